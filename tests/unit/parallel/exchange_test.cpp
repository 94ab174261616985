#include "trainer/parallel/exchange.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "tests/unit/parallel/ranks.h"
#include "trainer/parallel/rows_beside.h"

namespace trireme {
namespace {

// Runs body(group, rank) on a thread per rank of one tensor group.
void on_tensor_ranks(int world, const std::function<void(Communicator&, int)>& body) {
  Layout layout;
  layout.tp = world;
  test::on_layout(layout, [&](ParallelContext& context) { body(context.tensor_parallel(), context.rank()); });
}

at::Tensor values(int rank, int64_t rows, int64_t width, at::ScalarType dtype) {
  const at::Tensor x = at::arange(rows * width, at::kDouble) + 1000 * rank;
  return ((x * 0.37).sin() * ((x * 0.011).cos() * 4).exp()).view({rows, width}).to(dtype);
}

// The definition, one element at a time and without ATen's additions.
at::Tensor oracle(int world, int64_t rows, int64_t width, at::ScalarType dtype) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < world; ++rank) parts.push_back(values(rank, rows, width, dtype).to(at::kDouble).view({-1}));
  std::vector<double> sums;
  for (int64_t i = 0; i < rows * width; ++i) {
    if (dtype == at::kDouble) {
      double sum = 0;
      for (const at::Tensor& part : parts) sum += part.const_data_ptr<double>()[i];
      sums.push_back(sum);
    } else {
      volatile float sum = 0;
      for (const at::Tensor& part : parts) sum = sum + static_cast<float>(part.const_data_ptr<double>()[i]);
      sums.push_back(sum);
    }
  }
  return at::tensor(sums, at::kDouble).to(at::kFloat == dtype ? at::kFloat : at::kDouble).to(dtype).view({rows, width});
}

TEST(Exchange, SumsAreTheOrderedOnesWhateverTheRows) {
  for (const int world : {2, 3, 4}) {
    on_tensor_ranks(world, [&](Communicator& group, int rank) {
      for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
        // Below and above what goes in one step; also rows that do not divide among the ranks, and none.
        for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{world * 2}, int64_t{world * 3000 + 1}}) {
          const at::Tensor partial = values(rank, rows, 24, dtype);
          EXPECT_TRUE(at::equal(sum_rows(group, partial), oracle(world, rows, 24, dtype))) << world << " " << rows;
          const int64_t even = rows / world * world;
          const at::Tensor own = sum_to_rows(group, partial.narrow(0, 0, even));
          EXPECT_TRUE(at::equal(own, oracle(world, rows, 24, dtype).narrow(0, rank * even / world, even / world)));
          const at::Tensor all = gather_rows(group, own);
          EXPECT_TRUE(at::equal(all, oracle(world, rows, 24, dtype).narrow(0, 0, even)));
        }
      }
      EXPECT_EQ(exchange_problem(group, 40, at::TensorOptions(at::kBFloat16)), std::nullopt);
      EXPECT_EQ(exchange_problem(group, 40, at::TensorOptions(at::kFloat)), std::nullopt);
      // A row is more than goes in one step.
      EXPECT_EQ(exchange_problem(group, 70'000, at::TensorOptions(at::kFloat)), std::nullopt);
    });
  }
}

// In two calls, with others between them: the same rows and the same sums.
TEST(Exchange, WhatTravelsBesideComputationHasTheBitsOfWhatIsAwaited) {
  for (const int world : {2, 3, 4}) {
    on_tensor_ranks(world, [&](Communicator& group, int rank) {
      for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
        for (const int64_t each : {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{3000}}) {
          const at::Tensor own = values(rank, each, 24, dtype);
          const at::Tensor partial = values(50 + rank, each * world, 24, dtype);
          const at::Tensor gathered = gather_rows(group, own), summed = sum_to_rows(group, partial);
          for (const bool beside : {true, false}) {
            RowsComing rows(group, own, beside);
            const at::Tensor others = at::cat(
                {partial.narrow(0, 0, rank * each), partial.narrow(0, (rank + 1) * each, (world - 1 - rank) * each)});
            SumsComing sums(group, others, beside);
            sums.own().copy_(partial.narrow(0, rank * each, each));
            EXPECT_TRUE(at::equal(sums.finish(), summed)) << world << " " << each;
            EXPECT_TRUE(at::equal(rows.all(), gathered)) << world << " " << each;
          }
        }
      }
    });
  }
}

