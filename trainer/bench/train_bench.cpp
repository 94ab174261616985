#include "trainer/bench/train_bench.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "trainer/algorithms/loss.h"
#include "trainer/algorithms/pipeline_step.h"
#include "trainer/algorithms/recompute.h"
#include "trainer/algorithms/router_metrics.h"
#include "trainer/batch/micro_batch.h"
#include "trainer/bench/trace.h"
#include "trainer/bench/work.h"
#include "trainer/model/context_rows.h"
#include "trainer/ops/philox.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/device.h"

namespace trireme::bench {
namespace {

constexpr double kLearningRate = 1e-6, kWeightDecay = 0.01, kMaxGradNorm = 1.0;
constexpr int64_t kUsualPrompt = 200;

struct Batch {
  MicroBatch micro;
  LossInputs inputs;  // all but `current` and the counts
  std::vector<int64_t> lengths;
  double flops = 0;  // of forward and backward
};

Batch make_batch(const TrainBenchOptions& options, const Target& target, uint64_t id) {
  const int64_t length = options.tokens / options.sequences;
  const int64_t prompt =
      options.prompt_tokens > 0 ? options.prompt_tokens : std::max<int64_t>(1, std::min(kUsualPrompt, length / 2));
  if (prompt > length) {
    fail_user("--prompt-tokens " + std::to_string(prompt) + " is more than the " + std::to_string(length) +
              " tokens of a sequence");
  }
  std::vector<Sample> samples;
  Members members;
  std::vector<double> advantages, ones;
  uint64_t draw = 0;
  const auto token = [&] {
    return static_cast<int32_t>(philox_uniform(options.common.seed, id, draw++) *
                                static_cast<double>(target.config.vocab_size));
  };
  for (int64_t s = 0; s < options.sequences; ++s) {
    Sample sample;
    std::vector<int32_t> tokens;
    for (int64_t t = 0; t < prompt; ++t) tokens.push_back(token());
    sample.prompt = SharedTokens(std::move(tokens));
    // The last token of a response is a target only, so that the pass has `length` rows.
    for (int64_t t = prompt; t <= length; ++t) sample.response.push_back(token());
    sample.generation_logprobs.assign(sample.response.size(), -std::log(static_cast<float>(target.config.vocab_size)));
    samples.push_back(std::move(sample));
    members.push_back(s);
    advantages.push_back(s % 2 == 0 ? 1 : -1);
    ones.push_back(1);
  }
  Batch batch;
  batch.micro = make_micro_batch(samples, members);
  batch.inputs.previous = generation_logprobs(samples, members).to(target.device);
  batch.inputs.generation = batch.inputs.reference = batch.inputs.previous;
  batch.inputs.advantages = spread(samples, members, advantages).to(target.device);
  batch.inputs.mask = spread(samples, members, ones).to(target.device);
  batch.inputs.sequence = batch.micro.sequence.to(target.device);
  batch.inputs.sequence_mask = at::ones({options.sequences}, at::TensorOptions().device(target.device));
  batch.lengths.assign(static_cast<size_t>(options.sequences), length);
  batch.flops = training_flops(target.config, batch.lengths, batch.micro.response_tokens());
  return batch;
}

// Of a tensor's bits and their order: one number to compare weights by. Little memory: in pieces.
std::string fingerprint(const at::Tensor& flat) {
  constexpr int64_t kPiece = int64_t{1} << 24;
  const at::Tensor bits = flat.view(flat.element_size() == 2 ? at::kShort : at::kInt);
  uint64_t sum = 0;
  for (int64_t from = 0; from < bits.numel(); from += kPiece) {
    const at::Tensor piece = bits.narrow(0, from, std::min(kPiece, bits.numel() - from)).to(at::kLong);
    const at::Tensor places = at::arange(1, piece.numel() + 1, piece.options());
    sum = sum * 0x9E3779B97F4A7C15U + static_cast<uint64_t>((piece * places).sum().item<int64_t>());
  }
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(sum));
  return text;
}

// Of a step in parts: seconds, and the most memory at once in each part.
struct Split {
  double forward = 0, backward = 0, optimizer = 0;
  struct {
    int64_t forward = 0, backward = 0, optimizer = 0;
  } peak;
};

void check_length(const TrainBenchOptions& options, const Target& target) {
  const int64_t length = options.tokens / options.sequences;
  if (length <= target.config.positions()) return;
  fail_user("a sequence of " + std::to_string(length) + " tokens is longer than the " +
            std::to_string(target.config.positions()) + " positions of " + options.common.shape +
            "; raise --sequences");
}

StateSharding sharding_of(const TrainBenchOptions& options) {
  const auto found = parse_sharding(options.sharding);
  if (!found) fail_user("--sharding " + options.sharding + ": it is one of " + join(sharding_names(), ", "));
  return *found;
}

ModelOptions model_options(const TrainBenchOptions& options, const Target& target, ParallelContext& context) {
  ModelOptions model = target.model_options(/*trainable=*/true, context);
  model.gradient_dtype = parse_dtype(options.gradient_dtype);
  model.overlap_exchanges = options.overlap;
  const StateSharding shared = sharding_of(options);
  if (shared < StateSharding::kGradients || context.data_parallel().size() == 1) return model;
  if (options.common.pp > 1) fail_user("--sharding " + options.sharding + " needs a model of one stage (--pp 1)");
  model.sharding = {.gradients = true,
                    .weights = shared == StateSharding::kWeights,
                    .ranks = &context.data_parallel(),
                    .experts = context.expert_data_parallel(model.split)};
  return model;
}

// A model, its optimizer and the micro-batches of one optimizer step of this rank.
class TrainStep final {
 public:
  TrainStep(const TrainBenchOptions& options, const Target& target, ParallelContext& context)
      : options_(options),
        device_(target.device),
        context_(context),
        model_(make_random_model(target.config, model_options(options, target, context), options.common.seed)) {
    if (model_->options().sharding.weights) model_->units()->cut();
    if (options.optimizer) {
      AdamWOptions adam;
      adam.shard_state = sharding_of(options) != StateSharding::kNothing;
      adam.reduce_in_fp32 = parse_dtype(options.gradient_dtype) == at::kFloat;
      optimizer_ = std::make_unique<DistributedAdamW>(*model_, context.data_parallel(), adam,
                                                      context.expert_data_parallel(model_->options().split));
    }
    if (model_->units() != nullptr) model_->units()->release();
    for (int64_t m = 0; m < options.micro_batches; ++m) {
      const int64_t id = context.coordinates().dp * options.micro_batches + m;
      batches_.push_back(make_batch(options, target, static_cast<uint64_t>(id)));
      scored_ += batches_.back().micro.response_tokens();
      flops_ += batches_.back().flops / static_cast<double>(options.common.devices_of_replica());
    }
    const int64_t ranks = context.layout().dp;
    global_tokens_ = static_cast<double>(scored_ * ranks);
    global_sequences_ = static_cast<double>(options.sequences * options.micro_batches * ranks);
    loss_.kl_score_function_gradient = false;  // as in the results there are
    Config config;
    config.policy.activation_checkpointing = options.checkpoint_activations;
    config.policy.recompute_layers = options.recompute_layers;
    OwnRows most_rows;
    for (const Batch& batch : batches_) most_rows = at_most(most_rows, own_rows(*model_, batch.micro.input));
    const KeptActivations kept = kept_activations(model_->split(), most_rows, options.micro_batches);
    set_recompute(*model_, config, kept, context);
    watch_routers(*model_, config, context);
  }

