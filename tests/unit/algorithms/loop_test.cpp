// The training loops as a whole, in this process: tiny models, one rank.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/errors.h"
#include "tests/unit/model/tiny.h"
#include "tests/unit/parallel/listening.h"
#include "trainer/algorithms/dynamic_sampling.h"
#include "trainer/algorithms/grpo.h"
#include "trainer/algorithms/sft.h"
#include "trainer/model/model.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

// A folder with a model of 20,000 parameters and problems whose answers are digits.
class Place final {
 public:
  Place() {
    make_byte_tokenizer(model());
    ModelConfig config = test::tiny_config(
        {.vocab = kByteVocabSize, .heads = 2, .kv_heads = 1, .head_dim = 16, .initializer_range = 0.3});
    config.eos_token_ids = {kByteImEnd};
    init_model(model(), config, 3);
    std::ostringstream rows;
    for (int i = 0; i < 24; ++i)
      rows << nlohmann::json{{"input", std::to_string(i) + "+1="}, {"output", std::to_string(i + 1)}}.dump() << "\n";
    write_file_atomic(data(), rows.str());
  }

  fs::path model() const { return dir_.path() / "model"; }
  fs::path data() const { return dir_.path() / "data.jsonl"; }
  fs::path checkpoints() const { return dir_.path() / "checkpoints"; }
  std::vector<nlohmann::json> log() const {
    std::vector<nlohmann::json> lines;
    std::ifstream file(dir_.path() / "logs" / "train.jsonl");
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  std::vector<std::string> settings(const std::vector<std::string>& more) const {
    std::vector<std::string> all = {"policy.model_name=" + model().string(),
                                    "data.train.data_path=" + data().string(),
                                    "data.validation.data_path=" + data().string(),
                                    "data.apply_chat_template=false",
                                    "data.train.input_key=input",
                                    "data.train.output_key=output",
                                    "data.validation.input_key=input",
                                    "data.validation.output_key=output",
                                    "checkpointing.checkpoint_dir=" + checkpoints().string(),
                                    "logger.log_dir=" + (dir_.path() / "logs").string(),
                                    "logger.prometheus.enabled=false",
                                    "logger.report=false",
                                    "policy.precision=float32",
                                    "policy.max_total_sequence_length=32",
                                    "cluster.device=cpu",
                                    "cluster.gpus_per_node=1"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  TrainSummary grpo(const std::vector<std::string>& more, const TrainOptions& options = {}) const {
    std::vector<std::string> all = settings(
        {"grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=16",
         "policy.train_micro_batch_size=4", "policy.generation.max_new_tokens=6",
         "policy.generation.max_running_samples=8", "policy.generation.kv_cache_tokens=2048", "grpo.max_num_steps=3",
         "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.max_val_samples=8",
         "grpo.val_batch_size=8", "env.format.enabled=true", "env.format.pattern=(1|2|3|4|5|6|7|8|9|a|e|i|o|u)"});
    all.insert(all.end(), more.begin(), more.end());
    return run_grpo(load_config_text("defaults: grpo.yaml\n", all, nullptr, configs() / "test.yaml"),
                    with_place(options));
  }

  TrainSummary sft(const std::vector<std::string>& more, const TrainOptions& options = {}) const {
    std::vector<std::string> all =
        settings({"policy.train_global_batch_size=8", "policy.train_micro_batch_size=4", "sft.max_num_steps=4",
                  "sft.max_num_epochs=10", "sft.val_period=0", "sft.val_at_start=false"});
    all.insert(all.end(), more.begin(), more.end());
    return run_sft(load_config_text("defaults: sft.yaml\n", all, nullptr, configs() / "test.yaml"),
                   with_place(options));
  }

 private:
  static fs::path configs() {
    const char* root = std::getenv("TRIREME_SOURCE_DIR");
    return (root != nullptr ? fs::path(root) : fs::current_path()) / "configs";
  }
  TrainOptions with_place(TrainOptions options) const {
    options.rendezvous = port_.place(0, 1, Milliseconds(60000));
    options.reporting.terminal = false;
    return options;
  }

  const TemporaryDirectory dir_;
  mutable ListeningPort port_;
};

TEST(GrpoLoop, PhasesAddUpToTheStepAndItsWaitsAreInThem) {
  const Place place;
  place.grpo({"checkpointing.enabled=true", "checkpointing.save_period=1"});
  const std::vector<nlohmann::json> log = place.log();
  ASSERT_EQ(log.size(), 3u);
  for (const nlohmann::json& step : log) {
    double sum = 0;
    for (const Phase phase : all_phases()) sum += step.at(timing_name(phase)).get<double>();
    const double total = step.at("timing/train/total_step_time").get<double>();
    EXPECT_NEAR(sum, total, 1e-6 * total);
    EXPECT_GT(step.at(timing_name(Phase::kGeneration)).get<double>(), 0);
    EXPECT_GT(step.at(timing_name(Phase::kTraining)).get<double>(), 0);
  }
  for (size_t s = 0; s < log.size(); ++s) {
    EXPECT_EQ(log[s].at("train/weight_version"), s);
    for (const char* name : {"avg_trajectory_age", "max_trajectory_age", "stale_tokens", "spanning_samples"})
      EXPECT_EQ(log[s].at(std::string("train/") + name), 0) << "strictly on-policy: " << name;
  }
  // An optimizer step asks whether a checkpoint must be waited for, which takes next to no time; saving takes some.
  const double nothing = log[0].at(timing_name(Phase::kCheckpoint)).get<double>();
  const double saved = log[1].at(timing_name(Phase::kCheckpoint)).get<double>();
  EXPECT_GT(saved, 10 * nothing) << "saving step 1 belongs to step 2";
  EXPECT_GT(saved, 1e-4);
}

TEST(GrpoLoop, DynamicSamplingTrainsOnAsManyGroupsAsWanted) {
  const Place place;
  place.grpo(
      {"grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5", "grpo.dynamic_sampling_max_gen_batches=50"});
  const std::vector<nlohmann::json> log = place.log();
  ASSERT_EQ(log.size(), 3u);
  for (const nlohmann::json& step : log) {
    const auto batches = step.at("train/dynamic_sampling_num_gen_batches").get<double>();
    EXPECT_EQ(step.at("train/num_generated_samples").get<double>(), batches * 6 * 4);
    EXPECT_EQ(step.at("train/num_valid_samples").get<double>(), 16);
  }
  const Place flat;  // no response is ever right: no group differs
  try {
    flat.grpo({"grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=2",
               "env.format.pattern=nothing that a model of bytes writes"});
    FAIL() << "trained on groups that teach nothing";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("after 2 generation batches only 0 of 4"), std::string::npos)
        << error.what();
  }
}

const std::vector<std::string> kCarryOver = {
    "grpo.async_grpo.enabled=true", "grpo.async_grpo.in_flight_weight_updates=true",
    "loss_fn.use_importance_sampling_correction=true", "loss_fn.reference_policy_kl_penalty=0",
    "policy.generation.max_new_tokens=20",
    // Responses of many lengths, and fewer places than a step has samples.
    "policy.generation.stop_token_ids=[200,201,202,203,204,205,206,207,208,"
    "209,210,211,212,213,214,215,216,217,218,219]",
    "policy.generation.max_running_samples=10", "grpo.max_num_epochs=50"};

std::vector<std::string> carry_over(const std::vector<std::string>& more) {
  std::vector<std::string> all = kCarryOver;
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST(GrpoLoop, CarriesUnfinishedResponsesOverItsUpdates) {
  for (const char* ratio : {"training", "generation"}) {
    const Place place;
    const TrainSummary summary = place.grpo(
        carry_over({"grpo.max_num_steps=6", "grpo.val_period=2", std::string("grpo.async_grpo.ratio_from=") + ratio}));
    EXPECT_EQ(summary.steps, 6);
    const std::vector<nlohmann::json> log = place.log();
    ASSERT_EQ(log.size(), 6u);
    double stale = 0;
    for (size_t s = 0; s < log.size(); ++s) {
      EXPECT_EQ(log[s].at("train/logprob_mismatch_tokens"), 0);
      EXPECT_EQ(log[s].at("train/weight_version"), s);
      EXPECT_LE(log[s].at("train/max_trajectory_age"), 1);
      EXPECT_LE(log[s].at("train/avg_trajectory_age"), 1);
      EXPECT_EQ(log[s].at("train/mixed_context_tokens"), 0);
      EXPECT_EQ(log[s].at("train/num_generated_samples"), 16);
      stale += log[s].at("train/stale_tokens").get<double>();
      double sum = 0;
      for (const Phase phase : all_phases()) sum += log[s].at(timing_name(phase)).get<double>();
      EXPECT_NEAR(sum, log[s].at("timing/train/total_step_time").get<double>(), 1e-5);
      EXPECT_EQ(log[s].at("timing/train/exposed_generation"), log[s].at(timing_name(Phase::kGeneration)));
    }
    EXPECT_EQ(log[0].at("train/stale_tokens"), 0);
    EXPECT_GT(stale, 0);
    EXPECT_EQ(log.back().at("performance/ledger_groups_leased"), 0) << "nothing is begun behind the last step";
  }
}

TEST(GrpoLoop, CarriesOverWithKeptKeysAndWithDynamicSampling) {
  const Place kept;
  kept.grpo(carry_over(
      {"grpo.max_num_steps=5", "grpo.val_period=2", "grpo.async_grpo.recompute_kv_cache_after_weight_updates=false"}));
  double mixed = 0;
  for (const nlohmann::json& step : kept.log()) {
    EXPECT_EQ(step.at("train/logprob_mismatch_tokens"), 0) << "what is marked is not compared";
    mixed += step.at("train/mixed_context_tokens").get<double>();
  }
  EXPECT_GT(mixed, 0);
  const Place dynamic;
  dynamic.grpo(carry_over({"grpo.max_num_steps=4", "grpo.use_dynamic_sampling=true",
                           "grpo.dynamic_sampling_max_gen_batches=50", "policy.generation.max_new_tokens=6"}));
  const std::vector<nlohmann::json> log = dynamic.log();
  ASSERT_EQ(log.size(), 4u);
  for (const nlohmann::json& step : log) {
    EXPECT_EQ(step.at("train/num_valid_samples"), 16);
    EXPECT_GE(step.at("train/num_generated_samples"), 16);
    EXPECT_EQ(step.at("train/logprob_mismatch_tokens"), 0);
    EXPECT_LE(step.at("train/max_trajectory_age"), 1);
  }
  const Place flat;
  try {
    flat.grpo(carry_over({"grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=2",
                          "env.format.pattern=nothing that a model of bytes writes"}));
    FAIL() << "trained on groups that teach nothing";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("of the 8 groups that step 1 may use up only 0 of 4"), std::string::npos)
        << error.what();
  }
}

TEST(PpoLoop, CarriesOverBehindTheCriticsOwnStepsWithAdvantagesOfOlderTokens) {
  const Place place;
  std::vector<std::string> all = {
      "algorithm=ppo", "ppo.num_prompts_per_step=4", "ppo.num_generations_per_prompt=4", "ppo.max_num_steps=6",
      "ppo.ppo_epochs=1", "ppo.policy_training_start_step=2", "ppo.val_period=3", "ppo.val_at_start=false",
      "ppo.max_val_samples=8", "ppo.async_ppo.enabled=true", "ppo.async_ppo.in_flight_weight_updates=true",
      "loss_fn.use_importance_sampling_correction=true",
      // Rewards of tokens follow from the log-probs that their step begins with.
      "loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1", "ppo.seq_logprob_error_threshold=50"};
  for (const std::string& setting : kCarryOver) {
    if (setting.starts_with("policy.generation.")) all.push_back(setting);
  }
  EXPECT_EQ(place.grpo(all).steps, 6);
  std::vector<nlohmann::json> log;
  for (nlohmann::json& line : place.log()) {
    if (line.contains("critic/loss")) log.push_back(std::move(line));
  }
  ASSERT_EQ(log.size(), 6u);
  double stale = 0;
  for (size_t s = 0; s < log.size(); ++s) {
    EXPECT_EQ(log[s].at("train/weight_version"), s < 2 ? 0 : s - 2);
    EXPECT_LE(log[s].at("train/max_trajectory_age"), 1);
    EXPECT_TRUE(std::isfinite(log[s].at("train/kl_penalty").get<double>()));
    EXPECT_LE(log[s].at("performance/ledger_groups_leased").get<double>() +
                  log[s].at("performance/ledger_groups_complete").get<double>(),
              4)
        << "groups of one step ahead, while the critic alone trains too";
    EXPECT_EQ(log[s].contains("train/loss"), s >= 2);
    if (s >= 2) {
      EXPECT_EQ(log[s].at("train/logprob_mismatch_tokens"), 0);
    }
    stale += log[s].at("train/stale_tokens").get<double>();
    double sum = 0;
    for (const Phase phase : all_phases()) sum += log[s].at(timing_name(phase)).get<double>();
    EXPECT_NEAR(sum, log[s].at("timing/train/total_step_time").get<double>(), 1e-5);
  }
  EXPECT_GT(stale, 0);
}

// A reward model of the same tokens, of which the loop knows the folder only.
fs::path make_reward_model(const Place& place) {
  ModelConfig config = test::tiny_config({.vocab = kByteVocabSize, .heads = 2, .kv_heads = 1, .head_dim = 16});
  config.initializer_range = 0.3;
  ModelOptions options;
  options.trainable = false;
  Model model(config.with_value_head(), options);
  init_parameters(model, 8);
  const fs::path folder = place.model().parent_path() / "reward-model";
  save_model(model, folder, {});
  return folder;
}

TEST(GrpoLoop, ARewardModelIsOneOfTheRewards) {
  const Place place;
  const std::string folder = make_reward_model(place).string();
  const std::vector<std::string> scored = {"env.reward_model.model_name=" + folder, "env.reward_model.enabled=true",
                                           "env.reward_model.weight=0.5", "grpo.val_at_start=true"};
  place.grpo(scored);
  const std::vector<nlohmann::json> log = place.log();
  double before = 0;
  for (const nlohmann::json& line : log) {
    if (!line.contains("train/loss")) continue;
    const double score = line.at("train/rewards/reward_model");
    EXPECT_NE(score, before);
    before = score;
    EXPECT_NEAR(
        line.at("train/reward").get<double>(),
        line.at("train/rewards/math").get<double>() + line.at("train/rewards/format").get<double>() + 0.5 * score,
        1e-6);
    double sum = 0;
    for (const Phase phase : all_phases()) sum += line.at(timing_name(phase)).get<double>();
    EXPECT_NEAR(sum, line.at("timing/train/total_step_time").get<double>(), 1e-5);
  }
  EXPECT_NE(before, 0);
}

// What three steps of PPO with a reference and a reward model log, times apart.
struct PpoRun {
  std::vector<nlohmann::json> log;
  std::map<std::string, double> shares;  // of responses whose numbers came under generation
};

PpoRun run_ppo_beside(bool beside) {
  const Place place;
  place.grpo({"algorithm=ppo", "ppo.num_prompts_per_step=4", "ppo.num_generations_per_prompt=4", "ppo.max_num_steps=3",
              "ppo.ppo_epochs=2", "ppo.val_period=0", "ppo.val_at_start=false", "value.optimizer.kwargs.lr=0.001",
              "loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1",
              "env.reward_model.model_name=" + make_reward_model(place).string(), "env.reward_model.enabled=true",
              "policy.generation.max_new_tokens=24", "policy.generation.max_running_samples=2",
              std::string("policy.generation.background_sms=") + (beside ? "1" : "0")});
  PpoRun run;
  for (const nlohmann::json& line : place.log()) {
    if (!line.contains("critic/loss")) continue;
    for (const char* what : {"references", "values", "scores"})
      run.shares[what] += line.at(std::string("performance/") + what + "_under_generation").get<double>() / 3;
    nlohmann::json& kept = run.log.emplace_back(nlohmann::json::object());
    for (const auto& [key, value] : line.items()) {
      if (key != "time" && !key.starts_with("timing/") && !key.starts_with("performance/")) kept[key] = value;
    }
  }
  return run;
}

// Values, scores and log-probs of finished responses, computed while others are generated or afterwards. Which
// of them come under generation is the scheduler's choice: on a busy machine none may, so runs go on until all have.
TEST(PpoLoop, WhatComesUnderGenerationChangesNothing) {
  const PpoRun after = run_ppo_beside(false);
  ASSERT_EQ(after.log.size(), 3u);
  for (const auto& [what, share] : after.shares) EXPECT_EQ(share, 0) << what;
  std::set<std::string> missing = {"references", "values", "scores"};
  for (int run = 0; run < 10 && !missing.empty(); ++run) {
    const PpoRun under = run_ppo_beside(true);
    EXPECT_EQ(under.log, after.log);
    for (const auto& [what, share] : under.shares) {
      if (share > 0) missing.erase(what);
    }
  }
  EXPECT_EQ(missing, std::set<std::string>()) << "never came under generation";
}

TEST(GrpoLoop, ARewardModelAloneAndUnderCarryOver) {
  for (const bool carried : {false, true}) {
    const Place place;
    std::vector<std::string> settings = {"env.reward_model.model_name=" + make_reward_model(place).string(),
                                         "data.train.env_name=reward_model"};
    if (carried) settings = carry_over(settings);
    place.grpo(settings);
    int64_t steps = 0;
    for (const nlohmann::json& line : place.log()) {
      if (!line.contains("train/loss")) continue;
      ++steps;
      EXPECT_EQ(line.at("train/reward"), line.at("train/rewards/reward_model"));
      EXPECT_FALSE(line.contains("train/rewards/math"));
      EXPECT_EQ(line.at("train/num_valid_samples"), 16);
      EXPECT_EQ(line.at("train/logprob_mismatch_tokens"), 0);
    }
    EXPECT_GE(steps, 3);
  }
}

TEST(GrpoLoop, ARewardModelThatScoresNothingIsRefused) {
  const Place place;
  const std::string error = test::user_error_of([&] {
    place.grpo({"env.reward_model.enabled=true", "env.reward_model.model_name=" + place.model().string()});
  });
  EXPECT_MENTIONS(error, "env.reward_model.model_name: ");
  EXPECT_MENTIONS(error, "is a causal model, which scores nothing");
}

TEST(GrpoLoop, CarryOverGoesOnFromItsCheckpointOrWithoutIt) {
  const Place place;
  const std::vector<std::string> saving =
      carry_over({"checkpointing.enabled=true", "checkpointing.save_period=1", "grpo.max_num_steps=3"});
  std::atomic<int> stop{0};
  TrainOptions interrupted;
  interrupted.stop_signal = &stop;
  interrupted.on_ready = [&] { stop = 15; };
  EXPECT_EQ(place.grpo(saving, interrupted).steps, 1);
  EXPECT_TRUE(fs::exists(place.checkpoints() / "step_1" / "ledger.bin"));
  EXPECT_EQ(place.grpo(saving).steps, 3);
  std::vector<nlohmann::json> log = place.log();
  ASSERT_EQ(log.size(), 3u);
  for (const nlohmann::json& step : log) EXPECT_EQ(step.at("train/logprob_mismatch_tokens"), 0);
  // On-policy from there: the groups that are not trained are generated again.
  EXPECT_EQ(place
                .grpo({"checkpointing.enabled=true", "grpo.max_num_steps=4", "grpo.max_num_epochs=50",
                       "loss_fn.reference_policy_kl_penalty=0", "policy.generation.max_new_tokens=20"})
                .steps,
            4);
  log = place.log();
  ASSERT_EQ(log.size(), 4u);
  EXPECT_EQ(log.back().at("train/stale_tokens"), 0);
  // And back: a checkpoint without a ledger loads.
  EXPECT_EQ(place.grpo(carry_over({"checkpointing.enabled=true", "grpo.max_num_steps=5"})).steps, 5);
}

// What a program wrote that knew neither ledgers nor critics: these entries and keys, and no others.
TEST(GrpoLoop, ACheckpointOfBeforeStepsOverlappedIsGoneOnFrom) {
  const Place whole, place;
  const std::vector<std::string> saving = {"checkpointing.enabled=true", "checkpointing.save_period=1",
                                           "grpo.max_num_steps=2", "grpo.max_num_epochs=50"};
  whole.grpo(saving);
  std::atomic<int> stop{0};
  TrainOptions interrupted;
  interrupted.stop_signal = &stop;
  interrupted.on_ready = [&] { stop = 15; };
  ASSERT_EQ(place.grpo(saving, interrupted).steps, 1);
  const fs::path folder = place.checkpoints() / "step_1";
  std::set<std::string> entries;
  for (const auto& entry : fs::directory_iterator(folder)) entries.insert(entry.path().filename().string());
  EXPECT_EQ(entries, (std::set<std::string>{"config.yaml", "manifest.json", "policy"}));
  const nlohmann::json now = nlohmann::json::parse(read_file(folder / "manifest.json"));
  const auto only = [](const nlohmann::json& of, const std::vector<std::string>& keys) {
    nlohmann::json kept;
    for (const std::string& key : keys) kept[key] = of.at(key);
    return kept;
  };
  nlohmann::json older =
      only(now, {"format", "step", "fingerprint", "ranks", "has_optimizer", "state", "metrics", "files"});
  older["fingerprint"] = only(now.at("fingerprint"), {"algorithm", "model"});
  older["state"] = only(now.at("state"), {"prompts", "next_sample_id", "validated_step", "optimizer_steps"});
  write_file_atomic(folder / "manifest.json", older.dump(1));
  EXPECT_EQ(place.grpo(saving).steps, 2);
  const fs::path weights = fs::path("step_2") / "policy" / "weights" / "model.safetensors";
  EXPECT_EQ(read_file(place.checkpoints() / weights), read_file(whole.checkpoints() / weights));
  EXPECT_EQ(place.grpo(carry_over({"checkpointing.enabled=true", "grpo.max_num_steps=3"})).steps, 3);
}

TEST(GrpoLoop, EndsEarlyAtItsThresholdAndStaysEnded) {
  const Place place;
  const std::vector<std::string> run = {"grpo.max_num_steps=6", "grpo.val_period=2", "checkpointing.enabled=true",
                                        "grpo.stop_at_validation_metric=accuracy",
                                        "grpo.stop_at_validation_threshold=0.0"};
  const TrainSummary summary = place.grpo(run);
  EXPECT_EQ(summary.steps, 2);
  EXPECT_EQ(summary.end, LoopEnd::kFinished);
  ASSERT_TRUE(summary.validation.has_value());
  EXPECT_TRUE(fs::exists(place.checkpoints() / "step_2"));
  EXPECT_EQ(place.grpo(run).steps, 2) << "started again it has nothing to do";
  EXPECT_EQ(place.log().size(), 2u);
}

TEST(GrpoLoop, ValidatesAtTheEndOnce) {
  const Place place;
  const TrainSummary summary = place.grpo({"grpo.max_num_steps=2", "grpo.val_at_end=true"});
  ASSERT_TRUE(summary.validation.has_value());
  const std::vector<nlohmann::json> log = place.log();
  EXPECT_EQ(log.back().count("validation/accuracy"), 1u);
  const Place with_period;  // the last step is validated by its period: not again
  with_period.grpo({"grpo.max_num_steps=2", "grpo.val_period=2", "grpo.val_at_end=true"});
  int validations = 0;
  for (const nlohmann::json& line : with_period.log()) validations += line.count("validation/accuracy") > 0 ? 1 : 0;
  EXPECT_EQ(validations, 1);
}

TEST(GrpoLoop, SavesBeforeTheTimeItIsGiven) {
  const Place place;
  const TrainSummary summary =
      place.grpo({"grpo.max_num_steps=1000000", "checkpointing.enabled=true", "checkpointing.save_period=1000000",
                  "checkpointing.checkpoint_must_save_by=00:00:00:02"});
  EXPECT_EQ(summary.end, LoopEnd::kStopped);
  EXPECT_GT(summary.steps, 0);
  EXPECT_TRUE(fs::exists(place.checkpoints() / ("step_" + std::to_string(summary.steps))));
}

TEST(SftLoop, GoesOnWhereItWasInterrupted) {
  const Place whole, parts;
  whole.sft({"checkpointing.enabled=true", "checkpointing.save_period=2"});
  std::atomic<int> stop{0};
  TrainOptions interrupted;
  interrupted.stop_signal = &stop;
  interrupted.on_ready = [&] { stop = 15; };  // finishes its step, saves, leaves
  const TrainSummary first = parts.sft({"checkpointing.enabled=true", "checkpointing.save_period=2"}, interrupted);
  EXPECT_EQ(first.end, LoopEnd::kStopped);
  EXPECT_EQ(first.steps, 1);
  EXPECT_EQ(parts.sft({"checkpointing.enabled=true", "checkpointing.save_period=2"}).steps, 4);
  const auto weights = [](const Place& place) {
    return read_file(place.checkpoints() / "step_4" / "policy" / "weights" / "model.safetensors");
  };
  EXPECT_TRUE(weights(whole) == weights(parts));
  ASSERT_EQ(parts.log().size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(parts.log()[i].at("train/loss"), whole.log()[i].at("train/loss"));
}

// Answers of one and of two digits: a mean over batches would depend on how many examples a batch has.
TEST(SftLoop, ValidationIsAMeanOverTokensHoweverTheyAreBatched) {
  const auto loss = [](int size, int batches) {
    const Place place;
    place.sft({"sft.val_period=4", "sft.val_global_batch_size=" + std::to_string(size),
               "sft.val_batches=" + std::to_string(batches)});
    return place.log().back().at("validation/loss").get<double>();
  };
  const double whole = loss(24, 1);
  EXPECT_GT(whole, 0);
  EXPECT_NEAR(loss(1, 24), whole, 1e-6 * whole);
  EXPECT_NEAR(loss(9, 3), whole, 1e-6 * whole);
}

// 24 rows: one whole batch of 16 an epoch, as NeMo-RL's loader has it; and those of a batch of 32 as they come.
TEST(SftLoop, AnEpochHasAsManyStepsAsWholeBatches) {
  const Place place, small;
  const auto steps = [](const Place& run, const std::string& batch, const std::string& epochs) {
    return run
        .sft({"checkpointing.enabled=true", "sft.max_num_steps=9", "policy.train_global_batch_size=" + batch,
              "sft.max_num_epochs=" + epochs})
        .steps;
  };
  EXPECT_EQ(steps(place, "16", "2"), 2);
  EXPECT_EQ(steps(place, "16", "2"), 2) << "started again";
  EXPECT_EQ(steps(place, "16", "5"), 5);
  EXPECT_EQ(steps(small, "32", "3"), 3);
}

TEST(GrpoLoop, AnEpochHasAsManyStepsAsWholeBatches) {
  const std::vector<std::string> batches = {"grpo.num_prompts_per_step=16", "policy.train_global_batch_size=64",
                                            "grpo.max_num_steps=9", "grpo.max_num_epochs=2"};
  const Place place, carried;
  EXPECT_EQ(place.grpo(batches).steps, 2);
  EXPECT_EQ(carried.grpo(carry_over(batches)).steps, 2);
}

Sample rewarded(int64_t group, int64_t index, double reward) {
  Sample s;
  s.group = group;
  s.index = index;
  s.response = {1};
  s.raw_reward = reward;
  return s;
}

TEST(DynamicSampling, KeepsWhatDiffersAndCountsWhatIsTooMuch) {
  DynamicSampling kept(2, 2, 3);
  EXPECT_NO_THROW(kept.check_may_go_on());
  kept.add({rewarded(0, 0, 1), rewarded(0, 1, 1), rewarded(1, 0, 0), rewarded(1, 1, 1)});
  EXPECT_FALSE(kept.complete());
  EXPECT_NO_THROW(kept.check_may_go_on());
  kept.add({rewarded(0, 0, 1), rewarded(0, 1, 0), rewarded(1, 0, 0), rewarded(1, 1, 1)});
  EXPECT_TRUE(kept.complete());
  EXPECT_EQ(kept.batches(), 2);
  EXPECT_EQ(kept.discarded_valid_samples(), 2);
  const std::vector<Sample> samples = kept.take();
  ASSERT_EQ(samples.size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(samples[i].group, static_cast<int64_t>(i / 2));
  EXPECT_EQ(samples[2].raw_reward, 1);
  DynamicSampling never(1, 1, 1);
  never.add({rewarded(0, 0, 1)});
  EXPECT_THROW(never.check_may_go_on(), Error);
}

}  // namespace
}  // namespace trireme
