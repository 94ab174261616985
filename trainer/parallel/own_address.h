// The address that other hosts reach this process at. Whoever links this asks no DNS for names of addresses:
// getnameinfo() gives numbers.
#pragma once

#include <string>

namespace trireme {

// The local address that reaches `peer`: the one that others on its way can reach us at. No packet is sent. Throws
// Error(kUnavailable) when the name cannot be resolved.
std::string own_address_towards(const std::string& peer);

}  // namespace trireme
