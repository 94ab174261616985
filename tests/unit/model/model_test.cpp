#include "trainer/model/model.h"

#include <ATen/Parallel.h>

#include <cmath>

#include "tests/unit/model/testing.h"

namespace trireme {
namespace {

using testing::random_tokens;
using testing::same_bits;
using testing::small_config;
using testing::small_model;

class Families : public ::testing::TestWithParam<ModelFamily> {};
INSTANTIATE_TEST_SUITE_P(Model, Families, ::testing::ValuesIn(testing::kAllFamilies),
                         [](const auto& info) { return std::string(to_string(info.param)); });

// Of experts: gate and up of the first begin a block, and its down another.
bool begins_block(const std::string& name) {
  if (name.find(".experts.") == std::string::npos) return true;
  return name.find(".experts.0.gate_proj") != std::string::npos || name.find(".experts.0.w1") != std::string::npos ||
         name.find(".experts.0.down_proj") != std::string::npos || name.find(".experts.0.w2") != std::string::npos;
}

TEST_P(Families, ParametersLieInOneFlatBufferWithGradientsInAnother) {
  ModelOptions options;
  options.freeze_router = false;
  const auto model = small_model(GetParam(), /*tied=*/false, options);
  int64_t elements = 0, end = 0;
  for (const Parameter& p : model->parameters()) {
    const bool inside_a_block = p.name.find("k_proj") != std::string::npos ||
                                p.name.find("v_proj") != std::string::npos ||
                                p.name.find("up_proj") != std::string::npos || !begins_block(p.name);
    if (inside_a_block) {
      EXPECT_EQ(p.offset, end) << p.name;
    } else {
      EXPECT_EQ(p.offset, (end + kParameterAlignment - 1) / kParameterAlignment * kParameterAlignment) << p.name;
    }
    EXPECT_EQ(p.tensor.data_ptr<float>(), model->flat_parameters().data_ptr<float>() + p.offset) << p.name;
    EXPECT_EQ(p.tensor.grad().data_ptr<float>(), model->flat_gradients().data_ptr<float>() + p.offset) << p.name;
    EXPECT_TRUE(p.tensor.is_leaf() && p.tensor.requires_grad());
    EXPECT_EQ(p.tensor.numel(), p.size);
    end = p.offset + p.size;
    elements += p.size;
  }
  EXPECT_EQ(elements, model->config().parameter_count());
  EXPECT_EQ(model->parameters().front().name, "model.embed_tokens.weight");
  EXPECT_EQ(model->parameters().back().name, "lm_head.weight");
}

at::Tensor some_loss(const Model& model, const PackedBatch& batch) {
  const at::Tensor hidden = model.forward(batch);
  return token_logprobs(hidden, model.head_weight(), batch.ids.roll(1), {}).mean();
}

TEST_P(Families, BackwardAddsIntoTheFlatGradients) {
  const auto model = small_model(GetParam());
  const PackedBatch batch = PackedBatch::from_sequences({random_tokens(17, 1), random_tokens(9, 2)});
  const void* before = model->flat_gradients().data_ptr();
  some_loss(*model, batch).backward();
  const at::Tensor once = model->flat_gradients().clone();
  for (const Parameter& p : model->parameters()) {
    EXPECT_EQ(p.trainable, !p.frozen) << p.name;
    if (p.frozen || p.name.find(".experts.") != std::string::npos) continue;  // not every expert gets a token
    EXPECT_GT(p.tensor.grad().abs().max().item<float>(), 0.0f) << p.name;
    EXPECT_EQ(p.tensor.grad().data_ptr<float>(), model->flat_gradients().data_ptr<float>() + p.offset);
  }
  some_loss(*model, batch).backward();
  EXPECT_EQ(model->flat_gradients().data_ptr(), before);
  EXPECT_TRUE(same_bits(model->flat_gradients(), once + once));
  model->zero_gradients();
  EXPECT_EQ(model->flat_gradients().abs().max().item<float>(), 0.0f);
}

TEST_P(Families, GradientMatchesFiniteDifferences) {
  ModelOptions options;
  options.dtype = at::kDouble;
  for (const bool tied : {false, true}) {
    const auto model = small_model(GetParam(), tied, options);
    const PackedBatch batch = PackedBatch::from_sequences({random_tokens(12, 1), random_tokens(7, 2)});
    some_loss(*model, batch).backward();
    EXPECT_NEAR(testing::differences_by_gradient(*model, [&] { return some_loss(*model, batch); }), 1.0, 1e-5);
  }
}

TEST_P(Families, ActivationCheckpointingGivesTheSameBits) {
  const PackedBatch batch = PackedBatch::from_sequences({random_tokens(17, 1), random_tokens(9, 2)});
  ModelOptions options;
  const auto plain = small_model(GetParam());
  options.checkpoint_activations = true;
  const auto saving = small_model(GetParam(), false, options);
  const at::Tensor a = some_loss(*plain, batch), b = some_loss(*saving, batch);
  EXPECT_TRUE(same_bits(a.detach(), b.detach()));
  a.backward();
  b.backward();
  EXPECT_TRUE(same_bits(plain->flat_gradients(), saving->flat_gradients()));
}

TEST_P(Families, RecomputationChangesNoBitOfAGradient) {
  const PackedBatch batch = PackedBatch::from_sequences({random_tokens(17, 1), random_tokens(9, 2)});
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    ModelOptions options;
    options.dtype = type;
    if (type == at::kBFloat16) options.gradient_dtype = at::kFloat;
    const auto model = small_model(GetParam(), /*tied=*/true, options);
    some_loss(*model, batch).backward();
    const at::Tensor expected = model->flat_gradients().clone();
    for (const Recompute& recompute :
         {Recompute{0, 1}, Recompute{0, 3}, Recompute{1, 0}, Recompute{1, 1}, Recompute{2, 9}, Recompute{3, 0},
          Recompute{9, 9}, Recompute{0, 3, true, false}, Recompute{0, 3, false, true}, Recompute{.expert_layers = 1},
          Recompute{.cheap_layers = 3, .expert_layers = 3}, Recompute{.whole_layers = 1, .expert_layers = 2}}) {
      model->set_recompute(recompute);
      model->zero_gradients();
      some_loss(*model, batch).backward();
      EXPECT_TRUE(same_bits(model->flat_gradients(), expected))
          << recompute.whole_layers << " whole, " << recompute.cheap_layers << " cheap, " << recompute.expert_layers
          << " without gates";
    }
  }
}

// The invariant of DESIGN: prefill in chunks, decode one by one, any mix of sequences, moved extents: the same bits.
TEST_P(Families, CachedForwardHasTheBitsOfThePackedOne) {
  const at::NoGradGuard no_grad;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    ModelOptions options;
    options.dtype = type;
    const auto model = small_model(GetParam(), false, options);
    const std::vector<std::vector<int32_t>> sequences = {random_tokens(33, 1), random_tokens(1, 2),
                                                         random_tokens(70, 3), random_tokens(18, 4)};
    const PackedBatch packed = PackedBatch::from_sequences(sequences);
    const at::Tensor expected = model->forward(packed);
    const std::vector<std::vector<int64_t>> plans = {{1}, {200}, {20, 1, 1, 1}, {7, 16, 3}};
    for (const auto& chunks : plans) {
      KvArena arena(model->config(), 300, type, at::kCPU);
      std::vector<int64_t> extents = {100, 20, 30, 150}, done(4, 0);
      for (size_t turn = 0;; ++turn) {
        CachedBatch batch;
        std::vector<int64_t> ids, positions;
        std::vector<at::Tensor> wanted;
        for (size_t i = 0; i < 4; ++i) {
          const size_t s = (i + turn) % 4;  // another order every time
          const auto length = static_cast<int64_t>(sequences[s].size());
          const int64_t count = std::min(chunks[(turn + s) % chunks.size()], length - done[s]);
          if (count == 0 || (turn + s) % 5 == 4) continue;
          for (int64_t t = 0; t < count; ++t) {
            ids.push_back(sequences[s][static_cast<size_t>(done[s] + t)]);
            positions.push_back(done[s] + t);
          }
          batch.plan.host_runs.push_back({extents[s], done[s], count});
          wanted.push_back(expected.narrow(0, packed.starts[s] + done[s], count));
          done[s] += count;
        }
        if (done == std::vector<int64_t>{33, 1, 70, 18} && batch.plan.host_runs.empty()) break;
        if (batch.plan.host_runs.empty()) continue;
        batch.ids = at::tensor(ids, at::kLong);
        batch.positions = at::tensor(positions, at::kLong);
        ASSERT_TRUE(same_bits(model->forward_cached(batch, arena), at::cat(wanted))) << "turn " << turn;
        if (turn == 2) {  // moving with overlap, both ways
          arena.move(extents[2], 35, done[2]);
          extents[2] = 35;
          arena.move(extents[3], 148, done[3]);
          extents[3] = 148;
          arena.move(extents[0], 230, done[0]);
          extents[0] = 230;
        }
      }
    }
  }
}

