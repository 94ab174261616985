// Rows of the cache from figures of memory: what holds for any figures, and what some come to.
#include "trainer/rollout/cache_size.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

namespace trireme {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;
constexpr int64_t kLlama8bRow = int64_t{128} << 10;  // 2 sides, 32 layers, 8 heads of 128, bfloat16

struct Figures {
  int64_t bytes = 0;  // free or available
  int64_t more = 0;   // a larger figure of the same
  double fraction = 0, larger_fraction = 0;
  int64_t step_bytes = 0;
  CacheLimits limits;
};

void for_random_figures(const std::function<void(const Figures&)>& check) {
  std::mt19937_64 random(3);
  const auto draw = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  for (int i = 0; i < 5000; ++i) {
    Figures f;
    f.bytes = draw(0, int64_t{1} << draw(0, 38));
    f.more = f.bytes + draw(0, int64_t{1} << draw(0, 38));
    f.fraction = static_cast<double>(draw(1, 1000)) / 1000.0;
    f.larger_fraction = std::min(1.0, f.fraction + static_cast<double>(draw(0, 1000)) / 1000.0);
    f.step_bytes = draw(0, 4 * kGiB);
    f.limits = {draw(1, 1 << 20), draw(1, int64_t{1} << draw(0, 24))};
    SCOPED_TRACE(std::to_string(f.bytes) + " bytes, " + std::to_string(f.fraction) + ", rows of " +
                 std::to_string(f.limits.row_bytes) + ", at most " + std::to_string(f.limits.most_rows));
    check(f);
    if (::testing::Test::HasFailure()) return;
  }
}

// `rows` are as many as go into `room`, within the limits.
void expect_fills(int64_t rows, int64_t room, const CacheLimits& limits) {
  EXPECT_GE(rows, 1);
  EXPECT_LE(rows, limits.most_rows);
  if (rows > 1) {
    EXPECT_LE(rows * limits.row_bytes, room);
  }
  if (rows < limits.most_rows) {
    EXPECT_GT((rows + 1) * limits.row_bytes, room);
  }
}

int64_t share(int64_t bytes, double fraction) { return static_cast<int64_t>(static_cast<double>(bytes) * fraction); }

TEST(CacheSize, TheHostsIsTheShareOfWhatIsAvailable) {
  for_random_figures([](const Figures& f) {
    expect_fills(host_cache_rows(f.bytes, f.fraction, f.limits), share(f.bytes, f.fraction), f.limits);
  });
  EXPECT_EQ(host_cache_rows(10 * kGiB, 0.5, {kLlama8bRow, 1 << 20}), 5 * kGiB / kLlama8bRow);
}

TEST(CacheSize, ADevicesIsTheShareOfWhatIsLeftAndLeavesTheDriversPart) {
  for_random_figures([](const Figures& f) {
    const int64_t room = std::min(share(f.bytes, f.fraction), f.bytes - kDriverBytes);
    expect_fills(device_cache_rows(f.bytes, f.fraction, f.limits), room, f.limits);
  });
  EXPECT_EQ(device_cache_rows(100 * kGiB, 0.6, {kLlama8bRow, 1 << 20}), 60 * kGiB / kLlama8bRow);
  EXPECT_EQ(device_cache_rows(100 * kGiB, 1.0, {kLlama8bRow, 1 << 20}), 99 * kGiB / kLlama8bRow);
}

TEST(CacheSize, MoreMemoryOrALargerShareIsNeverFewerRows) {
  for_random_figures([](const Figures& f) {
    const CacheLimits wider{2 * f.limits.row_bytes, f.limits.most_rows};
    for (const auto& rows : {host_cache_rows, device_cache_rows}) {
      EXPECT_LE(rows(f.bytes, f.fraction, f.limits), rows(f.more, f.fraction, f.limits));
      EXPECT_LE(rows(f.bytes, f.fraction, f.limits), rows(f.bytes, f.larger_fraction, f.limits));
      EXPECT_LE(rows(f.bytes, f.fraction, wider), rows(f.bytes, f.fraction, f.limits));
    }
    EXPECT_LE(returning_cache_rows(f.bytes, f.step_bytes, f.limits), returning_cache_rows(f.more, 0, f.limits));
    EXPECT_LE(mapped_cache_rows(f.bytes, 1 << 20, f.limits), mapped_cache_rows(f.more, 1 << 21, f.limits));
  });
}

// What is mapped holds whatever the cache can come to, so that it can take it again under the same addresses.
TEST(CacheSize, ADevicesCacheNeverOutgrowsItsAddresses) {
  for_random_figures([](const Figures& f) {
    const int64_t reachable = std::max<int64_t>(1, f.more / 3);
    const int64_t mapped = mapped_cache_rows(f.more, reachable, f.limits);
    EXPECT_LE(mapped, f.limits.most_rows);
    EXPECT_LE(mapped, reachable);
    EXPECT_LE(mapped, std::max<int64_t>(1, f.more / f.limits.row_bytes));
    EXPECT_LE(device_cache_rows(f.bytes, f.fraction, {f.limits.row_bytes, mapped}), mapped);
    if (reachable >= f.limits.most_rows) {
      EXPECT_EQ(device_cache_rows(f.more, f.fraction, {f.limits.row_bytes, mapped}),
                device_cache_rows(f.more, f.fraction, f.limits));
    }
  });
}

TEST(CacheSize, AReturningCacheHasItsRowsAgainOrLeavesWhatStepsWant) {
  for_random_figures([](const Figures& f) {
    const int64_t first = device_cache_rows(f.bytes, f.fraction, f.limits);
    const CacheLimits limits{f.limits.row_bytes, first};
    EXPECT_EQ(returning_cache_rows(f.bytes, 0, limits), first);  // nobody has taken anything
    EXPECT_EQ(returning_cache_rows(f.more, 0, limits), first);   // and never more than before
    const int64_t left = f.bytes / 2;                            // somebody has
    expect_fills(returning_cache_rows(left, f.step_bytes, limits), left - f.step_bytes - kDriverBytes / 2, limits);
  });
}

TEST(CacheSize, NoMemoryIsOneRow) {
  const CacheLimits limits{kLlama8bRow, 1000};
  EXPECT_EQ(host_cache_rows(0, 0.6, limits), 1);
  EXPECT_EQ(device_cache_rows(0, 0.6, limits), 1);
  EXPECT_EQ(device_cache_rows(kDriverBytes, 1.0, limits), 1);
  EXPECT_EQ(returning_cache_rows(0, 2 * kGiB, limits), 1);
  EXPECT_EQ(mapped_cache_rows(0, 1, limits), 1);
}

}  // namespace
}  // namespace trireme
