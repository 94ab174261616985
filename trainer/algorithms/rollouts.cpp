#include "trainer/algorithms/rollouts.h"

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/rollout/queue.h"

namespace trireme {
namespace {

class JobCounter final : public CounterStore {
 public:
  explicit JobCounter(JobStore& store) : store_(store) {}
  int64_t add(const std::string& key, int64_t amount) override { return store_.add(key, amount); }

 private:
  JobStore& store_;
};

// A number where it was measured on H200: docs/performance.md.
constexpr int64_t kBackgroundProcessors = 32;

SamplingOptions sampling_of(const Config& config, const Tokenizer& tokenizer) {
  const GenerationConfig& g = config.policy.generation;
  SamplingOptions s;
  s.temperature = g.temperature;
  s.top_k = g.top_k;
  s.top_p = g.top_p;
  s.min_p = g.min_p;
  s.max_new_tokens = g.max_new_tokens;
  s.stop_ids = tokenizer.eos_ids();
  for (const int64_t id : g.stop_token_ids) s.stop_ids.push_back(static_cast<int32_t>(id));
  s.stop_strings = g.stop_strings;
  s.seed = static_cast<uint64_t>(config.grpo.seed);
  return s;
}

}  // namespace

SamplingOptions training_sampling(const Config& config, const Tokenizer& tokenizer) {
  return sampling_of(config, tokenizer);
}

SamplingOptions validation_sampling(const Config& config, const Tokenizer& tokenizer) {
  const GenerationConfig& g = config.policy.generation;
  SamplingOptions s = sampling_of(config, tokenizer);
  s.temperature = g.val_temperature;
  s.top_p = g.val_top_p;
  s.top_k = g.val_top_k;
  s.greedy = s.temperature == 0;
  s.seed = hash64("validation", s.seed);  // its own random numbers
  return s;
}

EngineOptions engine_options(const Config& config, std::shared_ptr<const DevicePartition> partition) {
  const GenerationConfig& g = config.policy.generation;
  EngineOptions o;
  o.cache_rows = g.kv_cache_tokens;
  o.cache_memory_fraction = g.kv_cache_memory_fraction;
  o.max_sequences = g.max_running_samples;
  o.prefill_chunk_tokens = g.prefill_chunk_tokens;
  o.max_total_length = config.policy.max_total_sequence_length;
  o.partition = std::move(partition);
  return o;
}

std::shared_ptr<const DevicePartition> partition_for(const Config& config, at::Device device, bool wanted) {
  const int64_t processors = config.policy.generation.background_processors;
  return wanted ? split_device(device, processors < 0 ? kBackgroundProcessors : processors) : nullptr;
}

std::unique_ptr<ReferenceStream> make_reference_stream(const Config& config, const Model* reference, at::Device device,
                                                       std::shared_ptr<const DevicePartition> partition,
                                                       std::function<void(const std::string&)> on_stuck) {
  const bool on_cpu = device.is_cpu() && config.policy.generation.background_processors > 0;
  if (partition == nullptr && !on_cpu) return nullptr;
  return std::make_unique<ReferenceStream>(reference, reference_distribution(config),
                                           config.policy.sequence_packing.share_prompts, std::move(partition),
                                           config.cluster.collective_timeout_s, std::move(on_stuck));
}

std::vector<RewardOptions> reward_options(const Config& config) {
  std::vector<RewardOptions> all;
  std::vector<std::string> names = config.env.enabled();
  const std::string& only = config.data.train.env_name;
  if (!only.empty()) {
    if (std::find(names.begin(), names.end(), only) == names.end()) {
      fail_user("data.train.env_name is '" + only + "' but env." + only + " is not enabled");
    }
    names = {only};
  }
  for (const std::string& name : names) {
    const RewardConfig& c = config.env.by_name(name);
    RewardOptions o;
    o.type = name;
    o.weight = c.weight;
    o.timeout_s = c.timeout_s;
    o.failure_policy = parse_failure_policy(c.failure_policy);
    o.workers = static_cast<int>(c.num_workers);
    o.pattern = c.pattern;
    o.command = c.command;
    o.tags = c.tags;
    o.answer_timeout_s = c.answer_timeout_s;
    o.url = c.url;
    o.max_batch = static_cast<int>(c.max_batch);
    o.max_attempts = static_cast<int>(c.max_attempts);
    all.push_back(o);
  }
  return all;
}

RolloutCollector::RolloutCollector(Engine& engine, const Tokenizer& tokenizer, RewardPool& rewards,
                                   ParallelContext& context, double timeout_s)
    : engine_(engine), tokenizer_(tokenizer), rewards_(rewards), context_(context), timeout_s_(timeout_s) {}

// `own` is sorted by nothing while it grows; the group id of a reward is the index of its first sample in `own`.
void RolloutCollector::take_rewarded(const RewardedGroup& group, std::vector<RolloutSample>& own) {
  for (size_t i = 0; i < group.rewards.size(); ++i) {
    RolloutSample& sample = own[static_cast<size_t>(group.group_id) + i];
    sample.raw_reward = group.rewards[i];
    sample.dropped = group.dropped[i] != 0;
  }
}

std::vector<RolloutSample> RolloutCollector::collect(const RolloutRequest& request, RolloutTimes& times) {
  const std::vector<PromptExample>& prompts = *request.prompts;
  const int64_t per_prompt = request.samples_per_prompt;
  QueueShape shape;
  shape.groups = static_cast<int64_t>(prompts.size());
  shape.samples = per_prompt;
  // Whole groups keep the prompt's prefill shared; with several ranks smaller runs even out their lengths.
  shape.run = context_.world_size() == 1 || request.on_group ? per_prompt
                                                             : std::max<int64_t>(1, std::min<int64_t>(per_prompt, 8));
  std::unique_ptr<JobCounter> counter;
  std::unique_ptr<PullQueue> queue;
  if (context_.store() != nullptr) {
    counter = std::make_unique<JobCounter>(*context_.store());
    queue = std::make_unique<StorePullQueue>(*counter, "rollout-" + request.name, shape);
  } else {
    queue = std::make_unique<LocalPullQueue>(shape);
  }

  Stopwatch watch;
  context_.set_phase("generation");
  std::vector<RolloutSample> own;
  std::vector<SampleRun> runs;  // index: the engine's group id
  const SamplesToReference to_reference(engine_, request.reference, runs);
  int64_t rewarded = 0, submitted = 0;
  std::map<int64_t, std::vector<size_t>> rewarded_places;  // of a prompt, in `own`
  const auto tell_of_whole_group = [&](const RewardedGroup& group) {
    if (!request.on_group) return;
    const auto first = static_cast<size_t>(group.group_id);
    std::vector<size_t>& places = rewarded_places[own[first].group];
    for (size_t i = 0; i < group.rewards.size(); ++i) places.push_back(first + i);
    if (static_cast<int64_t>(places.size()) < per_prompt) return;
    std::vector<RolloutSample> whole;
    for (const size_t place : places) whole.push_back(own[place]);
    std::sort(whole.begin(), whole.end(),
              [](const RolloutSample& a, const RolloutSample& b) { return a.index < b.index; });
    request.on_group(std::move(whole));
  };
  const int64_t wanted =
      engine_.options().max_sequences + per_prompt;  // enough to keep it full, little enough to share
  while (true) {
    while (engine_.unfinished_samples() < wanted) {
      const std::optional<SampleRun> run = queue->pull();
      if (!run) break;
      GroupRequest group;
      group.group_id = static_cast<int64_t>(runs.size());
      group.prompt = prompts[static_cast<size_t>(run->group)].prompt_ids;
      group.samples = run->count;
      group.first_sample_id =
          request.first_sample_id + static_cast<uint64_t>(run->group * per_prompt + run->first_sample);
      group.sampling = request.sampling;
      engine_.submit(std::move(group));
      runs.push_back(*run);
    }
    if (engine_.idle()) break;
    std::vector<GeneratedGroup> finished = engine_.step();
    if (request.reference != nullptr) request.reference->after_step(engine_);
    for (GeneratedGroup& group : finished) {
      const SampleRun& run = runs[static_cast<size_t>(group.group_id)];
      const PromptExample& prompt = prompts[static_cast<size_t>(run.group)];
      std::vector<RewardRequest> requests;
      const int64_t first = static_cast<int64_t>(own.size());
      for (size_t i = 0; i < group.samples.size(); ++i) {
        GeneratedSample& generated = group.samples[i];
        RolloutSample sample;
        sample.group = run.group;
        sample.index = run.first_sample + static_cast<int64_t>(i);
        sample.prompt = prompt.prompt_ids;
        sample.truncated = generated.finish == FinishReason::kLength;
        RewardRequest reward;
        reward.prompt = prompt.prompt_text;
        reward.response = tokenizer_.decode(generated.tokens);
        reward.gold = prompt.gold;
        reward.extra = prompt.extra;
        reward.truncated = sample.truncated;
        requests.push_back(std::move(reward));
        sample.tokens = std::move(generated.tokens);
        sample.generation_logprobs = std::move(generated.logprobs);
        own.push_back(std::move(sample));
      }
      rewards_.submit(first, std::move(requests));
      ++submitted;
    }
    while (rewarded < submitted) {  // whatever is ready, without waiting
      const auto group = rewards_.wait_any(Deadline::after(Milliseconds(0)));
      if (!group) break;
      take_rewarded(*group, own);
      ++rewarded;
      tell_of_whole_group(*group);
    }
    if (on_progress) on_progress();
  }
  if (request.reference != nullptr) (void)request.reference->finish(engine_, own);
  times.generation_seconds += watch.lap();

  context_.set_phase("rewards");
  const Deadline deadline = Deadline::after(Milliseconds(static_cast<int64_t>(timeout_s_ * 1000)));
  while (rewarded < submitted) {
    const auto group = rewards_.wait_any(Deadline::after(std::min(Milliseconds(1000), deadline.remaining())));
    if (group) {
      take_rewarded(*group, own);
      ++rewarded;
    } else if (deadline.passed()) {
      fail_timeout("rank " + std::to_string(context_.rank()) + ": " + std::to_string(submitted - rewarded) +
                   " groups have no reward yet after cluster.collective_timeout_s; their own limits should be shorter");
    }
    if (on_progress) on_progress();
  }
  times.rewards_seconds += watch.lap();

  context_.set_phase("rollout exchange");
  std::vector<RolloutSample> all;
  if (context_.world_size() == 1) {
    all = std::move(own);
  } else {
    for (const std::string& part : context_.data_parallel().all_gather_bytes(pack_samples(own))) {
      std::vector<RolloutSample> theirs = unpack_samples(part);
      all.insert(all.end(), std::make_move_iterator(theirs.begin()), std::make_move_iterator(theirs.end()));
    }
  }
  std::sort(all.begin(), all.end(), [](const RolloutSample& a, const RolloutSample& b) {
    return a.group != b.group ? a.group < b.group : a.index < b.index;
  });
  TRIREME_CHECK(static_cast<int64_t>(all.size()) == shape.groups * per_prompt, "a rollout has lost samples");
  times.gather_seconds += watch.lap();
  return all;
}

}  // namespace trireme