TEST(Exchange, TheNormOfASumIsThatOfTheSumByItself) {
  for (const int world : {2, 3}) {
    on_tensor_ranks(world, [&](Communicator& group, int rank) {
      for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{4000}}) {
        const at::Tensor x = values(99, rows, 64, at::kBFloat16), scale = values(98, 1, 64, at::kBFloat16).view({64});
        const at::Tensor sum = oracle(world, rows, 64, at::kBFloat16);
        const NormResult expected = add_rms_norm(x, sum, scale, 1e-6);
        const NormResult found = sum_add_rms_norm(group, x, values(rank, rows, 64, at::kBFloat16), scale, 1e-6);
        EXPECT_TRUE(at::equal(found.sum, expected.sum) && at::equal(found.normed, expected.normed)) << rows;
      }
    });
  }
}

TEST(Exchange, ColumnsBecomeWholeRowsAndRowsColumns) {
  constexpr int kWorld = 3;
  constexpr int64_t kOwn = 4, kWidth = 8;
  const at::Tensor whole = values(5, kWorld * kOwn, kWorld * kWidth, at::kFloat);
  on_tensor_ranks(kWorld, [&](Communicator& group, int rank) {
    const at::Tensor columns = whole.narrow(1, rank * kWidth, kWidth), rows = whole.narrow(0, rank * kOwn, kOwn);
    EXPECT_TRUE(at::equal(whole_rows(group, columns), rows));
    EXPECT_TRUE(at::equal(own_columns(group, rows.contiguous()), columns));
    EXPECT_EQ(whole_rows(group, columns.narrow(0, 0, 0)).sizes(), (std::vector<int64_t>{0, kWorld * kWidth}));
    const DeviceSamples drawn{at::full({2}, int64_t{10 + rank}, at::kLong), at::full({2}, -0.5f * rank)};
    const DeviceSamples all = gather_samples(group, drawn);
    EXPECT_TRUE(at::equal(all.ids, at::tensor({10, 10, 11, 11, 12, 12}, at::kLong)));
    EXPECT_TRUE(at::equal(all.logprobs, at::tensor({0.0f, 0.0f, -0.5f, -0.5f, -1.0f, -1.0f})));
  });
}

TEST(Exchange, OneElementTravelsWhateverStrideItSays) {
  constexpr int kWorld = 2;
  on_tensor_ranks(kWorld, [&](Communicator& group, int rank) {
    const at::Tensor own = at::full({1, 128}, 1.5f * (rank + 1)).narrow(1, 7, 1);
    ASSERT_EQ(own.stride(0), 128);
    ASSERT_TRUE(own.is_contiguous());
    EXPECT_TRUE(at::equal(share_rows(group, own), at::tensor({1.5f, 3.0f}).view({2, 1})));
  });
}

