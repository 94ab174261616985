#include "topology/exactness.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

TEST(Exactness, OfEqualArithmeticIsGiven) {
  EXPECT_TRUE(exactness({}, {}).equal);
  EXPECT_EQ(exactness({}, {}).difference, "");
  const Arithmetic experts{.dtype = "float32", .tp = 4, .etp = 2, .combine_blocks = 8};
  EXPECT_TRUE(exactness(experts, experts).equal);
}

TEST(Exactness, NamesEverythingThatDiffersInOneClause) {
  const Arithmetic a{.dtype = "bfloat16", .tp = 2};
  const Exactness tp = exactness(a, {.dtype = "bfloat16", .tp = 4});
  EXPECT_FALSE(tp.equal);
  EXPECT_EQ(tp.difference, "generation has tp 2, training tp 4");
  EXPECT_EQ(exactness(a, {.dtype = "float32", .tp = 2}).difference,
            "generation has dtype bfloat16, training dtype float32");
  EXPECT_EQ(exactness(a, {.dtype = "float32", .tp = 1, .etp = 2, .combine_blocks = 8}).difference,
            "generation has dtype bfloat16, tp 2, etp 1, combine blocks 0, training dtype float32, tp 1, etp 2, "
            "combine blocks 8");
}

// Whatever two of these differ in decides, and nothing else does.
TEST(Exactness, IsAnEquivalence) {
  std::vector<Arithmetic> all;
  for (const char* dtype : {"bfloat16", "float32"})
    for (const int64_t tp : {1, 2})
      for (const int64_t etp : {1, 2})
        for (const int64_t blocks : {0, 8})
          all.push_back({.dtype = dtype, .tp = tp, .etp = etp, .combine_blocks = blocks});
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < all.size(); ++j) {
      const Exactness result = exactness(all[i], all[j]);
      EXPECT_EQ(result.equal, i == j);
      EXPECT_EQ(result.difference.empty(), result.equal);
      EXPECT_EQ(exactness(all[j], all[i]).equal, result.equal);
    }
  }
}

}  // namespace
}  // namespace trireme
