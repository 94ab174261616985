// A small mixture of experts under every legal layout of 2, 4 and 8 ranks, with each size of expert and expert tensor
// parallel: an optimizer step against one rank's, log-probs against those of whole experts, the sampler against the
// loss. `make test` has a sample that shows each pair of axes; TRIREME_WHOLE_MATRIX=1 runs them all.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstring>
#include <map>
#include <numeric>

#include "tests/unit/checkpoint/covering.h"
#include "tests/unit/checkpoint/trained_rank.h"
#include "tests/unit/parallel/ranks.h"
#include "topology/topology.h"
#include "trainer/batch/micro_batch.h"
#include "trainer/rollout/engine.h"

namespace trireme {
namespace {

using test::expect_near;
using test::layout_of;
using test::name_of;
using test::Sizes;
using test::Step;
using test::TrainedRank;
using testing::part_of;
using testing::random_tokens;

// Eight experts, two of them a token, a dense layer among the four; heads for as many tensor ranks.
ModelConfig mixture() {
  ModelConfig config = test::four_layers(ModelFamily::kQwen3Moe);
  config.num_kv_heads = 8;
  return config;
}

std::vector<Sizes> legal_sizes() {
  const ModelShape shape = mixture().shape();
  std::vector<Sizes> all;
  for (const int64_t world : {2, 4, 8}) {
    for (const int64_t virtual_stages : {1, 2}) {
      const LayoutCheck check{.world = world, .shape = &shape, .stages = {.virtual_stages = virtual_stages}};
      for (Layout layout : legal_layouts(check)) {
        if (virtual_stages > 1 && layout.pp == 1) continue;
        for (layout.etp = 1; layout.etp <= world; layout.etp *= 2) {
          if (!check_layout(layout, check).ok()) continue;
          all.push_back({.tp = layout.tp,
                         .pp = layout.pp,
                         .dp = layout.dp,
                         .stages = check.stages,
                         .ep = layout.ep,
                         .cp = layout.cp,
                         .etp = layout.etp});
        }
      }
    }
  }
  return all;
}

std::set<std::string> shown_by(const Sizes& sizes) {
  std::set<std::string> shown = test::pairs_of(test::traits_of(sizes));
  for (const auto& [axis, size] : test::axes_of(sizes)) {
    if (size > 1) shown.insert(axis + " " + std::to_string(size));
  }
  return shown;
}

std::vector<Sizes> chosen_sizes() {
  const std::vector<Sizes> all = legal_sizes();
  return test::whole_matrix() ? all : test::covering<Sizes>(all, shown_by);
}

// Samples that every replica generates: tokens whose log-prob has other bits in the loss. 0 where another stage knows.
int64_t mismatches(const Model& model) {
  const SamplingOptions sampling{.temperature = 0.8, .max_new_tokens = 9, .stop_ids = {5}, .seed = 3};
  Engine engine(model, nullptr, {.cache_rows = 200, .max_sequences = 4}, sampling);
  engine.take_cache();
  for (int64_t g = 0; g < 3; ++g) {
    GroupRequest request;
    request.group_id = g;
    request.prompt = random_tokens(3 + 5 * g, static_cast<uint64_t>(g + 1));
    request.samples = 2;
    request.first_sample_id = static_cast<uint64_t>(10 * g);
    engine.submit(std::move(request));
  }
  std::vector<Sample> samples;
  for (GeneratedGroup& group : engine.run()) {
    for (size_t i = 0; i < group.samples.size(); ++i) {
      Sample& sample = samples.emplace_back();
      sample.group = group.group_id;
      sample.index = static_cast<int64_t>(i);
      sample.prompt = SharedTokens(group.prompt);
      sample.response = group.samples[i].response;
      sample.generation_logprobs = group.samples[i].logprobs;
    }
  }
  EXPECT_EQ(samples.size(), 6u);
  Members members(samples.size());
  std::iota(members.begin(), members.end(), int64_t{0});
  const MicroBatch batch = make_micro_batch(samples, members);
  const at::Tensor drawn = generation_logprobs(samples, members);
  EXPECT_GT(drawn.size(0), 12);
  int64_t count = 0;
  PipelineWork work;
  work.inputs = {&batch.input};
  work.finish = [&](size_t, const at::Tensor& hidden) {
    const at::Tensor of_loss =
        response_logprobs(model, hidden, batch, sampling.logprob_options()).to(at::kFloat).contiguous();
    for (int64_t i = 0; i < drawn.size(0); ++i)
      count += std::memcmp(of_loss.const_data_ptr<float>() + i, drawn.const_data_ptr<float>() + i, sizeof(float)) != 0;
    return of_loss;
  };
  forward_passes(model, work);
  return count;
}

TEST(ExpertLayouts, AreManyAndASampleShowsEachPairOfAxes) {
  const std::vector<Sizes> all = legal_sizes(), sample = test::covering<Sizes>(all, shown_by);
  EXPECT_GT(all.size(), 200u);
  EXPECT_LT(sample.size(), 30u);
  std::set<std::string> pairs;
  for (const Sizes& sizes : sample) pairs.merge(shown_by(sizes));
  for (const char* pair : {"ep with tp", "cp with ep", "ep with pp", "dp with ep", "ep with etp", "etp with tp",
                           "cp with etp", "etp with pp", "dp with etp", "cp with pp", "ep 8", "etp 8", "cp 8", "pp 4"})
    EXPECT_EQ(pairs.count(pair), 1u) << pair;
}

class ExpertLayouts : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ExpertLayouts, ::testing::Values(2, 4, 8),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(ExpertLayouts, GiveTheAnswerOfOneRank) {
  const ModelConfig config = mixture();
  ParallelContext alone;
  TrainedRank one(alone, config);
  const Step wanted = one.train(0);
  std::map<std::string, double> whole_losses;  // of layouts with all experts on each rank
  const auto whole_loss = [&](Sizes sizes) {
    sizes.ep = 1;
    const std::string key = name_of(sizes) + (sizes.stages.virtual_stages > 1 ? " virtual" : "");
    if (const auto known = whole_losses.find(key); known != whole_losses.end()) return known->second;
    double loss = 0;
    test::on_layout(layout_of(sizes), [&](ParallelContext& context) {
      TrainedRank rank(context, config, sizes);
      const double found = rank.train(0).loss;
      if (context.is_main()) loss = found;
    });
    return whole_losses[key] = loss;
  };
  size_t found = 0;
  for (const Sizes& sizes : chosen_sizes()) {
    if (layout_of(sizes).world() != GetParam() || !test::in_part(found++)) continue;
    const std::string name = name_of(sizes) + (sizes.stages.virtual_stages > 1 ? " virtual" : "");
    SCOPED_TRACE(name);
    const double whole = sizes.ep > 1 ? whole_loss(sizes) : 0;
    test::on_layout(layout_of(sizes), [&](ParallelContext& context) {
      TrainedRank rank(context, config, sizes);
      EXPECT_EQ(mismatches(rank.model), 0) << name;
      const Step got = rank.train(0);
      expect_near(got, wanted);
      if (sizes.ep > 1) {
        EXPECT_EQ(got.loss, whole) << name << ": ep changes a bit";
      }
      for (const Parameter& parameter : rank.model.parameters()) {
        expect_near(parameter.tensor.detach(), part_of(parameter, one.model.find(parameter.name)->tensor.detach()),
                    name + " " + parameter.name);
      }
    });
  }
}

// What is not of experts is reduced while backward runs, also where experts' rows travel between the reductions and
// some ranks only take part in that.
TEST(ExpertLayouts, ReductionsBesideBackwardChangeNoBit) {
  for (const Sizes& sizes :
       std::vector<Sizes>{{.tp = 1, .pp = 1, .dp = 2, .ep = 2},
                          {.tp = 1, .pp = 1, .dp = 8, .ep = 4},
                          {.tp = 2, .pp = 1, .dp = 2, .ep = 2},
                          {.tp = 1, .pp = 1, .dp = 4, .ep = 2, .etp = 2},
                          {.tp = 1, .pp = 2, .dp = 2, .ep = 2},
                          {.tp = 1, .pp = 1, .dp = 2, .ep = 4, .cp = 2},
                          {.tp = 1, .pp = 1, .dp = 4, .ep = 2, .shared = test::Shared::kNothing}}) {
    test::on_layout(layout_of(sizes), [&](ParallelContext& context) {
      TrainedRank behind(context, mixture(), sizes), beside(context, mixture(), sizes);
      behind.overlaps = false;
      for (int step = 0; step < 2; ++step) {
        const Step wanted = behind.train(step), got = beside.train(step);
        EXPECT_EQ(got.loss, wanted.loss) << name_of(sizes);
        EXPECT_EQ(got.grad_norm, wanted.grad_norm) << name_of(sizes);
        EXPECT_EQ(behind.reduced_early, 0);
        EXPECT_GT(beside.reduced_early, 0) << name_of(sizes);
      }
      EXPECT_TRUE(testing::same_bits(beside.model.flat_parameters(), behind.model.flat_parameters())) << name_of(sizes);
    });
  }
}

}  // namespace
}  // namespace trireme