// y = sum_to_rows(gather_rows(x) * w_rank): against the same on one rank.
TEST(Exchange, GradientsAreThoseOfOneRank) {
  constexpr int kWorld = 3;
  constexpr int64_t kOwn = 4, kWidth = 5;
  std::vector<at::Tensor> x, w;
  for (int rank = 0; rank < kWorld; ++rank) {
    x.push_back(values(rank, kOwn, kWidth, at::kDouble).set_requires_grad(true));
    w.push_back(values(rank + 7, 1, kWidth, at::kDouble).set_requires_grad(true));
  }
  const at::Tensor all = at::cat(x);
  at::Tensor y = at::zeros_like(all.detach());
  for (const at::Tensor& weight : w) y = y + all * weight;
  const at::Tensor loss = (y * y).sum();
  std::vector<at::Tensor> inputs = x;
  inputs.insert(inputs.end(), w.begin(), w.end());
  const auto expected = torch::autograd::grad({loss}, inputs);
  on_tensor_ranks(kWorld, [&](Communicator& group, int rank) {
    const at::Tensor own = x[rank].detach().clone().set_requires_grad(true);
    const at::Tensor weight = w[rank].detach().clone().set_requires_grad(true);
    const at::Tensor mine = sum_to_rows(group, gather_rows(group, own) * weight);
    const auto gradients = torch::autograd::grad({(mine * mine).sum()}, {own, weight});
    EXPECT_LT((gradients[0] - expected[rank]).abs().max().item<double>(), 1e-9);
    EXPECT_LT((gradients[1] - expected[kWorld + rank]).abs().max().item<double>(), 1e-9);
    // What is summed for all is used alike by all: each rank's part gets the whole gradient.
    const at::Tensor part = own.detach().clone().set_requires_grad(true);
    const at::Tensor whole = sum_rows(group, part);
    const auto gradient = torch::autograd::grad({(whole * 3).sum()}, {part});
    EXPECT_TRUE(at::equal(gradient[0], at::full_like(part, 3)));
    const at::Tensor shared = share_rows(group, part);
    const auto of_own = torch::autograd::grad({(shared * (at::arange(kWorld * kOwn).view({-1, 1}) + 1)).sum()}, {part});
    EXPECT_TRUE(at::equal(of_own[0].select(1, 0), (at::arange(kOwn) + rank * kOwn + 1).to(at::kDouble)));
  });
}

TEST(Exchange, RowsGoToWhomTheyAreForAndGradientsComeBack) {
  constexpr int kWorld = 3;
  on_tensor_ranks(kWorld, [&](Communicator& group, int rank) {
    // Rank 1 has rows for nobody, rank 2 gets none.
    const std::vector<std::vector<int64_t>> counts{{2, 1, 0}, {0, 0, 0}, {3, 4, 0}};
    std::vector<int64_t> to = counts[rank], from;
    for (const auto& of : counts) from.push_back(of[rank]);
    int64_t rows = 0, coming = 0;
    for (const int64_t n : to) rows += n;
    for (const int64_t n : from) coming += n;
    const at::Tensor own = values(rank, rows, 6, at::kFloat).set_requires_grad(true);
    const at::Tensor got = all_to_all_rows(group, own, to, from);
    ASSERT_EQ(got.size(0), coming);
    int64_t at_row = 0;
    for (int other = 0; other < kWorld; ++other) {
      int64_t begin = 0;
      for (int r = 0; r < rank; ++r) begin += counts[other][r];
      const at::Tensor theirs = values(other, begin + from[other], 6, at::kFloat).narrow(0, begin, from[other]);
      EXPECT_TRUE(at::equal(got.narrow(0, at_row, from[other]).detach(), theirs));
      at_row += from[other];
    }
    const auto gradient = torch::autograd::grad({(got * (rank + 1)).sum()}, {own});
    at_row = 0;
    for (int other = 0; other < kWorld; ++other) {
      EXPECT_TRUE(at::equal(gradient[0].narrow(0, at_row, to[other]), at::full({to[other], 6}, other + 1.0f)));
      at_row += to[other];
    }
  });
}

TEST(Exchange, AloneNothingIsDone) {
  Communicator alone;
  const at::Tensor x = values(0, 4, 3, at::kFloat);
  EXPECT_TRUE(gather_rows(alone, x).is_same(x));
  EXPECT_TRUE(sum_rows(alone, x).is_same(x));
  EXPECT_TRUE(sum_to_rows(alone, x).is_same(x));
  EXPECT_TRUE(all_to_all_rows(alone, x, {4}, {4}).is_same(x));
}

}  // namespace
}  // namespace trireme
