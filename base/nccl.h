// What NCCL calls its networks: what the operator's admission and the trainer both judge by.
#pragma once

#include <string_view>

namespace trireme {

// Of a network as NCCL or its plugin calls itself, as NCCL_NET names it, or of what libfabric stands on: it goes over
// TCP and is no RDMA. "Socket", "FastSocket", "GPUDirectTCPX_v7", "tcp", in any case.
bool is_sockets(std::string_view network);

}  // namespace trireme
