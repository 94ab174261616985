#include "trainer/telemetry/step_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/clock.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"

namespace trireme {
namespace {

// One line -> a step; nothing when it is not whole.
std::optional<LoggedStep> parse_line(std::string_view line) {
  const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return std::nullopt;
  const auto step = json.find("step");
  if (step == json.end() || !step->is_number_integer()) return std::nullopt;
  LoggedStep logged;
  logged.step = step->get<int64_t>();
  for (const auto& [key, value] : json.items()) {
    if (key == "step") continue;
    if (key == "time" && value.is_string()) logged.time = value.get<std::string>();
    if (value.is_number()) logged.values[key] = value.get<double>();
  }
  return logged;
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

void keep_until(const std::filesystem::path& path, int64_t last_step) {
  const std::string text = read_file(path);
  std::string kept;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find('\n', at);
    if (end == std::string::npos) break;  // torn: the run died while writing it
    const std::string_view line(text.data() + at, end - at);
    const auto logged = parse_line(line);
    if (logged && logged->step <= last_step) kept.append(line).push_back('\n');
    at = end + 1;
  }
  if (kept != text) write_file_atomic(path, kept);
}

void move_aside(const std::filesystem::path& path) {
  for (int i = 1;; ++i) {
    const std::filesystem::path aside = path.string() + "." + std::to_string(i);
    if (std::filesystem::exists(aside)) continue;
    std::filesystem::rename(path, aside);
    return;
  }
}

}  // namespace

std::map<std::string, double> StepRecord::flat() const {
  std::map<std::string, double> values;
  for (const auto& [name, value] : train) values["train/" + name] = value;
  for (const auto& [name, value] : critic) values["critic/" + name] = value;
  for (const auto& [name, value] : performance) values["performance/" + name] = value;
  for (const auto& [name, value] : validation) values["validation/" + name] = value;
  for (const auto& [name, value] : timing) values["timing/" + name] = value;
  values["timing/train/total_step_time"] = phases.total_s;
  for (const Phase phase : all_phases()) values[timing_name(phase)] = phases.of(phase);
  values["timing/train/prepare_for_generation"] = phases.of(Phase::kRefit);  // v0.3's name of it
  return values;
}

std::optional<double> StepRecord::find(const std::string& name) const {
  const auto values = flat();
  const auto found = values.find(name);
  return found == values.end() ? std::nullopt : std::optional(found->second);
}

void fill_performance(StepRecord& record, const StepCounts& counts) {
  const double ranks = static_cast<double>(std::max<int64_t>(counts.ranks, 1));
  const auto rate = [&](const std::string& name, double amount, double seconds) {
    if (seconds <= 0) return;
    record.performance[name] = amount / seconds;
    record.performance[name + "_per_gpu"] = amount / seconds / ranks;
  };
  const auto per_gpu = [&](const std::string& name, double amount, double seconds) {
    if (seconds > 0) record.performance[name] = amount / seconds / ranks;
  };
  const double tokens = static_cast<double>(counts.total_tokens);
  rate("samples_per_sec", static_cast<double>(counts.samples), record.phases.total_s);
  rate("tokens_per_sec", tokens, record.phases.total_s);
  rate("generation_tokens_per_sec", static_cast<double>(counts.generated_tokens), record.phases.of(Phase::kGeneration));
  const double trained = counts.trained_tokens < 0 ? tokens : static_cast<double>(counts.trained_tokens);
  per_gpu("policy_training_tokens_per_sec_per_gpu", trained, record.phases.of(Phase::kTraining));
  per_gpu("policy_and_reference_logprobs_tokens_per_sec_per_gpu", trained, record.phases.of(Phase::kLogprobs));
}

std::optional<double> LoggedStep::find(const std::string& name) const {
  const auto found = values.find(name);
  return found == values.end() ? std::nullopt : std::optional(found->second);
}

std::vector<LoggedStep> read_step_log(const std::filesystem::path& path, int64_t* bad_lines) {
  int64_t bad = 0;
  std::map<int64_t, LoggedStep> steps;
  if (std::filesystem::exists(path)) {
    const std::string text = read_file(path);
    for (size_t at = 0; at < text.size();) {
      size_t end = text.find('\n', at);
      if (end == std::string::npos) end = text.size();
      const std::string_view line = trim(std::string_view(text.data() + at, end - at));
      at = end + 1;
      if (line.empty()) continue;
      if (auto logged = parse_line(line)) {
        LoggedStep& known = steps[logged->step];
        for (const auto& [name, value] : known.values) logged->values.emplace(name, value);
        known = std::move(*logged);
      } else {
        ++bad;
      }
    }
  }
  if (bad_lines) *bad_lines = bad;
  std::vector<LoggedStep> ordered;
  ordered.reserve(steps.size());
  for (auto& [step, logged] : steps) ordered.push_back(std::move(logged));
  return ordered;
}

StepLog::StepLog(std::filesystem::path path, int64_t resumed_step) : path_(std::move(path)) {
  std::error_code error;
  if (path_.has_parent_path()) std::filesystem::create_directories(path_.parent_path(), error);
  if (error) fail_io("cannot make the log folder " + path_.parent_path().string() + ": " + error.message());
  if (std::filesystem::is_regular_file(path_, error)) {
    if (resumed_step > 0) {
      keep_until(path_, resumed_step);
    } else if (std::filesystem::file_size(path_, error) > 0) {
      move_aside(path_);
    }
  }
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) fail_io("cannot write the step log " + path_.string() + ": " + std::strerror(errno));
}

