#include "trainer/ops/cuda/exchange/peer_kernels.h"

#include <algorithm>

#include "trainer/ops/cuda/device/hopper.cuh"
#include "trainer/ops/cuda/elementwise/norm.cuh"

namespace trireme::cuda {
namespace {

using namespace rows;

constexpr int kThreads = 512;
constexpr int kMostBlocks = 128;
constexpr int kAtOnce = 4;      // pieces that a thread has under way
constexpr uint32_t kAhead = 2;  // groups of pieces that it has sent before it takes the first

// Positions in `state`.
constexpr int kLast = 0, kEnded = 1, kUsed = 2, kGivenUp = kUsed + kPeerBuffers;
static_assert(kGivenUp + 1 == kPeerStateWords);

__device__ __forceinline__ Chunk look(const Chunk* p) {
  Chunk v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void send(Chunk* p, Chunk v) {
  v.x = v.x == kNothing ? 0 : v.x;
  v.y = v.y == kNothing ? 0 : v.y;
  v.z = v.z == kNothing ? 0 : v.z;
  v.w = v.w == kNothing ? 0 : v.w;
  asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ bool has_come(const Chunk& v) {
  return v.x != kNothing && v.y != kNothing && v.z != kNothing && v.w != kNothing;
}

// One exchange as a thread sees it.
struct Turn {
  const PeerMemoryView& peers;
  uint32_t buffer;  // this exchange's; those of the ones before are the next lower ones
  uint64_t began = 0;
  uint32_t tries = 0;

  // After wait_for_predecessors.
  __device__ __forceinline__ explicit Turn(const PeerMemoryView& view)
      : peers(view), buffer((*reinterpret_cast<volatile uint32_t*>(view.state + kLast) + 1) % kPeerBuffers) {}

  __device__ __forceinline__ int64_t slot(uint32_t of, int from) const {
    return (static_cast<int64_t>(of) * peers.ranks + from) * (peers.slot_bytes / sizeof(Chunk));
  }
  __device__ __forceinline__ Chunk* to(int rank) const {
    return static_cast<Chunk*>(peers.receive[rank]) + slot(buffer, peers.rank);
  }
  __device__ __forceinline__ const Chunk* from(int rank) const {
    return static_cast<const Chunk*>(peers.receive[peers.rank]) + slot(buffer, rank);
  }
  // The `step`-th rank behind the own one: all ranks begin with another.
  __device__ __forceinline__ int behind(int step) const {
    const int rank = peers.rank + step;
    return rank < peers.ranks ? rank : rank - peers.ranks;
  }

  __device__ Chunk receive(const Chunk* p, int rank) { return wait_for(look(p), p, rank); }
  // Of what was looked at already.
  __device__ __forceinline__ Chunk wait_for(Chunk v, const Chunk* p, int rank) {
    while (!has_come(v) && !over(rank)) v = look(p);
    return v;
  }

  // What the exchange before this one used, emptied by all threads together.
  __device__ void empty_last(int64_t thread, int64_t threads) const {
    const uint32_t last = (buffer + kPeerBuffers - 1) % kPeerBuffers;
    const uint32_t used = *reinterpret_cast<volatile uint32_t*>(peers.state + kUsed + last);
    const Chunk nothing = make_uint4(kNothing, kNothing, kNothing, kNothing);
    for (int step = 1; step < peers.ranks; ++step) {
      Chunk* pieces = static_cast<Chunk*>(peers.receive[peers.rank]) + slot(last, behind(step));
      for (int64_t i = thread; i < used; i += threads) pieces[i] = nothing;
    }
  }

  // The last block of all counts the exchange. Every thread calls it.
  __device__ void end(uint32_t used) const {
    __syncthreads();
    if (threadIdx.x != 0 || atomicInc(peers.state + kEnded, gridDim.x - 1) != gridDim.x - 1) return;
    *reinterpret_cast<volatile uint32_t*>(peers.state + kUsed + buffer) = used;
    *reinterpret_cast<volatile uint32_t*>(peers.state + kLast) = buffer;
  }

 private:
  __device__ bool over(int rank) {
    if (++tries % 1024 != 0) return false;
    if (*reinterpret_cast<volatile uint32_t*>(peers.state + kGivenUp) != 0) return true;
    const uint64_t now = hopper::nanoseconds();
    if (began == 0) began = now;
    if (now - began < peers.patience_ns) return false;
    *reinterpret_cast<volatile uint32_t*>(peers.state + kGivenUp) = 1;
    *reinterpret_cast<volatile uint32_t*>(peers.absent) = static_cast<uint32_t>(rank) + 1;
    __threadfence_system();
    return true;
  }
};

// The sum's value so far.
struct Sum {
  float value[kChunk];

  __device__ __forceinline__ Sum() {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) value[i] = 0.0f;
  }
  __device__ __forceinline__ void add(const Chunk& part) {
    float more[kChunk];
    unpack(part, more);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) value[i] = __fadd_rn(value[i], more[i]);
  }
};

struct RowPieces {  // PeerRows in pieces of 16 bytes
  const Chunk* in;
  int64_t in_rank, in_row;
  Chunk* out;
  int64_t out_rank, out_row;
  uint32_t pieces, row_pieces;

