#include "trainer/bench/step_bench.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "trainer/algorithms/policy_trainer.h"
#include "trainer/algorithms/rollouts.h"
#include "trainer/bench/work.h"
#include "trainer/ops/philox.h"
#include "trainer/parallel/device.h"
#include "trainer/rollout/queue.h"
#include "trainer/telemetry/phases.h"

namespace trireme::bench {
namespace {

constexpr int64_t kRun = 8;  // samples a rank pulls at once when there are several

class StoreCounter final : public CounterStore {
 public:
  explicit StoreCounter(JobStore& store) : store_(store) {}
  int64_t add(const std::string& key, int64_t amount) override { return store_.add(key, amount); }

 private:
  JobStore& store_;
};

RolloutLengths lengths_of(const StepBenchOptions& options) {
  if (!options.lengths.empty()) return load_lengths(options.lengths);
  if (options.prompts < 1 || options.samples < 1 || options.answer_tokens < 1 || options.prompt_tokens < 1)
    fail_user("--prompts, --samples, --answer-tokens and --prompt-tokens must be positive");
  RolloutLengths lengths;
  lengths.name = std::to_string(options.prompts) + "x" + std::to_string(options.samples) + " answers of " +
                 std::to_string(options.answer_tokens) + " tokens";
  lengths.prompts.assign(static_cast<size_t>(options.prompts), options.prompt_tokens);
  lengths.outputs.assign(static_cast<size_t>(options.prompts * options.samples), options.answer_tokens);
  return lengths;
}

// One measured step.
struct StepTimes {
  double seconds = 0;
  std::map<std::string, double> phases;  // exposed seconds of this rank; they add up to `seconds`
  TrainResult trained;
};

class StepBench final {
 public:
  StepBench(const StepBenchOptions& options, ParallelContext& context)
      : options_(options),
        context_(context),
        target_(resolve(options.common)),
        lengths_(lengths_of(options)),
        config_(step_config(options, target_, lengths_, context.data_parallel().size())),
        ceilings_(measure_ceilings(target_.device, target_.dtype)) {
    ModelOptions trainable = target_.model_options(/*trainable=*/true);
    trainable.gradient_dtype = parse_dtype(options.gradient_dtype);
    policy_ = make_random_model(target_.config, trainable, options.common.seed);
    if (options.reference) {
      reference_ = std::make_unique<Model>(target_.config, target_.model_options(/*trainable=*/false));
      reference_->copy_parameters_from(*policy_);
    }
    const AdamSettings adam = adam_settings(config_);
    AdamWOptions adam_options;
    adam_options.beta1 = adam.beta1;
    adam_options.beta2 = adam.beta2;
    adam_options.eps = adam.eps;
    adam_options.reduce_in_fp32 = trainable.gradient_dtype == at::kFloat;
    optimizer_ = std::make_unique<DistributedAdamW>(*policy_, context.data_parallel(), adam_options);
    const bool exact = linear_rows_are_exact(target_.config.linear_shapes(), target_.dtype, target_.device);
    exact_ = context.data_parallel().all_reduce_max(exact ? 0 : 1) == 0;
    trainer_ = std::make_unique<PolicyTrainer>(config_, *policy_, reference_.get(), *optimizer_, context, exact_);
    engine_settings_ = engine_options(options.generation, lengths_, context.data_parallel().size());
    engine_settings_.partition = partition_for(config_, target_.device, options.reference || options.early_gradients);
    if (options.early_gradients && !exact_)
      fail_user("--early-gradients needs linear layers that keep row bits; see the log");
    if (options.reference || options.early_gradients) {
      reference_stream_ = make_reference_stream(config_, reference_.get(), target_.device, engine_settings_.partition,
                                                options.on_stuck);
    }
    if (options.early_gradients) {
      if (reference_stream_ == nullptr)
        fail_user(
            "--early-gradients needs a part of the device of its own: --background-processors above 0 on a CPU, and a "
            "GPU that can be divided");
      reference_stream_->train = [this](const std::vector<RolloutSample>& samples) { trainer_->train_early(samples); };
    }
    engine_ = std::make_unique<Engine>(*policy_, nullptr, engine_settings_,
                                       sampling_options(options.generation, options.common.seed));
    trainer_->make_room = [this] { engine_->release_cache(); };
    prompts_ = random_prompts(lengths_, target_.config.vocab_size, options.common.seed);
  }