  // Of the first micro-batch's log-probs: alike under every layout but another tp.
  std::string logprobs_fingerprint() {
    const at::NoGradGuard no_grad;
    const MicroBatch& batch = batches_.front().micro;
    at::Tensor found = at::empty({batch.response_tokens()}, at::TensorOptions(device_).dtype(at::kFloat));
    PipelineWork work;
    work.inputs = {&batch.input};
    work.finish = [&](size_t, const at::Tensor& hidden) {
      return found = response_logprobs(*model_, hidden, batch, LogprobOptions());
    };
    forward_passes(*model_, work);
    share_result(*model_, found);
    return fingerprint(found);
  }

  void whole() {
    PipelineWork work;
    for (const Batch& batch : batches_) work.inputs.push_back(&batch.micro.input);
    work.finish = [this](size_t index, const at::Tensor& hidden) { return loss_of(batches_[index], hidden); };
    if (optimizer_ != nullptr && options_.overlap) work.before_last = [this] { optimizer_->reduce_in_next_backward(); };
    train_passes(*model_, work);
    finish();
  }

  // The same with the device awaited between its parts. Of one stage.
  Split in_parts() {
    Split split;
    synchronize(device_);
    take_peak_memory_bytes(device_);
    Stopwatch watch;
    const auto end_part = [&](double& seconds, int64_t& peak) {
      synchronize(device_);
      seconds += watch.lap();
      peak = std::max(peak, take_peak_memory_bytes(device_));
    };
    for (Batch& batch : batches_) {
      const at::Tensor value = loss_of(batch, model_->forward(on_device(context_part(*model_, batch.micro.input))));
      end_part(split.forward, split.peak.forward);
      value.backward();
      end_part(split.backward, split.peak.backward);
    }
    finish();
    end_part(split.optimizer, split.peak.optimizer);
    return split;
  }

