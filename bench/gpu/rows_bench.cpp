// The row-local kernels on one GPU: GB/s of what each must read and write against a device-to-device copy of the same
// run, and microseconds of a call on 64 rows from a graph, as in decode. Median of repeats, warm-up left out.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <vector>

#include "bench/gpu/timing.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

constexpr int64_t kRows = 16'384;
constexpr int64_t kRows = 64;
constexpr double kEps = 1e-6;

at::TensorOptions device(at::ScalarType type) {
  return at::TensorOptions().device(at::Device(at::kCUDA, 0)).dtype(type);
}
at::Tensor randn(at::IntArrayRef shape) { return at::randn(shape, device(at::kBFloat16)); }

// Of a call between others in a graph.
double seconds_in_graph(const std::function<void()>& call) {
  constexpr int kCalls = 200;
  call();
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  for (int i = 0; i < kCalls; ++i) call();
  graph.capture_end();
  return bench::median_seconds([&] { graph.replay(); }, 3) / kCalls;
}

double copy_ceiling() {
  const at::Tensor from = at::zeros({int64_t{1} << 31}, device(at::kByte)), to = at::empty_like(from);
  const auto copy = [&] {
    cudaMemcpyAsync(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes(), cudaMemcpyDeviceToDevice,
                    c10::cuda::getCurrentCUDAStream());
  };
  return 2.0 * static_cast<double>(from.nbytes()) / bench::median_seconds(copy, 5);
}

class Report final {
 public:
  explicit Report(double ceiling) : ceiling_(ceiling) {}
  // elements: bfloat16 numbers read and written.
  void large(const char* name, int64_t elements, const std::function<void()>& call) const {
    const double time = bench::median_seconds(call, 20), rate = 2.0 * static_cast<double>(elements) / time;
    std::printf("  %-28s %7.1f us %7.0f GB/s (%3.0f %% of the copy)\n", name, time * 1e6, rate * 1e-9,
                100 * rate / ceiling_);
    std::fflush(stdout);
  }
  void small(const char* name, const std::function<void()>& call) const {
    std::printf("  %-28s %7.2f us\n", name, seconds_in_graph(call) * 1e6);
    std::fflush(stdout);
  }

 private:
  double ceiling_;
};

struct Shape {
  const char* name;
  int64_t hidden, intermediate, q_heads, kv_heads;
  bool head_norms;
};

// The inputs of a layer's row-local steps for so many rows.
struct Inputs {
  at::Tensor x, delta, norm, gate_up, qkv, q_norm, k_norm, table, positions, embedding, ids, arena_k, arena_v;
  QkvLayout layout;
  CachePlan plan;

