#include "trainer/algorithms/grpo.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <random>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "topology/exactness.h"
#include "trainer/algorithms/beside_generation.h"
#include "trainer/algorithms/carried_rollouts.h"
#include "trainer/algorithms/critic.h"
#include "trainer/algorithms/datasets.h"
#include "trainer/algorithms/dedicated.h"
#include "trainer/algorithms/dynamic_sampling.h"
#include "trainer/algorithms/engine_layout.h"
#include "trainer/algorithms/forced_lengths.h"
#include "trainer/algorithms/grpo_validation.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/algorithms/recompute.h"
#include "trainer/algorithms/refit.h"
#include "trainer/algorithms/reward_model.h"
#include "trainer/algorithms/rollout_metrics.h"
#include "trainer/algorithms/rollout_source.h"
#include "trainer/algorithms/rollouts.h"
#include "trainer/algorithms/sample_advantages.h"
#include "trainer/algorithms/token_passes.h"
#include "trainer/rewards/failures.h"

namespace trireme {
namespace {

class GrpoLoop final {
 public:
  GrpoLoop(const Config& config, const TrainOptions& options)
      : session_(config, options, config.grpo.max_num_steps),
        config_(session_.config),
        datasets_(open_datasets(config_, session_.tokenizer, options.hf_home, /*completions=*/false)),
        prompts_(datasets_.train),
        rewards_(reward_options(config_, options.rewards), uses_reward_model(config_)),
        refit_(make_refit()),
        // What runs beside the last responses would meet their exchanges, which a thread of its own cannot make.
        split_(session_.context.holders().size() > 1 || session_.context.layout().cp > 1 || refit_ != nullptr ||
               session_.policy->options().sharding.weights),
        partition_(partition_for(config_, session_.policy->options().device,
                                 !split_ && !overlaps() && works_beside_generation(session_))),
        engine_(refit_ ? refit_->model() : *session_.policy, session_.tokenizer.get(), options_of_engine(),
                training_sampling(config_, *session_.tokenizer)),
        collector_(engine_, session_.tokenizer.get(), &rewards_, session_.context, session_.timer,
                   config_.cluster.collective_timeout_s) {
    check_validation_data(datasets_, config_.algorithm, config_.grpo.val_period, config_.grpo.max_num_steps,
                          config_.grpo.val_at_start, config_.grpo.val_at_end);
    if (needs_reference(config_)) {
      ModelOptions frozen = session_.policy->options();
      frozen.trainable = false;
      reference_ = load_or_draw_model(config_, session_.model_dir, frozen);
      if (reference_->units() != nullptr) reference_->units()->release();
    }
    forced_lengths_ = forced_lengths(config_, session_.context.is_main());
    row_exact_ = session_.linear_is_row_exact && generation_is_exact();
    early_gradients_ = early_gradients_beside(session_, split_, row_exact_);
    make_critic();
    // Under carry-over the places of the last responses are filled, and elsewhere they are on other devices: nothing is
    // left to run beside them.
    if (!split_ && !overlaps())
      reference_stream_ = stream_beside_generation(session_, reference_.get(), critic_trainer_, early_gradients_,
                                                   partition_, options.rendezvous.on_stuck);
    if (!session_.linear_is_row_exact && session_.context.is_main()) {
      log_warn("grpo", "linear layers do not keep row bits on this machine: a previous-log-prob pass runs every step");
    }
    trainer_ = std::make_unique<PolicyTrainer>(config_, *session_.policy, reference_.get(), *session_.optimizer,
                                               session_.context, session_.timer, row_exact_);
    if (early_gradients_)
      reference_stream_->train = [this](const std::vector<Sample>& samples) { trainer_->train_early(samples); };
    if (session_.resumed) resume(session_.resumed->state);
    connect();
    if (datasets_.validation != nullptr) {
      validation_ = std::make_unique<GrpoValidation>(session_, *datasets_.validation, [this](const RolloutRequest& r) {
        RankShares shares;
        return collect(r, shares, validated_rewards_);
      });
    }
    run_and_report(session_.context, [&] {
      probe_rewards();
      begin_ledger(options);
    });
    session_.ready(step_);
  }

  TrainSummary run() {
    TrainSummary summary;
    run_and_report(session_.context, [&] { summary = run_steps(); });
    return summary;
  }

