#include "trainer/bench/step_bench.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "trainer/algorithms/carry_over.h"
#include "trainer/algorithms/critic.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/algorithms/rollout_metrics.h"
#include "trainer/algorithms/rollouts.h"
#include "trainer/algorithms/sample_advantages.h"
#include "trainer/bench/work.h"
#include "trainer/parallel/device.h"
#include "trainer/telemetry/phases.h"

namespace trireme::bench {
namespace {

// Of so many steps, whose responses may be alive at once.
RolloutLengths repeated(RolloutLengths lengths, int64_t times) {
  const RolloutLengths once = lengths;
  for (int64_t i = 1; i < times; ++i) {
    lengths.prompts.insert(lengths.prompts.end(), once.prompts.begin(), once.prompts.end());
    lengths.outputs.insert(lengths.outputs.end(), once.outputs.begin(), once.outputs.end());
  }
  return lengths;
}

// One measured step.
struct StepTimes {
  double seconds = 0;
  std::map<std::string, double> phases;  // exposed seconds of this rank; they add up to `seconds`
  TrainResult trained;
  RankShares shares;
  std::map<std::string, double> ages;    // with carry-over
  std::map<std::string, double> critic;  // its seconds within the phases, what it measured; names of the log
};

class StepBench final {
 public:
  StepBench(const StepBenchOptions& options, ParallelContext& context)
      : options_(options),
        context_(context),
        target_(resolve(options.common)),
        lengths_(step_lengths(options)),
        config_(step_config(options, target_, lengths_, context.world_size())),
        critic_config_(critic_config(config_)),
        ceilings_(measure_ceilings(target_.device, target_.dtype)) {
    ModelOptions trainable = target_.model_options(/*trainable=*/true, context);
    trainable.gradient_dtype = parse_dtype(options.gradient_dtype);
    policy_ = make_random_model(target_.config, trainable, options.common.seed);
    if (options.reference) {
      reference_ = std::make_unique<Model>(target_.config, target_.model_options(/*trainable=*/false, context));
      reference_->copy_parameters_from(*policy_);
    }
    optimizer_ = make_optimizer(*policy_);
    if (options.critic) {
      critic_model_ = make_random_model(target_.config.with_value_head(), trainable, options.common.seed + 1);
      critic_optimizer_ = make_optimizer(*critic_model_);
      critic_ = std::make_unique<CriticTrainer>(critic_config_, *critic_model_, *critic_optimizer_, context);
    }
    const bool row_exact =
        products_are_exact(target_.config, policy_->local(), target_.dtype, target_.device, options.train_tokens);
    row_exact_ = context.world().all_reduce_max(row_exact ? 0 : 1) == 0;
    trainer_ =
        std::make_unique<PolicyTrainer>(config_, *policy_, reference_.get(), *optimizer_, context, timer_, row_exact_);
    engine_settings_ =
        engine_options(options.generation, repeated(lengths_, 1 + options.carry_over), context.data_parallel().size());
    engine_settings_.lanes = options.common.pp;
    const bool split = context.holders().size() > 1 || context.layout().cp > 1;
    if (split && options.early_gradients) fail_user("--early-gradients needs a model that is not split (--tp 1)");
    const bool beside = options.carry_over == 0;  // the last responses leave room for something
    if (!split && beside)
      engine_settings_.partition =
          partition_for(config_, target_.device, options.reference || options.early_gradients || options.critic);
    if (options.early_gradients && !row_exact_)
      fail_user("--early-gradients needs linear layers that keep row bits; see the log");
    if (!split && beside) make_stream();
    if (options.early_gradients) {
      if (reference_stream_ == nullptr)
        fail_user(
            "--early-gradients needs a part of the device of its own: --background-sms above 0 on a CPU, and a "
            "GPU that can be divided");
      reference_stream_->train = [this](const std::vector<Sample>& samples) { trainer_->train_early(samples); };
    }
    engine_ = std::make_unique<Engine>(*policy_, nullptr, engine_settings_,
                                       sampling_options(options.generation, options.common.seed));
    if (!options.keep_cache) trainer_->make_room = [this] { engine_->release_cache(); };
    if (critic_) critic_->make_room = trainer_->make_room;
    for (std::vector<int32_t>& ids : random_prompts(lengths_, target_.config.vocab_size, options.common.seed)) {
      prompts_.emplace_back();
      prompts_.back().prompt = std::move(ids);
    }
    collector_ =
        std::make_unique<RolloutCollector>(*engine_, nullptr, nullptr, context, timer_, options.collective_timeout_s);
    if (options.carry_over > 0) make_carry_over();
  }

