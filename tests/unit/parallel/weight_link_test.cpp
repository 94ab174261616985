// Weights from one process to another, both threads here: bits, versions, who waits for whom, and what breaks.
#include "trainer/parallel/weight_link.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <future>
#include <thread>

#include "base/fs.h"
#include "base/host.h"
#include "tests/unit/errors.h"
#include "tests/unit/parallel/listening.h"
#include "trainer/parallel/link_pair.h"
#include "trainer/parallel/sockets.h"
#include "trainer/parallel/weight_protocol.h"

namespace trireme {
namespace {

using test::error_of;

constexpr Milliseconds kLong{120000};                 // of what must not fail
constexpr Milliseconds kShort{1500};                  // of what is waited for in vain
constexpr int64_t kPieces = (int64_t{70} << 20) / 2;  // elements of bf16 that go in three pieces

at::Tensor draw(int64_t elements, int64_t seed, at::ScalarType dtype = at::kBFloat16) {
  const at::Tensor bits = at::arange(elements, at::kLong) * (2 * seed + 1) + seed;
  return bits.remainder(30011).to(dtype);
}

WeightView view_of(const at::Tensor& flat, uint64_t layout = 7) { return {.flat = flat, .layout = layout}; }

// A store as that of a job with one actor rank.
class Job final {
 public:
  Job() {
    std::signal(SIGPIPE, SIG_IGN);
    RendezvousOptions options = port_.place(0, 2, kLong);
    options.world_size = 1;
    options.attempt = "3";
    options_.store_port = options.master_port;
    options_.attempt = "3";
    options_.deadline = kLong;
    store_ = std::make_unique<JobStore>(options);
  }

  WeightLinkOptions actor(int64_t rank = 0, int64_t ranks = 1) const {
    WeightLinkOptions options = options_;
    options.actor_rank = rank;
    options.actor_ranks = ranks;
    return options;
  }
  WeightLinkOptions engine(int64_t number = 0) const {
    WeightLinkOptions options = options_;
    options.engine = number;
    return options;
  }

