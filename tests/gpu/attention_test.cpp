// On a GPU: attention against float64, and the invariant that the engine stands on: a row has the same bits alone,
// packed, prefilled whole or in chunks, decoded by any kernel in any batch, eagerly or from a graph.
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <ostream>

#include "base/error.h"
#include "tests/gpu/device.h"
#include "tests/gpu/oracle/attention_oracle.h"
#include "tests/gpu/skinny_gemm.h"
#include "trainer/ops/cuda/attention/attention.h"
#include "trainer/ops/cuda/gemm/gemm_choice.h"
#include "trainer/ops/cuda/gemm/linear.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

constexpr DecodeKernel kDecodeKernels[] = {DecodeKernel::kShared, DecodeKernel::kSharedDeep, DecodeKernel::kCluster2,
                                           DecodeKernel::kCluster4, DecodeKernel::kCluster8};
using testing::equal_bits;
using testing::gpu;
using testing::gpu_randn;
using testing::seed_gpu;

struct Heads {
  int64_t group, kv_heads, head_dim;
};
std::ostream& operator<<(std::ostream& out, const Heads& h) {
  return out << "group " << h.group << ", " << h.kv_heads << " key heads of " << h.head_dim;
}

// Lengths on both sides of the key tile (64), of the tile of query rows and of kChunkAlignment.
const std::vector<int64_t> kLengths = {1, 2, 3, 17, 63, 64, 65, 127, 128, 129, 200, 256, 257, 300, 1100};

// Of runs that decode: one tile, as many as are copied ahead, one more, and on both sides of a round of clusters of 2,
// 4 and 8 blocks (8, 16 and 32 tiles).
const std::vector<int64_t> kDecodeLengths = {1,   2,   64,  65,   192,  193,  256,  384,  385,
                                             448, 512, 513, 1024, 1025, 2048, 2049, 2500, 700};

// Sequences packed and, in another order and with gaps, in an arena that holds NaN wherever no key is.
struct Batch {
  Heads heads;
  std::vector<int64_t> lengths, starts{0}, extents;
  at::Tensor q, k, v, arena_k, arena_v;

  Batch(Heads h, std::vector<int64_t> lens, double amplitude = 1.0) : heads(h), lengths(std::move(lens)) {
    for (const int64_t n : lengths) starts.push_back(starts.back() + n);
    seed_gpu(7);
    q = gpu_randn({tokens(), h.group * h.kv_heads, h.head_dim}, amplitude);
    k = gpu_randn({tokens(), h.kv_heads, h.head_dim});
    v = gpu_randn({tokens(), h.kv_heads, h.head_dim});
    extents.resize(lengths.size());
    int64_t capacity = 5;
    for (size_t i = lengths.size(); i-- > 0;) {
      extents[i] = capacity;
      capacity += lengths[i] + 1 + static_cast<int64_t>(i % 3);
    }
    arena_k = at::full({capacity, h.kv_heads, h.head_dim}, std::nan(""), q.options());
    arena_v = arena_k.clone();
  }

  int64_t tokens() const { return starts.back(); }
  CachePlan plan(const std::vector<CacheRun>& runs) const { return make_cache_plan(runs, heads.group, gpu()); }
  void fill_arena() {
    std::vector<CacheRun> runs;
    for (size_t s = 0; s < lengths.size(); ++s) runs.push_back({extents[s], 0, lengths[s]});
    append_cached(k, v, arena_k, arena_v, plan(runs));
  }
  // Every token as a decode step of its own.
  std::vector<CacheRun> steps() const {
    std::vector<CacheRun> runs;
    for (size_t s = 0; s < lengths.size(); ++s) {
      for (int64_t i = 0; i < lengths[s]; ++i) runs.push_back({extents[s], i, 1});
    }
    return runs;
  }
};

// Plain products and softmax, sequence by sequence.
at::Tensor reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::vector<int64_t>& starts) {
  const int64_t group = q.size(1) / k.size(1);
  std::vector<at::Tensor> parts;
  for (size_t s = 0; s + 1 < starts.size(); ++s) {
    const int64_t count = starts[s + 1] - starts[s];
    if (count == 0) continue;
    const auto heads = [&](const at::Tensor& t, int64_t repeat) {
      return t.narrow(0, starts[s], count).repeat_interleave(repeat, 1).transpose(0, 1);
    };
    const at::Tensor scores =
        at::matmul(heads(q, 1), heads(k, group).transpose(1, 2)) / std::sqrt(static_cast<double>(q.size(2)));
    const at::Tensor mask = at::ones({count, count}, q.options().dtype(at::kBool)).tril().logical_not();
    parts.push_back(at::matmul(at::softmax(scores.masked_fill(mask, -INFINITY), -1), heads(v, group)).transpose(0, 1));
  }
  return at::cat(parts);
}

// Largest relative error of a (token, head) row.
double row_error(const at::Tensor& actual, const at::Tensor& expected) {
  const at::Tensor difference = (actual.to(at::kDouble) - expected).norm(2, -1);
  return (difference / expected.norm(2, -1)).max().item<double>();
}

