#include "base/fs.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace trireme {
namespace {

std::string reason() { return std::strerror(errno); }

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

[[noreturn]] void fail_open(const std::filesystem::path& path) {
  throw Error(errno == ENOENT ? ErrorKind::kNotFound : ErrorKind::kIo,
              "cannot open " + path.string() + ": " + reason());
}

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) fail_open(path);
  std::string bytes;
  char buffer[1 << 16];
  while (true) {
    const ssize_t got = ::read(file.fd, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_io("cannot read " + path.string() + ": " + reason());
    if (got == 0) return bytes;
    bytes.append(buffer, static_cast<size_t>(got));
  }
}

void sync_directory(const std::filesystem::path& path) {
  Descriptor folder{::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (folder.fd < 0) fail_open(path);
  if (::fsync(folder.fd) != 0) fail_io("cannot sync folder " + path.string() + ": " + reason());
}

void write_file_atomic(const std::filesystem::path& path, std::string_view bytes) {
  static std::atomic<uint64_t> counter{0};
  const std::filesystem::path temporary =
      path.string() + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(counter.fetch_add(1));
  try {
    {
      Descriptor file{::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)};
      if (file.fd < 0) fail_io("cannot create " + temporary.string() + ": " + reason());
      size_t done = 0;
      while (done < bytes.size()) {
        const ssize_t put = ::write(file.fd, bytes.data() + done, bytes.size() - done);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) fail_io("cannot write " + path.string() + ": " + reason());
        done += static_cast<size_t>(put);
      }
      if (::fsync(file.fd) != 0) fail_io("cannot sync " + path.string() + ": " + reason());
    }
    if (::rename(temporary.c_str(), path.c_str()) != 0) fail_io("cannot rename to " + path.string() + ": " + reason());
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  sync_directory(path.parent_path());
}

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "trireme-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) fail_io("cannot make a temporary folder like " + pattern + ": " + reason());
  path_ = pattern;
}

TemporaryDirectory::~TemporaryDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

MappedFile::MappedFile(const std::filesystem::path& path) {
  Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) fail_open(path);
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) fail_io("cannot stat " + path.string() + ": " + reason());
  if (!S_ISREG(info.st_mode)) fail_io(path.string() + " is not a regular file");
  size_ = static_cast<size_t>(info.st_size);
  if (size_ == 0) return;
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (mapped == MAP_FAILED) fail_io("cannot map " + path.string() + ": " + reason());
  data_ = static_cast<uint8_t*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace trireme
