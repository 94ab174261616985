#include "trainer/parallel/communicator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "base/error.h"
#include "base/sigpipe.h"
#include "tests/unit/parallel/listening.h"
#include "trainer/parallel/context.h"

namespace trireme {
namespace {

// Runs body(rank) on a thread per rank; returns what each threw.
std::vector<std::string> on_ranks(int world, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(world));
  ignore_sigpipe();  // as cli_main does: Gloo writes to connections whose other end may have gone
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
  ListeningPort port;
  const auto errors = on_ranks(kWorld, [&](int rank) {
    const RendezvousOptions rendezvous = port.place(rank, kWorld, Milliseconds(250000));
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
  ListeningPort port;
  try {
    JobStore store(port.place(0, 2, Milliseconds(1500)));
    FAIL();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
    EXPECT_NE(text.find("of 2 ranks"), std::string::npos) << text;
  }
}

TEST(Communicator, APeerThatStaysAwayIsNamedByOperationAndPhase) {
  constexpr int kWorld = 3;
  ListeningPort port;
  std::atomic<int> gave_up{0}, reported{-1}, stuck{0};
  const auto errors = on_ranks(kWorld, [&](int rank) {
    RendezvousOptions rendezvous = port.place(rank, kWorld, Milliseconds(250000));
    JobStore store(rendezvous);
    rendezvous.timeout = Milliseconds(30000);
    rendezvous.stuck_grace = Milliseconds(100);
    rendezvous.on_stuck = [&, rank](const std::string& what) {
      EXPECT_EQ(rank, 1);
      EXPECT_NE(what.find("rank 1 is stuck"), std::string::npos) << what;
      EXPECT_NE(what.find("in phase generation"), std::string::npos) << what;
      ++stuck;
    };
    Communicator group(store, rendezvous, "dp");
    group.on_absent = [&, rank](const std::vector<int>& ranks) {
      if (rank == 0) reported = ranks.size() == 1 ? ranks.front() : -2;
    };
    group.set_phase(rank == 1 ? "generation" : "training");
    group.barrier();
    if (rank == 1) {  // comes late: when the others have gone and its absence was noticed
      const Deadline limit = Deadline::after(Milliseconds(200000));
      while ((gave_up < 2 || stuck == 0) && !limit.passed()) std::this_thread::sleep_for(Milliseconds(10));
      return;
    }
    std::string error;
    try {
      at::Tensor x = at::ones({4});
      group.all_reduce_sum(x);
    } catch (const std::exception& e) {
      error = e.what();
    }
    ++gave_up;
    // Rank 0 serves the store: it leaves last.
    const Deadline limit = Deadline::after(Milliseconds(200000));
    while ((gave_up < 2 || stuck == 0) && !limit.passed()) std::this_thread::sleep_for(Milliseconds(10));
    throw std::runtime_error(error);
  });
  for (const int rank : {0, 2}) {
    const std::string& error = errors[static_cast<size_t>(rank)];
    EXPECT_NE(error.find("all-reduce number 3 of group 'dp' (3 ranks) in phase training"), std::string::npos) << error;
    EXPECT_NE(error.find("rank 1 has not come (last seen at number 2, phase generation)"), std::string::npos) << error;
  }
  EXPECT_EQ(errors[1], "");
  EXPECT_EQ(reported, 1);
  EXPECT_EQ(stuck, 1);
}

TEST(Communicator, ARankThatDiesIsNamedByAllOthersLongBeforeTheirDeadline) {
  constexpr int kWorld = 3;
  for (const int victim : {0, 1}) {
    ListeningPort port;
    const auto errors = on_ranks(kWorld, [&](int rank) {
      const RendezvousOptions rendezvous = port.place(rank, kWorld, Milliseconds(250000));
      JobStore store(rendezvous);
      Communicator group(store, rendezvous, "dp");
      group.set_phase("training");
      group.barrier();
      if (rank == victim) throw std::runtime_error("gone");  // nobody was told: as if its process had ended
      at::Tensor x = at::ones({4});
      while (true) group.all_reduce_sum(x);
    });
    for (int rank = 0; rank < kWorld; ++rank) {
      const std::string& error = errors[static_cast<size_t>(rank)];
      if (rank == victim) continue;
      EXPECT_NE(error.find("of group 'dp' (3 ranks) in phase training failed: "), std::string::npos) << error;
      EXPECT_NE(error.find("; rank " + std::to_string(victim) + " has died"), std::string::npos) << error;
      EXPECT_EQ(error.find("rank " + std::to_string(3 - rank - victim) + " has died"), std::string::npos) << error;
    }
  }
}

TEST(JobStore, ACallAfterRank0HasGoneNamesPhaseAndCause) {
  ListeningPort port;
  const auto errors = on_ranks(2, [&](int rank) {
    const RendezvousOptions rendezvous = port.place(rank, 2, Milliseconds(250000));
    JobStore store(rendezvous);
    Communicator group(store, rendezvous, "dp");
    group.set_phase("generation");
    group.barrier();
    if (rank == 0) throw std::runtime_error("gone");
    while (true) store.add("counter", 1);
  });
  EXPECT_NE(errors[1].find("store add of 'counter' in phase generation failed: "), std::string::npos) << errors[1];
  EXPECT_NE(errors[1].find("; rank 0 has died: its connection was closed without a word"), std::string::npos)
      << errors[1];
}

TEST(ParallelContext, RefusesSplitsItCannotDo) {
  RendezvousOptions two_ranks;
  two_ranks.world_size = 2;
  Layout layout;
  layout.tp = 2;
  try {
    ParallelContext context(layout, two_ranks);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("tp 2 (tensor parallel) is not supported"), std::string::npos);
  }
  layout = {};
  layout.dp = 3;
  EXPECT_THROW(ParallelContext(layout, two_ranks), Error);
}

}  // namespace
}  // namespace trireme
