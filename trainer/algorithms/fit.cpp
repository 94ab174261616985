#include "trainer/algorithms/fit.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "topology/plan.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/plan_inputs.h"

namespace trireme {
namespace {

// Measured runs are within 12 % of the formula (docs/layouts.md): below so much of what it says nothing fits.
constexpr double kSurely = 0.8;

// Of a device what the plan says, of a host what is there whatever is computed.
int64_t least_of(const LayoutPlan& plan, bool gpu) {
  const MemoryParts& state = plan.memory.training;
  return gpu ? plan.least_memory
             : state.weights + state.reference + state.gradients + state.optimizer + state.critic + state.reward_model;
}

PlannedBeside planned_beside(const Config& config, const ModelsBeside& beside) {
  PlannedBeside planned;
  if (beside.critic != nullptr) planned.critic = planned_critic(config, beside.critic->model.shape(), {});
  if (beside.reward_model != nullptr)
    planned.reward_model = planned_reward_model(config, beside.reward_model->model.shape(), {});
  return planned;
}

std::string size_text(int64_t bytes) { return format_bytes(static_cast<uint64_t>(bytes)); }

// The end of a sentence that begins with what wants it.
std::string wants_of(const Layout& layout, int64_t wanted, const MemoryLimit& memory) {
  return " in " + to_string(layout) + " wants " + size_text(wanted) +
         (memory.gpu ? " of a GPU" : " of the host for a rank") + " at the least, and there are " +
         size_text(memory.bytes);
}

// Whether it may be that it fits, as far as the formula can say; said, where `main`.
bool may_fit(const std::string& wants, int64_t wanted, const MemoryLimit& memory, bool main) {
  if (kSurely * static_cast<double>(wanted) > static_cast<double>(memory.bytes)) return false;
  if (main) log_warn("train", wants + ": it may end for lack of memory; see trireme plan");
  return true;
}

}  // namespace

void check_fits(const Config& config, const ModelConfig& model, const std::filesystem::path& dir, const Layout& layout,
                const MemoryLimit& memory, bool main, const ModelsBeside& beside) {
  const ModelShape shape = model.shape();
  PlanOptions options = plan_options(config);
  options.sharding = state_sharding(config);
  Workload work = planned_work(config, {});
  work.engines = work.age = 0;  // devices of others, and time
  PlanDevices devices;
  devices.rates = *device_rates("h200");  // only memory is asked for
  devices.memory_bytes = memory.bytes;
  devices.of_node = config.cluster.processes;
  const PlannedBeside models = planned_beside(config, beside);
  const LayoutPlan plan = plan_layout(shape, layout, work, options, devices, models);
  const int64_t wanted = least_of(plan, memory.gpu);
  if (wanted <= memory.bytes) return;
  std::string all = "the model of " + dir.string();
  if (beside.critic != nullptr) all += " with the critic of " + beside.critic->dir.string();
  if (beside.reward_model != nullptr) all += " with the reward model of " + beside.reward_model->dir.string();
  const std::string wants = all + wants_of(layout, wanted, memory);
  if (may_fit(wants, wanted, memory, main)) return;
  std::vector<std::string> parts;
  if (beside.critic != nullptr)
    parts.push_back(size_text(plan.memory.training.critic) + " are the critic's weights and training state");
  if (beside.reward_model != nullptr)
    parts.push_back(size_text(plan.memory.training.reward_model) + " are the reward model's weights");
  if (!parts.empty()) {
    fail_user(wants + ", of which " + join(parts, " and ") +
              "; more ranks, which share training state, or smaller models (value.model_name, "
              "env.reward_model.model_name) make it less");
  }
  LayoutCheck check;
  check.world = layout.world();
  check.gpus_per_node = std::min<int64_t>(config.cluster.processes, check.world);
  check.shape = &shape;
  check.stages = options.stages;
  const std::vector<LayoutPlan> others =
      rank_layouts(shape, legal_layouts(check, layout.etp), work, options, devices, models);
  const auto least = std::min_element(others.begin(), others.end(), [&](const LayoutPlan& a, const LayoutPlan& b) {
    return least_of(a, memory.gpu) < least_of(b, memory.gpu);
  });
  std::string advice = "; more ranks, or less of policy.sequence_packing and policy.generation, make it smaller";
  if (least != others.end()) {
    advice = "; of all layouts of " + std::to_string(check.world) + " ranks" +
             (layout.etp > 1 ? " with etp " + std::to_string(layout.etp) : "") + " " + to_string(least->layout) +
             " wants least, " + size_text(least_of(*least, memory.gpu));
  }
  fail_user(wants + advice + " (trireme plan --gpus N shows them all)");
}

void check_critic_fits(const Config& config, const CriticModel& critic, const Layout& layout, const MemoryLimit& memory,
                       bool main) {
  const PlannedModel model = planned_critic(config, critic.model.shape(), {});
  PlanDevices devices;
  devices.rates = *device_rates("h200");  // only memory is asked for
  devices.memory_bytes = memory.bytes;
  devices.of_node = config.cluster.processes;
  const int64_t wanted = least_of(plan_layout(model.shape, layout, model.work, model.options, devices), memory.gpu);
  if (wanted <= memory.bytes) return;
  const std::string wants =
      "the critic of " + critic.dir.string() + " on ranks of its own" + wants_of(layout, wanted, memory);
  if (may_fit(wants, wanted, memory, main)) return;
  fail_user(wants +
            "; more critic ranks (launch --critic-ranks), which share its training state, or a smaller model "
            "(value.model_name) make it less");
}

}  // namespace trireme
