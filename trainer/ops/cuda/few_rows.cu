#include "trainer/ops/cuda/few_rows.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>

#include "trainer/ops/cuda/few_rows_kernel.cuh"

namespace trireme::cuda {
namespace {

// Two blocks of the narrow budget fit a processor beside a small kernel between them, so that the next launch can take
// its place, and its first weights, while this one runs. The wide budget is all a block can have.
constexpr size_t kNarrowBytes = 106 * 1024;
constexpr size_t kWideBytes = 226 * 1024;
constexpr int kMostStages = 32;
constexpr int kFewestStages = 3;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Instance {
  int columns, parts;
  bool swiglu;
  const void* kernel[2];  // for up to 64 and up to 128 rows
};
template <int kColumns, int kParts, bool kSwiglu>
constexpr Instance instance() {
  return {kColumns,
          kParts,
          kSwiglu,
          {reinterpret_cast<const void*>(&few_rows_kernel<kColumns, kParts, 1, kSwiglu>),
           reinterpret_cast<const void*>(&few_rows_kernel<kColumns, kParts, 2, kSwiglu>)}};
}
const Instance kInstances[] = {
    instance<16, 1, false>(), instance<32, 1, false>(), instance<48, 1, false>(),  instance<64, 1, false>(),
    instance<80, 1, false>(), instance<96, 1, false>(), instance<112, 1, false>(), instance<128, 1, false>(),
    instance<80, 2, false>(), instance<96, 2, false>(), instance<112, 2, false>(), instance<128, 2, false>(),
    instance<16, 2, true>(),  instance<32, 2, true>(),  instance<48, 2, true>(),   instance<64, 2, true>(),
    instance<80, 2, true>(),  instance<96, 2, true>(),  instance<112, 2, true>(),  instance<128, 2, true>(),
};

const Instance* find_instance(int columns, int parts, bool swiglu) {
  for (const Instance& i : kInstances) {
    if (i.columns == columns && i.parts == parts && i.swiglu == swiglu) return &i;
  }
  return nullptr;
}

int padded_rows(int64_t rows) { return static_cast<int>(divide_up(rows, 8) * 8); }
int groups_for(int64_t rows) { return rows > kGroupRows ? 2 : 1; }
int block_threads(int groups) { return groups * kGroupThreads + 64; }
int64_t weight_rows(const FewRowsArgs& a) { return a.swiglu ? 2 * a.out : a.out; }
int tile_outputs(const FewRowsPlan& plan, bool swiglu) { return swiglu ? plan.columns : plan.columns * plan.parts; }
size_t slab_bytes(const FewRowsPlan& plan, int64_t rows) {
  return static_cast<size_t>(padded_rows(rows) + plan.columns * plan.parts) * kSlabRowBytes;
}
size_t shared_bytes(const FewRowsPlan& plan, int64_t rows) {
  return kSharedAlignment + static_cast<size_t>(plan.stages * plan.slabs) * slab_bytes(plan, rows) +
         static_cast<size_t>(plan.stages) * kBarriers * 8;
}

cudaError_t current_device(int* device) { return cudaGetDevice(device); }

int processors() {
  int device = 0, count = 0;
  if (current_device(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 0;
  return count;
}

bool is_hopper() {
  static std::array<std::atomic<int>, 64> known{};  // by device: 0 not asked, 1 no, 2 yes
  int device = 0, major = 0, minor = 0;
  if (current_device(&device) != cudaSuccess || device < 0 || device >= 64) return false;
  std::atomic<int>& state = known[static_cast<size_t>(device)];
  if (state == 0) {
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
    if (cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) return false;
    state = major == 9 && minor == 0 ? 2 : 1;
  }
  return state == 2;
}

// A launch's configuration with its attributes, which it points to.
struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2]{};
  Launch(const FewRowsPlan& plan, int groups, bool overlap, cudaStream_t stream) {
    config.gridDim = dim3(static_cast<unsigned>(plan.clusters * plan.cluster));
    config.blockDim = dim3(static_cast<unsigned>(block_threads(groups)));
    config.dynamicSmemBytes = plan.shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (plan.cluster > 1) {
      cudaLaunchAttribute& a = attributes[config.numAttrs++];
      a.id = cudaLaunchAttributeClusterDimension;
      a.val.clusterDim.x = static_cast<unsigned>(plan.cluster);
      a.val.clusterDim.y = a.val.clusterDim.z = 1;
    }
    if (overlap) {
      cudaLaunchAttribute& a = attributes[config.numAttrs++];
      a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      a.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
};

cudaError_t allow_shared(const void* kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kWideBytes));
}

// Rates for comparing plans on an H200: bytes a microsecond, bytes that must be under way for the first of them.
constexpr double kMemoryRate = 4.4e6, kBytesUnderWay = 5.0e6;
constexpr double kCacheRate = 5.0e6;      // L2 to all processors together
constexpr double kProcessorRate = 0.8e5;  // into one processor
constexpr double kStepUs = 0.018;         // one product after another in a chain

double predict(const FewRowsArgs& a, const FewRowsPlan& plan) {
  const double row_bytes = static_cast<double>(a.in) * 2;
  const int tile_rows = plan.columns * plan.parts;
  const auto tiles = static_cast<double>(divide_up(a.out, tile_outputs(plan, a.swiglu)));
  const double blocks = std::min(tiles, static_cast<double>(plan.clusters * plan.cluster));
  const double rounds = static_cast<double>(divide_up(static_cast<int64_t>(tiles), plan.clusters * plan.cluster));
  const double weight = static_cast<double>(weight_rows(a)) * row_bytes;
  const double under_way = blocks * (plan.stages - 1) * plan.slabs * tile_rows * kSlabRowBytes;
  const double stream = weight / kMemoryRate * std::max(1.0, kBytesUnderWay / under_way);
  const double cache = (weight + tiles / plan.cluster * padded_rows(a.rows) * row_bytes) / kCacheRate;
  const double processor = rounds * (tile_rows + padded_rows(a.rows)) * row_bytes / kProcessorRate;
  const double chain = rounds * static_cast<double>(a.in) / kStep * kStepUs;
  const double start = 1.5 + 0.1 * (plan.cluster - 1) + (plan.wide ? 1.0 : 0.0);
  return std::max({stream, cache, processor, chain}) + 0.15 * processor + start;
}

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

// Rows of `in` elements, loaded as boxes of 64 x box_rows.
bool encode(CUtensorMap* map, const void* data, int64_t rows, int64_t in, int64_t stride, int box_rows) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(in), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride) * 2};
  const cuuint32_t box[2] = {kSlab, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  return encoder()(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool shape_supported(const FewRowsArgs& a) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 4;
  return a.rows >= 1 && a.rows <= kMostFewRows && a.in >= kSlab && a.in % kSlab == 0 && a.in < kMost && a.out >= 8 &&
         a.out % 8 == 0 && a.out < kMost;
}

bool plan_fits(const FewRowsArgs& a, const FewRowsPlan& p) {
  const bool cluster = p.cluster == 1 || p.cluster == 2 || p.cluster == 4 || p.cluster == 8;
  const bool slabs = p.slabs == 1 || p.slabs == 2 || p.slabs == 4;
  return cluster && slabs && p.clusters > 0 && p.stages >= 2 && p.stages <= kMostStages && p.prefetch >= 0 &&
         a.in / kSlab % p.slabs == 0 && p.stages * p.slabs % p.cluster == 0 &&
         p.shared_bytes == shared_bytes(p, a.rows) && p.shared_bytes <= kWideBytes &&
         // What a product reads behind the last tokens must lie inside the block's memory.
         static_cast<size_t>(p.stages * p.slabs) * static_cast<size_t>(p.columns * p.parts) * kSlabRowBytes >=
             size_t{kGroupRows - 8} * kSlabRowBytes;
}

}  // namespace

