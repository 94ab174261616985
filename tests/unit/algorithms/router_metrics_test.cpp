#include "trainer/algorithms/router_metrics.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tests/unit/parallel/ranks.h"

namespace trireme {
namespace {

// Three layers of four experts, the second without experts.
TEST(RouterMetrics, LayersWithoutExpertsDoNotCount) {
  const RouterSums sums{at::tensor({6., 2., 0., 0., 4., 2., 5., 10.,  //
                                    0., 0., 0., 0., 0., 0., 0., 0.,   //
                                    2., 2., 2., 2., 4., 4., 1., 10.})
                            .view({3, 8})};
  const BalanceOptions balance{BalanceOptions::Kind::kMicroBatch, 1};
  const MetricSums metrics = router_metrics(sums, balance);
  EXPECT_DOUBLE_EQ(metrics.at("moe/expert_load"), (3.0 + 1.0) / 2);
  EXPECT_DOUBLE_EQ(metrics.at("moe/expert_load_max"), 3);
  EXPECT_DOUBLE_EQ(metrics.at("moe/unused_experts"), 2);
  EXPECT_DOUBLE_EQ(metrics.at("moe/router_entropy"), 6.0 / 8);
  EXPECT_DOUBLE_EQ(metrics.at("moe/load_balancing_loss"), 0.3);
  EXPECT_EQ(router_metrics(sums, BalanceOptions{}).count("moe/load_balancing_loss"), 0U);
  EXPECT_TRUE(router_metrics(RouterSums{at::zeros({3, 8}, at::kDouble)}, balance).empty());
}

// One rank's rows alone would leave two experts of its layer unused, and the other stage's layer out.
TEST(RouterMetrics, TensorRanksAndStagesAddUpWhatEachHasSeen) {
  test::on_layout({.tp = 2, .pp = 2}, [](ParallelContext& context) {
    RouterWatch watch(2, 4, {}, at::kCPU);
    const int32_t first = context.coordinates().tp == 0 ? 0 : 2;
    Routes routes;
    routes.experts = at::tensor(std::vector<int32_t>{first, first + 1}, at::kInt).view({1, 2});
    routes.probabilities = at::full({1, 4}, 0.25, at::kFloat);
    const ExpertShape shape{.experts = 4, .per_token = 2};
    (void)watch.add(context.coordinates().pp, routes, shape, *watch.rows_of({0, 2}, {}, {}));
    const MetricSums metrics = router_metrics(watch, context);
    EXPECT_DOUBLE_EQ(metrics.at("moe/expert_load"), 1);
    EXPECT_DOUBLE_EQ(metrics.at("moe/expert_load_max"), 1);
    EXPECT_DOUBLE_EQ(metrics.at("moe/unused_experts"), 0);
    EXPECT_NEAR(metrics.at("moe/router_entropy"), std::log(4.0), 1e-6);
  });
}

TEST(RouterMetrics, BalancingIsAsConfigured) {
  Config config;
  config.policy.megatron_cfg.enabled = true;
  config.policy.megatron_cfg.moe_aux_loss_coeff = 0.25;
  using Kind = BalanceOptions::Kind;
  for (const auto& [name, kind] :
       {std::pair("none", Kind::kNone), {"aux_loss", Kind::kMicroBatch}, {"seq_aux_loss", Kind::kSample}}) {
    config.policy.megatron_cfg.moe_router_load_balancing_type = name;
    EXPECT_EQ(balance_options(config).kind, kind);
    EXPECT_EQ(balance_options(config).coefficient, 0.25);
  }
  config.policy.megatron_cfg.moe_aux_loss_coeff = 0;
  EXPECT_EQ(balance_options(config).kind, Kind::kNone) << "a loss that weighs nothing";
  config.policy.megatron_cfg.moe_aux_loss_coeff = 0.25;
  config.policy.megatron_cfg.enabled = false;
  EXPECT_EQ(balance_options(config).kind, Kind::kNone) << "a back-end that is off says nothing";
}

}  // namespace
}  // namespace trireme
