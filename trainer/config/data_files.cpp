// Names of data sets -> the files that hold a split's rows.
#include <glob.h>

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "trainer/config/config.h"
#include "trainer/config/fields.h"
#include "trainer/config/hub.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string>& data_extensions() {
  static const std::vector<std::string> kExtensions = {".parquet", ".jsonl",     ".json",    ".jsonl.gz",
                                                       ".json.gz", ".jsonl.zst", ".json.zst"};
  return kExtensions;
}

// "train-00000-of-00002.parquet" -> "train-00000-of-00002"; nothing for a file of another kind.
std::optional<std::string> data_stem(const fs::path& path) {
  const std::string name = path.filename().string();
  std::optional<std::string> stem;
  for (const std::string& extension : data_extensions()) {
    if (name.size() <= extension.size() || !ends_with(name, extension)) continue;
    const std::string found = name.substr(0, name.size() - extension.size());
    if (!stem || found.size() < stem->size()) stem = found;
  }
  return stem;
}

// The split that a file's name stands for: SPLIT or SPLIT-00000-of-00002, as on the Hub.
std::string split_of(const std::string& stem) {
  const size_t of = stem.rfind("-of-");
  const size_t shard = of == std::string::npos ? of : stem.rfind('-', of - 1);
  if (shard == std::string::npos || shard == 0) return stem;
  const auto digits = [](const std::string& text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  };
  const bool sharded = digits(stem.substr(shard + 1, of - shard - 1)) && digits(stem.substr(of + 4));
  return sharded ? stem.substr(0, shard) : stem;
}

