// Weights from several ranks to one engine: one version of all, who keeps which how long, and what breaks.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <future>
#include <thread>

#include "tests/unit/errors.h"
#include "tests/unit/parallel/listening.h"
#include "trainer/parallel/weight_link.h"
#include "trainer/parallel/weight_protocol.h"

namespace trireme {
namespace {

using test::error_of;

constexpr Milliseconds kLong{120000};  // of what must not fail
constexpr int64_t kRows = 2700;        // of a matrix of 5000 columns: its parts take several chunks

// Of a model that is a vector of 7, which the first rank has, and a matrix that two ranks share by columns.
constexpr int64_t kVector = 7, kColumns = 5000;
Range columns_of(int64_t rank) { return rank == 0 ? Range{0, 1800} : Range{1800, kColumns}; }

at::Tensor whole_model(int64_t seed) {
  return (at::arange(kVector + kRows * kColumns, at::kInt) * (2 * seed + 1)).remainder(30011).to(at::kFloat);
}
at::Tensor own_weights(int64_t rank, int64_t seed) {
  const at::Tensor all = whole_model(seed);
  const Range own = columns_of(rank);
  const at::Tensor matrix =
      all.narrow(0, kVector, kRows * kColumns).view({kRows, kColumns}).narrow(1, own.begin, own.size()).reshape({-1});
  return rank == 0 ? at::cat({all.narrow(0, 0, kVector), matrix}) : matrix.contiguous();
}

WeightPart part_of(int64_t rank, bool sent) {
  WeightPart part{.actor_rank = rank, .whole = false, .digest = 77};
  const Range own = columns_of(rank);
  if (rank == 0) part.pieces.push_back({0, 1, kVector, kVector, 0, kVector});
  part.pieces.push_back({.offset = sent ? (rank == 0 ? kVector : 0) : kVector + own.begin,
                         .rows = kRows,
                         .columns = own.size(),
                         .stride = sent ? own.size() : kColumns,
                         .place = kVector + own.begin,
                         .place_stride = kColumns});
  for (const WeightPiece& piece : part.pieces) part.elements += piece.elements();
  return part;
}

std::vector<WeightPart> received(std::vector<int64_t> order = {0, 1}) {
  std::vector<WeightPart> parts;
  for (const int64_t rank : order) parts.push_back(part_of(rank, /*sent=*/false));
  return parts;
}

class TwoRanks final {
 public:
  explicit TwoRanks(const std::function<void(int64_t rank, WeightLinkOptions&)>& change = {}) {
    std::signal(SIGPIPE, SIG_IGN);
    RendezvousOptions rendezvous = port_.place(0, 2, kLong);
    rendezvous.world_size = 1;
    options_.store_port = rendezvous.master_port;
    options_.deadline = kLong;
    store_ = std::make_unique<JobStore>(rendezvous);
    for (int64_t rank = 0; rank < 2; ++rank) {
      live_.push_back(own_weights(rank, 0));
      WeightLinkOptions options = options_;
      options.actor_rank = rank;
      options.actor_ranks = 2;
      if (change) change(rank, options);
      WeightRoutes routes;
      routes.sources = [](int64_t) { return std::vector<int64_t>{0, 1}; };
      routes.sent = [rank](int64_t) { return part_of(rank, /*sent=*/true); };
      senders_.push_back(std::make_unique<WeightSender>(options, WeightView{live_.back(), 1}, routes));
    }
  }

  WeightSender& operator[](size_t rank) { return *senders_[rank]; }
  // The weights of that version, by the rank.
  void publish(int64_t rank, int64_t version) {
    live_[static_cast<size_t>(rank)].copy_(own_weights(rank, version));
    senders_[static_cast<size_t>(rank)]->publish(version);
  }
  WeightLinkOptions engine() const { return options_; }