bool few_rows_supported(const FewRowsArgs& a) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const auto stride = [&](int64_t s) { return s >= a.in && s % 8 == 0 && s < (int64_t{1} << 38); };
  return shape_supported(a) && stride(a.x_stride) && stride(a.weight_stride) && aligned(a.x) && aligned(a.weight) &&
         aligned(a.bias) && aligned(a.y) && !(a.swiglu && a.bias != nullptr) && is_hopper() && encoder() != nullptr;
}

std::vector<FewRowsPlan> few_rows_plans(const FewRowsArgs& a) {
  std::vector<FewRowsPlan> plans;
  if (!shape_supported(a) || !is_hopper()) return plans;
  const int count = processors(), groups = groups_for(a.rows);
  for (const Instance& i : kInstances) {
    if (i.swiglu != a.swiglu) continue;
    const void* kernel = i.kernel[groups - 1];
    if (allow_shared(kernel) != cudaSuccess) continue;
    for (const int cluster : {1, 2, 4, 8}) {
      for (const int slabs : {1, 2, 4}) {
        if (a.in / kSlab % slabs != 0) continue;
        for (const bool wide : {false, true}) {
          FewRowsPlan plan;
          plan.columns = i.columns;
          plan.parts = i.parts;
          plan.cluster = cluster;
          plan.slabs = slabs;
          plan.wide = wide;
          const size_t budget = (wide ? kWideBytes : kNarrowBytes) - kSharedAlignment - kMostStages * kBarriers * 8;
          const int together = std::max(1, cluster / slabs);  // stages that the cluster's blocks load by turns
          const auto most = static_cast<int>(budget / slab_bytes(plan, a.rows) / static_cast<size_t>(slabs));
          const int64_t tiles = divide_up(a.out, tile_outputs(plan, a.swiglu));
          // More stages than a block has work for would only lie idle.
          const int64_t work = a.in / kSlab / slabs * (tiles > count ? 2 : 1);
          const auto useful = static_cast<int>(divide_up(std::max<int64_t>(work, 2), together) * together);
          plan.stages = std::min({most, useful, kMostStages}) / together * together;
          if (plan.stages < std::min(kFewestStages, useful) || plan.stages < 2) continue;
          plan.shared_bytes = shared_bytes(plan, a.rows);
          if (wide && plan.shared_bytes <= kNarrowBytes) continue;  // the narrow one has it all
          plan.clusters = static_cast<int>(std::min<int64_t>(divide_up(tiles, cluster), count / cluster));
          if (plan.clusters == 0 || !plan_fits(a, plan)) continue;
          Launch launch(plan, groups, false, nullptr);
          int resident = 0;
          if (cudaOccupancyMaxActiveClusters(&resident, kernel, &launch.config) != cudaSuccess || resident == 0) {
            cudaGetLastError();
            continue;
          }
          plan.clusters = std::min(plan.clusters, resident);
          plan.predicted_us = predict(a, plan);
          plans.push_back(plan);
        }
      }
    }
  }
  return plans;
}