  nlohmann::json run(std::ostream& out) {
    one_step(staircase(lengths_));
    take_peak_memory_bytes(target_.device);
    std::vector<StepTimes> steps;
    std::vector<double> seconds;
    int64_t mismatched = 0;
    for (int64_t r = 0; r < options_.common.repeats; ++r) {
      steps.push_back(one_step(lengths_));
      seconds.push_back(steps.back().seconds);
      mismatched += steps.back().trained.mismatched_tokens;
    }
    const double middle = median(seconds);
    const StepTimes& typical = *std::min_element(steps.begin(), steps.end(), [&](const auto& a, const auto& b) {
      return std::abs(a.seconds - middle) < std::abs(b.seconds - middle);
    });
    return report(seconds, middle, typical, mismatched, out);
  }

 private:
  StepTimes one_step(const RolloutLengths& lengths) {
    StepTimes times;
    synchronize(target_.device);
    context_.set_phase("benchmark");
    context_.data_parallel().barrier();
    PhaseTimer timer;
    timer.start_step();
    std::vector<RolloutSample> own;
    {
      const auto scope = timer.enter(Phase::kGeneration);
      context_.set_phase("generation");
      own = generate(lengths);
      synchronize(target_.device);
    }
    std::vector<RolloutSample> samples = gather(std::move(own), lengths.samples());  // in no phase: idle
    {
      const auto scope = timer.enter(Phase::kRewards);
      draw_rewards(samples, lengths.samples_per_prompt(), options_.common.seed);
      assign_advantages(samples, lengths.samples_per_prompt(), config_);
    }
    {
      const auto scope = timer.enter(Phase::kTraining);
      early_gradients_ = std::count_if(samples.begin(), samples.end(),
                                       [](const RolloutSample& sample) { return sample.trained_early; });
      early_references_ = std::count_if(samples.begin(), samples.end(),
                                        [](const RolloutSample& sample) { return !sample.reference_logprobs.empty(); });
      times.trained = trainer_->train(samples);
      synchronize(target_.device);
    }
    {
      const auto scope = timer.enter(Phase::kRefit);
      engine_->weights_changed();
    }
    context_.data_parallel().barrier();
    const PhaseTimes measured = timer.finish_step();
    times.seconds = measured.total_s;
    for (const Phase phase : all_phases()) times.phases[to_string(phase)] = measured.of(phase);
    times.phases[to_string(Phase::kLogprobs)] += times.trained.logprob_seconds;
    times.phases[to_string(Phase::kTraining)] -= times.trained.logprob_seconds;
    next_sample_id_ += static_cast<uint64_t>(lengths.samples());
    ++steps_done_;
    return times;
  }

  std::vector<RolloutSample> generate(const RolloutLengths& lengths) {
    QueueShape shape;
    shape.groups = static_cast<int64_t>(lengths.prompts.size());
    shape.samples = lengths.samples_per_prompt();
    std::unique_ptr<StoreCounter> counter;
    std::unique_ptr<PullQueue> queue;
    if (context_.store() != nullptr) {
      shape.run = options_.early_gradients ? shape.samples : std::min(shape.samples, kRun);
      counter = std::make_unique<StoreCounter>(*context_.store());
      queue = std::make_unique<StorePullQueue>(*counter, "bench-" + std::to_string(steps_done_), shape);
    } else {
      shape.run = shape.samples;
      queue = std::make_unique<LocalPullQueue>(shape);
    }
    std::vector<RolloutSample> own;
    std::vector<SampleRun> runs;
    const SamplesToReference to_reference(*engine_, reference_stream_.get(), runs);
    // No more at first than an even share: what one rank takes no other can.
    const int64_t ranks = context_.data_parallel().size();
    const int64_t wanted =
        std::min(engine_settings_.max_sequences + shape.samples, (lengths.samples() + ranks - 1) / ranks);
    while (true) {
      while (engine_->unfinished_samples() < wanted) {
        const std::optional<SampleRun> run = queue->pull();
        if (!run) break;
        GroupRequest group =
            forced_group(lengths, prompts_, run->group, run->first_sample, run->count, next_sample_id_);
        group.group_id = static_cast<int64_t>(runs.size());
        engine_->submit(std::move(group));
        runs.push_back(*run);
      }
      if (engine_->idle()) break;
      std::vector<GeneratedGroup> finished = engine_->step();
      if (reference_stream_ != nullptr) reference_stream_->after_step(*engine_);
      for (GeneratedGroup& group : finished) {
        const SampleRun& run = runs[static_cast<size_t>(group.group_id)];
        group.group_id = run.group;
        for (RolloutSample& sample : as_samples({std::move(group)})) {
          sample.index += run.first_sample;
          own.push_back(std::move(sample));
        }
        if (options_.early_gradients) train_if_whole(own, run.group, shape.samples);
      }
    }
    if (reference_stream_ != nullptr) (void)reference_stream_->finish(*engine_, own);
    return own;
  }

