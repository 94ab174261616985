#include "trainer/algorithms/critic_rank.h"

#include <cstring>
#include <map>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/session_parts.h"
#include "trainer/parallel/device.h"

namespace trireme {
namespace {

// What a value depends on.
std::string tokens_of(const Sample& sample) {
  const auto prompt_tokens = static_cast<uint64_t>(sample.prompt.size());
  std::string tokens(reinterpret_cast<const char*>(&prompt_tokens), sizeof prompt_tokens);
  tokens.append(reinterpret_cast<const char*>(sample.prompt.data()), sample.prompt.size() * sizeof(int32_t));
  tokens.append(reinterpret_cast<const char*>(sample.response.data()), sample.response.size() * sizeof(int32_t));
  return tokens;
}

class CriticRank final {
 public:
  CriticRank(const Config& config, const TrainOptions& options)
      : config_(with_its_device(config, options)),
        options_(options),
        context_(runnable(options.layout, choose_device(config.cluster.device, options.rendezvous.local_rank).is_cuda()),
                 options.rendezvous),
        mail_(context_) {
    context_.set_on_phase(
        [this](const std::string& phase) { cause_kill(options_.fault, step_ + 1, phase, context_); });
    // Until its rewards answer, the actor gives no sign of life.
    mail_.add_patience(Milliseconds(static_cast<int64_t>(config_.env.startup_timeout_s * 1000)));
  }

  TrainSummary run() {
    TrainSummary summary;
    run_and_report(context_, [&] {
      start();
      summary = follow();
    });
    return summary;
  }

 private:
  void start() {
    const std::string theirs = mail_.wait(critic_mail::kSettings, /*from=*/0, "the actor's settings");
    if (const auto problem = settings_problem(theirs, config_)) fail_user(context_.name() + " " + *problem);
    const at::Device device = choose_device(config_.cluster.device, options_.rendezvous.local_rank);
    check_transport(options_.transport, context_, device);
    const std::filesystem::path policy_dir = resolve_model(config_.policy.model_name, options_.hf_home);
    const CriticModel found =
        find_critic(config_, ModelConfig::load(policy_dir), *load_tokenizer(config_, options_, policy_dir),
                    options_.hf_home, context_.layout(), context_.is_main());
    state_ = make_critic(found, options_.rendezvous.local_rank, context_);
    trainer_ = std::make_unique<CriticTrainer>(state_->config, *state_->model, *state_->optimizer, context_);
    trainer_->on_progress = [this] { mail_.beat(); };
    make_checkpoints();
    begin();
    context_.world().barrier();  // a signal finds all ranks before it, or all in the loop
    if (options_.on_ready) options_.on_ready();
    if (context_.is_main()) mail_.post(critic_mail::kReady, "", context_.actor_ranks());
  }

  void make_checkpoints() {
    CheckpointOptions checkpoint = checkpoint_options(config_, options_, state_->model_dir);
    checkpoint.follows = checkpoint.directory;
    checkpoint.directory /= "value";
    checkpoint.folder = "value";
    const nlohmann::json fingerprint = {{"algorithm", config_.algorithm}, {"value", state_->model->config().to_json()}};
    checkpoints_ = std::make_unique<CheckpointManager>(checkpoint, fingerprint, context_);
    checkpoints_->on_wait = [this] { mail_.beat(); };
    checkpoints_->committed = [this](int64_t step) { context_.store()->set(critic_mail::saved(step), ""); };
    state_->optimizer->before_update = [this] { checkpoints_->wait_copied(); };
    if (ShardedUnits* units = state_->model->units()) units->before_release = state_->optimizer->before_update;
  }

  // Where the actor begins, or goes on.
  void begin() {
    const std::vector<std::string> words =
        split(mail_.wait(critic_mail::kBegin, /*from=*/0, "the actor to begin"), ' ');
    const auto steps = words.size() == 2 ? parse_int(words[0]) : std::nullopt;
    if (!steps || *steps < 0) fail_data("the actor does not say where the run begins");
    step_ = *steps;
    trainer_->set_passes_done(step_ * passes_per_rollout(config_));
    if (words[1] != "1") {
      warm_start_critic(*state_, config_, context_.is_main());
      return;
    }
    const CheckpointInfo loaded = checkpoints_->load_step(step_, config_.checkpointing.checkpoint_dir, *state_->model,
                                                          *state_->optimizer);
    if (context_.is_main())
      log_info("critic", "resuming after step " + std::to_string(step_) + " from " + loaded.path.string());
  }

  // The actor's next call. Meanwhile what was generated gets its values.
  CriticCall next_call() {
    context_.set_phase("waiting");
    const std::string name = critic_mail::call(++calls_);
    Mail::Wait wait(mail_, /*from=*/0, "the actor's next call, number " + std::to_string(calls_));
    while (true) {
      if (const auto bytes = mail_.take(name)) return unpack_call(*bytes);
      if (value_ahead()) continue;
      checkpoints_->throw_failure();
      tell_saved();
      tell_to_stop();
      wait.pause();
    }
  }

