#include "trainer/work/shared_desk.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace trireme {
namespace {

constexpr Milliseconds kLook{250};  // at deadlines of leases, and at what others changed

Deadline of_request(int64_t wait_ms) { return Deadline::after(Milliseconds(std::min(wait_ms, kMaxWireWait_ms))); }

}  // namespace

SharedDesk::Changed::~Changed() {
  desk_.tell_news();
  lock_.unlock();
  desk_.changed_.notify_all();
}

SharedDesk::SharedDesk(DeskOptions options, std::function<void(int64_t engine, const std::string& link)> serve)
    : serve_(std::move(serve)), desk_(std::move(options)) {}

// Under the lock, so that they stand in the order in which they happened.
void SharedDesk::tell_news() {
  for (const std::string& line : desk_.take_news()) log_info("engines", line);
}

JoinReply SharedDesk::join(const JoinRequest& request) {
  const Changed changed(*this);
  return desk_.join(request, SteadyClock::now());
}

// A wait is no sign of life: the time is that of the request.
LeaseReply SharedDesk::lease(const LeaseRequest& request, const std::function<bool()>& gone) {
  const Desk::Time now = SteadyClock::now();
  const Deadline deadline = of_request(request.wait_ms);
  LeaseReply reply;
  const auto waits = [&] {
    // While the training thread trains, those who ask for work look for what others had.
    if (desk_.expire(SteadyClock::now())) changed_.notify_all();
    reply = desk_.lease(request, now);
    return reply.known && !reply.over && reply.runs.empty() && !desk_.answers_now(request, reply) && !stopped_ &&
           !deadline.passed();
  };
  {
    const Changed changed(*this);  // who waits for engines with new weights hears of it
    if (!waits()) return reply;
  }
  std::unique_lock lock(mutex_);
  do {
    changed_.wait_for(lock, std::min(kLook, deadline.remaining()));
    if (gone()) return {};
  } while (waits());
  tell_news();
  return reply;
}

GroupsReply SharedDesk::take_groups(GroupsRequest request) {
  const Changed changed(*this);
  return desk_.take_groups(std::move(request), SteadyClock::now());
}

WeightsReply SharedDesk::weights(const WeightsRequest& request, const std::function<bool()>& gone) {
  const Desk::Time now = SteadyClock::now();
  const Deadline deadline = of_request(request.wait_ms);
  WeightsReply reply;
  {
    const Changed changed(*this);
    reply = desk_.weights(request, now);
  }
  std::unique_lock lock(mutex_);
  while (reply.known && !reply.over && reply.version < 0 && !stopped_ && !deadline.passed()) {
    changed_.wait_for(lock, std::min(kLook, deadline.remaining()));
    if (gone()) return {};
    reply = desk_.weights(request, now);
  }
  lock.unlock();
  if (reply.version >= 0) serve_(request.caller.engine, reply.link);
  return reply;
}

void SharedDesk::leave(const LeaveRequest& request) {
  const Changed changed(*this);
  desk_.leave(request, SteadyClock::now());
}

void SharedDesk::stop() {
  const Changed changed(*this);
  stopped_ = true;
}

bool SharedDesk::wait(const std::function<bool(Desk&)>& done, Milliseconds patience,
                      const std::function<void()>& on_wait) {
  std::unique_lock lock(mutex_);
  int64_t progress = desk_.progress();
  Deadline deadline = Deadline::after(patience);
  Deadline look = Deadline::after(kLook);
  while (true) {
    const bool expired = desk_.expire(SteadyClock::now());
    if (expired) {
      tell_news();
      changed_.notify_all();
    }
    if (done(desk_)) return true;
    if (desk_.progress() != progress) {
      progress = desk_.progress();
      deadline = Deadline::after(patience);
    }
    if (stopped_ || deadline.passed()) return false;
    if (look.passed()) {
      look = Deadline::after(kLook);
      if (on_wait) {
        lock.unlock();
        on_wait();
        lock.lock();
        continue;  // it may be done by now, of which nobody tells again
      }
    }
    changed_.wait_for(lock, kLook);
  }
}

}  // namespace trireme
