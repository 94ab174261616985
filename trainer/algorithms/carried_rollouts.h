// CarriedRollouts: a run's groups by carry-over (carry_over.h), on the engine that shares its device with training.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "trainer/algorithms/carry_over.h"
#include "trainer/algorithms/rollout_source.h"

namespace trireme {

class CarriedRollouts final : public RolloutSource {
 public:
  // Behind the restoring of a checkpoint, whose stream of prompts `prompts` is: it runs ahead of what is trained from
  // here on. The run has done `steps` steps; the next sample is `next_sample_id`. All outlive it; `lengths` may be
  // null. `on_progress` is called between engine steps, for heartbeats.
  CarriedRollouts(Session& session, Engine& engine, RewardPool& rewards, PromptStream& prompts,
                  const RolloutLengths* lengths, int64_t steps, uint64_t next_sample_id,
                  std::function<void()> on_progress);

  Step collect(RankShares& shares, std::map<std::string, double>& values) override;
  void trained(int64_t step) override { carry_->trained(step); }
  void make_way() override;
  void set_aside() override { carry_->set_aside(); }
  const DataPlace& place() const override { return prompts_.place(); }
  SavedGroups saved() const override { return carry_->saved(); }
  int64_t restore(const SavedGroups& saved) override { return carry_->restore(saved); }

 private:
  void count_rewards();

  Session& session_;
  Engine& engine_;
  RewardPool& rewards_;
  PromptsAhead prompts_;
  std::unique_ptr<CarryOver> carry_;
  std::vector<RewardCounters> counted_before_, counted_;  // of this rank
  bool made_way_ = false;                                 // what rewards count is somebody else's
};

// Whether keys and values of unfinished responses are kept over an update.
bool keeps_cache(const Config& config);

}  // namespace trireme
