#include "trainer/algorithms/recompute.h"

#include <algorithm>

#include "base/log.h"
#include "base/text.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {
namespace {

constexpr int64_t kLogitsBytes = int64_t{512} << 20;  // of a chunk
// Of what is free, left for the allocator's rounding and fragments.
constexpr double kUsable = 0.95;

Recompute at_level(int64_t level, int64_t layers) {
  Recompute recompute;
  recompute.whole_layers = std::max<int64_t>(0, level - layers);
  recompute.cheap_layers = std::min(level, layers) - recompute.whole_layers;
  return recompute;
}

}  // namespace

ActivationBytes activation_bytes(const ModelConfig& c, int64_t element) {
  const int64_t hidden = c.hidden_size, wide = c.intermediate_size;
  const int64_t q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
  // Attention keeps q, k, v and its result; with head norms v is a part of qkv, which is kept for them.
  const int64_t attention = c.qk_norm ? 3 * q + 3 * kv : 2 * q + 2 * kv;
  const int64_t log_sums = 4 * c.num_heads;
  ActivationBytes bytes;
  bytes.whole = element * (4 * hidden + attention + 3 * wide) + log_sums;
  bytes.cheap = element * (2 * hidden + attention + 2 * wide) + log_sums;
  bytes.input = element * hidden;
  // Attention's backward has the gradients of its result and of q, k and v, the latter again as one, and two sums of
  // each row.
  const int64_t in_attention = element * (3 * q + 4 * kv) + 8 * c.num_heads;
  const int64_t in_mlp = element * (2 * hidden + 4 * wide);
  bytes.passing = element * 6 * hidden + std::max(in_attention, in_mlp);
  bytes.fixed = 3 * kLogitsBytes + 4 * c.vocab_size * hidden;
  return bytes;
}

Recompute fit_recompute(const ModelConfig& config, int64_t element_bytes, int64_t tokens, int64_t free_bytes,
                        int64_t* needed) {
  const ActivationBytes bytes = activation_bytes(config, element_bytes);
  const int64_t layers = config.num_layers;
  const auto room = static_cast<int64_t>(static_cast<double>(free_bytes) * kUsable);
  for (int64_t level = 0;; ++level) {
    const Recompute recompute = at_level(level, layers);
    const int64_t kept = layers - recompute.whole_layers - recompute.cheap_layers;
    // A layer that is computed again has all of its own for a while. That is when what the layers behind it kept is
    // free again, since the first ones are chosen.
    const int64_t behind = std::max(recompute.cheap_layers * bytes.cheap + kept * bytes.whole,
                                    recompute.whole_layers > 0 ? bytes.whole : 0);
    const int64_t total = tokens * (recompute.whole_layers * bytes.input + behind + bytes.passing) + bytes.fixed;
    if (total > room && level < 2 * layers) continue;
    if (needed != nullptr) *needed = total;
    return recompute;
  }
}

void set_own_recompute(Model& model, const Config& config, int64_t tokens) {
  if (!recompute_setting(config).fit || !model.options().device.is_cuda()) return;
  const auto element = static_cast<int64_t>(c10::elementSize(model.options().dtype));
  model.set_recompute(fit_recompute(model.config(), element, tokens, device_available_bytes(model.options().device)));
}

void set_recompute(Model& model, const Config& config, int64_t tokens, Communicator& ranks,
                   const std::function<void()>& make_room) {
  const RecomputeSetting setting = recompute_setting(config);
  const ModelConfig& shape = model.config();
  Recompute recompute;
  std::string why;
  Recompute own;
  int64_t free = 0, needed = 0;
  const bool on_cuda = model.options().device.is_cuda();
  if (on_cuda) {
    const auto fit = [&] {
      const auto element = static_cast<int64_t>(c10::elementSize(model.options().dtype));
      free = device_available_bytes(model.options().device);
      own = fit_recompute(shape, element, tokens, free, &needed);
    };
    fit();
    if (make_room != nullptr && own.whole_layers + own.cheap_layers > 0) {
      make_room();
      fit();
    }
  }
  if (setting.fit) {
    if (on_cuda) {
      // As the number of layers and of whole ones: more of either is more recomputation.
      recompute.whole_layers = static_cast<int64_t>(ranks.all_reduce_max(static_cast<double>(own.whole_layers)));
      const auto touched =
          static_cast<int64_t>(ranks.all_reduce_max(static_cast<double>(own.whole_layers + own.cheap_layers)));
      recompute.cheap_layers = touched - recompute.whole_layers;
      why = ": " + std::to_string(tokens) + " tokens a micro-batch take " +
            format_bytes(static_cast<uint64_t>(needed)) + " of " + format_bytes(static_cast<uint64_t>(free)) + " free";
    }
  } else {
    recompute.whole_layers = setting.all ? shape.num_layers : std::min(setting.layers, shape.num_layers);
    recompute.norms = setting.norms;
    recompute.swiglu = setting.swiglu;
    if (setting.norms || setting.swiglu) recompute.cheap_layers = shape.num_layers - recompute.whole_layers;
  }
  const Recompute before = model.recompute();
  model.set_recompute(recompute);
  const bool same = before.whole_layers == recompute.whole_layers && before.cheap_layers == recompute.cheap_layers;
  if (same || ranks.rank() != 0) return;
  log_info("train", "backward computes again " + std::to_string(recompute.whole_layers) + " of " +
                        std::to_string(shape.num_layers) + " layers, and norms and SwiGLU of " +
                        std::to_string(recompute.cheap_layers) + why);
}

}  // namespace trireme