  // The group, if all of it is among `own` and in the first optimizer step, goes to the stream.
  void train_if_whole(const std::vector<RolloutSample>& own, int64_t group, int64_t size) {
    if ((group + 1) * size > config_.policy.train_global_batch_size) return;
    std::vector<RolloutSample> whole;
    std::copy_if(own.begin(), own.end(), std::back_inserter(whole),
                 [group](const RolloutSample& sample) { return sample.group == group; });
    if (static_cast<int64_t>(whole.size()) < size) return;
    std::sort(whole.begin(), whole.end(),
              [](const RolloutSample& a, const RolloutSample& b) { return a.index < b.index; });
    draw_rewards(whole, size, options_.common.seed);
    assign_advantages(whole, size, config_);
    reference_stream_->add_group(std::move(whole));
  }

  std::vector<RolloutSample> gather(std::vector<RolloutSample> own, int64_t expected) {
    context_.set_phase("rollout exchange");
    std::vector<RolloutSample> all;
    if (context_.data_parallel().size() == 1) {
      all = std::move(own);
    } else {
      for (const std::string& part : context_.data_parallel().all_gather_bytes(pack_samples(own))) {
        for (RolloutSample& sample : unpack_samples(part)) all.push_back(std::move(sample));
      }
    }
    std::sort(all.begin(), all.end(), [](const RolloutSample& a, const RolloutSample& b) {
      return a.group != b.group ? a.group < b.group : a.index < b.index;
    });
    TRIREME_CHECK(static_cast<int64_t>(all.size()) == expected, "a rollout has lost samples");
    return all;
  }

  // At the ceilings, on this many devices: generation reads weights for each of the longest answer's tokens and an even
  // share of the contexts; the reference's forward, and forward and backward, have an even share of the operations.
  std::map<std::string, double> floors() const {
    const auto ranks = static_cast<double>(context_.data_parallel().size());
    const RolloutWork work =
        rollout_work(target_.config, lengths_.prompt_of_each_sample(), lengths_.outputs, target_.element_bytes,
                     engine_settings_.max_sequences * context_.data_parallel().size());
    std::vector<int64_t> rows;  // of a sample: all but its last token
    for (int64_t s = 0; s < lengths_.samples(); ++s) rows.push_back(lengths_.total_of(s) - 1);
    const int64_t scored = lengths_.output_tokens();
    const double flops = ranks * ceilings_.flops_per_second;
    return {{"generation", (static_cast<double>(work.steps) * work.weight_bytes + work.context_bytes / ranks) /
                               ceilings_.bytes_per_second},
            {"logprobs", options_.reference ? forward_flops(target_.config, rows, scored) / flops : 0.0},
            {"training", training_flops(target_.config, rows, scored) / flops}};
  }

  nlohmann::json report(const std::vector<double>& seconds, double middle, const StepTimes& typical, int64_t mismatched,
                        std::ostream& out) {
    Communicator& group = context_.data_parallel();
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
    json.update({{"ranks", group.size()},
                 {"lengths", lengths_.name},
                 {"samples", lengths_.samples()},
                 {"answer_tokens", lengths_.output_tokens()},
                 {"global_batch_size", config_.policy.train_global_batch_size},
                 {"optimizer_steps", typical.trained.optimizer_steps},
                 {"reference", options_.reference},
                 {"background_processors", reference_stream_ == nullptr ? 0
                                           : engine_settings_.partition == nullptr
                                               ? -1
                                               : engine_settings_.partition->background_processors},
                 {"references_under_generation", early_references_},
                 {"gradients_under_generation", early_gradients_},
                 {"recomputed_layers", policy_->recompute().whole_layers},
                 {"cheaply_recomputed_layers", policy_->recompute().cheap_layers},
                 {"share_prompts", options_.share_prompts},
                 {"gradient_dtype", options_.gradient_dtype},
                 {"linear_rows_exact", exact_},
                 {"micro_batch_tokens", config_.policy.sequence_packing.train_mb_tokens},
                 {"seconds", middle},
                 {"seconds_of_repeats", seconds},
                 {"phases", typical.phases},
                 {"phases_of_slowest_rank", slowest},
                 {"floor_seconds", floor_total},
                 {"floors", floor},
                 {"samples_per_second", samples / middle},
                 {"samples_per_second_per_device", samples / middle / static_cast<double>(group.size())},
                 {"mismatched_tokens", mismatched},
                 {"grad_norm", typical.trained.metrics.at("grad_norm")},
                 {"cache_rows", engine_settings_.cache_rows},
                 {"peak_memory_bytes", peak},
                 {"copy_bytes_per_second", ceilings_.bytes_per_second},
                 {"matmul_flops_per_second", ceilings_.flops_per_second}});
    if (!context_.is_main()) return json;
    Table table({"step " + options_.common.shape + ", " + std::to_string(group.size()) + " ranks", "seconds",
                 "slowest rank", "floor"});
    for (const Phase phase : all_phases()) {
      const std::string name = to_string(phase);
      const auto found = floor.find(name);
      table.add({"  " + name, format_fixed(typical.phases.at(name), 3), format_fixed(slowest.at(name), 3),
                 found == floor.end() ? "-" : format_fixed(found->second, 3)});
    }
    table.add({"step (median of " + std::to_string(seconds.size()) + ")", format_fixed(middle, 3),
               format_fixed(middle, 3), format_fixed(floor_total, 3)});
    table.print(out);
    if (reference_stream_ != nullptr)
      out << "reference log-probs computed under generation: of " << early_references_ << " samples\n";
    if (options_.early_gradients) out << "gradients computed under generation: of " << early_gradients_ << " samples\n";
    out << "samples/s: " << format_fixed(samples / middle, 2) << ", of a device "
        << format_fixed(samples / middle / static_cast<double>(group.size()), 2) << "\n"
        << "tokens whose log-prob bits differ between sampler and loss: " << mismatched << "\n";
    if (peak > 0) out << "peak memory: " << format_bytes(static_cast<uint64_t>(peak)) << "\n";
    write_report(options_.common, json);
    return json;
  }

