#include "trainer/ops/cuda/gemm/skinny_gemm_mma.h"

#include <algorithm>
#include <array>

#include "trainer/ops/cuda/gemm/skinny_gemm_mma_kernel.cuh"

namespace trireme::cuda {
namespace {

using namespace skinny_gemm;

constexpr int kMostStages = 32;
constexpr int kFewestStages = 3;
constexpr int kMostBoxRows = 256;

// [fragments of tokens - 1][one fragment of weights, two, one of the gate and one of up][slabs 1, 2, 4]
template <int kTokens, int kWeights, bool kSwiglu>
constexpr std::array<const void*, 3> instances() {
  return {reinterpret_cast<const void*>(&skinny_gemm_mma_kernel<kTokens, kWeights, kSwiglu, 1>),
          reinterpret_cast<const void*>(&skinny_gemm_mma_kernel<kTokens, kWeights, kSwiglu, 2>),
          reinterpret_cast<const void*>(&skinny_gemm_mma_kernel<kTokens, kWeights, kSwiglu, 4>)};
}
const std::array<const void*, 3> kInstances[2][3] = {
    {instances<1, 1, false>(), instances<1, 2, false>(), instances<1, 2, true>()},
    {instances<2, 1, false>(), instances<2, 2, false>(), instances<2, 2, true>()}};

const void* find_kernel(const SkinnyMmaPlan& plan, bool swiglu) {
  return kInstances[plan.tokens - 1][swiglu ? 2 : plan.fragments - 1][static_cast<size_t>(plan.slabs / 2)];
}

int token_fragments(int64_t rows) { return static_cast<int>(divide_up(rows, kFragmentRows)); }
int token_groups(const SkinnyMmaPlan& plan, int64_t rows) {
  return static_cast<int>(divide_up(token_fragments(rows), plan.tokens));
}
int x_rows(const SkinnyMmaPlan& plan, int64_t rows) { return token_groups(plan, rows) * plan.tokens * kFragmentRows; }
// Of weights.
int tile_rows(const SkinnyMmaPlan& plan, bool swiglu) { return swiglu ? 2 * plan.columns : plan.columns; }
int side_by_side(const SkinnyMmaPlan& plan, bool swiglu) {
  return tile_rows(plan, swiglu) / kFragmentRows / plan.fragments;
}
int multiplying_warps(const SkinnyMmaPlan& plan, const SkinnyGemmArgs& a) {
  return side_by_side(plan, a.swiglu) * token_groups(plan, a.rows);
}
size_t slab_bytes(const SkinnyMmaPlan& plan, const SkinnyGemmArgs& a) {
  return static_cast<size_t>(x_rows(plan, a.rows) + tile_rows(plan, a.swiglu)) * kSlabRowBytes;
}
size_t shared_bytes(const SkinnyMmaPlan& plan, const SkinnyGemmArgs& a) {
  const size_t needed = kSharedAlignment + static_cast<size_t>(plan.stages * plan.slabs) * slab_bytes(plan, a) +
                        static_cast<size_t>(plan.stages) * kBarriers * 8;
  return std::max(needed, kLeastSharedBytes);
}

// For comparing plans, in cycles.
constexpr double kStepCycles = 48;     // one product after another in a chain
constexpr double kProductCycles = 8;   // between products of a quarter of an SM
constexpr double kFragmentCycles = 4;  // shared memory, of an SM
constexpr double kStageCycles = 80;    // to the next stage

double predict(const SkinnyGemmArgs& a, const SkinnyMmaPlan& plan) {
  const double row_bytes = static_cast<double>(a.in) * 2;
  const double rows_of_tile = tile_rows(plan, a.swiglu), rows = x_rows(plan, a.rows);
  const auto tiles = static_cast<double>(divide_up(a.out, plan.columns));
  const double blocks = std::min(tiles, static_cast<double>(plan.clusters * plan.cluster));
  const double rounds = static_cast<double>(divide_up(static_cast<int64_t>(tiles), plan.clusters * plan.cluster));
  const double weight = static_cast<double>(weight_rows(a)) * row_bytes;
  const double under_way = blocks * (plan.stages - 1) * plan.slabs * rows_of_tile * kSlabRowBytes;
  const double stream = weight / kMemoryRate * std::max(1.0, kBytesUnderWay / under_way);
  const double cache = (weight + tiles / plan.cluster * rows * row_bytes) / kCacheRate;
  const double processor = rounds * (rows_of_tile + rows) * row_bytes / kSmRate;
  const int warps = multiplying_warps(plan, a);
  const double products = static_cast<double>(divide_up(warps, 4)) * 2 * plan.tokens * plan.fragments;
  const double step = std::max({kStepCycles, products * kProductCycles,
                                warps * (plan.tokens + plan.fragments) * kFragmentCycles + rows_of_tile / 8});
  const double chain =
      rounds * static_cast<double>(a.in) * (step / kStep + kStageCycles / (kSlab * plan.slabs)) / kClock;
  const double start = 1.5 + 0.1 * (plan.cluster - 1);
  return std::max({stream, cache, processor, chain}) + 0.15 * processor + start;
}

bool plan_fits(const SkinnyGemmArgs& a, const SkinnyMmaPlan& p) {
  const bool cluster = p.cluster == 1 || p.cluster == 2 || p.cluster == 4;
  const bool slabs = p.slabs == 1 || p.slabs == 2 || p.slabs == 4;
  const bool fragments = p.fragments == 2 || (p.fragments == 1 && !a.swiglu);
  const bool tokens = p.tokens == 1 || p.tokens == 2;
  if (!cluster || !slabs || !fragments || !tokens || p.columns < kFragmentRows || p.columns > kMostBoxRows)
    return false;
  const int side = side_by_side(p, a.swiglu);
  return side >= 1 && tile_rows(p, a.swiglu) == side * p.fragments * kFragmentRows &&
         multiplying_warps(p, a) <= kMostMultiplyingWarps && p.clusters > 0 && p.stages >= 2 &&
         p.stages <= kMostStages && a.in / kSlab % p.slabs == 0 && p.stages * p.slabs % p.cluster == 0 &&
         p.shared_bytes == shared_bytes(p, a) && p.shared_bytes <= kMostSharedBytes;
}

}  // namespace

bool skinny_gemm_mma_supported(const SkinnyGemmArgs& a) {
  return shape_supported(a, kMostMmaRows) && layout_supported(a) && device_supported();
}

std::vector<SkinnyMmaPlan> skinny_gemm_mma_plans(const SkinnyGemmArgs& a) {
  std::vector<SkinnyMmaPlan> plans;
  if (!shape_supported(a, kMostMmaRows) || !device_supported()) return plans;
  const int count = sm_count();
  SkinnyMmaPlan plan;
  const auto try_plan = [&] {
    constexpr size_t kRoom = kMostSharedBytes - kSharedAlignment - kMostStages * kBarriers * 8;
    const int together = std::max(1, plan.cluster / plan.slabs);  // stages that the cluster's blocks load by turns
    const auto most = static_cast<int>(kRoom / slab_bytes(plan, a) / static_cast<size_t>(plan.slabs));
    const int64_t tiles = divide_up(a.out, plan.columns);
    // More stages than a block has work for would only lie idle.
    const int64_t work = a.in / kSlab / plan.slabs * (tiles > count ? 2 : 1);
    const auto useful = static_cast<int>(divide_up(std::max<int64_t>(work, 2), together) * together);
    plan.stages = std::min({most, useful, kMostStages}) / together * together;
    if (plan.stages < std::min(kFewestStages, useful) || plan.stages < 2) return;
    plan.shared_bytes = shared_bytes(plan, a);
    plan.clusters = static_cast<int>(std::min<int64_t>(divide_up(tiles, plan.cluster), count / plan.cluster));
    if (plan.clusters == 0 || !plan_fits(a, plan)) return;
    const Launch launch(plan.clusters, plan.cluster, multiplying_warps(plan, a) + kLoadingWarps, plan.shared_bytes,
                        false, nullptr);
    plan.clusters =
        std::min(plan.clusters, resident_clusters(launch, find_kernel(plan, a.swiglu), plan.cluster, count));
    if (plan.clusters == 0) return;
    plan.predicted_us = predict(a, plan);
    plans.push_back(plan);
  };
  for (plan.columns = kFragmentRows; plan.columns <= kMostBoxRows; plan.columns += kFragmentRows) {
    for (plan.fragments = a.swiglu ? 2 : 1; plan.fragments <= 2; ++plan.fragments) {
      if (!a.swiglu && plan.columns % (kFragmentRows * plan.fragments) != 0) continue;
      for (plan.tokens = 1; plan.tokens <= std::min(2, token_fragments(a.rows)); ++plan.tokens) {
        if (multiplying_warps(plan, a) > kMostMultiplyingWarps) continue;
        for (plan.slabs = 1; plan.slabs <= 4; plan.slabs *= 2) {
          if (a.in / kSlab % plan.slabs != 0 || taken(allow_shared(find_kernel(plan, a.swiglu))) != cudaSuccess)
            continue;
          for (plan.cluster = 1; plan.cluster <= 4; plan.cluster *= 2) try_plan();
        }
      }
    }
  }
  return plans;
}

cudaError_t skinny_gemm_mma(const SkinnyGemmArgs& a, const SkinnyMmaPlan& plan, cudaStream_t stream) {
  if (!skinny_gemm_mma_supported(a) || !plan_fits(a, plan)) return cudaErrorInvalidValue;
  const void* kernel = find_kernel(plan, a.swiglu);
  SkinnyGemmMmaParams params;
  if (!encode(&params.x_map, a.x, a.rows, a.in, a.x_stride, x_rows(plan, a.rows)) ||
      !encode(&params.w_map, a.weight, weight_rows(a), a.in, a.weight_stride, plan.columns)) {
    return cudaErrorInvalidValue;
  }
  params.y = static_cast<__nv_bfloat16*>(a.y);
  params.bias = static_cast<const __nv_bfloat16*>(a.bias);
  params.rows = static_cast<int>(a.rows);
  params.x_rows = x_rows(plan, a.rows);
  params.out = static_cast<int>(a.out);
  params.weight_rows = static_cast<int>(weight_rows(a));
  params.columns = plan.columns;
  params.warps = multiplying_warps(plan, a);
  params.side_by_side = side_by_side(plan, a.swiglu);
  params.tiles = static_cast<int>(divide_up(a.out, plan.columns));
  params.cluster = plan.cluster;
  params.stages_of_in = static_cast<int>(a.in / kSlab / plan.slabs);
  params.stages = plan.stages;
  const cudaError_t error = allow_shared(kernel);
  if (error != cudaSuccess) return taken(error);
  const Launch launch(plan.clusters, plan.cluster, multiplying_warps(plan, a) + kLoadingWarps, plan.shared_bytes,
                      a.overlap, stream);
  void* arguments[] = {&params};
  return taken(cudaLaunchKernelExC(&launch.config, kernel, arguments));
}

}  // namespace trireme::cuda
