// Decode for few runs: a cluster of blocks shares one (run, key head), so that the reading and scoring of its keys is
// spread over many SMs, and only what must be done one tile after another is: the sums over keys.
//
// Key tiles are taken in rounds of kCluster * kScoreWarps; each warp that scores has one tile of a round.
//   score   S = Q K^T of its tile, masked; the tile's row maxima go to all blocks of the cluster.
//   weigh   When all maxima of the round are there: the running maximum before and after its tile, hence the factor of
//           what was summed before it, and its weights in bf16; both go to all blocks, as operands of products.
//   chain   A warp of the chain owns 16 columns of the output (8, where a block has no more). Tile by tile, in order of
//           keys, it scales what it has and adds the products of weights and values, and likewise the sum of the
//           weights.
//   values  A warp copies the block's columns of V, as far ahead as there is room.
// Scoring and weighing of a round run under the chain of the round before it.
//
// Why the bits are those of the packed kernel: a score is one chain of products over head_dim, as there; a maximum has
// no rounding, so the running maximum is the same however it is found, and factor and weights are computed from the
// same operands by the same operations (attention_steps.cuh); an element of the output and a row's sum see the same
// factors and products tile by tile in the same order. Only who computes an element differs.
//
// Barriers (two of each per round parity, and one pair a stage of values):
//   maxima_full    this block has the maxima of the round: bytes of remote stores, named by the first warp.
//   weights_full   this block has the factors and weights of the round: likewise.
//   weights_free   the chains of all blocks are done with the round before the last: arrivals of remote warps.
//   value_full, value_free   of a stage of values, within the block.
// And keys_begun, once: the first half of each scoring warp's first keys has come, or will be asked for late.
// A round's maxima need no barrier to be overwritten: who sends those of round i + 2 has seen all of round i + 1, and
// every warp sends its own after it has read those of round i.
#include <algorithm>
#include <flashinfer/math.cuh>

#include "trainer/ops/cuda/attention/attention_decode.cuh"
#include "trainer/ops/cuda/attention/attention_steps.cuh"
#include "trainer/ops/cuda/device/hopper.cuh"

namespace trireme::cuda {
namespace {

using namespace decode;
using hopper::shared_address;

constexpr int kScoreWarps = 4;
constexpr int kSteps = kKeyTile / 16;  // of a tile in the chain

// ---- exchange between the blocks of a cluster (addresses are those of the shared window)

__device__ __forceinline__ uint32_t address_in(uint32_t address, int rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}
// Stores in another block; its barrier counts the bytes once they can be seen there.
__device__ __forceinline__ void send(uint32_t remote, float value, uint32_t remote_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
               "r"(__float_as_uint(value)), "r"(remote_barrier)
               : "memory");
}
__device__ __forceinline__ void send(uint32_t remote, uint4 value, uint32_t remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
      "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(remote_barrier)
      : "memory");
}
__device__ __forceinline__ bool round_ended(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}
// hopper::wait over the memory of the cluster, with its deadline.
__device__ __forceinline__ void wait_for_cluster(uint32_t barrier, uint32_t parity) {
  uint64_t start = 0;
  for (uint32_t tries = 1; !round_ended(barrier, parity); ++tries) {
    if (tries % 1024 != 0) continue;
    const uint64_t now = hopper::nanoseconds();
    if (start == 0) start = now;
    if (now - start > hopper::kWaitDeadlineNs) hopper::fail();
  }
}
// Arrives at a barrier of this block when all copies that this thread has begun have come.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ uint4 load_words(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ float2 load_pair(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ float load_float(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}

// ---- shared memory