 private:
  // Where a checkpoint of the same run ends.
  void resume(const nlohmann::json& state) {
    step_ = trained_steps_ = session_.resumed->step;
    engine_.weights_changed(weights_version());
    prompts_.restore(state.at("prompts"));
    next_sample_id_ = state.at("next_sample_id").get<uint64_t>();
    if (state.contains("validation")) last_accuracy_ = state.at("validation").get<double>();
    // A run that ended after its last checkpoint has validated already: once is enough, for the log too.
    validated_step_ = state.value("validated_step", int64_t{-1});
    const int64_t only_critic = std::min(step_, config_.ppo.policy_training_start_step);
    trainer_->set_passes_done((ppo() ? step_ - only_critic : step_) * passes_per_rollout(config_));
    if (critic_trainer_ != nullptr) critic_trainer_->set_passes_done(step_ * passes_per_rollout(config_));
    // Older checkpoints have the optimizer's own count only, and not even that one when its state was not saved.
    const int64_t counted = session_.optimizer->steps_done();
    optimizer_steps_ =
        state.value("optimizer_steps", counted > 0 ? counted : step_ * optimizer_steps_per_rollout(config_));
  }

  // Of the groups that are generated and not trained.
  void begin_ledger(const TrainOptions& options) {
    if (generates_elsewhere(config_)) {
      DedicatedOptions dedicated;
      dedicated.rendezvous = options.rendezvous;
      dedicated.work_port = options.work_port;
      dedicated.transport = options.transport;
      dedicated.hf_home = options.hf_home;
      dedicated.rewards = static_cast<int64_t>(rewards_.counters().size());
      dedicated.probe = probe();
      dedicated.steps = step_;
      dedicated.next_sample_id = next_sample_id_;
      source_ = std::make_unique<DedicatedRollouts>(session_, prompts_, forced_lengths_ ? &*forced_lengths_ : nullptr,
                                                    dedicated, collector_.on_progress);
      restore_groups(*source_, session_);
    } else if (carries()) {
      source_ = std::make_unique<CarriedRollouts>(session_, engine_, rewards_, prompts_,
                                                  forced_lengths_ ? &*forced_lengths_ : nullptr, step_, next_sample_id_,
                                                  collector_.on_progress);
      restore_groups(*source_, session_);
    } else {
      LedgerOptions synchronous;  // of age 0
      synchronous.groups_per_step = config_.grpo.num_prompts_per_step;
      synchronous.samples_per_group = config_.grpo.num_generations_per_prompt;
      synchronous.critic_only_steps = critic_only_steps(config_);
      ledger_ = std::make_unique<Ledger>(synchronous, step_ + 1);
    }
    if (source_ && critic_ != nullptr &&
        (generates_elsewhere(config_) ? critic_->works_in_waits() : critic_->works_ahead()))
      source_->on_samples = [this](std::vector<Sample>& samples) { critic_->in_wait(samples); };
    if (!overlaps() && session_.resumed && session_.resumed->state.contains("ledger") && session_.context.is_main()) {
      log_info("grpo", "steps do not overlap: groups of the checkpoint that are not trained are generated anew");
    }
  }

  // On these ranks, or what speaks to it on its own.
  void make_critic() {
    if (session_.critic_link != nullptr) critic_ = std::make_unique<RemoteCritic>(*session_.critic_link);
    if (session_.critic == nullptr) return;
    auto trainer = std::make_unique<CriticTrainer>(session_.critic->config, *session_.critic->model,
                                                   *session_.critic->optimizer, *session_.critic->ranks);
    critic_trainer_ = trainer.get();
    critic_ = std::make_unique<LocalCritic>(std::move(trainer));
  }

  void connect() {
    collector_.on_progress = [this] { session_.heartbeat(); };
    trainer_->on_progress = collector_.on_progress;
    if (!keeps_cache(config_)) trainer_->make_room = [this] { engine_.release_cache(); };
    trainer_->gathers_weights = refit_ == nullptr;
    if (critic_trainer_ == nullptr) return;
    critic_trainer_->on_progress = collector_.on_progress;
    critic_trainer_->make_room = trainer_->make_room;
  }

  bool carries() const { return carries_over(config_); }
  bool overlaps() const { return carries() || generates_elsewhere(config_); }  // or other processes generate

  // Whether the rows behind those that are trained are of this run.
  bool has_rows() const {
    const int64_t drawn = source_ ? source_->place().drawn : prompts_.drawn();
    return drawn < prompts_.rows_of_epochs(config_.grpo.max_num_epochs, prompts_per_round(config_.grpo));
  }

