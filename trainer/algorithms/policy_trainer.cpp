#include "trainer/algorithms/policy_trainer.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/clock.h"
#include "base/error.h"
#include "trainer/algorithms/recompute.h"
#include "trainer/model/safetensors.h"
#include "trainer/ops/device_state.h"
#include "trainer/optimizer/lr_schedule.h"

namespace trireme {
namespace {

bool combines_by_min(const std::string& key) { return key.size() > 4 && key.compare(key.size() - 4, 4, "_min") == 0; }
bool combines_by_max(const std::string& key) { return key.size() > 4 && key.compare(key.size() - 4, 4, "_max") == 0; }

void add_metrics(std::map<std::string, double>& sums, const std::map<std::string, double>& more) {
  for (const auto& [key, value] : more) {
    const auto [at, inserted] = sums.emplace(key, value);
    if (inserted) continue;
    if (combines_by_min(key))
      at->second = std::min(at->second, value);
    else if (combines_by_max(key))
      at->second = std::max(at->second, value);
    else
      at->second += value;
  }
}

// Over ranks. Every rank has the same keys except those that need a token; rank order decides nothing.
std::map<std::string, double> reduce_metrics(const std::map<std::string, double>& own, Communicator& group) {
  if (group.size() == 1) return own;
  nlohmann::json json(own);
  std::map<std::string, double> all;
  for (const std::string& text : group.all_gather_bytes(json.dump())) {
    add_metrics(all, nlohmann::json::parse(text).get<std::map<std::string, double>>());
  }
  return all;
}

int64_t differing_bits(const at::Tensor& a, const at::Tensor& b, const at::Tensor& mask) {
  const at::Tensor x = a.to(at::kCPU, at::kFloat).contiguous();
  const at::Tensor y = b.to(at::kCPU, at::kFloat).contiguous();
  const float* p = x.const_data_ptr<float>();
  const float* q = y.const_data_ptr<float>();
  const float* m = mask.const_data_ptr<float>();
  int64_t count = 0;
  for (int64_t i = 0; i < x.numel(); ++i) count += m[i] != 0 && std::memcmp(p + i, q + i, sizeof(float)) != 0 ? 1 : 0;
  return count;
}

void check_finite(const at::Tensor& logprobs, const at::Tensor& mask, const MicroBatch& batch) {
  const at::Tensor bad = at::logical_and(at::logical_not(at::isfinite(logprobs.detach())), mask > 0);
  if (!bad.any().item<bool>()) return;
  throw_on_bad_ids(logprobs.device());
  const int64_t token = bad.nonzero()[0].item<int64_t>();
  fail_data("the log-prob of a token of sample " +
            std::to_string(batch.samples[static_cast<size_t>(batch.sequence[token].item<int64_t>())]) +
            " is not finite in the loss");
}

}  // namespace

LossOptions loss_options(const Config& config) {
  const LossConfig& c = config.loss_fn;
  LossOptions o;
  o.kl_penalty = config.grpo.skip_reference_policy_logprobs_calculation ? 0 : c.reference_policy_kl_penalty;
  o.kl_estimator = c.reference_policy_kl_type == "k1"   ? KlEstimator::kK1
                   : c.reference_policy_kl_type == "k2" ? KlEstimator::kK2
                                                        : KlEstimator::kK3;
  o.kl_input_clamp = c.kl_input_clamp_value;
  o.kl_output_clamp = c.kl_output_clamp_value;
  o.kl_score_function_gradient = c.kl_score_function_gradient;
  o.on_policy_kl_approximation = c.use_on_policy_kl_approximation;
  o.clip_min = c.ratio_clip_min;
  o.clip_max = c.ratio_clip_max;
  o.clip_c = c.ratio_clip_c;
  o.importance_sampling_correction = c.use_importance_sampling_correction;
  if (c.truncated_importance_sampling_type == "tis") o.truncated_is = TruncatedImportanceSampling::kTis;
  if (c.truncated_importance_sampling_type == "icepop") o.truncated_is = TruncatedImportanceSampling::kIcepop;
  if (c.truncated_importance_sampling_type == "seq-mask-tis") o.truncated_is = TruncatedImportanceSampling::kSeqMaskTis;
  o.truncated_is_ratio = c.truncated_importance_sampling_ratio;
  o.truncated_is_ratio_min = c.truncated_importance_sampling_ratio_min;
  o.sequence_level_ratios = c.sequence_level_importance_ratios;
  o.token_level_loss = c.token_level_loss;
  o.force_on_policy_ratio = c.force_on_policy_ratio;
  o.cispo = c.use_cispo;
  o.disable_ppo_ratio = c.disable_ppo_ratio;
  o.positive_example_nll_weight = c.positive_example_nll_weight;
  return o;
}

AdvantageOptions advantage_options(const Config& config) {
  AdvantageOptions o;
  o.estimator = config.grpo.adv_estimator.name == "reinforce_plus_plus" ? AdvantageEstimator::kReinforcePlusPlus
                                                                        : AdvantageEstimator::kGrpo;
  o.normalize_rewards = config.grpo.normalize_rewards;
  o.use_leave_one_out_baseline = config.grpo.use_leave_one_out_baseline;
  o.unbiased_std = !config.grpo.biased_group_std;
  o.minus_baseline = config.grpo.adv_estimator.minus_baseline;
  o.clip_low = config.grpo.advantage_clip_low;
  o.clip_high = config.grpo.advantage_clip_high;
  return o;
}

LogprobOptions sampling_distribution(const Config& config) {
  const GenerationConfig& g = config.policy.generation;
  LogprobOptions o;
  o.temperature = g.temperature;
  o.top_k = g.top_k;
  o.top_p = g.top_p;
  o.min_p = g.min_p;
  // After the first optimizer step a sampled token may fall outside the filters of the moved distribution: its ratio is
  // 0.
  o.allow_filtered = o.filters();
  return o;
}

LogprobOptions reference_distribution(const Config& config) {
  LogprobOptions o = sampling_distribution(config);
  o.top_k = 0;
  o.top_p = 1;
  o.min_p = 0;
  return o;
}

void assign_advantages(std::vector<RolloutSample>& samples, int64_t group_size, const Config& config) {
  RewardScaling scaling;
  const RewardScalingConfig& sc = config.grpo.reward_scaling;
  scaling = {sc.enabled, sc.source_min, sc.source_max, sc.target_min, sc.target_max};
  RewardShaping shaping;
  const RewardShapingConfig& sh = config.grpo.reward_shaping;
  shaping = {sh.enabled, sh.overlong_buffer_length, sh.overlong_buffer_penalty, sh.max_response_length,
             sh.stop_properly_penalty_coef};
  for (RolloutSample& s : samples) {
    s.reward =
        shape_reward(scale_reward(s.raw_reward, scaling), static_cast<int64_t>(s.tokens.size()), s.truncated, shaping);
    s.loss_multiplier = s.dropped || (config.grpo.overlong_filtering && s.truncated) ? 0 : 1;
    s.advantage = 0;
  }
  const AdvantageOptions options = advantage_options(config);
  for (size_t begin = 0; begin < samples.size(); begin += static_cast<size_t>(group_size)) {
    std::vector<double> rewards;
    std::vector<size_t> members;
    for (size_t i = begin; i < std::min(samples.size(), begin + static_cast<size_t>(group_size)); ++i) {
      if (samples[i].dropped) continue;
      rewards.push_back(samples[i].reward);
      members.push_back(i);
    }
    const std::vector<double> advantages = group_advantages(rewards, options);
    for (size_t k = 0; k < members.size(); ++k) samples[members[k]].advantage = advantages[k];
  }
  if (options.estimator != AdvantageEstimator::kReinforcePlusPlus) return;
  std::vector<double> advantages, tokens;
  for (const RolloutSample& s : samples) {
    advantages.push_back(s.advantage);
    tokens.push_back(s.loss_multiplier * static_cast<double>(s.tokens.size()));
  }
  const std::vector<double> whitened = whiten(std::move(advantages), tokens);
  for (size_t i = 0; i < samples.size(); ++i) {
    if (samples[i].loss_multiplier > 0) samples[i].advantage = clip_advantage(whitened[i], options);
  }
}

PolicyTrainer::PolicyTrainer(const Config& config, Model& policy, const Model* reference, DistributedAdamW& optimizer,
                             ParallelContext& context, bool exact)
    : config_(config),
      policy_(policy),
      reference_(reference),
      optimizer_(optimizer),
      context_(context),
      loss_(loss_options(config)),
      distribution_(sampling_distribution(config)),
      exact_(exact) {
  validate(loss_);
  if (loss_.kl_penalty != 0) TRIREME_CHECK(reference != nullptr, "the KL term needs a reference model");
}

std::vector<std::vector<Bin>> PolicyTrainer::micro_batches(const std::vector<RolloutSample>& samples,
                                                           const Bin& members, const MicroBatchSize& size,
                                                           int64_t ranks, uint64_t seed) const {
  const PolicyConfig& p = config_.policy;
  SharedLengths of;
  for (const int64_t i : members) {
    const RolloutSample& sample = samples[static_cast<size_t>(i)];
    of.lengths.push_back(sample.length());
    of.prompts.push_back(static_cast<int64_t>(sample.prompt.size()));
    of.groups.push_back(sample.group);
  }
  const std::vector<int64_t>& lengths = of.lengths;
  std::vector<std::vector<Bin>> all;
  if (p.dynamic_batching.enabled) {
    all = dynamic_micro_batches(lengths, size.dynamic_tokens, p.dynamic_batching.sequence_length_round, ranks);
  } else if (p.sequence_packing.enabled) {
    const PackingAlgorithm algorithm = parse_packing_algorithm(p.sequence_packing.algorithm);
    all = p.sequence_packing.share_prompts ? shared_micro_batches(of, size.packed_tokens, ranks, algorithm, seed)
                                           : packed_micro_batches(lengths, size.packed_tokens, ranks, algorithm, seed);
    if (p.sequence_packing.microbatch_order == "largest_first") {
      const auto load = [&](const Bin& bin) {
        int64_t sum = 0;
        for (const int64_t i : bin) sum += lengths[static_cast<size_t>(i)];
        return sum;
      };
      for (auto& bins : all)
        std::stable_sort(bins.begin(), bins.end(), [&](const Bin& a, const Bin& b) { return load(a) > load(b); });
    }
  } else {
    all = fixed_micro_batches(static_cast<int64_t>(lengths.size()), size.samples, ranks);
  }
  return all;
}

std::vector<Bin> PolicyTrainer::own_bins(const std::vector<RolloutSample>& samples, const Bin& members,
                                         uint64_t seed) const {
  const PolicyConfig& p = config_.policy;
  const MicroBatchSize size{p.dynamic_batching.train_mb_tokens, p.sequence_packing.train_mb_tokens,
                            p.train_micro_batch_size};
  return micro_batches(samples, members, size, context_.data_parallel().size(),
                       seed)[static_cast<size_t>(context_.data_parallel().rank())];
}

std::vector<at::Tensor> PolicyTrainer::logprob_pass(const Model& model, const std::vector<RolloutSample>& samples,
                                                    const std::vector<Bin>& bins, const LogprobOptions& options,
                                                    std::vector<float> RolloutSample::*known) {
  const c10::NoGradGuard no_grad;
  const PolicyConfig& p = config_.policy;
  const MicroBatchSize size{p.dynamic_batching.logprob_mb_tokens, p.sequence_packing.logprob_mb_tokens,
                            p.logprob_batch_size};
  Bin own;
  std::map<int64_t, at::Tensor> of_sample;
  for (const Bin& bin : bins) {
    for (const int64_t i : bin) {
      const RolloutSample& sample = samples[static_cast<size_t>(i)];
      if (known != nullptr && !(sample.*known).empty()) {
        of_sample[i] = at::tensor(sample.*known, at::kFloat);
      } else {
        own.push_back(i);
      }
    }
  }
  std::vector<Bin> passes;
  if (!own.empty()) passes = micro_batches(samples, own, size, 1, static_cast<uint64_t>(config_.grpo.seed)).front();
  for (Bin& bin : passes) {
    for (int64_t& i : bin) i = own[static_cast<size_t>(i)];
    const MicroBatch batch = make_micro_batch(samples, bin, p.sequence_packing.share_prompts);
    if (batch.answer_tokens() == 0) continue;
    const at::Tensor all = answer_logprobs(model, batch, options).to(at::kCPU);
    int64_t from = 0;
    for (const int64_t i : bin) {
      const int64_t tokens = static_cast<int64_t>(samples[static_cast<size_t>(i)].tokens.size());
      of_sample[i] = all.narrow(0, from, tokens);
      from += tokens;
    }
    if (on_progress) on_progress();
  }
  std::vector<at::Tensor> of_bin;
  for (const Bin& bin : bins) {
    std::vector<at::Tensor> parts;
    for (const int64_t i : bin) {
      const auto found = of_sample.find(i);
      if (found != of_sample.end()) parts.push_back(found->second);
    }
    of_bin.push_back(parts.empty() ? at::empty({0}, at::kFloat) : at::cat(parts));
  }
  return of_bin;
}

PolicyTrainer::Prepared PolicyTrainer::prepare(const std::vector<RolloutSample>& samples, const Bin& bin) const {
  Prepared prepared;
  prepared.batch = make_micro_batch(samples, bin, config_.policy.sequence_packing.share_prompts);
  prepared.generation = generation_logprobs(samples, bin);
  std::vector<double> advantages, mask, positive;
  for (const int64_t i : bin) {
    const RolloutSample& s = samples[static_cast<size_t>(i)];
    advantages.push_back(s.advantage);
    mask.push_back(s.loss_multiplier);
    positive.push_back(s.raw_reward > 0 ? 1 : 0);
  }
  prepared.advantages = spread(samples, bin, advantages);
  prepared.mask = spread(samples, bin, mask);
  prepared.sequence_mask = at::tensor(std::vector<float>(mask.begin(), mask.end()), at::kFloat);
  if (loss_.positive_example_nll_weight != 0) prepared.positive = spread(samples, bin, positive);
  return prepared;
}

// Sequences whose mean exp(|generation - previous|) exceeds the threshold leave the loss.
void PolicyTrainer::mask_mismatched_sequences(Prepared& p) const {
  if (!config_.grpo.seq_logprob_error_threshold) return;
  const int64_t count = p.sequence_mask.size(0);
  const at::Tensor error = (p.generation - p.previous).abs().exp();
  const at::Tensor sums = at::zeros({count}, error.options()).index_add(0, p.batch.sequence, error * p.mask);
  const at::Tensor tokens = at::zeros({count}, error.options()).index_add(0, p.batch.sequence, p.mask).clamp_min(1);
  const at::Tensor keep = (sums / tokens <= *config_.grpo.seq_logprob_error_threshold).to(at::kFloat);
  p.sequence_mask = p.sequence_mask * keep;
  p.mask = p.mask * keep.index_select(0, p.batch.sequence);
}

PolicyTrainer::Trained PolicyTrainer::train_micro_batch(const Prepared& p, double valid_tokens,
                                                        double valid_sequences) {
  const at::Device device = policy_.options().device;
  const at::Tensor current = answer_logprobs(policy_, p.batch, distribution_);
  check_finite(current, p.mask.to(device), p.batch);
  LossInputs inputs;
  inputs.current = current;
  inputs.previous = p.previous.to(device);
  inputs.generation = p.generation.to(device);
  if (p.reference.defined()) inputs.reference = p.reference.to(device);
  inputs.advantages = p.advantages.to(device);
  inputs.mask = p.mask.to(device);
  inputs.sequence = p.batch.sequence.to(device);
  inputs.sequence_mask = p.sequence_mask.to(device);
  if (p.positive.defined()) inputs.positive = p.positive.to(device);
  inputs.global_valid_tokens = valid_tokens;
  inputs.global_valid_sequences = valid_sequences;
  Trained trained;
  trained.output = policy_loss(inputs, loss_);
  trained.output.loss.backward();
  trained.logprobs = current.detach();
  return trained;
}

void PolicyTrainer::train_early(const std::vector<RolloutSample>& samples) {
  TRIREME_CHECK(exact_, "early gradients need the sampler's log-probs to be those of the loss");
  const c10::DeviceGuard device(policy_.options().device);  // the calling thread may never have had one
  int64_t rows = 0;
  for (const RolloutSample& sample : samples) rows += sample.length();
  set_own_recompute(policy_, config_, rows);
  Bin bin(samples.size());
  std::iota(bin.begin(), bin.end(), int64_t{0});
  Prepared p = prepare(samples, bin);
  if (p.batch.answer_tokens() == 0) return;
  p.previous = p.generation;
  if (loss_.kl_penalty != 0) {
    std::vector<float> reference;
    for (const RolloutSample& sample : samples)
      reference.insert(reference.end(), sample.reference_logprobs.begin(), sample.reference_logprobs.end());
    p.reference = at::tensor(reference, at::kFloat);
  }
  const Trained trained = train_micro_batch(p, 1, 1);
  early_.tokens += p.mask.sum().item<double>();
  early_.sequences += p.sequence_mask.sum().item<double>();
  early_.mismatched_tokens += differing_bits(trained.logprobs, p.generation, p.mask);
  add_metrics(early_.metrics, trained.output.metrics);
  (void)policy_.flat_gradients()[0].item<double>();  // waits for what this thread has queued
}

void PolicyTrainer::divide_early(double valid_tokens, double valid_sequences) {
  if (early_.metrics.empty()) return;
  const double by_loss = loss_.token_level_loss ? valid_tokens : valid_sequences;
  policy_.flat_gradients().mul_(1 / by_loss);
  for (auto& [key, value] : early_.metrics) {
    if (combines_by_min(key) || combines_by_max(key)) continue;
    const bool of_loss = key == "loss" || key == "actor_loss" || key == "kl_penalty";
    value /= of_loss ? by_loss : valid_tokens;
  }
}

TrainResult PolicyTrainer::train(const std::vector<RolloutSample>& samples, const std::string& dump) {
  TrainResult result;
  const int64_t batch_size = config_.policy.train_global_batch_size;
  const int64_t total = static_cast<int64_t>(samples.size());

  // All micro-batches first: reference and previous log-probs belong to the weights before the first optimizer step.
  Stopwatch logprob_watch;
  context_.set_phase("logprobs");
  struct OptimizerBatch {
    std::vector<Bin> bins;
    std::vector<Prepared> micro_batches;  // one for each bin, until those without answers are left out
  };
  std::vector<OptimizerBatch> batches;
  int64_t most_rows = 0;
  for (int64_t begin = 0; begin < total; begin += batch_size) {
    Bin members;
    for (int64_t i = begin; i < std::min(total, begin + batch_size); ++i) {
      const bool trained = samples[static_cast<size_t>(i)].trained_early;
      TRIREME_CHECK(!trained || (begin == 0 && exact_ && dump.empty()), "a sample was trained early that must not be");
      if (!trained) members.push_back(i);
    }
    OptimizerBatch batch;
    if (!members.empty()) batch.bins = own_bins(samples, members, static_cast<uint64_t>(config_.grpo.seed));
    for (Bin& bin : batch.bins) {
      for (int64_t& i : bin) i = members[static_cast<size_t>(i)];
      batch.micro_batches.push_back(prepare(samples, bin));
      most_rows = std::max(most_rows, batch.micro_batches.back().batch.input.tokens());
    }
    batches.push_back(std::move(batch));
  }
  set_recompute(policy_, config_, most_rows, context_.data_parallel(), make_room);
  std::vector<std::vector<Prepared>> steps;
  for (OptimizerBatch& batch : batches) {
    std::vector<at::Tensor> reference, previous;
    if (loss_.kl_penalty != 0) {
      reference = logprob_pass(*reference_, samples, batch.bins, reference_distribution(config_),
                               &RolloutSample::reference_logprobs);
    }
    if (!exact_) previous = logprob_pass(policy_, samples, batch.bins, distribution_);
    std::vector<Prepared> step;
    for (size_t b = 0; b < batch.bins.size(); ++b) {
      Prepared& prepared = batch.micro_batches[b];
      if (prepared.batch.answer_tokens() == 0) continue;
      if (!reference.empty()) prepared.reference = reference[b];
      prepared.previous = exact_ ? prepared.generation : previous[b];
      if (!exact_) mask_mismatched_sequences(prepared);
      step.push_back(std::move(prepared));
    }
    steps.push_back(std::move(step));
  }
  result.logprob_seconds = logprob_watch.lap();

  context_.set_phase("training");
  std::map<std::string, double> sums;
  for (size_t s = 0; s < steps.size(); ++s) {
    double valid_tokens = 0, valid_sequences = 0;
    for (const Prepared& p : steps[s]) {
      valid_tokens += p.mask.sum().item<double>();
      valid_sequences += p.sequence_mask.sum().item<double>();
    }
    if (s == 0) {
      valid_tokens += early_.tokens;
      valid_sequences += early_.sequences;
    }
    valid_tokens = context_.data_parallel().all_reduce_sum(valid_tokens);
    valid_sequences = context_.data_parallel().all_reduce_sum(valid_sequences);
    std::map<std::string, double> own;
    if (s == 0) {
      divide_early(valid_tokens, valid_sequences);
      own = std::move(early_.metrics);
      result.mismatched_tokens += early_.mismatched_tokens;
      early_ = {};
    }
    NamedTensors dumped;
    for (size_t m = 0; m < steps[s].size(); ++m) {
      const Prepared& p = steps[s][m];
      if (m + 1 == steps[s].size() && overlap_grad_reduce(config_)) optimizer_.reduce_in_next_backward();
      const Trained trained = train_micro_batch(p, valid_tokens, valid_sequences);
      if (on_progress) on_progress();
      add_metrics(own, trained.output.metrics);
      if (s == 0) result.mismatched_tokens += differing_bits(trained.logprobs, p.generation, p.mask);
      if (s == 0 && !dump.empty()) {
        const std::string prefix = "micro_batch." + std::to_string(m) + ".";
        dumped.insert(dumped.end(),
                      {{prefix + "ids", p.batch.input.ids},
                       {prefix + "starts", at::tensor(p.batch.input.starts, at::kLong)},
                       {prefix + "rows", p.batch.rows},
                       {prefix + "targets", p.batch.targets},
                       {prefix + "sequence", p.batch.sequence},
                       {prefix + "mask", p.mask},
                       {prefix + "sequence_mask", p.sequence_mask},
                       {prefix + "advantages", p.advantages},
                       {prefix + "generation_logprobs", p.generation},
                       {prefix + "previous_logprobs", p.previous},
                       {prefix + "current_logprobs", trained.logprobs.to(at::kCPU)},
                       {prefix + "loss", trained.output.loss.detach().to(at::kCPU, at::kDouble).reshape({1})}});
        if (p.reference.defined()) dumped.emplace_back(prefix + "reference_logprobs", p.reference);
        if (p.positive.defined()) dumped.emplace_back(prefix + "positive", p.positive);
        if (!p.batch.input.prefix.empty())
          dumped.emplace_back(prefix + "prefix", at::tensor(p.batch.input.prefix, at::kLong));
      }
    }
    if (s == 0 && !dump.empty()) {
      for (const Parameter& parameter : policy_.parameters()) {
        const at::Tensor gradient = policy_.flat_gradients().narrow(0, parameter.offset, parameter.size);
        dumped.emplace_back("grad_norm." + parameter.name, gradient.to(at::kDouble).norm().reshape({1}).to(at::kCPU));
      }
      write_safetensors(dump, dumped,
                        {{"micro_batches", std::to_string(steps[s].size())},
                         {"global_valid_tokens", std::to_string(valid_tokens)},
                         {"global_valid_sequences", std::to_string(valid_sequences)},
                         {"config", to_yaml(config_)}});
    }
    const int64_t done = optimizer_.steps_done();
    const double rate = learning_rate(config_, done);
    const bool forward_follows = s + 1 < steps.size() && overlap_param_gather(config_);
    const OptimizerStep step =
        optimizer_.step(rate, weight_decay(config_, done), max_grad_norm(config_),
                        forward_follows ? DistributedAdamW::Gather::kLater : DistributedAdamW::Gather::kNow);
    result.buckets_reduced_in_backward += step.reduced_early;
    std::map<std::string, double> reduced = reduce_metrics(own, context_.data_parallel());
    add_metrics(sums, reduced);
    sums["grad_norm"] += step.grad_norm;
    sums["lr"] += rate;
    sums["global_valid_toks"] += valid_tokens;
    sums["global_valid_seqs"] += valid_sequences;
    ++result.optimizer_steps;
  }
  // Means over optimizer steps; extremes stay.
  for (auto& [key, value] : sums) {
    if (!combines_by_min(key) && !combines_by_max(key) && result.optimizer_steps > 0)
      value /= static_cast<double>(result.optimizer_steps);
  }
  result.metrics = std::move(sums);
  result.mismatched_tokens = context_.data_parallel().all_reduce_sum(result.mismatched_tokens);
  result.training_seconds = logprob_watch.lap();
  return result;
}

}  // namespace trireme
