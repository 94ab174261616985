// The packed forward by warp-group products (wgmma): 128 query rows a block, two groups of four warps with 64 rows
// each; a third group copies, its first warp key and value tiles, the next two the piece's queries.
//
// Why the bits are those of the other kernels: a score is one chain of steps of 16 along head_dim, an element of the
// output one chain of steps of 16 along the keys, tile by tile, ascending; a step has the same bits as part of any
// tensor-core instruction (skinny_gemm_mma.h). A maximum has no rounding; factors and weights are computed by the
// operations of attention_steps.cuh; sums of weights are products with ones in all kernels.
//
// A group's time line: it turns the scores of tile j into weights while the products of values with the weights of tile
// j - 1 run, and its rescaling and rounding fall under the products of the other group. Blocks stay and take pieces
// (item, key head) one after another: the first scores of a piece are computed together with the last products of the
// one before.
//
// Barriers: key_full, key_free, value_full, value_free a stage; query_full, query_free. A tile of values that reaches
// past the last key is copied (landed), then its rows past the end are zeroed, for what lies there may be no number and
// 0 times it none either.
#include <algorithm>
#include <flashinfer/math.cuh>

#include "trainer/ops/cuda/attention/attention_groups.cuh"
#include "trainer/ops/cuda/attention/attention_steps.cuh"

namespace trireme::cuda {
namespace {

using namespace groups;
using namespace hopper;
using bf16 = __nv_bfloat16;

constexpr int kQueryWarps = 2;  // that copy queries

template <int kHeadDim>
struct Plan {
  static constexpr uint32_t kTileBytes = kKeyTile * kHeadDim * 2;
  static constexpr int kBoxes = kHeadDim / 64;
  static constexpr uint32_t kValueBytes = kTileBytes + kBoxBytes;  // values, and ones for the sums of weights
  static constexpr int kOutColumns = kHeadDim + 8;
  static constexpr uint32_t kQueryBytes = kPackedTileRows * kHeadDim * 2;
  static constexpr int kStages = kHeadDim == 128 ? 4 : 8;
  static constexpr int kBarriers = 4 * kStages + 3;
  static constexpr uint32_t kShared = 1024 + kStages * (kTileBytes + kValueBytes) + kQueryBytes + kBarriers * 8;
  static_assert(kShared <= skinny_gemm::kMostSharedBytes);
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

__device__ __forceinline__ void copy_async(uint32_t target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) attend_packed(const __grid_constant__ WgmmaParams p) {
  using Shape = Plan<kHeadDim>;
  constexpr int kStages = Shape::kStages, kSteps = kHeadDim / 16;
  extern __shared__ uint8_t shared[];
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;

  const int pieces = p.item_count * p.kv_heads, blocks = static_cast<int>(gridDim.x);
  struct Piece {
    int tile, head, first_query, queries, first_key, keys, past, tiles;
  };
  const auto piece_of = [&](int index) {
    Piece w;
    const int taken = dealt(index, pieces, blocks), item = taken / p.kv_heads;
    const int run = p.items[item];
    w.head = taken - item * p.kv_heads;
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
  // Where row `row` of a piece's queries stands, 16-byte chunk `chunk` of it: eight rows' same chunks on different
  // banks.
  const auto query_at = [&](uint32_t row, uint32_t chunk) { return row * kHeadDim * 2 + (chunk ^ row % 8) * 16; };

  const uint32_t key_tiles = (shared_address(shared) + 1023) & ~1023u;
  const uint32_t value_tiles = key_tiles + kStages * Shape::kTileBytes;
  const uint32_t queries = value_tiles + kStages * Shape::kValueBytes;
  const uint32_t key_full = queries + Shape::kQueryBytes;
  const uint32_t key_free = key_full + 8 * kStages, value_full = key_free + 8 * kStages;
  const uint32_t value_free = value_full + 8 * kStages, landed = value_free + 8 * kStages;
  const uint32_t query_full = landed + 8, query_free = landed + 16;
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
    init_barrier(query_full, kQueryWarps * 32);
    init_barrier(query_free, kGroups * 4);
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
    if (warp > kQueryWarps) return;
    if (warp != 0) {
      constexpr int kChunks = kHeadDim / 8, kRowsAtOnce = kQueryWarps * 32 / kChunks;
      const int thread = (warp - 1) * 32 + lane, chunk = thread % kChunks;
      uint32_t phase = 0;
      for (int index = static_cast<int>(blockIdx.x); index < pieces; index += blocks, phase ^= 1) {
        const Piece w = piece_of(index);
        wait(query_free, phase ^ 1);
#pragma unroll 4
        for (int row = thread / kChunks; row < kPackedTileRows; row += kRowsAtOnce) {
          const int pair = w.tile * kPackedTileRows + row, token = pair / p.group;
          const bf16* const from = p.q + (w.first_query + min(token, w.queries - 1)) * p.q_stride +
                                   (w.head * p.group + pair - token * p.group) * kHeadDim + chunk * 8;
          copy_async(queries + query_at(static_cast<uint32_t>(row), static_cast<uint32_t>(chunk)), from);
        }
        arrive_when_copied(query_full);
      }
      return;
    }
    const uint64_t policy = evict_last_policy();
    skinny_gemm::Ring ring(kStages);
    uint32_t landed_phase = 0;
    for (int index = static_cast<int>(blockIdx.x); index < pieces; index += blocks) {
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
        __syncwarp();
        load(key_tiles + static_cast<uint32_t>(ring.stage) * Shape::kTileBytes, &p.k_map, key_full + 8 * ring.stage);
        wait(value_free + 8 * ring.stage, ring.phase ^ 1);
        __syncwarp();
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
        zero_rows<Shape::kBoxes>(values, rest, lane);
        if (lane == 0) arrive(value_full + 8 * ring.stage);
      }
    }
    return;
  }

