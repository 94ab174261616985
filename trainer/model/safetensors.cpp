#include "trainer/model/safetensors.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

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

// A file under a temporary name until finish(); removed if that never comes.
class OutputFile final {
 public:
  explicit OutputFile(const std::filesystem::path& path)
      : path_(path), temporary_(path.string() + ".tmp-" + std::to_string(::getpid())) {
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd_ < 0) fail("create");
  }
  ~OutputFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!finished_) ::unlink(temporary_.c_str());
  }
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(const void* data, size_t bytes) {
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t put = ::write(fd_, at, std::min<size_t>(bytes, size_t{1} << 30));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail("write");
      at += put;
      bytes -= static_cast<size_t>(put);
    }
  }
  void finish() {
    if (::fsync(fd_) != 0) fail("sync");
    const int closed = ::close(fd_);
    fd_ = -1;
    if (closed != 0) fail("close");
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename");
    finished_ = true;
    sync_directory(path_.parent_path());
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    fail_io(std::string("cannot ") + what + " " + path_.string() + ": " + std::strerror(errno));
  }
  std::filesystem::path path_;
  std::string temporary_;
  int fd_ = -1;
  bool finished_ = false;
};

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

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

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsEntry> entries;
  uint64_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    const uint64_t bytes = static_cast<uint64_t>(bytes_of(tensor));
    entries.push_back({name, name_of(tensor.scalar_type(), name), tensor.sizes().vec(), at, at + bytes});
    at += bytes;
  }
  OutputFile file(path);
  const std::string header = make_safetensors_header(entries, metadata);
  file.write(header.data(), header.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor host = tensor.detach().to(at::kCPU).contiguous();
    if (host.numel() > 0) file.write(host.const_data_ptr(), static_cast<size_t>(bytes_of(host)));
  }
  file.finish();
}

void write_sharded(const std::filesystem::path& dir, const NamedTensors& tensors, int64_t max_shard_bytes,
                   std::optional<at::ScalarType> dtype) {
  const auto stored_bytes = [&](const at::Tensor& tensor) {
    return tensor.numel() * static_cast<int64_t>(c10::elementSize(dtype.value_or(tensor.scalar_type())));
  };
  std::vector<NamedTensors> shards(1);
  int64_t in_shard = 0, total = 0;
  for (const auto& [name, tensor] : tensors) {
    const int64_t bytes = stored_bytes(tensor);
    if (!shards.back().empty() && in_shard + bytes > max_shard_bytes) {
      shards.emplace_back();
      in_shard = 0;
    }
    shards.back().emplace_back(name, tensor);
    in_shard += bytes;
    total += bytes;
  }
  // One shard in the target dtype at a time.
  const auto write_shard = [&](const std::filesystem::path& path, NamedTensors shard) {
    if (dtype) {
      for (auto& [name, tensor] : shard) tensor = tensor.detach().to(*dtype);
    }
    write_safetensors(path, shard, {{"format", "pt"}});
  };
  if (shards.size() == 1) {
    write_shard(dir / kSingle, shards[0]);
    std::filesystem::remove(dir / kIndex);
    return;
  }
  nlohmann::json map = nlohmann::json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::string name = shard_name(i, shards.size());
    write_shard(dir / name, shards[i]);
    for (const auto& [tensor_name, tensor] : shards[i]) map[tensor_name] = name;
  }
  const nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
  write_file_atomic(dir / kIndex, index.dump(2) + "\n");
  std::filesystem::remove(dir / kSingle);  // readers would prefer it
}

void read_model_tensors(const std::filesystem::path& dir,
                        const std::function<void(const std::string&, const at::Tensor&, const std::string&)>& visit) {
  if (std::filesystem::exists(dir / kSingle)) {
    const SafetensorsFile file(dir / kSingle);
    for (const std::string& name : file.names()) visit(name, file.tensor(name), (dir / kSingle).string());
    return;
  }
  const std::filesystem::path index_path = dir / kIndex;
  if (!std::filesystem::exists(index_path)) {
    const bool pickle = std::filesystem::exists(dir / "pytorch_model.bin") ||
                        std::filesystem::exists(dir / "pytorch_model.bin.index.json");
    fail_user(dir.string() + " has neither " + kSingle + " nor " + kIndex +
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
      fail_data(path.string() + " is missing, " + kIndex + " names it for " + *names.begin());
    const SafetensorsFile file(path);
    for (const std::string& name : names) {
      if (!file.contains(name))
        fail_data(path.string() + " lacks tensor " + name + ", which " + kIndex + " says is there");
    }
    for (const std::string& name : file.names()) {
      if (names.count(name) == 0) fail_data(path.string() + ": tensor " + name + " is not in " + kIndex);
      visit(name, file.tensor(name), path.string());
    }
  }
}

}  // namespace trireme
