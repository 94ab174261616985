#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/model/tiny.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/model/safetensors.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/optimizer/lr_schedule.h"

namespace trireme {
namespace {

ModelConfig tiny() {
  return test::tiny_config(
      {.vocab = 50, .hidden = 16, .intermediate = 24, .layers = 2, .heads = 2, .kv_heads = 1, .positions = 64});
}

void fill_gradients(Model& model, int step) {
  const c10::NoGradGuard no_grad;
  for (Parameter& p : model.parameters()) {
    at::Tensor g = model.flat_gradients().narrow(0, p.offset, p.size);
    g.copy_(at::arange(p.size, at::kFloat).mul(0.01).add(static_cast<double>(step)).sin().mul(0.1));
  }
}

// Decoupled AdamW written out on one element, in double.
struct Oracle {
  double w, m = 0, v = 0;
  void step(double g, double lr, double wd, int t) {
    w *= 1 - lr * wd;
    m = 0.9 * m + 0.1 * g;
    v = 0.99 * v + 0.01 * g * g;
    w -= lr * (m / (1 - std::pow(0.9, t))) / (std::sqrt(v / (1 - std::pow(0.99, t))) + 1e-8);
  }
};

AdamWOptions options() {
  AdamWOptions o;
  o.beta2 = 0.99;
  return o;
}

// Frozen routers lie behind what is trained: no gradient, no state, no decay.
TEST(AdamW, FrozenRoutersAreLeftAlone) {
  ModelConfig config = test::tiny_config({.family = ModelFamily::kQwen3Moe,
                                          .vocab = 50,
                                          .hidden = 16,
                                          .layers = 2,
                                          .heads = 2,
                                          .kv_heads = 1,
                                          .positions = 64});
  for (const bool frozen : {true, false}) {
    ModelOptions model_options;
    model_options.freeze_router = frozen;
    Model model(config, model_options);
    init_parameters(model, 3);
    Communicator alone;
    DistributedAdamW optimizer(model, alone, options());
    const std::string name = "model.layers.0.mlp.gate.weight";
    const at::Tensor before = model.find(name)->tensor.detach().clone();
    model.flat_gradients().detach().fill_(0.5);
    const OptimizerStep step = optimizer.step(0.01, 0.1, 0.0);
    EXPECT_NEAR(step.grad_norm, 0.5 * std::sqrt(static_cast<double>(model.trained_elements())), 1e-3);
    EXPECT_EQ(model.find(name)->trainable, !frozen);
    EXPECT_EQ(at::equal(model.find(name)->tensor.detach(), before), frozen);
    EXPECT_EQ(model.flat_gradients().numel(), model.trained_elements());
    const TensorFile saved = optimizer.saved();
    EXPECT_EQ(saved.metadata.at("pieces").find(name) == std::string::npos, frozen);
    EXPECT_NE(saved.metadata.at("pieces").find("model.layers.0.mlp.experts.7.down_proj.weight"), std::string::npos);
  }
}

TEST(AdamW, MatchesTheFormulaElementByElement) {
  Model model(tiny(), {});
  init_parameters(model, 3);
  Communicator alone;
  DistributedAdamW optimizer(model, alone, options());
  const std::vector<int64_t> picked = {0, 17, 301};
  std::vector<Oracle> oracles;
  for (const int64_t i : picked) oracles.push_back({model.flat_parameters()[i].item<double>()});
  for (int t = 1; t <= 5; ++t) {
    fill_gradients(model, t);
    for (size_t k = 0; k < picked.size(); ++k)
      oracles[k].step(model.flat_gradients()[picked[k]].item<double>(), 0.01, 0.1, t);
    optimizer.step(0.01, 0.1, 0);
    EXPECT_EQ(model.flat_gradients().abs().max().item<double>(), 0) << "gradients are consumed";
  }
  for (size_t k = 0; k < picked.size(); ++k)
    EXPECT_NEAR(model.flat_parameters()[picked[k]].item<double>(), oracles[k].w, 2e-6);
}

TEST(AdamW, ClipsByTheGlobalNorm) {
  Model model(tiny(), {});
  init_parameters(model, 3);
  Communicator alone;
  DistributedAdamW optimizer(model, alone, options());
  fill_gradients(model, 1);
  const double norm = model.flat_gradients().to(at::kDouble).norm().item<double>();
  const OptimizerStep step = optimizer.step(0, 0, norm / 4);
  EXPECT_NEAR(step.grad_norm, norm, norm * 1e-6);
  EXPECT_NEAR(step.clip_factor, 0.25, 1e-5);
}

TEST(AdamW, BucketsDoNotChangeTheResult) {
  at::Tensor expected;
  for (const int64_t bucket : {int64_t{1} << 24, int64_t{1000}, int64_t{64}}) {
    Model model(tiny(), {});
    init_parameters(model, 3);
    Communicator alone;
    AdamWOptions o = options();
    o.bucket_elements = bucket;
    DistributedAdamW optimizer(model, alone, o);
    for (int t = 1; t <= 3; ++t) {
      fill_gradients(model, t);
      optimizer.step(0.01, 0.1, 1);
    }
    if (!expected.defined()) expected = model.flat_parameters().clone();
    EXPECT_TRUE(at::equal(model.flat_parameters(), expected)) << bucket;
  }
}

TEST(AdamW, WhoReadsTheStateIsWaitedForBeforeAnyOfItIsWritten) {
  Model model(tiny(), {});
  init_parameters(model, 3);
  Communicator alone;
  DistributedAdamW optimizer(model, alone, options());
  fill_gradients(model, 1);
  optimizer.step(0.01, 0, 1);
  const TensorFile file = optimizer.saved();
  std::vector<at::Tensor> before;
  for (const auto& [name, tensor] : file.tensors) before.push_back(tensor.clone());
  const at::Tensor weights = model.flat_parameters().clone();
  const auto unchanged = [&] {
    bool same = at::equal(model.flat_parameters(), weights);
    for (size_t i = 0; i < before.size(); ++i) same = same && at::equal(file.tensors[i].second, before[i]);
    return same;
  };
  fill_gradients(model, 2);
  optimizer.before_update = [&] {
    EXPECT_TRUE(unchanged());
    fail_io("the disk is gone");
  };
  EXPECT_THROW(optimizer.step(0.01, 0.1, 1), Error);
  EXPECT_TRUE(unchanged());
  EXPECT_EQ(optimizer.steps_done(), 1);
  optimizer.before_update = nullptr;
  fill_gradients(model, 2);
  optimizer.step(0.01, 0.1, 1);
  EXPECT_FALSE(unchanged()) << "saved() gives views";
}

TEST(AdamW, NonFiniteGradientNamesTheParameterAndChangesNothing) {
  Model model(tiny(), {});
  init_parameters(model, 3);
  Communicator alone;
  DistributedAdamW optimizer(model, alone, options());
  const at::Tensor before = model.flat_parameters().clone();
  fill_gradients(model, 1);
  const Parameter* victim = model.find("model.layers.1.mlp.down_proj.weight");
  ASSERT_NE(victim, nullptr);
  model.flat_gradients()[victim->offset + 3] = std::nan("");
  try {
    optimizer.step(0.01, 0, 1);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("model.layers.1.mlp.down_proj.weight"), std::string::npos) << error.what();
  }
  EXPECT_TRUE(at::equal(model.flat_parameters(), before));
}

TEST(AdamW, EveryRankNamesTheOneWhoseGradientIsNotFinite) {
  std::vector<std::string> said(2);
  std::vector<ErrorKind> kinds(2, ErrorKind::kInternal);
  Layout layout;
  layout.dp = 2;
  test::on_layout(layout, [&](ParallelContext& context) {
    const auto rank = static_cast<size_t>(context.rank());
    Model model(tiny(), {});
    init_parameters(model, 3);
    DistributedAdamW optimizer(model, context.data_parallel(), options());
    fill_gradients(model, 1);
    if (rank == 1) model.flat_gradients()[model.find("model.layers.0.mlp.down_proj.weight")->offset] = std::nan("");
    try {
      optimizer.step(0.01, 0, 1);
    } catch (const Error& error) {
      said[rank] = error.what();
      kinds[rank] = error.kind();
    }
  });
  EXPECT_NE(said[0].find("the gradient of rank 1 at optimizer step 1 is not finite"), std::string::npos) << said[0];
  EXPECT_EQ(kinds[0], ErrorKind::kUnavailable);  // the echo of another's failure
  EXPECT_NE(said[1].find("rank 1: the gradient of model.layers.0.mlp.down_proj.weight"), std::string::npos) << said[1];
  EXPECT_EQ(kinds[1], ErrorKind::kData);
}

TEST(AdamW, SavedStateContinuesBitForBit) {
  const TemporaryDirectory dir;
  Communicator alone;
  Model whole(tiny(), {}), first(tiny(), {}), second(tiny(), {});
  init_parameters(whole, 3);
  init_parameters(first, 3);
  DistributedAdamW one(whole, alone, options()), two(first, alone, options());
  for (int t = 1; t <= 2; ++t) {
    fill_gradients(whole, t);
    one.step(0.01, 0.1, 1);
    fill_gradients(first, t);
    two.step(0.01, 0.1, 1);
  }
  two.save(dir.path());
  second.copy_parameters_from(first);
  AdamWOptions other = options();
  other.bucket_elements = 500;  // another cut of the flat buffer
  DistributedAdamW three(second, alone, other);
  three.load(dir.path());
  EXPECT_EQ(three.steps_done(), 2);
  fill_gradients(whole, 3);
  one.step(0.01, 0.1, 1);
  fill_gradients(second, 3);
  three.step(0.01, 0.1, 1);
  EXPECT_TRUE(at::equal(whole.flat_parameters(), second.flat_parameters()));
}

// As two ranks of a program of before had written it: of each bucket of 500 elements of the flat buffer each has half,
// one behind the other; the first moment of the buffer's element i is i.
void write_format_1(const std::filesystem::path& dir, int64_t elements, const std::string& said) {
  constexpr int64_t kBucket = 500;
  for (int64_t rank = 0; rank < 2; ++rank) {
    std::string segments;
    std::vector<double> own;
    for (int64_t bucket = 0; bucket < elements; bucket += kBucket) {
      const int64_t half = (std::min(kBucket, elements - bucket) + 1) / 2, begin = bucket + rank * half;
      const int64_t size = std::min({half, elements - begin, bucket + kBucket - begin});
      segments += (segments.empty() ? "[[" : ", [") + std::to_string(begin) + ", " + std::to_string(size) + ", " +
                  std::to_string(own.size()) + "]";
      for (int64_t i = 0; i < half; ++i) own.push_back(i < size ? static_cast<double>(begin + i) : -7);  // padding
    }
    const at::Tensor state = at::tensor(own, at::kFloat);
    write_safetensors(dir / ("rank_0000" + std::to_string(rank) + ".safetensors"),
                      {{"exp_avg", state}, {"exp_avg_sq", state + 0.25}, {"master", state + 0.5}},
                      {{"segments", segments + "]"}, {"ranks", "2"}, {"elements", said}, {"steps_done", "11"}});
  }
}

// Whoever reads it: one rank, two that share the state, two tensor ranks, of which each takes its slices.
TEST(AdamW, StateOfFormatOneIsStillRead) {
  const TemporaryDirectory dir;
  ModelConfig config = tiny();
  config.num_kv_heads = 2;
  const Model whole(config, {});
  const int64_t elements = whole.flat_parameters().numel();
  write_format_1(dir.path(), elements, std::to_string(elements));
  for (const Layout& layout : {Layout{}, Layout{.dp = 2}, Layout{.tp = 2}}) {
    test::on_layout(layout, [&](ParallelContext& context) {
      ModelOptions split;
      set_split(split, config.shape(), context);
      Model model(config, split);
      DistributedAdamW optimizer(model, context.data_parallel(), options());
      optimizer.load(dir.path());
      EXPECT_EQ(optimizer.steps_done(), 11);
      const TemporaryDirectory again;  // what this rank holds of the moments
      optimizer.save(again.path());
      for (const Parameter& parameter : model.parameters()) {
        const Parameter& of_whole = *whole.find(parameter.name);
        const at::Tensor places =
            at::arange(of_whole.offset, of_whole.offset + of_whole.size, at::kFloat).view(of_whole.tensor.sizes());
        const Range& range = parameter.slice.range;
        const at::Tensor wanted = places.narrow(parameter.slice.dimension, range.begin, range.size()) + 0.5;
        EXPECT_TRUE(at::equal(parameter.tensor.detach(), wanted)) << to_string(layout) << " " << parameter.name;
      }
      if (layout.world() > 1) return;
      const SafetensorsFile saved(again.path() / "rank_00000.safetensors");
      for (const auto& [name, more] : {std::pair{"exp_avg", 0.0}, {"exp_avg_sq", 0.25}}) {
        const at::Tensor state = saved.tensor(name);
        for (const Parameter& parameter : model.parameters()) {
          const int64_t begin = parameter.offset, end = begin + parameter.size;
          EXPECT_TRUE(at::equal(state.narrow(0, begin, end - begin), at::arange(begin, end, at::kFloat) + more))
              << name << " " << parameter.name;
        }
      }
    });
  }
  write_format_1(dir.path(), elements, "17");
  Communicator alone;
  Model model(config, {});
  DistributedAdamW optimizer(model, alone, options());
  try {
    optimizer.load(dir.path());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kData);
    EXPECT_NE(std::string(error.what())
                  .find("rank_00000.safetensors is not an optimizer state of this model: holds "
                        "the state of 17 parameter elements, the model has " +
                        std::to_string(elements)),
              std::string::npos)
        << error.what();
  }
}

