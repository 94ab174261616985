#include "trainer/batch/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "base/error.h"

namespace trireme {
namespace {

int64_t load(const Members& bin, const std::vector<int64_t>& lengths) {
  int64_t sum = 0;
  for (const int64_t i : bin) sum += lengths[static_cast<size_t>(i)];
  return sum;
}

std::vector<int64_t> sorted_members(const std::vector<Members>& bins) {
  std::vector<int64_t> all;
  for (const Members& bin : bins) all.insert(all.end(), bin.begin(), bin.end());
  std::sort(all.begin(), all.end());
  return all;
}

std::vector<int64_t> iota(size_t count) {
  std::vector<int64_t> all(count);
  std::iota(all.begin(), all.end(), int64_t{0});
  return all;
}

const PackingAlgorithm kAll[] = {PackingAlgorithm::kConcatenative, PackingAlgorithm::kFirstFitDecreasing,
                                 PackingAlgorithm::kFirstFitShuffle, PackingAlgorithm::kModifiedFirstFitDecreasing};

TEST(Packing, EverySequenceOnceAndNoBinTooFull) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> lengths(random() % 200);
    for (int64_t& length : lengths) length = 1 + static_cast<int64_t>(random() % 1000);
    for (const PackingAlgorithm algorithm : kAll) {
      const std::vector<Members> bins = pack_bins(lengths, 1000, algorithm, 3);
      EXPECT_EQ(sorted_members(bins), iota(lengths.size()));
      for (const Members& bin : bins) EXPECT_LE(load(bin, lengths), 1000);
      EXPECT_EQ(bins, pack_bins(lengths, 1000, algorithm, 3)) << "packing must be repeatable";
    }
  }
}

// First-fit decreasing needs at most 11/9 OPT + 6/9 bins (Dosa 2007), the modified one 71/60 OPT + 1; OPT >= sum /
// capacity.
TEST(Packing, ModifiedFirstFitStaysNearTheLowerBoundOnSmallItems) {
  std::mt19937 random(11);
  for (int round = 0; round < 50; ++round) {
    std::vector<int64_t> lengths(300);
    for (int64_t& length : lengths) length = 1 + static_cast<int64_t>(random() % 400);
    const double least =
        std::ceil(static_cast<double>(std::accumulate(lengths.begin(), lengths.end(), int64_t{0})) / 1000.0);
    const size_t used = pack_bins(lengths, 1000, PackingAlgorithm::kModifiedFirstFitDecreasing, 0).size();
    EXPECT_LE(static_cast<double>(used), least * 71 / 60 + 2);
  }
}

TEST(Packing, TooLongASequenceNamesItAndTheKey) {
  try {
    pack_bins({3, 12}, 10, PackingAlgorithm::kFirstFitDecreasing, 0);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    EXPECT_NE(std::string(error.what()).find("sequence 1 has 12 tokens"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("train_mb_tokens"), std::string::npos);
  }
}

TEST(Packing, RanksGetTheSameNumberOfMicroBatches) {
  std::mt19937 random(5);
  for (int64_t ranks = 1; ranks <= 5; ++ranks) {
    for (const size_t count : {size_t{0}, size_t{1}, size_t{3}, size_t{64}}) {
      std::vector<int64_t> lengths(count);
      for (int64_t& length : lengths) length = 1 + static_cast<int64_t>(random() % 90);
      for (const auto& plan :
           {packed_micro_batches(lengths, 100, ranks, PackingAlgorithm::kModifiedFirstFitDecreasing, 0),
            dynamic_micro_batches(lengths, 128, 8, ranks),
            fixed_micro_batches(static_cast<int64_t>(count), 4, ranks)}) {
        ASSERT_EQ(static_cast<int64_t>(plan.size()), ranks);
        std::vector<Members> all;
        for (const auto& bins : plan) {
          EXPECT_EQ(bins.size(), plan.front().size());
          all.insert(all.end(), bins.begin(), bins.end());
        }
        EXPECT_EQ(sorted_members(all), iota(count));
      }
    }
  }
}

TEST(Packing, DynamicBatchesKeepTheTokenBudget) {
  std::vector<int64_t> lengths;
  for (int64_t i = 1; i <= 40; ++i) lengths.push_back(i);
  for (const auto& bins : dynamic_micro_batches(lengths, 96, 8, 2)) {
    for (const Members& bin : bins) {
      int64_t longest = 0;
      for (const int64_t i : bin) longest = std::max(longest, (lengths[static_cast<size_t>(i)] + 7) / 8 * 8);
      EXPECT_LE(static_cast<int64_t>(bin.size()) * longest, 96);
    }
  }
}

// Rows of a bin in which each group's prompt is there once.
int64_t shared_load(const Members& bin, const SharedLengths& samples) {
  int64_t sum = 0;
  std::set<int64_t> groups;
  for (const int64_t i : bin) {
    const auto at = static_cast<size_t>(i);
    sum += samples.lengths[at] - samples.prompts[at];
    if (groups.insert(samples.groups[at]).second) sum += samples.prompts[at];
  }
  return sum;
}

TEST(Packing, GroupsStayTogetherWherePromptsAreShared) {
  std::mt19937 random(13);
  for (int round = 0; round < 100; ++round) {
    SharedLengths samples;
    const int64_t groups = 1 + static_cast<int64_t>(random() % 6), size = 1 + static_cast<int64_t>(random() % 20);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t prompt = 1 + static_cast<int64_t>(random() % 300);
      for (int64_t i = 0; i < size; ++i) {
        samples.groups.push_back(g);
        samples.prompts.push_back(prompt);
        samples.lengths.push_back(prompt + static_cast<int64_t>(random() % 600));
      }
    }
    for (const PackingAlgorithm algorithm : kAll) {
      for (const int64_t ranks : {1, 2, 3}) {
        const auto plan = shared_micro_batches(samples, 1000, ranks, algorithm, 3);
        EXPECT_EQ(plan, shared_micro_batches(samples, 1000, ranks, algorithm, 3)) << "packing must be repeatable";
        std::vector<Members> all;
        for (const auto& bins : plan) {
          EXPECT_EQ(bins.size(), plan.front().size());
          all.insert(all.end(), bins.begin(), bins.end());
        }
        EXPECT_EQ(sorted_members(all), iota(samples.lengths.size()));
        int64_t rows = 0;
        for (const Members& bin : all) {
          EXPECT_LE(shared_load(bin, samples), 1000);
          rows += shared_load(bin, samples);
        }
        EXPECT_LE(rows, load(iota(samples.lengths.size()), samples.lengths));
      }
    }
  }
  // Eight answers of 50 tokens to each of two prompts of 100, one rank: a group fits whole into a row of 500.
  SharedLengths even;
  for (int64_t i = 0; i < 16; ++i)
    even.groups.push_back(i / 8), even.prompts.push_back(100), even.lengths.push_back(150);
  const auto whole = shared_micro_batches(even, 500, 1, PackingAlgorithm::kModifiedFirstFitDecreasing, 0);
  EXPECT_EQ(whole.front(), (std::vector<Members>{{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}}));
  // Of 350 two even parts of each.
  const auto halves = shared_micro_batches(even, 350, 1, PackingAlgorithm::kModifiedFirstFitDecreasing, 0);
  EXPECT_EQ(halves.front().size(), 4u);
  for (const Members& bin : halves.front()) EXPECT_EQ(bin.size(), 4u);
  // On four ranks each has a quarter, though a row could hold more.
  for (const auto& bins : shared_micro_batches(even, 2000, 4, PackingAlgorithm::kConcatenative, 0)) {
    ASSERT_EQ(bins.size(), 1u);
    EXPECT_EQ(bins.front().size(), 4u);
  }
}

