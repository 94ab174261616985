// Hugging Face ids -> folders and files of the local cache.
#include <algorithm>

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "trainer/config/config.h"
#include "trainer/config/hub.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

bool on_disk(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// The weights of the newest complete step of a checkpoint directory. A step gets its name when it is complete.
std::optional<fs::path> newest_weights(const fs::path& directory) {
  constexpr std::string_view kPrefix = "step_";
  std::optional<fs::path> found;
  int64_t newest = -1;
  std::error_code ignored;
  for (fs::directory_iterator entry(directory, ignored), end; !ignored && entry != end; entry.increment(ignored)) {
    const std::string name = entry->path().filename().string();
    if (!starts_with(name, kPrefix)) continue;
    const auto step = parse_int(name.substr(kPrefix.size()));
    const fs::path weights = entry->path() / "policy" / "weights";
    if (!step || *step <= newest || !on_disk(weights / "config.json")) continue;
    newest = *step;
    found = weights;
  }
  return found;
}

}  // namespace

namespace config {

bool is_hub_id(const std::string& name) {
  const auto parts = split(name, '/');
  if (parts.size() > 2) return false;
  return std::all_of(parts.begin(), parts.end(), [](const std::string& part) {
    return !part.empty() && part[0] != '.' && part[0] != '~' &&
           std::all_of(part.begin(), part.end(),
                       [](unsigned char c) { return std::isalnum(c) || c == '-' || c == '_' || c == '.'; });
  });
}

std::optional<fs::path> snapshot(const std::string& kind, const std::string& id, const fs::path& hf_home) {
  const fs::path folder = hf_home / "hub" / (kind + "--" + replace_all(id, "/", "--"));
  if (on_disk(folder / "refs" / "main")) {
    const fs::path found = folder / "snapshots" / std::string(trim(read_file(folder / "refs" / "main")));
    if (on_disk(found)) return found;
  }
  std::vector<fs::path> all;
  std::error_code ignored;
  for (fs::directory_iterator entry(folder / "snapshots", ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    all.push_back(entry->path());
  }
  return all.size() == 1 ? std::optional(all.front()) : std::nullopt;
}

std::string download_command(const std::string& id, bool dataset) {
  return std::string("hf download ") + (dataset ? "--repo-type dataset " : "") + id;
}

}  // namespace config

using config::download_command;

fs::path resolve_model(const std::string& model_name, const fs::path& hf_home) {
  if (on_disk(fs::path(model_name) / "config.json")) return model_name;
  if (on_disk(model_name)) {
    if (const auto weights = newest_weights(model_name)) return *weights;
    fail_user(
        "policy.model_name: '" + model_name +
        "' has no config.json and no checkpoints; name a folder in Hugging Face format or a checkpoint directory");
  }
  if (!config::is_hub_id(model_name)) fail_user("policy.model_name: there is no folder '" + model_name + "'");
  const auto found = config::snapshot("models", model_name, hf_home);
  if (!found || !on_disk(*found / "config.json")) {
    fail_user("policy.model_name: '" + model_name + "' is neither a folder nor in the Hugging Face cache " +
              (hf_home / "hub").string() + "; download it with: " + download_command(model_name, false));
  }
  return *found;
}

}  // namespace trireme
