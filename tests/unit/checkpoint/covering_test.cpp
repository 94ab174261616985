#include "tests/unit/checkpoint/covering.h"

#include <gtest/gtest.h>

#include <utility>

namespace trireme::test {
namespace {

using Traits = std::set<std::string>;

TEST(Covering, ShowsAllThatAnyCaseShowsWithFewCases) {
  const std::vector<Traits> cases = {{"a"}, {"a", "b"}, {"b", "c"}, {"a", "b", "c"}, {"d"}, {"c", "d"}};
  const std::function<Traits(const Traits&)> shows = [](const Traits& traits) { return pairs_of(traits); };
  EXPECT_EQ(covering(cases, shows), (std::vector<Traits>{{"a", "b", "c"}, {"c", "d"}}));
  const std::function<Traits(const Traits&)> itself = [](const Traits& traits) { return traits; };
  EXPECT_EQ(covering(cases, itself), (std::vector<Traits>{{"a", "b", "c"}, {"d"}}));
  EXPECT_TRUE(covering({}, itself).empty());
}

TEST(Covering, PairsHaveOneName) {
  EXPECT_EQ(pairs_of({"b", "a", "c"}), (Traits{"a with b", "a with c", "b with c"}));
  EXPECT_TRUE(pairs_of({"a"}).empty());
}

}  // namespace
}  // namespace trireme::test
