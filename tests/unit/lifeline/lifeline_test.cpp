#include "trainer/parallel/lifeline.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <thread>

#include "base/error.h"
#include "base/text.h"

namespace trireme {
namespace {

constexpr Milliseconds kLong{250000};

bool comes(const std::function<bool()>& what) {
  const Deadline limit = Deadline::after(Milliseconds(200000));
  while (!what() && !limit.passed()) std::this_thread::sleep_for(Milliseconds(5));
  return what();
}

class Launcher {
 public:
  Launcher() {
    if (::pipe(ends_) != 0) throw std::runtime_error("no pipe");
  }
  ~Launcher() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  int fd() const { return ends_[0]; }
  void says(const std::string& text) const {
    EXPECT_EQ(::write(ends_[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }

 private:
  int ends_[2];
};

// Ranks in one process. One that dies is destroyed by an exception that nobody was told of: the others see what the
// kernel does at the end of a process.
class Gang {
 public:
  explicit Gang(int world) : launchers(static_cast<size_t>(world)), left_(launchers.size()), ranks_(launchers.size()) {}

  Lifeline& start(int rank) {
    LifelineOptions options;
    options.rank = rank;
    options.world_size = static_cast<int>(ranks_.size());
    options.launcher_fd = launchers[at(rank)].fd();
    options.settle = settle;
    options.patience = Milliseconds(100);
    options.leaving_patience = leaving_patience;
    options.on_death = [this, rank](const std::string& what) {
      const std::lock_guard<std::mutex> lock(mutex_);
      left_[at(rank)].push_back(what);
    };
    ranks_[at(rank)] = std::make_unique<Lifeline>(options);
    return *ranks_[at(rank)];
  }
  void start_and_join(int rank) {
    Lifeline& lifeline = start(rank);
    if (rank == 0)
      ticket = lifeline.open();
    else
      lifeline.join("127.0.0.1", ticket, Deadline::after(kLong));
  }
  void start_all() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) start_and_join(static_cast<int>(rank));
    for (auto& rank : ranks_) rank->wait_for_all(Deadline::after(kLong));
  }
  void end(int rank) { ranks_[at(rank)].reset(); }
  void die(int rank) {
    try {
      const std::unique_ptr<Lifeline> doomed = std::move(ranks_[at(rank)]);
      throw 0;
    } catch (int) {
    }
  }
  Lifeline& operator[](int rank) { return *ranks_[at(rank)]; }
  // What its on_death was told; empty: nothing.
  std::string left(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_LE(left_[at(rank)].size(), 1u);
    return left_[at(rank)].empty() ? "" : left_[at(rank)].front();
  }
  // The same sentence on all of them, which is returned.
  std::string told(const std::vector<int>& ranks) {
    std::string first;
    for (const int rank : ranks) {
      const auto dead = (*this)[rank].wait_for_dead(kLong);
      if (rank == ranks.front()) first = dead.value_or("nothing");
      EXPECT_EQ(dead.value_or("nothing"), first) << "rank " << rank;
    }
    return first;
  }

  std::vector<Launcher> launchers;
  std::string ticket;
  Milliseconds settle{300}, leaving_patience{250000};

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }
  std::mutex mutex_;
  std::vector<std::vector<std::string>> left_;
  std::vector<std::unique_ptr<Lifeline>> ranks_;  // end before what their threads use
};

// A process that speaks to rank 0 as it likes.
class Stranger {
 public:
  explicit Stranger(const std::string& ticket) : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(parse_int(ticket.substr(0, ticket.find(' '))).value()));
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  ~Stranger() { ::close(fd_); }
  void says(const std::string& text) const { (void)::send(fd_, text.data(), text.size(), MSG_NOSIGNAL); }
  bool is_hung_up_on() const {
    char byte;
    const timeval limit{200, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    const ssize_t got = ::recv(fd_, &byte, 1, 0);
    return got == 0 || (got < 0 && errno == ECONNRESET);
  }

 private:
  int fd_;
};

TEST(Lifeline, EndsInAnyOrderAreNoDeaths) {
  for (const std::vector<int>& order : {std::vector<int>{1, 0, 2}, {2, 1, 0}, {0, 1, 2}}) {
    Gang gang(3);
    gang.settle = Milliseconds(100);
    gang.start_all();
    for (const int rank : order) {
      gang.end(rank);
      std::this_thread::sleep_for(3 * gang.settle);
      for (int other = 0; other < 3; ++other) EXPECT_EQ(gang.left(other), "");
    }
  }
}

TEST(Lifeline, ADeathIsToldToAllWithItsPhaseAndTheyLeave) {
  Gang gang(4);
  gang.start_all();
  for (int rank = 0; rank < 4; ++rank) gang[rank].set_phase(rank == 1 ? "training" : "generation");
  gang.die(1);
  EXPECT_EQ(gang.told({0, 2, 3}), "rank 1 has died in phase training: its connection was closed without a word");
  for (const int rank : {0, 2, 3}) {
    ASSERT_TRUE(comes([&] { return !gang.left(rank).empty(); }));
    EXPECT_EQ(gang.left(rank), "rank " + std::to_string(rank) +
                                   " leaves in phase generation: rank 1 has died in phase training: its connection was "
                                   "closed without a word");
  }
}

TEST(Lifeline, TheLauncherSaysHowWhetherItComesBeforeTheConnectionsEndOrAfter) {
  for (const bool before : {true, false}) {
    Gang gang(3);
    gang.settle = Milliseconds(2000);
    gang.start_all();
    gang[1].set_phase("training");
    if (!before) gang.die(1);
    gang.launchers[2].says("died 1 signal 9 (Killed)\n");
    if (before) gang.die(1);
    EXPECT_EQ(gang.told({0, 2}), "rank 1 has died in phase training: signal 9 (Killed)");
  }
}

TEST(Lifeline, TheDeathOfRank0IsSeenByEachRank) {
  Gang gang(3);
  gang.start_all();
  gang.launchers[1].says("died 0 signal 11 (Segmentation fault)\n");  // rank 2 is on another machine
  gang.die(0);
  EXPECT_EQ(gang.told({1}), "rank 0 has died: signal 11 (Segmentation fault)");
  EXPECT_EQ(gang.told({2}), "rank 0 has died: its connection was closed without a word");
  EXPECT_TRUE(gang[2].rank0_is_gone());
  ASSERT_TRUE(comes([&] { return !gang.left(1).empty() && !gang.left(2).empty(); }));
}

TEST(Lifeline, TwoDeathsAtOnceAreBothNamed) {
  Gang gang(4);
  gang.settle = Milliseconds(3000);
  gang.start_all();
  gang.launchers[0].says("died 3 signal 9 (Killed)\ndied 1 signal 9 (Killed)\n");
  gang.die(3);
  gang.die(1);
  EXPECT_EQ(gang.told({0, 2}),
            "rank 1 has died in phase start: signal 9 (Killed); rank 3 has died in phase start: signal 9 (Killed)");
}

TEST(Lifeline, Rank0AndAnotherAtOnce) {
  Gang gang(3);
  gang.settle = Milliseconds(3000);
  gang.start_all();
  gang.die(1);
  gang.die(0);
  EXPECT_EQ(gang.told({2}).find("rank 0 has died: its connection was closed"), 0u);
}

// Whoever waits in the rendezvous hears of it, and of whom, not of its deadline.
void expect_end_of_rendezvous(Gang& gang, int rank, ErrorKind kind, const std::string& text, Milliseconds limit) {
  try {
    gang[rank].wait_for_all(Deadline::after(limit));
    ADD_FAILURE() << "rank " << rank << " waited in vain";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_EQ(std::string(error.what()), text) << "rank " << rank;
  }
}

TEST(Lifeline, ADeathBeforeAllHaveComeEndsTheRendezvous) {
  Gang gang(4);
  for (const int rank : {0, 1, 2}) gang.start_and_join(rank);  // rank 3 has not come
  gang.die(1);
  const std::string text = "rank 1 has died in phase start: its connection was closed without a word";
  expect_end_of_rendezvous(gang, 0, ErrorKind::kUnavailable, text, kLong);
  expect_end_of_rendezvous(gang, 2, ErrorKind::kUnavailable, text, kLong);
  gang.start_and_join(3);  // who comes later hears of it as well
  expect_end_of_rendezvous(gang, 3, ErrorKind::kUnavailable, text, kLong);
}

TEST(Lifeline, ADeathBeforeItJoinedIsKnownFromTheLauncher) {
  Gang gang(3);
  for (const int rank : {0, 2}) gang.start_and_join(rank);
  gang.launchers[2].says("died 1 exit code 10\n");
  const std::string text = "rank 1 has died: exit code 10";
  expect_end_of_rendezvous(gang, 0, ErrorKind::kUnavailable, text, kLong);
  expect_end_of_rendezvous(gang, 2, ErrorKind::kUnavailable, text, kLong);
  // Rank 0 has not even opened: its launcher's word is all there is.
  Gang early(2);
  early.start(1);
  early.launchers[1].says("died 0 signal 9 (Killed)\n");
  EXPECT_EQ(early.told({1}), "rank 0 has died: signal 9 (Killed)");
  ASSERT_TRUE(comes([&] { return !early.left(1).empty(); }));
  EXPECT_EQ(early.left(1), "rank 1 leaves in phase start: rank 0 has died: signal 9 (Killed)");
}

TEST(Lifeline, WhoDoesNotComeIsNamedAtTheDeadline) {
  Gang gang(4);
  for (const int rank : {0, 2}) gang.start_and_join(rank);
  const std::string text = "ranks 1, 3 have not come in time";
  expect_end_of_rendezvous(gang, 0, ErrorKind::kTimeout, text, Milliseconds(200));
  expect_end_of_rendezvous(gang, 2, ErrorKind::kUnavailable, text, kLong);
}

TEST(Lifeline, NobodyThereIsAnErrorThatSaysWhere) {
  std::string ticket;
  {
    Gang gone(2);
    gone.start_and_join(0);
    ticket = gone.ticket;
  }
  Gang gang(2);
  try {
    gang.start(1).join("127.0.0.1", ticket, Deadline::after(Milliseconds(300)));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
    EXPECT_EQ(std::string(error.what()).find("rank 0 cannot be reached at 127.0.0.1 port "), 0u) << error.what();
  }
}

TEST(Lifeline, StrangersAreHungUpOnAndAreNobodysDeath) {
  Gang gang(3);
  gang.start_and_join(0);
  const std::string secret = gang.ticket.substr(gang.ticket.find(' ') + 1);
  for (const std::string& text :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string("join wrong 1\n"), "join " + secret + " 0\n",
        "join " + secret + " 3\n", "join " + secret + " -1\n", std::string("died 1 x\n"), std::string("bye\n")}) {
    Stranger stranger(gang.ticket);
    stranger.says(text);
    EXPECT_TRUE(stranger.is_hung_up_on()) << text;
  }
  const Stranger silent(gang.ticket);
  Stranger endless(gang.ticket);
  endless.says(std::string(100000, 'x'));
  gang.start_and_join(1);
  Stranger second(gang.ticket);  // the place is taken
  second.says("join " + secret + " 1\n");
  EXPECT_TRUE(second.is_hung_up_on());
  gang.start_and_join(2);
  for (int rank = 0; rank < 3; ++rank) gang[rank].wait_for_all(Deadline::after(kLong));
  std::this_thread::sleep_for(3 * gang.settle);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(gang[rank].dead(), std::nullopt);
}

TEST(Lifeline, ARankThatLeavesWithAnErrorThatIsKnownHasNotDied) {
  Gang gang(3);
  gang.start_all();
  gang[2].leaving();
  gang.die(2);  // unwinding, but it had been said
  gang[1].goodbye();
  gang.die(1);
  std::this_thread::sleep_for(4 * gang.settle);
  EXPECT_EQ(gang[0].dead(), std::nullopt);
}

TEST(Lifeline, WhoIsLeavingIsGivenTheTimeToSayWhyItself) {
  Gang gang(3);
  gang.start_all();
  gang[0].leaving();
  gang[2].explain("rank 1 on host: a number was not finite");
  gang.launchers[0].says("died 1 exit code 21\n");
  ASSERT_TRUE(comes([&] { return !gang.left(2).empty(); }));
  EXPECT_EQ(gang.left(2),
            "rank 2 leaves in phase start: rank 1 on host: a number was not finite; rank 1 has died: exit "
            "code 21");
  std::this_thread::sleep_for(3 * gang.settle);
  EXPECT_EQ(gang.left(0), "");
}

TEST(Lifeline, MessagesAreReadOrAreNone) {
  using Kind = LifelineMessage::Kind;
  const LifelineMessage died = parse_lifeline_message("died 12 signal 9 (Killed)");
  EXPECT_EQ(died.kind, Kind::kDied);
  EXPECT_EQ(died.rank, 12);
  EXPECT_EQ(died.text, "signal 9 (Killed)");
  EXPECT_EQ(died_message(12, "signal 9\n(Killed)"), "died 12 signal 9 (Killed)\n");
  EXPECT_EQ(parse_lifeline_message("join abc 3").rank, 3);
  EXPECT_EQ(parse_lifeline_message("phase log probs").text, "log probs");
  for (const char* none : {"", " ", "died", "died x y", "died -1 x", "died 99999999999 x", "join abc", "join abc x",
                           "join  3 3", "al", "byee", "DEAD x"}) {
    EXPECT_EQ(parse_lifeline_message(none).kind, Kind::kUnknown) << none;
  }
}

}  // namespace
}  // namespace trireme
