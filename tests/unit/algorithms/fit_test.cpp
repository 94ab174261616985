// The fit check of models beside the policy.
#include "trainer/algorithms/fit.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/unit/errors.h"
#include "tests/unit/model/tiny.h"

namespace trireme {
namespace {

// The least memory of a host that is not refused, by halving.
int64_t first_that_fits(const Config& config, const ModelConfig& model, const ModelsBeside& beside) {
  int64_t refused = 0, fits = int64_t{1} << 40;
  while (fits - refused > 1) {
    const int64_t middle = refused + (fits - refused) / 2;
    const std::string error = test::user_error_of([&] {
      check_fits(config, model, "policy", {}, {middle, false}, false, beside);
    });
    (error.empty() ? fits : refused) = middle;
  }
  return fits;
}

TEST(Fit, ARewardModelIsThereWholeBesideTheRest) {
  const Config config = load_config_text("", {"policy.precision=float32"});
  const ModelConfig model = test::tiny_config({.layers = 2});
  const RewardModelFolder scorer{test::tiny_config({.layers = 40}).with_value_head(), "scorer"};
  const int64_t alone = first_that_fits(config, model, {});
  const int64_t both = first_that_fits(config, model, {nullptr, &scorer});
  // What is surely too little is 0.8 of what the formula says.
  const double bytes = 4.0 * static_cast<double>(scorer.model.parameter_count());
  EXPECT_NEAR(static_cast<double>(both - alone), 0.8 * bytes, 2);
  const std::string error = test::user_error_of([&] {
    check_fits(config, model, "policy", {}, {alone, false}, false, {nullptr, &scorer});
  });
  EXPECT_MENTIONS(error, "the model of policy with the reward model of scorer in ");
  EXPECT_MENTIONS(error, " are the reward model's weights; ");
  EXPECT_EQ(error.find("critic's"), std::string::npos);
}

TEST(Fit, ACriticsTrainingStateIsThereBesideTheRest) {
  const Config config = load_config_text("", {"algorithm=ppo", "policy.precision=float32"});
  const ModelConfig model = test::tiny_config({.layers = 2});
  const CriticModel critic{critic_config(config), test::tiny_config({.layers = 40}).with_value_head(), "critic"};
  const int64_t alone = first_that_fits(config, model, {});
  const int64_t both = first_that_fits(config, model, {&critic, nullptr});
  // Weights, gradients and two moments of float32; the embedding of 90 tokens has 96 rows.
  const auto elements = static_cast<double>(critic.model.parameter_count() + 6 * critic.model.hidden_size);
  EXPECT_NEAR(static_cast<double>(both - alone), 0.8 * 16 * elements, 2);
  const std::string error = test::user_error_of([&] {
    check_fits(config, model, "policy", {}, {alone, false}, false, {&critic, nullptr});
  });
  EXPECT_MENTIONS(error, "the model of policy with the critic of critic in ");
  EXPECT_MENTIONS(error, " are the critic's weights and training state; ");
}

}  // namespace
}  // namespace trireme
