#include "trainer/rewards/answer_relation.h"

#include <algorithm>
#include <utility>

#include "trainer/rewards/answer_lexer.h"
#include "trainer/rewards/answer_nodes.h"

namespace trireme {
namespace {

bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }

// S, S_1, AB: capital letters, as points, segments and areas have.
std::string capital_name(const Node& node) {
  if (node.kind == NodeKind::kSymbol) return !node.text.empty() && is_upper(node.text[0]) ? node.text : "";
  if (node.kind != NodeKind::kProduct) return "";
  std::string name;
  for (size_t k = 0; k < node.children.size(); ++k) {
    const Node& child = *node.children[k];
    const std::string part = child.kind == NodeKind::kSymbol ? capital_name(child) : "";
    if (part.empty() || node.flags[k] != kPlain) return "";
    name += part;
  }
  return name;
}

// What an equation's left side calls its right side: a plain name, |AB|, A : B, NO / BO. Small letters are unknowns
// there: |x| = 1 and x/y = 2 say more than 1 and 2 do.
std::string quantity_name(const Node& node) {
  std::string name = plain_name(node);
  if (!name.empty()) return name;
  if (node.kind == NodeKind::kFunction && node.text == "abs" && node.children[0]->kind == NodeKind::kProduct) {
    name = capital_name(*node.children[0]);
    return name.empty() ? "" : "|" + name + "|";
  }
  if (node.kind != NodeKind::kRatio && node.kind != NodeKind::kProduct) return "";
  for (size_t k = 0; k < node.children.size(); ++k) {
    const std::string part = capital_name(*node.children[k]);
    if (part.empty()) return "";
    const bool divides = node.kind == NodeKind::kProduct && node.flags[k] == kInverse;
    name += (node.kind == NodeKind::kRatio ? ":" : divides ? "/" : "*") + part;
  }
  return name;
}

bool is_variable(const Node& n) { return n.kind == NodeKind::kSymbol && has_symbols(n); }

// f(x): a value that has its bounds as a variable has.
bool is_function_value(const Node& n) {
  return n.kind == NodeKind::kProduct && n.children.size() == 2 && n.flags[1] == kPlain &&
         is_variable(*n.children[0]) && is_variable(*n.children[1]) &&
         (n.children[0]->text == "f" || n.children[0]->text == "g");
}

bool is_absolute(const Node& n) {
  return n.kind == NodeKind::kFunction && n.text == "abs" && is_variable(*n.children[0]);
}

// A number that needs no computing to be seen positive.
bool is_positive(const Node& n) {
  switch (n.kind) {
    case NodeKind::kNumber:
      return n.text.find_first_of("123456789") != std::string::npos;
    case NodeKind::kSymbol:
      return n.text == "pi" || n.text == "e";
    case NodeKind::kProduct:
    case NodeKind::kRoot:
      return std::all_of(n.children.begin(), n.children.end(),
                         [](const NodePtr& child) { return is_positive(*child); });
    default:
      return false;
  }
}

NodePtr infinity() { return make(NodeKind::kSymbol, "infty"); }

NodePtr interval(const std::string& name, char low_sign, NodePtr low, char high_sign, NodePtr high) {
  auto node = make(NodeKind::kGroup, std::move(low), std::move(high));
  node->text = std::string(low_sign == '<' ? "(" : "[") + (high_sign == '<' ? ")" : "]");
  node->name = name;
  return node;
}

NodePtr equation(std::vector<NodePtr> operands) {
  NodePtr left = std::move(operands.front()), right = std::move(operands.back());
  std::string name = quantity_name(*left);
  if (name.empty() && !plain_name(*right).empty() && !has_symbols(*left)) {
    std::swap(left, right);
    name = plain_name(*left);
  }
  if (name.empty() && !has_symbols(*left) && !has_symbols(*right)) return right;  // 2 + 3 = 5
  auto node = make(NodeKind::kEquation, std::move(left), std::move(right));
  node->name = std::move(name);
  return node;
}

// x = 1/3 \approx 0.33: what stands before the first \approx, and the last operand as its rounding.
NodePtr approximation(std::vector<NodePtr> operands, const std::vector<char>& signs) {
  if (std::any_of(signs.begin(), signs.end(), [](char s) { return s != '=' && s != sign::kApprox; })) return nullptr;
  const auto first = std::find(signs.begin(), signs.end(), sign::kApprox) - signs.begin();
  if (first == 0 && has_symbols(*operands[0])) return equation(std::move(operands));  // x \approx 3.14
  NodePtr rounded = std::move(operands.back());
  operands.resize(static_cast<size_t>(first) + 1);
  NodePtr exact = operands.size() == 1 ? std::move(operands[0]) : equation(std::move(operands));
  exact->rounded = std::move(rounded);
  return exact;
}

// Bounds of |x| as bounds of x: an interval or the union of two. Null when they are none. upward: '<' or '<='.
NodePtr absolute_bounds(std::vector<NodePtr>& operands, const std::vector<char>& upward) {
  const size_t at = is_absolute(*operands[0]) ? 0 : 1;
  if (operands.size() > 3 || (at == 0 && operands.size() != 2) || !is_absolute(*operands[at])) return nullptr;
  for (size_t k = 0; k < operands.size(); ++k) {
    if (k != at && !is_positive(*operands[k])) return nullptr;
  }
  const std::string name = operands[at]->children[0]->text;
  if (at == 0) {
    NodePtr low = negated(copy(*operands[1]));
    return interval(name, upward[0], std::move(low), upward[0], std::move(operands[1]));
  }
  const bool bounded = operands.size() == 3;
  const char outer = bounded ? upward[1] : '<';
  NodePtr high = bounded ? std::move(operands[2]) : infinity();
  NodePtr below = interval(name, outer, negated(copy(*high)), upward[0], negated(copy(*operands[0])));
  return make(NodeKind::kUnion, std::move(below),
              interval(name, upward[0], std::move(operands[0]), outer, std::move(high)));
}

}  // namespace

