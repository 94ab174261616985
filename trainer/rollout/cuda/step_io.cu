#include "trainer/rollout/cuda/step_io.h"

namespace trireme::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kStepThreads = 1024;  // of the only block: every byte of a small step is asked for at once

__device__ __forceinline__ int64_t resolved(int64_t token, const int64_t* previous) {
  return token >= 0 ? token : previous[-token - 1];
}

__global__ void resolve_kernel(const int64_t* tokens, const int64_t* previous, int64_t* ids, int64_t count) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (i < count) ids[i] = resolved(tokens[i], previous);
}

__global__ void __launch_bounds__(kStepThreads)
    begin_kernel(StepRing ring, uint4* target, int64_t chunks, const int64_t* previous, int64_t rows) {
  const int64_t step = *ring.begun;
  const auto* inputs = static_cast<const char*>(ring.inputs) + step % ring.slots * ring.input_stride;
  // The host writes a slot again and again: nothing of it may come from a cache.
  const auto* source = reinterpret_cast<const uint4*>(inputs);
  for (int64_t i = threadIdx.x; i < chunks; i += kStepThreads) target[i] = __ldcv(source + i);
  __syncthreads();  // also: everyone has read the count
  auto* tokens = reinterpret_cast<int64_t*>(target);
  for (int64_t i = threadIdx.x; i < rows; i += kStepThreads) tokens[i] = resolved(tokens[i], previous);
  if (threadIdx.x == 0) *ring.begun = step + 1;
}

__global__ void __launch_bounds__(kStepThreads)
    finish_kernel(StepRing ring, const int64_t* ids, const float* logprobs, int64_t* previous, int64_t rows) {
  const int64_t slot = (*ring.begun - 1) % ring.slots;
  const int64_t slot_bytes = ring.result_rows * static_cast<int64_t>(sizeof(int64_t) + sizeof(float));
  auto* host_ids = reinterpret_cast<int64_t*>(static_cast<char*>(ring.results) + slot * slot_bytes);
  auto* host_logprobs = reinterpret_cast<float*>(host_ids + ring.result_rows);
  for (int64_t i = threadIdx.x; i < rows; i += kStepThreads) {
    const int64_t id = ids[i];
    previous[i] = id;
    host_ids[i] = id;
    host_logprobs[i] = logprobs[i];
  }
}

}  // namespace

void resolve_tokens(const int64_t* tokens, const int64_t* previous, int64_t* ids, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  resolve_kernel<<<blocks, kThreads, 0, stream>>>(tokens, previous, ids, count);
}

void begin_decode_step(const StepRing& ring, void* target, int64_t bytes, const int64_t* previous, int64_t rows,
                       cudaStream_t stream) {
  begin_kernel<<<1, kStepThreads, 0, stream>>>(ring, static_cast<uint4*>(target), bytes / 16, previous, rows);
}

void finish_decode_step(const StepRing& ring, const int64_t* ids, const float* logprobs, int64_t* previous,
                        int64_t rows, cudaStream_t stream) {
  finish_kernel<<<1, kStepThreads, 0, stream>>>(ring, ids, logprobs, previous, rows);
}

}  // namespace trireme::cuda
