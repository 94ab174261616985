// What trireme plan predicts against what was measured: every kept file of decode steps, a rollout, a training step, a
// whole step and of exchanges, of one device and of several that split a model.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/fs.h"
#include "base/text.h"
#include "topology/plan.h"
#include "topology/plan_decode.h"
#include "trainer/bench/shapes.h"
#include "trainer/rollout/lengths.h"

namespace trireme {
namespace {

constexpr int64_t kMicroBatchTokens = 16'384;  // of bench step, where a file does not say

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
  options.lanes = json.value("lanes", int64_t{0});
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
  work.train_tokens = work.logprob_tokens = std::max(json.value("micro_batch_tokens", kMicroBatchTokens), work.longest);
  work.places = json.value("max_sequences", int64_t{256});
  // Whatever the program then did or could do of it.
  const auto samples_of = [&](const char* key) { return json.value(key, 0.0); };
  work.early_gradients = samples_of("gradients_under_generation") > 0;
  if (work.early_gradients || samples_of("references_under_generation") > 0)
    work.background_processors = json.value("background_processors", int64_t{0});
  work.engines = json.value("engines", int64_t{0});
  work.engine = {.tp = json.value("engine_tp", int64_t{1}), .ep = json.value("engine_ep", int64_t{1})};
  work.age = json.value("carry_over", int64_t{0});
  work.in_flight = work.age > 0;
  work.recomputes_keys = !json.value("keep_cache", false);
  work.previous_pass = work.age > 0 && json.value("ratio_from", "training") == "training";
  return work;
}

Layout layout_of(const Json& json) {
  const auto axis = [&](const char* key) { return json.value(key, int64_t{1}); };
  Layout layout{.tp = axis("tp"), .cp = axis("cp"), .ep = axis("ep"), .pp = axis("pp")};
  const int64_t model =
      layout.tp * layout.cp * layout.pp;  // as many ranks where none are told, or those of its experts
  layout.dp = json.value("ranks", std::max(model, layout.ep * layout.pp)) / model;
  return layout;
}

bool is_split(const Layout& layout) { return layout.tp * layout.cp * layout.pp * layout.ep > 1; }

// Of seconds: every file of an H200. Of an H100, for which nothing is fitted, decode of dense models, since its rates
// there are an H200's and the published memory's.
double seconds_limit(const Json& json, const std::string& device) {
  const bool experts = bench::find_shape(json.at("shape"), json.at("layers")).shape().experts > 0;
  const bool decode = json.at("benchmark") == "decode" || json.at("benchmark") == "rollout";
  return device == "h200" || (decode && !experts) ? 0.2 : 0;
}

LayoutPlan planned(const Json& json, const Workload& work, const PlanOptions& options, const std::string& device) {
  const ModelConfig config = bench::find_shape(json.at("shape"), json.at("layers"));
  PlannedBeside beside;
  if (json.value("critic", false))
    beside.critic = PlannedModel{config.with_value_head().shape(), work, options, layout_of(json)};
  return plan_layout(config.shape(), layout_of(json), work, options, {.rates = *device_rates(device)}, beside);
}

void compare_rollout(const std::string& name, const Json& json, const std::string& device,
                     std::vector<Comparison>& rows) {
  const LayoutPlan plan = planned(json, workload_of(json), options_of(json), device);
  rows.push_back({name + " seconds", json.at("seconds"), plan.time.generation(), seconds_limit(json, device)});
}

void compare_step(const std::string& name, const Json& json, const std::string& device, std::vector<Comparison>& rows) {
  const LayoutPlan plan = planned(json, workload_of(json), options_of(json), device);
  const double limit = seconds_limit(json, device);
  const Json& phases = json.at("phases");
  const PlannedTime& time = plan.time;
  const double passes = time.training - time.training_under + time.optimizer + time.gradient_exchanges;
  // Steps that overlap are long and short in turn: their mean.
  const auto repeats = json.at("seconds_of_repeats").get<std::vector<double>>();
  const bool overlap = json.value("carry_over", 0) > 0;
  const double mean = std::accumulate(repeats.begin(), repeats.end(), 0.0) / static_cast<double>(repeats.size());
  rows.push_back({name + " seconds", overlap ? mean : json.at("seconds").get<double>(), time.step(), limit});
  if (overlap) return;
  // Of ranks that split a model exchanges and bubble are no phase's.
  const bool whole = !is_split(layout_of(json));
  const bool apart =
      json.value("references_under_generation", 0.0) + json.value("gradients_under_generation", 0.0) == 0;
  // Of what runs under generation a small rest follows; ranks that an older program dealt unevenly wait for each other.
  const bool uneven = name == "step-llama-3.1-8b-x4-shared-uneven";
  const auto phase = [&](const char* key, double value, bool judged) {
    rows.push_back({name + " " + key, phases.at(key), value, judged && whole ? limit : 0});
  };
  if (!json.value("critic", false)) {  // whose part of the phases is in the whole seconds only
    phase("generation", time.generation() + time.reference_under + time.training_under, true);
    if (json.at("reference").get<bool>()) phase("logprobs", time.reference - time.reference_under, apart);
    phase("training", passes, !uneven);
  }
  // Files of the day on which the peak did not count the cache (docs/lab/016-shared-prompts.md).
  const bool without_cache = name == "step-llama-3.1-8b-x4" || name == "step-llama-3.1-8b-x4-12288" ||
                             name == "step-llama-3.1-8b-x4-reference-after" ||
                             name == "step-llama-3.1-8b-x4-shared-uneven";
  const int64_t bytes =
      (without_cache ? plan.memory.training.total() : plan.memory.peak()) - peer_buffer_bytes(plan.layout, plan.layout);
  rows.push_back(
      {name + " bytes", json.at("peak_memory_bytes"), static_cast<double>(bytes), device == "h200" ? 0.15 : 0});
}

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
  if (name == "train-llama-3.1-8b-pp2" && options.stages == StageOptions{})
    options.stages = {.first_layers = 17, .last_layers = 15};  // its command
  const LayoutPlan plan = planned(json, work, options, device);
  const bool optimizer = json.at("optimizer");
  const double passes = plan.time.step() - plan.time.optimizer - plan.time.gradient_exchanges;
  rows.push_back(
      {name + " seconds", json.at("seconds"), optimizer ? plan.time.step() : passes, seconds_limit(json, device)});
  // Where there is no optimizer nothing is there of its state, 12 bytes of an element, nor of the sums over ranks, 4.
  const int64_t state = plan.memory.training.optimizer, sums = layout.dp * layout.cp > 1 ? state / 3 : 0;
  int64_t bytes = plan.memory.peak() - (optimizer ? 0 : state + sums) - peer_buffer_bytes(plan.layout, plan.layout);
  // The day's program had a place for the sums of gradients that nobody shares, too.
  if (name == "train-qwen3-30b-a3b-8-layers-ep2")
    bytes += 4 * rank_memory(bench::find_shape(json.at("shape"), json.at("layers")).shape(), layout, 0).expert_params;
  rows.push_back(
      {name + " bytes", json.at("peak_memory_bytes"), static_cast<double>(bytes), device == "h200" ? 0.15 : 0.1});
}

