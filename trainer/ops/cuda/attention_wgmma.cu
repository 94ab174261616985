// The packed forward by warp-group products (wgmma): 128 query rows a block, two groups of four warps with 64 rows
// each, a third group whose first warp copies key and value tiles.
//
// Why the bits are those of the other kernels: a score is one chain of steps of 16 along head_dim, an element of the
// output one chain of steps of 16 along the keys, tile by tile, ascending; a step has the same bits as part of any
// tensor-core instruction (few_rows.h). Maxima, factors, weights and the sum of weights are computed by the operations
// of attention_steps.cuh, and the lane that holds a score holds it in the other kernels too.
//
// A group's time line: while the products of values with the weights of tile j - 1 run, it turns the scores of tile j
// into weights. The groups take turns at issuing products, so that one weighs while the other multiplies.
//
// Blocks stay and take every so manyth (item, key head); the warp that copies is ahead of the others over the ends of
// items too.
//
// Barriers: key_full, key_free, value_full, value_free a stage. A tile of values that reaches past the last key is
// copied, then its rows past the end are zeroed, for what lies there may be no number and 0 times it none either.
#include <algorithm>
#include <flashinfer/math.cuh>

#include "trainer/ops/cuda/attention_kernels.h"
#include "trainer/ops/cuda/attention_steps.cuh"
#include "trainer/ops/cuda/row_product.cuh"
#include "trainer/ops/cuda/wgmma.cuh"

