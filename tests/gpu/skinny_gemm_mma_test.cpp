// Skinny GEMM by mma: our kernel has the bits of cublasLt's row-exact GEMM, for every number of rows, every way of
// cutting the work, with bias, with strided rows, with the activation fused in, and with launches that overlap.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"
#include "tests/gpu/skinny_gemm.h"
#include "trainer/ops/cuda/gemm/gemm_choice.h"

namespace trireme {
namespace {

using cuda::SkinnyGemmArgs;
using testing::args_of, testing::by_library, testing::differing, testing::gpu_randn, testing::Limit, testing::Shape;

const std::vector<int64_t> kRows = {1,  2,  3,  5,  7,  8,  9,  12, 15, 16, 17, 23, 24,
                                    31, 32, 33, 39, 40, 47, 48, 49, 56, 57, 63, 64, 65};

struct Mma {
  using Plan = cuda::SkinnyMmaPlan;
  static std::vector<Plan> plans(const SkinnyGemmArgs& args) { return cuda::skinny_gemm_mma_plans(args); }
  static cudaError_t launch(const SkinnyGemmArgs& args, const Plan& plan, cudaStream_t stream) {
    return cuda::skinny_gemm_mma(args, plan, stream);
  }
  static void fewest_blocks(Plan& plan) { plan.clusters = 1; }
  static std::string text(const Plan& p) {
    return "columns " + std::to_string(p.columns) + " / " + std::to_string(p.fragments) + ", cluster " +
           std::to_string(p.cluster) + " x " + std::to_string(p.clusters) + ", slabs " + std::to_string(p.slabs) +
           ", stages " + std::to_string(p.stages) + ", " + std::to_string(p.shared_bytes) + " bytes";
  }
};

class SkinnyGemmMma : public testing::GpuTest {};
class SkinnyGemmMmaShapes : public testing::GpuTest, public ::testing::WithParamInterface<Shape> {};
INSTANTIATE_TEST_SUITE_P(Shapes, SkinnyGemmMmaShapes, ::testing::ValuesIn(testing::kShapes));
INSTANTIATE_TEST_SUITE_P(Head, SkinnyGemmMmaShapes, ::testing::Values(Shape{151936, 2048}));

TEST_P(SkinnyGemmMmaShapes, BitsAreThoseOfTheLibraryForEveryNumberOfRows) {
  const at::NoGradGuard no_grad;
  const auto [out, in] = GetParam();
  testing::seed_gpu(1);
  const at::Tensor x = gpu_randn({1024, in}), weight = gpu_randn({out, in}, 0.05), bias = gpu_randn({out});
  const at::Tensor whole = by_library(x, weight, {}), whole_biased = by_library(x, weight, bias);
  const Limit most(cuda::kMostMmaRows);
  for (const int64_t rows : kRows) {
    for (const int64_t from : {int64_t{0}, 1024 - rows}) {
      const at::Tensor part = x.narrow(0, from, rows);
      const at::Tensor buffer = at::empty({rows, out}, x.options());
      ASSERT_EQ(cuda::skinny_gemm_mma_supported(args_of(part, weight, bias, buffer)), rows <= cuda::kMostMmaRows);
      EXPECT_EQ(differing(cuda::linear_forward(part, weight, {}), whole.narrow(0, from, rows)), 0)
          << rows << " rows from " << from;
      EXPECT_EQ(differing(cuda::linear_forward(part, weight, bias), whole_biased.narrow(0, from, rows)), 0)
          << rows << " rows from " << from << ", with bias";
    }
  }
  // And the library itself, where it takes the place of the kernel.
  for (const int64_t rows : {int64_t{1}, int64_t{16}, int64_t{64}}) {
    EXPECT_EQ(differing(by_library(x.narrow(0, 0, rows), weight, bias), whole_biased.narrow(0, 0, rows)), 0);
  }
}

// Numbers whose sums round differently in any other order, zeros of both signs, huge and tiny ones.
TEST_F(SkinnyGemmMma, BitsHoldForUnevenNumbers) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(2);
  const int64_t out = 1024, in = 4096;
  const auto uneven = [&](at::IntArrayRef shape) {
    const at::Tensor scale =
        at::exp2(at::randint(-12, 12, shape, at::TensorOptions().device(testing::gpu()).dtype(at::kFloat)));
    const at::Tensor keep = at::randint(0, 4, shape, at::TensorOptions().device(testing::gpu())).ne(0);
    return gpu_randn(shape, 1.0, at::kFloat).mul(scale).mul(keep).to(at::kBFloat16);
  };
  const at::Tensor x = uneven({256, in}), weight = uneven({out, in});
  const at::Tensor whole = by_library(x, weight, {});
  const Limit most(cuda::kMostMmaRows);
  for (const int64_t rows : {1, 16, 40, 64}) {
    EXPECT_EQ(differing(cuda::linear_forward(x.narrow(0, 0, rows), weight, {}), whole.narrow(0, 0, rows)), 0) << rows;
  }
  // One row that is not finite stays alone.
  at::Tensor broken = x.narrow(0, 0, 24).clone();
  broken[3].fill_(std::numeric_limits<double>::infinity());
  broken[19].fill_(std::numeric_limits<double>::quiet_NaN());
  const at::Tensor got = cuda::linear_forward(broken, weight, {});
  for (const int64_t row : {0, 2, 4, 18, 20, 23}) EXPECT_EQ(differing(got[row], whole[row]), 0) << row;
}

TEST_F(SkinnyGemmMma, EveryPlanGivesTheSameBitsAndWritesNothingElse) {
  testing::expect_bits_of_every_plan<Mma>(64, {3, 16, 40, 61});
}

TEST_F(SkinnyGemmMma, EveryPlanOfTheFusedActivationGivesTheUnfusedBits) {
  testing::expect_unfused_bits_of_every_fused_plan<Mma>(64, {1, 16, 40, 61}, /*fewest_blocks_too=*/false);
}

TEST_F(SkinnyGemmMma, FusedActivationOfRealShapes) {  // the last two: the unfused path
  testing::expect_unfused_bits_of_real_shapes(cuda::kMostMmaRows, 200, {1, 8, 16, 17, 33, 64, 65, 200});
}

TEST_F(SkinnyGemmMma, RowsMayBeStridedAndOffsetAndOddShapesFallBack) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(6);
  const at::Tensor wide = gpu_randn({70, 3 * 1024 + 16}), weight = gpu_randn({520, 1024}, 0.05);
  const Limit most(cuda::kMostMmaRows);
  for (const int64_t column : {0, 8, 1024, 2056, 4, 3}) {  // the last two are not multiples of 16 bytes
    const at::Tensor x = wide.narrow(1, column, 1024);
    const at::Tensor expected = by_library(x.contiguous(), weight, {});
    for (const int64_t rows : {1, 16, 70}) {
      EXPECT_EQ(differing(cuda::linear_forward(x.narrow(0, 0, rows), weight, {}), expected.narrow(0, 0, rows)), 0)
          << "column " << column << ", " << rows << " rows";
    }
  }
  // A weight that is part of a larger one.
  const at::Tensor all = gpu_randn({520, 2048}, 0.05), half = all.narrow(1, 1024, 1024);
  const at::Tensor x = wide.narrow(1, 0, 1024).narrow(0, 0, 16);
  EXPECT_EQ(differing(cuda::linear_forward(x, half, {}), by_library(x, half.contiguous(), {})), 0);
  // `in` of no whole slabs: not ours.
  const at::Tensor odd_x = gpu_randn({16, 72}), odd_weight = gpu_randn({64, 72});
  EXPECT_FALSE(cuda::skinny_gemm_mma_supported(args_of(odd_x, odd_weight, {}, at::empty({16, 64}, odd_x.options()))));
  EXPECT_EQ(differing(cuda::linear_forward(odd_x, odd_weight, {}), by_library(odd_x, odd_weight, {})), 0);
}

