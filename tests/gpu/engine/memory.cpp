// What an engine shares its device with: another part of the SMs, the cache lent to others, graphs of one pool.
#include <ATen/cuda/CUDAContext.h>

#include <algorithm>
#include <cstdio>

#include "tests/gpu/engine/models.h"
#include "trainer/algorithms/reference_stream.h"
#include "trainer/batch/micro_batch.h"
#include "trainer/ops/cuda/device/clusters.h"
#include "trainer/ops/linear.h"
#include "trainer/rollout/driver.h"
#include "trainer/rollout/step_runner.h"

namespace trireme::gpu {
namespace {

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

}  // namespace
}  // namespace trireme::gpu
