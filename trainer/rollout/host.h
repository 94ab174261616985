// EngineHost: an engine on a thread of its own, with a queue of requests in front of it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "trainer/rollout/engine.h"

namespace trireme {

// What `fn` of between_steps throws when the engine may take no step any more: its weights are those of no version. It
// ends the host as what the engine throws does.
class UnusableEngine final : public Error {
 public:
  using Error::Error;
};

// What a host does with its engine, and its followers with theirs: where experts are split a submit and a step have
// collectives ahead of them (engine.h).
void submit_to(Engine& engine, GroupRequest request);
std::vector<GeneratedGroup> step_of(Engine& engine);

// The other ranks of the engine's model, which do what it does, in the same order. They hear of it ahead, so that they
// meet it in the exchanges of a step. Called on the host's thread.
class EngineFollowers {
 public:
  virtual ~EngineFollowers() = default;
  virtual void submit(const GroupRequest& request) = 0;
  virtual void step() = 0;
};

// All calls are for any thread. What the engine throws ends its thread; check() and every later call throw it again.
class EngineHost final {
 public:
  // `make` is called on the host's thread. `finished` too, for every group that is complete; it may not call the host.
  // `followers` (null: there are none) outlive it. What a task does with the engine it tells them.
  EngineHost(std::function<std::unique_ptr<Engine>()> make, std::function<void(GeneratedGroup)> finished,
             EngineFollowers* followers = nullptr);
  ~EngineHost();  // behind the step under way; what is unfinished is dropped
  EngineHost(const EngineHost&) = delete;
  EngineHost& operator=(const EngineHost&) = delete;

  void submit(GroupRequest request);
  // Calls `fn` on the host's thread between two steps, the requests ahead of it submitted. Returns when it has, and
  // throws what it threw, which ends nothing but for UnusableEngine. Throws Error(kTimeout) when it was not begun until
  // the deadline; then it never is. Once it has begun its end is waited for, so that it may use what is the caller's:
  // whatever it waits for has deadlines of its own.
  void between_steps(std::function<void(Engine&)> fn, const Deadline& deadline);

  int64_t unfinished() const { return unfinished_.load(); }  // samples, until `finished` has returned
  // How many more samples would be decoded at once; none while some wait for room. 0 before the engine is made.
  int64_t places() const;
  int64_t steps() const { return steps_.load(); }
  int64_t recomputed_rows() const { return recomputed_rows_.load(); }
  // Waits until the number of free places is another than `places`, or the deadline.
  void wait_for_places(int64_t places, const Deadline& deadline);
  void check() const;

 private:
  struct Task {
    std::function<void(Engine&)> fn;
    bool begun = false, done = false, dropped = false;
    std::exception_ptr error;
  };
  void run(const std::function<std::unique_ptr<Engine>()>& make);
  void serve(Engine& engine);
  bool take_requests(Engine& engine);  // false: it is to end
  void step(Engine& engine);
  void throw_failure() const;  // under the lock

  const std::function<void(GeneratedGroup)> finished_;
  EngineFollowers* const followers_;
  mutable std::mutex mutex_;
  std::condition_variable wake_, changed_;
  std::deque<GroupRequest> requests_;
  std::deque<std::shared_ptr<Task>> tasks_;
  bool stopping_ = false;
  std::exception_ptr failure_;
  std::atomic<int64_t> unfinished_{0}, steps_{0}, recomputed_rows_{0}, max_sequences_{0};
  std::atomic<bool> crowded_{false};
  std::thread thread_;  // last: it uses the members above
};

}  // namespace trireme