// State of padded widths (as on CUDA) goes on without padding, and the other way round.
TEST(AdamW, StateMovesBetweenPaddedAndUnpaddedWidths) {
  const ModelConfig config = test::tiny_config(
      {.vocab = 50, .hidden = 20, .intermediate = 27, .layers = 2, .heads = 2, .kv_heads = 1, .positions = 64});
  const c10::NoGradGuard no_grad;
  Communicator alone;
  // The same gradients of each parameter, whatever lies between them.
  const auto train = [](Model& model, DistributedAdamW& optimizer, int first, int steps) {
    for (int t = first; t < first + steps; ++t) {
      for (Parameter& p : model.parameters()) {
        const at::Tensor values = at::arange(p.tensor.numel(), at::kFloat).mul(0.01).add(static_cast<double>(t)).sin();
        p.tensor.mutable_grad().copy_(values.mul(0.1).view(p.tensor.sizes()));
      }
      optimizer.step(0.01, 0.1, 1);
    }
  };
  const auto expect_near = [](const Model& got, const Model& wanted) {
    for (const Parameter& p : got.parameters()) {
      const at::Tensor difference = p.tensor.detach() - wanted.find(p.name)->tensor.detach();
      EXPECT_LE(difference.abs().max().item<double>(), 1e-5) << p.name;
    }
    EXPECT_TRUE(testing::rest_is_zero(got, got.flat_parameters()));
  };
  for (const bool padded : {false, true}) {
    ModelOptions here, there;
    here.pad_widths = padded;
    there.pad_widths = !padded;
    Model first(config, here), second(config, there), all(config, there);
    init_parameters(first, 3);
    init_parameters(all, 3);
    DistributedAdamW one(first, alone, options()), two(second, alone, options()), whole(all, alone, options());
    train(first, one, 1, 2);
    train(all, whole, 1, 2);
    expect_near(first, all);
    const TemporaryDirectory dir;
    one.save(dir.path());
    two.load(dir.path());  // weights too: in float32 they are the state's
    for (const Parameter& p : second.parameters())
      EXPECT_TRUE(at::equal(p.tensor.detach(), first.find(p.name)->tensor.detach())) << p.name;
    train(second, two, 3, 2);
    train(all, whole, 3, 2);
    expect_near(second, all);
  }
}