// kHalves: how many blocks of 8 rows the query heads of a key head fill; rows of the other stay zero.
template <int kHeadDim, int kCluster, int kHalves>
struct Plan {
  static constexpr int kTiles = kCluster * kScoreWarps;  // of a round
  static constexpr int kRows = 8 * kHalves;
  static constexpr int kColumns = kHeadDim / kCluster;  // of a block
  static constexpr int kChainWarps = std::max(1, kColumns / 16);
  static constexpr int kWarps = kScoreWarps + 1 + kChainWarps;
  static constexpr int kVectors = 2 * kHalves;  // of 16 bytes: weights of a tile in a lane
  static constexpr uint32_t kKeyBytes = kKeyTile * kHeadDim * 2;
  static constexpr uint32_t kValueBytes = kKeyTile * kColumns * 2;
  static constexpr int kStages = std::min<int>(32, (kHalves == 1 ? 65536 : 16384) / kValueBytes);
  static constexpr uint32_t kRowBytes = kRows * 4;  // maxima or factors of a tile
  static constexpr int kBarriers = 7 + 2 * kStages;
  // Offsets; the weights, whose size depends on the group, come last.
  static constexpr uint32_t kValues = kScoreWarps * kKeyBytes;
  static constexpr uint32_t kMaxima = kValues + kStages * kValueBytes;
  static constexpr uint32_t kFactors = kMaxima + 2 * kTiles * kRowBytes;
  static constexpr uint32_t kBarrierAt = kFactors + 2 * kTiles * kRowBytes;
  static constexpr uint32_t kWeights = (kBarrierAt + kBarriers * 8 + 15) / 16 * 16;

  static_assert(kColumns % 8 == 0 && kStages >= 2 && (kStages & (kStages - 1)) == 0);
  static constexpr uint32_t kWeightsEnd = 32 * 16;
  static constexpr uint32_t weight_bytes(int lanes) { return kVectors * lanes * 16; }  // of a tile
  static constexpr uint32_t bytes(int lanes) { return kWeights + 2 * kTiles * weight_bytes(lanes) + kWeightsEnd; }
  static_assert(bytes(32) <= 227 * 1024);
};

// Lanes whose part of a tile's weights belongs to a query head; only they are exchanged.
constexpr int weighing_lanes(int group) { return 4 * std::min(group, 8); }

// Bytes from the start of a tile of values; rows of kColumns, swizzled so that eight of them, from an even eighth,
// touch every bank once at the same chunk of 16 bytes.
template <int kColumns>
__device__ __forceinline__ uint32_t value_offset(int row, int chunk) {
  constexpr int kChunks = kColumns / 8;
  static_assert(kChunks <= 8);
  const int turned = chunk ^ (row / (8 / kChunks) % kChunks);
  return static_cast<uint32_t>(row * kColumns * 2 + turned * 16);
}

// What a thread is, the run and key head of its cluster, and where things lie in shared memory.
template <int kHeadDim, int kCluster, int kHalves>
struct Block {
  using P = Plan<kHeadDim, kCluster, kHalves>;

  const DecodeParams& params;
  uint32_t base;
  uint32_t maxima_full, weights_full, weights_free, keys_begun, value_full, value_free;
  int warp, lane, rank, head;
  int64_t q_row, first_key;
  int keys, tiles, rounds;
  int lanes;  // that weigh
  uint32_t weight_bytes;

