// bench step --engines: a step of the trainer whose responses another process generates; here both are threads.
#include <gtest/gtest.h>

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

Apart run_apart(const StepBenchOptions& options) {
  ListeningPort port;
  Apart apart;
  std::vector<std::string> errors(2);
  std::vector<std::thread> processes;
  for (int rank = 0; rank < 2; ++rank) {
    processes.emplace_back([&, rank] {
      try {
        std::ostringstream out;
        nlohmann::json report = bench_step_with_engines(options, port.place(rank, 2, Milliseconds(250000)), out);
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
  options.common.tp = 2;
  EXPECT_MENTIONS(refusal(options), "a model that is not split");
  options = small_step_apart();
  options.early_gradients = true;
  EXPECT_MENTIONS(refusal(options), "is for generation on the same device");
}

}  // namespace
}  // namespace trireme::bench
