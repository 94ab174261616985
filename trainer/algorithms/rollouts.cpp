#include "trainer/algorithms/rollouts.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/clock.h"
#include "base/error.h"
#include "trainer/algorithms/options.h"
#include "trainer/ops/philox.h"
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

// The queue of a replica's ranks, which generate the same samples: the leader takes, and all have what it took: the
// tensor ranks beside it at once, the other stages when they come to it. Once there was nothing left for it nobody asks
// again.
class ReplicaQueue final : public SampleSource {
 public:
  ReplicaQueue(SampleQueue& queue, ParallelContext& context) : queue_(queue), context_(context) {}

  int64_t places() const override { return queue_.places(); }

  std::vector<SampleSpan> take(int64_t room) override {
    const GenerationRanks& ranks = context_.generation();
    if (ranks.replica->size() == 1) return queue_.take(room);
    std::vector<SampleSpan> spans;
    if (over_) return spans;
    std::string packed;
    if (ranks.leads()) {
      spans = queue_.take(room);
      packed.assign(reinterpret_cast<const char*>(spans.data()), spans.size() * sizeof(SampleSpan));
    }
    packed = ranks.from_leader(packed);
    spans.resize(packed.size() / sizeof(SampleSpan));
    if (!spans.empty()) std::memcpy(spans.data(), packed.data(), packed.size());
    over_ = spans.empty();
    return spans;
  }

 private:
  SampleQueue& queue_;
  ParallelContext& context_;
  bool over_ = false;
};
static_assert(std::is_trivially_copyable_v<SampleSpan>);

}  // namespace

std::unique_ptr<ReferenceStream> make_reference_stream(const Config& config, std::vector<TokenScorer> scorers,
                                                       at::Device device,
                                                       std::shared_ptr<const DevicePartition> partition,
                                                       std::function<void(const std::string&)> on_stuck) {
  const bool on_cpu = device.is_cpu() && config.policy.generation.background_sms > 0;
  if (partition == nullptr && !on_cpu) return nullptr;
  return std::make_unique<ReferenceStream>(std::move(scorers), std::move(partition),
                                           config.cluster.collective_timeout_s, std::move(on_stuck));
}

TokenScorer reference_scorer(const Config& config, const Model& reference) {
  return reference_scorer(reference, reference_distribution(config), config.policy.sequence_packing.share_prompts);
}

double drawn_reward(uint64_t seed, int64_t group, int64_t index, int64_t group_size) {
  if (index == 0) return 1;
  if (index + 1 == group_size) return 0;
  return philox_uniform(seed, static_cast<uint64_t>(group), static_cast<uint64_t>(index), /*stream=*/7) < 0.5 ? 0 : 1;
}

RewardRequest reward_request(const PromptExample& example, const std::vector<int32_t>& response, bool truncated,
                             const Tokenizer& tokenizer) {
  RewardRequest reward;
  reward.prompt = example.prompt_text;
  reward.response = tokenizer.decode(response);
  reward.gold = example.gold;
  reward.extra = example.extra;
  reward.truncated = truncated;
  return reward;
}

void fill_rewards(const RewardedGroup& rewarded, Sample* samples) {
  for (size_t i = 0; i < rewarded.rewards.size(); ++i) {
    samples[i].raw_reward = rewarded.rewards[i];
    for (const std::vector<double>& part : rewarded.parts) samples[i].reward_parts.push_back(part[i]);
    samples[i].dropped = rewarded.dropped[i] != 0;
  }
}

void fill_drawn_rewards(uint64_t seed, int64_t group_size, Sample* samples, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    samples[i].raw_reward = drawn_reward(seed, samples[i].group, samples[i].index, group_size);
    samples[i].dropped = false;
  }
}

Sample to_sample(int64_t group, int64_t index, const SharedTokens& prompt, GeneratedSample generated) {
  Sample sample;
  sample.group = group;
  sample.index = index;
  sample.prompt = prompt;
  sample.truncated = generated.finish == FinishReason::kLength;
  sample.response = std::move(generated.response);
  sample.generation_logprobs = std::move(generated.logprobs);
  sample.weight_versions = std::move(generated.versions);
  sample.mixed_context = generated.mixed_context;
  return sample;
}

// A rank's finished samples and their rewards. A span's samples lie next to each other; the reward pool's group id is
// the place of the first.
class RolloutCollector::Scoring final {
 public:
  Scoring(const RolloutRequest& request, const Tokenizer* tokenizer, RewardPool* rewards)
      : request_(request), tokenizer_(tokenizer), rewards_(rewards) {
    TRIREME_CHECK(rewards != nullptr || request.drawn_rewards, "samples without rewards");
    for (const PromptExample& example : *request.prompts) prompts_.emplace_back(example.prompt);
  }

