#include "trainer/algorithms/critic.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "base/error.h"
#include "trainer/algorithms/loss.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/pipeline_step.h"
#include "trainer/algorithms/recompute.h"
#include "trainer/algorithms/token_passes.h"
#include "trainer/ops/device_state.h"
#include "trainer/optimizer/lr_schedule.h"

namespace trireme {
namespace {

// `values` [T] of a micro-batch; `name`: of the sample at a place among the batch's.
void check_values(const at::Tensor& values, const MicroBatch& batch,
                  const std::function<std::string(size_t place)>& name) {
  const at::Tensor bad = at::logical_not(at::isfinite(values.detach()));
  if (!bad.any().item<bool>()) return;
  throw_on_bad_ids(values.device());
  const int64_t row = bad.nonzero()[0].item<int64_t>();
  const int64_t member = batch.sequence[row].item<int64_t>();
  const int64_t token = row - (batch.sequence < member).sum().item<int64_t>();
  fail_data("the critic's value before token " + std::to_string(token) + " of the response of sample " +
            name(static_cast<size_t>(batch.members[static_cast<size_t>(member)])) + " is not finite");
}

std::string number_of(size_t sample) { return std::to_string(sample); }

}  // namespace

// Sums over optimizer steps.
struct CriticTrainer::Moments {
  int64_t steps = 0;
  double tokens = 0;
  MetricSums of_steps;   // loss, grad_norm: added up
  MetricSums of_tokens;  // means over valid tokens, times their number; extremes
};

CriticTrainer::CriticTrainer(const Config& config, Model& critic, DistributedAdamW& optimizer, ParallelContext& context)
    : config_(config), critic_(critic), optimizer_(optimizer), context_(context) {}

void CriticTrainer::fill_values(std::vector<Sample>& samples) { fill(samples, context_); }

void CriticTrainer::fill_own_values(std::vector<Sample>& samples) {
  TRIREME_CHECK(values_alone(), "values need the other ranks' part of the weights");
  fill(samples, alone_);
}

void CriticTrainer::fill(std::vector<Sample>& samples, ParallelContext& context) {
  if (critic_.units() != nullptr) critic_.units()->release();
  fill_token_numbers(
      samples, &Sample::values, critic_, logprob_micro_batches(config_), context,
      [&](const at::Tensor& hidden, const MicroBatch& batch) {
        const at::Tensor values = response_values(critic_, hidden, batch);
        check_values(values, batch, [&](size_t place) {
          const Sample& its = samples[place];
          return number_of(place) + " (group " + std::to_string(its.group) + ", response " + std::to_string(its.index) +
                 ")";
        });
        return values;
      },
      on_progress);
}

TokenScorer CriticTrainer::scorer() const {
  TRIREME_CHECK(is_whole(), "values need the other ranks' part of the weights");
  TokenScorer scorer;
  scorer.model = &critic_;
  scorer.numbers = [&model = critic_](const at::Tensor& hidden, const MicroBatch& batch,
                                      const std::vector<Sample>& samples) {
    const at::Tensor values = response_values(model, hidden, batch);
    check_values(values, batch, [&](size_t place) {  // which is nobody else's
      return std::to_string(samples[place].index) + " of group " + std::to_string(samples[place].group);
    });
    return values;
  };
  scorer.keep = [](Sample& sample, std::vector<float> numbers) { sample.values = std::move(numbers); };
  scorer.share_prompts = logprob_micro_batches(config_).share_prompts;
  return scorer;
}

std::vector<CriticTrainer::OptimizerBatch> CriticTrainer::prepare_steps(const std::vector<Sample>& samples) {
  const auto total = static_cast<int64_t>(samples.size());
  const int64_t size = config_.policy.train_global_batch_size;
  const MicroBatchOptions options = training_micro_batches(config_);
  const Communicator& ranks = context_.group(Axis::kDp);
  std::vector<OptimizerBatch> steps;
  OwnRows most_rows;
  int64_t most_batches = 0;
  for (int64_t begin = 0; begin < total; begin += size) {
    Members members;
    for (int64_t i = begin; i < std::min(total, begin + size); ++i) members.push_back(i);
    OptimizerBatch& step = steps.emplace_back();
    const auto dealt = make_micro_batches(samples, members, options, ranks.size());
    for (const Members& own : dealt[static_cast<size_t>(ranks.rank())]) {
      Batch batch;
      batch.micro_batch = make_micro_batch(samples, own, options.share_prompts);
      if (batch.micro_batch.response_tokens() == 0) continue;
      batch.old_values = of_tokens(samples, own, &Sample::values);
      batch.returns = of_tokens(samples, own, &Sample::returns);
      batch.mask = loss_mask(samples, own);
      most_rows = at_most(most_rows, own_rows(critic_, batch.micro_batch.input));
      step.push_back(std::move(batch));
    }
    most_batches = std::max(most_batches, static_cast<int64_t>(step.size()));
  }
  set_recompute(critic_, config_, kept_activations(critic_.split(), most_rows, most_batches), context_, make_room);
  return steps;
}

// Of all micro-batches of an optimizer step; what their losses say, on all stages of a pipeline.
MetricSums CriticTrainer::backward_passes(const OptimizerBatch& batch, double valid) {
  MetricSums own;
  PipelineWork work;
  for (const Batch& one : batch) work.inputs.push_back(&one.micro_batch.input);
  work.finish = [&](size_t index, const at::Tensor& hidden) {
    const Batch& one = batch[index];
    const at::Device device = critic_.options().device;
    ValueLossInputs inputs;
    inputs.values = response_values(critic_, hidden, one.micro_batch);
    check_values(inputs.values, one.micro_batch, number_of);
    inputs.old_values = one.old_values.to(device);
    inputs.returns = one.returns.to(device);
    inputs.mask = one.mask.to(device);
    inputs.global_valid_tokens = valid;
    const LossOutput output = value_loss(inputs, config_.value_loss_fn);
    add_metrics(own, output.metrics);
    return output.loss;
  };
  if (overlap_grad_reduce(config_)) work.before_last = [this] { optimizer_.reduce_in_next_backward(); };
  work.on_progress = on_progress;
  train_passes(critic_, work);
  if (critic_.split().pp == 1) return own;
  const std::vector<uint8_t> bytes = nlohmann::json::to_cbor(own);  // as text a number that is not finite is lost
  const std::string shared = share_result(critic_, std::string(bytes.begin(), bytes.end()));
  return nlohmann::json::from_cbor(shared).get<MetricSums>();
}

void CriticTrainer::train_step(const OptimizerBatch& batch, double learning_rate, double decay, bool last,
                               Moments& moments) {
  Communicator& ranks = context_.group(Axis::kDp);
  double valid = 0;
  for (const Batch& one : batch) valid += one.mask.sum().item<double>();
  valid = ranks.all_reduce_sum(valid);
  const MetricSums own = backward_passes(batch, valid);
  const OptimizerStep step = optimizer_.step(
      learning_rate, decay, max_grad_norm(config_),
      !last && overlap_param_gather(config_) ? DistributedAdamW::Gather::kLater : DistributedAdamW::Gather::kNow);
  MetricSums all = reduce_metrics(own, ranks);
  moments.of_steps["loss"] += all["loss"];
  moments.of_steps["grad_norm"] += step.grad_norm;
  all.erase("loss");
  for (auto& [name, value] : all) {
    if (!is_extreme(name)) value *= valid;
  }
  add_metrics(moments.of_tokens, all);
  moments.tokens += valid;
  ++moments.steps;
}

MetricSums CriticTrainer::train(const std::vector<Sample>& samples, int64_t passes) {
  if (critic_.units() != nullptr) critic_.units()->release();
  const std::vector<OptimizerBatch> steps = prepare_steps(samples);
  Moments moments;
  double rate = 0;
  for (int64_t pass = 0; pass < passes; ++pass) {
    rate = learning_rate(config_, passes_done_);
    const double decay = weight_decay(config_, passes_done_);
    ++passes_done_;
    for (size_t s = 0; s < steps.size(); ++s)
      train_step(steps[s], rate, decay, pass + 1 == passes && s + 1 == steps.size(), moments);
  }
  MetricSums metrics = moments.of_steps;
  divide_metrics(metrics, static_cast<double>(std::max<int64_t>(1, moments.steps)));
  divide_metrics(moments.of_tokens, std::max(1.0, moments.tokens));
  MetricSums& m = moments.of_tokens;
  metrics["explained_var"] =
      explained_variance(m["values_mean"], m["returns_mean"], m["returns_sq_mean"], m["residual_sq_mean"]);
  for (const char* name : {"values_mean", "values_min", "values_max", "returns_mean", "vf_clipfrac"})
    metrics[name] = m[name];
  metrics["lr"] = rate;
  return metrics;
}

}  // namespace trireme
