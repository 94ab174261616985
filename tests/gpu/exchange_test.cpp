// Exchanges of two GPUs over each other's memory: against the sum in float64, the definition and NCCL's own sum, in
// captured graphs, and with a peer that does not come. Memory is mapped between processes: each test begins itself once
// more, as rank 1.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <thread>

#include "base/host.h"
#include "base/subprocess.h"
#include "tests/gpu/device.h"
#include "tests/unit/parallel/listening.h"
#include "trainer/parallel/context.h"
#include "trainer/parallel/exchange.h"
#include "trainer/parallel/peer_exchange.h"
#include "trainer/parallel/row_checks.h"

namespace trireme {
namespace {

using testing::equal_bits;

constexpr const char* kPortName = "TRIREME_TEST_EXCHANGE_PORT";
constexpr int64_t kWidth = 4096;
constexpr double kEps = 1e-6;

struct Rank {
  explicit Rank(const RendezvousOptions& rendezvous) : context({.tp = 2}, rendezvous) {
    c10::cuda::set_device(static_cast<c10::DeviceIndex>(context.rank()));
  }
  Communicator& group() { return context.tensor_parallel(); }
  at::Device device() const { return {at::kCUDA, static_cast<c10::DeviceIndex>(context.rank())}; }
  // Other values on each rank and for each salt, of both signs and many magnitudes, none of them zero.
  at::Tensor draw(int64_t rows, int64_t salt) const {
    at::Generator generator = at::globalContext().defaultGenerator(device());
    generator.set_current_seed(static_cast<uint64_t>(100 * salt + context.rank()));
    const auto options = at::TensorOptions().device(device()).dtype(at::kFloat);
    const at::Tensor values = at::randn({rows, kWidth}, options) * (3 * at::randn({rows, kWidth}, options)).exp();
    return at::where(values.eq(0), 1, values).to(at::kBFloat16);
  }
  // What both ranks have, as the communicator carries it.
  at::Tensor parts(const at::Tensor& own) {
    std::vector<int64_t> sizes = own.sizes().vec();
    sizes.insert(sizes.begin(), 2);
    at::Tensor all = at::empty(sizes, own.options());
    group().all_gather(all.view({-1}).view(at::kByte), own.contiguous().view({-1}).view(at::kByte));
    return all;
  }
  void synchronize() { c10::cuda::device_synchronize(); }
  ParallelContext context;
};

class Exchanges : public testing::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && c10::cuda::device_count() < 2) GTEST_SKIP() << "two GPUs are wanted";
  }

  // Runs `body` in two processes, of which this one is rank 0; `change` makes a rank's rendezvous another.
  template <typename Body>
  void on_two(Milliseconds timeout, const Body& body, const std::function<void(RendezvousOptions&)>& change = {}) {
    if (const char* port = std::getenv(kPortName)) {
      RendezvousOptions rendezvous;
      rendezvous.rank = 1;
      rendezvous.world_size = 2;
      rendezvous.local_rank = 1;
      rendezvous.master_port = std::atoi(port);
      rendezvous.timeout = timeout;
      if (change) change(rendezvous);
      Rank rank(rendezvous);
      body(rank);
      rank.context.world().barrier();
      return;
    }
    ListeningPort port;
    RendezvousOptions rendezvous = port.place(0, 2, timeout);
    if (change) change(rendezvous);
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    SpawnOptions other;
    other.argv = {std::filesystem::read_symlink("/proc/self/exe").string(),
                  std::string("--gtest_filter=") + test->test_suite_name() + "." + test->name()};
    other.set_env = {{kPortName, std::to_string(rendezvous.master_port)}};
    Subprocess child = Subprocess::spawn(other);
    {
      Rank rank(rendezvous);
      body(rank);
      rank.context.world().barrier();
    }
    const std::optional<ExitStatus> status = child.wait(Deadline::after(Milliseconds(60000)));
    ASSERT_TRUE(status.has_value()) << "rank 1 does not end";
    EXPECT_TRUE(status->ok()) << "rank 1: " << status->describe();
  }
};

TEST_F(Exchanges, SumsAreTheDefinitionsNearFloat64AndOfTwoRanksNcclsOwn) {
  on_two(Milliseconds(120000), [](Rank& rank) {
    ASSERT_NE(rank.group().peers(rank.device()), nullptr) << "the devices do not see each other's memory";
    const at::NoGradGuard no_grad;
    for (const int64_t rows : {1, 3, 64, 250, 4096}) {
      const at::Tensor partial = rank.draw(rows, rows);
      const at::Tensor parts = rank.parts(partial);
      const at::Tensor sum = sum_rows(rank.group(), partial);
      EXPECT_TRUE(equal_bits(sum, ordered_sum(parts))) << rows;
      // Half a unit in the last of eight binary digits, of an addition that float32 may have rounded before.
      const at::Tensor exact = parts.to(at::kDouble).sum(0);
      EXPECT_TRUE(((sum.to(at::kDouble) - exact).abs() <= exact.abs() * 0x1.02p-8 + 1e-38).all().item<bool>()) << rows;
      // One addition has no order.
      at::Tensor reduced = partial.clone();
      rank.group().all_reduce_sum(reduced);
      EXPECT_TRUE(reduced.eq(sum).all().item<bool>()) << rows;
      if (rows % 2 != 0) continue;
      const int64_t own = rows / 2, begin = own * rank.context.rank();
      EXPECT_TRUE(equal_bits(sum_to_rows(rank.group(), partial), sum.narrow(0, begin, own))) << rows;
      EXPECT_TRUE(equal_bits(gather_rows(rank.group(), partial), parts.flatten(0, 1))) << rows;
    }
  });
}