  Inputs(const Shape& shape, int64_t rows) : layout{shape.q_heads, shape.kv_heads, 128, kEps} {
    x = randn({rows, shape.hidden}), delta = randn({rows, shape.hidden}), norm = randn({shape.hidden});
    gate_up = randn({rows, 2 * shape.intermediate});
    qkv = randn({rows, (shape.q_heads + 2 * shape.kv_heads) * 128});
    if (shape.head_norms) q_norm = randn({128}), k_norm = randn({128});
    RopeOptions options;
    options.head_dim = 128;
    table = rope_table(at::arange(4096, at::kLong), options).to(x.device());
    positions = at::arange(rows, device(at::kLong)).remainder(4096);
    embedding = randn({32'768, shape.hidden});
    ids = at::randint(0, 32'768, {rows}, device(at::kLong));
    arena_k = randn({rows, shape.kv_heads, 128}), arena_v = randn({rows, shape.kv_heads, 128});
    plan.token_rows = at::randperm(rows, device(at::kLong));
  }
};

// Gradients of `outputs` for `inputs`, the graph kept.
std::function<void()> backward(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs) {
  std::vector<at::Tensor> douts;
  for (const at::Tensor& output : outputs) douts.push_back(randn(output.sizes()));
  return [=] { torch::autograd::grad(outputs, inputs, douts, /*retain_graph=*/true); };
}

void bench_large(const Shape& shape, const Report& report) {
  Inputs in(shape, kRows);
  const int64_t wide = kRows * shape.hidden, inner = kRows * shape.intermediate;
  const int64_t q = kRows * shape.q_heads * 128, kv = kRows * shape.kv_heads * 128;
  std::printf("%s, %ld rows\n", shape.name, static_cast<long>(kRows));
  {
    const at::NoGradGuard no_grad;
    report.large("rms_norm", 2 * wide, [&] { trireme::rms_norm(in.x, in.norm, kEps); });
    report.large("add_rms_norm", 4 * wide, [&] { add_rms_norm(in.x, in.delta, in.norm, kEps); });
    report.large("swiglu_halves", 3 * inner, [&] { swiglu_halves(in.gate_up); });
    report.large("split_qkv", 2 * (q + kv),
                 [&] { split_qkv(in.qkv, in.q_norm, in.k_norm, in.table, in.positions, in.layout); });
    report.large("split_qkv_cached", 2 * (q + 2 * kv), [&] {
      split_qkv_cached(in.qkv, in.q_norm, in.k_norm, in.table, in.positions, in.layout, in.arena_k, in.arena_v,
                       in.plan);
    });
    report.large("embed", 2 * wide, [&] { embed(in.embedding, in.ids); });
  }
  for (at::Tensor* leaf : {&in.x, &in.delta, &in.norm, &in.gate_up, &in.qkv, &in.embedding})
    leaf->set_requires_grad(true);
  const NormResult normed = add_rms_norm(in.x, in.delta, in.norm, kEps);
  report.large("add_rms_norm backward", 4 * wide, backward({normed.sum, normed.normed}, {in.x, in.delta, in.norm}));
  report.large("swiglu_halves backward", 5 * inner, backward({swiglu_halves(in.gate_up)}, {in.gate_up}));
  std::vector<at::Tensor> leaves = {in.qkv};
  if (shape.head_norms) {
    in.q_norm.set_requires_grad(true), in.k_norm.set_requires_grad(true);
    leaves.insert(leaves.end(), {in.q_norm, in.k_norm});
  }
  const Qkv parts = split_qkv(in.qkv, in.q_norm, in.k_norm, in.table, in.positions, in.layout);
  report.large("split_qkv backward", (shape.head_norms ? 3 : 2) * (q + kv) + 2 * kv,
               backward({parts.q, parts.k, parts.v}, leaves));
  in.embedding.mutable_grad() = at::zeros(in.embedding.sizes(), device(at::kFloat));
  const at::Tensor rows = embed(in.embedding, in.ids), drows = randn(rows.sizes());
  // Read: the rows' gradients; read and written in float32: the rows of the ids that occur, about 12,900 of 32,768.
  const int64_t distinct = std::get<0>(at::_unique(in.ids)).size(0);
  report.large("embed backward, sort too", wide + 4 * distinct * shape.hidden,
               [&] { torch::autograd::backward({rows}, {drows}, /*retain_graph=*/true); });
}

void bench_small(const Shape& shape, const Report& report) {
  const at::NoGradGuard no_grad;
  const Inputs in(shape, kRows);
  std::printf("%s, %ld rows, in a graph\n", shape.name, static_cast<long>(kRows));
  report.small("rms_norm", [&] { trireme::rms_norm(in.x, in.norm, kEps); });
  report.small("add_rms_norm", [&] { add_rms_norm(in.x, in.delta, in.norm, kEps); });
  report.small("swiglu_halves", [&] { swiglu_halves(in.gate_up); });
  report.small("split_qkv_cached", [&] {
    split_qkv_cached(in.qkv, in.q_norm, in.k_norm, in.table, in.positions, in.layout, in.arena_k, in.arena_v, in.plan);
  });
  report.small("embed", [&] { embed(in.embedding, in.ids); });
}

int run() {
  if (c10::cuda::device_count() == 0) {
    std::fprintf(stderr, "error: no GPU is visible\n");
    return 1;
  }
  const double ceiling = copy_ceiling();
  std::printf("copy: %.2f TB/s read and written\n", ceiling * 1e-12);
  const Report report(ceiling);
  const Shape shapes[] = {{"width 2048 (Qwen3-1.7B)", 2048, 6144, 16, 8, true},
                          {"width 4096 (Llama-3.1-8B)", 4096, 14'336, 32, 8, false},
                          {"width 4096 (Qwen3-8B)", 4096, 12'288, 32, 8, true}};
  for (const Shape& shape : shapes) {
    bench_large(shape, report);
    bench_small(shape, report);
  }
  return 0;
}

}  // namespace
}  // namespace trireme

int main() { return trireme::run(); }
