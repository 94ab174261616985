#include "trainer/parallel/exposed_waits.h"

namespace trireme {

void ExposedWaits::start() {
  (void)take();
  counts_ = true;
}

void ExposedWaits::add(Kind kind, double seconds) {
  if (!counts_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  of(kind) += seconds;
}

void ExposedWaits::queue(Kind kind, const std::function<void()>& launch) {
  if (!counts_ || capturing()) return launch();
  TimeMark begin = mark_time();
  launch();
  TimeMark end = mark_time();
  const std::lock_guard<std::mutex> lock(mutex_);
  queued_.push_back({kind, std::move(begin), std::move(end)});
}

ExposedWaits::Seconds ExposedWaits::take() {
  counts_ = false;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Queued& one : queued_) of(one.kind) += seconds_between(one.begin, one.end);
  queued_.clear();
  return std::exchange(seconds_, {});
}

}  // namespace trireme
