// LeaderElector: one of several replicas acts, decided by a Lease. Expiry is judged by this machine's steady clock
// only.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "base/clock.h"
#include "operator/kube/client.h"
#include "operator/kube/lease_term.h"
#include "operator/kube/reflector.h"

namespace trireme::kube {

struct LeaderOptions {
  std::string lease_namespace = "trireme-system";
  std::string lease_name = "trireme-operator";
  std::string identity;                // pod name + "_" + random; must be unique
  Milliseconds lease_duration{15000};  // others wait this long after the last change they saw
  Milliseconds renew_deadline{10000};  // a leader that could not renew for this long has lost; < lease_duration
  Milliseconds retry_period{2000};     // between renewals, and between tries of a standby without news
  bool release_on_stop = true;
  Metrics* metrics = nullptr;  // leader_election_master_status
};

struct LeaderCallbacks {
  // On the elector's thread; must return soon.
  std::function<void()> on_started_leading;
  // The lease was lost (not after stop()): work in progress cannot be taken back. Whoever wants to lead again ends it,
  // forgets what it knew, and calls stand_again().
  std::function<void()> on_lost;
  std::function<void(const std::string& identity)> on_new_leader;  // also for ourselves; may be empty
};

class LeaderElector final {
 public:
  LeaderElector(const Client& client, LeaderOptions options, LeaderCallbacks callbacks);
  ~LeaderElector();  // stops
  LeaderElector(const LeaderElector&) = delete;
  LeaderElector& operator=(const LeaderElector&) = delete;

  void start();
  // Ends the thread; a leader gives its Lease up first (best effort, within renew_deadline). Stop the workers before
  // this.
  void stop();
  // After on_lost: asks for the lease again, as any standby. Without it a lost elector stays out for ever.
  void stand_again();
  // True only while the last successful renewal is younger than renew_deadline, measured from before that request was
  // sent: no other replica can hold the Lease then. Cheap; workers ask before every write. False after stop(). A leader
  // for whom it was false once has lost: on_lost follows, even if a renewal was under way.
  bool is_leader() const;
  std::string leader() const;  // the holder seen last, "" unknown

 private:
  class LeaseWatch;
  void run();
  bool campaign();                                         // false: stopping
  bool lead();                                             // until the lease is lost (true) or we stop (false)
  bool try_acquire_or_renew(const Deadline& deadline);     // true: we hold it
  std::optional<bool> try_once(const Deadline& deadline);  // the same; nothing: no answer, not known
  void observe(const nlohmann::json& lease);
  void set_leading(bool leading);
  void release();
  bool wait_until(SteadyClock::time_point at, bool wake_on_news);  // false when stopping

  const Client& client_;
  LeaderOptions options_;
  LeaderCallbacks callbacks_;
  std::atomic<bool> leading_{false};
  LeaseTerm term_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  bool out_ = false;   // the lease was lost, and nobody said stand_again() yet
  uint64_t news_ = 0;  // bumped by the watch when the Lease changed
  std::string holder_;
  // Elector thread only:
  nlohmann::json lease_;       // as last read or written
  std::string observed_spec_;  // text of its spec; expiry counts from when this changed
  SteadyClock::time_point observed_at_{};
  Milliseconds observed_duration_{0};
  uint64_t seen_news_ = 0;
  std::unique_ptr<LeaseWatch> watch_;
  std::thread thread_;
};

}  // namespace trireme::kube
