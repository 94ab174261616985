// What the GPU tests share: the device, random tensors on it, bit comparison.
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

namespace trireme::testing {

// Skips where there is no device, unless TRIREME_REQUIRE_GPU says that there must be one.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (c10::cuda::device_count() > 0) return;
    if (std::getenv("TRIREME_REQUIRE_GPU") != nullptr) FAIL() << "TRIREME_REQUIRE_GPU is set and no GPU is visible";
    GTEST_SKIP() << "no GPU is visible";
  }
};

inline at::Device gpu() { return {at::kCUDA, 0}; }

inline void seed_gpu(uint64_t seed) {
  at::Generator generator = at::globalContext().defaultGenerator(gpu());
  generator.set_current_seed(seed);
}

inline at::Tensor gpu_randn(at::IntArrayRef shape, double scale = 1.0, at::ScalarType type = at::kBFloat16) {
  return at::randn(shape, at::TensorOptions().device(gpu()).dtype(at::kFloat)).mul_(scale).to(type);
}

inline bool equal_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous().cpu(), y = b.contiguous().cpu();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace trireme::testing
