#include "base/atomic_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "base/host.h"
#include "base/text.h"

namespace trireme {
namespace {

// Containers that write to one volume may have the same process numbers.
std::string temporary_name(const std::filesystem::path& path) {
  static const std::string& word = *new std::string(random_hex());  // for threads that outlive main()
  static std::atomic<uint64_t> counter{0};
  return path.string() + ".tmp-" + word + "-" + std::to_string(::getpid()) + "-" + std::to_string(counter.fetch_add(1));
}

}  // namespace

AtomicFile::AtomicFile(const std::filesystem::path& path) : path_(path), temporary_(temporary_name(path)) {
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (fd_ < 0) fail("create");
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!finished_) ::unlink(temporary_.c_str());
}

void AtomicFile::fail(const char* what) const {
  fail_io(std::string("cannot ") + what + " " + path_.string() + ": " + errno_text());
}

void AtomicFile::write(const void* data, size_t bytes) {
  constexpr int64_t kBegin = int64_t{32} << 20;
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = ::write(fd_, at, std::min<size_t>(bytes, size_t{1} << 30));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("write");
    at += put;
    bytes -= static_cast<size_t>(put);
    written_ += put;
  }
  if (written_ - begun_ < kBegin) return;
  // Advice: a file system that does not know it, or an error of the disk, is seen at the sync.
  (void)::sync_file_range(fd_, begun_, written_ - begun_, SYNC_FILE_RANGE_WRITE);
  begun_ = written_;
}

void AtomicFile::finish() {
  if (::fsync(fd_) != 0) fail("sync");
  const int closed = ::close(fd_);
  fd_ = -1;
  if (closed != 0) fail("close");
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename to");
  finished_ = true;
  sync_directory(path_.parent_path());
}

FileLock::FileLock(const std::filesystem::path& path, const Deadline& deadline) {
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0) fail_io("cannot create " + path.string() + ": " + errno_text());
  while (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EINTR) continue;
    supported_ = errno == EWOULDBLOCK;
    if (!supported_) return;
    if (deadline.passed()) {
      ::close(fd_);
      fail_timeout(path.string() + " is locked by another process and was not released in time");
    }
    std::this_thread::sleep_for(std::min(deadline.remaining(), Milliseconds(20)));
  }
}

FileLock::~FileLock() { ::close(fd_); }

}  // namespace trireme