  // Reads the run, readies the barriers meanwhile, and arrives at the cluster's barrier.
  __device__ __forceinline__ Block(const DecodeParams& of, const uint8_t* shared) : params(of) {
    base = shared_address(shared);
    maxima_full = base + P::kBarrierAt;
    weights_full = maxima_full + 16;
    weights_free = weights_full + 16;
    keys_begun = weights_free + 16;
    value_full = keys_begun + 8;
    value_free = value_full + 8 * P::kStages;
    warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x) / 32, 0);
    lane = static_cast<int>(threadIdx.x) % 32;
    rank = static_cast<int>(blockIdx.x) % kCluster;
    const int run = static_cast<int>(blockIdx.x) / kCluster;
    head = static_cast<int>(blockIdx.y);
    int q_row_read = params.runs[run], first_key_read = params.runs[2 * params.run_count + run];
    int keys_read = params.runs[3 * params.run_count + run];
    hopper::let_successors_begin();
    init_barriers();  // while the run is being read
    __syncthreads();  // keys_begun is arrived at before the cluster's barrier
    hopper::cluster_arrive();
    asm volatile("" : "+r"(q_row_read), "+r"(first_key_read), "+r"(keys_read));
    q_row = q_row_read;
    first_key = first_key_read;
    keys = keys_read;
    tiles = (keys + kKeyTile - 1) / kKeyTile;
    rounds = (tiles + P::kTiles - 1) / P::kTiles;
    lanes = weighing_lanes(params.group);
    weight_bytes = P::weight_bytes(lanes);
  }

  // One lane a warp: done by several at once, such an instruction costs as much for each.
  __device__ __forceinline__ void init_barriers() const {
    if (lane == 0) {
      if (warp == P::kWarps - 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          hopper::init_barrier(maxima_full + 8 * i, 1);
          hopper::init_barrier(weights_full + 8 * i, 1);
          hopper::init_barrier(weights_free + 8 * i, kCluster * P::kChainWarps);
        }
        hopper::init_barrier(keys_begun, 32 * kScoreWarps);
      } else {
#pragma unroll
        for (int first = 0; first < P::kStages; first += P::kWarps - 1) {
          const int stage = first + warp;
          if (stage >= P::kStages) break;
          hopper::init_barrier(value_full + 8 * stage, 32);
          hopper::init_barrier(value_free + 8 * stage, P::kChainWarps);
        }
      }
      hopper::publish_barriers();
    }
  }

  __device__ __forceinline__ uint32_t weights_of(int round, int place) const {
    return base + P::kWeights + static_cast<uint32_t>(round % 2 * P::kTiles + place) * weight_bytes;
  }
  __device__ __forceinline__ uint32_t rows_of(uint32_t section, int round, int place) const {
    return base + section + static_cast<uint32_t>(round % 2 * P::kTiles + place) * P::kRowBytes;
  }
};

// A warp that scores and weighs one tile of every round. What it computes with lives in registers: arrays are indexed
// by constants only. They stand apart from the rest, which the compiler takes apart before it has unrolled the loops
// over these arrays.
template <int kHeadDim, int kCluster, int kHalves>
struct Scorer {
  using P = Plan<kHeadDim, kCluster, kHalves>;
  static constexpr int kHeadSteps = kHeadDim / 16;
  using Queries = uint32_t[kHeadSteps][4];  // fragments; rows beyond the group are zero
  using Scores = float[8][4];               // [block of 8 keys][row lane / 4: 2 keys, row lane / 4 + 8: 2 keys]
  using Rows = float[kHalves];
  struct Round {
    int index, tile;
    int count;  // tiles of this round
    bool mine;
    uint32_t parity, have_maxima, have_weights;
  };

  const Block<kHeadDim, kCluster, kHalves>& block;
  const DecodeParams& params;
  int lane;
  const bf16* k;
  uint32_t key_tile;
  int place;  // of this warp's tile in a round
  float scale;

  __device__ __forceinline__ explicit Scorer(const Block<kHeadDim, kCluster, kHalves>& of)
      : block(of), params(of.params), lane(of.lane) {
    k = params.k + block.first_key * params.k_stride + block.head * kHeadDim;
    key_tile = block.base + static_cast<uint32_t>(block.warp) * P::kKeyBytes;
    place = block.warp * kCluster + block.rank;
    scale = params.scale_log2;
  }

