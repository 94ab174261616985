// The packed backward by warp-group products (wgmma), deterministic: nothing is added in the order of arrival.
//
// With P the weights that the forward's log-sum-exp gives back, dP = dO V^T and D the rows' sums of dO * O:
//   dS = P * (dP - D),  dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
// (FlashAttention-2, arXiv:2307.08691, algorithm 2). Two passes, each of which holds what it sums in registers and
// computes P and dS for itself: of keys (dK and dV of 128 keys over all queries that see them, and over the query heads
// of the key head), and of queries (dQ of 128 queries of a head over all keys that they see). That is 7 products
// for the 5 of a pass whose blocks would add to dQ in memory, one after another to be deterministic.
//
// Both passes are one kernel: two operands of a piece stay in shared memory, 128 rows each (keys and values, or queries
// and dO), two others stream by in tiles of 64 rows (queries and dO, or keys and values). Two groups of four warps have
// 64 of the 128 rows each; a third group copies.
//
// Rows past a sequence's end belong to the next one, which must not be seen even where it is no number: streamed ones
// are zeroed once they have landed, results of staged ones are not written.
#include <algorithm>
#include <utility>

#include "trainer/ops/cuda/attention/attention_groups.cuh"
#include "trainer/ops/cuda/attention/attention_steps.cuh"

namespace trireme::cuda {
namespace {

using namespace groups;
using namespace hopper;
using bf16 = __nv_bfloat16;

template <int kHeadDim>
struct Plan {
  static constexpr int kBoxes = kHeadDim / 64;
  static constexpr uint32_t kTileBytes = kTile * kHeadDim * 2;        // of one operand
  static constexpr uint32_t kStagedBytes = 2 * kGroups * kTileBytes;  // both operands of a piece
  static constexpr uint32_t kStatisticsBytes = 2 * kTile * 4;         // log-sum-exp and D of a tile of queries
  static constexpr int kStages = kHeadDim == 128 ? 4 : 8;
  static constexpr int kBarriers = 2 * kStages + 3;
  static constexpr uint32_t kShared =
      1024 + kStagedBytes + kStages * (2 * kTileBytes + kStatisticsBytes) + kBarriers * 8;
  static_assert(kShared <= skinny_gemm::kMostSharedBytes);
};

struct BackwardParams {
  CUtensorMap staged[2], streamed[2];  // boxes of 64 elements x 64 rows
  const float* minus_lse;              // [q_heads, tokens]
  const float* sums;                   // [q_heads, tokens], D
  bf16* first;                         // dK or dQ
  bf16* second;                        // dV
  const int32_t* runs;
  const int32_t* items;
  int run_count, item_count, tokens;
  int group, q_heads, kv_heads;
  float scale, scale_log2;
};

__device__ __forceinline__ void copy_word(uint32_t target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}
__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address));
  return pair;
}

struct Piece {
  int head, first_query, queries, first_key, keys, past;
  int row;    // of the run: the first of the piece's 128 staged rows
  int begin;  // the first streamed tile
  int tiles;  // from there, of a query head
  int turns;  // tiles of all query heads
};

// A streamed tile of a piece: those of its first query head come first.
struct StreamedTile {
  int head, tile = 0;  // tile: from the piece's first streamed tile on
  __device__ __forceinline__ explicit StreamedTile(int first_head) : head(first_head) {}
  __device__ __forceinline__ void advance(const Piece& piece) {
    if (++tile == piece.tiles) {
      tile = 0;
      ++head;
    }
  }
};

// What the warps of a block share: its pieces, and the addresses of tiles and barriers in shared memory.
// kOfKeys, here and below: the pass of dK and dV; otherwise that of dQ.
template <int kHeadDim, bool kOfKeys>
struct Block {
  using Shape = Plan<kHeadDim>;
  static constexpr int kStages = Shape::kStages;

