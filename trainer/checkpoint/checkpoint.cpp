#include "trainer/checkpoint/checkpoint.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

constexpr int kFormat = 1;

std::optional<int64_t> step_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!starts_with(name, "step_")) return std::nullopt;
  return parse_int(std::string_view(name).substr(5));
}

CheckpointInfo read_checkpoint(const fs::path& path) {
  const fs::path manifest_path = path / "manifest.json";
  nlohmann::json manifest;
  try {
    manifest = nlohmann::json::parse(read_file(manifest_path));
    CheckpointInfo info;
    info.path = path;
    if (manifest.at("format").get<int>() != kFormat) fail_data(manifest_path.string() + " has another format version");
    info.step = manifest.at("step").get<int64_t>();
    info.state = manifest.at("state");
    info.metrics = manifest.at("metrics").get<std::map<std::string, double>>();
    info.has_optimizer = manifest.at("has_optimizer").get<bool>();
    for (const auto& file : manifest.at("files")) {
      const fs::path name = path / file.at("name").get<std::string>();
      std::error_code missing;
      const auto size = fs::file_size(name, missing);
      if (missing) fail_data(name.string() + " is missing");
      if (size != file.at("size").get<uint64_t>()) {
        fail_data(name.string() + " has " + std::to_string(size) + " bytes, its manifest says " +
                  file.at("size").dump());
      }
    }
    return info;
  } catch (const nlohmann::json::exception& error) {
    fail_data(manifest_path.string() + " is damaged: " + error.what());
  }
}

// "model.hidden_size is 64 there and 128 here"
std::optional<std::string> first_difference(const nlohmann::json& there, const nlohmann::json& here,
                                            const std::string& path) {
  if (there == here) return std::nullopt;
  if (there.is_object() && here.is_object()) {
    std::set<std::string> keys;
    for (const auto& [key, unused] : there.items()) keys.insert(key);
    for (const auto& [key, unused] : here.items()) keys.insert(key);
    for (const std::string& key : keys) {
      if (auto found = first_difference(there.value(key, nlohmann::json()), here.value(key, nlohmann::json()),
                                        path.empty() ? key : path + "." + key)) {
        return found;
      }
    }
  }
  return path + " is " + there.dump() + " there and " + here.dump() + " here";
}

void sync_tree(const fs::path& root) {
  sync_directory(root);
  for (const auto& entry : fs::recursive_directory_iterator(root)) {
    if (entry.is_directory()) sync_directory(entry.path());
  }
}

}  // namespace

std::vector<CheckpointInfo> list_checkpoints(const fs::path& directory, std::vector<std::string>* warnings) {
  std::vector<CheckpointInfo> found;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(directory, missing)) {
    if (!step_of(entry.path())) continue;
    try {
      found.push_back(read_checkpoint(entry.path()));
    } catch (const Error& error) {
      if (warnings != nullptr)
        warnings->push_back("ignoring the incomplete checkpoint " + entry.path().string() + ": " + error.what());
    }
  }
  std::sort(found.begin(), found.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.step < b.step; });
  return found;
}

std::vector<int64_t> steps_to_remove(const std::vector<CheckpointInfo>& checkpoints, const std::string& metric,
                                     bool higher_is_better, int64_t keep_top_k) {
  if (keep_top_k <= 0 || checkpoints.empty()) return {};
  std::vector<const CheckpointInfo*> order;
  for (const CheckpointInfo& info : checkpoints) order.push_back(&info);
  const auto has = [&](const CheckpointInfo* info) { return !metric.empty() && info->metrics.count(metric) > 0; };
  std::stable_sort(order.begin(), order.end(), [&](const CheckpointInfo* a, const CheckpointInfo* b) {
    if (has(a) != has(b)) return has(a);
    if (has(a)) {
      const double x = a->metrics.at(metric), y = b->metrics.at(metric);
      if (x != y) return higher_is_better ? x > y : x < y;
    }
    return a->step > b->step;  // the newer of equals
  });
  std::vector<int64_t> removed;
  for (size_t i = static_cast<size_t>(keep_top_k); i < order.size(); ++i) {
    if (order[i]->step != checkpoints.back().step) removed.push_back(order[i]->step);
  }
  std::sort(removed.begin(), removed.end());
  return removed;
}

CheckpointManager::CheckpointManager(const CheckpointOptions& options, const nlohmann::json& fingerprint,
                                     ParallelContext& context)
    : options_(options), fingerprint_(fingerprint), context_(context) {
  if (!context_.is_main()) return;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(options_.directory, missing)) {
    if (!starts_with(entry.path().filename().string(), "tmp_step_")) continue;
    log_info("checkpoint", "removing the unfinished " + entry.path().string());
    std::error_code ignored;
    fs::remove_all(entry.path(), ignored);
  }
}

