// RolloutLog: what was asked, answered, rewarded and made of it, as text: train_data_step_N.jsonl, the newest ones
// kept.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

// One response; a line of the file.
struct RolloutLine {
  int64_t group = 0, index = 0;  // place of its prompt in the rollout, and its own in the group
  std::string prompt, response;
  double raw_reward = 0;                                // weighted sum of the parts
  double reward = 0;                                    // after scaling and shaping
  std::vector<std::pair<std::string, double>> rewards;  // by name, before weighting
  double advantage = 0;
  bool truncated = false, dropped = false;
  int64_t prompt_tokens = 0, response_tokens = 0;
  std::vector<std::array<int64_t, 3>> weight_versions;  // version, and its tokens [from, to) of the response
};

// A JSON object without a newline. Texts longer than `max_text_bytes` are cut, which a key "cut" says; bytes that are
// no UTF-8 are replaced.
std::string rollout_line(int64_t step, const RolloutLine& line, size_t max_text_bytes);

struct RolloutLogOptions {
  std::filesystem::path directory;
  int64_t keep_steps = 20;        // files; older ones are removed
  size_t max_text_bytes = 65536;  // of a prompt, and of a response
};

// Not thread-safe. Nothing here stops a run: a file that cannot be written is warned about once.
class RolloutLog final {
 public:
  // Files of steps after `resumed_step` are removed: that work is done anew. So a new run (0) removes an earlier run's.
  RolloutLog(RolloutLogOptions options, int64_t resumed_step);

  static std::string file_name(int64_t step) { return "train_data_step_" + std::to_string(step) + ".jsonl"; }
  // Writes the file of a step, whole or not at all, and removes those that are too old.
  void write(int64_t step, const std::vector<RolloutLine>& lines);

 private:
  // Of the files there, in rising order.
  std::vector<int64_t> steps() const;
  void remove(int64_t step) const;

  const RolloutLogOptions options_;
  bool warned_ = false;
};

}  // namespace trireme