  const BackwardParams& p;
  int heads, pieces, blocks;
  uint32_t staged, streamed, statistics;
  uint32_t full, free;  // a barrier each stage
  uint32_t staged_full, staged_free, landed;

  __device__ __forceinline__ Block(const BackwardParams& params, const uint8_t* shared) : p(params) {
    heads = kOfKeys ? p.kv_heads : p.q_heads;
    pieces = p.item_count * heads;
    blocks = static_cast<int>(gridDim.x);
    staged = (shared_address(shared) + 1023) & ~1023u;
    streamed = staged + Shape::kStagedBytes;
    statistics = streamed + kStages * 2 * Shape::kTileBytes;
    full = statistics + kStages * Shape::kStatisticsBytes;
    free = full + 8 * kStages;
    staged_full = free + 8 * kStages;
    staged_free = staged_full + 8;
    landed = staged_full + 16;
  }

  // By one thread, before any other uses a barrier.
  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < 2; ++i) {
      prefetch_map(&p.staged[i]);
      prefetch_map(&p.streamed[i]);
    }
    for (int s = 0; s < kStages; ++s) {
      init_barrier(full + 8 * s, kOfKeys ? 1 + 32 : 1);
      init_barrier(free + 8 * s, kGroups * 4);
    }
    init_barrier(staged_full, 1);
    init_barrier(staged_free, kGroups * 4);
    init_barrier(landed, 1);
    publish_barriers();
  }

  __device__ __forceinline__ Piece piece_of(int index) const {
    Piece w;
    const int taken = dealt(index, pieces, blocks), item = taken / heads, run = p.items[item];
    w.head = taken - item * heads;
    w.row = p.items[p.item_count + item] * kBackwardTileRows;
    w.first_query = p.runs[run];
    w.queries = p.runs[p.run_count + run];
    w.first_key = p.runs[2 * p.run_count + run];
    w.keys = p.runs[3 * p.run_count + run];
    w.past = w.keys - w.queries;
    if constexpr (kOfKeys) {
      w.begin = max(w.row - w.past, 0) / kTile;
      w.tiles = (w.queries + kTile - 1) / kTile - w.begin;
      w.turns = w.tiles * p.group;
    } else {
      w.begin = 0;
      w.tiles = (w.past + min(w.row + kBackwardTileRows, w.queries) + kTile - 1) / kTile;
      w.turns = w.tiles;
    }
    return w;
  }
};

// The warp that copies staged rows and streamed tiles.
template <int kHeadDim, bool kOfKeys>
struct Producer {
  using Shape = Plan<kHeadDim>;

  const Block<kHeadDim, kOfKeys>& block;
  int lane;
  uint64_t policy = evict_last_policy();
  skinny_gemm::Ring ring;
  uint32_t phase = 0, landed_phase = 0;

  __device__ __forceinline__ Producer(const Block<kHeadDim, kOfKeys>& of, int own_lane)
      : block(of), lane(own_lane), ring(Shape::kStages) {}

  __device__ __forceinline__ void load() {
    for (int index = static_cast<int>(blockIdx.x); index < block.pieces; index += block.blocks, phase ^= 1) {
      const Piece w = block.piece_of(index);
      load_staged(w);
      StreamedTile from(kOfKeys ? w.head * block.p.group : w.head / block.p.group);
      for (int turn = 0; turn < w.turns; ++turn, ring.advance()) {
        load_streamed(w, from);
        from.advance(w);
      }
    }
  }

