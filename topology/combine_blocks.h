// In how many blocks the experts of a layer are combined, and which expert parallel sizes that allows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

// As many as asked for, 0: derived: 8, or the largest divisor of the experts below that; `ranks` where more share them.
int64_t combine_blocks(int64_t experts, int64_t asked, int64_t ranks = 1);

// Why `asked` blocks (policy.moe_combine_blocks; 0: derived) of `experts` experts do not go over `ranks` expert
// parallel ranks: sentences, the expert parallel size first where it is about that; none where they do.
std::vector<std::string> combine_block_problems(int64_t experts, int64_t asked, int64_t ranks);

}  // namespace trireme
