#include "trainer/trackers/append_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace trireme {

AppendFile::AppendFile(std::filesystem::path path) : path_(std::move(path)) {
  std::error_code error;
  std::filesystem::create_directories(path_.parent_path(), error);
  if (error) fail_io("cannot make the folder " + path_.parent_path().string() + ": " + error.message());
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (fd_ < 0) fail_io("cannot write " + path_.string() + ": " + std::strerror(errno));
  size_ = std::filesystem::file_size(path_, error);
}

AppendFile::~AppendFile() { ::close(fd_); }

void AppendFile::append(std::string_view bytes) {
  uint64_t written = 0;
  while (written < bytes.size()) {
    const ssize_t now = ::write(fd_, bytes.data() + written, bytes.size() - written);
    if (now < 0 && errno == EINTR) continue;
    if (now <= 0) {
      const int reason = errno;
      // Else the next record would follow half of this one.
      if (::ftruncate(fd_, static_cast<off_t>(size_)) != 0) size_ += written;
      fail_io("cannot write " + path_.string() + ": " + std::strerror(reason));
    }
    written += static_cast<uint64_t>(now);
  }
  size_ += written;
}

}  // namespace trireme
