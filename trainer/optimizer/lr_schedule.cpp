#include "trainer/optimizer/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/error.h"

namespace trireme {
namespace {

double value(const SchedulerPiece& piece, const char* key) {
  const auto found = piece.kwargs.find(key);
  if (found == piece.kwargs.end()) fail_user("policy.scheduler: " + piece.name + " needs kwargs." + key);
  return found->second;
}

// The factor on `base` after `step` steps of this piece.
double factor_of(const SchedulerPiece& piece, double step, double base) {
  if (piece.name == "LinearLR") {
    const double start = value(piece, "start_factor"), end = value(piece, "end_factor"),
                 total = value(piece, "total_iters");
    return start + (end - start) * (total <= 0 ? 1.0 : std::min(step, total) / total);
  }
  if (piece.name == "ConstantLR") return step < value(piece, "total_iters") ? value(piece, "factor") : 1.0;
  if (piece.name == "CosineAnnealingLR") {
    const double period = value(piece, "T_max"), floor = value(piece, "eta_min");
    const double rate = floor + (base - floor) * (1 + std::cos(std::numbers::pi * step / period)) / 2;
    return base == 0 ? 0 : rate / base;
  }
  if (piece.name == "ExponentialLR") return std::pow(value(piece, "gamma"), step);
  fail_user("policy.scheduler: unknown scheduler '" + piece.name + "'");
}

double torch_rate(const SchedulerConfig& scheduler, double base, int64_t step) {
  if (scheduler.pieces.empty()) return base;
  if (scheduler.milestones.empty()) {
    double factor = 1;
    for (const SchedulerPiece& piece : scheduler.pieces) factor *= factor_of(piece, static_cast<double>(step), base);
    return base * factor;
  }
  size_t current = 0;
  int64_t start = 0;
  while (current < scheduler.milestones.size() && step >= scheduler.milestones[current])
    start = scheduler.milestones[current++];
  return base * factor_of(scheduler.pieces[current], static_cast<double>(step - start), base);
}

// Megatron-LM's OptimizerParamScheduler, in steps.
double megatron_rate(const MegatronSchedulerConfig& s, double peak, double floor, int64_t step) {
  const double done = static_cast<double>(step), warmup = static_cast<double>(s.lr_warmup_iters);
  if (warmup > 0 && done <= warmup) return s.lr_warmup_init + (peak - s.lr_warmup_init) * done / warmup;
  if (s.lr_decay_style == "constant") return peak;
  if (s.lr_decay_style == "inverse-square-root") {
    return std::max(floor, peak * std::sqrt(std::max(warmup, 1.0)) / std::sqrt(std::max(done, 1.0)));
  }
  const double span = static_cast<double>(s.lr_decay_iters) - warmup;
  if (done > static_cast<double>(s.lr_decay_iters) || span <= 0) return floor;
  const double share = (done - warmup) / span;
  if (s.lr_decay_style == "linear") return floor + (1 - share) * (peak - floor);
  return floor + 0.5 * (std::cos(std::numbers::pi * share) + 1) * (peak - floor);
}

}  // namespace

double learning_rate(const Config& config, int64_t steps_done) {
  const AdamSettings adam = adam_settings(config);
  if (config.policy.megatron_cfg.enabled) {
    return megatron_rate(config.policy.megatron_cfg.scheduler, adam.lr, adam.min_lr, steps_done);
  }
  return torch_rate(config.policy.scheduler, adam.lr, steps_done);
}

double weight_decay(const Config& config, int64_t steps_done) {
  const AdamSettings adam = adam_settings(config);
  if (!config.policy.megatron_cfg.enabled) return adam.weight_decay;
  const MegatronSchedulerConfig& s = config.policy.megatron_cfg.scheduler;
  if (s.weight_decay_incr_style == "constant" || s.lr_decay_iters <= 0) return s.end_weight_decay;
  const double share = std::min(1.0, static_cast<double>(steps_done) / static_cast<double>(s.lr_decay_iters));
  const double coefficient =
      s.weight_decay_incr_style == "linear" ? share : 0.5 * (std::cos(std::numbers::pi * (1 - share)) + 1);
  return s.start_weight_decay + coefficient * (s.end_weight_decay - s.start_weight_decay);
}

}  // namespace trireme
