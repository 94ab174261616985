// ReportStore: the last status report of each job, as rank 0 pushed it, with the steady-clock time at which we got it.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "operator/controller/observed.h"
#include "operator/kube/resource.h"

namespace trireme::controller {

class ReportStore final {
 public:
  // Called after every put; must not call back. An empty one ends it: none runs any more when this returns.
  void set_listener(std::function<void(const kube::ObjectKey&, bool urgent)> listener);
  // Reports of an older attempt than the one held are dropped; `age` is ignored. Returns false when dropped.
  bool put(const kube::ObjectKey& job, const std::string& uid, Report report);
  // Of this incarnation of the job, with its age.
  std::optional<Report> get(const kube::ObjectKey& job, const std::string& uid) const;
  void forget(const kube::ObjectKey& job);
  size_t size() const;

 private:
  struct Entry {
    std::string uid;
    Report report;
    SteadyClock::time_point at;
  };
  mutable std::mutex mutex_;
  std::unordered_map<kube::ObjectKey, Entry> entries_;
  std::mutex listener_mutex_;
  std::function<void(const kube::ObjectKey&, bool)> listener_;
};

}  // namespace trireme::controller
