// Attention on one GPU: decode in TB/s of keys and values read, against a plain read of the same run; packed forward
// and backward in TFLOP/s (half the causal square, backward 2.5 forwards). Median of repeats, warm-up left out.
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
#include <cstring>
#include <functional>

#include "bench/gpu/timing.h"
#include "trainer/bench/cuda/ceilings.h"
#include "trainer/ops/cuda/attention/attention.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

at::Device gpu() { return {at::kCUDA, 0}; }
at::Tensor randn(at::IntArrayRef shape) {
  return at::randn(shape, at::TensorOptions().device(gpu()).dtype(at::kBFloat16));
}

double read_ceiling() {
  const at::Tensor data = at::zeros({int64_t{1} << 32}, at::TensorOptions().device(gpu()).dtype(at::kByte));
  const at::Tensor sink = at::zeros({1}, at::TensorOptions().device(gpu()).dtype(at::kInt));
  const auto read = [&] {
    bench::launch_read(data.const_data_ptr(), data.nbytes(), static_cast<unsigned*>(sink.mutable_data_ptr()),
                       c10::cuda::getCurrentCUDAStream());
  };
  return static_cast<double>(data.nbytes()) / bench::median_seconds(read, 3);
}

// Passes over different keys one after another, as the layers of a model, so that the L2 cache holds nothing; in a
// graph, as the engine runs them.
double decode_seconds(int64_t sequences, int64_t keys, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
                      DecodeKernel kernel) {
  const double bytes = static_cast<double>(sequences * keys * kv_heads * head_dim) * 4;
  const int64_t passes = std::clamp<int64_t>(static_cast<int64_t>(400e6 / bytes) + 1, 2, 64);
  const int64_t rows = sequences * keys;
  const at::Tensor arena_k = randn({passes * rows, kv_heads, head_dim}), arena_v = randn(arena_k.sizes());
  const at::Tensor q = randn({sequences, q_heads, head_dim});
  std::vector<CachePlan> plans;
  for (int64_t pass = 0; pass < passes; ++pass) {
    std::vector<CacheRun> runs;
    for (int64_t s = 0; s < sequences; ++s) runs.push_back({pass * rows + s * keys, keys - 1, 1});
    plans.push_back(make_cache_plan(runs, q_heads / kv_heads, gpu()));
  }
  c10::cuda::device_synchronize();
  const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
  const auto run = [&] {
    for (const CachePlan& plan : plans) cuda::attention_decode(q, arena_k, arena_v, plan, 0.0, kernel);
  };
  run();
  c10::cuda::device_synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  run();
  graph.capture_end();
  return bench::median_seconds([&] { graph.replay(); }, 5) / static_cast<double>(passes);
}