namespace trireme::cuda {
namespace {

using namespace hopper;
using bf16 = __nv_bfloat16;

constexpr int kGroups = 2, kGroupRows = 64, kGroupThreads = 128;
constexpr int kThreads = (kGroups + 1) * kGroupThreads;
static_assert(kGroups * kGroupRows == kPackedTileRows);
constexpr int kLoadingRegisters = 40, kRegisters = 232;  // 40 + 2 x 232 of the 3 x 168 that the block begins with
constexpr uint32_t kBoxBytes = kKeyTile * 128;           // 64 keys x 64 elements

template <int kHeadDim>
struct Plan {
  static constexpr uint32_t kTileBytes = kKeyTile * kHeadDim * 2;
  static constexpr int kBoxes = kHeadDim / 64;
  static constexpr uint32_t kValueBytes = kTileBytes + kBoxBytes;  // values, and ones for the sums of weights
  static constexpr int kOutColumns = kHeadDim + 8;
  static constexpr int kStages = kHeadDim == 128 ? 5 : 9;
  static constexpr int kBarriers = 4 * kStages + 1;
  static constexpr uint32_t kShared = 1024 + kStages * (kTileBytes + kValueBytes) + kBarriers * 8;
  static_assert(kShared <= row_product::kMostSharedBytes);
};

struct WgmmaParams {
  CUtensorMap k_map, v_map;  // boxes of 64 elements x 64 keys
  const bf16* q;
  bf16* out;
  float* lse;
  const int32_t* runs;
  const int32_t* items;
  int64_t q_stride;
  int run_count, item_count;
  int group, q_heads, kv_heads;
  float scale_log2;
};

__device__ __forceinline__ void wait_turn(int group) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(group + 1), "n"(kGroups * kGroupThreads) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(group + 1), "n"(kGroups * kGroupThreads) : "memory");
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) attend_packed(const __grid_constant__ WgmmaParams p) {
  using Shape = Plan<kHeadDim>;
  constexpr int kStages = Shape::kStages, kSteps = kHeadDim / 16;
  extern __shared__ uint8_t shared[];
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;

  // Pieces of work, the ones with most keys first: (item, key head).
  const int pieces = p.item_count * p.kv_heads;
  struct Piece {
    int tile, head, first_query, queries, first_key, keys, past, tiles;
  };
  const auto piece_of = [&](int index) {
    Piece w;
    const int item = index / p.kv_heads;
    const int run = p.items[item];
    w.head = index - item * p.kv_heads;
    w.tile = p.items[p.item_count + item];
    w.first_query = p.runs[run];
    w.queries = p.runs[p.run_count + run];
    w.first_key = p.runs[2 * p.run_count + run];
    w.keys = p.runs[3 * p.run_count + run];
    w.past = w.keys - w.queries;
    const int tokens =
        min(w.queries, (w.tile * kPackedTileRows + kPackedTileRows - 1) / p.group + 1);  // to the tile's end
    w.tiles = (w.past + tokens + kKeyTile - 1) / kKeyTile;
    return w;
  };

  const uint32_t key_tiles = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t value_tiles = key_tiles + kStages * Shape::kTileBytes;
  const uint32_t key_full = value_tiles + kStages * Shape::kValueBytes;
  const uint32_t key_free = key_full + 8 * kStages, value_full = key_free + 8 * kStages;
  const uint32_t value_free = value_full + 8 * kStages, landed = value_free + 8 * kStages;
  if (threadIdx.x == 0) {
    prefetch_map(&p.k_map);
    prefetch_map(&p.v_map);
    for (int s = 0; s < kStages; ++s) {
      init_barrier(key_full + 8 * s, 1);
      init_barrier(value_full + 8 * s, 1);
      init_barrier(key_free + 8 * s, kGroups * 4);
      init_barrier(value_free + 8 * s, kGroups * 4);
    }
    init_barrier(landed, 1);
    publish_barriers();
  }
  for (int stage = 0; stage < kStages; ++stage) {
    const uint32_t ones = value_tiles + static_cast<uint32_t>(stage) * Shape::kValueBytes + Shape::kTileBytes;
    for (uint32_t at = threadIdx.x * 16; at < kBoxBytes; at += kThreads * 16) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(ones + at), "r"(0x3f803f80) : "memory");
    }
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  if (group == 0) {
    give_registers_away<kLoadingRegisters>();
    if (warp != 0) return;
    const uint64_t policy = evict_last_policy();
    row_product::Ring ring(kStages);
    uint32_t landed_phase = 0;
    for (int index = static_cast<int>(blockIdx.x); index < pieces; index += static_cast<int>(gridDim.x)) {
      const Piece w = piece_of(index);
      for (int j = 0; j < w.tiles; ++j, ring.advance()) {
        const auto load = [&](uint32_t target, const CUtensorMap* map, uint32_t barrier) {
          if (lane != 0) return;
          arrive_expecting(barrier, Shape::kTileBytes);
#pragma unroll
          for (int box = 0; box < Shape::kBoxes; ++box) {
            load_box(target + box * kBoxBytes, map, w.head * kHeadDim + box * 64, w.first_key + j * kKeyTile, barrier,
                     policy);
          }
        };
        wait(key_free + 8 * ring.stage, ring.phase ^ 1);
        load(key_tiles + static_cast<uint32_t>(ring.stage) * Shape::kTileBytes, &p.k_map, key_full + 8 * ring.stage);
        wait(value_free + 8 * ring.stage, ring.phase ^ 1);
        const uint32_t values = value_tiles + static_cast<uint32_t>(ring.stage) * Shape::kValueBytes;
        const int rest = w.keys - j * kKeyTile;
        if (rest >= kKeyTile) {
          load(values, &p.v_map, value_full + 8 * ring.stage);
          continue;
        }
        load(values, &p.v_map, landed);
        __syncwarp();
        wait(landed, landed_phase);
        landed_phase ^= 1;
#pragma unroll
        for (int box = 0; box < Shape::kBoxes; ++box) {
          for (uint32_t at = static_cast<uint32_t>(rest) * 128 + static_cast<uint32_t>(lane) * 16; at < kBoxBytes;
               at += 512) {
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values + box * kBoxBytes + at), "r"(0)
                         : "memory");
          }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) arrive(value_full + 8 * ring.stage);
      }
    }
    return;
  }

  take_registers<kRegisters>();
  const float scale = p.scale_log2;
  const uint32_t key_rows = swizzled_rows(key_tiles), value_columns = swizzled_columns(value_tiles);
  const auto release = [&](uint32_t barrier) {
    __syncwarp();
    if (lane == 0) arrive(barrier);
  };
  const int first_pair = (group - 1) * kGroupRows + warp * 16;  // of the warp in a tile's pairs of token and query head

  uint32_t q[kSteps][4];
  // out's last 4: the sums of weights, twice a row.
  float out[Shape::kOutColumns / 2], scores[kKeyTile / 2];
  float max[2], factor[2];
  uint32_t weights[kKeyTile / 16][4];

  const auto pair_of = [&](const Piece& w, int h) { return w.tile * kPackedTileRows + first_pair + lane / 4 + 8 * h; };
  // What the thread's rows see of the keys.
  struct Seen {
    int by_all, last[2];  // up to `by_all` every row of the warp sees all
  };
  const auto seen_of = [&](const Piece& w) {
    const auto last_of = [&](int pair) { return w.past + min(pair / p.group, w.queries - 1); };
    return Seen{last_of(w.tile * kPackedTileRows + first_pair), {last_of(pair_of(w, 0)), last_of(pair_of(w, 1))}};
  };
  int index = static_cast<int>(blockIdx.x);
  Piece w = piece_of(index);
  Seen seen = seen_of(w);
  const auto load_queries = [&](const Piece& w) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int pair = pair_of(w, h), token = pair / p.group;
      const int query_head = w.head * p.group + pair - token * p.group;
      const bf16* const row = p.q + (w.first_query + min(token, w.queries - 1)) * p.q_stride + query_head * kHeadDim;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int part = h; part < 4; part += 2) {
          q[step][part] = *reinterpret_cast<const uint32_t*>(row + 2 * (lane % 4) + 16 * step + 8 * (part / 2));
        }
      }
    }
  };
  const auto issue_scores = [&](int stage) {
    const uint32_t from = further(key_rows, static_cast<uint32_t>(stage) * Shape::kTileBytes);
    multiply_rows<kKeyTile, false, true>(scores, q[0], from);
#pragma unroll
    for (uint32_t step = 1; step < kSteps; ++step) {
      multiply_rows<kKeyTile, false, false>(scores, q[step], further(from, step / 4 * kBoxBytes + step % 4 * 32));
    }
    end_of_group();
  };
  const auto issue_values = [&](int stage) {
    const uint32_t from = further(value_columns, static_cast<uint32_t>(stage) * Shape::kValueBytes);
#pragma unroll
    for (uint32_t step = 0; step < kKeyTile / 16; ++step) {
      multiply_rows<Shape::kOutColumns, true, false>(out, weights[step], further(from, step * 16 * 128));
    }
    end_of_group();
  };
  const auto begin_sums = [&] {
#pragma unroll
    for (int i = 0; i < Shape::kOutColumns / 2; ++i) out[i] = 0;
  };
  // Scores of key tile j become weights, still in float32 (registers that products under way read must not be written
  // meanwhile), and the factor of what is summed so far is found.
  const auto weigh = [&](int j) {
    if (j * kKeyTile + kKeyTile - 1 > seen.by_all) {
      const int key = j * kKeyTile + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kKeyTile / 2; ++i) {
        if (key + i / 4 * 8 + i % 2 > seen.last[i / 2 % 2]) scores[i] = -INFINITY;
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float now = max[h];
#pragma unroll
      for (int b = 0; b < kKeyTile / 8; ++b) now = fmaxf(now, fmaxf(scores[4 * b + 2 * h], scores[4 * b + 2 * h + 1]));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffU, now, 2));
      now = fmaxf(now, __shfl_xor_sync(0xffffffffU, now, 1));
      factor[h] = steps::rescale(max[h], now, scale);
      max[h] = now;
      const float top = steps::scaled_max(now, scale);