  __device__ __forceinline__ void run() const {
    begin();
    hopper::wait_for_predecessors();
    Queries q;
    load_queries(q);
    hopper::cluster_wait();
    Rows maximum;  // of all rounds before this one
#pragma unroll
    for (int j = 0; j < kHalves; ++j) maximum[j] = -INFINITY;
#pragma unroll 1
    for (int index = 0; index < block.rounds; ++index) {
      const Round round = round_of(index);
      if (block.warp == 0 && lane == 0)
        hopper::arrive_expecting(round.have_maxima, static_cast<uint32_t>(round.count) * P::kRowBytes);
      Scores scores;
      Rows top, factor;
      if (round.mine) {
        score(scores, q, round);
        send_maxima(top, scores, round);
      }
      // Also where this warp has no tile: no block ends with maxima under way to it.
      wait_for_cluster(round.have_maxima, round.parity);
      if (round.mine) weigh(scores, maximum, factor, top, round);
      // The first warp waits and expects in any case; the others must not where they send nothing, since their parity
      // could come round again.
      if (round.mine || block.warp == 0) wait_for_cluster(block.weights_free + 8 * (index % 2), round.parity ^ 1);
      if (block.warp == 0 && lane == 0)
        hopper::arrive_expecting(round.have_weights,
                                 static_cast<uint32_t>(round.count) * (block.weight_bytes + P::kRowBytes));
      if (round.mine) send_weights(scores, factor, round);
    }
  }

  __device__ __forceinline__ Round round_of(int index) const {
    Round round;
    round.index = index;
    round.tile = index * P::kTiles + place;
    round.count = min(P::kTiles, block.tiles - index * P::kTiles);
    round.mine = place < round.count;
    round.parity = static_cast<uint32_t>(index / 2 % 2);
    round.have_maxima = block.maxima_full + 8 * (index % 2);
    round.have_weights = block.weights_full + 8 * (index % 2);
    return round;
  }

  // Only the last key's row is written by the kernel ahead, and q. Values do not wait for the last tile's keys.
  __device__ __forceinline__ void begin() const {
    if (place == block.tiles - 1) {
      arrive_after_copies(block.keys_begun);
      hopper::wait_for_predecessors();
    }
    load_half(place, 0);
    if (place != block.tiles - 1) arrive_after_copies(block.keys_begun);
    load_half(place, 1);
  }

  __device__ __forceinline__ void load_half(int tile, int half) const {
    constexpr int kChunks = kHeadDim / 8, kRowsAtOnce = 32 / kChunks;
    if (tile < block.tiles) {
      const int chunk = lane % kChunks;
#pragma unroll
      for (int i = 0; i < 32 / kRowsAtOnce; ++i) {
        const int row = half * 32 + lane / kChunks + i * kRowsAtOnce;
        const int key = tile * kKeyTile + row;
        const bool valid = key < block.keys;
        copy16(key_tile + tile_offset<kHeadDim>(row, chunk), k + (valid ? key : 0) * params.k_stride + chunk * 8,
               valid);
      }
    }
    commit();
  }

  __device__ __forceinline__ void load_queries(Queries& q) const {
    const bf16* source = params.q + block.q_row * params.q_stride + int64_t{block.head} * params.group * kHeadDim;
#pragma unroll
    for (int step = 0; step < kHeadSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i % 2 * 8;
        q[step][i] = 0;
        if (i % 2 < kHalves && row < params.group) {
          q[step][i] =
              *reinterpret_cast<const uint32_t*>(source + row * kHeadDim + step * 16 + i / 2 * 8 + lane % 4 * 2);
        }
      }
    }
  }

  // Each half of the tile's keys makes room for that of the next round's tile.
  __device__ __forceinline__ void score(Scores& scores, const Queries& q, const Round& round) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      wait<1>();  // the other half may still be under way
      __syncwarp();
#pragma unroll
      for (int b = 4 * half; b < 4 * half + 4; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[b][i] = 0.0F;
      }
