// Lanes over pipeline stages: the samples of one lane bit for bit, whatever the workload; what the lines carry
// afterwards; a stage that stands still is named.
#include <ATen/ATen.h>

#include <atomic>
#include <map>
#include <random>
#include <set>

#include "base/fs.h"
#include "base/host.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/parallel/stage_links.h"
#include "trainer/rollout/driver.h"
#include "trainer/rollout/engine.h"

namespace trireme {
namespace {

using testing::eight_heads;
using testing::fill;
using testing::random_tokens;
using testing::split_options;

constexpr int64_t kLongest = 64;

ModelConfig deep_config() {
  ModelConfig config = eight_heads(ModelFamily::kLlama, false);
  config.num_layers = 4;
  return config;
}

// Groups of other sizes, prompts and ways to sample; some end by force, some by a text.
std::vector<GroupRequest> workload(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto draw = [&random](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  std::vector<GroupRequest> all;
  for (int64_t g = 0; g < 7; ++g) {
    GroupRequest request;
    request.group_id = g;
    request.prompt = random_tokens(draw(1, 30), seed * 100 + static_cast<uint64_t>(g));
    request.samples = draw(1, 9);
    request.first_sample_id = static_cast<uint64_t>(20 * g);
    if (g % 3 == 1) {
      for (int64_t i = 0; i < request.samples; ++i) request.forced_lengths.push_back(draw(1, 30));
      request.ends_known = g % 2 == 0;
    }
    if (g % 3 == 2) {
      request.sampling = SamplingOptions{.temperature = 0.9, .top_k = 20, .max_new_tokens = 25, .seed = seed};
      request.sampling->stop_strings = {"3", " ,"};
    }
    all.push_back(std::move(request));
  }
  return all;
}

SamplingOptions sampling_options() {
  return {.temperature = 0.8, .max_new_tokens = 33, .stop_ids = {5, 17}, .seed = 7};
}

void add_bytes(std::string& bytes, const GeneratedSample& sample) {
  bytes.append(reinterpret_cast<const char*>(sample.response.data()), sample.response.size() * sizeof(int32_t));
  bytes.append(reinterpret_cast<const char*>(sample.logprobs.data()), sample.logprobs.size() * sizeof(float));
  bytes += to_string(sample.finish);
}

// The samples of each group as bytes, and how the engine made them.
struct Made {
  std::map<int64_t, std::string> groups;
  EngineStats stats;
};

// The groups come on the way, a few at a time.
Made generate(const Model& model, const Tokenizer& tokenizer, const EngineOptions& options, uint64_t seed) {
  Engine engine(model, &tokenizer, options, sampling_options());
  std::map<std::pair<int64_t, int64_t>, std::string> ended;
  engine.on_sample = [&](const GroupRequest& group, int64_t index, const GeneratedSample& sample) {
    std::string bytes;
    add_bytes(bytes, sample);
    EXPECT_TRUE(ended.emplace(std::pair(group.group_id, index), bytes).second) << "a sample ended twice";
  };
  Made made;
  const auto keep = [&](std::vector<GeneratedGroup> groups) {
    for (const GeneratedGroup& group : groups) {
      std::string bytes;
      for (size_t i = 0; i < group.samples.size(); ++i) {
        std::string of_sample;
        add_bytes(of_sample, group.samples[i]);
        EXPECT_EQ(of_sample, ended.at({group.group_id, static_cast<int64_t>(i)}));
        bytes += of_sample;
      }
      EXPECT_TRUE(made.groups.emplace(group.group_id, bytes).second) << "a group came twice";
    }
  };
  int64_t count = 0;
  for (GroupRequest& request : workload(seed)) {
    engine.submit(std::move(request));
    if (++count % 3 == 0) keep(engine.step());
  }
  keep(engine.run());
  EXPECT_TRUE(engine.idle());
  made.stats = engine.stats();
  engine.release_cache();
  return made;
}

struct Way {
  const char* name;
  EngineOptions options;  // of one lane; caches and places are of a lane
};
std::vector<Way> ways() {
  EngineOptions roomy{.cache_rows = 4000}, tight{.cache_rows = 100, .max_sequences = 6, .headroom_rows = 1};
  EngineOptions pieces{.cache_rows = 1000, .prefill_chunk_tokens = 5}, ahead = roomy, both = tight;
  ahead.late_stops = both.late_stops = true;
  both.prefill_chunk_tokens = 7;
  return {{"roomy", roomy}, {"tight", tight}, {"pieces", pieces}, {"ahead", ahead}, {"tight and ahead", both}};
}

struct LaneWay {
  int64_t tp, pp;
  at::ScalarType dtype;
  StageOptions stages = {};
};

class Lanes : public ::testing::TestWithParam<LaneWay> {};
INSTANTIATE_TEST_SUITE_P(Pipelines, Lanes,
                         ::testing::Values(LaneWay{1, 2, at::kFloat}, LaneWay{1, 4, at::kBFloat16},
                                           LaneWay{2, 2, at::kFloat}, LaneWay{2, 2, at::kBFloat16},
                                           LaneWay{1, 2, at::kFloat, {.virtual_stages = 2}}),
                         [](const auto& info) {
                           const LaneWay& way = info.param;
                           return "tp" + std::to_string(way.tp) + "_pp" + std::to_string(way.pp) +
                                  (way.stages.virtual_stages > 1 ? "_virtual" : "") +
                                  (way.dtype == at::kFloat ? "_float32" : "_bfloat16");
                         });

TEST_P(Lanes, GiveTheSamplesOfOneLane) {
  const LaneWay& way = GetParam();
  const TemporaryDirectory dir;
  make_byte_tokenizer(dir.path());
  const auto tokenizer = Tokenizer::load(dir.path());
  Layout layout;
  layout.tp = way.tp;
  layout.pp = way.pp;
  test::on_layout(layout, [&](ParallelContext& context) {
    ModelOptions options = split_options(context, deep_config(), way.stages);
    options.dtype = way.dtype;
    options.trainable = false;
    Model model(deep_config(), options);
    fill(model);
    for (uint64_t seed = 1; seed <= (way.tp > 1 ? 1 : 2); ++seed) {
      const Made one = generate(model, *tokenizer, {.cache_rows = 4000, .max_total_length = kLongest}, seed);
      ASSERT_EQ(one.groups.size(), 7u);
      std::set<std::string> ranks;
      for (const Way& batching : ways()) {
        SCOPED_TRACE(batching.name);
        EngineOptions settings = batching.options;
        settings.max_total_length = kLongest;
        settings.lanes = way.pp;
        settings.cache_rows *= way.pp;
        settings.max_sequences *= way.pp;
        const Made made = generate(model, *tokenizer, settings, seed);
        EXPECT_EQ(made.groups, one.groups);
        EXPECT_EQ(made.stats.lanes, way.pp);
        EXPECT_TRUE(batching.options.cache_rows > 100 || made.stats.preemptions > 0);
        EXPECT_TRUE(!settings.late_stops || made.stats.surplus_tokens > 0);
        std::string all;
        for (const auto& [group, bytes] : made.groups) all += bytes;
        for (const std::string& of_rank : context.world().all_gather_bytes(all)) ranks.insert(of_rank);
      }
      EXPECT_EQ(ranks.size(), 1u);
    }
  });
}

// More lanes than stages, or fewer, are lanes too; and what one rank generates is what they do.
TEST(LaneEngine, AnyNumberOfLanesGivesWhatOneRankDoes) {
  const TemporaryDirectory dir;
  make_byte_tokenizer(dir.path());
  const auto tokenizer = Tokenizer::load(dir.path());
  ModelOptions frozen;
  frozen.trainable = false;
  Model whole(deep_config(), frozen);
  fill(whole);
  const Made wanted = generate(whole, *tokenizer, {.cache_rows = 4000, .max_total_length = kLongest}, 3);
  test::on_layout({.pp = 2}, [&](ParallelContext& context) {
    Model model(deep_config(), split_options(context, deep_config()));
    fill(model);
    for (const int64_t lanes : {1, 2, 3, 5}) {
      const Made made =
          generate(model, *tokenizer, {.cache_rows = 4000, .max_total_length = kLongest, .lanes = lanes}, 3);
      EXPECT_EQ(made.groups, wanted.groups);
      EXPECT_EQ(made.stats.lanes, lanes);
    }
    // A cache for two of the longest sequences has two lanes, one for a single sequence one.
    for (const int64_t rows : {2 * kLongest, kLongest}) {
      const Made made = generate(model, *tokenizer, {.cache_rows = rows, .max_total_length = kLongest, .lanes = 4}, 3);
      EXPECT_EQ(made.groups, wanted.groups);
      EXPECT_EQ(made.stats.lanes, rows / kLongest);
    }
  });
}

// Places are filled again as samples end, the weights change on the way, and when all has ended nothing is left on the
// lines: what a stage sends next is what the next one receives.
TEST(LaneEngine, RefillsTakesNewWeightsAndLeavesTheLinesEmpty) {
  for (const bool late : {false, true}) {
    test::on_layout({.pp = 4}, [&](ParallelContext& context) {
      Model model(deep_config(), split_options(context, deep_config()));
      const auto rollout = [&](int64_t lanes) {
        fill(model);
        Engine engine(
            model, nullptr,
            {.cache_rows = 2000, .max_sequences = 8, .max_total_length = kLongest, .late_stops = late, .lanes = lanes},
            {.seed = 5});
        std::map<std::pair<int64_t, int64_t>, std::string> samples;
        for (int rollout = 0; rollout < 2; ++rollout) {
          LocalCounter counter;
          SampleQueue queue({.groups = 6, .samples = 5, .places = 8}, counter, "q");
          DriverHooks hooks;
          hooks.request = [&](const SampleSpan& span) {
            GroupRequest request;
            request.prompt = random_tokens(3 + span.group, 9);
            request.first_sample_id = static_cast<uint64_t>(100 * rollout + span.group * 5 + span.first_sample);
            for (int64_t i = 0; i < span.count; ++i)
              request.forced_lengths.push_back(2 + (span.group + 3 * (span.first_sample + i)) % 17);
            request.ends_known = rollout == 1;
            return request;
          };
          hooks.finished = [&](const FinishedSample& sample) {
            std::string bytes;
            add_bytes(bytes, sample.generated);
            EXPECT_TRUE(samples.emplace(std::pair(rollout * 10 + sample.span.group, sample.index), bytes).second);
          };
          drive_rollout(engine, queue, hooks);
          EXPECT_EQ(static_cast<int64_t>(samples.size()), 30 * (rollout + 1));
          StageLinks& links = *context.stage_links();
          PendingCollective sent = links.begin_send(at::full({3}, links.stage(), at::kFloat), false);
          const at::Tensor received = at::empty({3});
          links.begin_receive(received, false).wait();
          sent.wait();
          EXPECT_EQ(received[0].item<float>(), static_cast<float>((links.stage() + 3) % 4));
          engine.release_cache();
        }
        return samples;
      };
      EXPECT_EQ(rollout(4), rollout(1));
      const auto changed = [&](int64_t lanes) {
        fill(model);
        Engine engine(model, nullptr,
                      {.cache_rows = 2000, .max_total_length = kLongest, .late_stops = late, .lanes = lanes},
                      {.max_new_tokens = 20, .seed = 5});
        for (int64_t g = 0; g < 6; ++g) {
          GroupRequest request;
          request.group_id = g;
          request.prompt = random_tokens(4 + g, 2);
          request.samples = 3;
          request.first_sample_id = static_cast<uint64_t>(10 * g);
          engine.submit(std::move(request));
        }
        for (int i = 0; i < 5; ++i) EXPECT_TRUE(engine.step().empty());
        init_parameters(model, 12);
        engine.weights_changed(1);
        std::string bytes;
        for (const GeneratedGroup& group : engine.run()) {
          for (const GeneratedSample& sample : group.samples) add_bytes(bytes, sample);
        }
        return bytes;
      };
      EXPECT_EQ(changed(4), changed(1));
    });
  }
}

// A middle stage that takes no turn: who sends to it, who waits for its rows and who waits for what is sampled all name
// it.
TEST(LaneEngine, AStageThatStandsStillIsNamedByAll) {
  Layout layout;
  layout.pp = 4;
  ListeningPort port;
  test::StandStill still(3);
  const auto errors = test::on_ranks(4, [&](int rank) {
    RendezvousOptions rendezvous = port.place(rank, 4, Milliseconds(15000));
    still.watch(rendezvous);
    ParallelContext context(layout, rendezvous);
    Model model(deep_config(), split_options(context, deep_config()));
    fill(model);
    Engine engine(model, nullptr, {.cache_rows = 2000, .max_total_length = kLongest, .lanes = 4},
                  {.max_new_tokens = 30, .seed = 5});
    for (int64_t g = 0; g < 4; ++g) {
      GroupRequest request;
      request.group_id = g;
      request.prompt = random_tokens(5, 2);
      request.samples = 2;
      request.first_sample_id = static_cast<uint64_t>(10 * g);
      engine.submit(std::move(request));
    }
    context.set_phase("generation");
    context.world().barrier();
    for (int i = 0; i < 3; ++i) (void)engine.step();
    if (rank == 1) return still.stand();
    still.fail([&] { (void)engine.run(); });
  });
  EXPECT_EQ(still.told(), 1);
  for (const int rank : {0, 2, 3}) {
    const std::string& error = errors[static_cast<size_t>(rank)];
    EXPECT_NE(error.find("rank 1 on " + host_name() + " has not come"), std::string::npos) << error;
    EXPECT_NE(error.find("in phase generation failed"), std::string::npos) << error;
  }
}

}  // namespace
}  // namespace trireme
