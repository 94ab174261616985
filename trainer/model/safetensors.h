// Safetensors with tensors: mapped reading, streaming crash-safe writing. The header rules are in base/safetensors.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fs.h"
#include "base/safetensors.h"

namespace trireme {

// One file, mapped. Tensors are views of the mapping and keep it alive; they must not be written.
class SafetensorsFile final {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);  // throws Error(kData) that names the file
  const SafetensorsHeader& header() const { return header_; }
  bool contains(const std::string& name) const;
  at::Tensor tensor(const std::string& name) const;  // throws Error(kData) when absent
  std::vector<std::string> names() const;

 private:
  std::filesystem::path path_;
  std::shared_ptr<MappedFile> file_;
  SafetensorsHeader header_;
};

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

// What a file holds.
struct TensorFile {
  std::string name;  // in its folder
  NamedTensors tensors;
  std::map<std::string, std::string> metadata;

  std::string header() const;  // all bytes before the first tensor's; the tensors' follow one another
  int64_t tensor_bytes() const;
};

// Writes one file: header, then tensors in the order given, streamed; temporary name, fsync, rename. Tensors may be on
// any device and need not be contiguous.
void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

// The files that write_sharded would write without a dtype, and the text of the index; no text: one file needs none.
struct ShardPlan {
  std::vector<TensorFile> files;
  std::string index;
};
ShardPlan plan_shards(const NamedTensors& tensors, int64_t max_shard_bytes,
                      std::optional<at::ScalarType> dtype = std::nullopt);
inline constexpr const char* kShardIndex = "model.safetensors.index.json";

// dir/model.safetensors, or shards of at most max_shard_bytes with model.safetensors.index.json.
// Converts to `dtype` when given, one shard at a time. The last file written makes the folder readable.
void write_sharded(const std::filesystem::path& dir, const NamedTensors& tensors, int64_t max_shard_bytes,
                   std::optional<at::ScalarType> dtype = std::nullopt);

// All tensors of a model folder: the single file or the shards of the index. Calls visit(name, tensor, file) once per
// tensor, shard by shard. Throws Error when the folder has neither, a shard is missing, or index and shards disagree.
void read_model_tensors(const std::filesystem::path& dir,
                        const std::function<void(const std::string&, const at::Tensor&, const std::string&)>& visit);

}  // namespace trireme
