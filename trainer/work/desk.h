// Desk: what actor 0 knows of the generation processes and of their work: who is there, with which weights, who has
// which samples until when. A state machine without thread, clock, socket or tensor: calls are given the time, and the
// same calls give the same answers. SharedDesk puts a lock and waits around it.
//
// - An engine is there as long as it is heard of (`silence`) and, with samples in hand, takes engine steps (`lease`).
//   Else its leases go back to the ledger. What it still brings is taken as long as it is wanted, and it may join
//   again.
// - Samples are counted once, however often they are brought, and rewards are counted as the engine says its counters
//   stand, so that nothing is counted twice.
// - An engine has at most an even share of what may begin and of what is under way, so that the last samples of a step
//   are not all one engine's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "trainer/data/dataset.h"
#include "trainer/rollout/ledger.h"
#include "trainer/work/wire.h"

namespace trireme {

struct WorkPrompt {
  PromptExample example;
  std::vector<int64_t> forced_lengths;  // of its group's samples, for measurements; empty: off
};

struct DeskOptions {
  LedgerOptions ledger;  // run_samples too
  int64_t first_step = 1;
  int64_t first_group = 0;
  uint64_t first_sample_id = 0;  // of the first group; the next ones follow
  bool in_flight = false;        // engines take new weights between two steps
  Milliseconds silence{10000};
  Milliseconds lease{120000};
  int64_t max_lost = 0;    // engines lost in a row with samples in hand that end the run; 0: any number
  int64_t vocabulary = 0;  // ids of a response are below it
  int64_t rewards = 0;     // numbers that each sample must have
  std::string name;        // of this life of the actor: no other has it
  // grpo or ppo: whose keys sentences name.
  std::string section = "grpo";
  // The prompt of a group; asked once each, in order. Nothing: the data has ended ahead of it. `needed`: of the next
  // step.
  std::function<std::optional<WorkPrompt>(int64_t group, bool needed)> prompt;
  // Why an engine may not join: it would generate something else. Empty: all may.
  std::function<std::optional<std::string>(const JoinRequest& request)> refuses;
};

class Desk final {
 public:
  using Time = SteadyClock::time_point;
  explicit Desk(DeskOptions options);

  // The engine's requests. join() throws Error(kUser) with the reason when it is refused; all throw Error(kConflict)
  // for a caller of another life of the actor, and Error(kData) for what no engine of this program would send.
  JoinReply join(const JoinRequest& request, Time now);
  LeaseReply lease(const LeaseRequest& request, Time now);
  GroupsReply take_groups(GroupsRequest request, Time now);
  // Nothing newer: version -1. Else somebody must serve the link, whose name is this process's alone.
  WeightsReply weights(const WeightsRequest& request, Time now);
  void leave(const LeaveRequest& request, Time now);
  // Whether an engine whose lease() gave nothing must hear of it at once: it has fetched weights meanwhile, say.
  bool answers_now(const LeaseRequest& request, const LeaseReply& reply) const;

  // Before it nothing is leased: the actor is not ready.
  void open() { open_ = true; }
  // Takes leases back whose time is over. Returns whether there were any.
  bool expire(Time now);
  // The step that was taken is trained; the weights of the ledger's newest version can be had from now on.
  void trained(int64_t step);
  void publish();
  // They cannot any more: training writes them. Until the next publish() nobody is told of weights.
  void retract() { published_ = false; }
  // The run has ended: everybody is told to leave.
  void end() { over_ = true; }

  // Of the next step. Throws the error of an engine that ends the run.
  bool complete() const;
  struct Step {
    std::vector<LedgerGroup> groups;      // with their prompts
    std::vector<RewardCounters> rewards;  // that engines counted since the step before
    double transfer_s = 0, stall_s = 0;   // the slowest engine's since then
    int64_t recomputed_rows = 0;          // of all engines since then
    std::map<int64_t, int64_t> samples;   // that each engine brought since then
  };
  Step take(int64_t step);

  // Engines that are there, and the names of those that have not fetched the newest weights.
  int64_t engines() const { return static_cast<int64_t>(engines_.size()); }
  std::vector<std::string> behind() const;
  // Somebody waited for these too long: they are lost.
  void give_up_behind();
  int64_t lost_engines() const { return lost_engines_; }  // since the beginning
  int64_t progress() const { return progress_; }          // rises with every sample that comes and engine that joins
  // "step 7 waits for groups 4, 7 (engine-1 has 3 of their samples); 2 engines are there"
  std::string describe_wait() const;
  // A sentence that was not said yet, for the log.
  std::vector<std::string> take_news();

  const Ledger& ledger() const { return ledger_; }
  uint64_t sample_id(int64_t group) const;  // of its first sample
  // Of a group that is not taken yet; it is asked for where it was not. Null: the data ends ahead of it.
  const SharedTokens* prompt(int64_t group);
  // Before anything is leased.
  int64_t restore(std::vector<LedgerGroup> groups) { return ledger_.restore(std::move(groups)); }

 private:
  struct Prompt {
    WorkPrompt work;
    SharedTokens tokens;
  };
  struct Engine {
    std::string name, session;
    std::string link;  // of this process: no other has had it
    int64_t places = 0;
    int64_t version = -1, fetched = -1;
    int64_t steps = 0;
    Time heard{}, moved{};  // its last word; its last engine step, or when it got samples without any in hand
    int64_t recomputed_rows = 0;
    std::vector<RewardCounters> counters;
  };

  Engine* find(const Caller& caller);
  void check_desk(const Caller& caller) const;
  Engine* heard(const Caller& caller, Time now);
  void lose(int64_t number, const std::string& why);
  void forget_versions();
  bool ask(int64_t group, bool needed);
  void ask_for_prompts(int64_t version);
  int64_t share_of(int64_t number, int64_t places, int64_t version) const;
  LeasedWork work_of_run(const LeasedRun& run) const;
  void check_samples(const GroupsRequest& request) const;
  void count(const Caller& caller, std::vector<RewardCounters> counters);
  std::string name_of(int64_t engine) const;
  std::string key_of(const std::string& name) const;  // of asynchronous steps

  const DeskOptions options_;
  Ledger ledger_;
  bool open_ = false, over_ = false, published_ = false;
  std::map<int64_t, Prompt> prompts_;  // of the groups from the ledger's first one on
  int64_t next_prompt_ = 0;
  std::map<int64_t, Engine> engines_;       // those that are there
  std::map<int64_t, std::string> names_;    // of all there ever were
  std::map<std::string, int64_t> numbers_;  // likewise
  std::map<std::string, Engine> departed_;  // counters of sessions that are not there now
  std::vector<RewardCounters> rewards_;
  std::map<int64_t, int64_t> samples_;
  double transfer_s_ = 0, stall_s_ = 0;
  int64_t recomputed_rows_ = 0;
  int64_t links_ = 0, lost_engines_ = 0, lost_in_row_ = 0, progress_ = 0;
  std::set<std::string> said_;
  std::vector<std::string> news_;
  std::optional<Error> failure_;
};

}  // namespace trireme
