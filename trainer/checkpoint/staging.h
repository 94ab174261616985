// Host memory through which a checkpoint's state goes: a bounded number of blocks, and how a device is read into them.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace trireme {

// Bytes that this process could still use: what the machine has available, or what its control group leaves if that is
// less. `root`: of the file systems /proc and /sys; for tests.
int64_t available_host_memory(const std::filesystem::path& root = "/");

// The share of a rank that needs `own` bytes where the ranks of its machine need `all` and may use half of `available`.
int64_t staging_share(int64_t own, int64_t all, int64_t available);

class StagingPool final {
 public:
  // At least two blocks. Where `device` is a GPU they are pinned, and kept once they are.
  StagingPool(at::Device device, int64_t limit_bytes, int64_t block_bytes);
  ~StagingPool();
  StagingPool(const StagingPool&) = delete;
  StagingPool& operator=(const StagingPool&) = delete;

  int64_t block_bytes() const { return block_bytes_; }
  int64_t limit_bytes() const { return most_ * block_bytes_; }
  // Begins to pin what `bytes` need, up to the limit, on a thread: pinning costs seconds, which no save shall wait for.
  // Nothing on CPU.
  void reserve(int64_t bytes);
  // Returns when reserve() has done it.
  void wait_reserved();
  // A free block; waits for one. Null when `cancelled`, of which wake() tells.
  uint8_t* acquire(const std::atomic<bool>& cancelled);
  void release(uint8_t* block);
  void wake();
  // Gives back memory that is cheap to have again.
  void trim();

 private:
  uint8_t* allocate();
  void free_block(uint8_t* block);

  const at::Device device_;
  const int64_t block_bytes_;
  const int64_t most_;
  std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<uint8_t*> free_;  // under mutex_, as the next two
  int64_t made_ = 0;            // blocks that there are or that are being made
  bool stopping_ = false;
  std::atomic<bool> unpinned_{false};  // the driver did not pin one
  std::thread reserver_;
};

// Reads live tensors beside what the training thread computes. On CUDA on a stream of its own, in pieces that let small
// copies of others pass; captures of graphs elsewhere are not disturbed.
class StateReader final {
 public:
  explicit StateReader(at::Device device);
  ~StateReader();
  StateReader(const StateReader&) = delete;
  StateReader& operator=(const StateReader&) = delete;

  // On the training thread: what is read from now on is what all that it has queued leaves behind.
  void mark();
  // On the reading thread, before its first read.
  void begin();
  // Queues a copy; both must stay until finish(), which returns when all are done.
  void read(void* to, const void* from, int64_t bytes);
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
