// Refits carried out on numbers: each element of the model has its own, ranks have those of their slices, and messages
// bring them where generation wants them.
#include "topology/refit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>

#include "base/error.h"
#include "tests/unit/topology/numbered.h"

namespace trireme {
namespace {

using test::kNothing;
using test::memories;
using test::Memory;
using test::small;
using test::visit_places;
using testing::ElementsAre;

struct Refitted {
  ModelShape shape;
  RefitLayouts layouts;
};

std::string text(const Refitted& r) {
  const auto pieces = [](const StageOptions& o) {
    return " (" + std::to_string(o.first_layers) + ", " + std::to_string(o.last_layers) + ", " +
           std::to_string(o.virtual_stages) + ")";
  };
  return to_string(r.layouts.training) + pieces(r.layouts.training_stages) + " to " + to_string(r.layouts.generation) +
         pieces(r.layouts.generation_stages) + ", " + std::to_string(r.layouts.of_node) + " of a host, vocabulary of " +
         std::to_string(r.shape.vocab);
}

// A refit as ranks carry it out.
class Carried final {
 public:
  Carried(const Refitted& refitted, int64_t element_bytes, int64_t bucket_bytes)
      : refitted_(refitted), layouts_(refitted_.layouts), parameters_(model_parameters(refitted.shape)) {
    plan_ = refit_plan(refitted.shape, parameters_, layouts_, element_bytes);
    trained_ = memories(refitted.shape, parameters_, layouts_.training, layouts_.training_stages);
    wanted_ = memories(refitted.shape, parameters_, layouts_.generation, layouts_.generation_stages);
    for (const Memory& of_rank : wanted_) {
      Memory& empty = got_.emplace_back();
      for (const auto& parameter : of_rank) empty.emplace_back(parameter.size(), kNothing);
    }
    for (int64_t rank = 0; rank < plan_.ranks; ++rank) ranks_.push_back(rank_refit(plan_, rank, bucket_bytes));
    bucket_bytes_ = bucket_bytes;
  }

  void run() {
    for (const RankRefit& rank : ranks_) {
      for (const RefitCopy& copy : rank.own) {
        ASSERT_EQ(copy.from, copy.to);
        std::vector<int64_t> values = read(copy);
        ASSERT_NO_FATAL_FAILURE(write(copy, values));
        ASSERT_TRUE(values.empty());
      }
    }
    size_t most = 0;
    for (const RankRefit& rank : ranks_) most = std::max(most, rank.buckets.size());
    for (size_t b = 0; b < most; ++b) ASSERT_NO_FATAL_FAILURE(exchange(b));
    ASSERT_EQ(got_, wanted_);
  }

  // Itself, its host, anybody.
  void expect_nearest() const {
    for (const RefitCopy& copy : plan_.copies) {
      const auto parameter = static_cast<size_t>(copy.parameter);
      ASSERT_LE(copy.range.end, parameters_[parameter].shape[static_cast<size_t>(copy.dimension)]);
      visit_places(parameters_[parameter], copy.dimension, copy.range, [&](size_t place) {
        const auto has = [&](int64_t rank) {
          return trained_[static_cast<size_t>(rank)][parameter][place] != kNothing;
        };
        bool on_host = false;
        for (int64_t rank = 0; rank < plan_.ranks; ++rank) on_host |= host(rank) == host(copy.to) && has(rank);
        ASSERT_TRUE(has(copy.from));
        ASSERT_EQ(copy.from == copy.to, has(copy.to));
        ASSERT_EQ(host(copy.from) == host(copy.to), on_host);
      });
    }
  }

  // A rank's last copy was its turn: whoever could have sent it instead had sent as much by then.
  void expect_even() const {
    for (const bool near : {true, false}) {
      std::vector<int64_t> sent(static_cast<size_t>(plan_.ranks), 0);
      std::map<int64_t, const RefitCopy*> last;
      for (const RefitCopy& copy : plan_.copies) {
        if (copy.from == copy.to || (host(copy.from) == host(copy.to)) != near) continue;
        sent[static_cast<size_t>(copy.from)] += copy.bytes();
        last[copy.from] = &copy;
      }
      for (const auto& [from, copy] : last) {
        for (int64_t rank = 0; rank < plan_.ranks; ++rank) {
          if ((near && host(rank) != host(copy->to)) || !could_send(rank, *copy)) continue;
          ASSERT_LE(sent[static_cast<size_t>(from)], sent[static_cast<size_t>(rank)] + copy->bytes());
        }
      }
    }
  }

