// The engine over a model that is split over tensor ranks and pipeline stages: all ranks have the same samples,
// whatever the batching, and the sampler's log-probs have the bits of the loss's.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstring>
#include <set>

#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/parallel/stage_links.h"
#include "trainer/rollout/engine.h"

namespace trireme {
namespace {

using testing::eight_heads;
using testing::fill;
using testing::random_tokens;
using testing::split_options;

std::vector<GroupRequest> requests() {
  std::vector<GroupRequest> all;
  for (int64_t g = 0; g < 5; ++g) {
    GroupRequest request;
    request.group_id = g;
    request.prompt = random_tokens(3 + 7 * g, static_cast<uint64_t>(g + 1));
    request.samples = 3;
    request.first_sample_id = static_cast<uint64_t>(10 * g);
    all.push_back(request);
  }
  return all;
}

struct Way {
  const char* name;
  EngineOptions options;
};
// Room for all at once; for a few, so that samples wait, move and are preempted; prompts in pieces; a step ahead.
std::vector<Way> ways() {
  EngineOptions roomy{.cache_rows = 4000}, tight{.cache_rows = 130, .max_sequences = 4, .headroom_rows = 2};
  EngineOptions pieces{.cache_rows = 4000, .prefill_chunk_tokens = 5}, ahead{.cache_rows = 4000, .late_stops = true};
  return {{"roomy", roomy}, {"tight", tight}, {"pieces", pieces}, {"ahead", ahead}};
}

std::vector<GeneratedGroup> generate(const Model& model, const EngineOptions& options,
                                     const SamplingOptions& sampling) {
  Engine engine(model, nullptr, options, sampling);
  engine.take_cache();
  for (GroupRequest& request : requests()) engine.submit(std::move(request));
  return engine.run();
}

// Samples as bytes, to be compared between ranks.
std::string bytes_of(const std::vector<GeneratedGroup>& groups) {
  std::string bytes;
  const auto add = [&bytes](const auto& values) {
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
  };
  for (const GeneratedGroup& group : groups) {
    for (const GeneratedSample& sample : group.samples) {
      add(sample.response);
      add(sample.logprobs);
    }
  }
  return bytes;
}

// Hidden states of a batch as the loss has them, on the last stage; undefined on the others.
at::Tensor forward_all(const Model& model, const PackedBatch& batch) {
  StageLinks* links = model.options().links;
  if (links == nullptr) return model.forward(batch);
  at::Tensor out;
  for (int64_t piece = 0; piece < static_cast<int64_t>(model.split().layers.size()); ++piece) {
    at::Tensor in;
    if (!model.split().begins(piece)) {
      in = model.make_residual(batch.tokens());
      links->begin_receive(in, false).wait();
    }
    out = model.forward_piece(piece, batch, in);
    if (!model.split().ends(piece)) links->begin_send(out, false).wait();
  }
  return model.split().last_stage() ? out : at::Tensor();
}

// 0 where another stage has the log-probs.
int64_t mismatches(const Model& model, const std::vector<GeneratedGroup>& groups, const LogprobOptions& options) {
  const at::NoGradGuard no_grad;
  int64_t count = 0;
  for (const GeneratedGroup& group : groups) {
    for (const GeneratedSample& sample : group.samples) {
      std::vector<int32_t> tokens = group.prompt;
      tokens.insert(tokens.end(), sample.response.begin(), sample.response.end());
      // Beside another sequence, as in a micro-batch.
      const PackedBatch batch = PackedBatch::from_sequences({random_tokens(11, 3), tokens});
      const auto first = 11 + static_cast<int64_t>(group.prompt.size()) - 1;
      const auto made = static_cast<int64_t>(sample.response.size());
      const at::Tensor hidden = forward_all(model, batch);
      if (!hidden.defined()) continue;
      const at::Tensor of_loss =
          model.logprobs(hidden.narrow(0, first, made), batch.ids.narrow(0, first + 1, made), options)
              .to(at::kFloat)
              .contiguous();
      for (int64_t i = 0; i < made; ++i)
        count += std::memcmp(of_loss.const_data_ptr<float>() + i, &sample.logprobs[static_cast<size_t>(i)], 4) != 0;
    }
  }
  return count;
}

struct SplitWay {
  ModelFamily family;
  bool tied;
  int64_t tp, pp;
  at::ScalarType dtype;
  StageOptions stages = {};
  int64_t etp = 1;
  int64_t ep = 1, dp = 1;  // replicas with the same work, which their experts are split over
};

class SplitEngine : public ::testing::TestWithParam<SplitWay> {};
INSTANTIATE_TEST_SUITE_P(
    TensorParallel, SplitEngine,
    ::testing::Values(SplitWay{ModelFamily::kLlama, false, 2, 1, at::kFloat},
                      SplitWay{ModelFamily::kQwen2, false, 4, 1, at::kBFloat16},
                      SplitWay{ModelFamily::kQwen3, true, 2, 1, at::kBFloat16},
                      SplitWay{ModelFamily::kQwen3, true, 4, 1, at::kFloat},
                      SplitWay{ModelFamily::kLlama, false, 1, 2, at::kBFloat16},
                      SplitWay{ModelFamily::kQwen3, true, 1, 4, at::kFloat},
                      SplitWay{ModelFamily::kQwen2, false, 2, 2, at::kBFloat16},
                      SplitWay{ModelFamily::kQwen3Moe, false, 1, 2, at::kBFloat16},
                      SplitWay{ModelFamily::kQwen3Moe, false, 2, 1, at::kBFloat16},
                      SplitWay{ModelFamily::kQwen3Moe, false, 4, 1, at::kFloat},
                      SplitWay{ModelFamily::kMixtral, false, 2, 2, at::kBFloat16},
                      SplitWay{ModelFamily::kQwen3Moe, false, 2, 1, at::kBFloat16, {}, 2},
                      SplitWay{ModelFamily::kQwen3Moe, false, 1, 1, at::kFloat, {}, 2, 1, 2},
                      SplitWay{ModelFamily::kQwen3Moe, false, 1, 1, at::kBFloat16, {}, 2, 2, 4},
                      SplitWay{ModelFamily::kQwen3Moe, false, 2, 1, at::kBFloat16, {}, 2, 2, 2},
                      SplitWay{ModelFamily::kMixtral, false, 1, 2, at::kBFloat16, {}, 2, 2, 4},
                      SplitWay{ModelFamily::kQwen3Moe, false, 2, 2, at::kFloat, {.virtual_stages = 2}, 1, 2},
                      SplitWay{ModelFamily::kQwen3, true, 1, 2, at::kFloat, {.virtual_stages = 2}}),
    [](const auto& info) {
      const SplitWay& way = info.param;
      return std::string(to_string(way.family)) + "_tp" + std::to_string(way.tp) + "_pp" + std::to_string(way.pp) +
             (way.stages.virtual_stages > 1 ? "_virtual" : "") + (way.etp > 1 ? "_etp" + std::to_string(way.etp) : "") +
             (way.ep > 1 ? "_ep" + std::to_string(way.ep) : "") + (way.dp > 1 ? "_dp" + std::to_string(way.dp) : "") +
             (way.dtype == at::kFloat ? "_float32" : "_bfloat16");
    });

TEST_P(SplitEngine, SamplerAndLossHaveTheSameBitsOnAllRanks) {
  const SplitWay& way = GetParam();
  ModelConfig config = eight_heads(way.family, way.tied);
  if (way.pp > 1) config.num_layers = 4;
  Layout layout;
  layout.tp = way.tp;
  layout.pp = way.pp;
  layout.etp = way.etp;
  layout.ep = way.ep;
  layout.dp = way.dp;
  test::on_layout(layout, [&](ParallelContext& context) {
    ModelOptions options = split_options(context, config, way.stages);
    options.dtype = way.dtype;
    options.trainable = false;
    Model model(config, options);
    fill(model);
    SamplingOptions plain;
    plain.seed = 7;
    plain.temperature = 0.8;
    plain.max_new_tokens = 13;
    plain.stop_ids = {5};
    SamplingOptions filtered = plain;
    filtered.top_k = 20;
    filtered.top_p = 0.9;
    for (const SamplingOptions& sampling : {plain, filtered}) {
      std::set<std::string> seen;
      for (const Way& batching : ways()) {
        // Of many ranks on few cores: all at once, and waiting, moving and preempted; expert_engine_test has the rest.
        if (way.dp > 1 && batching.options.cache_rows > 1000 && batching.name != std::string("roomy")) continue;
        const auto groups = generate(model, batching.options, sampling);
        ASSERT_EQ(groups.size(), 5u);
        EXPECT_EQ(mismatches(model, groups, sampling.logprob_options()), 0) << batching.name;
        for (const std::string& of_rank : context.world().all_gather_bytes(bytes_of(groups))) seen.insert(of_rank);
      }
      EXPECT_EQ(seen.size(), 1u) << "samples depend on the rank or on how they were batched";
    }
  });
}

// Stages change no bit: neither of tokens nor of log-probs.
TEST(SplitEngine, StagesGenerateWhatOneRankDoes) {
  ModelConfig config = eight_heads(ModelFamily::kLlama, false);
  config.num_layers = 4;
  SamplingOptions sampling;
  sampling.seed = 3;
  sampling.max_new_tokens = 12;
  ModelOptions frozen;
  frozen.trainable = false;
  Model whole(config, frozen);
  fill(whole);
  const std::string wanted = bytes_of(generate(whole, {.cache_rows = 2000}, sampling));
  Layout layout;
  layout.pp = 4;
  test::on_layout(layout, [&](ParallelContext& context) {
    Model model(config, split_options(context, config));
    fill(model);
    for (const Way& batching : ways()) EXPECT_EQ(bytes_of(generate(model, batching.options, sampling)), wanted);
  });
}

// Replicas whose experts are split step together, each with requests of its own: some, all, or none. Neither the tokens
// nor their log-probs are others than with whole experts. They take their caches together, whoever has none to fill it.
TEST(SplitEngine, ExpertGroupsStepTogetherWithUnevenQueues) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    ModelConfig config = testing::small_config(ModelFamily::kQwen3Moe);
    config.num_layers = 4;
    SamplingOptions sampling;
    sampling.seed = 3;
    sampling.max_new_tokens = 12;
    sampling.stop_ids = {5};
    const auto some = [](int64_t replica) {  // 5, 0, 1, 2 of them
      std::vector<GroupRequest> all = requests();
      all.resize(replica == 0 ? 5 : static_cast<size_t>(replica - 1));
      return all;
    };
    const auto run = [&](const Model& model, const EngineOptions& options, int64_t replica) {
      Engine engine(model, nullptr, options, sampling);
      engine.take_cache();
      for (GroupRequest& request : some(replica)) engine.submit(std::move(request));
      std::vector<GeneratedGroup> groups = engine.run();
      EXPECT_TRUE(engine.idle());
      return groups;
    };
    const auto frozen = [&](ModelOptions options) {
      options.trainable = false;
      options.dtype = dtype;
      return options;
    };
    for (const int64_t tp : {1, 2}) {
      std::vector<std::string> wanted(4);
      test::on_layout({.tp = tp}, [&](ParallelContext& context) {
        Model model(config, frozen(split_options(context, config)));
        fill(model);
        for (int64_t replica = 0; replica < 4; ++replica) {
          const auto groups = run(model, {.cache_rows = 2000}, replica);
          EXPECT_EQ(mismatches(model, groups, sampling.logprob_options()), 0);
          if (context.is_main()) wanted[static_cast<size_t>(replica)] = bytes_of(groups);
        }
      });
      // Of pipelines with one lane or with as many as there are stages, and a piece or two of each.
      struct Case {
        Layout layout;
        StageOptions stages = {};
      };
      const std::vector<Case> cases = tp == 1 ? std::vector<Case>{{{.ep = 2, .dp = 4}},
                                                                  {{.ep = 4, .dp = 4}},
                                                                  {{.cp = 2, .ep = 4, .dp = 2}},
                                                                  {{.ep = 2, .dp = 2, .pp = 2}},
                                                                  {{.ep = 2, .dp = 2, .pp = 2}, {.virtual_stages = 2}}}
                                              : std::vector<Case>{{{.tp = 2, .ep = 2, .dp = 2}},
                                                                  {{.tp = 2, .ep = 4, .dp = 2}},
                                                                  {{.tp = 2, .ep = 2}},
                                                                  {{.tp = 2, .ep = 4, .dp = 2, .pp = 2}}};
      for (const auto& [layout, stages] : cases) {
        const bool virtual_ones = stages.virtual_stages > 1;
        test::on_layout(layout, [&, &layout = layout, &stages = stages](ParallelContext& context) {
          Model model(config, frozen(split_options(context, config, stages)));
          fill(model);
          const int replica = context.generation().number;
          for (const Way& batching : ways()) {
            if (dtype == at::kBFloat16 && batching.options.cache_rows > 1000) continue;  // the tight one
            EngineOptions options = batching.options;
            options.lanes = layout.pp > 1 && batching.options.cache_rows > 1000 ? layout.pp : 1;
            options.least_of_ranks = [&](int64_t rows) {
              return static_cast<int64_t>(-context.holders().all_reduce_max(-static_cast<double>(rows)));
            };
            EXPECT_EQ(bytes_of(run(model, options, replica)), wanted[static_cast<size_t>(replica)])
                << to_string(layout) << (virtual_ones ? " virtual " : " ") << batching.name;
          }
        });
      }
    }
  }
}

