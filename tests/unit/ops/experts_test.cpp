// Mixtures of experts against a loop over tokens that shares nothing with the op, and against themselves bit for bit.
#include "trainer/ops/experts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "tests/unit/errors.h"
#include "tests/unit/ops/testing.h"
#include "topology/combine_blocks.h"

namespace trireme {
namespace {

using testing::expect_matches;
using testing::random;
using testing::relative_error;
using testing::same_bits;
using Tensors = std::vector<at::Tensor>;

constexpr int64_t kHidden = 24, kWidth = 16;

ExpertShape shape_of(int64_t experts, int64_t per_token, bool normalize = true) {
  return {
      .experts = experts, .per_token = per_token, .normalize = normalize, .combine_blocks = combine_blocks(experts, 0)};
}

struct Sizes {
  int64_t rows, experts, per_token;
  bool normalize;
};

Tensors inputs_of(const Sizes& s, at::ScalarType type) {
  return {random({s.rows, kHidden}, 1, type), random({s.experts, kHidden}, 2, type),
          random({s.experts * 2 * kWidth, kHidden}, 3, type, 0.3), random({s.experts * kHidden, kWidth}, 4, type, 0.3)};
}

at::Tensor ours(const Tensors& t, const ExpertShape& shape) {
  return mixture_of_experts(t[0], {t[1], t[2], t[3]}, shape);
}

// Every expert computes every token; a mask keeps what the router chose. Differentiable by LibTorch.
at::Tensor by_masks(const Tensors& t, const ExpertShape& shape) {
  const at::Tensor scores = at::softmax(at::linear(t[0], t[1]), 1);
  const auto [kept, chosen] = at::topk(scores, shape.per_token, 1);
  const at::Tensor mask = at::zeros_like(scores).scatter(1, chosen, 1.0);
  at::Tensor weights = scores * mask;
  if (shape.normalize) weights = weights / weights.sum(1, true);
  at::Tensor sum = at::zeros_like(t[0]);
  for (int64_t e = 0; e < shape.experts; ++e) {
    const at::Tensor both = at::linear(t[0], t[2].narrow(0, e * 2 * kWidth, 2 * kWidth));
    const at::Tensor active = at::silu(both.narrow(1, 0, kWidth)) * both.narrow(1, kWidth, kWidth);
    sum = sum + at::linear(active, t[3].narrow(0, e * kHidden, kHidden)) * weights.select(1, e).unsqueeze(1);
  }
  return sum;
}

class Mixtures : public ::testing::TestWithParam<Sizes> {};
INSTANTIATE_TEST_SUITE_P(Experts, Mixtures,
                         ::testing::Values(Sizes{37, 8, 2, true}, Sizes{37, 8, 2, false}, Sizes{5, 16, 4, true},
                                           Sizes{1, 3, 2, true}, Sizes{1, 3, 1, false}, Sizes{64, 4, 4, false},
                                           Sizes{130, 12, 3, true}));

TEST_P(Mixtures, ValuesAndGradientsMatchMasks) {
  const ExpertShape shape = shape_of(GetParam().experts, GetParam().per_token, GetParam().normalize);
  expect_matches(
      inputs_of(GetParam(), at::kDouble), [&](const Tensors& t) { return ours(t, shape); },
      [&](const Tensors& t) { return by_masks(t, shape); }, 1e-11);
  expect_matches(
      inputs_of(GetParam(), at::kFloat), [&](const Tensors& t) { return ours(t, shape); },
      [&](const Tensors& t) { return by_masks(t, shape); }, 1e-5);
}

TEST_P(Mixtures, BackwardFromWhatIsComputedAgainIsTheSame) {
  const ExpertShape shape = shape_of(GetParam().experts, GetParam().per_token, GetParam().normalize);
  const Tensors inputs = inputs_of(GetParam(), at::kFloat);
  const Tensors kept = testing::gradients(inputs, [&](const Tensors& t) { return ours(t, shape); });
  int64_t calls = 0;
  const std::function<at::Tensor()> input = [&calls, x = inputs[0]] {
    ++calls;
    return x;
  };
  for (const ExpertsAgain& which :
       {ExpertsAgain{.x = input}, ExpertsAgain{.gate_up = true}, ExpertsAgain{input, true}}) {
    calls = 0;
    const Tensors again = testing::gradients(inputs, [&](const Tensors& t) {
      return mixture_of_experts(t[0], {t[1], t[2], t[3]}, shape, which);
    });
    EXPECT_EQ(calls, which.x ? 1 : 0);
    for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(same_bits(kept[i], again[i])) << "input " << i;
  }
}

TEST(Experts, RowsHaveTheSameBitsInEveryBatch) {
  for (const auto type : {at::kFloat, at::kBFloat16, at::kDouble}) {
    const ExpertShape shape = shape_of(8, 2);
    const at::NoGradGuard no_grad;
    Tensors all = inputs_of({83, 8, 2, true}, type);
    const at::Tensor x = all[0], whole = ours(all, shape);
    for (const int64_t count : {1, 2, 7, 16, 33, 64}) {
      for (const int64_t from : {int64_t{0}, int64_t{5}, 83 - count}) {
        if (from + count > 83) continue;
        all[0] = x.narrow(0, from, count);
        EXPECT_TRUE(same_bits(ours(all, shape), whole.narrow(0, from, count))) << count << " from " << from;
      }
    }
    all[0] = x.narrow(0, 0, 0);
    EXPECT_EQ(ours(all, shape).sizes(), at::IntArrayRef({0, kHidden}));
    // What records gradients has the bits of what does not.
    all[0] = x;
    const at::AutoGradMode record(true);
    all[2].set_requires_grad(true);
    EXPECT_TRUE(same_bits(ours(all, shape).detach(), whole));
  }
}

TEST(Experts, EveryRowMayGoToOneExpert) {
  const ExpertShape shape = shape_of(6, 1, /*normalize=*/false);
  Tensors t = inputs_of({40, 6, 1, false}, at::kDouble);
  t[0].select(1, 0).fill_(1.0);
  t[1].zero_();
  t[1].select(1, 0).copy_(at::tensor({0.0, 0.0, 0.0, 9.0, 0.0, 0.0}, at::kDouble));
  const Routes routes = route(t[0], t[1], shape);
  EXPECT_TRUE(at::equal(routes.offsets, at::tensor({0, 0, 0, 0, 40, 40, 40}, at::kInt)));
  expect_matches(
      t, [&](const Tensors& x) { return ours(x, shape); }, [&](const Tensors& x) { return by_masks(x, shape); }, 1e-11);
}

TEST(Routes, OfEqualLogitsTheLowerIdIsTaken) {
  const ExpertShape shape = shape_of(5, 3);
  const at::Tensor x = at::ones({2, 4}, at::kFloat);
  Routes routes = route(x, at::zeros({5, 4}, at::kFloat), shape);
  EXPECT_TRUE(at::equal(routes.experts, at::tensor({0, 1, 2, 0, 1, 2}, at::kInt).view({2, 3})));
  EXPECT_LT(relative_error(routes.weights, at::full({2, 3}, 1.0 / 3.0, at::kDouble)), 1e-6);
  at::Tensor router = at::zeros({5, 4}, at::kFloat);
  router[4].fill_(1.0);
  routes = route(x, router, shape);
  EXPECT_TRUE(at::equal(routes.experts, at::tensor({0, 1, 4, 0, 1, 4}, at::kInt).view({2, 3})));
}

TEST(Routes, SortedRowsAreByExpertThenByRowAndPlacesLeadBack) {
  const ExpertShape shape = shape_of(16, 4);
  const at::Tensor x = random({50, kHidden}, 1);
  at::Tensor gathered;
  const Routes routes = route(x, random({16, kHidden}, 2), shape, false, &gathered);
  EXPECT_TRUE(same_bits(gathered, x.index_select(0, routes.rows)));
  const auto* experts = routes.experts.const_data_ptr<int32_t>();
  const auto* places = routes.places.const_data_ptr<int32_t>();
  const auto* rows = routes.rows.const_data_ptr<int32_t>();
  const auto* offsets = routes.offsets.const_data_ptr<int32_t>();
  ASSERT_EQ(offsets[16], 200);
  for (int64_t e = 0; e < 16; ++e) {
    EXPECT_TRUE(std::is_sorted(rows + offsets[e], rows + offsets[e + 1])) << "expert " << e;
  }
  for (int64_t i = 0; i < 200; ++i) {
    EXPECT_EQ(rows[places[i]], i / 4);
    EXPECT_TRUE(offsets[experts[i]] <= places[i] && places[i] < offsets[experts[i] + 1]);
    EXPECT_TRUE(i % 4 == 0 || experts[i - 1] < experts[i]);
  }
}

// A sum that cancels: what is left is lost in float32, and found in float64.
// A term that float32 loses between two large ones: 64 apart, so that one lane of any vector adds all three.
TEST(Routes, WideLogitsAreSummedInFloat64) {
  at::Tensor x = at::zeros({1, 192});
  x[0][0] = 1e8f, x[0][64] = 1.0f, x[0][128] = -1e8f;
  ExpertShape shape = shape_of(2, 1);
  const at::Tensor with = at::ones({192}), without = at::ones({192});
  without[64] = 0.0f;
  const auto chosen = [&](const at::Tensor& first, const at::Tensor& second) {
    return route(x, at::stack({first, second}), shape).experts[0][0].item<int32_t>();
  };
  shape.wide_router = true;
  EXPECT_EQ(chosen(with, without), 0);
  EXPECT_EQ(chosen(without, with), 1);
  shape.wide_router = false;
  EXPECT_EQ(chosen(without, with), 0) << "float32 can tell them apart: this test shows nothing";
}

TEST(Routes, LogitsThatAreNotFiniteNameTheRow) {
  at::Tensor x = at::ones({3, 4}, at::kFloat);
  x[1][2] = std::nanf("");
  EXPECT_MENTIONS(test::error_of([&] {
                    (void)route(x, at::ones({4, 4}, at::kFloat), shape_of(4, 2));
                  }),
                  "row 1: the router's logits are not finite");
}

// In bfloat16: each block of experts is rounded, then their sum; a block without a choice changes nothing.
TEST(Combine, BlocksAreSummedAndRoundedInOrder) {
  ExpertShape shape = shape_of(8, 3);
  shape.combine_blocks = 4;
  Routes routes;
  routes.experts = at::tensor({0, 1, 6}, at::kInt).view({1, 3});
  routes.weights = at::tensor({0.5f, 0.3f, 0.2f}).view({1, 3});
  routes.places = at::tensor({2, 0, 1}, at::kInt).view({1, 3});
  const at::Tensor y = random({3, kHidden}, 1, at::kBFloat16);
  const auto scaled = [&](int64_t place, float weight) { return y[place].to(at::kFloat) * weight; };
  const at::Tensor first = (scaled(2, 0.5f) + scaled(0, 0.3f)).to(at::kBFloat16).to(at::kFloat);
  const at::Tensor second = scaled(1, 0.2f).to(at::kBFloat16).to(at::kFloat);
  EXPECT_TRUE(same_bits(combine(y, routes, shape)[0], (first + second).to(at::kBFloat16)));
}

// One choice that is all of the weight: nothing that the router could learn.
TEST(Experts, TheOnlyChoiceGivesTheRouterNoGradient) {
  const Tensors t = inputs_of({9, 4, 1, true}, at::kFloat);
  const Tensors own = testing::gradients(t, [&](const Tensors& x) { return ours(x, shape_of(4, 1)); });
  EXPECT_EQ(own[1].abs().max().item<float>(), 0.0f);
}

TEST(Experts, AFrozenRouterStillPassesGradientsOn) {
  const ExpertShape shape = shape_of(8, 2);
  const Tensors t = inputs_of({20, 8, 2, true}, at::kDouble);
  const Tensors frozen = testing::gradients({t[0]}, [&](const Tensors& x) {
    return ours({x[0], t[1], t[2], t[3]}, shape);
  });
  const Tensors expected = testing::gradients({t[0]}, [&](const Tensors& x) {
    return by_masks({x[0], t[1], t[2], t[3]}, shape);
  });
  EXPECT_LT(relative_error(frozen[0], expected[0]), 1e-11);
}

}  // namespace
}  // namespace trireme
