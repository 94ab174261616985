#include <cmath>

#include "base/error.h"
#include "tests/unit/ops/testing.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

using testing::expect_matches;
using testing::random;
using testing::random_ids;
using testing::same_bits;
using Tensors = std::vector<at::Tensor>;

at::Tensor filtered_log_softmax(const at::Tensor& hidden, const at::Tensor& head, const LogprobOptions& o) {
  at::Tensor z = at::linear(hidden, head) / o.temperature;
  const auto drop = [&](const at::Tensor& mask) { z = z.masked_fill(mask, -INFINITY); };
  if (o.top_k > 0) drop(z < std::get<0>(z.topk(o.top_k, -1)).narrow(1, o.top_k - 1, 1));
  if (o.top_p < 1.0) {
    const auto [sorted, order] = z.sort(/*stable=*/true, -1, /*descending=*/true);
    const at::Tensor p = at::softmax(sorted, -1);
    const at::Tensor before = p.cumsum(-1) - p;
    drop(at::zeros_like(z, at::kBool).scatter(1, order, before >= o.top_p));
  }
  if (o.min_p > 0.0) {
    const at::Tensor p = at::softmax(z, -1);
    drop(p < o.min_p * p.amax(-1, true));
  }
  return at::log_softmax(z, -1);
}

at::Tensor entropy_reference(const at::Tensor& log_p) {
  return -(log_p.exp() * log_p.masked_fill(log_p == -INFINITY, 0)).sum(-1);
}

at::Tensor likely_targets(const at::Tensor& hidden, const at::Tensor& head) {
  return std::get<1>(at::linear(hidden, head).max(-1));
}

std::vector<LogprobOptions> all_options() {
  std::vector<LogprobOptions> all(7);
  all[1].temperature = 0.7;
  all[2].top_k = 5;
  all[3].top_p = 0.8;
  all[4].min_p = 0.05;
  all[5].temperature = 1.3, all[5].top_k = 20, all[5].top_p = 0.9, all[5].min_p = 0.02;
  all[6].top_p = 0.999;
  return all;
}

TEST(TokenLogprobs, MatchLogSoftmaxWithGradients) {
  for (const auto& [rows, vocab, width] : {std::tuple<int, int, int>{13, 50, 12}, {7, 301, 33}}) {
    const at::Tensor hidden = random({rows, width}, 1, at::kDouble), head = random({vocab, width}, 2, at::kDouble, 0.4);
    for (const LogprobOptions& options : all_options()) {
      const at::Tensor targets = options.filters() ? likely_targets(hidden, head) : random_ids(rows, vocab, 3);
      expect_matches(
          {hidden, head}, [&](const Tensors& t) { return token_logprobs(t[0], t[1], targets, options); },
          [&](const Tensors& t) {
            return filtered_log_softmax(t[0], t[1], options).gather(1, targets.unsqueeze(1)).squeeze(1);
          },
          1e-10);
      expect_matches(
          {hidden, head},
          [&](const Tensors& t) {
            const LogprobResult r = token_logprobs_and_entropy(t[0], t[1], targets, options);
            return r.logprobs * 0.3 + r.entropy;
          },
          [&](const Tensors& t) {
            const at::Tensor log_p = filtered_log_softmax(t[0], t[1], options);
            return log_p.gather(1, targets.unsqueeze(1)).squeeze(1) * 0.3 + entropy_reference(log_p);
          },
          1e-10);
    }
  }
}

TEST(TokenLogprobs, Float32IsCloseToFloat64) {
  const at::Tensor hidden = random({40, 64}, 1), head = random({260, 64}, 2, at::kFloat, 0.3),
                   targets = random_ids(40, 260, 3);
  const auto f = [&](const Tensors& t) { return token_logprobs(t[0], t[1], targets, {}); };
  const Tensors narrow = {hidden, head}, wide = {hidden.to(at::kDouble), head.to(at::kDouble)};
  EXPECT_LE(testing::relative_error(f(narrow), f(wide)), 1e-6);
  const auto a = testing::gradients(narrow, f), e = testing::gradients(wide, f);
  for (size_t i = 0; i < 2; ++i) EXPECT_LE(testing::relative_error(a[i], e[i]), 5e-6);
}