TEST_F(SkinnyGemmMma, PlansThatDoNotFitAreRefused) {
  const at::Tensor x = gpu_randn({16, 1024}), weight = gpu_randn({512, 1024});
  const at::Tensor y = at::empty({16, 512}, x.options());
  const SkinnyGemmArgs args = args_of(x, weight, {}, y);
  using Plan = Mma::Plan;
  const auto refused = [&](auto change) { return testing::refused<Mma>(args, change); };
  EXPECT_TRUE(refused([](Plan& p) { p.columns = 24; }));
  EXPECT_TRUE(refused([](Plan& p) { p.cluster = 3; }));
  EXPECT_TRUE(refused([](Plan& p) { p.clusters = 0; }));
  EXPECT_TRUE(refused([](Plan& p) { p.stages = 1; }));
  EXPECT_TRUE(refused([](Plan& p) { p.tokens = 3; }));
  EXPECT_TRUE(refused([](Plan& p) { p.shared_bytes += 16; }));
  EXPECT_FALSE(refused([](Plan&) {}));
  c10::cuda::device_synchronize();
  EXPECT_THROW(cuda::set_own_rows_limit(cuda::kMostOwnRows + 1), Error);
}

// GEMMs that follow one another in a graph, each reading what the one before wrote, with other kernels between.
// Overlapping launches read weights early; what they must not read early are rows. Buffers come back to the allocator,
// so that outputs lie where earlier inputs did.
TEST_F(SkinnyGemmMma, OverlappingLaunchesInAGraphGiveTheSameBits) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(7);
  const testing::GemmLayers layers(2048, 6144, 6);
  for (const int64_t rows : {1, 16, 64}) {
    const at::Tensor x = gpu_randn({rows, 2048});
    EXPECT_EQ(differing(layers.run(x), layers.by_library(x)), 0) << rows << " rows, one launch after another";
    testing::expect_bits_from_graph(layers, rows);
  }
}

}  // namespace
}  // namespace trireme
