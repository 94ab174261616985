// One rank of a training run under any layout: a small model, its optimizer, and steps on the same eight sequences; and
// what of a layout tests tell apart.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/fs.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/algorithms/pipeline_step.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/model/context_rows.h"
#include "trainer/parallel/stage_links.h"

namespace trireme::test {

enum class Shared { kNothing, kState, kGradients, kWeights };

struct Sizes {
  int64_t tp, pp, dp;
  StageOptions stages = {};
  int64_t ep = 1, cp = 1, etp = 1;
  Shared shared = Shared::kState;
  bool operator==(const Sizes&) const = default;
};

inline Layout layout_of(const Sizes& sizes) {
  Layout layout;
  layout.tp = sizes.tp;
  layout.pp = sizes.pp;
  layout.dp = sizes.dp;
  layout.ep = sizes.ep;
  layout.cp = sizes.cp;
  layout.etp = sizes.etp;
  return layout;
}

inline ModelConfig with_layers(ModelFamily family, int64_t layers) {
  ModelConfig config = testing::eight_heads(family, /*tied=*/family == ModelFamily::kQwen3);
  config.num_layers = layers;
  return config;
}

inline ModelConfig four_layers(ModelFamily family) { return with_layers(family, 4); }

// Each token's is the next one of its sequence, the last one's the first.
inline at::Tensor targets(const PackedBatch& batch) {
  std::vector<at::Tensor> parts;
  for (size_t s = 0; s + 1 < batch.starts.size(); ++s)
    parts.push_back(batch.ids.narrow(0, batch.starts[s], batch.starts[s + 1] - batch.starts[s]).roll(-1));
  return at::cat(parts);
}

inline std::string name_of(Shared shared) {
  const char* names[] = {"no_shard", "optim", "optim_grads", "optim_grads_params"};
  return names[static_cast<size_t>(shared)];
}

inline std::string name_of(const Sizes& sizes) {
  const std::string layout = to_string(layout_of(sizes)) + " " + name_of(sizes.shared);
  return sizes.stages.virtual_stages > 1 ? layout + " in " + std::to_string(sizes.stages.virtual_stages) + " pieces"
                                         : layout;
}

inline std::map<std::string, int64_t> axes_of(const Sizes& sizes) {
  return {{"tp", sizes.tp},
          {"pp", sizes.pp},
          {"dp", sizes.dp},
          {"ep", sizes.ep},
          {"cp", sizes.cp},
          {"etp", sizes.etp},
          {"virtual stages", sizes.stages.virtual_stages}};
}

// What a layout has and others do not.
inline std::set<std::string> traits_of(const Sizes& sizes) {
  std::set<std::string> traits = {name_of(sizes.shared)};
  for (const auto& [axis, size] : axes_of(sizes)) {
    if (size > 1) traits.insert(axis);
  }
  return traits;
}

struct Step {
  double loss = 0, grad_norm = 0;
};

// One rank's model and optimizer, and how it trains: each replica its share of the same eight sequences.
struct TrainedRank {
  TrainedRank(ParallelContext& ranks, const ModelConfig& config, const Sizes& sizes = {1, 1, 1})
      : context(ranks),
        model(config, model_options(ranks, config, sizes)),
        optimizer(model, ranks.data_parallel(), options(sizes.shared),
                  ranks.expert_data_parallel(model.options().split)) {
    testing::fill(model);
    optimizer.reset_master_from_weights();
  }
  static ModelOptions model_options(ParallelContext& ranks, const ModelConfig& config, const Sizes& sizes) {
    ModelOptions options = testing::split_options(ranks, config, sizes.stages);
    options.freeze_router = config.family != ModelFamily::kMixtral;
    if (sizes.shared < Shared::kGradients) return options;
    options.sharding = {.gradients = true,
                        .weights = sizes.shared == Shared::kWeights,
                        .ranks = &ranks.data_parallel(),
                        .experts = ranks.expert_data_parallel(options.split),
                        .bucket_elements = 3000};
    return options;
  }
  static AdamWOptions options(Shared shared) {
    AdamWOptions options;
    options.shard_state = shared != Shared::kNothing;
    options.bucket_elements = 3000;
    options.eps = 1e-4;  // where gradients are almost 0 their sign is chance
    options.decay_all = false;
    return options;
  }

