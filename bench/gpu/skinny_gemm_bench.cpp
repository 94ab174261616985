// Skinny GEMMs on one GPU: microseconds and TB/s of weights for our kernel (launched one after another, and
// overlapping) and for cublasLt, beside a plain read of the same bytes in the same run. Every measurement is a CUDA
// graph of launches that go round more than 200 MB of weights, so that the L2 cache serves none; median of repeats,
// warm-up left out.
//   gpu_skinny_gemm_bench                    the table
//   gpu_skinny_gemm_bench sweep OUT IN ROWS [swiglu]   the plans of one shape with the lowest predicted times, fastest
//                                         first
//   gpu_skinny_gemm_bench layers             the GEMMs of a layer one after another, as decoding runs them
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <string>

#include "base/error.h"
#include "trainer/bench/cuda/ceilings.h"
#include "trainer/ops/cuda/gemm/gemm_choice.h"
#include "trainer/ops/cuda_ops.h"

namespace trireme {
namespace {

using cuda::SkinnyGemmArgs;
using cuda::SkinnyMmaPlan;

at::Device gpu() { return {at::kCUDA, 0}; }
at::Tensor randn(at::IntArrayRef shape) {
  return at::randn(shape, at::TensorOptions().device(gpu()).dtype(at::kBFloat16)).mul_(0.05);
}
cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

// Median microseconds of one launch: `body` launches `launches` of them, captured once and replayed.
double graph_us(int64_t launches, const std::function<void()>& body) {
  constexpr int kRepeats = 9;
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  body();
  c10::cuda::device_synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  body();
  graph.capture_end();
  cudaEvent_t from = nullptr, to = nullptr;
  cudaEventCreate(&from);
  cudaEventCreate(&to);
  graph.replay();
  std::vector<double> times;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    cudaEventRecord(from, stream());
    graph.replay();
    cudaEventRecord(to, stream());
    cudaEventSynchronize(to);
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, from, to);
    times.push_back(milliseconds * 1e3 / static_cast<double>(launches));
  }
  cudaEventDestroy(from);
  cudaEventDestroy(to);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) fail_internal(cudaGetErrorString(error));
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return times[kRepeats / 2];
}

struct Shape {
  const char* name;
  int64_t out, in;  // of the weight
  bool swiglu = false;
};
const std::vector<Shape> kShapes = {
    {"8B qkv", 6144, 4096},        {"8B o", 4096, 4096},
    {"8B gate_up", 28672, 4096},   {"8B gate_up+act", 28672, 4096, true},
    {"8B down", 4096, 14336},      {"8B head", 128256, 4096},
    {"1.7B qkv", 4096, 2048},      {"1.7B o", 2048, 2048},
    {"1.7B gate_up", 12288, 2048}, {"1.7B gate_up+act", 12288, 2048, true},
    {"1.7B down", 2048, 6144},     {"1.7B head", 151936, 2048},
};

// Weights of one shape, more than 200 MB and at least eight of them.
struct Weights {
  std::vector<at::Tensor> all;
  double bytes = 0;  // of one
  explicit Weights(const Shape& s) : bytes(static_cast<double>(s.out * s.in) * 2) {
    const int64_t count = std::max<int64_t>(4, static_cast<int64_t>(240e6 / bytes) + 1);
    for (int64_t i = 0; i < count; ++i) all.push_back(randn({s.out, s.in}));
  }
  int64_t launches() const { return static_cast<int64_t>(all.size()); }
};

at::Tensor gemm(const Shape& s, const at::Tensor& x, const at::Tensor& weight) {
  return s.swiglu ? cuda::gate_up_swiglu(x, weight) : cuda::linear_forward(x, weight, {});
}

double read_us(const Weights& weights) {
  const at::Tensor sink = at::zeros({1}, at::TensorOptions().device(gpu()).dtype(at::kInt));
  return graph_us(weights.launches(), [&] {
    for (const at::Tensor& w : weights.all)
      bench::launch_read(w.const_data_ptr(), w.nbytes(), static_cast<unsigned*>(sink.mutable_data_ptr()), stream());
  });
}

double gemm_us(const Shape& s, const Weights& weights, int64_t rows, int64_t limit, bool overlap) {
  cuda::set_own_rows_limit(limit);
  const at::Tensor x = randn({rows, s.in});
  return graph_us(weights.launches(), [&] {
    std::optional<cuda::DecodeScope> scope;
    if (overlap) scope.emplace();
    for (const at::Tensor& w : weights.all) gemm(s, x, w);
  });
}

