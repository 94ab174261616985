// Which nodes are bad, since when, and when there are too many of them to be believed; no threads, no clock.
#include "operator/controller/bad_nodes.h"

#include <gtest/gtest.h>

namespace trireme::controller {
namespace {

using Names = std::set<std::string>;
const SteadyClock::time_point kStart{};
SteadyClock::time_point at(int seconds) { return kStart + std::chrono::seconds(seconds); }

TEST(BadNodes, OneIsBadFromItsFirstWordOn) {
  BadNodes nodes;
  EXPECT_EQ(nodes.heard("a", NodeState::kReady, 10, at(0)), Names{}) << "no news";
  EXPECT_EQ(nodes.heard("a", NodeState::kNotReady, 10, at(1)), Names{"a"});
  EXPECT_EQ(nodes.heard("a", NodeState::kNotReady, 10, at(2)), Names{});
  EXPECT_EQ(nodes.since("a"), at(1));
  EXPECT_EQ(nodes.heard("a", NodeState::kGone, 9, at(3)), Names{"a"});
  EXPECT_EQ(nodes.since("a"), at(1)) << "it was bad before it went";
  EXPECT_EQ(nodes.heard("a", NodeState::kReady, 10, at(4)), Names{"a"});
  EXPECT_EQ(nodes.since("a"), std::nullopt);
  EXPECT_FALSE(nodes.in_doubt());
}

TEST(BadNodes, ManyAtOnceAreTheClustersTrouble) {
  BadNodes nodes;
  for (const char* name : {"a", "b", "c", "d", "e"}) nodes.heard(name, NodeState::kNotReady, 10, at(1));
  EXPECT_FALSE(nodes.in_doubt()) << "five of ten";
  EXPECT_EQ(nodes.heard("f", NodeState::kNotReady, 10, at(2)), (Names{"a", "b", "c", "d", "e", "f"}));
  EXPECT_TRUE(nodes.in_doubt());
  EXPECT_EQ(nodes.since("a"), at(1));
  // The grace begins anew for those that are still bad when the doubt ends, and their jobs are looked at.
  EXPECT_EQ(nodes.heard("f", NodeState::kReady, 10, at(9)), (Names{"a", "b", "c", "d", "e", "f"}));
  EXPECT_FALSE(nodes.in_doubt());
  EXPECT_EQ(nodes.since("a"), at(9));
  nodes.heard("g", NodeState::kNotReady, 20, at(11));
  EXPECT_EQ(nodes.since("g"), at(11));
}

TEST(BadNodes, InASmallClusterOnlyAllOfSeveralAreDoubted) {
  BadNodes nodes;
  nodes.heard("a", NodeState::kNotReady, 1, at(0));
  EXPECT_FALSE(nodes.in_doubt()) << "it is the only one";
  nodes.heard("b", NodeState::kNotReady, 3, at(0));
  EXPECT_FALSE(nodes.in_doubt()) << "two of three";
  nodes.heard("c", NodeState::kNotReady, 3, at(0));
  EXPECT_TRUE(nodes.in_doubt());
}

TEST(BadNodes, ThoseThatWereTakenAwayAreForgottenAfterADay) {
  constexpr int kDay = 24 * 3600;
  BadNodes nodes;
  nodes.heard("gone", NodeState::kGone, 9, at(0));
  nodes.heard("silent", NodeState::kNotReady, 9, at(0));
  nodes.heard("other", NodeState::kNotReady, 9, at(kDay - 1));
  EXPECT_EQ(nodes.since("gone"), at(0));
  EXPECT_EQ(nodes.heard("other", NodeState::kReady, 9, at(kDay)), Names{"other"});
  EXPECT_EQ(nodes.since("gone"), std::nullopt) << "an autoscaler never uses a name again";
  EXPECT_EQ(nodes.since("silent"), at(0)) << "it may still come back";
}

TEST(BadNodes, ThoseThatWereTakenAwayAreNotDoubted) {
  BadNodes nodes;
  for (const char* name : {"a", "b", "c"}) nodes.heard(name, NodeState::kGone, 0, at(0));
  EXPECT_FALSE(nodes.in_doubt());
}

}  // namespace
}  // namespace trireme::controller