NodePtr make_relation(std::vector<NodePtr> operands, const std::vector<char>& signs) {
  if (std::find(signs.begin(), signs.end(), sign::kApprox) != signs.end())
    return approximation(std::move(operands), signs);
  if (std::all_of(signs.begin(), signs.end(), [](char s) { return s == '='; })) return equation(std::move(operands));
  if (signs.size() == 1 && signs[0] == sign::kIn) {
    operands[1]->name = plain_name(*operands[0]);
    return std::move(operands[1]);
  }
  std::vector<char> upward = signs;  // with the smaller side first
  const bool down = signs[0] == '>' || signs[0] == sign::kGreaterEqual;
  if (down) {
    std::reverse(operands.begin(), operands.end());
    std::reverse(upward.begin(), upward.end());
    for (char& s : upward) s = s == '>' ? '<' : s == sign::kGreaterEqual ? sign::kLessEqual : s;
  }
  for (const char s : upward) {
    if (s != '<' && s != sign::kLessEqual && !(s == sign::kNotEqual && upward.size() == 1)) return nullptr;
  }
  if (upward[0] != sign::kNotEqual) {
    if (operands.size() == 2 && is_variable(*operands[1]) && !has_symbols(*operands[0])) {
      return interval(operands[1]->text, upward[0], std::move(operands[0]), '<', infinity());
    }
    if (operands.size() == 2 && is_variable(*operands[0]) && !has_symbols(*operands[1])) {
      return interval(operands[0]->text, '<', negated(infinity()), upward[0], std::move(operands[1]));
    }
    if (operands.size() == 3 && (is_variable(*operands[1]) || is_function_value(*operands[1]))) {
      return interval(plain_name(*operands[1]), upward[0], std::move(operands[0]), upward[1], std::move(operands[2]));
    }
  }
  if (upward[0] != sign::kNotEqual) {
    if (NodePtr bounds = absolute_bounds(operands, upward)) return bounds;
  }
  if (operands.size() != 2) return nullptr;
  auto node = make(NodeKind::kRelation, std::move(operands[0]), std::move(operands[1]));
  node->text = std::string(1, upward[0]);
  return node;
}

std::vector<NodePtr> points(std::vector<NodePtr> items, const std::string& separators) {
  if (separators.find(';') == std::string::npos || separators.find(',') == std::string::npos) return items;
  const size_t size = separators.find(';') + 1;
  if (size < 2 || items.size() % size != 0 || separators.size() + 1 != items.size()) return items;
  for (size_t k = 0; k < items.size(); ++k) {
    if (items[k]->kind != NodeKind::kEquation || items[k]->name.empty() || items[k]->name != items[k % size]->name)
      return items;
    if (k + 1 < items.size() && separators[k] != ((k + 1) % size == 0 ? ';' : ',')) return items;
  }
  std::vector<NodePtr> found;
  for (size_t k = 0; k < items.size(); ++k) {
    if (k % size == 0) found.push_back(make(NodeKind::kGroup, "()"));
    found.back()->children.push_back(std::move(items[k]));
  }
  return found;
}

}  // namespace trireme
