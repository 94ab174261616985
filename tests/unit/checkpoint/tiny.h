// The model of the checkpoints' tests, and what lies in a folder of checkpoints.
#pragma once

#include <filesystem>
#include <vector>

#include "tests/unit/model/tiny.h"
#include "trainer/checkpoint/checkpoint.h"

namespace trireme {

inline ModelConfig tiny(int64_t hidden = 16) {
  return test::tiny_config(
      {.vocab = 50, .hidden = hidden, .intermediate = 24, .heads = 2, .kv_heads = 1, .positions = 64});
}

inline std::vector<int64_t> steps(const std::filesystem::path& dir) {
  std::vector<int64_t> found;
  for (const CheckpointInfo& info : list_checkpoints(dir)) found.push_back(info.step);
  return found;
}

}  // namespace trireme
