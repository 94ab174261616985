#include "trainer/checkpoint/catalogue.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

std::optional<int64_t> step_of(const fs::path& path) {
  const std::string name = path.filename().string();
  if (!starts_with(name, "step_")) return std::nullopt;
  return parse_int(std::string_view(name).substr(5));
}

// Those of checkpoints. A folder that cannot be read to its end is not taken for one that holds less.
std::vector<fs::path> step_folders(const fs::path& directory) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end; entry.increment(error)) {
    if (step_of(entry->path())) found.push_back(entry->path());
  }
  const bool missing = error == std::errc::no_such_file_or_directory || error == std::errc::not_a_directory;
  if (error && !missing) fail_io("cannot list the checkpoints in " + directory.string() + ": " + error.message());
  return found;
}

}  // namespace

CheckpointInfo read_checkpoint(const fs::path& path) {
  const fs::path manifest_path = path / "manifest.json";
  nlohmann::json manifest;
  try {
    manifest = nlohmann::json::parse(read_file(manifest_path));
    CheckpointInfo info;
    info.path = path;
    if (const int format = manifest.at("format").get<int>(); format < 1 || format > kCheckpointFormat)
      fail_data(manifest_path.string() + " has another format version");
    info.step = manifest.at("step").get<int64_t>();
    info.state = manifest.at("state");
    info.metrics = manifest.at("metrics").get<std::map<std::string, double>>();
    // Older programs gave a step the validation of an earlier one; such a score says nothing about these weights.
    if (info.state.is_object() && info.state.value("validated_step", info.step) != info.step) {
      for (auto metric = info.metrics.begin(); metric != info.metrics.end();)
        metric = starts_with(metric->first, "val:") ? info.metrics.erase(metric) : std::next(metric);
    }
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

std::vector<CheckpointInfo> list_checkpoints(const fs::path& directory, std::vector<std::string>* warnings) {
  std::vector<CheckpointInfo> found;
  for (const fs::path& path : step_folders(directory)) {
    try {
      found.push_back(read_checkpoint(path));
    } catch (const Error& error) {
      if (warnings != nullptr)
        warnings->push_back("ignoring the incomplete checkpoint " + path.string() + ": " + error.what());
    }
  }
  std::sort(found.begin(), found.end(),
            [](const CheckpointInfo& a, const CheckpointInfo& b) { return a.step < b.step; });
  return found;
}

std::vector<int64_t> checkpoint_steps(const fs::path& directory) {
  std::vector<int64_t> steps;
  for (const fs::path& path : step_folders(directory)) steps.push_back(*step_of(path));
  std::sort(steps.begin(), steps.end());
  return steps;
}

namespace {

// Best first: those with the metric before those without, the newer of equals.
std::vector<const CheckpointInfo*> ranked(const std::vector<CheckpointInfo>& checkpoints, const std::string& metric,
                                          bool higher_is_better) {
  std::vector<const CheckpointInfo*> order;
  for (const CheckpointInfo& info : checkpoints) order.push_back(&info);
  const auto has = [&](const CheckpointInfo* info) { return !metric.empty() && info->metrics.count(metric) > 0; };
  std::stable_sort(order.begin(), order.end(), [&](const CheckpointInfo* a, const CheckpointInfo* b) {
    if (has(a) != has(b)) return has(a);
    if (has(a)) {
      const double x = a->metrics.at(metric), y = b->metrics.at(metric);
      if (x != y) return higher_is_better ? x > y : x < y;
    }
    return a->step > b->step;
  });
  return order;
}

}  // namespace

std::vector<int64_t> steps_to_remove(const std::vector<CheckpointInfo>& checkpoints, const std::string& metric,
                                     bool higher_is_better, int64_t keep_top_k) {
  if (keep_top_k <= 0 || checkpoints.empty()) return {};
  const std::vector<const CheckpointInfo*> order = ranked(checkpoints, metric, higher_is_better);
  std::vector<int64_t> removed;
  for (size_t i = static_cast<size_t>(keep_top_k); i < order.size(); ++i) {
    if (order[i]->step != checkpoints.back().step) removed.push_back(order[i]->step);
  }
  std::sort(removed.begin(), removed.end());
  return removed;
}

std::vector<int64_t> steps_not_among(const std::vector<int64_t>& steps, const std::vector<int64_t>& others,
                                     int64_t newest) {
  std::vector<int64_t> removed;
  if (others.empty()) return removed;
  const int64_t newest_other = *std::max_element(others.begin(), others.end());
  for (const int64_t step : steps) {
    const bool kept = step == newest || step > newest_other || std::count(others.begin(), others.end(), step) > 0;
    if (!kept) removed.push_back(step);
  }
  return removed;
}

const CheckpointInfo* best_checkpoint(const std::vector<CheckpointInfo>& checkpoints, const std::string& metric,
                                      bool higher_is_better) {
  const std::vector<const CheckpointInfo*> order = ranked(checkpoints, metric, higher_is_better);
  return order.empty() || order.front()->metrics.count(metric) == 0 ? nullptr : order.front();
}

}  // namespace trireme
