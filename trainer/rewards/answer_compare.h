// Whether two parsed final answers mean the same.
#pragma once

#include "trainer/rewards/answer_parser.h"

namespace trireme {

bool same_final_answer(const Node& gold, const Node& final_answer);

}  // namespace trireme
