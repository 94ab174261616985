#include "trainer/algorithms/grpo.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/datasets.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/algorithms/rollouts.h"

namespace trireme {
namespace {

double mean(const std::vector<double>& values) {
  return values.empty() ? 0 : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

class GrpoLoop final {
 public:
  GrpoLoop(const Config& config, const TrainOptions& options)
      : session_(config, options, config.grpo.max_num_steps),
        config_(session_.config),
        datasets_(open_datasets(config_, session_.tokenizer, options.hf_home, /*completions=*/false)),
        prompts_(datasets_.train),
        rewards_(reward_options(config_), 4),
        partition_(partition_for(config_, session_.policy->options().device,
                                 loss_options(config_).kl_penalty != 0 || config_.grpo.early_gradients)),
        engine_(*session_.policy, session_.tokenizer.get(), engine_options(config_, partition_),
                training_sampling(config_, *session_.tokenizer)),
        collector_(engine_, *session_.tokenizer, rewards_, session_.context, config_.cluster.collective_timeout_s) {
    const LossOptions loss = loss_options(config_);
    if (loss.kl_penalty != 0) {
      ModelOptions frozen = session_.policy->options();
      frozen.trainable = false;
      reference_ = load_model(session_.model_dir, frozen);
    }
    exact_ = session_.exact_linear;
    early_gradients_ = config_.grpo.early_gradients && exact_;
    if (reference_ != nullptr || early_gradients_) {
      reference_stream_ = make_reference_stream(config_, reference_.get(), session_.policy->options().device,
                                                partition_, options.rendezvous.on_stuck);
    }
    if (config_.grpo.early_gradients && !exact_ && session_.context.is_main())
      log_warn("grpo", "grpo.early_gradients is off: it needs linear layers that keep row bits");
    if (early_gradients_ && reference_stream_ == nullptr) {
      fail_user(
          session_.policy->options().device.is_cpu()
              ? "grpo.early_gradients needs a thread of its own: set policy.generation.background_processors to "
                "1, or grpo.early_gradients to false"
              : "grpo.early_gradients needs a part of the GPU of its own, and this one cannot be divided (see the "
                "warning above): set it to false");
    }
    if (!exact_ && session_.context.is_main()) {
      log_warn("grpo", "linear layers do not keep row bits on this machine: a previous-log-prob pass runs every step");
    }
    trainer_ = std::make_unique<PolicyTrainer>(config_, *session_.policy, reference_.get(), *session_.optimizer,
                                               session_.context, exact_);
    if (early_gradients_)
      reference_stream_->train = [this](const std::vector<RolloutSample>& samples) { trainer_->train_early(samples); };
    if (session_.resumed) {
      const nlohmann::json& state = session_.resumed->state;
      step_ = session_.resumed->step;
      prompts_.restore(state.at("prompts"));
      next_sample_id_ = state.at("next_sample_id").get<uint64_t>();
      if (state.contains("validation")) last_validation_ = state.at("validation").get<double>();
      // A run that ended after its last checkpoint has validated already: once is enough, for the log too.
      validated_step_ = state.value("validated_step", int64_t{-1});
    }
    collector_.on_progress = [this] { session_.reporting.heartbeat(); };
    trainer_->on_progress = collector_.on_progress;
    trainer_->make_room = [this] { engine_.release_cache(); };
    session_.ready(step_);
  }

  TrainSummary run() {
    TrainSummary summary;
    run_and_report(session_.context, [&] { summary = run_steps(); });
    return summary;
  }

 private:
  TrainSummary run_steps() {
    const GrpoConfig& g = config_.grpo;
    if (g.val_at_start && step_ == 0) {
      validate(0);
      session_.reporting.log_validation(0, validation_values());
    }
    TrainSummary summary;
    bool stop_early = good_enough();  // a run that had ended so, started again
    while (step_ < g.max_num_steps && prompts_.epoch() < g.max_num_epochs && !stop_early) {
      stop_early = one_step();
      if (session_.should_stop() && step_ < g.max_num_steps) {
        if (session_.checkpoint_on_stop()) session_.save(step_, state(), checkpoint_metrics());
        summary.end = LoopEnd::kStopped;
        break;
      }
    }
    if (summary.end == LoopEnd::kFinished) {
      if (g.val_at_end && validated_step_ != step_) {
        validate(step_);
        session_.reporting.log_validation(step_, validation_values());
      }
      session_.save(step_, state(), checkpoint_metrics());
    }
    session_.reporting.finish();
    summary.steps = step_;
    summary.validation = last_validation_;
    return summary;
  }

  nlohmann::json state() const {
    nlohmann::json state = {{"prompts", prompts_.state()}, {"next_sample_id", next_sample_id_}};
    if (last_validation_) state["validation"] = *last_validation_;
    state["validated_step"] = validated_step_;
    return state;
  }

  // Whether this step was validated with an accuracy that ends the run.
  bool good_enough() const {
    const auto& limit = config_.grpo.stop_at_validation_threshold;
    return limit && validated_step_ == step_ && last_validation_ && *last_validation_ >= *limit;
  }

  std::map<std::string, double> checkpoint_metrics() const {
    std::map<std::string, double> metrics;
    if (last_validation_) metrics["val:accuracy"] = *last_validation_;
    metrics["train:reward"] = last_reward_;
    return metrics;
  }

  // One or, under dynamic sampling, several generation batches. Samples in data order, group by group.
  std::vector<RolloutSample> generate(RolloutTimes& times, std::map<std::string, double>& values) {
    const GrpoConfig& g = config_.grpo;
    const int64_t wanted_groups = g.num_prompts_per_step;
    const int64_t batch_groups = g.use_dynamic_sampling
                                     ? static_cast<int64_t>(static_cast<double>(wanted_groups) * g.batch_multiplier)
                                     : wanted_groups;
    std::vector<RolloutSample> kept;
    int64_t kept_groups = 0;
    for (int64_t batch = 0;; ++batch) {
      if (batch > 0 && batch >= g.dynamic_sampling_max_gen_batches) {
        fail_data("dynamic sampling: after " + std::to_string(batch) + " generation batches only " +
                  std::to_string(kept_groups) + " of " + std::to_string(wanted_groups) +
                  " groups have rewards that differ; raise grpo.dynamic_sampling_max_gen_batches or choose other data");
      }
      const std::vector<PromptExample> prompts = prompts_.take(batch_groups);
      RolloutRequest request;
      request.prompts = &prompts;
      request.samples_per_prompt = g.num_generations_per_prompt;
      request.first_sample_id = next_sample_id_;
      request.name = "train-" + std::to_string(next_sample_id_);
      request.sampling = engine_.sampling();
      request.reference = reference_stream_.get();
      if (early_gradients_ && !dumps(step_ + 1)) {
        request.on_group = [&](std::vector<RolloutSample> group) {
          const int64_t groups = config_.policy.train_global_batch_size / g.num_generations_per_prompt;
          if (group.front().group >= groups) return;
          assign_advantages(group, g.num_generations_per_prompt, config_);
          reference_stream_->add_group(std::move(group));
        };
      }
      next_sample_id_ += static_cast<uint64_t>(batch_groups * g.num_generations_per_prompt);
      std::vector<RolloutSample> samples = collector_.collect(request, times);
      if (g.shuffle_rewards) shuffle_rewards(samples);
      if (!g.use_dynamic_sampling) return samples;
      for (int64_t p = 0; p < batch_groups; ++p) {
        const auto begin = samples.begin() + p * g.num_generations_per_prompt;
        const auto end = begin + g.num_generations_per_prompt;
        std::vector<double> rewards;
        for (auto s = begin; s != end; ++s) {
          if (!s->dropped) rewards.push_back(s->raw_reward);
        }
        if (rewards.empty() || all_equal(rewards)) continue;
        if (kept_groups == wanted_groups) {
          values["train/dynamic_sampling_num_discarded_valid_samples"] +=
              static_cast<double>(g.num_generations_per_prompt);
          continue;
        }
        for (auto s = begin; s != end; ++s) {
          s->group = kept_groups;
          kept.push_back(std::move(*s));
        }
        ++kept_groups;
      }
      values["train/dynamic_sampling_num_gen_batches"] = static_cast<double>(batch + 1);
      if (kept_groups == wanted_groups) return kept;
    }
  }

  // The control experiment: rewards that say nothing about the answers.
  void shuffle_rewards(std::vector<RolloutSample>& samples) const {
    std::mt19937_64 generator(static_cast<uint64_t>(config_.grpo.seed) * 1000003 + next_sample_id_);
    for (size_t i = samples.size(); i > 1; --i)
      std::swap(samples[i - 1].raw_reward, samples[generator() % i].raw_reward);
  }

  bool dumps(int64_t step) const {
    const std::vector<int64_t>& steps = config_.logger.dump_steps;
    return std::find(steps.begin(), steps.end(), step) != steps.end();
  }

  // The part of the samples whose gradients came with them.
  static double early_gradients(const std::vector<RolloutSample>& samples) {
    const auto count =
        std::count_if(samples.begin(), samples.end(), [](const RolloutSample& sample) { return sample.trained_early; });
    return static_cast<double>(count) / static_cast<double>(samples.size());
  }

  // The part of the samples whose reference log-probs came with them.
  static double early_references(const std::vector<RolloutSample>& samples) {
    const auto count = std::count_if(samples.begin(), samples.end(),
                                     [](const RolloutSample& sample) { return !sample.reference_logprobs.empty(); });
    return static_cast<double>(count) / static_cast<double>(samples.size());
  }

  void describe(const std::vector<RolloutSample>& samples, std::map<std::string, double>& values) const {
    std::vector<double> raw, lengths, prompt_lengths, totals, advantages;
    double truncated = 0, correct = 0, valid = 0;
    for (const RolloutSample& s : samples) {
      raw.push_back(s.raw_reward);
      lengths.push_back(static_cast<double>(s.tokens.size()));
      prompt_lengths.push_back(static_cast<double>(s.prompt.size()));
      totals.push_back(static_cast<double>(s.length()));
      advantages.push_back(s.advantage);
      truncated += s.truncated ? 1 : 0;
      correct += s.raw_reward > 0 ? 1 : 0;
      valid += s.loss_multiplier > 0 ? 1 : 0;
    }
    const double count = static_cast<double>(samples.size());
    values["train/reward"] = mean(raw);
    values["train/mean_gen_tokens_per_sample"] = mean(lengths);
    values["train/max_gen_tokens_per_sample"] = *std::max_element(lengths.begin(), lengths.end());
    values["train/mean_prompt_length"] = mean(prompt_lengths);
    values["train/mean_total_tokens_per_sample"] = mean(totals);
    values["train/total_num_tokens"] = mean(totals) * count;
    values["train/truncation_rate"] = truncated / count;
    values["train/natural_termination_rate"] = 1 - truncated / count;
    values["train/num_valid_samples"] = valid;
    values["train/correct_rate"] = correct / count;
    values["train/advantages/mean"] = mean(advantages);
    values["train/advantages/max"] = *std::max_element(advantages.begin(), advantages.end());
    values["train/advantages/min"] = *std::min_element(advantages.begin(), advantages.end());
    int64_t flat = 0, groups = 0;
    const size_t size = static_cast<size_t>(config_.grpo.num_generations_per_prompt);
    for (size_t begin = 0; begin < samples.size(); begin += size, ++groups) {
      bool equal = true;
      for (size_t i = begin; i < begin + size; ++i) equal = equal && samples[i].raw_reward == samples[begin].raw_reward;
      flat += equal ? 1 : 0;
    }
    values["train/zero_std_groups"] = static_cast<double>(flat) / static_cast<double>(std::max<int64_t>(1, groups));
  }

  // Returns true when the run should end because a metric reached its threshold.
  bool one_step() {
    const GrpoConfig& g = config_.grpo;
    Stopwatch whole;
    StepReport report;
    report.step = step_ + 1;
    RolloutTimes times;
    session_.reporting.phase("generation", report.step);
    std::vector<RolloutSample> samples = generate(times, report.values);
    Stopwatch rewards_watch;
    assign_advantages(samples, g.num_generations_per_prompt, config_);
    report.phases["generation"] = times.generation_seconds;
    report.phases["rewards"] = times.rewards_seconds + rewards_watch.seconds();
    report.phases["idle"] = times.gather_seconds;
    describe(samples, report.values);

    session_.reporting.phase("training", report.step);
    std::string dump;
    if (dumps(report.step)) {
      std::filesystem::create_directories(config_.logger.log_dir);
      dump = (std::filesystem::path(config_.logger.log_dir) /
              ("dump_step_" + std::to_string(report.step) +
               (session_.context.world_size() > 1 ? "_rank_" + std::to_string(session_.context.rank()) : "") +
               ".safetensors"))
                 .string();
    }
    session_.context.set_phase("training");
    session_.cause_fault(report.step);
    const TrainResult trained = trainer_->train(samples, dump);
    engine_.weights_changed();
    report.phases["logprobs"] = trained.logprob_seconds;
    report.phases["training"] = trained.training_seconds;
    for (const auto& [key, value] : trained.metrics) report.values["train/" + key] = value;
    report.values["performance/buckets_reduced_in_backward"] = static_cast<double>(trained.buckets_reduced_in_backward);
    if (early_gradients_) report.values["performance/gradients_under_generation"] = early_gradients(samples);
    if (reference_ != nullptr) report.values["performance/references_under_generation"] = early_references(samples);
    report.values["train/logprob_mismatch_tokens"] = static_cast<double>(trained.mismatched_tokens);
    for (const RewardCounters& counter : rewards_.counters()) {
      report.values["train/reward_failures/" + counter.name] = static_cast<double>(counter.failed);
    }
    ++step_;
    last_reward_ = report.values["train/reward"];

    const bool last = step_ == g.max_num_steps;
    const bool validate_now = g.val_period > 0 && step_ >= g.val_start_at && step_ % g.val_period == 0;
    if (validate_now) {
      validate(step_);
      for (const auto& [name, value] : validation_values()) report.values[name] = value;
    }
    const bool reached = good_enough();
    if (saved_seconds_ > 0) report.phases["checkpoint"] = saved_seconds_;
    // Validation is not part of the step, as in the published tables.
    report.seconds = whole.seconds() + saved_seconds_ - (validate_now ? validation_seconds_ : 0);
    report.tokens = report.values["train/total_num_tokens"];
    report.samples = static_cast<double>(samples.size());
    session_.reporting.step(report);
    saved_seconds_ = 0;
    // After the step's record: a run killed in between repeats the step; the other way round it would lack the record.
    if (config_.checkpointing.save_period > 0 && step_ % config_.checkpointing.save_period == 0 && !last && !reached) {
      saved_seconds_ = session_.save(step_, state(), checkpoint_metrics());
    }
    return reached;
  }

  // Of the last validation, by their names in the log.
  std::map<std::string, double> validation_values() const {
    std::map<std::string, double> values = {{"timing/validation/total_validation_time", validation_seconds_},
                                            {"validation/accuracy", *last_validation_},
                                            {"validation/avg_length", validation_length_}};
    if (config_.grpo.val_num_generations_per_prompt > 1) values["validation/pass_k"] = validation_pass_k_;
    return values;
  }

  double validate(int64_t step) {
    const GrpoConfig& g = config_.grpo;
    Stopwatch watch;
    session_.reporting.phase("validation", step);
    if (!datasets_.validation) {
      fail_user("grpo.val_period is " + std::to_string(g.val_period) +
                " but there is no validation data: set data.validation.data_path or data.train.split_validation_size, "
                "or val_period to 0");
    }
    const int64_t count = std::min(g.max_val_samples, datasets_.validation->size());
    std::vector<double> rewards, lengths, passed;  // passed: one a prompt, 1 when any of its answers was right
    std::vector<PromptExample> batch;
    int64_t printed = 0;
    const auto flush = [&](int64_t end) {
      if (batch.empty()) return;
      RolloutRequest request;
      request.prompts = &batch;
      request.samples_per_prompt = g.val_num_generations_per_prompt;
      request.first_sample_id = static_cast<uint64_t>(end) * static_cast<uint64_t>(g.val_num_generations_per_prompt);
      request.name = "validation-" + std::to_string(step) + "-" + std::to_string(end);
      request.sampling = validation_sampling(config_, *session_.tokenizer);
      RolloutTimes times;
      for (const RolloutSample& s : collector_.collect(request, times)) {
        rewards.push_back(s.raw_reward);
        lengths.push_back(static_cast<double>(s.tokens.size()));
        if (s.index == 0) passed.push_back(0);
        if (s.raw_reward > 0) passed.back() = 1;
        if (session_.context.is_main() && printed < config_.logger.num_val_samples_to_print) {
          ++printed;
          log_info("validation", "prompt " + batch[static_cast<size_t>(s.group)].prompt_text + " answer " +
                                     session_.tokenizer->decode(s.tokens) + " reward " + format_double(s.raw_reward));
        }
      }
      batch.clear();
    };
    for (int64_t i = 0; i < count; ++i) {
      if (auto example = datasets_.validation->example(i)) batch.push_back(std::move(*example));
      if (static_cast<int64_t>(batch.size()) == g.val_batch_size) flush(i);
    }
    flush(count);
    last_validation_ = mean(rewards);
    validated_step_ = step;
    validation_length_ = mean(lengths);
    validation_pass_k_ = mean(passed);
    validation_seconds_ = watch.seconds();
    session_.reporting.validation(step, *last_validation_, validation_length_, validation_seconds_);
    return *last_validation_;
  }

  Session session_;
  const Config& config_;
  Datasets datasets_;
  PromptStream prompts_;
  RewardPool rewards_;
  const std::shared_ptr<const DevicePartition> partition_;
  Engine engine_;
  RolloutCollector collector_;
  std::unique_ptr<Model> reference_;
  std::unique_ptr<PolicyTrainer> trainer_;
  std::unique_ptr<ReferenceStream> reference_stream_;  // or null; its thread may train
  bool exact_ = true;
  bool early_gradients_ = false;
  int64_t step_ = 0;
  uint64_t next_sample_id_ = 0;
  std::optional<double> last_validation_;
  int64_t validated_step_ = -1;
  double validation_length_ = 0;
  double validation_pass_k_ = 0;
  double validation_seconds_ = 0;
  double saved_seconds_ = 0;  // of the checkpoint after the last step; the next step's record counts it
  double last_reward_ = 0;
};

}  // namespace

TrainSummary run_grpo(const Config& config, const TrainOptions& options) { return GrpoLoop(config, options).run(); }

}  // namespace trireme
