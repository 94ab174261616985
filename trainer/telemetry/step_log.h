// StepRecord: what one step measured, under NeMo-RL's names; StepLog: one JSON line a step, kept across resumes.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "trainer/telemetry/phases.h"

namespace trireme {

struct StepRecord {
  int64_t step = 0;  // 1 for the first
  int64_t max_steps = 0;
  PhaseTimes phases;
  // Names without their group: train["reward"] is "train/reward" in the log.
  std::map<std::string, double> train, critic, performance, validation, timing;

  // A value by its full name ("train/reward", "timing/train/policy_training", "validation/accuracy").
  std::optional<double> find(const std::string& name) const;
  // All values by full name: the groups, the phases and total_step_time.
  std::map<std::string, double> flat() const;
};

// Fills record.performance from counts of the whole job and record.phases.
struct StepCounts {
  int64_t samples = 0;
  int64_t total_tokens = 0;      // prompts and responses of all that was generated
  int64_t generated_tokens = 0;  // of these: responses
  int64_t trained_tokens = -1;   // of total_tokens, what was trained; -1: all
  int64_t ranks = 1;
};
void fill_performance(StepRecord& record, const StepCounts& counts);

// A line of the log.
struct LoggedStep {
  int64_t step = 0;
  std::string time;  // UTC, ISO 8601
  std::map<std::string, double> values;
  std::optional<double> find(const std::string& name) const;
};

// Reads a log; lines that are not whole are skipped and counted; lines with the same step are one, later values win.
// A missing file is an empty log. Ordered by step.
std::vector<LoggedStep> read_step_log(const std::filesystem::path& path, int64_t* bad_lines = nullptr);

// Appends to a log. Not thread-safe. A disk that is full is warned about once and does not stop the run.
class StepLog final {
 public:
  // A run resumed after step `resumed_step` keeps the lines up to it and drops later ones (that work is done anew) and
  // a torn last line. With resumed_step 0 an existing log is renamed to NAME.1 (or .2, ...) first.
  StepLog(std::filesystem::path path, int64_t resumed_step);
  ~StepLog();
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;

  void append(const StepRecord& record);
  // Values measured before the first step (0) or after a step's own line; a reader adds them to that step.
  void append(int64_t step, const std::map<std::string, double>& values);
  const std::filesystem::path& path() const { return path_; }
  int64_t failed_writes() const { return failed_; }

 private:
  void write(int64_t step, const std::map<std::string, double>& values);

  std::filesystem::path path_;
  int fd_ = -1;
  int64_t failed_ = 0;
};

// The published tables' row over steps first..last (means): total, policy training, refit, generation, log-probs, mean
// tokens generated per sample; as a Markdown table.
std::string phase_table_markdown(const std::vector<LoggedStep>& steps, int64_t first, int64_t last);

}  // namespace trireme