  // The next step's groups where steps overlap. Samples in data order, group by group.
  std::vector<Sample> generate_overlapped(RankShares& shares, GeneratedTotals& generated,
                                          std::map<std::string, double>& values) {
    const GrpoConfig& g = config_.grpo;
    fill();
    RolloutSource::Step step = source_->collect(shares, values);
    count_rewards(step.rewards, step_rewards_);
    judge_rewards(step_rewards_);
    score(step.groups);
    const auto used = static_cast<double>(step.groups.size());
    std::vector<Sample> kept = kept_samples(std::move(step.groups), g.num_generations_per_prompt, generated);
    next_sample_id_ = source_->place().next_sample_id;
    if (g.shuffle_rewards) shuffle_rewards(kept);
    if (g.use_dynamic_sampling)
      values["train/dynamic_sampling_num_gen_batches"] = std::ceil(used / static_cast<double>(g.num_prompts_per_step));
    return kept;
  }

  // Training has the cache's memory where it has not enough without it; so have passes that come before it.
  void make_room(const Model& model, const Config& config, const std::vector<Sample>& samples) {
    make_room_for_passes(model, most_tokens_of_a_pass(samples, logprob_micro_batches(config)), session_.context,
                         trainer_->make_room);
  }

  // What the reward model says of samples, besides their other rewards. In a measurement, whose rewards are drawn, it
  // is computed and does not count.
  void score(std::vector<Sample>& samples) {
    if (session_.reward_model == nullptr) return;
    const PhaseTimer::Scope rewards = session_.timer.enter(Phase::kRewards);
    session_.context.set_phase("reward model");
    if (std::any_of(samples.begin(), samples.end(), [](const Sample& sample) { return !sample.score; }))
      make_room(*session_.reward_model, config_, samples);
    const std::vector<float> scores = reward_model_scores(
        samples, *session_.reward_model, logprob_micro_batches(config_), session_.context, collector_.on_progress);
    add_scores(samples, scores, forced_lengths_ ? 0 : config_.env.reward_model.weight);
  }

  // Of a step's groups.
  void score(std::vector<LedgerGroup>& groups) {
    if (session_.reward_model == nullptr) return;
    std::vector<Sample> samples;
    for (LedgerGroup& group : groups)
      samples.insert(samples.end(), std::make_move_iterator(group.samples.begin()),
                     std::make_move_iterator(group.samples.end()));
    score(samples);
    auto next = samples.begin();
    for (LedgerGroup& group : groups) {
      for (Sample& sample : group.samples) sample = std::move(*next++);
    }
  }

  bool ppo() const { return config_.algorithm == "ppo"; }

  std::unique_ptr<Refit> make_refit() {
    if (!session_.context.generation().apart) return nullptr;
    return std::make_unique<Refit>(*session_.policy, stage_options(config_), session_.context,
                                   config_.cluster.processes);
  }

  // Whether the sampler's log-probs have the loss's bits although generation has a layout of its own. Experts are added
  // up in the same blocks in both.
  bool generation_is_exact() {
    const bool elsewhere = generates_elsewhere(config_);
    if (refit_ == nullptr && !elsewhere) return true;
    const auto arithmetic = [&](const Layout& layout) {
      return Arithmetic{.dtype = config_.policy.precision, .tp = layout.tp, .etp = layout.etp};
    };
    const Layout generation = elsewhere
                                  ? engine_layout(config_, session_.policy->config().shape(), session_.context.layout())
                                  : session_.context.generation().layout;
    const Exactness found = exactness(arithmetic(generation), arithmetic(session_.context.layout()));
    const bool exact = elsewhere || rows_are_exact(refit_->model(), config_, session_.context,
                                                   /*generates=*/true);  // an engine looks itself
    if (!session_.context.is_main()) return found.equal && exact;
    if (!found.equal)
      log_warn("grpo", found.difference +
                           ": log-probs differ in their last bits, a previous-log-prob pass runs every "
                           "step");
    else if (!exact)
      log_warn("grpo",
               "products of generation's layout do not keep row bits: a previous-log-prob pass runs every step");
    return found.equal && exact;
  }

  int64_t weights_version() const { return std::max<int64_t>(0, trained_steps_ - critic_only_steps(config_)); }

  KeptCache kept() const { return keeps_cache(config_) ? KeptCache::kKept : KeptCache::kNothing; }

  // What generates goes on with the next version; of a step that has trained the critic alone with the same.
  void end_training(int64_t step) {
    ++trained_steps_;
    if (step > critic_only_steps(config_)) engine_.weights_changed(weights_version(), kept());
    if (source_) {
      source_->trained(step);
    } else if (!config_.grpo.use_dynamic_sampling) {
      ledger_->trained(step);
    }
  }

