// PhaseTimer: where a step's wall time goes, as seen by the rank's main thread.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace trireme {

// Every moment of a step belongs to exactly one. Work hidden under another phase is not counted: times are exposed.
enum class Phase { kGeneration, kRewards, kLogprobs, kRefit, kTraining, kCheckpoint, kIdle };
inline constexpr size_t kPhaseCount = 7;
const std::array<Phase, kPhaseCount>& all_phases();
const char* to_string(Phase phase);    // "generation", "rewards", ...
const char* timing_name(Phase phase);  // NeMo-RL's name in the step log: "timing/train/policy_training", ...

struct PhaseTimes {
  double total_s = 0;                         // the step
  std::array<double, kPhaseCount> seconds{};  // add up to total_s
  double of(Phase phase) const { return seconds[static_cast<size_t>(phase)]; }
};

// One thread. Phases nest: an inner one stops the outer one's clock. Time in no phase is idle.
//   timer.start_step(); { auto scope = timer.enter(Phase::kGeneration); ... } PhaseTimes times = timer.finish_step();
class PhaseTimer final {
 public:
  // `now` gives seconds of a monotonic clock; empty: the steady clock.
  explicit PhaseTimer(std::function<double()> now = {});

  class Scope final {
   public:
    Scope(Scope&& other) noexcept : timer_(other.timer_) { other.timer_ = nullptr; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() { end(); }
    // Before the end of its life; scopes end in the reverse of the order in which they began.
    void end();

   private:
    friend class PhaseTimer;
    explicit Scope(PhaseTimer* timer) : timer_(timer) {}
    PhaseTimer* timer_;
  };

  void start_step();
  [[nodiscard]] Scope enter(Phase phase);
  Phase current() const { return stack_.empty() ? Phase::kIdle : stack_.back(); }
  // The step so far, without ending it.
  PhaseTimes peek() const;
  // Ends the step; a phase still open goes on into the next one.
  PhaseTimes finish_step();

 private:
  void charge();
  std::function<double()> now_;
  double step_start_ = 0, last_ = 0;
  std::array<double, kPhaseCount> seconds_{};
  std::vector<Phase> stack_;
};

}  // namespace trireme
