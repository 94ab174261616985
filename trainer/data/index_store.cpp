#include "trainer/data/index_store.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "base/host.h"
#include "base/log.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[8] = {'T', 'R', 'I', 'R', 'I', 'D', 'X', '1'};

// The lock file of a key, held shared or alone until destruction.
class KeyLock final {
 public:
  KeyLock(fs::path folder, std::string key) : folder_(std::move(folder)), key_(std::move(key)) {}
  ~KeyLock() {
    if (fd_ < 0) return;
    // The last one to leave removes the files; somebody who waits for the lock sees that its name is gone.
    if (::flock(fd_, LOCK_EX | LOCK_NB) == 0 && is_named()) {
      clear();
      std::error_code ignored;
      fs::remove(file(".lock"), ignored);
    }
    ::close(fd_);
  }
  KeyLock(const KeyLock&) = delete;
  KeyLock& operator=(const KeyLock&) = delete;

  fs::path file(const char* extension) const { return folder_ / (key_ + extension); }

  // LOCK_SH or LOCK_EX; false when others hold it.
  bool try_take(int kind) {
    while (true) {
      if (fd_ < 0) {
        fd_ = ::open(file(".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (fd_ < 0) fail_io("cannot write " + file(".lock").string() + ": " + errno_text());
      }
      if (::flock(fd_, kind | LOCK_NB) != 0) {
        if (errno == EINTR) continue;
        if (errno != EWOULDBLOCK) fail_io("cannot lock " + file(".lock").string() + ": " + errno_text());
        return false;
      }
      if (is_named()) return true;
      ::close(fd_);  // it was removed between open and lock
      fd_ = -1;
    }
  }

  // Whether the name still leads to the file that is locked.
  bool is_named() const {
    struct stat mine {
    }, named{};
    return ::fstat(fd_, &mine) == 0 && ::stat(file(".lock").c_str(), &named) == 0 && mine.st_ino == named.st_ino &&
           mine.st_dev == named.st_dev;
  }

  // What a builder that was killed, or a damaged index, left.
  void clear() const {
    std::error_code ignored;
    for (const char* extension : {".index", ".rows"}) fs::remove(file(extension), ignored);
  }

 private:
  const fs::path folder_;
  const std::string key_;
  int fd_ = -1;
};

// What a SharedIndex keeps alive. The lock goes last: its end may remove the files.
struct Owner {
  std::unique_ptr<KeyLock> lock;
  std::unique_ptr<MappedFile> file;
  RowIndex own;
  int fd = -1;
  ~Owner() {
    if (fd >= 0) ::close(fd);
  }
};

std::string as_bytes(const RowIndex& index) {
  const std::string facts = index.facts.dump();
  const uint64_t sizes[3] = {facts.size(), index.skipped.size(), index.offsets.size()};
  std::string bytes(kMagic, sizeof kMagic);
  bytes.append(reinterpret_cast<const char*>(sizes), sizeof sizes);
  bytes += facts;
  bytes.resize((bytes.size() + 7) / 8 * 8);
  const auto put = [&](const std::vector<int64_t>& values) {
    bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t));
  };
  put(index.skipped);
  put(index.offsets);
  return bytes;
}

// False for a file that is not what as_bytes writes.
bool map_index(const fs::path& path, SharedIndex& index, Owner& owner) {
  owner.file = std::make_unique<MappedFile>(path);
  const std::string_view bytes = owner.file->view();
  uint64_t sizes[3];
  constexpr size_t kHead = sizeof kMagic + sizeof sizes;
  if (bytes.size() < kHead || std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0) return false;
  std::memcpy(sizes, bytes.data() + sizeof kMagic, sizeof sizes);
  if (sizes[0] > bytes.size() - kHead || sizes[1] > bytes.size() / 8 || sizes[2] > bytes.size() / 8) return false;
  const size_t numbers = (kHead + sizes[0] + 7) / 8 * 8;
  if (bytes.size() != numbers + 8 * (sizes[1] + sizes[2])) return false;
  index.facts = nlohmann::json::parse(bytes.substr(kHead, sizes[0]), nullptr, false);
  if (!index.facts.is_object()) return false;
  const auto* first = reinterpret_cast<const int64_t*>(owner.file->data() + numbers);
  index.skipped = {first, sizes[1]};
  index.offsets = {first + sizes[1], sizes[2]};
  return true;
}

