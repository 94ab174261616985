// Skinny GEMM by wgmma, 33 to 256 rows: our kernel has the bits of cublasLt's row-exact GEMM, for every number of rows,
// every way of cutting the work, with bias, with strided rows, with the activation fused in, and with launches that
// overlap.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/gpu/skinny_gemm.h"
#include "trainer/ops/cuda/gemm/gemm_choice.h"
#include "trainer/ops/cuda/gemm/skinny_gemm_wgmma.h"

namespace trireme {
namespace {

using cuda::SkinnyGemmArgs;
using testing::args_of, testing::by_library, testing::differing, testing::gpu_randn, testing::Limit, testing::Shape;

struct Wgmma {
  using Plan = cuda::SkinnyWgmmaPlan;
  static std::vector<Plan> plans(const SkinnyGemmArgs& args) { return cuda::skinny_gemm_wgmma_plans(args); }
  static cudaError_t launch(const SkinnyGemmArgs& args, const Plan& plan, cudaStream_t stream) {
    return cuda::skinny_gemm_wgmma(args, plan, stream);
  }
  static void fewest_blocks(Plan& plan) { plan.teams = 1; }
  static std::string text(const Plan& p) {
    return "columns " + std::to_string(p.columns) + ", across " + std::to_string(p.across) + ", along " +
           std::to_string(p.along) + (p.clustered ? ", clusters " : ", teams ") + std::to_string(p.teams) + ", slabs " +
           std::to_string(p.slabs) + ", stages " + std::to_string(p.stages) + ", " + std::to_string(p.shared_bytes) +
           " bytes";
  }
};

class SkinnyGemmWgmma : public testing::GpuTest {};
class SkinnyGemmWgmmaShapes : public testing::GpuTest, public ::testing::WithParamInterface<Shape> {};
INSTANTIATE_TEST_SUITE_P(Shapes, SkinnyGemmWgmmaShapes, ::testing::ValuesIn(testing::kShapes));

// The ten most promising plans, of all those that decoding may come to use.
TEST_P(SkinnyGemmWgmmaShapes, BitsAreThoseOfTheLibraryForEveryNumberOfRows) {
  const at::NoGradGuard no_grad;
  const auto [out, in] = GetParam();
  testing::seed_gpu(1);
  const at::Tensor x = gpu_randn({1024, in}), weight = gpu_randn({out, in}, 0.05), bias = gpu_randn({out});
  const at::Tensor whole = by_library(x, weight, {}), whole_biased = by_library(x, weight, bias);
  for (const int64_t rows : {1, 31, 33, 48, 63, 64, 65, 96, 127, 128, 129, 160, 192, 193, 200, 255, 256}) {
    for (const int64_t from : {int64_t{0}, 1024 - rows}) {
      const at::Tensor part = x.narrow(0, from, rows);
      std::vector<Wgmma::Plan> plans = cuda::skinny_gemm_wgmma_plans(args_of(part, weight, bias, whole, false));
      ASSERT_FALSE(plans.empty());
      std::sort(plans.begin(), plans.end(),
                [](const auto& a, const auto& b) { return a.predicted_us < b.predicted_us; });
      plans.resize(std::min<size_t>(plans.size(), 10));
      for (const Wgmma::Plan& plan : plans) {
        int64_t outside = -1;
        ASSERT_EQ(differing(testing::by_plan<Wgmma>(part, weight, bias, plan, false, &outside),
                            whole_biased.narrow(0, from, rows)),
                  0)
            << rows << " rows from " << from << ": " << Wgmma::text(plan);
        ASSERT_EQ(outside, 0) << Wgmma::text(plan);
      }
      int64_t outside = -1;
      EXPECT_EQ(
          differing(testing::by_plan<Wgmma>(part, weight, {}, plans[0], false, &outside), whole.narrow(0, from, rows)),
          0)
          << rows << " rows from " << from;
    }
  }
}

TEST_F(SkinnyGemmWgmma, EveryPlanGivesTheSameBitsAndWritesNothingElse) {
  testing::expect_bits_of_every_plan<Wgmma>(256, {3, 61, 100, 188, 256});
}

TEST_F(SkinnyGemmWgmma, EveryPlanOfTheFusedActivationGivesTheUnfusedBits) {
  testing::expect_unfused_bits_of_every_fused_plan<Wgmma>(256, {1, 61, 100, 188, 256}, /*fewest_blocks_too=*/true);
}

TEST_F(SkinnyGemmWgmma, RowsAndWeightsMayBeParts) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(8);
  const at::Tensor wide = gpu_randn({256, 3 * 1024 + 16}), all = gpu_randn({520, 2048}, 0.05);
  for (const int64_t column : {0, 8, 1024, 2056}) {
    const at::Tensor x = wide.narrow(1, column, 1024), weight = all.narrow(1, 1024, 1024);
    const at::Tensor expected = by_library(x.contiguous(), weight.contiguous(), {});
    SCOPED_TRACE("column " + std::to_string(column));
    ASSERT_NO_FATAL_FAILURE(
        testing::expect_bits_of_every_plan<Wgmma>(x, weight, {}, expected, {40, 130, 256}, false, false));
  }
}

TEST_F(SkinnyGemmWgmma, FusedActivationOfRealShapes) {  // the last two: the library's
  testing::expect_unfused_bits_of_real_shapes(cuda::kMostOwnRows, 300, {65, 128, 129, 200, 256, 257, 300});
}

TEST_F(SkinnyGemmWgmma, NumbersThatAreNotFiniteStayInTheirRow) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(6);
  const at::Tensor x = gpu_randn({150, 1024}), weight = gpu_randn({520, 1024}, 0.05);
  const at::Tensor whole = by_library(x, weight, {});
  at::Tensor broken = x.clone();
  broken[3].fill_(std::numeric_limits<double>::infinity());
  broken[119].fill_(std::numeric_limits<double>::quiet_NaN());
  const Limit most(cuda::kMostOwnRows);
  const at::Tensor got = cuda::linear_forward(broken, weight, {});
  for (const int64_t row : {0, 2, 4, 118, 120, 149}) EXPECT_EQ(differing(got[row], whole[row]), 0) << row;
}

