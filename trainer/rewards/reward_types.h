// How the kinds of reward are made, and what they share; callers use make_reward.
#pragma once

#include <memory>

#include "trainer/rewards/reward.h"

namespace trireme {

// make_math_reward, make_format_reward, ...: each is beside its class.
#define TRIREME_MAKE(name, ...) std::unique_ptr<Reward> make_##name##_reward(const RewardOptions& options);
TRIREME_REWARDS(TRIREME_MAKE)
#undef TRIREME_MAKE

// {"prompt", "response", "gold", "extra", "truncated"}: what command and http rewards are sent.
nlohmann::json request_json(const RewardRequest& request);
// One line of it; bytes that are not UTF-8 are replaced.
std::string request_line(const nlohmann::json& request);

RewardResult failed_result(std::string error);

}  // namespace trireme