  take_registers<kRegisters>();
  const float scale = p.scale_log2;
  const uint32_t key_rows = swizzled_rows(key_tiles), value_columns = swizzled_columns(value_tiles);
  const int first_row = (group - 1) * kGroupRows + warp * 16;  // of the warp in a tile's pairs of token and query head

  // What a thread knows of a piece: two rows, lane / 4 and 8 further.
  struct Rows {
    int tiles;
    int seen_by_all;  // up to this key every row of the warp sees all
    int last[2];      // the last key a row sees
    int row[2];       // of out and lse; -1: past the last
  };
  const auto rows_of = [&](int index) {
    const Piece w = piece_of(index);
    Rows rows;
    rows.tiles = w.tiles;
    const int first = w.tile * kPackedTileRows + first_row;
    rows.seen_by_all = w.past + min(first / p.group, w.queries - 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int pair = first + lane / 4 + 8 * h, token = pair / p.group;
      rows.last[h] = w.past + min(token, w.queries - 1);
      rows.row[h] =
          token < w.queries ? (w.first_query + token) * p.q_heads + w.head * p.group + pair - token * p.group : -1;
    }
    return rows;
  };

  uint32_t q[kSteps][4], weights[kKeyTile / 16][4];
  float out[Shape::kOutColumns / 2];  // the last 4: the sums of weights, twice a row
  float scores[kKeyTile / 2], max[2], factor[2];
  uint32_t query_phase = 0;

  const auto load_queries = [&] {
    wait(query_full, query_phase);
    __syncwarp();
    query_phase ^= 1;
#pragma unroll
    for (uint32_t step = 0; step < kSteps; ++step) {
      const auto row = static_cast<uint32_t>(first_row + lane % 16),
                 chunk = 2 * step + static_cast<uint32_t>(lane) / 16;
      load_matrices_in_order(q[step], queries + query_at(row, chunk));
    }
    release(query_free, lane);
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
  // Scores of key tile j become weights, still in float32 (registers that products under way read must not be written
  // meanwhile), and the factor of what is summed so far is found.
  const auto weigh = [&](const Rows& rows, int j) {
    if (j * kKeyTile + kKeyTile - 1 > rows.seen_by_all) {
      const int key = j * kKeyTile + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < kKeyTile / 2; ++i) {
        if (key + i / 4 * 8 + i % 2 > rows.last[i / 2 % 2]) scores[i] = -INFINITY;
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
  const auto write = [&](const Rows& rows, const float(&last_max)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = out[kHeadDim / 2 + 2 * h], inverse = flashinfer::math::ptx_rcp(sum);
      bf16* const to = p.out + static_cast<int64_t>(rows.row[h]) * kHeadDim;
#pragma unroll
      for (int b = 0; b < kHeadDim / 8; b += 4) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (b + i) + 2 * h;
          word[i] = pack_pair(__fmul_rn(out[at], inverse), __fmul_rn(out[at + 1], inverse));
        }
        skinny_gemm::write_row(word, to + 8 * b, kHeadDim, rows.row[h] >= 0, lane);
      }
      if (p.lse != nullptr && rows.row[h] >= 0 && lane % 4 == 0) {
        p.lse[rows.row[h]] = __fadd_rn(flashinfer::math::ptx_log2(sum), __fmul_rn(last_max[h], scale));
      }
    }
  };

