// bench refit with threads for ranks, on the tiny shape and the CPU.
#include <ATen/ATen.h>

#include <fstream>
#include <sstream>

#include "base/fs.h"
#include "tests/unit/errors.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/bench/refit_bench.h"

namespace trireme::bench {
namespace {

TEST(RefitBench, EnginesHaveTheSenderBitsAndItReportsTransferAndStall) {
  const TemporaryDirectory folder;
  for (const bool second_buffer : {true, false}) {
    const std::string file = (folder.path() / "refit.json").string();
    ListeningPort port;
    std::ostringstream out;
    const auto errors = test::on_ranks(3, [&](int rank) {
      RendezvousOptions rendezvous = port.place(rank, 3, Milliseconds(250000));
      RefitBenchOptions options;
      options.common.shape = "tiny";
      options.common.device = "cpu";
      options.common.repeats = 2;
      options.common.json = file;
      options.second_buffer = second_buffer;
      options.link.store_port = rendezvous.master_port;
      options.link.deadline = rendezvous.timeout;
      ParallelContext context(Layout{.dp = 3}, rendezvous);
      std::ostringstream ignored;
      const nlohmann::json report = bench_refit(options, context, rank == 0 ? out : ignored);
      EXPECT_TRUE(report.at("same_bits").get<bool>());
      EXPECT_EQ(ignored.str(), "");
    });
    for (const std::string& error : errors) EXPECT_EQ(error, "");
    std::ifstream in(file);
    const nlohmann::json report = nlohmann::json::parse(in);
    EXPECT_EQ(report.at("benchmark"), "refit");
    EXPECT_EQ(report.at("ranks"), 3);
    EXPECT_EQ(report.at("second_buffer").get<bool>(), second_buffer);
    EXPECT_EQ(report.at("transfer_seconds_of_repeats").size(), 2U);
    EXPECT_GT(report.at("transfer_seconds").get<double>(), 0);
    EXPECT_GT(report.at("stall_seconds").get<double>(), 0);
    EXPECT_GE(report.at("whole_seconds").get<double>(), report.at("transfer_seconds").get<double>() / 2);
    EXPECT_EQ(report.contains("transfer_seconds_beside"), second_buffer);
    EXPECT_MENTIONS(out.str(), "decoding stopped");
    EXPECT_MENTIONS(out.str(), "the same bits");
  }
}

struct Split {
  std::string shape;
  Layout training, engine;
  int64_t actors = 0;  // as given
  int ranks = 2;
  int64_t elements = 0;  // that come to a rank
  int64_t sources = 1;
};

// In float32. Of the tiny shape a layer has 128 x 512, 256 x 128 and 3 x 128 x 256 elements in products and 384 in
// norms; besides there are a table of 512 x 128 for both ends, and the last norm. In the mixture the place of the last
// product is taken by a router of 8 x 128 and eight experts of 3 x 128 x 64.
TEST(RefitBench, EachRankOfAnEngineGetsItsPartFromThoseThatHaveIt) {
  constexpr int64_t kAttention = 128 * 512 + 256 * 128, kMlp = 3 * 128 * 256, kNorms = 384, kTable = 512 * 128;
  constexpr int64_t kWhole = 2 * (kAttention + kMlp + kNorms) + kTable + 128;
  constexpr int64_t kHalf = 2 * ((kAttention + kMlp) / 2 + kNorms) + kTable / 2 + 128;
  constexpr int64_t kHalfMixture = 2 * (kAttention / 2 + kNorms + 8 * 128 + 4 * 3 * 128 * 64) + kTable / 2 + 128;
  for (const Split& split :
       {Split{"tiny", {.tp = 2}, {}, 0, 3, kWhole, 2}, Split{"tiny", {}, {.tp = 2}, 0, 3, kHalf, 1},
        Split{"tiny", {.pp = 2}, {.tp = 2}, 0, 4, kHalf, 2}, Split{"tiny", {}, {.tp = 2}, 2, 6, kHalf, 1},
        Split{"tiny-moe", {.ep = 2}, {.tp = 2, .ep = 2}, 0, 4, kHalfMixture, 2}}) {
    nlohmann::json report;
    ListeningPort port;
    std::ostringstream out;
    const auto errors = test::on_ranks(split.ranks, [&](int rank) {
      RendezvousOptions rendezvous = port.place(rank, split.ranks, Milliseconds(250000));
      RefitBenchOptions options;
      options.common.shape = split.shape;
      options.common.device = "cpu";
      options.common.repeats = 1;
      options.training = split.training;
      options.engine = split.engine;
      options.actors = split.actors;
      options.link.store_port = rendezvous.master_port;
      options.link.deadline = rendezvous.timeout;
      ParallelContext context(Layout{.dp = split.ranks}, rendezvous);
      std::ostringstream ignored;
      nlohmann::json own = bench_refit(options, context, rank == 0 ? out : ignored);
      if (rank == 0) report = std::move(own);
    });
    for (const std::string& error : errors) ASSERT_EQ(error, "") << split.shape;
    const int64_t actors = split.actors > 0 ? split.actors : split.training.copy_ranks() * split.training.pp;
    EXPECT_TRUE(report.at("same_bits").get<bool>());
    EXPECT_EQ(report.at("actors"), actors);
    EXPECT_EQ(report.at("engines"), (split.ranks - actors) / split.engine.tp);
    EXPECT_EQ(report.at("bytes"), 4 * split.elements) << to_string(split.training);
    EXPECT_EQ(report.at("sources"), split.sources);
    EXPECT_GT(report.at("bytes_per_second").get<double>(), 0);
    EXPECT_FALSE(report.contains("forward_seconds"));  // nobody computes with a part of a model
    EXPECT_MENTIONS(out.str(), "the same bits");
  }
}

TEST(RefitBench, RanksAndLayoutsThatDoNotFitAreRefused) {
  const auto refusal = [](const Layout& training, const Layout& engine, int64_t actors = 0) {
    ParallelContext alone;
    RefitBenchOptions options;
    options.common.shape = "tiny";
    options.common.device = "cpu";
    options.training = training;
    options.engine = engine;
    options.actors = actors;
    std::ostringstream out;
    return test::user_error_of([&] { bench_refit(options, alone, out); });
  };
  EXPECT_MENTIONS(refusal({}, {}), "needs at least 2 ranks, the first 1 to train and 1 for each engine, not 1");
  EXPECT_MENTIONS(refusal({.tp = 2, .pp = 2}, {.tp = 2}), "needs at least 6 ranks");
  EXPECT_MENTIONS(refusal({.ep = 8}, {}), "needs at least 9 ranks");
}

}  // namespace
}  // namespace trireme::bench
