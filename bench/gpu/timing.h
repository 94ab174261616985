// Median time of work on the current stream.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <vector>

namespace trireme::bench {

// Seconds of a call: `calls` of them between two events, nine times over, after one to warm up.
inline double median_seconds(const std::function<void()>& call, int calls) {
  constexpr int kRepeats = 9;
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  cudaEvent_t from = nullptr, to = nullptr;
  cudaEventCreate(&from);
  cudaEventCreate(&to);
  call();
  std::vector<double> times;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    cudaEventRecord(from, stream);
    for (int i = 0; i < calls; ++i) call();
    cudaEventRecord(to, stream);
    cudaEventSynchronize(to);
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, from, to);
    times.push_back(milliseconds * 1e-3 / calls);
  }
  cudaEventDestroy(from);
  cudaEventDestroy(to);
  std::nth_element(times.begin(), times.begin() + kRepeats / 2, times.end());
  return times[kRepeats / 2];
}

}  // namespace trireme::bench