StepLog::~StepLog() { ::close(fd_); }

void StepLog::append(const StepRecord& record) { write(record.step, record.flat()); }

void StepLog::append(int64_t step, const std::map<std::string, double>& values) { write(step, values); }

void StepLog::write(int64_t step, const std::map<std::string, double>& values) {
  nlohmann::ordered_json line;
  line["step"] = step;
  line["time"] = utc_now();
  for (const auto& [name, value] : values) {
    if (std::isfinite(value)) {
      line[name] = value;
    } else {
      line[name] = nullptr;
    }
  }
  if (write_all(fd_, line.dump() + "\n")) return;
  const int reason = errno;
  write_all(fd_, "\n");  // so that the next whole line starts on its own
  if (failed_++ == 0)
    log_warn("telemetry",
             "cannot write the step log " + path_.string() + ": " + std::strerror(reason) + "; the run goes on");
}

std::string phase_table_markdown(const std::vector<LoggedStep>& steps, int64_t first, int64_t last) {
  static const std::vector<std::pair<const char*, const char*>> kColumns = {
      {"total step (s)", "timing/train/total_step_time"},
      {"policy training (s)", "timing/train/policy_training"},
      {"refit (s)", "timing/train/prepare_for_generation/total"},
      {"generation (s)", "timing/train/generation"},
      {"get logprobs (s)", "timing/train/policy_and_reference_logprobs"},
      {"mean tokens per sample", "train/mean_gen_tokens_per_sample"},
      {"tokens/s/GPU", "performance/tokens_per_sec_per_gpu"}};
  std::string head = "| steps |", rule = "|---|",
              row = "| " + std::to_string(first) + "-" + std::to_string(last) + " |";
  for (const auto& [title, name] : kColumns) {
    double sum = 0;
    int64_t count = 0;
    for (const LoggedStep& step : steps) {
      const auto value = step.find(name);
      if (step.step < first || step.step > last || !value) continue;
      sum += *value;
      ++count;
    }
    head += std::string(" ") + title + " |";
    rule += "---|";
    row += count == 0
               ? " - |"
               : " " + format_fixed(sum / static_cast<double>(count), sum / static_cast<double>(count) < 10 ? 2 : 1) +
                     " |";
  }
  return head + "\n" + rule + "\n" + row + "\n";
}

}  // namespace trireme