  std::string weights_fingerprint() {
    if (optimizer_ != nullptr) optimizer_->finish_gather();
    if (model_->options().sharding.weights) model_->units()->gather();
    return fingerprint(model_->flat_parameters().detach());
  }

  const Model& model() const { return *model_; }
  int64_t scored() const { return scored_; }
  double flops() const { return flops_; }
  int64_t reduced_early() const { return reduced_early_; }

 private:
  PackedBatch on_device(PackedBatch input) const {
    input.ids = input.ids.to(device_);
    input.positions = input.positions.to(device_);
    return input;
  }

  at::Tensor loss_of(const Batch& batch, const at::Tensor& hidden) const {
    LossInputs inputs = batch.inputs;
    inputs.current = response_logprobs(*model_, hidden, batch.micro, LogprobOptions());
    inputs.global_valid_tokens = global_tokens_;
    inputs.global_valid_sequences = global_sequences_;
    return policy_loss(inputs, loss_).loss;
  }

  void finish() {
    if (model_->router_watch != nullptr) (void)router_metrics(*model_->router_watch, context_);
    if (optimizer_ == nullptr) {
      model_->zero_gradients();
      return;
    }
    const auto gather = options_.overlap ? DistributedAdamW::Gather::kLater : DistributedAdamW::Gather::kNow;
    reduced_early_ = optimizer_->step(kLearningRate, kWeightDecay, kMaxGradNorm, gather).reduced_early;
  }