// Three replicas of two tensor ranks, of which each expert group has one and a half.
TEST(SplitEngine, ExpertGroupsMayEndInsideOfAReplica) {
  ModelConfig config = testing::small_config(ModelFamily::kQwen3Moe);
  config.num_experts = 6;
  SamplingOptions sampling;
  sampling.seed = 3;
  sampling.max_new_tokens = 12;
  const auto run = [&](const Model& model, int64_t replica) {
    Engine engine(model, nullptr, {.cache_rows = 2000}, sampling);
    engine.take_cache();
    std::vector<GroupRequest> all = requests();
    all.resize(static_cast<size_t>(2 * replica));
    for (GroupRequest& request : all) engine.submit(std::move(request));
    return bytes_of(engine.run());
  };
  std::vector<std::string> wanted(3);
  for (const int64_t ep : {1, 3}) {
    test::on_layout({.tp = 2, .ep = ep, .dp = 3}, [&](ParallelContext& context) {
      Model model(config, split_options(context, config));
      fill(model);
      const auto replica = static_cast<size_t>(context.generation().number);
      const std::string got = run(model, static_cast<int64_t>(replica));
      if (ep > 1) {
        EXPECT_EQ(got, wanted[replica]);
      } else if (context.coordinates().tp == 0) {
        wanted[replica] = got;
      }
    });
  }
}