void compare_decode(const std::string& name, const Json& json, const std::string& device,
                    std::vector<Comparison>& rows) {
  const Layout layout = layout_of(json);
  const auto replicas = static_cast<size_t>(layout.dp * layout.cp);
  for (const Json& row : json.at("rows")) {
    // One token more of as many samples: two rollouts of that context differ by a step of it.
    const auto seconds = [&](int64_t output) {
      Workload work;
      work.places = row.at("alive");
      work.prompts = {static_cast<int64_t>(row.at("context").get<double>())};
      work.outputs.assign(row.at("alive").get<size_t>() * replicas, output);
      PlanOptions options;
      options.cache_rows = int64_t{1} << 20;
      const PlannedTime time = planned(json, work, options, device).time;
      return time.decode + time.decode_exchanges;
    };
    // Over stages a file's step is of one lane or of all: which, its command says.
    rows.push_back({name + " " + row.at("alive").dump() + " alive", row.at("milliseconds").get<double>() / 1e3,
                    seconds(2) - seconds(1), layout.pp > 1 ? 0 : seconds_limit(json, device)});
  }
}

// What a sum takes besides the norm that it is launched with.
void compare_exchange(const std::string& name, const Json& json, const std::string& device,
                      std::vector<Comparison>& rows) {
  const DeviceRates rates = *device_rates(device);
  for (const Json& row : json.at("small")) {
    const auto bytes = 2 * row.at("rows").get<double>() * row.at("width").get<double>();
    const auto fused = row.at("fused_microseconds").get<double>(), norm = row.at("norm_microseconds").get<double>();
    rows.push_back({name + " " + row.at("rows").dump() + " rows", (fused - norm) / 1e6,
                    planning::decode_sum_seconds(rates.decode_in_node, json.at("ranks"), bytes),
                    device == "h100" ? 0.2 : 0});
  }
}

