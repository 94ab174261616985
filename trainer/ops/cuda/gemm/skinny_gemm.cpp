#include "trainer/ops/cuda/gemm/skinny_gemm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>

#include "trainer/ops/sms.h"

namespace trireme::cuda::skinny_gemm {
namespace {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);
EncodeTensorMap encoder() {  // through the runtime, so that nothing links libcuda
  static const EncodeTensorMap found = [] {
    void* pointer = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &pointer, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTensorMap>(pointer)
                                                                         : nullptr;
  }();
  return found;
}

bool is_hopper() {
  static std::array<std::atomic<int>, 64> known{};  // by device: 0 not asked, 1 no, 2 yes
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return false;
  std::atomic<int>& state = known[static_cast<size_t>(device)];
  if (state == 0) {
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
    if (cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) return false;
    state = major == 9 && minor == 0 ? 2 : 1;
  }
  return state == 2;
}

}  // namespace

int sm_count() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
  return sm_limit() > 0 ? std::min(count, sm_limit()) : count;
}

bool device_supported() { return is_hopper() && encoder() != nullptr; }

bool shape_supported(const SkinnyGemmArgs& a, int64_t most_rows) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 4;
  return a.rows >= 1 && a.rows <= most_rows && a.in >= kSlab && a.in % kSlab == 0 && a.in < kMost && a.out >= 8 &&
         a.out % 8 == 0 && a.out < kMost;
}

bool layout_supported(const SkinnyGemmArgs& a) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const auto stride = [&](int64_t s) { return s >= a.in && s % 8 == 0 && s < (int64_t{1} << 38); };
  return stride(a.x_stride) && stride(a.weight_stride) && aligned(a.x) && aligned(a.weight) && aligned(a.bias) &&
         aligned(a.y) && !(a.swiglu && a.bias != nullptr);
}

bool encode(CUtensorMap* map, const void* data, int64_t rows, int64_t in, int64_t stride, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(in), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {kSlab, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  return encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

cudaError_t allow_shared(const void* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kMostSharedBytes));
}

Launch::Launch(int clusters, int cluster, int warps, size_t shared_bytes, bool overlap, cudaStream_t stream) {
  config.gridDim = dim3(static_cast<unsigned>(clusters * cluster));
  config.blockDim = dim3(static_cast<unsigned>(warps * 32));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  if (cluster > 1) {
    cudaLaunchAttribute& shape = attributes[config.numAttrs++];
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim.x = static_cast<unsigned>(cluster);
    shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
  }
  if (overlap) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
}

int resident_clusters(const Launch& launch, const void* kernel, int cluster, int sms) {
  int count = 0;
  cudaError_t error;
  if (cluster > 1) {
    error = cudaOccupancyMaxActiveClusters(&count, kernel, &launch.config);
  } else {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, static_cast<int>(launch.config.blockDim.x),
                                                          launch.config.dynamicSmemBytes);
    count *= sms;
  }
  if (error == cudaSuccess) return std::min(count, std::max(1, sms / cluster));
  cudaGetLastError();
  return 0;
}

}  // namespace trireme::cuda::skinny_gemm
