#include "trainer/cli/role_layout.h"

#include <tuple>

#include "base/error.h"

namespace trireme {
namespace {

[[noreturn]] void refuse_size(const std::string& axis, int64_t configured, int64_t wanted, const std::string& role) {
  const bool engine = role == "generation";  // which gets no --layout
  const std::string whose = engine ? " of an engine" : role == "critic" ? " of the critic" : "";
  fail_user("the configuration says " + axis + " " + std::to_string(configured) + whose + ", but the RLJob" +
            (engine ? "" : " (--layout)") + " says " + std::to_string(wanted) + "; the RLJob decides: set spec.roles." +
            role + ".parallelism." + axis + " or change the configuration");
}

}  // namespace

void check_layout_agrees(const ParallelSizes& sizes, const Layout& layout, const std::string& role) {
  const std::tuple<const char*, int64_t, int64_t> rows[] = {{"tp", sizes.tensor, layout.tp},
                                                            {"pp", sizes.pipeline, layout.pp},
                                                            {"cp", sizes.context, layout.cp},
                                                            {"ep", sizes.expert, layout.ep},
                                                            {"etp", sizes.expert_tensor, layout.etp}};
  for (const auto& [axis, configured, wanted] : rows) {
    if (configured != 1 && configured != wanted) refuse_size(axis, configured, wanted, role);
  }
}

void check_engine_agrees(const Config& config, const Parallelism& engine) {
  const GenerationConfig& g = config.policy.generation;
  const std::tuple<const char*, int64_t, int64_t> rows[] = {{"tp", g.tensor_parallel_size, engine.tp},
                                                            {"ep", g.expert_parallel_size, engine.ep}};
  for (const auto& [axis, configured, wanted] : rows) {
    if (wanted > 1 && configured != wanted) refuse_size(axis, configured, wanted, "generation");
  }
}

void check_generation_role(const Config& config, bool has_role) {
  const bool elsewhere = generates_elsewhere(config);
  if (!elsewhere && has_role)
    fail_user(
        "the RLJob has pods that generate (spec.roles.generation), but policy.generation.colocated.enabled is true: "
        "set it to false, or leave the role out");
  if (elsewhere && !has_role)
    fail_user(
        "policy.generation.colocated.enabled is false, but the RLJob has no pods that generate: add "
        "spec.roles.generation, or set it to true");
}

}  // namespace trireme
