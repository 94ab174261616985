// Answers: what the API server's answers to our writes tell of a job: what it would not take (a quota, a policy) and
// when to ask again; what admission made of what it took. Pure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "base/clock.h"
#include "operator/kube/api_error.h"
#include "operator/kube/resource.h"

namespace trireme::controller {

struct Refusal {
  std::string job_uid;  // a job that is made again under the name has nothing to do with it
  int64_t attempt = 0;
  std::string kind;  // of the object that was refused
  std::string message;
  bool is_final = false;  // asking again is pointless
  int in_a_row = 0;
  SteadyClock::time_point retry_at{};

  bool is_of(const std::string& uid, int64_t number) const { return job_uid == uid && attempt == number; }
};

// A spec that we asked for, and the one that admission webhooks made of it; fingerprints (network_policy.h).
struct Rewrite {
  uint64_t wanted = 0;
  uint64_t got = 0;
  bool operator==(const Rewrite&) const = default;
};

struct Answers {
  std::optional<Refusal> refusal;  // of the attempt whose pods were asked for last, until they are taken
  Rewrite policy;                  // of the job's NetworkPolicy; 0: it is as we asked for it
};

inline bool is_refusal(const kube::ApiError& error) {
  return error.kind() == kube::ApiErrorKind::kInvalid || error.kind() == kube::ApiErrorKind::kForbidden;
}

// A quota may come back and a webhook be mended, so it is asked again: after `least`, twice as long each time up to
// `most`, and not before the time that the server named. Only a pod that is no valid pod (422) will never be taken;
// whatever else our objects are refused for is not the job's fault, and a webhook that names no code denies with 400.
inline Refusal refused(const std::optional<Refusal>& before, const std::string& job_uid, int64_t attempt,
                       const std::string& kind, const kube::ApiError& error, SteadyClock::time_point now,
                       Milliseconds least, Milliseconds most) {
  const int again = before && before->is_of(job_uid, attempt) ? before->in_a_row : 0;
  const Milliseconds wait = std::min(least * (1 << std::min(again, 10)), most);
  const bool is_final = kind == kube::resources::kPods.kind && error.status() == 422;
  const Milliseconds asked = error.retry_after().value_or(Milliseconds(0));
  return {job_uid, attempt, kind, error.what(), is_final, again + 1, now + std::max(wait, asked)};
}

// How long until the next look at a job after a refusal: none after the first in a row, so that the status says why.
inline Milliseconds look_after(const Refusal& refusal, SteadyClock::time_point now) {
  if (refusal.in_a_row == 1) return Milliseconds(1);
  return std::max(Milliseconds(1), std::chrono::ceil<Milliseconds>(refusal.retry_at - now));
}

}  // namespace trireme::controller
