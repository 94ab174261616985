// SharedDesk: the desk behind a lock, for the server's threads and actor 0's training thread, with the waits of both.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>

#include "trainer/work/desk.h"

namespace trireme {

// Safe from any thread. Every wait has a deadline and ends at stop().
class SharedDesk final {
 public:
  // `serve` is called for every engine that is told of new weights, from the server's threads and without the lock.
  SharedDesk(DeskOptions options, std::function<void(int64_t engine, const std::string& link)> serve);

  // Of the server.
  JoinReply join(const JoinRequest& request);
  // Waits while nothing may begin. `gone`: whoever asked is not there any more, which would be given work in vain.
  LeaseReply lease(const LeaseRequest& request, const std::function<bool()>& gone);
  GroupsReply take_groups(GroupsRequest request);
  WeightsReply weights(const WeightsRequest& request, const std::function<bool()>& gone);  // waits for newer ones
  void leave(const LeaveRequest& request);
  // What still waits is answered, with what there is.
  void stop();

  // Calls `fn` with the desk; whoever waits looks again afterwards.
  template <typename Fn>
  auto with(Fn&& fn) {
    const Changed changed(*this);
    return fn(desk_);
  }

  // Waits until `done(desk)` holds; looks at leases meanwhile and calls `on_wait` about four times a second, without
  // the lock. False: nothing has come for `patience`, or stop() was called.
  bool wait(const std::function<bool(Desk&)>& done, Milliseconds patience, const std::function<void()>& on_wait);

 private:
  // The lock, whose end wakes all that wait.
  class Changed final {
   public:
    explicit Changed(SharedDesk& desk) : desk_(desk), lock_(desk.mutex_) {}
    ~Changed();

   private:
    SharedDesk& desk_;
    std::unique_lock<std::mutex> lock_;
  };
  void tell_news();

  const std::function<void(int64_t, const std::string&)> serve_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Desk desk_;
  bool stopped_ = false;
};

}  // namespace trireme
