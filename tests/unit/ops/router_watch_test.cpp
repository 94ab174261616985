// Balancing losses against Switch's formula differentiated by LibTorch, and what a watch counts against a loop.
#include "trainer/ops/router_watch.h"

#include <ATen/ATen.h>

#include <cmath>
#include <map>

#include "tests/unit/ops/testing.h"

namespace trireme {
namespace {

using testing::random;
using testing::relative_error;
using Kind = BalanceOptions::Kind;

constexpr int64_t kWidthIn = 12, kWidthOf = 8, kExperts = 6, kChosen = 2;
constexpr double kCoefficient = 0.7, kValid = 11;

struct Mixture {
  at::Tensor x, router, gate_up, down;
};

Mixture mixture(int64_t rows) {
  return {random({rows, kWidthIn}, 1, at::kDouble), random({kExperts, kWidthIn}, 2, at::kDouble),
          random({kExperts * 2 * kWidthOf, kWidthIn}, 3, at::kDouble, 0.3),
          random({kExperts * kWidthIn, kWidthOf}, 4, at::kDouble, 0.3)};
}

ExpertShape six_experts(bool normalize) {
  return {.experts = kExperts, .per_token = kChosen, .normalize = normalize, .wide_router = true, .combine_blocks = 2};
}

std::shared_ptr<const RouterCall> watched(const BalanceOptions& balance, const std::vector<int64_t>& starts,
                                          const std::vector<int64_t>& prefix) {
  auto watch = std::make_shared<RouterWatch>(2, kExperts, balance, at::kCPU);
  watch->set_valid_tokens(kValid);
  return std::make_shared<const RouterCall>(
      RouterCall{watch, 1, std::make_shared<const WatchedRows>(WatchedRows::of(starts, prefix, {}, at::kCPU))});
}

// Gradients of x and router of the sum of the mixture's results, with whatever balancing there is.
std::vector<at::Tensor> gradients(const Mixture& m, bool normalize, const std::shared_ptr<const RouterCall>& call) {
  const at::Tensor x = m.x.detach().clone().requires_grad_(), router = m.router.detach().clone().requires_grad_();
  mixture_of_experts(x, {router, m.gate_up, m.down}, six_experts(normalize), {}, call).sum().backward();
  return {x.grad(), router.grad()};
}

// Switch's loss of the rows of each unit, which weighs as many tokens: experts / choices * sum over experts of the
// share of rows that chose it times its mean probability.
at::Tensor switch_loss(const at::Tensor& x, const at::Tensor& router, const std::vector<std::vector<int64_t>>& units) {
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (const auto& rows : units) {
    const at::Tensor p = at::softmax(at::linear(x.index_select(0, at::tensor(rows)), router), 1);
    const auto chosen = std::get<1>(at::topk(p, kChosen, 1));
    at::Tensor share = at::zeros({kExperts}, at::kDouble);
    for (int64_t i = 0; i < chosen.numel(); ++i) share[chosen.flatten()[i].item<int64_t>()] += 1.0;
    const auto tokens = static_cast<double>(rows.size());
    sum = sum + tokens / kValid * kCoefficient * kExperts / kChosen * (share / tokens * p.mean(0)).sum();
  }
  return sum;
}

struct BalanceCase {
  Kind kind;
  bool normalize;
  std::vector<int64_t> starts, prefix;
  std::vector<std::vector<int64_t>> units;
};

std::vector<int64_t> range(int64_t begin, int64_t end) {
  std::vector<int64_t> rows;
  for (int64_t r = begin; r < end; ++r) rows.push_back(r);
  return rows;
}

std::vector<int64_t> joined(std::vector<int64_t> a, const std::vector<int64_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<BalanceCase> balance_cases() {
  // A prompt of 5 rows that two responses share, then a sample alone.
  const std::vector<int64_t> starts = {0, 5, 9, 16, 20}, prefix = {-1, 0, 0, -1};
  const std::vector<int64_t> first = joined(range(0, 5), range(5, 9)), second = joined(range(0, 5), range(9, 16)),
                             third = range(16, 20);
  const std::vector<int64_t> all = joined(joined(first, second), third);
  return {{Kind::kSample, true, starts, prefix, {first, second, third}},
          {Kind::kSample, false, starts, prefix, {first, second, third}},
          {Kind::kMicroBatch, true, starts, prefix, {all}},
          {Kind::kSample, true, starts, {}, {range(0, 5), range(5, 9), range(9, 16), range(16, 20)}},
          {Kind::kMicroBatch, false, starts, {}, {range(0, 20)}}};
}

TEST(RouterWatch, BalancingLossesAreSwitchsAndSoAreTheirGradients) {
  for (const BalanceCase& c : balance_cases()) {
    const Mixture m = mixture(20);
    const auto call = watched({c.kind, kCoefficient}, c.starts, c.prefix);
    const auto with = gradients(m, c.normalize, call), without = gradients(m, c.normalize, nullptr);
    const at::Tensor x = m.x.detach().clone().requires_grad_(), router = m.router.detach().clone().requires_grad_();
    const at::Tensor loss = switch_loss(x, router, c.units);
    loss.backward();
    EXPECT_LE(relative_error(with[0] - without[0], x.grad()), 1e-11);
    EXPECT_LE(relative_error(with[1] - without[1], router.grad()), 1e-11);
    const at::Tensor sums = call->watch->take().of_layers;
    EXPECT_NEAR(sums[1][kExperts + 2].item<double>(), loss.item<double>() * kValid, 1e-10);
    size_t tokens = 0;
    for (const auto& unit : c.units) tokens += unit.size();
    EXPECT_EQ(sums[1][kExperts + 3].item<double>(), static_cast<double>(tokens));
  }
}

// Ranks that share a micro-batch's rows, one of them without any: what they see and train adds up to the whole.
TEST(RouterWatch, PartsOfAMicroBatchGiveTheWhole) {
  const std::vector<std::vector<int64_t>> parts = {
      joined(range(0, 3), range(12, 18)), {}, joined(range(3, 12), {18, 19})};
  for (const BalanceCase& c : balance_cases()) {
    const Mixture m = mixture(20);
    const auto whole = watched({c.kind, kCoefficient}, c.starts, c.prefix);
    const auto wanted = gradients(m, c.normalize, whole);
    const at::Tensor sums = whole->watch->take().of_layers;
    // The first round learns each part's counts, the second one adds the others' to them.
    std::vector<at::Tensor> counts(parts.size());
    for (const bool second : {false, true}) {
      at::Tensor router = at::zeros_like(wanted[1]), of_layers = at::zeros_like(sums);
      for (size_t part = 0; part < parts.size(); ++part) {
        const at::Tensor rows = at::tensor(parts[part], at::kLong);
        auto watch = std::make_shared<RouterWatch>(2, kExperts, BalanceOptions{c.kind, kCoefficient}, at::kCPU);
        watch->set_valid_tokens(kValid);
        watch->over_ranks = [&](at::Tensor own) {
          if (!second) counts[part] = own.clone();
          for (size_t other = 0; second && other < parts.size(); ++other)
            if (other != part) own.add_(counts[other]);
        };
        const auto call =
            std::make_shared<const RouterCall>(RouterCall{watch, 1, watch->rows_of(c.starts, c.prefix, rows)});
        Mixture own = m;
        own.x = m.x.index_select(0, rows);
        const auto got = gradients(own, c.normalize, call);
        router += got[1];
        of_layers += watch->take().of_layers;
        if (second) {
          EXPECT_LE((got[0] - wanted[0].index_select(0, rows)).abs().sum().item<double>(), 1e-11);
        }
      }
      if (!second) continue;
      EXPECT_LE(relative_error(router, wanted[1]), 1e-11);
      EXPECT_LE((of_layers - sums).abs().max().item<double>(), 1e-10);
    }
  }
}

TEST(RouterWatch, CountsChoicesRowsAndEntropyOfEachPassOnce) {
  const Mixture m = mixture(20);
  const auto call = watched({}, {0, 20}, {});
  const auto alone = gradients(m, true, nullptr);
  for (int pass = 0; pass < 2; ++pass) {
    const auto seen = gradients(m, true, call);
    EXPECT_TRUE(testing::same_bits(seen[0], alone[0])) << "watching changes gradients";
  }
  const at::Tensor p = at::softmax(at::linear(m.x, m.router), 1), chosen = std::get<1>(at::topk(p, kChosen, 1));
  std::map<int64_t, double> counts;
  for (int64_t i = 0; i < chosen.numel(); ++i) counts[chosen.flatten()[i].item<int64_t>()] += 2;
  const at::Tensor sums = call->watch->take().of_layers;
  for (int64_t e = 0; e < kExperts; ++e) EXPECT_EQ(sums[1][e].item<double>(), counts[e]);
  EXPECT_EQ(sums[1][kExperts].item<double>(), 40);
  double entropy = 0;
  for (int64_t i = 0; i < p.numel(); ++i) {
    const double value = p.flatten()[i].item<double>();
    entropy -= 2 * value * std::log(value);
  }
  EXPECT_NEAR(sums[1][kExperts + 1].item<double>(), entropy, 1e-10);
  EXPECT_EQ(sums[0].abs().sum().item<double>(), 0) << "the layer without a call";
  EXPECT_EQ(call->watch->take().of_layers.abs().sum().item<double>(), 0) << "taken once";
}

TEST(RouterWatch, AMicroBatchWithoutRowsAddsNothing) {
  const Mixture m = mixture(0);
  const auto call = watched({Kind::kSample, 1}, {0}, {});
  const auto grads = gradients(m, true, call);
  EXPECT_EQ(grads[1].abs().sum().item<double>(), 0);
  EXPECT_EQ(call->watch->take().of_layers.abs().sum().item<double>(), 0);
}

}  // namespace
}  // namespace trireme