// More rows than one chunk holds: each row's bits and the gradients' sums stay.
TEST(TokenLogprobs, RowsDoNotDependOnTheBatchOrItsChunks) {
  const at::NoGradGuard no_grad;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor hidden = random({2100, 16}, 1, type), head = random({37, 16}, 2, type),
                     targets = random_ids(2100, 37, 3);
    const at::Tensor whole = token_logprobs(hidden, head, targets, {});
    ASSERT_EQ(whole.scalar_type(), at::kFloat);
    for (const int64_t from : {0, 1, 1023, 1024, 2090}) {
      for (const int64_t count : {1, 2, 10}) {
        EXPECT_TRUE(same_bits(token_logprobs(hidden.narrow(0, from, count), head, targets.narrow(0, from, count), {}),
                              whole.narrow(0, from, count)));
      }
    }
  }
  const at::Tensor hidden = random({2100, 16}, 1, at::kDouble), head = random({37, 16}, 2, at::kDouble),
                   targets = random_ids(2100, 37, 3);
  expect_matches(
      {hidden, head}, [&](const Tensors& t) { return token_logprobs(t[0], t[1], targets, {}); },
      [&](const Tensors& t) {
        return at::log_softmax(at::linear(t[0], t[1]), -1).gather(1, targets.unsqueeze(1)).squeeze(1);
      },
      1e-11);
}

TEST(TokenLogprobs, BFloat16GradientsAreCloseToFloat32) {
  const at::Tensor hidden = random({30, 32}, 1, at::kBFloat16), head = random({50, 32}, 2, at::kBFloat16),
                   targets = random_ids(30, 50, 3);
  const auto f = [&](const Tensors& t) { return token_logprobs(t[0], t[1], targets, {}).to(at::kFloat); };
  const auto a = testing::gradients({hidden, head}, f),
             e = testing::gradients({hidden.to(at::kFloat), head.to(at::kFloat)}, f);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(a[i].scalar_type(), at::kBFloat16);
    EXPECT_LE(testing::relative_error(a[i], e[i]), 0.02);
  }
}

TEST(TokenLogprobs, FilteredTargetIsAnErrorThatNamesTheRowOrMinusInfinity) {
  const at::Tensor hidden = random({4, 8}, 1), head = random({20, 8}, 2);
  at::Tensor targets = likely_targets(hidden, head);
  targets[2] = std::get<1>(at::linear(hidden, head).min(-1))[2];
  LogprobOptions options;
  options.top_k = 3;
  try {
    token_logprobs(hidden, head, targets, options);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("row 2"), std::string::npos) << error.what();
  }
  options.allow_filtered = true;
  const at::Tensor logprobs = token_logprobs(hidden, head, targets, options);
  EXPECT_EQ(logprobs[2].item<float>(), -INFINITY);
  EXPECT_TRUE(std::isfinite(logprobs[1].item<float>()));
  const auto grads = testing::gradients({hidden, head}, [&](const Tensors& t) {
    return token_logprobs(t[0], t[1], targets, options).masked_fill(targets == targets[2], 0.0);
  });
  EXPECT_TRUE(grads[0].isfinite().all().item<bool>());
  EXPECT_EQ(grads[0][2].abs().max().item<float>(), 0.0f);
}

TEST(TokenLogprobs, BadArgumentsAreNamed) {
  const at::Tensor hidden = random({2, 4}, 1), head = random({5, 4}, 2);
  LogprobOptions cold;
  cold.temperature = 0.0;
  EXPECT_THROW(token_logprobs(hidden, head, at::tensor({1, 2}, at::kLong), cold), Error);
  EXPECT_THROW(token_logprobs(hidden, head, at::tensor({1, 5}, at::kLong), {}), Error);
  LogprobOptions p;
  p.top_p = 0.0;
  EXPECT_THROW(token_logprobs(hidden, head, at::tensor({1, 2}, at::kLong), p), Error);
}

