// Ranks of one engine: how they meet, what the leader says, who hears of whose end.
#include "trainer/algorithms/engine_group.h"

#include <gtest/gtest.h>

#include <csignal>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "base/error.h"
#include "tests/unit/errors.h"
#include "tests/unit/parallel/listening.h"
#include "trainer/algorithms/engine_layout.h"

namespace trireme {
namespace {

using test::error_of;

EngineMessage of_kind(EngineMessage::Kind kind, int64_t number = 0) {
  return {.kind = kind, .number = number, .text = {}};
}

TEST(EngineMessages, ARequestTravelsWhole) {
  GroupRequest request;
  request.group_id = 7;
  request.prompt = {5, 0, 151642};
  request.samples = 3;
  request.first_sample_id = (uint64_t{1} << 63) + 5;
  request.max_new_tokens = 12;
  request.forced_lengths = {4, 1, 9};
  request.ends_known = false;
  const GroupRequest back = unpack_request(pack_request(request));
  EXPECT_EQ(back.group_id, 7);
  EXPECT_EQ(back.prompt, request.prompt);
  EXPECT_EQ(back.samples, 3);
  EXPECT_EQ(back.first_sample_id, request.first_sample_id);
  EXPECT_EQ(back.max_new_tokens, 12);
  EXPECT_EQ(back.forced_lengths, request.forced_lengths);
  EXPECT_FALSE(back.ends_known);
  EXPECT_FALSE(back.sampling);
  for (const std::string& bad : {std::string(), std::string("x"), pack_request(request).substr(1)})
    EXPECT_NE(error_of([&] { unpack_request(bad); }), "");
}

// The job's store, and the ranks of an engine as threads.
class EngineGroupTest : public testing::Test {
 protected:
  EngineGroupTest() {
    std::signal(SIGPIPE, SIG_IGN);
    job_ = port_.place(0, 2, Milliseconds(60000));
    job_.world_size = 1;
    store_ = std::make_unique<JobStore>(job_);
  }

  EngineGroupOptions options(int rank, int ranks) const {
    return {.job = job_, .name = "engine-0", .start = start_, .rank = rank, .layout = {.tp = ranks}};
  }
  // What each rank does; the first failure of one is the test's.
  void run(int ranks, const std::function<void(EngineGroup&)>& leader, const std::function<void(EngineGroup&)>& other) {
    std::vector<std::future<void>> all;
    for (int rank = 0; rank < ranks; ++rank) {
      all.push_back(std::async(std::launch::async, [&, rank] {
        EngineGroup group(options(rank, ranks));
        EXPECT_EQ(group.rank(), rank);
        EXPECT_EQ(group.size(), ranks);
        EXPECT_EQ(group.leads(), rank == 0);
        (rank == 0 ? leader : other)(group);
      }));
    }
    for (std::future<void>& one : all) one.get();
  }

