// A store whose machine or process stands still: nobody who asks it waits for ever.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "tests/unit/errors.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/parallel/attendance.h"
#include "trainer/parallel/bounded_calls.h"
#include "trainer/parallel/link_pair.h"
#include "trainer/parallel/sockets.h"

namespace trireme {
namespace {

using test::error_of;

// Passes on what comes to its port and what is answered, until it is frozen: its kernel still answers then.
class Relay final {
 public:
  explicit Relay(int target) : target_(target), listener_(listen_anywhere(port_, "a test")) {
    thread_ = std::thread([this] { run(); });
  }
  ~Relay() {
    stopping_ = true;
    thread_.join();
    for (const pollfd& end : ends_) ::close(end.fd);
  }
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;
  int port() const { return port_; }
  void freeze() { frozen_ = true; }

 private:
  void run() {
    ends_.push_back({listener_, POLLIN, 0});  // then pairs: who came, and the target
    while (!stopping_) {
      if (::poll(ends_.data(), ends_.size(), 20) <= 0) continue;
      if (frozen_) {
        std::this_thread::sleep_for(Milliseconds(20));
        continue;
      }
      for (size_t i = 1; i < ends_.size(); ++i) {
        if (ends_[i].revents != 0) pass_on(ends_[i], ends_[i % 2 == 1 ? i + 1 : i - 1]);
      }
      if ((ends_.front().revents & POLLIN) != 0) accept_one();
    }
  }
  void accept_one() {
    const int fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    std::string why;
    const int other = connect_to("127.0.0.1", std::to_string(target_), Deadline::after(Milliseconds(60000)), why);
    ends_.push_back({fd, POLLIN, 0});
    ends_.push_back({other, POLLIN, 0});  // -1, which poll passes over, where there is none
    if (other < 0) ::shutdown(fd, SHUT_RDWR);
  }
  static void pass_on(pollfd& from, pollfd& to) {
    char bytes[4096];
    const ssize_t size = ::recv(from.fd, bytes, sizeof bytes, 0);
    if (size <= 0) {
      ::shutdown(to.fd, SHUT_RDWR);
      from.events = 0;
      ::close(std::exchange(from.fd, -1));
      return;
    }
    for (ssize_t done = 0; done < size;) {
      const ssize_t sent = ::send(to.fd, bytes + done, static_cast<size_t>(size - done), MSG_NOSIGNAL);
      if (sent < 0 && errno != EAGAIN) return;
      done += std::max<ssize_t>(sent, 0);
    }
  }

