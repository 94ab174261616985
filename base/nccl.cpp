#include "base/nccl.h"

#include <string>

#include "base/text.h"

namespace trireme {

bool is_sockets(std::string_view network) {
  const std::string name = to_lower(network);
  return name.find("socket") != std::string::npos || name.find("tcp") != std::string::npos;
}

}  // namespace trireme