// Rows that differ in any bit.
std::string differing(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor rows = a.contiguous().view(at::kShort).ne(b.contiguous().view(at::kShort)).flatten(1).any(1);
  const at::Tensor which = rows.nonzero().flatten().cpu();
  std::string text = std::to_string(which.numel()) + " of " + std::to_string(a.size(0)) + " rows differ";
  if (which.numel() > 0) text += ", the first is " + std::to_string(which[0].item<int64_t>());
  return text;
}
#define EXPECT_SAME_ROWS(a, b) EXPECT_TRUE(equal_bits(a, b)) << differing(a, b)

// The plan's pass by the oracle; decode plans and others.
at::Tensor by_oracle(const at::Tensor& q, const at::Tensor& arena_k, const at::Tensor& arena_v, const CachePlan& plan) {
  at::Tensor out = at::empty(q.sizes(), q.options());
  cuda::AttentionArgs args;
  args.q = q.const_data_ptr();
  args.k = arena_k.const_data_ptr();
  args.v = arena_v.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.q_stride = q.stride(0);
  args.k_stride = arena_k.stride(0);
  args.v_stride = arena_v.stride(0);
  args.key_rows = arena_k.size(0);
  args.q_heads = static_cast<int>(q.size(1));
  args.kv_heads = static_cast<int>(arena_k.size(1));
  args.head_dim = static_cast<int>(q.size(2));
  args.scale_log2 = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(q.size(2))));
  args.runs = plan.runs.const_data_ptr<int32_t>();
  args.run_count = static_cast<int>(plan.runs.size(1));
  args.items = plan.items.const_data_ptr<int32_t>();
  args.item_count = static_cast<int>(plan.items.size(1));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  const cudaError_t error = plan.decode ? cuda::oracle_decode(args, stream) : cuda::oracle_packed(args, stream);
  EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error);
  return out;
}

class GpuAttentionEdges : public testing::GpuTest {};
class GpuAttention : public testing::GpuTest, public ::testing::WithParamInterface<Heads> {};
INSTANTIATE_TEST_SUITE_P(Shapes, GpuAttention,
                         ::testing::Values(Heads{1, 2, 128}, Heads{2, 2, 128}, Heads{4, 8, 128}, Heads{5, 1, 128},
                                           Heads{8, 1, 128}, Heads{16, 1, 128}, Heads{1, 2, 64}, Heads{2, 2, 64},
                                           Heads{4, 2, 64}, Heads{5, 1, 64}, Heads{7, 2, 64}, Heads{8, 1, 64},
                                           Heads{16, 1, 64}));

TEST_P(GpuAttention, PackedIsCloseToFloat64) {
  const at::NoGradGuard no_grad;
  const Batch b(GetParam(), kLengths);
  const at::Tensor expected = reference(b.q.to(at::kDouble), b.k.to(at::kDouble), b.v.to(at::kDouble), b.starts);
  EXPECT_LT(row_error(attention_packed(b.q, b.k, b.v, b.starts), expected), 1e-2);
}

TEST_P(GpuAttention, PackedRowsHaveTheBitsOfTheSequenceAlone) {
  const at::NoGradGuard no_grad;
  const Batch b(GetParam(), kLengths);
  const at::Tensor packed = attention_packed(b.q, b.k, b.v, b.starts);
  for (size_t s = 0; s < b.lengths.size(); ++s) {
    const int64_t from = b.starts[s], count = b.lengths[s];
    const at::Tensor alone = attention_packed(b.q.narrow(0, from, count), b.k.narrow(0, from, count),
                                              b.v.narrow(0, from, count), {0, count});
    EXPECT_SAME_ROWS(alone, packed.narrow(0, from, count)) << " (length " << count << ")";
  }
}

TEST_P(GpuAttention, PackedRowsHaveTheBitsOfTheOracle) {
  const at::NoGradGuard no_grad;
  const std::vector<std::vector<int64_t>> batches = {kLengths, {5000}, {33000}, std::vector<int64_t>(300, 37)};
  for (const double amplitude : {1.0, 12.0}) {
    for (const std::vector<int64_t>& lengths : batches) {
      const Batch b(GetParam(), lengths, amplitude);
      std::vector<CacheRun> runs;
      for (size_t s = 0; s < b.lengths.size(); ++s) runs.push_back({b.starts[s], 0, b.lengths[s]});
      const at::Tensor expected = by_oracle(b.q, b.k, b.v, b.plan(runs));
      for (int repeat = 0; repeat < 3; ++repeat) {
        EXPECT_SAME_ROWS(attention_packed(b.q, b.k, b.v, b.starts), expected)
            << " (" << lengths.size() << " sequences, amplitude " << amplitude << ")";
      }
    }
  }
}

// Large scores move the running maximum often and far.
TEST_P(GpuAttention, EveryDecodeKernelHasTheBitsOfPackedRows) {
  const at::NoGradGuard no_grad;
  for (const double amplitude : {1.0, 12.0}) {
    Batch b(GetParam(), kLengths, amplitude);
    b.fill_arena();
    const at::Tensor packed = attention_packed(b.q, b.k, b.v, b.starts);
    ASSERT_TRUE(packed.isfinite().all().item<bool>());
    const CachePlan plan = b.plan(b.steps());
    ASSERT_TRUE(plan.decode);
    EXPECT_SAME_ROWS(by_oracle(b.q, b.arena_k, b.arena_v, plan), packed) << " (the oracle)";
    for (const DecodeKernel kernel : kDecodeKernels) {
      const at::Tensor decoded = cuda::attention_decode(b.q, b.arena_k, b.arena_v, plan, 0.0, kernel);
      EXPECT_SAME_ROWS(decoded, packed) << " (kernel " << static_cast<int>(kernel) << ", amplitude " << amplitude
                                        << ")";
    }
  }
}