#pragma unroll
      for (int step = 0; step < kHeadSteps; ++step) {
#pragma unroll
        for (int pair = 2 * half; pair < 2 * half + 2; ++pair) {
          uint32_t b[4];
          const int row = pair * 16 + lane / 16 * 8 + lane % 8;
          load_matrices(b, key_tile + tile_offset<kHeadDim>(row, 2 * step + lane / 8 % 2));
          multiply(scores[2 * pair], q[step], b[0], b[1]);
          multiply(scores[2 * pair + 1], q[step], b[2], b[3]);
        }
      }
      __syncwarp();
      load_half(round.tile + P::kTiles, half);
    }
    if (round.tile == block.tiles - 1) {
      const int key = round.tile * kKeyTile + lane % 4 * 2;
#pragma unroll
      for (int b = 0; b < 8; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (key + b * 8 + i % 2 >= block.keys) scores[b][i] = -INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ void send_maxima(Rows& top, const Scores& scores, const Round& round) const {
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      top[j] = fmaxf(scores[0][2 * j], scores[0][2 * j + 1]);
#pragma unroll
      for (int b = 1; b < 8; ++b) top[j] = fmaxf(top[j], fmaxf(scores[b][2 * j], scores[b][2 * j + 1]));
      top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffU, top[j], 2));
      top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffU, top[j], 1));
    }
    send_rows(P::kMaxima, top, round.have_maxima, round);
  }

  // A float of each row to all blocks.
  __device__ __forceinline__ void send_rows(uint32_t section, const Rows& rows, uint32_t full,
                                            const Round& round) const {
    const uint32_t target = block.rows_of(section, round.index, place) + lane / 4 * 4;
    for (int to = lane % 4; to < kCluster; to += 4) {
      const uint32_t remote = address_in(target, to), barrier = address_in(full, to);
#pragma unroll
      for (int j = 0; j < kHalves; ++j) send(remote + 32 * j, rows[j], barrier);
    }
  }

  __device__ __forceinline__ void weigh(Scores& scores, Rows& maximum, Rows& factor, const Rows& top,
                                        const Round& round) const {
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
      float before = maximum[j], all = maximum[j];
      const uint32_t source = block.rows_of(P::kMaxima, round.index, lane % 4) + lane / 4 * 4 + 32 * j;
#pragma unroll
      for (int i = 0; i < P::kTiles / 4; ++i) {
        const int other = lane % 4 + 4 * i;
        if (other >= round.count) continue;
        const float value = load_float(source + i * 4 * P::kRowBytes);
        all = fmaxf(all, value);
        if (other < place) before = fmaxf(before, value);
      }
#pragma unroll
      for (int step = 2; step > 0; step /= 2) {
        before = fmaxf(before, __shfl_xor_sync(0xffffffffU, before, step));
        all = fmaxf(all, __shfl_xor_sync(0xffffffffU, all, step));
      }
      maximum[j] = all;
      const float now = fmaxf(before, top[j]);
      factor[j] = steps::rescale(before, now, scale);
      const float scaled = steps::scaled_max(now, scale);
#pragma unroll
      for (int b = 0; b < 8; ++b) {
        scores[b][2 * j] = steps::weight(scores[b][2 * j], scaled, scale);
        scores[b][2 * j + 1] = steps::weight(scores[b][2 * j + 1], scaled, scale);
      }
    }
  }

  __device__ __forceinline__ void send_weights(const Scores& scores, const Rows& factor, const Round& round) const {
    const auto packed = [&](int b, int j) { return pack_pair(scores[b][2 * j], scores[b][2 * j + 1]); };
    // The operand of a product of 16 keys lies in the same lane as their scores, in neighbouring words.
    uint4 words[P::kVectors];
#pragma unroll
    for (int i = 0; i < P::kVectors; ++i) {
      words[i] = kHalves == 1
                     ? make_uint4(packed(4 * i, 0), packed(4 * i + 1, 0), packed(4 * i + 2, 0), packed(4 * i + 3, 0))
                     : make_uint4(packed(2 * i, 0), packed(2 * i + 1, 0), packed(2 * i, kHalves - 1),
                                  packed(2 * i + 1, kHalves - 1));
    }
    const uint32_t weights = block.weights_of(round.index, place) + lane * 16;
    if (lane < block.lanes) {
#pragma unroll
      for (int to = 0; to < kCluster; ++to) {
        const uint32_t remote = address_in(weights, to), barrier = address_in(round.have_weights, to);
#pragma unroll
        for (int i = 0; i < P::kVectors; ++i) send(remote + i * block.lanes * 16, words[i], barrier);
      }
    }
    send_rows(P::kFactors, factor, round.have_weights, round);
  }
};

