// WorkClient: an engine's requests to the work server. One thread each.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "base/clock.h"
#include "trainer/work/wire.h"

namespace trireme {

struct WorkClientOptions {
  std::string url;  // http://host:port
  std::string ticket;
  // How long a request is tried again where nobody answers: then the actor has gone.
  Milliseconds patience{10000};
  // Of an answer, besides what a request itself waits for.
  Milliseconds answer{60000};
};

// All throw Error(kUnavailable) when the actor has gone or a stop was asked for, Error(kConflict) when another one is
// in its place, Error(kUser) with the actor's words when the engine may not join, Error(kData) for an answer that is
// none.
class WorkClient final {
 public:
  // `stop`, when not null, ends what waits soon after it is set.
  WorkClient(const WorkClientOptions& options, const std::atomic<bool>* stop);
  ~WorkClient();
  WorkClient(const WorkClient&) = delete;
  WorkClient& operator=(const WorkClient&) = delete;

  JoinReply join(const JoinRequest& request);
  LeaseReply lease(const LeaseRequest& request);
  GroupsReply send_groups(const GroupsRequest& request);
  WeightsReply weights(const WeightsRequest& request);
  // Once, and whatever comes of it.
  void leave(const LeaveRequest& request) noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
