// CriticFollower: what a rank of PPO's critic does where that has ranks of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "trainer/algorithms/session.h"

namespace trireme {

// Follows the actor's calls (CriticLink) until the last one; meanwhile it computes values of samples that were
// generated. One per rank of the critic, on its training thread.
class CriticFollower final {
 public:
  // All outlive it. The run has done `steps` steps.
  CriticFollower(ParallelContext& context, Mail& mail, CriticState& state, CriticTrainer& trainer,
                 CheckpointManager& checkpoints, int64_t steps);

  // All ranks of the critic. Throws Error(kUnavailable | kTimeout) when the actor has failed or gives no sign of life,
  // and what went wrong here, a save under way included.
  TrainSummary follow();
  int64_t steps() const { return steps_; }  // that it has trained

  std::string config_yaml;                            // for checkpoints
  const std::atomic<int>* stop_signal = nullptr;      // non-zero: the actor is asked to stop
  std::function<void(int64_t step)> before_training;  // for tests; may be empty

 private:
  CriticCall next_call();
  bool value_ahead();
  int64_t next_ahead() const;
  void drop_ahead();
  void fill_values(std::vector<Sample>& samples);
  CriticTrained train(const CriticCall& call);
  void save(const CriticCall& call);
  void answer(const std::string& bytes);
  void tell_to_stop();
  void tell_saved();

  ParallelContext& context_;
  Mail& mail_;
  CriticState& state_;
  CriticTrainer& trainer_;
  CheckpointManager& checkpoints_;
  std::map<std::string, std::vector<float>> values_ahead_;  // of this rank, by tokens: of the weights of now
  int64_t steps_;
  int64_t calls_ = 0, aheads_taken_ = 0;
  bool told_to_stop_ = false;
};

}  // namespace trireme
