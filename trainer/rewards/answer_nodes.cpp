#include "trainer/rewards/answer_nodes.h"

#include <algorithm>
#include <utility>

namespace trireme {

NodePtr make(NodeKind kind, std::string text) {
  auto node = std::make_unique<Node>();
  node->kind = kind;
  node->text = std::move(text);
  return node;
}

NodePtr make(NodeKind kind, NodePtr a, NodePtr b) {
  auto node = make(kind);
  node->children.push_back(std::move(a));
  if (b) node->children.push_back(std::move(b));
  return node;
}

NodePtr negated(NodePtr child) {
  auto node = make(NodeKind::kSum, std::move(child));
  node->flags = {kInverse};
  return node;
}

NodePtr number(int64_t value) { return make(NodeKind::kNumber, std::to_string(value)); }

bool has_either_sign(const Node& node) {
  if (node.kind == NodeKind::kSum) {
    for (const uint8_t flag : node.flags) {
      if (flag >= kEitherSign) return true;
    }
  }
  return std::any_of(node.children.begin(), node.children.end(),
                     [](const NodePtr& child) { return has_either_sign(*child); });
}

NodePtr with_sign(const Node& node, bool upper) {
  auto copy = std::make_unique<Node>();
  copy->kind = node.kind;
  copy->text = node.text;
  copy->repeat = node.repeat;
  copy->exponent = node.exponent;
  copy->name = node.name;
  copy->unit = node.unit;
  copy->percent = node.percent;
  copy->flags = node.flags;
  if (node.kind == NodeKind::kSum) {
    for (uint8_t& flag : copy->flags) {
      if (flag == kEitherSign)
        flag = upper ? kPlain : kInverse;
      else if (flag == kOtherSign)
        flag = upper ? kInverse : kPlain;
    }
  }
  for (const NodePtr& child : node.children) copy->children.push_back(with_sign(*child, upper));
  return copy;
}

bool has_symbols(const Node& node) {
  if (node.kind == NodeKind::kSymbol)
    return node.text != "pi" && node.text != "e" && node.text != "i" && node.text != "infty";
  return std::any_of(node.children.begin(), node.children.end(),
                     [](const NodePtr& child) { return has_symbols(*child); });
}

std::string plain_name(const Node& node) {
  switch (node.kind) {
    case NodeKind::kSymbol:
      return node.text == "pi" || node.text == "e" || node.text == "infty" ? "" : node.text;
    case NodeKind::kProduct:
    case NodeKind::kGroup: {
      std::string name;
      for (size_t i = 0; i < node.children.size(); ++i) {
        const std::string part = plain_name(*node.children[i]);
        if (part.empty() || (node.kind == NodeKind::kProduct && node.flags[i] != kPlain)) return "";
        name += part + " ";
      }
      return name;
    }
    default:
      return "";
  }
}

}  // namespace trireme
