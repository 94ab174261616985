// Decode steps of a replica, in seconds. Internal to plan.
#pragma once

#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

#include "topology/plan_parts.h"

namespace trireme::planning {

// Replicas whose steps are one, since ranks of theirs share experts.
inline int64_t replicas_in_step(const Case& c) {
  const int64_t tp = c.layout.tp;
  return c.shape.experts > 0 ? std::lcm(tp, c.layout.ep * c.layout.etp) / tp : 1;
}

// Of a decode step: rows of `bytes` summed for all of `ranks` tensor ranks. Few rows go to all at once, or where two
// ranks are, more in two exchanges (in_one_step of trainer/parallel/exchange.cpp).
inline double decode_sum_seconds(const LinkRates& link, int64_t ranks, double bytes) {
  constexpr double kOneStepBytes = 256 << 10;
  const double others = real(ranks - 1);
  return ranks == 2 || bytes <= kOneStepBytes ? link.seconds(others * bytes)
                                              : 2 * link.seconds(others / real(ranks) * bytes);
}

// What steps of a replica cost.
class DecodeSteps final {
 public:
  explicit DecodeSteps(const Case& c) : c_(c), element_(real(c.options.element_bytes)) {
    for (int64_t layer = 0; layer < c.shape.layers; ++layer) sparse_ += c.shape.has_experts(layer) ? 1 : 0;
    const ModelShape& m = c.shape;
    const double experts = sparse_ * real(m.experts) * real(3 * m.hidden * m.moe_intermediate);
    const double table = m.tied ? 0 : real(m.vocab * m.hidden);
    dense_bytes_ = (real(parameter_count(m)) - experts - table) * element_ / real(c.layout.tp);
    expert_bytes_ = experts * element_ / real(c.layout.ep * c.layout.etp);
    sent_ = expert_rows(c);
    reach_ = std::max(1.0, real(c.layout.ep * c.layout.etp) / real(c.layout.tp)) / real(replicas_in_step(c));
    const bool mapped = c.devices.of_node <= 0 || inside_node(c.layout, Axis::kTp, c.devices.of_node);
    tensor_link_ = mapped ? c.devices.rates.decode_in_node : link(c, Axis::kTp);
    stage_link_ = link(c, Axis::kPp);
    expert_link_ = link(c, Axis::kEtpEp);
    token_bytes_ = real(2 * m.layers * m.kv_heads * m.head_dim) * element_ / real(c.layout.tp);
  }

  // Of one step with `alive` samples and `together` of all replicas in it, without their keys and values.
  double seconds(double alive, double together) const {
    const DeviceRates& rates = c_.devices.rates;
    const double layers = real(c_.shape.layers) * (rates.decode_layer_s + rates.decode_sample_s * alive);
    return (dense_bytes_ + read_share(together) * expert_bytes_) / rates.decode_read + layers +
           sparse_ * rates.decode_experts_s;
  }
  double keys_seconds(double tokens) const { return tokens * token_bytes_ / c_.devices.rates.decode_read; }

  // Between ranks: sums over tensor ranks behind attention, MLP and embedding, columns of logits to whole rows and what
  // was drawn of them; from stage to stage and the tokens back; rows to experts and back.
  double exchange_seconds(double alive) const {
    const Layout& l = c_.layout;
    const double row = real(c_.shape.hidden) * element_;
    double seconds = 0;
    if (l.tp > 1) {
      constexpr double kDrawnBytes = 16;  // id and log-prob
      const double own = alive / real(l.tp), logits = real(c_.shape.vocab) / real(l.tp) * element_;
      seconds += real(2 * c_.shape.layers + 1) * decode_sum_seconds(tensor_link_, l.tp, alive * row);
      seconds += tensor_link_.seconds(own * real(l.tp - 1) * logits);
      seconds += tensor_link_.seconds(own * real(l.tp - 1) * kDrawnBytes);
    }
    if (l.pp > 1) seconds += real(l.pp) * stage_link_.seconds(alive * row / real(l.tp));
    if (const int64_t ranks = l.ep * l.etp; ranks > 1) {
      const double away = alive / real(l.tp) * row * real(ranks - 1) / real(ranks);
      seconds += sparse_ * (expert_link_.seconds(away * sent_.out) + expert_link_.seconds(away * sent_.back));
    }
    return seconds;
  }

 private:
  // Of a rank's experts, the share that any sample of its group chooses.
  double read_share(double together) const {
    if (c_.shape.experts == 0) return 0;
    const double unchosen = 1 - real(c_.shape.experts_per_token) / real(c_.shape.experts);
    return 1 - std::pow(unchosen, together * reach_);
  }

  const Case& c_;
  double element_ = 0, sparse_ = 0;
  double reach_ = 1;  // of the samples in a step, those whose rows may come to a rank's experts
  double dense_bytes_ = 0, expert_bytes_ = 0, token_bytes_ = 0;
  ExpertRows sent_;
  LinkRates tensor_link_, stage_link_, expert_link_;  // found once: that looks at all groups
};

// Tokens.
struct Response {
  double prompt = 0, output = 0;
};

// A step's rollout on the replica that takes longest.
struct Rollout {
  std::vector<Response> responses;  // of a step, in their order
  size_t places = 1;
};

}  // namespace trireme::planning
