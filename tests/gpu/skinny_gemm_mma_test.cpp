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
using cuda::SkinnyMmaPlan;
using testing::args_of, testing::by_library, testing::differing, testing::gpu_randn, testing::Limit, testing::Shape;

const std::vector<int64_t> kRows = {1,  2,  3,  5,  7,  8,  9,  12, 15, 16, 17, 23, 24,
                                    31, 32, 33, 39, 40, 47, 48, 49, 56, 57, 63, 64, 65};

std::string text(const SkinnyMmaPlan& p) {
  return "columns " + std::to_string(p.columns) + " / " + std::to_string(p.fragments) + ", cluster " +
         std::to_string(p.cluster) + " x " + std::to_string(p.clusters) + ", slabs " + std::to_string(p.slabs) +
         ", stages " + std::to_string(p.stages) + ", " + std::to_string(p.shared_bytes) + " bytes";
}

at::Tensor by_plan(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const SkinnyMmaPlan& plan,
                   bool swiglu, int64_t* outside) {
  return testing::guarded(
      x, weight, bias, swiglu,
      [&](const SkinnyGemmArgs& args, cudaStream_t stream) { return cuda::skinny_gemm_mma(args, plan, stream); },
      outside);
}

class SkinnyGemmMma : public testing::GpuTest {};
class SkinnyGemmMmaShapes : public testing::GpuTest, public ::testing::WithParamInterface<Shape> {};
INSTANTIATE_TEST_SUITE_P(Shapes, SkinnyGemmMmaShapes,
                         ::testing::Values(Shape{6144, 4096}, Shape{4096, 4096}, Shape{28672, 4096}, Shape{4096, 14336},
                                           Shape{128256, 4096}, Shape{4096, 2048}, Shape{2048, 2048},
                                           Shape{12288, 2048}, Shape{2048, 6144}, Shape{151936, 2048},
                                           Shape{1536, 1536}, Shape{200, 512}, Shape{8, 64}, Shape{1000, 192}));

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
  const at::NoGradGuard no_grad;
  testing::seed_gpu(3);
  size_t tried = 0;
  for (const auto& [out, in] : {Shape{1704, 1024}, Shape{200, 512}, Shape{5000, 320}}) {
    const at::Tensor x = gpu_randn({64, in}), weight = gpu_randn({out, in}, 0.05), bias = gpu_randn({out});
    const at::Tensor whole = by_library(x, weight, bias);
    for (const int64_t rows : {3, 16, 40, 61}) {
      const at::Tensor part = x.narrow(0, 0, rows);
      const std::vector<SkinnyMmaPlan> plans = cuda::skinny_gemm_mma_plans(args_of(part, weight, bias, whole));
      EXPECT_FALSE(plans.empty());
      for (SkinnyMmaPlan plan : plans) {
        for (const bool one_cluster : {false, true}) {  // as few blocks as can be: every tile one after another
          if (one_cluster) plan.clusters = 1;
          int64_t outside = -1;
          const at::Tensor y = by_plan(part, weight, bias, plan, false, &outside);
          ASSERT_EQ(differing(y, whole.narrow(0, 0, rows)), 0)
              << rows << " rows, " << Shape{out, in} << ": " << text(plan);
          ASSERT_EQ(outside, 0) << text(plan);
          ++tried;
        }
      }
    }
  }
  EXPECT_GT(tried, 1000u);
}

TEST_F(SkinnyGemmMma, EveryPlanOfTheFusedActivationGivesTheUnfusedBits) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(4);
  for (const auto& [width, in] : {Shape{856, 1024}, Shape{104, 512}}) {
    const at::Tensor x = gpu_randn({64, in}, 2.0), weight = gpu_randn({2 * width, in}, 0.1);
    const at::Tensor whole = cuda::swiglu_halves(by_library(x, weight, {}));
    for (const int64_t rows : {1, 16, 40, 61}) {
      const at::Tensor part = x.narrow(0, 0, rows);
      const std::vector<SkinnyMmaPlan> plans = cuda::skinny_gemm_mma_plans(args_of(part, weight, {}, whole, true));
      EXPECT_FALSE(plans.empty());
      for (const SkinnyMmaPlan& plan : plans) {
        int64_t outside = -1;
        const at::Tensor y = by_plan(part, weight, {}, plan, true, &outside);
        ASSERT_EQ(differing(y, whole.narrow(0, 0, rows)), 0) << rows << " rows, width " << width << ": " << text(plan);
        ASSERT_EQ(outside, 0) << text(plan);
      }
    }
  }
}

TEST_F(SkinnyGemmMma, FusedActivationOfRealShapes) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(5);
  for (const auto& [width, in] : {Shape{14336, 4096}, Shape{6144, 2048}, Shape{12288, 4096}}) {
    const at::Tensor x = gpu_randn({200, in}), weight = gpu_randn({2 * width, in}, 0.03);
    const at::Tensor whole = cuda::swiglu_halves(by_library(x, weight, {}));
    const Limit most(cuda::kMostMmaRows);
    for (const int64_t rows : {1, 8, 16, 17, 33, 64, 65, 200}) {  // the last two: the unfused path
      EXPECT_EQ(differing(cuda::gate_up_swiglu(x.narrow(0, 0, rows), weight), whole.narrow(0, 0, rows)), 0)
          << rows << " rows, width " << width;
    }
  }
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
  const SkinnyMmaPlan good = cuda::skinny_gemm_mma_plans(args).front();
  const auto refused = [&](auto change) {
    SkinnyMmaPlan plan = good;
    change(plan);
    return cuda::skinny_gemm_mma(args, plan, c10::cuda::getCurrentCUDAStream().stream()) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refused([](SkinnyMmaPlan& p) { p.columns = 24; }));
  EXPECT_TRUE(refused([](SkinnyMmaPlan& p) { p.cluster = 3; }));
  EXPECT_TRUE(refused([](SkinnyMmaPlan& p) { p.clusters = 0; }));
  EXPECT_TRUE(refused([](SkinnyMmaPlan& p) { p.stages = 1; }));
  EXPECT_TRUE(refused([](SkinnyMmaPlan& p) { p.tokens = 3; }));
  EXPECT_TRUE(refused([](SkinnyMmaPlan& p) { p.shared_bytes += 16; }));
  EXPECT_FALSE(refused([](SkinnyMmaPlan&) {}));
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