TEST_P(Families, AGroupSharesItsPromptsRows) {
  const at::NoGradGuard no_grad;
  const auto model = small_model(GetParam());
  const auto prompt = random_tokens(15, 1);
  KvArena arena(model->config(), 64, at::kFloat, at::kCPU);
  const PackedBatch as_packed = PackedBatch::from_sequences({prompt});
  model->forward_cached({as_packed.ids, as_packed.positions, {{{0, 0, 15}}}}, arena);
  arena.move(0, 20, 15);
  arena.move(0, 40, 15);
  CachedBatch step{at::tensor({5, 9}, at::kLong), at::tensor({15, 15}, at::kLong), {{{20, 15, 1}, {40, 15, 1}}}};
  const at::Tensor hidden = model->forward_cached(step, arena);
  for (int64_t i = 0; i < 2; ++i) {
    auto whole = prompt;
    whole.push_back(i == 0 ? 5 : 9);
    EXPECT_TRUE(
        same_bits(model->forward(PackedBatch::from_sequences({whole})).narrow(0, 15, 1), hidden.narrow(0, i, 1)));
  }
}

TEST_P(Families, PackingDoesNotChangeBitsNorDoThreadsOrGradMode) {
  const auto model = small_model(GetParam());
  const auto a = random_tokens(40, 1), b = random_tokens(25, 2);
  const at::Tensor both = model->forward(PackedBatch::from_sequences({a, b})).detach();
  EXPECT_TRUE(
      same_bits(model->forward(PackedBatch::from_sequences({b, a})).detach().narrow(0, 25, 40), both.narrow(0, 0, 40)));
  const at::NoGradGuard no_grad;
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  EXPECT_TRUE(same_bits(model->forward(PackedBatch::from_sequences({b})), both.narrow(0, 40, 25)));
  at::set_num_threads(threads);
}

