#include "trainer/telemetry/phases.h"

#include "base/clock.h"
#include "base/error.h"

namespace trireme {

const std::array<Phase, kPhaseCount>& all_phases() {
  static const std::array<Phase, kPhaseCount> kAll = {Phase::kGeneration, Phase::kRewards,  Phase::kLogprobs,
                                                      Phase::kRefit,      Phase::kTraining, Phase::kCheckpoint,
                                                      Phase::kIdle};
  return kAll;
}

const char* to_string(Phase phase) {
  static const char* const kNames[kPhaseCount] = {"generation", "rewards",    "logprobs", "refit",
                                                  "training",   "checkpoint", "idle"};
  return kNames[static_cast<size_t>(phase)];
}

const char* timing_name(Phase phase) {
  static const char* const kNames[kPhaseCount] = {"timing/train/generation",
                                                  "timing/train/reward_calculation",
                                                  "timing/train/policy_and_reference_logprobs",
                                                  "timing/train/prepare_for_generation/total",
                                                  "timing/train/policy_training",
                                                  "timing/train/checkpointing",
                                                  "timing/train/idle"};
  return kNames[static_cast<size_t>(phase)];
}

PhaseTimer::PhaseTimer(std::function<double()> now) : now_(std::move(now)) {
  if (!now_) now_ = [watch = Stopwatch()] { return watch.seconds(); };
  start_step();
}

void PhaseTimer::start_step() {
  step_start_ = last_ = now_();
  seconds_ = {};
}

void PhaseTimer::charge() {
  const double at = now_();
  seconds_[static_cast<size_t>(current())] += at - last_;
  last_ = at;
}

PhaseTimer::Scope PhaseTimer::enter(Phase phase) {
  charge();
  stack_.push_back(phase);
  return Scope(this);
}

void PhaseTimer::Scope::end() {
  if (!timer_) return;
  timer_->charge();
  timer_->stack_.pop_back();
  timer_ = nullptr;
}

PhaseTimes PhaseTimer::peek() const {
  PhaseTimer copy = *this;
  return copy.finish_step();
}

PhaseTimes PhaseTimer::finish_step() {
  charge();
  PhaseTimes times;
  times.total_s = last_ - step_start_;
  times.seconds = seconds_;
  step_start_ = last_;
  seconds_ = {};
  return times;
}

}  // namespace trireme
