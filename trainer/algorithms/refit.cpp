#include "trainer/algorithms/refit.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/engine_layout.h"
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
  // Else the cache would take what the gradients need when they come back.
  options.least_bytes = policy.lent_bytes();
  options.lends_gradients = false;
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
  if (!has_rollouts(config) || generates_elsewhere(config)) return std::nullopt;
  if (!g.fold_pipeline && (g.tensor_parallel_size == 0 || g.tensor_parallel_size == training.tp)) return std::nullopt;
  return generation_layout(training, g.tensor_parallel_size, g.fold_pipeline);
}

std::optional<std::string> generation_problem(const Config& config, const ModelShape& shape, const std::string& model,
                                              const Layout& training, int64_t of_node) {
  if (has_rollouts(config) && generates_elsewhere(config)) return engine_problem(config, shape, model, training);
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
  const StageOptions stages = layout->pp == 1 ? StageOptions{} : stage_options(config);
  const LayoutReport report =
      check_layout(*layout, {.world = training.world(), .gpus_per_node = of_node, .shape = &shape, .stages = stages});
  if (report.ok()) return std::nullopt;
  return key + ": the model of " + model + " cannot generate so: " + report.errors.front();
}

Refit::Refit(Model& policy, const StageOptions& stages, ParallelContext& context, int64_t of_node, int64_t bucket_bytes)
    : policy_(policy) {
  const ModelShape shape = policy.config().shape();
  const GenerationRanks& ranks = context.generation();
  const StageOptions of_generation = ranks.links == nullptr ? StageOptions{} : stages;
  model_ = std::make_unique<Model>(policy.config(), options_of_generation(policy, of_generation, context));
  const auto element = static_cast<int64_t>(c10::elementSize(policy.options().dtype));
  const RefitLayouts layouts{.training = context.layout(),
                             .generation = ranks.layout,
                             .training_stages = stages,
                             .generation_stages = of_generation,
                             .of_node = of_node};
  std::vector<int64_t> fetched(static_cast<size_t>(context.layout().world()), 0);
  std::map<std::vector<int64_t>, std::shared_ptr<Communicator>> groups;
  parts_ = parts_of_policy();
  for (size_t i = 0; i < parts_.size(); ++i) {
    Part& part = parts_[i];
    if (part.parameters.empty()) continue;  // as where a tied head's norm is alike on tensor ranks
    const RefitPlan whole = refit_plan(shape, part.parameters, layouts, element);
    part.plan = rank_refit(whole, context.rank(), bucket_bytes);
    // The ranks of a group are together first in the same part, so all make it there.
    const std::vector<int64_t>& members = part.plan.group;
    std::shared_ptr<Communicator>& group = groups[members];
    if (group == nullptr) {
      const std::string number = i == 0 ? "" : "-" + std::to_string(i);
      group = context.make({"refit-" + std::to_string(members.front()) + number, {members.begin(), members.end()}});
    }
    part.group = group;
    for (const RefitCopy& one : whole.copies)
      if (one.from != one.to) fetched[static_cast<size_t>(one.to)] += one.bytes();
  }
  most_bytes_ = *std::max_element(fetched.begin(), fetched.end());
  if (context.is_main()) {
    log_info("refit", "generation runs in " + to_string(ranks.layout) + ", training in " + to_string(context.layout()) +
                          ": a second copy of the weights takes " +
                          format_bytes(static_cast<uint64_t>(model_->flat_parameters().numel() * element)) +
                          " of a rank while it generates" +
                          (policy.lent_bytes() == 0
                               ? ""
                               : ", of its gradients' " + format_bytes(static_cast<uint64_t>(policy.lent_bytes()))) +
                          ", of which it fetches up to " + format_bytes(static_cast<uint64_t>(most_bytes_)) +
                          " from others before each rollout");
  }
}

