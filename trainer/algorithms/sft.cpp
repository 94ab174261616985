#include "trainer/algorithms/sft.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/log.h"
#include "trainer/algorithms/datasets.h"
#include "trainer/algorithms/loss.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/pipeline_step.h"
#include "trainer/algorithms/recompute.h"
#include "trainer/algorithms/router_metrics.h"
#include "trainer/batch/micro_batch.h"
#include "trainer/optimizer/lr_schedule.h"

namespace trireme {
namespace {

struct SftBatch {
  std::vector<Sample> samples;                  // tokens: the completion
  std::vector<std::vector<uint8_t>> loss_mask;  // per sample, per completion token
};

class SftLoop final {
 public:
  SftLoop(const Config& config, const TrainOptions& options)
      : session_(config, options, config.sft.max_num_steps),
        config_(session_.config),
        datasets_(open_datasets(config_, session_.tokenizer, options.hf_home, /*completions=*/true)),
        stream_(datasets_.train) {
    if (session_.resumed) {
      step_ = session_.resumed->step;
      stream_.restore(session_.resumed->state.at("prompts"));
      validated_step_ =
          session_.resumed->state.value("validated_step", int64_t{-1});  // once is enough, for the log too
      const nlohmann::json& state = session_.resumed->state;
      if (state.contains("validation")) {
        last_validation_ = state.at("validation").get<double>();
      } else if (session_.resumed->metrics.count("val:loss") > 0) {  // an older checkpoint
        last_validation_ = session_.resumed->metrics.at("val:loss");
      }
    }
    check_validation_data(datasets_, "sft", config_.sft.val_period, config_.sft.max_num_steps, config_.sft.val_at_start,
                          config_.sft.val_at_end);
    routers_ = watch_routers(*session_.policy, config_, session_.context);
    session_.ready(step_);
  }

  TrainSummary run() {
    TrainSummary summary;
    run_and_report(session_.context, [&] { summary = run_steps(); });
    return summary;
  }

 private:
  TrainSummary run_steps() {
    const SftConfig& s = config_.sft;
    if (s.val_at_start && step_ == 0) session_.reporting.log_validation(0, {{"validation/loss", validate()}});
    TrainSummary summary;
    session_.timer.start_step();
    const int64_t rows = stream_.rows_of_epochs(s.max_num_epochs, config_.policy.train_global_batch_size);
    while (step_ < s.max_num_steps && stream_.drawn() < rows && !good_enough()) {
      one_step();
      if (session_.should_stop() && step_ < s.max_num_steps && !good_enough()) {
        if (session_.checkpoint_on_stop()) save();
        summary.end = LoopEnd::kStopped;
        break;
      }
    }
    if (summary.end == LoopEnd::kFinished) {
      if (s.val_at_end && validated_step_ != step_)
        session_.reporting.log_validation(step_, {{"validation/loss", validate()}});
      save();
    }
    session_.finish_saves();
    session_.reporting.finish();
    summary.steps = step_;
    summary.validation = last_validation_;
    return summary;
  }

  // Whether this step was validated with a loss that ends the run; for a resumed one too.
  bool good_enough() const {
    const auto& limit = config_.sft.stop_at_validation_loss;
    return limit && validated_step_ == step_ && last_validation_ && *last_validation_ <= *limit;
  }

  void save() {
    nlohmann::json state = {{"prompts", stream_.state()}, {"validated_step", validated_step_}};
    if (last_validation_) state["validation"] = *last_validation_;
    session_.save(step_, state, metrics_of_step(config_, measured_));
  }