  // The weights of this moment, for whatever generates next.
  void fill() {
    if (refit_ == nullptr) return;
    const PhaseTimer::Scope refit = session_.timer.enter(Phase::kRefit);
    const std::string before = session_.context.phase();
    session_.context.set_phase("refit");
    if (refit_->fill()) engine_.weights_changed(weights_version(), kept());
    session_.context.set_phase(before);
  }

  // The ranks of a replica make the same plans, and with split experts several replicas take their caches together.
  EngineOptions options_of_engine() {
    EngineOptions options = engine_options(config_, partition_);
    const GenerationRanks& generation = session_.context.generation();
    if (split_)
      options.least_of_ranks = [&ranks =
                                    generation.apart ? *generation.replica : session_.context.holders()](int64_t rows) {
        return static_cast<int64_t>(-ranks.all_reduce_max(static_cast<double>(-rows)));
      };
    return options;
  }

  // Prompts of the forced lengths, and responses.
  void force(std::vector<PromptExample>& prompts, RolloutRequest& request) const {
    if (!forced_lengths_) return;
    for (size_t p = 0; p < prompts.size(); ++p) force_prompt(*forced_lengths_, static_cast<int64_t>(p), prompts[p]);
    request.forced_lengths = &*forced_lengths_;
    request.drawn_rewards = static_cast<uint64_t>(config_.grpo.seed);
  }

  TrainSummary run_steps() {
    const GrpoConfig& g = config_.grpo;
    if (g.val_at_start && step_ == 0) session_.reporting.log_validation(0, validate());
    TrainSummary summary;
    bool stop_early = good_enough();  // a run that had ended so, started again
    session_.timer.start_step();
    while (step_ < g.max_num_steps && has_rows() && !stop_early) {
      stop_early = one_step();
      if (session_.should_stop() && step_ < g.max_num_steps) {
        if (session_.checkpoint_on_stop()) save();
        summary.end = LoopEnd::kStopped;
        break;
      }
    }
    if (summary.end == LoopEnd::kFinished) {
      if (g.val_at_end && validated_step_ != step_) session_.reporting.log_validation(step_, validate());
      save();
    }
    session_.finish_saves();
    if (session_.critic_link != nullptr) session_.critic_link->end(summary.end == LoopEnd::kStopped);
    if (source_) source_->finish();
    session_.reporting.finish();
    summary.steps = step_;
    summary.validation = last_accuracy_;
    return summary;
  }

  // What rewards are probed with: the first row that is a prompt, answered by its own gold.
  RewardRequest probe() const {
    for (int64_t i = 0; i < datasets_.train->size(); ++i) {
      const std::optional<PromptExample> example = datasets_.train->example(i);
      if (example) return {example->prompt_text, example->gold, example->gold, example->extra};
    }
    return {};
  }

  // Engines score what they generate, so that elsewhere only validation needs rewards here.
  bool scores() const {
    const GrpoConfig& g = config_.grpo;
    return !generates_elsewhere(config_) || validates(g.val_period, g.max_num_steps, g.val_at_start, g.val_at_end);
  }

  // Before anything is trained: rewards that cannot work are said, services that still start are waited for. An engine
  // probes its own before it joins; the wait for engines begins behind this one, so that it is not for services.
  void probe_rewards() {
    if (config_.env.startup_timeout_s <= 0 || !session_.context.generation().leads()) return;
    session_.context.set_phase("rewards");
    rewards_.probe(probe(), Milliseconds(static_cast<int64_t>(config_.env.startup_timeout_s * 1000)), scores());
  }

  // A rollout with its rewards, which `counted` gets of all ranks.
  std::vector<Sample> collect(const RolloutRequest& request, RankShares& shares, std::vector<RewardCounters>& counted) {
    fill();
    const std::vector<RewardCounters> before = rewards_.counters();
    std::vector<Sample> samples = collector_.collect(request, shares);
    const std::vector<RewardCounters> of_rollout = sum_counters(
        session_.context.world().all_gather_bytes(pack_counters(counted_since(rewards_.counters(), before))));
    score(samples);
    count_rewards(of_rollout, counted);
    return samples;
  }

  // What rewards counted on all ranks, into a step's or a validation's sum.
  void count_rewards(const std::vector<RewardCounters>& of_rollout, std::vector<RewardCounters>& counted) {
    for (const RewardCounters& one : of_rollout) reward_failures_[one.name] += one.failed;
    add_counters(counted, of_rollout);
  }

  // Ends the run on all ranks when a reward failed for too many responses of a step, or of a validation.
  void judge_rewards(const std::vector<RewardCounters>& counted) const {
    if (const auto problem = too_many_failed(counted, config_.env.max_failed_share)) fail_io(*problem);
  }

