#include "trainer/ops/cuda/gemm/skinny_gemm_wgmma.h"

#include <algorithm>
#include <array>
#include <utility>

#include "trainer/ops/cuda/gemm/skinny_gemm_wgmma_kernel.cuh"

namespace trireme::cuda {
namespace {

using namespace skinny_gemm;
using skinny_gemm_wgmma_detail::kGroupRows, skinny_gemm_wgmma_detail::kGroupWarps,
    skinny_gemm_wgmma_detail::most_groups;

constexpr int kColumnStep = 16, kMostColumns = 256;
constexpr int kMostStages = 24;
constexpr int kMostGroups = 4;
constexpr int kMostTeam = 4;

// Slabs of a stage that there is a kernel for: several where a product is short.
constexpr bool has_slabs(int columns, int slabs) {
  return slabs == 1 ? columns > 96 : slabs == 2 ? columns <= 160 : columns <= 96;
}
template <int kColumns, bool kSwiglu, int kSlabs>
constexpr const void* instance() {
  if constexpr (has_slabs(kColumns, kSlabs)) {
    return reinterpret_cast<const void*>(&skinny_gemm_wgmma_kernel<kColumns, kSwiglu, kSlabs>);
  } else {
    return nullptr;
  }
}
using Instances = std::array<std::array<const void*, 3>, kMostColumns / kColumnStep>;  // [columns / 16 - 1][slabs / 2]
template <bool kSwiglu, size_t... kSixteens>
constexpr Instances instances(std::index_sequence<kSixteens...>) {
  return {std::array<const void*, 3>{instance<static_cast<int>(kSixteens + 1) * kColumnStep, kSwiglu, 1>(),
                                     instance<static_cast<int>(kSixteens + 1) * kColumnStep, kSwiglu, 2>(),
                                     instance<static_cast<int>(kSixteens + 1) * kColumnStep, kSwiglu, 4>()}...};
}
const Instances kPlain = instances<false>(std::make_index_sequence<kMostColumns / kColumnStep>());
const Instances kWithSwiglu = instances<true>(std::make_index_sequence<kMostColumns / kColumnStep>());

const void* find_kernel(const SkinnyWgmmaPlan& plan, bool swiglu) {
  const auto& of_columns = (swiglu ? kWithSwiglu : kPlain)[static_cast<size_t>(plan.columns / kColumnStep - 1)];
  return of_columns[static_cast<size_t>(plan.slabs / 2)];
}

// Tokens of a block, the same number for each block of a team; what is beyond the last comes as zeros, which costs
// time.
int block_rows(const SkinnyWgmmaPlan& plan, int64_t rows) {
  const int64_t unit = 8 * (plan.clustered ? plan.across : 1);
  return static_cast<int>(divide_up(divide_up(rows, plan.along), unit) * unit);
}
int groups_of(const SkinnyWgmmaPlan& plan, int64_t rows) {  // of a block
  return static_cast<int>(divide_up(block_rows(plan, rows), kGroupRows));
}
int y_columns(const SkinnyWgmmaPlan& plan, bool swiglu) {
  return swiglu ? plan.columns / 2 : plan.columns;
}  // of a tile
int warps_of(const SkinnyWgmmaPlan& plan, int64_t rows) {
  return groups_of(plan, rows) * kGroupWarps + skinny_gemm_wgmma_detail::kLoadingWarps;
}
size_t stage_bytes(const SkinnyWgmmaPlan& plan, int64_t rows) {
  return static_cast<size_t>(plan.slabs * (groups_of(plan, rows) * kGroupRows + plan.columns)) * kSlabRowBytes;
}
size_t shared_bytes(const SkinnyWgmmaPlan& plan, int64_t rows) {
  const size_t needed = kSharedAlignment + static_cast<size_t>(plan.stages) * stage_bytes(plan, rows) +
                        static_cast<size_t>(plan.stages) * skinny_gemm_wgmma_detail::kBarriers * 8;
  return std::max(needed, kLeastSharedBytes);
}

// For comparing plans, in cycles.
constexpr double kSharedRate = 115;    // bytes of shared memory a cycle, products and copies together
constexpr double kStageCycles = 200;   // from stage to stage, while products go on
constexpr double kProductCycles = 40;  // one product after another

double predict(const SkinnyGemmArgs& a, const SkinnyWgmmaPlan& plan) {
  const double row_bytes = static_cast<double>(a.in) * 2, steps = static_cast<double>(a.in) / 16;
  const double groups = groups_of(plan, a.rows), rows = groups * kGroupRows, columns = plan.columns;
  const int64_t tiles = divide_up(a.out, y_columns(plan, a.swiglu));
  const auto rounds = static_cast<double>(divide_up(tiles, int64_t{plan.teams} * plan.across));
  const double blocks =
      std::min(static_cast<double>(divide_up(tiles, plan.across)), plan.teams * 1.0) * plan.across * plan.along;
  const double weight = static_cast<double>(weight_rows(a)) * row_bytes;
  const double under_way =
      blocks / (plan.clustered ? plan.along : 1) * (plan.stages - 1) * plan.slabs * columns * kSlabRowBytes;
  const double stream = weight / kMemoryRate * std::max(1.0, kBytesUnderWay / under_way);
  const double cache = (weight * (plan.clustered ? 1 : plan.along) +
                        static_cast<double>(tiles) / plan.across * plan.along * rows * row_bytes) /
                       kCacheRate;
  const double processor = rounds * (columns + rows) * row_bytes / kSmRate;
  const double of_shared = (groups * (2048 + columns * 32) + (block_rows(plan, a.rows) + columns) * 32) / kSharedRate;
  const double of_step = std::max({kProductCycles + kStageCycles / (4 * plan.slabs), groups * columns / 2, of_shared});
  const double chain = rounds * steps * of_step / kClock;
  const double start = 1.5 + 0.1 * (plan.across * plan.along - 1);
  return std::max({stream, cache, processor, chain}) + 0.15 * processor + start;
}

bool plan_fits(const SkinnyGemmArgs& a, const SkinnyWgmmaPlan& p) {
  if (p.columns < kColumnStep || p.columns > kMostColumns || p.columns % kColumnStep != 0) return false;
  const int team = p.across * p.along;
  if ((p.across != 1 && p.across != 2 && p.across != 4) || p.along < 1 || team > kMostTeam) return false;
  if (p.clustered ? team == 1 : p.across > 1) return false;
  if ((p.slabs != 1 && p.slabs != 2 && p.slabs != 4) || !has_slabs(p.columns, p.slabs) || a.in / kSlab % p.slabs != 0)
    return false;
  return groups_of(p, a.rows) <= std::min(kMostGroups, most_groups(p.columns)) &&
         y_columns(p, a.swiglu) % (8 * (p.clustered ? p.along : 1)) == 0 && p.teams > 0 && p.stages >= 2 &&
         p.stages <= kMostStages && p.shared_bytes >= shared_bytes(p, a.rows) && p.shared_bytes <= kMostSharedBytes;
}

}  // namespace

bool skinny_gemm_wgmma_supported(const SkinnyGemmArgs& a) {
  return shape_supported(a, kMostWgmmaRows) && layout_supported(a) && device_supported();
}

std::vector<SkinnyWgmmaPlan> skinny_gemm_wgmma_plans(const SkinnyGemmArgs& a) {
  std::vector<SkinnyWgmmaPlan> plans;
  if (!shape_supported(a, kMostWgmmaRows) || !device_supported()) return plans;
  const int count = sm_count();
  SkinnyWgmmaPlan plan;
  const auto try_plan = [&] {
    constexpr size_t kRoom =
        kMostSharedBytes - kSharedAlignment - size_t{kMostStages} * skinny_gemm_wgmma_detail::kBarriers * 8;
    const int team = plan.across * plan.along, cluster = plan.clustered ? team : 1;
    const auto most = static_cast<int>(kRoom / stage_bytes(plan, a.rows));
    const int64_t tiles = divide_up(a.out, y_columns(plan, a.swiglu));
    // More stages than a block has work for would only lie idle.
    const int64_t work = a.in / kSlab / plan.slabs * (tiles > count ? 2 : 1);
    plan.stages = static_cast<int>(std::min<int64_t>({most, std::max<int64_t>(work, 2), kMostStages}));
    if (plan.stages < 2) return;
    plan.shared_bytes = shared_bytes(plan, a.rows);
    plan.teams = static_cast<int>(std::min<int64_t>(divide_up(tiles, plan.across), count / team));
    if (plan.teams == 0 || !plan_fits(a, plan)) return;
    const void* const kernel = find_kernel(plan, a.swiglu);
    if (taken(allow_shared(kernel)) != cudaSuccess) return;
    const Launch launch(plan.teams * team / cluster, cluster, warps_of(plan, a.rows), plan.shared_bytes, false,
                        nullptr);
    plan.teams = std::min(plan.teams, resident_clusters(launch, kernel, cluster, count) * cluster / team);
    if (plan.teams == 0) return;
    plan.predicted_us = predict(a, plan);
    plans.push_back(plan);
  };
  for (plan.columns = kColumnStep; plan.columns <= kMostColumns; plan.columns += kColumnStep) {
    for (plan.across = 1; plan.across <= kMostTeam; plan.across *= 2) {
      for (plan.along = 1; plan.along * plan.across <= kMostTeam && plan.along <= divide_up(a.rows, kGroupRows);
           ++plan.along) {
        for (const bool clustered : {false, true}) {
          plan.clustered = clustered;
          for (plan.slabs = 1; plan.slabs <= 4; plan.slabs *= 2) try_plan();
        }
      }
    }
  }
  return plans;
}

cudaError_t skinny_gemm_wgmma(const SkinnyGemmArgs& a, const SkinnyWgmmaPlan& plan, cudaStream_t stream) {
  if (!skinny_gemm_wgmma_supported(a) || !plan_fits(a, plan)) return cudaErrorInvalidValue;
  const void* const kernel = find_kernel(plan, a.swiglu);
  SkinnyGemmWgmmaParams params;
  params.groups = groups_of(plan, a.rows);
  params.x_share = plan.clustered ? plan.across : 1;
  params.w_share = plan.clustered ? plan.along : 1;
  params.block_rows = block_rows(plan, a.rows);
  params.x_box = params.block_rows / params.x_share;
  params.w_box = y_columns(plan, a.swiglu) / params.w_share;
  if (!encode(&params.x_map, a.x, a.rows, a.in, a.x_stride, params.x_box) ||
      !encode(&params.w_map, a.weight, weight_rows(a), a.in, a.weight_stride, params.w_box)) {
    return cudaErrorInvalidValue;
  }
  params.y = static_cast<__nv_bfloat16*>(a.y);
  params.bias = static_cast<const __nv_bfloat16*>(a.bias);
  params.rows = static_cast<int>(a.rows);
  params.out = static_cast<int>(a.out);
  params.weight_rows = static_cast<int>(weight_rows(a));
  params.tiles = static_cast<int>(divide_up(a.out, y_columns(plan, a.swiglu)));
  params.across = plan.across;
  params.along = plan.along;
  params.stages_of_in = static_cast<int>(a.in / kSlab / plan.slabs);
  params.stages = plan.stages;
  const cudaError_t error = allow_shared(kernel);
  if (error != cudaSuccess) return taken(error);
  const int team = plan.across * plan.along, cluster = plan.clustered ? team : 1;
  const Launch launch(plan.teams * team / cluster, cluster, warps_of(plan, a.rows), plan.shared_bytes, a.overlap,
                      stream);
  void* arguments[] = {&params};
  return taken(cudaLaunchKernelExC(&launch.config, kernel, arguments));
}

}  // namespace trireme::cuda