#pragma unroll
      for (int b = 0; b < kKeyTile / 8; ++b) {
        scores[4 * b + 2 * h] = steps::weight(scores[4 * b + 2 * h], top, scale);
        scores[4 * b + 2 * h + 1] = steps::weight(scores[4 * b + 2 * h + 1], top, scale);
      }
    }
    pin(scores);  // before the products under way are waited for
  };
  const auto rescale_sums = [&] {
    if (__any_sync(0xffffffffU, factor[0] != 1.0F || factor[1] != 1.0F)) {
#pragma unroll
      for (int i = 0; i < Shape::kOutColumns / 2; ++i) out[i] = __fmul_rn(out[i], factor[i / 2 % 2]);
    }
  };
  const auto round_weights = [&] {
#pragma unroll
    for (int step = 0; step < kKeyTile / 16; ++step) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        weights[step][part] = row_product::pack_pair(scores[8 * step + 2 * part], scores[8 * step + 2 * part + 1]);
      }
    }
  };
  const auto write = [&](const Piece& w, const float (&last_max)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int pair = pair_of(w, h), token = pair / p.group;
      const bool inside = token < w.queries;
      const int row = (w.first_query + token) * p.q_heads + w.head * p.group + pair - token * p.group;
      const float sum = out[kHeadDim / 2 + 2 * h], inverse = flashinfer::math::ptx_rcp(sum);
      bf16* const to = p.out + static_cast<int64_t>(row) * kHeadDim;
#pragma unroll
      for (int b = 0; b < kHeadDim / 8; b += 4) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (b + i) + 2 * h;
          word[i] = row_product::pack_pair(__fmul_rn(out[at], inverse), __fmul_rn(out[at + 1], inverse));
        }
        row_product::write_row(word, to + 8 * b, kHeadDim, inside, lane);
      }
      if (p.lse != nullptr && inside && lane % 4 == 0) {
        p.lse[row] = __fadd_rn(flashinfer::math::ptx_log2(sum), __fmul_rn(last_max[h], scale));
      }
    }
  };

  if (group == 2) give_turn(1);
  row_product::Ring key_ring(kStages), value_ring(kStages);
  load_queries(w);
  begin_sums();
  max[0] = max[1] = -INFINITY;

  wait(key_full + 8 * key_ring.stage, key_ring.phase);
  __syncwarp();
  wait_turn(group);
  begin_products();
  issue_scores(key_ring.stage);
  give_turn(3 - group);
  wait_for_products<0>();
  pin(scores);
  release(key_free + 8 * key_ring.stage);
  key_ring.advance();
  weigh(0);
  round_weights();
  // What the next products read has landed. Stands before the wait for products under way: a branch, over which ptxas
  // does not move that wait (it would wait before the weights are found, and nothing would run beside them).
  const auto wait_for_values = [&](const row_product::Ring& ring) {
    wait(value_full + 8 * ring.stage, ring.phase);
    __syncwarp();
  };
  wait_for_values(value_ring);
  // Every further turn: the scores of tile j, be it this piece's or the first of the next one's, and the products with
  // the weights of the tile before.
  const auto turn = [&](int j) {
    wait(key_full + 8 * key_ring.stage, key_ring.phase);
    __syncwarp();
    wait_turn(group);
    pin(out);
    pin(weights);
    begin_products();
    issue_scores(key_ring.stage);
    issue_values(value_ring.stage);
    give_turn(3 - group);
    wait_for_products<1>();
    pin(scores);
    release(key_free + 8 * key_ring.stage);
    key_ring.advance();
    weigh(j);
    const uint32_t read = value_free + 8 * value_ring.stage;
    value_ring.advance();
    wait_for_values(value_ring);
    wait_for_products<0>();
    pin(out);
    release(read);
  };
  for (;;) {
    const int next = index + static_cast<int>(gridDim.x);
    const bool more = next < pieces;
    const Piece following = more ? piece_of(next) : w;
#pragma unroll 1
    for (int j = 1; j < w.tiles; ++j) {
      turn(j);
      rescale_sums();
      round_weights();
    }
    if (!more) break;
    load_queries(following);
    const float last_max[2] = {max[0], max[1]};
    max[0] = max[1] = -INFINITY;
    seen = seen_of(following);
    turn(0);
    write(w, last_max);
    begin_sums();
    round_weights();
    index = next;
    w = following;
  }
  pin(out);
  pin(weights);
  begin_products();
  issue_values(value_ring.stage);
  wait_for_products<0>();
  pin(out);
  release(value_free + 8 * value_ring.stage);
  write(w, max);
}

