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
  }
};

at::Tensor values(int64_t elements, int64_t seed, at::Device device) {
  return (at::arange(elements, at::TensorOptions(device).dtype(at::kLong)) * (2 * seed + 1))
      .remainder(30011)
      .to(at::kBFloat16);
}

TEST_F(WeightLinkOnGpus, TheSameBitsComeTwentyTimesBesideOtherWork) {
  ListeningPort port;
  RendezvousOptions rendezvous = port.place(0, 2, kLong);
  rendezvous.world_size = 1;
  const JobStore store(rendezvous);
  WeightLinkOptions options;
  options.store_port = rendezvous.master_port;
  options.deadline = kLong;
  options.verify_weights_period = 4;
  constexpr int64_t kElements = (int64_t{300} << 20) + 3;
  const at::Device here(at::kCUDA, 0), there(at::kCUDA, 1);
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

// A step that the device still has when its engine comes for new weights reads the old ones, also where these are all
// there are.
TEST_F(WeightLinkOnGpus, WithoutASecondBufferBytesComeBehindTheStepUnderWay) {
  ListeningPort port;
  RendezvousOptions rendezvous = port.place(0, 2, kLong);
  rendezvous.world_size = 1;
  const JobStore store(rendezvous);
  WeightLinkOptions options;
  options.store_port = rendezvous.master_port;
  options.deadline = kLong;
  options.second_buffer = false;
  constexpr int64_t kElements = int64_t{64} << 20;
  constexpr int64_t kSleep = 2'000'000'000;  // cycles: a second or more
  const at::Device here(at::kCUDA, 0), there(at::kCUDA, 1);
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
