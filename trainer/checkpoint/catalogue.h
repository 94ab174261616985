// The checkpoints of a folder: found, ranked by a metric. Needs no LibTorch.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace trireme {

// Of manifest.json. Since 2 optimizer state names its parameters (optimizer/state_pieces.h); 1 is still read.
inline constexpr int kCheckpointFormat = 2;

struct CheckpointInfo {
  std::filesystem::path path;
  int64_t step = 0;
  nlohmann::json state;  // what the loop gave to save()
  std::map<std::string, double> metrics;
  bool has_optimizer = false;
};

// Complete checkpoints below `directory`, oldest first. Incomplete ones are reported in `warnings`, one sentence each.
// None where there is no directory; throws Error(kIo) where it cannot be read.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& directory,
                                             std::vector<std::string>* warnings = nullptr);

// The steps that have a folder there, whether or not it can be read, in order. Throws as list_checkpoints().
std::vector<int64_t> checkpoint_steps(const std::filesystem::path& directory);

// One of them; throws Error(kData | kNotFound) that says what is missing.
CheckpointInfo read_checkpoint(const std::filesystem::path& path);

// The steps that pruning removes: all but the newest and the best `keep_top_k` by the metric (those without the metric
// rank last). Pure.
std::vector<int64_t> steps_to_remove(const std::vector<CheckpointInfo>& checkpoints, const std::string& metric,
                                     bool higher_is_better, int64_t keep_top_k);

// Of `steps`, those that a directory which follows another removes: all but the other's, `newest`, and what is newer
// than all of the other's, whose listing may be behind. None where the other has none, which may be a volume that is
// not mounted. Pure.
std::vector<int64_t> steps_not_among(const std::vector<int64_t>& steps, const std::vector<int64_t>& others,
                                     int64_t newest);

// The best by the metric, the newer of equals; null when none has it. Pure.
const CheckpointInfo* best_checkpoint(const std::vector<CheckpointInfo>& checkpoints, const std::string& metric,
                                      bool higher_is_better);

}  // namespace trireme
