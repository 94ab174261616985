// The tree of a final answer: an expression, or lists, sets, intervals, equations and matrices of them.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trainer/rewards/answer_lexer.h"

namespace trireme {

enum class NodeKind {
  // expressions
  kNumber,    // text (digits), repeat, exponent
  kSymbol,    // text
  kSum,       // children, flags: 0 plus, 1 minus, 2 plus-minus, 3 minus-plus
  kProduct,   // children, flags: 1 divides
  kPower,     // base, exponent
  kRoot,      // radicand, index
  kFunction,  // text; argument [, base of the logarithm]
  kFactorial,
  kBinomial,
  kDegrees,  // as an angle in radians
  kPercent,  // as a hundredth
  // structures
  kList,   // a, b, c without brackets
  kGroup,  // text: its two brackets, "(]" and so on; one child in round brackets is no group but the child
  kSet,    // text: "{}" for braces of LaTeX, which may be a list as well
  kUnion,
  kIntersection,
  kDifference,
  kRatio,     // a : b
  kMatrix,    // children: rows, each a kList
  kEquation,  // name (of a left side that is a plain name, else empty); left, right
  kRelation,  // text: '<', 'l', 'n'; left, right, with > turned round
  kText,      // text: lower-case words
};

struct Node {
  NodeKind kind = NodeKind::kText;
  std::string text;
  std::string repeat;
  int64_t exponent = 0;
  std::vector<std::unique_ptr<Node>> children;
  std::vector<uint8_t> flags;
  // What stood around it, for whole items:
  std::string name;  // x in "x = 3", "x > 3", "x \in S"
  std::string unit;  // canonical
  bool percent = false;
  std::unique_ptr<Node> rounded;  // 0.33 in "1/3 \approx 0.33"
};
using NodePtr = std::unique_ptr<Node>;

// Null when the text is no answer this grammar knows. Depth and size are bounded.
// letter_units: a single letter directly behind a number is a unit (5m), not a factor.
NodePtr parse_final_answer(std::vector<Token> tokens, bool letter_units);

}  // namespace trireme