  const TrainBenchOptions& options_;
  at::Device device_;
  ParallelContext& context_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<DistributedAdamW> optimizer_;
  std::vector<Batch> batches_;
  LossOptions loss_;
  int64_t scored_ = 0;  // tokens
  double flops_ = 0;
  double global_tokens_ = 0, global_sequences_ = 0;
  int64_t reduced_early_ = 0;  // buckets, in the last step
};

struct TrainTimes {
  std::vector<double> seconds;  // of whole steps
  double middle = 0;            // their median
  std::optional<Split> split;   // medians of steps in parts; nothing of several stages, where there is no such order
  int64_t peak_bytes = 0;       // of whole steps
};

TrainTimes time_steps(TrainStep& step, const TrainBenchOptions& options, at::Device device, Communicator& group) {
  take_peak_memory_bytes(device);
  step.whole();
  TrainTimes times;
  for (int64_t r = 0; r < options.common.repeats; ++r) {
    synchronize(device);
    group.barrier();
    Stopwatch watch;
    step.whole();
    synchronize(device);
    times.seconds.push_back(group.all_reduce_max(watch.seconds()));
  }
  times.peak_bytes = take_peak_memory_bytes(device);
  std::vector<double> forward, backward, optimizer;
  Split last;
  for (int64_t r = 0; r < options.common.repeats && options.common.pp == 1; ++r) {
    group.barrier();
    last = step.in_parts();
    forward.push_back(group.all_reduce_max(last.forward));
    backward.push_back(group.all_reduce_max(last.backward));
    optimizer.push_back(group.all_reduce_max(last.optimizer));
  }
  times.middle = median(times.seconds);
  if (!forward.empty()) times.split = {median(forward), median(backward), median(optimizer), last.peak};
  return times;
}

// Of each device: the ranks of a replica, and context ranks, share a micro-batch.
double tokens_per_second(const TrainBenchOptions& options, const TrainTimes& times) {
  const int64_t tokens = options.tokens / options.sequences * options.sequences * options.micro_batches;
  return static_cast<double>(tokens) / static_cast<double>(options.common.devices_of_replica()) / times.middle;
}

nlohmann::json train_report(const TrainBenchOptions& options, const Target& target, const TrainStep& step,
                            const TrainTimes& times, const Ceilings& ceilings, int64_t ranks) {
  const double flops = step.flops(), ceiling = ceilings.flops_per_second;
  nlohmann::json report = report_header("train", options.common, target);
  report.update({{"ranks", ranks},
                 {"micro_batch_tokens", options.tokens},
                 {"sequences", options.sequences},
                 {"micro_batches", options.micro_batches},
                 {"scored_tokens", step.scored()},
                 {"optimizer", options.optimizer},
                 {"gradient_dtype", options.gradient_dtype},
                 {"sharding", options.sharding},
                 {"recomputed_layers", step.model().recompute().whole_layers},
                 {"cheaply_recomputed_layers", step.model().recompute().cheap_layers},
                 {"overlap", options.overlap},
                 {"buckets_reduced_in_backward", step.reduced_early()},
                 {"seconds", times.middle},
                 {"seconds_of_repeats", times.seconds},
                 {"tokens_per_second_per_device", tokens_per_second(options, times)},
                 {"model_flops_per_device", flops},
                 {"flops_per_second", flops / times.middle},
                 {"floor_seconds", flops / ceiling},
                 {"peak_memory_bytes", times.peak_bytes},
                 {"copy_bytes_per_second", ceilings.copy_bytes_per_second},
                 {"read_bytes_per_second", ceilings.read_bytes_per_second},
                 {"matmul_flops_per_second", ceiling}});
  if (const std::optional<Split>& split = times.split) {
    report["split"] = {{"forward_seconds", split->forward},
                       {"backward_seconds", split->backward},
                       {"optimizer_seconds", split->optimizer},
                       {"forward_peak_bytes", split->peak.forward},
                       {"backward_peak_bytes", split->peak.backward},
                       {"optimizer_peak_bytes", split->peak.optimizer},
                       {"forward_flops_per_second", flops / 3 / split->forward},
                       {"backward_flops_per_second", flops * 2 / 3 / split->backward},
                       {"forward_backward_flops_per_second", flops / (split->forward + split->backward)}};
  }
  return report;
}

void print_train(const TrainBenchOptions& options, const TrainTimes& times, double flops, double ceiling, int64_t ranks,
                 std::ostream& out) {
  Table table({"train " + options.common.shape + ", " + std::to_string(ranks) + " ranks (tp " +
                   std::to_string(options.common.tp) + ", cp " + std::to_string(options.common.cp) + ", pp " +
                   std::to_string(options.common.pp) + ")",
               "seconds", "model flops/s", "of the product's " + teraflops(ceiling)});
  const auto add = [&](const std::string& name, double elapsed, double operations) {
    table.add({name, format_fixed(elapsed, 4), operations > 0 ? teraflops(operations / elapsed) : "-",
               operations > 0 ? percent(operations / elapsed, ceiling) : "-"});
  };
  add(options.optimizer ? "optimizer step of " + std::to_string(options.micro_batches) + " micro-batches"
                        : std::to_string(options.micro_batches) + " micro-batches, no optimizer",
      times.middle, flops);
  if (const std::optional<Split>& split = times.split) {
    add("  forward", split->forward, flops / 3);
    add("  backward", split->backward, flops * 2 / 3);
    add("  forward + backward", split->forward + split->backward, flops);
    add(options.optimizer ? "  optimizer" : "  zeroing gradients", split->optimizer, 0);
  }
  table.print(out);
  out << "tokens/s of a device: " << format_fixed(tokens_per_second(options, times), 1) << "\n";
  if (times.peak_bytes > 0) out << "peak memory: " << format_bytes(static_cast<uint64_t>(times.peak_bytes)) << "\n";
}

}  // namespace

nlohmann::json bench_train(const TrainBenchOptions& options, ParallelContext& context, std::ostream& out) {
  if (options.sequences < 1 || options.tokens < 2 * options.sequences)
    fail_user("--tokens must be at least 2 for each of --sequences");
  if (options.micro_batches < 1) fail_user("--micro-batches must be at least 1");
  const Target target = resolve(options.common);
  check_length(options, target);
  const int64_t ranks = context.world_size();
  const Ceilings ceilings = measure_ceilings(target.device, target.dtype);
  TrainStep step(options, target, context);
  context.set_phase("benchmark");
  const std::string logprobs = step.logprobs_fingerprint();
  const TrainTimes times = time_steps(step, options, target.device, context.world());
  const std::string weights = step.weights_fingerprint();
  if (!options.trace.empty()) {
    const std::string file = ranks == 1 ? options.trace : options.trace + "." + std::to_string(context.rank());
    const Trace trace = trace_device(target.device, file, [&] { step.whole(); });
    if (context.is_main()) print_trace(trace, 1, out);
  }
  nlohmann::json report = train_report(options, target, step, times, ceilings, ranks);
  report["weights_fingerprint"] = weights;
  report["logprobs_fingerprint"] = logprobs;
  if (!context.is_main()) return report;
  print_train(options, times, step.flops(), ceilings.flops_per_second, ranks, out);
  out << "fingerprint of the weights: " << weights << ", of the first log-probs: " << logprobs << "\n";
  write_report(options.common, report);
  return report;
}

}  // namespace trireme::bench