ShardedUnits* Refit::shared_weights() const {
  ShardedUnits* units = policy_.units();
  return units != nullptr && units->shares_weights() ? units : nullptr;
}

std::vector<Refit::Part> Refit::parts_of_policy() const {
  const ShardedUnits* units = shared_weights();
  std::vector<Part> parts(units == nullptr ? 1 : static_cast<size_t>(units->places()));
  for (ModelParameter& parameter : model_parameters(policy_.config().shape())) {
    const Parameter* own = units == nullptr ? nullptr : policy_.find(parameter.name);
    const int64_t place = own == nullptr ? 0 : units->place_of(own->offset);
    parts[static_cast<size_t>(place)].parameters.push_back(std::move(parameter));
  }
  return parts;
}

// The copy's range of a parameter, as this rank has it.
at::Tensor Refit::range(const Model& model, const Part& part, const RefitCopy& copy) const {
  const Parameter* parameter = model.find(part.parameters[static_cast<size_t>(copy.parameter)].name);
  TRIREME_CHECK(parameter != nullptr, "a refit names a parameter of another stage");
  const ParameterSlice& slice = parameter->slice;
  const int64_t before = slice.dimension == copy.dimension ? slice.range.begin : 0;
  return parameter->tensor.detach().narrow(copy.dimension, copy.range.begin - before, copy.range.size());
}

void Refit::begin(const Part& part, size_t bucket) {
  const RefitBucket& now = part.plan.buckets[bucket];
  Turn& turn = turns_[bucket % turns_.size()];
  const at::TensorOptions options = policy_.flat_parameters().options();
  const auto element = static_cast<int64_t>(options.dtype().itemsize());
  turn.in = at::empty({bytes_of(now.sends) / element}, options);
  turn.out = at::empty({bytes_of(now.receives) / element}, options);
  int64_t at = 0;
  for (const RefitCopy& copy : now.sends) {
    const at::Tensor from = range(policy_, part, copy);
    turn.in.narrow(0, at, from.numel()).view(from.sizes()).copy_(from);
    at += from.numel();
  }
  turn.pending = part.group->begin_all_to_all(
      turn.out, turn.in, elements_by_rank(now.receives, part.plan.group, &RefitCopy::from, element),
      elements_by_rank(now.sends, part.plan.group, &RefitCopy::to, element));
}

void Refit::finish(const Part& part, size_t bucket) {
  Turn& turn = turns_[bucket % turns_.size()];
  turn.pending.wait();
  int64_t at = 0;
  for (const RefitCopy& copy : part.plan.buckets[bucket].receives) {
    const at::Tensor to = range(*model_, part, copy);
    to.copy_(turn.out.narrow(0, at, to.numel()).view(to.sizes()));
    at += to.numel();
  }
  turn = {};
}

// The next bucket is under way while this one's ranges are put into their places.
void Refit::copy(const Part& part) {
  if (!part.plan.buckets.empty()) begin(part, 0);
  for (const RefitCopy& copy : part.plan.own) range(*model_, part, copy).copy_(range(policy_, part, copy));
  for (size_t bucket = 0; bucket < part.plan.buckets.size(); ++bucket) {
    if (bucket + 1 < part.plan.buckets.size()) begin(part, bucket + 1);
    finish(part, bucket);
  }
}

bool Refit::fill() {
  if (filled_) return false;
  const at::NoGradGuard no_grad;
  ShardedUnits* units = shared_weights();
  if (units != nullptr) units->release();
  policy_.lend_gradients();
  model_->take_memory();
  for (size_t place = 0; place < parts_.size(); ++place) {
    if (units != nullptr) units->read(static_cast<int64_t>(place));
    copy(parts_[place]);
  }
  if (units != nullptr) units->end_passes();
  synchronize(policy_.options().device);
  filled_ = true;
  return true;
}

void Refit::release() {
  filled_ = false;
  model_->release_memory();
  policy_.return_gradients();
}

}  // namespace trireme