FewRowsPlan few_rows_plan(const FewRowsArgs& a) {
  FewRowsPlan best;
  for (const FewRowsPlan& plan : few_rows_plans(a)) {
    // Of equals, the one with more slabs a stage: longer runs of a row together.
    if (best.clusters == 0 || plan.predicted_us < best.predicted_us - 1e-9 ||
        (plan.predicted_us < best.predicted_us + 0.25 && plan.slabs > best.slabs && plan.slabs <= 2 &&
         plan.stages >= 4 && plan.columns == best.columns && plan.parts == best.parts && plan.wide == best.wide &&
         plan.cluster == best.cluster)) {
      best = plan;
    }
  }
  return best;
}

cudaError_t few_rows(const FewRowsArgs& a, const FewRowsPlan& plan, cudaStream_t stream) {
  const Instance* instance = find_instance(plan.columns, plan.parts, a.swiglu);
  if (instance == nullptr || !few_rows_supported(a) || !plan_fits(a, plan)) return cudaErrorInvalidValue;
  const int groups = groups_for(a.rows);
  const void* kernel = instance->kernel[groups - 1];
  FewRowsParams params;
  if (!encode(&params.x_map, a.x, a.rows, a.in, a.x_stride, padded_rows(a.rows)) ||
      !encode(&params.w_map, a.weight, weight_rows(a), a.in, a.weight_stride, plan.columns)) {
    return cudaErrorInvalidValue;
  }
  params.y = static_cast<__nv_bfloat16*>(a.y);
  params.bias = static_cast<const __nv_bfloat16*>(a.bias);
  params.rows = static_cast<int>(a.rows);
  params.padded_rows = padded_rows(a.rows);
  params.out = static_cast<int>(a.out);
  params.weight_rows = static_cast<int>(weight_rows(a));
  params.part_rows = a.swiglu ? params.out : plan.columns;
  params.tiles = static_cast<int>(divide_up(a.out, tile_outputs(plan, a.swiglu)));
  params.cluster = plan.cluster;
  params.stages_of_in = static_cast<int>(a.in / kSlab / plan.slabs);
  params.slabs = plan.slabs;
  params.stages = plan.stages;
  params.prefetch = a.overlap ? plan.prefetch : 0;
  const cudaError_t error = allow_shared(kernel);
  if (error != cudaSuccess) return error;
  const Launch launch(plan, groups, a.overlap, stream);
  void* arguments[] = {&params};
  return cudaLaunchKernelExC(&launch.config, kernel, arguments);
}

}  // namespace trireme::cuda
