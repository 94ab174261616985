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

TEST(RefitBench, OneRankIsTooFew) {
  ParallelContext alone;
  std::ostringstream out;
  EXPECT_MENTIONS(test::user_error_of([&] { bench_refit({}, alone, out); }), "at least two ranks");
}

}  // namespace
}  // namespace trireme::bench
