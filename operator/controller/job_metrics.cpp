#include "operator/controller/job_metrics.h"

#include <array>
#include <map>

#include "base/text.h"

namespace trireme::controller {
namespace {

std::string escape(const std::string& value) {
  std::string out;
  for (const char c : value) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

class Family final {
 public:
  Family(const char* name, const char* type, const char* help) : name_(name) {
    text_ = std::string("# HELP ") + name + " " + help + "\n# TYPE " + name + " " + type + "\n";
  }
  void add(const std::string& labels, double value) {
    text_ += name_ + "{" + labels + "} " + format_double(value) + "\n";
  }
  const std::string& text() const { return text_; }

 private:
  std::string name_;
  std::string text_;
};

}  // namespace

std::string job_metrics_text(const Reconciler& reconciler, const ReportStore& reports) {
  Family jobs("trireme_jobs", "gauge", "RLJobs by phase.");
  Family info("trireme_job_phase", "gauge", "1 for the phase the job is in.");
  Family attempt("trireme_job_attempt", "gauge", "Number of the current attempt.");
  Family restarts("trireme_job_restarts_total", "counter", "Restarts, by whether they count against the budget.");
  Family pods("trireme_job_pods", "gauge", "Pods of the current attempt, by state.");
  Family step("trireme_job_step", "gauge", "Last training step that was reported.");
  Family max_steps("trireme_job_max_steps", "gauge", "Steps the job will run.");
  Family reward("trireme_job_reward", "gauge", "Mean reward of the last step.");
  Family step_seconds("trireme_job_step_seconds", "gauge", "Seconds the last step took.");
  Family tokens("trireme_job_tokens_per_second", "gauge", "Tokens per second in the last step.");
  Family checkpoint("trireme_job_checkpoint_step", "gauge", "Step of the last complete checkpoint.");
  Family heartbeat("trireme_job_heartbeat_age_seconds", "gauge", "Seconds since rank 0 last reported.");
  std::map<std::string, int64_t> by_phase;
  for (const char* p : {phase::kPending, phase::kQueued, phase::kStarting, phase::kRunning, phase::kRestarting,
                        phase::kSuspended, phase::kComplete, phase::kFailed}) {
    by_phase[p] = 0;
  }
  reconciler.for_each_job([&](const kube::ObjectKey& key, const CachedJob& job) {
    if (!job.managed) return;
    const std::string phase = job.phase.empty() ? phase::kPending : job.phase;
    ++by_phase[phase];
    const std::string labels = "namespace=\"" + escape(key.ns) + "\",job=\"" + escape(key.name) + "\"";
    info.add(labels + ",phase=\"" + escape(phase) + "\"", 1);
    attempt.add(labels, static_cast<double>(job.attempt));
    restarts.add(labels + ",counted=\"true\"", static_cast<double>(job.restarts));
    restarts.add(labels + ",counted=\"false\"", static_cast<double>(job.free_restarts));
    pods.add(labels + ",state=\"desired\"", static_cast<double>(job.pods_wanted));
    pods.add(labels + ",state=\"created\"", static_cast<double>(job.pods_created));
    pods.add(labels + ",state=\"ready\"", static_cast<double>(job.pods_ready));
    // What was pushed last is newer than what the status shows.
    const auto report = is_terminal(phase) ? std::nullopt : reports.get(key, job.uid);
    if (report) heartbeat.add(labels, static_cast<double>(report->age.count()) / 1000.0);
    if (!report && !job.has_progress) return;
    const Progress* live = report ? &report->progress : nullptr;
    step.add(labels, static_cast<double>(live ? live->step : job.step));
    max_steps.add(labels, static_cast<double>(live ? live->max_steps : job.max_steps));
    if (live ? live->reward.has_value() : job.has_reward) reward.add(labels, live ? *live->reward : job.reward);
    const double seconds = live ? live->step_seconds.value_or(0) : job.step_seconds;
    const double rate = live ? live->tokens_per_second.value_or(0) : job.tokens_per_second;
    if (seconds > 0) step_seconds.add(labels, seconds);
    if (rate > 0) tokens.add(labels, rate);
    const int64_t saved = live ? live->last_checkpoint_step.value_or(-1) : job.checkpoint_step;
    if (saved >= 0) checkpoint.add(labels, static_cast<double>(saved));
  });
  for (const auto& [phase, count] : by_phase) jobs.add("phase=\"" + escape(phase) + "\"", static_cast<double>(count));
  std::string text;
  for (const Family* family : std::array{&jobs, &info, &attempt, &restarts, &pods, &step, &max_steps, &reward,
                                         &step_seconds, &tokens, &checkpoint, &heartbeat}) {
    text += family->text();
  }
  return text;
}

}  // namespace trireme::controller
