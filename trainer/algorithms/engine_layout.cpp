#include "trainer/algorithms/engine_layout.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/text.h"
#include "topology/combine_blocks.h"

namespace trireme {

int64_t engine_ranks(const Config& config) {
  return std::max<int64_t>(1, config.policy.generation.tensor_parallel_size);
}

std::string link_of_rank(const std::string& link, int64_t rank) {
  return rank == 0 ? link : link + "." + std::to_string(rank);
}

Layout engine_layout(const Config& config, const ModelShape& shape, const Layout& training) {
  Layout layout{.tp = engine_ranks(config)};
  if (shape.experts == 0) return layout;
  const int64_t blocks = combine_blocks(shape.experts, config.policy.moe_combine_blocks, training.ep);
  const int64_t asked = config.policy.generation.expert_parallel_size;
  layout.ep = asked > 0 ? asked : std::gcd(layout.tp, blocks);
  return layout;
}

std::optional<std::string> engine_problem(const Config& config, const ModelShape& shape, const std::string& model,
                                          const Layout& training) {
  const Layout layout = engine_layout(config, shape, training);
  const GenerationConfig& g = config.policy.generation;
  if (g.expert_parallel_size > 1 && shape.experts == 0) {
    return "policy.generation.expert_parallel_size " + std::to_string(g.expert_parallel_size) + ": the model of " +
           model + " has no experts; leave it out";
  }
  const LayoutReport report =
      check_layout(layout, {.world = layout.world(), .gpus_per_node = layout.world(), .shape = &shape});
  std::vector<std::string> problems = report.errors;
  if (shape.experts > 0) {
    const int64_t blocks = combine_blocks(shape.experts, config.policy.moe_combine_blocks, training.ep);
    for (std::string& problem : combine_block_problems(shape.experts, blocks, layout.ep))
      problems.push_back(std::move(problem));
  }
  if (problems.empty()) return std::nullopt;
  const bool experts = starts_with(problems.front(), "ep ");
  return (experts ? "policy.generation.expert_parallel_size " + std::to_string(layout.ep)
                  : "policy.generation.tensor_parallel_size " + std::to_string(layout.tp)) +
         ": an engine cannot split the model of " + model + " so: " + problems.front();
}

}  // namespace trireme
