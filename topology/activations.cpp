#include "topology/activations.h"

#include <algorithm>
#include <cmath>

namespace trireme {

namespace {

constexpr int64_t kLogitsBytes = int64_t{512} << 20;  // of a chunk

}  // namespace

ActivationBytes activation_bytes(const LocalShape& shape, int64_t element_bytes, int64_t gradient_bytes,
                                 double gathered_keys) {
  const int64_t element = element_bytes;
  // Of a layer with experts: what its MLPs are as wide as for a token together, and the rows that are sent to them.
  const bool mixture = shape.experts > 0;
  const int64_t chosen = mixture ? shape.experts_per_token : 0;
  const int64_t wide = std::max(chosen * shape.moe_intermediate, shape.intermediate);
  const int64_t hidden = (shape.hidden + shape.tp - 1) / shape.tp;  // of a tensor rank's share of the rows
  const int64_t gathered = shape.tp > 1 ? shape.hidden : 0;         // a product's input, again
  const int64_t q = shape.query_width(), kv = shape.key_width();
  // Attention keeps q, k, v and its result; with head norms v is a part of qkv, which is kept for them.
  // Gathered keys and values are kept behind a copy of the rank's own; then v is no part of qkv.
  const int64_t gathered_kv = std::llround(2 * gathered_keys * static_cast<double>(kv));
  const int64_t copied = shape.qk_norm && gathered_keys > 0 ? kv : 0;
  const int64_t attention = (shape.qk_norm ? 3 * q + 3 * kv : 2 * q + 2 * kv) + gathered_kv + copied;
  const int64_t log_sums = 4 * shape.heads;
  ActivationBytes bytes;
  // Of experts the activation's result is always computed again; gate, up and routes are kept. Ranks that share experts
  // have received rows besides, and of these the order of the choices here, of which there are as many as of own rows.
  const bool shared = shape.received > 0;
  const double own = 1 / static_cast<double>(shape.tp);  // rows of a token
  const int64_t received = shared ? std::llround(own * shape.received * static_cast<double>(shape.hidden)) : 0;
  const int64_t of_experts = received + 2 * chosen * shape.moe_intermediate;
  const int64_t routes = 16 * chosen + (shared ? 20 * chosen + std::llround(4 * own * shape.received) : 0);
  bytes.whole = element * (4 * hidden + attention + std::max(of_experts, 3 * shape.intermediate)) + log_sums + routes;
  bytes.cheap = element * (2 * hidden + attention + std::max(of_experts, 2 * shape.intermediate)) + log_sums + routes;
  bytes.experts = element * (2 * hidden + attention + std::max(received, 2 * shape.intermediate)) + log_sums + routes;
  bytes.input = element * hidden;
  // Attention's backward has the gradients of its result and of q, k and v, the latter again as one, and two sums of
  // each row. Where inputs are gathered so are the gradients of what is summed over the tensor ranks. Gathered keys and
  // values are there in the order of the chains, with gradients.
  const int64_t in_attention = element * (3 * q + 4 * kv + 2 * gathered + 2 * gathered_kv) + 8 * shape.heads;
  // Rows of all choices: their inputs, the gradients of their results and of their inputs.
  const int64_t in_mlp = element * (2 * shape.hidden + 4 * wide + gathered + 3 * chosen * shape.hidden) + 24 * chosen;
  bytes.passing = element * 6 * hidden + std::max(in_attention, in_mlp);
  bytes.ending = element * (4 * hidden + 2 * gathered);
  if (shape.head && !shape.value_head)
    bytes.fixed = 3 * kLogitsBytes + (gradient_bytes == 4 ? 0 : 4 * shape.vocab * shape.hidden);
  return bytes;
}

int64_t activation_total(const ActivationBytes& bytes, const KeptLayers& layers, int64_t tokens, int64_t in_flight) {
  const int64_t of_experts = layers.experts * bytes.experts;
  const int64_t kept = of_experts + layers.cheap * bytes.cheap + layers.whole * bytes.whole;
  const int64_t inputs = layers.input * bytes.input;
  // A layer that is computed again has all of its own for a while. That is when what the layers behind it kept is free
  // again, since the first ones are chosen.
  const int64_t with_gates = layers.experts > 0 ? of_experts + bytes.cheap - bytes.experts : 0;
  const int64_t behind = std::max({kept, with_gates, layers.input > 0 ? bytes.whole : 0});
  // Logits are gone when the first layer is differentiated, and none is before.
  const int64_t at_head = tokens * (kept + bytes.ending) + bytes.fixed, in_layers = tokens * (behind + bytes.passing);
  return tokens * (inputs + (in_flight - 1) * (inputs + kept)) + std::max(at_head, in_layers);
}

FittedLayers fit_layers(const ActivationBytes& bytes, int64_t layers, int64_t tokens, int64_t in_flight, int64_t room) {
  const auto usable = static_cast<int64_t>(static_cast<double>(room) * kUsableForActivations);
  const int64_t of_experts = bytes.experts > 0 && bytes.experts < bytes.cheap ? layers : 0;
  const int64_t most = 2 * layers + of_experts;
  for (int64_t level = 0;; ++level) {
    // Of how many layers norms, then experts, then all is computed again.
    const int64_t norms = std::min(level, layers), gates = std::clamp<int64_t>(level - layers, 0, of_experts);
    const int64_t input = std::max<int64_t>(0, level - layers - of_experts), experts = std::max(gates, input) - input;
    FittedLayers fitted{
        .kept = {.input = input, .experts = experts, .cheap = norms - input - experts, .whole = layers - norms}};
    fitted.bytes = activation_total(bytes, fitted.kept, tokens, in_flight);
    if (fitted.bytes <= usable || level >= most) return fitted;
  }
}

}  // namespace trireme
