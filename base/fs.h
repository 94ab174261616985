// Files: whole reads, crash-safe writes, temporary folders.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace trireme {

// Whole file as bytes. Throws Error(kNotFound | kIo) that names the path.
std::string read_file(const std::filesystem::path& path);

// All of a file at once, through an AtomicFile (atomic_file.h): after a crash it holds the old bytes or the new ones.
// Throws Error(kIo) (disk full included); nothing is left behind.
void write_file_atomic(const std::filesystem::path& path, std::string_view bytes);

// fsync of a folder, so that renames in it are durable.
void sync_directory(const std::filesystem::path& path);

// Removed with everything below it at the end of its life. For tests and scratch space.
class TemporaryDirectory final {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Read-only mapping of a whole file; stays valid until destruction. Empty files map to an empty view.
class MappedFile final {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  const uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  std::string_view view() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace trireme
