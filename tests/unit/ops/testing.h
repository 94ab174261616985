// Helpers of the op tests: deterministic numbers, bit comparison, gradients of a weighted sum.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstring>
#include <vector>

#include "trainer/ops/philox.h"

namespace trireme::testing {

inline at::Tensor random(at::IntArrayRef shape, uint64_t seed, at::ScalarType dtype = at::kFloat, double scale = 1.0) {
  at::Tensor values = at::empty(shape, at::kDouble);
  double* value = values.data_ptr<double>();
  for (int64_t i = 0; i < values.numel(); ++i) value[i] = scale * philox_normal(seed, 7, static_cast<uint64_t>(i));
  return values.to(dtype);
}

inline at::Tensor random_ids(int64_t count, int64_t below, uint64_t seed) {
  at::Tensor ids = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i) {
    ids.data_ptr<int64_t>()[i] =
        static_cast<int64_t>(philox_uniform(seed, 9, static_cast<uint64_t>(i)) * static_cast<double>(below));
  }
  return ids;
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

// Largest difference as a part of the expected tensor's largest value.
inline double relative_error(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor a = actual.to(at::kDouble), e = expected.to(at::kDouble);
  if (e.numel() == 0) return a.numel() == 0 ? 0.0 : 1.0;
  return ((a - e).abs().max() / e.abs().max().clamp_min(1e-300)).item<double>();
}

// Gradients of sum(f(inputs) * fixed random weights) with respect to each input.
template <class F>
std::vector<at::Tensor> gradients(const std::vector<at::Tensor>& inputs, F&& f) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().clone().set_requires_grad(true));
  const at::AutoGradMode record(true);
  const at::Tensor out = f(leaves);
  const at::Tensor loss = (out * random(out.sizes(), 4242, out.scalar_type())).sum();
  return torch::autograd::grad({loss}, leaves);
}

// Our op against LibTorch's, value and gradients.
template <class F, class G>
void expect_matches(const std::vector<at::Tensor>& inputs, F&& ours, G&& reference, double tolerance) {
  const at::NoGradGuard no_grad;
  EXPECT_LE(relative_error(ours(inputs), reference(inputs)), tolerance);
  const auto a = gradients(inputs, ours), e = gradients(inputs, reference);
  for (size_t i = 0; i < inputs.size(); ++i) {
    EXPECT_EQ(a[i].sizes(), inputs[i].sizes());
    EXPECT_LE(relative_error(a[i], e[i]), tolerance) << "gradient of input " << i;
  }
}

}  // namespace trireme::testing