// Keys for several rounds of a cluster, and on both sides of where rounds of every cluster size end.
TEST_P(GpuAttention, EveryDecodeKernelHasTheBitsOfPackedRowsOverManyKeys) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> tokens = {511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 4999};
  for (int64_t token = 0; token < 5000; token += 61) tokens.push_back(token);
  for (const double amplitude : {1.0, 12.0}) {
    Batch b(GetParam(), {5000}, amplitude);
    b.fill_arena();
    const at::Tensor index = at::tensor(tokens, at::kLong).to(gpu());
    const at::Tensor packed = attention_packed(b.q, b.k, b.v, b.starts).index_select(0, index);
    const at::Tensor q = b.q.index_select(0, index);
    std::vector<CacheRun> runs;
    for (const int64_t token : tokens) runs.push_back({b.extents[0], token, 1});
    const CachePlan plan = b.plan(runs);
    for (const DecodeKernel kernel : kDecodeKernels) {
      for (int repeat = 0; repeat < 3; ++repeat) {
        EXPECT_SAME_ROWS(cuda::attention_decode(q, b.arena_k, b.arena_v, plan, 0.0, kernel), packed)
            << " (kernel " << static_cast<int>(kernel) << ", amplitude " << amplitude << ")";
      }
    }
  }
}

// 32k and 128k keys, at and around the ends of tiles and rounds; the packed kernel computes the last 128 rows as a
// chunk.
TEST_F(GpuAttentionEdges, DecodeHasTheBitsOfPackedRowsOverVeryManyKeys) {
  const at::NoGradGuard no_grad;
  for (const Heads heads : {Heads{4, 2, 128}, Heads{8, 2, 64}, Heads{12, 1, 128}}) {
    for (const int64_t keys : {int64_t{32768}, int64_t{131072}}) {
      for (const double amplitude : {1.0, 12.0}) {
        seed_gpu(17);
        const at::Tensor k = gpu_randn({keys, heads.kv_heads, heads.head_dim}), v = gpu_randn(k.sizes());
        const at::Tensor q = gpu_randn({kChunkAlignment, heads.group * heads.kv_heads, heads.head_dim}, amplitude);
        const int64_t past = keys - kChunkAlignment;
        const auto plan_of = [&](const std::vector<CacheRun>& runs) {
          return make_cache_plan(runs, heads.group, gpu());
        };
        const CachePlan chunk = plan_of({{0, past, kChunkAlignment}});
        const at::Tensor packed = attention_cached(q, k, v, chunk);
        EXPECT_SAME_ROWS(by_oracle(q, k, v, chunk), packed) << " (the oracle, " << heads << ", " << keys << " keys)";
        std::vector<CacheRun> runs;
        std::vector<int64_t> tokens;
        for (const int64_t token : {0, 1, 62, 63, 64, 65, 126, 127}) {
          runs.push_back({0, past + token, 1});
          tokens.push_back(token);
        }
        const at::Tensor index = at::tensor(tokens, at::kLong).to(gpu());
        const at::Tensor some = q.index_select(0, index), expected = packed.index_select(0, index);
        const CachePlan plan = plan_of(runs);
        EXPECT_EQ(plan.longest_keys, keys);
        for (const DecodeKernel kernel : kDecodeKernels) {
          EXPECT_SAME_ROWS(cuda::attention_decode(some, k, v, plan, 0.0, kernel), expected)
              << " (kernel " << static_cast<int>(kernel) << ", " << heads << ", " << keys << " keys)";
        }
        // As attention_cached chooses: one run alone, and one among many short ones.
        EXPECT_SAME_ROWS(attention_cached(q.narrow(0, 127, 1), k, v, plan_of({{0, past + 127, 1}})),
                         packed.narrow(0, 127, 1));
        std::vector<CacheRun> mixed(31, CacheRun{0, 200, 1});
        mixed.push_back({0, past + 127, 1});
        const at::Tensor last = q.narrow(0, 127, 1);
        EXPECT_SAME_ROWS(
            attention_cached(last.expand({32, -1, -1}).contiguous(), k, v, plan_of(mixed)).narrow(0, 31, 1),
            packed.narrow(0, 127, 1));
      }
    }
  }
}

