// Products of 33 to 256 rows: our kernel has the bits of cublasLt's row-exact product, for every number of rows, every
// way of cutting the work, with bias, with strided rows, with the activation fused in, and with launches that overlap.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "tests/gpu/device.h"
#include "trainer/ops/cuda/linear.h"
#include "trainer/ops/cuda/medium_rows.h"
#include "trainer/ops/cuda/product_choice.h"
#include "trainer/ops/cuda/row_ops.h"

namespace trireme {
namespace {

using cuda::MediumRowsPlan;
using cuda::RowProductArgs;
using testing::gpu;
using testing::gpu_randn;

struct Shape {
  int64_t out, in;
};
std::ostream& operator<<(std::ostream& to, const Shape& s) { return to << s.out << "x" << s.in; }

int64_t differing(const at::Tensor& a, const at::Tensor& b) {
  return a.contiguous().view(at::kShort).ne(b.contiguous().view(at::kShort)).sum().item<int64_t>();
}

class Limit final {
 public:
  explicit Limit(int64_t rows) : before_(cuda::own_rows_limit()) { cuda::set_own_rows_limit(rows); }
  ~Limit() { cuda::set_own_rows_limit(before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  int64_t before_;
};

at::Tensor by_library(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const Limit none(0);
  return cuda::linear_forward(x, weight, bias);
}

RowProductArgs args_of(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& y,
                       bool swiglu) {
  RowProductArgs args;
  args.x = x.const_data_ptr();
  args.x_stride = x.stride(0);
  args.weight = weight.const_data_ptr();
  args.weight_stride = weight.stride(0);
  args.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  args.y = y.mutable_data_ptr();
  args.rows = x.size(0);
  args.in = x.size(1);
  args.out = swiglu ? weight.size(0) / 2 : weight.size(0);
  args.swiglu = swiglu;
  return args;
}

std::string text(const MediumRowsPlan& p) {
  return "columns " + std::to_string(p.columns) + ", across " + std::to_string(p.across) + ", along " +
         std::to_string(p.along) + (p.clustered ? ", clusters " : ", teams ") + std::to_string(p.teams) + ", stages " +
         std::to_string(p.stages) + ", " + std::to_string(p.shared_bytes) + " bytes";
}

// Our kernel into the middle of a larger buffer; `outside` gets the number of elements changed around the result.
at::Tensor by_plan(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const MediumRowsPlan& plan,
                   bool swiglu, int64_t* outside) {
  const int64_t out = swiglu ? weight.size(0) / 2 : weight.size(0), rows = x.size(0);
  constexpr int64_t kGuardRows = 300;
  const at::Tensor buffer =
      at::full({rows + 2 * kGuardRows, out}, -77.0, at::TensorOptions().device(gpu()).dtype(at::kBFloat16));
  const at::Tensor y = buffer.narrow(0, kGuardRows, rows);
  const cudaError_t error =
      cuda::medium_rows(args_of(x, weight, bias, y, swiglu), plan, c10::cuda::getCurrentCUDAStream().stream());
  EXPECT_EQ(error, cudaSuccess) << cudaGetErrorString(error) << ": " << text(plan);
  c10::cuda::device_synchronize();
  const auto changed = [&](int64_t from) { return buffer.narrow(0, from, kGuardRows).ne(-77.0).sum().item<int64_t>(); };
  *outside = changed(0) + changed(kGuardRows + rows);
  return y;
}

class MediumRows : public testing::GpuTest {};
class MediumRowsShapes : public testing::GpuTest, public ::testing::WithParamInterface<Shape> {};
INSTANTIATE_TEST_SUITE_P(Shapes, MediumRowsShapes,
                         ::testing::Values(Shape{6144, 4096}, Shape{4096, 4096}, Shape{28672, 4096}, Shape{4096, 14336},
                                           Shape{128256, 4096}, Shape{4096, 2048}, Shape{2048, 2048},
                                           Shape{12288, 2048}, Shape{2048, 6144}, Shape{1536, 1536}, Shape{200, 512},
                                           Shape{8, 64}, Shape{1000, 192}));

// The ten most promising plans, of all those that decoding may come to use.
TEST_P(MediumRowsShapes, BitsAreThoseOfTheLibraryForEveryNumberOfRows) {
  const at::NoGradGuard no_grad;
  const auto [out, in] = GetParam();
  testing::seed_gpu(1);
  const at::Tensor x = gpu_randn({1024, in}), weight = gpu_randn({out, in}, 0.05), bias = gpu_randn({out});
  const at::Tensor whole = by_library(x, weight, {}), whole_biased = by_library(x, weight, bias);
  for (const int64_t rows : {1, 31, 33, 48, 63, 64, 65, 96, 127, 128, 129, 160, 192, 193, 200, 255, 256}) {
    for (const int64_t from : {int64_t{0}, 1024 - rows}) {
      const at::Tensor part = x.narrow(0, from, rows);
      std::vector<MediumRowsPlan> plans = cuda::medium_rows_plans(args_of(part, weight, bias, whole, false));
      ASSERT_FALSE(plans.empty());
      std::sort(plans.begin(), plans.end(),
                [](const auto& a, const auto& b) { return a.predicted_us < b.predicted_us; });
      plans.resize(std::min<size_t>(plans.size(), 10));
      for (const MediumRowsPlan& plan : plans) {
        int64_t outside = -1;
        ASSERT_EQ(differing(by_plan(part, weight, bias, plan, false, &outside), whole_biased.narrow(0, from, rows)), 0)
            << rows << " rows from " << from << ": " << text(plan);
        ASSERT_EQ(outside, 0) << text(plan);
      }
      int64_t outside = -1;
      EXPECT_EQ(differing(by_plan(part, weight, {}, plans[0], false, &outside), whole.narrow(0, from, rows)), 0)
          << rows << " rows from " << from;
    }
  }
}

TEST_F(MediumRows, EveryPlanGivesTheSameBitsAndWritesNothingElse) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(3);
  size_t tried = 0;
  for (const auto& [out, in] : {Shape{1704, 1024}, Shape{200, 512}, Shape{5000, 320}}) {
    const at::Tensor x = gpu_randn({256, in}), weight = gpu_randn({out, in}, 0.05), bias = gpu_randn({out});
    const at::Tensor whole = by_library(x, weight, bias);
    for (const int64_t rows : {3, 61, 100, 188, 256}) {
      const at::Tensor part = x.narrow(0, 0, rows);
      for (MediumRowsPlan plan : cuda::medium_rows_plans(args_of(part, weight, bias, whole, false))) {
        for (const bool one_cluster : {false, true}) {  // as few blocks as can be: every tile one after another
          if (one_cluster) plan.teams = 1;
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

TEST_F(MediumRows, EveryPlanOfTheFusedActivationGivesTheUnfusedBits) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(4);
  for (const auto& [width, in] : {Shape{856, 1024}, Shape{104, 512}}) {
    const at::Tensor x = gpu_randn({256, in}, 2.0), weight = gpu_randn({2 * width, in}, 0.1);
    const at::Tensor whole = cuda::swiglu_halves(by_library(x, weight, {}));
    for (const int64_t rows : {1, 61, 100, 188, 256}) {
      const at::Tensor part = x.narrow(0, 0, rows);
      const std::vector<MediumRowsPlan> plans = cuda::medium_rows_plans(args_of(part, weight, {}, whole, true));
      EXPECT_FALSE(plans.empty());
      for (MediumRowsPlan plan : plans) {
        for (const bool one_team : {false, true}) {
          if (one_team) plan.teams = 1;
          int64_t outside = -1;
          const at::Tensor y = by_plan(part, weight, {}, plan, true, &outside);
          ASSERT_EQ(differing(y, whole.narrow(0, 0, rows)), 0)
              << rows << " rows, width " << width << ": " << text(plan);
          ASSERT_EQ(outside, 0) << text(plan);
        }
      }
    }
  }
}

TEST_F(MediumRows, RowsAndWeightsMayBeParts) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(8);
  const at::Tensor wide = gpu_randn({256, 3 * 1024 + 16}), all = gpu_randn({520, 2048}, 0.05);
  for (const int64_t column : {0, 8, 1024, 2056}) {
    const at::Tensor x = wide.narrow(1, column, 1024), weight = all.narrow(1, 1024, 1024);
    const at::Tensor expected = by_library(x.contiguous(), weight.contiguous(), {});
    for (const int64_t rows : {40, 130, 256}) {
      const at::Tensor part = x.narrow(0, 0, rows);
      for (const MediumRowsPlan& plan : cuda::medium_rows_plans(args_of(part, weight, {}, expected, false))) {
        int64_t outside = -1;
        ASSERT_EQ(differing(by_plan(part, weight, {}, plan, false, &outside), expected.narrow(0, 0, rows)), 0)
            << "column " << column << ", " << rows << " rows: " << text(plan);
        ASSERT_EQ(outside, 0) << text(plan);
      }
    }
  }
}

TEST_F(MediumRows, FusedActivationOfRealShapes) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(5);
  for (const auto& [width, in] : {Shape{14336, 4096}, Shape{6144, 2048}, Shape{12288, 4096}}) {
    const at::Tensor x = gpu_randn({300, in}), weight = gpu_randn({2 * width, in}, 0.03);
    const at::Tensor whole = cuda::swiglu_halves(by_library(x, weight, {}));
    const Limit most(cuda::kMostOwnRows);
    for (const int64_t rows : {65, 128, 129, 200, 256, 257, 300}) {  // the last two: the library's
      EXPECT_EQ(differing(cuda::gate_up_swiglu(x.narrow(0, 0, rows), weight), whole.narrow(0, 0, rows)), 0)
          << rows << " rows, width " << width;
    }
  }
}

TEST_F(MediumRows, NumbersThatAreNotFiniteStayInTheirRow) {
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

TEST_F(MediumRows, PlansThatDoNotFitAreRefused) {
  const at::Tensor x = gpu_randn({100, 1024}), weight = gpu_randn({512, 1024});
  const at::Tensor y = at::empty({100, 512}, x.options());
  const RowProductArgs args = args_of(x, weight, {}, y, false);
  const MediumRowsPlan good = cuda::medium_rows_plans(args).front();
  const auto refused = [&](auto change) {
    MediumRowsPlan plan = good;
    change(plan);
    return cuda::medium_rows(args, plan, c10::cuda::getCurrentCUDAStream().stream()) == cudaErrorInvalidValue;
  };
  EXPECT_TRUE(refused([](MediumRowsPlan& p) { p.columns = 24; }));
  EXPECT_TRUE(refused([](MediumRowsPlan& p) { p.across = 3; }));
  EXPECT_TRUE(refused([](MediumRowsPlan& p) { p.along = 0; }));
  EXPECT_TRUE(refused([](MediumRowsPlan& p) { p.teams = 0; }));
  EXPECT_TRUE(refused([](MediumRowsPlan& p) { p.stages = 1; }));
  EXPECT_TRUE(refused([](MediumRowsPlan& p) { p.shared_bytes -= 16; }));
  EXPECT_FALSE(refused([](MediumRowsPlan&) {}));
  c10::cuda::device_synchronize();
}

// Launches that begin early, one plan after another: straight after a product and behind another short kernel. They
// read weights early; rows they must not, and results lie where earlier rows did.
TEST_F(MediumRows, EarlyLaunchesOfEveryPlanGiveTheSameBits) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(9);
  const int64_t hidden = 1024, width = 2048, layers = 3;
  std::vector<at::Tensor> in, gate_up, down;
  for (int64_t i = 0; i < layers; ++i) {
    in.push_back(gpu_randn({hidden, hidden}, 0.02));
    gate_up.push_back(gpu_randn({2 * width, hidden}, 0.02));
    down.push_back(gpu_randn({hidden, width}, 0.02));
  }
  const at::Tensor norm = at::ones({hidden}, in[0].options());
  using Product = std::function<at::Tensor(const at::Tensor&, const at::Tensor&, bool)>;
  const auto run = [&](at::Tensor x, const Product& product) {
    for (size_t i = 0; i < in.size(); ++i) {
      const at::Tensor a = product(x, in[i], false), b = product(a, in[i], false);
      const NormResult n = cuda::add_rms_norm(b, x, norm, 1e-6);
      x = product(product(n.normed, gate_up[i], true), down[i], false);
    }
    return x;
  };
  size_t tried = 0;
  for (const int64_t rows : {48, 128, 200, 256}) {
    const at::Tensor x = gpu_randn({rows, hidden});
    const at::Tensor expected = run(x, [](const at::Tensor& rows, const at::Tensor& weight, bool swiglu) {
      const at::Tensor y = by_library(rows, weight, {});
      return swiglu ? cuda::swiglu_halves(y) : y;
    });
    for (size_t turn = 0; turn < 40; ++turn) {  // the turn-th plan of each product, from the first again at the end
      const at::Tensor y = run(x, [&](const at::Tensor& rows, const at::Tensor& weight, bool swiglu) {
        const at::Tensor y = at::empty({rows.size(0), swiglu ? weight.size(0) / 2 : weight.size(0)}, rows.options());
        RowProductArgs args = args_of(rows, weight, {}, y, swiglu);
        args.overlap = true;
        const std::vector<MediumRowsPlan> plans = cuda::medium_rows_plans(args);
        const MediumRowsPlan& plan = plans[turn * plans.size() / 40];
        EXPECT_EQ(cuda::medium_rows(args, plan, c10::cuda::getCurrentCUDAStream().stream()), cudaSuccess) << text(plan);
        return y;
      });
      ASSERT_EQ(differing(y, expected), 0) << rows << " rows, turn " << turn;
      ++tried;
    }
  }
  EXPECT_EQ(tried, 160u);
}

// As FewRows.OverlappingLaunchesInAGraphGiveTheSameBits, by the kernels that decoding chooses.
TEST_F(MediumRows, OverlappingLaunchesInAGraphGiveTheSameBits) {
  const at::NoGradGuard no_grad;
  testing::seed_gpu(7);
  const int64_t hidden = 2048, width = 6144, layers = 4;
  std::vector<at::Tensor> in, gate_up, down;
  for (int64_t i = 0; i < layers; ++i) {
    in.push_back(gpu_randn({hidden, hidden}, 0.02));
    gate_up.push_back(gpu_randn({2 * width, hidden}, 0.02));
    down.push_back(gpu_randn({hidden, width}, 0.02));
  }
  const at::Tensor norm = at::ones({hidden}, in[0].options());
  const auto run = [&](at::Tensor x) {
    for (size_t i = 0; i < in.size(); ++i) {
      const at::Tensor a = cuda::linear_forward(x, in[i], {});  // straight after a product of ours
      const NormResult n = cuda::add_rms_norm(a, x, norm, 1e-6);
      x = cuda::linear_forward(cuda::gate_up_swiglu(n.normed, gate_up[i]), down[i], {});
    }
    return x;
  };
  for (const int64_t limit : {cuda::kMostOwnRows, cuda::kWherePaid}) {
    for (const int64_t rows : {48, 64, 128, 192, 256}) {
      const at::Tensor first = gpu_randn({rows, hidden}), second = gpu_randn({rows, hidden});
      at::Tensor expected_first, expected_second;
      {
        const Limit none(0);
        expected_first = run(first);
        expected_second = run(second);
      }
      const Limit some(limit);
      c10::cuda::device_synchronize();
      const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
      const at::Tensor x = first.clone();
      at::Tensor y;
      {
        const cuda::DecodeScope overlap;
        EXPECT_EQ(differing(run(x), expected_first), 0) << rows << " rows, overlapping, no graph";
        c10::cuda::device_synchronize();
      }
      at::cuda::CUDAGraph graph;
      {
        const cuda::DecodeScope overlap;
        graph.capture_begin();
        y = run(x);
        graph.capture_end();
      }
      for (int replay = 0; replay < 30; ++replay) {
        const bool odd = replay % 2 != 0;
        x.copy_(odd ? second : first);
        y.fill_(0.5);
        graph.replay();
        ASSERT_EQ(differing(y, odd ? expected_second : expected_first), 0) << rows << " rows, replay " << replay;
      }
      for (int replay = 0; replay < 20; ++replay) graph.replay();
      ASSERT_EQ(differing(y, expected_second), 0) << rows << " rows, replays back to back";
      c10::cuda::device_synchronize();
    }
  }
}

}  // namespace
}  // namespace trireme