  __device__ __forceinline__ void load_staged(const Piece& w) {
    wait(block.staged_free, phase ^ 1);
    __syncwarp();
    if (lane == 0) {
      const int first_staged = (kOfKeys ? w.first_key : w.first_query) + w.row;
      arrive_expecting(block.staged_full, Shape::kStagedBytes);
      for (int operand = 0; operand < 2; ++operand) {
        for (int half = 0; half < kGroups; ++half) {
          for (int box = 0; box < Shape::kBoxes; ++box) {
            load_box(block.staged + static_cast<uint32_t>((operand * kGroups + half) * Shape::kBoxes + box) * kBoxBytes,
                     &block.p.staged[operand], w.head * kHeadDim + box * 64, first_staged + half * kGroupRows,
                     block.staged_full, policy);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void load_streamed(const Piece& w, const StreamedTile& from) {
    const int first = (w.begin + from.tile) * kTile, rest = (kOfKeys ? w.queries : w.keys) - first;
    const uint32_t there = block.full + 8 * ring.stage, barrier = rest >= kTile ? there : block.landed;
    const uint32_t target = block.streamed + static_cast<uint32_t>(ring.stage) * 2 * Shape::kTileBytes;
    wait(block.free + 8 * ring.stage, ring.phase ^ 1);
    __syncwarp();
    if (lane == 0) {
      arrive_expecting(barrier, 2 * Shape::kTileBytes);
      for (int operand = 0; operand < 2; ++operand) {
        for (int box = 0; box < Shape::kBoxes; ++box) {
          load_box(target + static_cast<uint32_t>(operand * Shape::kBoxes + box) * kBoxBytes,
                   &block.p.streamed[operand], from.head * kHeadDim + box * 64,
                   (kOfKeys ? w.first_query : w.first_key) + first, barrier, policy);
        }
      }
    }
    if (rest < kTile) {
      __syncwarp();
      wait(block.landed, landed_phase);
      landed_phase ^= 1;
      zero_rows<2 * Shape::kBoxes>(target, rest, lane);
      if (lane == 0) arrive(there);
    }
  }
};

// The pass of keys: the warp that copies the statistics of streamed queries.
template <int kHeadDim>
struct StatisticsProducer {
  using Shape = Plan<kHeadDim>;

  const Block<kHeadDim, true>& block;
  int lane;

  __device__ __forceinline__ void load() const {
    skinny_gemm::Ring ring(Shape::kStages);
    for (int index = static_cast<int>(blockIdx.x); index < block.pieces; index += block.blocks) {
      const Piece w = block.piece_of(index);
      StreamedTile from(w.head * block.p.group);
      for (int turn = 0; turn < w.turns; ++turn, ring.advance()) {
        load_tile(w, from, ring);
        from.advance(w);
      }
    }
  }

  __device__ __forceinline__ void load_tile(const Piece& w, const StreamedTile& tile,
                                            const skinny_gemm::Ring& ring) const {
    wait(block.free + 8 * ring.stage, ring.phase ^ 1);
    __syncwarp();
    const uint32_t target = block.statistics + static_cast<uint32_t>(ring.stage) * Shape::kStatisticsBytes;
    for (int i = lane; i < kTile; i += 32) {
      // Past the last query any one will do: its weights are 0.
      const int query = min((w.begin + tile.tile) * kTile + i, w.queries - 1);
      const int64_t from = int64_t{tile.head} * block.p.tokens + w.first_query + query;
      copy_word(target + static_cast<uint32_t>(i) * 4, block.p.minus_lse + from);
      copy_word(target + static_cast<uint32_t>(kTile + i) * 4, block.p.sums + from);
    }
    arrive_when_copied(block.full + 8 * ring.stage);
  }
};

// A group of four warps that multiplies: 64 of a piece's 128 rows. All of it lives in registers: arrays are indexed by
// constants only.
template <int kHeadDim, bool kOfKeys>
struct Consumer {
  using Shape = Plan<kHeadDim>;
  static constexpr int kSteps = kHeadDim / 16;

  const Block<kHeadDim, kOfKeys>& block;
  int lane, first_row;  // first_row: of the warp
  float scale_log2;
  uint32_t own[2];
  uint32_t tile_rows, tile_columns;
  skinny_gemm::Ring ring;
  uint32_t phase = 0;

  float scores[kTile / 2], gradients[kTile / 2];  // S and dP, [64 rows, 64 streamed rows]
  float first[kHeadDim / 2], second[kOfKeys ? kHeadDim / 2 : 1];
  uint32_t weights[kTile / 16][4], changes[kTile / 16][4];  // P and dS as operands

  // Of the piece.
  Piece w;
  int row;  // of the run, and the one 8 further
  // Of queries: the rows' statistics and the last key that each sees.
  float minus_lse[2], sums[2];
  int last[2], seen_by_all;
  int tile;  // that streams by

  __device__ __forceinline__ Consumer(const Block<kHeadDim, kOfKeys>& of, int half, int warp, int own_lane)
      : block(of), lane(own_lane), ring(Shape::kStages) {
    scale_log2 = block.p.scale_log2;
    first_row = half * kGroupRows + warp * 16;
    own[0] = swizzled_rows(block.staged + static_cast<uint32_t>(half) * Shape::kTileBytes);
    own[1] = swizzled_rows(block.staged + static_cast<uint32_t>(kGroups + half) * Shape::kTileBytes);
    tile_rows = swizzled_rows(block.streamed);
    tile_columns = swizzled_columns(block.streamed);
    // Opaque, so that the compiler keeps them and does not find them again from addresses in every turn: the pass of
    // keys has no registers left for that and would spill.
    asm volatile("" : "+r"(own[0]), "+r"(own[1]));
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int index = static_cast<int>(blockIdx.x); index < block.pieces; index += block.blocks, phase ^= 1) {
      begin_piece(index);
      sum_piece();
      write();
    }
  }

  __device__ __forceinline__ void begin_piece(int index) {
    w = block.piece_of(index);
    row = w.row + first_row + lane / 4;
    if constexpr (!kOfKeys) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int query = min(row + 8 * h, w.queries - 1);
        const int64_t from = int64_t{w.head} * block.p.tokens + w.first_query + query;
        minus_lse[h] = block.p.minus_lse[from];
        sums[h] = block.p.sums[from];
        last[h] = w.past + query;
      }
      seen_by_all = w.past + min(w.row + first_row, w.queries - 1);
    }
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) first[i] = 0;
    if constexpr (kOfKeys) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) second[i] = 0;
    }
    tile = w.begin;
  }

  // One turn a streamed tile. A tile's scores and the last product with the changes of the tile before, if there is
  // one, are under way when finish_turn begins.
  __device__ __forceinline__ void sum_piece() {
    wait(block.staged_full, phase);
    __syncwarp();
    wait_for_tile();
    begin_products();
    issue_rows(scores, 0, ring.stage);
    if constexpr (kOfKeys) {
      wait_for_products<0>();
    } else {
      issue_rows(gradients, 1, ring.stage);
      wait_for_products<1>();
    }
    finish_turn();
#pragma unroll 1
    for (int turn = 1; turn < w.turns; ++turn) {
      const int before = ring.stage;
      ring.advance();
      if (++tile == w.begin + w.tiles) tile = w.begin;
      wait_for_tile();
      pin(first);
      pin(changes);
      begin_products();
      issue_rows(scores, 0, ring.stage);
      issue_columns(first, changes, 0, before);
      if constexpr (kOfKeys) {
        wait_for_products<1>();
      } else {
        issue_rows(gradients, 1, ring.stage);
        wait_for_products<2>();
      }
      finish_turn();
      release(block.free + 8 * before, lane);
    }
    release(block.staged_free, lane);
    pin(first);
    pin(changes);
    begin_products();
    issue_columns(first, changes, 0, ring.stage);
    wait_for_products<0>();
    pin(first);
    release(block.free + 8 * ring.stage, lane);
    ring.advance();
  }

  // Afterwards the tile's changes are ready. In the pass of keys dP begins late and the values' product at once, since
  // there are no registers for more; in that of queries dP is under way from the beginning.
  __device__ __forceinline__ void finish_turn() {
    const uint32_t at = block.statistics + static_cast<uint32_t>(ring.stage) * Shape::kStatisticsBytes;
    pin(scores);
    weigh(at);
    wait_for_tile();  // It has come. But ptxas does not move the next wait over a branch, ahead of the weights.
    wait_for_products<0>();
    pin(first);
    if constexpr (kOfKeys) {
      round_sums(weights, scores);
      pin(second);
      pin(weights);
      begin_products();
      issue_rows(gradients, 1, ring.stage);
      issue_columns(second, weights, 1, ring.stage);
      wait_for_products<1>();
    }
    pin(gradients);
    change(at + kTile * 4);
    if constexpr (kOfKeys) {
      wait_for_tile();
      wait_for_products<0>();
      pin(second);
    }
    round_sums(changes, gradients);
  }

  __device__ __forceinline__ void wait_for_tile() const {
    wait(block.full + 8 * ring.stage, ring.phase);
    __syncwarp();
  }

  // S or dP: rows of the piece times streamed rows.
  __device__ __forceinline__ void issue_rows(float (&sum)[kTile / 2], int operand, int stage) const {
    const uint32_t b = further(tile_rows, static_cast<uint32_t>(2 * stage + operand) * Shape::kTileBytes),
                   a = own[operand];
    multiply_first_group(sum, a, b);
#pragma unroll
    for (uint32_t step = 1; step < kSteps; ++step) {
      const uint32_t at = step / 4 * kBoxBytes + step % 4 * 32;
      multiply_group<kTile>(sum, further(a, at), further(b, at));
    }
    end_of_group();
  }

  // sum += a [64, 64] times streamed rows [64, head_dim].
  __device__ __forceinline__ void issue_columns(float (&sum)[kHeadDim / 2], const uint32_t (&a)[kTile / 16][4],
                                                int operand, int stage) const {
    const uint32_t b = further(tile_columns, static_cast<uint32_t>(2 * stage + operand) * Shape::kTileBytes);
#pragma unroll
    for (uint32_t step = 0; step < kTile / 16; ++step) {
      multiply_rows<kHeadDim, true, false>(sum, a[step], further(b, step * 16 * 128));
    }
    end_of_group();
  }

  // A statistic of the queries that sums [row][column] of block b of columns belong to: in the pass of keys those at
  // `at`, else those of the thread's rows.
  __device__ __forceinline__ void get_statistic(float (&of)[2][2], const float (&of_rows)[2], uint32_t at,
                                                int b) const {
    if constexpr (kOfKeys) {
      const float2 pair = load_pair(at + static_cast<uint32_t>(8 * b + 2 * (lane % 4)) * 4);
      of[0][0] = of[1][0] = pair.x;
      of[0][1] = of[1][1] = pair.y;
    } else {
      of[0][0] = of[0][1] = of_rows[0];
      of[1][0] = of[1][1] = of_rows[1];
    }
  }

  // Scores become weights.
  __device__ __forceinline__ void weigh(uint32_t lse_at) {
#pragma unroll
    for (int b = 0; b < kTile / 8; ++b) {
      float from[2][2];
      get_statistic(from, minus_lse, lse_at, b);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[4 * b + i] = steps::exp2_approx(__fmaf_rn(scores[4 * b + i], scale_log2, from[i / 2][i % 2]));
      }
    }
    const int column = tile * kTile + 2 * (lane % 4);
    if constexpr (kOfKeys) {
      // Rows are keys, columns queries.
      if (w.row + first_row + 15 > w.past + tile * kTile || tile * kTile + kTile > w.queries) {
#pragma unroll
        for (int i = 0; i < kTile / 2; ++i) {
          const int query = column + i / 4 * 8 + i % 2;
          if (row + 8 * (i / 2 % 2) > w.past + query || query >= w.queries) scores[i] = 0;
        }
      }
    } else if (tile * kTile + kTile - 1 > seen_by_all) {
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) {
        if (column + i / 4 * 8 + i % 2 > last[i / 2 % 2]) scores[i] = 0;
      }
    }
    pin(scores);
  }

  // dP becomes dS.
  __device__ __forceinline__ void change(uint32_t sums_at) {
#pragma unroll
    for (int b = 0; b < kTile / 8; ++b) {
      float from[2][2];
      get_statistic(from, sums, sums_at, b);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        gradients[4 * b + i] = __fmul_rn(scores[4 * b + i], __fsub_rn(gradients[4 * b + i], from[i / 2][i % 2]));
      }
    }
    pin(gradients);
  }

  __device__ __forceinline__ void write() const {
    const int own_lane = lane;  // read once, so that the columns of all rows are found once
    const int end = kOfKeys ? w.keys : w.queries;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool inside = row + 8 * h < end;
      const int64_t to =
          (int64_t{(kOfKeys ? w.first_key : w.first_query) + row + 8 * h} * block.heads + w.head) * kHeadDim;
#pragma unroll
      for (int b = 0; b < kHeadDim / 8; b += 4) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = 4 * (b + i) + 2 * h;
          word[i] = pack_pair(__fmul_rn(first[at], block.p.scale), __fmul_rn(first[at + 1], block.p.scale));
        }
        skinny_gemm::write_row(word, block.p.first + to + 8 * b, kHeadDim, inside, own_lane);
        if constexpr (kOfKeys) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = 4 * (b + i) + 2 * h;
            word[i] = pack_pair(second[at], second[at + 1]);
          }
          skinny_gemm::write_row(word, block.p.second + to + 8 * b, kHeadDim, inside, own_lane);
        }
      }
    }
  }
};