// What the choice asks of the device.
TEST_F(GpuAttentionEdges, TheDeviceSaysHowManyClustersItHasRoomFor) {
  for (const int64_t head_dim : {64, 128}) {
    for (const int64_t group : {1, 4, 8, 16}) {
      const DecodeRoom room = cuda::decode_room(gpu(), 2 * group, 2, head_dim);
      const int64_t all = at::cuda::getDeviceProperties(0)->multiProcessorCount;
      if (std::getenv("TRIREME_TEST_SMS") == nullptr) {
        EXPECT_EQ(room.sms, all);
      } else {
        EXPECT_LT(room.sms, all);  // of this thread's part
      }
      std::printf("head_dim %d, group %d: %d SMs, clusters of 2, 4 and 8 at once: %d, %d, %d\n",
                  static_cast<int>(head_dim), static_cast<int>(group), static_cast<int>(room.sms),
                  static_cast<int>(room.clusters2), static_cast<int>(room.clusters4), static_cast<int>(room.clusters8));
      EXPECT_GT(room.clusters8, 0);
      EXPECT_GE(room.clusters4, 2 * room.clusters8 - 2);
      EXPECT_GE(room.clusters2, 2 * room.clusters4 - 2);
      EXPECT_LE(room.clusters2, room.sms / 2);
    }
  }
}

TEST_P(GpuAttention, BatchSizeDoesNotChangeTheBitsOfADecodeRow) {
  const at::NoGradGuard no_grad;
  Batch b(GetParam(), kLengths);
  b.fill_arena();
  const at::Tensor packed = attention_packed(b.q, b.k, b.v, b.starts);
  const std::vector<CacheRun> steps = b.steps();
  for (const int64_t count : {1, 2, 7, 16, 33, 64, 150, 256, 700}) {
    const int64_t stride = b.tokens() / count;
    std::vector<CacheRun> runs;
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < count; ++i) {
      tokens.push_back(b.tokens() - 1 - i * stride);
      runs.push_back(steps[static_cast<size_t>(tokens.back())]);
    }
    const at::Tensor index = at::tensor(tokens, at::kLong).to(gpu());
    const at::Tensor out = attention_cached(b.q.index_select(0, index), b.arena_k, b.arena_v, b.plan(runs));
    EXPECT_SAME_ROWS(out, packed.index_select(0, index)) << " (" << count << " runs)";
  }
}

// Chunks at multiples of kChunkAlignment, as ops.h asks, and at any other place: a key tile that a row does not see
// leaves its bits alone, so here the place does not matter. Passes mix prefill and decode.
TEST_P(GpuAttention, ChunkedPrefillHasTheBitsOfTheWhole) {
  const at::NoGradGuard no_grad;
  Batch b(GetParam(), {300, 128, 1100, 64, 517});
  const at::Tensor packed = attention_packed(b.q, b.k, b.v, b.starts);
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{kChunkAlignment},
                                            {2 * kChunkAlignment, kChunkAlignment, 5 * kChunkAlignment},
                                            {100, 1, 37, 300}}) {
    b.arena_k.fill_(std::nan(""));
    b.arena_v.fill_(std::nan(""));
    std::vector<int64_t> done(b.lengths.size(), 0);
    for (size_t turn = 0;; ++turn) {
      std::vector<CacheRun> runs;
      std::vector<at::Tensor> qs, ks, vs, expected;
      for (size_t s = 0; s < b.lengths.size(); ++s) {
        const int64_t count = std::min(sizes[(turn + s) % sizes.size()], b.lengths[s] - done[s]);
        if (count == 0) continue;
        runs.push_back({b.extents[s], done[s], count});
        const int64_t from = b.starts[s] + done[s];
        qs.push_back(b.q.narrow(0, from, count));
        ks.push_back(b.k.narrow(0, from, count));
        vs.push_back(b.v.narrow(0, from, count));
        expected.push_back(packed.narrow(0, from, count));
        done[s] += count;
      }
      if (runs.empty()) break;
      const CachePlan plan = b.plan(runs);
      append_cached(at::cat(ks), at::cat(vs), b.arena_k, b.arena_v, plan);
      ASSERT_TRUE(equal_bits(attention_cached(at::cat(qs), b.arena_k, b.arena_v, plan), at::cat(expected)))
          << "turn " << turn << " of chunks of " << sizes[0];
    }
  }
}

TEST_P(GpuAttention, RowStridesDoNotChangeBits) {
  const at::NoGradGuard no_grad;
  const Heads h = GetParam();
  Batch b(h, {70, 200});
  b.fill_arena();
  const int64_t q_width = h.group * h.kv_heads * h.head_dim, kv_width = h.kv_heads * h.head_dim;
  const at::Tensor fused = at::cat({b.q.flatten(1), b.k.flatten(1), b.v.flatten(1)}, 1);
  const auto part = [&](int64_t from, int64_t width) {
    return fused.narrow(1, from, width).unflatten(1, {width / h.head_dim, h.head_dim});
  };
  const at::Tensor q = part(0, q_width);
  ASSERT_EQ(q.stride(0), q_width + 2 * kv_width);
  EXPECT_SAME_ROWS(attention_packed(q, part(q_width, kv_width), part(q_width + kv_width, kv_width), b.starts),
                   attention_packed(b.q, b.k, b.v, b.starts));
  const CachePlan plan = b.plan(b.steps());
  for (const DecodeKernel kernel : kDecodeKernels) {
    EXPECT_SAME_ROWS(cuda::attention_decode(q, b.arena_k, b.arena_v, plan, 0.0, kernel),
                     cuda::attention_decode(b.q, b.arena_k, b.arena_v, plan, 0.0, kernel));
  }
}

