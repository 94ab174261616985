#include "trainer/algorithms/reporting.h"

#include <cstdio>
#include <filesystem>
#include <optional>

#include "base/log.h"
#include "base/text.h"
#include "trainer/telemetry/metrics_server.h"
#include "trainer/telemetry/report.h"
#include "trainer/telemetry/status_reporter.h"
#include "trainer/telemetry/step_log.h"
#include "trainer/telemetry/terminal.h"
#include "trainer/trackers/mlflow.h"
#include "trainer/trackers/tensorboard.h"
#include "trainer/trackers/wandb.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

std::optional<Phase> phase_of(const std::string& name) {
  for (const Phase phase : all_phases()) {
    if (name == to_string(phase)) return phase;
  }
  return std::nullopt;
}

// The trackers that the configuration switches on. Throws Error(kUser) for an address that is none.
std::vector<std::unique_ptr<Tracker>> make_trackers(const LoggerConfig& logger, const ReportingOptions& options) {
  std::vector<std::unique_ptr<Tracker>> trackers;
  const fs::path log_dir = logger.log_dir;
  if (logger.tensorboard_enabled) trackers.push_back(make_tensorboard(logger.tensorboard.log_dir));
  if (logger.wandb_enabled) {
    WandbOptions wandb;
    wandb.folder = log_dir / "wandb";
    if (!logger.wandb.project.empty()) wandb.project = logger.wandb.project;
    wandb.name = logger.wandb.name;
    wandb.entity = logger.wandb.entity;
    wandb.group = logger.wandb.group;
    wandb.tags = logger.wandb.tags;
    trackers.push_back(make_wandb(wandb));
  }
  if (logger.mlflow_enabled) {
    MlflowOptions mlflow;
    mlflow.tracking_uri = logger.mlflow.tracking_uri.empty() ? options.mlflow_tracking_uri : logger.mlflow.tracking_uri;
    mlflow.experiment_name = logger.mlflow.experiment_name;
    mlflow.run_name = logger.mlflow.run_name;
    mlflow.state_file = log_dir / "mlflow_run.json";
    mlflow.token = options.mlflow_token;
    mlflow.username = options.mlflow_username;
    mlflow.password = options.mlflow_password;
    trackers.push_back(make_mlflow(mlflow));
  }
  return trackers;
}

}  // namespace

struct Reporting::Impl {
  Config config;
  ReportingOptions options;
  int rank = 0;
  int world_size = 1;
  int64_t total_steps = 0;
  std::unique_ptr<StepLog> log;
  std::unique_ptr<RolloutLog> rollouts;
  std::unique_ptr<MetricsServer> metrics;
  std::unique_ptr<StatusReporter> status;
  std::unique_ptr<TerminalView> terminal;
  std::vector<std::unique_ptr<Tracker>> trackers;  // until ready()
  std::unique_ptr<TrackerQueue> tracking;
  double reward_failures = 0;
  int64_t step_now = 0;
  Phase phase_now = Phase::kIdle;

  fs::path log_path() const { return fs::path(config.logger.log_dir) / "train.jsonl"; }
  fs::path report_path() const { return fs::path(config.logger.log_dir) / "report.html"; }

  void write_page() {
    if (rank != 0 || !config.logger.report) return;
    try {
      ReportOptions page;
      page.title = "Trireme: " + config.policy.model_name;
      page.config_yaml = to_yaml(config);
      write_report(log_path(), report_path(), page);
    } catch (const std::exception& error) {
      log_warn("report", std::string("cannot write the report page: ") + error.what());
    }
  }
};

Reporting::Reporting(const Config& config, const ReportingOptions& options, int rank, int world_size,
                     int64_t total_steps)
    : impl_(std::make_unique<Impl>()) {
  impl_->config = config;
  impl_->options = options;
  impl_->rank = rank;
  impl_->world_size = world_size;
  impl_->total_steps = total_steps;
  const PrometheusConfig& p = config.logger.prometheus;
  if (p.enabled && (rank == 0 || p.per_rank)) {
    MetricsOptions metrics;
    metrics.address = p.address;
    metrics.port = p.port == 0 ? 0 : static_cast<int>(p.port + (p.per_rank ? rank : 0));
    metrics.rank = rank;
    impl_->metrics = std::make_unique<MetricsServer>(metrics);
    log_info("metrics", "http://" + p.address + ":" + std::to_string(impl_->metrics->port()) + "/metrics");
  }
  if (rank != 0) return;
  if (!options.status_url.empty()) {
    StatusOptions status;
    status.url = options.status_url;
    status.token_file = options.status_token_file;
    status.ca_file = options.status_ca_file;
    impl_->status = std::make_unique<StatusReporter>(status);
    impl_->status->update({{"attempt", parse_int(options.attempt).value_or(0)}, {"rendezvousDone", false}});
  }
  impl_->trackers = make_trackers(config.logger, options);
  if (options.terminal) impl_->terminal = std::make_unique<TerminalView>(stdout);
}

Reporting::~Reporting() = default;

