// Making and asking the nodes of an answer's tree, for its parser.
#pragma once

#include <string>

#include "trainer/rewards/answer_parser.h"

namespace trireme {

// Node::flags of a sum (plain, minus, plus-minus, minus-plus) and of a product (plain, divides).
enum Flag : uint8_t { kPlain = 0, kInverse = 1, kEitherSign = 2, kOtherSign = 3 };

NodePtr make(NodeKind kind, std::string text = "");
NodePtr make(NodeKind kind, NodePtr a, NodePtr b = nullptr);
NodePtr negated(NodePtr child);
NodePtr number(int64_t value);

bool has_either_sign(const Node& node);
// A copy with every plus-minus settled: the upper signs or the lower ones.
NodePtr with_sign(const Node& node, bool upper);
inline NodePtr copy(const Node& node) { return with_sign(node, true); }
// Whether a letter stands for an unknown (pi, e, i and infinity do not).
bool has_symbols(const Node& node);
// x, x_1, f(x), AB, (x, y): a left side that only says what the right side is called. Empty when it is something else.
std::string plain_name(const Node& node);

}  // namespace trireme