template <int kHeadDim, bool kOfKeys>
__global__ void __launch_bounds__(kThreads, 1) attend_backward(const __grid_constant__ BackwardParams p) {
  extern __shared__ uint8_t shared[];
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4, lane = static_cast<int>(threadIdx.x) % 32;
  const Block<kHeadDim, kOfKeys> block(p, shared);
  if (threadIdx.x == 0) block.init_barriers();
  __syncthreads();

  if (group == 0) {
    give_registers_away<kLoadingRegisters>();
    if (warp == 0) {
      Producer<kHeadDim, kOfKeys>(block, lane).load();
    } else if constexpr (kOfKeys) {
      if (warp == 1) StatisticsProducer<kHeadDim>{block, lane}.load();
    }
    return;
  }
  take_registers<kRegisters>();
  Consumer<kHeadDim, kOfKeys>(block, group - 1, warp, lane).run();
}

// A warp has a head of 32 tokens.
template <int kHeadDim>
__global__ void __launch_bounds__(256)
    sum_rows(const bf16* __restrict__ out, const bf16* __restrict__ dout, const float* __restrict__ lse,
             float* __restrict__ minus_lse, float* __restrict__ sums, int tokens, int heads) {
  constexpr int kPerLane = kHeadDim / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t unit = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  const int head = static_cast<int>(unit % heads);
  const int64_t first = unit / heads * 32;
  if (first >= tokens) return;
  const int count = static_cast<int>(min(int64_t{32}, tokens - first));
  float mine = 0;
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const int64_t at = ((first + i) * heads + head) * kHeadDim + lane * kPerLane;
    __nv_bfloat162 a[kPerLane / 2], b[kPerLane / 2];
    if constexpr (kPerLane == 4) {
      *reinterpret_cast<uint2*>(a) = *reinterpret_cast<const uint2*>(out + at);
      *reinterpret_cast<uint2*>(b) = *reinterpret_cast<const uint2*>(dout + at);
    } else {
      *reinterpret_cast<uint32_t*>(a) = *reinterpret_cast<const uint32_t*>(out + at);
      *reinterpret_cast<uint32_t*>(b) = *reinterpret_cast<const uint32_t*>(dout + at);
    }
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kPerLane / 2; ++k) {
      const float2 x = __bfloat1622float2(a[k]), y = __bfloat1622float2(b[k]);
      sum = __fmaf_rn(x.y, y.y, __fmaf_rn(x.x, y.x, sum));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffU, sum, distance);
    if (i == lane) mine = sum;
  }
  if (lane >= count) return;
  const int64_t to = int64_t{head} * tokens + first + lane;
  sums[to] = mine;
  minus_lse[to] = -lse[(first + lane) * heads + head];
}

