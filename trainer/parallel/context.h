// ParallelContext: this rank's place in the layout, the group of everybody, and the group of each axis that a model may
// be split over.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "topology/split.h"
#include "topology/topology.h"
#include "trainer/parallel/communicator.h"
#include "trainer/parallel/exposed_waits.h"

namespace trireme {

class Attendance;
class StageLinks;

// The ranks that generate with one model, take the same samples and generate them together, and how many such replicas
// there are. They are training's, unless generation has a layout of its own.
struct GenerationRanks {
  Layout layout;
  Communicator* tensor = nullptr;   // of the layout's tensor ranks
  StageLinks* links = nullptr;      // null: one stage
  Communicator* replica = nullptr;  // tensor ranks of the first stage, then of the next ones
  Communicator* leaders = nullptr;  // of all replicas, in their order; on one that leads, else null
  int replicas = 1, number = 0;     // how many there are, which this one is
  bool apart = false;               // not training's
  bool leads() const;               // its first rank, the leader, speaks for it
  // What this replica's leader says, on all of its ranks: on the tensor ranks beside it at once, on the other stages
  // when they come to it. `own` counts on the leader. Collective over the replica, of stages at the same place among
  // what they send each other.
  std::string from_leader(const std::string& own) const;
  // What each leader says, on all ranks, in the order of replicas: between the leaders, then inside replicas. `own`
  // counts on one that leads. Collective.
  std::vector<std::string> from_leaders(const std::string& own) const;
};

class ParallelContext final {
 public:
  // One process, no store: tests and the inspection verbs.
  ParallelContext();
  // Meets the other ranks (deadline: rendezvous.timeout). Throws Error(kUser) that names the size when the layout does
  // not fit the world, and, on all ranks, the first one whose layout is another. What a model can be split over is the
  // caller's to know. Layout, ranks, groups and everybody are those of this process's role; what is said of the job is
  // of the actor's and the critic's ranks together.
  ParallelContext(const Layout& layout, const RendezvousOptions& rendezvous);
  // The same ranks once more, for a further model that they split by a layout of its own: another rank's place, and
  // groups of their own, whose names begin with `name` ("value-tp"). Everybody, the store, phases and generation are
  // `first`'s, which outlives it. Throws Error(kUser) where the layout does not fit the world. Collective.
  ParallelContext(ParallelContext& first, const Layout& layout, const std::string& name);
  ~ParallelContext();

  const Layout& layout() const { return layout_; }
  const Coordinates& coordinates() const { return coordinates_; }
  int rank() const { return rendezvous_.rank; }
  int world_size() const { return rendezvous_.world_size; }
  bool is_main() const { return rendezvous_.rank == 0; }
  // "rank 37 (tp 1, pp 2, dp 1)", "critic rank 0"
  std::string name() const { return name_of_job_rank(job_.layout, job_.actor_ranks, job_.rank); }
  int job_rank() const { return job_.rank; }
  int job_size() const { return job_.world_size; }
  // Of the job; 0 where the critic has no ranks of its own.
  int actor_ranks() const { return job_.actor_ranks; }
  int critic_ranks() const { return job_.critic_ranks; }
  bool of_critic() const { return job_.of_critic; }

  // Everybody, for control: stop, barriers, errors, decisions on checkpoints. Numbers and bytes of the host only.
  Communicator& world() { return *world_; }
  // The group of the axis that this rank is in. Groups are made at the start, in one order on all ranks; axes of the
  // same ranks share one.
  Communicator& group(Axis axis) { return *groups_.at(axis); }
  // Who holds the same weights: gradients, optimizer slices. Context parallel ranks among them train on the same
  // samples: what is counted over samples is summed over group(Axis::kDp).
  Communicator& data_parallel() { return group(Axis::kDpCp); }
  Communicator& tensor_parallel() { return group(Axis::kTp); }

  // The further groups of a mixture of experts: kEtpEp, kEdp, kCopy, kCopyPp, kPasses, kTpCp. The constructor makes
  // them where the layout splits experts; whoever has a mixture calls this, since with tensor ranks its experts are
  // reduced apart, and a dense model shall not pay for that. Collective; a second call does nothing.
  void make_expert_groups();
  // Who holds the same experts, where these are apart from the rest of the rank's part; else null.
  Communicator* expert_data_parallel(const std::optional<ModelSplit>& split) {
    return split && split->experts_apart() ? &group(Axis::kEdp) : nullptr;
  }