  __device__ __forceinline__ int64_t input(uint32_t piece) const {
    const uint32_t row = piece / row_pieces;
    return row * in_row + (piece - row * row_pieces);
  }
  __device__ __forceinline__ int64_t output(uint32_t piece) const {
    const uint32_t row = piece / row_pieces;
    return row * out_row + (piece - row * row_pieces);
  }
};

// What one thread does of an exchange: its pieces in groups of kAtOnce.
template <bool kSum>
struct Exchange {
  Turn& turn;
  const PeerMemoryView& peers;
  const RowPieces& rows;
  const uint32_t first, threads;

  __device__ __forceinline__ uint32_t piece(uint32_t group, int j) const {
    return first + (group * kAtOnce + static_cast<uint32_t>(j)) * threads;
  }

  __device__ __forceinline__ void push(uint32_t group) {
    for (int step = 1; step < peers.ranks; ++step) {
      const int rank = turn.behind(step);
      Chunk* to = turn.to(rank);
      const Chunk* in = rows.in + rank * rows.in_rank;
      Chunk value[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (piece(group, j) < rows.pieces) value[j] = in[rows.input(piece(group, j))];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (piece(group, j) < rows.pieces) send(to + piece(group, j), value[j]);
    }
  }

  __device__ __forceinline__ void take(uint32_t group) {
    Sum sums[kSum ? kAtOnce : 1];
    for (int rank = 0; rank < peers.ranks; ++rank) {
      const bool own = rank == peers.rank;
      const Chunk* from = own ? rows.in + rank * rows.in_rank : turn.from(rank);
      Chunk value[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (piece(group, j) >= rows.pieces) continue;
        value[j] = own ? from[rows.input(piece(group, j))] : look(from + piece(group, j));
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (piece(group, j) >= rows.pieces) continue;
        if (!own) value[j] = turn.wait_for(value[j], from + piece(group, j), rank);
        if constexpr (kSum) {
          sums[j].add(value[j]);
        } else {
          rows.out[rank * rows.out_rank + rows.output(piece(group, j))] = value[j];
        }
      }
    }
    if constexpr (kSum) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (piece(group, j) < rows.pieces) rows.out[rows.output(piece(group, j))] = pack(sums[j].value);
    }
  }
};

// What is on its way and what has come are worked off side by side: the link is never idle.
template <bool kSum>
__global__ void __launch_bounds__(kThreads)
    exchange_kernel(const __grid_constant__ PeerMemoryView peers, const __grid_constant__ RowPieces rows) {
  hopper::let_successors_begin();
  hopper::wait_for_predecessors();
  Turn turn(peers);
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  Exchange<kSum> exchange{turn, peers, rows, first, threads};
  const uint32_t groups = (rows.pieces + kAtOnce * threads - 1) / (kAtOnce * threads);
  for (uint32_t group = 0; group < groups + kAhead; ++group) {
    if (group < groups) exchange.push(group);
    if (group + 1 == groups) turn.empty_last(first, threads);
    if (group >= kAhead) exchange.take(group - kAhead);
  }
  turn.end(rows.pieces);
}

// A block a row, as norm_forward_kernel.
template <int kVectors>
__global__ void __launch_bounds__(kNormThreads)
    exchange_norm_kernel(const __grid_constant__ PeerMemoryView peers, const Chunk* x, const Chunk* partial,
                         const Chunk* __restrict__ weight, float eps, float one_over_width, int row_chunks,
                         Chunk* __restrict__ sum, Chunk* __restrict__ normed) {
  __shared__ float shared[kNormThreads / kWarp];
  const int64_t base = static_cast<int64_t>(blockIdx.x) * row_chunks;
  const auto column = [&](int v) { return static_cast<int>(threadIdx.x + v * blockDim.x); };
  Chunk value[kVectors], own[kVectors], scale[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) scale[v] = column(v) < row_chunks ? weight[column(v)] : zeros();
  hopper::let_successors_begin();
  hopper::wait_for_predecessors();
  Turn turn(peers);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) own[v] = column(v) < row_chunks ? partial[base + column(v)] : zeros();
  for (int step = 1; step < peers.ranks; ++step) {
    Chunk* to = turn.to(turn.behind(step)) + base;
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (column(v) < row_chunks) send(to + column(v), own[v]);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) value[v] = column(v) < row_chunks ? x[base + column(v)] : zeros();
  turn.empty_last(static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x,
                  static_cast<int64_t>(gridDim.x) * blockDim.x);
  float squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column(v) >= row_chunks) continue;
    Sum delta;
    for (int rank = 0; rank < peers.ranks; ++rank)
      delta.add(rank == peers.rank ? own[v] : turn.receive(turn.from(rank) + base + column(v), rank));
    value[v] = added(value[v], pack(delta.value), squares);
    sum[base + column(v)] = value[v];
  }
  const float inverse = inverse_rms(block_sum(squares, shared), one_over_width, eps);
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (column(v) < row_chunks) normed[base + column(v)] = scaled(value[v], scale[v], inverse);
  turn.end(static_cast<uint32_t>(gridDim.x) * static_cast<uint32_t>(row_chunks));
}

