#include "trainer/rewards/reward.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/text.h"
#include "trainer/rewards/math.h"
#include "trainer/rewards/reward_types.h"

namespace trireme {
namespace {

class MathReward final : public Reward {
 public:
  explicit MathReward(std::string name) : name_(std::move(name)) {}
  const std::string& name() const override { return name_; }

  std::vector<RewardResult> score(const std::vector<RewardRequest>& requests, const Deadline& deadline) override {
    std::vector<RewardResult> results;
    results.reserve(requests.size());
    for (const RewardRequest& request : requests) {
      if (deadline.passed()) {
        results.push_back(failed_result("no time left"));
        continue;
      }
      const auto final_answers = extract_final_answers(request.response);
      const bool right = std::any_of(final_answers.begin(), final_answers.end(),
                                     [&](const std::string& found) { return math_equal(request.gold, found); });
      results.push_back({.reward = right ? 1.0 : 0.0});
    }
    return results;
  }

 private:
  std::string name_;
};

}  // namespace

nlohmann::json request_json(const RewardRequest& request) {
  return {{"prompt", request.prompt},
          {"response", request.response},
          {"gold", request.gold},
          {"extra", request.extra},
          {"truncated", request.truncated}};
}

std::string request_line(const nlohmann::json& request) {
  return request.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

RewardResult failed_result(std::string error) { return {.reward = 0, .failed = true, .error = std::move(error)}; }

std::unique_ptr<Reward> make_math_reward(const RewardOptions& options) {
  return std::make_unique<MathReward>(options.name.empty() ? options.type : options.name);
}

std::unique_ptr<Reward> make_reward(const RewardOptions& options) {
  const std::string name = options.name.empty() ? options.type : options.name;
  if (!std::isfinite(options.weight)) fail_user("reward '" + name + "': weight is not a number");
  if (!(options.timeout_s > 0) || options.timeout_s > 86400)
    fail_user("reward '" + name + "': timeout_s must be above 0 and at most 86400 s");
  if (!(options.answer_timeout_s >= 0)) fail_user("reward '" + name + "': answer_timeout_s must not be negative");
  if (options.num_workers < 1) fail_user("reward '" + name + "': num_workers must be at least 1");
#define TRIREME_MAKE(kind, ...) \
  if (options.type == #kind) return make_##kind##_reward(options);
  TRIREME_REWARDS(TRIREME_MAKE)
#undef TRIREME_MAKE
  const std::vector<std::string> names = reward_names();
  const auto close = nearest(options.type, names);
  fail_user("reward type '" + options.type + "' is not one of " + join(names, ", ") +
            (close ? " (did you mean " + *close + "?)" : ""));
}

}  // namespace trireme