void Reporting::ready(int64_t resumed_step) {
  impl_->step_now = resumed_step;
  if (impl_->rank == 0) {
    fs::create_directories(impl_->config.logger.log_dir);
    impl_->log = std::make_unique<StepLog>(impl_->log_path(), resumed_step);
    const RolloutLogConfig& r = impl_->config.logger.rollouts;
    if (r.enabled && has_rollouts(impl_->config)) {
      RolloutLogOptions rollouts;
      rollouts.directory = impl_->config.logger.log_dir;
      rollouts.keep_steps = r.keep_steps;
      impl_->rollouts = std::make_unique<RolloutLog>(rollouts, resumed_step);
    }
    if (!impl_->trackers.empty()) {
      impl_->tracking =
          std::make_unique<TrackerQueue>(std::move(impl_->trackers), TrackedRun{to_json(impl_->config), resumed_step});
    }
  }
  if (impl_->status) {
    impl_->status->update(
        {{"rendezvousDone", true}, {"progress", {{"step", resumed_step}, {"maxSteps", impl_->total_steps}}}});
  }
}

void Reporting::phase(const std::string& name, int64_t step) {
  impl_->step_now = step;
  impl_->phase_now = phase_of(name).value_or(Phase::kIdle);
  if (impl_->status) impl_->status->update({{"progress", {{"phase", name}}}});
  heartbeat();
}

void Reporting::heartbeat() {
  if (impl_->metrics) impl_->metrics->beat();
  if (impl_->status) impl_->status->beat();
  if (impl_->terminal) impl_->terminal->progress(impl_->step_now, impl_->total_steps, impl_->phase_now, -1);
}

void Reporting::engines(int64_t live, int64_t lost) {
  if (impl_->metrics) impl_->metrics->set_engines(live, lost);
}

void Reporting::step(const StepReport& report) {
  StepRecord record;
  record.step = report.step;
  record.max_steps = impl_->total_steps;
  record.phases = report.phases;
  for (const auto& [name, value] : report.values) {
    if (starts_with(name, "train/"))
      record.train[name.substr(6)] = value;
    else if (starts_with(name, "validation/"))
      record.validation[name.substr(11)] = value;
    else if (starts_with(name, "critic/"))
      record.critic[name.substr(7)] = value;
    else if (starts_with(name, "performance/"))
      record.performance[name.substr(12)] = value;
    else
      record.timing[starts_with(name, "timing/") ? name.substr(7) : name] = value;
  }
  StepCounts counts;
  counts.samples = static_cast<int64_t>(report.samples);
  counts.total_tokens = static_cast<int64_t>(report.tokens);
  counts.generated_tokens = static_cast<int64_t>(report.generated_tokens);
  counts.trained_tokens = static_cast<int64_t>(report.trained_tokens);
  counts.ranks = impl_->world_size;
  fill_performance(record, counts);

  double failures = 0;
  for (const auto& [name, value] : record.train) {
    if (starts_with(name, "reward_failures/")) failures += value;
  }
  if (impl_->metrics) {
    impl_->metrics->observe(record);
    if (impl_->rank == 0)  // they are of all ranks: one of the servers counts them
      impl_->metrics->count_reward_failures(static_cast<int64_t>(failures - impl_->reward_failures));
  }
  impl_->reward_failures = failures;
  if (impl_->log) impl_->log->append(record);
  if (impl_->tracking) impl_->tracking->log(record.step, record.flat());
  if (impl_->status) impl_->status->update_step(record);
  if (impl_->terminal) impl_->terminal->step(record);
  const int64_t period = impl_->config.logger.report_period;
  if (period > 0 && report.step % period == 0) impl_->write_page();
}

void Reporting::validation(int64_t step, double accuracy, double length, double seconds) {
  if (!impl_->terminal) return;
  impl_->terminal->line("validation after step " + std::to_string(step) + ": accuracy " + format_fixed(accuracy, 4) +
                        ", mean length " + format_fixed(length, 1) + ", " + format_fixed(seconds, 2) + " s");
}

bool Reporting::wants_rollouts(int64_t step) const {
  return impl_->rollouts != nullptr && step % impl_->config.logger.rollouts.period == 0;
}

void Reporting::rollouts(int64_t step, const std::vector<RolloutLine>& lines) {
  if (wants_rollouts(step)) impl_->rollouts->write(step, lines);
}

void Reporting::log_validation(int64_t step, const std::map<std::string, double>& values) {
  if (impl_->log) impl_->log->append(step, values);
  if (impl_->tracking) impl_->tracking->log(step, values);
}

void Reporting::checkpointed(int64_t step) {
  if (impl_->metrics) impl_->metrics->set_checkpoint_step(step);
  if (impl_->status) impl_->status->update({{"progress", {{"lastCheckpointStep", step}}}});
}

void Reporting::stuck(int rank) {
  if (impl_->status) impl_->status->update({{"stuckRank", rank}});
}

void Reporting::finish() {
  impl_->write_page();
  if (impl_->tracking) impl_->tracking->end(true);
  if (impl_->terminal && impl_->config.logger.report) {
    std::error_code ignored;
    impl_->terminal->line("report: " + fs::absolute(impl_->report_path(), ignored).string());
  }
}

}  // namespace trireme