  nlohmann::json state() const {
    nlohmann::json state = {{"prompts", source_ ? source_->place().prompts : prompts_.state()},
                            {"next_sample_id", next_sample_id_}};
    if (last_accuracy_) state["validation"] = *last_accuracy_;
    state["validated_step"] = validated_step_;
    state["optimizer_steps"] = optimizer_steps_;
    return state;
  }

  // A checkpoint wants the policy whole: where ranks share it, in the memory of what generates, which is filled again.
  // Every rank knows the whole ledger; rank 0 writes it.
  void save() {
    const bool shared = session_.policy->options().sharding.weights;
    if (refit_ != nullptr && shared && config_.checkpointing.enabled) {
      if (keeps_cache(config_)) source_->set_aside();
      engine_.release_cache();
      refit_->release();
    }
    if (source_) source_->prepare_save();
    nlohmann::json all = state();
    std::map<std::string, std::string> files;
    if (source_ && session_.context.is_main()) save_groups(*source_, config_, all, files);
    session_.save(step_, all, checkpoint_metrics(), files);
  }

  // Whether this step was validated with an accuracy that ends the run.
  bool good_enough() const {
    const auto& limit = config_.grpo.stop_at_validation_threshold;
    return limit && validated_step_ == step_ && last_accuracy_ && *last_accuracy_ >= *limit;
  }

  // Of this step alone: what an earlier one's validation gave says nothing about these weights.
  std::map<std::string, double> checkpoint_metrics() const { return metrics_of_step(config_, measured_); }

  // One generation batch of `groups` prompts.
  std::vector<Sample> generate_batch(int64_t groups, RankShares& shares) {
    const GrpoConfig& g = config_.grpo;
    std::vector<PromptExample> prompts = prompts_.take(groups);
    RolloutRequest request;
    force(prompts, request);
    request.prompts = &prompts;
    request.samples_per_prompt = g.num_generations_per_prompt;
    request.first_sample_id = next_sample_id_;
    request.name = "train-" + std::to_string(next_sample_id_);
    request.sampling = engine_.sampling();
    request.reference = reference_stream_.get();
    if (early_gradients_ && !dumps(step_ + 1)) {
      request.on_group = [&](std::vector<Sample> group) {
        const int64_t of_first_step = config_.policy.train_global_batch_size / g.num_generations_per_prompt;
        if (group.front().group >= of_first_step) return;
        assign_advantages(group, g.num_generations_per_prompt, config_);
        reference_stream_->add_group(std::move(group));
      };
    }
    if (critic_ != nullptr && critic_->works_ahead())
      request.on_generated = [this](const Sample* samples, size_t count) { critic_->ahead(samples, count); };
    next_sample_id_ += static_cast<uint64_t>(groups * g.num_generations_per_prompt);
    std::vector<Sample> samples = collect(request, shares, step_rewards_);
    judge_rewards(step_rewards_);
    if (g.shuffle_rewards) shuffle_rewards(samples);
    return samples;
  }

  // The next step's groups, all of them of the present weights: the ledger with age 0, to which the ranks together, who
  // share one queue, are one engine.
  std::vector<Sample> generate_leased(RankShares& shares) {
    const int64_t groups = config_.grpo.num_prompts_per_step, size = config_.grpo.num_generations_per_prompt;
    const std::vector<LeasedRun> runs = ledger_->lease(/*engine=*/0, groups * size, weights_version());
    TRIREME_CHECK(static_cast<int64_t>(runs.size()) == groups,
                  "a step was leased another number of groups than it has");
    std::vector<Sample> batch = generate_batch(groups, shares);
    auto next = batch.begin();
    for (const LeasedRun& run : runs) {
      std::vector<Sample> group(std::make_move_iterator(next), std::make_move_iterator(next + size));
      next += size;
      for (Sample& sample : group) sample.group = run.span.group;
      TRIREME_CHECK(ledger_->complete(run.id, std::move(group)) == Completion::kTaken,
                    "an on-policy step has samples of other weights, or of other groups");
    }
    std::vector<Sample> samples;
    for (LedgerGroup& group : ledger_->take(ledger_->next_step())) {
      for (Sample& sample : group.samples) {
        sample.group = group.number - runs.front().span.group;
        samples.push_back(std::move(sample));
      }
    }
    return samples;
  }