SkinnyGemmArgs args_of(const Shape& s, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y) {
  SkinnyGemmArgs args;
  args.x = x.const_data_ptr();
  args.x_stride = x.stride(0);
  args.weight = weight.const_data_ptr();
  args.weight_stride = weight.stride(0);
  args.y = y.mutable_data_ptr();
  args.rows = x.size(0);
  args.in = s.in;
  args.out = s.swiglu ? s.out / 2 : s.out;
  args.swiglu = s.swiglu;
  return args;
}

std::string text(const SkinnyMmaPlan& p) {
  char line[160];
  std::snprintf(line, sizeof line, "%3d/%d/%d cluster %d x %3d slabs %d stages %2d %3zu KB", p.columns, p.fragments,
                p.tokens, p.cluster, p.clusters, p.slabs, p.stages, p.shared_bytes >> 10);
  return line;
}

std::string text(const cuda::SkinnyWgmmaPlan& p) {
  char line[160];
  std::snprintf(line, sizeof line, "%3d across %d along %d %s x %3d slabs %d stages %2d %3zu KB", p.columns, p.across,
                p.along, p.clustered ? "clustered" : "alone", p.teams, p.slabs, p.stages, p.shared_bytes >> 10);
  return line;
}

std::string text(const cuda::GemmChoice& choice) {
  using Kernel = cuda::GemmChoice::Kernel;
  return choice.kernel == Kernel::kSkinnyGemmMma     ? "mma: " + text(choice.mma)
         : choice.kernel == Kernel::kSkinnyGemmWgmma ? "wgmma: " + text(choice.wgmma)
                                                     : "library";
}

void table() {
  std::printf("%-17s %4s | %8s %5s | %8s %5s | %8s %5s | %8s %5s | plan\n", "weight", "rows", "read us", "TB/s",
              "own us", "TB/s", "overlap", "TB/s", "cublasLt", "TB/s");
  for (const Shape& s : kShapes) {
    const Weights weights(s);
    const double read = read_us(weights);
    for (const int64_t rows : {1, 16, 32, 48, 64, 96, 128, 192, 256}) {
      const double own = gemm_us(s, weights, rows, cuda::kMostOwnRows, false);
      const double overlapped = gemm_us(s, weights, rows, cuda::kMostOwnRows, true);
      const double library = gemm_us(s, weights, rows, 0, false);
      const auto rate = [&](double us) { return weights.bytes / us * 1e-6; };
      const at::Tensor x = randn({rows, s.in}), y = at::empty({rows, s.swiglu ? s.out / 2 : s.out}, x.options());
      const cuda::GemmChoice choice = cuda::choose_gemm(0, args_of(s, x, weights.all[0], y), nullptr);
      std::printf("%-17s %4lld | %8.2f %5.2f | %8.2f %5.2f | %8.2f %5.2f | %8.2f %5.2f | %s\n", s.name,
                  static_cast<long long>(rows), read, rate(read), own, rate(own), overlapped, rate(overlapped), library,
                  rate(library), text(choice).c_str());
      std::fflush(stdout);
    }
  }
}

void sweep(const Shape& s, int64_t rows) {
  const Weights weights(s);
  const at::Tensor x = randn({rows, s.in}), y = at::empty({rows, s.swiglu ? s.out / 2 : s.out}, x.options());
  std::printf("%lldx%lld, %lld rows%s: plain read %.2f us\n", static_cast<long long>(s.out),
              static_cast<long long>(s.in), static_cast<long long>(rows), s.swiglu ? ", swiglu" : "", read_us(weights));
  struct Result {
    double us, overlapped, predicted;
    std::string plan;
  };
  std::vector<Result> results;
  const auto measure_all = [&](auto plans, auto launch) {
    constexpr double kMostPredicted = 2.5;
    double best = std::numeric_limits<double>::infinity();
    for (const auto& plan : plans) best = std::min(best, plan.predicted_us);
    for (const auto& plan : plans) {
      if (plan.predicted_us > kMostPredicted * best) continue;
      const auto measure = [&](bool overlap) {
        return graph_us(weights.launches(), [&] {
          for (const at::Tensor& w : weights.all) {
            SkinnyGemmArgs args = args_of(s, x, w, y);
            args.overlap = overlap;
            if (const cudaError_t error = launch(args, plan, stream()); error != cudaSuccess)
              fail_internal(cudaGetErrorString(error));
          }
        });
      };
      results.push_back({measure(false), measure(true), plan.predicted_us, text(plan)});
    }
  };
  const SkinnyGemmArgs args = args_of(s, x, weights.all[0], y);
  if (rows <= cuda::kMostMmaRows) measure_all(cuda::skinny_gemm_mma_plans(args), cuda::skinny_gemm_mma);
  measure_all(cuda::skinny_gemm_wgmma_plans(args), cuda::skinny_gemm_wgmma);
  std::sort(results.begin(), results.end(),
            [](const Result& a, const Result& b) { return a.overlapped < b.overlapped; });
  for (const Result& r : results) {
    std::printf("%8.2f us %5.2f TB/s | overlap %8.2f us %5.2f TB/s | predicted %7.2f | %s\n", r.us,
                weights.bytes / r.us * 1e-6, r.overlapped, weights.bytes / r.overlapped * 1e-6, r.predicted,
                r.plan.c_str());
  }
}

