// On two GPUs, whose processes are threads here: weights from one to the other by NCCL, bits and what breaks.
#include "trainer/parallel/weight_link.h"

#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGuard.h>

#include <csignal>
#include <future>

#include "base/error.h"
#include "tests/gpu/device.h"
#include "tests/unit/parallel/listening.h"
#include "trainer/parallel/weight_wire.h"

namespace trireme {
namespace {

constexpr Milliseconds kLong{120000};

class WeightLinkOnGpus : public testing::GpuTest {
 protected:
  void SetUp() override {
    testing::GpuTest::SetUp();
    if (!IsSkipped() && c10::cuda::device_count() < 2) GTEST_SKIP() << "it takes two GPUs";
    std::signal(SIGPIPE, SIG_IGN);
    if (IsSkipped()) return;
    RendezvousOptions rendezvous = port_.place(0, 2, kLong);
    rendezvous.world_size = 1;
    store_ = std::make_unique<JobStore>(rendezvous);
    options.store_port = rendezvous.master_port;
    options.deadline = kLong;
  }

  WeightLinkOptions options;
  const at::Device here{at::kCUDA, 0}, there{at::kCUDA, 1};

 private:
  ListeningPort port_;
  std::unique_ptr<JobStore> store_;
};

at::Tensor values(int64_t elements, int64_t seed, at::Device device) {
  return (at::arange(elements, at::TensorOptions(device).dtype(at::kLong)) * (2 * seed + 1))
      .remainder(30011)
      .to(at::kBFloat16);
}

TEST_F(WeightLinkOnGpus, TheSameBitsComeTwentyTimesBesideOtherWork) {
  options.verify_weights_period = 4;
  constexpr int64_t kElements = (int64_t{300} << 20) + 3;
  at::Tensor live = values(kElements, 0, here), engine = at::zeros({kElements}, live.options().device(there));
  EXPECT_EQ(weight_checksum(live), weight_checksum(live.cpu()));
  WeightSender sender(options, {.flat = live, .layout = 1});
  WeightReceiver receiver(options, {.flat = engine, .layout = 1});
  ASSERT_FALSE(receiver.needs_stop());
  for (int64_t version = 0; version < 20; ++version) {
    live.copy_(values(kElements, version, here));  // still at work when it is published
    sender.publish(version);
    sender.serve(0, "engine-0");
    std::future<int64_t> fetched = std::async(std::launch::async, [&] { return receiver.fetch("engine-0", 0); });
    EXPECT_EQ(fetched.get(), version);
    receiver.apply();
    sender.retract();
    EXPECT_TRUE(at::equal(live, engine.to(here))) << version;
  }
}

// Two ranks share a matrix by columns: each sends a part that is contiguous with it and has gaps at the engine.
TEST_F(WeightLinkOnGpus, PartsOfTwoRanksBecomeTheWholeBesideOtherWork) {
  options.actor_ranks = 2;
  options.verify_weights_period = 2;
  constexpr int64_t kRows = 8192, kColumns = 5000, kFirst = 1800;
  const auto part_of = [&](int64_t rank, bool sent) {
    const int64_t begin = rank == 0 ? 0 : kFirst, columns = rank == 0 ? kFirst : kColumns - kFirst;
    WeightPart part{.actor_rank = rank, .whole = false, .elements = kRows * columns, .digest = 5};
    part.pieces = {{sent ? 0 : begin, kRows, columns, sent ? columns : kColumns, begin, kColumns}};
    return part;
  };
  at::Tensor engine = at::zeros({kRows * kColumns}, at::TensorOptions(there).dtype(at::kBFloat16));
  std::vector<at::Tensor> live;
  std::vector<std::unique_ptr<WeightSender>> senders;
  for (int64_t rank = 0; rank < 2; ++rank) {
    live.push_back(at::zeros({part_of(rank, true).elements}, engine.options().device(here)));
    WeightRoutes routes;
    routes.sources = [](int64_t) { return std::vector<int64_t>{0, 1}; };
    routes.sent = [&, rank](int64_t) { return part_of(rank, /*sent=*/true); };
    options.actor_rank = rank;
    senders.push_back(std::make_unique<WeightSender>(options, WeightView{live.back(), 1}, routes));
  }
  WeightReceiver receiver(options, {.flat = engine, .layout = 1});
  for (int64_t version = 0; version < 6; ++version) {
    const at::Tensor all = values(kRows * kColumns, version, here).view({kRows, kColumns});
    for (int64_t rank = 0; rank < 2; ++rank) {  // still at work when it is published
      const auto r = static_cast<size_t>(rank);
      live[r].copy_(all.narrow(1, rank == 0 ? 0 : kFirst, rank == 0 ? kFirst : kColumns - kFirst).reshape({-1}));
      senders[r]->publish(version);
    }
    senders[0]->serve(0, "engine-0");
    EXPECT_EQ(receiver.fetch("engine-0", {part_of(0, false), part_of(1, false)}), version);
    receiver.apply();
    for (const auto& sender : senders) sender->retract();
    EXPECT_TRUE(at::equal(all.view({-1}), engine.to(here))) << version;
  }
}

// A step that the device still has when its engine comes for new weights reads the old ones, also where these are all
// there are.
TEST_F(WeightLinkOnGpus, WithoutASecondBufferBytesComeBehindTheStepUnderWay) {
  options.second_buffer = false;
  constexpr int64_t kElements = int64_t{64} << 20;
  constexpr int64_t kSleep = 2'000'000'000;  // cycles: a second or more
  at::Tensor live = values(kElements, 0, here), engine = at::zeros({kElements}, live.options().device(there));
  WeightSender sender(options, {.flat = live, .layout = 1});
  WeightReceiver receiver(options, {.flat = engine, .layout = 1});
  ASSERT_TRUE(receiver.needs_stop());
  for (int64_t version = 0; version < 4; ++version) {  // the first one waits for its connection, too
    const at::Tensor before = engine.cpu();
    live.copy_(values(kElements, version + 1, here));
    sender.publish(version);
    sender.serve(0, "engine-0");
    at::Tensor seen;
    {
      const c10::cuda::CUDAGuard guard(there);
      seen = at::empty_like(engine);
      at::cuda::sleep(kSleep);
      seen.copy_(engine, /*non_blocking=*/true);
    }
    const Stopwatch watch;
    EXPECT_EQ(receiver.fetch("engine-0", 0), version);
    if (version > 0) {
      EXPECT_GT(watch.seconds(), 0.2) << "the step was over before: this test would notice nothing";
    }
    sender.retract();
    EXPECT_TRUE(at::equal(seen.cpu(), before)) << version << ": a step has read what came";
    EXPECT_TRUE(at::equal(live, engine.to(here))) << version;
  }
}

// NCCL's kernel waits on the device for the other side; the end of a wire takes it away.
TEST_F(WeightLinkOnGpus, ASendThatNobodyReceivesEndsAtItsDeadlineAndTheDeviceGoesOn) {
  const std::string id = WeightWire::make_id();
  LinkCancel cancel;
  std::promise<void> done;
  std::future<void> other = std::async(std::launch::async, [&] {
    const WeightWire wire(at::Device(at::kCUDA, 1), 1, id, Deadline::after(kLong), cancel);
    done.get_future().wait();
  });
  const at::Tensor live = values(int64_t{64} << 20, 1, at::Device(at::kCUDA, 0));
  {
    WeightWire wire(live.device(), 0, id, Deadline::after(kLong), cancel);
    wire.send(live, mark_time());
    try {
      wire.wait(Deadline::after(Milliseconds(1500)), cancel);
      FAIL() << "it was sent to nobody";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kTimeout) << error.what();
    }
  }
  EXPECT_EQ(at::ones({10}, live.options()).sum().item<float>(), 10);
  done.set_value();
  other.get();
}

}  // namespace
}  // namespace trireme
