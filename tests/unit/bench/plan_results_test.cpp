// What trireme plan predicts against what was measured: every kept file of a rollout, a training step and a whole step.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "base/fs.h"
#include "base/text.h"
#include "topology/plan.h"
#include "trainer/bench/shapes.h"
#include "trainer/rollout/lengths.h"

namespace trireme {
namespace {

struct Comparison {
  std::string what;
  double measured = 0, planned = 0;
  double limit = 0;  // of the difference; 0: told only
  double off() const { return planned / measured - 1; }
};

using Json = nlohmann::json;

RolloutLengths lengths_of(const Json& json) {
  const std::string text = json.at("lengths");
  const size_t space = text.find(' ');
  if (space == std::string::npos) return load_lengths(text);
  // "8x32 answers of 794 tokens": prompts of 200.
  std::string count = text.substr(text.find(" of ") + 4);
  count = count.substr(0, count.find(' '));
  return synthetic_lengths("synthetic:" + text.substr(0, space) + ":mean=" + count + ":max=" + count);
}

PlanOptions options_of(const Json& json) {
  PlanOptions options;
  if (json.contains("sharding")) options.sharding = *parse_sharding(json.at("sharding").get<std::string>());
  options.stages = {.first_layers = json.value("first_stage_layers", int64_t{0}),
                    .last_layers = json.value("last_stage_layers", int64_t{0}),
                    .virtual_stages = json.value("virtual_stages", int64_t{1})};
  if (json.value("gradient_dtype", "float32") == "bfloat16") options.gradient_bytes = 2;
  options.cache_rows = json.value("cache_rows", int64_t{0});
  return options;
}

Workload workload_of(const Json& json) {
  const RolloutLengths lengths = lengths_of(json);
  Workload work;
  work.prompts = lengths.prompts;
  work.outputs = lengths.outputs;
  work.longest = lengths.longest();
  work.reference = json.value("reference", false);
  work.share_prompts = json.value("share_prompts", false);
  work.optimizer_steps = json.value("optimizer_steps", int64_t{1});
  work.train_tokens = work.logprob_tokens = std::max(json.value("micro_batch_tokens", int64_t{1}), work.longest);
  work.places = json.value("max_sequences", int64_t{256});
  // Whatever the program then did or could do of it.
  const auto samples_of = [&](const char* key) { return json.value(key, 0.0); };
  work.early_gradients = samples_of("gradients_under_generation") > 0;
  if (work.early_gradients || samples_of("references_under_generation") > 0)
    work.background_processors = json.value("background_processors", int64_t{0});
  return work;
}

Layout layout_of(const Json& json) {
  const auto axis = [&](const char* key) { return json.value(key, int64_t{1}); };
  Layout layout{.tp = axis("tp"), .cp = axis("cp"), .ep = axis("ep"), .pp = axis("pp")};
  layout.dp = axis("ranks") / (layout.tp * layout.cp * layout.pp);
  return layout;
}

LayoutPlan planned(const Json& json, const Workload& work, const PlanOptions& options,
                   const std::string& device = "h200") {
  const ModelShape shape = bench::find_shape(json.at("shape"), json.at("layers")).shape();
  return plan_layout(shape, layout_of(json), work, options, {.rates = *device_rates(device)});
}

void compare_rollout(const std::string& name, const Json& json, std::vector<Comparison>& rows) {
  const LayoutPlan plan = planned(json, workload_of(json), options_of(json));
  rows.push_back({name + " seconds", json.at("seconds"), plan.time.prefill + plan.time.decode, 0.2});
}

void compare_step(const std::string& name, const Json& json, std::vector<Comparison>& rows) {
  const LayoutPlan plan = planned(json, workload_of(json), options_of(json));
  const Json& phases = json.at("phases");
  const PlannedTime& time = plan.time;
  const double passes = time.training - time.training_under + time.optimizer + time.gradient_exchanges;
  rows.push_back({name + " seconds", json.at("seconds"), plan.time.step(), 0.2});
  const bool apart =
      json.value("references_under_generation", 0.0) + json.value("gradients_under_generation", 0.0) == 0;
  // Of what runs under generation a small rest follows; ranks that an older program dealt unevenly wait for each other.
  const bool uneven = name == "step-llama-3.1-8b-x4-shared-uneven";
  const auto phase = [&](const char* key, double value, bool judged) {
    rows.push_back({name + " " + key, phases.at(key), value, judged ? 0.2 : 0});
  };
  phase("generation", time.prefill + time.decode + time.reference_under + time.training_under, true);
  if (json.at("reference").get<bool>()) phase("logprobs", time.reference - time.reference_under, apart);
  phase("training", passes, !uneven);
  // Files of the day on which the peak did not count the cache (docs/lab/016-shared-prompts.md).
  const bool without_cache = name == "step-llama-3.1-8b-x4" || name == "step-llama-3.1-8b-x4-12288" ||
                             name == "step-llama-3.1-8b-x4-reference-after" ||
                             name == "step-llama-3.1-8b-x4-shared-uneven";
  const int64_t bytes = without_cache ? plan.memory.training.total() : plan.memory.peak();
  rows.push_back({name + " bytes", json.at("peak_memory_bytes"), static_cast<double>(bytes), 0.15});
}

// Seconds of an H100 are told only: nothing is fitted to it.
void compare_train(const std::string& name, const Json& json, const std::string& device,
                   std::vector<Comparison>& rows) {
  const int64_t tokens = json.at("micro_batch_tokens"), sequences = json.at("sequences");
  const int64_t batches = json.at("micro_batches");
  const Layout layout = layout_of(json);
  const int64_t all = sequences * batches * layout.dp, length = tokens / sequences;
  Workload work;
  work.generates = false;
  const int64_t scored = json.at("scored_tokens").get<int64_t>() / (sequences * batches);
  work.prompts.assign(static_cast<size_t>(all), length + 1 - scored);  // the last token of each is a target only
  work.outputs.assign(static_cast<size_t>(all), scored);
  work.longest = length;
  work.train_tokens = tokens;
  PlanOptions options = options_of(json);
  options.fit_recompute = false;
  options.recomputed_layers = json.at("recomputed_layers");
  // The day's program computed gate and up of shared experts again always (and kept the norms, 1 GB that this misses).
  if (name == "train-qwen3-30b-a3b-8-layers-ep2") options.cheap_recompute = options.expert_recompute = true;
  if (name == "train-llama-3.1-8b-pp2") options.stages = {.first_layers = 17, .last_layers = 15};  // its command
  const LayoutPlan plan = planned(json, work, options, device);
  const bool optimizer = json.at("optimizer"), fitted_to = device == "h200";
  rows.push_back(
      {name + " seconds", json.at("seconds"), optimizer ? plan.time.step() : plan.time.training, fitted_to ? 0.2 : 0});
  // Where there is no optimizer nothing is there of its state, 12 bytes of an element, nor of the sums over ranks, 4.
  const int64_t state = plan.memory.training.optimizer, sums = layout.dp * layout.cp > 1 ? state / 3 : 0;
  const int64_t bytes = plan.memory.peak() - (optimizer ? 0 : state + sums);
  rows.push_back({name + " bytes", json.at("peak_memory_bytes"), static_cast<double>(bytes), fitted_to ? 0.15 : 0.1});
}

void compare_decode(const std::string& name, const Json& json, std::vector<Comparison>& rows) {
  const ModelShape shape = bench::find_shape(json.at("shape"), json.at("layers")).shape();
  for (const Json& row : json.at("rows")) {
    // One token more of as many samples: two rollouts of that context differ by a step of it.
    const auto seconds = [&](int64_t output) {
      Workload work;
      work.places = row.at("alive");
      work.prompts = {static_cast<int64_t>(row.at("context").get<double>())};
      work.outputs.assign(row.at("alive").get<size_t>(), output);
      PlanOptions options;
      options.cache_rows = int64_t{1} << 20;
      return plan_layout(shape, {}, work, options, {.rates = *device_rates("h200")}).time.decode;
    };
    rows.push_back({name + " " + row.at("alive").dump() + " alive", row.at("milliseconds").get<double>() / 1e3,
                    seconds(2) - seconds(1), 0.2});
  }
}

// What the rates were fitted to (topology/rates.cpp).
bool fitted(const std::string& what) {
  for (const char* source :
       {"decode-", "train-llama-3.1-8b seconds", "train-llama-3.1-8b-x2 seconds", "step-qwen3-1.7b-shared logprobs",
        "step-qwen3-1.7b-shared training", "train-qwen3-30b-a3b-6-layers seconds"}) {
    if (starts_with(what, source)) return true;
  }
  return false;
}

TEST(PlanResults, ThePlanIsNearWhatWasMeasured) {
  std::map<std::string, std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator("bench/results/h200"))
    files[entry.path().stem()] = entry.path();
  std::vector<Comparison> rows;
  for (const auto& [name, path] : files) {
    const Json json = Json::parse(read_file(path));
    const std::string kind = json.at("benchmark");
    if (kind == "rollout") compare_rollout(name, json, rows);
    if (kind == "step") compare_step(name, json, rows);
    if (kind == "train") compare_train(name, json, "h200", rows);
    if (kind == "decode") compare_decode(name, json, rows);
  }
  ASSERT_GT(rows.size(), 50U);
  // On one H100 and two: what each sharding keeps, tensor, context, expert and pipeline parallel ranks.
  std::map<std::string, std::filesystem::path> trained;
  for (const auto& entry : std::filesystem::directory_iterator("bench/results/h100")) {
    if (starts_with(entry.path().stem().string(), "train-")) trained[entry.path().stem()] = entry.path();
  }
  ASSERT_GE(trained.size(), 10U);
  for (const auto& [name, path] : trained) compare_train(name, Json::parse(read_file(path)), "h100", rows);
  for (const Comparison& row : rows) {
    const bool bytes = ends_with(row.what, " bytes");
    const double unit = bytes ? 1 << 30 : 1;
    std::printf("%-64s %9.3f %9.3f %s %+6.1f %%%s\n", row.what.c_str(), row.measured / unit, row.planned / unit,
                bytes ? "GiB" : "s  ", 100 * row.off(),
                row.limit == 0     ? "  (told only)"
                : fitted(row.what) ? "  (fitted)"
                                   : "");
    if (row.limit > 0) {
      EXPECT_LT(std::abs(row.off()), row.limit) << row.what;
    }
  }
}

// What docs/layouts.md says of carry-over, of which no run was measured.
TEST(PlanResults, CarryOverOfTheKeptLengths) {
  const RolloutLengths lengths = load_lengths("bench/data/rollout_lengths_256.json");
  Workload work;
  work.prompts = lengths.prompts;
  work.outputs = lengths.outputs;
  work.longest = work.train_tokens = lengths.longest();
  const ModelShape shape = *known_model_shape("qwen3-1.7b");
  for (const auto& [age, seconds] : std::vector<std::pair<int64_t, double>>{{0, 10.1}, {1, 8.0}, {2, 7.3}, {4, 6.7}}) {
    work.age = age;
    const LayoutPlan plan = plan_layout(shape, {}, work, {}, {.rates = *device_rates("h200")});
    EXPECT_NEAR(plan.time.decode, seconds, 0.06) << "age " << age;
    std::printf("carry-over, age %lld: decode %.2f s, keys again %.2f s, %.0f %% of the samples older\n",
                static_cast<long long>(age), plan.time.decode, plan.time.again, 100 * plan.time.older);
  }
}

}  // namespace
}  // namespace trireme