// The warp that copies values.
template <int kHeadDim, int kCluster, int kHalves>
struct Producer {
  using P = Plan<kHeadDim, kCluster, kHalves>;

  const Block<kHeadDim, kCluster, kHalves>& block;

  __device__ __forceinline__ void load() const {
    constexpr int kChunks = P::kColumns / 8, kRowsAtOnce = 32 / kChunks;
    const auto& params = block.params;
    const int lane = block.lane, chunk = lane % kChunks;
    const bf16* v =
        params.v + block.first_key * params.v_stride + block.head * kHeadDim + block.rank * P::kColumns + chunk * 8;
    hopper::cluster_wait();
    // Keys are needed before values: they go first where memory is the limit.
    if (block.tiles > 0) hopper::wait(block.keys_begun, 0);
#pragma unroll 1
    for (int tile = 0; tile < block.tiles; ++tile) {
      const int stage = tile % P::kStages;
      hopper::wait(block.value_free + 8 * stage, static_cast<uint32_t>(tile / P::kStages % 2) ^ 1);
      if (tile == block.tiles - 1) hopper::wait_for_predecessors();
      const uint32_t target = block.base + P::kValues + static_cast<uint32_t>(stage) * P::kValueBytes;
#pragma unroll
      for (int i = 0; i < kKeyTile / kRowsAtOnce; ++i) {
        const int row = lane / kChunks + i * kRowsAtOnce;
        const int key = tile * kKeyTile + row;
        const bool valid = key < block.keys;
        copy16(target + value_offset<P::kColumns>(row, chunk), v + (valid ? key : 0) * params.v_stride, valid);
      }
      arrive_after_copies(block.value_full + 8 * stage);
    }
  }
};

// A warp of the chain. Values are the products' first operand, transposed (16 columns x 16 keys), weights the second
// (16 keys x 8 query heads): so both are used as they are read. Where the block has 8 columns only, the other 8 rows
// repeat them. Operands and Sums live in registers, as a Scorer's arrays.
template <int kHeadDim, int kCluster, int kHalves>
struct Chain {
  using P = Plan<kHeadDim, kCluster, kHalves>;
  struct Operands {
    uint4 weights[P::kVectors];
    float2 factor[kHalves];  // of query heads lane % 4 * 2, + 1
    uint32_t values[kSteps][4];
  };
  using Sums = float[kHalves][4];

  const Block<kHeadDim, kCluster, kHalves>& block;
  int lane, first_column;
  uint32_t weights_base, factors_base, values_base;

  __device__ __forceinline__ explicit Chain(const Block<kHeadDim, kCluster, kHalves>& of) : block(of), lane(of.lane) {
    first_column = (block.warp - kScoreWarps - 1) * 16;
    weights_base = block.base + P::kWeights + static_cast<uint32_t>(lane) * 16;
    factors_base = block.base + P::kFactors + static_cast<uint32_t>(lane % 4) * 8;
    const int chunk = first_column / 8 + (P::kColumns > 8 ? lane / 8 % 2 : 0);
    values_base = block.base + P::kValues + value_offset<P::kColumns>(lane / 16 * 8 + lane % 8, chunk);
  }

