// Whether two parsed answers mean the same.
#pragma once

#include "trainer/rewards/answer_parser.h"

namespace trireme {

bool same_answer(const Node& gold, const Node& answer);

}  // namespace trireme
