// What devices that see each other's memory must know of their group.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"

namespace trireme {

struct PeerGroup {
  std::string name;
  int rank = 0, size = 1;
  // Any bytes of each rank on all, by the host. Collective.
  std::function<std::vector<std::string>(const std::string&)> all_gather_bytes;
  Milliseconds patience{0};  // after which a kernel waits no more
};

}  // namespace trireme
