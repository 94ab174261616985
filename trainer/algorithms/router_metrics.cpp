#include "trainer/algorithms/router_metrics.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "trainer/algorithms/options.h"
#include "trainer/parallel/context.h"

namespace trireme {

BalanceOptions balance_options(const Config& config) {
  const MegatronConfig& m = router_settings(config);
  using Kind = BalanceOptions::Kind;
  const Kind kind = m.moe_router_load_balancing_type == "aux_loss"       ? Kind::kMicroBatch
                    : m.moe_router_load_balancing_type == "seq_aux_loss" ? Kind::kSample
                                                                         : Kind::kNone;
  return {m.moe_aux_loss_coeff > 0 ? kind : Kind::kNone, m.moe_aux_loss_coeff};
}

std::shared_ptr<RouterWatch> watch_routers(Model& model, const Config& config, ParallelContext& ranks) {
  const ModelConfig& shape = model.config();
  if (shape.num_experts == 0) return nullptr;
  model.router_watch = std::make_shared<RouterWatch>(shape.num_layers, shape.num_experts, balance_options(config),
                                                     model.options().device);
  if (ranks.layout().tp * ranks.layout().cp > 1) {
    model.router_watch->over_ranks = [&group = ranks.group(Axis::kTpCp)](at::Tensor counts) {
      if (counts.numel() > 0) group.all_reduce_sum(std::move(counts));
    };
  }
  return model.router_watch;
}

MetricSums router_metrics(RouterWatch& watch, ParallelContext& ranks) {
  RouterSums sums = watch.take();
  ranks.data_parallel().all_reduce_sum(sums.of_layers);
  sums.of_layers = sums.of_layers.to(at::kCPU);
  ranks.tensor_parallel().all_reduce_sum(sums.of_layers);  // each tensor rank has watched its own rows,
  ranks.group(Axis::kPp).all_reduce_sum(sums.of_layers);   // each stage its own layers
  return router_metrics(sums, watch.balance());
}

MetricSums router_metrics(const RouterSums& sums, const BalanceOptions& balance) {
  const int64_t experts = sums.experts();
  double layers = 0, load = 0, largest = 0, unused = 0, entropy = 0, rows = 0, loss = 0;
  const auto values = sums.of_layers.accessor<double, 2>();
  for (int64_t layer = 0; layer < sums.of_layers.size(0); ++layer) {
    const double* const choices = values[layer].data();
    if (values[layer][experts] == 0) continue;
    double all = 0, most = 0;
    for (int64_t e = 0; e < experts; ++e) {
      all += choices[e];
      most = std::max(most, choices[e]);
      unused += choices[e] == 0 ? 1 : 0;
    }
    const double of_layer = most * static_cast<double>(experts) / all;
    ++layers;
    load += of_layer;
    largest = std::max(largest, of_layer);
    rows += values[layer][experts];
    entropy += values[layer][experts + 1];
    const double tokens = values[layer][experts + 3];
    loss += tokens > 0 ? values[layer][experts + 2] / tokens : 0;
  }
  if (layers == 0) return {};
  MetricSums metrics = {{"moe/expert_load", load / layers},
                        {"moe/expert_load_max", largest},
                        {"moe/unused_experts", unused},
                        {"moe/router_entropy", entropy / rows}};
  using Kind = BalanceOptions::Kind;
  if (balance.kind == Kind::kMicroBatch) metrics["moe/load_balancing_loss"] = loss / layers;
  if (balance.kind == Kind::kSample) metrics["moe/seq_load_balancing_loss"] = loss / layers;
  return metrics;
}

}  // namespace trireme
