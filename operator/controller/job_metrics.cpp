#include "operator/controller/job_metrics.h"

#include <map>
#include <optional>
#include <vector>

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

// Gathers lines of one family after the other and writes them on.
class Exposition final {
 public:
  explicit Exposition(const kube::HttpWrite& write) : write_(write) { text_.reserve(kPiece + kPiece / 8); }

  void family(const char* name, const char* type, const char* help) {
    name_ = name;
    append(std::string("# HELP ") + name + " " + help + "\n# TYPE " + name + " " + type + "\n");
  }
  void add(const std::string& labels, double value) {
    append(name_ + "{" + labels + "} " + format_double(value) + "\n");
  }
  void flush() {
    there_ = there_ && write_(text_);
    text_.clear();
  }

 private:
  static constexpr size_t kPiece = 64 << 10;
  void append(const std::string& line) {
    if (!there_) return;
    text_ += line;
    if (text_.size() >= kPiece) flush();
  }

  const kube::HttpWrite& write_;
  bool there_ = true;
  std::string name_, text_;
};

// What is shown of a job, copied, since writing to a slow client must not hold up the store.
struct Row {
  std::string labels, phase;
  int64_t attempt = 0, restarts = 0, free_restarts = 0, pods_wanted = 0, pods_created = 0, pods_ready = 0;
  bool terminating = false;
  bool has_progress = false;
  int64_t step = 0, max_steps = 0, checkpoint_step = -1;
  double step_seconds = 0, tokens_per_second = 0;
  std::optional<double> reward, heartbeat_age;
};

Row row_of(const kube::ObjectKey& key, const CachedJob& job, const ReportStore& reports) {
  Row row;
  row.labels = "namespace=\"" + escape(key.ns) + "\",job=\"" + escape(key.name) + "\"";
  row.phase = job.phase.empty() ? phase::kPending : job.phase;
  row.attempt = job.attempt;
  row.restarts = job.restarts;
  row.free_restarts = job.free_restarts;
  row.pods_wanted = job.pods_wanted;
  row.pods_created = job.pods_created;
  row.pods_ready = job.pods_ready;
  row.terminating = job.terminating;
  // What was pushed last is newer than what the status shows.
  const auto report = is_terminal(row.phase) ? std::nullopt : reports.get(key, job.uid);
  row.has_progress = report || job.has_progress;
  if (report) {
    const Progress& live = report->progress;
    row.heartbeat_age = static_cast<double>(report->age.count()) / 1000.0;
    row.step = live.step;
    row.max_steps = live.max_steps;
    row.reward = live.reward;
    row.step_seconds = live.step_seconds.value_or(0);
    row.tokens_per_second = live.tokens_per_second.value_or(0);
    row.checkpoint_step = live.last_checkpoint_step.value_or(-1);
  } else if (job.has_progress) {
    row.step = job.step;
    row.max_steps = job.max_steps;
    if (job.has_reward) row.reward = job.reward;
    row.step_seconds = job.step_seconds;
    row.tokens_per_second = job.tokens_per_second;
    row.checkpoint_step = job.checkpoint_step;
  }
  return row;
}

}  // namespace

void write_job_metrics(const Reconciler& reconciler, const ReportStore& reports, const kube::HttpWrite& write) {
  std::map<std::string, int64_t> by_phase;
  for (const char* p : {phase::kPending, phase::kQueued, phase::kStarting, phase::kRunning, phase::kRestarting,
                        phase::kSuspended, phase::kComplete, phase::kFailed}) {
    by_phase[p] = 0;
  }
  std::vector<Row> rows;
  rows.reserve(reconciler.job_count());
  reconciler.for_each_job([&](const kube::ObjectKey& key, const CachedJob& job) {
    if (!job.managed) return;
    rows.push_back(row_of(key, job, reports));
    ++by_phase[rows.back().phase];
  });

  Exposition out(write);
  out.family("trireme_jobs", "gauge", "RLJobs by phase.");
  for (const auto& [phase, count] : by_phase) out.add("phase=\"" + escape(phase) + "\"", static_cast<double>(count));
  const auto family = [&](const char* name, const char* type, const char* help, const auto& add) {
    out.family(name, type, help);
    for (const Row& row : rows) add(row);
  };
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  family("trireme_job_phase", "gauge", "1 for the phase the job is in.",
         [&](const Row& r) { out.add(r.labels + ",phase=\"" + escape(r.phase) + "\"", 1); });
  family("trireme_job_attempt", "gauge", "Number of the current attempt.",
         [&](const Row& r) { out.add(r.labels, number(r.attempt)); });
  family("trireme_job_restarts_total", "counter", "Restarts, by whether they count against the budget.",
         [&](const Row& r) {
           out.add(r.labels + ",counted=\"true\"", number(r.restarts));
           out.add(r.labels + ",counted=\"false\"", number(r.free_restarts));
         });
  family("trireme_job_pods", "gauge", "Pods of the current attempt, by state.", [&](const Row& r) {
    out.add(r.labels + ",state=\"desired\"", number(r.pods_wanted));
    out.add(r.labels + ",state=\"created\"", number(r.pods_created));
    out.add(r.labels + ",state=\"ready\"", number(r.pods_ready));
  });
  family("trireme_job_pod_stuck", "gauge", "1 while a pod of the job was told to go and does not.", [&](const Row& r) {
    if (r.terminating) out.add(r.labels, 1);
  });
  const auto progress = [&](const char* name, const char* help, const auto& value) {
    family(name, "gauge", help, [&](const Row& r) {
      const std::optional<double> shown = value(r);
      if (r.has_progress && shown) out.add(r.labels, *shown);
    });
  };
  const auto positive = [](double value) { return value > 0 ? std::optional<double>(value) : std::nullopt; };
  progress("trireme_job_step", "Last training step that was reported.",
           [&](const Row& r) { return std::optional<double>(number(r.step)); });
  progress("trireme_job_max_steps", "Steps the job will run.",
           [&](const Row& r) { return std::optional<double>(number(r.max_steps)); });
  progress("trireme_job_reward", "Mean reward of the last step.", [](const Row& r) { return r.reward; });
  progress("trireme_job_step_seconds", "Seconds the last step took.",
           [&](const Row& r) { return positive(r.step_seconds); });
  progress("trireme_job_tokens_per_second", "Tokens per second in the last step.",
           [&](const Row& r) { return positive(r.tokens_per_second); });
  progress("trireme_job_checkpoint_step", "Step of the last complete checkpoint.", [&](const Row& r) {
    return r.checkpoint_step >= 0 ? std::optional<double>(number(r.checkpoint_step)) : std::nullopt;
  });
  progress("trireme_job_heartbeat_age_seconds", "Seconds since rank 0 last reported.",
           [](const Row& r) { return r.heartbeat_age; });
  out.flush();
}

}  // namespace trireme::controller
