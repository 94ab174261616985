#include "trainer/parallel/bounded_calls.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "base/error.h"

namespace trireme {

struct BoundedCalls::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> waiting;
  int64_t asked = 0, done = 0;  // calls
  bool ending = false, lost = false;
};

BoundedCalls::BoundedCalls(Milliseconds limit)
    : limit_(limit), state_(std::make_shared<State>()), thread_([state = state_] { work(state); }) {}

BoundedCalls::~BoundedCalls() {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->ending = true;
  }
  state_->changed.notify_all();
  if (lost()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

bool BoundedCalls::lost() const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->lost;
}

void BoundedCalls::work(const std::shared_ptr<State>& state) {
  std::unique_lock<std::mutex> lock(state->mutex);
  while (true) {
    state->changed.wait(lock, [&] { return state->ending || !state->waiting.empty(); });
    if (state->waiting.empty()) return;
    std::function<void()> task = std::move(state->waiting.front());
    state->waiting.pop_front();
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    ++state->done;
    state->changed.notify_all();
  }
}

void BoundedCalls::run(std::function<void()> task) {
  State& state = *state_;
  std::unique_lock<std::mutex> lock(state.mutex);
  if (!state.lost) {
    state.waiting.push_back(std::move(task));
    const int64_t number = ++state.asked;
    state.changed.notify_all();
    state.changed.wait_for(lock, limit_, [&] { return state.done >= number || state.lost; });
    if (state.done >= number) return;
    state.lost = true;
    state.waiting.clear();
    state.changed.notify_all();
  }
  fail_timeout("no answer within " + std::to_string(limit_.count() / 1000) + " s");
}

}  // namespace trireme
