#include "trainer/algorithms/critic_rank.h"

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/critic_follower.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/session_parts.h"
#include "trainer/parallel/device.h"

namespace trireme {
namespace {

class CriticRank final {
 public:
  CriticRank(const Config& config, const TrainOptions& options)
      : config_(with_its_device(config, options)),
        options_(options),
        context_(options.layout, options.rendezvous),
        mail_(context_) {
    context_.set_on_phase([this](const std::string& phase) {
      if (follower_ != nullptr) cause_kill(options_.fault, follower_->steps() + 1, phase, context_);
    });
    // Until its rewards answer, the actor gives no sign of life.
    mail_.add_patience(Milliseconds(static_cast<int64_t>(config_.env.startup_timeout_s * 1000)));
  }

  TrainSummary run() {
    TrainSummary summary;
    run_and_report(context_, [&] {
      start();
      summary = follower_->follow();
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
    const ModelRanks ranks{context_.layout(), ranks_of_node(config_, options_.rendezvous), device.is_cuda()};
    const CriticModel found =
        find_critic(config_, ModelConfig::load(policy_dir), *load_tokenizer(config_, options_.hf_home, policy_dir),
                    options_.hf_home, ranks, context_.is_main());
    check_critic_fits(config_, found, context_.layout(), memory_of_a_rank(config_, device), context_.is_main());
    state_ = make_critic(found, options_.rendezvous.local_rank, context_);
    trainer_ = std::make_unique<CriticTrainer>(state_->config, *state_->model, *state_->optimizer, context_);
    trainer_->on_progress = [this] { mail_.beat(); };
    make_checkpoints();
    follow_from(begin());
    context_.world().barrier();  // a signal finds all ranks before it, or all in the loop
    if (options_.on_ready) options_.on_ready();
    const bool alone = trainer_->values_alone();
    if (context_.is_main())
      mail_.post(critic_mail::kReady, alone ? "" : critic_mail::kTogether, context_.actor_ranks());
  }

  void make_checkpoints() {
    CheckpointOptions checkpoint = checkpoint_options(config_, options_, state_->model_dir);
    checkpoint.follows = checkpoint.directory;
    checkpoint.directory /= "value";
    checkpoint.folder = "value";
    const nlohmann::json fingerprint = {{"algorithm", config_.algorithm}, {"value", state_->model->config().to_json()}};
    checkpoints_ = std::make_unique<CheckpointManager>(checkpoint, fingerprint, context_);
    checkpoints_->on_wait = [this] { mail_.beat(); };
    checkpoints_->on_written = [this] { (void)context_.store()->add(critic_mail::kSaving, 1); };
    checkpoints_->committed = [this](int64_t step) { context_.store()->set(critic_mail::saved(step), ""); };
    state_->optimizer->before_update = [this] { checkpoints_->wait_copied(); };
    if (ShardedUnits* units = state_->model->units()) units->before_release = state_->optimizer->before_update;
  }

  // How many steps the run has done: where the actor begins, or goes on.
  int64_t begin() {
    const std::vector<std::string> words =
        split(mail_.wait(critic_mail::kBegin, /*from=*/0, "the actor to begin"), ' ');
    const auto steps = words.size() == 2 ? parse_int(words[0]) : std::nullopt;
    if (!steps || *steps < 0) fail_data("the actor does not say where the run begins");
    trainer_->set_passes_done(*steps * passes_per_rollout(config_));
    if (words[1] != "1") {
      warm_start_critic(*state_, config_, context_.is_main());
      if (config_.checkpointing.enabled) checkpoints_->open(*state_->model, *state_->optimizer);
      return *steps;
    }
    const CheckpointInfo loaded =
        checkpoints_->load_step(*steps, config_.checkpointing.checkpoint_dir, *state_->model, *state_->optimizer);
    if (context_.is_main())
      log_info("critic", "resuming after step " + std::to_string(*steps) + " from " + loaded.path.string());
    return *steps;
  }

  void follow_from(int64_t steps) {
    follower_ = std::make_unique<CriticFollower>(context_, mail_, *state_, *trainer_, *checkpoints_, steps);
    follower_->config_yaml = to_yaml(config_);
    follower_->stop_signal = options_.stop_signal;
    follower_->before_training = [this](int64_t step) {
      if (options_.fault.step != step) return;
      checkpoints_->wait_copied();
      cause_fault(options_.fault, step, context_, *state_->model);
    };
  }

  const Config config_;
  const TrainOptions& options_;
  ParallelContext context_;
  Mail mail_;
  std::unique_ptr<CriticState> state_;
  std::unique_ptr<CriticTrainer> trainer_;
  std::unique_ptr<CheckpointManager> checkpoints_;  // its threads read the state
  std::unique_ptr<CriticFollower> follower_;
};

}  // namespace

TrainSummary run_critic(const Config& config, const TrainOptions& options) { return CriticRank(config, options).run(); }

}  // namespace trireme
