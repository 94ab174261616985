// Mixtures of experts on a device: grouped products against the plain one by memcmp, routing against the host's, the
// whole MLP and its gradients against the host in float64.
#include "trainer/ops/experts.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <numeric>

#include "tests/gpu/device.h"
#include "topology/combine_blocks.h"
#include "trainer/ops/cuda/experts/expert_kernels.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/expert_rows.h"

namespace trireme {
namespace {

at::TensorOptions on_device(at::ScalarType type = at::kBFloat16) {
  return at::TensorOptions().dtype(type).device(at::kCUDA, 0);
}

at::Tensor random(std::vector<int64_t> shape, double scale = 1.0) {
  return (at::randn(shape, on_device(at::kFloat)) * scale).to(at::kBFloat16);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && at::equal(a.view(at::kShort), b.view(at::kShort));
}

at::Tensor offsets_of(const std::vector<int64_t>& sizes) {
  std::vector<int32_t> offsets{0};
  for (const int64_t size : sizes) offsets.push_back(offsets.back() + static_cast<int32_t>(size));
  return at::tensor(offsets, at::TensorOptions().dtype(at::kInt)).to(on_device(at::kInt));
}

at::Tensor by_plain_products(const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> parts;
  const int64_t out = weight.size(0) / static_cast<int64_t>(sizes.size());
  int64_t first = 0;
  for (size_t e = 0; e < sizes.size(); ++e) {
    parts.push_back(
        cuda::linear_forward(x.narrow(0, first, sizes[e]), weight.narrow(0, static_cast<int64_t>(e) * out, out), {}));
    first += sizes[e];
  }
  return at::cat(parts);
}

class Groups : public ::testing::TestWithParam<std::vector<int64_t>> {};
INSTANTIATE_TEST_SUITE_P(Experts, Groups,
                         ::testing::Values(std::vector<int64_t>{1, 7, 0, 3}, std::vector<int64_t>{0, 0, 0, 5},
                                           std::vector<int64_t>{16, 0, 17, 1}, std::vector<int64_t>{64, 65, 1, 0},
                                           std::vector<int64_t>{0, 256, 0, 0}, std::vector<int64_t>{31, 32, 33, 200},
                                           std::vector<int64_t>{1000, 0, 7, 16},
                                           // As a list of what there is, and by looking for each item's expert.
                                           std::vector<int64_t>{0, 4096, 0, 0}, std::vector<int64_t>{0, 4097, 0, 0},
                                           std::vector<int64_t>{1, 64, 5000, 65}, std::vector<int64_t>{0, 0, 0, 4200},
                                           std::vector<int64_t>{3000, 0, 0, 2001}));

TEST_P(Groups, ProductsHaveTheBitsOfPlainOnes) {
  at::manual_seed(3);
  const std::vector<int64_t>& sizes = GetParam();
  const int64_t rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const int64_t most = *std::max_element(sizes.begin(), sizes.end());
  for (const auto& [in, width] : {std::pair<int64_t, int64_t>{2048, 768}, {768, 1024}, {1024, 384}, {128, 64}}) {
    const at::Tensor weight = random({4 * 2 * width, in}, 0.05), x = random({rows, in}), offsets = offsets_of(sizes);
    const at::Tensor expected = by_plain_products(x, weight, sizes);
    EXPECT_TRUE(same_bits(cuda::grouped_linear(x, weight, offsets, most), expected)) << in << " " << width;
    EXPECT_TRUE(same_bits(cuda::grouped_linear(x, weight, offsets, 100'000), expected)) << "by the library";
    EXPECT_TRUE(same_bits(cuda::grouped_gate_up_swiglu(x, weight, offsets, most), cuda::swiglu_halves(expected)));
  }
}

// The kernel itself, for every way to cut the work.
TEST_P(Groups, HowTheWorkIsCutShowsInNoBit) {
  at::manual_seed(4);
  const std::vector<int64_t>& sizes = GetParam();
  const int64_t rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const int64_t largest = *std::max_element(sizes.begin(), sizes.end());
  const at::Tensor weight = random({4 * 2048, 768}, 0.05), x = random({rows, 768}), offsets = offsets_of(sizes);
  const at::Tensor expected = by_plain_products(x, weight, sizes);
  for (const int64_t most : {16, 32, 64, 256}) {
    if (most < std::min<int64_t>(largest, 64)) continue;
    cuda::GroupedGemmArgs args;
    args.x = x.const_data_ptr();
    args.weight = weight.const_data_ptr();
    args.offsets = offsets.const_data_ptr<int32_t>();
    const at::Tensor y = at::zeros({rows, 2048}, x.options());
    args.y = y.mutable_data_ptr();
    args.rows = rows;
    args.experts = 4;
    args.in = 768;
    args.out = 2048;
    args.most = most;
    ASSERT_EQ(cuda::grouped_gemm(args, nullptr), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_TRUE(same_bits(y, expected)) << most;
  }
}

TEST(Experts, TheStartUpTestPasses) {
  EXPECT_TRUE(cuda::grouped_rows_are_exact(128, 2048, 768, at::Device(at::kCUDA, 0)));
  EXPECT_TRUE(cuda::grouped_gemm_in_use());
  EXPECT_TRUE(cuda::library_grouped_gemm_in_use());
}

ExpertShape shape_of(int64_t experts, int64_t per_token, bool normalize, bool wide) {
  return {.experts = experts,
          .per_token = per_token,
          .normalize = normalize,
          .wide_router = wide,
          .combine_blocks = combine_blocks(experts, 0)};
}

TEST(Routes, AreTheHostsAndRowExact) {
  at::manual_seed(5);
  for (const auto& [experts, per_token] : {std::pair<int64_t, int64_t>{128, 8}, {8, 2}, {60, 4}, {512, 16}, {33, 1}}) {
    for (const bool wide : {false, true}) {
      const ExpertShape shape = shape_of(experts, per_token, true, wide);
      const at::Tensor x = random({1500, 1024}), router = random({experts, 1024}, 0.05);
      const Routes all = route(x, router, shape, true);
      const Routes host = route(x.cpu(), router.cpu(), shape, true);
      EXPECT_LT((all.probabilities.cpu() - host.probabilities).abs().max().item<double>(), 1e-5);
      // Ties within rounding may fall otherwise than on the host, but hardly ever.
      EXPECT_LT((all.experts.cpu() != host.experts).sum().item<int64_t>(), wide ? 1 : 40) << experts;
      for (const int64_t count : {1, 16, 100, 256, 257, 1000}) {
        at::Tensor gathered;
        const Routes some = route(x.narrow(0, 300, count), router, shape, false, &gathered);
        EXPECT_TRUE(same_bits(gathered, x.narrow(0, 300, count).index_select(0, some.rows)));
        const Routes plain = route(x.narrow(0, 300, count), router, shape);
        EXPECT_TRUE(at::equal(plain.rows, some.rows) && at::equal(plain.places, some.places) &&
                    at::equal(plain.offsets, some.offsets));
        EXPECT_TRUE(at::equal(some.experts, all.experts.narrow(0, 300, count)));
        EXPECT_TRUE(at::equal(some.weights, all.weights.narrow(0, 300, count)));
        // Sorted as the host sorts them.
        const at::Tensor flat = some.experts.flatten().cpu();
        const at::Tensor order = std::get<1>(at::sort(flat.to(at::kLong), /*stable=*/true, 0, false));
        EXPECT_TRUE(at::equal(some.rows.cpu().to(at::kLong), at::floor_divide(order, per_token)));
        EXPECT_TRUE(at::equal(some.places.flatten().cpu().to(at::kLong).index_select(0, order),
                              at::arange(order.numel(), at::kLong)));
        const at::Tensor counts = at::bincount(flat.to(at::kLong), {}, experts).cumsum(0);
        EXPECT_TRUE(at::equal(some.offsets.cpu().narrow(0, 1, experts).to(at::kLong), counts));
        EXPECT_EQ(some.offsets[0].item<int32_t>(), 0);
      }
    }
  }
}

TEST(Routes, OfEqualLogitsTheLowerIdIsTakenAndBadRowsGiveNaN) {
  const ExpertShape shape = shape_of(128, 8, true, false);
  at::Tensor x = at::ones({3, 128}, on_device());
  x[1].fill_(std::numeric_limits<float>::quiet_NaN());
  const Routes routes = route(x, at::zeros({128, 128}, on_device()), shape);
  const at::Tensor first = at::arange(8, at::kInt);
  for (const int64_t row : {0, 2}) EXPECT_TRUE(at::equal(routes.experts[row].cpu(), first));
  EXPECT_TRUE(at::isnan(routes.weights[1]).all().item<bool>());
  EXPECT_FALSE(at::isnan(routes.weights[2]).any().item<bool>());
}

// It would send rows elsewhere without a word.
TEST(Routes, ARouterThatIsNotFiniteGivesNaN) {
  for (const bool wide : {false, true}) {
    const ExpertShape shape = shape_of(16, 2, true, wide);
    at::Tensor router = random({16, 256}, 0.05);
    router[3][77].fill_(std::numeric_limits<float>::quiet_NaN());
    const Routes routes = route(random({20, 256}, 0.1), router, shape);
    EXPECT_TRUE(at::isnan(routes.weights).all().item<bool>()) << wide;
  }
}

TEST(Experts, ValuesAndGradientsAreThoseOfFloat64) {
  at::manual_seed(6);
  for (const auto& [rows, experts, per_token, normalize] :
       {std::tuple<int64_t, int64_t, int64_t, bool>{300, 16, 4, true}, {300, 16, 4, false}, {33, 8, 2, true}}) {
    const ExpertShape shape = shape_of(experts, per_token, normalize, true);
    const int64_t hidden = 256, width = 128;
    std::vector<at::Tensor> device = {random({rows, hidden}), random({experts, hidden}, 0.2),
                                      random({experts * 2 * width, hidden}, 0.05),
                                      random({experts * hidden, width}, 0.05)};
    std::vector<at::Tensor> host;
    for (at::Tensor& t : device) {
      host.push_back(t.cpu().to(at::kDouble).set_requires_grad(true));
      t.set_requires_grad(true);
    }
    const at::AutoGradMode record(true);
    const auto run = [&](const std::vector<at::Tensor>& t) {
      return mixture_of_experts(t[0], {t[1], t[2], t[3]}, shape);
    };
    const at::Tensor y = run(device), expected = run(host);
    const auto error = [](const at::Tensor& a, const at::Tensor& e) {
      return ((a.detach().cpu().to(at::kDouble) - e.detach()).abs().max() / e.detach().abs().max()).item<double>();
    };
    EXPECT_LT(error(y, expected), 0.02);
    const at::Tensor upstream = random({rows, hidden});
    const auto own = torch::autograd::grad({y}, device, {upstream});
    const auto oracle = torch::autograd::grad({expected}, host, {upstream.cpu().to(at::kDouble)});
    for (size_t i = 0; i < own.size(); ++i) EXPECT_LT(error(own[i], oracle[i]), 0.03) << "input " << i;
  }
}

TEST(Experts, RowsHaveTheSameBitsInEveryBatchAndInTraining) {
  at::manual_seed(7);
  const ExpertShape shape = shape_of(32, 4, true, true);
  const at::Tensor x = random({2000, 1024}), router = random({32, 1024}, 0.05);
  ExpertWeights weights{router, random({32 * 2 * 384, 1024}, 0.05), random({32 * 1024, 384}, 0.05)};
  const at::NoGradGuard no_grad;
  const at::Tensor whole = mixture_of_experts(x, weights, shape);
  for (const int64_t count : {1, 7, 16, 64, 256, 300, 1024}) {
    for (const int64_t from : {int64_t{0}, int64_t{11}, 2000 - count}) {
      EXPECT_TRUE(same_bits(mixture_of_experts(x.narrow(0, from, count), weights, shape), whole.narrow(0, from, count)))
          << count << " from " << from;
    }
  }
  const at::AutoGradMode record(true);
  weights.down.set_requires_grad(true);
  EXPECT_TRUE(same_bits(mixture_of_experts(x, weights, shape).detach(), whole));
}

// By another kernel, block by block.
TEST(Experts, TheirResultsAreCombinedInBlocksOfAnyNumberOfChoices) {
  at::manual_seed(11);
  for (const int64_t per_token : {1, 2, 3, 4, 7, 8, 9, 16}) {
    const ExpertShape shape = shape_of(32, per_token, true, true);
    for (const auto& [rows, hidden] : {std::pair<int64_t, int64_t>{1, 128}, {65, 2048}, {700, 4096}}) {
      const Routes routes = route(random({rows, hidden}), random({32, hidden}, 0.1), shape);
      const at::Tensor y = random({rows * per_token, hidden});
      const at::Tensor blocks = part_block_sums(y, routes, shape, 0, shape.combine_blocks);
      EXPECT_TRUE(same_bits(combine(y, routes, shape), sum_in_order(blocks))) << per_token << " of " << rows << " rows";
    }
  }
}

// What ranks that share experts do in decode steps, on one device: of all rows each computes its own experts'.
TEST(Experts, PartsOfThemGiveTheSumsOfAll) {
  at::manual_seed(10);
  const ExpertShape shape = shape_of(16, 4, true, true);
  const int64_t hidden = 512, width = 256;
  for (const int64_t rows : {1, 40, 1000, 1500, 4096}) {
    const at::Tensor x = random({rows, hidden}), router = random({16, hidden}, 0.1);
    const ExpertWeights weights{router, random({16 * 2 * width, hidden}, 0.05), random({16 * hidden, width}, 0.05)};
    const at::Tensor whole = mixture_of_experts(x, weights, shape);
    const Routes routes = route(x, router, shape);
    for (const int64_t parts : {2, 8}) {
      const int64_t experts = 16 / parts, blocks = shape.combine_blocks / parts;
      ASSERT_TRUE(cuda::grouped_part_supported(4 * rows, experts, hidden, width));
      std::vector<at::Tensor> sums;
      for (int64_t part = 0; part < parts; ++part) {
        const auto own = [&](const at::Tensor& all, int64_t out) {
          return all.narrow(0, part * experts * out, experts * out);
        };
        const at::Tensor offsets = routes.offsets.narrow(0, part * experts, experts + 1);
        const at::Tensor active = grouped_part(gather_part(x, routes.rows, offsets), own(weights.gate_up, 2 * width),
                                               offsets, /*swiglu=*/true);
        const at::Tensor y = grouped_part(active, own(weights.down, hidden), offsets, /*swiglu=*/false);
        sums.push_back(part_block_sums(y, routes, shape, part * blocks, blocks));
      }
      EXPECT_TRUE(same_bits(sum_in_order(at::cat(sums, 1)), whole)) << rows << " rows, " << parts << " parts";
    }
  }
}

// As after a start-up test that has found other bits in one of the two.
TEST(Experts, EitherGroupedProductComputesAllWithTheSameBits) {
  at::manual_seed(9);
  const ExpertShape shape = shape_of(16, 4, true, true);
  for (const int64_t rows : {1, 64, 300, 1500, 6000}) {
    std::vector<at::Tensor> inputs = {random({rows, 512}), random({16, 512}, 0.1), random({16 * 2 * 256, 512}, 0.05),
                                      random({16 * 512, 256}, 0.05)};
    const at::Tensor upstream = random({rows, 512});
    const auto outputs = [&](bool ours, bool library) {
      cuda::set_grouped_gemms_in_use(ours, library);
      for (at::Tensor& t : inputs) t.set_requires_grad(false);
      std::vector<at::Tensor> all = {mixture_of_experts(inputs[0], {inputs[1], inputs[2], inputs[3]}, shape)};
      for (at::Tensor& t : inputs) t.set_requires_grad(true);
      const at::AutoGradMode record(true);
      const at::Tensor y = mixture_of_experts(inputs[0], {inputs[1], inputs[2], inputs[3]}, shape);
      for (const at::Tensor& gradient : torch::autograd::grad({y}, inputs, {upstream})) all.push_back(gradient);
      all.push_back(y.detach());
      cuda::set_grouped_gemms_in_use(true, true);
      return all;
    };
    const std::vector<at::Tensor> both = outputs(true, true);
    for (const bool ours : {false, true}) {
      const std::vector<at::Tensor> one = outputs(ours, !ours);
      for (size_t i = 0; i < both.size(); ++i)
        EXPECT_TRUE(same_bits(one[i], both[i])) << rows << " rows, " << i << (ours ? ", ours" : ", the library's");
    }
  }
}

// A product for each expert, several of them at a time, onto what is there.
TEST(Experts, GradientsOfTheirMatricesAreEachItsOwnAndTheSameInEveryRun) {
  at::manual_seed(12);
  const int64_t experts = 24, out = 384, in = 512;
  std::vector<int64_t> sizes;
  for (int64_t e = 0; e < experts; ++e) sizes.push_back(e % 5 == 0 ? 0 : 1 + 97 * e % 700);
  const int64_t rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const at::Tensor dy = random({rows, out}), x = random({rows, in}), offsets = offsets_of(sizes);
  const at::Tensor before = at::randn({experts * out, in}, on_device(at::kFloat));
  at::Tensor expected = before.to(at::kDouble), first;
  for (int64_t e = 0, row = 0; e < experts; row += sizes[static_cast<size_t>(e++)]) {
    const int64_t count = sizes[static_cast<size_t>(e)];
    expected.narrow(0, e * out, out) +=
        dy.narrow(0, row, count).to(at::kDouble).t().mm(x.narrow(0, row, count).to(at::kDouble));
  }
  for (int run = 0; run < 20; ++run) {
    const at::Tensor sum = before.clone();
    const auto on_host = offsets_on_host(offsets);
    (void)grouped_backward_weight(dy, x, on_host(), sum, sum);
    if (run == 0) {
      EXPECT_LT(((sum - expected).abs().max() / expected.abs().max()).item<double>(), 1e-5);
      first = sum;
    }
    EXPECT_TRUE(at::equal(sum, first)) << "run " << run;
  }
}

TEST(Experts, GateAndUpComputedAgainChangeNoBitOfAGradient) {
  at::manual_seed(8);
  const ExpertShape shape = shape_of(16, 4, true, true);
  for (const int64_t rows : {1, 40, 3000}) {
    std::vector<at::Tensor> inputs = {random({rows, 512}), random({16, 512}, 0.1), random({16 * 2 * 256, 512}, 0.05),
                                      random({16 * 512, 256}, 0.05)};
    for (at::Tensor& t : inputs) t.set_requires_grad(true);
    const at::AutoGradMode record(true);
    const at::Tensor upstream = random({rows, 512});
    const auto gradients = [&](const ExpertsAgain& again) {
      const at::Tensor y = mixture_of_experts(inputs[0], {inputs[1], inputs[2], inputs[3]}, shape, again);
      std::vector<at::Tensor> all = torch::autograd::grad({y}, inputs, {upstream});
      all.push_back(y.detach());
      return all;
    };
    const std::vector<at::Tensor> kept = gradients({}), again = gradients({.gate_up = true});
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(same_bits(kept[i], again[i])) << rows << " rows, " << i;
  }
}

}  // namespace
}  // namespace trireme
