// AppendFile: a file that only grows; each write is whole or an error, and what a failed write left is cut off again.
#pragma once

#include <filesystem>
#include <string_view>

namespace trireme {

class AppendFile final {
 public:
  // Creates the folders above it; an existing file goes on. Throws Error(kIo) that names the path.
  explicit AppendFile(std::filesystem::path path);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  void append(std::string_view bytes);
  uint64_t size() const { return size_; }

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

}  // namespace trireme
