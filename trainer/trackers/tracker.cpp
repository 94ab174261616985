#include "trainer/trackers/tracker.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "base/log.h"

namespace trireme {

// One tracker, its waiting steps and its thread. The thread owns the tracker: a lane that is given up at the end
// (a server that never answers) leaves both to a detached thread, which ends with the process.
class TrackerQueue::Lane final {
 public:
  Lane(std::unique_ptr<Tracker> tracker, const TrackedRun& run, const TrackerQueueOptions& options)
      : state_(std::make_shared<State>()) {
    state_->tracker = std::move(tracker);
    state_->run = run;
    state_->options = options;
    thread_ = std::thread([state = state_] { State::work(*state); });
  }

  ~Lane() {
    if (thread_.joinable()) thread_.detach();
  }

  void log(const TrackedStep& step) {
    {
      const std::lock_guard lock(state_->mutex);
      if (state_->waiting.size() >= state_->options.most_waiting) {
        state_->waiting.pop_front();
        ++state_->dropped;
      }
      state_->waiting.push_back(step);
    }
    state_->wake.notify_all();
  }

  void ask_to_end(bool succeeded) {
    {
      const std::lock_guard lock(state_->mutex);
      state_->ending = true;
      state_->succeeded = succeeded;
    }
    state_->wake.notify_all();
  }

  void wait_for_end(SteadyClock::time_point until) {
    std::unique_lock lock(state_->mutex);
    if (state_->wake.wait_until(lock, until, [&] { return state_->ended; })) {
      lock.unlock();
      thread_.join();
      return;
    }
    state_->given_up = true;
    log_warn("trackers", std::string(state_->tracker->name()) + ": " + std::to_string(state_->waiting.size()) +
                             " steps could not be handed over before the end; they are in the step log" +
                             (state_->problem.empty() ? "" : " (" + state_->problem + ")"));
    lock.unlock();
    state_->wake.notify_all();
    thread_.detach();
  }

 private:
  struct State {
    std::unique_ptr<Tracker> tracker;  // the thread's
    TrackedRun run;
    TrackerQueueOptions options;
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<TrackedStep> waiting;  // under mutex, as what follows
    int64_t dropped = 0;
    std::string problem;  // of the present outage
    bool ending = false, succeeded = false, ended = false, given_up = false;

    static void work(State& s) {
      if (!s.until_done([&] { s.tracker->begin(s.run); })) return;
      while (true) {
        TrackedStep step;
        {
          std::unique_lock lock(s.mutex);
          s.wake.wait(lock, [&] { return s.ending || s.given_up || !s.waiting.empty(); });
          if (s.given_up) return;
          if (s.waiting.empty()) break;
          step = s.waiting.front();
        }
        if (!s.until_done([&] { s.tracker->log(step); })) return;
        const std::lock_guard lock(s.mutex);
        // A full queue may have dropped it meanwhile.
        if (!s.waiting.empty() && s.waiting.front().step == step.step && s.waiting.front().values == step.values)
          s.waiting.pop_front();
      }
      if (!s.until_done([&] { s.tracker->end(s.succeeded); })) return;
      {
        const std::lock_guard lock(s.mutex);
        s.ended = true;
      }
      s.wake.notify_all();
    }

    // Tries until `act` returns; false when the queue was given up.
    template <class Act>
    bool until_done(Act&& act) {
      Milliseconds pause = options.retry;
      while (true) {
        std::string why;
        try {
          act();
        } catch (const std::exception& error) {
          why = error.what();
        }
        std::unique_lock lock(mutex);
        if (why.empty()) {
          if (!problem.empty()) {
            log_info("trackers", std::string(tracker->name()) + " takes steps again" +
                                     (dropped == 0 ? "" : "; " + std::to_string(dropped) + " steps were dropped"));
          }
          problem.clear();
          return true;
        }
        if (problem.empty())
          log_warn("trackers", std::string(tracker->name()) + ": " + why + "; the run goes on, it is tried again");
        problem = why;
        const auto until = SteadyClock::now() + pause;
        wake.wait_until(lock, until, [&] { return given_up || ending; });
        // At the end there is no time for long pauses.
        if (ending && !given_up) wake.wait_for(lock, std::min(pause, Milliseconds(200)), [&] { return given_up; });
        if (given_up) return false;
        pause = std::min(pause * 2, options.retry * 32);
      }
    }
  };

  std::shared_ptr<State> state_;
  std::thread thread_;
};

TrackerQueue::TrackerQueue(std::vector<std::unique_ptr<Tracker>> trackers, const TrackedRun& run,
                           const TrackerQueueOptions& options) {
  for (auto& tracker : trackers) lanes_.push_back(std::make_unique<Lane>(std::move(tracker), run, options));
  end_timeout_ = options.end_timeout;
}

TrackerQueue::~TrackerQueue() { end(false); }

void TrackerQueue::log(int64_t step, std::map<std::string, double> values) {
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const TrackedStep tracked{step, now, std::move(values)};
  for (const auto& lane : lanes_) lane->log(tracked);
}

void TrackerQueue::end(bool succeeded) {
  if (ended_) return;
  ended_ = true;
  const auto until = SteadyClock::now() + end_timeout_;
  for (const auto& lane : lanes_) lane->ask_to_end(succeeded);
  for (const auto& lane : lanes_) lane->wait_for_end(until);
}

}  // namespace trireme
