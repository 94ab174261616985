#include "trainer/rollout/host.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace trireme {

void submit_to(Engine& engine, GroupRequest request) {
  engine.take_cache();
  engine.submit(std::move(request));
}

std::vector<GeneratedGroup> step_of(Engine& engine) {
  if (!engine.somebody_unfinished()) return {};
  return engine.step();
}

EngineHost::EngineHost(std::function<std::unique_ptr<Engine>()> make, std::function<void(GeneratedGroup)> finished,
                       EngineFollowers* followers)
    : finished_(std::move(finished)), followers_(followers), thread_([this, make = std::move(make)] { run(make); }) {}

EngineHost::~EngineHost() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void EngineHost::throw_failure() const {
  if (failure_) std::rethrow_exception(failure_);
}

void EngineHost::check() const {
  const std::lock_guard lock(mutex_);
  throw_failure();
}

void EngineHost::submit(GroupRequest request) {
  {
    const std::lock_guard lock(mutex_);
    throw_failure();
    unfinished_ += request.samples;
    requests_.push_back(std::move(request));
  }
  wake_.notify_all();
}

void EngineHost::between_steps(std::function<void(Engine&)> fn, const Deadline& deadline) {
  const auto task = std::make_shared<Task>();
  task->fn = std::move(fn);
  std::unique_lock lock(mutex_);
  throw_failure();
  tasks_.push_back(task);
  wake_.notify_all();
  const bool ended = changed_.wait_until(lock, deadline.at(), [&] { return task->done || failure_ || stopping_; });
  if (task->begun) changed_.wait(lock, [&] { return task->done; });
  if (task->done) {
    if (task->error) std::rethrow_exception(task->error);
    return;
  }
  task->dropped = true;
  throw_failure();
  if (!ended) fail_timeout("the engine did not come to the end of a step in time");
  throw Error(ErrorKind::kUnavailable, "the engine is being stopped");
}

int64_t EngineHost::places() const {
  const int64_t unfinished = unfinished_.load();
  if (crowded_.load() && unfinished > 0) return 0;
  return std::max<int64_t>(0, max_sequences_.load() - unfinished);
}

void EngineHost::wait_for_places(int64_t count, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline.at(), [&] { return places() != count || failure_ || stopping_; });
  throw_failure();
}

void EngineHost::run(const std::function<std::unique_ptr<Engine>()>& make) {
  try {
    const std::unique_ptr<Engine> engine = make();
    max_sequences_ = engine->options().max_sequences;
    serve(*engine);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
  }
  changed_.notify_all();
}

// Requests and tasks in the order in which they came, then one step.
bool EngineHost::take_requests(Engine& engine) {
  std::unique_lock lock(mutex_);
  wake_.wait(lock, [&] { return stopping_ || !requests_.empty() || !tasks_.empty() || !engine.idle(); });
  if (stopping_) return false;
  while (!requests_.empty()) {
    GroupRequest request = std::move(requests_.front());
    requests_.pop_front();
    lock.unlock();
    if (followers_ != nullptr) followers_->submit(request);
    submit_to(engine, std::move(request));
    lock.lock();
  }
  while (!tasks_.empty()) {
    const std::shared_ptr<Task> task = tasks_.front();
    tasks_.pop_front();
    if (task->dropped) continue;
    task->begun = true;
    lock.unlock();
    std::exception_ptr error;
    bool unusable = false;
    try {
      task->fn(engine);
    } catch (const UnusableEngine&) {
      error = std::current_exception();
      unusable = true;
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    task->error = error;
    task->done = true;
    if (unusable) failure_ = error;
    changed_.notify_all();
    if (unusable) return false;
  }
  return true;
}

void EngineHost::serve(Engine& engine) {
  changed_.notify_all();
  while (take_requests(engine)) {
    if (!engine.idle()) step(engine);
  }
}

void EngineHost::step(Engine& engine) {
  if (followers_ != nullptr) followers_->step();
  std::vector<GeneratedGroup> groups = step_of(engine);
  ++steps_;
  recomputed_rows_ = engine.stats().recomputed_rows;
  crowded_ = engine.crowded();
  for (GeneratedGroup& group : groups) {
    const auto samples = static_cast<int64_t>(group.samples.size());
    finished_(std::move(group));
    unfinished_ -= samples;
  }
  if (groups.empty()) return;
  { const std::lock_guard lock(mutex_); }  // who has just looked is waiting by now
  changed_.notify_all();
}

}  // namespace trireme
