#include "base/host.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace trireme {

std::string host_name() {
  char name[256] = "";
  if (::gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "unknown";
  return name;
}

std::string errno_text() { return std::strerror(errno); }

}  // namespace trireme