  void add(SftBatch& batch, PromptExample example) const {
    const int64_t longest = config_.policy.max_total_sequence_length;
    Sample sample;
    sample.group = static_cast<int64_t>(batch.samples.size());
    sample.prompt = SharedTokens(std::move(example.prompt));
    sample.response = std::move(example.response);
    std::vector<uint8_t> mask = std::move(example.response_mask);
    const int64_t room = std::max<int64_t>(0, longest - static_cast<int64_t>(sample.prompt.size()));
    if (static_cast<int64_t>(sample.response.size()) > room) {  // cut, as the reference does
      sample.response.resize(static_cast<size_t>(room));
      mask.resize(static_cast<size_t>(room));
    }
    sample.generation_logprobs.assign(sample.response.size(), 0.0f);
    batch.samples.push_back(std::move(sample));
    batch.loss_mask.push_back(std::move(mask));
  }

  std::vector<Members> own_micro_batches(const SftBatch& batch, bool train) {
    Members all(batch.samples.size());
    std::iota(all.begin(), all.end(), int64_t{0});
    const Communicator& ranks = session_.context.group(Axis::kDp);
    return make_micro_batches(batch.samples, all, sft_micro_batches(config_, train),
                              ranks.size())[static_cast<size_t>(ranks.rank())];
  }

  static double valid_tokens(const SftBatch& batch) {
    double tokens = 0;
    for (const auto& mask : batch.loss_mask)
      tokens += static_cast<double>(std::count(mask.begin(), mask.end(), uint8_t{1}));
    return tokens;
  }

  static at::Tensor token_mask(const SftBatch& batch, const Members& members) {
    std::vector<float> flat;
    for (const int64_t i : members) {
      const auto& mask = batch.loss_mask[static_cast<size_t>(i)];
      flat.insert(flat.end(), mask.begin(), mask.end());
    }
    return at::tensor(flat, at::kFloat);
  }

  // This rank's part of the loss: the sum over its micro-batches, divided by the global token count; backward when
  // `train`. Alike on all ranks of a split model. Its sum over replicas is the caller's, after the optimizer step:
  // backward may have begun collectives, which come in one order on all ranks, also on one without a micro-batch.
  double forward(const SftBatch& batch, bool train) {
    const double tokens = valid_tokens(batch);
    Model& policy = *session_.policy;
    std::vector<MicroBatch> micro_batches;
    for (const Members& members : own_micro_batches(batch, train)) {
      MicroBatch micro = make_micro_batch(batch.samples, members);
      if (micro.response_tokens() > 0) micro_batches.push_back(std::move(micro));
    }
    if (train) {
      OwnRows most_rows;
      for (const MicroBatch& micro : micro_batches) most_rows = at_most(most_rows, own_rows(policy, micro.input));
      const auto batches = static_cast<int64_t>(micro_batches.size());
      set_recompute(policy, config_, kept_activations(policy.split(), most_rows, batches), session_.context);
    }
    PipelineWork work;
    for (const MicroBatch& micro : micro_batches) work.inputs.push_back(&micro.input);
    at::Tensor loss = at::zeros({1}, at::kDouble);
    work.finish = [&](size_t index, const at::Tensor& hidden) {
      const MicroBatch& micro = micro_batches[index];
      const at::Tensor mask = token_mask(batch, micro.members).to(policy.options().device);
      LossOutput output = sft_loss(response_logprobs(policy, hidden, micro, LogprobOptions{}), mask, tokens);
      loss += output.metrics.at("loss");
      return output.loss;
    };
    if (overlap_grad_reduce(config_)) work.before_last = [this] { session_.optimizer->reduce_in_next_backward(); };
    work.on_progress = [this] { session_.reporting.heartbeat(); };
    if (train) {
      if (routers_ != nullptr) routers_->set_valid_tokens(tokens);
      train_passes(policy, work);
    } else {
      forward_passes(policy, work);
    }
    share_result(policy, loss);
    return loss.item<double>();
  }

