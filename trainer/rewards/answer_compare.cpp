#include "trainer/rewards/answer_compare.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include "trainer/rewards/answer_nodes.h"
#include "trainer/rewards/answer_units.h"
#include "trainer/rewards/answer_value.h"

namespace trireme {
namespace {

constexpr int kSamples = 4;                  // sample points of an expression with symbols
constexpr int64_t kBudget = 200'000;         // node evaluations of one comparison; spent: not the same
constexpr int kMinDecimals = 4;              // fewest decimals that may stand for a value they only approximate
constexpr long double kMaxRounding = 0.02L;  // relative error of a rounding behind \approx
constexpr size_t kMaxUnordered = 200;        // longest lists whose order is ignored

bool is_expression(const Node& n) { return n.kind <= NodeKind::kPercent; }
bool is_tuple(const Node& n) { return n.kind == NodeKind::kGroup && n.text == "()"; }

// As the parser's has_symbols, but infinity is one of them: it has no value to compare.
bool has_unknowns(const Node& n) {
  if (n.kind == NodeKind::kSymbol) return n.text != "pi" && n.text != "e" && n.text != "i";
  return std::any_of(n.children.begin(), n.children.end(), [](const NodePtr& child) { return has_unknowns(*child); });
}

// Decimals written in a plain decimal number (or minus one), else nothing.
std::optional<int64_t> decimals(const Node& n) {
  if (n.kind == NodeKind::kSum && n.children.size() == 1) return decimals(*n.children[0]);
  if (n.kind != NodeKind::kNumber || n.exponent != 0 || !n.repeat.empty()) return std::nullopt;
  const size_t dot = n.text.find('.');
  return dot == std::string::npos ? 0 : static_cast<int64_t>(n.text.size() - dot - 1);
}

bool is_terminating(const Node& n, const Value& v) {
  if (decimals(n)) return true;
  if (!v.exact) return !(std::abs(v.approximate) < 1e12L);  // irrational, or too large to be approximated by decimals
  int64_t d = v.exact->denominator;
  while (d % 2 == 0) d /= 2;
  while (d % 5 == 0) d /= 5;
  return d == 1;
}

class Comparer final {
 public:
  bool same(const Node& a, const Node& b) {
    if (++depth_ > 100 || budget_ <= 0) return false;
    const bool result = same_any_kind(a, b) || (a.rounded && is_rounded(a) && same_any_kind(*a.rounded, b)) ||
                        (b.rounded && is_rounded(b) && same_any_kind(a, *b.rounded));
    --depth_;
    return result;
  }

 private:
  using Children = std::vector<const Node*>;

  static Children items(const Node& n) {
    Children list;
    for (const NodePtr& child : n.children) list.push_back(child.get());
    return list;
  }

  bool same_any_kind(const Node& a, const Node& b) {
    if (is_expression(a) && is_expression(b) && !is_real_line(a) && !is_real_line(b)) return same_quantity(a, b);
    if (!a.name.empty() && !b.name.empty() && !names_agree(a.name, b.name) && a.kind != NodeKind::kEquation)
      return false;
    if (a.kind == NodeKind::kEquation || b.kind == NodeKind::kEquation) return same_equation(a, b);
    return same_structure(a, b) || same_structure(b, a);
  }

  // Whether what stands behind \approx is a rounding of what stands before it: "1/3 \approx 11" says 1/3 only.
  bool is_rounded(const Node& n) {
    const Node& exact = n.kind == NodeKind::kEquation ? *n.children[1] : n;
    const Node& literal = *n.rounded;
    const auto places = decimals(literal);
    if (!places || *places > 17 || !is_expression(exact) || has_unknowns(exact) || exact.percent != literal.percent)
      return false;
    const Value value = evaluate(exact, 0), written = evaluate(literal, 0);
    if (!value.valid || !written.valid || is_zero(written)) return false;
    const long double half = 0.5L * std::pow(10.0L, -static_cast<long double>(*places));
    const long double error = std::abs(value.approximate - written.approximate);
    return error <= half * (1 + 1e-12L) && error <= kMaxRounding * std::abs(value.approximate);
  }

  // -2x > -6 and the half-line x < 3: the half-line says x - 3 < 0, a positive multiple of the other.
  bool same_half_line(const Node& relation, const Node& line) {
    if (line.name.empty() || line.name.find(' ') != std::string::npos || line.children.size() != 2) return false;
    const bool below = is_infinity(*line.children[0], true), above = is_infinity(*line.children[1], false);
    if (below == above || relation.text == "n") return false;
    const Node& bound = *line.children[below ? 1 : 0];
    const bool open = line.text[below ? 1 : 0] == (below ? ')' : '(');
    if (open != (relation.text == "<")) return false;
    NodePtr variable = make(NodeKind::kSymbol, line.name), limit = with_sign(bound, true);
    if (!below) std::swap(variable, limit);
    return proportional(relation, *make(NodeKind::kRelation, std::move(variable), std::move(limit)), true);
  }

