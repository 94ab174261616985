#include "trainer/ops/decode_choice.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

// What an H200 has; an H100 PCIe has 114 SMs, a GH200 as many as an H200.
constexpr DecodeRoom kH200{132, 66, 30, 15}, kPcie{114, 57, 26, 13};

DecodeWork alike(int64_t runs, int64_t keys, int64_t kv_heads = 8) { return {runs, kv_heads, keys, runs * keys}; }

TEST(DecodeChoice, ClustersAreTakenWhileAllOfThemAreOnTheChip) {
  for (const DecodeRoom& room : {kH200, kPcie, kH200.of(88)}) {
    for (int64_t pairs = 1; pairs < 400; ++pairs) {
      const DecodeKernel expected = pairs <= room.clusters8   ? DecodeKernel::kCluster8
                                    : pairs <= room.clusters4 ? DecodeKernel::kCluster4
                                    : pairs <= room.clusters2 ? DecodeKernel::kCluster2
                                    : pairs <= room.sms       ? DecodeKernel::kSharedDeep
                                                              : DecodeKernel::kShared;
      EXPECT_EQ(choose_decode_kernel({pairs, 1, 0, 0}, room), expected) << pairs;
      // Of runs that are alike the lengths change nothing.
      for (const int64_t keys : {1, 100, 4000, 131072})
        EXPECT_EQ(choose_decode_kernel(alike(pairs, keys, 1), room), expected) << pairs << " of " << keys;
    }
  }
}

TEST(DecodeChoice, AChipWithoutClustersDoesWithout) {
  const DecodeRoom room{132, 0, 0, 0};
  EXPECT_EQ(choose_decode_kernel(alike(1, 131072), room), DecodeKernel::kSharedDeep);
  EXPECT_EQ(choose_decode_kernel({16, 8, 131072, 131072 + 15 * 1000}, room), DecodeKernel::kSharedDeep);
}

// Fifteen short runs and one of 128k keys: its chain of tiles decides, and a cluster goes from tile to tile in a third
// of the time of a block alone.
TEST(DecodeChoice, OneLongRunAmongShortOnesGetsACluster) {
  EXPECT_EQ(choose_decode_kernel({16, 8, 131072, 131072 + 15 * 1000}, kH200), DecodeKernel::kCluster4);
  EXPECT_EQ(choose_decode_kernel({64, 8, 131072, 131072 + 63 * 1000}, kH200), DecodeKernel::kCluster4);
  EXPECT_EQ(choose_decode_kernel({5, 8, 131072, 131072 + 4 * 500}, kH200), DecodeKernel::kCluster4);
  // Where others are as long there is nothing to gain.
  EXPECT_EQ(choose_decode_kernel({16, 8, 131072, 16 * 131072}, kH200), DecodeKernel::kSharedDeep);
  EXPECT_EQ(choose_decode_kernel({16, 8, 131072, 12 * 131072}, kH200), DecodeKernel::kSharedDeep);
  // Nor with the lengths of a usual rollout.
  EXPECT_EQ(choose_decode_kernel({32, 8, 3000, 32 * 1200}, kH200), DecodeKernel::kShared);
  EXPECT_EQ(choose_decode_kernel({256, 8, 3800, 256 * 800}, kH200), DecodeKernel::kShared);
}

TEST(DecodeChoice, APartOfTheProcessorsHasItsShareOfTheRoom) {
  const DecodeRoom part = kH200.of(88);
  EXPECT_EQ(part.sms, 88);
  EXPECT_EQ(part.clusters2, 44);
  EXPECT_EQ(part.clusters4, 20);
  EXPECT_EQ(part.clusters8, 10);
}

}  // namespace
}  // namespace trireme