  // A step lasts from the end of the one before, saving included, to the end of its optimizer step.
  void one_step() {
    StepReport report;
    report.step = step_ + 1;
    session_.begin_step(report.step);
    session_.reporting.phase("training", report.step);
    session_.context.set_phase("training");
    session_.cause_fault(report.step);
    if (ShardedUnits* units = session_.policy->units()) units->release();  // a save had them whole
    PhaseTimer::Scope training = session_.timer.enter(Phase::kTraining);
    SftBatch batch;
    for (PromptExample& example : stream_.take(config_.policy.train_global_batch_size)) add(batch, std::move(example));
    session_.start_waits();
    const double own_loss = forward(batch, true);
    const double rate = learning_rate(config_, step_);
    const OptimizerStep step = session_.optimizer->step(
        rate, weight_decay(config_, step_), max_grad_norm(config_),
        overlap_param_gather(config_) ? DistributedAdamW::Gather::kLater : DistributedAdamW::Gather::kNow);
    const double loss = session_.context.group(Axis::kDp).all_reduce_sum(own_loss);
    session_.describe_waits(report.values);
    training.end();
    ++step_;
    for (const Sample& s : batch.samples) report.tokens += static_cast<double>(s.length());
    report.samples = static_cast<double>(batch.samples.size());
    if (routers_ != nullptr) {
      for (const auto& [name, value] : router_metrics(*routers_, session_.context))
        report.values["train/" + name] = value;
    }
    report.values["train/loss"] = loss;
    report.values["train/grad_norm"] = step.grad_norm;
    report.values["train/lr"] = rate;
    report.values["train/skipped_long_prompts"] = static_cast<double>(stream_.skipped_long());  // since the start
    report.values["train/optimizer_steps"] = static_cast<double>(step_);
    report.values["train/lr_schedule_steps"] = static_cast<double>(step_ - 1);  // where "train/lr" was read
    report.values["train/total_num_tokens"] = report.tokens;
    measured_ = report.values;
    report.phases = session_.timer.finish_step();
    if (config_.sft.val_period > 0 && step_ % config_.sft.val_period == 0) {  // no part of the step
      Stopwatch watch;
      report.values["validation/loss"] = validate();
      report.values["timing/validation/total_validation_time"] = watch.seconds();
    }
    session_.reporting.step(report);
    session_.timer.start_step();
    // After the step's record: a run killed in between repeats the step; the other way round it would lack the record.
    if (config_.checkpointing.save_period > 0 && step_ % config_.checkpointing.save_period == 0 &&
        step_ < config_.sft.max_num_steps && !good_enough()) {
      save();
    }
  }

  // The mean over valid tokens, however they are batched.
  double validate() {
    session_.reporting.phase("validation", step_);
    double sum = 0, tokens = 0;
    int64_t next = 0;
    for (int64_t batches = 0; batches < config_.sft.val_batches && next < datasets_.validation->size(); ++batches) {
      SftBatch batch;
      while (static_cast<int64_t>(batch.samples.size()) < config_.sft.val_global_batch_size &&
             next < datasets_.validation->size()) {
        if (auto example = datasets_.validation->example(next++)) add(batch, std::move(*example));
      }
      const double of_batch = valid_tokens(batch);
      sum += of_batch * session_.context.group(Axis::kDp).all_reduce_sum(forward(batch, false));
      tokens += of_batch;
    }
    last_validation_ = tokens > 0 ? sum / tokens : 0;
    validated_step_ = step_;
    measured_["validation/loss"] = *last_validation_;
    if (session_.context.is_main())
      log_info("sft", "step " + std::to_string(step_) + ": validation loss " + std::to_string(*last_validation_));
    return *last_validation_;
  }

  Session session_;
  const Config& config_;
  Datasets datasets_;
  PromptStream stream_;
  int64_t step_ = 0;
  std::optional<double> last_validation_;
  int64_t validated_step_ = -1;
  std::shared_ptr<RouterWatch> routers_;    // null: the model has no experts
  std::map<std::string, double> measured_;  // of step_, by their names in the log; empty after a resume
};

}  // namespace

TrainSummary run_sft(const Config& config, const TrainOptions& options) { return SftLoop(config, options).run(); }

}  // namespace trireme
