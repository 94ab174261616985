// ReportStore: the last status report of each job, as rank 0 pushed it, with the steady-clock time at which we got it.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "operator/controller/observed.h"
#include "operator/kube/resource.h"

namespace trireme::controller {

// What we find at the address that trainers report to (operator/telemetry/path_probe.h).
struct OwnPath {
  bool broken = false;          // nothing answers there
  Milliseconds answers_for{0};  // so long it has answered without a break; 0: it does not, or it is not known
};

class ReportStore final {
 public:
  // Called after every put; must not call back. An empty one ends it: none runs any more when this returns.
  void set_listener(std::function<void(const kube::ObjectKey&, bool urgent)> listener);
  // Reports of an older attempt than the one held are dropped; `age` is ignored. Returns false when dropped.
  bool put(const kube::ObjectKey& job, const std::string& uid, Report report);
  // Of this incarnation of the job, with its age.
  std::optional<Report> get(const kube::ObjectKey& job, const std::string& uid) const;
  void forget(const kube::ObjectKey& job);
  // As when it was made, but for the listener: what came while somebody else led is not known here.
  void clear();
  // A report was not taken, and that was our own trouble: the API server did not say whose it was.
  void turned_away();
  // A report that may be this job's was not looked at, since others use up what its pod may ask: until it is heard
  // again its age counts from here, for its silence is not its own. What does not fit the last report's job is ignored.
  void crowded_out(const kube::ObjectKey& job, const std::string& uid);
  size_t size() const;

  // Silence of everybody at once is ours, not theirs.
  struct Path {
    bool out = false;                             // for longer than `window` none of several jobs has been heard
    Milliseconds back_for = Milliseconds::max();  // since such a time ended
    Milliseconds quiet_for{0};                    // so long none of several jobs has been heard; 0: only one reports
    Milliseconds served_for{0};                   // so long any report that reached us would have been taken
  };
  // Several: of the jobs that reported within the minute before the last report of all; or `expected`, when none has
  // come since we began. One is enough when nothing answers where trainers report; but what we find there is left out
  // while reports come all the same. `window` is at least kLeastGap.
  Path path(Milliseconds window, size_t expected = 0, OwnPath own = {}) const;
  // No shorter silence of all is remembered; a trainer reports every 10 s.
  static constexpr Milliseconds kLeastGap{15000};
  using Clock = std::function<SteadyClock::time_point()>;
  explicit ReportStore(Milliseconds least_gap = kLeastGap, Clock clock = SteadyClock::now)
      : least_gap_(least_gap), now_(std::move(clock)), heard_(now_()) {}

 private:
  struct Entry {
    std::string uid;
    Report report;
    SteadyClock::time_point at;
    SteadyClock::time_point crowded_out{};  // last time, or never
  };
  size_t talkers() const;
  void hear(SteadyClock::time_point now);  // a report, whosesoever
  void look(bool broken) const;

  const Milliseconds least_gap_;
  const Clock now_;
  mutable std::mutex mutex_;
  std::unordered_map<kube::ObjectKey, Entry> entries_;
  struct Heard {
    explicit Heard(SteadyClock::time_point beginning) : last(beginning), turned_away(beginning) {}
    SteadyClock::time_point last;         // report of any job, or our beginning
    SteadyClock::time_point turned_away;  // when one last was, or our beginning
    bool any = false;
    bool was_broken = false;                                // since the last report
    bool broken = false;                                    // at the last look
    bool contradicted = false;                              // reports came although it was broken all the time
    std::optional<SteadyClock::time_point> while_broken{};  // the first of them
    SteadyClock::time_point back{};                         // end of the last silence of all
    Milliseconds gap{0};                                    // and its length; 0: there was none
  };
  mutable Heard heard_;
  std::mutex listener_mutex_;
  std::function<void(const kube::ObjectKey&, bool)> listener_;
};

}  // namespace trireme::controller