  // One or, under dynamic sampling, several generation batches. Samples in data order, group by group.
  std::vector<Sample> generate(RankShares& shares, GeneratedTotals& generated, std::map<std::string, double>& values) {
    const GrpoConfig& g = config_.grpo;
    step_rewards_.clear();
    if (source_) return generate_overlapped(shares, generated, values);
    if (!g.use_dynamic_sampling) {
      std::vector<Sample> samples = generate_leased(shares);
      generated.add(samples, g.num_generations_per_prompt);
      return samples;
    }
    const int64_t groups = prompts_per_round(g);
    DynamicSampling kept(g.num_prompts_per_step, g.num_generations_per_prompt, g.dynamic_sampling_max_gen_batches);
    while (!kept.complete()) {
      kept.check_may_go_on();
      std::vector<Sample> batch = generate_batch(groups, shares);
      generated.add(batch, g.num_generations_per_prompt);
      kept.add(std::move(batch));
    }
    values["train/dynamic_sampling_num_gen_batches"] = static_cast<double>(kept.batches());
    if (kept.discarded_valid_samples() > 0)
      values["train/dynamic_sampling_num_discarded_valid_samples"] =
          static_cast<double>(kept.discarded_valid_samples());
    return kept.take();
  }

  std::vector<std::string> reward_names() const {
    std::vector<std::string> names;
    for (const RewardCounters& counter : rewards_.counters()) names.push_back(counter.name);
    if (session_.reward_model != nullptr) names.emplace_back(kRewardModel);
    return names;
  }

  // The control experiment: rewards that say nothing about the responses.
  void shuffle_rewards(std::vector<Sample>& samples) const {
    std::mt19937_64 generator(static_cast<uint64_t>(config_.grpo.seed) * 1000003 + next_sample_id_);
    for (size_t i = samples.size(); i > 1; --i) {
      Sample& other = samples[generator() % i];
      std::swap(samples[i - 1].raw_reward, other.raw_reward);
      std::swap(samples[i - 1].dropped, other.dropped);  // a reward that failed goes with its number
    }
  }

  bool dumps(int64_t step) const {
    const std::vector<int64_t>& steps = config_.logger.dump_steps;
    return std::find(steps.begin(), steps.end(), step) != steps.end();
  }

  // Where this rank's first optimizer step is written to be computed again; empty: nowhere. One file a replica: its
  // ranks train the same, and the last stage has the results.
  std::string dump_path(int64_t step) const {
    if (!dumps(step) || !session_.context.has_results()) return "";
    std::filesystem::create_directories(config_.logger.log_dir);
    const ParallelContext& ranks = session_.context;
    const std::string of_rank = ranks.world_size() > 1 ? "_rank_" + std::to_string(ranks.rank()) : "";
    return (std::filesystem::path(config_.logger.log_dir) /
            ("dump_step_" + std::to_string(step) + of_rank + ".safetensors"))
        .string();
  }

  // PPO: values of all states and, where rewards or masks need them, log-probs of all tokens; then rewards, advantages
  // and returns of tokens, the same on all ranks. A critic on ranks of its own computes beside the log-probs' passes.
  void assign_of_tokens(std::vector<Sample>& samples, StepReport& report) {
    const double kl = reward_kl_penalty(config_);
    {
      const PhaseTimer::Scope passes = session_.timer.enter(Phase::kLogprobs);
      session_.context.set_phase("values");
      if (critic_ != nullptr) {
        const Stopwatch watch;
        if (critic_trainer_ != nullptr)
          report.values["performance/values_under_generation"] = share_with_values(samples);
        if (session_.critic != nullptr) make_room(*session_.critic->model, session_.critic->config, samples);
        critic_->begin_values(samples, report.step);
        report.values["timing/train/value_inference"] = watch.seconds();
      }
      const auto fill = [&](std::vector<Sample>& of, std::vector<float> Sample::*numbers, const Model& model,
                            const LogprobOptions& options) {
        make_room(model, config_, of);
        fill_token_numbers(
            of, numbers, model, logprob_micro_batches(config_), session_.context,
            [&](const at::Tensor& hidden, const MicroBatch& batch) {
              return response_logprobs(model, hidden, batch, options);
            },
            collector_.on_progress);
      };
      const auto threshold = config_.grpo.seq_logprob_error_threshold;
      if (critic_ != nullptr && (!row_exact_ || threshold || kl != 0)) {  // advantages follow from them
        const auto unknown = [&](const Sample& sample) { return !trainer_->knows_previous(sample, weights_version()); };
        with_some(samples, unknown, [&](std::vector<Sample>& some) {
          fill(some, &Sample::previous_logprobs, *session_.policy, sampling_distribution(config_));
        });
        if (threshold) mask_mismatched_samples(samples, *threshold);
      }
      // The loss's, too, where values are computed elsewhere meanwhile; unless the policy's weights, which its training
      // gives back first, are whole until then.
      const bool of_loss = session_.critic_link != nullptr && reference_ != nullptr &&
                           report.step > critic_only_steps(config_) && !session_.policy->options().sharding.weights;
      if (kl != 0 || of_loss) fill(samples, &Sample::reference_logprobs, *reference_, reference_distribution(config_));
      if (critic_ != nullptr) {
        const Stopwatch watch;
        critic_->finish_values(samples);
        report.values["timing/train/value_inference"] += watch.seconds();
      }
    }
    for (const auto& [name, value] :
         assign_token_advantages(samples, config_.ppo.adv_estimator, kl, config_.loss_fn.reference_policy_kl_type))
      report.values["train/" + name] = value;
  }

