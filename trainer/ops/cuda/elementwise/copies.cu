// Copies and moves of rows in the arena of cached keys and values.
#include <algorithm>

#include "trainer/ops/cuda/elementwise/rows.cuh"

namespace trireme::cuda {
namespace {

using namespace rows;

// Block x: part of a move; y: move; z: buffer.
__global__ void __launch_bounds__(kFlatThreads)
    copy_rows_kernel(void* const* __restrict__ buffers, int row_chunks, const int64_t* __restrict__ moves) {
  const int64_t* move = moves + static_cast<int64_t>(blockIdx.y) * 3;
  Chunk* base = static_cast<Chunk*>(buffers[blockIdx.z]);
  const Chunk* from = base + move[0] * row_chunks;
  Chunk* to = base + move[1] * row_chunks;
  const int64_t count = move[2] * row_chunks, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  constexpr int kAtOnce = 4;
  for (int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += kAtOnce * step) {
    Chunk held[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (at + j * step < count) held[j] = from[at + j * step];
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (at + j * step < count) to[at + j * step] = held[j];
    }
  }
}

// Block x: columns of a row; y: buffer. A thread moves one column of 16 bytes through all moves in their order, so that
// nobody waits for anybody; a move down the buffer goes from its first row on, one up it from its last, and what is
// written before a read lies behind it.
constexpr int kColumnThreads = 32;  // small, so that few columns find all SMs
__global__ void __launch_bounds__(kColumnThreads) move_rows_kernel(void* const* __restrict__ buffers, int row_chunks,
                                                                   const int64_t* __restrict__ moves, int64_t count) {
  const int column = static_cast<int>(blockIdx.x) * kColumnThreads + static_cast<int>(threadIdx.x);
  if (column >= row_chunks) return;
  Chunk* const base = static_cast<Chunk*>(buffers[blockIdx.y]) + column;
  constexpr int kAtOnce = 32;
  for (int64_t m = 0; m < count; ++m) {
    const int64_t from = moves[3 * m], to = moves[3 * m + 1], rows = moves[3 * m + 2];
    const bool down = to < from;
    const int64_t step = down ? row_chunks : -static_cast<int64_t>(row_chunks), first = down ? 0 : rows - 1;
    const Chunk* read = base + (from + first) * row_chunks;
    Chunk* write = base + (to + first) * row_chunks;
    for (int64_t left = rows; left > 0; left -= kAtOnce, read += kAtOnce * step, write += kAtOnce * step) {
      Chunk held[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (j < left) held[j] = read[j * step];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (j < left) write[j * step] = held[j];
      }
    }
  }
}

}  // namespace

void copy_arena_rows(void* const* buffers, int64_t buffer_count, int64_t row_bytes, const int64_t* moves, int64_t count,
                     int64_t most_rows, cudaStream_t stream) {
  if (buffer_count == 0 || count == 0 || most_rows == 0) return;
  constexpr int64_t kMostMoves = 65'535;  // of a grid's second extent
  const int64_t row_chunks = row_bytes / static_cast<int64_t>(sizeof(Chunk));
  const int64_t parts = std::clamp<int64_t>(divide_up(most_rows * row_chunks, 4 * kFlatThreads), 1, 64);
  for (int64_t first = 0; first < count; first += kMostMoves) {
    const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(std::min(kMostMoves, count - first)),
                    static_cast<unsigned>(buffer_count));
    copy_rows_kernel<<<grid, kFlatThreads, 0, stream>>>(buffers, static_cast<int>(row_chunks), moves + first * 3);
  }
}

void move_arena_rows(void* const* buffers, int64_t buffer_count, int64_t row_bytes, const int64_t* moves, int64_t count,
                     cudaStream_t stream) {
  if (buffer_count == 0 || count == 0) return;
  const int64_t row_chunks = row_bytes / static_cast<int64_t>(sizeof(Chunk));
  const dim3 grid(static_cast<unsigned>(divide_up(row_chunks, kColumnThreads)), static_cast<unsigned>(buffer_count));
  move_rows_kernel<<<grid, kColumnThreads, 0, stream>>>(buffers, static_cast<int>(row_chunks), moves, count);
}

}  // namespace trireme::cuda
