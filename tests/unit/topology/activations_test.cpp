#include "topology/activations.h"

#include <gtest/gtest.h>

#include <vector>

namespace trireme {
namespace {

LocalShape local(const char* model, const Layout& layout, int64_t rank = 0) {
  const ModelShape shape = *known_model_shape(model);
  return local_shape(shape, model_split(shape, layout, rank));
}

TEST(Activations, BytesOfALayerAreCountedByHand) {
  const ActivationBytes llama = activation_bytes(local("Llama-3.1-8B", {}), 2);
  // Two sums and two norms of 4096, q and the result of 4096, k and v of 1024, gate, up and their product of 14336;
  // 32 sums of exponentials in float32.
  EXPECT_EQ(llama.whole, 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14'336) + 4 * 32);
  EXPECT_EQ(llama.whole - llama.cheap, 2 * (2 * 4096 + 14'336));
  EXPECT_EQ(llama.input, 2 * 4096);
  // The MLP's backward: gradients of the down product's input, gate and up, and their product again, of 14336; of its
  // own input and output. Around it the residual stream's six.
  EXPECT_EQ(llama.passing, 2 * (6 * 4096 + 2 * 4096 + 4 * 14'336));
  // Three chunks of logits of half a GiB, and the head's gradient in float32.
  EXPECT_EQ(llama.fixed, (int64_t{3} << 29) + int64_t{4} * 128'256 * 4096);
  // Which is added up in its buffer where that is float32.
  EXPECT_EQ(activation_bytes(local("Llama-3.1-8B", {}), 2, 4).fixed, int64_t{3} << 29);
  // The last sum, its norm, the gradients of both.
  EXPECT_EQ(llama.ending, 2 * 4 * 4096);
  // Head norms keep the products besides: q 2048, k and v 1024 each.
  const ActivationBytes qwen = activation_bytes(local("Qwen3-1.7B", {}), 4);
  EXPECT_EQ(qwen.whole, 4 * (4 * 2048 + (2048 + 2 * 1024) + 2 * 2048 + 1024 + 3 * 6144) + 4 * 16);
}

TEST(Activations, OfExpertsAreGateAndUpAndReceivedRows) {
  // 8 choices of width 768; rows of 2048.
  const ActivationBytes whole = activation_bytes(local("qwen3-30b-a3b", {}), 2);
  EXPECT_EQ(whole.whole - whole.cheap, 2 * 2 * 2048);
  EXPECT_EQ(whole.cheap - whole.experts, 2 * 2 * 8 * 768);
  // Over two ranks a row goes to 2 (1 - 1 / 256) of them, and there its choices have a place, a row, a slot and a
  // weight in 20 bytes, and the row says where they begin; of all ranks' choices a rank has as many as of its own rows.
  const ActivationBytes split = activation_bytes(local("qwen3-30b-a3b", {.ep = 2, .dp = 2}), 2);
  EXPECT_EQ(split.cheap - split.experts, 2 * 2 * 8 * 768);
  EXPECT_NEAR(static_cast<double>(split.experts - whole.experts), 2 * (1 - 1.0 / 256) * (2 * 2048 + 4) + 8 * 20, 2);
  EXPECT_EQ(split.passing, whole.passing);
  // Tensor ranks have a part of the rows each.
  const ActivationBytes cut = activation_bytes(local("qwen3-30b-a3b", {.tp = 2, .ep = 2}), 2);
  EXPECT_LT(cut.experts, 0.6 * static_cast<double>(split.experts));
  EXPECT_EQ(activation_bytes(local("Llama-3.1-8B", {}), 2).experts,
            activation_bytes(local("Llama-3.1-8B", {}), 2).cheap);
}

TEST(Activations, AreSharedByTensorRanks) {
  for (const char* model : {"Llama-3.1-70B", "Qwen3-32B", "Qwen2.5-7B"}) {
    const ActivationBytes one = activation_bytes(local(model, {}), 2);
    for (const int64_t tp : {2, 4}) {
      const ActivationBytes part = activation_bytes(local(model, {.tp = tp}, 1), 2);
      EXPECT_EQ(part.whole * tp, one.whole);
      EXPECT_EQ(part.cheap * tp, one.cheap);
      EXPECT_EQ(part.input * tp, one.input);
      // Inputs and gradients are gathered while a layer is differentiated.
      EXPECT_GT(part.passing * tp, one.passing);
      EXPECT_LT(part.passing, one.passing);
      EXPECT_LT(part.fixed, one.fixed);
    }
  }
}

// Two rows' keys and values, of 1024 each, for one row's: kept by every layer, and while it is differentiated there in
// the order of the chains, with gradients.
TEST(Activations, ContextRanksKeepTheKeysOfAll) {
  const LocalShape shape = local("Llama-3.1-8B", {});
  const ActivationBytes one = activation_bytes(shape, 2), gathered = activation_bytes(shape, 2, 2, 2);
  for (const auto part : {&ActivationBytes::whole, &ActivationBytes::cheap, &ActivationBytes::experts})
    EXPECT_EQ(gathered.*part - one.*part, 2 * 2 * 2 * 1024);
  EXPECT_EQ(gathered.input, one.input);
  EXPECT_EQ(gathered.passing, one.passing);  // the MLP's is more
  EXPECT_EQ(activation_bytes(shape, 2, 2, 20).passing - one.passing,
            2 * (3 * 4096 + 4 * 1024 + 2 * 20 * 2 * 1024) + 8 * 32 - 2 * (2 * 4096 + 4 * 14'336));
  // Behind head norms the products are kept, and a copy of the own values.
  const LocalShape qwen = local("Qwen3-1.7B", {});
  EXPECT_EQ(activation_bytes(qwen, 2, 2, 2).whole - activation_bytes(qwen, 2).whole, 2 * (2 * 2 * 1024 + 1024));
}

TEST(Activations, OfAStageHaveNoLogitsBeforeTheLast) {
  const Layout layout{.pp = 4};
  for (int64_t stage = 0; stage < 4; ++stage)
    EXPECT_EQ(activation_bytes(local("Llama-3.1-70B", layout, stage), 2).fixed > 0, stage == 3);
}

TEST(Activations, TotalsAreWhatLayersKeep) {
  const ActivationBytes bytes{.whole = 1000, .cheap = 600, .input = 10, .passing = 70, .ending = 20, .fixed = 5};
  EXPECT_EQ(activation_total(bytes, {.whole = 4}, 3), 3 * (4000 + 70));
  EXPECT_EQ(activation_total(bytes, {.cheap = 1, .whole = 3}, 3), 3 * (3600 + 70));
  // All computed again: one at a time is whole.
  EXPECT_EQ(activation_total(bytes, {.input = 4}, 3), 3 * (40 + 1000 + 70));
  // Experts' gate and up are there again while their layer is differentiated.
  const ActivationBytes mixture{.whole = 1000, .cheap = 600, .experts = 400, .input = 10, .passing = 70};
  EXPECT_EQ(activation_total(mixture, {.experts = 4}, 3), 3 * (1600 + 200 + 70));
  EXPECT_EQ(activation_total(mixture, {.experts = 1, .cheap = 3}, 3), 3 * (2200 + 70));
  EXPECT_EQ(activation_total(mixture, {.input = 2, .experts = 2}, 3), 3 * (20 + 1000 + 70));
  // Once what the layers behind keep is free, the first one fits where they were.
  EXPECT_EQ(activation_total(bytes, {.input = 1, .cheap = 3}, 3), 3 * (10 + 1800 + 70));
  EXPECT_EQ(activation_total(bytes, {.input = 3, .cheap = 1}, 3), 3 * (30 + 1000 + 70));
  // Of many logits that is the moment when the head is differentiated, with all that layers keep.
  const ActivationBytes wide{.whole = 1000, .cheap = 600, .input = 10, .passing = 70, .ending = 20, .fixed = 5000};
  EXPECT_EQ(activation_total(wide, {.whole = 4}, 3), 3 * (4000 + 20) + 5000);
  EXPECT_EQ(activation_total(wide, {.input = 4}, 3, 2), 3 * (40 + 40 + 20) + 5000);
  // Micro-batches in flight keep; only one is differentiated.
  EXPECT_EQ(activation_total(bytes, {.whole = 4}, 3, 5) - activation_total(bytes, {.whole = 4}, 3, 1), 4 * 3 * 4000);
  EXPECT_EQ(activation_total(bytes, {.input = 4}, 3, 2) - activation_total(bytes, {.input = 4}, 3, 1), 3 * 40);
}

TEST(Activations, TheLeastRecomputationThatFitsIsChosen) {
  const ActivationBytes bytes{.whole = 1000, .cheap = 600, .input = 10, .passing = 70, .fixed = 5};
  // In the order in which more is computed again, of three layers.
  const std::vector<KeptLayers> order = {{.whole = 3}, {.cheap = 1, .whole = 2}, {.cheap = 2, .whole = 1},
                                         {.cheap = 3}, {.input = 1, .cheap = 2}, {.input = 2, .cheap = 1},
                                         {.input = 3}};
  for (int64_t room = 0; room < 40'000; room += 50) {
    size_t expected = 0;
    while (expected + 1 < order.size() && static_cast<double>(activation_total(bytes, order[expected], 7, 2)) >
                                              kUsableForActivations * static_cast<double>(room)) {
      ++expected;
    }
    const FittedLayers fitted = fit_layers(bytes, 3, 7, 2, room);
    EXPECT_EQ(fitted.kept.input, order[expected].input) << room;
    EXPECT_EQ(fitted.kept.cheap, order[expected].cheap) << room;
    EXPECT_EQ(fitted.kept.whole, order[expected].whole) << room;
    EXPECT_EQ(fitted.bytes, activation_total(bytes, order[expected], 7, 2));
  }
}

TEST(Activations, GateAndUpOfExpertsGoBetweenNormsAndWholeLayers) {
  const ActivationBytes bytes{.whole = 1000, .cheap = 600, .experts = 400, .input = 10, .passing = 70, .fixed = 5};
  const std::vector<KeptLayers> order = {
      {.whole = 2},   {.cheap = 1, .whole = 1},   {.cheap = 2}, {.experts = 1, .cheap = 1},
      {.experts = 2}, {.input = 1, .experts = 1}, {.input = 2}};
  std::vector<bool> seen(order.size());
  for (int64_t room = 0; room < 30'000; room += 50) {
    size_t expected = 0;
    while (expected + 1 < order.size() && static_cast<double>(activation_total(bytes, order[expected], 7, 2)) >
                                              kUsableForActivations * static_cast<double>(room)) {
      ++expected;
    }
    seen[expected] = true;
    const KeptLayers kept = fit_layers(bytes, 2, 7, 2, room).kept;
    EXPECT_EQ(kept.input, order[expected].input) << room;
    EXPECT_EQ(kept.experts, order[expected].experts) << room;
    EXPECT_EQ(kept.cheap, order[expected].cheap) << room;
    EXPECT_EQ(kept.whole, order[expected].whole) << room;
  }
  EXPECT_TRUE(seen[3] && seen[4]);
}

}  // namespace
}  // namespace trireme