  // The critic's optimizer steps. It shares nothing with the actor while they train, so that all of its passes before
  // all of the actor's, or beside them, are what taking turns pass by pass would give.
  void begin_critic(const std::vector<Sample>& samples, StepReport& report) {
    if (critic_ == nullptr) return;
    const PhaseTimer::Scope training = session_.timer.enter(Phase::kTraining);
    session_.context.set_phase("value training");
    critic_->begin_training(samples, passes_per_rollout(config_), report.step);
    if (critic_trainer_ != nullptr) describe_critic(report);
  }
  // Of a critic on ranks of its own: waits for what it has not finished beside the actor.
  void finish_critic(StepReport& report) {
    if (session_.critic_link == nullptr) return;
    const PhaseTimer::Scope training = session_.timer.enter(Phase::kTraining);
    session_.context.set_phase("value training");
    describe_critic(report);
  }
  void describe_critic(StepReport& report) {
    const CriticTrained trained = critic_->finish_training();
    for (const auto& [name, value] : trained.metrics) report.values["critic/" + name] = value;
    report.values["timing/train/value_training"] = trained.seconds;
  }

  // Rewards to advantages, then the optimizer steps; the engine has the new weights afterwards.
  void train(std::vector<Sample>& samples, StepReport& report) {
    session_.reporting.phase("training", report.step);
    session_.context.set_phase("training");
    session_.cause_fault(report.step);
    if (refit_ != nullptr) refit_->release();
    session_.start_waits();
    begin_critic(samples, report);
    if (report.step <= critic_only_steps(config_)) {  // the actor's turn has not come
      finish_critic(report);
      session_.describe_waits(report.values);
      end_training(report.step);
      fill();
      return;
    }
    const TrainResult trained =
        trainer_->train(samples, dump_path(report.step), weights_version(), passes_per_rollout(config_));
    finish_critic(report);
    session_.describe_waits(report.values);
    {
      const PhaseTimer::Scope refit = session_.timer.enter(Phase::kRefit);
      end_training(report.step);
    }
    fill();  // now, in this step's time: the next rollout may be a validation's
    report.values["performance/generation_group_ranks"] =
        static_cast<double>(session_.context.generation().replica->size());
    report.values["performance/refit_bytes"] = refit_ != nullptr ? static_cast<double>(refit_->most_bytes()) : 0;
    optimizer_steps_ += trained.optimizer_steps;
    describe_training(trained, report.values);
    report.values["train/optimizer_steps"] = static_cast<double>(optimizer_steps_);
    // Where "train/lr" was read.
    report.values["train/lr_schedule_steps"] = static_cast<double>(trainer_->passes_done() - 1);
    if (early_gradients_) report.values["performance/gradients_under_generation"] = share_trained_early(samples);
  }

