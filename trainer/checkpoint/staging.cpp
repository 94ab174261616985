#include "trainer/checkpoint/staging.h"

#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/checkpoint/pinned_memory.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kFirstTouch = 4096;

// The number in a file, or nothing: absent, "max", not a number.
std::optional<int64_t> number_in(const fs::path& path) {
  std::error_code missing;
  if (!fs::exists(path, missing)) return std::nullopt;
  try {
    return parse_int(trim(read_file(path)));
  } catch (const Error&) {
    return std::nullopt;
  }
}

// "KEY VALUE" or "KEY: VALUE kB" in a file of such lines.
int64_t line_in(const fs::path& path, const std::string& key) {
  std::error_code missing;
  if (!fs::exists(path, missing)) return 0;
  try {
    for (const std::string& line : split(read_file(path), '\n')) {
      if (!starts_with(line, key)) continue;
      const std::string rest(trim(std::string_view(line).substr(key.size())));
      return parse_int(rest.substr(0, rest.find(' '))).value_or(0);
    }
  } catch (const Error&) {
  }
  return 0;
}

// What a control group leaves: its page cache is given up when memory is wanted.
int64_t group_leaves(const fs::path& limit, const fs::path& used, const fs::path& statistics) {
  const auto most = number_in(limit);
  if (!most) return std::numeric_limits<int64_t>::max();
  const int64_t cache = line_in(statistics, "inactive_file ") + line_in(statistics, "active_file ");
  return std::max<int64_t>(0, *most - number_in(used).value_or(0) + cache);
}

}  // namespace

int64_t available_host_memory(const fs::path& root) {
  const fs::path group = root / "sys" / "fs" / "cgroup";
  const int64_t machine = line_in(root / "proc" / "meminfo", "MemAvailable:") * 1024;
  const int64_t second = group_leaves(group / "memory.max", group / "memory.current", group / "memory.stat");
  const fs::path old = group / "memory";
  const int64_t first = group_leaves(old / "memory.limit_in_bytes", old / "memory.usage_in_bytes", old / "memory.stat");
  return std::min({machine, first, second});
}

int64_t staging_share(int64_t own, int64_t all, int64_t available) {
  if (all <= available / 2) return own;
  const double part = static_cast<double>(own) / static_cast<double>(std::max<int64_t>(1, all));
  return static_cast<int64_t>(part * static_cast<double>(available / 2));
}

StagingPool::StagingPool(at::Device device, int64_t limit_bytes, int64_t block_bytes)
    : device_(device), block_bytes_(block_bytes), most_(std::max<int64_t>(2, limit_bytes / block_bytes)) {
  TRIREME_CHECK(block_bytes > 0, "a block holds something");
}

StagingPool::~StagingPool() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  if (reserver_.joinable()) reserver_.join();
  for (uint8_t* block : free_) free_block(block);
}

uint8_t* StagingPool::allocate() {
  void* block =
      ::mmap(nullptr, static_cast<size_t>(block_bytes_), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (block == MAP_FAILED) {
    fail_io("no " + format_bytes(static_cast<uint64_t>(block_bytes_)) +
            " of the machine's memory for a checkpoint's state; lower checkpointing.staging_gib");
  }
  if (device_.is_cuda()) {
    // Few large pages are pinned in a fraction of the time of many small ones.
    if (block_bytes_ % kHugePage == 0) (void)::madvise(block, static_cast<size_t>(block_bytes_), MADV_HUGEPAGE);
    for (int64_t at = 0; at < block_bytes_; at += kFirstTouch) static_cast<volatile uint8_t*>(block)[at] = 0;
    std::string problem;
    if (!pin_memory(device_, block, block_bytes_, &problem) && !unpinned_.exchange(true)) {
      log_warn("checkpoint",
               "memory for checkpoints cannot be pinned (" + problem + "): copies from the GPU take longer");
    }
  }
  return static_cast<uint8_t*>(block);
}

void StagingPool::free_block(uint8_t* block) {
  if (device_.is_cuda()) unpin_memory(block);
  ::munmap(block, static_cast<size_t>(block_bytes_));
}

void StagingPool::reserve(int64_t bytes) {
  if (!device_.is_cuda() || reserver_.joinable()) return;
  const int64_t wanted = std::min(most_, (bytes + block_bytes_ - 1) / block_bytes_);
  reserver_ = std::thread([this, wanted] {
    try {
      while (true) {
        {
          const std::lock_guard<std::mutex> lock(mutex_);
          if (stopping_ || made_ >= wanted) return;
          ++made_;
        }
        release(allocate());
      }
    } catch (const std::exception& error) {  // the save that finds it missing says so
      log_warn("checkpoint", error.what());
      const std::lock_guard<std::mutex> lock(mutex_);
      --made_;
    }
  });
}

void StagingPool::wait_reserved() {
  if (reserver_.joinable()) reserver_.join();
}

uint8_t* StagingPool::acquire(const std::atomic<bool>& cancelled) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    freed_.wait(lock, [&] { return cancelled.load() || !free_.empty() || made_ < most_; });
    if (cancelled.load()) return nullptr;
    if (!free_.empty()) {
      uint8_t* block = free_.back();
      free_.pop_back();
      return block;
    }
    ++made_;
  }
  try {
    return allocate();
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    --made_;
    throw;
  }
}

void StagingPool::release(uint8_t* block) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(block);
  }
  freed_.notify_all();
}

void StagingPool::wake() {
  { const std::lock_guard<std::mutex> lock(mutex_); }  // nobody is between looking and sleeping
  freed_.notify_all();
}

void StagingPool::trim() {
  if (device_.is_cuda()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  made_ -= static_cast<int64_t>(free_.size());
  for (uint8_t* block : free_) free_block(block);
  free_.clear();
}

}  // namespace trireme
