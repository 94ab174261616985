// Rewards: what turns a response into a number. The pool that runs them beside generation is in trainer/rewards/pool.h.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/clock.h"

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

// What happens to a sample whose reward failed. Each failure is counted and logged whatever the policy.
enum class FailurePolicy {
  kZero,   // it counts as 0
  kDrop,   // the sample is marked as dropped: no loss, no part in the baseline
  kError,  // RewardPool::wait_any throws
};

FailurePolicy parse_failure_policy(const std::string& text);  // "zero" | "drop" | "error", else Error(kUser)

struct RewardOptions {
  std::string type = "math";  // math | format | command | http
  std::string name;           // for metrics and messages; empty: the type
  double weight = 1;          // of this reward in the sum
  double timeout_s = 60;      // for one group, restarts and retries included
  FailurePolicy failure_policy = FailurePolicy::kZero;
  int workers = 0;  // threads (and child processes or connections) of this reward; 0: the pool's default

  std::string pattern;            // format: RE2 expression that must be found in the response (anchor it yourself)
  std::vector<std::string> tags;  // format: <tag>...</tag> blocks that must stand exactly once each, in this order

  std::vector<std::string> command;  // command: program and arguments, no shell
  double answer_timeout_s = 0;       // command: for one response; 0: only timeout_s

  std::string url;                                 // http: http(s)://host[:port]/path
  std::vector<std::string> headers;                // http: see http_headers.h
  std::map<std::string, std::string> environment;  // http: the variables that `headers` ask for
  std::string ca_file;                             // http: PEM; empty: the system's authorities
  int max_batch = 64;                              // http: responses per POST
  int max_attempts = 3;  // http: tries of one POST (refused connections, 429 and 5xx are tried again)
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
