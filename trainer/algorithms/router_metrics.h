// What the log says of a mixture's routers, and the settings of the loss that balances them.
#pragma once

#include <memory>

#include "trainer/algorithms/metric_sums.h"
#include "trainer/config/config.h"
#include "trainer/model/model.h"
#include "trainer/ops/router_watch.h"

namespace trireme {

class ParallelContext;

BalanceOptions balance_options(const Config& config);

// Has the model's training passes watched; null for a model without experts. The model shares it. With a balancing loss
// these passes are collective over the ranks that share a micro-batch's rows (Axis::kTpCp), once a layer.
std::shared_ptr<RouterWatch> watch_routers(Model& model, const Config& config, ParallelContext& ranks);

// Of all passes since the last call, over all ranks; layers without experts do not count. Collective.
//   moe/expert_load            tokens of the fullest expert over the mean, mean over layers; 1 is even
//   moe/expert_load_max        the same of the layer where it is largest
//   moe/unused_experts         that got no token, of all layers
//   moe/router_entropy         of a token's probabilities of all experts, nats, mean over tokens and layers
//   moe/load_balancing_loss    mean over tokens and layers, for seq_aux_loss moe/seq_load_balancing_loss; only where
//                              there is one
MetricSums router_metrics(RouterWatch& watch, ParallelContext& ranks);
// The same from sums over all ranks, on the host.
MetricSums router_metrics(const RouterSums& sums, const BalanceOptions& balance);

}  // namespace trireme
