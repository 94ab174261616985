// bench step --engines: a step of the trainer whose responses another process generates; here both are threads.
#include <gtest/gtest.h>

#include <csignal>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/errors.h"
#include "tests/unit/parallel/listening.h"
#include "trainer/bench/engines_bench.h"
#include "trainer/telemetry/phases.h"

namespace trireme::bench {
namespace {

StepBenchOptions small_step_apart() {
  StepBenchOptions options;
  options.common.shape = "tiny";
  options.common.layers = 1;
  options.common.device = "cpu";
  options.common.repeats = 2;
  options.lengths = "synthetic:2x4:mean=10:max=20:prompt=6";
  options.optimizer_steps = 2;
  options.train_tokens = 64;
  options.generation.max_sequences = 6;  // of 8 samples
  options.collective_timeout_s = 250;
  options.engines = 1;
  return options;
}

struct Apart {
  nlohmann::json report;
  std::string text;
};

Apart run_apart(const StepBenchOptions& options, int world = 2) {
  std::signal(SIGPIPE, SIG_IGN);  // as cli_main does
  ListeningPort port;
  Apart apart;
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::thread> processes;
  for (int rank = 0; rank < world; ++rank) {
    processes.emplace_back([&, rank] {
      try {
        std::ostringstream out;
        nlohmann::json report = bench_step_with_engines(options, port.place(rank, world, Milliseconds(250000)), out);
        if (rank == 0) apart = {std::move(report), out.str()};
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& process : processes) process.join();
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  return apart;
}

TEST(EnginesBench, InTurnAStepWaitsForItsResponses) {
  const TemporaryDirectory dir;
  StepBenchOptions options = small_step_apart();
  options.common.json = (dir.path() / "step.json").string();
  const auto [report, text] = run_apart(options);
  ASSERT_TRUE(report.contains("engines"));
  EXPECT_EQ(report.at("benchmark"), "step");
  EXPECT_EQ(report.at("engines"), 1);
  EXPECT_EQ(report.at("ranks"), 1);
  EXPECT_EQ(report.at("samples"), 8);
  EXPECT_EQ(report.at("optimizer_steps"), 2);
  EXPECT_EQ(report.at("seconds_of_repeats").size(), 2u);
  EXPECT_EQ(report.at("mismatched_tokens"), 0);
  EXPECT_GT(report.at("compared_tokens"), 0);
  EXPECT_GT(report.at("exposed_generation_seconds"), 0);
  EXPECT_GT(report.at("phases").at("training"), 0);
  EXPECT_EQ(report.at("ages").at("train/max_trajectory_age"), 0);
  EXPECT_TRUE(report.at("of_critic").empty());
  EXPECT_NE(text.find("step tiny, 1 ranks, 1 engines"), std::string::npos) << text;
  EXPECT_EQ(nlohmann::json::parse(read_file(dir.path() / "step.json")), report);
}

// Both sides have two tensor ranks, so that the loss gives each token the sampler's bits.
TEST(EnginesBench, RanksThatSplitAPolicyAndRanksOfAnEngine) {
  StepBenchOptions options = small_step_apart();
  options.common.tp = options.engine_tp = 2;
  const auto [report, text] = run_apart(options, 4);
  ASSERT_TRUE(report.contains("engines"));
  EXPECT_EQ(report.at("engines"), 1);
  EXPECT_EQ(report.at("engine_tp"), 2);
  EXPECT_EQ(report.at("ranks"), 2);
  EXPECT_EQ(report.at("tp"), 2);
  EXPECT_EQ(report.at("mismatched_tokens"), 0);
  EXPECT_GT(report.at("compared_tokens"), 0);
  EXPECT_DOUBLE_EQ(4 * report.at("samples_per_second_per_device").get<double>(),
                   report.at("samples_per_second").get<double>());
  EXPECT_NE(text.find("step tiny, 2 ranks, 1 engines of 2"), std::string::npos) << text;
}

TEST(EnginesBench, InFlightWithACritic) {
  StepBenchOptions options = small_step_apart();
  options.carry_over = 1;
  options.ratio_from = "generation";
  options.critic = true;
  const auto [report, text] = run_apart(options);
  ASSERT_TRUE(report.contains("engines"));
  EXPECT_EQ(report.at("carry_over"), 1);
  EXPECT_EQ(report.at("mismatched_tokens"), 0);
  EXPECT_LE(report.at("ages").at("train/max_trajectory_age"), 1);
  EXPECT_GT(report.at("of_critic").at("timing/train/value_training"), 0);
  EXPECT_TRUE(report.at("of_critic").contains("critic/explained_var"));
  EXPECT_NE(text.find("older tokens: "), std::string::npos) << text;
  EXPECT_NE(text.find("of the critic: values "), std::string::npos) << text;
}

TEST(EnginesBench, WhatItHasNoUseForIsRefused) {
  const auto refusal = [](StepBenchOptions options, int world = 2) {
    RendezvousOptions place;
    place.world_size = world;
    std::ostringstream out;
    return test::user_error_of([&] { (void)bench_step_with_engines(options, place, out); });
  };
  StepBenchOptions options = small_step_apart();
  EXPECT_MENTIONS(refusal(options, 1), "needs as many processes and one that trains");
  options.engine_tp = 2;
  EXPECT_MENTIONS(refusal(options), "--engines 1 of --engine-tp 2 needs as many processes");
  options.engine_tp = 3;
  EXPECT_MENTIONS(refusal(options, 4),
                  "--engine-tp 3: an engine cannot split the model of tiny so: tp 3 does not divide");
  options = small_step_apart();
  options.common.tp = 2;
  EXPECT_MENTIONS(refusal(options), "--tp 2 times --cp 1 times --pp 1 does not divide the 1 ranks");
  options = small_step_apart();
  options.early_gradients = true;
  EXPECT_MENTIONS(refusal(options), "is for generation on the same device");
}

}  // namespace
}  // namespace trireme::bench