  nlohmann::json run(std::ostream& out) {
    // Under carry-over a step is what the ones before left to it: two lead in.
    if (carry_) {
      one_step(lengths_);
      one_step(lengths_);
    } else {
      one_step(staircase(lengths_));
    }
    take_peak_memory_bytes(target_.device);
    std::vector<StepTimes> steps;
    std::vector<double> seconds;
    int64_t mismatched = 0;
    for (int64_t r = 0; r < options_.common.repeats; ++r) {
      steps.push_back(one_step(lengths_));
      seconds.push_back(steps.back().seconds);
      mismatched += steps.back().trained.mismatched_tokens;
      compared_tokens_ += steps.back().trained.compared_tokens;
      if (context_.is_main()) print_step(r + 1, steps.back(), out);
    }
    const double middle = median(seconds);
    const StepTimes& typical = *std::min_element(steps.begin(), steps.end(), [&](const auto& a, const auto& b) {
      return std::abs(a.seconds - middle) < std::abs(b.seconds - middle);
    });
    return report(seconds, middle, typical, mismatched, out);
  }

 private:
  std::unique_ptr<DistributedAdamW> make_optimizer(Model& model) const {
    const AdamSettings adam = adam_settings(config_);
    AdamWOptions options;
    options.beta1 = adam.beta1;
    options.beta2 = adam.beta2;
    options.eps = adam.eps;
    options.reduce_in_fp32 = model.options().gradient_dtype == at::kFloat;
    return std::make_unique<DistributedAdamW>(model, context_.data_parallel(), options,
                                              context_.expert_data_parallel(model.options().split));
  }

  // Of what there is to compute beside the last responses.
  void make_stream() {
    std::vector<TokenScorer> scorers;
    if (reference_) scorers.push_back(reference_scorer(config_, *reference_));
    if (critic_) scorers.push_back(critic_->scorer());
    if (scorers.empty() && !options_.early_gradients) return;
    reference_stream_ = make_reference_stream(config_, std::move(scorers), target_.device, engine_settings_.partition,
                                              options_.on_stuck);
  }

  void make_carry_over() {
    CarryOverOptions carry;
    carry.ledger.groups_per_step = config_.grpo.num_prompts_per_step;
    carry.ledger.samples_per_group = lengths_.samples_per_prompt();
    carry.ledger.max_age = options_.carry_over;
    carry.sampling = engine_->sampling();
    carry.keep_cache = options_.keep_cache;
    carry.ends_known = !options_.generation.unknown_ends;
    carry.drawn_rewards = options_.common.seed;
    carry.timeout_s = options_.collective_timeout_s;
    carry.prompt = [this](int64_t group, bool) {
      CarriedPrompt prompt{prompts_[static_cast<size_t>(group) % prompts_.size()], {}};
      for (int64_t i = 0; i < lengths_.samples_per_prompt(); ++i)
        prompt.forced_lengths.push_back(lengths_.output_of(group, i));
      return prompt;
    };
    carry_ = std::make_unique<CarryOver>(*engine_, nullptr, nullptr, context_, timer_, std::move(carry));
  }

  // As it ends, so that a run that is cut short has said what it measured.
  void print_step(int64_t number, const StepTimes& step, std::ostream& out) const {
    out << "step " << number << " of " << options_.common.repeats << ": " << format_fixed(step.seconds, 3) << " s";
    for (const auto& [phase, seconds] : step.phases)
      if (seconds > 0) out << ", " << phase << ' ' << format_fixed(seconds, 3);
    out << std::endl;
  }