  const std::vector<SharedTokens>& prompts() const { return prompts_; }

  void add(const SampleSpan& span, GeneratedGroup generated) {
    const PromptExample& example = (*request_.prompts)[static_cast<size_t>(span.group)];
    const size_t first = own_.size();
    std::vector<RewardRequest> requests;
    for (size_t i = 0; i < generated.samples.size(); ++i) {
      own_.push_back(to_sample(span.group, span.first_sample + static_cast<int64_t>(i),
                               prompts_[static_cast<size_t>(span.group)], std::move(generated.samples[i])));
      const Sample& sample = own_.back();
      if (rewards_ != nullptr)
        requests.push_back(reward_request(example, sample.response, sample.truncated, *tokenizer_));
    }
    if (request_.on_generated) request_.on_generated(&own_[first], own_.size() - first);
    if (rewards_ != nullptr) {
      rewards_->submit(static_cast<int64_t>(first), std::move(requests));
      ++waiting_;
    } else {
      rewarded(first, own_.size() - first);
    }
  }

  // The next span's rewards, if they come before the deadline.
  bool take(const Deadline& deadline) {
    const auto group = rewards_->wait_any(deadline);
    if (!group) return false;
    const auto first = static_cast<size_t>(group->group_id);
    fill_rewards(*group, &own_[first]);
    --waiting_;
    rewarded(first, group->rewards.size());
    return true;
  }
  void take_what_is_ready() {
    while (waiting_ > 0 && take(Deadline::after(Milliseconds(0)))) {
    }
  }

  // Nothing is generated any more: groups whose rewards come now are announced to nobody.
  void generation_ended() { generating_ = false; }

  int64_t waiting() const { return waiting_; }  // spans without rewards
  std::vector<Sample>& own() { return own_; }

 private:
  // Samples [first, first + count) have their raw rewards.
  void rewarded(size_t first, size_t count) {
    if (request_.drawn_rewards && count > 0)
      fill_drawn_rewards(*request_.drawn_rewards, request_.samples_per_prompt, &own_[first], count);
    if (!request_.on_group || !generating_ || count == 0) return;
    std::vector<size_t>& places = places_[own_[first].group];
    for (size_t i = first; i < first + count; ++i) places.push_back(i);
    if (static_cast<int64_t>(places.size()) < request_.samples_per_prompt) return;
    std::vector<Sample> whole;
    for (const size_t place : places) whole.push_back(own_[place]);
    std::sort(whole.begin(), whole.end(), [](const Sample& a, const Sample& b) { return a.index < b.index; });
    request_.on_group(std::move(whole));
  }

  const RolloutRequest& request_;
  const Tokenizer* tokenizer_;
  RewardPool* rewards_;
  std::vector<SharedTokens> prompts_;
  std::vector<Sample> own_;
  int64_t waiting_ = 0;
  bool generating_ = true;
  std::map<int64_t, std::vector<size_t>> places_;  // in own_, of a prompt's rewarded samples
};

RolloutCollector::RolloutCollector(Engine& engine, const Tokenizer* tokenizer, RewardPool* rewards,
                                   ParallelContext& context, PhaseTimer& timer, double timeout_s)
    : engine_(engine),
      tokenizer_(tokenizer),
      rewards_(rewards),
      context_(context),
      timer_(timer),
      timeout_s_(timeout_s) {}

