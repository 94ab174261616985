// DedicatedRollouts: a run's groups from processes of their own (`trireme engine`), which get weights from every rank
// and work from rank 0.
//
// Rank 0 has the desk (trainer/work): the ledger, and who generates what. All ranks wait for it to have the next step's
// groups, and get them by one broadcast. Behind a step's training each rank publishes its weights; before the optimizer
// writes them the next time they are retracted, so that training and transfers run beside each other. Of a policy that
// ranks split each of them sends its part. Weights that ranks share are whole from one training to the next, and
// retracted before they are released for it.
//
// An engine may be several ranks of one machine, each of which has its part of the model (engine_layout.h) and is sent
// it; one of them speaks for all.
//
// - In turn (age 0): a group is begun with the weights that its step begins with.
// - Exact versions (exact_versions): with those of max(0, v(s) - age) and no others. The write of the weights waits
//   until every engine that is there has fetched them, and a checkpoint for what was begun with older ones.
// - In flight: engines take weights between two steps, the newest that there are.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "trainer/algorithms/rollout_source.h"
#include "trainer/model/weight_parts.h"
#include "trainer/parallel/weight_link.h"
#include "trainer/work/server.h"
#include "trainer/work/shared_desk.h"

namespace trireme {

struct DedicatedOptions {
  RendezvousOptions rendezvous;  // of the actors
  int work_port = 0;             // of the work server; 0: the system chooses, and the store says which
  TransportCheck transport;
  std::filesystem::path hf_home;
  int64_t rewards = 0;  // numbers of a sample
  RewardRequest probe;  // what engines probe their rewards with
  int64_t steps = 0;    // that the run has done
  uint64_t next_sample_id = 0;
};

class DedicatedRollouts final : public RolloutSource {
 public:
  // Collective. Behind the restoring of a checkpoint, whose stream of prompts `prompts` is: rank 0's runs ahead of what
  // is trained from here on, the others' stays. All outlive it; `lengths` may be null. `on_progress` is called while
  // this rank waits, for heartbeats.
  DedicatedRollouts(Session& session, PromptStream& prompts, const RolloutLengths* lengths,
                    const DedicatedOptions& options, std::function<void()> on_progress);
  ~DedicatedRollouts() override;

  Step collect(RankShares& shares, std::map<std::string, double>& values) override;
  void trained(int64_t step) override;
  void make_way() override {}
  void set_aside() override {}
  void prepare_save() override;
  void finish() override;
  const DataPlace& place() const override { return place_; }
  SavedGroups saved() const override;
  int64_t restore(const SavedGroups& saved) override;

 private:
  void make_desk(const DedicatedOptions& options, const RolloutLengths* lengths);
  void make_server(const DedicatedOptions& options);
  void publish();
  void retract();
  void wait_for_main(const std::function<bool(Desk&)>& done, Milliseconds patience,
                     const std::function<void()>& too_long, const std::function<void()>& meanwhile = {});
  std::vector<Sample> next_to_tell();
  void value_ready();
  [[noreturn]] void fail_without_groups();
  Step take(std::map<std::string, double>& values);
  bool is_main() const { return session_.context.is_main(); }

  Session& session_;
  PromptsAhead prompts_;  // rank 0: under the desk's lock
  const std::function<void()> on_progress_;
  const bool exact_;  // and an age: engines must get every version
  const Milliseconds patience_;
  DataPlace place_;
  int64_t next_step_ = 1, version_ = 0, waits_ = 0;
  bool published_ = false;
  double waited_for_weights_ = 0;  // since the last step
  // On rank 0, of the step that is collected, by group and index: samples that on_samples had, and what it gave.
  std::set<std::pair<int64_t, int64_t>> told_;
  std::map<std::pair<int64_t, int64_t>, std::vector<float>> values_;
  std::function<void()> before_update_, before_release_;  // of optimizer and shared weights, before this
  std::unique_ptr<JobStore> own_store_;                   // with one rank
  JobStore* store_ = nullptr;
  std::unique_ptr<WeightParts> parts_;
  std::unique_ptr<WeightSender> sender_;  // it asks them
  std::unique_ptr<SharedDesk> desk_;      // of rank 0, as the next one
  std::unique_ptr<WorkServer> server_;
};

}  // namespace trireme
