#include "operator/controller/reports.h"

#include <algorithm>

#include "base/log.h"

namespace trireme::controller {
namespace {

constexpr Milliseconds kTalking{60000};

}  // namespace

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
    const auto now = SteadyClock::now();
    hear(now);
    entries_[job] = Entry{uid, std::move(report), now};
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
  const auto since = std::max(found->second.at, found->second.crowded_out);
  report.age = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - since);
  return report;
}

void ReportStore::forget(const kube::ObjectKey& job) {
  std::lock_guard lock(mutex_);
  entries_.erase(job);
}

size_t ReportStore::talkers() const {
  return static_cast<size_t>(std::count_if(entries_.begin(), entries_.end(),
                                           [&](const auto& entry) { return last_ - entry.second.at <= kTalking; }));
}

void ReportStore::turned_away() {
  std::lock_guard lock(mutex_);
  turned_away_ = SteadyClock::now();
}

void ReportStore::crowded_out(const kube::ObjectKey& job, const std::string& uid) {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(job);
  if (found == entries_.end() || found->second.uid != uid) return;
  const auto now = SteadyClock::now();
  if (now - found->second.crowded_out > kTalking) {
    log_warn("status",
             job.ns + "/" + job.name +
                 ": more tokens come in its rank 0's name than are looked at; silence does not count as a hang");
  }
  found->second.crowded_out = now;
}

void ReportStore::hear(SteadyClock::time_point now) {
  // One may be faster than our next look at a path that is whole again; not a second one some looks later.
  if (broken_ && heard_broken_ && now - *heard_broken_ > 4 * least_gap_) contradicted_ = true;
  if (broken_ && !heard_broken_) heard_broken_ = now;
  const auto gap = std::chrono::duration_cast<Milliseconds>(now - last_);
  if (gap > least_gap_ && (!heard_ || was_broken_ || talkers() >= 2)) {
    // A short silence right after a long one does not hide it.
    gap_ = now - back_ > kTalking ? gap : std::max(gap, gap_);
    back_ = now;
  }
  last_ = now;
  heard_ = true;
  was_broken_ = false;
}

void ReportStore::look(bool broken) const {
  broken_ = broken;
  if (broken) return;
  heard_broken_.reset();
  contradicted_ = false;
}

ReportStore::Path ReportStore::path(Milliseconds window, size_t expected, OwnPath own) const {
  std::lock_guard lock(mutex_);
  const auto now = SteadyClock::now();
  look(own.broken);
  const bool broken = own.broken && !contradicted_;
  Path path;
  const auto quiet = std::chrono::duration_cast<Milliseconds>(now - last_);
  if (quiet > Milliseconds(0) && (broken || (heard_ ? talkers() : expected) >= 2)) path.quiet_for = quiet;
  path.out = path.quiet_for > window;
  was_broken_ |= broken;
  if (gap_ > window) path.back_for = std::chrono::duration_cast<Milliseconds>(now - back_);
  path.served_for = std::chrono::duration_cast<Milliseconds>(now - turned_away_);
  if (!contradicted_) path.served_for = std::min(path.served_for, own.answers_for);
  return path;
}

size_t ReportStore::size() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace trireme::controller
