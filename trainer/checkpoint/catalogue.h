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
// Throws nothing for a directory that does not exist.
std::vector<CheckpointInfo> list_checkpoints(const std::filesystem::path& directory,
                                             std::vector<std::string>* warnings = nullptr);

// One of them; throws Error(kData | kNotFound) that says what is missing.
CheckpointInfo read_checkpoint(const std::filesystem::path& path);

// The steps that pruning removes: all but the newest and the best `keep_top_k` by the metric (those without the metric
// rank last). Pure.
std::vector<int64_t> steps_to_remove(const std::vector<CheckpointInfo>& checkpoints, const std::string& metric,
                                     bool higher_is_better, int64_t keep_top_k);

// The steps that a directory which follows another removes: all but the other's and `newest`. None where the other has
// none, which may be a volume that is not mounted. Pure.
std::vector<int64_t> steps_not_among(const std::vector<CheckpointInfo>& checkpoints,
                                     const std::vector<CheckpointInfo>& others, int64_t newest);

// The best by the metric, the newer of equals; null when none has it. Pure.
const CheckpointInfo* best_checkpoint(const std::vector<CheckpointInfo>& checkpoints, const std::string& metric,
                                      bool higher_is_better);

}  // namespace trireme