// Norm, qkv, o, norm, gate_up with activation, down: the GEMMs of a layer and the kernels that stand between them
// in decoding, but no attention.
void layers() {
  struct Model {
    const char* name;
    int64_t hidden, qkv, heads, width, layers;
  };
  for (const Model& m : {Model{"8B", 4096, 6144, 4096, 14336, 6}, Model{"1.7B", 2048, 4096, 2048, 6144, 14}}) {
    struct Layer {
      at::Tensor qkv, o, gate_up, down, norm;
    };
    std::vector<Layer> all;
    for (int64_t i = 0; i < m.layers; ++i) {
      all.push_back({randn({m.qkv, m.hidden}), randn({m.hidden, m.heads}), randn({2 * m.width, m.hidden}),
                     randn({m.hidden, m.width}), randn({m.hidden})});
    }
    double bytes = 0;
    for (const at::Tensor* t : {&all[0].qkv, &all[0].o, &all[0].gate_up, &all[0].down})
      bytes += static_cast<double>(t->nbytes());
    for (const int64_t rows : {1, 16, 32, 48, 64, 96, 128, 192, 256}) {
      const at::Tensor x = randn({rows, m.hidden});
      const auto measure = [&](int64_t limit, bool overlap, bool fused) {
        cuda::set_own_rows_limit(limit);
        return graph_us(m.layers, [&] {
          std::optional<cuda::DecodeScope> scope;
          if (overlap) scope.emplace();
          at::Tensor h = x;
          for (const Layer& l : all) {
            const NormResult n = cuda::add_rms_norm(h, x, l.norm, 1e-6);
            const at::Tensor qkv = cuda::linear_forward(n.normed, l.qkv, {});
            const at::Tensor o = cuda::linear_forward(qkv.narrow(1, 0, m.heads), l.o, {});
            const NormResult p = cuda::add_rms_norm(o, n.sum, l.norm, 1e-6);
            const at::Tensor act = fused ? cuda::gate_up_swiglu(p.normed, l.gate_up)
                                         : cuda::swiglu_halves(cuda::linear_forward(p.normed, l.gate_up, {}));
            h = cuda::linear_forward(act, l.down, {});
          }
        });
      };
      const auto line = [&](const char* how, double us) {
        std::printf("%-5s %3lld rows, %-28s %8.2f us a layer, %5.2f TB/s of weights\n", m.name,
                    static_cast<long long>(rows), how, us, bytes / us * 1e-6);
        std::fflush(stdout);
      };
      line("cublasLt", measure(0, false, false));
      line("own", measure(cuda::kMostOwnRows, false, false));
      line("own, fused activation", measure(cuda::kMostOwnRows, false, true));
      line("own, fused, overlapping", measure(cuda::kMostOwnRows, true, true));
      line("as decoding chooses", measure(cuda::kWherePaid, true, true));
    }
  }
}

int run(int count, char** values) {
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard device(gpu());
  const std::string what = count > 1 ? values[1] : "table";
  if (what == "table" && count <= 2) {
    table();
  } else if (what == "layers" && count == 2) {
    layers();
  } else if (what == "sweep" && (count == 5 || (count == 6 && std::strcmp(values[5], "swiglu") == 0))) {
    sweep({"", std::stoll(values[2]), std::stoll(values[3]), count == 6}, std::stoll(values[4]));
  } else {
    std::fprintf(stderr, "usage: %s [table | layers | sweep OUT IN ROWS [swiglu]]\n", values[0]);
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace trireme

int main(int count, char** values) {
  try {
    return trireme::run(count, values);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
