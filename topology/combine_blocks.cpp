#include "topology/combine_blocks.h"

#include <algorithm>

namespace trireme {

int64_t combine_blocks(int64_t experts, int64_t asked, int64_t ranks) {
  if (asked > 0) return asked;
  if (ranks > 8) return ranks;
  int64_t blocks = std::min<int64_t>(8, experts);
  while (experts % blocks != 0) --blocks;
  return blocks;
}

std::vector<std::string> combine_block_problems(int64_t experts, int64_t asked, int64_t ranks) {
  const std::string all = std::to_string(experts) + " experts";
  if (asked > 0 && experts % asked != 0)
    return {"policy.moe_combine_blocks is " + std::to_string(asked) + ", which does not divide the model's " + all};
  const int64_t blocks = combine_blocks(experts, asked, ranks);
  if (blocks % ranks == 0) return {};
  return {"ep " + std::to_string(ranks) + " does not divide the " + std::to_string(blocks) +
          " blocks that experts are combined in: set policy.moe_combine_blocks to a multiple of it that divides the " +
          all + ", or another size"};
}

}  // namespace trireme
