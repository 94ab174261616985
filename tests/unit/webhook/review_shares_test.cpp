#include "operator/telemetry/review_shares.h"

#include <gtest/gtest.h>

namespace trireme::telemetry {
namespace {

SteadyClock::time_point at(double s) {
  return SteadyClock::time_point{} +
         std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(s));
}

TEST(ReviewShares, OneAccountsReviewsAreNobodyElses) {
  ReviewShares shares({.per_second = 0.5, .burst = 3});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(shares.take("a", at(100)));
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(shares.take("a", at(100)));
  EXPECT_TRUE(shares.take("b", at(100)));
  EXPECT_FALSE(shares.take("a", at(101)));
  EXPECT_TRUE(shares.take("a", at(102.1))) << "asking in vain costs nothing";
  EXPECT_FALSE(shares.take("a", at(102.2)));
  int taken = 0;
  for (int i = 0; i < 10; ++i) taken += shares.take("a", at(1000));
  EXPECT_EQ(taken, 3) << "never more than the burst";
}

TEST(ReviewShares, AreBounded) {
  ReviewShares shares({.per_second = 1, .burst = 2, .most = 10});
  for (int i = 0; i < 1000; ++i) {
    EXPECT_TRUE(shares.take("pod-" + std::to_string(i), at(100)));
    EXPECT_LE(shares.size(), 10u);
  }
  EXPECT_TRUE(shares.take("late", at(200)));
  EXPECT_EQ(shares.size(), 1u) << "those that are whole again went";
  for (int i = 0; i < 2; ++i) shares.take("flood", at(200.5));
  for (int i = 0; i < 8; ++i) shares.take("pod-" + std::to_string(i), at(200.6));
  EXPECT_FALSE(shares.take("flood", at(200.7)));
  EXPECT_TRUE(shares.take("one more", at(200.8)));
  EXPECT_EQ(shares.size(), 10u);
  EXPECT_FALSE(shares.take("flood", at(200.9))) << "it is not forgotten while it asks";
}

}  // namespace
}  // namespace trireme::telemetry
