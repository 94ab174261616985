// Kernels of mixtures of experts on raw device pointers: routing, our grouped GEMM, what lies between products. No
// LibTorch here, so that the kernels compile fast.
//
// Determinism class: forwards are row-exact (a row's sums have a shape fixed by its width), backwards give the same
// bits in every run. Nothing allocates or waits: legal in stream capture. Launch errors stay in cudaGetLastError().
//
// Elements are bf16 unless a type says otherwise; matrices are contiguous, pointers multiples of 16 bytes. `early` as
// of row_kernels.h: no kernel here touches anything before the one ahead has ended.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "trainer/ops/cuda/elementwise/row_kernels.h"

namespace trireme::cuda {

inline constexpr int kMostExperts = 512, kMostPerToken = 16;

// ---- routing (router.cu)

// logits [rows, experts] = x [rows, hidden] . router [experts, hidden]^T. A sum over `hidden` (a multiple of 64) is
// that of eight equal parts in order; each part one chain of fused multiply-adds, ascending, in float32, or with `wide`
// one chain of tensor-core steps in float64, each of four elements that lie eight apart. Numbers that are not finite,
// in a row or in the router, make logits of NaN.
void router_logits(const Bf16* x, const Bf16* router, int64_t rows, int64_t hidden, int64_t experts, bool wide,
                   float* logits, cudaStream_t stream, bool early);

struct RoutePlace {  // Routes of experts.h
  int32_t* experts = nullptr;
  float* weights = nullptr;
  float* probabilities = nullptr;  // or null
  int32_t* offsets = nullptr;
  int32_t* rows = nullptr;
  int32_t* places = nullptr;
};
// The rows that were routed, as they are sorted: x [rows, width] -> out [rows * per_token, width]; null: not asked for.
struct SortedRows {
  const Bf16* x = nullptr;
  int64_t width = 0;  // a multiple of 8
  Bf16* out = nullptr;
};
// Bytes of scratch that choose_and_sort takes for so many rows.
int64_t sort_scratch_bytes(int64_t rows, int64_t experts);
void choose_and_sort(const float* logits, int64_t rows, int64_t experts, int64_t per_token, bool normalize,
                     const RoutePlace& to, const SortedRows& sorted, void* scratch, cudaStream_t stream, bool early);

// ---- rows between products (expert_rows.cu); widths are multiples of 8

void gather_rows(const Bf16* x, const int32_t* rows, int64_t count, int64_t width, Bf16* out, cudaStream_t stream,
                 bool early = false);
// Of the `count` rows only those from *begin to *end, which lie on the device.
void gather_part(const Bf16* x, const int32_t* rows, const int32_t* begin, const int32_t* end, int64_t count,
                 int64_t width, Bf16* out, cudaStream_t stream, bool early = false);

// out [rows, width]: combine of experts.h, blocks of `of_block` experts.
void combine_rows(const Bf16* y, const int32_t* experts, const float* weights, const int32_t* places, int64_t rows,
                  int64_t per_token, int64_t of_block, int64_t width, Bf16* out, cudaStream_t stream,
                  bool early = false);

// The two steps of combine: out [sums, width], sum i of y's rows places[begins[i]] .. places[begins[i + 1] - 1] in
// order from +0, weighted or as they are, rounded once.
void weighted_sums(const Bf16* y, const int32_t* places, const float* weights, const int32_t* begins, int64_t sums,
                   int64_t width, Bf16* out, cudaStream_t stream);
void plain_sums(const Bf16* y, const int32_t* places, const int32_t* begins, int64_t sums, int64_t width, Bf16* out,
                cudaStream_t stream);

// part_block_sums of expert_rows.h -> out [rows, blocks, width].
struct PartShape {
  int64_t rows = 0, per_token = 0;
  int64_t of_block = 0;  // experts of a block
  int64_t first_block = 0, blocks = 0;
  int64_t width = 0;
};
void part_sums(const Bf16* y, const int32_t* experts, const float* weights, const int32_t* places,
               const PartShape& shape, Bf16* out, cudaStream_t stream, bool early = false);
// in [rows, blocks, width] -> out [rows, width], each row's in order from +0, rounded once.
void sums_in_order(const Bf16* in, int64_t rows, int64_t blocks, int64_t width, Bf16* out, cudaStream_t stream,
                   bool early = false);

void sum_rows_of_places(const Bf16* y, const int32_t* places, int64_t rows, int64_t per_token, int64_t width, Bf16* out,
                        cudaStream_t stream);

// expert_gradients of expert_rows.h; row_weights [rows] and dots [rows] are of sorted rows.
void expert_gradient_rows(const Bf16* gate_up, const Bf16* upstream, const float* row_weights, int64_t rows,
                          int64_t width, Bf16* weighted, Bf16* dgate_up, float* dots, cudaStream_t stream);

// ---- grouped GEMM (grouped_gemm.cu)

// Of each expert e the rows offsets[e] .. offsets[e + 1] of x times its matrix: y [rows, out]; with swiglu the product
// of up times silu of that of the gate, each rounded to bf16 first: y [rows, out], matrices [2 * out, in]. Reads only
// matrices of experts that have rows. Bits: one chain of tensor-core steps of 16 along `in`, ascending, as
// skinny_gemm_mma.h.
struct GroupedGemmArgs {
  const void* x = nullptr;       // [rows, in]
  const void* weight = nullptr;  // [experts * weight_rows, in]
  const int32_t* offsets = nullptr;
  void* y = nullptr;
  int64_t rows = 0, experts = 0;
  int64_t in = 0;    // a multiple of 64
  int64_t out = 0;   // a multiple of 128, with swiglu of 64
  int64_t most = 0;  // rows of an expert, at most: decides how the work is cut, and no bit
  bool swiglu = false;
  bool early = false;  // as of row_kernels.h
};
inline constexpr int64_t kFewGroupedRows = 4096;  // cut as fits decoding; more, another way: no bit depends on it
bool grouped_gemm_supported(const GroupedGemmArgs& args);
cudaError_t grouped_gemm(const GroupedGemmArgs& args, cudaStream_t stream);
// Whether the start-up test left it, and the library's, in use (cuda_ops.h, grouped_rows_are_exact).
bool grouped_gemm_in_use();
bool library_grouped_gemm_in_use();
// As that test does it; process-wide, not while ops run.
void set_grouped_gemms_in_use(bool ours, bool library);

}  // namespace trireme::cuda
