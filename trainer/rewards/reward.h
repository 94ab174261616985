// Rewards: what turns a response into a number. The pool that runs them beside generation is in trainer/rewards/pool.h.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/clock.h"
#include "trainer/options/rewards.h"

namespace trireme {

struct RewardRequest {
  std::string prompt;
  std::string response;
  std::string gold;        // what the data set says is right; may be a whole solution ("... #### 72")
  nlohmann::json extra;    // the other columns of the data row, handed through to command and http rewards
  bool truncated = false;  // the response ended at the length limit
};

struct RewardResult {
  double reward = 0;    // finite
  bool failed = false;  // the reward could not be had (crash, time-out, bad answer); `reward` is 0 then
  std::string error;    // one sentence, only when failed
  // Of a failure: the program or service has answered, but says it has no reward for this response ...
  bool declined = false;
  // ... or it is one that another try will not mend: no such program, one that ends without an answer, a bad URL.
  bool hopeless = false;
};

class Reward {
 public:
  virtual ~Reward() = default;
  virtual const std::string& name() const = 0;
  // One result per request, in order. Never throws for a bad response, program or server: those are failed results.
  // Returns soon after the deadline. One thread at a time.
  virtual std::vector<RewardResult> score(const std::vector<RewardRequest>& requests, const Deadline& deadline) = 0;
  // Makes a running score() return soon and every later one fail at once. From any thread.
  virtual void cancel() noexcept {}
};

// Throws Error(kUser) for options that cannot work.
std::unique_ptr<Reward> make_reward(const RewardOptions& options);

}  // namespace trireme