 private:
  ListeningPort port_;
  WeightLinkOptions options_;
  std::unique_ptr<JobStore> store_;
};

template <typename Fn>
auto beside(Fn fn) {
  return std::async(std::launch::async, std::move(fn));
}

template <typename T>
bool goes_on(std::future<T>& future) {
  return future.wait_for(Milliseconds(300)) == std::future_status::timeout;
}

TEST(WeightLink, BytesAndVersionComeAndCountFromApplyOn) {
  const Job job;
  for (const auto& [elements, dtype] : {std::pair{kPieces + 3, at::kBFloat16}, std::pair{int64_t{5}, at::kFloat}}) {
    const std::string link = "engine-0." + std::to_string(elements);
    const at::Tensor live = draw(elements, 0, dtype), there = at::zeros({elements}, dtype);
    WeightLinkOptions options = job.actor();
    options.verify_weights_period = 3;
    WeightSender sender(options, view_of(live));
    WeightReceiver receiver(job.engine(), view_of(there));
    EXPECT_FALSE(receiver.needs_stop());
    for (int64_t version = 0; version < 5; ++version) {
      live.copy_(draw(elements, version + 1, dtype));
      sender.publish(version);
      sender.serve(0, link);
      const at::Tensor before = there.clone();
      EXPECT_EQ(receiver.fetch(link, 0), version);
      EXPECT_TRUE(at::equal(there, before));  // nothing is read from the live weights' place yet
      receiver.apply();
      EXPECT_TRUE(at::equal(there, live));
      EXPECT_EQ(receiver.last().version, version);
      EXPECT_EQ(receiver.last().bytes, static_cast<int64_t>(live.nbytes()));
      EXPECT_EQ(receiver.last().verified, version % 3 == 0);
      const Deadline limit = Deadline::after(Milliseconds(60000));
      double transfer = 0;  // told when the receipt has come
      while ((transfer = sender.take_transfer_seconds()) == 0 && !limit.passed())
        std::this_thread::sleep_for(Milliseconds(1));
      EXPECT_GT(transfer, 0);
      EXPECT_EQ(sender.take_transfer_seconds(), 0);
      sender.retract();
    }
    EXPECT_GT(receiver.stall_seconds(), 0);
    EXPECT_GT(sender.take_stall_seconds(), 0);
    EXPECT_EQ(sender.take_stall_seconds(), 0);
  }
}

TEST(WeightLink, RetractWaitsForTheSendUnderWayAndNoneBeginsUntilThereAreWeightsAgain) {
  const Job job;
  const at::Tensor live = draw(kPieces, 1), there = at::zeros_like(live);
  std::promise<void> begun, released;
  std::shared_future<void> release = released.get_future().share();
  std::atomic<bool> holds{true};
  WeightLinkOptions options = job.actor();
  options.on_bytes = [&](int64_t) {
    if (!holds.exchange(false)) return;
    begun.set_value();
    release.wait();
  };
  WeightSender sender(options, view_of(live));
  WeightReceiver receiver(job.engine(), view_of(there));
  sender.publish(4);
  sender.serve(0, "engine-0");
  auto fetched = beside([&] { return receiver.fetch("engine-0", 0); });
  begun.get_future().wait();
  auto retracted = beside([&] { return sender.retract(); });
  EXPECT_TRUE(goes_on(retracted));
  released.set_value();
  EXPECT_GT(retracted.get(), 0);
  EXPECT_EQ(fetched.get(), 4);
  receiver.apply();
  EXPECT_TRUE(at::equal(there, live));

  live.add_(1);  // nobody reads it
  sender.serve(0, "engine-0");
  auto next = beside([&] { return receiver.fetch("engine-0", 0); });
  EXPECT_TRUE(goes_on(next));
  sender.retract();  // of what has not begun nothing is waited for
  sender.publish(5);
  EXPECT_EQ(next.get(), 5);
  receiver.apply();
  EXPECT_TRUE(at::equal(there, live));
}

TEST(WeightLink, ASendThatBreaksHalfWayLeavesTheWeightsAndTheNextOneComes) {
  const Job job;
  const at::Tensor live = draw(kPieces, 1), there = draw(kPieces, 9), before = there.clone();
  std::atomic<bool> breaks{true};
  WeightLinkOptions options = job.actor();
  options.on_bytes = [&](int64_t bytes) {
    if (bytes < static_cast<int64_t>(live.nbytes()) && breaks.exchange(false)) throw std::runtime_error("cut");
  };
  WeightSender sender(options, view_of(live));
  WeightReceiver receiver(job.engine(2), view_of(there));
  sender.publish(1);
  sender.serve(2, "engine-2");
  const std::string error = error_of([&] { receiver.fetch("engine-2", 0); });
  EXPECT_MENTIONS(error, "from rank 0 to engine 2");
  EXPECT_MENTIONS(error, "has gone");
  receiver.apply();
  EXPECT_TRUE(at::equal(there, before));
  EXPECT_FALSE(receiver.torn());

  sender.serve(2, "engine-2");
  EXPECT_EQ(receiver.fetch("engine-2", 0), 1);
  EXPECT_TRUE(receiver.last().verified);  // of a new connection
  receiver.apply();
  EXPECT_TRUE(at::equal(there, live));
}

TEST(WeightLink, AnEngineThatBreaksHalfWayHoldsNobody) {
  const Job job;
  const at::Tensor live = draw(kPieces, 1), broken = at::zeros_like(live), other = at::zeros_like(live);
  WeightSender sender(job.actor(), view_of(live));
  sender.publish(1);
  WeightLinkOptions options = job.engine(0);
  options.on_bytes = [](int64_t) { throw std::runtime_error("died"); };
  {
    WeightReceiver receiver(options, view_of(broken));
    sender.serve(0, "engine-0");
    EXPECT_MENTIONS(error_of([&] { receiver.fetch("engine-0", 0); }), "died");
  }
  sender.retract();  // the deadline is two minutes
  sender.publish(2);
  WeightReceiver receiver(job.engine(1), view_of(other));
  sender.serve(1, "engine-1");
  EXPECT_EQ(receiver.fetch("engine-1", 0), 2);
  // Made again under another name, as a pod is.
  WeightReceiver again(job.engine(0), view_of(broken));
  sender.serve(0, "engine-0-again");
  EXPECT_EQ(again.fetch("engine-0-again", 0), 2);
}

TEST(WeightLink, AnEngineThatStandsStillHoldsTheActorUntilTheDeadline) {
  const Job job;
  const at::Tensor live = draw(kPieces, 1), there = at::zeros_like(live);
  std::promise<void> begun, released;
  std::shared_future<void> release = released.get_future().share();
  WeightLinkOptions options = job.actor();
  options.deadline = Milliseconds(5000);  // from before the transfer's beginning
  WeightSender sender(options, view_of(live));
  sender.publish(1);
  WeightLinkOptions of_engine = job.engine();
  of_engine.on_bytes = [&, once = std::make_shared<std::atomic<bool>>(true)](int64_t) {
    if (!once->exchange(false)) return;
    begun.set_value();
    release.wait();
  };
  WeightReceiver receiver(of_engine, view_of(there));
  sender.serve(0, "engine-0");
  auto fetched = beside([&] { return error_of([&] { receiver.fetch("engine-0", 0); }); });
  EXPECT_EQ(begun.get_future().wait_for(Milliseconds(60000)), std::future_status::ready);
  sender.retract();
  released.set_value();
  EXPECT_MENTIONS(fetched.get(), "from rank 0 to engine 0");
  receiver.apply();
  EXPECT_TRUE(at::equal(there, at::zeros_like(live)));
}

TEST(WeightLink, WhoDoesNotComeIsNamedAtTheDeadline) {
  const Job job;
  const at::Tensor live = draw(100, 1), there = at::zeros_like(live);
  WeightLinkOptions options = job.engine(5);
  options.deadline = Milliseconds(400);
  WeightReceiver receiver(options, view_of(there));
  const std::string error = error_of([&] { receiver.fetch("engine-5", 3); });
  EXPECT_MENTIONS(error, "from rank 3 to engine 5");
  EXPECT_MENTIONS(error, "rank 3 did not come to the link");

  // The other way round nobody waits: an engine that has asked and does not come keeps no weights.
  WeightSender sender(job.actor(), view_of(live));
  sender.publish(1);
  sender.serve(0, "engine-0");
  std::this_thread::sleep_for(Milliseconds(100));
  sender.retract();
  sender.publish(2);
  // It is given up when the engine asks once more.
  WeightReceiver late(job.engine(0), view_of(there));
  sender.serve(0, "engine-0");
  EXPECT_EQ(late.fetch("engine-0", 0), 2);
}

TEST(WeightLink, AFetchThatCameTooLateOrTooEarlyIsNoHarmToTheNext) {
  const Job job;
  const at::Tensor live = draw(100, 1), there = at::zeros_like(live);
  WeightSender sender(job.actor(), view_of(live));
  sender.publish(1);
  WeightLinkOptions options = job.engine();
  options.deadline = Milliseconds(400);
  for (int i = 0; i < 2; ++i) {  // nobody has asked for it
    WeightReceiver receiver(options, view_of(there));
    EXPECT_MENTIONS(error_of([&] { receiver.fetch("engine-0", 0); }), "did not come");
  }
  WeightReceiver receiver(job.engine(), view_of(there));
  sender.serve(0, "engine-0");
  std::this_thread::sleep_for(Milliseconds(300));  // the sender has found a connection that was given up
  EXPECT_EQ(receiver.fetch("engine-0", 0), 1);
  sender.serve(0, "engine-0");  // whose fetch has come from elsewhere, or never does
  sender.serve(0, "engine-0");
  EXPECT_EQ(receiver.fetch("engine-0", 0), 1);
}

TEST(WeightLink, OtherBytesThanWereSentAreFound) {
  const Job job;
  const at::Tensor live = draw(1000, 1), there = draw(1000, 9), before = there.clone();
  WeightLinkOptions options = job.actor();
  std::atomic<bool> changes{true};
  options.on_bytes = [&](int64_t) {
    if (changes.exchange(false)) live.narrow(0, 500, 1).add_(64);  // behind the send, before the checksum
  };
  WeightSender sender(options, view_of(live));
  WeightReceiver receiver(job.engine(), view_of(there));
  sender.publish(1);
  sender.serve(0, "engine-0");
  EXPECT_MENTIONS(error_of([&] { receiver.fetch("engine-0", 0); }), "other bytes came than were sent: checksum");
  receiver.apply();
  EXPECT_TRUE(at::equal(there, before));
  sender.serve(0, "engine-0");
  EXPECT_EQ(receiver.fetch("engine-0", 0), 1);
}

TEST(WeightLink, AnotherModelIsRefusedInOneSentence) {
  const Job job;
  const at::Tensor live = draw(1000, 1);
  WeightSender sender(job.actor(), view_of(live));
  sender.publish(1);
  const auto refusal = [&](const at::Tensor& there, uint64_t layout) {
    WeightReceiver receiver(job.engine(), view_of(there, layout));
    sender.serve(0, "engine-0");
    return test::user_error_of([&] { receiver.fetch("engine-0", 0); });
  };
  EXPECT_MENTIONS(refusal(at::zeros({1000}, at::kFloat), 7), "are BFloat16, the engine's Float;");
  EXPECT_MENTIONS(refusal(at::zeros({1001}, at::kBFloat16), 7), "have 2000 bytes, the engine's 2002;");
  EXPECT_MENTIONS(refusal(at::zeros({1000}, at::kBFloat16), 8), "other names, shapes or places");
  EXPECT_MENTIONS(test::user_error_of([&] { sender.serve(0, "no word"); }), "the name of a weight link");
  EXPECT_MENTIONS(test::user_error_of([&] { sender.serve(0, ""); }), "the name of a weight link");
}

TEST(WeightLink, EnginesAreServedAtOnceEachByItsRank) {
  const Job job;
  const at::Tensor even = draw(kPieces, 1), odd = draw(kPieces, 2);
  WeightSender first(job.actor(0, 2), view_of(even)), second(job.actor(1, 2), view_of(odd));
  first.publish(6);
  second.publish(7);
  std::vector<std::future<void>> engines;
  for (int64_t engine = 0; engine < 4; ++engine) {
    engines.push_back(beside([&, engine] {
      const at::Tensor there = at::zeros_like(even);
      WeightReceiver receiver(job.engine(engine), view_of(there));
      const std::string link = "engine-" + std::to_string(engine);
      first.serve(engine, link);  // whichever rank is asked
      EXPECT_EQ(receiver.fetch(link, engine % 2), 6 + engine % 2);
      receiver.apply();
      EXPECT_TRUE(at::equal(there, engine % 2 == 0 ? even : odd));
    }));
  }
  for (std::future<void>& engine : engines) engine.get();
}

TEST(WeightLink, WithoutASecondBufferBytesGoWhereTheyAreReadAndMayBeTorn) {
  const Job job;
  const at::Tensor live = draw(kPieces, 1), there = draw(kPieces, 9);
  std::atomic<bool> breaks{true};
  WeightLinkOptions options = job.actor();
  options.on_bytes = [&](int64_t bytes) {
    if (bytes < static_cast<int64_t>(live.nbytes()) && breaks.exchange(false)) throw std::runtime_error("cut");
  };
  WeightSender sender(options, view_of(live));
  sender.publish(1);
  WeightLinkOptions direct = job.engine();
  direct.second_buffer = false;
  WeightReceiver receiver(direct, view_of(there));
  EXPECT_TRUE(receiver.needs_stop());
  EXPECT_FALSE(receiver.torn());
  sender.serve(0, "engine-0");
  EXPECT_NE(error_of([&] { receiver.fetch("engine-0", 0); }), "");
  EXPECT_TRUE(receiver.torn());
  sender.serve(0, "engine-0");
  EXPECT_EQ(receiver.fetch("engine-0", 0), 1);
  EXPECT_FALSE(receiver.torn());
  EXPECT_TRUE(at::equal(there, live));
}

TEST(WeightLink, WhoLeavesEndsWhatItWaitsFor) {
  const Job job;
  const at::Tensor live = draw(100, 1), there = at::zeros_like(live);
  auto sender = std::make_unique<WeightSender>(job.actor(), view_of(live));
  WeightReceiver receiver(job.engine(), view_of(there));
  sender->serve(0, "engine-0");  // nothing is published
  auto fetched = beside([&] { return error_of([&] { receiver.fetch("engine-0", 0); }); });
  EXPECT_TRUE(goes_on(fetched));
  sender.reset();
  EXPECT_TRUE(goes_on(fetched));  // another sender could come
  receiver.cancel();
  EXPECT_MENTIONS(fetched.get(), "given up");
  EXPECT_MENTIONS(error_of([&] { receiver.fetch("engine-0", 0); }), "given up");
}

TEST(WeightLink, RdmaThatIsRequiredIsNoTcp) {
  const Job job;
  const at::Tensor live = draw(100, 1), there = at::zeros_like(live);
  WeightSender sender(job.actor(), view_of(live));
  sender.publish(1);
  WeightLinkOptions options = job.engine();
  options.transport.required = true;
  WeightReceiver receiver(options, view_of(there));
  sender.serve(0, "engine-0");
  try {
    receiver.fetch("engine-0", 0);
    FAIL() << "TCP was taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);  // code 20
    EXPECT_MENTIONS(error.what(), "spec.network.rdma.require");
  }
}

// Between devices: what NCCL took says its log; where it could take nothing, the sentence says why, and what to do.
TEST(WeightLink, RdmaThatIsRequiredIsNoSocketBetweenDevicesEither) {
  const TemporaryDirectory dir;
  TransportCheck check;
  check.required = check.spans_nodes = true;
  check.environment = [](const std::string& name) -> std::optional<std::string> {
    return name == "NCCL_NET" ? std::optional<std::string>("IB") : std::nullopt;
  };
  check.log.emplace();
  check.log->file = (dir.path() / "nccl.log").string();
  const auto judged = [&](const std::string& network, const std::string& host) {
    std::ofstream(check.log->file) << "node:1:2 [0] NCCL INFO Using network " << network << "\n";
    return error_of([&] { judge_transport(check, /*on_device=*/true, host); });
  };
  EXPECT_MENTIONS(judged("Socket", "other"), "weights between ");
  EXPECT_MENTIONS(judged("Socket", "other"), "and other: the manifest requires RDMA (spec.network.rdma.require) but");
  EXPECT_MENTIONS(judged("FastSocket", "other"), "NCCL took sockets, FastSocket");
  EXPECT_EQ(judged("IB", "other"), "");
  EXPECT_EQ(judged("Socket", host_name()), "") << "within a host no network is used";
  TransportCheck unread = check;
  unread.log.reset();
  EXPECT_EQ(error_of([&] { judge_transport(unread, /*on_device=*/true, "other"); }), "") << "NCCL may use only IB";
  unread.environment = [](const std::string&) { return std::optional<std::string>("FastSocket"); };
  const auto of_unread = [&](const std::string& host) {
    return error_of([&] { judge_transport(unread, /*on_device=*/true, host); });
  };
  EXPECT_MENTIONS(of_unread("other"), "NCCL_NET is 'FastSocket', which goes over sockets");
  EXPECT_EQ(of_unread(host_name()), "");
  const std::string failed = "NCCL: connecting two devices failed: internal error";
  EXPECT_MENTIONS(failure_of_transfer(check, failed), failed + "; the manifest requires RDMA");
  EXPECT_MENTIONS(failure_of_transfer(check, failed), "NCCL_NET 'IB'");
  EXPECT_EQ(failure_of_transfer(check, "rank 0 has gone"), "rank 0 has gone");
  check.required = false;
  EXPECT_EQ(judged("Socket", "other"), "");
  EXPECT_EQ(failure_of_transfer(check, failed), failed);
}

TEST(WeightLink, AConnectionThatIsGivenUpWhileItIsMadeIsClosed) {
  const Job job;
  const WeightLinkOptions options = job.engine();
  const auto store = [&] { return LinkStore(options.store_address, options.store_port, options.attempt, kLong); };
  LinkCancel cancel;
  auto listening = beside([&] {
    LinkStore own = store();
    return error_of([&] { LinkPair(own, "pair", 0, options.store_address, "engine", Deadline::after(kLong), cancel); });
  });
  LinkStore own = store();
  const std::string address = own.get("pair/address", Deadline::after(kLong), cancel, "no address");
  const std::string port = address.substr(address.find(' ') + 1, address.rfind(' ') - address.find(' ') - 1);
  std::string why;
  const int stranger = connect_to(options.store_address, port, Deadline::after(kLong), why);
  ASSERT_GE(stranger, 0) << why;
  EXPECT_TRUE(goes_on(listening)) << "it waits for the secret";
  cancel.cancel();
  EXPECT_MENTIONS(listening.get(), "it was given up");
  pollfd ended{stranger, POLLIN, 0};
  EXPECT_EQ(::poll(&ended, 1, 10000), 1);
  ::close(stranger);
}

TEST(WeightLink, AStoreThatIsNotThereIsNamed) {
  WeightLinkOptions options;
  options.store_port = ListeningPort().place(1, 2, kShort).master_port;  // closed again
  options.deadline = kShort;
  const at::Tensor live = draw(10, 1);
  EXPECT_MENTIONS(error_of([&] { WeightSender(options, view_of(live)); }), "cannot be reached");
}

TEST(WeightChecksum, TellsWhatChangedAndIsTheSameByAReduction) {
  for (const int64_t elements : {int64_t{1}, int64_t{3}, int64_t{4}, int64_t{1001}, (int64_t{4} << 22) + 5}) {
    at::Tensor values = draw(elements, 3).add_(1);
    const uint64_t sum = weight_checksum(values);
    EXPECT_EQ(weight_checksum_by_reduction(values), sum);
    EXPECT_EQ(weight_checksum(values.clone()), sum);
    for (const int64_t at : {int64_t{0}, elements / 2, elements - 1}) {
      at::Tensor other = values.clone();
      other.narrow(0, at, 1).mul_(-1);
      EXPECT_NE(weight_checksum(other), sum) << at << " of " << elements;
    }
  }
  const at::Tensor words = at::arange(6, at::kLong);
  EXPECT_NE(weight_checksum(words), weight_checksum(words.flip(0).contiguous()));  // places count
}

}  // namespace
}  // namespace trireme