template <int kHeadDim, bool kOfKeys>
cudaError_t launch_pass(BackwardParams p, const int32_t* items, int item_count, cudaStream_t stream) {
  if (item_count == 0) return cudaSuccess;
  p.items = items;
  p.item_count = item_count;
  auto* const kernel = attend_backward<kHeadDim, kOfKeys>;
  const cudaError_t error = skinny_gemm::allow_shared(reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  const int grid = std::min(skinny_gemm::sm_count(), item_count * (kOfKeys ? p.kv_heads : p.q_heads));
  kernel<<<static_cast<unsigned>(grid), kThreads, Plan<kHeadDim>::kShared, stream>>>(p);
  return cudaGetLastError();
}

template <int kHeadDim>
cudaError_t launch(const AttentionBackwardArgs& args, cudaStream_t stream) {
  const AttentionArgs& forward = args.forward;
  const int64_t q_width = int64_t{forward.q_heads} * kHeadDim, k_width = int64_t{forward.kv_heads} * kHeadDim;
  CUtensorMap q, dout, k, v;
  if (!skinny_gemm::encode(&q, forward.q, args.tokens, q_width, forward.q_stride, kTile) ||
      !skinny_gemm::encode(&dout, args.dout, args.tokens, q_width, q_width, kTile) ||
      !skinny_gemm::encode(&k, forward.k, forward.key_rows, k_width, forward.k_stride, kTile) ||
      !skinny_gemm::encode(&v, forward.v, forward.key_rows, k_width, forward.v_stride, kTile)) {
    return cudaErrorInvalidValue;
  }
  constexpr int64_t kWarps = 8;
  const int64_t units = (args.tokens + 31) / 32 * forward.q_heads;
  sum_rows<kHeadDim><<<static_cast<unsigned>((units + kWarps - 1) / kWarps), kWarps * 32, 0, stream>>>(
      static_cast<const bf16*>(forward.out), static_cast<const bf16*>(args.dout), forward.lse, args.minus_lse,
      args.sums, static_cast<int>(args.tokens), forward.q_heads);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  BackwardParams p;
  p.minus_lse = args.minus_lse;
  p.sums = args.sums;
  p.runs = forward.runs;
  p.run_count = forward.run_count;
  p.tokens = static_cast<int>(args.tokens);
  p.group = forward.q_heads / forward.kv_heads;
  p.q_heads = forward.q_heads;
  p.kv_heads = forward.kv_heads;
  p.scale = args.scale;
  p.scale_log2 = forward.scale_log2;
  p.staged[0] = k;
  p.staged[1] = v;
  p.streamed[0] = q;
  p.streamed[1] = dout;
  p.first = static_cast<bf16*>(args.dk);
  p.second = static_cast<bf16*>(args.dv);
  error = launch_pass<kHeadDim, true>(p, args.key_items, args.key_item_count, stream);
  if (error != cudaSuccess) return error;
  std::swap(p.staged, p.streamed);
  p.first = static_cast<bf16*>(args.dq);
  p.second = nullptr;
  return launch_pass<kHeadDim, false>(p, args.query_items, args.query_item_count, stream);
}

}  // namespace

cudaError_t launch_attention_backward(const AttentionBackwardArgs& args, cudaStream_t stream) {
  return args.forward.head_dim == 128 ? launch<128>(args, stream) : launch<64>(args, stream);
}

}  // namespace trireme::cuda