  void expect_bounded() const {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      const RankRefit& own = ranks_[r];
      ASSERT_TRUE(std::is_sorted(own.group.begin(), own.group.end()));
      ASSERT_TRUE(std::count(own.group.begin(), own.group.end(), static_cast<int64_t>(r)) == 1);
      for (const int64_t other : own.group) {
        ASSERT_EQ(ranks_[static_cast<size_t>(other)].group, own.group);
        ASSERT_EQ(ranks_[static_cast<size_t>(other)].buckets.size(), own.buckets.size());
      }
      for (const RefitBucket& bucket : own.buckets) {
        ASSERT_NO_FATAL_FAILURE(expect_bounded(bucket.sends, own.group, &RefitCopy::to));
        ASSERT_NO_FATAL_FAILURE(expect_bounded(bucket.receives, own.group, &RefitCopy::from));
      }
    }
  }

  const RefitPlan& plan() const { return plan_; }
  const std::vector<RankRefit>& ranks() const { return ranks_; }

 private:
  int64_t host(int64_t rank) const { return layouts_.of_node > 0 ? rank / layouts_.of_node : 0; }

  bool could_send(int64_t rank, const RefitCopy& copy) const {
    bool all = true;
    visit_places(parameters_[static_cast<size_t>(copy.parameter)], copy.dimension, copy.range, [&](size_t place) {
      all &= trained_[static_cast<size_t>(rank)][static_cast<size_t>(copy.parameter)][place] != kNothing;
    });
    return all;
  }

  std::vector<int64_t> read(const RefitCopy& copy) const {
    std::vector<int64_t> values;
    visit_places(parameters_[static_cast<size_t>(copy.parameter)], copy.dimension, copy.range, [&](size_t place) {
      values.push_back(trained_[static_cast<size_t>(copy.from)][static_cast<size_t>(copy.parameter)][place]);
    });
    return values;
  }

  // Takes the copy's elements off the front of `values`.
  void write(const RefitCopy& copy, std::vector<int64_t>& values) {
    std::vector<int64_t>& to = got_[static_cast<size_t>(copy.to)][static_cast<size_t>(copy.parameter)];
    size_t taken = 0;
    visit_places(parameters_[static_cast<size_t>(copy.parameter)], copy.dimension, copy.range, [&](size_t place) {
      ASSERT_LT(taken, values.size());
      ASSERT_EQ(to[place], kNothing) << "an element came twice";
      ASSERT_NE(values[taken], kNothing) << "sent by a rank that does not have it";
      to[place] = values[taken++];
    });
    values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(taken));
  }

  // Bucket `b` of all ranks: one message for each pair, read from its front.
  void exchange(size_t b) {
    std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> messages;
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (b >= ranks_[r].buckets.size()) continue;
      for (const RefitCopy& copy : ranks_[r].buckets[b].sends) {
        ASSERT_EQ(copy.from, static_cast<int64_t>(r));
        std::vector<int64_t>& message = messages[{copy.from, copy.to}];
        const std::vector<int64_t> values = read(copy);
        message.insert(message.end(), values.begin(), values.end());
      }
    }
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (b >= ranks_[r].buckets.size()) continue;
      for (const RefitCopy& copy : ranks_[r].buckets[b].receives) {
        ASSERT_EQ(copy.to, static_cast<int64_t>(r));
        ASSERT_NO_FATAL_FAILURE(write(copy, messages[{copy.from, copy.to}]));
      }
    }
    for (const auto& [pair, left] : messages) ASSERT_TRUE(left.empty());
  }

  void expect_bounded(const std::vector<RefitCopy>& copies, const std::vector<int64_t>& group,
                      int64_t RefitCopy::*other) const {
    int64_t bytes = 0, before = kNothing;
    std::map<int64_t, int64_t> largest_unit;  // of each other rank's
    for (const RefitCopy& copy : copies) {
      ASSERT_TRUE(std::binary_search(group.begin(), group.end(), copy.*other));
      ASSERT_LE(before, copy.*other);
      ASSERT_GT(copy.range.size(), 0);
      before = copy.*other;
      bytes += copy.bytes();
      largest_unit[copy.*other] = std::max(largest_unit[copy.*other], copy.unit_bytes);
    }
    int64_t units = 0;
    for (const auto& [rank, unit] : largest_unit) units += unit;
    ASSERT_LT(bytes, bucket_bytes_ + std::max<int64_t>(1, units));
  }

  const Refitted refitted_;
  const RefitLayouts& layouts_;
  std::vector<ModelParameter> parameters_;
  RefitPlan plan_;
  std::vector<Memory> trained_, wanted_, got_;  // of each rank
  std::vector<RankRefit> ranks_;
  int64_t bucket_bytes_ = 0;
};

