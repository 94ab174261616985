#include "trainer/parallel/communicator.h"

#include <ATen/ATen.h>
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <thread>

#include "base/error.h"
#include "trainer/parallel/context.h"

namespace trireme {
namespace {

int free_loopback_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ::bind(fd, reinterpret_cast<sockaddr*>(&address), length);
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  ::close(fd);
  return ntohs(address.sin_port);
}

RendezvousOptions place(int rank, int world, int port, int timeout_ms) {
  RendezvousOptions r;
  r.rank = rank;
  r.world_size = world;
  r.master_port = port;
  r.timeout = Milliseconds(timeout_ms);
  return r;
}

// Runs body(rank) on a thread per rank; returns what each threw.
std::vector<std::string> on_ranks(int world, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(Communicator, Collectives) {
  constexpr int kWorld = 3;
  const int port = free_loopback_port();
  const auto errors = on_ranks(kWorld, [&](int rank) {
    const RendezvousOptions rendezvous = place(rank, kWorld, port, 300000);
    JobStore store(rendezvous);
    Communicator group(store, rendezvous, "test");
    at::Tensor sum = at::full({4}, static_cast<double>(rank + 1));
    group.all_reduce_sum(sum);
    EXPECT_EQ(sum[0].item<double>(), 6);
    EXPECT_EQ(group.all_reduce_max(static_cast<double>(rank)), 2);
    EXPECT_EQ(group.all_reduce_sum(int64_t{rank}), 3);
    at::Tensor gathered = at::empty({6});
    group.all_gather(gathered, at::full({2}, static_cast<double>(rank)));
    EXPECT_EQ(gathered[5].item<double>(), 2);
    at::Tensor part = at::empty({2});
    group.reduce_scatter_sum(part, at::arange(6, at::kFloat));
    EXPECT_EQ(part[1].item<double>(), 3.0 * (2 * rank + 1));
    at::Tensor root = at::full({1}, static_cast<double>(rank));
    group.broadcast(root, 1);
    EXPECT_EQ(root.item<double>(), 1);
    const auto texts =
        group.all_gather_bytes(std::string(static_cast<size_t>(rank) * 3, 'a' + static_cast<char>(rank)));
    EXPECT_EQ(texts, (std::vector<std::string>{"", "bbb", "cccccc"}));
    store.add("counter", 5);
    group.barrier();
    EXPECT_EQ(store.add("counter", 0), 15);
    group.barrier();  // rank 0 serves the store: it leaves last
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(Communicator, AloneEverythingIsTheIdentity) {
  Communicator alone;
  at::Tensor x = at::arange(4, at::kFloat);
  alone.all_reduce_sum(x);
  at::Tensor out = at::empty({4});
  alone.reduce_scatter_sum(out, x);
  EXPECT_TRUE(at::equal(out, x));
  EXPECT_EQ(alone.all_gather_bytes("x"), std::vector<std::string>{"x"});
}

TEST(Communicator, AMissingRankIsAnErrorThatSaysWho) {
  const int port = free_loopback_port();
  try {
    JobStore store(place(0, 2, port, 1500));
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
    EXPECT_NE(text.find("of 2 ranks"), std::string::npos) << text;
  }
}

TEST(Communicator, APeerThatStaysAwayIsNamedByOperationAndPhase) {
  const int port = free_loopback_port();
  const auto errors = on_ranks(2, [&](int rank) {
    const RendezvousOptions rendezvous = place(rank, 2, port, 3000);
    JobStore store(rendezvous);
    Communicator group(store, rendezvous, "dp");
    group.set_phase("training");
    if (rank == 0) {
      at::Tensor x = at::ones({4});
      group.all_reduce_sum(x);
    } else {
      std::this_thread::sleep_for(std::chrono::seconds(5));
    }
  });
  EXPECT_NE(errors[0].find("all-reduce number 2 of group 'dp' (2 ranks) in phase training"), std::string::npos)
      << errors[0];
}

TEST(ParallelContext, RefusesSplitsItCannotDo) {
  Layout layout;
  layout.tp = 2;
  try {
    ParallelContext context(layout, place(0, 2, 0, 1000));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("tensor parallel size 2 is not supported"), std::string::npos);
  }
  layout = {};
  layout.dp = 3;
  EXPECT_THROW(ParallelContext(layout, place(0, 2, 0, 1000)), Error);
}

}  // namespace
}  // namespace trireme