// A graph of a decode pass serves other runs, other keys and padding once its plan is overwritten.
TEST_P(GpuAttention, ReplayedGraphHasTheBitsOfAnEagerPass) {
  const at::NoGradGuard no_grad;
  Batch b(GetParam(), {300, 90, 64, 700, 2600});
  b.fill_arena();
  b.arena_k.select(0, 0).zero_();  // scratch row of the padding
  b.arena_v.select(0, 0).zero_();
  const at::Tensor packed = attention_packed(b.q, b.k, b.v, b.starts);
  constexpr int64_t kSlots = 6;
  const auto pass = [&](int64_t position) {
    std::vector<CacheRun> runs;
    std::vector<int64_t> tokens;
    for (size_t s = 0; s < b.lengths.size(); ++s) {
      if (position >= b.lengths[s]) continue;
      runs.push_back({b.extents[s], position, 1});
      tokens.push_back(b.starts[s] + position);
    }
    const auto alive = static_cast<int64_t>(runs.size());
    while (static_cast<int64_t>(runs.size()) < kSlots) runs.push_back({0, 0, 1}), tokens.push_back(0);
    return std::tuple(b.plan(runs), at::tensor(tokens, at::kLong).to(gpu()), alive);
  };
  auto [plan, first, all] = pass(10);
  at::Tensor q = b.q.index_select(0, first);
  for (const DecodeKernel kernel : kDecodeKernels) {
    at::cuda::CUDAGraph graph;
    at::Tensor out;
    c10::cuda::device_synchronize();
    {
      const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
      cuda::attention_decode(q, b.arena_k, b.arena_v, plan, 0.0, kernel);
      c10::cuda::device_synchronize();
      graph.capture_begin();
      out = cuda::attention_decode(q, b.arena_k, b.arena_v, plan, 0.0, kernel);
      graph.capture_end();
    }
    for (const int64_t position : {0, 63, 64, 89, 150, 299, 650, 1030, 2599}) {
      const auto [next, tokens, alive] = pass(position);
      plan.runs.copy_(next.runs);
      q.copy_(b.q.index_select(0, tokens));
      c10::cuda::device_synchronize();
      graph.replay();
      c10::cuda::device_synchronize();
      EXPECT_SAME_ROWS(out.narrow(0, 0, alive), packed.index_select(0, tokens.narrow(0, 0, alive)))
          << " (kernel " << static_cast<int>(kernel) << ", position " << position << ")";
    }
  }
}

std::vector<at::Tensor> gradients(const Batch& b, at::ScalarType type, bool ours) {
  std::vector<at::Tensor> leaves;
  for (const at::Tensor& x : {b.q, b.k, b.v})
    leaves.push_back(x.detach().to(type, false, true).set_requires_grad(true));
  const at::AutoGradMode record(true);
  const at::Tensor out = ours ? attention_packed(leaves[0], leaves[1], leaves[2], b.starts)
                              : reference(leaves[0], leaves[1], leaves[2], b.starts);
  seed_gpu(99);
  const at::Tensor dout = gpu_randn(out.sizes());
  return torch::autograd::grad({out}, leaves, {dout.to(type)});
}

// `actual` is `expected` within `limit`, as a whole and row by row. Short rows, as those of keys that few queries see,
// may be as far off as a row of a fiftieth of the mean length.
void expect_close(const at::Tensor& actual, const at::Tensor& expected, double limit, const std::string& name) {
  const auto lengths = [](const at::Tensor& x) { return x.flatten(1).norm(2, 1); };
  const at::Tensor difference = actual.to(expected.scalar_type()) - expected, rows = lengths(expected);
  EXPECT_LT((difference.norm() / expected.norm()).item<double>(), limit) << name;
  const at::Tensor of_row = lengths(difference) / (rows + rows.mean() * 0.02);
  EXPECT_LT(of_row.max().item<double>(), 10 * limit) << "row " << of_row.argmax().item<int64_t>() << " of " << name;
}
const char* const kGradients[] = {"the gradient of q", "the gradient of k", "the gradient of v"};

TEST_P(GpuAttention, GradientsAreCloseToFloat64) {
  // Few pieces of work, many of a sequence, and more sequences than SMs.
  const std::vector<std::vector<int64_t>> batches = {
      {1, 64, 0, 65, 300, 129, 700}, {2000, 3}, std::vector<int64_t>(150, 70)};
  for (const std::vector<int64_t>& lengths : batches) {
    const Batch b(GetParam(), lengths);
    const auto expected = gradients(b, at::kDouble, false), actual = gradients(b, at::kBFloat16, true);
    for (size_t i = 0; i < 3; ++i) expect_close(actual[i], expected[i], 1e-2, kGradients[i]);
  }
}

// FlashAttention-2 of LibTorch, forward and backward.
std::vector<at::Tensor> gradients_of_the_library(const Batch& b) {
  const at::NoGradGuard no_grad;
  const at::Tensor starts = at::tensor(b.starts, at::kInt).to(gpu());
  const int64_t longest = *std::max_element(b.lengths.begin(), b.lengths.end());
  const auto [out, lse, state, unused, mask] =
      at::_flash_attention_forward(b.q, b.k, b.v, starts, starts, longest, longest, 0.0, true, false);
  seed_gpu(99);
  const at::Tensor dout = gpu_randn(b.q.sizes());
  const auto [dq, dk, dv] = at::_flash_attention_backward(dout, b.q, b.k, b.v, out, lse, starts, starts, longest,
                                                          longest, 0.0, true, state, unused);
  return {dq, dk, dv};
}

