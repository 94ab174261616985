// Planner: one call of plan(), as an object. Internal to plan.cpp (acceptance, suspension, the end), attempt.cpp (an
// attempt's way from its pods to its steps), recovery.cpp (what follows from failures), services.cpp (pods that are
// made again alone) and describe.cpp (the status).
#pragma once

#include <string>
#include <vector>

#include "operator/controller/actions.h"
#include "operator/controller/failure.h"
#include "operator/controller/plan.h"
#include "operator/controller/slots.h"

namespace trireme::controller {

class Planner final {
 public:
  Planner(const Observed& observed, const PlanOptions& options)
      : o_(observed), options_(options), job_(observed.job), next_(observed.job.status) {}

  Plan run();

 private:
  // One of these ends every path.
  void decide();
  void requeue(Milliseconds after);

  // plan.cpp
  bool accept();
  scheduling::Backend backend() const;
  // Asked before pods are made. True: the job's back-end is missing, they would come without queue or gang, and the
  // plan says so.
  bool lacks_backend();
  void refuse(const std::string& reason, const std::string& message);
  void begin();
  void suspend();
  void resume();
  void finished();
  bool succeeded();
  bool deadline_passed();
  void complete();
  // `cause`: what the status shows as the last failure; null: it does so already.
  void fail(const std::string& reason, const std::string& message, const char* cause = nullptr);
  void start_attempt_at(int64_t unix_ms);
  bool keep(const ObservedPod& pod) const;
  void cleanup_attempts(bool also_current);
  void repair_status(int64_t highest);
  int64_t since(const std::string& rfc3339) const;

  // attempt.cpp
  void run_attempt();
  void clear();
  void queued();
  void make_gang(const std::vector<WantedPod>& missing);
  void release_gang(const std::string& why);
  void starting();
  void running();
  void run_by(const char* reason, const std::string& message);
  // False when something is missing that was there; what follows is in the plan.
  bool stays_whole();
  // A start or a run that takes too long: what health.action says.
  void overdue(const Failure& failure);
  Failure hang(Milliseconds age, const std::string& step_phase, bool unheard) const;
  std::vector<WantedPod> missing_pods() const;
  // The pod that reports checks the status server with another CA than the operator has today.
  bool under_other_ca() const;
  void cannot_report();
  bool heard() const { return o_.report && o_.report->attempt == job_.status.attempt; }
  bool all_ready() const;

  // recovery.cpp
  // What went wrong; pods that are replaced alone are not among it but in lost_.
  std::vector<Failure> failures();
  bool echo_waits(const std::vector<Failure>& found, const Failure& cause);
  void on_failure(const Failure& failure);
  void restart(const Failure& failure, const Verdict& verdict);
  int64_t count_restart();
  int64_t count_free_restart();
  void avoid_node(const Failure& failure, const Verdict& verdict);
  bool keeps_reservation(const Failure& failure, const Verdict& verdict) const;
  LastFailure record_of(const Failure& failure, const char* action) const;

  // services.cpp
  struct Lost {
    const ObservedPod* pod;
    Failure failure;
    int64_t failures;  // in a row, with this one
    bool given_up;
  };
  int64_t failures_in_a_row(const ObservedPod& pod, const Failure& failure) const;
  bool may_replace(const ObservedPod& pod) const;
  bool lose(const ObservedPod& pod, const Failure& failure);
  void tell_lost();
  void remove_outgoing();
  std::vector<WantedPod> due_pods(bool& avoids);
  bool avoid_alone(const Failure& failure);
  // True: the status has to say so first.
  bool give_numbers(std::vector<WantedPod>& due);
  // Makes again what is due, takes away what is too much.
  void mend_services();
  std::optional<Failure> too_few_generate();

  // describe.cpp
  void describe_pods();
  void describe_claims();
  void describe_progress();
  void describe_rendezvous();
  void describe_stuck(const ObservedPod* stuck);
  // In the condition `type`: the API server would not take so many pods that are missing, or what they need.
  void describe_refusal(const char* type, size_t missing);
  // What an ended job's conditions may still say of waiting.
  void close_conditions(const std::string& reason);
  // The one word of status.waiting; the first one that is said stays.
  void waits_for(const std::string& word) {
    if (next_.waiting.empty()) next_.waiting = word;
  }
  // An event when the condition first has this reason.
  void note_once(const char* type, const std::string& reason, const std::string& message);
  void note(bool warning, const std::string& reason, const std::string& message);
  void condition(const char* type, bool value, const std::string& reason, const std::string& message = {});
  void unknown(const char* type, const std::string& reason, const std::string& message);
  std::string time(int64_t unix_ms) const;
  AttemptContext context() const { return {job_, job_.status.attempt, backend_, options_.objects}; }
  bool in(const char* phase) const { return job_.status.phase == phase; }

  const Observed& o_;
  const PlanOptions& options_;
  const RLJob& job_;
  RLJobStatus next_;
  Plan out_;
  scheduling::Backend backend_;
  std::optional<std::string> no_backend_;  // why there is none; backend_ is kNone then
  Slots slots_;
  std::vector<const ObservedPod*> current_;  // the pods that count: slots_.newest
  std::vector<Lost> lost_;
  bool old_alive_ = false;
};

// base, 2 base, 4 base, ... up to most.
int64_t doubled(Milliseconds base, int64_t times, Milliseconds most);

// "3 of 4".
std::string part_of(size_t part, size_t whole);
// What fits into a condition or an event, cut at a character's border.
std::string shorten(const std::string& message);

}  // namespace trireme::controller