  // y and f(x) are the same kind of name; x and y are not.
  static bool names_agree(const std::string& a, const std::string& b) {
    const auto function_like = [](const std::string& n) { return n == "y" || n.find(' ') != std::string::npos; };
    return a == b || (function_like(a) && function_like(b));
  }

  bool same_equation(const Node& a, const Node& b) {
    if (a.kind == NodeKind::kEquation && b.kind == NodeKind::kEquation) {
      if (!a.name.empty() && !b.name.empty() && names_agree(a.name, b.name) && same(*a.children[1], *b.children[1]))
        return true;
      return proportional(a, b, false);
    }
    const Node& equation = a.kind == NodeKind::kEquation ? a : b;
    const Node& other = a.kind == NodeKind::kEquation ? b : a;
    if (equation.name.empty()) return false;
    return same(*equation.children[1], other);
  }

  // left - right of one is a constant (positive, for relations) multiple of the other's.
  bool proportional(const Node& a, const Node& b, bool positive) {
    if (!has_unknowns(a) && !has_unknowns(b)) return false;
    for (const Node* n : {&a, &b}) {
      if (!is_expression(*n->children[0]) || !is_expression(*n->children[1])) return false;
    }
    std::optional<Value> a0, b0;
    int compared = 0;
    for (int sample = 0; sample < kSamples; ++sample) {
      const Value da = subtract(evaluate(*a.children[0], sample), evaluate(*a.children[1], sample));
      const Value db = subtract(evaluate(*b.children[0], sample), evaluate(*b.children[1], sample));
      if (!da.valid && !db.valid) continue;
      if (!da.valid || !db.valid || is_zero(da) || is_zero(db)) return false;
      if (positive && (da.approximate.real() > 0) != (db.approximate.real() > 0)) return false;
      if (!a0)
        a0 = da, b0 = db;
      else if (!same_value(multiply(da, *b0), multiply(db, *a0)))
        return false;
      ++compared;
    }
    return compared >= 2;
  }

  bool same_quantity(const Node& a, const Node& b) {
    if (!a.unit.empty() && !b.unit.empty() && a.unit != b.unit) {
      const auto factors = unit_factors(a.unit, b.unit);
      if (!factors) return false;
      return same_value(multiply(evaluate(a, 0), integer_value(factors->first)),
                        multiply(evaluate(b, 0), integer_value(factors->second)));
    }
    if (same_expression(a, b, 1, 1)) return true;
    // 50% may be given as 50 or as 0.5.
    return a.percent != b.percent && (a.percent ? same_expression(a, b, 100, 1) : same_expression(a, b, 1, 100));
  }

  // a / divide_a == b / divide_b as functions of their symbols.
  bool same_expression(const Node& a, const Node& b, int64_t divide_a, int64_t divide_b) {
    const int samples = has_unknowns(a) || has_unknowns(b) ? kSamples : 1;
    int compared = 0;
    for (int sample = 0; sample < samples; ++sample) {
      const Value va = divide(evaluate(a, sample), integer_value(divide_a));
      const Value vb = divide(evaluate(b, sample), integer_value(divide_b));
      if (!va.valid && !vb.valid) continue;
      if (!va.valid || !vb.valid) return false;
      if (!same_value(va, vb))
        return samples == 1 && divide_a == divide_b && (rounds_to(b, vb, a, va) || rounds_to(a, va, b, vb));
      ++compared;
    }
    return compared > (samples > 1 ? 1 : 0);
  }

  // A decimal of enough digits stands for the value it rounds, when that has no finite decimal of its own.
  static bool rounds_to(const Node& node, const Value& value, const Node& literal, const Value& literal_value) {
    const auto places = decimals(literal);
    if (!places || *places < kMinDecimals || *places > 17 || is_terminating(node, value)) return false;
    const long double half = 0.5L * std::pow(10.0L, -static_cast<long double>(*places));
    return std::abs(value.approximate - literal_value.approximate) <= half * (1 + 1e-12L);
  }

