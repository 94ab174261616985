// A micro-batch over context parallel ranks against one rank: hidden states, log-probs, gradients.
#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "base/text.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/model/context_rows.h"
#include "trainer/model/model.h"
#include "trainer/parallel/exchange.h"

namespace trireme {
namespace {

using testing::eight_heads;
using testing::fill;
using testing::part_of;
using testing::random_tokens;
using testing::same_bits;
using testing::split_options;
using testing::sum_over_tensor_ranks;

struct ContextCase {
  const char* name;
  std::vector<int64_t> lengths;
  std::vector<int64_t> prefix;
};

// Cut in folds, cut in blocks, dealt whole, behind shared prompts, and ranks without rows.
const std::vector<ContextCase> kContextCases = {
    {"long", {1100, 9}, {}},
    {"blocks", {300, 41, 17}, {}},
    {"short", {17, 9, 30, 5, 12}, {}},
    {"prompts", {150, 40, 200, 11, 30, 21}, {-1, 0, 0, -1, 3, 3}},
    {"one short", {7}, {}},
};

PackedBatch batch_of(const ContextCase& which) {
  std::vector<std::vector<int32_t>> sequences;
  for (const int64_t length : which.lengths) sequences.push_back(random_tokens(length, sequences.size() + 1));
  PackedBatch batch = PackedBatch::from_sequences(sequences);
  batch.prefix = which.prefix;
  for (size_t s = 0; s < which.prefix.size(); ++s) {
    if (which.prefix[s] < 0) continue;
    batch.positions.narrow(0, batch.starts[s], which.lengths[s])
        .add_(which.lengths[static_cast<size_t>(which.prefix[s])]);
  }
  return batch;
}

struct ContextResult {
  at::Tensor hidden, logprobs;  // of own rows
};

// Every row counts, each with another weight, the same one wherever it is computed.
ContextResult context_pass(Model& model, const PackedBatch& whole) {
  const PackedBatch part = context_part(model, whole);
  std::vector<int64_t> all(static_cast<size_t>(whole.tokens()));
  std::iota(all.begin(), all.end(), int64_t{0});
  const at::Tensor rows = at::tensor(part.context ? part.context->rows : all, at::kLong);
  const at::Tensor targets = whole.ids.roll(1).index_select(0, rows);
  const at::Tensor weights = at::linspace(-1, 2, whole.tokens()).index_select(0, rows);
  const at::Tensor hidden = model.forward(part), logprobs = model.logprobs(hidden, targets, {});
  (logprobs * weights).sum().backward();
  return {hidden.detach(), logprobs.detach()};
}

void check_context(const ModelConfig& config, int64_t tp, int64_t cp) {
  for (const ContextCase& which : kContextCases) {
    const PackedBatch batch = batch_of(which);
    Model whole(config, {});
    fill(whole);
    const ContextResult one_rank = context_pass(whole, batch);
    Layout plain;
    plain.tp = tp;
    ContextResult wanted = one_rank;
    if (tp > 1) {
      test::on_layout(plain, [&](ParallelContext& context) {
        Model model(config, split_options(context, config));
        fill(model);
        const ContextResult got = context_pass(model, batch);
        if (context.is_main()) wanted = got;
      });
    }
    Layout layout = plain;
    layout.cp = cp;
    test::on_layout(layout, [&](ParallelContext& context) {
      Model model(config, split_options(context, config));
      fill(model);
      const ContextResult got = context_pass(model, batch);
      const at::Tensor rows = at::tensor(context_part(model, batch).context->rows, at::kLong);
      EXPECT_TRUE(same_bits(got.hidden, wanted.hidden.index_select(0, rows))) << which.name;
      EXPECT_TRUE(same_bits(got.logprobs, wanted.logprobs.index_select(0, rows))) << which.name;
      const at::Tensor own = model.flat_gradients().clone();
      for (const Parameter& parameter : model.parameters()) {
        if (!parameter.trainable) continue;  // a frozen router
        at::Tensor gradient = sum_over_tensor_ranks(context, parameter);
        context.data_parallel().all_reduce_sum(gradient);
        const at::Tensor expected = part_of(parameter, whole.find(parameter.name)->tensor.grad());
        if (expected.numel() == 0) continue;
        const double largest = expected.abs().max().item<double>();
        EXPECT_LE((gradient - expected).abs().max().item<double>(), 1e-5 * std::max(largest, 1e-3))
            << which.name << " " << parameter.name;
      }
      // What backward computes again changes no bit.
      model.zero_gradients();
      model.set_recompute({1, 1});
      (void)context_pass(model, batch);
      EXPECT_TRUE(same_bits(model.flat_gradients(), own)) << which.name;
    });
  }
}

TEST(ContextParallel, TwoAndFourRanksGiveTheBitsOfOne) {
  check_context(eight_heads(ModelFamily::kQwen3, true), 1, 2);
  check_context(eight_heads(ModelFamily::kLlama, false), 1, 4);
  check_context(eight_heads(ModelFamily::kQwen2, false), 1, 4);
  check_context(eight_heads(ModelFamily::kQwen3Moe, false), 1, 2);
}

TEST(ContextParallel, WithTensorRanksTheBitsAreTheirs) {
  check_context(eight_heads(ModelFamily::kQwen3, false), 2, 2);
  check_context(eight_heads(ModelFamily::kQwen3Moe, false), 2, 2);
}

TEST(ContextParallel, RowsAreOfOneRankEach) {
  for (const ContextCase& which : kContextCases) {
    const PackedBatch batch = batch_of(which);
    for (const int64_t ranks : {2, 4}) {
      std::vector<int64_t> all;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const PackedBatch part = context_part(batch, {.row = 100, .square = 1}, ranks, rank);
        for (const int64_t row : part.context->rows) {
          EXPECT_EQ(part.context->places[static_cast<size_t>(row)], static_cast<int64_t>(all.size()));
          all.push_back(row);
        }
        EXPECT_EQ(part.tokens(), part.context->counts[static_cast<size_t>(rank)]);
        const OwnRows own = own_rows(batch, {.row = 100, .square = 1}, ranks, rank);
        EXPECT_EQ(own.rows, part.tokens());
        const std::vector<int64_t>& shared = part.context->shared_counts;
        EXPECT_EQ(own.shared, std::accumulate(shared.begin(), shared.end(), int64_t{0}));
        if (std::string(which.name) == "one short") {
          EXPECT_EQ(part.tokens(), rank == 0 ? 7 : 0);
        }
      }
      std::sort(all.begin(), all.end());
      ASSERT_EQ(static_cast<int64_t>(all.size()), batch.tokens());
      for (size_t i = 0; i < all.size(); ++i) EXPECT_EQ(all[i], static_cast<int64_t>(i));
    }
  }
}

// Rank r has 2 r rows: 0, 2 and 4 of them.
TEST(ContextParallel, UnevenRowsGoToAllAndTheirGradientsBack) {
  Layout layout;
  layout.cp = 3;
  test::on_layout(layout, [&](ParallelContext& context) {
    Communicator& group = context.group(Axis::kCp);
    const std::vector<int64_t> counts = {0, 2, 4};
    const int64_t rank = group.rank(), begin = rank == 2 ? 2 : 0;
    const at::Tensor whole = at::arange(18, at::kFloat).view({6, 3});
    const at::Tensor own = whole.narrow(0, begin, 2 * rank).clone().set_requires_grad(true);
    const at::Tensor all = gather_rows(group, own, counts);
    EXPECT_TRUE(same_bits(all.detach(), whole));
    (all * whole * static_cast<double>(rank + 1)).sum().backward();
    EXPECT_TRUE(same_bits(own.grad(), whole.narrow(0, begin, 2 * rank) * 6));  // 1 + 2 + 3
    own.mutable_grad() = at::Tensor();
    const at::Tensor shared = share_rows(group, own, counts);
    EXPECT_TRUE(same_bits(shared.detach(), whole));
    (shared * whole).sum().backward();
    EXPECT_TRUE(same_bits(own.grad(), whole.narrow(0, begin, 2 * rank)));
  });
}

}  // namespace
}  // namespace trireme
