// How a step's inputs reach the device and its results the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace trireme::cuda {

// ids[i] = tokens[i] when that is >= 0, else previous[-tokens[i] - 1]. All int64 on the device; ids may be tokens.
void resolve_tokens(const int64_t* tokens, const int64_t* previous, int64_t* ids, int64_t count, cudaStream_t stream);

// A ring of slots in pinned host memory that the device reads and writes itself, so that between two decode graphs
// stands no copy: a copy engine costs some 10 us each time work goes there and back. The device counts the decode steps
// it began; step n uses slot n % slots.
struct StepRing {
  const void* inputs = nullptr;  // pinned: [slots] of input_stride bytes
  int64_t input_stride = 0;      // a multiple of 16
  void* results = nullptr;       // pinned: [slots] of result_rows int64 ids, then as many float log-probs
  int64_t result_rows = 0;       // a multiple of 4
  int slots = 0;
  int64_t* begun = nullptr;  // device: steps begun
};
// First kernel of a decode step: copies `bytes` (a multiple of 16) of its slot to `target` (device), whose first
// `rows` int64 are token ids, resolved as above with `previous`; counts the step. Legal in capture.
void begin_decode_step(const StepRing& ring, void* target, int64_t bytes, const int64_t* previous, int64_t rows,
                       cudaStream_t stream);
// Last kernel: ids (int64) and logprobs (float) of `rows` rows go to the step's slot, ids to `previous` too.
void finish_decode_step(const StepRing& ring, const int64_t* ids, const float* logprobs, int64_t* previous,
                        int64_t rows, cudaStream_t stream);

}  // namespace trireme::cuda
