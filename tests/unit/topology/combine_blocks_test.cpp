#include "topology/combine_blocks.h"

#include <gmock/gmock.h>

namespace trireme {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(CombineBlocks, DerivedOnesDivideTheExperts) {
  EXPECT_EQ(combine_blocks(128, 0), 8);
  EXPECT_EQ(combine_blocks(60, 0), 6);
  EXPECT_EQ(combine_blocks(7, 0), 7);
  EXPECT_EQ(combine_blocks(4, 0), 4);
  EXPECT_EQ(combine_blocks(128, 16), 16);
  EXPECT_EQ(combine_blocks(128, 0, 32), 32);
}

TEST(CombineBlocks, ExpertParallelRanksHoldWholeBlocks) {
  for (const int64_t ranks : {1, 2, 4, 8, 16}) EXPECT_THAT(combine_block_problems(128, 0, ranks), IsEmpty()) << ranks;
  EXPECT_THAT(combine_block_problems(60, 0, 4),
              ElementsAre("ep 4 does not divide the 6 blocks that experts are combined in: set "
                          "policy.moe_combine_blocks to a multiple of it that divides the 60 experts, or another "
                          "size"));
  EXPECT_THAT(combine_block_problems(60, 12, 4), IsEmpty());
  EXPECT_THAT(combine_block_problems(8, 2, 4), ElementsAre(HasSubstr("ep 4 does not divide the 2 blocks")));
  EXPECT_THAT(combine_block_problems(8, 3, 1),
              ElementsAre("policy.moe_combine_blocks is 3, which does not divide the model's 8 experts"));
}

}  // namespace
}  // namespace trireme
