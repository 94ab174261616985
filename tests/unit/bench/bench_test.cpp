// The benchmarks themselves on the tiny shape and the CPU: what they report and write, and that they see a mismatch.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>
#include <sstream>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/errors.h"
#include "tests/unit/parallel/listening.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/bench/checkpoint_bench.h"
#include "trainer/bench/ops_bench.h"
#include "trainer/bench/rollout_bench.h"
#include "trainer/bench/step_bench.h"
#include "trainer/bench/trace.h"
#include "trainer/bench/train_bench.h"
#include "trainer/bench/work.h"
#include "trainer/telemetry/phases.h"

namespace trireme::bench {
namespace {

CommonOptions tiny(const std::filesystem::path& json = {}) {
  CommonOptions options;
  options.shape = "tiny";
  options.layers = 1;
  options.device = "cpu";
  options.repeats = 2;
  options.json = json.string();
  return options;
}

void expect_header(const nlohmann::json& report, const std::string& benchmark, const std::string& shape = "tiny") {
  EXPECT_EQ(report.at("benchmark"), benchmark);
  EXPECT_EQ(report.at("shape"), shape);
  EXPECT_EQ(report.at("layers"), 1);
  EXPECT_EQ(report.at("dtype"), "float32");
  EXPECT_EQ(report.at("device_kind"), "cpu");
  EXPECT_FALSE(report.at("device").get<std::string>().empty());
  EXPECT_EQ(report.at("date").get<std::string>().size(), std::string("2026-01-31T12:34:56Z").size());
  for (const char* part : {"trireme", "libtorch", "compiler"}) EXPECT_TRUE(report.at("versions").contains(part));
  EXPECT_GT(report.at("copy_bytes_per_second"), 0);
  EXPECT_GT(report.at("matmul_flops_per_second"), 0);
}

TEST(RolloutBench, ReportsTheWorkloadItRanAndNoMismatch) {
  const TemporaryDirectory dir;
  RolloutBenchOptions options;
  options.common = tiny(dir.path() / "rollout.json");
  options.lengths = "synthetic:2x3:mean=12:max=30:prompt=9:seed=5";
  options.score_tokens = 40;
  std::ostringstream out;
  ParallelContext alone;
  const nlohmann::json report = bench_rollout(options, alone, out);
  EXPECT_EQ(nlohmann::json::parse(read_file(dir.path() / "rollout.json")), report);
  expect_header(report, "rollout");
  const RolloutLengths lengths = load_lengths(options.lengths);
  EXPECT_EQ(report.at("lengths"), options.lengths);
  EXPECT_EQ(report.at("tokens"), lengths.output_tokens());
  EXPECT_EQ(report.at("scored_tokens"), lengths.output_tokens());
  EXPECT_EQ(report.at("mismatched_tokens"), 0);
  EXPECT_EQ(report.at("repeat_mismatched_tokens"), 0);
  EXPECT_EQ(report.at("largest_logprob_difference"), 0);
  EXPECT_GT(report.at("seconds"), 0);
  EXPECT_EQ(report.at("seconds_of_repeats").size(), 2u);
  EXPECT_NEAR(report.at("tokens_per_second").get<double>() * report.at("seconds").get<double>(),
              static_cast<double>(lengths.output_tokens()), 1e-6);
  const RolloutWork work =
      rollout_work(find_shape("tiny", 1), lengths.prompt_of_each_sample(), lengths.outputs, 4, 256);
  const double ceiling =
      std::max(report.at("copy_bytes_per_second").get<double>(), report.at("read_bytes_per_second").get<double>());
  EXPECT_NEAR(report.at("floor_seconds").get<double>() * ceiling, work.bytes(), 1e-6 * work.bytes());
  EXPECT_EQ(report.at("floor_steps"), 30);
  EXPECT_GE(report.at("steps"), 30);
  int64_t steps = 0;
  for (const nlohmann::json& bin : report.at("steps_by_alive")) steps += bin.at("steps").get<int64_t>();
  EXPECT_GE(steps, 29);
  EXPECT_LE(steps, report.at("steps").get<int64_t>());
  EXPECT_NE(out.str().find("floor seconds"), std::string::npos);
}

// More samples than places, and ends that the scheduler does not know: the same tokens, other steps.
TEST(RolloutBench, AdmitsWhileItGeneratesAndEndsAsByAStopToken) {
  RolloutBenchOptions options;
  options.common = tiny();
  options.lengths = "synthetic:4x3:mean=12:max=30:prompt=9:seed=5";
  options.score_tokens = 100;
  std::ostringstream out;
  ParallelContext alone;
  for (const int64_t places : {3, 5}) {
    for (const bool unknown : {false, true}) {
      options.generation.max_sequences = places;
      options.generation.unknown_ends = unknown;
      const nlohmann::json report = bench_rollout(options, alone, out);
      const int64_t tokens = load_lengths(options.lengths).output_tokens();
      EXPECT_EQ(report.at("tokens"), tokens);
      EXPECT_EQ(report.at("scored_tokens"), report.at("tokens"));
      EXPECT_EQ(report.at("mismatched_tokens"), 0);
      EXPECT_EQ(report.at("repeat_mismatched_tokens"), 0);
      EXPECT_EQ(report.at("ends_known"), !unknown);
      EXPECT_EQ(report.at("max_sequences"), places);
      EXPECT_LE(report.at("mean_batch"), static_cast<double>(places));
      EXPECT_GE(report.at("floor_steps"), tokens / places);
    }
  }
}

TEST(RolloutBench, RefusesSamplesLongerThanTheShapeKnows) {
  RolloutBenchOptions options;
  options.common = tiny();
  options.lengths = "synthetic:1x1:mean=5000:max=5000";
  std::ostringstream out;
  ParallelContext alone;
  EXPECT_THROW(bench_rollout(options, alone, out), Error);
}

TEST(CompareLogprobs, CountsEveryTokenWhoseBitsDiffer) {
  const auto model = make_random_model(find_shape("tiny", 1), {}, 1);
  const RolloutLengths lengths = synthetic_lengths("synthetic:2x2:mean=7:max=9:prompt=4");
  const auto prompts = random_prompts(lengths, 512, 1);
  const SamplingOptions sampling = sampling_options({}, 1);
  Engine engine(*model, nullptr, engine_options({}, lengths, 1), sampling);
  std::vector<Sample> samples = as_samples(timed_rollout(engine, lengths, prompts, at::kCPU).groups);
  ASSERT_EQ(samples.size(), 4u);
  for (size_t s = 0; s < samples.size(); ++s)
    EXPECT_EQ(static_cast<int64_t>(samples[s].response.size()), lengths.outputs[s]);
  EXPECT_EQ(compare_logprobs(*model, samples, sampling.logprob_options(), 30).mismatched, 0);
  float& value = samples[2].generation_logprobs[3];
  value = std::nextafter(value, 0.0f);
  samples[0].generation_logprobs[0] -= 0.5f;
  const LogprobComparison compared = compare_logprobs(*model, samples, sampling.logprob_options(), 30);
  EXPECT_EQ(compared.tokens, lengths.output_tokens());
  EXPECT_EQ(compared.mismatched, 2);
  EXPECT_NEAR(compared.largest_difference, 0.5, 1e-5);
}

TEST(DecodeBench, ReportsARowForEachNumberOfSamples) {
  DecodeBenchOptions options;
  options.common = tiny();
  options.batch_sizes = {3, 1};
  options.context = 40;
  options.steps = 6;
  std::ostringstream out;
  ParallelContext alone;
  const nlohmann::json report = bench_decode(options, alone, out);
  expect_header(report, "decode");
  ASSERT_EQ(report.at("rows").size(), 2u);
  const nlohmann::json& row = report.at("rows")[0];
  EXPECT_EQ(row.at("alive"), 3);
  EXPECT_NEAR(row.at("context").get<double>(), 40, 1);
  EXPECT_GT(row.at("milliseconds"), 0);
  const ModelConfig config = find_shape("tiny", 1);
  EXPECT_NEAR(
      row.at("bytes").get<double>(),
      decode_weight_bytes(config, 4, 3) + 3 * row.at("context").get<double>() * context_bytes_per_token(config, 4), 1);
  options.context = 10;
  EXPECT_THROW(bench_decode(options, alone, out), Error);
}

TEST(DecodeBench, WritesATraceForEachNumberOfSamples) {
  const TemporaryDirectory folder;
  DecodeBenchOptions options;
  options.common = tiny();
  options.common.repeats = 1;
  options.batch_sizes = {2, 1};
  options.context = 40;
  options.steps = 2;
  options.trace = (folder.path() / "trace.json").string();
  std::ostringstream out;
  ParallelContext alone;
  bench_decode(options, alone, out);
  for (const char* ending : {".2", ".1"}) {
    const nlohmann::json trace = nlohmann::json::parse(read_file(options.trace + ending));
    EXPECT_GT(trace.at("traceEvents").size(), 10u) << ending;
  }
  options.trace = (folder.path() / "nowhere" / "trace.json").string();
  EXPECT_THROW(bench_decode(options, alone, out), Error);
}

TEST(Trace, WhatAKernelAddsIsWhatRanBesideNothingBefore) {
  // a 0-10, b 5-12 begins under it, a 15-20 after a pause, c 16-18 wholly under it.
  const Trace trace = summarize({{"a", 0, 10}, {"c", 16, 18}, {"b", 5, 12}, {"a", 15, 20}});
  EXPECT_DOUBLE_EQ(trace.seconds, 20e-9);
  ASSERT_EQ(trace.kernels.size(), 3u);
  const TracedKernel& a = trace.kernels[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.calls, 2);
  EXPECT_DOUBLE_EQ(a.seconds, 15e-9);
  EXPECT_DOUBLE_EQ(a.alone, 15e-9);
  EXPECT_DOUBLE_EQ(a.idle, 3e-9);
  EXPECT_EQ(trace.kernels[1].name, "b");
  EXPECT_DOUBLE_EQ(trace.kernels[1].seconds, 7e-9);
  EXPECT_DOUBLE_EQ(trace.kernels[1].alone, 2e-9);
  EXPECT_DOUBLE_EQ(trace.kernels[1].idle, 0);
  EXPECT_DOUBLE_EQ(trace.kernels[2].alone, 0);
}

TEST(TrainBench, CountsModelFlopsOfItsMicroBatches) {
  TrainBenchOptions options;
  options.common = tiny();
  options.tokens = 96;
  options.sequences = 3;
  options.prompt_tokens = 8;
  options.micro_batches = 2;
  ParallelContext alone;
  std::ostringstream out;
  const nlohmann::json report = bench_train(options, alone, out);
  expect_header(report, "train");
  const int64_t scored = 3 * (32 - 8 + 1);  // the last prompt row predicts the first answer token
  EXPECT_EQ(report.at("scored_tokens"), 2 * scored);
  const double flops = 2 * training_flops(find_shape("tiny", 1), std::vector<int64_t>{32, 32, 32}, scored);
  EXPECT_NEAR(report.at("model_flops_per_device").get<double>(), flops, 1);
  EXPECT_NEAR(report.at("flops_per_second").get<double>() * report.at("seconds").get<double>(), flops, 1e-6 * flops);
  for (const char* part : {"forward_seconds", "backward_seconds", "optimizer_seconds"})
    EXPECT_GT(report.at("split").at(part), 0) << part;
  const std::string weights = report.at("weights_fingerprint");
  EXPECT_EQ(weights.size(), 16u);
  EXPECT_EQ(bench_train(options, alone, out).at("weights_fingerprint"), weights);
  options.common.seed = 2;
  EXPECT_NE(bench_train(options, alone, out).at("weights_fingerprint"), weights);
  options.prompt_tokens = 40;
  EXPECT_THROW(bench_train(options, alone, out), Error);
}

StepBenchOptions small_step() {
  StepBenchOptions options;
  options.common = tiny();
  options.lengths = "synthetic:2x4:mean=10:max=20:prompt=6";
  options.optimizer_steps = 2;
  options.reference = true;
  options.train_tokens = 64;
  return options;
}

void expect_step(const nlohmann::json& report, const std::string& shape = "tiny") {
  expect_header(report, "step", shape);
  EXPECT_EQ(report.at("samples"), 8);
  EXPECT_EQ(report.at("optimizer_steps"), 2);
  EXPECT_EQ(report.at("global_batch_size"), 4);
  EXPECT_EQ(report.at("mismatched_tokens"), 0);
  EXPECT_EQ(report.at("compared_optimizer_steps"), 1);
  EXPECT_GT(report.at("compared_tokens"), 0);
  EXPECT_LT(report.at("compared_tokens").get<int64_t>(), 2 * report.at("answer_tokens").get<int64_t>());
  EXPECT_TRUE(report.at("linear_rows_exact"));
  EXPECT_GT(report.at("grad_norm"), 0);
  double sum = 0;
  for (const Phase phase : all_phases()) sum += report.at("phases").at(to_string(phase)).get<double>();
  // The phases are those of the run nearest to the median, which with an even number of runs lies between two.
  const double slowest = report.at("seconds_of_repeats")[0], fastest = report.at("seconds_of_repeats")[1];
  EXPECT_GE(sum, std::min(slowest, fastest) * (1 - 1e-9));
  EXPECT_LE(sum, std::max(slowest, fastest) * (1 + 1e-9));
  for (const char* phase : {"generation", "logprobs", "training"}) {
    EXPECT_GT(report.at("phases").at(phase), 0) << phase;
    EXPECT_GT(report.at("floors").at(phase), 0) << phase;
  }
}

TEST(StepBench, OneRankReportsPhasesThatAddUp) {
  ParallelContext alone;
  std::ostringstream out;
  const nlohmann::json report = bench_step(small_step(), alone, out);
  expect_step(report);
  EXPECT_EQ(report.at("ranks"), 1);
  EXPECT_NE(out.str().find("generation"), std::string::npos);
}

TEST(StepBench, FloorsCountASharedPromptOnce) {
  ParallelContext alone;
  std::ostringstream out;
  StepBenchOptions options = small_step();
  const auto operations = [&](const char* phase) {
    const nlohmann::json report = bench_step(options, alone, out);
    return report.at("floors").at(phase).get<double>() * report.at("matmul_flops_per_second").get<double>();
  };
  const ModelConfig config = find_shape("tiny", 1);
  const RolloutLengths lengths = load_lengths(options.lengths);
  for (const bool shared : {false, true}) {
    options.share_prompts = shared;
    const double expected =
        training_flops(config, training_pieces(lengths.prompts, lengths.outputs, shared), lengths.output_tokens());
    EXPECT_NEAR(operations("training"), expected, 1e-6 * expected);
    EXPECT_NEAR(operations("logprobs"), expected / 3, 1e-6 * expected);
  }
}

TEST(Bench, BlocksOfExpertsAreThoseAskedFor) {
  CommonOptions options;
  options.shape = "qwen3-30b-a3b";
  EXPECT_EQ(resolve(options).model_options(false).combine_blocks, 0);
  options.combine_blocks = options.ep = 2;
  EXPECT_EQ(resolve(options).model_options(true).combine_blocks, 2);
  options.ep = 4;
  EXPECT_MENTIONS(test::user_error_of([&] { resolve(options); }), "ep 4 does not divide the 2 blocks");
  options.combine_blocks = 3;
  EXPECT_MENTIONS(test::user_error_of([&] { resolve(options); }), "which does not divide the model's 128 experts");
  options.shape = "tiny";
  options.ep = 1;
  EXPECT_MENTIONS(test::user_error_of([&] { resolve(options); }), "the shape tiny has no experts");
}

// Replicas of their own, and such that share experts.
class StepOfTwo : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(StepBench, StepOfTwo, ::testing::Values(1, 2),
                         [](const auto& info) { return "ep" + std::to_string(info.param); });

TEST_P(StepOfTwo, RanksShareOneStep) {
  const int64_t ep = GetParam();
  const std::string shape = ep > 1 ? "tiny-moe" : "tiny";
  const TemporaryDirectory dir;
  ListeningPort port;
  std::vector<nlohmann::json> reports(2);
  std::vector<std::string> errors(2), texts(2);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        ParallelContext context({.ep = ep, .dp = 2}, port.place(rank, 2, Milliseconds(250000)));
        StepBenchOptions options = small_step();
        options.common.ep = ep;
        options.common.shape = shape;
        options.common.json = (dir.path() / "step.json").string();
        std::ostringstream out;
        reports[static_cast<size_t>(rank)] = bench_step(options, context, out);
        texts[static_cast<size_t>(rank)] = out.str();
        context.world().barrier();
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : ranks) thread.join();
  ASSERT_EQ(errors[0], "");
  ASSERT_EQ(errors[1], "");
  expect_step(reports[0], shape);
  EXPECT_EQ(reports[0].at("ranks"), 2);
  EXPECT_EQ(reports[0].at("ep"), ep);
  EXPECT_EQ(reports[0].at("mismatched_tokens"), reports[1].at("mismatched_tokens"));
  const auto shares = reports[0].at("samples_of_ranks").get<std::vector<int64_t>>();
  EXPECT_EQ(shares.size(), 2u);
  EXPECT_EQ(shares[0] + shares[1], 8);
  EXPECT_EQ(reports[0].at("generation_idle_seconds_of_ranks").size(), 2u);
  EXPECT_TRUE(texts[1].empty());  // rank 0 speaks
  EXPECT_EQ(nlohmann::json::parse(read_file(dir.path() / "step.json")), reports[0]);
}

TEST(StepBench, CarryOverFillsThePlacesOfTheLastResponses) {
  ParallelContext alone;
  for (const bool keep : {false, true}) {
    std::ostringstream out;
    StepBenchOptions options = small_step();
    options.generation.max_sequences = 6;  // of 8 samples
    options.carry_over = 1;
    options.keep_cache = keep;
    options.ratio_from = keep ? "generation" : "training";
    const nlohmann::json report = bench_step(options, alone, out);
    EXPECT_EQ(report.at("carry_over"), 1);
    EXPECT_EQ(report.at("mismatched_tokens"), 0);
    const nlohmann::json& ages = report.at("ages");
    EXPECT_GT(ages.at("train/stale_tokens"), 0);
    EXPECT_LE(ages.at("train/max_trajectory_age"), 1);
    EXPECT_EQ(ages.at("train/mixed_context_tokens").get<double>() > 0, keep);
    EXPECT_EQ(ages.at("train/recomputed_rows").get<double>() > 0, !keep);
    EXPECT_NE(out.str().find("older tokens: "), std::string::npos);
  }
}

TEST(StepBench, CarryOverOfAModelThatRanksShare) {
  for (const Layout& layout : {Layout{.tp = 2}, Layout{.pp = 2}, Layout{.ep = 2, .dp = 2}}) {
    SCOPED_TRACE(to_string(layout));
    test::on_layout(layout, [&](ParallelContext& context) {
      StepBenchOptions options = small_step();
      options.common.layers = 2;
      options.common.tp = layout.tp;
      options.common.pp = layout.pp;
      options.common.ep = layout.ep;
      if (layout.ep > 1) options.common.shape = "tiny-moe";
      options.generation.max_sequences = layout.dp > 1 ? 3 : 6;  // of 8 samples
      options.carry_over = 1;
      std::ostringstream out;
      const nlohmann::json report = bench_step(options, context, out);
      EXPECT_EQ(report.at("mismatched_tokens"), 0);
      EXPECT_GT(report.at("ages").at("train/stale_tokens"), 0);
      EXPECT_LE(report.at("ages").at("train/max_trajectory_age"), 1);
      EXPECT_EQ(static_cast<int64_t>(report.at("samples_of_ranks").size()), layout.dp);
    });
  }
}

TEST(StepBench, CarryOverGoesWithACritic) {
  ParallelContext alone;
  std::ostringstream out;
  StepBenchOptions options = small_step();
  options.generation.max_sequences = 6;  // of 8 samples
  options.carry_over = 1;
  options.critic = true;
  const nlohmann::json report = bench_step(options, alone, out);
  EXPECT_EQ(report.at("mismatched_tokens"), 0);
  EXPECT_GT(report.at("ages").at("train/stale_tokens"), 0);
  EXPECT_LE(report.at("ages").at("train/max_trajectory_age"), 1);
  EXPECT_GT(report.at("of_critic").at("timing/train/value_inference"), 0);
}

TEST(StepBench, ACriticBesideTheActorIsMeasuredByPhase) {
  ParallelContext alone;
  StepBenchOptions options = small_step();
  std::ostringstream out;
  const nlohmann::json without = bench_step(options, alone, out);
  EXPECT_EQ(without.at("critic"), false);
  EXPECT_TRUE(without.at("of_critic").empty());
  EXPECT_EQ(out.str().find("of the critic: "), std::string::npos);
  options.critic = true;
  const nlohmann::json report = bench_step(options, alone, out);
  expect_step(report);  // the actor's optimizer steps and its log-probs are those of GRPO
  EXPECT_EQ(report.at("critic"), true);
  EXPECT_NE(out.str().find("of the critic: values "), std::string::npos);
  const nlohmann::json& critic = report.at("of_critic");
  const nlohmann::json& phases = report.at("phases");
  // Its seconds are within its phases, of which the reference and the actor have a part too.
  EXPECT_EQ(critic.at("performance/values_under_generation"), 0) << "no part of a CPU is for them";
  EXPECT_GT(critic.at("timing/train/value_inference"), 0);
  EXPECT_LE(critic.at("timing/train/value_inference"), phases.at("logprobs"));
  EXPECT_GT(critic.at("timing/train/value_training"), 0);
  EXPECT_LT(critic.at("timing/train/value_training"), phases.at("training"));
  EXPECT_GT(critic.at("critic/grad_norm"), 0);
  EXPECT_GT(critic.at("critic/loss"), 0);
  EXPECT_LT(critic.at("critic/values_min"), critic.at("critic/values_max"));
  const auto operations = [](const nlohmann::json& json, const char* phase) {
    return json.at("floors").at(phase).get<double>() * json.at("matmul_flops_per_second").get<double>();
  };
  const RolloutLengths lengths = load_lengths(options.lengths);
  const double values = forward_flops(find_shape("tiny", 1).with_value_head(),
                                      training_pieces(lengths.prompts, lengths.outputs, /*share_prompts=*/false),
                                      lengths.output_tokens());
  const double tolerance = 1e-6 * operations(report, "training");
  EXPECT_NEAR(operations(report, "logprobs") - operations(without, "logprobs"), values, tolerance);
  EXPECT_NEAR(operations(report, "training") - operations(without, "training"), 3 * values, tolerance);
}

TEST(StepBench, ACriticIsSplitAsTheActorIs) {
  for (const Layout& layout : {Layout{.tp = 2}, Layout{.pp = 2}}) {
    test::on_layout(layout, [&](ParallelContext& context) {
      StepBenchOptions options = small_step();
      options.common.layers = 2;
      options.common.tp = layout.tp;
      options.common.pp = layout.pp;
      options.critic = true;
      std::ostringstream out;
      const nlohmann::json report = bench_step(options, context, out);
      EXPECT_EQ(report.at("mismatched_tokens"), 0) << to_string(layout);
      const nlohmann::json& critic = report.at("of_critic");
      EXPECT_GT(critic.at("critic/grad_norm"), 0) << to_string(layout);
      EXPECT_LT(critic.at("critic/values_min"), critic.at("critic/values_max")) << to_string(layout);
    });
  }
}

TEST(StepBench, ACriticIsRefusedWhereARunWouldRefuseIt) {
  ParallelContext alone;
  std::ostringstream out;
  StepBenchOptions options = small_step();
  options.critic = true;
  options.early_gradients = true;
  const std::string error = test::error_of([&] { bench_step(options, alone, out); });
  EXPECT_NE(error.find("--critic"), std::string::npos) << error;
}

TEST(StepBench, ImpossibleArithmeticIsNamed) {
  ParallelContext alone;
  std::ostringstream out;
  StepBenchOptions options = small_step();
  options.optimizer_steps = 3;
  EXPECT_THROW(bench_step(options, alone, out), Error);
  options = small_step();
  options.lengths = "synthetic:4x1:mean=10:max=20";
  EXPECT_THROW(bench_step(options, alone, out), Error);
}

TEST(OpsBench, MeasuresEveryOperation) {
  OpsBenchOptions options;
  options.common = tiny();
  options.rows = {2, 5};
  options.decode_samples = {3};
  options.decode_context = 20;
  options.packed_tokens = 32;
  std::ostringstream out;
  const nlohmann::json report = bench_ops(options, out);
  expect_header(report, "ops");
  std::set<std::string> kinds;
  for (const nlohmann::json& op : report.at("ops")) {
    const std::string name = op.at("name");
    kinds.insert(name.substr(0, name.find_first_of(" ,")));
    EXPECT_GT(op.at("microseconds"), 0) << name;
    EXPECT_GT(op.at("floor_microseconds"), 0) << name;
    EXPECT_GT(op.at("bytes"), 0) << name;
  }
  EXPECT_EQ(kinds, (std::set<std::string>{"linear", "add_rms_norm", "swiglu_halves", "split_qkv", "token_logprobs",
                                          "attention", "adamw"}));
}

TEST(Median, IsTheMiddleOrTheMeanOfTheTwo) {
  EXPECT_EQ(median({3, 1, 2}), 2);
  EXPECT_EQ(median({4, 1, 2, 3}), 2.5);
}

TEST(CheckpointBench, ReportsStallAndRateAndLeavesNothing) {
  const TemporaryDirectory dir;
  CheckpointBenchOptions options;
  options.common = tiny(dir.path() / "checkpoint.json");
  options.directory = (dir.path() / "disk").string();
  options.generation_seconds = 0.01;
  std::ostringstream out;
  ParallelContext alone;
  const nlohmann::json report = bench_checkpoint(options, alone, out);
  EXPECT_EQ(nlohmann::json::parse(read_file(dir.path() / "checkpoint.json")), report);
  EXPECT_EQ(report.at("benchmark"), "checkpoint");
  EXPECT_EQ(report.at("shape"), "tiny");
  EXPECT_EQ(report.at("ranks"), 1);
  // Weights, master weights and two moments, all float32 here; the latter three are padded to whole buckets.
  const int64_t parameters = report.at("parameters").get<int64_t>();
  EXPECT_GE(report.at("bytes").get<int64_t>(), 16 * parameters);
  EXPECT_LT(report.at("bytes").get<int64_t>(), 17 * parameters);
  EXPECT_EQ(report.at("stall_seconds_of_repeats").size(), 2u);
  EXPECT_GT(report.at("stall_seconds").get<double>(), 0);
  EXPECT_GE(report.at("written_seconds").get<double>(), 0);
  EXPECT_GT(report.at("bytes_per_second").get<double>(), 0);
  EXPECT_GT(report.at("forward_seconds_beside").get<double>(), 0);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path() / "disk"));
  EXPECT_NE(out.str().find("stall of a step"), std::string::npos);

  // A slow disk that is only imagined.
  options.disk_gigabytes_per_second = static_cast<double>(report.at("bytes").get<int64_t>()) / 1e9 / 0.5;
  options.common.repeats = 1;
  const nlohmann::json slow = bench_checkpoint(options, alone, out);
  EXPECT_GT(slow.at("written_seconds").get<double>(), 0.2);
}

}  // namespace
}  // namespace trireme::bench
