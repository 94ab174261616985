// run_critic: a rank of PPO's critic, where that has ranks of its own.
#pragma once

#include "trainer/algorithms/session.h"

namespace trireme {

// In the job of an actor (options.rendezvous.of_critic): computes values of finished samples while others are
// generated, answers the actor's calls (critic_role.h), saves its checkpoints in checkpoint_dir/value, and returns when
// the actor's run has ended. Its ranks split it as value.* says. A signal to stop is passed on to the actor.
TrainSummary run_critic(const Config& config, const TrainOptions& options);

}  // namespace trireme