  // Of samples that this rank may take: the one after the other, in turn with the critic's other ranks.
  bool value_ahead() {
    const auto bytes = mail_.take(critic_mail::ahead(next_ahead()));
    if (!bytes) return false;
    ++aheads_taken_;
    if (!trainer_->values_alone()) return true;
    context_.set_phase("values");
    std::vector<Sample> samples = unpack_for_critic(*bytes);
    trainer_->fill_own_values(samples);
    for (const Sample& sample : samples) values_ahead_[tokens_of(sample)] = sample.values;
    context_.set_phase("waiting");
    return true;
  }
  int64_t next_ahead() const { return 1 + context_.rank() + aheads_taken_ * context_.world_size(); }

  // What was not come to before the call, which has all samples: taken out of the store.
  void drop_ahead() {
    const int64_t all = context_.store()->add(critic_mail::kAheadCount, 0);
    for (; next_ahead() <= all; ++aheads_taken_)
      (void)mail_.wait(critic_mail::ahead(next_ahead()), /*from=*/0, "samples that were generated");
  }

  // Values of the call's samples, on all ranks: those that any rank has already, then the rest, evenly.
  void fill_values(std::vector<Sample>& samples) {
    drop_ahead();
    std::string own;
    for (size_t i = 0; i < samples.size() && !values_ahead_.empty(); ++i) {
      const auto found = values_ahead_.find(tokens_of(samples[i]));
      if (found == values_ahead_.end()) continue;
      const auto place = static_cast<uint64_t>(i);
      own.append(reinterpret_cast<const char*>(&place), sizeof place);
      own.append(reinterpret_cast<const char*>(found->second.data()), found->second.size() * sizeof(float));
    }
    values_ahead_.clear();
    for (const std::string& part : context_.world().all_gather_bytes(own)) {
      for (size_t at = 0; at < part.size();) {
        uint64_t place = 0;
        TRIREME_CHECK(part.size() - at >= sizeof place, "a critic rank's values are cut off");
        std::memcpy(&place, part.data() + at, sizeof place);
        at += sizeof place;
        TRIREME_CHECK(place < samples.size(), "a critic rank has values of another sample");
        Sample& sample = samples[place];
        const size_t bytes = sample.response.size() * sizeof(float);
        TRIREME_CHECK(part.size() - at >= bytes, "a critic rank's values are cut off");
        sample.values.resize(sample.response.size());
        if (bytes > 0) std::memcpy(sample.values.data(), part.data() + at, bytes);
        at += bytes;
      }
    }
    trainer_->fill_values(samples);
  }

  CriticTrained train(const CriticCall& call) {
    if (options_.fault.step == call.step) {
      checkpoints_->wait_copied();
      cause_fault(options_.fault, call.step, context_, *state_->model);
    }
    const Stopwatch watch;
    CriticTrained trained;
    trained.metrics = trainer_->train(call.samples, call.passes);
    trained.seconds = watch.seconds();
    step_ = call.step;
    return trained;
  }

  void save(const CriticCall& call) {
    state_->optimizer->finish_gather();
    if (ShardedUnits* units = state_->model->units()) units->gather();
    checkpoints_->begin_save(call.step, *state_->model, *state_->optimizer, nlohmann::json::object(), call.metrics,
                             to_yaml(config_));
    tell_saved();
  }

  void answer(const std::string& bytes) {
    if (context_.is_main()) mail_.post(critic_mail::answer(calls_), bytes, context_.actor_ranks());
  }

  TrainSummary follow() {
    TrainSummary summary;
    while (true) {
      CriticCall call = next_call();
      switch (call.kind) {
        case CriticCall::Kind::kValues:
          context_.set_phase("values");
          fill_values(call.samples);
          answer(pack_values(call.samples));
          break;
        case CriticCall::Kind::kTrain:
          context_.set_phase("value training");
          answer(pack_trained(train(call)));
          break;
        case CriticCall::Kind::kSave:
          context_.set_phase("checkpoint");
          save(call);
          break;
        case CriticCall::Kind::kEnd:
          context_.set_phase("checkpoint");
          checkpoints_->finish();
          checkpoints_->tidy();
          context_.world().barrier();
          summary.end = call.stopped ? LoopEnd::kStopped : LoopEnd::kFinished;
          summary.steps = step_;
          answer("");
          return summary;
      }
    }
  }

  // The actor saves and stops all of its ranks, and then these.
  void tell_to_stop() {
    if (told_to_stop_ || options_.stop_signal == nullptr || options_.stop_signal->load() == 0) return;
    told_to_stop_ = true;
    context_.store()->set(critic_mail::kStop, context_.name());
  }

  void tell_saved() {
    const std::optional<SavedCheckpoint> saved = checkpoints_->take_saved();
    if (saved && context_.is_main()) log_saved(*saved);
  }

  const Config config_;
  const TrainOptions& options_;
  ParallelContext context_;
  Mail mail_;
  std::unique_ptr<CriticState> state_;
  std::unique_ptr<CriticTrainer> trainer_;
  std::unique_ptr<CheckpointManager> checkpoints_;           // its threads read the state
  std::map<std::string, std::vector<float>> values_ahead_;   // of this rank, by tokens_of(): of the weights of now
  int64_t step_ = 0;                                         // trained
  int64_t calls_ = 0, aheads_taken_ = 0;
  bool told_to_stop_ = false;
};

}  // namespace

TrainSummary run_critic(const Config& config, const TrainOptions& options) {
  return CriticRank(config, options).run();
}

}  // namespace trireme