  std::vector<Sample> generate_carried(StepTimes& times) {
    const int64_t recomputed = engine_->stats().recomputed_rows;
    CarriedStep step = carry_->collect(times.shares);
    std::vector<Sample> samples;
    for (size_t g = 0; g < step.groups.size(); ++g) {
      for (Sample& sample : step.groups[g].samples) {
        sample.group = static_cast<int64_t>(g);
        samples.push_back(std::move(sample));
      }
    }
    describe_ages(samples, steps_done_, times.ages);
    times.ages["train/recomputed_rows"] =
        static_cast<double>(sum_of_replicas(context_, engine_->stats().recomputed_rows - recomputed));
    times.ages["performance/ledger_samples_carried"] = static_cast<double>(carry_->ledger().counts().leased_samples);
    return samples;
  }

  StepTimes one_step(const RolloutLengths& lengths) {
    StepTimes times;
    synchronize(target_.device);
    context_.set_phase("benchmark");
    context_.world().barrier();
    timer_.start_step();
    std::vector<Sample> samples;
    {
      const auto scope = timer_.enter(Phase::kGeneration);
      samples = carry_ ? generate_carried(times) : generate(lengths, times.shares);
      synchronize(target_.device);
    }
    if (critic_) {
      assign_of_tokens(samples, times);
      train_critic(samples, times);
    } else {
      const auto scope = timer_.enter(Phase::kRewards);
      assign_advantages(samples, lengths.samples_per_prompt(), config_);
    }
    {
      const auto scope = timer_.enter(Phase::kTraining);
      early_gradients_ =
          std::count_if(samples.begin(), samples.end(), [](const Sample& sample) { return sample.trained_early; });
      early_references_ = std::count_if(samples.begin(), samples.end(),
                                        [](const Sample& sample) { return !sample.reference_logprobs.empty(); });
      times.trained = trainer_->train(samples, {}, steps_done_, passes_per_rollout(config_));
      synchronize(target_.device);
    }
    {
      const auto scope = timer_.enter(Phase::kRefit);
      engine_->weights_changed(steps_done_ + 1, options_.keep_cache ? KeptCache::kKept : KeptCache::kNothing);
      if (carry_) carry_->trained(steps_done_ + 1);
    }
    context_.world().barrier();
    const PhaseTimes measured = timer_.finish_step();
    times.seconds = measured.total_s;
    for (const Phase phase : all_phases()) times.phases[to_string(phase)] = measured.of(phase);
    next_sample_id_ += static_cast<uint64_t>(lengths.samples());
    ++steps_done_;
    return times;
  }

  // Values of all states, then rewards, advantages and returns of tokens.
  void assign_of_tokens(std::vector<Sample>& samples, StepTimes& times) {
    {
      const auto scope = timer_.enter(Phase::kLogprobs);
      const Stopwatch watch;
      times.critic["performance/values_under_generation"] = share_with_values(samples);
      critic_->fill_values(samples);
      synchronize(target_.device);
      times.critic["timing/train/value_inference"] = watch.seconds();
    }
    const auto scope = timer_.enter(Phase::kRewards);
    assign_rewards(samples, config_);
    assign_token_advantages(samples, config_.ppo.adv_estimator, reward_kl_penalty(config_),
                            config_.loss_fn.reference_policy_kl_type);
  }

  // The critic's optimizer steps, which come before the actor's.
  void train_critic(const std::vector<Sample>& samples, StepTimes& times) {
    const auto scope = timer_.enter(Phase::kTraining);
    const Stopwatch watch;
    for (const auto& [name, value] : critic_->train(samples, passes_per_rollout(config_)))
      times.critic["critic/" + name] = value;
    synchronize(target_.device);
    times.critic["timing/train/value_training"] = watch.seconds();
  }

