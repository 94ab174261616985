// On a GPU: the log-prob that the sampler returns has the bits of the one that the loss computes, whatever the batch,
// the chunking, the graphs, preemption, packing or process; and the model agrees with the CPU's float32 one. More of
// the same program: engine/.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "base/fs.h"
#include "base/subprocess.h"
#include "tests/gpu/engine/models.h"
#include "tests/unit/model/split_models.h"
#include "trainer/batch/micro_batch.h"
#include "trainer/model/safetensors.h"
#include "trainer/optimizer/adamw.h"

namespace trireme::gpu {
namespace {

class Families : public ::testing::TestWithParam<ModelFamily> {};
INSTANTIATE_TEST_SUITE_P(All, Families,
                         ::testing::Values(ModelFamily::kLlama, ModelFamily::kQwen2, ModelFamily::kQwen3,
                                           ModelFamily::kQwen3Moe, ModelFamily::kMixtral));

TEST_P(Families, SamplerAndLossAgreeToTheBitBeforeAndAfterAnOptimizerStep) {
  const auto model = gpu_model(config_of(GetParam()), /*trainable=*/true);
  Communicator alone;
  DistributedAdamW optimizer(*model, alone, {});
  for (int step = 0; step < 2; ++step) {
    const Groups groups = generate(*model, {}, sampling_options(), requests(kPrompts, 8, 7 + step));
    const Packed packed = pack(groups);
    const at::Tensor logprobs = logprobs_of_the_loss(*model, packed, sampling_options().logprob_options());
    EXPECT_EQ(0, differing(logprobs, packed.expected)) << "of " << packed.expected.size() << " tokens, step " << step;
    logprobs.mean().neg().backward();
    EXPECT_GT(optimizer.step(1e-3, 0.0, 1.0).grad_norm, 0.0);
  }
}

INSTANTIATE_TEST_SUITE_P(Engine, Batching, ::testing::Values(ModelFamily::kQwen3, ModelFamily::kQwen3Moe));

TEST_P(Batching, BitsDoNotDependOnHowSamplesAreBatched) {
  const auto model = gpu_model(config_of(GetParam()));
  const auto wanted = requests(kPrompts, 8);
  const Groups whole = generate(*model, {.max_sequences = 256}, sampling_options(), wanted);
  for (const int64_t sequences : {1, 3, 16, 40, 64}) {
    expect_same(whole, generate(*model, {.max_sequences = sequences}, sampling_options(), wanted),
                "max_sequences " + std::to_string(sequences));
  }
  for (const int64_t chunk : {128, 256, 640}) {
    expect_same(whole, generate(*model, {.prefill_chunk_tokens = chunk}, sampling_options(), wanted),
                "prefill chunk " + std::to_string(chunk));
  }
  const auto narrow = requests({5, 12, 20, 17, 9, 3, 33, 40}, 8);
  EngineStats stats;
  expect_same(generate(*model, {}, sampling_options(), narrow),
              generate(*model, {.cache_rows = 130, .max_sequences = 32, .headroom_rows = 1}, sampling_options(), narrow,
                       &stats),
              "preemption");
  EXPECT_GT(stats.preemptions, 0);
}

// One token more than a multiple of 8, tied and not, up to one less: the sampler's bits are the loss's, no token beyond
// is drawn, and rows behind the head change nothing.
TEST(Engine, AnyNumberOfTokensInTheVocabulary) {
  for (const int64_t more : {1, 3, 7}) {
    for (const ModelFamily family : {ModelFamily::kQwen3, ModelFamily::kLlama}) {  // tied, not tied
      ModelConfig config = config_of(family);
      config.vocab_size += more;
      const auto model = gpu_model(config, /*trainable=*/true);
      Communicator alone;
      DistributedAdamW optimizer(*model, alone, {});
      for (int step = 0; step < 2; ++step) {
        const Packed packed = pack(generate(*model, {}, sampling_options(), requests({5, 300, 129}, 8, 7 + step)));
        for (const int64_t target : packed.targets) ASSERT_LT(target, config.vocab_size);
        const at::Tensor logprobs = logprobs_of_the_loss(*model, packed, sampling_options().logprob_options());
        EXPECT_EQ(0, differing(logprobs, packed.expected)) << config.vocab_size << " tokens, step " << step;
        // A head without rows behind it (a copy) has the same bits, and so has one where they are no numbers.
        {
          const at::NoGradGuard no_grad;
          PackedBatch batch = PackedBatch::from_sequences(packed.sequences);
          batch.ids = batch.ids.to(model->options().device);
          batch.positions = batch.positions.to(model->options().device);
          const at::Tensor hidden =
              model->forward(batch).index_select(0, at::tensor(packed.rows, at::kLong).to(batch.ids.device()));
          const at::Tensor targets = at::tensor(packed.targets, at::kLong).to(batch.ids.device());
          const at::Tensor& head = model->head_weight();
          at::Tensor spoilt = at::full({head.size(0) + 8, head.size(1)}, std::nan(""), head.options());
          spoilt.narrow(0, 0, head.size(0)).copy_(head);
          for (const at::Tensor& other : {head.clone(), spoilt.narrow(0, 0, head.size(0))}) {
            const at::Tensor again = token_logprobs(hidden, other, targets, sampling_options().logprob_options());
            EXPECT_EQ(0, differing(again, packed.expected)) << config.vocab_size << " tokens, another head";
          }
        }
        logprobs.mean().neg().backward();
        EXPECT_TRUE(model->flat_gradients().isfinite().all().item<bool>());
        EXPECT_GT(optimizer.step(1e-3, 0.0, 1.0).grad_norm, 0.0);
      }
    }
  }
}

// Start-up's test with what it left out: biases, and more rows than 4,096, as a micro-batch has.
// Held with zeros behind them: equal bits, and the answer of the host, which holds none.
TEST(Engine, WidthsThatAreNoMultipleOf8) {
  for (const ModelFamily family : {ModelFamily::kQwen3, ModelFamily::kQwen2, ModelFamily::kLlama}) {
    ModelConfig config = config_of(family);
    config.hidden_size = 1020;
    config.intermediate_size = 3003;
    config.num_layers = 2;
    const auto model = gpu_model(config, /*trainable=*/true);
    ASSERT_EQ(model->local().hidden, 1024);
    ASSERT_EQ(model->local().intermediate, 3008);
    Model cpu(config, ModelOptions());
    Communicator alone;
    DistributedAdamW optimizer(*model, alone, {});
    for (int step = 0; step < 2; ++step) {
      const Packed packed = pack(generate(*model, {}, sampling_options(), requests({5, 300, 129}, 8, 7 + step)));
      const at::Tensor logprobs = logprobs_of_the_loss(*model, packed, sampling_options().logprob_options());
      EXPECT_EQ(0, differing(logprobs, packed.expected)) << to_string(family) << ", step " << step;
      {
        const at::NoGradGuard no_grad;
        for (const Parameter& p : model->parameters()) cpu.find(p.name)->tensor.detach().copy_(p.tensor.detach());
        const at::Tensor wanted = logprobs_of_the_loss(cpu, packed, sampling_options().logprob_options());
        EXPECT_LE((logprobs.to(at::kCPU) - wanted).abs().mean().item<double>(), 0.03) << to_string(family);
      }
      logprobs.mean().neg().backward();
      EXPECT_GT(optimizer.step(1e-3, 0.1, 1.0).grad_norm, 0.0);
      EXPECT_TRUE(testing::rest_is_zero(*model, model->flat_parameters())) << to_string(family) << ", step " << step;
    }
  }
}

TEST(Engine, HeadDimensionsAndGroupSizes) {
  for (const auto& [heads, kv_heads, head_dim] :
       std::vector<std::array<int64_t, 3>>{{16, 16, 64}, {14, 2, 64}, {32, 8, 128}, {28, 4, 128}, {8, 8, 128}}) {
    const auto model = gpu_model(config_of(ModelFamily::kLlama, heads, kv_heads, head_dim));
    const Packed packed = pack(generate(*model, {}, sampling_options(), requests({40, 257, 9}, 5)));
    const at::NoGradGuard no_grad;
    EXPECT_EQ(0, differing(logprobs_of_the_loss(*model, packed, sampling_options().logprob_options()), packed.expected))
        << heads << " heads, " << kv_heads << " key heads of " << head_dim;
  }
}

TEST(Engine, FiltersAndGreedyAgreeToo) {
  const auto model = gpu_model(config_of(ModelFamily::kQwen3));
  SamplingOptions sampling = sampling_options();
  sampling.top_p = 0.9;
  sampling.top_k = 50;
  const Packed packed = pack(generate(*model, {}, sampling, requests(kPrompts, 4)));
  const at::NoGradGuard no_grad;
  EXPECT_EQ(0, differing(logprobs_of_the_loss(*model, packed, sampling.logprob_options()), packed.expected));
  SamplingOptions greedy = sampling_options();
  greedy.greedy = true;
  const Groups groups = generate(*model, {}, greedy, requests({20, 90}, 3));
  for (const auto& [id, group] : groups) {
    for (const GeneratedSample& sample : group.samples) {
      const size_t common = std::min(sample.response.size(), group.samples[0].response.size());
      EXPECT_TRUE(std::equal(sample.response.begin(), sample.response.begin() + static_cast<std::ptrdiff_t>(common),
                             group.samples[0].response.begin()));
    }
  }
}

TEST(Engine, RecomputedActivationsGiveTheSameBits) {
  for (const ModelFamily family : {ModelFamily::kQwen3, ModelFamily::kLlama}) {
    const auto model = gpu_model(config_of(family), /*trainable=*/true);
    const Packed packed = pack(generate(*model, {}, sampling_options(), requests({100, 30}, 4)));
    const at::Tensor a = logprobs_of_the_loss(*model, packed, {});
    a.mean().backward();
    const at::Tensor expected = model->flat_gradients().clone();
    for (const Recompute& recompute : {Recompute{0, 99}, Recompute{1, 1}, Recompute{99, 0}}) {
      model->set_recompute(recompute);
      model->zero_gradients();
      const at::Tensor b = logprobs_of_the_loss(*model, packed, {});
      EXPECT_TRUE(at::equal(a, b));
      b.mean().backward();
      EXPECT_TRUE(at::equal(model->flat_gradients(), expected))
          << recompute.whole_layers << " whole, " << recompute.cheap_layers << " cheap";
    }
  }
}

// A group's prompt once in the batch: the sampler's bits, and the gradients of the unshared batch within rounding.
TEST(Engine, SharedPromptsHaveTheBitsOfTheSampler) {
  for (const ModelFamily family : {ModelFamily::kQwen3, ModelFamily::kLlama, ModelFamily::kQwen2}) {
    const auto model = gpu_model(config_of(family), /*trainable=*/true);
    const std::vector<GroupRequest> wanted = requests(kPrompts, 6);
    const Groups groups = generate(*model, {}, sampling_options(), wanted);
    std::vector<Sample> samples;
    Members members;
    std::vector<float> sampled;
    for (const auto& [id, group] : groups) {
      for (const auto& generated : group.samples) {
        Sample sample;
        sample.group = id;
        sample.prompt = SharedTokens(wanted[static_cast<size_t>(id)].prompt);
        sample.response = generated.response;
        sampled.insert(sampled.end(), generated.logprobs.begin(), generated.logprobs.end());
        members.push_back(static_cast<int64_t>(samples.size()));
        samples.push_back(std::move(sample));
      }
    }
    const LogprobOptions options = sampling_options().logprob_options();
    const MicroBatch shared = make_micro_batch(samples, members, true), apart = make_micro_batch(samples, members);
    ASSERT_LT(shared.input.tokens(), apart.input.tokens());
    const at::Tensor a = response_logprobs(*model, shared, options);
    EXPECT_EQ(0, differing(a, sampled));
    a.mean().backward();
    const at::Tensor gradients = model->flat_gradients().to(at::kDouble);
    model->zero_gradients();
    const at::Tensor again = response_logprobs(*model, shared, options);
    again.mean().backward();
    EXPECT_TRUE(at::equal(model->flat_gradients().to(at::kDouble), gradients)) << "not repeatable";
    model->zero_gradients();
    response_logprobs(*model, apart, options).mean().backward();
    const at::Tensor expected = model->flat_gradients().to(at::kDouble);
    EXPECT_LE(((gradients - expected).norm() / expected.norm()).item<double>(), 0.02);
  }
}

TEST(Model, AgreesWithTheCpuInFloat32) {
  for (const ModelFamily family : {ModelFamily::kLlama, ModelFamily::kQwen2, ModelFamily::kQwen3}) {
    ModelConfig config = config_of(family);
    config.num_layers = 2;
    const auto gpu = gpu_model(config, /*trainable=*/true);
    ModelOptions on_cpu;
    Model cpu(config, on_cpu);
    {
      const at::NoGradGuard no_grad;
      cpu.copy_parameters_from(*gpu);
    }
    Packed packed = pack(generate(*gpu, {}, sampling_options(), requests({50, 20}, 2)));
    const at::Tensor want = logprobs_of_the_loss(cpu, packed, {}), got = logprobs_of_the_loss(*gpu, packed, {});
    EXPECT_LE((got.to(at::kCPU) - want).abs().mean().item<double>(), 0.03) << to_string(family);
    want.mean().backward();
    got.mean().backward();
    for (size_t i = 0; i < cpu.parameters().size(); ++i) {
      const Parameter& p = cpu.parameters()[i];
      const auto slice = [&](const Model& m) {
        return m.flat_gradients().narrow(0, p.offset, p.size).to(at::kCPU, at::kDouble);
      };
      const at::Tensor a = slice(cpu), b = slice(*gpu);
      const double cosine = ((a * b).sum() / (a.norm() * b.norm() + 1e-30)).item<double>();
      EXPECT_GE(cosine, 0.99) << to_string(family) << " " << p.name;
    }
  }
}

// A checkpoint's weights, read by a fresh process, give the sampler's bits to another packing.
TEST(Recompute, InAFreshProcess) {
  const char* given = std::getenv("TRIREME_RECOMPUTE_DIR");
  const std::string dir = given != nullptr ? given : "/tmp/trireme-recompute-" + std::to_string(::getpid());
  ModelOptions options;
  options.dtype = at::kBFloat16;
  options.device = choose_device("cuda", 0);
  options.trainable = false;
  if (given != nullptr) {
    const auto model = load_model(dir, options);
    const SafetensorsFile file(dir + "/samples.safetensors");
    const auto numbers = [&](const char* name) {
      const at::Tensor t = file.tensor(name).to(at::kLong).contiguous();
      return std::vector<int64_t>(t.const_data_ptr<int64_t>(), t.const_data_ptr<int64_t>() + t.numel());
    };
    const auto ids = numbers("ids"), starts = numbers("starts");
    Packed packed;
    packed.rows = numbers("rows");
    packed.targets = numbers("targets");
    for (size_t s = 0; s + 1 < starts.size(); ++s)
      packed.sequences.emplace_back(ids.begin() + starts[s], ids.begin() + starts[s + 1]);
    const at::Tensor expected = file.tensor("logprobs").contiguous();
    packed.expected.assign(expected.const_data_ptr<float>(), expected.const_data_ptr<float>() + expected.numel());
    const at::NoGradGuard no_grad;
    EXPECT_EQ(0,
              differing(logprobs_of_the_loss(*model, packed, sampling_options().logprob_options()), packed.expected));
    return;
  }
  const auto model = gpu_model(config_of(ModelFamily::kQwen3));
  save_model(*model, dir, {});
  const Packed packed = pack(generate(*model, {}, sampling_options(), requests(kPrompts, 3)));
  std::vector<int64_t> ids, starts = {0};
  for (const auto& sequence : packed.sequences) {
    ids.insert(ids.end(), sequence.begin(), sequence.end());
    starts.push_back(static_cast<int64_t>(ids.size()));
  }
  write_safetensors(dir + "/samples.safetensors",
                    {{"ids", at::tensor(ids, at::kLong)},
                     {"starts", at::tensor(starts, at::kLong)},
                     {"rows", at::tensor(packed.rows, at::kLong)},
                     {"targets", at::tensor(packed.targets, at::kLong)},
                     {"logprobs", at::tensor(packed.expected, at::kFloat)}},
                    {});
  SpawnOptions child;
  child.argv = {"/proc/self/exe", "--gtest_filter=Recompute.InAFreshProcess"};
  child.set_env = {{"TRIREME_RECOMPUTE_DIR", dir}};
  Subprocess process = Subprocess::spawn(child);
  const auto status = process.wait(Deadline::after(Milliseconds(120'000)));
  ASSERT_TRUE(status.has_value()) << "the fresh process did not end";
  EXPECT_TRUE(status->ok()) << status->describe();
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace trireme::gpu
