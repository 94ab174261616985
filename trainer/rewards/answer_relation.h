// Equations, inequalities and named points of an answer's tree, for its parser.
#pragma once

#include <string>
#include <vector>

#include "trainer/rewards/answer_parser.h"

namespace trireme {

// operands[0] signs[0] operands[1] ...: an equation, what it says of constants, an interval ("1 < x \le 2"), the union
// of two ("1 < |x| < 2") or a relation. In a chain with \approx the part before it counts, with what follows as
// Node::rounded. Null for a chain without one meaning.
NodePtr make_relation(std::vector<NodePtr> operands, const std::vector<char>& signs);

// "p=5, q=2; p=7, q=2" as two points, when every part names the same things in the same order; else the items as they
// are. separators: the sign behind each item but the last.
std::vector<NodePtr> points(std::vector<NodePtr> items, const std::string& separators);

}  // namespace trireme