  // Returns true when the run should end because a metric reached its threshold. A step lasts from the end of the one
  // before, saving included, to the end of training; validation is no part of it, as in the published tables.
  bool one_step() {
    const GrpoConfig& g = config_.grpo;
    StepReport report;
    report.step = step_ + 1;
    session_.begin_step(report.step);
    session_.reporting.phase("generation", report.step);
    RankShares shares;
    GeneratedTotals generated;
    std::vector<Sample> samples = generate(shares, generated, report.values);
    describe_ages(samples, weights_version(), report.values);
    report.values["train/weight_version"] = static_cast<double>(weights_version());
    if (reference_ != nullptr) report.values["performance/references_under_generation"] = share_with_reference(samples);
    if (session_.reward_model) report.values["performance/scores_under_generation"] = share_with_score(samples);
    {
      const PhaseTimer::Scope rewards = session_.timer.enter(Phase::kRewards);
      if (!ppo()) assign_advantages(samples, g.num_generations_per_prompt, config_);
      if (ppo()) assign_rewards(samples, config_);
    }
    describe_rollout(generated, samples, reward_names(), g.use_dynamic_sampling, report.values);
    if (ppo()) assign_of_tokens(samples, report);
    describe_shares(shares, report.values);
    train(samples, report);
    report.values["train/skipped_long_prompts"] =  // since the start
        static_cast<double>(source_ ? source_->place().skipped_long : prompts_.skipped_long());
    for (const auto& [name, failed] : reward_failures_)
      report.values["train/reward_failures/" + name] = static_cast<double>(failed);
    ++step_;
    measured_ = report.values;
    report.tokens = static_cast<double>(generated.tokens);
    report.generated_tokens = static_cast<double>(generated.response_tokens);
    report.trained_tokens = report.values["train/total_num_tokens"];
    report.samples = static_cast<double>(samples.size());
    report.phases = session_.timer.finish_step();
    if (source_) report.values.emplace("timing/train/exposed_generation", report.phases.of(Phase::kGeneration));

    if (g.val_period > 0 && step_ >= g.val_start_at && step_ % g.val_period == 0) {
      for (const auto& [name, value] : validate()) report.values[name] = value;
    }
    session_.reporting.step(report);
    session_.timer.start_step();
    if (session_.reporting.wants_rollouts(step_)) {
      session_.reporting.rollouts(
          step_, rollout_lines(samples, g.num_generations_per_prompt, config_.logger.rollouts.max_samples,
                               reward_names(), *session_.tokenizer));
    }
    const bool reached = good_enough();
    // After the step's record: a run killed in between repeats the step; the other way round it would lack the record.
    const bool last = step_ == g.max_num_steps;
    if (config_.checkpointing.save_period > 0 && step_ % config_.checkpointing.save_period == 0 && !last && !reached)
      save();
    return reached;
  }

  // Returns what came, by its names in the log.
  std::map<std::string, double> validate() {
    validated_rewards_.clear();
    if (source_) source_->make_way();
    const ValidationResult result = validation_->validate(step_);
    if (generates_elsewhere(config_)) engine_.release_cache();  // this rank generates nothing else
    judge_rewards(validated_rewards_);
    last_accuracy_ = result.accuracy;
    validated_step_ = step_;
    const std::map<std::string, double> values = result.values(config_.grpo.val_num_generations_per_prompt);
    for (const auto& [name, value] : values) measured_[name] = value;
    return values;
  }

  Session session_;
  const Config& config_;
  Datasets datasets_;
  PromptStream prompts_;
  RewardPool rewards_;
  const std::unique_ptr<Refit> refit_;  // null: generation has training's layout
  const bool split_;                    // the model over ranks, or what its passes read or compute
  const std::shared_ptr<const DevicePartition> partition_;
  std::optional<RolloutLengths> forced_lengths_;  // for measurements
  Engine engine_;
  RolloutCollector collector_;
  std::unique_ptr<Model> reference_;
  std::unique_ptr<PolicyTrainer> trainer_;
  std::unique_ptr<Critic> critic_;                     // null: the algorithm has none
  CriticTrainer* critic_trainer_ = nullptr;            // critic_'s on these ranks; null: it is on others
  std::unique_ptr<GrpoValidation> validation_;         // null: nothing to validate with
  std::unique_ptr<ReferenceStream> reference_stream_;  // or null; its thread may train
  std::unique_ptr<RolloutSource> source_;              // of steps that overlap; null: strictly on-policy
  std::unique_ptr<Ledger> ledger_;                     // of a strictly on-policy run without dynamic sampling
  bool row_exact_ = true;
  bool early_gradients_ = false;
  int64_t step_ = 0;
  int64_t trained_steps_ = 0;    // one ahead of step_ while a trained step is told
  int64_t optimizer_steps_ = 0;  // of the whole run
  uint64_t next_sample_id_ = 0;
  std::optional<double> last_accuracy_;  // of the last validation
  int64_t validated_step_ = -1;
  std::map<std::string, double> measured_;          // of step_, by their names in the log; empty after a resume
  std::map<std::string, int64_t> reward_failures_;  // by reward, of all ranks since the start
  std::vector<RewardCounters> step_rewards_, validated_rewards_;  // of all ranks in this step, in the last validation
};

}  // namespace

TrainSummary run_grpo(const Config& config, const TrainOptions& options) { return GrpoLoop(config, options).run(); }

}  // namespace trireme
