// Weights in pieces: what of a flat buffer goes to another process, or comes from one, as a stream that both ends cut
// alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace trireme {

// Elements of a flat buffer: rows of so many next to each other, and where the same ones are in the whole model.
struct WeightPiece {
  int64_t offset = 0;  // of the first element
  int64_t rows = 0, columns = 0;
  int64_t stride = 0;        // elements from row to row of the flat buffer
  int64_t place = 0;         // of the first element in the whole model
  int64_t place_stride = 0;  // elements from row to row there
  int64_t elements() const { return rows * columns; }
  bool operator==(const WeightPiece&) const = default;
};

// The weights that one actor rank sends to one engine. Each end has its own, of its own flat buffer; the elements are
// the same, in the same order.
struct WeightPart {
  int64_t actor_rank = 0;
  bool whole = true;                // both have the same flat buffer, and all of it goes
  std::vector<WeightPiece> pieces;  // else: the stream, piece after piece, row by row
  int64_t elements = 0;             // in them
  uint64_t digest = 0;              // of names and ranges: two that differ come from plans that do
};

// A run of the stream, in as few rows of the flat buffer as it lies in.
struct WeightChunk {
  struct Stretch {
    int64_t offset = 0;
    int64_t rows = 0, columns = 0;
    int64_t stride = 0;
    int64_t elements() const { return rows * columns; }
  };
  std::vector<Stretch> stretches;
  int64_t elements = 0;
  bool contiguous() const { return stretches.size() == 1 && stretches.front().rows == 1; }
};
// The part's stream, cut behind every `elements` of it (at least 1).
std::vector<WeightChunk> chunks_of(const WeightPart& part, int64_t elements);

// `packed` [chunk.elements] of the flat buffer's dtype; on its device, by the current stream. A contiguous chunk needs
// neither: it is flat.narrow(0, offset, elements).
void gather_chunk(const at::Tensor& flat, const WeightChunk& chunk, at::Tensor packed);
void scatter_chunk(const at::Tensor& packed, const WeightChunk& chunk, at::Tensor flat);

// 64 bits over the part's elements: the sum of the bits of each, as a signed number, times twice its place in the whole
// model plus 1, modulo 2^64. The same at both ends whatever their flat buffers are like, so that a wrong range at
// either shows. On CUDA by the current stream, which is waited for. The same number on every device.
uint64_t part_checksum(const at::Tensor& flat, const WeightPart& part);
// The same by reductions of the library, as on a device.
uint64_t part_checksum_by_reduction(const at::Tensor& flat, const WeightPart& part);

}  // namespace trireme
