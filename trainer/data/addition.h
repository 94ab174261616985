// A synthetic task for quick runs and tests: sums of two numbers, "27+58=" -> "085".
#pragma once

#include <cstdint>
#include <filesystem>

namespace trireme {

struct AdditionTask {
  int64_t smallest = 10;  // summands smallest .. largest
  int64_t largest = 99;
  int64_t warm_start = 1000;  // problems with responses for SFT
  int64_t held_out = 512;     // problems for validation
  int64_t seed = 1;
};

struct AdditionCounts {
  int64_t warm_start = 0;
  int64_t train = 0;
  int64_t held_out = 0;
};

// Sums are written with the digits of the largest one, so that all golds have one length.
// Writes warm_start.jsonl, train.jsonl and held_out.jsonl of {"input", "output"} into `dir`. The three sets are
// disjoint and together all pairs; which pair is where depends on the seed only. Throws Error(kUser) when the sizes
// leave no training problems.
AdditionCounts write_addition_task(const AdditionTask& task, const std::filesystem::path& dir);

}  // namespace trireme
