// The vocabulary ops on one GPU: sampling after the product, replayed from a graph as the engine does, and the loss
// forward and backward, against a plain read of the same run. Median of repeats, warm-up left out.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdio>

#include "bench/gpu/timing.h"
#include "trainer/bench/cuda/ceilings.h"
#include "trainer/ops/cuda/vocabulary/vocabulary_kernels.h"
#include "trainer/ops/linear.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

using bench::median_seconds;

at::TensorOptions on_gpu(at::ScalarType type) { return at::TensorOptions().device(at::kCUDA, 0).dtype(type); }
at::Tensor randn(at::IntArrayRef shape, double scale) {
  return at::randn(shape, on_gpu(at::kFloat)).mul_(scale).to(at::kBFloat16);
}

double read_ceiling() {
  const at::Tensor data = at::zeros({int64_t{1} << 32}, on_gpu(at::kByte)), sink = at::zeros({1}, on_gpu(at::kInt));
  const auto read = [&] {
    bench::launch_read(data.const_data_ptr(), data.nbytes(), static_cast<unsigned*>(sink.mutable_data_ptr()),
                       c10::cuda::getCurrentCUDAStream());
  };
  return static_cast<double>(data.nbytes()) / median_seconds(read, 3);
}

struct Sampling {
  const char* name;
  int32_t top_k;
  float top_p;
};

// Seconds of the kernels after the product, 20 draws in a graph.
double sampling_seconds(const at::Tensor& z, const Sampling& kind) {
  constexpr int kDraws = 20;
  const int64_t rows = z.size(0), vocab = z.size(1);
  const at::Tensor keys = at::arange(3 * rows, on_gpu(at::kLong)).view({rows, 3});
  const at::Tensor parameters = at::tensor({1.0f, kind.top_p, 0.0f, 0.0f}).repeat({rows, 1}).to(z.device());
  const at::Tensor top_k = at::full({rows}, kind.top_k, on_gpu(at::kInt));
  const at::Tensor partials = at::empty({rows, cuda::slices_of(vocab), 2}, on_gpu(at::kFloat));
  const at::Tensor filters = at::empty({rows, 2}, on_gpu(at::kFloat));
  const at::Tensor ids = at::empty({rows}, on_gpu(at::kLong)), logprobs = at::empty({rows}, on_gpu(at::kFloat));
  const cuda::Logits logits{static_cast<const uint16_t*>(z.const_data_ptr()), rows, vocab};
  cuda::RowOptions options;
  options.parameters = parameters.const_data_ptr<float>();
  options.top_ks = top_k.const_data_ptr<int32_t>();
  const bool filtered = kind.top_k > 0 || kind.top_p < 1;
  auto* filter = filtered ? static_cast<cuda::RowFilter*>(filters.mutable_data_ptr()) : nullptr;
  auto* slices = static_cast<cuda::SlicePartial*>(partials.mutable_data_ptr());
  const auto draw = [&] {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    if (filtered) cuda::find_filters(logits, options, filter, stream);
    cuda::slice_partials(logits, options, filter, slices, nullptr, stream);
    cuda::finish_samples(logits, options, filter, keys.const_data_ptr<int64_t>(), slices,
                         ids.mutable_data_ptr<int64_t>(), logprobs.mutable_data_ptr<float>(), stream);
  };
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  for (int i = 0; i < kDraws; ++i) draw();
  graph.capture_end();
  return median_seconds([&] { graph.replay(); }, 5) / kDraws;
}