// What the rates were fitted to (topology/rates.cpp).
bool fitted(const std::string& device, const std::string& what) {
  const std::map<std::string, std::vector<std::string>> sources = {
      {"h100", {"exchange-"}},
      {"h200",
       {"decode-llama-3.1-8b ", "decode-qwen3-30b-a3b ", "train-llama-3.1-8b seconds", "train-llama-3.1-8b-x2 seconds",
        "step-qwen3-1.7b-shared logprobs", "step-qwen3-1.7b-shared training", "train-qwen3-30b-a3b-6-layers seconds"}}};
  const std::vector<std::string>& of_device = sources.at(device);
  return std::any_of(of_device.begin(), of_device.end(),
                     [&](const std::string& source) { return starts_with(what, source); });
}

// How many files split a model and have judged seconds, by axis.
std::map<std::string, int> compare_files(const std::string& device, std::vector<Comparison>& rows) {
  std::map<std::string, std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator("bench/results/" + device))
    files[entry.path().stem()] = entry.path();
  std::map<std::string, int> split;
  for (const auto& [name, path] : files) {
    const Json json = Json::parse(read_file(path));
    const std::string kind = json.at("benchmark");
    const auto before = static_cast<std::ptrdiff_t>(rows.size());
    if (kind == "rollout") compare_rollout(name, json, device, rows);
    if (kind == "step") compare_step(name, json, device, rows);
    if (kind == "train") compare_train(name, json, device, rows);
    if (kind == "decode") compare_decode(name, json, device, rows);
    if (kind == "exchange") compare_exchange(name, json, device, rows);
    const bool judged = std::any_of(rows.begin() + before, rows.end(), [](const Comparison& row) {
      return row.limit > 0 && !ends_with(row.what, " bytes");
    });
    if (!judged || kind == "exchange") continue;
    const Layout layout = layout_of(json);
    for (const auto& [axis, size] :
         {std::pair{"tp", layout.tp}, {"pp", layout.pp}, {"cp", layout.cp}, {"ep", layout.ep}})
      split[axis] += size > 1 ? 1 : 0;
  }
  return split;
}

void expect_near(const std::string& device, const std::vector<Comparison>& rows) {
  for (const Comparison& row : rows) {
    const bool bytes = ends_with(row.what, " bytes");
    const double unit = bytes ? 1 << 30 : row.measured < 1e-3 ? 1e-6 : 1;
    std::printf("%s %-64s %9.3f %9.3f %s %+6.1f %%%s\n", device.c_str(), row.what.c_str(), row.measured / unit,
                row.planned / unit,
                bytes      ? "GiB"
                : unit < 1 ? "us "
                           : "s  ",
                100 * row.off(),
                row.limit == 0             ? "  (told only)"
                : fitted(device, row.what) ? "  (fitted)"
                                           : "");
    if (row.limit > 0) {
      EXPECT_LT(std::abs(row.off()), row.limit) << device << " " << row.what;
    }
  }
}

TEST(PlanResults, ThePlanIsNearWhatWasMeasured) {
  std::vector<Comparison> h200, h100;
  (void)compare_files("h200", h200);
  ASSERT_GT(h200.size(), 50U);
  expect_near("h200", h200);
  // On one H100 and two: what each sharding keeps, tensor, context, expert and pipeline parallel ranks.
  const std::map<std::string, int> split = compare_files("h100", h100);
  const auto trained = std::count_if(h100.begin(), h100.end(), [](const Comparison& row) {
    return starts_with(row.what, "train-") && ends_with(row.what, " bytes");
  });
  ASSERT_GE(trained, 10);
  EXPECT_GE(split.at("tp"), 5);
  EXPECT_GE(split.at("pp"), 1);
  expect_near("h100", h100);
}

// What a plan says of carry-over at ages of which no run was measured.
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
