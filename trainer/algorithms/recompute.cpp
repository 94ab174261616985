#include "trainer/algorithms/recompute.h"

#include <algorithm>

#include "base/log.h"
#include "base/text.h"
#include "topology/pipeline.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {
KeptActivations kept_activations(const ModelSplit& split, const OwnRows& most, int64_t micro_batches) {
  const auto pieces = static_cast<int64_t>(split.layers.size());
  const PipelineTable table = training_passes(split.pp, pieces, micro_batches);
  const int64_t in_flight = table.most_in_flight.at(static_cast<size_t>(split.stage));
  return {most.rows, most.shared, pieces, std::max<int64_t>(1, in_flight)};
}

Recompute fit_recompute(const LocalShape& shape, int64_t element_bytes, const KeptActivations& at_once,
                        int64_t free_bytes, int64_t* needed, int64_t gradient_bytes) {
  // A context rank without rows keeps the keys of the others too.
  const int64_t tokens = at_once.shared > 0 ? std::max<int64_t>(1, at_once.tokens) : at_once.tokens;
  const double gathered = tokens > 0 ? static_cast<double>(at_once.shared) / static_cast<double>(tokens) : 0;
  const FittedLayers fitted = fit_layers(activation_bytes(shape, element_bytes, gradient_bytes, gathered),
                                         shape.layers / at_once.pieces, tokens, at_once.in_flight, free_bytes);
  if (needed != nullptr) *needed = fitted.bytes;
  Recompute recompute;
  recompute.whole_layers = fitted.kept.input;
  recompute.cheap_layers = fitted.kept.cheap + fitted.kept.experts;
  recompute.expert_layers = fitted.kept.experts;
  return recompute;
}

namespace {

// By which activations are counted: of tensor ranks each takes its part of the rows through experts of whole width,
// which is as much of a row as a part of the width of all rows.
LocalShape counted_shape(const Model& model) {
  LocalShape shape = model.local();
  shape.moe_intermediate = model.config().moe_intermediate_size / shape.tp;
  return shape;
}

int64_t gradient_bytes(const Model& model) { return static_cast<int64_t>(model.flat_gradients().element_size()); }

// Ranks that generate together take their caches back together, too; they may be others than those that train so.
bool somebody(bool on_this_rank, ParallelContext& ranks) {
  Communicator& generating = ranks.generation().apart ? ranks.world() : ranks.holders();
  return generating.all_reduce_max(on_this_rank ? 1.0 : 0.0) > 0;
}

}  // namespace

int64_t pass_bytes(const LocalShape& shape, int64_t element_bytes, const KeptActivations& at_once) {
  constexpr int64_t kNoGradients = 4;  // as those that need no memory beside their buffer
  int64_t needed = 0;
  (void)fit_recompute(shape, element_bytes, at_once, /*free_bytes=*/0, &needed, kNoGradients);
  return static_cast<int64_t>(static_cast<double>(needed) / kUsableForActivations);
}

void make_room_for_passes(const Model& model, int64_t tokens, ParallelContext& ranks,
                          const std::function<void()>& make_room) {
  if (!make_room || !model.options().device.is_cuda()) return;
  const auto element = static_cast<int64_t>(c10::elementSize(model.options().dtype));
  const int64_t needed =
      pass_bytes(counted_shape(model), element, kept_activations(model.split(), {.rows = tokens}, 1));
  if (somebody(device_available_bytes(model.options().device) < needed, ranks)) make_room();
}

void set_own_recompute(Model& model, const Config& config, int64_t tokens) {
  if (!recompute_setting(config).fit || !model.options().device.is_cuda()) return;
  const auto element = static_cast<int64_t>(c10::elementSize(model.options().dtype));
  model.set_recompute(fit_recompute(counted_shape(model), element, kept_activations(model.split(), {.rows = tokens}, 1),
                                    device_available_bytes(model.options().device), nullptr, gradient_bytes(model)));
}

void set_recompute(Model& model, const Config& config, const KeptActivations& kept, ParallelContext& ranks,
                   const std::function<void()>& make_room) {
  const RecomputeSetting setting = recompute_setting(config);
  const int64_t layers = model.local().layers / kept.pieces;
  Recompute recompute;
  std::string why;
  Recompute own;
  int64_t free = 0, needed = 0;
  const bool on_cuda = model.options().device.is_cuda();
  if (on_cuda) {
    const auto fit = [&] {
      const auto element = static_cast<int64_t>(c10::elementSize(model.options().dtype));
      free = device_available_bytes(model.options().device);
      own = fit_recompute(counted_shape(model), element, kept, free, &needed, gradient_bytes(model));
    };
    fit();
    if (somebody(make_room != nullptr && own.whole_layers + own.cheap_layers > 0, ranks)) {
      make_room();
      fit();
    }
  }
  if (setting.fit) {
    if (on_cuda) {
      // As the number of layers and of whole ones: more of either is more recomputation.
      const auto most = [&](int64_t number) {
        const double of_replicas = ranks.data_parallel().all_reduce_max(static_cast<double>(number));
        return static_cast<int64_t>(ranks.tensor_parallel().all_reduce_max(of_replicas));
      };
      recompute.whole_layers = most(own.whole_layers);
      recompute.cheap_layers = most(own.whole_layers + own.cheap_layers) - recompute.whole_layers;
      recompute.expert_layers = most(own.whole_layers + own.expert_layers) - recompute.whole_layers;
      why = ": " + std::to_string(kept.in_flight) + " x " + std::to_string(kept.tokens) + " tokens take " +
            format_bytes(static_cast<uint64_t>(needed)) + " of " + format_bytes(static_cast<uint64_t>(free)) + " free";
    }
  } else {
    recompute.whole_layers = setting.all ? layers : std::min(setting.layers, layers);
    recompute.norms = setting.norms;
    recompute.swiglu = setting.swiglu;
    if (setting.norms || setting.swiglu) recompute.cheap_layers = layers - recompute.whole_layers;
    if (setting.experts && counted_shape(model).experts > 0) recompute.expert_layers = layers - recompute.whole_layers;
  }
  const Recompute before = model.recompute();
  model.set_recompute(recompute);
  const bool same = before.whole_layers == recompute.whole_layers && before.cheap_layers == recompute.cheap_layers &&
                    before.expert_layers == recompute.expert_layers;
  if (same || !ranks.is_main()) return;
  std::string experts;
  if (recompute.expert_layers > 0) experts = ", experts' gate and up of " + std::to_string(recompute.expert_layers);
  log_info("train", "backward computes again " + std::to_string(recompute.whole_layers) + " of " +
                        std::to_string(layers) + " layers, and norms and SwiGLU of " +
                        std::to_string(recompute.cheap_layers) + experts + why);
}

}  // namespace trireme
