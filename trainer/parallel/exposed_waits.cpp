#include "trainer/parallel/exposed_waits.h"

namespace trireme {

namespace {
// Of a thread, since a backward pass runs on another one than its forward.
thread_local bool waits_for_experts = false;
}  // namespace

ExposedWaits::ForExperts::ForExperts() : before_(std::exchange(waits_for_experts, true)) {}
ExposedWaits::ForExperts::~ForExperts() { waits_for_experts = before_; }

void ExposedWaits::count(Kind kind, bool for_experts, double seconds) {
  if (kind == Kind::kStage) {
    seconds_.stage += seconds;
    return;
  }
  seconds_.exchange += seconds;
  if (for_experts) seconds_.experts += seconds;
}

void ExposedWaits::start() {
  (void)take();
  counts_ = true;
}

void ExposedWaits::add(Kind kind, double seconds) {
  if (!counts_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  count(kind, waits_for_experts, seconds);
}

void ExposedWaits::queue(Kind kind, const std::function<void()>& launch) {
  if (!counts_ || capturing()) return launch();
  TimeMark begin = mark_time();
  launch();
  TimeMark end = mark_time();
  const std::lock_guard<std::mutex> lock(mutex_);
  queued_.push_back({kind, waits_for_experts, std::move(begin), std::move(end)});
}

ExposedWaits::Seconds ExposedWaits::take() {
  counts_ = false;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Queued& one : queued_) count(one.kind, one.for_experts, seconds_between(one.begin, one.end));
  queued_.clear();
  return std::exchange(seconds_, {});
}

}  // namespace trireme
