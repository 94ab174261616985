#include "trainer/model/safetensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "base/atomic_file.h"
#include "base/error.h"

namespace trireme {
namespace {

struct TypeName {
  const char* name;
  at::ScalarType type;
};
constexpr TypeName kTypes[] = {{"F64", at::kDouble},
                               {"F32", at::kFloat},
                               {"F16", at::kHalf},
                               {"BF16", at::kBFloat16},
                               {"I64", at::kLong},
                               {"I32", at::kInt},
                               {"I16", at::kShort},
                               {"I8", at::kChar},
                               {"U8", at::kByte},
                               {"BOOL", at::kBool},
                               {"F8_E4M3", at::kFloat8_e4m3fn},
                               {"F8_E5M2", at::kFloat8_e5m2}};

at::ScalarType type_of(const std::string& name, const std::string& where) {
  for (const TypeName& entry : kTypes) {
    if (name == entry.name) return entry.type;
  }
  fail_data(where + ": dtype " + name + " is not supported");
}

const char* name_of(at::ScalarType type, const std::string& tensor) {
  for (const TypeName& entry : kTypes) {
    if (type == entry.type) return entry.name;
  }
  fail_internal("tensor " + tensor + " has a dtype that safetensors does not know: " + c10::toString(type));
}

constexpr const char* kSingle = "model.safetensors";

std::string shard_name(size_t index, size_t count) {
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", index + 1, count);
  return name;
}

int64_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path), file_(std::make_shared<MappedFile>(path)) {
  header_ = parse_safetensors_header(file_->view(), file_->size(), path.string());
}

bool SafetensorsFile::contains(const std::string& name) const {
  return std::any_of(header_.entries.begin(), header_.entries.end(),
                     [&](const SafetensorsEntry& entry) { return entry.name == name; });
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const SafetensorsEntry& entry : header_.entries) names.push_back(entry.name);
  return names;
}

at::Tensor SafetensorsFile::tensor(const std::string& name) const {
  for (const SafetensorsEntry& entry : header_.entries) {
    if (entry.name != name) continue;
    const at::ScalarType type = type_of(entry.dtype, path_.string() + ": tensor " + name);
    const auto options = at::TensorOptions().dtype(type);
    if (entry.begin == entry.end) return at::empty(entry.shape, options);
    const uint8_t* data = file_->data() + header_.data_start + entry.begin;
    if (reinterpret_cast<uintptr_t>(data) % c10::elementSize(type) != 0) {  // some writers do not align the header
      at::Tensor copy = at::empty(entry.shape, options);
      std::memcpy(copy.mutable_data_ptr(), data, static_cast<size_t>(entry.end - entry.begin));
      return copy;
    }
    return at::from_blob(
        const_cast<uint8_t*>(data), entry.shape, [keep = file_](void*) {}, options);
  }
  fail_data(path_.string() + " has no tensor " + name);
}

std::string TensorFile::header() const {
  std::vector<SafetensorsEntry> entries;
  uint64_t at = 0;
  for (const auto& [tensor_name, tensor] : tensors) {
    const uint64_t bytes = static_cast<uint64_t>(bytes_of(tensor));
    entries.push_back({tensor_name, name_of(tensor.scalar_type(), tensor_name), tensor.sizes().vec(), at, at + bytes});
    at += bytes;
  }
  return make_safetensors_header(entries, metadata);
}

int64_t TensorFile::tensor_bytes() const {
  int64_t bytes = 0;
  for (const auto& [tensor_name, tensor] : tensors) bytes += bytes_of(tensor);
  return bytes;
}

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::string header = TensorFile{path.filename().string(), tensors, metadata}.header();
  AtomicFile file(path);
  file.write(header.data(), header.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor host = tensor.detach().to(at::kCPU).contiguous();
    if (host.numel() > 0) file.write(host.const_data_ptr(), static_cast<size_t>(bytes_of(host)));
  }
  file.finish();
}