void bench_decode(double ceiling, bool quick) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kKvHeads = 8, kHeadDim = 128;
  const std::pair<DecodeKernel, const char*> kernels[] = {{DecodeKernel::kShared, "shared"},
                                                          {DecodeKernel::kSharedDeep, "deep"},
                                                          {DecodeKernel::kCluster2, "cluster2"},
                                                          {DecodeKernel::kCluster4, "cluster4"},
                                                          {DecodeKernel::kCluster8, "cluster8"}};
  const auto all_q_heads = quick ? std::vector<int64_t>{32} : std::vector<int64_t>{32, 16};
  const auto all_keys =
      quick ? std::vector<int64_t>{1000, 2048, 4000} : std::vector<int64_t>{100, 400, 1000, 2048, 4000};
  const auto all_sequences = quick ? std::vector<int64_t>{1, 2, 3, 4, 5, 8, 9, 12, 16, 32}
                                   : std::vector<int64_t>{1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256};
  const DecodeRoom room = cuda::decode_room(gpu(), 32, kKvHeads, kHeadDim);
  std::printf("clusters of 2, 4 and 8 blocks at once: %ld, %ld, %ld\n", static_cast<long>(room.clusters2),
              static_cast<long>(room.clusters4), static_cast<long>(room.clusters8));
  for (const int64_t q_heads : all_q_heads) {
    for (const int64_t keys : all_keys) {
      for (const int64_t sequences : all_sequences) {
        const double bytes = static_cast<double>(sequences * keys * kKvHeads * kHeadDim) * 4;
        std::printf(
            "decode %2ld/8 heads of 128, %4ld keys, %3ld sequences (floor %6.2f us):", static_cast<long>(q_heads),
            static_cast<long>(keys), static_cast<long>(sequences), bytes / ceiling * 1e6);
        const DecodeKernel chosen = choose_decode_kernel({sequences, kKvHeads, keys, sequences * keys}, room);
        for (const auto& [kernel, name] : kernels) {
          const double time = decode_seconds(sequences, keys, q_heads, kKvHeads, kHeadDim, kernel);
          std::printf("  %s%s %6.2f us %.2f TB/s (%2.0f %%)", name, kernel == chosen ? "*" : "", time * 1e6,
                      bytes / time * 1e-12, 100 * bytes / time / ceiling);
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  }
  std::printf("*: what attention_cached takes\n");
}

void bench_packed(int64_t sequences, int64_t length, int64_t q_heads, int64_t kv_heads, int64_t head_dim) {
  const int64_t tokens = sequences * length;
  at::Tensor q = randn({tokens, q_heads, head_dim}), k = randn({tokens, kv_heads, head_dim}), v = randn(k.sizes());
  const at::Tensor dout = randn(q.sizes());
  std::vector<int64_t> starts;
  for (int64_t s = 0; s <= sequences; ++s) starts.push_back(s * length);
  const double flops = 4.0 * static_cast<double>(q_heads * head_dim * sequences) * static_cast<double>(length) *
                       static_cast<double>(length + 1) / 2;
  double forward = 0, library_forward = 0, library_backward = 0;
  {
    const at::NoGradGuard no_grad;
    forward = bench::median_seconds([&] { attention_packed(q, k, v, starts); }, 5);
    const at::Tensor cumulative = at::arange(0, tokens + 1, length, at::TensorOptions().device(gpu()).dtype(at::kInt));
    const auto library = [&] {
      return at::_flash_attention_forward(q, k, v, cumulative, cumulative, length, length, 0.0, true, false);
    };
    library_forward = bench::median_seconds([&] { library(); }, 5);
    const auto [out, lse, state, unused, mask] = library();
    library_backward = bench::median_seconds(
        [&, &out = out, &lse = lse, &state = state, &unused = unused] {
          at::_flash_attention_backward(dout, q, k, v, out, lse, cumulative, cumulative, length, length, 0.0, true,
                                        state, unused);
        },
        5);
  }
  std::vector<at::Tensor> leaves = {q.set_requires_grad(true), k.set_requires_grad(true), v.set_requires_grad(true)};
  const at::Tensor out = attention_packed(q, k, v, starts);
  const auto gradients = [&] { torch::autograd::grad({out}, leaves, {dout}, /*retain_graph=*/true); };
  const double backward = bench::median_seconds(gradients, 5);
  std::printf(
      "packed %2ld x %5ld, %ld/%ld heads of %ld: forward %.0f TFLOP/s, backward %.0f; FlashAttention-2 of LibTorch: "
      "forward %.0f, backward %.0f (not deterministic)\n",
      static_cast<long>(sequences), static_cast<long>(length), static_cast<long>(q_heads), static_cast<long>(kv_heads),
      static_cast<long>(head_dim), flops / forward * 1e-12, 2.5 * flops / backward * 1e-12,
      flops / library_forward * 1e-12, 2.5 * flops / library_backward * 1e-12);
  std::fflush(stdout);
}

// Few sequences of very many keys, and one such among short ones.
void bench_long(double ceiling) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kKvHeads = 8, kHeadDim = 128, kQHeads = 32, kShort = 1000;
  const std::pair<DecodeKernel, const char*> kernels[] = {{DecodeKernel::kShared, "shared"},
                                                          {DecodeKernel::kSharedDeep, "deep"},
                                                          {DecodeKernel::kCluster2, "cluster2"},
                                                          {DecodeKernel::kCluster4, "cluster4"},
                                                          {DecodeKernel::kCluster8, "cluster8"}};
  const DecodeRoom room = cuda::decode_room(gpu(), kQHeads, kKvHeads, kHeadDim);
  for (const int64_t keys : {int64_t{32768}, int64_t{131072}}) {
    for (const auto& [longs, shorts] :
         std::vector<std::pair<int64_t, int64_t>>{{1, 0}, {2, 0}, {4, 0}, {16, 0}, {1, 4}, {1, 15}, {1, 63}, {2, 14}}) {
      if (longs * keys > 1'100'000) continue;
      const int64_t total = longs * keys + shorts * kShort, sequences = longs + shorts;
      const at::Tensor arena_k = randn({total, kKvHeads, kHeadDim}), arena_v = randn(arena_k.sizes());
      const at::Tensor q = randn({sequences, kQHeads, kHeadDim});
      std::vector<CacheRun> runs;  // the long ones last, where they begin last
      for (int64_t s = 0; s < shorts; ++s) runs.push_back({s * kShort, kShort - 1, 1});
      for (int64_t s = 0; s < longs; ++s) runs.push_back({shorts * kShort + s * keys, keys - 1, 1});
      const CachePlan plan = make_cache_plan(runs, kQHeads / kKvHeads, gpu());
      const double floor = static_cast<double>(total * kKvHeads * kHeadDim) * 4 / ceiling;
      const DecodeKernel chosen = choose_decode_kernel({sequences, kKvHeads, keys, total}, room);
      std::printf("decode %2ld of %6ld keys, %2ld of %ld (floor %7.1f us):", static_cast<long>(longs),
                  static_cast<long>(keys), static_cast<long>(shorts), static_cast<long>(kShort), floor * 1e6);
      for (const auto& [kernel, name] : kernels) {
        const double time = bench::median_seconds(
            [&, kernel = kernel] { cuda::attention_decode(q, arena_k, arena_v, plan, 0.0, kernel); }, 5);
        std::printf("  %s%s %7.1f us (%.2f floors)", name, kernel == chosen ? "*" : "", time * 1e6, time / floor);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  std::printf("*: what attention_cached takes\n");
}

enum class Part { kAll, kPacked, kFewSequences, kLong };

int run(Part part) {
  if (c10::cuda::device_count() == 0) {
    std::fprintf(stderr, "error: no GPU is visible\n");
    return 1;
  }
  const double ceiling = read_ceiling();
  std::printf("plain read: %.2f TB/s\n", ceiling * 1e-12);
  if (part == Part::kFewSequences) {
    bench_decode(ceiling, true);
    return 0;
  }
  if (part == Part::kLong) {
    bench_long(ceiling);
    return 0;
  }
  for (const int64_t q_heads : {32, 16}) {
    bench_packed(16, 1024, q_heads, 8, 128);
    bench_packed(4, 4096, q_heads, 8, 128);
    bench_packed(1, 16384, q_heads, 8, 128);
  }
  bench_packed(4, 4096, 32, 8, 64);
  if (part == Part::kAll) bench_decode(ceiling, false);
  return 0;
}

}  // namespace
}  // namespace trireme

// attention_bench [--packed | --quick | --long]: packed passes alone; decoding of few sequences alone; of 32k and 128k
// keys alone
int main(int argc, char** argv) {
  using trireme::Part;
  const bool packed = argc == 2 && std::strcmp(argv[1], "--packed") == 0;
  const bool quick = argc == 2 && std::strcmp(argv[1], "--quick") == 0;
  const bool many = argc == 2 && std::strcmp(argv[1], "--long") == 0;
  if (argc > 1 && !packed && !quick && !many) {
    std::fprintf(stderr, "usage: %s [--packed | --quick | --long]\n", argv[0]);
    return 2;
  }
  return trireme::run(packed ? Part::kPacked : quick ? Part::kFewSequences : many ? Part::kLong : Part::kAll);
}