 private:
  ListeningPort port_;
  WeightLinkOptions options_;
  std::unique_ptr<JobStore> store_;
  std::vector<at::Tensor> live_;
  std::vector<std::unique_ptr<WeightSender>> senders_;
};

template <typename Fn>
auto beside(Fn fn) {
  return std::async(std::launch::async, std::move(fn));
}
template <typename T>
bool goes_on(std::future<T>& future) {
  return future.wait_for(Milliseconds(300)) == std::future_status::timeout;
}

TEST(WeightSources, PartsOfAllRanksBecomeTheWholeModel) {
  TwoRanks ranks;
  const at::Tensor there = at::zeros_like(whole_model(0));
  WeightReceiver receiver(ranks.engine(), {there, 1});
  for (int64_t version = 0; version < 4; ++version) {
    for (int64_t rank = 0; rank < 2; ++rank) ranks.publish(rank, version);
    ranks[0].serve(0, "engine-0");  // which asks both
    EXPECT_EQ(receiver.fetch("engine-0",
                             received(version / 2 == 0 ? std::vector<int64_t>{0, 1} : std::vector<int64_t>{1, 0})),
              version);
    receiver.apply();
    EXPECT_TRUE(at::equal(there, whole_model(version)));
    EXPECT_EQ(receiver.last().bytes, static_cast<int64_t>(there.nbytes()));
    EXPECT_EQ(receiver.last().version, version);
    for (size_t rank = 0; rank < 2; ++rank) ranks[rank].retract();
  }
}

TEST(WeightSources, RanksOfAnEngineTakeTheSameVersionInHalves) {
  TwoRanks ranks;
  const at::Tensor first = at::zeros_like(whole_model(0)), second = at::zeros_like(whole_model(0));
  WeightLinkOptions options = ranks.engine();
  options.engine_ranks = 2;
  WeightReceiver leader(options, {first, 1});
  options.engine = 1;
  WeightReceiver follower(options, {second, 1});
  for (int64_t rank = 0; rank < 2; ++rank) ranks.publish(rank, 4);
  ranks[0].serve(0, "engine-0");
  ranks[0].serve(1, "engine-0.1");
  ASSERT_EQ(leader.pin("engine-0", received(), -1), 4);
  ASSERT_EQ(follower.pin("engine-0.1", received({1, 0}), 4), 4);
  auto written = beside([&] { return ranks[0].retract(); });
  EXPECT_TRUE(goes_on(written)) << "both keep it";
  follower.release();
  EXPECT_TRUE(goes_on(written)) << "the leader keeps it";
  leader.receive_pinned();
  written.get();
  EXPECT_EQ(leader.last().version, 4);
  // What is there no more nobody keeps; one that comes is the next.
  EXPECT_EQ(follower.pin("engine-0.1", received({1, 0}), 4), -1);
  ranks[1].retract();
  for (int64_t rank = 0; rank < 2; ++rank) ranks.publish(rank, 5);
  ASSERT_EQ(follower.pin("engine-0.1", received({1, 0}), 5), 5);
  follower.receive_pinned();
  leader.apply();
  follower.apply();
  EXPECT_TRUE(at::equal(first, whole_model(4)));
  EXPECT_TRUE(at::equal(second, whole_model(5)));
  const std::string error = error_of([&] { follower.pin("engine-0.1", {}, 5); });
  EXPECT_MENTIONS(error, "come from somebody");
}

TEST(WeightSources, AnEngineOfSeveralRanksIsNamedByBoth) {
  TwoRanks ranks;
  const at::Tensor there = at::zeros_like(whole_model(0));
  WeightLinkOptions options = ranks.engine();
  options.engine = 3;
  options.engine_ranks = 2;
  options.deadline = Milliseconds(500);
  WeightReceiver receiver(options, {there, 1});
  EXPECT_MENTIONS(error_of([&] { receiver.pin("engine-1.1", received({0}), -1); }), "to engine 1 rank 1 over");
}

TEST(WeightSources, ARankThatHasNotComeToTheVersionIsWaitedForAndTheOthersKeepTheirs) {
  TwoRanks ranks;
  const at::Tensor there = at::zeros_like(whole_model(0));
  WeightReceiver receiver(ranks.engine(), {there, 1});
  ranks.publish(0, 3);
  ranks[1].serve(0, "engine-0");
  auto fetched = beside([&] { return receiver.fetch("engine-0", received()); });
  EXPECT_TRUE(goes_on(fetched));
  // Until the engine has asked for them nobody keeps rank 0's: they are taken back at once.
  auto retracted = beside([&] { return ranks[0].retract(); });
  for (int tries = 0; tries < 200 && !goes_on(retracted); ++tries) {
    ranks.publish(0, 3);
    retracted = beside([&] { return ranks[0].retract(); });
  }
  EXPECT_TRUE(goes_on(retracted));
  ranks.publish(1, 3);
  EXPECT_EQ(fetched.get(), 3);
  EXPECT_GT(retracted.get(), 0);
  receiver.apply();
  EXPECT_TRUE(at::equal(there, whole_model(3)));
}

// A rank is already writing the next weights: nobody waits in a ring, and no two versions are mixed.
TEST(WeightSources, WeightsThatAreGoneAtOneRankAreLetBeAndTheNextOnesCome) {
  TwoRanks ranks;
  const at::Tensor there = at::zeros_like(whole_model(0));
  WeightReceiver receiver(ranks.engine(), {there, 1});
  for (int64_t rank = 0; rank < 2; ++rank) ranks.publish(rank, 1);
  ranks[1].retract();
  ranks[0].serve(0, "engine-0");
  auto fetched = beside([&] { return receiver.fetch("engine-0", received()); });
  EXPECT_TRUE(goes_on(fetched));
  ranks[0].retract();  // the deadline is two minutes
  ranks.publish(1, 2);
  EXPECT_TRUE(goes_on(fetched));
  ranks.publish(0, 2);
  EXPECT_EQ(fetched.get(), 2);
  receiver.apply();
  EXPECT_TRUE(at::equal(there, whole_model(2)));
}

TEST(WeightSources, WhoReadsFromAnotherRankGivesSignsOfLife) {
  TwoRanks ranks([](int64_t, WeightLinkOptions& options) { options.silence = Milliseconds(4000); });
  const at::Tensor there = at::zeros_like(whole_model(0));
  std::promise<void> begun, released;
  std::shared_future<void> release = released.get_future().share();
  WeightLinkOptions options = ranks.engine();
  options.silence = Milliseconds(4000);
  options.on_bytes = [&, once = std::make_shared<std::atomic<bool>>(true)](int64_t) {
    if (!once->exchange(false)) return;
    begun.set_value();
    release.wait();
  };
  WeightReceiver receiver(options, {there, 1});
  for (int64_t rank = 0; rank < 2; ++rank) ranks.publish(rank, 5);
  ranks[0].serve(0, "engine-0");
  auto fetched = beside([&] { return receiver.fetch("engine-0", received()); });
  begun.get_future().wait();
  auto retracted = beside([&] { return ranks[1].retract(); });
  EXPECT_EQ(retracted.wait_for(Milliseconds(6000)), std::future_status::timeout);
  released.set_value();
  EXPECT_EQ(fetched.get(), 5);
  EXPECT_GT(retracted.get(), 5);
  receiver.apply();
  EXPECT_TRUE(at::equal(there, whole_model(5)));
}

// An engine whose process stands still: asks, is answered, and says nothing any more.
TEST(WeightSources, AnEngineThatGivesNoSignHoldsTheWeightsForSoLongOnly) {
  TwoRanks ranks([](int64_t, WeightLinkOptions& options) { options.silence = Milliseconds(1500); });
  for (int64_t rank = 0; rank < 2; ++rank) ranks.publish(rank, 5);
  ranks[0].serve(0, "engine-0");
  const WeightLinkOptions options = ranks.engine();
  const Deadline deadline = Deadline::after(kLong);
  LinkCancel cancel;
  LinkStore store(options.store_address, options.store_port, options.attempt, kLong);
  const std::string name =
      link_key("engine-0", 1, std::to_string(store.add(link_key("engine-0", 1, "connections"), 1)));
  store.set(name, "1");
  (void)store.get(name + "/offered", deadline, cancel, "no sender");
  store.set(name + "/taken", "1");
  LinkPair pair(store, name, 1, options.store_address, "rank 1", deadline, cancel);
  const WeightView view{at::zeros_like(whole_model(0)), 1};
  WeightMessage ready = message_about(view, part_of(1, /*sent=*/false), WeightMessage::kReady, 5);
  ready.pins = 1;
  const Stopwatch silent;
  send_message(pair, ready, deadline);
  EXPECT_EQ(receive_message(pair, deadline).kind, WeightMessage::kHeader);
  EXPECT_LT(ranks[1].retract(), 60);
  EXPECT_GT(silent.seconds(), 1.4);
  EXPECT_MENTIONS(error_of([&] { (void)receive_message(pair, deadline); }), "has gone");

  // Another one is served as ever.
  ranks.publish(1, 5);
  const at::Tensor there = at::zeros_like(whole_model(0));
  WeightReceiver receiver(ranks.engine(), {there, 1});
  ranks[0].serve(1, "engine-1");
  EXPECT_EQ(receiver.fetch("engine-1", received({1, 0})), 5);
}

TEST(WeightSources, ARankWhoseBytesAreCutIsNamedAndNobodyKeepsWeights) {
  std::atomic<bool> breaks{true};
  TwoRanks ranks([&](int64_t rank, WeightLinkOptions& options) {
    if (rank != 1) return;
    options.on_bytes = [&](int64_t) {
      if (breaks.exchange(false)) throw std::runtime_error("cut");
    };
  });
  const at::Tensor there = at::zeros_like(whole_model(0)), before = there.clone();
  WeightReceiver receiver(ranks.engine(), {there, 1});
  for (int64_t rank = 0; rank < 2; ++rank) ranks.publish(rank, 1);
  for (const std::vector<int64_t>& order : {std::vector<int64_t>{0, 1}, std::vector<int64_t>{1, 0}}) {
    breaks = true;
    ranks[0].serve(0, "engine-0");
    const std::string error = error_of([&] { receiver.fetch("engine-0", received(order)); });
    EXPECT_MENTIONS(error, "from rank 1 to engine 0");
    EXPECT_MENTIONS(error, "has gone");
    receiver.apply();
    EXPECT_TRUE(at::equal(there, before));
    for (size_t rank = 0; rank < 2; ++rank) EXPECT_LT(ranks[rank].retract(), 60);
    for (int64_t rank = 0; rank < 2; ++rank) ranks.publish(rank, 1);
  }
  ranks[0].serve(0, "engine-0");
  EXPECT_EQ(receiver.fetch("engine-0", received()), 1);
  EXPECT_TRUE(receiver.last().verified);  // of new connections
  receiver.apply();
  EXPECT_TRUE(at::equal(there, whole_model(1)));
}

TEST(WeightSources, AnEngineThatDiesWhileRanksKeepWeightsHoldsNobody) {
  TwoRanks ranks;
  const at::Tensor there = at::zeros_like(whole_model(0));
  WeightLinkOptions options = ranks.engine();
  options.on_bytes = [](int64_t) { throw std::runtime_error("died"); };
  for (int64_t rank = 0; rank < 2; ++rank) ranks.publish(rank, 1);
  {
    WeightReceiver receiver(options, {there, 1});
    ranks[0].serve(0, "engine-0");
    EXPECT_MENTIONS(error_of([&] { receiver.fetch("engine-0", received()); }), "died");
  }
  for (size_t rank = 0; rank < 2; ++rank) ranks[rank].retract();  // the deadline is two minutes
}

TEST(WeightSources, OtherRangesThanAreSentAreRefusedOrFound) {
  TwoRanks ranks;
  const at::Tensor there = at::zeros_like(whole_model(0));
  WeightReceiver receiver(ranks.engine(), {there, 1});
  for (int64_t rank = 0; rank < 2; ++rank) ranks.publish(rank, 1);
  std::vector<WeightPart> other = received();
  other[1].digest = 78;
  ranks[0].serve(0, "engine-0");
  EXPECT_MENTIONS(test::user_error_of([&] { receiver.fetch("engine-0", other); }), "other names, shapes or places");
  // A range that is as large and lies beside the right one.
  other = received();
  ++other[1].pieces[0].place;
  ranks[0].serve(0, "engine-0");
  EXPECT_MENTIONS(error_of([&] { receiver.fetch("engine-0", other); }), "other bytes came than were sent: checksum");
}

TEST(WeightSources, WithoutASecondBufferWeightsAreTornUntilAllPartsHaveCome) {
  std::atomic<bool> breaks{true};
  TwoRanks ranks([&](int64_t rank, WeightLinkOptions& options) {
    if (rank != 1) return;
    options.on_bytes = [&](int64_t) {
      if (breaks.exchange(false)) throw std::runtime_error("cut");
    };
  });
  const at::Tensor there = at::zeros_like(whole_model(0));
  WeightLinkOptions options = ranks.engine();
  options.second_buffer = false;
  WeightReceiver receiver(options, {there, 1});
  for (int64_t rank = 0; rank < 2; ++rank) ranks.publish(rank, 1);
  ranks[0].serve(0, "engine-0");
  EXPECT_NE(error_of([&] { receiver.fetch("engine-0", received()); }), "");
  EXPECT_TRUE(receiver.torn());
  ranks[0].serve(0, "engine-0");
  EXPECT_EQ(receiver.fetch("engine-0", received()), 1);
  EXPECT_FALSE(receiver.torn());
  EXPECT_TRUE(at::equal(there, whole_model(1)));
}

}  // namespace
}  // namespace trireme