TEST(SplitEngine, WorkBeforeTheCacheIsTakenTogetherIsOurMistake) {
  const ModelConfig config = testing::small_config(ModelFamily::kQwen3Moe);
  test::on_layout({.ep = 2, .dp = 2}, [&](ParallelContext& context) {
    Model model(config, split_options(context, config));
    fill(model);
    Engine engine(model, nullptr, {.cache_rows = 100}, {.max_new_tokens = 2});
    EXPECT_THROW(engine.submit(requests().front()), Error);
    engine.take_cache();
    EXPECT_NO_THROW(engine.submit(requests().front()));
    EXPECT_EQ(engine.run().size(), 1u);
  });
}

// Other tokens than those of one rank may be drawn where two are all but equally likely; the likeliest rarely change.
TEST(SplitEngine, GreedySamplesAreThoseOfOneRank) {
  const ModelConfig config = eight_heads(ModelFamily::kLlama, false);
  SamplingOptions greedy;
  greedy.temperature = 0;
  greedy.max_new_tokens = 12;
  ModelOptions frozen;
  frozen.trainable = false;
  Model whole(config, frozen);
  fill(whole);
  const auto wanted = generate(whole, {.cache_rows = 2000}, greedy);
  Layout layout;
  layout.tp = 4;
  test::on_layout(layout, [&](ParallelContext& context) {
    Model model(config, split_options(context, config));
    fill(model);
    const auto groups = generate(model, {.cache_rows = 2000}, greedy);
    for (size_t g = 0; g < groups.size(); ++g) {
      for (size_t i = 0; i < groups[g].samples.size(); ++i)
        EXPECT_EQ(groups[g].samples[i].response, wanted[g].samples[i].response);
    }
  });
}

// Memory differs between machines: the ranks plan for the least.
TEST(SplitEngine, RanksAgreeOnTheCache) {
  const ModelConfig config = eight_heads(ModelFamily::kLlama, false);
  Layout layout;
  layout.tp = 2;
  test::on_layout(layout, [&](ParallelContext& context) {
    Model model(config, split_options(context, config));
    fill(model);
    EngineOptions options;
    options.max_sequences = 3;
    const bool poor = context.rank() == 1;
    options.least_of_ranks = [&](int64_t rows) {
      return static_cast<int64_t>(-context.tensor_parallel().all_reduce_max(-static_cast<double>(poor ? 200 : rows)));
    };
    Engine engine(model, nullptr, options, {.max_new_tokens = 4});
    for (GroupRequest& request : requests()) engine.submit(std::move(request));
    EXPECT_EQ(engine.stats().cache_rows, 200);
    EXPECT_EQ(engine.run().size(), 5u);
  });
}

}  // namespace
}  // namespace trireme
