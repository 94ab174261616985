// Learning rate and weight decay as closed forms of the number of optimizer steps already done.
#pragma once

#include <cstdint>

#include "trainer/config/config.h"

namespace trireme {

// PyTorch's LinearLR, ConstantLR, CosineAnnealingLR, ExponentialLR, alone, chained (factors multiply) or one after
// another (milestones); Megatron's warm-up and decay when megatron_cfg is on.
double learning_rate(const Config& config, int64_t optimizer_steps_done);
double weight_decay(const Config& config, int64_t optimizer_steps_done);

}  // namespace trireme
