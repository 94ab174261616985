#include <cmath>

#include "base/error.h"
#include "tests/unit/ops/testing.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

using testing::expect_matches;
using testing::random;
using testing::same_bits;
using Tensors = std::vector<at::Tensor>;

// One sequence after another with plain matrix products and a causal mask.
at::Tensor reference(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const std::vector<int64_t>& starts) {
  const int64_t group = q.size(1) / k.size(1);
  Tensors parts;
  for (size_t s = 0; s + 1 < starts.size(); ++s) {
    const int64_t count = starts[s + 1] - starts[s];
    if (count == 0) continue;
    const auto heads = [&](const at::Tensor& t, int64_t repeat) {
      return t.narrow(0, starts[s], count).repeat_interleave(repeat, 1).transpose(0, 1);
    };
    const at::Tensor scores =
        at::matmul(heads(q, 1), heads(k, group).transpose(1, 2)) / std::sqrt(static_cast<double>(q.size(2)));
    const at::Tensor mask = at::ones({count, count}, at::kBool).tril().logical_not();
    parts.push_back(at::matmul(at::softmax(scores.masked_fill(mask, -INFINITY), -1), heads(v, group)).transpose(0, 1));
  }
  return at::cat(parts);
}

struct Case {
  int64_t q_heads, kv_heads, head_dim;
};

class Attention : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Shapes, Attention,
                         ::testing::Values(Case{4, 2, 16}, Case{4, 4, 32}, Case{6, 1, 24}, Case{7, 1, 64},
                                           Case{2, 2, 10}, Case{32, 8, 128}));

TEST_P(Attention, MatchesReferenceInFloat64WithGradients) {
  const Case c = GetParam();
  const std::vector<int64_t> starts = {0, 1, 20, 20, 57};
  expect_matches(
      {random({57, c.q_heads, c.head_dim}, 1, at::kDouble), random({57, c.kv_heads, c.head_dim}, 2, at::kDouble),
       random({57, c.kv_heads, c.head_dim}, 3, at::kDouble)},
      [&](const Tensors& t) { return attention_packed(t[0], t[1], t[2], starts); },
      [&](const Tensors& t) { return reference(t[0], t[1], t[2], starts); }, 1e-11);
}

TEST_P(Attention, Float32IsCloseToFloat64) {
  const Case c = GetParam();
  const std::vector<int64_t> starts = {0, 70, 75};
  const Tensors inputs = {random({75, c.q_heads, c.head_dim}, 1), random({75, c.kv_heads, c.head_dim}, 2),
                          random({75, c.kv_heads, c.head_dim}, 3)};
  Tensors wide;
  for (const at::Tensor& t : inputs) wide.push_back(t.to(at::kDouble));
  const auto f = [&](const Tensors& t) { return attention_packed(t[0], t[1], t[2], starts); };
  EXPECT_LE(testing::relative_error(f(inputs), f(wide)), 2e-6);
  const auto narrow_grads = testing::gradients(inputs, f), wide_grads = testing::gradients(wide, f);
  for (size_t i = 0; i < 3; ++i) EXPECT_LE(testing::relative_error(narrow_grads[i], wide_grads[i]), 5e-6);
}

// The invariant the rollout engine stands on: decode, chunked prefill and packed training give a row the same bits.
TEST_P(Attention, CachedRowsHaveTheBitsOfPackedRows) {
  const Case c = GetParam();
  const at::NoGradGuard no_grad;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const std::vector<int64_t> lengths = {37, 1, 64, 18};
    std::vector<int64_t> starts = {0};
    for (const int64_t n : lengths) starts.push_back(starts.back() + n);
    const int64_t total = starts.back();
    const at::Tensor q = random({total, c.q_heads, c.head_dim}, 1, type);
    const at::Tensor k = random({total, c.kv_heads, c.head_dim}, 2, type),
                     v = random({total, c.kv_heads, c.head_dim}, 3, type);
    const at::Tensor packed = attention_packed(q, k, v, starts);
    // Other extents in another order, chunks of changing size, all sequences mixed in one call.
    const std::vector<int64_t> extents = {150, 3, 60, 10};
    for (const std::vector<int64_t>& chunks : {std::vector<int64_t>{1}, {5, 1, 17}, {64}, {16}}) {
      at::Tensor arena_k = at::full({200, c.kv_heads, c.head_dim}, 1e3, at::TensorOptions().dtype(type));
      at::Tensor arena_v = arena_k.clone();
      std::vector<int64_t> done(lengths.size(), 0);
      size_t turn = 0;
      bool more = true;
      while (more) {
        more = false;
        std::vector<CacheRun> runs;
        Tensors qs, ks, vs, expected;
        for (size_t s = 0; s < lengths.size(); ++s) {
          const int64_t count = std::min(chunks[(turn + s) % chunks.size()], lengths[s] - done[s]);
          if (count == 0) continue;
          runs.push_back({extents[s], done[s], count});
          const int64_t at = starts[s] + done[s];
          qs.push_back(q.narrow(0, at, count)), ks.push_back(k.narrow(0, at, count)),
              vs.push_back(v.narrow(0, at, count));
          expected.push_back(packed.narrow(0, at, count));
          done[s] += count;
          more = true;
        }
        ++turn;
        if (!more) break;
        const CachePlan plan{runs};
        append_cached(at::cat(ks), at::cat(vs), arena_k, arena_v, plan);
        ASSERT_TRUE(same_bits(attention_cached(at::cat(qs), arena_k, arena_v, plan), at::cat(expected)))
            << "turn " << turn;
      }
    }
  }
}

