// Checkpoints: written to a temporary name and renamed, found again, pruned by metric.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "trainer/model/model.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/context.h"

namespace trireme {

struct CheckpointOptions {
  std::filesystem::path directory;
  std::filesystem::path source_dir;  // tokenizer files and generation_config.json come from here
  std::string metric_name;           // "" : keep the newest
  bool higher_is_better = true;
  int64_t keep_top_k = 3;  // 0: keep all
  bool save_optimizer = true;
};

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

// The steps that pruning removes: all but the newest and the best `keep_top_k` by the metric (those without the metric
// rank last). Pure.
std::vector<int64_t> steps_to_remove(const std::vector<CheckpointInfo>& checkpoints, const std::string& metric,
                                     bool higher_is_better, int64_t keep_top_k);

class CheckpointManager final {
 public:
  // `fingerprint`: what must be equal for a resume, e.g. {"algorithm": ..., "model": {...}}.
  CheckpointManager(const CheckpointOptions& options, const nlohmann::json& fingerprint, ParallelContext& context);

  // Collective. Throws on every rank when one could not write.
  void save(int64_t step, const Model& model, const DistributedAdamW& optimizer, const nlohmann::json& state,
            const std::map<std::string, double>& metrics, const std::string& config_yaml);

  // Collective. Loads weights and optimizer of the newest complete checkpoint; nothing when there is none. Throws
  // Error(kUser) when it belongs to another model or algorithm, naming the first difference.
  std::optional<CheckpointInfo> load_latest(Model& model, DistributedAdamW& optimizer);

  int64_t last_saved_step() const { return last_saved_step_; }

 private:
  void together(const std::string& what, const std::string& own_error);

  CheckpointOptions options_;
  nlohmann::json fingerprint_;
  ParallelContext& context_;
  int64_t last_saved_step_ = -1;
};

}  // namespace trireme