  // As the trainer generates, but for prompts, lengths and rewards.
  std::vector<Sample> generate(const RolloutLengths& lengths, RankShares& shares) {
    RolloutRequest request;
    request.prompts = &prompts_;
    request.samples_per_prompt = lengths.samples_per_prompt();
    request.first_sample_id = next_sample_id_;
    request.name = "bench-" + std::to_string(steps_done_);
    request.sampling = engine_->sampling();
    request.reference = reference_stream_.get();
    request.forced_lengths = &lengths;
    request.ends_known = !options_.generation.unknown_ends;
    request.drawn_rewards = options_.common.seed;
    if (options_.early_gradients) {
      request.on_group = [this](std::vector<Sample> group) {
        const auto size = static_cast<int64_t>(group.size());
        if ((group.front().group + 1) * size > config_.policy.train_global_batch_size) return;
        assign_advantages(group, size, config_);
        reference_stream_->add_group(std::move(group));
      };
    }
    return collector_->collect(request, shares);
  }

  // Of a rollout that so many copies of what is read share.
  RolloutWork work_of(int64_t copies) const {
    return rollout_work(target_.config, lengths_.prompt_of_each_sample(), lengths_.outputs, target_.element_bytes,
                        engine_settings_.max_sequences * context_.data_parallel().size(), copies);
  }

  // At the ceilings, on this many devices: generation reads weights for each of the longest response's tokens and an
  // even share of the contexts; the forwards of reference and critic, and forward and backward of actor and critic,
  // have an even share of the operations. Ranks that share experts read a share of those that the samples of all of
  // them choose.
  std::map<std::string, double> floors() const {
    const auto ranks = static_cast<double>(context_.world_size()), tp = static_cast<double>(context_.layout().tp);
    const RolloutWork work = work_of(context_.data_parallel().size());
    double experts = work.expert_bytes / tp;
    if (const int64_t ep = context_.layout().ep; ep > 1) experts = work_of(context_.copies()).expert_bytes / real(ep);
    const std::vector<Piece> rows = training_pieces(lengths_.prompts, lengths_.outputs, options_.share_prompts);
    const int64_t scored = lengths_.output_tokens();
    const double flops = ranks * ceilings_.flops_per_second;
    double logprobs = options_.reference ? forward_flops(target_.config, rows, scored) : 0;
    double training = training_flops(target_.config, rows, scored);
    if (critic_) {
      logprobs += forward_flops(critic_model_->config(), rows, scored);
      training += training_flops(critic_model_->config(), rows, scored);
    }
    const double weights = (work.weight_bytes - work.expert_bytes) / tp + experts;
    return {{"generation", (weights + work.context_bytes / ranks) / ceilings_.bytes_per_second()},
            {"logprobs", logprobs / flops},
            {"training", training / flops}};
  }

