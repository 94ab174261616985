// The rewards there are, and what each is told: the keys env.NAME.*, as trainer/rewards/reward.h takes them.
//
// A new reward is a line of TRIREME_REWARDS with its options below, its keys in trainer/config/fields_data.cpp, and
// make_NAME_reward beside its class in trainer/rewards.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trainer/options/names.h"

namespace trireme {

// X(name, defaults that differ from those of RewardOptions), in the order in which rewards are summed and documented.
// A machine that is broken is no wrong answer: for programs and services its sample is left out.
#define TRIREME_REWARDS(X)                                 \
  X(math, .enabled = true)                                 \
  X(format)                                                \
  X(command, .failure_policy = RewardFailurePolicy::kDrop) \
  X(http, .failure_policy = RewardFailurePolicy::kDrop)

// What happens to a sample whose reward failed. Each failure is counted and logged whatever the policy.
enum class RewardFailurePolicy {
  kZero,   // it counts as 0
  kDrop,   // the sample is marked as dropped: no loss, no part in the baseline
  kError,  // RewardPool::wait_any throws
};
inline Names names_of(RewardFailurePolicy) {
  static constexpr const char* kNames[] = {"zero", "drop", "error"};
  return kNames;
}

// One reward. The reward of a sample is the sum over enabled ones of weight * reward.
struct RewardOptions {
  std::string type = "math";  // a name of TRIREME_REWARDS; no key
  std::string name;           // for metrics and messages; empty: the type. No key
  bool enabled = false;       // of a configuration
  double weight = 1.0;        // in the sum
  int64_t num_workers = 8;    // threads (and child processes or connections) of this reward
  double timeout_s = 60.0;    // for the group of one prompt, restarts and retries included
  RewardFailurePolicy failure_policy = RewardFailurePolicy::kZero;

  std::string math_verify_impl = "trireme";  // math: hf_math_verify and dapo_math_verify mean the same here

  std::string pattern;            // format: RE2 expression that must be found in the response (anchor it yourself)
  std::vector<std::string> tags;  // format: <tag>...</tag> blocks that must stand exactly once each, in this order

  std::vector<std::string> command;  // command: program and arguments, no shell; fed JSON lines
  double answer_timeout_s = 0;       // command: for one response; 0: only timeout_s

  std::string url;                   // http: http(s)://host[:port]/path; empty in a configuration: TRIREME_REWARD_URL
  std::vector<std::string> headers;  // http: "Name: value", see trainer/rewards/http_headers.h
  std::map<std::string, std::string> environment;  // http: the variables that `headers` ask for; no key
  std::string ca_file;                             // http: PEM; empty: the system's authorities
  int64_t max_batch = 64;                          // http: responses per POST
  int64_t max_attempts = 3;  // http: tries of one POST (refused connections, 429 and 5xx are tried again)
};

// One of each, under its name.
struct RewardSet {
#define TRIREME_MEMBER(name, ...) RewardOptions name{.type = #name __VA_OPT__(, ) __VA_ARGS__};
  TRIREME_REWARDS(TRIREME_MEMBER)
#undef TRIREME_MEMBER

  std::vector<const RewardOptions*> all() const {
#define TRIREME_ADDRESS(name, ...) &(name),
    return {TRIREME_REWARDS(TRIREME_ADDRESS)};
#undef TRIREME_ADDRESS
  }
};

inline std::vector<std::string> reward_names() {
#define TRIREME_NAME(name, ...) #name,
  return {TRIREME_REWARDS(TRIREME_NAME)};
#undef TRIREME_NAME
}

}  // namespace trireme