// Answers as models give them, many short and few long ones: the fullest rank has hardly more than the mean.
TEST(Packing, RanksGetEvenLoads) {
  std::mt19937 random(29);
  for (int round = 0; round < 20; ++round) {
    SharedLengths samples;
    for (int64_t g = 0; g < 16; ++g) {
      const int64_t prompt = 50 + static_cast<int64_t>(random() % 300);
      for (int64_t i = 0; i < 32; ++i) {
        samples.groups.push_back(g);
        samples.prompts.push_back(prompt);
        const double draw = static_cast<double>(random() % 1000 + 1) / 1000;
        samples.lengths.push_back(prompt + 1 + std::min<int64_t>(3000, static_cast<int64_t>(-600 * std::log(draw))));
      }
    }
    for (const int64_t ranks : {2, 3, 8}) {
      for (const bool shared : {false, true}) {
        const auto plan =
            shared
                ? shared_micro_batches(samples, 8192, ranks, PackingAlgorithm::kModifiedFirstFitDecreasing, 3)
                : packed_micro_batches(samples.lengths, 8192, ranks, PackingAlgorithm::kModifiedFirstFitDecreasing, 3);
        int64_t sum = 0, most = 0;
        for (const std::vector<Members>& bins : plan) {
          int64_t rank = 0;
          for (const Members& bin : bins) rank += shared ? shared_load(bin, samples) : load(bin, samples.lengths);
          sum += rank;
          most = std::max(most, rank);
        }
        EXPECT_LE(static_cast<double>(most) * static_cast<double>(ranks), 1.02 * static_cast<double>(sum))
            << ranks << (shared ? " ranks, shared" : " ranks");
      }
    }
  }
}

TEST(Packing, LargestFirstOrdersARanksMicroBatchesAndNothingElse) {
  SharedLengths sequences;
  sequences.lengths = {10, 90, 30, 60, 20, 80, 40};
  MicroBatchOptions options;
  options.rule = MicroBatchOptions::Rule::kPacked;
  options.algorithm = PackingAlgorithm::kConcatenative;
  options.tokens = 100;
  std::vector<Members> plain = make_micro_batches(sequences, options, 1).front();
  options.largest_first = true;
  const std::vector<Members> ordered = make_micro_batches(sequences, options, 1).front();
  const auto loads = [&](const std::vector<Members>& all) {
    std::vector<int64_t> result;
    for (const Members& members : all) result.push_back(load(members, sequences.lengths));
    return result;
  };
  ASSERT_GT(plain.size(), 2u);
  const std::vector<int64_t> before = loads(plain), after = loads(ordered);
  EXPECT_FALSE(std::is_sorted(before.rbegin(), before.rend())) << "nothing to order";
  EXPECT_TRUE(std::is_sorted(after.rbegin(), after.rend()));
  std::vector<Members> same = ordered;
  std::sort(plain.begin(), plain.end());
  std::sort(same.begin(), same.end());
  EXPECT_EQ(plain, same);
}

TEST(Packing, UnknownAlgorithmIsNamed) { EXPECT_THROW(parse_packing_algorithm("best_fit"), Error); }

}  // namespace
}  // namespace trireme