TEST_F(Exchanges, ACapturedGraphHasTheBitsOfTheDefinitionEachTimeItIsReplayed) {
  on_two(Milliseconds(120000), [](Rank& rank) {
    Communicator& group = rank.group();
    ASSERT_NE(group.peers(rank.device()), nullptr) << "the devices do not see each other's memory";
    const at::NoGradGuard no_grad;
    constexpr int64_t kRows = 64;
    const at::Tensor x = rank.draw(kRows, 1), partial = rank.draw(kRows, 2);
    const at::Tensor weight = at::ones({kWidth}, x.options());
    at::Tensor sum, gathered, scattered;
    NormResult fused;
    const auto exchanges = [&] {
      sum = sum_rows(group, partial);
      fused = sum_add_rms_norm(group, x, partial, weight, kEps);
      gathered = gather_rows(group, partial);
      scattered = sum_to_rows(group, partial);
    };
    exchanges();  // the allocator has the sizes then
    rank.synchronize();
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, rank.device().index()));
    at::cuda::CUDAGraph graph;
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    exchanges();
    graph.capture_end();
    for (int64_t replay = 0; replay < 7; ++replay) {  // the receive buffers' turn comes round twice
      x.copy_(rank.draw(kRows, 10 + replay));
      partial.copy_(rank.draw(kRows, 20 + replay));
      group.queue("replay", [&] { graph.replay(); });
      rank.synchronize();
      const at::Tensor parts = rank.parts(partial), defined = ordered_sum(parts);
      const NormResult expected = add_rms_norm(x, defined, weight, kEps);
      EXPECT_TRUE(equal_bits(sum, defined)) << replay;
      EXPECT_TRUE(equal_bits(fused.sum, expected.sum)) << replay;
      EXPECT_TRUE(equal_bits(fused.normed, expected.normed)) << replay;
      EXPECT_TRUE(equal_bits(gathered, parts.flatten(0, 1))) << replay;
      EXPECT_TRUE(equal_bits(scattered, defined.narrow(0, kRows / 2 * rank.context.rank(), kRows / 2))) << replay;
    }
  });
}

// As if the two were an expert group that decodes, or a context group. A second call is what a start pays, with groups
// and receive buffers there.
TEST_F(Exchanges, SelfTestsOfExpertAndContextGroupsFindNothing) {
  on_two(Milliseconds(120000), [](Rank& rank) {
    const auto options = at::TensorOptions(rank.device()).dtype(at::kBFloat16);
    double ms = 0;
    for (int64_t call = 0; call < 2; ++call) {
      const auto begin = std::chrono::steady_clock::now();
      EXPECT_EQ(expert_exchange_problem(rank.group(), kWidth, options, /*decodes=*/true), std::nullopt);
      EXPECT_EQ(context_exchange_problem(rank.group(), kWidth, options), std::nullopt);
      ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
    }
    if (rank.context.is_main()) std::cout << "both self-tests: " << ms << " ms\n";
  });
}

// Rank 1 does not replay: rank 0 says so at the deadline, though its host waits for nothing. Then rank 1 comes, and the
// sum is there.
TEST_F(Exchanges, APeerThatDoesNotComeToAGraphIsNamedAtTheDeadline) {
  std::string said;
  std::atomic<bool> told{false};
  const auto listen = [&](RendezvousOptions& rendezvous) {
    rendezvous.stuck_grace = Milliseconds(100);
    rendezvous.on_deadline = [&](const std::string& what) {
      said = what;
      told = true;
    };
  };
  const auto body = [&](Rank& rank) {
    Communicator& group = rank.group();
    ASSERT_NE(group.peers(rank.device()), nullptr) << "the devices do not see each other's memory";
    const at::NoGradGuard no_grad;
    rank.context.set_phase("generation");
    const at::Tensor partial = rank.draw(16, 1);
    const at::Tensor wanted = ordered_sum(rank.parts(partial));
    at::Tensor sum = sum_rows(group, partial);
    rank.synchronize();
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool(false, rank.device().index()));
    at::cuda::CUDAGraph graph;
    graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
    sum = sum_rows(group, partial);
    graph.capture_end();
    rank.context.world().barrier();
    const Deadline limit = Deadline::after(Milliseconds(120000));
    if (rank.context.is_main()) {
      group.queue("replay", [&] { graph.replay(); });
      while (!told && !limit.passed()) std::this_thread::sleep_for(Milliseconds(20));
      rank.context.store()->set("test-told", "1");
      ASSERT_TRUE(told) << "nobody was named";
      EXPECT_NE(said.find("replay number "), std::string::npos) << said;
      EXPECT_NE(said.find("of group 'tp' (2 ranks) in phase generation has not ended within 40 s; rank 1 on " +
                          host_name() + " has not come"),
                std::string::npos)
          << said;
    } else {
      while (!rank.context.store()->has("test-told") && !limit.passed()) std::this_thread::sleep_for(Milliseconds(20));
      group.queue("replay", [&] { graph.replay(); });
    }
    rank.synchronize();
    EXPECT_TRUE(equal_bits(sum, wanted));
  };
  on_two(Milliseconds(40000), body, listen);
}

}  // namespace
}  // namespace trireme
