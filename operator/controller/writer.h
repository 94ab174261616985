// Writer: everything that is written for a job: its status, the objects of its attempts, events. Nothing is written
// unless may_write says so.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "operator/controller/action.h"
#include "operator/controller/answers.h"
#include "operator/controller/per_job.h"
#include "operator/controller/pool.h"
#include "operator/kube/client.h"
#include "operator/kube/events.h"

namespace trireme::controller {

struct WriterOptions {
  Milliseconds status_interval{1000};     // between two status writes of a job that decide nothing
  Milliseconds progress_interval{10000};  // between two that only carry progress; grows with the number of jobs
  Milliseconds refusal_min{1000};         // before objects that were refused (a quota) are asked for again; doubles
  Milliseconds refusal_max{30000};
  kube::EventRecorder* events = nullptr;  // may be null
  std::function<bool()> may_write;        // asked before every write; empty: always (no leader election)
};

// What a status would change.
enum class StatusChange { kNothing, kProgress, kMore };
StatusChange change_of(const RLJobStatus& from, const RLJobStatus& to);

// How much there is to do beside this job.
struct Load {
  size_t jobs = 0;
  size_t queued = 0;  // keys that wait for a worker
};
// The least time between two writes of a job's status that decide nothing.
Milliseconds status_interval(StatusChange change, const Load& load, const WriterOptions& options);

// Throws kube::NotLeading where it may not write, kube::Requeue where an object of ours stands in the way and will go,
// kube::ApiError otherwise. Calls for one job by one thread at a time; for different jobs from any.
class Writer final {
 public:
  // `load` is asked when a status is about to be written.
  Writer(const kube::Client& client, WriterOptions options, Pool& pool, std::function<Load()> load);

  // A decision: written now, under the job's resourceVersion, then told. The job as the answer shows it.
  RLJob decide(const kube::ObjectKey& key, const RLJob& job, const RLJobStatus& status,
               const std::vector<EventNote>& events, const Deadline& deadline);

  // What the status should say besides; with events it is written at once, else not more often than status_interval().
  struct Described {
    std::optional<RLJob> job;          // as the answer shows it; nothing: it was not written
    std::optional<Milliseconds> wait;  // it has to be written, but not yet
  };
  Described describe(const kube::ObjectKey& key, const RLJob& job, const RLJobStatus& status,
                     const std::vector<EventNote>& events, const Deadline& deadline);

  // Wave after wave. False: the API server would not take pods; answers() says why, for the planner to decide about.
  bool carry_out(const kube::ObjectKey& key, const RLJob& job, std::vector<Action> actions, const Deadline& deadline);
  const Answers& answers(const kube::ObjectKey& key) { return memory_.of(key).answers; }
  // By UID, so that what somebody else made under the name meanwhile stays. job_uid "": of whatever RLJob.
  void remove(const kube::ObjectKey& key, const std::string& job_uid, const Action& action, const Deadline& deadline);
  void forget(const kube::ObjectKey& key) { memory_.forget(key); }

 private:
  struct Memory {
    SteadyClock::time_point status_written{};
    Answers answers;
  };
  RLJob write_status(const kube::ObjectKey& key, const RLJob& job, const RLJobStatus& status,
                     const Deadline& deadline) const;
  void run_waves(const kube::ObjectKey& key, const RLJob& job, std::vector<Action> actions, const Deadline& deadline);
  class Wave;  // writer.cpp
  // Throws Refused (writer.cpp) where the API server does not take the object. What the wave has been refused already
  // is not asked for.
  void carry_out_one(const kube::ObjectKey& key, const RLJob& job, Action& action, Wave& wave,
                     const Deadline& deadline);
  void create(const kube::ObjectKey& key, const RLJob& job, Action& action,
              const Deadline& deadline);  // takes the body
  void make_so(const kube::ObjectKey& key, const RLJob& job, const Action& action, const Json& existing,
               const Deadline& deadline);
  void compare(const kube::ObjectKey& key, const RLJob& job, const Action& action, const Json& answer);
  void emit(const RLJob& job, const std::vector<EventNote>& notes) const;
  void check_may_write() const;

  const kube::Client& client_;
  const WriterOptions options_;
  Pool& pool_;
  const std::function<Load()> load_;
  PerJob<Memory> memory_;
};

// Do these actions make pods?
bool makes_pods(const std::vector<Action>& actions);
// RFC 7386: the merge patch that turns `from` into `to`.
Json merge_diff(const Json& from, const Json& to);

}  // namespace trireme::controller