  nlohmann::json report(const std::vector<double>& seconds, double middle, const StepTimes& typical, int64_t mismatched,
                        std::ostream& out) {
    Communicator& group = context_.world();
    std::map<std::string, double> slowest;
    for (const Phase phase : all_phases())
      slowest[to_string(phase)] = group.all_reduce_max(typical.phases.at(to_string(phase)));
    const int64_t peak =
        static_cast<int64_t>(group.all_reduce_max(static_cast<double>(take_peak_memory_bytes(target_.device))));
    const std::map<std::string, double> floor = floors();
    double floor_total = 0;
    for (const auto& [name, value] : floor) floor_total += value;
    const auto samples = static_cast<double>(lengths_.samples());
    nlohmann::json json = report_header("step", options_.common, target_);
    json.update(
        {{"ranks", group.size()},
         {"lengths", lengths_.name},
         {"samples", lengths_.samples()},
         {"answer_tokens", lengths_.output_tokens()},
         {"global_batch_size", config_.policy.train_global_batch_size},
         {"optimizer_steps", typical.trained.optimizer_steps},
         {"reference", options_.reference},
         {"critic", options_.critic},
         {"of_critic", typical.critic},
         {"background_sms", reference_stream_ == nullptr            ? 0
                            : engine_settings_.partition == nullptr ? -1
                                                                    : engine_settings_.partition->background_sms},
         {"references_under_generation", early_references_},
         {"carry_over", options_.carry_over},
         {"keep_cache", options_.keep_cache},
         {"ratio_from", options_.ratio_from},
         {"ages", typical.ages},
         {"gradients_under_generation", early_gradients_},
         {"recomputed_layers", policy_->recompute().whole_layers},
         {"cheaply_recomputed_layers", policy_->recompute().cheap_layers},
         {"share_prompts", options_.share_prompts},
         {"gradient_dtype", options_.gradient_dtype},
         {"linear_rows_exact", row_exact_},
         {"micro_batch_tokens", config_.policy.sequence_packing.train_mb_tokens},
         {"seconds", middle},
         {"seconds_of_repeats", seconds},
         {"phases", typical.phases},
         {"phases_of_slowest_rank", slowest},
         {"generation_idle_seconds_of_ranks", typical.shares.idle_seconds},
         {"samples_of_ranks", typical.shares.samples},
         {"ends_known", !options_.generation.unknown_ends},
         {"floor_seconds", floor_total},
         {"floors", floor},
         {"samples_per_second", samples / middle},
         {"samples_per_second_per_device", samples / middle / static_cast<double>(group.size())},
         {"mismatched_tokens", mismatched},
         {"compared_tokens", compared_tokens_},
         {"compared_optimizer_steps", typical.trained.compared_optimizer_steps},
         {"grad_norm", typical.trained.metrics.at("grad_norm")},
         {"cache_rows", engine_settings_.cache_rows},
         {"peak_memory_bytes", peak},
         {"copy_bytes_per_second", ceilings_.copy_bytes_per_second},
         {"read_bytes_per_second", ceilings_.read_bytes_per_second},
         {"matmul_flops_per_second", ceilings_.flops_per_second}});
    if (!context_.is_main()) return json;
    print(json, typical, out);
    write_report(options_.common, json);
    return json;
  }

  // What `json` and the step say, for people.
  void print(const nlohmann::json& json, const StepTimes& typical, std::ostream& out) const {
    const auto number = [&json](const char* key) { return json.at(key).get<double>(); };
    const int64_t ranks = json.at("ranks"), peak = json.at("peak_memory_bytes");
    const double middle = number("seconds");
    const nlohmann::json &floor = json.at("floors"), &slowest = json.at("phases_of_slowest_rank");
    Table table({"step " + options_.common.shape + ", " + std::to_string(ranks) + " ranks", "seconds", "slowest rank",
                 "floor"});
    for (const Phase phase : all_phases()) {
      const std::string name = to_string(phase);
      table.add({"  " + name, format_fixed(typical.phases.at(name), 3), format_fixed(slowest.at(name).get<double>(), 3),
                 floor.contains(name) ? format_fixed(floor.at(name).get<double>(), 3) : "-"});
    }
    table.add({"step (median of " + std::to_string(json.at("seconds_of_repeats").size()) + ")", format_fixed(middle, 3),
               format_fixed(middle, 3), format_fixed(number("floor_seconds"), 3)});
    table.print(out);
    if (reference_stream_ != nullptr && reference_)
      out << "reference log-probs computed under generation: of " << early_references_ << " samples\n";
    if (carry_) {
      const auto age = [&](const char* name) { return format_fixed(typical.ages.at(name), 0); };
      out << "older tokens: " << age("train/stale_tokens")
          << ", samples over an update: " << age("train/spanning_samples")
          << ", rows computed again: " << age("train/recomputed_rows")
          << ", carried on: " << age("performance/ledger_samples_carried") << " samples\n";
    }
    if (options_.early_gradients) out << "gradients computed under generation: of " << early_gradients_ << " samples\n";
    if (critic_) {
      out << "of the critic: values " << format_fixed(typical.critic.at("timing/train/value_inference"), 3)
          << " s (in logprobs; " << format_fixed(100 * typical.critic.at("performance/values_under_generation"), 0)
          << " % of the samples had theirs from under generation), training "
          << format_fixed(typical.critic.at("timing/train/value_training"), 3) << " s (in training)\n";
    }
    if (ranks > 1) {
      const auto [least, most] =
          std::minmax_element(typical.shares.idle_seconds.begin(), typical.shares.idle_seconds.end());
      out << "idle after its last sample: the fastest rank " << format_fixed(*most, 3) << " s, the slowest "
          << format_fixed(*least, 3) << " s\n";
    }
    out << "samples/s: " << format_fixed(number("samples_per_second"), 2) << ", of a device "
        << format_fixed(number("samples_per_second_per_device"), 2) << "\n"
        << "tokens whose log-prob bits differ between sampler and loss: " << json.at("mismatched_tokens") << " of "
        << compared_tokens_ << " (of the first " << typical.trained.compared_optimizer_steps << " of "
        << typical.trained.optimizer_steps
        << " optimizer steps a rollout, whose weights had sampled them; of all repeats)\n";
    if (peak > 0) out << "peak memory: " << format_bytes(static_cast<uint64_t>(peak)) << "\n";
  }

