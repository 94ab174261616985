// Ledger: the groups that are being generated or are complete, and not trained yet. Who has which samples, which step a
// group is of, and whether what comes may still be trained. No LibTorch, no clock, no socket: the same calls give the
// same answers, so that ranks which make them in one order agree without a message.
//
// - Groups are numbered in data-set order. Step s consists of the next groups_per_step of them, never of those that
//   came first: else short responses would be trained more often. With `teaches_nothing` a complete group of which it
//   is true is left out and the next one takes its place.
// - v(s) is the version of the weights that step s begins with. A token of step s that weights of version w drew has
//   the age v(s) - w. It is bounded before anything is generated: a group is leased to an engine with weights w only
//   while w >= v(s) - max_age. Where it is not known yet which step a group is of, since groups ahead of it may still
//   be left out, s is the latest that it can be. So nothing is ever dropped for its age.
// - A sample is counted once, whoever brings it, in whatever order, and however often.
// - While the critic alone trains nothing gets older: `most_steps_ahead` bounds how far ahead groups are begun then.
// - While the next step is not complete somebody has a sample of it, or lease() gives one to an engine with the newest
//   weights: nothing waits for ever. Exceptions are said by exhausted() and end_at().
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "trainer/batch/sample.h"
#include "trainer/rollout/queue.h"

namespace trireme {

struct LedgerOptions {
  int64_t groups_per_step = 1;
  int64_t samples_per_group = 1;
  int64_t max_age = 0;  // 0: every token is drawn from the weights that its step begins with
  // A group is begun with weights of exactly max(0, v(s) - max_age), unless they are gone. Then what is generated does
  // not depend on when. With an age and `teaches_nothing` the step of a group is not known then: not together.
  bool exact_version = false;
  int64_t critic_only_steps = 0;  // so many steps at the beginning of a run leave the policy's weights as they are
  // Groups of steps further ahead than this of the one that is trained are not begun, whatever their age: while the
  // weights stay as they are this alone bounds how much is held.
  int64_t most_steps_ahead = std::numeric_limits<int64_t>::max();
  int64_t last_step = std::numeric_limits<int64_t>::max();  // no group of a later one is begun
  // Samples of a run at most. A run begins at a multiple of it in its group. 0: whole groups.
  int64_t run_samples = 0;
  // Whether a complete group is left out. A function of the group, for ever. Empty: all are trained.
  std::function<bool(const std::vector<Sample>& group)> teaches_nothing = {};
  int64_t max_groups_of_step = 0;  // then: that a step may use up, those left out among them; at least groups_per_step
};

// Samples next to each other of one group, which an engine has taken to generate.
struct LeasedRun {
  int64_t id = 0;  // never used twice
  int64_t engine = 0;
  SampleSpan span;      // with the group's number
  int64_t version = 0;  // of the engine's weights then
  bool operator==(const LeasedRun&) const = default;
};

enum class Completion {
  kTaken,    // some of its samples were not there yet
  kKnown,    // all were, or their step is trained: nothing changes
  kForeign,  // these are not the run's samples, or nobody leased it: nothing changes
  kTooOld,   // drawn from older weights than the lease said, or from some that nobody has: the samples are leased again
};

// A group of the next step without which it cannot begin.
struct MissingGroup {
  struct Holder {
    int64_t engine = 0;
    int64_t samples = 0;
    bool operator==(const Holder&) const = default;
  };
  int64_t number = 0;
  int64_t open = 0;             // samples that nobody has
  std::vector<Holder> holders;  // by engine
  bool operator==(const MissingGroup&) const = default;
};

struct LedgerGroup {
  int64_t number = 0;
  bool kept = true;  // else it teaches nothing
  std::vector<Sample> samples;
};

class Ledger final {
 public:
  // The next step is `first_step` (from 1), its first group has the number `first_group`. Throws Error(kUser) on
  // impossible options.
  Ledger(const LedgerOptions& options, int64_t first_step = 1, int64_t first_group = 0);

  // Version of the weights that a step begins with.
  int64_t version_of(int64_t step) const;
  int64_t next_step() const { return next_step_; }
  // The newest weights that there are: of the step that comes next, or, between take() and trained(), is trained.
  int64_t newest_version() const { return newest_version_; }
  // The first group that no step has, and the one behind the last that was ever leased or restored.
  int64_t first_group() const { return first_group_; }
  int64_t end_group() const { return first_group_ + static_cast<int64_t>(groups_.size()); }