TEST(Model, SamplerLogprobsAreThoseOfTheLoss) {
  const auto model = small_model(ModelFamily::kQwen3);
  KvArena arena(model->config(), 64, at::kFloat, at::kCPU);
  LogprobOptions options;
  options.temperature = 0.9;
  options.top_p = 0.97;
  options.allow_filtered = true;  // of the prompt's tokens
  std::vector<int32_t> sequence = random_tokens(6, 1);
  std::vector<float> sampled;
  int64_t past = 0;
  std::vector<int64_t> next(sequence.begin(), sequence.end());
  for (int step = 0; step < 20; ++step) {
    const auto count = static_cast<int64_t>(next.size());
    const at::Tensor hidden = model->forward_cached(
        {at::tensor(next, at::kLong), at::arange(past, past + count, at::kLong), {{{7, past, count}}}}, arena);
    past += count;
    const SampleResult one = sample_tokens(hidden.narrow(0, count - 1, 1), model->head_weight(),
                                           {{options, {3, 4, static_cast<uint64_t>(past)}, false}});
    sequence.push_back(static_cast<int32_t>(one.ids[0]));
    sampled.push_back(one.logprobs[0]);
    next = one.ids;
  }
  const auto scored = score(*model, {sequence}, options);
  ASSERT_EQ(scored[0].size(), sequence.size() - 1);
  EXPECT_EQ(std::memcmp(scored[0].data() + 5, sampled.data(), sampled.size() * sizeof(float)), 0);
  // With other sequences around it, recorded by autograd.
  const PackedBatch packed = PackedBatch::from_sequences({random_tokens(31, 8), sequence});
  const at::Tensor rows = at::arange(31 + 5, 31 + 25, at::kLong);
  const at::Tensor logprobs = token_logprobs(model->forward(packed).index_select(0, rows), model->head_weight(),
                                             packed.ids.index_select(0, rows + 1), options);
  EXPECT_TRUE(logprobs.requires_grad());
  EXPECT_TRUE(same_bits(logprobs.detach(), at::tensor(sampled, at::kFloat)));
}