  // What this rank's pipeline sends from stage to stage; null where the model has one.
  StageLinks* stage_links() { return links_.get(); }

  const GenerationRanks& generation() const { return generation_; }
  // The same ranks generate in a legal layout of their own (generation_layout). Collective, once.
  void set_generation(const Layout& layout);
  // Ranks that hold the weights of training together (Axis::kCopyPp): those of the first stage, then of the next ones.
  // Without split experts a replica's. This rank is in copy() of copies() such groups.
  Communicator& holders() { return groups_.count(Axis::kCopyPp) > 0 ? group(Axis::kCopyPp) : *replica_; }
  int copies() const { return static_cast<int>(ranks_of_stage() / layout_.copy_ranks()); }
  int copy() const { return static_cast<int>(rank() % ranks_of_stage() / layout_.copy_ranks()); }
  // The first of the ranks that train on the same samples and have the results of a forward pass: log-probs, the loss.
  // A replica's, or of context parallel ones together.
  bool has_results() const { return coordinates_.tp == 0 && coordinates_.cp == 0 && coordinates_.pp == layout_.pp - 1; }

  // A further group; the tensor group, the pipeline's, a replica's or one of generation's where its ranks are theirs.
  // Who is in it makes it, and a rank that is in several makes them in one order on all ranks.
  std::shared_ptr<Communicator> make(const RankGroup& group);

  // Null where the job has one process. Keys are of the job: those of a role begin with role_keys().
  JobStore* store() { return store_.get(); }
  Milliseconds timeout() const { return rendezvous_.timeout; }  // of a collective
  std::string role_keys() const { return job_.of_critic ? "critic-" : ""; }
  // Shown in errors; the training loop sets it ("generation", "training", ...).
  void set_phase(const std::string& phase);
  // Called by set_phase, behind it. May be empty.
  void set_on_phase(std::function<void(const std::string& phase)> on_phase) { on_phase_ = std::move(on_phase); }
  std::string phase() const;
  // What this rank waits for others from the one call to the other, in all groups but the world's.
  void start_waits();
  ExposedWaits::Seconds take_waits();
  // Called when a collective has failed, with the ranks of the job that have not come, before the error is thrown.
  void set_on_absent(std::function<void(const std::vector<int>& ranks)> on_absent);
  // This rank leaves with an error of its own, which is none of a collective: the others are told what it was, and
  // leave at once instead of at their deadline. Waits a moment for them to read it.
  void report_failure(const std::string& what);
  // This rank leaves with an error that is the echo of another's failure: its end is no death to the others.
  void leaving();
  // This rank is about to throw what ends it. Where its own device keeps it from ending, on_unwinding does.
  void leaves_by(std::exception_ptr error);
  // "critic rank 0: ...", of a rank of the job that has died or has reported a failure, for who waits for it without a
  // collective; nothing else. Never throws.
  std::optional<std::string> failure_of_another();
  // "critic rank 0 (last seen in phase values)". Never throws.
  std::string last_seen(int job_rank);

 private:
  RankGroup in_job(RankGroup group) const;
  std::shared_ptr<Communicator> make_group(RankGroup group);
  void make_groups();
  void add_group(Axis axis);
  int64_t ranks_of_stage() const { return layout_.tp * layout_.cp * layout_.dp; }

  Layout layout_;
  RendezvousOptions rendezvous_;  // of the role
  RendezvousOptions job_;
  Coordinates coordinates_;
  std::string prefix_;  // of the names of groups
  std::shared_ptr<JobStore> store_;
  std::shared_ptr<Attendance> attendance_;  // null with one process, as the store
  std::shared_ptr<Communicator> world_;
  std::map<Axis, std::shared_ptr<Communicator>> groups_;  // axes of the same ranks share one
  std::shared_ptr<Communicator> replica_;                 // of training: groups_' kTpPp
  std::unique_ptr<StageLinks> links_;
  GenerationRanks generation_;
  std::vector<std::shared_ptr<Communicator>> more_;  // groups of generation's own layout
  std::string phase_ = "start";                      // with one process
  std::function<void(const std::string&)> on_phase_;
};

}  // namespace trireme