  // Runs for an engine with weights of `version`, in data-set order, until its `places` are full: the last run may
  // have more samples than places are left. None: nothing may begin.
  std::vector<LeasedRun> lease(int64_t engine, int64_t places, int64_t version);
  // What lease() would give to an engine with the newest weights, or of `version`, and so many places, one call or
  // several.
  std::vector<SampleSpan> leasable_runs(int64_t places) const { return open_runs(places, newest_version_); }
  std::vector<SampleSpan> leasable_runs(int64_t places, int64_t version) const { return open_runs(places, version); }
  // How many samples that is with places for all.
  int64_t leasable() const { return leasable(newest_version_); }
  int64_t leasable(int64_t version) const;
  // A run's samples, in their order: group is its number, index that in the group.
  Completion complete(int64_t run, std::vector<Sample> samples);
  // With exact_version: weights of an older version than `version` are nowhere any more. Groups that want them may be
  // begun with newer ones. Returns the numbers of those of the next steps that were not complete. Never goes back.
  std::vector<int64_t> gone_before(int64_t version);
  // Groups that are not complete and want older weights than the newest ones: what is in a checkpoint must be, for the
  // run behind it to be the same. None without exact_version.
  std::vector<int64_t> wanting_older() const;
  // What the engine has and has not completed is open again. What it still brings is taken as long as it is wanted.
  // Returns how many samples these are.
  int64_t lost(int64_t engine);

  // Samples that must come before the next step can begin; as far as is known now, with `teaches_nothing`.
  std::vector<MissingGroup> missing() const;
  bool complete() const { return missing().empty() && !exhausted(); }
  // Of complete groups that are there, how many the next step would have, of how many; when it may use up no more and
  // they are too few. Only with `teaches_nothing`.
  struct Exhausted {
    int64_t kept = 0, used_up = 0;
  };
  std::optional<Exhausted> exhausted() const;
  // The groups of the next step, which must be complete, and those left out among them, in data-set order.
  std::vector<LedgerGroup> take(int64_t step);
  // Samples of the next step that are there, as far as is known now which these are: stretches next to each other of
  // one group each, in data-set order.
  void visit_ready(const std::function<void(const Sample* samples, size_t count)>& visit) const;
  // The step that was taken is trained: the weights have the next version now.
  void trained(int64_t step);
  // No group from this number on is begun: the data ends there.
  void end_at(int64_t group) { end_at_ = group; }

  // Complete groups, for a checkpoint. What is not complete is generated again.
  std::vector<LedgerGroup> whole_groups() const;
  // Into a ledger of which nothing was leased: the groups of an earlier one with the same next step and first group.
  // Returns how many it does not take: of another size, too old for these options, or behind the last step.
  int64_t restore(std::vector<LedgerGroup> groups);

  struct Counts {                                // of groups that no step has
    int64_t open = 0, leased = 0, complete = 0;  // leased: somebody has or had a part of it
    int64_t leased_samples = 0;
  };
  Counts counts() const;
  // Samples that an engine has, by engine; those without any are not in it.
  std::map<int64_t, int64_t> held() const;

 private:
  static constexpr int64_t kOpen = -1, kComplete = -2;
  struct Group {
    std::vector<int64_t> holder;  // of each sample: its run, kOpen or kComplete
    std::vector<Sample> samples;
    int64_t open = 0, complete = 0;
    bool left_out = false;
  };
  struct Run {
    int64_t engine = 0;
    SampleSpan span;
    int64_t version = 0;
  };

  Group& at(int64_t number) { return groups_[static_cast<size_t>(number - first_group_)]; }
  bool whole(const Group& group) const { return group.complete == options_.samples_per_group; }
  enum class Begin { kYes, kNo, kNever };  // kNever: nor any later step
  Begin begin(int64_t step, int64_t version) const;
  int64_t wanted_version(int64_t step) const;
  std::vector<SampleSpan> open_runs(int64_t places, int64_t version) const;
  // Calls visit(number, group, step) for the groups that there are, then for further ones (group null), each with the
  // latest step that it can be of, until visit returns false. Groups left out are passed over.
  template <typename Visit>
  void walk(Visit&& visit) const;
  int64_t latest_step(int64_t number) const;
  void put(int64_t number, Sample sample);
  void add_group();

  const LedgerOptions options_;
  int64_t run_samples_ = 1;
  int64_t next_step_ = 1;
  int64_t current_step_ = 1;  // begins with the newest weights: next_step_, or the one that is trained
  int64_t newest_version_ = 0;
  int64_t gone_before_ = 0;
  int64_t first_group_ = 0;
  int64_t end_at_ = std::numeric_limits<int64_t>::max();
  std::deque<Group> groups_;     // from first_group_ on
  std::map<int64_t, Run> runs_;  // of groups that are there; lost ones too
  int64_t next_run_ = 0;
};

// Runs for `engines` engines with the newest weights that have `places` each: as many as make what they have even, each
// to the one that has the fewest. What else could begin stays open, for whoever has room first.
std::vector<LeasedRun> deal_evenly(Ledger& ledger, int64_t engines, int64_t places);

// "groups 4, 7 (rank 1 has 3 of their samples, nobody has 2)": a few by number. `engine`: what engines are called.
std::string describe(const std::vector<MissingGroup>& missing, const std::string& engine);

}  // namespace trireme
