#include "trainer/algorithms/recompute.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "topology/topology.h"

namespace trireme {
namespace {

ModelConfig llama_8b() {
  ModelConfig c;
  c.family = ModelFamily::kLlama;
  c.vocab_size = 128'256;
  c.hidden_size = 4096;
  c.intermediate_size = 14'336;
  c.num_layers = 32;
  c.num_heads = 32;
  c.num_kv_heads = 8;
  c.head_dim = 128;
  return c;
}

ModelConfig llama_tiny() {
  ModelConfig c = llama_8b();
  c.vocab_size = 10;
  c.hidden_size = c.intermediate_size = 8;
  c.num_layers = 5;
  c.num_heads = c.num_kv_heads = 1;
  c.head_dim = 8;
  return c;
}

LocalShape whole(const ModelConfig& config) { return local_shape(config.shape(), model_split(config.shape(), {}, 0)); }

TEST(Recompute, AsLittleAsFits) {
  const LocalShape config = whole(llama_8b());
  constexpr int64_t kGiB = int64_t{1} << 30, kTokens = 16'384;
  const auto level = [](const Recompute& r) { return 2 * r.whole_layers + r.cheap_layers; };
  int64_t before = 0;
  for (int64_t gib = 140; gib >= 0; --gib) {
    int64_t needed = 0;
    const Recompute recompute = fit_recompute(config, 2, {.tokens = kTokens}, gib * kGiB, &needed);
    EXPECT_GE(level(recompute), before) << "less room, less recomputation at " << gib << " GiB";
    before = level(recompute);
    if (level(recompute) < 64) {
      EXPECT_LE(needed, gib * kGiB);
    }
    // Cheap operations first: a layer is computed again only when those of all others are.
    if (recompute.whole_layers > 0) {
      EXPECT_EQ(recompute.whole_layers + recompute.cheap_layers, 32);
    }
  }
  EXPECT_EQ(level(fit_recompute(config, 2, {.tokens = kTokens}, 140 * kGiB)), 0);
  EXPECT_EQ(fit_recompute(config, 2, {.tokens = kTokens}, 0).whole_layers, 32);
  const Recompute middle = fit_recompute(config, 2, {.tokens = kTokens}, 70 * kGiB);
  EXPECT_GT(middle.cheap_layers, 0);
  EXPECT_EQ(middle.whole_layers, 0);
  EXPECT_GT(fit_recompute(config, 2, {.tokens = kTokens}, 40 * kGiB).whole_layers, 0);
}

// The first stage keeps as many micro-batches as there are stages, the last one; pieces share a stage's layers.
TEST(Recompute, CountsWhatIsInFlightOnAStage) {
  constexpr int64_t kGiB = int64_t{1} << 30;
  const ModelShape shape = llama_8b().shape();
  const auto stage_of = [&](int64_t stage, int64_t pieces) {
    Layout layout;
    layout.pp = 4;
    const ModelSplit split = model_split(shape, layout, stage, {.virtual_stages = pieces});
    KeptActivations kept = kept_activations(split, {.rows = 8192}, 16);
    EXPECT_EQ(kept.pieces, pieces);
    return std::pair(local_shape(shape, split), kept);
  };
  const auto level = [&](int64_t stage, int64_t pieces) {
    const auto [local, kept] = stage_of(stage, pieces);
    const Recompute recompute = fit_recompute(local, 2, kept, 20 * kGiB);
    EXPECT_LE(recompute.whole_layers + recompute.cheap_layers, 8 / pieces);
    return 2 * recompute.whole_layers + recompute.cheap_layers;
  };
  for (int64_t stage = 0; stage < 4; ++stage) EXPECT_EQ(stage_of(stage, 1).second.in_flight, 4 - stage);
  EXPECT_EQ(stage_of(3, 2).second.in_flight, 5);
  EXPECT_GT(level(0, 1), level(3, 1));
  EXPECT_EQ(level(3, 1), 0);
  EXPECT_GT(level(0, 2), 0);
  // Without micro-batches, and on one stage, one at a time.
  EXPECT_EQ(kept_activations(model_split(shape, {}, 0), {.rows = 8192}, 5).in_flight, 1);
  EXPECT_EQ(kept_activations(model_split(shape, {}, 0), {.rows = 8192}, 0).in_flight, 1);
}

// A sequence of 16,384 tokens over two ranks: where half of its activations fit with the keys of all, nothing is
// computed again.
TEST(Recompute, CountsTheRowsOfAContextRank) {
  const LocalShape config = whole(llama_8b());
  const std::vector<int32_t> sequence(16'384, 1);
  const PackedBatch batch = PackedBatch::from_sequences({sequence});
  int64_t rows = 0;
  for (int64_t rank = 0; rank < 2; ++rank) {
    const OwnRows own = own_rows(batch, context_work(llama_8b().shape()), 2, rank);
    EXPECT_NEAR(static_cast<double>(own.rows), 8192, 128);
    EXPECT_GT(own.shared, 10'000);  // all but the last piece, behind which nobody has rows
    EXPECT_LE(own.shared, 16'384);
    rows += own.rows;
    const KeptActivations kept = kept_activations(model_split(llama_8b().shape(), {}, 0), own, 1);
    int64_t needed = 0, without_keys = 0;
    constexpr int64_t kRoom = int64_t{60} << 30;
    const Recompute recompute = fit_recompute(config, 2, kept, kRoom, &needed);
    EXPECT_EQ(recompute.whole_layers + recompute.cheap_layers, 0);
    // Keys and values of 8 heads of 128 in each of 32 layers.
    (void)fit_recompute(config, 2, {.tokens = own.rows}, kRoom, &without_keys);
    EXPECT_NEAR(static_cast<double>(needed - without_keys), 32.0 * 2 * 2 * 1024 * static_cast<double>(own.shared),
                32.0 * 2 * static_cast<double>(own.rows));
    const Recompute of_all = fit_recompute(config, 2, {.tokens = batch.tokens()}, kRoom);
    EXPECT_GT(of_all.whole_layers + of_all.cheap_layers, 0);
  }
  EXPECT_EQ(rows, batch.tokens());
}

// Passes without gradients, which run before training has made room: less than training keeps, and not nothing.
TEST(Recompute, APassWithoutGradientsTakesLayersOneByOne) {
  const LocalShape shape = whole(llama_8b());
  constexpr int64_t kGiB = int64_t{1} << 30;
  const int64_t pass = pass_bytes(shape, 2, {.tokens = 16'384});
  // A layer's gate, up and their product, and rows between layers.
  EXPECT_GT(pass, 2 * 16'384 * (3 * 14'336 + 4096));
  EXPECT_LT(pass, 12 * kGiB);
  int64_t training = 0;
  (void)fit_recompute(shape, 2, {.tokens = 16'384}, 140 * kGiB, &training);
  EXPECT_LT(4 * pass, training);
  EXPECT_GT(pass_bytes(shape, 2, {.tokens = 32'768}), pass * 3 / 2);
  Model small(llama_tiny(), {});
  ParallelContext alone;
  make_room_for_passes(small, 100, alone, [] { ADD_FAILURE() << "on CPU the memory asks for nothing"; });
}

TEST(Recompute, TheConfigurationDecides) {
  const ModelConfig small = llama_tiny();
  Model model(small, {});
  ParallelContext alone;
  const auto with = [&](const std::vector<std::string>& overrides) {
    std::vector<std::string> warnings;
    set_recompute(model, load_config_text("", overrides, &warnings), {.tokens = 100}, alone);
    EXPECT_TRUE(warnings.empty());
    return model.recompute();
  };
  EXPECT_EQ(with({"policy.activation_checkpointing=true"}).whole_layers, 5);
  EXPECT_EQ(with({}).whole_layers, 0);  // on CPU the memory asks for nothing
  EXPECT_EQ(with({"policy.recompute_layers=2"}).whole_layers, 2);
  EXPECT_EQ(with({"policy.recompute_layers=0"}).whole_layers, 0);
  const std::string m = "policy.megatron_cfg.";
  EXPECT_EQ(with({m + "enabled=true", m + "activation_checkpointing=true"}).whole_layers, 5);
  EXPECT_EQ(with({m + "enabled=true", m + "recompute_granularity=full"}).whole_layers, 5);
  EXPECT_EQ(with({m + "enabled=true", m + "recompute_granularity=full", m + "recompute_method=block",
                  m + "recompute_num_layers=3"})
                .whole_layers,
            3);
  const Recompute norms =
      with({m + "enabled=true", m + "recompute_granularity=selective", m + "recompute_modules=[layernorm]"});
  EXPECT_EQ(norms.cheap_layers, 5);
  EXPECT_TRUE(norms.norms);
  EXPECT_FALSE(norms.swiglu);
  EXPECT_EQ(with({m + "enabled=true", m + "recompute_granularity=null"}).cheap_layers, 0);
  // Experts, of a model that has some.
  const std::vector<std::string> moe{m + "enabled=true", m + "recompute_granularity=selective",
                                     m + "recompute_modules=[moe]"};
  EXPECT_EQ(with(moe).expert_layers, 0);
  ModelConfig mixture = small;
  mixture.family = ModelFamily::kQwen3Moe;
  mixture.num_experts = 4;
  mixture.experts_per_token = 2;
  mixture.moe_intermediate_size = 8;
  Model of_experts(mixture, {});
  std::vector<std::string> warnings;
  set_recompute(of_experts, load_config_text("", moe, &warnings), {.tokens = 100}, alone);
  EXPECT_EQ(of_experts.recompute().expert_layers, 5);
  EXPECT_EQ(of_experts.recompute().cheap_layers, 0);
  EXPECT_EQ(of_experts.recompute().whole_layers, 0);
}

// A mixture gives up gate and up of its experts before whole layers, also where ranks share experts.
TEST(Recompute, ExpertsComeBeforeWholeLayers) {
  const ModelShape shape = *known_model_shape("qwen3-30b-a3b");
  constexpr int64_t kGiB = int64_t{1} << 30;
  const auto most_experts = [&](const Layout& layout) {
    const LocalShape local = local_shape(shape, model_split(shape, layout, 0));
    int64_t most = 0;
    for (int64_t gib = 140; gib >= 0; --gib) {
      const Recompute recompute = fit_recompute(local, 2, {.tokens = 16'384}, gib * kGiB);
      most = std::max(most, recompute.expert_layers);
      if (recompute.expert_layers > 0) {
        EXPECT_EQ(recompute.whole_layers + recompute.cheap_layers, 48) << gib;
      }
      if (recompute.whole_layers > 0) {
        EXPECT_EQ(recompute.whole_layers + recompute.expert_layers, 48) << gib;
      }
    }
    return most;
  };
  EXPECT_GT(most_experts({}), 40);
  EXPECT_GT(most_experts({.ep = 2, .dp = 2}), 40);
}

}  // namespace
}  // namespace trireme
