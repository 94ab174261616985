// Learning rate and weight decay as closed forms of how often the schedule has moved.
#pragma once

#include <cstdint>

#include "trainer/config/config.h"

namespace trireme {

// PyTorch's LinearLR, ConstantLR, CosineAnnealingLR, ExponentialLR, alone, chained (factors multiply) or one after
// another (milestones); Megatron's warm-up and decay when megatron_cfg is on. As in NeMo-RL, whose torch scheduler
// steps once a call of train() and whose Megatron scheduler counts one global batch of samples a call, a schedule moves
// once a training step: GRPO's has one rollout and one or more optimizer steps, SFT's one optimizer step.
double learning_rate(const Config& config, int64_t steps_done);
double weight_decay(const Config& config, int64_t steps_done);

}  // namespace trireme
