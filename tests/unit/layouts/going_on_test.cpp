// Eight ranks: a run saved under each of five layouts goes on under each other. `make test` loads each under three;
// TRIREME_WHOLE_MATRIX=1 under all.
#include <array>
#include <set>

#include "base/fs.h"
#include "tests/unit/checkpoint/covering.h"
#include "tests/unit/checkpoint/trained_rank.h"

namespace trireme {
namespace {

using test::expect_near;
using test::expect_parameters_of;
using test::layout_of;
using test::name_of;
using test::Shared;
using test::Sizes;
using test::Step;
using test::TrainedRank;
using testing::part_of;
using testing::same_bits;

const std::vector<Sizes> kStops = {{.tp = 2, .pp = 2, .dp = 2},
                                   {.tp = 4, .pp = 1, .dp = 2},
                                   {.tp = 1, .pp = 4, .dp = 1, .cp = 2},
                                   {.tp = 1, .pp = 1, .dp = 8, .shared = Shared::kWeights},
                                   {.tp = 1, .pp = 1, .dp = 1}};

struct Stop {
  TemporaryDirectory dir;
  std::vector<at::Tensor> weights;  // of each rank, a step after the save
};

// Which of the stops are loaded under layout `to`.
std::set<size_t> loaded_under(size_t to) {
  const size_t all = kStops.size();
  if (!test::whole_matrix()) return {to, (to + 1) % all, (to + 3) % all};
  std::set<size_t> every;
  for (size_t from = 0; from < all; ++from) every.insert(from);
  return every;
}

TEST(EightRanks, AnyLayoutGoesOnWhereAnyOtherHasStopped) {
  const ModelConfig config = test::with_layers(ModelFamily::kQwen3, 4);
  ParallelContext alone;
  TrainedRank whole(alone, config);
  (void)whole.train(0);
  const at::Tensor saved = whole.model.flat_parameters().detach().clone();
  const Step next = whole.train(1);
  ASSERT_FALSE(same_bits(saved, whole.model.flat_parameters().detach()));
  std::array<Stop, 5> stops;
  ASSERT_EQ(kStops.size(), stops.size());
  for (size_t from = 0; from < stops.size(); ++from) {
    Stop& stop = stops[from];
    stop.weights.resize(static_cast<size_t>(layout_of(kStops[from]).world()));
    test::on_layout(layout_of(kStops[from]), [&](ParallelContext& context) {
      TrainedRank rank(context, config, kStops[from]);
      const auto manager = rank.checkpoints(stop.dir.path());
      (void)rank.train(0);
      manager->save(1, rank.model, rank.optimizer, {{"a", 1}}, {}, "b: 2\n");
      (void)rank.train(1);
      stop.weights[static_cast<size_t>(context.rank())] = rank.model.flat_parameters().detach().clone();
    });
  }
  for (size_t to = 0; to < stops.size(); ++to) {
    const Sizes& sizes = kStops[to];
    test::on_layout(layout_of(sizes), [&](ParallelContext& context) {
      for (const size_t from : loaded_under(to)) {
        const std::string where = name_of(kStops[from]) + ", then " + name_of(sizes);
        TrainedRank rank(context, config, sizes);
        const auto manager = rank.checkpoints(stops[from].dir.path());
        const auto found = manager->load_latest(rank.model, rank.optimizer);
        ASSERT_TRUE(found) << where;
        EXPECT_EQ(found->step, 1) << where;
        EXPECT_EQ(rank.optimizer.steps_done(), 1) << where;
        // Weights after the step follow from the moments that were loaded.
        const Step step = rank.train(1);
        EXPECT_NEAR(step.loss, next.loss, 1e-5 * std::abs(next.loss)) << where;
        EXPECT_NEAR(step.grad_norm, next.grad_norm, 1e-5 * next.grad_norm) << where;
        expect_parameters_of(rank, whole.model, where);
        if (from != to) continue;
        const at::Tensor& undisturbed = stops[to].weights[static_cast<size_t>(context.rank())];
        EXPECT_TRUE(same_bits(rank.model.flat_parameters().detach(), undisturbed)) << where;
      }
    });
  }
}

}  // namespace
}  // namespace trireme
