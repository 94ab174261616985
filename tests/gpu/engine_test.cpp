// On a GPU: the log-prob that the sampler returns has the bits of the one that the loss computes, whatever the batch,
// the chunking, the graphs, preemption, packing or process; and the model agrees with the CPU's float32 one.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAContext.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "base/fs.h"
#include "base/subprocess.h"
#include "tests/unit/model/split_models.h"
#include "trainer/algorithms/reference_stream.h"
#include "trainer/batch/micro_batch.h"
#include "trainer/model/model.h"
#include "trainer/model/safetensors.h"
#include "trainer/ops/cuda/device/clusters.h"
#include "trainer/ops/cuda/gemm/linear.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/device.h"
#include "trainer/rollout/driver.h"
#include "trainer/rollout/engine.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {
namespace {

ModelConfig config_of(ModelFamily family, int64_t heads = 16, int64_t kv_heads = 8, int64_t head_dim = 128) {
  ModelConfig config;
  config.family = family;
  config.vocab_size = 32'064;
  config.hidden_size = 1024;
  config.intermediate_size = 3072;
  config.num_layers = 4;
  config.num_heads = heads;
  config.num_kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.max_position_embeddings = 4096;
  config.initializer_range = 0.05;
  config.rope.head_dim = head_dim;
  config.rope.theta = 1e6;
  config.qk_norm = family == ModelFamily::kQwen3 || family == ModelFamily::kQwen3Moe;
  if (family == ModelFamily::kQwen3Moe || family == ModelFamily::kMixtral) {
    config.num_experts = family == ModelFamily::kMixtral ? 8 : 32;
    config.experts_per_token = family == ModelFamily::kMixtral ? 2 : 4;
    config.moe_intermediate_size = family == ModelFamily::kMixtral ? config.intermediate_size : 384;
    if (family == ModelFamily::kQwen3Moe) config.dense_layers = {1};
  }
  config.qkv_bias = family == ModelFamily::kQwen2;
  config.tie_word_embeddings = family == ModelFamily::kQwen3;
  config.dtype = "bfloat16";
  return config;
}

// Normal weights drawn on the device; norms and biases are not trivial either. The same for the same seed.
void draw_weights(const Model& model, uint64_t seed) {
  const at::NoGradGuard no_grad;
  at::Generator generator = at::globalContext().defaultGenerator(model.options().device);
  generator.set_current_seed(seed);
  for (const Parameter& p : model.parameters()) {
    at::Tensor target = p.tensor.detach();
    const bool norm = p.name.find("norm") != std::string::npos;
    target.normal_(norm ? 1.0 : 0.0, norm ? 0.1 : model.config().initializer_range);
  }
}

std::unique_ptr<Model> gpu_model(const ModelConfig& config, bool trainable = false, uint64_t seed = 1) {
  ModelOptions options;
  options.dtype = at::kBFloat16;
  options.device = choose_device("cuda", 0);
  options.trainable = trainable;
  auto model = std::make_unique<Model>(config, options);
  draw_weights(*model, seed);
  return model;
}

std::vector<GroupRequest> requests(const std::vector<int64_t>& prompts, int64_t samples, uint32_t seed = 7) {
  std::vector<GroupRequest> result;
  std::mt19937 random(seed);
  uint64_t next = 1000;
  for (size_t g = 0; g < prompts.size(); ++g) {
    GroupRequest request;
    request.group_id = static_cast<int64_t>(g);
    request.samples = samples;
    request.first_sample_id = next;
    next += static_cast<uint64_t>(samples);
    for (int64_t i = 0; i < prompts[g]; ++i) request.prompt.push_back(static_cast<int32_t>(random() % 32'000));
    for (int64_t i = 0; i < samples; ++i) request.forced_lengths.push_back(1 + static_cast<int64_t>(random() % 60));
    result.push_back(std::move(request));
  }
  return result;
}

using Groups = std::map<int64_t, GeneratedGroup>;

Groups generate(const Model& model, EngineOptions options, const SamplingOptions& sampling,
                const std::vector<GroupRequest>& groups, EngineStats* stats = nullptr) {
  options.max_total_length = 2048;
  if (options.cache_rows == 0) options.cache_rows = 200'000;
  Engine engine(model, nullptr, options, sampling);
  for (const GroupRequest& request : groups) engine.submit(request);
  Groups result;
  for (GeneratedGroup& group : engine.run()) result.emplace(group.group_id, std::move(group));
  if (stats != nullptr) *stats = engine.stats();
  return result;
}

SamplingOptions sampling_options() {
  SamplingOptions sampling;
  sampling.temperature = 0.9;
  sampling.seed = 42;
  return sampling;
}

void expect_same(const Groups& a, const Groups& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [id, group] : a) {
    const GeneratedGroup& other = b.at(id);
    for (size_t i = 0; i < group.samples.size(); ++i) {
      ASSERT_EQ(group.samples[i].response, other.samples[i].response) << what << ": group " << id << " sample " << i;
      ASSERT_EQ(0, std::memcmp(group.samples[i].logprobs.data(), other.samples[i].logprobs.data(),
                               group.samples[i].logprobs.size() * sizeof(float)))
          << what << ": log-prob bits of group " << id << " sample " << i;
    }
  }
}

struct Packed {
  std::vector<std::vector<int32_t>> sequences;
  std::vector<int64_t> rows, targets;
  std::vector<float> expected;
};

// Every sample in another order than the engine's. With `wanted` only those of its tokens are compared.
Packed pack(const Groups& groups, const std::function<bool(const GeneratedSample&, int64_t token)>& wanted = {}) {
  Packed packed;
  int64_t offset = 0;
  for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
    for (const GeneratedSample& sample : group->second.samples) {
      std::vector<int32_t> ids = group->second.prompt;
      for (size_t i = 0; i < sample.response.size(); ++i) {
        if (!wanted || wanted(sample, static_cast<int64_t>(i))) {
          packed.rows.push_back(offset + static_cast<int64_t>(ids.size()) - 1);
          packed.targets.push_back(sample.response[i]);
          packed.expected.push_back(sample.logprobs[i]);
        }
        ids.push_back(sample.response[i]);
      }
      offset += static_cast<int64_t>(ids.size());
      packed.sequences.push_back(std::move(ids));
    }
  }
  return packed;
}

at::Tensor logprobs_of_the_loss(const Model& model, const Packed& packed, const LogprobOptions& options) {
  const at::Device device = model.options().device;
  PackedBatch batch = PackedBatch::from_sequences(packed.sequences);
  batch.ids = batch.ids.to(device);
  batch.positions = batch.positions.to(device);
  const at::Tensor hidden = model.forward(batch).index_select(0, at::tensor(packed.rows, at::kLong).to(device));
  return token_logprobs(hidden, model.head_weight(), at::tensor(packed.targets, at::kLong).to(device), options);
}

int64_t differing(const at::Tensor& logprobs, const std::vector<float>& expected) {
  const at::Tensor host = logprobs.detach().to(at::kCPU).contiguous();
  const float* value = host.const_data_ptr<float>();
  int64_t count = 0;
  for (size_t i = 0; i < expected.size(); ++i) count += std::memcmp(value + i, &expected[i], sizeof(float)) != 0;
  return count;
}

const std::vector<int64_t> kPrompts = {5, 300, 64, 129, 17, 700, 128, 33};

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

class Batching : public ::testing::TestWithParam<ModelFamily> {};
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

// Groups as they become complete, each once.
class Answers {
 public:
  void keep(std::vector<GeneratedGroup> more) {
    for (GeneratedGroup& group : more) {
      const int64_t id = group.group_id;
      EXPECT_TRUE(groups.emplace(id, std::move(group)).second) << "group " << id << " came twice";
    }
  }
  void steps(Engine& engine, int64_t count) {
    for (int64_t i = 0; i < count && !engine.idle(); ++i) keep(engine.step());
  }
  Groups groups;
};

// Set aside with answers under way, the cache's memory given away and others' answers generated meanwhile; with room
// for all of them and with so little that some are preempted.
TEST_P(Batching, SuspendedAnswersGoOnAsIfNothingHadHappened) {
  const auto model = gpu_model(config_of(GetParam()));
  const auto wanted = requests(kPrompts, 8);
  const Groups whole = generate(*model, {}, sampling_options(), wanted);
  for (const int64_t rows : {2'000, 200'000}) {
    for (const int64_t every : {3, 17}) {
      const std::string what = std::to_string(rows) + " rows, every " + std::to_string(every) + " steps";
      Engine engine(*model, nullptr, {.cache_rows = rows, .max_sequences = 32, .max_total_length = 2048},
                    sampling_options());
      for (const GroupRequest& request : wanted) engine.submit(request);
      Answers answers;
      int64_t suspensions = 0;
      while (!engine.idle()) {
        answers.steps(engine, every);
        const int64_t unfinished = engine.unfinished_samples();
        answers.keep(engine.suspend());
        ++suspensions;
        EXPECT_TRUE(engine.idle());
        EXPECT_LE(engine.suspended_samples(), unfinished);
        engine.release_cache();
        EXPECT_EQ(engine.stats().cache_rows, 0);
        if (suspensions % 4 == 1) {  // the same numbers of samples: nothing is mixed up
          GroupRequest other = wanted[1];
          other.group_id = 99;
          engine.submit(other);
          Answers others;
          others.keep(engine.run());
          Groups expected;
          expected.emplace(99, whole.at(1));
          expect_same(expected, others.groups, what + ", others");
        }
        engine.resume();
        EXPECT_EQ(engine.suspended_samples(), 0);
      }
      EXPECT_GT(suspensions, 2) << what;
      EXPECT_GT(engine.stats().recomputed_rows, 0) << what;
      expect_same(whole, answers.groups, what);
    }
  }
}

// Weights of version v are those of seed 1 + v; what a model has is drawn anew. Tokens whose log-prob is not, by
// memcmp, that of a packed forward under the weights of their version.
int64_t differing_from_their_weights(const Model& model, const Groups& groups, bool marked_too) {
  const at::NoGradGuard no_grad;
  std::set<int64_t> versions;
  for (const auto& [id, group] : groups) {
    for (const GeneratedSample& sample : group.samples) {
      EXPECT_TRUE(spans_tile(sample.versions, static_cast<int64_t>(sample.response.size())));
      for (const VersionSpan& span : sample.versions) versions.insert(span.version);
    }
  }
  int64_t tokens = 0;
  for (const int64_t version : versions) {
    draw_weights(model, 1 + static_cast<uint64_t>(version));
    const Packed packed = pack(groups, [&](const GeneratedSample& sample, int64_t token) {
      if (sample.mixed_context && !marked_too) return false;
      return std::any_of(sample.versions.begin(), sample.versions.end(), [&](const VersionSpan& span) {
        return span.version == version && span.from <= token && token < span.to;
      });
    });
    if (packed.rows.empty()) continue;
    tokens += differing(logprobs_of_the_loss(model, packed, sampling_options().logprob_options()), packed.expected);
  }
  return tokens;
}

// Weights are written while the device still has the step before; a token is of those that its step was begun with.
TEST_P(Batching, NewWeightsAreUsedFromTheNextTokenOn) {
  const auto model = gpu_model(config_of(GetParam()));
  auto wanted = requests({5, 64, 33}, 4);
  for (GroupRequest& request : wanted) request.forced_lengths.assign(4, 24);
  Engine engine(*model, nullptr, {.cache_rows = 20'000, .max_total_length = 2048}, sampling_options());
  for (const GroupRequest& request : wanted) engine.submit(request);
  Answers answers;
  answers.steps(engine, 5);
  EXPECT_TRUE(answers.groups.empty());
  draw_weights(*model, 1 + 3);
  engine.weights_changed(3);
  answers.keep(engine.run());
  ASSERT_EQ(answers.groups.size(), wanted.size());
  for (const auto& [id, group] : answers.groups) {
    for (const GeneratedSample& sample : group.samples) {
      EXPECT_EQ(sample.versions, (VersionSpans{{0, 0, 5}, {3, 5, 24}})) << "group " << id;
      EXPECT_FALSE(sample.mixed_context);
    }
  }
  EXPECT_EQ(differing_from_their_weights(*model, answers.groups, true), 0);
}

// Answers of several weights, by steps and by graphs: each token has the log-prob that a packed forward under its
// weights gives. With kept keys some have not, and those samples say so.
TEST_P(Batching, EveryTokenHasTheLogProbOfItsWeightsUnlessKeysAreKept) {
  const auto run = [&](const Model& model, bool suspend, KeptCache kept) {
    draw_weights(model, 1);
    // Fewer places than samples: some begin under later weights.
    Engine engine(model, nullptr, {.cache_rows = 20'000, .max_sequences = 40, .max_total_length = 2048},
                  sampling_options());
    for (const GroupRequest& request : requests(kPrompts, 8)) engine.submit(request);
    Answers answers;
    for (int64_t version = 1; !engine.idle(); ++version) {
      answers.steps(engine, 9);
      if (suspend) {
        answers.keep(engine.suspend());
        engine.release_cache();
      }
      draw_weights(model, 1 + static_cast<uint64_t>(version));
      engine.weights_changed(version, kept);
      if (suspend) engine.resume();
    }
    EXPECT_EQ(answers.groups.size(), kPrompts.size());
    return answers.groups;
  };
  const auto model = gpu_model(config_of(GetParam()));
  for (const bool suspend : {false, true}) {
    const Groups exact = run(*model, suspend, KeptCache::kNothing);
    int64_t spanning = 0;
    for (const auto& [id, group] : exact) {
      for (const GeneratedSample& sample : group.samples) {
        EXPECT_FALSE(sample.mixed_context);
        spanning += sample.versions.size() > 1 ? 1 : 0;
      }
    }
    EXPECT_GT(spanning, 8);
    EXPECT_EQ(differing_from_their_weights(*model, exact, true), 0) << (suspend ? "suspended" : "between two steps");
  }
  const Groups kept = run(*model, /*suspend=*/false, KeptCache::kKept);
  int64_t marked = 0;
  for (const auto& [id, group] : kept) {
    for (const GeneratedSample& sample : group.samples) {
      marked += sample.mixed_context ? 1 : 0;
      EXPECT_TRUE(sample.mixed_context || sample.versions.size() == 1);
    }
  }
  EXPECT_GT(marked, 0);
  EXPECT_EQ(differing_from_their_weights(*model, kept, false), 0) << "of those that are not marked";
  EXPECT_GT(differing_from_their_weights(*model, kept, true), 0) << "this test would not notice keys of other weights";
}

// Generation in one part of the SMs, reference log-probs and a critic's values in the other: no bit changes, and theirs
// are those of passes alone.
TEST(Engine, APartitionedDeviceChangesNoBit) {
  const auto policy = gpu_model(config_of(ModelFamily::kQwen3)),
             reference = gpu_model(config_of(ModelFamily::kQwen3), false, /*seed=*/2),
             critic = gpu_model(config_of(ModelFamily::kQwen3).with_value_head(), false, /*seed=*/3);
  const auto wanted = requests(kPrompts, 8);
  const Groups whole = generate(*policy, {}, sampling_options(), wanted);
  const int64_t sms = at::cuda::getDeviceProperties(0)->multiProcessorCount;
  const auto partition = split_device(policy->options().device, sms * 3 / 8);
  ASSERT_NE(partition, nullptr);
  EXPECT_GE(partition->foreground_sms, sms / 2);
  EXPECT_GE(partition->background_sms, sms / 4);
  const LogprobOptions options = sampling_options().logprob_options();
  TokenScorer values;
  values.model = critic.get();
  values.numbers = [&](const at::Tensor& hidden, const MicroBatch& batch, const std::vector<Sample>&) {
    return response_values(*critic, hidden, batch);
  };
  values.keep = [](Sample& sample, std::vector<float> numbers) { sample.values = std::move(numbers); };
  ReferenceStream stream({reference_scorer(*reference, options, /*share_prompts=*/false), values}, partition, 60,
                         nullptr, /*micro_batch_tokens=*/512);
  int64_t with_values = 0;
  EngineOptions settings{.cache_rows = 200'000, .max_total_length = 2048, .partition = partition};
  Engine engine(*policy, nullptr, settings, sampling_options());
  for (int round = 0; round < 3; ++round) {
    Groups groups;
    DriverHooks hooks;
    hooks.request = [&](const SampleSpan& span) { return wanted[static_cast<size_t>(span.group)]; };
    hooks.finished = [&](const FinishedSample& sample) { stream.add(sample); };
    hooks.complete = [&](const SampleSpan& span, GeneratedGroup group) {
      groups.emplace(span.group, std::move(group));
    };
    hooks.between_steps = [&] { stream.after_step(engine); };
    LocalCounter counter;
    SampleQueue queue({.groups = static_cast<int64_t>(wanted.size()), .samples = 8}, counter, "rollout");
    const ReferenceRollout until_the_end(&stream);
    drive_rollout(engine, queue, hooks);
    std::vector<Sample> samples;
    Members members;
    for (const auto& [id, group] : groups) {
      for (size_t i = 0; i < group.samples.size(); ++i) {
        Sample sample;
        sample.group = id;
        sample.index = static_cast<int64_t>(i);
        sample.prompt = SharedTokens(group.prompt);
        sample.response = group.samples[i].response;
        members.push_back(static_cast<int64_t>(samples.size()));
        samples.push_back(std::move(sample));
      }
    }
    EXPECT_GT(stream.finish(engine, samples), 0);
    expect_same(whole, groups, "round " + std::to_string(round));
    const at::NoGradGuard no_grad;
    const at::Tensor alone = response_logprobs(*reference, make_micro_batch(samples, members), options)
                                 .to(at::kCPU, at::kFloat)
                                 .contiguous();
    const std::vector<std::vector<float>> values_alone = score_samples(values, samples);
    const float* value = alone.const_data_ptr<float>();
    for (size_t i = 0; i < samples.size(); ++i) {
      const Sample& sample = samples[i];
      const size_t bytes = sample.response.size() * sizeof(float);
      if (!sample.reference_logprobs.empty()) {
        ASSERT_EQ(0, std::memcmp(value, sample.reference_logprobs.data(), bytes));
      }
      if (!sample.values.empty()) {
        ++with_values;
        ASSERT_EQ(0, std::memcmp(values_alone[i].data(), sample.values.data(), bytes));
      }
      value += sample.response.size();
    }
    engine.weights_changed(round + 1);
  }
  EXPECT_GT(with_values, 0);
}

// However few SMs are asked for, the library's products start on them, for any number of rows, with the bits of the
// whole device.
TEST(Engine, APartOfAnySizeComputesProducts) {
  const auto device = at::Device(at::kCUDA, 0);
  const at::NoGradGuard no_grad;
  at::manual_seed(1);
  const auto normal = [&](int64_t rows, int64_t columns) {
    return at::randn({rows, columns}, at::TensorOptions().dtype(at::kBFloat16).device(device));
  };
  for (const int64_t sms : {8, 16, 24, 32, 48, 66}) {
    const auto partition = split_device(device, sms);
    ASSERT_NE(partition, nullptr) << sms;
    EXPECT_GE(partition->background_sms, 8);
    std::printf("%2d SMs asked for, %d in the background, clusters that start:", static_cast<int>(sms),
                partition->background_sms);
    for (const int blocks : {1, 2, 4, 8}) {
      const at::cuda::CUDAStream stream(partition->background);
      if (cuda::clusters_start(stream, blocks)) std::printf(" %d", blocks);
    }
    std::printf("\n");
    for (const int64_t width : {512, 2048, 4096}) {
      const at::Tensor weight = normal(3 * width, width);
      for (const int64_t rows : {64, 300, 1024, 4096}) {
        const at::Tensor input = normal(rows, width);
        const at::Tensor whole = trireme::linear(input, weight, at::Tensor());
        at::cuda::device_synchronize();
        at::Tensor part;
        {
          const PartitionScope scope(*partition, PartitionScope::Part::kBackground);
          part = trireme::linear(input, weight, at::Tensor());
          at::cuda::device_synchronize();
        }
        EXPECT_TRUE(at::equal(whole, part)) << sms << " SMs, " << rows << " x " << width;
      }
    }
  }
}

// Buffers are as large as the most samples ask for, graphs of a shared device too.
TEST(Engine, APartitionedDeviceWithFewPlaces) {
  const auto model = gpu_model(config_of(ModelFamily::kLlama));
  const auto wanted = requests({5, 300, 64}, 6);
  const Groups whole = generate(*model, {}, sampling_options(), wanted);
  for (const int64_t places : {1, 4, 16, 17}) {
    EngineOptions settings{.cache_rows = 20'000, .max_sequences = places, .max_total_length = 2048};
    settings.partition = split_device(model->options().device, 48);
    Engine engine(*model, nullptr, settings, sampling_options());
    Groups groups;
    for (const GroupRequest& request : wanted) engine.submit(request);
    engine.share_device(true);
    for (GeneratedGroup& group : engine.run()) groups.emplace(group.group_id, std::move(group));
    engine.share_device(false);
    expect_same(whole, groups, std::to_string(places) + " places");
  }
}

// Graphs are captured over the cache's addresses: they hold when its memory was somebody else's meanwhile.
TEST(Engine, TheCacheComesBackUnderTheSameAddresses) {
  const auto model = gpu_model(config_of(ModelFamily::kLlama));
  const auto wanted = requests(kPrompts, 8);
  Engine engine(*model, nullptr, {.cache_rows = 600'000, .max_total_length = 2048}, sampling_options());
  const auto run = [&] {
    for (const GroupRequest& request : wanted) engine.submit(request);
    Groups groups;
    for (GeneratedGroup& group : engine.run()) groups.emplace(group.group_id, std::move(group));
    return groups;
  };
  const auto free = [&] { return device_available_bytes(model->options().device); };
  const Groups whole = run();
  const int64_t bytes = 600'000 * KvArena::bytes_per_row(model->config(), at::kBFloat16), before = free();
  for (int round = 0; round < 2; ++round) {
    engine.release_cache();
    EXPECT_EQ(engine.stats().cache_rows, 0);
    EXPECT_GT(free(), before + bytes / 10 * 9);
    {
      const at::Tensor other =
          at::full({free() / 10 * 8}, 0x7f, at::TensorOptions().dtype(at::kByte).device(model->options().device));
      EXPECT_EQ(other[-1].item<uint8_t>(), 0x7f);
    }
    expect_same(whole, run(), "round " + std::to_string(round));
    EXPECT_EQ(engine.stats().cache_rows, 600'000);
  }
}

// Training has the cache's memory while answers are set aside; their graphs hold afterwards.
TEST(Engine, TheCacheIsLentWhileAnswersAreSetAside) {
  const auto model = gpu_model(config_of(ModelFamily::kLlama));
  const auto wanted = requests(kPrompts, 8);
  const Groups whole = generate(*model, {}, sampling_options(), wanted);
  Engine engine(*model, nullptr, {.cache_rows = 600'000, .max_total_length = 2048}, sampling_options());
  const auto free = [&] { return device_available_bytes(model->options().device); };
  const int64_t bytes = 600'000 * KvArena::bytes_per_row(model->config(), at::kBFloat16);
  for (const GroupRequest& request : wanted) engine.submit(request);
  Answers answers;
  for (int round = 0; round < 3; ++round) {
    answers.steps(engine, 8);
    answers.keep(engine.suspend());
    ASSERT_GT(engine.suspended_samples(), 0);
    const int64_t before = free();
    engine.release_cache();
    EXPECT_EQ(engine.stats().cache_rows, 0);
    EXPECT_GT(free(), before + bytes / 10 * 9);
    {
      const at::Tensor other =
          at::full({free() / 10 * 8}, 0x7f, at::TensorOptions().dtype(at::kByte).device(model->options().device));
      EXPECT_EQ(other[-1].item<uint8_t>(), 0x7f);
    }
    engine.resume();
    EXPECT_EQ(engine.stats().cache_rows, 600'000);
  }
  answers.keep(engine.run());
  expect_same(whole, answers.groups, "set aside three times");
}

// A cache that finds its size itself leaves what steps want, also the widest ones, and nothing besides; where others
// have taken memory between two rollouts it is smaller until they give it back. The samples are always the same.
TEST(Engine, TheCacheTakesWhatStepsLeave) {
  ModelConfig config = config_of(ModelFamily::kLlama);
  config.num_layers = 16;
  config.max_position_embeddings = 16'384;
  const auto model = gpu_model(config);
  const at::Device device = model->options().device;
  const int64_t available = device_available_bytes(device);  // of an H100 too, or of a part of the memory (limits.cpp)
  const auto wanted = requests({9'000, 40, 3'000}, 200);
  const auto rollout = [&](Engine& engine) {
    for (const GroupRequest& request : wanted) engine.submit(request);
    Groups groups;
    for (GeneratedGroup& group : engine.run()) groups.emplace(group.group_id, std::move(group));
    return groups;
  };
  Groups whole;
  {
    Engine engine(*model, nullptr, {.cache_rows = 300'000, .max_total_length = 16'384}, sampling_options());
    whole = rollout(engine);
  }
  Engine engine(*model, nullptr, {.cache_memory_fraction = 0.999, .max_total_length = 16'384}, sampling_options());
  EXPECT_EQ(engine.stats().cache_rows, 0);
  expect_same(whole, rollout(engine), "all of the memory");
  const int64_t rows = engine.stats().cache_rows;
  const DeviceMemory memory = device_memory(device);
  constexpr int64_t kGiB = int64_t{1} << 30;
  EXPECT_GT(rows * KvArena::bytes_per_row(config, at::kBFloat16), available / 2);
  EXPECT_LT(memory.free, 2 * kGiB);
  for (const GroupRequest& request : wanted) engine.submit(request);
  Answers aside;  // of which some go on in what others leave
  aside.steps(engine, 20);
  aside.keep(engine.suspend());
  EXPECT_GT(engine.suspended_samples(), 0);
  engine.release_cache();
  {
    const at::Tensor other = at::empty({available * 2 / 7}, at::TensorOptions().dtype(at::kByte).device(device));
    engine.resume();
    EXPECT_LT(engine.stats().cache_rows, rows);
    aside.keep(engine.run());
    expect_same(whole, aside.groups, "set aside, then less");
    expect_same(whole, rollout(engine), "less");
    EXPECT_LT(engine.stats().cache_rows, rows);
    EXPECT_GT(engine.stats().cache_rows, rows / 2);
    engine.release_cache();
  }
  expect_same(whole, rollout(engine), "all again");
  EXPECT_EQ(engine.stats().cache_rows, rows);
}

// Memory that the graphs of decode steps of 1 to `samples` samples hold: of every size of step there is one.
int64_t graph_bytes(const Model& model, int64_t samples) {
  const at::Device device = model.options().device;
  EngineOptions settings{.cache_rows = 300'000, .max_sequences = samples, .max_total_length = 2048};
  Engine engine(model, nullptr, settings, sampling_options());
  const auto reserved = [&] {
    empty_device_cache(device);
    const DeviceMemory memory = device_memory(device);
    return memory.tensors + memory.cached;
  };
  const int64_t before = reserved();
  // So that every number of samples is alive at some time.
  GroupRequest request = requests({9}, samples)[0];
  for (int64_t i = 0; i < samples; ++i) request.forced_lengths[static_cast<size_t>(i)] = 2 + i / 2;
  engine.submit(request);
  (void)engine.run();
  return reserved() - before;
}

// Captured on one stream each had memory of its own: some 30 graphs of 256 samples and 45 of 1,024.
TEST(Engine, GraphsShareTheirMemory) {
  const auto model = gpu_model(config_of(ModelFamily::kQwen3));
  (void)graph_bytes(*model, 16);  // libraries' own memory
  for (const int64_t samples : {256, 1024}) {
    const int64_t bytes = graph_bytes(*model, samples);
    std::printf("graphs of up to %d samples: %.1f MiB\n", static_cast<int>(samples),
                static_cast<double>(bytes) / (1 << 20));
    // The largest step's results: logits, the layers' activations and the sampler's scratch.
    const int64_t largest = samples * 2 * (config_of(ModelFamily::kQwen3).vocab_size + 16 * 1024);
    EXPECT_LT(bytes, 3 * largest + (int64_t{48} << 20)) << samples;
  }
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

TEST(Linear, TheStartUpTestCoversBiasesAndTheRowsOfAMicroBatch) {
  const at::Device device = choose_device("cuda", 0);
  ModelConfig config = config_of(ModelFamily::kQwen2);
  config.vocab_size += 5;
  const std::vector<LinearShape> shapes = config.linear_shapes();
  EXPECT_TRUE(shapes[0].bias);
  EXPECT_TRUE(shapes.back().head);
  for (const int64_t rows : {0, 5000, 16384, 40001})
    EXPECT_TRUE(linear_rows_are_exact(shapes, at::kBFloat16, device, rows)) << rows;
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

// The bits hold because the library may not split sums: with its usual workspace they do not.
TEST(Linear, TheDefaultWorkspaceIsNotExact) {
  const at::Device device = choose_device("cuda", 0);
  const std::vector<LinearShape> shapes = {{4096, 4096}, {14336, 4096}, {2048, 6144}};
  const int64_t limit = cuda::own_rows_limit();
  cuda::set_own_rows_limit(0);  // the library alone
  EXPECT_TRUE(linear_rows_are_exact(shapes, at::kBFloat16, device));
  const size_t bytes = cuda::forward_workspace_bytes();
  cuda::set_forward_workspace_bytes(size_t{32} << 20);
  EXPECT_FALSE(linear_rows_are_exact(shapes, at::kBFloat16, device));
  cuda::set_forward_workspace_bytes(bytes);
  EXPECT_TRUE(linear_rows_are_exact(shapes, at::kBFloat16, device));
  cuda::set_own_rows_limit(limit);
}

// Small layers too, whose sums are short: every number of rows that a batch may have.
TEST(Linear, EveryRowCountGivesTheSameBits) {
  const at::NoGradGuard no_grad;
  const at::Device device = choose_device("cuda", 0);
  for (const auto& [in, out] : std::vector<std::array<int64_t, 2>>{{256, 264},
                                                                   {256, 512},
                                                                   {256, 1024},
                                                                   {512, 256},
                                                                   {768, 259},
                                                                   {256, 259},
                                                                   {512, 5},
                                                                   {768, 264},
                                                                   {768, 768},
                                                                   {768, 2304},
                                                                   {768, 4096},
                                                                   {2048, 768},
                                                                   {1024, 4096},
                                                                   {3072, 1024},
                                                                   {2048, 2048}}) {
    const auto random = [&](std::vector<int64_t> shape) {
      return at::randn(shape, at::TensorOptions().device(device)).to(at::kBFloat16);
    };
    const at::Tensor x = random({4096, in}), weight = random({out, in});
    const at::Tensor whole = trireme::linear(x, weight, {}).view(at::kShort);
    at::Tensor bad = at::zeros({}, at::TensorOptions().dtype(at::kLong).device(device));
    for (int64_t rows = 1; rows <= 4096; rows += rows < 700 ? 1 : 61) {
      const int64_t from = (rows * 37) % (4097 - rows);
      std::optional<cuda::DecodeScope> decoding;  // as a decode step computes it
      if (rows <= 256 && rows % 2 == 0) decoding.emplace();
      bad +=
          (trireme::linear(x.narrow(0, from, rows), weight, {}).view(at::kShort) != whole.narrow(0, from, rows)).sum();
    }
    EXPECT_EQ(bad.item<int64_t>(), 0) << in << " -> " << out;
  }
}

TEST(Linear, ForwardAndBackwardAreThoseOfFloat32) {
  const at::Device device = choose_device("cuda", 0);
  for (const auto& [rows, in, out] :
       std::vector<std::array<int64_t, 3>>{{1, 64, 128}, {37, 512, 1536}, {600, 1024, 200}}) {
    const auto random = [&](std::vector<int64_t> shape) {
      return at::randn(shape, at::TensorOptions().device(device)).to(at::kBFloat16);
    };
    at::Tensor x = random({rows, in}).set_requires_grad(true), w = random({out, in}).set_requires_grad(true),
               b = random({out}).set_requires_grad(true);
    const at::Tensor dy = random({rows, out});
    const at::Tensor y = trireme::linear(x, w, b);
    y.backward(dy);
    const auto wide = [](const at::Tensor& t) { return t.detach().to(at::kDouble); };
    const auto near = [&](const at::Tensor& got, const at::Tensor& want, const char* name) {
      EXPECT_LE(((wide(got) - want).abs().max() / want.abs().max()).item<double>(), 5e-3)
          << name << " of " << rows << " x " << in << " x " << out;
    };
    near(y, wide(x).mm(wide(w).t()) + wide(b), "y");
    near(x.grad(), wide(dy).mm(wide(w)), "dx");
    near(w.grad(), wide(dy).t().mm(wide(x)), "dw");
    near(b.grad(), wide(dy).sum(0), "db");
    const at::Tensor first = w.grad().clone();  // a second backward adds to the same buffer
    trireme::linear(x, w, b).backward(dy);
    near(w.grad(), 2 * wide(first), "accumulated dw");
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
}  // namespace trireme