  Value evaluate(const Node& n, int sample) {
    if (--budget_ <= 0) return {};
    switch (n.kind) {
      case NodeKind::kNumber:
        return decimal_value(n.text, n.repeat, n.exponent);
      case NodeKind::kSymbol:
        return symbol_value(n.text, sample);
      case NodeKind::kSum: {
        Value total = integer_value(0);
        for (size_t k = 0; k < n.children.size(); ++k) {
          const Value term = evaluate(*n.children[k], sample);
          total = n.flags[k] == 0 ? add(total, term) : subtract(total, term);
        }
        return total;
      }
      case NodeKind::kProduct: {
        Value total = integer_value(1);
        for (size_t k = 0; k < n.children.size(); ++k) {
          const Value factor = evaluate(*n.children[k], sample);
          total = n.flags[k] == 0 ? multiply(total, factor) : divide(total, factor);
        }
        return total;
      }
      case NodeKind::kPower: {
        const Node& base = *n.children[0];
        if (base.kind == NodeKind::kSymbol && base.text == "e") return natural_power(evaluate(*n.children[1], sample));
        return power(evaluate(base, sample), evaluate(*n.children[1], sample));
      }
      case NodeKind::kRoot:
        return root(evaluate(*n.children[0], sample), evaluate(*n.children[1], sample));
      case NodeKind::kFunction:
        return function(n, sample);
      case NodeKind::kFactorial: {
        const Value argument = evaluate(*n.children[0], sample);
        spend(argument);
        return factorial(argument);
      }
      case NodeKind::kBinomial: {
        const Value top = evaluate(*n.children[0], sample), bottom = evaluate(*n.children[1], sample);
        spend(bottom);
        return binomial(top, bottom);
      }
      case NodeKind::kDegrees:
        return divide(multiply(evaluate(*n.children[0], sample), symbol_value("pi", sample)), integer_value(180));
      case NodeKind::kPercent:
        return divide(evaluate(*n.children[0], sample), integer_value(100));
      default:
        return {};
    }
  }

  // e^x: an integer power keeps the residues, any other is a function.
  static Value natural_power(const Value& exponent) {
    if (exponent.exact && exponent.exact->denominator == 1) return power(symbol_value("e", 0), exponent);
    return apply_function("exp", exponent);
  }

  void spend(const Value& steps) {
    if (steps.exact && steps.exact->numerator > 0) budget_ -= std::min(steps.exact->numerator, kMaxProductTerms);
  }

  Value function(const Node& n, int sample) {
    const Value argument = evaluate(*n.children[0], sample);
    if (n.text == "abs") return absolute(argument);
    if (n.text == "floor") return round_down(argument);
    if (n.text == "ceil") return round_up(argument);
    if (n.children.size() == 2)
      return divide(apply_function("ln", argument), apply_function("ln", evaluate(*n.children[1], sample)));
    return apply_function(n.text, argument);
  }

  static bool is_real_line(const Node& n) { return n.kind == NodeKind::kSymbol && n.text == "mathbbR"; }
  static bool is_infinity(const Node& n, bool negative) {
    if (negative)
      return n.kind == NodeKind::kSum && n.children.size() == 1 && n.flags[0] == 1 &&
             is_infinity(*n.children[0], false);
    if (n.kind == NodeKind::kSum && n.children.size() == 1 && n.flags[0] == 0)
      return is_infinity(*n.children[0], false);
    return n.kind == NodeKind::kSymbol && n.text == "infty";
  }
  static bool is_empty_set(const Node& n) {
    return (n.kind == NodeKind::kSet && n.children.empty()) || (n.kind == NodeKind::kSymbol && n.text == "emptyset");
  }

  bool same_structure(const Node& a, const Node& b) {
    if (is_empty_set(a)) return is_empty_set(b);
    if (is_real_line(a)) {
      if (is_real_line(b)) return true;
      return is_tuple(b) && b.children.size() == 2 && is_infinity(*b.children[0], true) &&
             is_infinity(*b.children[1], false);
    }
    switch (a.kind) {
      case NodeKind::kList:
        // A point named twice is still one solution; a number named twice may be a double root.
        if (b.kind == NodeKind::kList) return same_unordered(items(a), items(b), !all_tuples(a) || !all_tuples(b));
        if (b.kind == NodeKind::kSet) return same_unordered(items(a), items(b), false);
        if (b.kind == NodeKind::kUnion) return same_unordered(items(a), items(b), true);
        if (is_tuple(b) || (b.kind == NodeKind::kGroup && b.text == "[]" && b.children.size() != 2))
          return same_ordered(by_name(items(a)), items(b));
        return false;
      case NodeKind::kSet:
        if (b.kind == NodeKind::kSet) return same_unordered(items(a), items(b), false);
        if (a.text == "{}" && is_tuple(b)) return same_ordered(items(a), items(b));
        return a.children.size() == 1 && b.kind != NodeKind::kList && same(*a.children[0], b);
      case NodeKind::kGroup:
        return b.kind == NodeKind::kGroup && a.text == b.text && same_ordered(items(a), items(b));
      case NodeKind::kUnion:
      case NodeKind::kIntersection:
        return b.kind == a.kind && same_unordered(items(a), items(b), true);
      case NodeKind::kDifference:
        return b.kind == a.kind && same_ordered(items(a), items(b));
      case NodeKind::kRatio:
        return same_ratio(a, b);
      case NodeKind::kMatrix:
        return same_matrix(a, b);
      case NodeKind::kRelation:
        if (b.kind == NodeKind::kGroup) return same_half_line(a, b);
        if (b.kind != NodeKind::kRelation || a.text != b.text) return false;
        return same_ordered(items(a), items(b)) || proportional(a, b, a.text != "n");
      case NodeKind::kText: {
        if (b.kind == NodeKind::kText) return a.text == b.text;
        const auto value = number_word(a.text);
        return value && is_expression(b) && !b.percent && same_value(evaluate(b, 0), integer_value(*value));
      }
      default:
        return false;
    }
  }

