#include "operator/controller/reports.h"

namespace trireme::controller {

bool ReportStore::put(const kube::ObjectKey& job, const std::string& uid, Report report) {
  bool urgent = false;
  {
    std::lock_guard lock(mutex_);
    const auto found = entries_.find(job);
    if (found == entries_.end() || found->second.uid != uid) {
      urgent = true;
    } else {
      const Report& before = found->second.report;
      if (report.attempt < before.attempt) return false;
      urgent = report.attempt != before.attempt || report.rendezvous_done != before.rendezvous_done;
      // Rendezvous does not come undone within an attempt, in whatever order the reports arrive.
      if (report.attempt == before.attempt) report.rendezvous_done |= before.rendezvous_done;
    }
    entries_[job] = Entry{uid, std::move(report), SteadyClock::now()};
  }
  std::lock_guard lock(listener_mutex_);
  if (listener_) listener_(job, urgent);
  return true;
}

void ReportStore::set_listener(std::function<void(const kube::ObjectKey&, bool)> listener) {
  std::lock_guard lock(listener_mutex_);
  listener_ = std::move(listener);
}

std::optional<Report> ReportStore::get(const kube::ObjectKey& job, const std::string& uid) const {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(job);
  if (found == entries_.end() || found->second.uid != uid) return std::nullopt;
  Report report = found->second.report;
  report.age = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - found->second.at);
  return report;
}

void ReportStore::forget(const kube::ObjectKey& job) {
  std::lock_guard lock(mutex_);
  entries_.erase(job);
}

size_t ReportStore::size() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace trireme::controller