void expect_carried(const Refitted& refitted, int64_t bucket_bytes) {
  Carried carried(refitted, /*element_bytes=*/2, bucket_bytes);
  ASSERT_NO_FATAL_FAILURE(carried.run()) << text(refitted);
  ASSERT_NO_FATAL_FAILURE(carried.expect_nearest()) << text(refitted);
  ASSERT_NO_FATAL_FAILURE(carried.expect_even()) << text(refitted);
  ASSERT_NO_FATAL_FAILURE(carried.expect_bounded()) << text(refitted);
}

// Every layout that `training` may generate in, with stages as in training and with plain ones.
std::vector<Refitted> every_generation(const ModelShape& shape, const Layout& training, const StageOptions& stages) {
  std::vector<Refitted> all;
  for (const bool fold : {false, true}) {
    for (const int64_t tp : divisors(training.world())) {
      const Layout generation = generation_layout(training, tp, fold);
      for (const bool plain : {false, true}) {
        if (fold && !plain) continue;
        const StageOptions own = plain ? StageOptions{} : stages;
        if (!check_layout(generation, {.world = training.world(), .shape = &shape, .stages = own}).ok()) continue;
        all.push_back({shape, {training, generation, stages, own}});
      }
    }
  }
  return all;
}

TEST(Refit, EveryElementComesOnceFromTheNearestInEveryLayout) {
  constexpr int64_t kHosts[] = {0, 2, 3};
  int64_t carried = 0;
  for (const ModelShape& shape : test::small_shapes()) {
    for (const int64_t world : {1, 2, 3, 4, 6, 8, 12}) {
      for (const StageOptions& stages : test::kStages) {
        for (const Layout& training : legal_layouts({.world = world, .shape = &shape, .stages = stages})) {
          for (Refitted& refitted : every_generation(shape, training, stages)) {
            refitted.layouts.of_node = kHosts[carried % 3];
            ASSERT_NO_FATAL_FAILURE(expect_carried(refitted, carried / 3 % 2 == 0 ? 64 : 1000));
            ++carried;
          }
        }
      }
    }
  }
  EXPECT_GT(carried, 1000);
}

TEST(Refit, ExpertsComeFromTheRanksThatHaveThem) {
  ModelShape shape = small(4, 2, 0, 20);
  shape.experts = 4;
  shape.experts_per_token = 2;
  shape.moe_intermediate = 5;
  shape.sparse_step = 2;
  shape.intermediate = 6;
  for (const int64_t ep : {1, 2, 4}) {
    for (const int64_t of_generation : {1, 2, 4}) {
      const Layout training{.ep = ep, .dp = 4}, generation{.ep = of_generation, .dp = 4};
      ASSERT_NO_FATAL_FAILURE(expect_carried({shape, {.training = training, .generation = generation}}, 50));
    }
  }
}

TEST(Refit, NothingIsSentWhereEachRankHasWhatItNeeds) {
  const ModelShape shape = small(8, 4, 8, 33);
  for (const Layout& training : {Layout{.tp = 2, .dp = 2, .pp = 2}, Layout{.cp = 2, .dp = 4}, Layout{.dp = 8}}) {
    Carried carried({shape, {training, generation_layout(training, 0, false)}}, 2, 1 << 20);
    ASSERT_NO_FATAL_FAILURE(carried.run());
    for (const RankRefit& rank : carried.ranks()) {
      EXPECT_EQ(rank.group.size(), 1U);
      EXPECT_TRUE(rank.buckets.empty());
    }
  }
  Carried cut({shape, {Layout{.dp = 4}, generation_layout({.dp = 4}, 4, false)}}, 2, 1 << 20);
  ASSERT_NO_FATAL_FAILURE(cut.run());
  for (const RankRefit& rank : cut.ranks()) EXPECT_TRUE(rank.buckets.empty());
}

TEST(Refit, AVocabularyIsCutByEachLayoutsOwnPadding) {
  const ModelShape shape = small(8, 4, 8, 33);  // padded to 48 over two ranks, to 64 over four
  const std::vector<ModelParameter> embedding{model_parameters(shape).front()};
  const Layout training{.tp = 4};
  const RefitPlan plan = refit_plan(shape, embedding, {training, generation_layout(training, 2, false)}, 2);
  const auto copy = [](int64_t from, int64_t to, int64_t begin, int64_t end) {
    return RefitCopy{from, to, 0, 0, {begin, end}, 6};
  };
  EXPECT_THAT(plan.copies, ElementsAre(copy(0, 0, 0, 16), copy(1, 0, 16, 24), copy(1, 1, 24, 32), copy(2, 1, 32, 33),
                                       copy(0, 2, 0, 16), copy(1, 2, 16, 24), copy(1, 3, 24, 32), copy(2, 3, 32, 33)));
}

