// StatusReporter: rank 0's news for the operator: step, phase, reward, throughput and a heartbeat, POSTed as JSON.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "base/clock.h"
#include "trainer/telemetry/step_log.h"

namespace trireme {

struct StatusOptions {
  std::string url;         // http(s)://host[:port]/path; what TRIREME_STATUS_URL holds
  std::string token_file;  // its content goes with every POST as a bearer token, read anew each time; empty: none
  std::string ca_file;     // authority of an https url; empty: the system's
  Milliseconds min_interval{1000};  // changes within it go out together
  Milliseconds heartbeat{10000};    // without a change the last state is sent so often, as long as beat() is called
  Milliseconds timeout{5000};       // of one POST
};

// Body: {"attempt": 1, "rendezvousDone": true, "progress": {"step": .., "maxSteps": .., "phase": .., "stepSeconds": ..,
// "phaseSeconds": {..}, "reward": .., "lastHeartbeatTime": ".."}}: what update() was given, merged, with the time of
// sending. Nothing here blocks or fails training: sending happens on a thread of its own, failures are logged once per
// outage and tried again.
class StatusReporter final {
 public:
  // Throws Error(kUser) for a url that is none.
  explicit StatusReporter(const StatusOptions& options);
  // Tries to send what is still unsent, for one timeout at most.
  ~StatusReporter();

  // Merges `patch` into the state (RFC 7386: null removes). Thread-safe.
  void update(const nlohmann::json& patch);
  // A sign of life of the training thread. Without one nothing is sent again: a hanging trainer falls silent.
  void beat();
  void update_phase(Phase phase) { update({{"progress", {{"phase", to_string(phase)}}}}); }
  void update_step(const StepRecord& record) { update({{"progress", progress_of(record)}}); }

  int64_t sent() const;
  int64_t failed() const;

  static nlohmann::json progress_of(const StepRecord& record);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