void bench_sampling(double ceiling) {
  const Sampling kinds[] = {{"plain", 0, 1.0f}, {"top_k 50", 50, 1.0f}, {"top_p 0.95", 0, 0.95f}};
  for (const int64_t vocab : {128256, 151936}) {
    for (const int64_t rows : {1, 4, 16, 64, 256, 1024}) {
      const at::Tensor z = randn({rows, vocab}, 3.0);
      std::printf("sampling %4ld rows of %ld:", static_cast<long>(rows), static_cast<long>(vocab));
      for (const Sampling& kind : kinds) {
        const double time = sampling_seconds(z, kind);
        std::printf("  %s %.1f us (one read at the ceiling %.1f)", kind.name, time * 1e6,
                    static_cast<double>(z.nbytes()) / ceiling * 1e6);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
}

// The kernels of the loss without the products, on logits that the L2 cache does not hold.
void bench_loss_kernels(double ceiling) {
  constexpr int64_t kRows = 2048, kVocab = 128256;
  const at::Tensor z = randn({kRows, kVocab}, 3.0);
  const at::Tensor targets = at::arange(kRows, on_gpu(at::kLong)), up = at::ones({kRows}, on_gpu(at::kFloat));
  const at::Tensor partials = at::empty({kRows, cuda::slices_of(kVocab), 2}, on_gpu(at::kFloat));
  const at::Tensor dots = at::empty({kRows, cuda::slices_of(kVocab)}, on_gpu(at::kFloat));
  const at::Tensor statistics = at::empty({kRows, 4}, on_gpu(at::kFloat)),
                   out = at::empty({2, kRows}, on_gpu(at::kFloat));
  const cuda::Logits logits{static_cast<const uint16_t*>(z.const_data_ptr()), kRows, kVocab};
  auto* slices = static_cast<cuda::SlicePartial*>(partials.mutable_data_ptr());
  cuda::LogprobOutputs outputs;
  outputs.logprobs = out.mutable_data_ptr<float>();
  outputs.entropies = out.mutable_data_ptr<float>() + kRows;
  outputs.statistics = static_cast<cuda::RowStatistics*>(statistics.mutable_data_ptr());
  for (const bool entropy : {false, true}) {
    float* dot = entropy ? dots.mutable_data_ptr<float>() : nullptr;
    const double forward = median_seconds(
        [&] {
          const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
          cuda::slice_partials(logits, {}, nullptr, slices, dot, stream);
          cuda::finish_logprobs(logits, {}, nullptr, targets.const_data_ptr<int64_t>(), false, slices, dot, outputs,
                                stream);
        },
        5);
    const at::Tensor copy = z.clone();
    const double backward = median_seconds(
        [&] {
          cuda::logits_gradient(static_cast<uint16_t*>(copy.mutable_data_ptr()), kRows, kVocab, kVocab, {}, nullptr,
                                targets.const_data_ptr<int64_t>(), outputs.statistics, up.const_data_ptr<float>(),
                                entropy ? up.const_data_ptr<float>() : nullptr, c10::cuda::getCurrentCUDAStream());
        },
        5);
    const double bytes = static_cast<double>(z.nbytes());
    std::printf("loss kernels%s, %ld rows of %ld: forward %.2f TB/s (%.0f %%), gradient %.2f TB/s read and written\n",
                entropy ? " with entropy" : "", static_cast<long>(kRows), static_cast<long>(kVocab),
                bytes / forward * 1e-12, 100 * bytes / forward / ceiling, 2 * bytes / backward * 1e-12);
  }
}

// The op: products of 2 rows vocab hidden FLOPs each, one forward, two or three backward.
void bench_loss(int64_t rows, int64_t hidden_size, int64_t vocab) {
  const at::Tensor hidden = randn({rows, hidden_size}, 1.0), head = randn({vocab, hidden_size}, 0.02);
  const at::Tensor targets = at::arange(rows, on_gpu(at::kLong));
  const double product = 2.0 * static_cast<double>(rows * vocab) * static_cast<double>(hidden_size);
  double forward = 0;
  {
    const at::NoGradGuard no_grad;
    forward = median_seconds([&] { token_logprobs(hidden, head, targets, {}); }, 3);
  }
  at::Tensor x = hidden.clone().set_requires_grad(true), w = head.clone().set_requires_grad(true);
  w.mutable_grad() = at::zeros_like(head);
  const double both = median_seconds(
      [&] {
        x.mutable_grad().reset();
        token_logprobs(x, w, targets, {}).mean().backward();
      },
      3);
  std::printf(
      "token_logprobs, %ld rows, %ld -> %ld: forward %.2f ms (%.0f TFLOP/s), forward and backward %.2f ms "
      "(%.0f TFLOP/s of the three products)\n",
      static_cast<long>(rows), static_cast<long>(hidden_size), static_cast<long>(vocab), forward * 1e3,
      product / forward * 1e-12, both * 1e3, 3 * product / both * 1e-12);
}

int run() {
  if (c10::cuda::device_count() == 0) {
    std::fprintf(stderr, "error: no GPU is visible\n");
    return 1;
  }
  const double ceiling = read_ceiling();
  std::printf("plain read: %.2f TB/s\n", ceiling * 1e-12);
  bench_sampling(ceiling);
  bench_loss_kernels(ceiling);
  bench_loss(2048, 4096, 128256);
  bench_loss(16384, 4096, 128256);
  bench_loss(16384, 2048, 151936);
  return 0;
}

}  // namespace
}  // namespace trireme

int main() { return trireme::run(); }
