// What the skinny GEMMs of decoding (skinny_gemm_mma.h, skinny_gemm_wgmma.h) take, and how their launches and those of
// attention by warp groups are put together. No LibTorch here, so that the kernels' files compile fast.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace trireme::cuda {

// y [rows, out] = x [rows, in] . weight [out, in]^T + bias. All pointers are multiples of 16 bytes, strides (in
// elements) and `out` of 8, `in` of 64. Elements are bf16.
struct SkinnyGemmArgs {
  const void* x = nullptr;  // [rows, in]
  int64_t x_stride = 0;
  const void* weight = nullptr;  // [out, in]; with swiglu [2 * out, in]: the gate's rows, then up's
  int64_t weight_stride = 0;
  const void* bias = nullptr;  // [out] or null; not with swiglu
  void* y = nullptr;           // [rows, out], contiguous
  int64_t rows = 0;
  int64_t in = 0;
  int64_t out = 0;
  // y = silu(gate) * up of the two GEMMs, each rounded to bf16 first: the bits of the GEMM followed by
  // swiglu_forward (elementwise/row_kernels.h).
  bool swiglu = false;
  // A programmatic dependent launch: may begin while the kernel before it in the stream runs, if that one allows it.
  // It then reads weights before that kernel (and whatever that one overlaps with) has ended: only where nothing in
  // the chain of overlapping launches writes them, as inside a decode graph. x, y and bias wait.
  bool overlap = false;
};

namespace skinny_gemm {

inline constexpr int kSlab = 64;  // elements of `in`: a row of 128 bytes in shared memory
inline constexpr int kSlabRowBytes = kSlab * 2;
inline constexpr int kSharedAlignment = 1024;
// Shared memory of a block: all it can have, and never so little that two fit an SM. Blocks of a launch that
// begins early go wherever there is room, and two of them on one SM would leave another without work.
inline constexpr size_t kMostSharedBytes = 226 * 1024;
inline constexpr size_t kLeastSharedBytes = 117 * 1024;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t weight_rows(const SkinnyGemmArgs& a) { return a.swiglu ? 2 * a.out : a.out; }

// SMs of the current device that this thread's kernels run on (sms.h).
int sm_count();
// Whether the current device and driver can run these kernels (compute capability 9.0, tensor maps).
bool device_supported();
// Widths, up to `most_rows` rows.
bool shape_supported(const SkinnyGemmArgs& args, int64_t most_rows);
// Strides and addresses.
bool layout_supported(const SkinnyGemmArgs& args);

// A map of `rows` rows of `in` elements that are loaded as boxes of 64 x box_rows; false where the driver refuses.
bool encode(CUtensorMap* map, const void* data, int64_t rows, int64_t in, int64_t stride, int box_rows);

cudaError_t allow_shared(const void* kernel);

// A launch that may fail leaves no error for the next call to find.
inline cudaError_t taken(cudaError_t error) {
  if (error != cudaSuccess) (void)cudaGetLastError();
  return error;
}

// A launch's configuration with its attributes, which it points to.
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2]{};
  Launch(int clusters, int cluster, int warps, size_t shared_bytes, bool overlap, cudaStream_t stream);
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
};

// Clusters of such a launch that `sms` SMs hold at once; 0 on error.
int resident_clusters(const Launch& launch, const void* kernel, int cluster, int sms);

// Rates for comparing plans on an H200: bytes a microsecond, bytes that must be under way for the first of them.
inline constexpr double kMemoryRate = 4.4e6, kBytesUnderWay = 5.0e6;
inline constexpr double kCacheRate = 9.0e6;  // L2 to all SMs together
inline constexpr double kSmRate = 0.8e5;     // into one SM
inline constexpr double kClock = 1800;       // cycles a microsecond

}  // namespace skinny_gemm
}  // namespace trireme::cuda