TEST(Refit, StagesOfALargeModelAreFetchedFromEachPipelinesOwnRanks) {
  const ModelShape shape = *known_model_shape("llama-3.1-70b");
  const Layout training{.tp = 4, .dp = 4, .pp = 4};
  const RefitLayouts layouts{training, generation_layout(training, 0, true), {}, {}, 8};
  const RefitPlan plan = refit_plan(shape, model_parameters(shape), layouts, 2);
  std::vector<int64_t> sent(64, 0), received(64, 0), own(64, 0);
  for (const RefitCopy& copy : plan.copies) {
    if (copy.from == copy.to) own[static_cast<size_t>(copy.to)] += copy.bytes();
    if (copy.from == copy.to) continue;
    sent[static_cast<size_t>(copy.from)] += copy.bytes();
    received[static_cast<size_t>(copy.to)] += copy.bytes();
  }
  constexpr int64_t kBucket = int64_t{1} << 26;
  for (int64_t rank = 0; rank < 64; ++rank) {
    const auto r = static_cast<size_t>(rank);
    EXPECT_EQ(sent[r], 3 * own[r]);  // to each of the other stages
    EXPECT_NEAR(static_cast<double>(received[r] + own[r]), 2 * 70.55e9 / 4, 0.01e9);
    const RankRefit refit = rank_refit(plan, rank, kBucket);
    EXPECT_EQ(refit.group, group_of(training, Axis::kPp, rank));
    EXPECT_EQ(refit.buckets.size(), 407U);  // 27.3 GB that the first stage sends, and the last one
  }
}

TEST(Refit, ATensorGroupOfAHostRefitsWithinIt) {
  const ModelShape shape = *known_model_shape("llama-3.1-8b");
  for (const int64_t tp : {1, 2, 8}) {
    const Layout training{.tp = 4, .dp = 4};
    const RefitLayouts layouts{training, generation_layout(training, tp, false), {}, {}, 8};
    const RefitPlan plan = refit_plan(shape, model_parameters(shape), layouts, 2);
    std::vector<int64_t> sent(16, 0);
    for (const RefitCopy& copy : plan.copies) {
      EXPECT_EQ(copy.from / 8, copy.to / 8);
      if (copy.from != copy.to) sent[static_cast<size_t>(copy.from)] += copy.bytes();
    }
    int64_t largest = 0;
    for (const RefitCopy& copy : plan.copies) largest = std::max(largest, copy.bytes());
    for (int64_t rank = 0; rank < 16; ++rank) {  // two of a host have the same
      const auto r = static_cast<size_t>(rank);
      EXPECT_GT(sent[r], 0);
      EXPECT_LE(std::abs(sent[r] - sent[r ^ 4]), largest) << tp << ", " << rank;
    }
  }
}

TEST(Refit, RanksKeepTheirPlacesInTheLayoutOfGeneration) {
  for (const int64_t world : {1, 2, 4, 6, 8, 12, 16}) {
    for (const Layout& training : legal_layouts({.world = world})) {
      EXPECT_EQ(groups(generation_layout(training, 0, true), Axis::kTp), groups(training, Axis::kTp));
      for (const int64_t tp : divisors(world / training.pp)) {
        const Layout generation = generation_layout(training, tp, false);
        ASSERT_EQ(generation.world(), world);
        EXPECT_EQ(groups(generation, Axis::kPp), groups(training, Axis::kPp));
        for (int64_t rank = 0; rank < world; ++rank)
          EXPECT_EQ(coordinates(generation, rank).pp, coordinates(training, rank).pp);
      }
    }
  }
  // One that does not divide the ranks is for check_layout to refuse.
  const Layout none = generation_layout({.tp = 2, .dp = 2}, 3, false);
  EXPECT_FALSE(check_layout(none, {.world = 4}).ok());
  EXPECT_FALSE(check_layout(generation_layout({.dp = 2}, 8, false), {.world = 2}).ok());
}

TEST(Refit, OtherRanksAreRefused) {
  const ModelShape shape = small(8, 4, 8, 33);
  EXPECT_THROW(refit_plan(shape, model_parameters(shape), {Layout{.dp = 4}, Layout{.tp = 2}}, 2), Error);
}

}  // namespace
}  // namespace trireme