std::vector<fs::path> data_files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code ignored;
  for (fs::directory_iterator entry(folder, ignored), end; !ignored && entry != end; entry.increment(ignored)) {
    if (!entry->is_directory(ignored) && data_stem(entry->path())) files.push_back(entry->path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

bool is_split_name(const std::string& name) {
  for (const char* usual : {"train", "test", "validation", "valid", "val", "dev"}) {
    const std::string prefix = usual;
    if (name == prefix || starts_with(name, prefix + "_") || starts_with(name, prefix + "-")) return true;
  }
  return false;
}

// Files of `split` in a folder, or in one that the Hub's data sets have below it (data, main, default, plain_text,
// SPLIT). A folder whose files are named for no split is one split. Throws Error(kUser) naming the splits that there
// are.
std::vector<fs::path> files_of_split(const fs::path& folder, const std::string& split, const std::string& what) {
  std::set<std::string> splits;
  std::vector<fs::path> nameless;
  for (const fs::path& place :
       {folder, folder / "data", folder / "main", folder / "default", folder / "plain_text", folder / split}) {
    std::vector<fs::path> named;
    const std::vector<fs::path> all = data_files_in(place);
    for (const fs::path& file : all) {
      const std::string name = split_of(*data_stem(file));
      if (name == split) named.push_back(file);
      if (is_split_name(name)) splits.insert(name);
    }
    if (!named.empty()) return named;
    if (nameless.empty()) nameless = all;
    if (place == folder / split && !all.empty()) return all;
  }
  if (!splits.empty()) {
    fail_user("data: " + what + " has no split '" + split + "'; it has " +
              join(std::vector<std::string>(splits.begin(), splits.end()), ", "));
  }
  if (nameless.empty()) {
    fail_user("data: the folder " + folder.string() + " of " + what + " holds no data files (" +
              join(data_extensions(), ", ") + ")");
  }
  return nameless;
}

// A file, a pattern with * or ?, or a folder; no split: train. Throws Error(kUser).
std::vector<fs::path> files_at(const std::string& path, const std::string& split) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return files_of_split(path, split.empty() ? "train" : split, path);
  if (fs::exists(path, ignored)) return {path};
  std::vector<fs::path> found;
  if (path.find_first_of("*?") != std::string::npos) {
    glob_t matches{};
    if (::glob(path.c_str(), 0, nullptr, &matches) == 0)
      found.assign(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
    ::globfree(&matches);
    if (found.empty()) fail_user("data: no file matches '" + path + "'");
    return found;
  }
  fail_user("data: there is no file '" + path + "'");
}

// Files of a data set of the Hub, known or not; `asked`: its split, where one is named. Throws Error(kUser).
std::vector<fs::path> files_of_dataset(const std::string& name, const std::string& asked, const fs::path& hf_home) {
  const config::KnownDataset* known = config::find_dataset(name);
  const std::string split = !asked.empty() ? asked : known ? known->split : "train";
  const std::string id = known ? known->hub_id : name;
  const auto folder = config::is_hub_id(id) ? config::snapshot("datasets", id, hf_home) : std::nullopt;
  if (folder) {
    // A known set may keep its only split in a file of another name.
    const auto& own = known && split == "train" ? known->train_files : std::vector<std::string>{};
    for (const std::string& file : own) {
      if (fs::is_regular_file(*folder / file)) return {*folder / file};
    }
    return files_of_split(*folder, split, "data set " + name);
  }
  if (known || (config::is_hub_id(id) && id.find('/') != std::string::npos)) {
    fail_user("data: data set " + name + " is not in the Hugging Face cache " + (hf_home / "hub").string() +
              "; download it with: " + config::download_command(id, true) + "  (or set data_path)");
  }
  std::vector<std::string> names;
  for (const auto& each : config::known_datasets()) names.push_back(each.name);
  const auto near = nearest(name, names);
  fail_user("data: unknown data set '" + name + "'" + (near ? "; did you mean '" + *near + "'?" : "") + "; known are " +
            join(names, ", ") + "; for any other set data_path, or give its id on the Hub (org/name)");
}

// "0.7 data/a.jsonl", "0.3 gsm8k", "0.3 nvidia/OpenMathInstruct-2:train_1M".
DatasetFiles mixed_source(const std::string& text, const DatasetConfig& dataset, const fs::path& hf_home) {
  const size_t blank = text.find(' ');
  const auto weight = parse_double(text.substr(0, blank));
  const std::string source = blank == std::string::npos ? "" : std::string(trim(text.substr(blank)));
  if (!weight || !(*weight > 0) || source.empty()) {
    fail_user("data.train.mixture: '" + text +
              "' is not \"WEIGHT SOURCE\", e.g. \"0.7 rows.jsonl\" or \"0.3 nvidia/OpenMathInstruct-2:train_1M\"");
  }
  DatasetFiles files;
  files.weight = *weight;
  std::error_code ignored;
  if (fs::exists(source, ignored) || source.find_first_of("*?") != std::string::npos) {
    files.files = files_at(source, dataset.split);
    return files;
  }
  const size_t colon = source.rfind(':');
  const std::string name = source.substr(0, colon);
  files.files = files_of_dataset(name, colon == std::string::npos ? dataset.split : source.substr(colon + 1), hf_home);
  if (const auto* known = config::find_dataset(name)) {
    files.input_key = known->input_key;
    files.output_key = known->output_key;
    files.system_key = known->system_key;
  }
  return files;
}

}  // namespace

std::vector<DatasetFiles> resolve_dataset(const DatasetConfig& dataset, const fs::path& hf_home) {
  std::vector<DatasetFiles> sources;
  for (const std::string& text : dataset.mixture) sources.push_back(mixed_source(text, dataset, hf_home));
  if (!sources.empty()) return sources;
  DatasetFiles files;
  if (!dataset.data_path.empty()) {
    files.files = files_at(dataset.data_path, dataset.split);
  } else if (!dataset.dataset_name.empty()) {
    files.files = files_of_dataset(dataset.dataset_name, dataset.split, hf_home);
  } else {
    fail_user("data.train.data_path: names no file");
  }
  return {files};
}

}  // namespace trireme
