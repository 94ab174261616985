// The float operations of silu(gate) * up that every kernel computing it must do alike, bit for bit.
#pragma once

#include <cuda_runtime.h>

namespace trireme::cuda::steps {

// 1 / (1 + exp(-x)) from the fast exponential and reciprocal (a few units in the last place of float32; compiled into
// the kernel whatever the flags, and one sequence of operations for every element).
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-x))); }

__device__ __forceinline__ float swiglu(float gate, float up) { return __fmul_rn(__fmul_rn(gate, sigmoid(gate)), up); }

}  // namespace trireme::cuda::steps
