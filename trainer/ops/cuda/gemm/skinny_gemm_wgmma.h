// Skinny GEMM by wgmma (decode of a larger batch), y [rows, out] = x [rows, in] . weight [out, in]^T + bias, bf16:
// up to 256 rows, worth it from some 33 on.
//
// Determinism class: as skinny_gemm_mma.h: row-exact, the bits of cublasLt's GEMM without a split of the sum.
//
// How: a block owns a tile of weight rows over the whole of `in` and 64 tokens for each of its groups of four warps,
// which multiply by wgmma: tokens are the 64 rows of an instruction, weights its columns. So a tile of any width up to
// 256 fits, and one tile for each SM reads a weight in one go, where the library's tiles leave some SMs idle. One warp
// streams weights, another tokens. The blocks of a cluster that have the same tokens read each a share of them and
// multicast it, and so do those that have the same weights. As in skinny_gemm_mma.h, with `overlap` the weights begin
// to flow before the kernel ahead has ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trainer/ops/cuda/gemm/skinny_gemm.h"

namespace trireme::cuda {

inline constexpr int64_t kMostWgmmaRows = 256;

// How the work is cut. No plan alters a bit.
struct SkinnyWgmmaPlan {
  int columns = 0;          // weight rows of a tile: a multiple of 16 up to 256, with swiglu of gate and up together
  int across = 1;           // blocks of a team with the same tokens and neighbouring tiles: 1, 2 or 4
  int along = 1;            // blocks of a team with the same tile, each with a share of the tokens: 1 to 4
  bool clustered = false;   // a team is a cluster and multicasts what it shares; else each block loads all it needs
  int teams = 0;            // of the grid; tiles go round them
  int slabs = 1;            // of 64 elements of `in`, in a stage: 1, 2 or 4
  int stages = 0;           // of the pipeline
  size_t shared_bytes = 0;  // of a block
  double predicted_us = 0;  // rough; plans are compared by it
};

// Whether the kernel takes these (shapes and addresses), on a device of compute capability 9.0.
bool skinny_gemm_wgmma_supported(const SkinnyGemmArgs& args);

// Every plan for the shape on this thread's SMs of the current device (sms.h). Uses rows, in, out and
// swiglu only. A plan fits fewer rows too.
std::vector<SkinnyWgmmaPlan> skinny_gemm_wgmma_plans(const SkinnyGemmArgs& args);

// Launches; legal in stream capture. cudaErrorInvalidValue where the plan is not one for these arguments.
cudaError_t skinny_gemm_wgmma(const SkinnyGemmArgs& args, const SkinnyWgmmaPlan& plan, cudaStream_t stream);

}  // namespace trireme::cuda