  const int target_;
  uint16_t port_ = 0;
  const int listener_;
  std::atomic<bool> frozen_{false}, stopping_{false};
  std::vector<pollfd> ends_;  // the thread's own
  std::thread thread_;
};

TEST(BoundedCalls, ReturnAndThrowWhatTheCallDoes) {
  BoundedCalls calls(Milliseconds(60000));
  EXPECT_EQ(calls.call([] { return 7; }), 7);
  EXPECT_MENTIONS(error_of([&] { calls.call([] { fail_io("no disk"); }); }), "no disk");
  std::atomic<int> at_once{0}, most{0}, sum{0};
  std::vector<std::thread> threads;
  for (int i = 1; i <= 4; ++i) {
    threads.emplace_back([&, i] {
      for (int turn = 0; turn < 50; ++turn) {
        calls.call([&, i] {
          most = std::max(most.load(), ++at_once);
          sum += i;
          --at_once;
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(sum, 500);
  EXPECT_EQ(most, 1) << "one at a time";
  EXPECT_FALSE(calls.lost());
}

TEST(BoundedCalls, OneThatDoesNotReturnIsLeftBehind) {
  struct Gate {
    std::atomic<bool> entered{false}, open{false}, passed{false};
  };
  const auto gate = std::make_shared<Gate>();
  {
    BoundedCalls calls(Milliseconds(1000));
    const auto stuck = [gate] {
      gate->entered = true;
      while (!gate->open) std::this_thread::sleep_for(Milliseconds(5));
      gate->passed = true;
    };
    std::thread behind([&] {
      while (!gate->entered && !calls.lost()) std::this_thread::sleep_for(Milliseconds(5));
      EXPECT_MENTIONS(error_of([&] { calls.call([] {}); }), "no answer within 1 s");
    });
    EXPECT_MENTIONS(error_of([&] { calls.call(stuck); }), "no answer within 1 s");
    behind.join();
    EXPECT_TRUE(calls.lost());
    std::atomic<bool> called{false};
    EXPECT_MENTIONS(error_of([&] { calls.call([&] { called = true; }); }), "no answer");
    EXPECT_FALSE(called);
  }
  EXPECT_FALSE(gate->passed) << "nobody has waited for it";
  gate->open = true;
  const Deadline limit = Deadline::after(Milliseconds(60000));
  while (!gate->passed && !limit.passed()) std::this_thread::sleep_for(Milliseconds(5));
  EXPECT_TRUE(gate->passed);
}

TEST(SilentStore, OneThatNeverAnswersEndsTheRendezvous) {
  ListeningPort port;  // whose kernel takes connections, and nobody reads them
  const RendezvousOptions place = port.place(1, 2, Milliseconds(1500));
  EXPECT_MENTIONS(error_of([&] { const JobStore store(place); }), "rendezvous at 127.0.0.1");
  EXPECT_MENTIONS(error_of([&] { const LinkStore store("127.0.0.1", place.master_port, "0", Milliseconds(1000)); }),
                  "cannot be reached");
}

// Rank 0's connection for who has died goes on, as that of a process that is stopped does.
TEST(SilentStore, ACollectiveThatRankZeroDoesNotComeToEndsAndSaysSo) {
  ListeningPort port;
  std::atomic<bool> left{false};
  std::unique_ptr<Relay> relay;
  const RendezvousOptions serves = port.place(0, 2, Milliseconds(250000));
  relay = std::make_unique<Relay>(serves.master_port);
  const auto errors = test::on_ranks(2, [&](int rank) {
    RendezvousOptions place = serves;
    if (rank == 1) {
      place.rank = 1;
      place.listen_fd = -1;
      place.master_port = relay->port();
      place.timeout = Milliseconds(4000);
    }
    JobStore store(place);
    Attendance attendance(store, place);
    Communicator group(store, place, attendance, {"dp", {0, 1}});
    group.barrier();
    if (rank == 0) {
      const Deadline limit = Deadline::after(Milliseconds(200000));
      while (!left && !limit.passed()) std::this_thread::sleep_for(Milliseconds(10));
      return;
    }
    relay->freeze();
    const std::string error = error_of([&] { group.barrier(); });
    EXPECT_MENTIONS(error, "barrier number 3 of group 'dp'");
    EXPECT_MENTIONS(error, "; rank 0, which keeps the store, stands still or cannot be reached");
    EXPECT_TRUE(store.silent());
    const Stopwatch watch;
    EXPECT_MENTIONS(error_of([&] { (void)store.add("a", 1); }), "store add of 'a' in phase start failed: no answer");
    EXPECT_LT(watch.seconds(), 2) << "at once, without a wait for the word of a death";
    left = true;
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(SilentStore, ALinkEndsTheWaitForItsAnswer) {
  ListeningPort port;
  RendezvousOptions serves = port.place(0, 2, Milliseconds(60000));
  serves.world_size = 1;
  JobStore store(serves);
  Relay relay(serves.master_port);
  LinkStore link("127.0.0.1", relay.port(), serves.attempt, Milliseconds(1000));
  link.set("key", "value");
  EXPECT_EQ(link.poll("key", Milliseconds(60000)), "value");
  relay.freeze();
  const std::string text = error_of([&] { (void)link.poll("other", Milliseconds(0)); });
  EXPECT_MENTIONS(text, "get of 'other' failed: no answer");
  EXPECT_MENTIONS(error_of([&] { (void)link.add("count", 1); }), "the job's store at 127.0.0.1");
}

}  // namespace
}  // namespace trireme
