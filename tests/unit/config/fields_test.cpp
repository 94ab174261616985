// Every accepted key changes the resolved configuration; every ignored key warns; the reference page is up to date.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <set>

#include "base/fs.h"
#include "base/text.h"
#include "trainer/config/config.h"
#include "trainer/config/fields.h"

namespace trireme {
namespace {

using config::Field;
using config::FieldRef;

// A legal value that is not the default, and what else must be set for it to pass the cross-field rules.
struct Sample {
  std::string value;
  std::vector<std::string> companions;
};

const std::map<std::string, Sample>& special_samples() {
  static const std::map<std::string, Sample> kSamples = {
      {"grpo.num_prompts_per_step", {"64", {}}},
      {"grpo.num_generations_per_prompt", {"32", {}}},
      {"grpo.async_grpo.enabled",
       {"true", {"grpo.async_grpo.in_flight_weight_updates=true", "loss_fn.use_importance_sampling_correction=true"}}},
      {"grpo.batch_multiplier", {"2", {"grpo.use_dynamic_sampling=true"}}},
      {"grpo.stop_at_validation_metric", {"accuracy", {"grpo.stop_at_validation_threshold=0.5"}}},
      {"grpo.stop_at_validation_threshold", {"0.5", {"grpo.stop_at_validation_metric=accuracy"}}},
      {"grpo.reward_scaling.source_max", {"4", {}}},
      {"grpo.skip_reference_policy_logprobs_calculation", {"true", {"loss_fn.reference_policy_kl_penalty=0"}}},
      {"grpo.seq_logprob_error_threshold", {"1.5", {}}},
      {"loss_fn.ratio_clip_c", {"3", {}}},
      {"loss_fn.truncated_importance_sampling_type",
       {"icepop",
        {"loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_ratio=2"}}},
      {"loss_fn.truncated_importance_sampling_ratio", {"3", {"loss_fn.use_importance_sampling_correction=true"}}},
      {"loss_fn.truncated_importance_sampling_ratio_min",
       {"0.5", {"loss_fn.use_importance_sampling_correction=true", "loss_fn.truncated_importance_sampling_ratio=2"}}},
      {"loss_fn.sequence_level_importance_ratios", {"true", {"loss_fn.token_level_loss=false"}}},
      {"loss_fn.use_kl_in_reward", {"true", {"grpo.adv_estimator.name=reinforce_plus_plus"}}},
      {"policy.train_global_batch_size", {"256", {}}},
      {"policy.max_total_sequence_length", {"1024", {}}},
      {"policy.generation.max_new_tokens", {"100", {}}},
      {"policy.generation.kv_cache_tokens", {"4096", {}}},
      {"policy.generation.top_k", {"20", {}}},
      {"policy.generation.pipeline_lanes",
       {"3",
        {"cluster.gpus_per_node=2", "policy.megatron_cfg.enabled=true",
         "policy.megatron_cfg.pipeline_model_parallel_size=2"}}},
      {"policy.generation.fold_pipeline",
       {"true",
        {"cluster.gpus_per_node=2", "policy.megatron_cfg.enabled=true",
         "policy.megatron_cfg.pipeline_model_parallel_size=2"}}},
      {"policy.generation.tensor_parallel_size", {"2", {"cluster.gpus_per_node=2"}}},
      {"policy.generation.expert_parallel_size",
       {"2", {"policy.generation.colocated.enabled=false", "policy.generation.tensor_parallel_size=2"}}},
      {"policy.dynamic_batching.train_mb_tokens", {"3000", {}}},
      {"policy.dynamic_batching.logprob_mb_tokens", {"3000", {}}},
      {"policy.sequence_packing.train_mb_tokens", {"3000", {}}},
      {"policy.sequence_packing.logprob_mb_tokens", {"3000", {}}},
      {"policy.optimizer.kwargs.betas", {"[0.8, 0.9]", {}}},
      {"policy.scheduler", {"[{name: LinearLR, kwargs: {total_iters: 9}}]", {}}},
      {"policy.tokenizer.chat_template_kwargs", {"{thinking: true}", {}}},
      {"policy.tokenizer.chat_template", {"template.jinja", {}}},
      {"data.train.env_name", {"math", {}}},
      {"data.validation.env_name", {"math", {}}},
      {"env.math.enabled", {"false", {"env.format.enabled=true", "env.format.tags=[think]"}}},
      {"env.format.enabled", {"true", {"env.format.pattern=x"}}},
      {"env.format.pattern", {"x+", {}}},
      {"env.reward_model.enabled", {"true", {"env.reward_model.model_name=org/scores"}}},
      {"env.command.enabled", {"true", {"env.command.command=[grade]"}}},
      {"env.command.command", {"[grade, -v]", {"env.command.enabled=true"}}},
      {"env.http.enabled", {"true", {"env.http.url=http://a"}}},
      {"env.http.url", {"https://b/c", {"env.http.enabled=true"}}},
      {"env.http.headers", {"[\"Authorization: Bearer {file:/t}\"]", {"env.http.enabled=true"}}},
      {"env.http.ca_file", {"ca.pem", {"env.http.enabled=true"}}},
      {"checkpointing.metric_name", {"train:reward", {}}},
      {"checkpointing.checkpoint_must_save_by", {"00:03:30:00", {}}},
      {"cluster.gpus_per_node", {"2", {}}},
      {"cluster.num_nodes", {"2", {}}},
      {"cluster.processes", {"2", {}}},
      {"policy.megatron_cfg.enabled", {"true", {}}},
      {"value.precision", {"float32", {}}},  // unset it is the policy's
      {"data.max_input_seq_length", {"77", {}}},
  };
  return kSamples;
}

Sample sample_for(const Field& field) {
  if (const auto found = special_samples().find(field.path); found != special_samples().end()) return found->second;
  // Keys of ppo.* and value.* that grpo.* and policy.* have too take their samples.
  for (const auto& [section, twin] : {std::pair{"ppo.", "grpo."}, std::pair{"value.", "policy."}}) {
    if (!starts_with(field.path, section)) continue;
    const auto found = special_samples().find(replace_all(field.path, section, twin));
    if (found == special_samples().end()) continue;
    Sample sample = found->second;
    for (std::string& companion : sample.companions) companion = replace_all(companion, twin, section);
    return sample;
  }
  Config defaults;
  const FieldRef ref = field.get(defaults);
  if (auto* flag = std::get_if<bool*>(&ref)) return {**flag ? "false" : "true", {}};
  if (!field.choices.empty()) {
    for (const std::string& choice : field.choices) {
      if (!choice.empty() && "\"" + choice + "\"" != config::flow_text(ref)) return {choice, {}};
    }
    return {field.choices.front(), {}};  // one legal value only: nothing to change
  }
  if (std::holds_alternative<std::string*>(ref)) return {"some-text", {}};
  if (std::holds_alternative<std::vector<std::string>*>(ref)) return {"[one, two]", {}};
  if (std::holds_alternative<std::vector<int64_t>*>(ref)) return {"[7, 8]", {}};
  if (auto* number = std::get_if<int64_t*>(&ref)) return {std::to_string(std::max<int64_t>(**number, 0) + 2), {}};
  double value = 0;
  if (auto* number = std::get_if<double*>(&ref)) value = std::max(**number, 0.0);
  const double ceiling = std::min(field.maximum, 1e9);
  return {format_double(value < ceiling * 0.4 ? std::max(value * 1.5, 0.25) : value * 0.5), {}};
}

std::string name_of(const std::string& path) { return replace_all(replace_all(path, ".", "__"), "-", "_"); }

class EveryField : public testing::TestWithParam<size_t> {};

TEST_P(EveryField, ChangesTheResolvedConfiguration) {
  const Field& field = config::fields()[GetParam()];
  const Sample sample = sample_for(field);
  Config without = load_config_text("");
  std::vector<std::string> overrides = sample.companions;
  overrides.push_back(field.path + "=" + sample.value);
  std::vector<std::string> warnings;
  Config with = load_config_text("", overrides, &warnings);
  EXPECT_TRUE(warnings.empty());
  const std::string before = config::flow_text(field.get(without));
  const std::string after = config::flow_text(field.get(with));
  const bool single = field.choices.size() == 1;
  if (!single) {
    EXPECT_NE(before, after);
    EXPECT_NE(to_yaml(without), to_yaml(with));
  }
  // What is printed reads back as the same.
  Config again = load_config_text(to_yaml(with));
  EXPECT_EQ(config::flow_text(field.get(again)), after);
  EXPECT_EQ(to_yaml(again), to_yaml(with));
}

TEST_P(EveryField, RefusesWhatItMust) {
  const Field& field = config::fields()[GetParam()];
  Config defaults;
  const FieldRef ref = field.get(defaults);
  std::vector<std::string> bad = {"{a: {b: c}}"};
  if (std::holds_alternative<nlohmann::json*>(ref)) bad = {"[1]", "text"};
  if (std::holds_alternative<bool*>(ref)) bad.push_back("3");
  if (std::holds_alternative<int64_t*>(ref)) bad.push_back("1.5");
  if (std::holds_alternative<double*>(ref) || std::holds_alternative<std::optional<double>*>(ref))
    bad.push_back("\"text\"");
  if (std::isfinite(field.minimum) && !std::holds_alternative<std::vector<double>*>(ref) &&
      !std::holds_alternative<std::vector<int64_t>*>(ref)) {
    bad.push_back(format_double(field.minimum - 1));
  }
  if (std::isfinite(field.maximum) && !std::holds_alternative<std::vector<double>*>(ref))
    bad.push_back(format_double(field.maximum + 1));
  if (!field.choices.empty()) bad.push_back("no-such-choice");
  for (const std::string& value : bad) {
    try {
      load_config_text("", {field.path + "=" + value});
      ADD_FAILURE() << field.path << " accepted " << value;
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr(field.path + ": "));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Config, EveryField, testing::Range<size_t>(0, config::fields().size()),
                         [](const auto& info) { return name_of(config::fields()[info.param].path); });

TEST(Fields, PathsAreUniqueAndSectionsAreTogether) {
  std::set<std::string> seen, closed;
  std::vector<std::string> open;
  for (const Field& field : config::fields()) {
    EXPECT_TRUE(seen.insert(field.path).second) << field.path;
    EXPECT_FALSE(field.doc.empty()) << field.path;
    std::vector<std::string> sections;
    for (size_t dot = field.path.find('.'); dot != std::string::npos; dot = field.path.find('.', dot + 1))
      sections.push_back(field.path.substr(0, dot));
    for (const std::string& section : open) {
      if (std::find(sections.begin(), sections.end(), section) == sections.end()) closed.insert(section);
    }
    for (const std::string& section : sections)
      EXPECT_EQ(closed.count(section), 0u) << field.path << ": section " << section << " is opened twice";
    open = sections;
  }
  for (const auto& ignored : config::ignored_keys())
    EXPECT_EQ(seen.count(ignored.path), 0u) << ignored.path << " is both used and ignored";
  for (const auto& feature : config::feature_keys())
    EXPECT_EQ(seen.count(feature.path), 0u) << feature.path << " is both used and a feature that is not here";
  for (const auto& entry : config::version_defaults()) EXPECT_EQ(seen.count(entry.path), 1u) << entry.path;
  for (const auto& alias : config::alias_keys()) {
    EXPECT_EQ(seen.count(alias.path), 0u) << alias.path;
    for (const std::string& target : alias.targets) EXPECT_EQ(seen.count(target), 1u) << target;
  }
}

TEST(Fields, EveryRewardHasItsKeys) {
  std::set<std::string> paths;
  for (const Field& field : config::fields()) paths.insert(field.path);
  for (const std::string& name : reward_names()) {
    for (const char* key : {"enabled", "weight", "num_workers", "timeout_s", "failure_policy"})
      EXPECT_EQ(paths.count("env." + name + "." + key), 1u) << name << " " << key;
    EXPECT_EQ(Config{}.env.by_name(name).type, name);
  }
}

TEST(Fields, EveryIgnoredKeyWarnsOnce) {
  for (const auto& ignored : config::ignored_keys()) {
    for (const char* value : {"1", "{a: 1, b: {c: 2}}"}) {
      std::vector<std::string> warnings;
      load_config_text("", {ignored.path + "=" + value}, &warnings);
      ASSERT_EQ(warnings.size(), 1u) << ignored.path;
      EXPECT_THAT(warnings.front(), testing::HasSubstr(ignored.path + " has no effect here: " + ignored.reason));
    }
  }
}

TEST(Fields, EveryAliasSetsItsTargets) {
  for (const auto& alias : config::alias_keys()) {
    for (const Field& field : config::fields()) {
      if (std::find(alias.targets.begin(), alias.targets.end(), field.path) == alias.targets.end()) continue;
      const Sample sample = sample_for(field);
      Config config = load_config_text("", {alias.path + "=" + sample.value});
      const std::string after = config::flow_text(field.get(config));
      EXPECT_TRUE(after == sample.value || after == "\"" + sample.value + "\"") << alias.path << ": " << after;
    }
  }
}

TEST(Fields, ReferencePageIsUpToDate) {
  if (std::getenv("TRIREME_WRITE_DOCS")) write_file_atomic("docs/configuration.md", config_reference_markdown());
  EXPECT_EQ(read_file("docs/configuration.md"), config_reference_markdown())
      << "write it anew: TRIREME_WRITE_DOCS=1 with this test";
}

}  // namespace
}  // namespace trireme
