// From the configuration to the options of each part of a run.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "topology/stages.h"
#include "topology/topology.h"
#include "trainer/algorithms/loss.h"
#include "trainer/batch/packing.h"
#include "trainer/config/config.h"
#include "trainer/ops/partition.h"
#include "trainer/rewards/place.h"
#include "trainer/rewards/reward.h"
#include "trainer/rollout/engine.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {

// Generation.
SamplingOptions training_sampling(const Config& config, const Tokenizer& tokenizer);
SamplingOptions validation_sampling(const Config& config, const Tokenizer& tokenizer);
EngineOptions engine_options(const Config& config, std::shared_ptr<const DevicePartition> partition = nullptr);
// policy.generation.background_sms, -1 resolved to its number on a GPU.
int64_t background_sms(const Config& config);
// The parts of `device` for generation and for what is computed beside its last responses; null where there are none,
// or none are wanted.
std::shared_ptr<const DevicePartition> partition_for(const Config& config, at::Device device, bool wanted);

// Rewards but for a reward model's. Throws Error(kUser) for an environment that is named and not enabled, and for a
// service without a URL.
std::vector<RewardOptions> reward_options(const Config& config, const RewardPlace& place);

// Loss.
LossOptions loss_options(const Config& config);
// Weight of the KL that is taken off the rewards of tokens instead of being added to the loss (use_kl_in_reward).
double reward_kl_penalty(const Config& config);
// Whether anything reads a token's previous log-prob. Not so where the loss takes every ratio for 1
// (force_on_policy_ratio), unless a KL in rewards or grpo.seq_logprob_error_threshold looks at it.
bool reads_previous_logprobs(const Config& config);
bool needs_reference(const Config& config);                   // a reference model, for the loss or the rewards
LogprobOptions sampling_distribution(const Config& config);   // what the sampler drew from, replayed in the loss
LogprobOptions reference_distribution(const Config& config);  // the same without filters
// Whether the loss has a KL and filters are on: the KL compares with a reference without filters, and so wants the
// current log-probs without filters beside the others.
bool kl_needs_unfiltered(const Config& config);

// How the layers are dealt to the stages of a pipeline.
StageOptions stage_options(const Config& config);
Layout layout_of(const ParallelSizes& sizes);  // with dp 1
// How `ranks` ranks split the critic: by the sizes of value.*, or by those of `sizes`, an RLJob's, whatever its dp.
// Throws Error(kUser) where they cannot be divided so.
Layout critic_layout(const Config& config, int64_t ranks);
Layout critic_layout(const Layout& sizes, int64_t ranks);

// Micro-batches: of training, of passes for log-probs, of SFT's training and validation.
MicroBatchOptions training_micro_batches(const Config& config);
MicroBatchOptions logprob_micro_batches(const Config& config);
MicroBatchOptions sft_micro_batches(const Config& config, bool train);
// What says how experts are routed: policy.megatron_cfg where it is enabled, else its defaults.
const MegatronConfig& router_settings(const Config& config);

}  // namespace trireme
