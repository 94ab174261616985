#include "base/host.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

namespace trireme {
namespace {

int64_t memory_figure(const std::string& wanted) {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  int64_t kib = 0;
  while (file >> key >> kib >> unit) {
    if (key == wanted) return kib * 1024;
  }
  return int64_t{1} << 30;
}

// Of this process's cgroup, as its container sees it: version 2's file, or the two of version 1 as version 2 writes
// them.
std::string cpu_max() {
  std::string quota, period;
  if (std::ifstream file("/sys/fs/cgroup/cpu.max"); file >> quota >> period) return quota + " " + period;
  std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota;
  std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  return quota + " " + period;
}

}  // namespace

int cpus_of_quota(const std::string& cpu_max) {
  std::istringstream text(cpu_max);
  int64_t quota = 0, period = 0;
  if (!(text >> quota >> period) || quota <= 0 || period <= 0) return 0;
  const int64_t cpus = quota / period + (quota % period == 0 ? 0 : 1);
  return static_cast<int>(std::min<int64_t>(cpus, std::numeric_limits<int>::max()));
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int mask = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
  const int quota = cpus_of_quota(cpu_max());
  return std::max(1, quota == 0 ? mask : std::min(mask, quota));
}

int64_t total_memory_bytes() { return memory_figure("MemTotal:"); }
int64_t available_memory_bytes() { return memory_figure("MemAvailable:"); }

std::string host_name() {
  char name[256] = "";
  if (::gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "unknown";
  return name;
}

std::string errno_text() { return std::strerror(errno); }

}  // namespace trireme