  Step train(int step) {
    const Communicator& samples = context.group(Axis::kDp);
    std::vector<std::vector<int32_t>> own;
    for (int s = 0; s < 8; ++s) {
      if (s % samples.size() == samples.rank()) own.push_back(testing::random_tokens(9 + 3 * s, 100 * step + s));
    }
    // Two micro-batches where there are as many sequences; the second replica has one of each.
    std::vector<PackedBatch> batches;
    const size_t together = samples.rank() == 1 ? 1 : (own.size() + 1) / 2;
    for (size_t begin = 0; begin < own.size(); begin += together) {
      const size_t end = std::min(own.size(), begin + together);
      batches.push_back(PackedBatch::from_sequences({own.begin() + begin, own.begin() + end}));
    }
    const at::Tensor loss = at::zeros({1}, at::kDouble);
    PipelineWork work;
    for (const PackedBatch& batch : batches) work.inputs.push_back(&batch);
    if (overlaps) work.before_last = [this] { optimizer.reduce_in_next_backward(); };
    work.finish = [&](size_t index, const at::Tensor& hidden) {
      at::Tensor wanted = targets(batches[index]);
      const PackedBatch part = context_part(model, batches[index]);
      if (part.context) wanted = wanted.index_select(0, at::tensor(part.context->rows, at::kLong));
      const at::Tensor sum = -model.logprobs(hidden, wanted, {}).sum() / 100;
      loss.add_(sum.item<double>());
      return sum;
    };
    if (model.units() != nullptr) model.units()->release();
    train_passes(model, work);
    share_result(model, loss);
    const OptimizerStep done = optimizer.step(0.01, 0.1, 0.5);
    reduced_early = done.reduced_early;
    if (model.units() != nullptr) model.units()->gather();
    return {context.data_parallel().all_reduce_sum(loss.item<double>()), done.grad_norm};
  }

  std::unique_ptr<CheckpointManager> checkpoints(const std::filesystem::path& dir) {
    CheckpointOptions options;
    options.directory = dir;
    options.keep_top_k = 0;
    auto manager = std::make_unique<CheckpointManager>(options, nlohmann::json{{"model", 1}}, context);
    optimizer.before_update = [manager = manager.get()] { manager->wait_copied(); };
    return manager;
  }

  ParallelContext& context;
  Model model;
  DistributedAdamW optimizer;
  bool overlaps = true;       // gradients are reduced while the last backward pass runs
  int64_t reduced_early = 0;  // OptimizerStep's, of the last step
};

inline void expect_near(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  if (wanted.numel() == 0) return;
  const double largest = wanted.abs().max().item<double>();
  EXPECT_LE((got - wanted).abs().max().item<double>(), 1e-5 * std::max(largest, 1e-3)) << what;
}

inline void expect_near(const Step& got, const Step& wanted) {
  EXPECT_NEAR(got.loss, wanted.loss, 1e-5 * std::abs(wanted.loss));
  EXPECT_NEAR(got.grad_norm, wanted.grad_norm, 1e-5 * wanted.grad_norm);
}

// Each of the rank's parameters is its part of those of `whole`, which one rank has trained.
inline void expect_parameters_of(const TrainedRank& rank, const Model& whole, const std::string& where) {
  for (const Parameter& parameter : rank.model.parameters()) {
    expect_near(parameter.tensor.detach(), testing::part_of(parameter, whole.find(parameter.name)->tensor.detach()),
                where + " " + parameter.name);
  }
}

// Both ends of a pipeline train a tied embedding: alike. Collective over the stages.
inline void expect_equal_ends(const TrainedRank& rank) {
  if (rank.context.layout().pp == 1 || !rank.model.config().tie_word_embeddings) return;
  for (const Parameter& parameter : rank.model.parameters()) {
    if (parameter.name != "model.embed_tokens.weight") continue;
    const at::Tensor other = rank.context.stage_links()->swap_ends(parameter.tensor.detach());
    EXPECT_TRUE(testing::same_bits(other, parameter.tensor.detach()));
  }
}

}  // namespace trireme::test
