#include "trainer/algorithms/policy_trainer.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/pipeline_step.h"
#include "trainer/algorithms/recompute.h"
#include "trainer/algorithms/router_metrics.h"
#include "trainer/algorithms/sample_advantages.h"
#include "trainer/ops/device_state.h"
#include "trainer/optimizer/lr_schedule.h"

namespace trireme {
namespace {

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

// With `filters` the log-prob of a token that they drop is -infinity.
void check_finite(const at::Tensor& logprobs, const at::Tensor& mask, const MicroBatch& batch, bool filters) {
  at::Tensor good = at::isfinite(logprobs.detach());
  if (filters) good = at::logical_or(good, at::isneginf(logprobs.detach()));
  const at::Tensor bad = at::logical_and(at::logical_not(good), mask > 0);
  if (!bad.any().item<bool>()) return;
  throw_on_bad_ids(logprobs.device());
  const int64_t token = bad.nonzero()[0].item<int64_t>();
  fail_data("the log-prob of a token of sample " +
            std::to_string(batch.members[static_cast<size_t>(batch.sequence[token].item<int64_t>())]) +
            " is not finite in the loss");
}

}  // namespace

PolicyTrainer::PolicyTrainer(const Config& config, Model& policy, const Model* reference, DistributedAdamW& optimizer,
                             ParallelContext& context, PhaseTimer& timer, bool row_exact)
    : config_(config),
      policy_(policy),
      reference_(reference),
      optimizer_(optimizer),
      context_(context),
      timer_(timer),
      loss_(loss_options(config)),
      // PPO has taken it off the rewards of samples (assign_token_advantages).
      reward_kl_(config.algorithm == "ppo" ? 0 : reward_kl_penalty(config)),
      distribution_(sampling_distribution(config)),
      row_exact_(row_exact),
      routers_(watch_routers(policy, config, context)) {
  validate(loss_);
  if (needs_reference(config)) TRIREME_CHECK(reference != nullptr, "the KL needs a reference model");
}

std::vector<Members> PolicyTrainer::own_micro_batches(const std::vector<Sample>& samples, int64_t begin,
                                                      int64_t end) const {
  Members members;
  for (int64_t i = begin; i < end; ++i) {
    if (!samples[static_cast<size_t>(i)].trained_early) members.push_back(i);
  }
  if (members.empty()) return {};
  const Communicator& ranks = context_.group(Axis::kDp);
  return make_micro_batches(samples, members, training_micro_batches(config_),
                            ranks.size())[static_cast<size_t>(ranks.rank())];
}

std::vector<at::Tensor> PolicyTrainer::logprob_pass(const Model& model, const std::vector<Sample>& samples,
                                                    const std::vector<Members>& micro_batches,
                                                    const LogprobOptions& options, const Known& known) {
  const c10::NoGradGuard no_grad;
  Members own;
  std::map<int64_t, at::Tensor> of_sample;
  for (const Members& members : micro_batches) {
    for (const int64_t i : members) {
      if (const std::vector<float>* logprobs = known(samples[static_cast<size_t>(i)])) {
        of_sample[i] = at::tensor(*logprobs, at::kFloat);
      } else {
        own.push_back(i);
      }
    }
  }
  std::vector<MicroBatch> passes;
  PipelineWork work;
  const MicroBatchOptions size = logprob_micro_batches(config_);
  int64_t tokens = 0;
  std::vector<Members> of_passes;
  if (!own.empty()) of_passes = make_micro_batches(samples, own, size, /*ranks=*/1).front();
  for (const Members& members : of_passes) {
    MicroBatch batch = make_micro_batch(samples, members, size.share_prompts);
    if (batch.response_tokens() == 0) continue;
    tokens += batch.response_tokens();
    passes.push_back(std::move(batch));
  }
  for (const MicroBatch& batch : passes) work.inputs.push_back(&batch.input);
  std::vector<at::Tensor> found_here;
  work.finish = [&](size_t index, const at::Tensor& hidden) {
    return found_here.emplace_back(response_logprobs(model, hidden, passes[index], options).to(at::kCPU, at::kFloat));
  };
  work.on_progress = on_progress;
  forward_passes(model, work);
  // What the last stage has found, on all.
  const at::Tensor all = found_here.empty() ? at::empty({tokens}, at::kFloat) : at::cat(found_here);
  share_result(model, all);
  int64_t from = 0;
  for (const MicroBatch& batch : passes) {
    for (const int64_t i : batch.members) {
      const auto length = static_cast<int64_t>(samples[static_cast<size_t>(i)].response.size());
      of_sample[i] = all.narrow(0, from, length);
      from += length;
    }
  }
  std::vector<at::Tensor> result;
  for (const Members& members : micro_batches) {
    std::vector<at::Tensor> parts;
    for (const int64_t i : members) {
      const auto found = of_sample.find(i);
      if (found != of_sample.end()) parts.push_back(found->second);
    }
    result.push_back(parts.empty() ? at::empty({0}, at::kFloat) : at::cat(parts));
  }
  return result;
}

PolicyTrainer::Trained PolicyTrainer::loss_of(const TrainingBatch& batch, const at::Tensor& hidden,
                                              const ValidCounts& valid) const {
  const at::Device device = policy_.options().device;
  const at::Tensor current = response_logprobs(policy_, hidden, batch.micro_batch, distribution_);
  check_finite(current, batch.mask.to(device), batch.micro_batch, distribution_.filters());
  LossInputs inputs;
  inputs.current = current;
  if (kl_needs_unfiltered(config_)) {
    inputs.current_unfiltered = response_logprobs(policy_, hidden, batch.micro_batch, reference_distribution(config_));
    check_finite(inputs.current_unfiltered, batch.mask.to(device), batch.micro_batch, /*filters=*/false);
  }
  inputs.previous = batch.previous.to(device);
  inputs.generation = batch.generation.to(device);
  if (batch.reference.defined()) inputs.reference = batch.reference.to(device);
  inputs.advantages = batch.advantages.to(device);
  inputs.mask = batch.mask.to(device);
  inputs.sequence = batch.micro_batch.sequence.to(device);
  inputs.sequence_mask = batch.sequence_mask.to(device);
  if (batch.positive.defined()) inputs.positive = batch.positive.to(device);
  inputs.global_valid_tokens = valid.tokens;
  inputs.global_valid_sequences = valid.sequences;
  inputs.global_positive_tokens = valid.positive_tokens;
  inputs.filters = distribution_.filters();
  Trained trained;
  trained.output = policy_loss(inputs, loss_);
  trained.logprobs = current.detach();
  if (inputs.current_unfiltered.defined()) trained.unfiltered = inputs.current_unfiltered.detach();
  return trained;
}

void PolicyTrainer::train_early(const std::vector<Sample>& samples) {
  TRIREME_CHECK(row_exact_, "early gradients need the sampler's log-probs to be those of the loss");
  const c10::DeviceGuard device(policy_.options().device);  // the calling thread may never have had one
  int64_t rows = 0;
  for (const Sample& sample : samples) rows += sample.length();
  set_own_recompute(policy_, config_, rows);
  Members members(samples.size());
  std::iota(members.begin(), members.end(), int64_t{0});
  TrainingBatch batch = make_training_batch(samples, members, config_.policy.sequence_packing.share_prompts,
                                            loss_.positive_example_nll_weight != 0);
  if (batch.micro_batch.response_tokens() == 0) return;
  batch.previous = batch.generation;
  if (loss_.reference_policy_kl_penalty != 0) {
    std::vector<float> reference;
    for (const Sample& sample : samples)
      reference.insert(reference.end(), sample.reference_logprobs.begin(), sample.reference_logprobs.end());
    batch.reference = at::tensor(reference, at::kFloat);
  }
  Trained trained;
  PipelineWork work;
  work.inputs = {&batch.micro_batch.input};
  work.finish = [&](size_t, const at::Tensor& hidden) {
    trained = loss_of(batch, hidden, {1, 1, 1});
    return trained.output.loss;
  };
  train_passes(policy_, work);
  early_.add(batch, trained.output.metrics, differing_bits(trained.logprobs, batch.generation, batch.mask));
  (void)policy_.flat_gradients()[0].item<double>();  // waits for what this thread has queued
}

const std::vector<float>* PolicyTrainer::known_previous(const Sample& sample, int64_t version) const {
  const bool sampled_by_these = sample.is_of(version);
  const bool known = sampled_by_these ? row_exact_ : config_.grpo.async_grpo.ratio_from == RatioFrom::kGeneration;
  if (known || !reads_previous_logprobs(config_)) return &sample.generation_logprobs;
  // Made ahead, for advantages of tokens.
  return sample.previous_logprobs.empty() ? nullptr : &sample.previous_logprobs;
}

std::vector<PolicyTrainer::OptimizerBatch> PolicyTrainer::prepare_steps(const std::vector<Sample>& samples,
                                                                        int64_t version, bool dumped) {
  const Known previous_of = [&](const Sample& sample) { return known_previous(sample, version); };
  const Known reference_of = [](const Sample& sample) {
    return sample.reference_logprobs.empty() ? nullptr : &sample.reference_logprobs;
  };
  // The same on all ranks, since passes are collective where ranks share weights or layers.
  // What was made ahead is taken there, not computed.
  const bool passes = std::any_of(samples.begin(), samples.end(),
                                  [&](const Sample& s) { return previous_of(s) != &s.generation_logprobs; });
  const bool older = std::any_of(samples.begin(), samples.end(), [&](const Sample& s) { return !s.is_of(version); });
  const auto total = static_cast<int64_t>(samples.size());
  const int64_t size = config_.policy.train_global_batch_size;
  std::vector<std::vector<Members>> members;  // of each micro-batch of each step
  std::vector<OptimizerBatch> steps;
  OwnRows most_rows;
  int64_t most_batches = 0;
  for (int64_t begin = 0; begin < total; begin += size) {
    const int64_t end = std::min(total, begin + size);
    for (int64_t i = begin; i < end; ++i) {
      TRIREME_CHECK(!samples[static_cast<size_t>(i)].trained_early || (begin == 0 && row_exact_ && !dumped),
                    "a sample was trained early that must not be");
    }
    members.push_back(own_micro_batches(samples, begin, end));
    OptimizerBatch& step = steps.emplace_back();
    for (const Members& of_batch : members.back()) {
      step.push_back(make_training_batch(samples, of_batch, config_.policy.sequence_packing.share_prompts,
                                         loss_.positive_example_nll_weight != 0));
      most_rows = at_most(most_rows, own_rows(policy_, step.back().micro_batch.input));
    }
    most_batches = std::max(most_batches, static_cast<int64_t>(step.size()));
  }
  set_recompute(policy_, config_, kept_activations(policy_.split(), most_rows, most_batches), context_, make_room);
  for (size_t s = 0; s < steps.size(); ++s) {
    std::vector<at::Tensor> reference, previous;
    if (loss_.reference_policy_kl_penalty != 0 || reward_kl_ != 0) {
      reference = logprob_pass(*reference_, samples, members[s], reference_distribution(config_), reference_of);
    }
    if (passes) previous = logprob_pass(policy_, samples, members[s], distribution_, previous_of);
    OptimizerBatch with_responses;
    for (size_t b = 0; b < steps[s].size(); ++b) {
      TrainingBatch& batch = steps[s][b];
      if (batch.micro_batch.response_tokens() == 0) continue;
      if (!reference.empty()) batch.reference = reference[b];
      batch.previous = passes ? previous[b] : batch.generation;
      if (older) batch.sampled_by_these = tokens_of_version(samples, batch.micro_batch.members, version);
      if (passes && config_.grpo.seq_logprob_error_threshold)
        mask_mismatched_sequences(batch, *config_.grpo.seq_logprob_error_threshold);
      with_responses.push_back(std::move(batch));
    }
    steps[s] = std::move(with_responses);
  }
  return steps;
}

ValidCounts PolicyTrainer::count_valid(const OptimizerBatch& batch, bool first) {
  ValidCounts valid;
  for (const TrainingBatch& one : batch) one.count(valid);
  if (first) {
    valid.tokens += early_.counts().tokens;
    valid.sequences += early_.counts().sequences;
  }
  Communicator& ranks = context_.group(Axis::kDp);
  valid.tokens = ranks.all_reduce_sum(valid.tokens);
  valid.sequences = ranks.all_reduce_sum(valid.sequences);
  if (loss_.positive_example_nll_weight != 0) valid.positive_tokens = ranks.all_reduce_sum(valid.positive_tokens);
  return valid;
}

void PolicyTrainer::backward_passes(const OptimizerBatch& batch, const ValidCounts& valid, bool sampled_these,
                                    StepDump& dump, StepSums& sums) {
  PipelineWork work;
  for (const TrainingBatch& one : batch) work.inputs.push_back(&one.micro_batch.input);
  work.finish = [&](size_t index, const at::Tensor& hidden) {
    const TrainingBatch& one = batch[index];
    const Trained trained = loss_of(one, hidden, valid);
    add_metrics(sums.metrics, trained.output.metrics);
    if (sampled_these) {
      const at::Tensor compared = one.sampled_by_these.defined() ? one.mask * one.sampled_by_these : one.mask;
      sums.compared_tokens += (compared > 0).sum().item<int64_t>();
      sums.mismatched_tokens += differing_bits(trained.logprobs, one.generation, compared);
    }
    if (dump.wanted()) dump.add(one, trained.logprobs, trained.unfiltered, trained.output.loss);
    return trained.output.loss;
  };
  if (overlap_grad_reduce(config_)) work.before_last = [this] { optimizer_.reduce_in_next_backward(); };
  work.on_progress = on_progress;
  train_passes(policy_, work);
  if (policy_.split().pp == 1) return;
  const nlohmann::json of_last = {sums.metrics, sums.compared_tokens, sums.mismatched_tokens};
  const std::vector<uint8_t> bytes = nlohmann::json::to_cbor(of_last);  // as text a number that is not finite is lost
  const auto shared = nlohmann::json::from_cbor(share_result(policy_, std::string(bytes.begin(), bytes.end())));
  sums = {shared.at(0).get<MetricSums>(), shared.at(1).get<int64_t>(), shared.at(2).get<int64_t>()};
}

void PolicyTrainer::train_step(const OptimizerBatch& batch, const Schedule& schedule, bool first, bool last,
                               bool sampled_these, const std::string& dump_to, TrainResult& result) {
  const ValidCounts valid = count_valid(batch, first);
  if (routers_ != nullptr) routers_->set_valid_tokens(valid.tokens);
  StepSums own;
  if (first) {
    own.compared_tokens = static_cast<int64_t>(early_.counts().tokens);
    own.mismatched_tokens = early_.mismatched_tokens();
    own.metrics = early_.finish(valid, loss_.token_level_loss, policy_.flat_gradients());
  }
  StepDump dump(first ? dump_to : "");
  backward_passes(batch, valid, sampled_these, dump, own);
  if (dump.wanted()) dump.write(policy_, valid, config_);
  result.compared_tokens += own.compared_tokens;
  result.mismatched_tokens += own.mismatched_tokens;
  const OptimizerStep step = optimizer_.step(
      schedule.learning_rate, schedule.weight_decay, max_grad_norm(config_),
      !last && overlap_param_gather(config_) ? DistributedAdamW::Gather::kLater : DistributedAdamW::Gather::kNow);
  result.buckets_reduced_in_backward += step.reduced_early;
  add_metrics(result.metrics, reduce_metrics(own.metrics, context_.group(Axis::kDp)));
  if (routers_ != nullptr) add_metrics(result.metrics, router_metrics(*routers_, context_));
  result.metrics["grad_norm"] += step.grad_norm;
  result.metrics["global_valid_toks"] += valid.tokens;
  result.metrics["global_valid_seqs"] += valid.sequences;
  ++result.optimizer_steps;
  if (sampled_these) ++result.compared_optimizer_steps;
}

TrainResult PolicyTrainer::train(const std::vector<Sample>& samples, const std::string& dump, int64_t version,
                                 int64_t passes) {
  TrainResult result;
  if (policy_.units() != nullptr) policy_.units()->release();
  PhaseTimer::Scope logprobs = timer_.enter(Phase::kLogprobs);
  context_.set_phase("logprobs");
  std::vector<OptimizerBatch> steps = prepare_steps(samples, version, !dump.empty());
  MetricSums of_advantages;
  if (reward_kl_ != 0) {
    std::vector<TrainingBatch*> batches;
    for (OptimizerBatch& step : steps) {
      for (TrainingBatch& batch : step) batches.push_back(&batch);
    }
    of_advantages =
        take_kl_off_advantages(batches, reward_kl_, loss_.reference_policy_kl_type, config_, context_.group(Axis::kDp));
  }
  logprobs.end();

  PhaseTimer::Scope training = timer_.enter(Phase::kTraining);
  context_.set_phase("training");
  Schedule schedule;
  bool sampled_these = true;  // the present weights
  for (int64_t pass = 0; pass < passes; ++pass) {
    schedule = {learning_rate(config_, passes_done_), weight_decay(config_, passes_done_)};
    ++passes_done_;
    for (size_t s = 0; s < steps.size(); ++s) {
      const bool first = pass == 0 && s == 0, last = pass + 1 == passes && s + 1 == steps.size();
      train_step(steps[s], schedule, first, last, sampled_these, dump, result);
      sampled_these = sampled_these && schedule.learning_rate == 0;
    }
  }
  if (result.optimizer_steps > 0) divide_metrics(result.metrics, static_cast<double>(result.optimizer_steps));
  result.metrics["lr"] = schedule.learning_rate;
  for (const auto& [name, value] : of_advantages) result.metrics[name] = value;
  result.compared_tokens = context_.group(Axis::kDp).all_reduce_sum(result.compared_tokens);
  result.mismatched_tokens = context_.group(Axis::kDp).all_reduce_sum(result.mismatched_tokens);
  training.end();
  if (policy_.units() != nullptr && gathers_weights) {
    const PhaseTimer::Scope refit = timer_.enter(Phase::kRefit);
    policy_.units()->gather();
  }
  return result;
}

}  // namespace trireme