int open_copy(const fs::path& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) fail_io("cannot open " + path.string() + ": " + errno_text());
  return fd;
}

// A file that no name leads to: it vanishes with its descriptor, even after a kill.
int open_nameless(const fs::path& folder) {
  std::string name = (folder / "trireme-data-XXXXXX").string();
  const int fd = ::mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) fail_io("cannot create a temporary file in " + folder.string() + ": " + errno_text());
  ::unlink(name.c_str());
  return fd;
}

}  // namespace

IndexStore::IndexStore(const fs::path& scratch_dir)
    : folder_(scratch_dir / ("trireme-" + std::to_string(::geteuid()))) {
  if (::mkdir(folder_.c_str(), 0700) != 0 && errno != EEXIST)
    fail_io("cannot make the folder " + folder_.string() + ": " + errno_text());
  struct stat info {};
  if (::lstat(folder_.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != ::geteuid() ||
      (info.st_mode & 077) != 0) {
    fail_io(folder_.string() + " is not a folder of this user's alone");
  }
}

void IndexStore::remove_leftovers(const std::string& but) const {
  std::error_code ignored;
  for (fs::directory_iterator entry(folder_, ignored), end; !ignored && entry != end; entry.increment(ignored)) {
    if (entry->path().extension() != ".lock" || entry->path().stem() == but) continue;
    KeyLock lock(folder_, entry->path().stem().string());
    lock.try_take(LOCK_EX);  // its end removes the files of a key that nobody holds
  }
}

SharedIndex IndexStore::get(const std::string& key, bool unpacks, const Build& build, Milliseconds wait) const {
  remove_leftovers(key);
  const auto owner = std::make_shared<Owner>();
  owner->lock = std::make_unique<KeyLock>(folder_, key);
  KeyLock& lock = *owner->lock;
  SharedIndex index;
  index.owner = owner;
  const Deadline deadline = Deadline::after(wait);
  while (true) {
    if (lock.try_take(LOCK_SH) && fs::exists(lock.file(".index"))) {
      if (map_index(lock.file(".index"), index, *owner)) break;
      log_warn("data", "the index " + lock.file(".index").string() + " is damaged and is made again");
    }
    if (lock.try_take(LOCK_EX)) {
      lock.clear();
      if (owner->fd >= 0) ::close(owner->fd);
      owner->fd = unpacks ? open_copy(lock.file(".rows"), O_RDWR | O_CREAT | O_EXCL) : -1;
      const RowIndex built = build(owner->fd);
      write_file_atomic(lock.file(".index"), as_bytes(built));
      continue;  // and shares it
    }
    if (deadline.passed()) {
      fail_timeout("another process has been reading a data file for " + std::to_string(wait.count() / 1000) + " s (" +
                   lock.file(".lock").string() + ")");
    }
    std::this_thread::sleep_for(std::min(Milliseconds(20), deadline.remaining()));
  }
  if (unpacks && owner->fd < 0) owner->fd = open_copy(lock.file(".rows"), O_RDONLY);
  index.fd = owner->fd;
  return index;
}

SharedIndex build_alone(const fs::path& scratch_dir, bool unpacks, const IndexStore::Build& build) {
  const auto owner = std::make_shared<Owner>();
  if (unpacks) owner->fd = open_nameless(scratch_dir);
  owner->own = build(owner->fd);
  SharedIndex index;
  index.skipped = owner->own.skipped;
  index.offsets = owner->own.offsets;
  index.facts = owner->own.facts;
  index.fd = owner->fd;
  index.owner = owner;
  return index;
}

}  // namespace trireme
