// Files, inheritance, interpolation, overrides, and what bad input is told.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/fs.h"
#include "tests/unit/errors.h"
#include "trainer/config/config.h"

namespace trireme {
namespace {

using test::user_error_of;
using testing::ElementsAre;
using testing::HasSubstr;

std::string load_error(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
  return user_error_of([&] { load_config_text(yaml, overrides, nullptr, "run.yaml"); });
}

class ConfigFiles : public testing::Test {
 protected:
  std::filesystem::path write(const std::string& name, const std::string& text) {
    const auto path = folder_.path() / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
    return path;
  }
  TemporaryDirectory folder_;
};

TEST_F(ConfigFiles, ChildWinsOverParentKeyByKey) {
  write("base/grandparent.yaml", "grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, seed: 1}\n");
  write("base/parent.yaml",
        "defaults: grandparent.yaml\ngrpo: {seed: 2, val_period: 5}\npolicy: {train_global_batch_size: 32}\n");
  const auto child = write("child.yaml", "defaults: base/parent.yaml\ngrpo:\n  val_period: 7\n");
  const Config config = load_config(child);
  EXPECT_EQ(config.grpo.num_prompts_per_step, 8);
  EXPECT_EQ(config.grpo.num_generations_per_prompt, 4);
  EXPECT_EQ(config.grpo.seed, 2);
  EXPECT_EQ(config.grpo.val_period, 7);
}

TEST_F(ConfigFiles, LaterDefaultsOfAListWin) {
  write("a.yaml", "grpo: {seed: 1, val_period: 3}\n");
  write("b.yaml", "grpo: {seed: 2}\n");
  const Config config = load_config(write("child.yaml", "defaults: [a.yaml, b.yaml, _self_]\n"));
  EXPECT_EQ(config.grpo.seed, 2);
  EXPECT_EQ(config.grpo.val_period, 3);
}

TEST_F(ConfigFiles, OverrideMarkReplacesAMapping) {
  write("base.yaml", "policy: {generation: {temperature: 0.5, top_p: 0.9}}\n");
  const Config merged = load_config(write("merged.yaml", "defaults: base.yaml\npolicy: {generation: {top_p: 0.8}}\n"));
  EXPECT_EQ(merged.policy.generation.temperature, 0.5);
  const Config replaced = load_config(
      write("replaced.yaml", "defaults: base.yaml\npolicy: {generation: {_override_: true, top_p: 0.8}}\n"));
  EXPECT_EQ(replaced.policy.generation.temperature, 1.0);
  EXPECT_EQ(replaced.policy.generation.top_p, 0.8);
  EXPECT_THAT(load_error("policy: {_override_: perhaps}\n"), HasSubstr("run.yaml:1: _override_"));
}

TEST_F(ConfigFiles, CircleOfDefaultsIsNamed) {
  write("a.yaml", "defaults: b.yaml\n");
  write("b.yaml", "\ndefaults: a.yaml\n");
  const std::string message = user_error_of([&] { load_config(folder_.path() / "a.yaml"); });
  EXPECT_THAT(message,
              HasSubstr("b.yaml:2: defaults: files inherit each other in a circle: a.yaml -> b.yaml -> a.yaml"));
}

TEST_F(ConfigFiles, MissingParentNamesTheLineThatAsks) {
  const auto child = write("child.yaml", "grpo: {seed: 1}\ndefaults: nowhere.yaml\n");
  const std::string message = user_error_of([&] { load_config(child); });
  EXPECT_THAT(message, HasSubstr("child.yaml:2: defaults:"));
  EXPECT_THAT(message, HasSubstr("nowhere.yaml"));
}

TEST_F(ConfigFiles, ProblemIsLocatedInTheFileThatWroteIt) {
  write("base.yaml", "grpo:\n  seed: -5\n");
  const std::string message =
      user_error_of([&] { load_config(write("child.yaml", "defaults: base.yaml\ngrpo: {val_period: 3}\n")); });
  EXPECT_THAT(message, HasSubstr("base.yaml:2: grpo.seed: must be at least 0, got -5"));
}

TEST(ConfigText, EmptyFileIsAllDefaults) {
  const Config config = load_config_text("");
  EXPECT_EQ(config.policy.logprob_batch_size, config.policy.train_micro_batch_size);
  EXPECT_EQ(config.policy.generation.max_new_tokens, config.policy.max_total_sequence_length);
  EXPECT_EQ(config.policy.tokenizer.name, config.policy.model_name);
}

TEST(ConfigText, InterpolationTakesValuesSectionsAndProducts) {
  const Config config = load_config_text(
      "policy:\n"
      "  max_total_sequence_length: 256\n"
      "  train_micro_batch_size: 8\n"
      "  sequence_packing:\n"
      "    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}\n"
      "    logprob_mb_tokens: \"${add:${policy.sequence_packing.train_mb_tokens},1}\"\n"
      "  optimizer: {kwargs: {lr: 3.0e-4, weight_decay: '${div:1, 8}', betas: [0.5, 0.6]}}\n"
      "  megatron_cfg: {optimizer: {lr: '${policy.optimizer.kwargs.lr}', min_lr: '${min:1e-5, "
      "${policy.optimizer.kwargs.lr}}'}}\n"
      "data:\n"
      "  train: {data_path: a.jsonl, input_key: q}\n"
      "  validation: ${data.train}\n"
      "logger: {log_dir: \"logs/${policy.precision}-x${policy.max_total_sequence_length}\\\\${kept}\"}\n");
  EXPECT_EQ(config.policy.sequence_packing.train_mb_tokens, 2048);
  EXPECT_EQ(config.policy.sequence_packing.logprob_mb_tokens, 2049);
  EXPECT_EQ(config.policy.optimizer.kwargs.weight_decay, 0.125);
  EXPECT_EQ(config.policy.megatron_cfg.optimizer.lr, 3e-4);
  EXPECT_EQ(config.policy.megatron_cfg.optimizer.min_lr, 1e-5);
  EXPECT_EQ(config.data.validation.data_path, "a.jsonl");
  EXPECT_EQ(config.data.validation.input_key, "q");
  EXPECT_EQ(config.logger.log_dir, "logs/bfloat16-x256${kept}");  // precision is set by no file: its default
}

TEST(ConfigText, BadInterpolationsAreNamed) {
  EXPECT_THAT(load_error("grpo:\n  seed: ${grpo.sed}\n"),
              HasSubstr("run.yaml:2: '${grpo.sed}': there is no key 'grpo.sed'"));
  EXPECT_THAT(load_error("grpo: {seed: \"${grpo.val_period}\", val_period: \"${grpo.seed}\"}\n"),
              HasSubstr("refer to each other in a circle"));
  EXPECT_THAT(load_error("grpo: ${grpo}\n"), HasSubstr("circle"));
  EXPECT_THAT(load_error("grpo: {seed: '${mul:2}'}\n"), HasSubstr("expected two numbers, got 1"));
  EXPECT_THAT(load_error("grpo: {seed: '${mul:2, two}'}\n"), HasSubstr("'two' is not a number"));
  EXPECT_THAT(load_error("grpo: {seed: '${pow:2, 3}'}\n"), HasSubstr("unknown function"));
  EXPECT_THAT(load_error("grpo: {seed: '${div:2, 0}'}\n"), HasSubstr("division by zero"));
  EXPECT_THAT(load_error("grpo: {seed: '${mul:9223372036854775807, 2}'}\n"), HasSubstr("too large"));
  EXPECT_THAT(load_error("logger: {log_dir: 'a${grpo.seed'}\n"), HasSubstr("without '}'"));
  std::string bomb = "logger:\n  a0: xxxxxxxxxx\n";
  for (int i = 1; i < 30; ++i) {
    const std::string before = "${logger.a" + std::to_string(i - 1) + "}";
    bomb += "  a" + std::to_string(i) + ": \"" + before + before + "\"\n";
  }
  EXPECT_THAT(load_error(bomb), HasSubstr("interpolation"));
}

TEST(ConfigText, OverridesWinAndTakeYamlValues) {
  const Config config =
      load_config_text("grpo: {seed: 1}\n",
                       {"grpo.seed=7", "++policy.optimizer.kwargs.betas=[0.8, 0.9]", "+logger.dump_steps=[3,4]",
                        "env.http.url=http://rewards:8080/score", "env.http.enabled=true",
                        "data.train.prompt_file=", "policy.generation.max_new_tokens=${policy.train_micro_batch_size}",
                        "grpo.advantage_clip_low=null", "policy.tokenizer.chat_template_kwargs.enable_thinking=false"});
  EXPECT_EQ(config.grpo.seed, 7);
  EXPECT_THAT(config.policy.optimizer.kwargs.betas, ElementsAre(0.8, 0.9));
  EXPECT_THAT(config.logger.dump_steps, ElementsAre(3, 4));
  EXPECT_EQ(config.env.http.url, "http://rewards:8080/score");
  EXPECT_EQ(config.policy.generation.max_new_tokens, 4);
  EXPECT_EQ(config.policy.tokenizer.chat_template_kwargs.at("enable_thinking"), false);
}

TEST(ConfigText, BadOverridesAreNamed) {
  EXPECT_THAT(load_error("", {"grpo.seed"}), HasSubstr("override 'grpo.seed': expected key.sub=value"));
  EXPECT_THAT(load_error("", {"grpo.sed=3"}),
              HasSubstr("override 'grpo.sed=3': grpo.sed: unknown key; did you mean 'seed'?"));
  EXPECT_THAT(load_error("", {"grpo..seed=3"}), HasSubstr("is not a key"));
  EXPECT_THAT(load_error("policy: {scheduler: [{name: ConstantLR}]}\n", {"policy.scheduler.0.name=x"}),
              HasSubstr("set that value as a whole"));
  EXPECT_THAT(load_error("", {"grpo.seed=[1"}), HasSubstr("not YAML"));
}

TEST(ConfigText, UnknownKeyNamesTheNearest) {
  EXPECT_EQ(load_error("policy:\n  precision: float32\n  train_micro_batchsize: 3\n"),
            "run.yaml:3: policy.train_micro_batchsize: unknown key; did you mean 'train_micro_batch_size'?");
  EXPECT_EQ(load_error("\ngrop: {seed: 3}\n"), "run.yaml:2: grop: unknown key; did you mean 'grpo'?");
  // The right name in the wrong section.
  EXPECT_EQ(load_error("loss_fn: {num_prompts_per_step: 3}\n"),
            "run.yaml:1: loss_fn.num_prompts_per_step: unknown key; did you mean 'grpo.num_prompts_per_step'?");
  EXPECT_EQ(load_error("policy: {zzzzzzzzzz: 3}\n"), "run.yaml:1: policy.zzzzzzzzzz: unknown key");
}

TEST(ConfigText, WrongTypesSayWhatIsExpected) {
  EXPECT_THAT(load_error("grpo: {seed: many}\n"),
              HasSubstr("run.yaml:1: grpo.seed: expected an integer, got the text 'many'"));
  EXPECT_THAT(load_error("grpo: {seed: 1.5}\n"), HasSubstr("expected an integer, got '1.5'"));
  EXPECT_THAT(load_error("grpo: {seed: '7'}\n"), HasSubstr("expected an integer, got the text '7'"));
  EXPECT_THAT(load_error("grpo: {seed: [1]}\n"), HasSubstr("expected an integer, got a list"));
  EXPECT_THAT(load_error("grpo: {normalize_rewards: 1}\n"), HasSubstr("expected true or false, got '1'"));
  EXPECT_THAT(load_error("grpo: 3\n"), HasSubstr("run.yaml:1: grpo: expected a mapping with keys such as"));
  EXPECT_THAT(load_error("grpo: {num_prompts_per_step: null}\n"), HasSubstr("expected an integer, got null"));
  EXPECT_THAT(load_error("policy: {optimizer: {kwargs: {lr: .inf}}}\n"), HasSubstr("expected a number"));
  EXPECT_THAT(load_error("policy: {precision: bf16}\n"), HasSubstr("must be one of bfloat16, float32, got 'bf16'"));
  EXPECT_THAT(load_error("policy: {generation: {top_p: 1.5}}\n"), HasSubstr("must be above 0 and at most 1, got 1.5"));
  EXPECT_THAT(load_error("cluster: {collective_timeout_s: 1e10}\n"), HasSubstr("must be above 0 and at most 1"));
  EXPECT_THAT(load_error("- a\n"), HasSubstr("expected a mapping of sections"));
}

TEST(ConfigText, BadYamlNamesTheLine) {
  EXPECT_THAT(load_error("grpo:\n  seed: 1\n  - x\n"), HasSubstr("run.yaml:"));
  EXPECT_THAT(load_error("grpo:\n  seed: 1\n  seed: 2\n"), HasSubstr("run.yaml:3: key 'seed' is given twice"));
  EXPECT_THAT(load_error("grpo: {seed: \xff}\n"), HasSubstr("not UTF-8"));
  EXPECT_THAT(load_error(std::string(200, '[') + std::string(200, ']')), HasSubstr("deep"));
}

TEST(ConfigText, AllProblemsAreToldAtOnce) {
  const std::string message = load_error("grpo: {sed: 1, val_period: x}\npolicy: {train_micro_batch_size: 0}\n");
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 2);
  std::string many = "grpo:\n";
  for (int i = 0; i < 40; ++i) many += "  wrong_" + std::to_string(i) + ": 1\n";
  EXPECT_THAT(load_error(many), HasSubstr("and 20 more"));
}

TEST(ConfigText, EngineInternalsAreAcceptedWithOneWarningEach) {
  std::vector<std::string> warnings;
  const Config config = load_config_text(
      "policy:\n  generation:\n    backend: vllm\n    vllm_cfg: {gpu_memory_utilization: 0.6, enforce_eager: false}\n"
      "logger: {swanlab_enabled: false}\n",
      {}, &warnings, "run.yaml");
  EXPECT_EQ(config.policy.generation.backend, "vllm");
  EXPECT_THAT(
      warnings,
      ElementsAre("run.yaml:4: policy.generation.vllm_cfg has no effect here: a setting of another generation engine; "
                  "for the layout of generation see policy.generation.tensor_parallel_size and fold_pipeline",
                  HasSubstr("run.yaml:5: logger.swanlab_enabled has no effect here")));
}

TEST(ConfigText, AsJsonItHasTheSameValues) {
  const Config config = load_config_text(
      "logger: {log_dir: out, wandb_enabled: true, wandb: {project: sums, tags: [a, b]}, tensorboard: {}}\n");
  const nlohmann::json json = to_json(config);
  EXPECT_EQ(json["logger"]["wandb"]["tags"], nlohmann::json({"a", "b"}));
  EXPECT_EQ(json["logger"]["wandb_enabled"], true);
  EXPECT_EQ(json["logger"]["tensorboard"]["log_dir"], "out/tensorboard");
  EXPECT_EQ(json["grpo"]["num_prompts_per_step"], config.grpo.num_prompts_per_step);
  EXPECT_TRUE(json["policy"]["optimizer"]["kwargs"]["lr"].is_number_float());
}

TEST(ConfigText, OldAndNewSpellingsOfDataAgree) {
  const Config flat =
      load_config_text("data: {dataset_name: gsm8k, prompt_file: p.txt, val_data_path: v.jsonl, input_key: q}\n");
  EXPECT_EQ(flat.data.train.dataset_name, "gsm8k");
  EXPECT_EQ(flat.data.train.prompt_file, "p.txt");
  EXPECT_EQ(flat.data.validation.prompt_file, "p.txt");
  EXPECT_EQ(flat.data.validation.data_path, "v.jsonl");
  EXPECT_EQ(flat.data.validation.input_key, "q");
  EXPECT_EQ(flat.data.train.output_key, "answer");  // GSM8K's column
  const Config own = load_config_text("data: {default: {prompt_file: p.txt}, validation: {prompt_file: v.txt}}\n");
  EXPECT_EQ(own.data.train.prompt_file, "p.txt");
  EXPECT_EQ(own.data.validation.prompt_file, "v.txt");
}

TEST(ConfigText, AdvEstimatorKeysWin) {
  const Config config =
      load_config_text("grpo: {normalize_rewards: true, adv_estimator: {normalize_rewards: false}}\n");
  EXPECT_FALSE(config.grpo.normalize_rewards);
}

TEST(ConfigText, DynamicBatchingTurnsPackingOffUnlessBothAreAsked) {
  EXPECT_FALSE(load_config_text("policy: {dynamic_batching: {enabled: true}}\n").policy.sequence_packing.enabled);
  EXPECT_THAT(load_error("policy: {dynamic_batching: {enabled: true}, sequence_packing: {enabled: true}}\n"),
              HasSubstr("excludes"));
}

TEST(ConfigText, NullMeansWhatNemoMeansByIt) {
  const Config config = load_config_text(
      "policy: {max_grad_norm: null, tokenizer: {chat_template: null}, generation: {top_k: null, stop_strings: null}, "
      "optimizer: null, scheduler: null}\n"
      "checkpointing: {metric_name: null, keep_top_k: null}\nloss_fn: {kl_input_clamp_value: null, ratio_clip_c: "
      "null}\n");
  EXPECT_EQ(config.policy.max_grad_norm, 0);
  EXPECT_EQ(config.policy.tokenizer.chat_template, "none");
  EXPECT_EQ(config.policy.generation.top_k, 0);
  EXPECT_EQ(config.checkpointing.metric_name, "");
  EXPECT_EQ(config.checkpointing.keep_top_k, 0);
  EXPECT_FALSE(config.loss_fn.kl_input_clamp_value.has_value());
  EXPECT_TRUE(config.loss_fn.kl_output_clamp_value.has_value());
}

TEST(ConfigText, Schedulers) {
  const Config config = load_config_text(
      "policy:\n  scheduler:\n"
      "    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 50}}\n"
      "    - {name: ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}\n"
      "    - {milestones: [50]}\n");
  ASSERT_EQ(config.policy.scheduler.pieces.size(), 2u);
  EXPECT_EQ(config.policy.scheduler.pieces[0].name, "LinearLR");
  EXPECT_EQ(config.policy.scheduler.pieces[0].kwargs.at("end_factor"), 1.0);
  EXPECT_EQ(config.policy.scheduler.pieces[1].kwargs.at("total_iters"), 1e10);
  EXPECT_THAT(config.policy.scheduler.milestones, ElementsAre(50));
  const auto scheduler_error = [](const std::string& list) {
    return load_error("policy: {scheduler: " + list + "}\n");
  };
  EXPECT_THAT(scheduler_error("[{name: OneCycleLR}]"),
              HasSubstr("unknown scheduler 'OneCycleLR'; there are ConstantLR"));
  EXPECT_THAT(scheduler_error("[{name: LinearLR, kwargs: {iters: 3}}]"),
              HasSubstr("LinearLR has no 'iters'; it has end_factor"));
  EXPECT_THAT(scheduler_error("[{name: CosineAnnealingLR}]"), HasSubstr("needs 'T_max'"));
  EXPECT_THAT(scheduler_error("[{name: LinearLR}, {name: ConstantLR}, {milestones: [5, 9]}]"),
              HasSubstr("2 schedulers need 1 milestones, got 2"));
  EXPECT_THAT(scheduler_error("[{name: LinearLR}, {name: ConstantLR}, {name: ConstantLR}, {milestones: [9, 5]}]"),
              HasSubstr("must rise"));
  EXPECT_THAT(scheduler_error("[{milestones: [5]}, {name: LinearLR}]"), HasSubstr("milestones must be the last entry"));
}

// A resolved file has the newer names: what is typed under an older one still counts.
TEST(Load, AnOverrideByAnAliasWinsOverTheFile) {
  const std::string file = "data: {train: {prompt_file: a.txt}, validation: {prompt_file: a.txt}}\n";
  const Config config = load_config_text(file, {"data.prompt_file=b.txt"});
  EXPECT_EQ(config.data.train.prompt_file, "b.txt");
  EXPECT_EQ(config.data.validation.prompt_file, "b.txt");
  const Config both = load_config_text(file, {"data.prompt_file=b.txt", "data.validation.prompt_file=c.txt"});
  EXPECT_EQ(both.data.train.prompt_file, "b.txt");
  EXPECT_EQ(both.data.validation.prompt_file, "c.txt");
}

}  // namespace
}  // namespace trireme