// A piece a row: id, log-prob.
__global__ void __launch_bounds__(kThreads)
    exchange_samples_kernel(const __grid_constant__ PeerMemoryView peers, const int64_t* ids, const float* logprobs,
                            int rows, int64_t* all_ids, float* all_logprobs) {
  Turn turn(peers);
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int threads = static_cast<int>(gridDim.x * blockDim.x);
  for (int i = first; i < rows; i += threads) {
    const Chunk piece = make_uint4(static_cast<uint32_t>(ids[i]), __float_as_uint(logprobs[i]), 0, 0);
    for (int step = 1; step < peers.ranks; ++step) send(turn.to(turn.behind(step)) + i, piece);
  }
  turn.empty_last(first, threads);
  for (int i = first; i < rows; i += threads) {
    for (int rank = 0; rank < peers.ranks; ++rank) {
      const bool own = rank == peers.rank;
      const Chunk piece = own ? zeros() : turn.receive(turn.from(rank) + i, rank);
      all_ids[rank * rows + i] = own ? ids[i] : static_cast<int64_t>(piece.x);
      all_logprobs[rank * rows + i] = own ? logprobs[i] : __uint_as_float(piece.y);
    }
  }
  turn.end(static_cast<uint32_t>(rows));
}

__global__ void __launch_bounds__(kThreads) fill_kernel(uint32_t* words, int64_t count) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads)
    words[i] = kNothing;
}

__global__ void __launch_bounds__(kThreads)
    ordered_sum_kernel(const Chunk* __restrict__ parts, int ranks, int64_t pieces, Chunk* __restrict__ out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= pieces) return;
  Sum sum;
  for (int rank = 0; rank < ranks; ++rank) sum.add(parts[rank * pieces + i]);
  out[i] = pack(sum.value);
}

void exchange(const PeerMemoryView& peers, const PeerRows& rows, bool sum, cudaStream_t stream, bool early) {
  if (rows.rows == 0 || rows.width == 0) return;
  RowPieces p;
  p.in = chunks(rows.in);
  p.in_rank = rows.in_rank / kChunk;
  p.in_row = rows.in_row / kChunk;
  p.out = chunks(rows.out);
  p.out_rank = rows.out_rank / kChunk;
  p.out_row = rows.out_row / kChunk;
  p.row_pieces = static_cast<uint32_t>(rows.width / kChunk);
  p.pieces = static_cast<uint32_t>(rows.rows) * p.row_pieces;
  const int64_t blocks = std::min<int64_t>(divide_up(p.pieces, kThreads), kMostBlocks);
  launch(sum ? exchange_kernel<true> : exchange_kernel<false>, static_cast<unsigned>(blocks), kThreads, stream, early,
         peers, p);
}

}  // namespace

void exchange_copies(const PeerMemoryView& peers, const PeerRows& rows, cudaStream_t stream, bool early) {
  exchange(peers, rows, /*sum=*/false, stream, early);
}

void exchange_sums(const PeerMemoryView& peers, const PeerRows& rows, cudaStream_t stream, bool early) {
  exchange(peers, rows, /*sum=*/true, stream, early);
}

void exchange_add_rms_norm(const PeerMemoryView& peers, const Bf16* x, const Bf16* partial, const Bf16* weight,
                           float eps, const NormRows& rows, Bf16* sum, Bf16* normed, cudaStream_t stream, bool early) {
  if (rows.rows == 0) return;
  const NormShape shape = norm_shape(rows.width);
  launch(shape.vectors == 2 ? exchange_norm_kernel<2> : exchange_norm_kernel<4>, static_cast<unsigned>(rows.rows),
         shape.threads, stream, early, peers, chunks(x), chunks(partial), chunks(weight), eps,
         1.0f / static_cast<float>(rows.counted), static_cast<int>(rows.width / kChunk), chunks(sum), chunks(normed));
}

void exchange_samples(const PeerMemoryView& peers, const int64_t* ids, const float* logprobs, int64_t rows,
                      int64_t* all_ids, float* all_logprobs, cudaStream_t stream) {
  if (rows == 0) return;
  const int64_t blocks = std::min<int64_t>(divide_up(rows, kThreads), kMostBlocks);
  exchange_samples_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      peers, ids, logprobs, static_cast<int>(rows), all_ids, all_logprobs);
}

void empty_receive_buffers(void* buffers, int64_t words, cudaStream_t stream) {
  fill_kernel<<<kMostBlocks, kThreads, 0, stream>>>(static_cast<uint32_t*>(buffers), words);
}

void ordered_sum(const Bf16* parts, int ranks, int64_t elements, Bf16* sum, cudaStream_t stream) {
  if (elements == 0) return;
  const int64_t pieces = elements / kChunk;
  ordered_sum_kernel<<<static_cast<unsigned>(divide_up(pieces, kThreads)), kThreads, 0, stream>>>(chunks(parts), ranks,
                                                                                                  pieces, chunks(sum));
}

}  // namespace trireme::cuda
