// `trireme grade --pairs FILE`: checks the math verifier, or any reward, on a file of pairs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <iosfwd>

#include "trainer/rewards/reward.h"

namespace trireme {

struct GradeTotals {
  int64_t pairs = 0;
  int64_t correct = 0;        // reward > 0
  int64_t failed = 0;         // the reward could not be had
  int64_t labelled = 0;       // lines with a "label"
  int64_t disagreements = 0;  // ... whose verdict is not the label
  double reward_sum = 0;
};

// Reads JSONL lines {"gold": text, "answer": text}, writes one JSON line each
//   {"line": 1, "correct": true, "reward": 1.0, "gold": ..., "answer": ...[, "label": true, "agrees": true][, "error":
//   ...]}
// and at the end {"total": {...}}. "answer" is compared as a final answer when the reward is math; a line with
// "response" instead is taken as a whole response and the final answer looked for in it. "label" (bool) is optional.
// Also "prompt" and "extra" for rewards that want them. Throws Error(kData) naming file and line for a malformed line.
GradeTotals grade_pairs(const std::filesystem::path& file, const RewardOptions& options, std::ostream& out);

}  // namespace trireme
