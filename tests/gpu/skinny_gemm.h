// What the tests of the skinny GEMMs share: the library's GEMM as the truth, arguments of our kernels, layers.
#pragma once

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <functional>
#include <ostream>
#include <vector>

#include "tests/gpu/device.h"
#include "trainer/ops/cuda/gemm/skinny_gemm.h"
#include "trainer/ops/cuda_ops.h"

namespace trireme::testing {

struct Shape {  // of a weight
  int64_t out, in;
};
inline std::ostream& operator<<(std::ostream& to, const Shape& s) { return to << s.out << "x" << s.in; }

// Elements whose bits differ.
inline int64_t differing(const at::Tensor& a, const at::Tensor& b) {
  return a.contiguous().view(at::kShort).ne(b.contiguous().view(at::kShort)).sum().item<int64_t>();
}

// own_rows_limit while it lives.
class Limit final {
 public:
  explicit Limit(int64_t rows) : before_(cuda::own_rows_limit()) { cuda::set_own_rows_limit(rows); }
  ~Limit() { cuda::set_own_rows_limit(before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  int64_t before_;
};

inline at::Tensor by_library(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const Limit none(0);
  return cuda::linear_forward(x, weight, bias);
}

inline cuda::SkinnyGemmArgs args_of(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                                    const at::Tensor& y, bool swiglu = false) {
  cuda::SkinnyGemmArgs args;
  args.x = x.const_data_ptr();
  args.x_stride = x.stride(0);
  args.weight = weight.const_data_ptr();
  args.weight_stride = weight.stride(0);
  args.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  args.y = y.mutable_data_ptr();
  args.rows = x.size(0);
  args.in = x.size(1);
  args.out = swiglu ? weight.size(0) / 2 : weight.size(0);
  args.swiglu = swiglu;
  return args;
}

// Launches (args, stream) into the middle of a larger buffer; `outside` gets the number of elements changed around the
// result.
using Launch = std::function<cudaError_t(const cuda::SkinnyGemmArgs&, cudaStream_t)>;
inline at::Tensor guarded(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, bool swiglu,
                          const Launch& launch, int64_t* outside) {
  const int64_t out = swiglu ? weight.size(0) / 2 : weight.size(0), rows = x.size(0);
  constexpr int64_t kGuardRows = 300;  // more than a kernel has places for
  const at::Tensor buffer =
      at::full({rows + 2 * kGuardRows, out}, -77.0, at::TensorOptions().device(gpu()).dtype(at::kBFloat16));
  const at::Tensor y = buffer.narrow(0, kGuardRows, rows);
  const cudaError_t error = launch(args_of(x, weight, bias, y, swiglu), c10::cuda::getCurrentCUDAStream().stream());
  EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
  c10::cuda::device_synchronize();
  const auto changed = [&](int64_t from) { return buffer.narrow(0, from, kGuardRows).ne(-77.0).sum().item<int64_t>(); };
  *outside = changed(0) + changed(kGuardRows + rows);
  return y;
}

// The shapes of weights of Llama 8B and Qwen3 1.7B, but for the latter's head, and odd ones.
inline const std::vector<Shape> kShapes = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {128256, 4096},
                                           {4096, 2048}, {2048, 2048}, {12288, 2048}, {2048, 6144},  {1536, 1536},
                                           {200, 512},   {8, 64},      {1000, 192}};

// What follows is the same for both kernels. A Kernel has Plan, plans(args), launch(args, plan, stream), text(plan),
// and fewest_blocks(plan): the same plan with every tile behind another.

template <class Kernel>
at::Tensor by_plan(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                   const typename Kernel::Plan& plan, bool swiglu, int64_t* outside) {
  return guarded(
      x, weight, bias, swiglu,
      [&](const cuda::SkinnyGemmArgs& args, cudaStream_t stream) { return Kernel::launch(args, plan, stream); },
      outside);
}

// Every plan for the first rows of x, so many each time, has the bits of `whole` and writes nothing else.
template <class Kernel>
void expect_bits_of_every_plan(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                               const at::Tensor& whole, const std::vector<int64_t>& row_counts, bool swiglu,
                               bool fewest_blocks_too, size_t* tried = nullptr) {
  for (const int64_t rows : row_counts) {
    const at::Tensor part = x.narrow(0, 0, rows);
    const auto plans = Kernel::plans(args_of(part, weight, bias, whole, swiglu));
    EXPECT_FALSE(plans.empty());
    for (typename Kernel::Plan plan : plans) {
      for (int turn = 0; turn < (fewest_blocks_too ? 2 : 1); ++turn) {
        if (turn == 1) Kernel::fewest_blocks(plan);
        int64_t outside = -1;
        const at::Tensor y = by_plan<Kernel>(part, weight, bias, plan, swiglu, &outside);
        ASSERT_EQ(differing(y, whole.narrow(0, 0, rows)), 0)
            << rows << " rows of " << x.sizes() << " by " << weight.sizes() << ": " << Kernel::text(plan);
        ASSERT_EQ(outside, 0) << Kernel::text(plan);
        if (tried != nullptr) ++*tried;
      }
    }
  }
}

template <class Kernel>
void expect_bits_of_every_plan(int64_t most_rows, const std::vector<int64_t>& row_counts) {
  const at::NoGradGuard no_grad;
  seed_gpu(3);
  size_t tried = 0;
  for (const auto& [out, in] : {Shape{1704, 1024}, Shape{200, 512}, Shape{5000, 320}}) {
    const at::Tensor x = gpu_randn({most_rows, in}), weight = gpu_randn({out, in}, 0.05), bias = gpu_randn({out});
    const at::Tensor whole = by_library(x, weight, bias);
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_every_plan<Kernel>(x, weight, bias, whole, row_counts, false, true, &tried));
  }
  EXPECT_GT(tried, 1000u);
}

template <class Kernel>
void expect_unfused_bits_of_every_fused_plan(int64_t most_rows, const std::vector<int64_t>& row_counts,
                                             bool fewest_blocks_too) {
  const at::NoGradGuard no_grad;
  seed_gpu(4);
  for (const auto& [width, in] : {Shape{856, 1024}, Shape{104, 512}}) {
    const at::Tensor x = gpu_randn({most_rows, in}, 2.0), weight = gpu_randn({2 * width, in}, 0.1);
    const at::Tensor whole = cuda::swiglu_halves(by_library(x, weight, {}));
    ASSERT_NO_FATAL_FAILURE(
        expect_bits_of_every_plan<Kernel>(x, weight, {}, whole, row_counts, true, fewest_blocks_too));
  }
}

// gate_up_swiglu, whatever it chooses up to `limit` rows, over the layers of real models.
inline void expect_unfused_bits_of_real_shapes(int64_t limit, int64_t most_rows,
                                               const std::vector<int64_t>& row_counts) {
  const at::NoGradGuard no_grad;
  seed_gpu(5);
  for (const auto& [width, in] : {Shape{14336, 4096}, Shape{6144, 2048}, Shape{12288, 4096}}) {
    const at::Tensor x = gpu_randn({most_rows, in}), weight = gpu_randn({2 * width, in}, 0.03);
    const at::Tensor whole = cuda::swiglu_halves(by_library(x, weight, {}));
    const Limit most(limit);
    for (const int64_t rows : row_counts) {
      EXPECT_EQ(differing(cuda::gate_up_swiglu(x.narrow(0, 0, rows), weight), whole.narrow(0, 0, rows)), 0)
          << rows << " rows, width " << width;
    }
  }
}

// Whether the first plan for the arguments, changed, is refused.
template <class Kernel>
bool refused(const cuda::SkinnyGemmArgs& args, const std::function<void(typename Kernel::Plan&)>& change) {
  typename Kernel::Plan plan = Kernel::plans(args).front();
  change(plan);
  return Kernel::launch(args, plan, c10::cuda::getCurrentCUDAStream().stream()) == cudaErrorInvalidValue;
}

// Weights of layers without attention. GEMMs follow one another, each reading what the one before wrote, twice
// straight after one another and once behind another short kernel.
struct GemmLayers {
  using Gemm = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight, bool swiglu)>;
  std::vector<at::Tensor> in, gate_up, down;
  at::Tensor norm;

