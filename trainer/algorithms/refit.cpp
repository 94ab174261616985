#include "trainer/algorithms/refit.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/options.h"
#include "trainer/parallel/device.h"
#include "trainer/parallel/stage_links.h"

namespace trireme {
namespace {

ModelOptions options_of_generation(const Model& policy, const StageOptions& stages, const ParallelContext& context) {
  const GenerationRanks& ranks = context.generation();
  ModelOptions options = policy.options();
  options.trainable = false;
  options.releasable = true;
  options.sharding = {};
  options.context = nullptr;
  options.split = model_split(policy.config().shape(), ranks.layout, context.rank(), stages);
  options.tensor = ranks.tensor->size() > 1 ? ranks.tensor : nullptr;
  options.links = ranks.links;
  return options;
}

int64_t bytes_of(const std::vector<RefitCopy>& copies) {
  int64_t bytes = 0;
  for (const RefitCopy& copy : copies) bytes += copy.bytes();
  return bytes;
}

// Elements that go to each rank of the group, or come from it.
std::vector<int64_t> elements_by_rank(const std::vector<RefitCopy>& copies, const std::vector<int64_t>& group,
                                      int64_t RefitCopy::*other, int64_t element_bytes) {
  std::vector<int64_t> elements(group.size(), 0);
  for (const RefitCopy& copy : copies) {
    const auto place = std::lower_bound(group.begin(), group.end(), copy.*other) - group.begin();
    elements[static_cast<size_t>(place)] += copy.bytes() / element_bytes;
  }
  return elements;
}

}  // namespace

std::optional<Layout> generation_layout(const Config& config, const Layout& training) {
  const GenerationConfig& g = config.policy.generation;
  if (config.algorithm != "grpo") return std::nullopt;
  if (!g.fold_pipeline && (g.tensor_parallel_size == 0 || g.tensor_parallel_size == training.tp)) return std::nullopt;
  return generation_layout(training, g.tensor_parallel_size, g.fold_pipeline);
}

std::optional<std::string> generation_problem(const Config& config, const ModelShape& shape, const std::string& model,
                                              const Layout& training) {
  const std::optional<Layout> layout = generation_layout(config, training);
  if (!layout) return std::nullopt;
  const GenerationConfig& g = config.policy.generation;
  const std::string key = g.tensor_parallel_size > 0
                              ? "policy.generation.tensor_parallel_size " + std::to_string(layout->tp)
                              : "policy.generation.fold_pipeline";
  if (shape.experts > 0) {
    return key + ": the model of " + model + " has " + std::to_string(shape.experts) +
           " experts, which generate as they are trained; leave it out";
  }
  if (state_sharding(config) == StateSharding::kWeights) {
    return key +
           ": weights that ranks share (optim_grads_params, or policy.dtensor_cfg.enabled) are generated with as they "
           "are trained; leave it out, or set policy.megatron_cfg.distributed_data_parallel_config."
           "data_parallel_sharding_strategy to optim_grads";
  }
  const StageOptions stages = layout->pp == 1 ? StageOptions{} : stage_options(config);
  const LayoutReport report = check_layout(*layout, {.world = training.world(), .shape = &shape, .stages = stages});
  if (report.ok()) return std::nullopt;
  return key + ": the model of " + model + " cannot generate so: " + report.errors.front();
}

Refit::Refit(const Model& policy, const StageOptions& stages, ParallelContext& context, int64_t of_node,
             int64_t bucket_bytes)
    : policy_(policy) {
  const ModelShape shape = policy.config().shape();
  const GenerationRanks& ranks = context.generation();
  const StageOptions of_generation = ranks.links == nullptr ? StageOptions{} : stages;
  model_ = std::make_unique<Model>(policy.config(), options_of_generation(policy, of_generation, context));
  parameters_ = model_parameters(shape);
  const auto element = static_cast<int64_t>(c10::elementSize(policy.options().dtype));
  const RefitPlan whole = refit_plan(shape, parameters_,
                                     {.training = context.layout(),
                                      .generation = ranks.layout,
                                      .training_stages = stages,
                                      .generation_stages = of_generation,
                                      .of_node = of_node},
                                     element);
  plan_ = rank_refit(whole, context.rank(), bucket_bytes);
  RankGroup group{"refit-" + std::to_string(plan_.group.front()), {plan_.group.begin(), plan_.group.end()}};
  group_ = context.make(group);
  std::vector<int64_t> fetched(static_cast<size_t>(whole.ranks), 0);
  for (const RefitCopy& copy : whole.copies)
    if (copy.from != copy.to) fetched[static_cast<size_t>(copy.to)] += copy.bytes();
  most_bytes_ = *std::max_element(fetched.begin(), fetched.end());
  if (context.is_main()) {
    log_info("refit", "generation runs in " + to_string(ranks.layout) + ", training in " + to_string(context.layout()) +
                          ": a second copy of the weights takes " +
                          format_bytes(static_cast<uint64_t>(model_->flat_parameters().numel() * element)) +
                          " of a rank while it generates, of which it fetches up to " +
                          format_bytes(static_cast<uint64_t>(most_bytes_)) + " from others before each rollout");
  }
}

// The copy's range of a parameter, as this rank has it.
at::Tensor Refit::part(const Model& model, const RefitCopy& copy) const {
  const Parameter* parameter = model.find(parameters_[static_cast<size_t>(copy.parameter)].name);
  TRIREME_CHECK(parameter != nullptr, "a refit names a parameter of another stage");
  const ParameterSlice& slice = parameter->slice;
  const int64_t before = slice.dimension == copy.dimension ? slice.range.begin : 0;
  return parameter->tensor.detach().narrow(copy.dimension, copy.range.begin - before, copy.range.size());
}

void Refit::begin(size_t bucket) {
  const RefitBucket& now = plan_.buckets[bucket];
  Turn& turn = turns_[bucket % turns_.size()];
  const at::TensorOptions options = policy_.flat_parameters().options();
  const auto element = static_cast<int64_t>(options.dtype().itemsize());
  turn.in = at::empty({bytes_of(now.sends) / element}, options);
  turn.out = at::empty({bytes_of(now.receives) / element}, options);
  int64_t at = 0;
  for (const RefitCopy& copy : now.sends) {
    const at::Tensor from = part(policy_, copy);
    turn.in.narrow(0, at, from.numel()).view(from.sizes()).copy_(from);
    at += from.numel();
  }
  turn.pending = group_->begin_all_to_all(turn.out, turn.in,
                                          elements_by_rank(now.receives, plan_.group, &RefitCopy::from, element),
                                          elements_by_rank(now.sends, plan_.group, &RefitCopy::to, element));
}

void Refit::finish(size_t bucket) {
  Turn& turn = turns_[bucket % turns_.size()];
  turn.pending.wait();
  int64_t at = 0;
  for (const RefitCopy& copy : plan_.buckets[bucket].receives) {
    const at::Tensor to = part(*model_, copy);
    to.copy_(turn.out.narrow(0, at, to.numel()).view(to.sizes()));
    at += to.numel();
  }
  turn = {};
}

bool Refit::fill() {
  if (filled_) return false;
  const at::NoGradGuard no_grad;
  model_->take_memory();
  // The next bucket is under way while this one's parts are put into their places.
  if (!plan_.buckets.empty()) begin(0);
  for (const RefitCopy& copy : plan_.own) part(*model_, copy).copy_(part(policy_, copy));
  for (size_t bucket = 0; bucket < plan_.buckets.size(); ++bucket) {
    if (bucket + 1 < plan_.buckets.size()) begin(bucket + 1);
    finish(bucket);
  }
  synchronize(policy_.options().device);
  filled_ = true;
  return true;
}

void Refit::release() {
  filled_ = false;
  model_->release_memory();
}

}  // namespace trireme
