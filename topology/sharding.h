// How training state is shared by the ranks that hold the same part of a model.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

// What of a replica's training state its data parallel ranks share. The names are Megatron's
// data_parallel_sharding_strategy.
enum class StateSharding {
  kNothing,    // no_shard
  kOptimizer,  // optim: ZeRO-1
  kGradients,  // optim_grads: a bucket is reduced into its owner's slice in every backward; not with pp
  kWeights,    // optim_grads_params: weights are gathered layer by layer, whole for generation; not with pp
};
const char* to_string(StateSharding sharding);
std::optional<StateSharding> parse_sharding(std::string_view name);
std::vector<std::string> sharding_names();

}  // namespace trireme