  GemmLayers(int64_t hidden, int64_t width, int64_t layers) : norm(at::ones({hidden}, gpu_randn({1}).options())) {
    for (int64_t i = 0; i < layers; ++i) {
      in.push_back(gpu_randn({hidden, hidden}, 0.02));
      gate_up.push_back(gpu_randn({2 * width, hidden}, 0.02));
      down.push_back(gpu_randn({hidden, width}, 0.02));
    }
  }
  at::Tensor run(at::Tensor x, const Gemm& gemm) const {
    for (size_t i = 0; i < in.size(); ++i) {
      const at::Tensor a = gemm(gemm(x, in[i], false), in[i], false);
      const NormResult n = cuda::add_rms_norm(a, x, norm, 1e-6);
      x = gemm(gemm(n.normed, gate_up[i], true), down[i], false);
    }
    return x;
  }
  // By linear_forward and gate_up_swiglu, whatever they choose.
  at::Tensor run(const at::Tensor& x) const {
    return run(x, [](const at::Tensor& rows, const at::Tensor& weight, bool swiglu) {
      return swiglu ? cuda::gate_up_swiglu(rows, weight) : cuda::linear_forward(rows, weight, {});
    });
  }
  at::Tensor by_library(const at::Tensor& x) const {
    const Limit none(0);
    return run(x);
  }
};

// The layers as a graph of overlapping launches, replayed with other rows, and back to back. Buffers come back to the
// allocator, so that outputs lie where earlier inputs did.
inline void expect_bits_from_graph(const GemmLayers& layers, int64_t rows) {
  const int64_t hidden = layers.norm.size(0);
  const at::Tensor first = gpu_randn({rows, hidden}), second = gpu_randn({rows, hidden});
  const at::Tensor expected_first = layers.by_library(first), expected_second = layers.by_library(second);
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
  const at::Tensor x = first.clone();
  at::Tensor y;
  {
    const cuda::DecodeScope overlap;  // plans and algorithms exist before the capture
    EXPECT_EQ(differing(layers.run(x), expected_first), 0) << rows << " rows, overlapping, no graph";
    c10::cuda::device_synchronize();
  }
  at::cuda::CUDAGraph graph;
  {
    const cuda::DecodeScope overlap;
    graph.capture_begin();
    y = layers.run(x);
    graph.capture_end();
  }
  for (int replay = 0; replay < 30; ++replay) {
    const bool odd = replay % 2 != 0;
    x.copy_(odd ? second : first);
    y.fill_(0.5);
    graph.replay();
    ASSERT_EQ(differing(y, odd ? expected_second : expected_first), 0) << rows << " rows, replay " << replay;
  }
  // A replay's first launches meet the end of the one before.
  for (int replay = 0; replay < 20; ++replay) graph.replay();
  ASSERT_EQ(differing(y, expected_second), 0) << rows << " rows, replays back to back";
  c10::cuda::device_synchronize();
}

}  // namespace trireme::testing
