// Memory for what is copied and not written yet.
#include "trainer/checkpoint/staging.h"

#include <gtest/gtest.h>

#include <cstring>
#include <future>

#include "base/fs.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kGiB = int64_t{1} << 30;

TEST(HostMemory, IsWhatTheControlGroupLeaves) {
  const TemporaryDirectory dir;
  fs::create_directories(dir.path() / "proc");
  fs::create_directories(dir.path() / "sys" / "fs" / "cgroup");
  write_file_atomic(dir.path() / "proc" / "meminfo", "MemTotal:  99999999 kB\nMemAvailable:   67108864 kB\n");
  EXPECT_EQ(available_host_memory(dir.path()), 64 * kGiB);
  const fs::path group = dir.path() / "sys" / "fs" / "cgroup";
  write_file_atomic(group / "memory.max", "max\n");
  EXPECT_EQ(available_host_memory(dir.path()), 64 * kGiB);
  write_file_atomic(group / "memory.max", std::to_string(32 * kGiB) + "\n");
  write_file_atomic(group / "memory.current", std::to_string(12 * kGiB) + "\n");
  write_file_atomic(group / "memory.stat", "anon 1\ninactive_file " + std::to_string(3 * kGiB) + "\nactive_file " +
                                               std::to_string(kGiB) + "\n");
  EXPECT_EQ(available_host_memory(dir.path()), 24 * kGiB) << "page cache is given up when memory is wanted";
}

TEST(HostMemory, HalfOfItIsSharedByNeed) {
  EXPECT_EQ(staging_share(60, 105, 210), 60);
  EXPECT_EQ(staging_share(60, 90, 90), 30);  // of 45
  EXPECT_EQ(staging_share(30, 90, 90), 15);
  EXPECT_EQ(staging_share(0, 0, 90), 0);
}

TEST(StagingPool, MakesNoMoreBlocksThanItMay) {
  StagingPool pool(at::kCPU, 3 * 4096 + 100, 4096);
  EXPECT_EQ(pool.limit_bytes(), 3 * 4096);
  std::atomic<bool> cancelled{false};
  std::vector<uint8_t*> blocks;
  for (int i = 0; i < 3; ++i) blocks.push_back(pool.acquire(cancelled));
  for (uint8_t* block : blocks) std::memset(block, 1, 4096);
  auto fourth = std::async(std::launch::async, [&] { return pool.acquire(cancelled); });
  EXPECT_EQ(fourth.wait_for(std::chrono::milliseconds(50)), std::future_status::timeout);
  pool.release(blocks[1]);
  EXPECT_EQ(fourth.get(), blocks[1]);
  auto never = std::async(std::launch::async, [&] { return pool.acquire(cancelled); });
  EXPECT_EQ(never.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  cancelled = true;
  pool.wake();
  EXPECT_EQ(never.get(), nullptr);
  for (uint8_t* block : blocks) pool.release(block);
}

TEST(StagingPool, HasTwoBlocksAtLeast) { EXPECT_EQ(StagingPool(at::kCPU, 1, 4096).limit_bytes(), 2 * 4096); }

}  // namespace
}  // namespace trireme
