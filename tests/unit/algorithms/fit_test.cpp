// The fit check of models beside the policy.
#include "trainer/algorithms/fit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tests/unit/errors.h"
#include "tests/unit/model/tiny.h"

namespace trireme {
namespace {

// The least memory that is not refused, by halving.
int64_t least_that_fits(const std::function<void(int64_t bytes)>& check) {
  int64_t refused = 0, fits = int64_t{1} << 40;
  while (fits - refused > 1) {
    const int64_t middle = refused + (fits - refused) / 2;
    (test::user_error_of([&] { check(middle); }).empty() ? fits : refused) = middle;
  }
  return fits;
}

// Of a host.
int64_t first_that_fits(const Config& config, const ModelConfig& model, const ModelsBeside& beside) {
  return least_that_fits([&](int64_t bytes) {
    check_fits(config, model, "policy", {}, {bytes, false}, false, beside);
  });
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

TEST(Fit, AdviceKeepsTheExpertTensorSize) {
  const Config config = load_config_text("", {"policy.precision=float32", "cluster.gpus_per_node=2"});
  const ModelConfig model = test::tiny_config({.family = ModelFamily::kQwen3Moe, .layers = 2});
  const std::string error = test::user_error_of([&] {
    check_fits(config, model, "policy", {.dp = 2, .etp = 2}, {1, false}, false);
  });
  EXPECT_MENTIONS(error, "; of all layouts of 2 ranks with etp 2 tp=");
  EXPECT_EQ(error.find("etp=1"), std::string::npos) << error;
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

TEST(Fit, RanksOfACriticsOwnAreJudgedByWhatTheyHold) {
  const Config config = load_config_text("", {"algorithm=ppo", "policy.precision=float32"});
  const CriticModel critic{critic_config(config), test::tiny_config({.layers = 40}).with_value_head(), "critic"};
  const auto on_host = [&](const Layout& layout) {
    return least_that_fits([&](int64_t bytes) { check_critic_fits(config, critic, layout, {bytes, false}, false); });
  };
  // Weights, gradients and two moments of float32, as beside a policy; four ranks have a fourth each of a master
  // copy, of moments and of summed gradients.
  const auto elements = static_cast<double>(critic.model.parameter_count() + 6 * critic.model.hidden_size);
  EXPECT_NEAR(static_cast<double>(on_host({})), 0.8 * 16 * elements, 0.01 * 16 * elements);
  EXPECT_NEAR(static_cast<double>(on_host({.dp = 4})), 0.8 * 12 * elements, 0.01 * 16 * elements);
  // On a GPU its activations count too, and nobody's cache.
  const int64_t on_gpu = least_that_fits([&](int64_t bytes) {
    check_critic_fits(config, critic, {}, {bytes, true}, false);
  });
  EXPECT_GT(on_gpu, on_host({}));
  const std::string error = test::user_error_of([&] {
    check_critic_fits(config, critic, {}, {1 << 10, false}, false);
  });
  EXPECT_MENTIONS(error, "the critic of critic on ranks of its own in ");
  EXPECT_MENTIONS(error, "more critic ranks (launch --critic-ranks)");
}

}  // namespace
}  // namespace trireme