TEST(Model, TiedHeadIsTheEmbedding) {
  const auto model = small_model(ModelFamily::kLlama, true);
  EXPECT_EQ(model->find("lm_head.weight"), nullptr);
  EXPECT_EQ(model->head_weight().data_ptr(), model->find("model.embed_tokens.weight")->tensor.data_ptr());
}

TEST(Model, ReferenceModelHasNoGradients) {
  ModelOptions options;
  options.trainable = false;
  const auto model = small_model(ModelFamily::kLlama, false, options);
  EXPECT_FALSE(model->flat_gradients().defined());
  EXPECT_FALSE(model->forward(PackedBatch::from_sequences({random_tokens(5, 1)})).requires_grad());
  const auto other = small_model(ModelFamily::kLlama);
  {
    const at::NoGradGuard no_grad;
    other->flat_parameters().mul_(2.0);
  }
  model->zero_gradients();
  model->copy_parameters_from(*other);
  EXPECT_TRUE(same_bits(model->flat_parameters(), other->flat_parameters()));
}

TEST(Model, ScoreOfShortAndManySequences) {
  const auto model = small_model(ModelFamily::kQwen2);
  const std::vector<std::vector<int32_t>> sequences = {
      {5}, {}, random_tokens(30, 1), random_tokens(2, 2), random_tokens(50, 3)};
  const auto together = score(*model, sequences);
  const auto small_batches = score(*model, sequences, {}, 10);
  ASSERT_EQ(together.size(), 5u);
  EXPECT_TRUE(together[0].empty() && together[1].empty());
  EXPECT_EQ(together[4].size(), 49u);
  EXPECT_EQ(together, small_batches);
}

TEST(Model, UnknownTokenIsNamed) {
  const auto model = small_model(ModelFamily::kLlama);
  EXPECT_MENTIONS(testing::error_of([&] { model->forward(PackedBatch::from_sequences({{1, 61}})); }), "id 61");
}

TEST(Model, HalfPrecisionOnCpuIsRefused) {
  ModelOptions options;
  options.dtype = at::kHalf;
  EXPECT_MENTIONS(testing::error_of([&] { Model model(small_config(ModelFamily::kLlama), options); }), "float16");
}

TEST(KvArena, MoveIsMemmoveInEveryLayer) {
  const ModelConfig config = small_config(ModelFamily::kLlama);
  KvArena arena(config, 10, at::kFloat, at::kCPU);
  EXPECT_EQ(KvArena::bytes_per_row(config, at::kFloat), 2 * 3 * 2 * 12 * 4);
  for (int64_t layer = 0; layer < 3; ++layer) {
    for (int64_t row = 0; row < 10; ++row) {
      arena.keys(layer)[row].fill_(static_cast<double>(layer * 100 + row));
      arena.values(layer)[row].fill_(static_cast<double>(-layer * 100 - row));
    }
  }
  arena.move(2, 4, 5);  // overlaps upwards
  for (int64_t layer = 0; layer < 3; ++layer) {
    for (int64_t row = 0; row < 10; ++row) {
      const double source = static_cast<double>(row >= 4 && row < 9 ? row - 2 : row);
      EXPECT_EQ(arena.keys(layer)[row][1][3].item<double>(), static_cast<double>(layer) * 100 + source);
      EXPECT_EQ(arena.values(layer)[row][0][0].item<double>(), -(static_cast<double>(layer) * 100 + source));
    }
  }
  EXPECT_THROW(arena.move(8, 0, 3), Error);
}

}  // namespace
}  // namespace trireme
