// token_values: the head of a value model.
#include "base/error.h"
#include "tests/unit/ops/testing.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

using testing::expect_matches;
using testing::random;
using testing::relative_error;
using testing::same_bits;

TEST(TokenValues, AreDotProductsWithTheirGradients) {
  for (const int64_t width : {1, 2, 3, 7, 64, 100, 257}) {
    expect_matches(
        {random({9, width}, 1, at::kDouble), random({1, width}, 2, at::kDouble)},
        [](const std::vector<at::Tensor>& in) { return token_values(in[0], in[1]); },
        [](const std::vector<at::Tensor>& in) { return in[0].mv(in[1].select(0, 0)); }, 1e-12);
  }
}

TEST(TokenValues, ARowHasItsBitsWhateverTheOthers) {
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor hidden = random({65, 193}, 3, type), score = random({1, 193}, 4, type);
    const at::Tensor all = token_values(hidden, score);
    EXPECT_EQ(all.scalar_type(), at::kFloat);
    for (const int64_t from : {0, 1, 17}) {
      for (const int64_t count : {1, 2, 7, 16, 33}) {
        EXPECT_TRUE(same_bits(token_values(hidden.narrow(0, from, count), score), all.narrow(0, from, count)));
        // Rows that do not lie next to each other in memory.
        EXPECT_TRUE(same_bits(token_values(hidden.t().contiguous().t().narrow(0, from, count), score),
                              all.narrow(0, from, count)));
      }
    }
    const int threads = at::get_num_threads();
    at::set_num_threads(1);
    EXPECT_TRUE(same_bits(token_values(hidden, score), all));
    at::set_num_threads(threads);
    const at::Tensor recorded = token_values(hidden.detach().clone().set_requires_grad(true), score);
    EXPECT_TRUE(recorded.requires_grad());
    EXPECT_TRUE(same_bits(recorded.detach(), all));
    EXPECT_LT(relative_error(all, hidden.to(at::kDouble).mv(score.select(0, 0).to(at::kDouble))), 1e-6);
  }
  EXPECT_EQ(token_values(random({0, 8}, 5), random({1, 8}, 6)).size(0), 0);
}

TEST(TokenValues, RefusesOtherShapes) {
  EXPECT_THROW(token_values(random({3, 8}, 1), random({2, 8}, 2)), Error);
  EXPECT_THROW(token_values(random({3, 8}, 1), random({1, 7}, 2)), Error);
  EXPECT_THROW(token_values(random({3, 8}, 1), random({1, 8}, 2, at::kBFloat16)), Error);
}

}  // namespace
}  // namespace trireme