TEST_F(SkinnyGemmWgmma, PlansThatDoNotFitAreRefused) {
  const at::Tensor x = gpu_randn({100, 1024}), weight = gpu_randn({512, 1024});
  const at::Tensor y = at::empty({100, 512}, x.options());
  const SkinnyGemmArgs args = args_of(x, weight, {}, y, false);
  using Plan = Wgmma::Plan;
  const auto refused = [&](auto change) { return testing::refused<Wgmma>(args, change); };
  EXPECT_TRUE(refused([](Plan& p) { p.columns = 24; }));
  EXPECT_TRUE(refused([](Plan& p) { p.across = 3; }));
  EXPECT_TRUE(refused([](Plan& p) { p.along = 0; }));
  EXPECT_TRUE(refused([](Plan& p) { p.teams = 0; }));
  EXPECT_TRUE(refused([](Plan& p) { p.stages = 1; }));
  EXPECT_TRUE(refused([](Plan& p) { p.shared_bytes -= 16; }));
  EXPECT_FALSE(refused([](Plan&) {}));
  c10::cuda::device_synchronize();
}

// Launches that begin early by many plans: straight after a GEMM and behind another short kernel. They read weights
// early; rows they must not, and results lie where earlier rows did.
TEST_F(SkinnyGemmWgmma, EarlyLaunchesOfManyPlansGiveTheSameBits) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(9);
  constexpr size_t kTurns = 40;  // over the plans of each GEMM, from the first to the last
  const testing::GemmLayers layers(1024, 2048, 3);
  for (const int64_t rows : {48, 128, 200, 256}) {
    const at::Tensor x = gpu_randn({rows, 1024}), expected = layers.by_library(x);
    for (size_t turn = 0; turn < kTurns; ++turn) {
      const at::Tensor y = layers.run(x, [&](const at::Tensor& in, const at::Tensor& weight, bool swiglu) {
        const at::Tensor out = at::empty({in.size(0), swiglu ? weight.size(0) / 2 : weight.size(0)}, in.options());
        SkinnyGemmArgs args = args_of(in, weight, {}, out, swiglu);
        args.overlap = true;
        const std::vector<Wgmma::Plan> plans = cuda::skinny_gemm_wgmma_plans(args);
        const Wgmma::Plan& plan = plans.at(turn * plans.size() / kTurns);
        EXPECT_EQ(cuda::skinny_gemm_wgmma(args, plan, c10::cuda::getCurrentCUDAStream().stream()), cudaSuccess)
            << Wgmma::text(plan);
        return out;
      });
      ASSERT_EQ(differing(y, expected), 0) << rows << " rows, turn " << turn;
    }
  }
}

// As SkinnyGemmMma.OverlappingLaunchesInAGraphGiveTheSameBits, by the kernels that decoding chooses.
TEST_F(SkinnyGemmWgmma, OverlappingLaunchesInAGraphGiveTheSameBits) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(7);
  const testing::GemmLayers layers(2048, 6144, 4);
  for (const int64_t limit : {cuda::kMostOwnRows, cuda::kWherePaid}) {
    const Limit some(limit);
    for (const int64_t rows : {48, 64, 128, 192, 256}) testing::expect_bits_from_graph(layers, rows);
  }
}

}  // namespace
}  // namespace trireme