// Too long for float64: against the library's.
TEST_P(GpuAttention, GradientsOfLongSequencesAreThoseOfTheLibrary) {
  const Batch b(GetParam(), {33000, 5});
  const auto actual = gradients(b, at::kBFloat16, true), expected = gradients_of_the_library(b);
  for (size_t i = 0; i < 3; ++i) expect_close(actual[i], expected[i].to(at::kFloat), 1.5e-2, kGradients[i]);
}

// Neighbours that are no numbers, on both sides, leave a sequence's result and gradients alone.
TEST_P(GpuAttention, SequencesDoNotSeeEachOther) {
  const std::vector<int64_t> lengths = {70, 65, 100};
  const Batch b(GetParam(), lengths);
  seed_gpu(99);
  const at::Tensor dout = gpu_randn(b.q.sizes());
  const auto all = [&](bool spoil) {
    std::vector<at::Tensor> leaves;
    at::Tensor gradient = dout.clone();
    for (const at::Tensor& x : {b.q, b.k, b.v}) leaves.push_back(x.clone());
    leaves.push_back(gradient);
    if (spoil) {
      for (at::Tensor& x : leaves) {
        x.narrow(0, 0, lengths[0]).fill_(std::nan(""));
        x.narrow(0, lengths[0] + lengths[1], lengths[2]).fill_(INFINITY);
      }
    }
    leaves.pop_back();
    for (at::Tensor& x : leaves) x.set_requires_grad(true);
    const at::AutoGradMode record(true);
    const at::Tensor out = attention_packed(leaves[0], leaves[1], leaves[2], b.starts);
    std::vector<at::Tensor> results = torch::autograd::grad({out}, leaves, {gradient});
    results.push_back(out.detach());
    for (at::Tensor& x : results) x = x.narrow(0, lengths[0], lengths[1]);
    return results;
  };
  const auto expected = all(false), actual = all(true);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_SAME_ROWS(actual[i], expected[i]);
}

// Parts of one tensor, as a layer hands them over, and layouts that have to be copied.
TEST_P(GpuAttention, GradientsDoNotDependOnLayouts) {
  const Heads h = GetParam();
  for (const int64_t tokens : {1, 130}) {
    const Batch b(h, {tokens});
    const int64_t q_heads = h.group * h.kv_heads, heads = q_heads + 2 * h.kv_heads;
    seed_gpu(99);
    const at::Tensor dout = gpu_randn(b.q.sizes());
    const auto of = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& gradient) {
      const at::AutoGradMode record(true);
      std::vector<at::Tensor> leaves;
      for (const at::Tensor& x : {q, k, v}) leaves.push_back(x.detach().set_requires_grad(true));
      return torch::autograd::grad({attention_packed(leaves[0], leaves[1], leaves[2], b.starts)}, leaves, {gradient});
    };
    const auto expected = of(b.q, b.k, b.v, dout);
    const at::Tensor parts = at::cat({b.q, b.k, b.v}, 1);
    const auto permuted = [](const at::Tensor& x) { return x.permute({1, 2, 0}).contiguous().permute({2, 0, 1}); };
    const auto odd = [](const at::Tensor& x) {
      at::Tensor room = at::empty({x.numel() + 1}, x.options());
      return room.narrow(0, 1, x.numel()).view(x.sizes()).copy_(x);
    };
    const std::vector<std::vector<at::Tensor>> layouts = {
        {parts.narrow(1, 0, q_heads), parts.narrow(1, q_heads, h.kv_heads),
         parts.narrow(1, heads - h.kv_heads, h.kv_heads), dout},
        {permuted(b.q), permuted(b.k), permuted(b.v), permuted(dout)},
        {odd(b.q), odd(b.k), odd(b.v), odd(dout)}};
    for (size_t layout = 0; layout < layouts.size(); ++layout) {
      const auto& x = layouts[layout];
      const auto actual = of(x[0], x[1], x[2], x[3]);
      for (size_t i = 0; i < 3; ++i) EXPECT_SAME_ROWS(actual[i], expected[i]) << ", layout " << layout;
    }
  }
}

TEST_P(GpuAttention, BackwardIsDeterministic) {
  const Batch b(GetParam(), {700, 64, 1, 513, 300, 900});
  const auto first = gradients(b, at::kBFloat16, true);
  for (int run = 0; run < 3; ++run) {
    const auto again = gradients(b, at::kBFloat16, true);
    for (size_t i = 0; i < 3; ++i) EXPECT_SAME_ROWS(again[i], first[i]);
  }
}