TEST(Schedule, TorchPieces) {
  Config c;
  c.policy.optimizer.kwargs.lr = 1.0;
  c.policy.scheduler.pieces = {{"LinearLR", {{"start_factor", 0.1}, {"end_factor", 1.0}, {"total_iters", 10}}},
                               {"CosineAnnealingLR", {{"T_max", 100}, {"eta_min", 0.2}}}};
  c.policy.scheduler.milestones = {10};
  EXPECT_NEAR(learning_rate(c, 0), 0.1, 1e-12);
  EXPECT_NEAR(learning_rate(c, 5), 0.55, 1e-12);
  EXPECT_NEAR(learning_rate(c, 10), 1.0, 1e-12);
  EXPECT_NEAR(learning_rate(c, 60), 0.6, 1e-12);
  EXPECT_NEAR(learning_rate(c, 110), 0.2, 1e-12);
}

TEST(Schedule, Megatron) {
  Config c;
  c.policy.megatron_cfg.enabled = true;
  auto& m = c.policy.megatron_cfg;
  m.optimizer.lr = 1.0;
  m.optimizer.min_lr = 0.1;
  m.scheduler.lr_warmup_init = 0.0;
  m.scheduler.lr_warmup_iters = 10;
  m.scheduler.lr_decay_iters = 110;
  m.scheduler.lr_decay_style = "linear";
  EXPECT_NEAR(learning_rate(c, 5), 0.5, 1e-12);
  EXPECT_NEAR(learning_rate(c, 60), 0.55, 1e-12);
  EXPECT_NEAR(learning_rate(c, 200), 0.1, 1e-12);
  m.scheduler.lr_decay_style = "cosine";
  EXPECT_NEAR(learning_rate(c, 60), 0.55, 1e-12);
  m.scheduler.lr_decay_style = "constant";
  EXPECT_NEAR(learning_rate(c, 500), 1.0, 1e-12);
}

}  // namespace
}  // namespace trireme
