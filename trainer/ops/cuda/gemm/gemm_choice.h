// Which kernel computes a skinny GEMM, and how it cuts the work: ours (skinny_gemm_mma.h, skinny_gemm_wgmma.h)
// or the library. The bits are the same.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "trainer/ops/cuda/gemm/skinny_gemm_mma.h"
#include "trainer/ops/cuda/gemm/skinny_gemm_wgmma.h"

namespace trireme::cuda {

inline constexpr int64_t kMostOwnRows = kMostWgmmaRows;

struct GemmChoice {
  enum class Kernel { kLibrary, kSkinnyGemmMma, kSkinnyGemmWgmma };
  Kernel kernel = Kernel::kLibrary;
  SkinnyMmaPlan mma;
  SkinnyWgmmaPlan wgmma;
};

// What a trial needs besides our kernels: GEMMs are timed as decoding runs them, each behind a short kernel.
struct GemmTrial {
  // The short kernel, over rows like x [rows, in]; `behind_ours`: launched behind a GEMM of ours, so that it may
  // begin early.
  std::function<void(const at::Tensor& rows, bool behind_ours)> before;
  // The library's way of the same GEMM, to be compared; may be empty. weight [out or 2 * out, in].
  std::function<void(const at::Tensor& x, const at::Tensor& weight)> library;
};

// The choice for a shape on this thread's SMs (sms.h) of the device; kept for this process. Rows count in
// sixteens up to 64, in 32s above. With a trial, outside of a capture, the first time, the fastest of the library and
// the most promising of our plans is found by running them with a cold cache: hundreds of short runs, and up to 250 MB
// for the time being. Until that could be done the library computes, if it takes part. Without a trial it is ours with
// the lowest predicted time, up to 64 rows skinny_gemm_mma.
GemmChoice choose_gemm(int device, const SkinnyGemmArgs& args, const GemmTrial* trial);

// Launches one of ours; cudaErrorInvalidValue for kLibrary.
cudaError_t launch_gemm(const SkinnyGemmArgs& args, const GemmChoice& choice, cudaStream_t stream);

}  // namespace trireme::cuda
