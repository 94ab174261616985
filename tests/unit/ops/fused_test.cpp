// The fused steps on CPU against the separate ops they stand for.
#include "base/error.h"
#include "tests/unit/ops/testing.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

using testing::expect_matches;
using testing::gradients;
using testing::random;
using testing::random_ids;
using testing::relative_error;
using testing::same_bits;
using Tensors = std::vector<at::Tensor>;

constexpr double kEps = 1e-6;

class FusedSteps : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Ops, FusedSteps, ::testing::Values(at::kDouble, at::kFloat, at::kBFloat16));

TEST_P(FusedSteps, AddRmsNormHasTheBitsOfTheSeparateOps) {
  const at::NoGradGuard no_grad;
  const auto type = GetParam();
  const at::Tensor x = random({37, 72}, 1, type), delta = random({37, 72}, 2, type), w = random({72}, 3, type);
  const NormResult both = add_rms_norm(x, delta, w, kEps);
  EXPECT_TRUE(same_bits(both.sum, x + delta));
  EXPECT_TRUE(same_bits(both.normed, trireme::rms_norm(x + delta, w, kEps)));
  const NormResult first = add_rms_norm(x, at::Tensor(), w, kEps);
  EXPECT_TRUE(same_bits(first.sum, x));
  EXPECT_TRUE(same_bits(first.normed, trireme::rms_norm(x, w, kEps)));
}

TEST_P(FusedSteps, SwigluHalvesHasTheBitsOfSwiglu) {
  const at::NoGradGuard no_grad;
  const at::Tensor gate = random({29, 40}, 1, GetParam(), 3.0), up = random({29, 40}, 2, GetParam());
  EXPECT_TRUE(same_bits(swiglu_halves(at::cat({gate, up}, 1)), swiglu(gate, up)));
}

struct QkvCase {
  QkvLayout layout{6, 2, 24, 1e-5};
  at::Tensor q, k, v, q_norm, k_norm, table, positions;

  explicit QkvCase(at::ScalarType type, int64_t tokens = 31) {
    q = random({tokens, layout.q_heads, layout.head_dim}, 1, type);
    k = random({tokens, layout.kv_heads, layout.head_dim}, 2, type);
    v = random({tokens, layout.kv_heads, layout.head_dim}, 3, type);
    q_norm = random({layout.head_dim}, 4, type);
    k_norm = random({layout.head_dim}, 5, type);
    RopeOptions options;
    options.head_dim = layout.head_dim;
    table = rope_table(at::arange(500, at::kLong), options, type == at::kDouble ? at::kDouble : at::kFloat);
    positions = random_ids(tokens, 500, 6);
  }
  at::Tensor qkv() const { return at::cat({q.flatten(1), k.flatten(1), v.flatten(1)}, 1); }
  at::Tensor rows_of_table() const { return table.index_select(0, positions); }
};

TEST_P(FusedSteps, SplitQkvHasTheBitsOfTheSeparateOps) {
  const at::NoGradGuard no_grad;
  const QkvCase c(GetParam());
  const Qkv plain = split_qkv(c.qkv(), at::Tensor(), at::Tensor(), c.table, c.positions, c.layout);
  EXPECT_TRUE(same_bits(plain.q, rope(c.q, c.rows_of_table())));
  EXPECT_TRUE(same_bits(plain.k, rope(c.k, c.rows_of_table())));
  EXPECT_TRUE(same_bits(plain.v, c.v));
  const Qkv normed = split_qkv(c.qkv(), c.q_norm, c.k_norm, c.table, c.positions, c.layout);
  EXPECT_TRUE(same_bits(normed.q, rope(trireme::rms_norm(c.q, c.q_norm, c.layout.eps), c.rows_of_table())));
  EXPECT_TRUE(same_bits(normed.k, rope(trireme::rms_norm(c.k, c.k_norm, c.layout.eps), c.rows_of_table())));
  EXPECT_TRUE(same_bits(normed.v, c.v));
}

TEST_P(FusedSteps, SplitQkvCachedFillsTheArena) {
  const QkvCase c(GetParam(), 7);
  CachePlan plan;
  plan.host_runs = {{10, 3, 4}, {30, 0, 1}, {2, 5, 2}};
  const std::vector<int64_t> rows = {13, 14, 15, 16, 30, 7, 8};
  const at::Tensor arena_k = random({40, 2, 24}, 7, GetParam()), arena_v = random({40, 2, 24}, 8, GetParam());
  at::Tensor expected_k = arena_k.clone(), expected_v = arena_v.clone();
  const at::Tensor leaf = c.qkv().set_requires_grad(true);
  const at::Tensor q =
      split_qkv_cached(leaf, c.q_norm, c.k_norm, c.table, c.positions, c.layout, arena_k, arena_v, plan);
  EXPECT_FALSE(q.requires_grad());
  const at::NoGradGuard no_grad;
  const Qkv parts = split_qkv(c.qkv(), c.q_norm, c.k_norm, c.table, c.positions, c.layout);
  for (int64_t t = 0; t < 7; ++t) {
    expected_k[rows[static_cast<size_t>(t)]].copy_(parts.k[t]);
    expected_v[rows[static_cast<size_t>(t)]].copy_(parts.v[t]);
  }
  EXPECT_TRUE(same_bits(q, parts.q));
  EXPECT_TRUE(same_bits(arena_k, expected_k));
  EXPECT_TRUE(same_bits(arena_v, expected_v));
}

