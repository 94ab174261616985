#include "trainer/parallel/communicator.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/host.h"
#include "base/sigpipe.h"
#include "tests/unit/parallel/listening.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/parallel/attendance.h"
#include "trainer/parallel/context.h"

namespace trireme {
namespace {

using test::on_ranks;

RankGroup everybody(int world) {
  RankGroup group{"dp", {}};
  for (int rank = 0; rank < world; ++rank) group.ranks.push_back(rank);
  return group;
}

TEST(Communicator, Collectives) {
  constexpr int kWorld = 3;
  ListeningPort port;
  const auto errors = on_ranks(kWorld, [&](int rank) {
    const RendezvousOptions rendezvous = port.place(rank, kWorld, Milliseconds(250000));
    JobStore store(rendezvous);
    Attendance attendance(store, rendezvous);
    Communicator group(store, rendezvous, attendance, everybody(kWorld));
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

// A group that waits for a rank to come to it holds up nobody else who asks the store.
TEST(Communicator, TheStoreAnswersWhileAGroupConnects) {
  ListeningPort port;
  const auto errors = on_ranks(2, [&](int rank) {
    const RendezvousOptions rendezvous = port.place(rank, 2, Milliseconds(20000));
    JobStore store(rendezvous);
    Attendance attendance(store, rendezvous);
    if (rank == 1) {
      // Rank 0's Attendance tells where it waits, from within its wait.
      const Deadline limit = Deadline::after(Milliseconds(10000));
      const auto waits = [&] {
        return store.has("attendance-0") && store.get("attendance-0").find("1 dp ") != std::string::npos;
      };
      while (!waits() && !limit.passed()) std::this_thread::sleep_for(Milliseconds(10));
      EXPECT_TRUE(waits());
      std::this_thread::sleep_for(Milliseconds(200));  // its wait for this rank's keys has begun
      store.set("asked", "");
    }
    std::thread asks;
    std::atomic<bool> answered{false};
    if (rank == 0) {
      asks = std::thread([&] {
        const Deadline limit = Deadline::after(Milliseconds(15000));
        while (!store.has("asked") && !limit.passed()) std::this_thread::sleep_for(Milliseconds(10));
        store.set("answered", "");
        answered = true;
      });
    } else {
      const Deadline limit = Deadline::after(Milliseconds(10000));
      while (!store.has("answered") && !limit.passed()) std::this_thread::sleep_for(Milliseconds(10));
      EXPECT_TRUE(store.has("answered")) << "while rank 0 waits for this rank";
    }
    Communicator group(store, rendezvous, attendance, everybody(2));
    if (asks.joinable()) asks.join();
    EXPECT_EQ(answered, rank == 0);
    group.barrier();  // rank 0 serves the store: it leaves last
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
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
    Attendance attendance(store, rendezvous);
    Communicator group(store, rendezvous, attendance, everybody(kWorld));
    attendance.set_on_absent([&, rank](const std::vector<int>& ranks) {
      if (rank == 0) reported = ranks.size() == 1 ? ranks.front() : -2;
    });
    attendance.set_phase(rank == 1 ? "generation" : "training");
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
    EXPECT_NE(error.find("rank 1 on " + host_name() + " has not come (last seen at number 2, phase generation)"),
              std::string::npos)
        << error;
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
      Attendance attendance(store, rendezvous);
      Communicator group(store, rendezvous, attendance, everybody(kWorld));
      attendance.set_phase("training");
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
    Attendance attendance(store, rendezvous);
    Communicator group(store, rendezvous, attendance, everybody(2));
    attendance.set_phase("generation");
    group.barrier();
    if (rank == 0) throw std::runtime_error("gone");
    while (true) store.add("counter", 1);
  });
  EXPECT_NE(errors[1].find("store add of 'counter' in phase generation failed: "), std::string::npos) << errors[1];
  EXPECT_NE(errors[1].find("; rank 0 has died: its connection was closed without a word"), std::string::npos)
      << errors[1];
}

TEST(Communicator, AllToAllMovesPartsOfAnySizeAndDtype) {
  constexpr int kWorld = 3;
  ListeningPort port;
  const auto errors = on_ranks(kWorld, [&](int rank) {
    Layout layout;
    layout.dp = kWorld;
    ParallelContext context(layout, port.place(rank, kWorld, Milliseconds(250000)));
    Communicator& group = context.data_parallel();
    for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble, at::kLong}) {
      // Rank r sends (r + to) rows of 2 to each: none from 0 to 0.
      std::vector<int64_t> to(kWorld), from(kWorld);
      std::vector<at::Tensor> parts;
      for (int other = 0; other < kWorld; ++other) {
        to[other] = from[other] = rank + other;
        parts.push_back(at::full({rank + other, 2}, 10 * rank + other).to(dtype));
      }
      const at::Tensor in = at::cat(parts);
      at::Tensor out = at::empty({3 * rank + 3, 2}, in.options());
      group.all_to_all(out, in, from, to);
      int64_t row = 0;
      for (int other = 0; other < kWorld; ++other) {
        for (int64_t i = 0; i < from[other]; ++i, ++row) {
          EXPECT_EQ(out[row][1].to(at::kDouble).item<double>(), 10 * other + rank);
        }
      }
    }
    context.world().barrier();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(ParallelContext, EveryRankIsInItsGroupOfEveryAxis) {
  Layout layout;
  layout.tp = 2;
  layout.dp = 2;
  layout.pp = 2;
  const auto world = static_cast<int>(layout.world());
  ListeningPort port;
  const auto errors = on_ranks(world, [&](int rank) {
    ParallelContext context(layout, port.place(rank, world, Milliseconds(250000)));
    EXPECT_EQ(context.world().size(), world);
    for (const Axis axis : {Axis::kTp, Axis::kCp, Axis::kPp, Axis::kDp, Axis::kDpCp}) {
      const std::vector<int64_t> members = group_of(layout, axis, rank);
      Communicator& group = context.group(axis);
      ASSERT_EQ(group.size(), static_cast<int>(members.size()));
      EXPECT_EQ(members[static_cast<size_t>(group.rank())], rank);
      int64_t expected = 0;
      for (const int64_t member : members) expected += 1 << member;
      EXPECT_EQ(group.all_reduce_sum(int64_t{1} << rank), group.size() == 1 ? int64_t{1} << rank : expected);
    }
    context.world().barrier();
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

// Rank 3 stands still. Rank 2 waits for it in its tensor group; rank 1 waits for it too, in the data group; and rank 0
// waits for rank 1 or 2. All name rank 3, and only rank 3 is told that it is stuck.
TEST(ParallelContext, TheCauseIsNamedAcrossGroups) {
  Layout layout;
  layout.tp = 2;
  layout.dp = 2;
  ListeningPort port;
  test::StandStill still(3);
  std::atomic<int> reported{-1};
  const auto errors = on_ranks(4, [&](int rank) {
    RendezvousOptions rendezvous = port.place(rank, 4, Milliseconds(20000));
    still.watch(rendezvous);
    ParallelContext context(layout, rendezvous);
    context.set_on_absent([&, rank](const std::vector<int>& ranks) {
      if (rank == 0) reported = ranks.size() == 1 ? ranks.front() : -2;
    });
    context.set_phase("training");
    context.world().barrier();
    if (rank == 3) {
      context.set_phase("generation");
      return still.stand();
    }
    still.fail([&] {
      // tp groups {0, 1}, {2, 3}; dp groups {0, 2}, {1, 3}.
      if (rank == 1) context.group(Axis::kDp).all_reduce_sum(1.0);
      context.tensor_parallel().all_reduce_sum(1.0);
    });
  });
  EXPECT_EQ(still.told(), 3);
  EXPECT_EQ(reported, 3);
  for (const int rank : {0, 1, 2}) {
    const std::string& error = errors[static_cast<size_t>(rank)];
    EXPECT_NE(error.find("rank 3 (tp 1, dp 1) on " + host_name() + " has not come"), std::string::npos) << error;
    EXPECT_NE(error.find("phase generation)"), std::string::npos) << error;
    EXPECT_EQ(error.find("; rank 1 (tp 1, dp 0)"), std::string::npos) << error;
  }
  EXPECT_NE(errors[0].find("rank 0 (tp 0, dp 0) on "), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("of group 'tp-0' (2 ranks)"), std::string::npos) << errors[0];
}

TEST(ParallelContext, RanksOfAnotherLayoutAreNamedOnAll) {
  ListeningPort port;
  const auto errors = on_ranks(4, [&](int rank) {
    Layout layout{.tp = 2, .dp = 2};
    if (rank == 2) layout = {.dp = 2, .pp = 2};
    ParallelContext(layout, port.place(rank, 4, Milliseconds(250000)));
  });
  for (const std::string& error : errors)
    EXPECT_EQ(error,
              "rank 2 has the layout tp=1,cp=1,ep=1,dp=2,pp=2,etp=1, rank 0 tp=2,cp=1,ep=1,dp=2,pp=1,etp=1; start all "
              "ranks with one configuration and one --layout");
}

TEST(ParallelContext, RefusesALayoutOfOtherRanks) {
  RendezvousOptions two_ranks;
  two_ranks.world_size = 2;
  EXPECT_THROW(ParallelContext({.dp = 3}, two_ranks), Error);
}

TEST(ParallelContext, TheSameRanksMaySplitAFurtherModelByAnotherLayout) {
  test::on_layout({.tp = 2, .dp = 2}, [](ParallelContext& first) {
    ParallelContext own(first, {.dp = 2, .pp = 2}, "value");
    EXPECT_EQ(own.rank(), first.rank());
    EXPECT_EQ(&own.world(), &first.world());
    EXPECT_EQ(own.tensor_parallel().size(), 1);
    EXPECT_EQ(own.coordinates().pp, first.rank() / 2);
    ASSERT_NE(own.stage_links(), nullptr);
    EXPECT_EQ(own.group(Axis::kPp).name(), "value-pp-" + std::to_string(first.rank() % 2));
    EXPECT_EQ(own.group(Axis::kPp).all_reduce_sum(int64_t{first.rank()}), 2 * (first.rank() % 2) + 2);
    EXPECT_EQ(own.data_parallel().all_reduce_sum(int64_t{first.rank()}), first.rank() < 2 ? 1 : 5);
    EXPECT_EQ(own.holders().size(), 2);
    EXPECT_EQ(first.tensor_parallel().all_reduce_sum(int64_t{first.rank()}), first.rank() < 2 ? 1 : 5);
    EXPECT_TRUE(own.generation().apart);  // the first one's, whatever this layout is
    EXPECT_EQ(own.generation().layout, first.layout());
    EXPECT_THROW(ParallelContext(first, {.tp = 3}, "odd"), Error);
    first.world().barrier();
  });
}

// Samples of replicas: all ranks have them in the order of replicas, whoever of them leads. Each from its first rank
// only: what another hands in is nobody's.
TEST(Generation, WhatLeadersSayReachesAllRanks) {
  const std::vector<std::pair<Layout, std::optional<Layout>>> layouts = {
      {Layout{.dp = 3}, std::nullopt},
      {Layout{.tp = 2, .dp = 2, .pp = 2}, std::nullopt},
      {Layout{.cp = 2, .dp = 2, .pp = 2}, std::nullopt},
      {Layout{.tp = 2, .dp = 2}, Layout{.tp = 4}},
      {Layout{.dp = 2, .pp = 2}, Layout{.dp = 4}},
      {Layout{.tp = 4, .pp = 2}, Layout{.tp = 2, .dp = 2, .pp = 2}}};
  for (const auto& [layout, generation] : layouts) {
    test::on_layout(
        layout,
        [&](ParallelContext& context) {
          const GenerationRanks& ranks = context.generation();
          EXPECT_EQ(ranks.leaders != nullptr, ranks.leads());
          if (ranks.leads()) {
            EXPECT_EQ(ranks.leaders->size(), ranks.replicas);
            EXPECT_EQ(ranks.leaders->rank(), ranks.number);
          }
          for (const size_t most : {size_t{0}, size_t{1000}}) {  // of other lengths, the first one empty
            const auto said = [&](int replica) {
              return std::string(most * static_cast<size_t>(replica), static_cast<char>('a' + replica));
            };
            const auto heard = ranks.from_leaders(ranks.leads() ? said(ranks.number) : "nobody's");
            ASSERT_EQ(heard.size(), static_cast<size_t>(ranks.replicas)) << to_string(context.layout());
            for (int replica = 0; replica < ranks.replicas; ++replica)
              EXPECT_EQ(heard[static_cast<size_t>(replica)], said(replica)) << to_string(context.layout());
          }
        },
        generation);
  }
}

}  // namespace
}  // namespace trireme