double RolloutCollector::generate(const RolloutRequest& request, Scoring& scoring) {
  QueueShape shape;
  shape.groups = static_cast<int64_t>(request.prompts->size());
  shape.samples = request.samples_per_prompt;
  shape.whole_groups = request.on_group != nullptr;
  shape.ranks = context_.generation().replicas;
  shape.rank = context_.generation().number;
  shape.places = engine_.options().max_sequences;
  std::unique_ptr<CounterStore> counter = std::make_unique<LocalCounter>();
  if (context_.store() != nullptr) counter = std::make_unique<JobCounter>(*context_.store());
  SampleQueue samples(shape, *counter, "rollout-" + request.name);
  ReplicaQueue queue(samples, context_);

  ReferenceStream* reference = request.reference;
  DriverHooks hooks;
  hooks.request = [&](const SampleSpan& span) {
    GroupRequest group;
    group.prompt = (*request.prompts)[static_cast<size_t>(span.group)].prompt;
    group.first_sample_id =
        request.first_sample_id + static_cast<uint64_t>(span.group * shape.samples + span.first_sample);
    for (int64_t i = 0; request.forced_lengths != nullptr && i < span.count; ++i)
      group.forced_lengths.push_back(request.forced_lengths->output_of(span.group, span.first_sample + i));
    group.ends_known = request.ends_known;
    group.sampling = request.sampling;
    return group;
  };
  if (reference != nullptr) hooks.finished = [&](const FinishedSample& sample) { reference->add(sample); };
  if (context_.generation().leads())
    hooks.complete = [&](const SampleSpan& span, GeneratedGroup group) { scoring.add(span, std::move(group)); };
  hooks.between_steps = [&] {
    if (reference != nullptr) reference->after_step(engine_);
    scoring.take_what_is_ready();
    if (on_progress) on_progress();
  };
  const ReferenceRollout until_the_end(reference);
  const Stopwatch watch;
  drive_rollout(engine_, queue, hooks);
  const double seconds = watch.seconds();
  scoring.generation_ended();
  if (reference != nullptr) (void)reference->finish(engine_, scoring.own());
  return seconds;
}

std::vector<Sample> RolloutCollector::collect(const RolloutRequest& request, RankShares& shares) {
  PhaseTimer::Scope generation = timer_.enter(Phase::kGeneration);
  context_.set_phase("generation");
  Scoring scoring(request, tokenizer_, rewards_);
  const double generated_after = generate(request, scoring);
  generation.end();

  PhaseTimer::Scope rewards = timer_.enter(Phase::kRewards);
  context_.set_phase("rewards");
  const Deadline deadline = Deadline::after(Milliseconds(static_cast<int64_t>(timeout_s_ * 1000)));
  while (scoring.waiting() > 0) {
    if (!scoring.take(Deadline::after(std::min(Milliseconds(1000), deadline.remaining()))) && deadline.passed()) {
      // No echo of a peer's failure, which a timeout would pass for.
      fail_io("rank " + std::to_string(context_.rank()) + ": " + std::to_string(scoring.waiting()) +
              " groups have no reward yet after cluster.collective_timeout_s; their own limits should be shorter");
    }
    if (on_progress) on_progress();
  }
  rewards.end();

  const PhaseTimer::Scope idle = timer_.enter(Phase::kIdle);
  context_.set_phase("rollout exchange");
  std::vector<Sample> all = exchange(std::move(scoring.own()), scoring.prompts(), generated_after, shares);
  TRIREME_CHECK(all.size() == request.prompts->size() * static_cast<size_t>(request.samples_per_prompt),
                "a rollout has lost samples");
  return all;
}

// All replicas' samples in data order, on every rank.
std::vector<Sample> RolloutCollector::exchange(std::vector<Sample> own, const std::vector<SharedTokens>& prompts,
                                               double generated_after, RankShares& shares) {
  const auto replicas = static_cast<size_t>(context_.generation().replicas);
  shares.idle_seconds.resize(replicas, 0);
  shares.samples.resize(replicas, 0);
  std::vector<Sample> all;
  if (context_.world_size() == 1) {
    shares.samples[0] += static_cast<int64_t>(own.size());
    all = std::move(own);
  } else {
    std::string part;
    if (context_.generation().leads()) {
      part.assign(sizeof generated_after, '\0');
      std::memcpy(part.data(), &generated_after, sizeof generated_after);
      part += pack_samples(own);
    }
    const std::vector<std::string> parts = context_.generation().from_leaders(part);
    own.clear();
    std::vector<double> seconds;
    for (const std::string& of_replica : parts) {
      const size_t replica = seconds.size();
      TRIREME_CHECK(of_replica.size() >= sizeof(double) && replica < replicas, "a rank's samples have no beginning");
      std::memcpy(&seconds.emplace_back(), of_replica.data(), sizeof(double));
      std::vector<Sample> theirs = unpack_samples(std::string_view(of_replica).substr(sizeof(double)), prompts);
      shares.samples[replica] += static_cast<int64_t>(theirs.size());
      all.insert(all.end(), std::make_move_iterator(theirs.begin()), std::make_move_iterator(theirs.end()));
    }
    const double slowest = *std::max_element(seconds.begin(), seconds.end());
    for (size_t replica = 0; replica < seconds.size(); ++replica)
      shares.idle_seconds[replica] += slowest - seconds[replica];
  }
  std::sort(all.begin(), all.end(), [](const Sample& a, const Sample& b) {
    return a.group != b.group ? a.group < b.group : a.index < b.index;
  });
  return all;
}

}  // namespace trireme
