// Part of every GPU test program: runs it as if the device were a smaller one.
//   TRIREME_TEST_DEVICE_GIB=80    all memory but so much is taken before the first test (an H100 with 80 GB)
//   TRIREME_TEST_SMS=112   the test's thread computes in a part of about so many SMs (an H100 PCIe has
//   114;
//                                 they are dealt out in eights); not for tests that divide the device themselves
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "trainer/ops/partition.h"

namespace trireme {
namespace {

class Limits final : public ::testing::Environment {
 public:
  void SetUp() override {
    if (c10::cuda::device_count() == 0) return;
    if (const int64_t gib = number("TRIREME_TEST_DEVICE_GIB"); gib > 0) take_all_but(gib << 30);
    if (const int64_t wanted = number("TRIREME_TEST_SMS"); wanted > 0) {
      int all = 0;
      ASSERT_EQ(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
      partition_ = split_device(c10::Device(c10::kCUDA, 0), all - wanted);
      ASSERT_NE(partition_, nullptr);
      std::printf("limits: %d of %d SMs\n", partition_->foreground_sms, all);
      part_ = std::make_unique<PartitionScope>(*partition_, PartitionScope::Part::kForeground);
    }
  }
  void TearDown() override {
    part_.reset();
    if (taken_ != nullptr) (void)cudaFree(taken_);
  }

 private:
  static int64_t number(const char* name) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::atoll(text) : 0;
  }

  void take_all_but(int64_t left) {
    size_t free = 0, total = 0;
    ASSERT_EQ(cudaMemGetInfo(&free, &total), cudaSuccess);
    if (free <= static_cast<size_t>(left)) return;
    ASSERT_EQ(cudaMalloc(&taken_, free - static_cast<size_t>(left)), cudaSuccess);
    std::printf("limits: %.1f of %.1f GiB are left\n", static_cast<double>(left) / (1 << 30),
                static_cast<double>(total) / (1 << 30));
  }

  void* taken_ = nullptr;
  std::shared_ptr<const DevicePartition> partition_;
  std::unique_ptr<PartitionScope> part_;
};

[[maybe_unused]] const auto* const kLimits = ::testing::AddGlobalTestEnvironment(new Limits);

}  // namespace
}  // namespace trireme
