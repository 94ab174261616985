// trireme bench step: a whole step of GRPO, or of PPO with a critic, with forced lengths and drawn rewards.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "trainer/bench/generation.h"
#include "trainer/config/config.h"
#include "trainer/parallel/context.h"

namespace trireme::bench {

struct StepBenchOptions {
  CommonOptions common;
  GenerationOptions generation;
  std::string lengths;  // empty: the next four decide
  int64_t prompts = 8, samples = 32, response_tokens = 794, prompt_tokens = 200;
  int64_t optimizer_steps = 4;
  bool reference = false;                  // a reference model and the KL term
  bool critic = false;                     // PPO with a critic of the same shape, ppo.ppo_epochs 1; else GRPO
  int64_t train_tokens = 16384;            // of a packed micro-batch; raised to the longest sample
  std::string gradient_dtype = "float32";  // in which backward adds up and ranks reduce
  bool checkpoint_activations = false;
  int64_t recompute_layers = -1;        // policy.recompute_layers
  bool share_prompts = false;           // policy.sequence_packing.share_prompts
  int64_t background_sms = -1;          // policy.generation.background_sms
  bool early_gradients = false;         // grpo.early_gradients
  int64_t carry_over = 0;               // grpo.async_grpo with this age; 0: off
  bool keep_cache = false;              // then: recompute_kv_cache_after_weight_updates false
  std::string ratio_from = "training";  // then: ratio_from
  int64_t engines = 0;                  // that generate (engines_bench.h); 0: it is generated here
  int64_t engine_tp = 1;                // processes of each
  double collective_timeout_s = 600;
  std::function<void(const std::string&)> on_stuck;  // ends the process (ReferenceStream)
};

// Of a step's rollout.
RolloutLengths step_lengths(const StepBenchOptions& options);
// The configuration that a run of this benchmark's step would have.
Config step_config(const StepBenchOptions& options, const Target& target, const RolloutLengths& lengths, int64_t ranks);

// Collective. Ranks generate, exchange and train through the trainer's own RolloutCollector and PolicyTrainer: the
// phases and the order of a run's step, without data set, tokenizer and reward programs. Every rank returns the report;
// rank 0 prints and writes it.
nlohmann::json bench_step(const StepBenchOptions& options, ParallelContext& context, std::ostream& out);

}  // namespace trireme::bench