// Five answers to a prompt whose length is no multiple of any tile, one of them empty, and two to another.
TEST_P(GpuAttention, SharedPrefixesGiveTheBitsOfRepeatedOnes) {
  const Batch b(GetParam(), {203, 1, 130, 0, 700, 64, 77, 300, 5});
  const std::vector<int64_t> prefix = {-1, 0, 0, 0, 0, 0, -1, 6, 6};
  std::vector<int64_t> rows, starts{0}, own;
  for (size_t s = 0; s < prefix.size(); ++s) {
    const auto append = [&](int64_t sequence, bool mine) {
      for (int64_t row = b.starts[static_cast<size_t>(sequence)]; row < b.starts[static_cast<size_t>(sequence) + 1];
           ++row) {
        if (mine) own.push_back(static_cast<int64_t>(rows.size()));
        rows.push_back(row);
      }
    };
    if (prefix[s] >= 0) append(prefix[s], false);
    append(static_cast<int64_t>(s), true);
    starts.push_back(static_cast<int64_t>(rows.size()));
  }
  const at::Tensor take = at::tensor(rows, at::kLong).to(gpu()), mine = at::tensor(own, at::kLong).to(gpu());
  const auto gradients_of = [&](at::ScalarType type, const auto& attention) {
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& x : {b.q, b.k, b.v})
      leaves.push_back(x.detach().to(type, false, true).set_requires_grad(true));
    const at::AutoGradMode record(true);
    const at::Tensor out = attention(leaves[0], leaves[1], leaves[2]);
    seed_gpu(99);
    const at::Tensor dout = gpu_randn(out.sizes());
    std::vector<at::Tensor> all = torch::autograd::grad({out}, leaves, {dout.to(type)});
    all.push_back(out.detach());
    return all;
  };
  const auto shared = [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return attention_shared(q, k, v, b.starts, prefix);
  };
  const auto actual = gradients_of(at::kBFloat16, shared), again = gradients_of(at::kBFloat16, shared);
  for (size_t i = 0; i < 4; ++i) EXPECT_SAME_ROWS(again[i], actual[i]);
  {
    const at::NoGradGuard no_grad;
    const at::Tensor repeated =
        attention_packed(b.q.index_select(0, take), b.k.index_select(0, take), b.v.index_select(0, take), starts);
    EXPECT_SAME_ROWS(actual[3], repeated.index_select(0, mine));
    EXPECT_SAME_ROWS(shared(b.q, b.k, b.v), actual[3]);
  }
  const auto expected = gradients_of(at::kDouble, [&](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return reference(q.index_select(0, take), k.index_select(0, take), v.index_select(0, take), starts)
        .index_select(0, mine);
  });
  for (size_t i = 0; i < 3; ++i) expect_close(actual[i], expected[i], 1e-2, kGradients[i]);
}

TEST_F(GpuAttentionEdges, EmptySequencesAndBatches) {
  const Batch b({4, 2, 128}, {5});
  const at::Tensor packed = attention_packed(b.q, b.k, b.v, b.starts);
  EXPECT_SAME_ROWS(attention_packed(b.q, b.k, b.v, {0, 0, 5, 5}), packed);
  const at::Tensor none = b.q.narrow(0, 0, 0), no_keys = b.k.narrow(0, 0, 0);
  EXPECT_EQ(attention_packed(none, no_keys, no_keys, {0}).size(0), 0);
  const CachePlan plan = b.plan({{3, 0, 0}});
  EXPECT_FALSE(plan.decode);
  EXPECT_EQ(attention_cached(none, b.arena_k, b.arena_v, plan).size(0), 0);
}

// Rows of the 16-row tile that belong to no query head must neither be written nor disturb the others.
TEST_F(GpuAttentionEdges, EveryGroupSizeDecodesToTheBitsOfPackedRows) {
  const at::NoGradGuard no_grad;
  for (const int64_t head_dim : {64, 128}) {
    for (int64_t group = 1; group <= cuda::kMaxDecodeGroup; ++group) {
      Batch b({group, 2, head_dim}, {1, 64, 65, 700});
      b.fill_arena();
      const at::Tensor packed = attention_packed(b.q, b.k, b.v, b.starts);
      const CachePlan plan = b.plan(b.steps());
      ASSERT_TRUE(plan.decode);
      for (const DecodeKernel kernel : kDecodeKernels) {
        EXPECT_SAME_ROWS(cuda::attention_decode(b.q, b.arena_k, b.arena_v, plan, 0.0, kernel), packed)
            << " (" << b.heads << ", kernel " << static_cast<int>(kernel) << ")";
      }
    }
  }
}

TEST_F(GpuAttentionEdges, PlanHoldsWhatOpsDocuments) {
  const CachePlan plan = make_cache_plan({{10, 0, 3}, {50, 7, 0}, {100, 128, 130}}, 4, gpu());
  EXPECT_FALSE(plan.decode);
  const at::Tensor runs = plan.runs.cpu(), items = plan.items.cpu(), rows = plan.token_rows.cpu();
  ASSERT_EQ(runs.sizes(), at::IntArrayRef({4, 2}));
  const std::vector<std::vector<int>> expected = {{0, 3}, {3, 130}, {10, 100}, {3, 258}};
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t j = 0; j < 2; ++j)
      EXPECT_EQ(runs[i][j].item<int>(), expected[static_cast<size_t>(i)][static_cast<size_t>(j)]);
  }
  ASSERT_EQ(rows.numel(), 133);
  EXPECT_EQ(rows[2].item<int64_t>(), 12);
  EXPECT_EQ(rows[3].item<int64_t>(), 228);
  ASSERT_EQ(items.sizes(), at::IntArrayRef({2, 6}));  // 12 rows in one tile, 520 in five; most keys first
  EXPECT_EQ(items[0][0].item<int>(), 1);
  EXPECT_EQ(items[1][0].item<int>(), 4);
  EXPECT_EQ(items[0][5].item<int>(), 0);
  EXPECT_TRUE(make_cache_plan({{1, 5, 1}, {9, 0, 1}}, 4, gpu()).decode);
}

