#include "operator/controller/pod_names.h"

#include <algorithm>

#include "api/runtime.h"
#include "base/text.h"

namespace trireme::controller {

std::vector<WantedPod> wanted_pods(const RLJob& job, int64_t attempt) {
  std::vector<WantedPod> wanted;
  for (const RoleRef& role : roles_of(job.spec)) {
    for (int64_t rank = 0; rank < role.spec->replicas; ++rank) {
      wanted.push_back({role.name, rank, pod_name(job.metadata.name, role.name, rank, attempt)});
    }
  }
  return wanted;
}

void PodNames::begin(const RLJob& job) {
  const uint64_t uid = hash64(job.metadata.uid);
  if (uid_hash_ == uid) return;  // somebody took its status back to nothing: it may have pods
  uid_hash_ = uid;
  generation_ = job.metadata.generation;
  first_ = last_ = 1;
  renamed_ = 0;
}

void PodNames::wrote(const RLJobStatus& status) {
  for (const RoleStatus& role : status.roles) {
    if (role.restarts > 0) renamed_ = std::max(renamed_, status.attempt);
  }
}

std::optional<std::vector<std::string>> PodNames::ask(const RLJob& job, std::vector<std::string> cached) const {
  const int64_t attempt = job.status.attempt;
  if (first_ == 0 || uid_hash_ != hash64(job.metadata.uid) || generation_ != job.metadata.generation || attempt < last_)
    return std::nullopt;
  const bool made_again = std::any_of(job.status.roles.begin(), job.status.roles.end(),
                                      [](const RoleStatus& role) { return role.restarts > 0; });
  if (made_again || first_ <= renamed_) return std::nullopt;
  const int64_t attempts = attempt - first_ + 1;
  int64_t pods = 0;
  for (const RoleRef& role : roles_of(job.spec)) {
    // The specification may be one that nobody has validated.
    if (role.spec->replicas < 0 || role.spec->replicas > kMost) return std::nullopt;
    pods += role.spec->replicas;
  }
  if (attempts > kMost || attempts * pods > kMost) return std::nullopt;
  std::vector<std::string> names = std::move(cached);
  for (int64_t a = first_; a <= attempt; ++a) {
    for (WantedPod& wanted : wanted_pods(job, a)) names.push_back(std::move(wanted.name));
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  if (static_cast<int64_t>(names.size()) > kMost) return std::nullopt;
  return names;
}

void PodNames::saw(const RLJob& job, const std::vector<ObservedPod>& pods) {
  const int64_t attempt = job.status.attempt;
  if (uid_hash_ != hash64(job.metadata.uid)) renamed_ = 0;
  // Who made the last attempt's pods before us may have made some of them again.
  if (first_ == 0 && (job.spec.roles.reward || job.spec.roles.generation)) renamed_ = std::max(renamed_, attempt - 1);
  wrote(job.status);
  uid_hash_ = hash64(job.metadata.uid);
  generation_ = job.metadata.generation;
  first_ = std::max<int64_t>(1, attempt - 1);
  last_ = std::max<int64_t>(1, attempt);
  for (const ObservedPod& pod : pods) {
    if (!explains(job, pod)) {
      first_ = 0;
      return;
    }
    first_ = std::min(first_, pod.attempt);
  }
}

bool PodNames::explains(const RLJob& job, const ObservedPod& pod) const {
  if (pod.attempt < 1 || pod.attempt > job.status.attempt || pod.rank < 0) return false;
  for (const RoleRef& role : roles_of(job.spec)) {
    if (role.name != pod.role) continue;
    return pod.rank < role.spec->replicas && pod.name == pod_name(job.metadata.name, pod.role, pod.rank, pod.attempt);
  }
  return false;
}

}  // namespace trireme::controller