// Every rank learns whether all succeeded; the first error is thrown everywhere.
void CheckpointManager::together(const std::string& what, const std::string& own_error) {
  const std::vector<std::string> errors = context_.data_parallel().all_gather_bytes(own_error);
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank].empty()) continue;
    fail_io(what + " failed" + (errors.size() > 1 ? " on rank " + std::to_string(rank) : "") + ": " + errors[rank]);
  }
}

void CheckpointManager::save(int64_t step, const Model& model, const DistributedAdamW& optimizer,
                             const nlohmann::json& state, const std::map<std::string, double>& metrics,
                             const std::string& config_yaml) {
  const fs::path temporary = options_.directory / ("tmp_step_" + std::to_string(step));
  const fs::path target = options_.directory / ("step_" + std::to_string(step));
  const std::string what = "saving checkpoint " + target.string();
  const auto attempt = [&](auto&& work) -> std::string {
    try {
      work();
      return {};
    } catch (const std::exception& error) {
      return error.what();
    }
  };
  try {
    together(what, attempt([&] {
               if (!context_.is_main()) return;
               fs::remove_all(temporary);
               fs::create_directories(temporary / "policy" / "weights");
               fs::create_directories(temporary / "policy" / "optimizer");
             }));
    together(what, attempt([&] {
               if (options_.save_optimizer) optimizer.save(temporary / "policy" / "optimizer");
               if (!context_.is_main()) return;
               SaveOptions save;
               save.source_dir = options_.source_dir;
               save_model(model, temporary / "policy" / "weights", save);
               write_file_atomic(temporary / "config.yaml", config_yaml);
             }));
    together(
        what, attempt([&] {
          if (!context_.is_main()) return;
          nlohmann::json files = nlohmann::json::array();
          for (const auto& entry : fs::recursive_directory_iterator(temporary)) {
            if (!entry.is_regular_file()) continue;
            files.push_back({{"name", fs::relative(entry.path(), temporary).string()}, {"size", entry.file_size()}});
          }
          const nlohmann::json manifest = {{"format", kFormat},
                                           {"step", step},
                                           {"fingerprint", fingerprint_},
                                           {"ranks", context_.world_size()},
                                           {"has_optimizer", options_.save_optimizer},
                                           {"files", files},
                                           {"state", state},
                                           {"metrics", metrics}};
          write_file_atomic(temporary / "manifest.json", manifest.dump(1));
          sync_tree(temporary);
          fs::remove_all(target);  // the same step saved again after a resume
          fs::rename(temporary, target);
          sync_directory(options_.directory);
        }));
  } catch (...) {
    std::error_code ignored;
    if (context_.is_main()) fs::remove_all(temporary, ignored);
    throw;
  }
  last_saved_step_ = step;
  if (!context_.is_main()) return;
  const std::vector<CheckpointInfo> all = list_checkpoints(options_.directory);
  for (const int64_t old : steps_to_remove(all, options_.metric_name, options_.higher_is_better, options_.keep_top_k)) {
    std::error_code error;
    fs::remove_all(options_.directory / ("step_" + std::to_string(old)), error);
    if (error) log_warn("checkpoint", "cannot remove step_" + std::to_string(old) + ": " + error.message());
  }
}

std::optional<CheckpointInfo> CheckpointManager::load_latest(Model& model, DistributedAdamW& optimizer) {
  // Rank 0 decides, so that all load the same one while folders come and go.
  std::string chosen;
  if (context_.is_main()) {
    std::vector<std::string> warnings;
    const std::vector<CheckpointInfo> all = list_checkpoints(options_.directory, &warnings);
    for (const std::string& warning : warnings) log_warn("checkpoint", warning);
    if (!all.empty()) chosen = all.back().path.string();
  }
  chosen = context_.data_parallel().all_gather_bytes(chosen).front();
  if (chosen.empty()) return std::nullopt;
  const CheckpointInfo info = read_checkpoint(chosen);
  const nlohmann::json manifest = nlohmann::json::parse(read_file(fs::path(chosen) / "manifest.json"));
  if (const auto difference = first_difference(manifest.at("fingerprint"), fingerprint_, "")) {
    fail_user("checkpoint " + chosen + " belongs to another run: " + *difference +
              "; choose another checkpointing.checkpoint_dir");
  }
  load_parameters(model, info.path / "policy" / "weights");
  if (info.has_optimizer) {
    optimizer.load(info.path / "policy" / "optimizer");
  } else {
    optimizer.reset_master_from_weights();
    log_warn("checkpoint", chosen + " holds no optimizer state: its moments start from zero");
  }
  last_saved_step_ = info.step;
  return info;
}

}  // namespace trireme
