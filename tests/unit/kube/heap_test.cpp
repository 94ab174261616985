#include "operator/kube/heap.h"

#include <gtest/gtest.h>

namespace trireme::kube {
namespace {

constexpr size_t kMiB = 1 << 20;

SteadyClock::time_point at(int s) { return SteadyClock::time_point{} + std::chrono::seconds(1000 + s); }

HeapSize mib(size_t resident, size_t in_use) { return {resident * kMiB, in_use * kMiB}; }

TEST(HeapTrims, AreForWhatWasFreedSinceTheLastOne) {
  HeapTrims trims(8 * kMiB);
  EXPECT_FALSE(trims.due(mib(17, 10), at(0)));
  EXPECT_TRUE(trims.due(mib(40, 25), at(1))) << "the first waits for nothing";
  trims.trimmed(mib(34, 25), at(1));
  for (int s = 2; s < 10000; ++s)
    EXPECT_FALSE(trims.due(mib(34, 25), at(s))) << "nothing was freed: a trim is for nothing";
  EXPECT_FALSE(trims.due(mib(90, 81), at(10000))) << "memory that is in use is not free";
  EXPECT_FALSE(trims.due(mib(90, 74), at(10001))) << "7 MiB more than the last one left";
  EXPECT_TRUE(trims.due(mib(90, 73), at(10002)));
  EXPECT_TRUE(trims.due(mib(43, 26), at(10003))) << "used and freed between two looks: resident again";
}

TEST(HeapTrims, AreSeldomUnlessABurstPilesUp) {
  HeapTrims trims(8 * kMiB);
  trims.trimmed(mib(20, 10), at(0));
  EXPECT_FALSE(trims.due(mib(40, 20), at(59)));
  EXPECT_TRUE(trims.due(mib(40, 20), at(60)));
  EXPECT_FALSE(trims.due(mib(62, 20), at(4)));
  EXPECT_TRUE(trims.due(mib(62, 20), at(5))) << "32 MiB";
  EXPECT_FALSE(trims.due(mib(61, 20), at(59))) << "31 MiB";
  int count = 0;
  for (int s = 61; s <= 661; ++s) {
    if (!trims.due(mib(45, 20), at(s))) continue;
    ++count;
    trims.trimmed(mib(22, 20), at(s));
  }
  EXPECT_EQ(count, 11) << "once a minute";
}

TEST(HeapTrims, WhatASystemTookBackByItselfIsNoMoreAllowance) {
  HeapTrims trims(8 * kMiB);
  trims.trimmed(mib(500, 100), at(0));  // pages pinned by a few objects
  EXPECT_FALSE(trims.due(mib(140, 100), at(30)));
  EXPECT_TRUE(trims.due(mib(160, 100), at(60))) << "20 MiB more than there were";
}

TEST(HeapTrims, ANumberOfTheSystemThatMakesNoSenseFreesNothing) {
  HeapTrims trims(8 * kMiB);
  EXPECT_FALSE(trims.due(mib(0, 0), at(0)));
  EXPECT_FALSE(trims.due(mib(5, 50), at(0)));
}

TEST(HeapTrims, TheSizesAreThisProcesss) {
  const HeapSize before = heap_size();
  if (before.resident == 0) GTEST_SKIP() << "a sanitizer's allocator";
  const std::string held(16 * kMiB, 'x');
  const HeapSize after = heap_size();
  EXPECT_GE(after.in_use, before.in_use + held.size());
  EXPECT_GE(after.resident, before.resident + held.size() / 2);
}

}  // namespace
}  // namespace trireme::kube
