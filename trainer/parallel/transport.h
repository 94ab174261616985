// What carries NCCL's traffic, read from NCCL's own log: it has no call that says so. No LibTorch.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/fs.h"

namespace trireme {

// Of one rank.
struct NcclTransport {
  std::string network;   // as NCCL or its plugin calls itself: "IB", "Socket", "AWS Libfabric"; empty: not in the log
  std::string provider;  // what libfabric, where that is the network, stands on: "efa", "cxi", "tcp"
  std::map<std::string, std::string> devices;  // of a network: {"IB", "mlx5_0:1/RoCE mlx5_1:1/RoCE"}
  // What connections to other ranks go through: "NET/IB/GDRDMA", "NET/Socket", "P2P/CUMEM", "SHM". Those of the
  // collectives so far: NCCL connects when an algorithm is used first.
  std::set<std::string> channels;
};

// Of a log with NCCL_DEBUG=INFO, any text: what is not NCCL's, and a last line without its end, says nothing.
NcclTransport parse_nccl_log(std::string_view text);

// "IB (mlx5_0:1/RoCE), GPU Direct RDMA"
std::string describe(const NcclTransport& transport);

// The value of an environment variable.
using LookUp = std::function<std::optional<std::string>(const std::string& name)>;

// Of what c10d throws for NCCL: its first line and, behind "Last error:", NCCL's own words.
std::string nccl_reason(std::string_view error);
// Whether it says that NCCL could not do it here, rather than that another rank has left or not come.
bool is_nccls_own(std::string_view error);

// What a rank says whose first collective between nodes has failed while RDMA is required
// (spec.network.rdma.require; the operator has set NCCL_NET then, so that NCCL fails instead of taking sockets): the
// error, the network, the node and its interface, and what to do.
std::string rdma_failure(const std::string& error, const LookUp& environment, const std::string& host);

struct NcclLogSettings {
  std::map<std::string, std::string> set;  // environment variables, before NCCL is called first
  std::string file;                        // where the log will be
};

// How NCCL is made to write its log; nothing where the user has a setting of it.
std::optional<NcclLogSettings> nccl_log_settings(const LookUp& environment, const std::string& own_file);

// At most the first 4 MiB. Waits until the log names the network, for `patience` at most. Empty: there is no such file.
std::string read_nccl_log(const std::filesystem::path& file, Milliseconds patience);

// What a start has to find out of the transport.
struct TransportCheck {
  bool required = false;  // spec.network.rdma.require
  bool spans_nodes = false;
  LookUp environment;                           // for the sentence of a failure
  std::optional<NcclLogSettings> log;           // none: nothing is read
  std::shared_ptr<TemporaryDirectory> scratch;  // of our own log, until the rank ends
};

// Where NCCL's bytes leave the node: why RDMA that is required would be sockets, as NCCL is set up, or nobody could
// know; nothing where it would not. Before NCCL is called.
std::optional<std::string> socket_setting(const TransportCheck& check);
// The same of what NCCL took, by its log: a network that is unknown is none of sockets.
std::optional<std::string> socket_choice(const TransportCheck& check, const NcclTransport& transport);

}  // namespace trireme
