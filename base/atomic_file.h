// Files written piece by piece, crash-safe; locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "base/clock.h"

namespace trireme {

// Where the bytes of one file go, in order.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  virtual void write(const void* data, size_t bytes) = 0;
  virtual void finish() = 0;  // once, at the end: the file is whole, durable and under its name
};

// A file under a temporary name in the same folder until finish(), which syncs it, renames it over `path` and syncs the
// folder: after a crash `path` holds the old bytes or the new ones. The temporary file is removed when finish() never
// comes. The kernel begins to write early, so that the sync of a large file finds little to do. Throws Error(kIo) that
// names the path.
class AtomicFile final : public ByteSink {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  ~AtomicFile() override;
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(const void* data, size_t bytes) override;
  void finish() override;

 private:
  [[noreturn]] void fail(const char* what) const;
  std::filesystem::path path_;
  std::string temporary_;
  int fd_ = -1;
  int64_t written_ = 0, begun_ = 0;  // bytes; begun_: the kernel was told to write them
  bool finished_ = false;
};

// An exclusive lock on a file, which is made when it is not there; it ends with the object, or with the process.
class FileLock final {
 public:
  // Throws Error(kTimeout) at the deadline, Error(kIo) when the file cannot be made.
  FileLock(const std::filesystem::path& path, const Deadline& deadline);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  bool supported() const { return supported_; }  // false: the file system knows no locks, and nothing is held

 private:
  int fd_ = -1;
  bool supported_ = true;
};

}  // namespace trireme
