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
    const auto now = now_();
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
  report.age = std::chrono::duration_cast<Milliseconds>(now_() - since);
  return report;
}

void ReportStore::forget(const kube::ObjectKey& job) {
  std::lock_guard lock(mutex_);
  entries_.erase(job);
}

void ReportStore::clear() {
  std::lock_guard lock(mutex_);
  entries_.clear();
  heard_ = Heard(now_());
}

size_t ReportStore::talkers() const {
  return static_cast<size_t>(std::count_if(
      entries_.begin(), entries_.end(), [&](const auto& entry) { return heard_.last - entry.second.at <= kTalking; }));
}

void ReportStore::turned_away() {
  std::lock_guard lock(mutex_);
  heard_.turned_away = now_();
}

void ReportStore::crowded_out(const kube::ObjectKey& job, const std::string& uid) {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(job);
  if (found == entries_.end() || found->second.uid != uid) return;
  const auto now = now_();
  if (now - found->second.crowded_out > kTalking) {
    log_warn("status",
             job.ns + "/" + job.name +
                 ": more tokens come in its rank 0's name than are looked at; silence does not count as a hang");
  }
  found->second.crowded_out = now;
}

void ReportStore::hear(SteadyClock::time_point now) {
  // One may be faster than our next look at a path that is whole again; not a second one some looks later.
  if (heard_.broken && heard_.while_broken && now - *heard_.while_broken > 4 * least_gap_) heard_.contradicted = true;
  if (heard_.broken && !heard_.while_broken) heard_.while_broken = now;
  const auto gap = std::chrono::duration_cast<Milliseconds>(now - heard_.last);
  if (gap > least_gap_ && (!heard_.any || heard_.was_broken || talkers() >= 2)) {
    // A short silence right after a long one does not hide it.
    heard_.gap = now - heard_.back > kTalking ? gap : std::max(gap, heard_.gap);
    heard_.back = now;
  }
  heard_.last = now;
  heard_.any = true;
  heard_.was_broken = false;
}

void ReportStore::look(bool broken) const {
  heard_.broken = broken;
  if (broken) return;
  heard_.while_broken.reset();
  heard_.contradicted = false;
}

ReportStore::Path ReportStore::path(Milliseconds window, size_t expected, OwnPath own) const {
  std::lock_guard lock(mutex_);
  const auto now = now_();
  look(own.broken);
  const bool broken = own.broken && !heard_.contradicted;
  Path path;
  const auto quiet = std::chrono::duration_cast<Milliseconds>(now - heard_.last);
  if (quiet > Milliseconds(0) && (broken || (heard_.any ? talkers() : expected) >= 2)) path.quiet_for = quiet;
  path.out = path.quiet_for > window;
  heard_.was_broken |= broken;
  if (heard_.gap > window) path.back_for = std::chrono::duration_cast<Milliseconds>(now - heard_.back);
  path.served_for = std::chrono::duration_cast<Milliseconds>(now - heard_.turned_away);
  if (!heard_.contradicted) path.served_for = std::min(path.served_for, own.answers_for);
  return path;
}

size_t ReportStore::size() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

}  // namespace trireme::controller
