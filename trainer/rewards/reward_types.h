// The four kinds of reward; callers use make_reward.
#pragma once

#include <memory>

#include "trainer/rewards/reward.h"

namespace trireme {

std::unique_ptr<Reward> make_math_reward(const RewardOptions& options);
std::unique_ptr<Reward> make_format_reward(const RewardOptions& options);
std::unique_ptr<Reward> make_command_reward(const RewardOptions& options);
std::unique_ptr<Reward> make_http_reward(const RewardOptions& options);

// {"prompt", "response", "gold", "extra", "truncated"}: what command and http rewards are sent.
nlohmann::json request_json(const RewardRequest& request);
// One line of it; bytes that are not UTF-8 are replaced.
std::string request_line(const nlohmann::json& request);

RewardResult failed_result(std::string error);

}  // namespace trireme