  __device__ __forceinline__ void run() const {
    Sums out = {};  // columns lane / 4, + 8 of query heads lane % 4 * 2, + 1
    // Of the weights of a query head, by products with ones, all rows of which are alike. The first factor is 0.
    Sums sum;
#pragma unroll
    for (int j = 0; j < kHalves; ++j) sum[j][0] = sum[j][1] = sum[j][2] = sum[j][3] = 1.0F;
    Operands even, odd;
    hopper::cluster_wait();
    if (block.tiles > 0) load(even, 0, false);
#pragma unroll 1
    for (int tile = 0; tile < block.tiles; tile += 2) {
      add(out, sum, even, odd, tile);
      if (tile + 1 < block.tiles) add(out, sum, odd, even, tile + 1);
    }
    write(out, sum);
  }

  // Waits for and reads what tile `tile` adds; `here`: its values are known to be there.
  __device__ __forceinline__ void load(Operands& to, int tile, bool here) const {
    const int stage = tile % P::kStages;
    if (tile % P::kTiles == 0) {
      const int round = tile / P::kTiles;
      wait_for_cluster(block.weights_full + 8 * (round % 2), static_cast<uint32_t>(round / 2 % 2));
    }
    if (!here) hopper::wait(block.value_full + 8 * stage, static_cast<uint32_t>(tile / P::kStages % 2));
    __syncwarp();
    const auto place = static_cast<uint32_t>(tile % (2 * P::kTiles));  // of two rounds
    // Lanes of rows that no query head has read what lies behind (kWeightsEnd): such rows are never written.
    const uint32_t weights = weights_base + place * block.weight_bytes;
#pragma unroll
    for (int i = 0; i < P::kVectors; ++i) to.weights[i] = load_words(weights + i * block.lanes * 16);
#pragma unroll
    for (int j = 0; j < kHalves; ++j) to.factor[j] = load_pair(factors_base + place * P::kRowBytes + 32 * j);
    const uint32_t values = values_base + static_cast<uint32_t>(stage) * P::kValueBytes;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)  // 16 rows further the swizzle is the same
      load_matrices_transposed(to.values[step], values + step * 16 * P::kColumns * 2);
  }

  // What tile `tile` adds; reads meanwhile what the next one will.
  __device__ __forceinline__ void add(Sums& out, Sums& sum, Operands& now, Operands& next, int tile) const {
    constexpr uint32_t kOnes[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};  // pairs of bf16
    const bool more = tile + 1 < block.tiles;
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float factor = i % 2 == 0 ? now.factor[j].x : now.factor[j].y;
        out[j][i] = __fmul_rn(out[j][i], factor);
        sum[j][i] = __fmul_rn(sum[j][i], factor);
      }
    }
    bool here = false;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step == 2 && more) load(next, tile + 1, here);
#pragma unroll
      for (int j = 0; j < kHalves; ++j) {
        const uint4& words = now.weights[kHalves == 1 ? step / 2 : step];
        const bool first = kHalves == 1 ? step % 2 == 0 : j == 0;
        const uint32_t low = first ? words.x : words.z, high = first ? words.y : words.w;
        multiply(out[j], now.values[step], low, high);
        multiply(sum[j], kOnes, low, high);
      }
      // Asked here and looked at two steps later, so that the answer costs no time.
      if (step == 0)
        here = hopper::has_ended(block.value_full + 8 * ((tile + 1) % P::kStages),
                                 static_cast<uint32_t>((tile + 1) / P::kStages % 2));
    }
    __syncwarp();
    if (lane == 0) hopper::arrive(block.value_free + 8 * (tile % P::kStages));
    const int round = tile / P::kTiles;
    // For the round after the next, if there is one: nobody would wait for another arrival.
    if (tile % P::kTiles == P::kTiles - 1 && round + 2 < block.rounds && lane < kCluster)
      hopper::arrive_at(block.weights_free + 8 * (round % 2), static_cast<uint32_t>(lane));
  }

  __device__ __forceinline__ void write(const Sums& out, const Sums& sum) const {
    const auto& params = block.params;
    const int q_heads = params.group * params.kv_heads;
#pragma unroll
    for (int j = 0; j < kHalves; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * j + lane % 4 * 2 + i;
        if (row >= params.group) continue;
        const float inverse = flashinfer::math::ptx_rcp(sum[j][i]);
        bf16* target = params.out + (block.q_row * q_heads + int64_t{block.head} * params.group + row) * kHeadDim +
                       block.rank * P::kColumns + first_column + lane / 4;
        target[0] = __float2bfloat16_rn(__fmul_rn(out[j][i], inverse));
        if constexpr (P::kColumns > 8) target[8] = __float2bfloat16_rn(__fmul_rn(out[j][i + 2], inverse));
      }
    }
  }
};