  const StepBenchOptions& options_;
  ParallelContext& context_;
  const Target target_;
  const RolloutLengths lengths_;
  const Config config_;
  const Ceilings ceilings_;
  EngineOptions engine_settings_;
  std::unique_ptr<Model> policy_, reference_;
  std::unique_ptr<DistributedAdamW> optimizer_;
  std::unique_ptr<PolicyTrainer> trainer_;
  std::unique_ptr<ReferenceStream> reference_stream_;  // or null; its thread may train
  std::unique_ptr<Engine> engine_;
  std::vector<std::vector<int32_t>> prompts_;
  uint64_t next_sample_id_ = 0;
  int64_t steps_done_ = 0;
  int64_t early_references_ = 0;  // of the last step, all ranks
  int64_t early_gradients_ = 0;
  bool exact_ = true;  // else a pass for the previous log-probs runs
};

}  // namespace

Config step_config(const StepBenchOptions& options, const Target& target, const RolloutLengths& lengths,
                   int64_t ranks) {
  if (lengths.longest() > target.config.max_position_embeddings) {
    fail_user("the longest sample has " + std::to_string(lengths.longest()) + " tokens, but " + options.common.shape +
              " knows only " + std::to_string(target.config.max_position_embeddings) + " positions");
  }
  if (lengths.samples_per_prompt() < 2)
    fail_user("a step needs at least 2 answers for each prompt: a group of one has no advantage");
  if (options.optimizer_steps < 1 || lengths.samples() % options.optimizer_steps != 0) {
    fail_user("--optimizer-steps " + std::to_string(options.optimizer_steps) + " does not divide the " +
              std::to_string(lengths.samples()) + " samples");
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
  policy.generation.background_processors = options.background_processors;
  config.grpo.early_gradients = options.early_gradients;
  config.cluster.processes = ranks;
  config.cluster.collective_timeout_s = options.collective_timeout_s;
  derive_defaults(config);
  const std::vector<std::string> problems = find_problems(config);
  if (!problems.empty()) fail_user("bench step: " + join(problems, "; "));
  return config;
}

void draw_rewards(std::vector<RolloutSample>& samples, int64_t group_size, uint64_t seed) {
  for (size_t begin = 0; begin < samples.size(); begin += static_cast<size_t>(group_size)) {
    const size_t end = std::min(samples.size(), begin + static_cast<size_t>(group_size));
    for (size_t i = begin; i < end; ++i) {
      const double draw = philox_uniform(seed, static_cast<uint64_t>(samples[i].group),
                                         static_cast<uint64_t>(samples[i].index), /*stream=*/7);
      samples[i].raw_reward = i == begin ? 1 : i + 1 == end ? 0 : draw < 0.5 ? 0 : 1;
    }
  }
}

nlohmann::json bench_step(const StepBenchOptions& options, ParallelContext& context, std::ostream& out) {
  return StepBench(options, context).run(out);
}

}  // namespace trireme::bench