class FusedGradients : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Ops, FusedGradients, ::testing::Values(at::kDouble, at::kFloat));

double tolerance(at::ScalarType type) { return type == at::kDouble ? 1e-11 : 6e-6; }

TEST_P(FusedGradients, AddRmsNorm) {
  const auto type = GetParam();
  expect_matches(
      {random({21, 40}, 1, type), random({21, 40}, 2, type), random({40}, 3, type)},
      [](const Tensors& t) {
        const NormResult result = add_rms_norm(t[0], t[1], t[2], kEps);
        return at::cat({result.sum, result.normed});
      },
      [](const Tensors& t) {
        const at::Tensor sum = t[0] + t[1];
        return at::cat({sum, sum * at::rsqrt(sum.square().mean(-1, true) + kEps) * t[2]});
      },
      tolerance(type));
}

TEST_P(FusedGradients, SwigluHalves) {
  const auto type = GetParam();
  expect_matches(
      {random({23, 36}, 1, type, 3.0)}, [](const Tensors& t) { return swiglu_halves(t[0]); },
      [](const Tensors& t) { return at::silu(t[0].narrow(1, 0, 18)) * t[0].narrow(1, 18, 18); }, tolerance(type));
}

TEST_P(FusedGradients, SplitQkv) {
  const auto type = GetParam();
  const QkvCase c(type);
  const at::Tensor cos = c.rows_of_table().select(1, 0).repeat({1, 2}).unsqueeze(1),
                   sin = c.rows_of_table().select(1, 1).repeat({1, 2}).unsqueeze(1);
  const auto reference = [&](const at::Tensor& x, const at::Tensor& norm) {
    const at::Tensor n = norm.defined() ? x * at::rsqrt(x.square().mean(-1, true) + c.layout.eps) * norm : x;
    const auto halves = n.chunk(2, -1);
    return n * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
  };
  const auto joined = [](const Qkv& parts) { return at::cat({parts.q, parts.k, parts.v}, 1); };
  const auto by_hand = [&](const at::Tensor& qkv, const at::Tensor& q_norm, const at::Tensor& k_norm) {
    const at::Tensor heads = qkv.view({-1, 10, 24});
    return at::cat(
        {reference(heads.narrow(1, 0, 6), q_norm), reference(heads.narrow(1, 6, 2), k_norm), heads.narrow(1, 8, 2)}, 1);
  };
  expect_matches(
      {c.qkv(), c.q_norm, c.k_norm},
      [&](const Tensors& t) { return joined(split_qkv(t[0], t[1], t[2], c.table, c.positions, c.layout)); },
      [&](const Tensors& t) { return by_hand(t[0], t[1], t[2]); }, tolerance(type));
  const at::Tensor none;
  expect_matches(
      {c.qkv()}, [&](const Tensors& t) { return joined(split_qkv(t[0], none, none, c.table, c.positions, c.layout)); },
      [&](const Tensors& t) { return by_hand(t[0], none, none); }, tolerance(type));
}

TEST(FusedStepErrors, NameTheShape) {
  const at::Tensor x = at::zeros({2, 8}), w = at::ones({8}), none;
  const QkvLayout layout{2, 1, 4, 1e-6};
  RopeOptions options;
  options.head_dim = 4;
  const at::Tensor table = rope_table(at::arange(4, at::kLong), options), positions = at::arange(2, at::kLong);
  const auto message = [](auto&& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const auto has = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(has(message([&] { add_rms_norm(x, at::zeros({3, 8}), w, kEps); }), "same shape"));
  EXPECT_TRUE(has(message([&] { add_rms_norm(x, none, at::ones({7}), kEps); }), "[width]"));
  EXPECT_TRUE(has(message([&] { swiglu_halves(at::zeros({2, 7})); }), "2 * width"));
  EXPECT_TRUE(has(message([&] { split_qkv(x, none, none, table, positions, layout); }), "kv_heads"));
  const at::Tensor qkv = at::zeros({2, 16});
  EXPECT_TRUE(has(message([&] { split_qkv(qkv, at::ones({4}), none, table, positions, layout); }), "come together"));
  EXPECT_TRUE(has(message([&] { split_qkv(qkv, none, none, table, at::arange(3, at::kLong), layout); }), "positions"));
  EXPECT_TRUE(has(message([&] {
                    split_qkv_cached(qkv, none, none, table, positions, layout, at::zeros({4, 2, 4}),
                                     at::zeros({4, 2, 4}), CachePlan{{{0, 0, 2}}, {}, {}, {}, false});
                  }),
                  "capacity"));
}

}  // namespace
}  // namespace trireme