template <int kHeadDim, int kCluster, int kHalves>
__global__ void __launch_bounds__(32 * Plan<kHeadDim, kCluster, kHalves>::kWarps, 1)
    attend_cluster(const __grid_constant__ DecodeParams params) {
  extern __shared__ __align__(128) uint8_t shared[];
  const Block<kHeadDim, kCluster, kHalves> block(params, shared);
  if (block.warp < kScoreWarps) {
    Scorer<kHeadDim, kCluster, kHalves>(block).run();
  } else if (block.warp == kScoreWarps) {
    Producer<kHeadDim, kCluster, kHalves>{block}.load();
  } else {
    Chain<kHeadDim, kCluster, kHalves>(block).run();
  }
  // A block may end before the others: all that they send to it has been waited for, and it has met all of them at the
  // cluster's barrier before it sent anything.
}

// Launches, or counts the clusters that run at once.
template <int kHeadDim, int kCluster, int kHalves>
cudaError_t launch(const DecodeParams& params, bool early, cudaStream_t stream, int* count) {
  using P = Plan<kHeadDim, kCluster, kHalves>;
  auto* kernel = attend_cluster<kHeadDim, kCluster, kHalves>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(std::max<size_t>(P::bytes(32), kAlone)));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = kCluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(params.run_count) * kCluster, static_cast<unsigned>(params.kv_heads));
  config.blockDim = dim3(32 * P::kWarps);
  // Of an early launch no two blocks go to one SM because there is room first.
  config.dynamicSmemBytes = std::max<size_t>(P::bytes(weighing_lanes(params.group)), early ? kAlone : 0);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = early ? 2 : 1;
  if (count != nullptr) return cudaOccupancyMaxActiveClusters(count, kernel, &config);
  return cudaLaunchKernelEx(&config, kernel, params);
}

template <int kHeadDim, int kCluster>
cudaError_t launch_group(const DecodeParams& params, bool early, cudaStream_t stream, int* count) {
  return params.group <= 8 ? launch<kHeadDim, kCluster, 1>(params, early, stream, count)
                           : launch<kHeadDim, kCluster, 2>(params, early, stream, count);
}

cudaError_t launch_blocks(const AttentionArgs& args, int blocks, cudaStream_t stream, int* count) {
  const DecodeParams params = make_params(args);
  const bool wide = args.head_dim == 128;
  switch (blocks) {
    case 2:
      return wide ? launch_group<128, 2>(params, args.early, stream, count)
                  : launch_group<64, 2>(params, args.early, stream, count);
    case 4:
      return wide ? launch_group<128, 4>(params, args.early, stream, count)
                  : launch_group<64, 4>(params, args.early, stream, count);
    case 8:
      return wide ? launch_group<128, 8>(params, args.early, stream, count)
                  : launch_group<64, 8>(params, args.early, stream, count);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t launch_attention_cluster(const AttentionArgs& args, int blocks, cudaStream_t stream) {
  return launch_blocks(args, blocks, stream, nullptr);
}

cudaError_t count_attention_clusters(const AttentionArgs& args, int blocks, int* count) {
  return launch_blocks(args, blocks, nullptr, count);
}

}  // namespace trireme::cuda