  ListeningPort port_;
  RendezvousOptions job_;
  std::unique_ptr<JobStore> store_;
  std::string start_ = "0";
};

TEST_F(EngineGroupTest, AloneItOpensNothingAndTellsNobody) {
  EngineGroup group(options(0, 1));
  EXPECT_TRUE(group.leads());
  group.step();
  group.be_still();
  EXPECT_TRUE(group.order(of_kind(EngineMessage::kPin)));
  EXPECT_FALSE(store_->has("engine-ranks/engine-0/0"));
}

TEST_F(EngineGroupTest, TurnsComeInOrderAndOrdersHaveAnswersOfAll) {
  const auto leader = [](EngineGroup& group) {
    group.tell(of_kind(EngineMessage::kBegin, 3));
    GroupRequest request;
    request.prompt = {1, 2};
    group.submit(request);
    for (int i = 0; i < 100; ++i) group.step();
    group.be_still();
    bool beside = false;
    EXPECT_TRUE(group.order(of_kind(EngineMessage::kPin, 1), [&] { beside = true; }));
    EXPECT_TRUE(beside);
    EXPECT_FALSE(group.order(of_kind(EngineMessage::kPin, 2))) << "one of them has it no more";
    const std::string failed = error_of([&] { (void)group.order(of_kind(EngineMessage::kReceive)); });
    EXPECT_MENTIONS(failed, "rank 2 broke");
    // What the leader does itself fails: the answers are taken all the same.
    EXPECT_MENTIONS(error_of([&] { (void)group.order(of_kind(EngineMessage::kPin, 1), [] { fail_timeout("own"); }); }),
                    "own");
    group.give_sign_of_life();
    EXPECT_TRUE(group.order(of_kind(EngineMessage::kRelease)));
    group.end("");
  };
  const auto follower = [](EngineGroup& group) {
    std::thread orders([&] {
      for (;;) {
        const EngineMessage order = group.next_order();
        if (order.kind == EngineMessage::kAlive) continue;
        if (order.kind == EngineMessage::kEnd) return;
        EngineMessage answer = of_kind(EngineMessage::kDone);
        if (order.number == 2 && group.rank() == 1) answer.kind = EngineMessage::kGone;
        if (order.kind == EngineMessage::kReceive && group.rank() == 2) {
          answer = {.kind = EngineMessage::kFailed,
                    .number = static_cast<int64_t>(ErrorKind::kUnavailable),
                    .text = "rank 2 broke"};
        }
        group.answer_order(answer);
      }
    });
    EXPECT_EQ(group.next_turn().number, 3);
    const EngineMessage submit = group.next_turn();
    EXPECT_EQ(submit.kind, EngineMessage::kSubmit);
    EXPECT_EQ(unpack_request(submit.text).prompt, (std::vector<int32_t>{1, 2}));
    for (int i = 0; i < 100; ++i) EXPECT_EQ(group.next_turn().kind, EngineMessage::kStep);
    EXPECT_EQ(group.next_turn().kind, EngineMessage::kStill);
    group.answer_turn(of_kind(EngineMessage::kDone));
    EXPECT_EQ(group.next_turn().kind, EngineMessage::kEnd);
    orders.join();
  };
  run(3, leader, follower);
}

TEST_F(EngineGroupTest, WhoseLeaderHasGoneHearsItAndItsWaitsCanBeEnded) {
  std::promise<void> waiting;
  run(
      2, [&](EngineGroup&) { waiting.get_future().wait(); },
      [&](EngineGroup& group) {
        waiting.set_value();
        EXPECT_MENTIONS(error_of([&] { (void)group.next_turn(); }), "rank 0 of engine engine-0 has gone");
      });
  start_ = "1";  // one that is started again meets its own ranks
  run(
      2, [&](EngineGroup& group) { EXPECT_MENTIONS(error_of([&] { group.be_still(); }), "rank 1 of engine"); },
      [&](EngineGroup& group) {
        group.cancel_turns();
        EXPECT_NE(error_of([&] { (void)group.next_turn(); }), "");
      });
}

// An answer that comes late would be taken for that of the next order.
TEST_F(EngineGroupTest, BehindAnOrderWhoseAnswersDidNotComeThereIsNone) {
  std::promise<void> gone;
  run(
      2,
      [&](EngineGroup& group) {
        gone.get_future().wait();
        bool beside = false;
        EXPECT_NE(error_of([&] { (void)group.order(of_kind(EngineMessage::kPin), [&] { beside = true; }); }), "");
        EXPECT_TRUE(beside) << "what is let go here must be let go";
        EXPECT_MENTIONS(error_of([&] { group.give_sign_of_life(); }), "has failed before");
        group.end("why");  // on lines that carry nothing any more
      },
      [&](EngineGroup& group) {
        group.cancel_orders();
        EXPECT_NE(error_of([&] { (void)group.next_order(); }), "");
        gone.set_value();
      });
}

TEST_F(EngineGroupTest, AFollowerWhoseLeaderDoesNotComeNamesTheEngine) {
  job_.timeout = Milliseconds(5000);  // of every call of the store, too
  EXPECT_MENTIONS(error_of([&] { EngineGroup group(options(1, 2)); }),
                  "the first rank of engine engine-0 did not come");
}

TEST(EngineLayout, ExpertsAreSplitAsFarAsTensorRanksAndBlocksAllow) {
  const ModelShape dense{.layers = 2, .hidden = 64, .heads = 8, .kv_heads = 8, .head_dim = 8, .intermediate = 64};
  ModelShape mixture = dense;
  mixture.experts = 128;
  const auto layout = [&](const ModelShape& shape, int64_t tp, int64_t ep, const Layout& training = {}) {
    Config config;
    config.policy.generation.tensor_parallel_size = tp;
    config.policy.generation.expert_parallel_size = ep;
    return engine_layout(config, shape, training);
  };
  EXPECT_EQ(layout(dense, 0, 0), Layout{});
  EXPECT_EQ(layout(dense, 4, 0), (Layout{.tp = 4}));
  EXPECT_EQ(layout(mixture, 4, 0), (Layout{.tp = 4, .ep = 4})) << "8 blocks";
  EXPECT_EQ(layout(mixture, 4, 2), (Layout{.tp = 4, .ep = 2}));
  EXPECT_EQ(layout(mixture, 4, 1), (Layout{.tp = 4}));
  mixture.experts = 6;  // in 6 blocks
  EXPECT_EQ(layout(mixture, 4, 0), (Layout{.tp = 4, .ep = 2}));
  mixture.experts = 128;
  EXPECT_EQ(layout(mixture, 16, 0, {.ep = 16, .dp = 16}), (Layout{.tp = 16, .ep = 16})) << "training's blocks";
}

TEST(EngineLayout, WhatCannotBeIsSaidByTheKey) {
  ModelShape shape{
      .layers = 2, .hidden = 64, .heads = 4, .kv_heads = 4, .head_dim = 16, .intermediate = 64, .vocab = 64};
  const auto problem = [&](int64_t tp, int64_t ep) {
    Config config;
    config.policy.generation.tensor_parallel_size = tp;
    config.policy.generation.expert_parallel_size = ep;
    return engine_problem(config, shape, "a-model", {}).value_or("");
  };
  EXPECT_EQ(problem(2, 0), "");
  EXPECT_MENTIONS(problem(8, 0),
                  "policy.generation.tensor_parallel_size 8: an engine cannot split the model of a-model");
  EXPECT_MENTIONS(problem(2, 2), "policy.generation.expert_parallel_size 2: the model of a-model has no experts");
  shape.experts = 6;
  shape.experts_per_token = 2;
  shape.moe_intermediate = 32;
  EXPECT_EQ(problem(2, 0), "");
  EXPECT_MENTIONS(problem(4, 4), "policy.generation.expert_parallel_size 4: an engine cannot split the model");
}

}  // namespace
}  // namespace trireme
