#include "trainer/parallel/exposed_waits.h"

namespace trireme {

void ExposedWaits::add(Kind kind, double seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  of(kind) += seconds;
}

void ExposedWaits::queue(Kind kind, const std::function<void()>& launch) {
  if (capturing()) return launch();
  TimeMark begin = mark_time();
  launch();
  TimeMark end = mark_time();
  const std::lock_guard<std::mutex> lock(mutex_);
  queued_.push_back({kind, std::move(begin), std::move(end)});
}

ExposedWaits::Seconds ExposedWaits::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Queued& one : queued_) of(one.kind) += seconds_between(one.begin, one.end);
  queued_.clear();
  return std::exchange(seconds_, {});
}

}  // namespace trireme