TEST(TokenLogprobs, TiesOfTheKthStay) {
  const at::Tensor hidden = at::ones({1, 1}), head = at::tensor({3.0f, 2.0f, 2.0f, 1.0f}).view({4, 1});
  LogprobOptions options;
  options.top_k = 2;
  const double total = std::exp(3.0) + 2 * std::exp(2.0);
  EXPECT_NEAR(token_logprobs(hidden, head, at::tensor({2}, at::kLong), options).item<float>(), 2.0 - std::log(total),
              1e-6);
}

std::vector<SampleRow> sample_keys(int64_t rows, const LogprobOptions& options, uint64_t seed) {
  std::vector<SampleRow> keys(static_cast<size_t>(rows));
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = {options, {seed, i / 3, i}, false};
  return keys;
}

TEST(Sample, LogprobsHaveTheBitsOfTheLoss) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor hidden = random({60, 24}, 1, type), head = random({130, 24}, 2, type, 0.5);
    for (const LogprobOptions& options : all_options()) {
      const SampleResult result = sample_tokens(hidden, head, sample_keys(60, options, 5));
      const at::Tensor ids = at::tensor(result.ids, at::kLong);
      EXPECT_TRUE(same_bits(token_logprobs(hidden, head, ids, options), at::tensor(result.logprobs, at::kFloat)));
      // With gradients recorded the forward is the same.
      const at::Tensor leaf = hidden.clone().set_requires_grad(true);
      EXPECT_TRUE(
          same_bits(token_logprobs(leaf, head, ids, options).detach(), at::tensor(result.logprobs, at::kFloat)));
    }
  }
}

TEST(Sample, ADrawDependsOnItsKeyOnly) {
  const at::Tensor hidden = random({40, 24}, 1), head = random({90, 24}, 2);
  LogprobOptions options;
  options.top_p = 0.95;
  const auto keys = sample_keys(40, options, 7);
  const SampleResult whole = sample_tokens(hidden, head, keys);
  for (int64_t i = 39; i >= 0; --i) {
    const SampleResult one = sample_tokens(hidden.narrow(0, i, 1), head, {keys[static_cast<size_t>(i)]});
    EXPECT_EQ(one.ids[0], whole.ids[static_cast<size_t>(i)]);
    EXPECT_EQ(one.logprobs[0], whole.logprobs[static_cast<size_t>(i)]);
  }
  const SampleResult other = sample_tokens(hidden, head, sample_keys(40, options, 8));
  EXPECT_NE(other.ids, whole.ids);
}

TEST(Sample, FrequenciesFollowTheDistribution) {
  constexpr int64_t kRows = 20000;
  const at::Tensor row = random({1, 8}, 1), head = random({12, 8}, 2, at::kFloat, 0.4);
  for (const LogprobOptions& options : all_options()) {
    const at::Tensor p = filtered_log_softmax(row.to(at::kDouble), head.to(at::kDouble),
                                              [&] {
                                                LogprobOptions o = options;
                                                o.top_k = std::min<int64_t>(o.top_k, 12);
                                                return o;
                                              }())
                             .exp();
    const SampleResult result =
        sample_tokens(row.expand({kRows, 8}).contiguous(), head, sample_keys(kRows, options, 11));
    std::vector<double> counts(12, 0.0);
    for (const int64_t id : result.ids) counts[static_cast<size_t>(id)] += 1.0 / kRows;
    for (int64_t j = 0; j < 12; ++j)
      EXPECT_NEAR(counts[static_cast<size_t>(j)], p[0][j].item<double>(), 0.02) << "token " << j;
  }
}

TEST(Sample, GreedyTakesTheFirstLargest) {
  const at::Tensor hidden = at::ones({1, 1}), head = at::tensor({1.0f, 3.0f, 3.0f}).view({3, 1});
  const SampleResult result = sample_tokens(hidden, head, {{{}, {}, true}});
  EXPECT_EQ(result.ids[0], 1);
  EXPECT_NEAR(result.logprobs[0], 3.0 - std::log(std::exp(1.0) + 2 * std::exp(3.0)), 1e-6);
}

TEST(Sample, LogitsThatAreNotFiniteAreAnError) {
  at::Tensor head = random({6, 4}, 2);
  head[3][1] = NAN;
  try {
    sample_tokens(random({2, 4}, 1), head, sample_keys(2, {}, 1));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("not finite"), std::string::npos);
  }
}

}  // namespace
}  // namespace trireme
