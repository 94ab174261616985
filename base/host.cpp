#include "base/host.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>

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

}  // namespace

int64_t total_memory_bytes() { return memory_figure("MemTotal:"); }
int64_t available_memory_bytes() { return memory_figure("MemAvailable:"); }

std::string host_name() {
  char name[256] = "";
  if (::gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "unknown";
  return name;
}

std::string errno_text() { return std::strerror(errno); }

}  // namespace trireme
