#include "trainer/bench/rollout_bench.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "trainer/bench/trace.h"
#include "trainer/bench/work.h"
#include "trainer/parallel/device.h"
#include "trainer/rollout/step_runner.h"

namespace trireme::bench {
namespace {

constexpr int64_t kBinEnds[] = {16, 32, 48, 64, 96, 128, 192, 256};
constexpr int64_t kDecodeWarmUpSteps = 8;
constexpr int64_t kTracedSteps = 8;

size_t bin_of(int64_t alive) {
  size_t bin = 0;
  while (bin < std::size(kBinEnds) && alive > kBinEnds[bin]) ++bin;
  return bin;
}

std::vector<AliveBin> empty_bins() {
  std::vector<AliveBin> bins(std::size(kBinEnds) + 1);
  for (size_t b = 0; b < bins.size(); ++b) {
    bins[b].low = b == 0 ? 1 : kBinEnds[b - 1] + 1;
    bins[b].high = b < std::size(kBinEnds) ? kBinEnds[b] : 0;
  }
  return bins;
}

std::string bin_name(const AliveBin& bin) {
  return std::to_string(bin.low) + (bin.high > 0 ? "-" + std::to_string(bin.high) : "+");
}

int64_t differing_tokens(const std::vector<Sample>& a, const std::vector<Sample>& b) {
  int64_t count = 0;
  for (size_t s = 0; s < a.size(); ++s) {
    for (size_t t = 0; t < a[s].response.size(); ++t) {
      const bool same = a[s].response[t] == b[s].response[t] &&
                        std::memcmp(&a[s].generation_logprobs[t], &b[s].generation_logprobs[t], sizeof(float)) == 0;
      count += same ? 0 : 1;
    }
  }
  return count;
}

std::string milliseconds(double seconds) { return format_fixed(seconds * 1e3, 3); }

void print_bins(const std::vector<AliveBin>& bins, std::ostream& out) {
  Table table({"samples alive", "steps", "ms a step", "floor ms", "seconds", "floor seconds"});
  for (const AliveBin& bin : bins) {
    if (bin.steps == 0) continue;
    const bool floor = bin.floor_steps > 0;
    table.add({bin_name(bin), std::to_string(bin.steps), milliseconds(bin.seconds / static_cast<double>(bin.steps)),
               floor ? milliseconds(bin.floor_seconds / static_cast<double>(bin.floor_steps)) : "-",
               format_fixed(bin.seconds, 3), floor ? format_fixed(bin.floor_seconds, 3) : "-"});
  }
  table.print(out);
}

nlohmann::json bins_json(const std::vector<AliveBin>& bins) {
  nlohmann::json json = nlohmann::json::array();
  for (const AliveBin& bin : bins) {
    if (bin.steps == 0) continue;
    nlohmann::json entry = {{"alive", bin_name(bin)},
                            {"steps", bin.steps},
                            {"seconds", bin.seconds},
                            {"milliseconds_per_step", 1e3 * bin.seconds / static_cast<double>(bin.steps)}};
    if (bin.floor_steps > 0)
      entry["floor_milliseconds_per_step"] = 1e3 * bin.floor_seconds / static_cast<double>(bin.floor_steps);
    json.push_back(std::move(entry));
  }
  return json;
}

}  // namespace

std::vector<AliveBin> alive_bins(const std::vector<TimedStep>& steps) {
  std::vector<AliveBin> bins = empty_bins();
  for (const TimedStep& step : steps) {
    if (step.prefill) continue;
    AliveBin& bin = bins[bin_of(step.alive)];
    bin.steps += step.steps;
    bin.seconds += step.seconds;
  }
  return bins;
}

void add_floors(std::vector<AliveBin>& bins, const RolloutLengths& lengths, const ModelConfig& config,
                int64_t element_bytes, double bytes_per_second) {
  const double of_token = context_bytes_per_token(config, element_bytes);
  const int64_t longest = *std::max_element(lengths.outputs.begin(), lengths.outputs.end());
  const auto samples = static_cast<size_t>(lengths.samples());
  // Step t makes token t + 1 of every response longer than t from prompt + t tokens.
  std::vector<int64_t> alive(static_cast<size_t>(longest), 0), context(static_cast<size_t>(longest), 0);
  for (size_t s = 0; s < samples; ++s) {
    for (int64_t t = 1; t < lengths.outputs[s]; ++t) {
      ++alive[static_cast<size_t>(t)];
      context[static_cast<size_t>(t)] += lengths.prompt_of(static_cast<int64_t>(s)) + t;
    }
  }
  for (int64_t t = 1; t < longest; ++t) {
    const int64_t samples_of_step = alive[static_cast<size_t>(t)];
    AliveBin& bin = bins[bin_of(samples_of_step)];
    ++bin.floor_steps;
    bin.floor_seconds += (decode_weight_bytes(config, element_bytes, real(samples_of_step)) +
                          of_token * real(context[static_cast<size_t>(t)])) /
                         bytes_per_second;
  }
}

namespace {

struct Repeats {
  std::vector<double> seconds;
  std::vector<TimedRollout> rollouts;
  std::vector<Sample> samples;  // of the last one
  int64_t repeat_mismatches = 0;
  double middle = 0;  // the median of the seconds