  static bool all_tuples(const Node& list) {
    return std::all_of(list.children.begin(), list.children.end(), [](const NodePtr& n) { return is_tuple(*n); });
  }

  // "y = 2, x = 1" as a point: the values in the order of the names, when each has one of its own.
  static Children by_name(Children list) {
    std::set<std::string> names;
    for (const Node* n : list) {
      if (n->kind != NodeKind::kEquation || n->name.empty()) return list;
      names.insert(n->name);
    }
    if (names.size() == list.size()) {
      std::stable_sort(list.begin(), list.end(), [](const Node* a, const Node* b) { return a->name < b->name; });
    }
    return list;
  }

  bool same_ordered(const Children& a, const Children& b) {
    if (a.size() != b.size()) return false;
    for (size_t k = 0; k < a.size(); ++k) {
      if (!same(*a[k], *b[k])) return false;
    }
    return true;
  }

  // With `counted`, equal items must occur equally often; else only the sets must agree.
  bool same_unordered(const Children& a, const Children& b, bool counted) {
    if ((counted && a.size() != b.size()) || std::max(a.size(), b.size()) > kMaxUnordered) return false;
    std::vector<bool> used(b.size(), false);
    for (const Node* one : a) {
      bool found = false;
      for (size_t k = 0; k < b.size() && !found; ++k) {
        if (counted && used[k]) continue;
        found = same(*one, *b[k]);
        if (found) used[k] = true;
      }
      if (!found) return false;
    }
    if (counted) return true;
    for (size_t k = 0; k < b.size(); ++k) {
      if (used[k]) continue;
      if (std::none_of(a.begin(), a.end(), [&](const Node* one) { return same(*one, *b[k]); })) return false;
    }
    return true;
  }

  bool same_ratio(const Node& a, const Node& b) {
    if (b.kind != NodeKind::kRatio) {  // 3 : 4 and 3/4
      if (a.children.size() != 2 || !is_expression(b)) return false;
      return same_value(divide(evaluate(*a.children[0], 0), evaluate(*a.children[1], 0)), evaluate(b, 0));
    }
    if (a.children.size() != b.children.size()) return false;
    const int samples = has_unknowns(a) || has_unknowns(b) ? kSamples : 1;
    for (int sample = 0; sample < samples; ++sample) {
      const Value a0 = evaluate(*a.children[0], sample), b0 = evaluate(*b.children[0], sample);
      for (size_t k = 1; k < a.children.size(); ++k) {
        const Value left = multiply(a0, evaluate(*b.children[k], sample)),
                    right = multiply(b0, evaluate(*a.children[k], sample));
        if (!same_value(left, right) || is_zero(a0) != is_zero(b0)) return false;
      }
    }
    return true;
  }

  bool same_matrix(const Node& a, const Node& b) {
    if (b.kind == NodeKind::kMatrix) {
      if (a.children.size() != b.children.size()) return false;
      for (size_t k = 0; k < a.children.size(); ++k) {
        if (!same_ordered(items(*a.children[k]), items(*b.children[k]))) return false;
      }
      return true;
    }
    // A single row or column is a tuple.
    if (!is_tuple(b) && b.kind != NodeKind::kList) return false;
    Children flat;
    for (const NodePtr& row : a.children) {
      if (a.children.size() > 1 && row->children.size() > 1) return false;
      for (const NodePtr& cell : row->children) flat.push_back(cell.get());
    }
    return same_ordered(flat, items(b));
  }

  int64_t budget_ = kBudget;
  int depth_ = 0;
};

}  // namespace

bool same_final_answer(const Node& gold, const Node& final_answer) { return Comparer().same(gold, final_answer); }

}  // namespace trireme