  const auto begin_sums = [&] {
#pragma unroll
    for (int i = 0; i < Shape::kOutColumns / 2; ++i) out[i] = 0;
  };
  const auto rescale_sums = [&] {
    if (__any_sync(0xffffffffU, factor[0] != 1.0F || factor[1] != 1.0F)) {
#pragma unroll
      for (int i = 0; i < Shape::kOutColumns / 2; ++i) out[i] = __fmul_rn(out[i], factor[i / 2 % 2]);
    }
  };
  int index = static_cast<int>(blockIdx.x);
  Rows rows = rows_of(index);
  skinny_gemm::Ring key_ring(kStages), value_ring(kStages);
  const auto wait_for_keys = [&] {
    wait(key_full + 8 * key_ring.stage, key_ring.phase);
    __syncwarp();
  };
  const auto wait_for_values = [&] {
    wait(value_full + 8 * value_ring.stage, value_ring.phase);
    __syncwarp();
  };
  const auto release_keys = [&] {
    release(key_free + 8 * key_ring.stage, lane);
    key_ring.advance();
  };
  load_queries();
  wait_for_keys();
  begin_products();
  issue_scores(key_ring.stage);
  begin_sums();
  max[0] = max[1] = -INFINITY;
  wait_for_products<0>();
  pin(scores);
  release_keys();
  weigh(rows, 0);
  round_sums(weights, scores);
  wait_for_values();
  // Every further turn: the scores of tile j, be it this piece's or the first of the next one's, and the products with
  // the weights of the tile before.
  const auto turn = [&](const Rows& of, int j) {
    wait_for_keys();
    pin(out);
    pin(weights);
    begin_products();
    issue_scores(key_ring.stage);
    issue_values(value_ring.stage);
    wait_for_products<1>();
    pin(scores);
    release_keys();
    weigh(of, j);
    const uint32_t read = value_free + 8 * value_ring.stage;
    value_ring.advance();
    // The values of tile j. The branch in it keeps ptxas from moving the next wait ahead of the weights, which would
    // leave nothing to run beside the products.
    wait_for_values();
    wait_for_products<0>();
    pin(out);
    release(read, lane);
  };
  for (;;) {
    const bool more = index + blocks < pieces;
    const Rows following = more ? rows_of(index + blocks) : rows;
#pragma unroll 1
    for (int j = 1; j < rows.tiles; ++j) {
      turn(rows, j);
      rescale_sums();
      round_sums(weights, scores);
    }
    const float last_max[2] = {max[0], max[1]};
    if (!more) break;
    load_queries();
    max[0] = max[1] = -INFINITY;
    turn(following, 0);
    write(rows, last_max);
    begin_sums();
    round_sums(weights, scores);
    index += blocks;
    rows = following;
  }
  pin(out);
  pin(weights);
  begin_products();
  issue_values(value_ring.stage);
  wait_for_products<0>();
  pin(out);
  release(value_free + 8 * value_ring.stage, lane);
  write(rows, max);
}

template <int kHeadDim>
cudaError_t launch(const AttentionArgs& args, cudaStream_t stream) {
  WgmmaParams p;
  const int64_t width = int64_t{args.kv_heads} * kHeadDim;
  if (!skinny_gemm::device_supported() ||
      !skinny_gemm::encode(&p.k_map, args.k, args.key_rows, width, args.k_stride, kKeyTile) ||
      !skinny_gemm::encode(&p.v_map, args.v, args.key_rows, width, args.v_stride, kKeyTile)) {
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
  const cudaError_t error = skinny_gemm::allow_shared(reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const int grid = std::min(skinny_gemm::sm_count(), args.item_count * args.kv_heads);
  kernel<<<static_cast<unsigned>(grid), kThreads, Plan<kHeadDim>::kShared, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_attention_packed(const AttentionArgs& args, cudaStream_t stream) {
  return args.head_dim == 128 ? launch<128>(args, stream) : launch<64>(args, stream);
}

}  // namespace trireme::cuda
