// Engines whose experts are split, stepping together through random work: each replica its own requests, arrivals,
// places, cache and stops. Every sample has the bits that whole experts give it, whoever else has work or has none.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <map>
#include <mutex>
#include <random>

#include "base/fs.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/rollout/driver.h"
#include "trainer/rollout/engine.h"

namespace trireme {
namespace {

using testing::fill;
using testing::random_tokens;
using testing::split_options;

constexpr int64_t kLongest = 64, kReplicas = 4;

ModelConfig mixture() {
  ModelConfig config = testing::small_config(ModelFamily::kQwen3Moe);
  config.num_layers = 4;
  return config;
}

class Draws final {
 public:
  explicit Draws(uint64_t seed) : random_(seed) {}
  int64_t operator()(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }

 private:
  std::mt19937_64 random_;
};

SamplingOptions sampling_options() {
  return {.temperature = 0.8, .max_new_tokens = 21, .stop_ids = {5, 17}, .seed = 7};
}

struct Arrival {
  int64_t turn = 0;  // before which it is submitted
  GroupRequest request;
};

// Of one replica: no groups at all in one of three workloads, else some, most of them late.
std::vector<Arrival> workload(uint64_t seed, int64_t replica) {
  Draws draw(seed * 1000 + static_cast<uint64_t>(replica));
  std::vector<Arrival> all;
  const int64_t groups = draw(0, 2) == 0 ? 0 : draw(1, 5);
  int64_t turn = 0;
  for (int64_t g = 0; g < groups; ++g) {
    GroupRequest request;
    request.group_id = 10 * replica + g;
    request.prompt = random_tokens(draw(1, 25), seed * 100 + static_cast<uint64_t>(request.group_id));
    request.samples = draw(1, 6);
    request.first_sample_id = static_cast<uint64_t>(20 * request.group_id);
    if (draw(0, 2) == 0) {
      for (int64_t i = 0; i < request.samples; ++i) request.forced_lengths.push_back(draw(1, 30));
      request.ends_known = draw(0, 1) == 0;
    } else if (draw(0, 1) == 0) {
      request.sampling = SamplingOptions{.temperature = 0.9, .top_k = 20, .max_new_tokens = 25, .seed = seed};
      request.sampling->stop_strings = {"3", " ,"};
    }
    turn += draw(0, 12);
    all.push_back({turn, std::move(request)});
  }
  return all;
}

// Each replica has other sizes; how many lanes there are is alike.
EngineOptions engine_options(uint64_t seed, int64_t replica, int64_t lanes) {
  Draws draw(seed * 77 + static_cast<uint64_t>(replica) + 5);
  EngineOptions options{.max_total_length = kLongest, .late_stops = seed % 2 == 0, .lanes = lanes};
  options.cache_rows = lanes * draw(kLongest, draw(0, 1) == 0 ? 110 : 1500);
  options.max_sequences = lanes * draw(1, 9);
  options.prefill_chunk_tokens = draw(1, 40);
  options.headroom_rows = draw(1, 20);
  return options;
}

using Samples = std::map<std::pair<int64_t, int64_t>, std::string>;  // by group and index, as bytes

std::string bytes_of(const GeneratedSample& sample) {
  std::string bytes(reinterpret_cast<const char*>(sample.response.data()), sample.response.size() * sizeof(int32_t));
  bytes.append(reinterpret_cast<const char*>(sample.logprobs.data()), sample.logprobs.size() * sizeof(float));
  return bytes + to_string(sample.finish);
}

// Turn by turn, as drive_rollout does, until nobody has or expects work.
Samples generate(const Model& model, const Tokenizer& tokenizer, const EngineOptions& options, uint64_t seed,
                 int64_t replica) {
  Engine engine(model, &tokenizer, options, sampling_options());
  Samples samples;
  engine.on_sample = [&](const GroupRequest& group, int64_t index, const GeneratedSample& sample) {
    EXPECT_TRUE(samples.emplace(std::pair(group.group_id, index), bytes_of(sample)).second) << "ended twice";
  };
  std::vector<Arrival> work = workload(seed, replica);
  engine.take_cache();
  Communicator* const steps = model.options().steps;
  size_t next = 0;
  for (int64_t turn = 0;; ++turn) {
    for (; next < work.size() && work[next].turn <= turn; ++next) engine.submit(std::move(work[next].request));
    const int64_t expects = next < work.size() ? 1 : 0;
    const bool later = (steps == nullptr ? expects : steps->all_reduce_sum(expects)) > 0;
    if (engine.somebody_unfinished()) {
      (void)engine.step();
    } else if (!later) {
      break;
    }
  }
  EXPECT_TRUE(engine.idle());
  return samples;
}

ModelOptions frozen(ModelOptions options, at::ScalarType dtype) {
  options.trainable = false;
  options.dtype = dtype;
  return options;
}

struct Way {
  Layout layout;
  StageOptions stages = {};
  at::ScalarType dtype = at::kFloat;
};

class ExpertEngines : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(RandomWork, ExpertEngines,
                         ::testing::Values(Way{{.ep = 2, .dp = 4}}, Way{{.ep = 4, .dp = 4}, {}, at::kBFloat16},
                                           Way{{.cp = 2, .ep = 4, .dp = 2}}, Way{{.tp = 2, .ep = 4, .dp = 2}},
                                           Way{{.ep = 2, .dp = 2, .pp = 2}},
                                           Way{{.ep = 2, .dp = 2, .pp = 2}, {.virtual_stages = 2}},
                                           Way{{.ep = 2, .dp = 4, .etp = 2}, {}, at::kBFloat16},
                                           Way{{.tp = 2, .ep = 2, .dp = 2, .etp = 2}}),
                         [](const auto& info) {
                           const Layout& l = info.param.layout;
                           return "tp" + std::to_string(l.tp) + "_cp" + std::to_string(l.cp) + "_ep" +
                                  std::to_string(l.ep) + "_pp" + std::to_string(l.pp) + "_dp" + std::to_string(l.dp) +
                                  "_etp" + std::to_string(l.etp) +
                                  (info.param.stages.virtual_stages > 1 ? "_virtual" : "") +
                                  (info.param.dtype == at::kFloat ? "_float32" : "_bfloat16");
                         });

// What each replica's work gives where nothing of an expert is anybody else's, or, as the width of shared experts has
// bits of its own, where one group shares them and has the same work at once.
TEST_P(ExpertEngines, GiveTheSamplesOfWholeExperts) {
  const Way& way = GetParam();
  const TemporaryDirectory dir;
  make_byte_tokenizer(dir.path());
  const auto tokenizer = Tokenizer::load(dir.path());
  constexpr uint64_t kSeeds = 2;
  const auto key = [](uint64_t seed, int64_t replica) { return std::pair(seed, replica); };
  std::map<std::pair<uint64_t, int64_t>, Samples> wanted;
  std::mutex mutex;
  const Layout alone{
      .tp = way.layout.tp, .dp = std::max<int64_t>(1, way.layout.etp / way.layout.tp), .etp = way.layout.etp};
  test::on_layout(alone, [&](ParallelContext& context) {
    Model model(mixture(), frozen(split_options(context, mixture()), way.dtype));
    fill(model);
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
      for (int64_t replica = 0; replica < kReplicas; ++replica) {
        const Samples samples =
            generate(model, *tokenizer, {.cache_rows = 4000, .max_total_length = kLongest}, seed, replica);
        const std::lock_guard<std::mutex> lock(mutex);
        EXPECT_EQ(wanted.emplace(key(seed, replica), samples).first->second, samples) << "ranks differ";
      }
    }
  });
  size_t count = 0;
  for (const auto& [which, samples] : wanted) count += samples.size();
  ASSERT_GT(count, 30u) << "too little work to show anything";
  test::on_layout(way.layout, [&](ParallelContext& context) {
    Model model(mixture(), frozen(split_options(context, mixture(), way.stages), way.dtype));
    fill(model);
    const int64_t replica = context.generation().number;
    for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
      for (const int64_t lanes : {int64_t{1}, way.layout.pp}) {
        const Samples samples = generate(model, *tokenizer, engine_options(seed, replica, lanes), seed, replica);
        EXPECT_EQ(samples, wanted.at(key(seed, replica)))
            << "seed " << seed << ", replica " << replica << ", lanes " << lanes;
        if (way.layout.pp == 1) break;
      }
    }
  });
}

