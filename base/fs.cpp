#include "base/fs.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/atomic_file.h"
#include "base/error.h"
#include "base/host.h"

namespace trireme {
namespace {

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

[[noreturn]] void fail_open(const std::filesystem::path& path) {
  throw Error(errno == ENOENT ? ErrorKind::kNotFound : ErrorKind::kIo,
              "cannot open " + path.string() + ": " + errno_text());
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
    if (got < 0) fail_io("cannot read " + path.string() + ": " + errno_text());
    if (got == 0) return bytes;
    bytes.append(buffer, static_cast<size_t>(got));
  }
}

void sync_directory(const std::filesystem::path& path) {
  Descriptor folder{::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (folder.fd < 0) fail_open(path);
  if (::fsync(folder.fd) != 0) fail_io("cannot sync folder " + path.string() + ": " + errno_text());
}

void write_file_atomic(const std::filesystem::path& path, std::string_view bytes) {
  AtomicFile file(path);
  file.write(bytes.data(), bytes.size());
  file.finish();
}

TemporaryDirectory::TemporaryDirectory() {
  std::string pattern = (std::filesystem::temp_directory_path() / "trireme-XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr)
    fail_io("cannot make a temporary folder like " + pattern + ": " + errno_text());
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
  if (::fstat(file.fd, &info) != 0) fail_io("cannot stat " + path.string() + ": " + errno_text());
  if (!S_ISREG(info.st_mode)) fail_io(path.string() + " is not a regular file");
  size_ = static_cast<size_t>(info.st_size);
  if (size_ == 0) return;
  void* mapped = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (mapped == MAP_FAILED) fail_io("cannot map " + path.string() + ": " + errno_text());
  data_ = static_cast<uint8_t*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace trireme