// As a layer decodes: behind a product of ours and the split that writes q and each run's last key and value, attention
// begins before they have ended. Those rows are NaN until then; the product is large, so that attention has to wait.
TEST_P(GpuAttention, BegunEarlyItWaitsForTheLastKeyAndTheQueries) {
  const at::NoGradGuard no_grad;
  const Heads heads = GetParam();
  constexpr int64_t kHidden = 4096;
  const testing::Limit ours(cuda::kMostOwnRows);
  const QkvLayout layout{heads.group * heads.kv_heads, heads.kv_heads, heads.head_dim};
  for (const int64_t count : {1, 3, 5, 8, 16, 40}) {
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < count; ++i)
      lengths.push_back(kDecodeLengths[static_cast<size_t>(i * 5 + count) % kDecodeLengths.size()]);
    Batch b(heads, lengths);
    b.fill_arena();
    std::vector<CacheRun> runs;
    std::vector<int64_t> positions;
    for (size_t s = 0; s < lengths.size(); ++s) {
      runs.push_back({b.extents[s], lengths[s] - 1, 1});
      positions.push_back(lengths[s] - 1);
    }
    const CachePlan plan = b.plan(runs);
    const at::Tensor position = at::tensor(positions, at::kLong).to(gpu());
    const at::Tensor table = rope_table(at::arange(2600, position.options()), RopeOptions{heads.head_dim});
    const at::Tensor x = gpu_randn({count, kHidden});
    const at::Tensor weight = gpu_randn({(layout.q_heads + 2 * layout.kv_heads) * layout.head_dim, kHidden}, 1.0 / 64);
    const at::Tensor filler = gpu_randn({8192, kHidden}, 1.0 / 64);
    const auto split = [&] {
      (void)cuda::linear_forward(x, filler, {});
      const at::Tensor qkv = cuda::linear_forward(x, weight, {});
      return split_qkv_cached(qkv, {}, {}, table, position, layout, b.arena_k, b.arena_v, plan);
    };
    const auto layer = [&](DecodeKernel kernel) {
      return cuda::attention_decode(split(), b.arena_k, b.arena_v, plan, 0.0, kernel);
    };
    const auto spoil = [&] {
      b.arena_k.index_fill_(0, plan.token_rows, std::nan(""));
      b.arena_v.index_fill_(0, plan.token_rows, std::nan(""));
    };
    spoil();
    const at::Tensor expected = by_oracle(split(), b.arena_k, b.arena_v, plan);
    ASSERT_TRUE(at::isfinite(expected).all().item<bool>());
    for (const DecodeKernel kernel : kDecodeKernels) {
      at::cuda::CUDAGraph graph;
      at::Tensor out;
      c10::cuda::device_synchronize();
      {
        const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
        const cuda::DecodeScope scope;
        (void)layer(kernel);  // plans are tried outside of a capture
        c10::cuda::device_synchronize();
        graph.capture_begin();
        out = layer(kernel);
        EXPECT_TRUE(cuda::may_begin_early());
        graph.capture_end();
      }
      for (int round = 0; round < 3; ++round) {
        spoil();
        out.fill_(std::nan(""));
        graph.replay();
        c10::cuda::device_synchronize();
        EXPECT_SAME_ROWS(out, expected) << " (" << heads << ", kernel " << static_cast<int>(kernel) << ", " << count
                                        << " runs)";
      }
    }
  }
}

// Many query heads on one key head: too many for the decode kernels, so the plan takes the packed one.
TEST_F(GpuAttentionEdges, LargeGroupsDecodeThroughThePackedKernel) {
  const at::NoGradGuard no_grad;
  Batch b({20, 1, 64}, {1, 130, 70});
  b.fill_arena();
  const CachePlan plan = b.plan(b.steps());
  EXPECT_FALSE(plan.decode);
  EXPECT_SAME_ROWS(attention_cached(b.q, b.arena_k, b.arena_v, plan), attention_packed(b.q, b.k, b.v, b.starts));
}

TEST_F(GpuAttentionEdges, MistakesAreNamed) {
  const Batch b({4, 2, 128}, {5});
  EXPECT_THROW(attention_packed(b.q.to(at::kFloat), b.k.to(at::kFloat), b.v.to(at::kFloat), b.starts), Error);
  EXPECT_THROW(attention_packed(b.q.narrow(2, 0, 96), b.k.narrow(2, 0, 96), b.v.narrow(2, 0, 96), b.starts), Error);
  CachePlan host_only;
  host_only.host_runs = {{5, 0, 5}};
  EXPECT_THROW(attention_cached(b.q, b.arena_k, b.arena_v, host_only), Error);
  EXPECT_THROW(attention_cached(b.q, b.arena_k, b.arena_v, b.plan({{b.arena_k.size(0) - 2, 0, 5}})), Error);
  EXPECT_THROW(append_cached(b.k, b.v, b.arena_k, b.arena_v, b.plan({{0, 0, 4}})), Error);
}

}  // namespace
}  // namespace trireme