  // The rollout whose time is nearest to the median stands for the steps.
  const TimedRollout& typical() const {
    return *std::min_element(rollouts.begin(), rollouts.end(), [&](const auto& a, const auto& b) {
      return std::abs(a.seconds - middle) < std::abs(b.seconds - middle);
    });
  }
};

// One that several replicas share is bench step's, unless they share experts.
void require_one_replica(const ParallelContext& context, bool experts = false) {
  const Layout& layout = context.layout();
  if (context.generation().replicas == 1 || (experts && layout.ep > 1 && context.copies() == 1)) return;
  fail_user("this benchmark generates with one replica, but " + std::to_string(context.world_size()) +
            " ranks with --tp " + std::to_string(layout.tp) + ", --pp " + std::to_string(layout.pp) + " and --ep " +
            std::to_string(layout.ep) + " are " + std::to_string(context.generation().replicas) +
            "; bench step generates with several");
}

Repeats repeat_rollouts(Engine& engine, const RolloutBenchOptions& options, const RolloutLengths& lengths,
                        const std::vector<std::vector<int32_t>>& prompts, at::Device device, ParallelContext& context) {
  timed_rollout(engine, staircase(lengths), prompts, device);
  Repeats result;
  for (int64_t r = 0; r < options.common.repeats; ++r) {
    context.world().barrier();
    TimedRollout run = timed_rollout(engine, lengths, prompts, device, !options.generation.unknown_ends);
    std::vector<Sample> made = as_samples(run.groups);
    run.groups.clear();
    if (r > 0) result.repeat_mismatches += differing_tokens(result.samples, made);
    result.samples = std::move(made);
    run.seconds = context.world().all_reduce_max(run.seconds);
    result.seconds.push_back(run.seconds);
    result.rollouts.push_back(std::move(run));
  }
  engine.release_cache();
  result.middle = median(result.seconds);
  return result;
}

// What the typical run did against what it had to.
struct RolloutFigures {
  RolloutWork work;
  double bytes = 0;  // that its steps read
  double floor = 0;  // seconds
  double tokens_per_second = 0;
  double mean_batch = 0;
  double prefill_seconds = 0;
  std::vector<AliveBin> bins;
};

// Of each device. Tensor ranks share all that is read, ranks of experts these. Stages share the cache, but a token
// passes through all of them, one after the other: in a step of every sample the weights are read once, whoever reads
// them.
RolloutFigures figures_of(const Repeats& repeats, const RolloutLengths& lengths, const Target& target,
                          const Ceilings& ceilings, int64_t max_sequences, const CommonOptions& split,
                          int64_t replicas) {
  const double tp = real(split.tp), devices = real(split.tp * split.pp * replicas);
  const double experts_of = split.ep > 1 ? real(split.ep) : tp;  // how many devices share them
  const TimedRollout& typical = repeats.typical();
  const EngineStats& stats = typical.stats;
  RolloutFigures f;
  f.work = rollout_work(target.config, lengths.prompt_of_each_sample(), lengths.outputs, target.element_bytes,
                        max_sequences * replicas);
  const double weights = (f.work.weight_bytes - f.work.expert_bytes) / tp + f.work.expert_bytes / experts_of;
  f.bytes = real(stats.steps) / real(f.work.steps) * weights / real(split.pp) + f.work.context_bytes / devices;
  f.floor = (weights + f.work.context_bytes / devices) / ceilings.bytes_per_second();
  f.tokens_per_second = static_cast<double>(lengths.output_tokens()) / repeats.middle;
  f.mean_batch = static_cast<double>(stats.sequence_steps) / static_cast<double>(stats.steps);
  for (const TimedStep& step : typical.steps) f.prefill_seconds += step.prefill ? step.seconds : 0;
  f.bins = alive_bins(typical.steps);
  if (lengths.samples() <= max_sequences && split.pp == 1 && replicas == 1) {  // else a step is one lane's
    add_floors(f.bins, lengths, target.config, target.element_bytes, tp * ceilings.bytes_per_second());
  }
  return f;
}

nlohmann::json rollout_report(const RolloutBenchOptions& options, const Target& target, const RolloutLengths& lengths,
                              const Repeats& repeats, const RolloutFigures& f, const Ceilings& ceilings,
                              const EngineOptions& engine) {
  const EngineStats& stats = repeats.typical().stats;
  nlohmann::json report = report_header("rollout", options.common, target);
  report.update({{"lengths", lengths.name},
                 {"samples", lengths.samples()},
                 {"tokens", lengths.output_tokens()},
                 {"seconds", repeats.middle},
                 {"seconds_of_repeats", repeats.seconds},
                 {"tokens_per_second", f.tokens_per_second},
                 {"floor_seconds", f.floor},
                 {"floor_steps", f.work.steps},
                 {"steps", stats.steps},
                 {"mean_batch", f.mean_batch},
                 {"prefill_seconds", f.prefill_seconds},
                 {"weight_bytes", f.work.weight_bytes / real(f.work.steps)},
                 {"context_bytes", f.work.context_bytes},
                 {"bytes_per_second", f.bytes / repeats.middle},
                 {"copy_bytes_per_second", ceilings.copy_bytes_per_second},
                 {"read_bytes_per_second", ceilings.read_bytes_per_second},
                 {"matmul_flops_per_second", ceilings.flops_per_second},
                 {"max_sequences", engine.max_sequences},
                 {"lanes", stats.lanes},
                 {"cache_rows", engine.cache_rows},
                 {"peak_cache_rows", stats.peak_cache_rows},
                 {"preemptions", stats.preemptions},
                 {"ends_known", !options.generation.unknown_ends},
                 {"surplus_tokens", stats.surplus_tokens},
                 {"repeat_mismatched_tokens", repeats.repeat_mismatches},
                 {"steps_by_alive", bins_json(f.bins)}});
  return report;
}

Table rollout_table(const RolloutBenchOptions& options, const RolloutLengths& lengths, const Repeats& repeats,
                    const RolloutFigures& f, const Ceilings& ceilings) {
  const EngineStats& stats = repeats.typical().stats;
  Table table({"rollout", options.common.shape});
  table.add({"samples, tokens", std::to_string(lengths.samples()) + ", " + std::to_string(lengths.output_tokens())});
  table.add({"seconds (median of " + std::to_string(options.common.repeats) + ")", format_fixed(repeats.middle, 3)});
  table.add({"tokens/s", format_fixed(f.tokens_per_second, 1)});
  table.add({"floor seconds", format_fixed(f.floor, 3) + " (" + percent(f.floor, repeats.middle) + ")"});
  table.add({"bytes read", terabytes(f.bytes / repeats.middle) + " of " + terabytes(ceilings.bytes_per_second()) +
                               " (" + percent(f.bytes / repeats.middle, ceilings.bytes_per_second()) + ")"});
  table.add({"steps, at best", std::to_string(stats.steps) + ", " + std::to_string(f.work.steps)});
  table.add({"mean batch", format_fixed(f.mean_batch, 1)});
  table.add({"seconds in steps that prefill", format_fixed(f.prefill_seconds, 3)});
  table.add({"preemptions", std::to_string(stats.preemptions)});
  table.add({"tokens that differ between repeats", std::to_string(repeats.repeat_mismatches)});
  return table;
}

// The sampler's log-probs against the loss's.
void compare_with_the_loss(const RolloutBenchOptions& options, const Model& model, const std::vector<Sample>& samples,
                           const LogprobOptions& distribution, ParallelContext& context, at::Device device,
                           nlohmann::json& report, Table& table) {
  synchronize(device);
  Stopwatch watch;
  LogprobComparison compared = compare_logprobs(model, samples, distribution, options.score_tokens);
  if (context.generation().replicas > 1) {  // each has its own samples, and its ranks the same
    const int64_t alike = context.world_size() / context.generation().replicas;
    compared.tokens = context.world().all_reduce_sum(compared.tokens) / alike;
    compared.mismatched = context.world().all_reduce_sum(compared.mismatched) / alike;
    compared.largest_difference = context.world().all_reduce_max(compared.largest_difference);
  }
  report.update({{"mismatched_tokens", compared.mismatched},
                 {"scored_tokens", compared.tokens},
                 {"largest_logprob_difference", compared.largest_difference},
                 {"scoring_seconds", watch.seconds()}});
  table.add({"tokens whose log-prob bits differ from the loss's",
             std::to_string(compared.mismatched) + " of " + std::to_string(compared.tokens)});
  table.add({"largest log-prob difference", format_double(compared.largest_difference)});
}

}  // namespace

nlohmann::json bench_rollout(const RolloutBenchOptions& options, ParallelContext& context, std::ostream& out) {
  require_one_replica(context, /*experts=*/true);
  const Target target = resolve(options.common);
  const RolloutLengths lengths = load_lengths(options.lengths);
  const GenerationRanks& ranks = context.generation();
  const RolloutLengths own = lengths.part(ranks.number, ranks.replicas);
  if (lengths.longest() > target.config.positions()) {
    fail_user("the longest sample has " + std::to_string(lengths.longest()) + " tokens, but " + options.common.shape +
              " knows only " + std::to_string(target.config.positions()) + " positions");
  }
  const std::unique_ptr<Model> model =
      make_random_model(target.config, target.model_options(/*trainable=*/false, context), options.common.seed);
  const Ceilings ceilings = measure_ceilings(target.device, target.dtype);
  const std::vector<std::vector<int32_t>> prompts =
      random_prompts(own, target.config.vocab_size, options.common.seed + static_cast<uint64_t>(ranks.number));
  const SamplingOptions sampling = sampling_options(options.generation, options.common.seed);
  EngineOptions engine_settings = engine_options(options.generation, own, 1);
  engine_settings.lanes = options.lanes > 0 ? options.lanes : options.common.pp;
  Engine engine(*model, nullptr, engine_settings, sampling);

  const Repeats repeats = repeat_rollouts(engine, options, own, prompts, target.device, context);
  const RolloutFigures figures =
      figures_of(repeats, lengths, target, ceilings, engine_settings.max_sequences, options.common, ranks.replicas);
  nlohmann::json report = rollout_report(options, target, lengths, repeats, figures, ceilings, engine_settings);
  Table table = rollout_table(options, lengths, repeats, figures, ceilings);
  if (options.score_tokens > 0)
    compare_with_the_loss(options, *model, repeats.samples, sampling.logprob_options(), context, target.device, report,
                          table);
  if (!context.is_main()) return report;
  table.print(out);
  out << "\n";
  print_bins(figures.bins, out);
  write_report(options.common, report);
  return report;
}

namespace {

// Fills the engine and warms it up: after it all samples are decoded together.
void begin_decoding(Engine& engine, GroupRequest group, int64_t alive, bool shares_device) {
  engine.submit(std::move(group));
  engine.share_device(shares_device);
  int64_t decoded = engine.stats().decode_tokens;
  while (!engine.idle()) {  // until all samples are in
    engine.step();
    const int64_t now = engine.stats().decode_tokens;
    if (now - decoded == alive) break;
    decoded = now;
  }
  for (int64_t i = 1; i < kDecodeWarmUpSteps; ++i) engine.step();
}

// Seconds of one of options.steps steps.
double time_decode_steps(Engine& engine, const DecodeBenchOptions& options, at::Device device) {
  synchronize(device);
  const int64_t before = engine.stats().steps;
  Stopwatch watch;
  for (int64_t i = 0; i < options.steps; ++i) engine.step();
  synchronize(device);
  const double elapsed = watch.seconds();
  const int64_t steps = engine.stats().steps - before;
  TRIREME_CHECK(steps == options.steps && !engine.idle(), "samples ended while decode steps were measured");
  return elapsed / static_cast<double>(steps);
}

void trace_decode_steps(Engine& engine, const DecodeBenchOptions& options, int64_t alive, at::Device device,
                        std::ostream& out) {
  const std::string file =
      options.batch_sizes.size() == 1 ? options.trace : options.trace + "." + std::to_string(alive);
  const Trace trace = trace_device(device, file, [&] {
    for (int64_t i = 0; i < kTracedSteps; ++i) engine.step();
  });
  if (!trace.kernels.empty()) out << alive << " samples alive\n";
  print_trace(trace, kTracedSteps, out);
}

// Median seconds of a decode step of `alive` samples that began with `prompt` tokens each.
double decode_seconds(const Model& model, const DecodeBenchOptions& options, const Target& target, int64_t prompt,
                      int64_t alive, ParallelContext& context, std::ostream& out) {
  if (alive < 1) fail_user("--batch-size " + std::to_string(alive) + " is not a number of samples");
  RolloutLengths lengths;
  lengths.prompts = {prompt};
  // Nobody ends while the clock runs.
  lengths.outputs.assign(static_cast<size_t>(alive), kDecodeWarmUpSteps + options.steps + kTracedSteps + 4);
  const std::vector<std::vector<int32_t>> prompts =
      random_prompts(lengths, target.config.vocab_size, options.common.seed);
  GenerationOptions generation = options.generation;
  generation.max_sequences = alive;
  EngineOptions settings = engine_options(generation, lengths, 1);
  settings.headroom_rows = lengths.longest();  // nobody's rows move either
  settings.partition = split_device(target.device, options.background_sms);
  if (options.background_sms > 0 && (settings.partition == nullptr || alive > kSharedDeviceSamples)) {
    fail_user("--background-sms needs a GPU that can be divided and at most " + std::to_string(kSharedDeviceSamples) +
              " samples; here are " + std::to_string(alive) + " on " + target.device.str());
  }
  Engine engine(model, nullptr, settings, sampling_options(generation, options.common.seed));
  std::vector<double> seconds;
  for (int64_t r = 0; r < options.common.repeats + 1; ++r) {  // the first one warms up
    context.world().barrier();
    begin_decoding(engine, forced_group(lengths, prompts, 0, 0, alive), alive, settings.partition != nullptr);
    const double of_a_step = time_decode_steps(engine, options, target.device);
    if (!options.trace.empty() && r == options.common.repeats && context.is_main())
      trace_decode_steps(engine, options, alive, target.device, out);
    engine.run();
    if (r > 0) seconds.push_back(of_a_step);
  }
  engine.release_cache();
  return context.world().all_reduce_max(median(seconds));
}

}  // namespace

nlohmann::json bench_decode(const DecodeBenchOptions& options, ParallelContext& context, std::ostream& out) {
  require_one_replica(context);
  const Target target = resolve(options.common);
  if (options.batch_sizes.empty()) fail_user("--batch-size needs at least one number of samples");
  if (options.steps < 1) fail_user("--steps must be at least 1");
  const int64_t prompt = options.context - kDecodeWarmUpSteps - options.steps / 2;
  if (prompt < 1) {
    fail_user("--context " + std::to_string(options.context) + " is too short for " + std::to_string(options.steps) +
              " measured steps around it; it must be at least " +
              std::to_string(kDecodeWarmUpSteps + options.steps / 2 + 1));
  }
  const std::unique_ptr<Model> model =
      make_random_model(target.config, target.model_options(/*trainable=*/false, context), options.common.seed);
  const Ceilings ceilings = measure_ceilings(target.device, target.dtype);
  // Contexts grow by one a step; the mean over the measured ones.
  const double tokens = static_cast<double>(prompt + kDecodeWarmUpSteps) + static_cast<double>(options.steps + 1) / 2;
  nlohmann::json rows = nlohmann::json::array();
  Table table({"samples alive", "ms a step", "floor ms", "of the floor", "bytes read"});
  for (const int64_t alive : options.batch_sizes) {
    const double middle = decode_seconds(*model, options, target, prompt, alive, context, out);
    const double bytes =
        (decode_weight_bytes(target.config, target.element_bytes, real(alive)) +
         tokens * static_cast<double>(alive) * context_bytes_per_token(target.config, target.element_bytes)) /
        real(options.common.tp);
    const double floor = bytes / ceilings.bytes_per_second();
    rows.push_back({{"alive", alive},
                    {"context", tokens},
                    {"milliseconds", middle * 1e3},
                    {"floor_milliseconds", floor * 1e3},
                    {"bytes", bytes},
                    {"bytes_per_second", bytes / middle}});
    table.add({std::to_string(alive), milliseconds(middle), milliseconds(floor), percent(floor, middle),
               terabytes(bytes / middle)});
  }
  nlohmann::json report = report_header("decode", options.common, target);
  report.update({{"steps", options.steps},
                 {"copy_bytes_per_second", ceilings.copy_bytes_per_second},
                 {"read_bytes_per_second", ceilings.read_bytes_per_second},
                 {"matmul_flops_per_second", ceilings.flops_per_second},
                 {"rows", rows}});
  if (!context.is_main()) return report;
  out << "decode steps of " << options.common.shape << ", mean context " << options.context << ", copy "
      << terabytes(ceilings.bytes_per_second()) << "\n";
  table.print(out);
  write_report(options.common, report);
  return report;
}

}  // namespace trireme::bench