// Ranks that pull from one counter until all is taken; who has got least ends first and steps on with nothing.
TEST(ExpertQueue, RanksThatPullGiveTheSamplesOfOne) {
  constexpr int64_t kGroups = 9, kSamples = 4;
  const auto request_of = [](uint64_t seed, const SampleSpan& span) {
    GroupRequest request;
    request.prompt = random_tokens(2 + 3 * span.group, seed);
    request.first_sample_id = static_cast<uint64_t>(span.group * kSamples + span.first_sample);
    for (int64_t i = 0; i < span.count; ++i) {
      Draws draw(seed * 5000 + request.first_sample_id + static_cast<uint64_t>(i));
      request.forced_lengths.push_back(draw(0, 4) == 0 ? draw(20, 30) : draw(1, 6));
    }
    request.ends_known = seed % 2 == 0;
    return request;
  };
  const auto roll_out = [&](const Model& model, uint64_t seed, CounterStore& counter, const QueueShape& shape,
                            const EngineOptions& options) {
    Engine engine(model, nullptr, options, sampling_options());
    SampleQueue queue(shape, counter, "q");
    Samples samples;
    DriverHooks hooks;
    hooks.request = [&](const SampleSpan& span) { return request_of(seed, span); };
    hooks.finished = [&](const FinishedSample& sample) {
      EXPECT_TRUE(samples.emplace(std::pair(sample.span.group, sample.index), bytes_of(sample.generated)).second);
    };
    drive_rollout(engine, queue, hooks);
    return samples;
  };
  ModelOptions plain;
  Model whole(mixture(), frozen(plain, at::kFloat));
  fill(whole);
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    QueueShape shape{.groups = kGroups, .samples = kSamples, .whole_groups = seed == 3, .places = 4};
    LocalCounter own;
    const Samples wanted = roll_out(whole, seed, own, shape, {.cache_rows = 2000, .max_total_length = kLongest});
    ASSERT_EQ(wanted.size(), static_cast<size_t>(kGroups * kSamples));
    for (const int64_t ep : {2, 4}) {
      LocalCounter shared;
      Samples all;
      std::mutex mutex;
      test::on_layout({.ep = ep, .dp = 4}, [&](ParallelContext& context) {
        Model model(mixture(), frozen(split_options(context, mixture()), at::kFloat));
        fill(model);
        QueueShape of_rank = shape;
        of_rank.ranks = context.world_size();
        of_rank.rank = context.rank();
        const Samples mine = roll_out(model, seed, shared, of_rank, engine_options(seed, context.rank(), /*lanes=*/1));
        const std::lock_guard<std::mutex> lock(mutex);
        for (const auto& [which, bytes] : mine) EXPECT_TRUE(all.emplace(which, bytes).second) << "generated twice";
      });
      EXPECT_EQ(all, wanted) << "ep " << ep << ", seed " << seed;
    }
  }
}

}  // namespace
}  // namespace trireme
