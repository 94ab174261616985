// IndexStore: what reading a data file once found out, shared by all processes of a node.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"

namespace trireme {

// The rows of one data file. Plain data; `facts` is whatever the reader of the rows wants to keep with them.
struct RowIndex {
  std::vector<int64_t> skipped;  // rows of the file that are not in the index, ascending
  std::vector<int64_t> offsets;  // of the good rows, in the file or in its unpacked copy
  nlohmann::json facts = nlohmann::json::object();
};

// A RowIndex somewhere in memory: built by this process, or mapped from the node's copy. Keeps what it points to alive.
struct SharedIndex {
  std::span<const int64_t> skipped, offsets;
  nlohmann::json facts;
  int fd = -1;  // the unpacked copy, open for reading; -1 where the file is read in place
  std::shared_ptr<void> owner;
};

// A folder of mode 0700 that belongs to this user, below a scratch folder. For each key there are a lock file, an index
// and, where the file had to be unpacked, its copy. Who needs an index takes the lock for itself and builds it, or
// finds it and shares the lock; the last one to let go of a key removes its files. Files of processes that were killed
// are removed by the next one that comes. Thread-safe; processes of one node may use it at the same time.
class IndexStore final {
 public:
  // Throws Error(kIo) when the folder cannot be made or belongs to somebody else.
  explicit IndexStore(const std::filesystem::path& scratch_dir);

  // Builds into `copy_fd` (an empty file, when `unpacks`) what cannot be read in place.
  using Build = std::function<RowIndex(int copy_fd)>;
  // The index under `key`; `build` is called when nobody on this node has it. Waits for whoever is building it, for at
  // most `wait`; then Error(kTimeout). Errors of `build` come through and leave nothing behind.
  SharedIndex get(const std::string& key, bool unpacks, const Build& build, Milliseconds wait) const;

  const std::filesystem::path& folder() const { return folder_; }

 private:
  void remove_leftovers(const std::string& but) const;

  std::filesystem::path folder_;
};

// The same for this process alone; an unpacked copy is a nameless file in `scratch_dir`.
SharedIndex build_alone(const std::filesystem::path& scratch_dir, bool unpacks, const IndexStore::Build& build);

}  // namespace trireme
