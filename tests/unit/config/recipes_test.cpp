// Recipes in NeMo-RL's manner: files load or are refused by a feature, never by a key; what a version means by silence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "base/text.h"
#include "tests/unit/errors.h"
#include "trainer/config/config.h"
#include "trainer/config/fields.h"

namespace trireme {
namespace {

using test::user_error_of;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using When = config::FeatureKey::When;

std::string load_error(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  return user_error_of([&] { load_config_text(yaml, overrides, nullptr, "run.yaml"); });
}

std::string refusal(const Config& config) {
  return user_error_of([&] { validate_supported(config); });
}

std::optional<std::string> no_variables(const std::string&) { return std::nullopt; }

struct File {
  const char* name;
  std::vector<std::string> refused;  // what the reasons say; none: it loads
};

class RecipeFiles : public testing::TestWithParam<File> {};

TEST_P(RecipeFiles, LoadOrAreRefusedByTheFeature) {
  std::vector<std::string> warnings;
  const Config config = load_config(std::string("tests/data/recipes/") + GetParam().name, {}, &warnings, no_variables);
  EXPECT_THAT(warnings, testing::Each(HasSubstr(" has no effect here: ")));
  const std::string reasons = refusal(config);
  EXPECT_EQ(reasons.empty(), GetParam().refused.empty()) << reasons;
  for (const std::string& part : GetParam().refused) EXPECT_THAT(reasons, HasSubstr(part));
}

INSTANTIATE_TEST_SUITE_P(
    Files, RecipeFiles,
    testing::Values(File{"v03_grpo.yaml", {}}, File{"small/v03_megatron.yaml", {}}, File{"v03_sft.yaml", {}},
                    File{"main_grpo.yaml", {}}, File{"small/main_split.yaml", {}}, File{"small/main_apart.yaml", {}},
                    File{"small/main_split_apart.yaml", {}}, File{"small/main_ppo_async.yaml", {}},
                    File{"small/main_reward_model.yaml", {}},
                    File{"small/main_gemma.yaml", {"policy.model_name: the architecture of Gemma is not supported"}},
                    File{"small/main_gym.yaml", {"env.should_use_nemo_gym: NeMo-Gym", "data.train.env_name: NeMo-Gym"}},
                    File{"small/main_many.yaml", {"data.train: several data sets at once"}}),
    [](const auto& info) {
      std::string name = info.param.name;
      for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
      return name;
    });

TEST(RecipeText, AsynchronousPpoIsWhatItsFileSays) {
  std::vector<std::string> warnings;
  const Config config = load_config("tests/data/recipes/small/main_ppo_async.yaml", {}, &warnings, no_variables);
  EXPECT_EQ(config.algorithm, "ppo");
  EXPECT_TRUE(has_critic(config));
  EXPECT_EQ(config.grpo.num_prompts_per_step, 64);
  EXPECT_EQ(config.ppo.policy_training_start_step, 4);
  EXPECT_TRUE(generates_elsewhere(config));
  EXPECT_EQ(most_age(config), 1);
  EXPECT_EQ(warmup_lead(config), 2);
  EXPECT_FALSE(exact_versions(config));
  EXPECT_FALSE(config.grpo.async_grpo.recompute_kv_cache_after_weight_updates);
  EXPECT_EQ(world_size(config), 2) << "of four devices two generate";
  EXPECT_EQ(config.value.optimizer.kwargs.lr, 2e-6);
  const auto of_async = [](const std::string& warning) { return warning.find("ppo.async_ppo.") != std::string::npos; };
  EXPECT_EQ(std::count_if(warnings.begin(), warnings.end(), of_async), 1) << "what a restore drops";
}

TEST(RecipeText, OtherAlgorithmsAreRefusedByNameAndNotByTheirKeys) {
  EXPECT_EQ(user_error_of([] { load_config("tests/data/recipes/main_dpo.yaml"); }),
            "tests/data/recipes/main_dpo.yaml:2: dpo: preference training (DPO) is not supported yet by this version, "
            "which runs grpo, ppo and sft");
  for (const auto& section : config::algorithm_sections()) {
    EXPECT_THAT(load_error(section.section + ":\n  unknown: ${oc.env:NOT_THERE}\n"),
                HasSubstr("run.yaml:1: " + section.section + ": " + section.what + " is not supported yet"));
  }
}

TEST(RecipeText, TheSectionSaysWhatIsRun) {
  EXPECT_EQ(load_config_text("sft: {max_num_steps: 3}\npolicy: {train_global_batch_size: 32}\n").algorithm, "sft");
  EXPECT_EQ(load_config_text("sft: {seed: 3}\ngrpo: {seed: 3}\n").algorithm, "grpo");
  EXPECT_EQ(load_config_text("sft: {seed: 3}\n", {"algorithm=grpo"}).algorithm, "grpo");
  EXPECT_EQ(load_config_text("grpo: {seed: 3}\n").algorithm, "grpo");
}

TEST(RecipeText, FilesOfV03MeanWhatV03Means) {
  const Config v03 = load_config("tests/data/recipes/v03_grpo.yaml");
  EXPECT_EQ(v03.compatibility, "v0.3");
  EXPECT_FALSE(v03.loss_fn.kl_input_clamp_value.has_value());
  EXPECT_FALSE(v03.loss_fn.kl_output_clamp_value.has_value());
  EXPECT_TRUE(v03.grpo.biased_group_std);
  EXPECT_FALSE(v03.loss_fn.kl_score_function_gradient);
  EXPECT_TRUE(v03.data.drop_line_feeds);
  EXPECT_TRUE(v03.data.shuffle);  // its loader does not, but its data sets come shuffled
  EXPECT_EQ(v03.data.train.split, "train_1M");
  const Config later = load_config("tests/data/recipes/main_grpo.yaml", {}, nullptr, no_variables);
  EXPECT_EQ(later.compatibility, "main");
  EXPECT_EQ(later.loss_fn.kl_input_clamp_value, 20.0);
  EXPECT_FALSE(later.grpo.biased_group_std);
  EXPECT_TRUE(later.loss_fn.kl_score_function_gradient);
  EXPECT_FALSE(later.data.drop_line_feeds);
  // What a file says counts, whatever the version.
  EXPECT_EQ(
      load_config_text("loss_fn: {kl_input_clamp_value: 7}\n", {"compatibility=v0.3"}).loss_fn.kl_input_clamp_value,
      7.0);
  EXPECT_FALSE(load_config_text("data: {shuffle: false}\n", {"compatibility=v0.3"}).data.shuffle);
  EXPECT_EQ(load_config("tests/data/recipes/v03_grpo.yaml", {"compatibility=main"}).loss_fn.kl_output_clamp_value,
            10.0);
  EXPECT_EQ(load_config("tests/data/recipes/v03_grpo.yaml", {"compatibility=null"}).compatibility, "v0.3");
}

TEST(RecipeText, SquadIsKnownByNameWithBothItsSplits) {
  const Config v03 = load_config_text("data: {dataset_name: squad}\n", {"compatibility=v0.3"});
  for (const DatasetConfig* dataset : {&v03.data.train, &v03.data.validation}) {
    EXPECT_EQ(dataset->dataset_name, "squad");
    EXPECT_EQ(dataset->input_key, "question");
    EXPECT_EQ(dataset->output_key, "answers.text[0]");
    EXPECT_EQ(dataset->system_key, "context");
  }
  EXPECT_EQ(v03.data.train.split, "train");
  EXPECT_EQ(v03.data.validation.split, "validation");
  EXPECT_EQ(refusal(v03), "");
  EXPECT_EQ(load_config_text(to_yaml(v03)).data.validation.split, "validation");
  // None where v0.3's file brings its own, where the set has no such split, and in later versions.
  for (const char* own :
       {"data: {dataset_name: squad, train_data_path: a.jsonl}\ncompatibility: v0.3\n",
        "data: {dataset_name: openmathinstruct2}\ncompatibility: v0.3\n", "data: {train: {dataset_name: squad}}\n"}) {
    const Config unnamed = load_config_text(own);
    EXPECT_EQ(unnamed.data.validation.dataset_name, "") << own;
    EXPECT_EQ(unnamed.data.validation.input_key, unnamed.data.train.input_key) << own;
    EXPECT_EQ(unnamed.data.validation.system_key, unnamed.data.train.system_key) << own;
  }
  // Columns that the file names are not the set's: no system message of its own then.
  EXPECT_EQ(load_config_text("data: {train: {dataset_name: squad, input_key: q}}\n").data.train.system_key, "");
  const Config dapo =
      load_config_text("data: {train: {dataset_name: DAPOMath17K}, validation: {dataset_name: DAPOMathAIME2024}}\n");
  EXPECT_EQ(dapo.data.train.input_key, "prompt[0].content");
  EXPECT_EQ(dapo.data.validation.output_key, "reward_model.ground_truth");
  EXPECT_EQ(refusal(dapo), "");
}

// In every version; of files of one's own, whatever set they are of, it is train.
TEST(RecipeText, ASplitThatIsNotNamedIsTheSetsOwn) {
  const auto split_of = [](const std::string& keys) {
    return load_config_text("data: {train: {" + keys + "}}\n").data.train.split;
  };
  EXPECT_EQ(split_of("dataset_name: OpenMathInstruct-2"), "train_1M");
  EXPECT_EQ(split_of("dataset_name: nvidia/OpenMathInstruct-2"), "train_1M");
  EXPECT_EQ(split_of("dataset_name: OpenMathInstruct-2, split: train"), "train");
  EXPECT_EQ(split_of("dataset_name: OpenMathInstruct-2, data_path: rows"), "train");
  EXPECT_EQ(split_of("dataset_name: gsm8k"), "train");
  EXPECT_EQ(split_of("dataset_name: org/rows"), "train");
  EXPECT_EQ(split_of("data_path: rows.jsonl"), "train");
  EXPECT_EQ(split_of("mixture: [1 OpenMathInstruct-2]"), "") << "of each source its own";
  const Config mixed = load_config_text("data: {train: {mixture: [1 OpenMathInstruct-2]}}\n");
  EXPECT_EQ(load_config_text(to_yaml(mixed)).data.train.split, "");
  EXPECT_EQ(load_config_text("data: {dataset_name: OpenMathInstruct-2}\n", {"compatibility=v0.3"}).data.train.split,
            "train_1M");
}

TEST(RecipeText, RowsAreHeldOutWhereNemoRlHoldsOutSome) {
  const auto held_out = [](const std::string& keys) {
    std::vector<std::string> warnings;
    const Config config = load_config_text("data: {train: {" + keys + "}}\n", {}, &warnings);
    const bool asked = keys.find("split_validation_size") != std::string::npos;
    const bool ignored = asked && config.data.train.split_validation_size == 0;
    EXPECT_THAT(warnings, ignored ? testing::Matcher<std::vector<std::string>>(ElementsAre(HasSubstr("no rows of")))
                                  : testing::Matcher<std::vector<std::string>>(IsEmpty()));
    EXPECT_EQ(load_config_text(to_yaml(config)).data.train.split_validation_size,
              config.data.train.split_validation_size);
    return config.data.train.split_validation_size;
  };
  EXPECT_EQ(held_out("dataset_name: OpenMathInstruct-2"), 0.05);
  EXPECT_EQ(held_out("dataset_name: OpenMathInstruct-2, split_validation_size: 0.1"), 0.1);
  EXPECT_EQ(held_out("dataset_name: OpenMathInstruct-2, data_path: rows.jsonl"), 0.05);
  for (const std::string name : {"gsm8k", "openai/gsm8k", "DAPOMath17K", "DeepScaler", "squad", "AIME2024"}) {
    EXPECT_EQ(held_out("dataset_name: " + name), 0) << name;
    EXPECT_EQ(held_out("dataset_name: " + name + ", split_validation_size: 0.05"), 0) << name;
    EXPECT_EQ(held_out("dataset_name: " + name + ", data_path: rows.jsonl, split_validation_size: 7"), 7) << name;
  }
  EXPECT_EQ(held_out("data_path: rows.jsonl"), 0);
  EXPECT_EQ(held_out("data_path: rows.jsonl, split_validation_size: 0.05"), 0.05);
  EXPECT_EQ(held_out("dataset_name: org/rows, split_validation_size: 0.05"), 0.05);
  EXPECT_EQ(held_out("mixture: [1 OpenMathInstruct-2]"), 0);
  EXPECT_EQ(load_config_text("data: {dataset_name: openmathinstruct2}\n", {"compatibility=v0.3"})
                .data.train.split_validation_size,
            0.05);
}

// Of v0.3: AIME 2024, each problem 16 times. Later versions' files say so themselves.
TEST(RecipeText, DeepScalerIsValidatedOnAimeInV03) {
  const Config v03 = load_config_text("data: {dataset_name: DeepScaler}\n", {"compatibility=v0.3"});
  EXPECT_EQ(refusal(v03), "");
  EXPECT_EQ(v03.data.validation.dataset_name, "AIME2024");
  EXPECT_EQ(v03.data.validation.split, "train");
  EXPECT_EQ(v03.data.validation.repeat, 16);
  EXPECT_EQ(v03.data.validation.input_key, "problem");
  EXPECT_EQ(v03.data.train.repeat, 1);
  EXPECT_EQ(load_config_text(to_yaml(v03)).data.validation.repeat, 16);
  const Config own =
      load_config_text("data: {dataset_name: DeepScaler, val_data_path: a.jsonl}\n", {"compatibility=v0.3"});
  EXPECT_EQ(own.data.validation.dataset_name, "");
  EXPECT_EQ(own.data.validation.repeat, 1);
  EXPECT_EQ(load_config_text("data: {train: {dataset_name: DeepScaler}}\n").data.validation.dataset_name, "");
  std::vector<std::string> warnings;
  const Config later = load_config_text(
      "data: {train: {dataset_name: DeepScaler}, validation: {dataset_name: AIME2024, repeat: 16}}\n", {}, &warnings);
  EXPECT_TRUE(warnings.empty());
  EXPECT_EQ(refusal(later), "");
  EXPECT_EQ(later.data.validation.repeat, 16);
  EXPECT_THAT(load_error("data: {train: {mixture: [1 gsm8k], repeat: 2}}\n"),
              HasSubstr("data.train.repeat: has no meaning beside data.train.mixture"));
}

TEST(RecipeText, StagesUnderV03ShareTheOptimizerWhateverTheStrategySays) {
  const std::string text =
      "policy: {megatron_cfg: {enabled: true, pipeline_model_parallel_size: 2, distributed_data_parallel_config: "
      "{data_parallel_sharding_strategy: optim_grads_params}}, dtensor_cfg: {enabled: false}}\ncluster: "
      "{gpus_per_node: 2}\n";
  EXPECT_EQ(state_sharding(load_config_text(text, {"compatibility=v0.3"})), StateSharding::kOptimizer);
  EXPECT_THAT(load_error(text), HasSubstr("pipeline stages take no_shard or optim"));
}

TEST(RecipeText, CompatibilityChoosesEveryDifferingDefault) {
  for (const auto& entry : config::version_defaults()) {
    for (const auto& field : config::fields()) {
      if (field.path != entry.path) continue;
      Config v03 = load_config_text("", {"compatibility=v0.3"});
      Config later = load_config_text("");
      EXPECT_EQ(config::flow_text(field.get(v03)), entry.v03) << entry.path;
      EXPECT_EQ(config::flow_text(field.get(later)), entry.main) << entry.path;
      // Also where another value refers to it, and after printing.
      if (entry.v03 != "null") {
        EXPECT_EQ(
            load_config_text("logger: {log_dir: \"x${" + entry.path + "}\"}\n", {"compatibility=v0.3"}).logger.log_dir,
            "x" + entry.v03);
      }
      Config again = load_config_text(to_yaml(v03));
      EXPECT_EQ(config::flow_text(field.get(again)), entry.v03) << entry.path;
    }
  }
  EXPECT_THAT(load_error("compatibility: v0.9\n"), HasSubstr("must be one of v0.3, main"));
  EXPECT_THAT(load_error("compatibility: v0.3\nloss_fn: 3\n"), HasSubstr("loss_fn: expected a mapping"));
}

// Overrides that switch a feature on, or leave it off.
std::string switch_on(const config::FeatureKey& key) {
  switch (key.when) {
    case When::kEnabled:
      return key.path + "={enabled: true, more: 1}";
    case When::kAboveOne:
      return key.path + "=2";
    case When::kIs:
      return key.path + "=" + key.value;
    case When::kList:
      return key.path + "=[{dataset_name: gsm8k}]";
    case When::kGrades:
      return "data.train.env_name=" + key.path.substr(4);
    case When::kSet:
    case When::kNever:
      break;
  }
  return key.path + "=[1]";
}

std::vector<std::string> leave_off(const config::FeatureKey& key) {
  switch (key.when) {
    case When::kEnabled:
      return {key.path + "=null", key.path + "={enabled: false, more: 1}", key.path + "={more: 1}"};
    case When::kAboveOne:
      return {key.path + "=1", key.path + "=null"};
    case When::kIs:
      return {key.path + "=auto", key.path + "=null"};
    case When::kList:
      return {key.path + "={dataset_name: gsm8k}", key.path + "=null"};
    case When::kGrades:
      return {key.path + "={num_workers: 3}", key.path + "=null"};
    case When::kSet:
      return {key.path + "=null", key.path + "=false", key.path + "=0",
              key.path + "=0.0",  key.path + "=[]",    key.path + "={}"};
    case When::kNever:
      break;
  }
  return {key.path + "=3", key.path + "={below: {it: 1}}"};
}

TEST(RecipeText, EveryFeatureRefusesWhereItIsOnAndIsSilentWhereItIsOff) {
  for (const auto& key : config::feature_keys()) {
    if (key.when != When::kNever) {
      const std::string reasons = refusal(load_config_text("", {switch_on(key)}));
      EXPECT_THAT(reasons, HasSubstr(": " + key.feature + " is not supported yet by this version")) << switch_on(key);
    }
    for (const std::string& off : leave_off(key)) {
      std::vector<std::string> warnings;
      const Config config = load_config_text("", {off}, &warnings);
      EXPECT_EQ(refusal(config), "") << off;
      if (!starts_with(key.path, "policy.generation.vllm_cfg.")) {
        EXPECT_THAT(warnings, IsEmpty()) << off;
      }
    }
  }
}

TEST(RecipeText, OneSentenceAFeature) {
  const Config config = load_config_text("", {"policy.megatron_cfg.peft.enabled=true",
                                              "policy.dtensor_cfg.lora_cfg.enabled=true", "policy.draft.enabled=true"});
  EXPECT_THAT(config.missing_features, ElementsAre("policy.draft: a draft model for speculative decoding",
                                                   "policy.dtensor_cfg.lora_cfg: low-rank adapters (LoRA)"));
}

TEST(RecipeText, KeysBesideAFeatureAreStillChecked) {
  EXPECT_THAT(load_error("policy: {draft: {enabled: true}, drafts: 1}\n"),
              HasSubstr("policy.drafts: unknown key; did you mean 'draft'?"));
  EXPECT_THAT(load_error("policy: {dequantise_base_checkpoint: 1}\n"),
              HasSubstr("did you mean 'dequantize_base_checkpoint'?"));
}

TEST(RecipeText, ModelsAndDataSetsThatAreNotHereAreNamed) {
  for (const auto& family : config::unsupported_families()) {
    EXPECT_THAT(refusal(load_config_text("", {"policy.model_name=" + family.prefix + "x"})),
                HasSubstr("policy.model_name: the architecture of " + family.family));
  }
  for (const char* name : {"Qwen/Qwen3-32B", "meta-llama/Llama-3.3-70B-Instruct", "Qwen/Qwen2.5-Math-7B",
                           "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "/models/google/gemma-3"}) {
    EXPECT_EQ(refusal(load_config_text("", {std::string("policy.model_name=") + name})), "") << name;
  }
  EXPECT_EQ(
      refusal(load_config_text("data: {dataset_name: no-such-set}\n")),
      "data.train.dataset_name: the data set 'no-such-set' without a file (data.train.data_path) is not supported "
      "yet by this version");
  EXPECT_THAT(refusal(load_config_text("data: {dataset_name: gsm8}\n")), HasSubstr("'gsm8' (did you mean 'gsm8k'?)"));
  EXPECT_EQ(refusal(load_config_text("data: {dataset_name: no-such-set, train_data_path: a.jsonl}\n")), "");
  EXPECT_EQ(load_config_text("data: {dataset_name: openmathinstruct2}\n").data.train.input_key, "problem");
}

TEST(RecipeText, ATruncationRangeWithoutATypeTruncatesOrIsAnError) {
  const std::string on = "loss_fn: {use_importance_sampling_correction: true, truncated_importance_sampling_ratio: 2";
  const auto type = [](const std::string& text) {
    return load_config_text(text).loss_fn.truncated_importance_sampling_type;
  };
  EXPECT_EQ(type(on + "}\n"), TruncatedImportanceSampling::kTis);  // v0.4, v0.5
  EXPECT_EQ(type(on + ", truncated_importance_sampling_type: icepop}\n"), TruncatedImportanceSampling::kIcepop);
  EXPECT_EQ(type(on + ", truncated_importance_sampling_type: ''}\n"),
            TruncatedImportanceSampling::kTis);  // as older checkpoints print a run's configuration
  EXPECT_THAT(
      load_error(on + ", truncated_importance_sampling_type: null}\n"),
      HasSubstr("loss_fn.truncated_importance_sampling_ratio: needs loss_fn.truncated_importance_sampling_type"));
  EXPECT_THAT(load_error("loss_fn: {truncated_importance_sampling_ratio: 2}\n"),
              HasSubstr("needs loss_fn.use_importance_sampling_correction"));
  EXPECT_THAT(load_error("loss_fn: {truncated_importance_sampling_ratio_min: 0.5}\n"),
              HasSubstr("loss_fn.truncated_importance_sampling_ratio_min: needs"));
  EXPECT_EQ(type("loss_fn: {truncated_importance_sampling_ratio: null}\n"), TruncatedImportanceSampling::kNone);
}

TEST(RecipeText, RecomputationCountsWhereItIsSwitchedOn) {
  const auto setting = [](const std::string& keys) {
    return recompute_setting(load_config_text("policy: {megatron_cfg: {enabled: true, " + keys + "}}\n"));
  };
  EXPECT_TRUE(setting("activation_checkpointing: false, recompute_granularity: full").fit);  // as NeMo-RL's base file
  EXPECT_TRUE(setting("activation_checkpointing: true, recompute_granularity: full").all);
  EXPECT_TRUE(setting("recompute_granularity: full").all);
  const auto selective = setting("activation_checkpointing: true, recompute_granularity: selective");
  EXPECT_TRUE(selective.norms && selective.swiglu && !selective.experts && !selective.all);
  EXPECT_TRUE(setting("recompute_granularity: selective, recompute_modules: [moe]").experts);
  EXPECT_TRUE(setting("activation_checkpointing: true").all);
}

TEST(RecipeText, NullsAndMinusOneOfTheMainBranch) {
  const Config config = load_config("tests/data/recipes/main_grpo.yaml", {}, nullptr, no_variables);
  EXPECT_EQ(config.grpo.val_period, 0);
  EXPECT_GE(config.grpo.max_val_samples, 1000000000);
  EXPECT_GE(config.grpo.val_batch_size, 1000000000);
  EXPECT_EQ(config.data.max_input_seq_length, 512);
  EXPECT_EQ(config.data.train.prompt_file, "somewhere/think.txt");
  EXPECT_EQ(config.policy.generation.val_temperature, 0.9);
  EXPECT_EQ(config.policy.train_global_batch_size, 32);
  EXPECT_EQ(
      load_config_text("policy: {sequence_packing: {algorithm: modified_ffd}}\n").policy.sequence_packing.algorithm,
      "modified_first_fit_decreasing");
  EXPECT_THAT(load_error("policy: {model_name: \"" + std::string(3, '?') + "\"}\n"),
              HasSubstr("run.yaml:1: policy.model_name: must be set"));
}

TEST(RecipeText, VariablesOfTheEnvironment) {
  const EnvironmentLookup environment = [](const std::string& name) {
    return name == "HERE" ? std::optional<std::string>("/data") : std::nullopt;
  };
  const auto log_dir = [&](const std::string& text) {
    return load_config_text("logger: {log_dir: \"" + text + "\"}\n", {}, nullptr, "run.yaml", environment)
        .logger.log_dir;
  };
  EXPECT_EQ(log_dir("${oc.env:HERE}/logs"), "/data/logs");
  EXPECT_EQ(log_dir("${oc.env:NOT_HERE,logs}"), "logs");
  EXPECT_EQ(log_dir("${oc.env:NOT_HERE, ${oc.env:HERE}}/x"), "/data/x");
  EXPECT_EQ(user_error_of([&] { log_dir("${oc.env:NOT_HERE}"); }),
            "run.yaml:1: '${oc.env:NOT_HERE}': the environment has no variable NOT_HERE");
  EXPECT_THAT(load_error("logger: {log_dir: \"${oc.env:HOME}\"}\n"),
              HasSubstr("has no variable HOME"));  // none is read
}

TEST(RecipeText, RelativeReferences) {
  const Config config = load_config_text(
      "policy: {generation: {temperature: 0.5, val_temperature: \"${.temperature}\"}, train_micro_batch_size: 3, "
      "sequence_packing: {sequence_length_round: \"${..train_micro_batch_size}\"}}\n"
      "data: {train: {data_path: a, prompt_file: \"${.data_path}.txt\"}, validation: \"${data.train}\"}\n");
  EXPECT_EQ(config.policy.generation.val_temperature, 0.5);
  EXPECT_EQ(config.policy.sequence_packing.sequence_length_round, 3);
  EXPECT_EQ(config.data.validation.prompt_file, "a.txt");
  EXPECT_THAT(load_error("grpo: {seed: \"${...x}\"}\n"), HasSubstr("goes above the top"));
  EXPECT_THAT(load_error("grpo: {seed: \"${.seed}\"}\n"), HasSubstr("circle"));
}

}  // namespace
}  // namespace trireme
