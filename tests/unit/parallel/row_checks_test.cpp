#include "trainer/parallel/row_checks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <functional>

#include "tests/unit/errors.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/parallel/flat_bytes.h"

namespace trireme {
namespace {

constexpr int64_t kWidth = 40;

void on_expert_ranks(int64_t ranks, const std::function<void(Communicator&)>& body) {
  test::on_layout({.ep = ranks, .dp = ranks}, [&](ParallelContext& context) { body(context.group(Axis::kEtpEp)); });
}

void on_context_ranks(int64_t ranks, const std::function<void(Communicator&)>& body) {
  test::on_layout({.cp = ranks}, [&](ParallelContext& context) { body(context.group(Axis::kCp)); });
}

// A copy whose first element has another lowest bit.
at::Tensor off_by_a_bit(const at::Tensor& rows) {
  at::Tensor other = rows.detach().clone();
  if (other.numel() > 0) *flat_bytes(other).mutable_data_ptr<uint8_t>() ^= 1;
  return other;
}

std::string of_experts(Communicator& group, const ExpertExchanges& exchanges, at::ScalarType dtype = at::kBFloat16) {
  return expert_exchange_problem(group, kWidth, at::TensorOptions(dtype), true, exchanges).value_or("");
}

std::string of_context(Communicator& group, const ContextExchanges& exchanges) {
  return context_exchange_problem(group, kWidth, at::TensorOptions(at::kBFloat16), exchanges).value_or("");
}

// What every rank says where rank 1 alone has met `exchange`, in rows of so many elements.
void expect_blame(Communicator& group, const std::string& said, const std::string& exchange, int64_t width = kWidth) {
  EXPECT_MENTIONS(said,
                  "rank 1 of group '" + group.name() + "' gets other bits than it should by " + exchange + ", in ");
  EXPECT_MENTIONS(said, " rows of " + std::to_string(width) + " elements");
  EXPECT_EQ(group.all_gather_bytes(said), std::vector<std::string>(static_cast<size_t>(group.size()), said));
}

TEST(RowChecks, ExchangesOfExpertAndContextGroupsAreRight) {
  for (const int64_t ranks : {2, 4}) {
    on_expert_ranks(ranks, [&](Communicator& group) {
      for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
        EXPECT_EQ(of_experts(group, {}, dtype), "");
        EXPECT_EQ(expert_exchange_problem(group, kWidth, at::TensorOptions(dtype), false), std::nullopt);
      }
      // A row is more than the many of the others are.
      EXPECT_EQ(expert_exchange_problem(group, 70'000, at::TensorOptions(at::kFloat), true), std::nullopt);
    });
  }
  for (const int64_t ranks : {2, 3}) {
    on_context_ranks(ranks, [&](Communicator& group) {
      for (const auto dtype : {at::kBFloat16, at::kFloat, at::kDouble})
        EXPECT_EQ(context_exchange_problem(group, kWidth, at::TensorOptions(dtype)), std::nullopt);
    });
  }
  Communicator alone;
  EXPECT_EQ(expert_exchange_problem(alone, kWidth, at::TensorOptions(at::kFloat), true), std::nullopt);
  EXPECT_EQ(context_exchange_problem(alone, kWidth, at::TensorOptions(at::kFloat)), std::nullopt);
}

TEST(RowChecks, OneBitOfAnExpertGroupsExchangeIsSeenByAllAndNamed) {
  on_expert_ranks(4, [](Communicator& group) {
    ExpertExchanges dispatch, given_back, gathered, whole;
    dispatch.dispatch = [](Communicator& of, const Dispatch& plan, const std::vector<at::Tensor>& own) {
      std::vector<at::Tensor> got = dispatch_rows(of, plan, own);
      if (of.rank() == 1) got[1] = off_by_a_bit(got[1]);
      return got;
    };
    given_back.give_back = [](Communicator& of, const Dispatch& plan, const std::vector<at::Tensor>& given) {
      std::vector<at::Tensor> back = return_rows(of, plan, given);
      if (of.rank() == 1) back[0] = off_by_a_bit(back[0]);
      return back;
    };
    gathered.gather = [](Communicator& of, const at::Tensor& own) {
      const at::Tensor all = gather_rows(of, own);
      return of.rank() == 1 ? off_by_a_bit(all) : all;
    };
    whole.whole = [](Communicator& of, const at::Tensor& columns) {
      const at::Tensor rows = whole_rows(of, columns);
      return of.rank() == 1 ? off_by_a_bit(rows) : rows;
    };
    expect_blame(group, of_experts(group, dispatch), "dispatch_rows", 4);
    expect_blame(group, of_experts(group, given_back), "return_rows");
    expect_blame(group, of_experts(group, gathered), "gather_rows");
    expect_blame(group, of_experts(group, whole), "whole_rows", 4 * kWidth);
    // What decode steps exchange is no matter of a model that makes none.
    EXPECT_EQ(expert_exchange_problem(group, kWidth, at::TensorOptions(at::kFloat), false, whole), std::nullopt);
  });
}

// The right rows in other places, and the right sums in another order.
TEST(RowChecks, TheOrderOfRowsAndOfSumsIsSeen) {
  on_expert_ranks(4, [](Communicator& group) {
    ExpertExchanges turned, backwards;
    turned.dispatch = [](Communicator& of, const Dispatch& plan, const std::vector<at::Tensor>& own) {
      std::vector<at::Tensor> got = dispatch_rows(of, plan, own);
      if (of.rank() == 1) got[0] = got[0].flip(0);
      return got;
    };
    backwards.add = [](const Dispatch& plan, const at::Tensor& returned, int64_t rows) {
      at::Tensor sum = at::zeros({rows, returned.size(1)}, returned.options());
      int64_t end = returned.size(0);
      for (auto count = plan.to.rbegin(); count != plan.to.rend(); ++count) {
        end -= *count;
        sum.index_add_(0, plan.rows.narrow(0, end, *count), returned.narrow(0, end, *count));
      }
      return sum;
    };
    expect_blame(group, of_experts(group, turned), "dispatch_rows");
    EXPECT_MENTIONS(of_experts(group, backwards), "should by add_returned");
  });
}

TEST(RowChecks, OneBitOfAContextGroupsExchangeIsSeenByAllAndNamed) {
  on_context_ranks(3, [](Communicator& group) {
    ContextExchanges gathered, shared, backward;
    gathered.gather = [](Communicator& of, const at::Tensor& own, const std::vector<int64_t>& counts) {
      const at::Tensor all = gather_rows(of, own, counts);
      return of.rank() == 1 ? all + (off_by_a_bit(all) - all.detach()) : all;
    };
    shared.share = [](Communicator& of, const at::Tensor& own, const std::vector<int64_t>& counts) {
      const at::Tensor all = share_rows(of, own, counts);
      return of.rank() == 1 ? off_by_a_bit(all) : all;
    };
    backward.gather = [](Communicator& of, const at::Tensor& own, const std::vector<int64_t>& counts) {
      const at::Tensor through = own * 1;
      if (of.rank() == 1) through.register_hook([](const at::Tensor& gradient) { return off_by_a_bit(gradient); });
      return gather_rows(of, through, counts);
    };
    expect_blame(group, of_context(group, gathered), "gather_rows");
    expect_blame(group, of_context(group, shared), "share_rows", 1);
    expect_blame(group, of_context(group, backward), "the backward pass of gather_rows");
  });
}

}  // namespace
}  // namespace trireme
