// What stages send each other: in order on each line, whatever the other lines do; who is absent is named.
#include <ATen/ATen.h>

#include <atomic>

#include "base/host.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/parallel/stage_links.h"

namespace trireme {
namespace {

using test::on_ranks;

Layout stages_of(int64_t pp, int64_t tp = 1) {
  Layout layout;
  layout.pp = pp;
  layout.tp = tp;
  return layout;
}

TEST(StageLinks, EachLineKeepsItsOrderWhateverTheOthersDo) {
  for (const int64_t pp : {2, 3, 4}) {
    test::on_layout(stages_of(pp), [&](ParallelContext& context) {
      StageLinks& links = *context.stage_links();
      ASSERT_EQ(links.stages(), pp);
      const auto value = [](int stage, bool backward, int number) { return 100 * stage + 10 * number + backward; };
      std::vector<PendingCollective> sends;
      for (const bool backward : {false, true}) {
        for (int number = 0; number < 4; ++number) {
          // Messages of other sizes, one without a row.
          const at::Tensor rows = at::full({number, 3}, value(links.stage(), backward, number), at::kBFloat16);
          sends.push_back(links.begin_send(rows, backward));
        }
      }
      // Of the line that was written last first, one ahead.
      for (const bool backward : {true, false}) {
        const int from = (links.stage() + (backward ? 1 : links.stages() - 1)) % links.stages();
        std::vector<at::Tensor> rows;
        std::vector<PendingCollective> pending;
        for (int number = 0; number < 4; ++number) {
          rows.push_back(at::zeros({number, 3}, at::kBFloat16));
          pending.push_back(links.begin_receive(rows.back(), backward));
        }
        for (size_t i = 0; i < pending.size(); ++i) {
          pending[i].wait();
          EXPECT_TRUE(at::equal(rows[i], at::full_like(rows[i], value(from, backward, static_cast<int>(i)))));
        }
      }
      for (PendingCollective& sent : sends) sent.wait();
    });
  }
}

TEST(StageLinks, RowsComeAsTheyWereSent) {
  for (const int64_t pp : {2, 3}) {
    test::on_layout(stages_of(pp), [&](ParallelContext& context) {
      for (const auto dtype : {at::kBFloat16, at::kFloat})
        EXPECT_EQ(context.stage_links()->problem(4096, at::TensorOptions(dtype)), std::nullopt);
    });
  }
}

TEST(StageLinks, EndsSwapAndTheLastSharesWithAll) {
  for (const int64_t pp : {2, 4}) {
    test::on_layout(stages_of(pp), [&](ParallelContext& context) {
      StageLinks& links = *context.stage_links();
      const int last = links.stages() - 1;
      if (links.stage() == 0 || links.stage() == last) {
        const at::Tensor other = links.swap_ends(at::full({5}, links.stage(), at::kFloat));
        EXPECT_TRUE(at::equal(other, at::full({5}, last - links.stage(), at::kFloat)));
      }
      const at::Tensor values = at::full({7}, 10 + links.stage(), at::kDouble);
      links.share_last(values);
      EXPECT_TRUE(at::equal(values, at::full({7}, 10 + last, at::kDouble)));
      EXPECT_EQ(links.share_last("stage " + std::to_string(links.stage())), "stage " + std::to_string(last));
    });
  }
}

TEST(ParallelContext, TheRanksOfAReplicaAreThoseOfItsStages) {
  Layout layout = stages_of(2, 2);
  layout.dp = 2;
  test::on_layout(layout, [&](ParallelContext& context) {
    const Coordinates& at = context.coordinates();
    EXPECT_EQ(context.generation().replicas, 2);
    EXPECT_EQ(context.generation().number, at.dp);
    EXPECT_EQ(context.generation().replica->size(), 4);
    EXPECT_EQ(context.generation().replica->rank(), at.tp + 2 * at.pp);
    EXPECT_EQ(context.generation().leads(), at.tp == 0 && at.pp == 0);
    EXPECT_EQ(context.has_results(), at.tp == 0 && at.pp == 1);
    EXPECT_EQ(context.generation().replica->all_reduce_sum(int64_t{context.rank()}),
              at.dp == 0 ? 0 + 1 + 4 + 5 : 2 + 3 + 6 + 7);
  });
}

// Generation in another layout: ranks keep their numbers, so lines are training's, and groups where they are the same.
TEST(ParallelContext, GenerationMayHaveALayoutOfItsOwn) {
  Layout layout = stages_of(2, 2);
  layout.dp = 2;
  const auto check = [&](const Layout& other, const std::function<void(ParallelContext&, const GenerationRanks&)>& of) {
    test::on_layout(
        layout,
        [&](ParallelContext& context) {
          const GenerationRanks& ranks = context.generation();
          EXPECT_TRUE(ranks.apart);
          EXPECT_EQ(ranks.layout, other);
          EXPECT_EQ(ranks.replicas, other.dp);
          EXPECT_EQ(ranks.replica->size(), other.tp * other.pp);
          const Coordinates at = coordinates(other, context.rank());
          EXPECT_EQ(ranks.leads(), at.tp == 0 && at.pp == 0);
          EXPECT_EQ(context.holders().size(), 4);  // training's
          EXPECT_EQ(context.copies(), 2);
          of(context, ranks);
        },
        other);
  };
  check({.tp = 2, .dp = 4}, [](ParallelContext& context, const GenerationRanks& ranks) {
    EXPECT_EQ(ranks.tensor, &context.tensor_parallel());
    EXPECT_EQ(ranks.replica, ranks.tensor);
    EXPECT_EQ(ranks.links, nullptr);
    EXPECT_EQ(ranks.number, context.rank() / 2);
  });
  check({.tp = 4, .dp = 2}, [](ParallelContext& context, const GenerationRanks& ranks) {
    EXPECT_EQ(ranks.number, context.rank() / 4);
    EXPECT_EQ(ranks.tensor->all_reduce_sum(int64_t{context.rank()}), context.rank() < 4 ? 6 : 22);
    EXPECT_EQ(ranks.links, nullptr);
  });
  check({.tp = 1, .dp = 4, .pp = 2}, [](ParallelContext& context, const GenerationRanks& ranks) {
    EXPECT_EQ(ranks.links, context.stage_links());
    EXPECT_EQ(ranks.number, context.rank() % 4);
    EXPECT_EQ(ranks.replica, &context.group(Axis::kPp));
  });
}

// Messages of any size, among others on the same lines; nobody waits for a stage behind it.
TEST(StageLinks, WhatTheFirstPassesOnReachesAllInItsPlace) {
  for (const int64_t pp : {2, 4}) {
    test::on_layout(stages_of(pp), [&](ParallelContext& context) {
      StageLinks& links = *context.stage_links();
      const bool first = links.stage() == 0, last = links.stage() + 1 == links.stages();
      std::vector<PendingCollective> sends;
      for (int number = 0; number < 200; ++number) {
        const std::string words(static_cast<size_t>(number % 7 == 3 ? 0 : number),
                                static_cast<char>('a' + number % 26));
        EXPECT_EQ(links.pass_on(first ? words : "not mine"), words);
        const at::Tensor rows = at::full({2}, number, at::kLong);
        if (!first) {
          const at::Tensor received = at::empty({2}, at::kLong);
          links.begin_receive(received, /*backward=*/false).wait();
          EXPECT_TRUE(at::equal(received, rows));
        }
        if (!last) sends.push_back(links.begin_send(rows, /*backward=*/false));
      }
      for (PendingCollective& sent : sends) sent.wait();
    });
  }
}

// Stage 1 stands still: the one before it waits to be received from, the one behind it for rows, and the last one for
// that one. All name stage 1.
TEST(StageLinks, AMiddleStageThatStandsStillIsNamedByAll) {
  const Layout layout = stages_of(4);
  ListeningPort port;
  test::StandStill still(3);
  const auto errors = on_ranks(4, [&](int rank) {
    RendezvousOptions rendezvous = port.place(rank, 4, Milliseconds(15000));
    still.watch(rendezvous);
    ParallelContext context(layout, rendezvous);
    context.set_phase("training");
    context.world().barrier();
    if (rank == 1) return still.stand();
    still.fail([&] {
      at::Tensor rows = at::zeros({4, 2});
      if (rank == 0) context.stage_links()->begin_send(rows, false).wait();
      if (rank > 1) context.stage_links()->begin_receive(rows, false).wait();
    });
  });
  EXPECT_EQ(still.told(), 1);
  for (const int rank : {0, 2, 3}) {
    const std::string& error = errors[static_cast<size_t>(rank)];
    EXPECT_NE(error.find("rank 1 on " + host_name() + " has not come"), std::string::npos) << error;
    EXPECT_NE(error.find(rank == 0 ? ": send number 1 of group 'pp-line-0' (2 ranks) in phase training failed"
                                   : ": receive number 1 of group 'pp-line-"),
              std::string::npos)
        << error;
  }
}

}  // namespace
}  // namespace trireme
