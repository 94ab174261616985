// The optimizer's kernels on one GPU in bytes read and written per second, against a plain read of the same run. Median
// of repeats, warm-up left out.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAFunctions.h>

#include <cstdio>

#include "bench/gpu/timing.h"
#include "trainer/bench/cuda/ceilings.h"
#include "trainer/optimizer/cuda/adamw.h"

namespace trireme {
namespace {

using bench::median_seconds;

at::TensorOptions on_gpu(at::ScalarType type) { return at::TensorOptions().device(at::kCUDA, 0).dtype(type); }

int run() {
  if (c10::cuda::device_count() == 0) {
    std::fprintf(stderr, "error: no GPU is visible\n");
    return 1;
  }
  constexpr int64_t kElements = int64_t{1} << 30;  // an eighth of an 8B model
  double ceiling = 0;
  {
    const at::Tensor data = at::zeros({int64_t{1} << 32}, on_gpu(at::kByte)), sink = at::zeros({1}, on_gpu(at::kInt));
    ceiling =
        static_cast<double>(data.nbytes()) / median_seconds(
                                                 [&] {
                                                   bench::launch_read(data.const_data_ptr(), data.nbytes(),
                                                                      static_cast<unsigned*>(sink.mutable_data_ptr()),
                                                                      c10::cuda::getCurrentCUDAStream());
                                                 },
                                                 3);
  }
  std::printf("plain read: %.2f TB/s\n", ceiling * 1e-12);
  const at::Tensor master = at::zeros({kElements}, on_gpu(at::kFloat)), m = at::zeros_like(master),
                   v = at::zeros_like(master), weights = at::zeros({kElements}, on_gpu(at::kBFloat16));
  const at::Tensor decay = at::full({kElements / cuda::kDecayGroup / 32 + 2}, -1, on_gpu(at::kInt));
  const at::Tensor sums = at::empty({cuda::squares_blocks(kElements) + 1}, on_gpu(at::kDouble));
  for (const auto type : {at::kBFloat16, at::kFloat}) {
    const at::Tensor gradients = at::full({kElements}, 1e-3, on_gpu(type));
    const cuda::Element element = type == at::kFloat ? cuda::Element::kFloat : cuda::Element::kBFloat16;
    const double norm = median_seconds(
        [&] {
          cuda::sum_of_squares(gradients.const_data_ptr(), element, kElements, sums.mutable_data_ptr<double>() + 1,
                               sums.mutable_data_ptr<double>(), c10::cuda::getCurrentCUDAStream());
        },
        3);
    cuda::AdamWRun run;
    run.gradients = gradients.const_data_ptr();
    run.gradient_type = element;
    run.master = master.mutable_data_ptr<float>();
    run.exp_avg = m.mutable_data_ptr<float>();
    run.exp_avg_sq = v.mutable_data_ptr<float>();
    run.weights = weights.mutable_data_ptr();
    run.n = kElements;
    run.decay_bits = static_cast<const uint32_t*>(decay.const_data_ptr());
    cuda::AdamWStep step;
    step.beta1 = 0.9f, step.beta2 = 0.999f, step.rest1 = 0.1f, step.rest2 = 0.001f;
    step.keep = 0.9999f, step.step_size = 1e-6f, step.eps = 1e-8f;
    const double update = median_seconds([&] { cuda::adamw_update(run, step, c10::cuda::getCurrentCUDAStream()); }, 3);
    const double element_bytes = static_cast<double>(gradients.element_size());
    const double norm_bytes = element_bytes * kElements, update_bytes = (element_bytes + 26) * kElements;
    std::printf("%s gradients, 2^30 elements: norm %.2f ms, %.2f TB/s (%.0f %%); update %.2f ms, %.2f TB/s (%.0f %%)\n",
                type == at::kFloat ? "float32" : "bfloat16", norm * 1e3, norm_bytes / norm * 1e-12,
                100 * norm_bytes / norm / ceiling, update * 1e3, update_bytes / update * 1e-12,
                100 * update_bytes / update / ceiling);
  }
  return 0;
}

}  // namespace
}  // namespace trireme

int main() { return trireme::run(); }
