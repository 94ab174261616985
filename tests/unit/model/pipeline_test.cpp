// A model in pipeline stages against the same without them: hidden states, log-probs and gradients, bit for bit.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/fs.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/parallel/stage_links.h"

namespace trireme {
namespace {

using testing::eight_heads;
using testing::fill;
using testing::part_of;
using testing::random_tokens;
using testing::same_bits;
using testing::split_options;

ModelConfig eight_layers(ModelFamily family) {
  ModelConfig config = eight_heads(family, /*tied=*/family == ModelFamily::kQwen3);
  config.num_layers = 8;
  return config;
}

// 29 rows: no multiple of tp.
PackedBatch some_batch() { return PackedBatch::from_sequences({random_tokens(17, 1), random_tokens(12, 2)}); }

at::Tensor receive(Model& model, const at::Tensor& like, bool backward) {
  const at::Tensor rows = at::empty_like(like);
  model.options().links->begin_receive(rows, backward).wait();
  return rows;
}

// All pieces of one batch in turn, forward and backward. Log-probs on the last stage.
at::Tensor forward_and_backward(Model& model, const PackedBatch& batch) {
  const ModelSplit& split = model.split();
  std::vector<PendingCollective> sends;
  std::vector<at::Tensor> inputs(split.layers.size()), outputs(split.layers.size());
  at::Tensor logprobs;
  for (size_t piece = 0; piece < split.layers.size(); ++piece) {
    const auto p = static_cast<int64_t>(piece);
    if (!split.begins(p)) inputs[piece] = receive(model, model.make_residual(batch.tokens()), false).requires_grad_();
    outputs[piece] = model.forward_piece(p, batch, inputs[piece]);
    if (split.ends(p)) {
      logprobs = model.logprobs(outputs[piece], batch.ids.roll(1), {});
    } else {
      EXPECT_EQ(outputs[piece].sizes(), model.make_residual(batch.tokens()).sizes());
      sends.push_back(model.options().links->begin_send(outputs[piece].detach(), false));
    }
  }
  for (size_t piece = split.layers.size(); piece-- > 0;) {
    if (split.ends(static_cast<int64_t>(piece))) {
      (logprobs * at::linspace(-1, 2, logprobs.size(0))).sum().backward();
    } else {
      torch::autograd::backward({outputs[piece]}, {receive(model, outputs[piece], true)});
    }
    if (inputs[piece].defined()) sends.push_back(model.options().links->begin_send(inputs[piece].grad(), true));
  }
  for (PendingCollective& sent : sends) sent.wait();
  return logprobs.defined() ? logprobs.detach() : logprobs;
}

struct Way {
  const char* name;
  ModelFamily family;
  at::ScalarType dtype;
  int64_t pp, tp;
  StageOptions stages;
};

class Stages : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(
    Pipeline, Stages,
    ::testing::Values(Way{"pp2", ModelFamily::kLlama, at::kFloat, 2, 1, {}},
                      Way{"pp4_bfloat16", ModelFamily::kQwen2, at::kBFloat16, 4, 1, {}},
                      Way{"pp2_tied", ModelFamily::kQwen3, at::kBFloat16, 2, 1, {}},
                      Way{"pp2_tp2", ModelFamily::kQwen3, at::kFloat, 2, 2, {}},
                      Way{"pp3_uneven", ModelFamily::kLlama, at::kFloat, 3, 1, {.first_layers = 1, .last_layers = 3}},
                      Way{"pp2_virtual4", ModelFamily::kQwen2, at::kFloat, 2, 1, {.virtual_stages = 4}},
                      Way{"pp4_experts", ModelFamily::kQwen3Moe, at::kBFloat16, 4, 1, {}},
                      Way{"pp2_tp2_experts", ModelFamily::kQwen3Moe, at::kBFloat16, 2, 2, {}},
                      Way{"pp2_virtual2_experts", ModelFamily::kMixtral, at::kFloat, 2, 1, {.virtual_stages = 2}}),
    [](const auto& info) { return info.param.name; });

TEST_P(Stages, HaveTheBitsOfTheModelWithoutThem) {
  const Way& way = GetParam();
  const ModelConfig config = eight_layers(way.family);
  const PackedBatch batch = some_batch();
  // The same tensor ranks with all layers each, and one rank of all.
  std::vector<std::unique_ptr<Model>> whole(static_cast<size_t>(way.tp));
  std::vector<at::Tensor> logprobs(whole.size());
  Layout flat;
  flat.tp = way.tp;
  const auto dtyped = [&](ModelOptions options) {
    options.dtype = way.dtype;
    return options;
  };
  test::on_layout(flat, [&](ParallelContext& context) {
    const auto rank = static_cast<size_t>(context.rank());
    whole[rank] = std::make_unique<Model>(config, dtyped(split_options(context, config)));
    fill(*whole[rank]);
    logprobs[rank] = forward_and_backward(*whole[rank], batch);
  });
  Layout layout = flat;
  layout.pp = way.pp;
  TemporaryDirectory dir;
  if (way.tp == 1) save_model(*whole.front(), dir.path(), {});
  test::on_layout(layout, [&](ParallelContext& context) {
    Model model(config, dtyped(split_options(context, config, way.stages)));
    fill(model);
    const Model& same = *whole[static_cast<size_t>(context.coordinates().tp)];
    if (way.tp == 1) {
      Model read(config, dtyped(split_options(context, config, way.stages)));
      load_parameters(read, dir.path());
      EXPECT_TRUE(same_bits(read.flat_parameters().detach(), model.flat_parameters().detach()));
    }
    for (const Recompute& recompute : {Recompute{}, Recompute{1, 0}, Recompute{0, 8}}) {
      model.zero_gradients();
      model.set_recompute(recompute);
      const at::Tensor got = forward_and_backward(model, batch);
      ASSERT_EQ(got.defined(), model.split().last_stage());
      if (got.defined()) {
        EXPECT_TRUE(same_bits(got, logprobs[static_cast<size_t>(context.coordinates().tp)]));
      }
      for (const Parameter& parameter : model.parameters()) {
        const bool tied = config.tie_word_embeddings && parameter.name == "model.embed_tokens.weight";
        if (!parameter.trainable) continue;  // a frozen router
        at::Tensor gradient = parameter.tensor.grad();
        if (tied) gradient = gradient + context.stage_links()->swap_ends(gradient);
        const at::Tensor wanted = same.find(parameter.name)->tensor.grad();
        if (tied) {  // the two uses are added in another order
          EXPECT_LE((gradient - wanted).abs().max().item<double>(), 1e-2 * wanted.abs().max().item<double>());
        } else {
          EXPECT_TRUE(same_bits(gradient, wanted)) << parameter.name;
        }
      }
    }
  });
}

TEST(Pipeline, CachedPiecesHaveTheBitsOfPackedOnes) {
  const ModelConfig config = eight_layers(ModelFamily::kQwen3);
  for (const StageOptions& stages : {StageOptions{}, StageOptions{.virtual_stages = 2}}) {
    Layout layout;
    layout.pp = 2;
    const auto tokens = random_tokens(13, 4);
    const PackedBatch packed = PackedBatch::from_sequences({tokens});
    Model whole(config, {});
    fill(whole);
    const at::NoGradGuard no_grad;
    const at::Tensor wanted = whole.forward(packed);
    test::on_layout(layout, [&](ParallelContext& context) {
      const at::NoGradGuard none_here;
      Model model(config, split_options(context, config, stages));
      fill(model);
      KvArena arena(model.local(), 40, at::kFloat, at::kCPU);
      EXPECT_EQ(arena.num_layers(), 4);
      // In two parts.
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 9}, {9, 13}}) {
        CachedBatch batch;
        batch.ids = packed.ids.narrow(0, begin, end - begin);
        batch.positions = packed.positions.narrow(0, begin, end - begin);
        batch.plan.host_runs.push_back({5, begin, end - begin});
        for (int64_t piece = 0; piece < static_cast<int64_t>(model.split().layers.size()); ++piece) {
          at::Tensor in;
          if (!model.split().begins(piece)) in = receive(model, model.make_residual(end - begin), false);
          const at::Tensor out = model.forward_cached_piece(piece, batch, arena, in);
          if (!model.split().ends(piece)) {
            context.stage_links()->begin_send(out, false).wait();
          } else {
            EXPECT_TRUE(same_bits(out, wanted.narrow(0, begin, end - begin)));
          }
        }
      }
    });
  }
}

TEST(Pipeline, OnlyAStagesOwnParametersAreThere) {
  const ModelConfig config = eight_layers(ModelFamily::kLlama);
  Layout layout;
  layout.pp = 4;
  test::on_layout(layout, [&](ParallelContext& context) {
    const Model model(config, split_options(context, config));
    const auto stage = context.coordinates().pp;
    EXPECT_EQ(model.local().layers, 2);
    EXPECT_EQ(model.find("model.embed_tokens.weight") != nullptr, stage == 0);
    EXPECT_EQ(model.find("lm_head.weight") != nullptr, stage == 3);
    EXPECT_EQ(model.find("model.norm.weight") != nullptr, stage == 3);
    for (int64_t layer = 0; layer < 8; ++layer) {
      const Parameter* o = model.find("model.layers." + std::to_string(layer) + ".self_attn.o_proj.weight");
      EXPECT_EQ(o != nullptr, layer / 2 == stage) << layer;
    }
    EXPECT_MENTIONS(test::error_of([&] { (void)model.forward(some_batch()); }), "several pipeline stages");
  });
}

}  // namespace
}  // namespace trireme