// Sequences 1, 2 and 4 see sequence 0, sequence 5 sees 3.
const std::vector<int64_t> kSharedStarts = {0, 23, 24, 64, 69, 86, 90}, kPrefix = {-1, 0, 0, -1, 0, 3};

// Rows of the same sequences with each prefix in front of every user of it, and where the own rows are among them.
struct Unshared {
  std::vector<int64_t> rows, starts{0}, own;
};
Unshared unshared() {
  Unshared u;
  for (size_t s = 0; s < kPrefix.size(); ++s) {
    if (kPrefix[s] >= 0) {
      const auto p = static_cast<size_t>(kPrefix[s]);
      for (int64_t row = kSharedStarts[p]; row < kSharedStarts[p + 1]; ++row) u.rows.push_back(row);
    }
    for (int64_t row = kSharedStarts[s]; row < kSharedStarts[s + 1]; ++row) {
      u.own.push_back(static_cast<int64_t>(u.rows.size()));
      u.rows.push_back(row);
    }
    u.starts.push_back(static_cast<int64_t>(u.rows.size()));
  }
  return u;
}

TEST_P(Attention, SharedPrefixesGiveTheBitsOfRepeatedOnes) {
  const Case c = GetParam();
  const Unshared u = unshared();
  const at::Tensor rows = at::tensor(u.rows, at::kLong), own = at::tensor(u.own, at::kLong);
  const auto shared = [&](const Tensors& t) { return attention_shared(t[0], t[1], t[2], kSharedStarts, kPrefix); };
  const auto repeated = [&](const Tensors& t) {
    return attention_packed(t[0].index_select(0, rows), t[1].index_select(0, rows), t[2].index_select(0, rows),
                            u.starts)
        .index_select(0, own);
  };
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const Tensors inputs = {random({90, c.q_heads, c.head_dim}, 1, type), random({90, c.kv_heads, c.head_dim}, 2, type),
                            random({90, c.kv_heads, c.head_dim}, 3, type)};
    EXPECT_TRUE(same_bits(shared(inputs), repeated(inputs)));
    if (type == at::kBFloat16) continue;
    expect_matches(inputs, shared, repeated, type == at::kDouble ? 1e-13 : 2e-6);
  }
}

TEST(Attention, PrefixesThatCannotBeAreRefused) {
  const at::Tensor x = at::zeros({4, 1, 8});
  for (const std::vector<int64_t>& prefix : {std::vector<int64_t>{-1, 1}, {0, -1}, {-1}, {-1, 2}})
    EXPECT_THROW(attention_shared(x, x, x, {0, 2, 4}, prefix), Error);
  EXPECT_THROW(attention_shared(x, x, x, {0, 1, 2, 4}, {-1, 0, 1}), Error);  // a prefix of a prefix
  EXPECT_THROW(attention_shared(x, x, x, {0, 0, 4}, {-1, 0}), Error);        // of no rows
}

TEST(Attention, SequencesDoNotSeeEachOther) {
  const at::NoGradGuard no_grad;
  const at::Tensor q = random({50, 4, 16}, 1), k = random({50, 2, 16}, 2), v = random({50, 2, 16}, 3);
  const at::Tensor together = attention_packed(q, k, v, {0, 20, 50});
  EXPECT_TRUE(same_bits(attention_packed(q.narrow(0, 20, 30), k.narrow(0, 20, 30), v.narrow(0, 20, 30), {0, 30}),
                        together.narrow(0, 20, 30)));
}

TEST(Attention, ThreadsDoNotChangeBits) {
  const int threads = at::get_num_threads();
  const Tensors inputs = {random({300, 4, 32}, 1), random({300, 2, 32}, 2), random({300, 2, 32}, 3)};
  const auto f = [&](const Tensors& t) { return attention_packed(t[0], t[1], t[2], {0, 200, 300}); };
  at::set_num_threads(1);
  const at::Tensor one = f(inputs);
  const auto one_grads = testing::gradients(inputs, f);
  at::set_num_threads(4);
  EXPECT_TRUE(same_bits(one, f(inputs)));
  const auto grads = testing::gradients(inputs, f);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(one_grads[i], grads[i]));
  at::set_num_threads(threads);
}

TEST(Attention, RunsOutsideTheArenaAreRefused) {
  const at::Tensor arena = at::zeros({10, 1, 8});
  EXPECT_THROW(attention_cached(at::zeros({3, 1, 8}), arena, arena, {{{8, 0, 3}}}), Error);
  EXPECT_THROW(append_cached(at::zeros({3, 1, 8}), at::zeros({3, 1, 8}), arena, arena, {{{0, 0, 2}}}), Error);
}

}  // namespace
}  // namespace trireme
