// Skinny GEMM by mma (decode, up to 64 rows): y [rows, out] = x [rows, in] . weight [out, in]^T + bias, bf16, at the
// speed of memory. No LibTorch here, so that skinny_gemm_mma.cu compiles fast.
//
// Determinism class: row-exact, and the bits of cublasLt's GEMM without a split of the sum. Every output element is
// one float32 chain of tensor-core steps of 16 along `in`, ascending, one after the other, whatever the plan; the bias
// is added in float32 and the sum rounded once. (On Hopper a step has the same bits as part of any wgmma or mma shape.)
//
// How: a block owns a tile of weight rows over the whole of `in`; its warps hold the sums in registers, each of 16 or
// 32 weight rows and 16 or 32 tokens. One warp streams the weights of the tile, another the tokens (each slab read once
// for a cluster of blocks and multicast). The weights do not depend on the kernel before, so with `overlap` they begin
// to flow before that kernel has ended.
//
// Speed on H200 (bench/gpu/skinny_gemm_bench sweep prints every plan; launches that overlap, cold cache), 16 rows: 6144
// x 4096 14.9 us, 4096 x 4096 11.4, 14336 x 4096 of gate and up with the activation 57.7, 4096 x 14336 30.3, 128256 x
// 4096 242; a plain read of the weights takes 13.3, 9.6, 55.6, 28.4 and 233.
// docs/lab/001-products-of-few-rows.md compares with cublasLt.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trainer/ops/cuda/gemm/skinny_gemm.h"

namespace trireme::cuda {

inline constexpr int64_t kMostMmaRows = 64;

// How the work is cut. No plan alters a bit.
struct SkinnyMmaPlan {
  int columns = 0;          // weight rows of a tile: a multiple of 16 up to 256; with swiglu so many of gate and of up
  int fragments = 1;        // of 16 weight rows that a warp multiplies: 1 or 2; with swiglu 2
  int tokens = 1;           // fragments of 16 tokens that a warp multiplies: 1 or 2
  int cluster = 1;          // blocks that share the tokens: 1, 2 or 4
  int clusters = 0;         // of the grid; tiles go round them
  int slabs = 1;            // of 64 elements of `in`, in a stage: 1, 2 or 4
  int stages = 0;           // of the pipeline
  size_t shared_bytes = 0;  // of a block
  double predicted_us = 0;  // rough; plans are compared by it
};

// Whether the kernel takes these (shapes and addresses), on a device of compute capability 9.0.
bool skinny_gemm_mma_supported(const SkinnyGemmArgs& args);

// Every plan for the shape on this thread's SMs of the current device (sms.h). Uses rows, in, out and
// swiglu only; rows count in sixteens. Costs milliseconds.
std::vector<SkinnyMmaPlan> skinny_gemm_mma_plans(const SkinnyGemmArgs& args);

// Launches; legal in stream capture. cudaErrorInvalidValue where the plan is not one for these arguments.
cudaError_t skinny_gemm_mma(const SkinnyGemmArgs& args, const SkinnyMmaPlan& plan, cudaStream_t stream);

}  // namespace trireme::cuda