template <int kHeadDim>
cudaError_t launch(const AttentionArgs& args, cudaStream_t stream) {
  WgmmaParams p;
  const int64_t width = int64_t{args.kv_heads} * kHeadDim;
  if (!row_product::device_supported() ||
      !row_product::encode(&p.k_map, args.k, args.key_rows, width, args.k_stride, kKeyTile) ||
      !row_product::encode(&p.v_map, args.v, args.key_rows, width, args.v_stride, kKeyTile)) {
    return cudaErrorInvalidValue;
  }
  p.q = static_cast<const bf16*>(args.q);
  p.out = static_cast<bf16*>(args.out);
  p.lse = args.lse;
  p.runs = args.runs;
  p.items = args.items;
  p.q_stride = args.q_stride;
  p.run_count = args.run_count;
  p.item_count = args.item_count;
  p.group = args.q_heads / args.kv_heads;
  p.q_heads = args.q_heads;
  p.kv_heads = args.kv_heads;
  p.scale_log2 = args.scale_log2;
  auto* const kernel = attend_packed<kHeadDim>;
  const cudaError_t error = row_product::allow_shared(reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const int blocks = std::min(row_product::processors(), args.item_count * args.kv_heads);
  kernel<<<static_cast<unsigned>(blocks), kThreads, Plan<kHeadDim>::kShared, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_attention_wgmma(const AttentionArgs& args, cudaStream_t stream) {
  return args.head_dim == 128 ? launch<128>(args, stream) : launch<64>(args, stream);
}

}  // namespace trireme::cuda