ShardPlan plan_shards(const NamedTensors& tensors, int64_t max_shard_bytes, std::optional<at::ScalarType> dtype) {
  const auto stored_bytes = [&](const at::Tensor& tensor) {
    return tensor.numel() * static_cast<int64_t>(c10::elementSize(dtype.value_or(tensor.scalar_type())));
  };
  ShardPlan plan;
  plan.files.emplace_back();
  int64_t in_shard = 0, total = 0;
  for (const auto& [name, tensor] : tensors) {
    const int64_t bytes = stored_bytes(tensor);
    if (!plan.files.back().tensors.empty() && in_shard + bytes > max_shard_bytes) {
      plan.files.emplace_back();
      in_shard = 0;
    }
    plan.files.back().tensors.emplace_back(name, tensor);
    in_shard += bytes;
    total += bytes;
  }
  const size_t count = plan.files.size();
  nlohmann::json map = nlohmann::json::object();
  for (size_t i = 0; i < count; ++i) {
    TensorFile& file = plan.files[i];
    file.name = count == 1 ? kSingle : shard_name(i, count);
    file.metadata = {{"format", "pt"}};
    for (const auto& [tensor_name, tensor] : file.tensors) map[tensor_name] = file.name;
  }
  if (count > 1) plan.index = nlohmann::json{{"metadata", {{"total_size", total}}}, {"weight_map", map}}.dump(2) + "\n";
  return plan;
}

void write_sharded(const std::filesystem::path& dir, const NamedTensors& tensors, int64_t max_shard_bytes,
                   std::optional<at::ScalarType> dtype) {
  ShardPlan plan = plan_shards(tensors, max_shard_bytes, dtype);
  for (TensorFile& file : plan.files) {  // one shard in the target dtype at a time
    NamedTensors shard = std::move(file.tensors);
    if (dtype) {
      for (auto& [name, tensor] : shard) tensor = tensor.detach().to(*dtype);
    }
    write_safetensors(dir / file.name, shard, file.metadata);
  }
  if (plan.index.empty()) {
    std::filesystem::remove(dir / kShardIndex);
    return;
  }
  write_file_atomic(dir / kShardIndex, plan.index);
  std::filesystem::remove(dir / kSingle);  // readers would prefer it
}

void read_model_tensors(const std::filesystem::path& dir,
                        const std::function<void(const std::string&, const at::Tensor&, const std::string&)>& visit) {
  if (std::filesystem::exists(dir / kSingle)) {
    const SafetensorsFile file(dir / kSingle);
    for (const std::string& name : file.names()) visit(name, file.tensor(name), (dir / kSingle).string());
    return;
  }
  const std::filesystem::path index_path = dir / kShardIndex;
  if (!std::filesystem::exists(index_path)) {
    const bool pickle = std::filesystem::exists(dir / "pytorch_model.bin") ||
                        std::filesystem::exists(dir / "pytorch_model.bin.index.json");
    fail_user(dir.string() + " has neither " + kSingle + " nor " + kShardIndex +
              (pickle ? "; pickled weights (pytorch_model.bin) are not read, save the model as safetensors" : ""));
  }
  const nlohmann::json index = nlohmann::json::parse(read_file(index_path), nullptr, false);
  if (index.is_discarded() || !index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    fail_data(index_path.string() + " is not an index: it needs an object weight_map");
  }
  std::map<std::string, std::set<std::string>> shards;
  for (const auto& [name, file] : index["weight_map"].items()) {
    if (!file.is_string() || file.get<std::string>().find('/') != std::string::npos) {
      fail_data(index_path.string() + ": weight_map." + name + " is not a file name in this folder");
    }
    shards[file.get<std::string>()].insert(name);
  }
  for (const auto& [shard, names] : shards) {
    const std::filesystem::path path = dir / shard;
    if (!std::filesystem::exists(path))
      fail_data(path.string() + " is missing, " + kShardIndex + " names it for " + *names.begin());
    const SafetensorsFile file(path);
    for (const std::string& name : names) {
      if (!file.contains(name))
        fail_data(path.string() + " lacks tensor " + name + ", which " + kShardIndex + " says is there");
    }
    for (const std::string& name : file.names()) {
      if (names.count(name) == 0) fail_data(path.string() + ": tensor " + name + " is not in " + kShardIndex);
      visit(name, file.tensor(name), path.string());
    }
  }
}

}  // namespace trireme