  const StepBenchOptions& options_;
  ParallelContext& context_;
  const Target target_;
  const RolloutLengths lengths_;
  const Config config_;
  const Config critic_config_;
  const Ceilings ceilings_;
  EngineOptions engine_settings_;
  std::unique_ptr<Model> policy_, reference_;
  std::unique_ptr<DistributedAdamW> optimizer_;
  std::unique_ptr<PolicyTrainer> trainer_;
  std::unique_ptr<Model> critic_model_;  // null, as the next two: GRPO
  std::unique_ptr<DistributedAdamW> critic_optimizer_;
  std::unique_ptr<CriticTrainer> critic_;
  std::unique_ptr<ReferenceStream> reference_stream_;  // or null; its thread may train
  std::unique_ptr<Engine> engine_;
  PhaseTimer timer_;
  std::unique_ptr<RolloutCollector> collector_;
  std::unique_ptr<CarryOver> carry_;  // null: strictly on-policy
  std::vector<PromptExample> prompts_;
  uint64_t next_sample_id_ = 0;
  int64_t steps_done_ = 0;
  int64_t compared_tokens_ = 0;   // of all repeats
  int64_t early_references_ = 0;  // of the last step, all ranks
  int64_t early_gradients_ = 0;
  bool row_exact_ = true;  // else a pass for the previous log-probs runs
};

}  // namespace

RolloutLengths step_lengths(const StepBenchOptions& options) {
  if (!options.lengths.empty()) return load_lengths(options.lengths);
  if (options.prompts < 1 || options.samples < 1 || options.response_tokens < 1 || options.prompt_tokens < 1)
    fail_user("--prompts, --samples, --response-tokens and --prompt-tokens must be positive");
  RolloutLengths lengths;
  lengths.name = std::to_string(options.prompts) + "x" + std::to_string(options.samples) + " responses of " +
                 std::to_string(options.response_tokens) + " tokens";
  lengths.prompts.assign(static_cast<size_t>(options.prompts), options.prompt_tokens);
  lengths.outputs.assign(static_cast<size_t>(options.prompts * options.samples), options.response_tokens);
  return lengths;
}

Config step_config(const StepBenchOptions& options, const Target& target, const RolloutLengths& lengths,
                   int64_t ranks) {
  if (lengths.longest() > target.config.positions()) {
    fail_user("the longest sample has " + std::to_string(lengths.longest()) + " tokens, but " + options.common.shape +
              " knows only " + std::to_string(target.config.positions()) + " positions");
  }
  if (lengths.samples_per_prompt() < 2)
    fail_user("a step needs at least 2 responses for each prompt: a group of one has no advantage");
  if (options.optimizer_steps < 1 || lengths.samples() % options.optimizer_steps != 0) {
    fail_user("--optimizer-steps " + std::to_string(options.optimizer_steps) + " does not divide the " +
              std::to_string(lengths.samples()) + " samples");
  }
  if (options.critic) {
    if (options.early_gradients) fail_user("--critic does not go with --early-gradients, which PPO does not have");
  }
  Config config;
  config.grpo.num_prompts_per_step = static_cast<int64_t>(lengths.prompts.size());
  config.grpo.num_generations_per_prompt = lengths.samples_per_prompt();
  config.grpo.val_period = 0;
  config.grpo.seed = static_cast<int64_t>(options.common.seed);
  config.loss_fn.reference_policy_kl_penalty = options.reference ? 0.01 : 0.0;
  PolicyConfig& policy = config.policy;
  policy.train_global_batch_size = lengths.samples() / options.optimizer_steps;
  policy.train_micro_batch_size = 1;
  policy.max_total_sequence_length = lengths.longest();
  policy.precision = dtype_name(target.dtype);
  policy.activation_checkpointing = options.checkpoint_activations;
  policy.recompute_layers = options.recompute_layers;
  policy.sequence_packing.enabled = true;
  policy.sequence_packing.share_prompts = options.share_prompts;
  policy.sequence_packing.train_mb_tokens = std::max(options.train_tokens, lengths.longest());
  policy.sequence_packing.logprob_mb_tokens = policy.sequence_packing.train_mb_tokens;
  policy.optimizer.kwargs.lr = 1e-6;
  policy.generation.temperature = options.generation.temperature;
  policy.generation.max_running_samples = options.generation.max_sequences;
  policy.generation.prefill_chunk_tokens = options.generation.prefill_chunk_tokens;
  policy.generation.background_sms = options.background_sms;
  config.grpo.early_gradients = options.early_gradients;
  if (options.carry_over > 0) {
    AsyncGrpoConfig& async = config.grpo.async_grpo;
    async.enabled = async.in_flight_weight_updates = true;
    async.max_trajectory_age_steps = options.carry_over;
    async.recompute_kv_cache_after_weight_updates = !options.keep_cache;
    async.ratio_from = options.ratio_from == "generation" ? RatioFrom::kGeneration : RatioFrom::kTraining;
    config.loss_fn.use_importance_sampling_correction = true;
  }
  config.cluster.processes = ranks;
  policy.moe_combine_blocks = options.common.combine_blocks;
  if (options.common.devices_of_replica() > 1 || options.common.ep > 1) {
    policy.megatron_cfg.enabled = true;
    policy.megatron_cfg.tensor_model_parallel_size = options.common.tp;
    policy.megatron_cfg.expert_model_parallel_size = options.common.ep;
    policy.megatron_cfg.context_parallel_size = options.common.cp;
    policy.megatron_cfg.pipeline_model_parallel_size = options.common.pp;
    const StageOptions& stages = options.common.stages;
    policy.megatron_cfg.virtual_pipeline_model_parallel_size = stages.virtual_stages;
    if (stages.first_layers > 0) policy.megatron_cfg.num_layers_in_first_pipeline_stage = stages.first_layers;
    if (stages.last_layers > 0) policy.megatron_cfg.num_layers_in_last_pipeline_stage = stages.last_layers;
  }
  config.cluster.collective_timeout_s = options.collective_timeout_s;
  if (options.critic) {
    config.algorithm = "ppo";
    static_cast<RolloutConfig&>(config.ppo) = config.grpo;
    static_cast<AsyncGrpoConfig&>(config.ppo.async_ppo) = config.grpo.async_grpo;
    config.ppo.ppo_epochs = 1;  // as many optimizer steps as GRPO's, beside which it is read
    static_cast<ModelTrainingConfig&>(config.value) = policy;
  }
  derive_defaults(config);
  const std::vector<std::string> problems = find_problems(config);
  if (!problems.empty()) fail_user("bench step: " + join(problems, "; "));
  return config;
}

nlohmann::json bench_step(const StepBenchOptions& options, ParallelContext& context, std::ostream& out) {
  return StepBench(options, context).run(out);
}

}  // namespace trireme::bench
