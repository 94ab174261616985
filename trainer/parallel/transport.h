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

// Why this is not RDMA, as a sentence for who asked for it (spec.network.rdma.require); nothing where it is, or where
// all ranks are on one node, which needs no network.
std::optional<std::string> rdma_problem(const NcclTransport& transport, bool spans_nodes);

// The value of an environment variable.
using LookUp = std::function<std::optional<std::string>(const std::string& name)>;

struct NcclLogSettings {
  std::map<std::string, std::string> set;  // environment variables, before NCCL is called first
  std::string file;                        // where the log will be
  bool echo = false;                       // the user wants it on stdout, where NCCL would have written it
};

// How NCCL is made to write its log. Where RDMA is `required`, the user's settings are kept as far as the log still
// says what is needed; where it is not, nothing comes when he has any. `own_file` is taken when he names none; `host`
// and `pid` are what NCCL puts for %h and %p in his. Throws Error(kUser) when his file cannot be read back.
std::optional<NcclLogSettings> nccl_log_settings(const LookUp& environment, const std::string& own_file, bool required,
                                                 const std::string& host, int64_t pid);

// At most the first 4 MiB. Waits until the log names the network, for `patience` at most. Empty: there is no such file.
std::string read_nccl_log(const std::filesystem::path& file, Milliseconds patience);

// What a start has to find out of the transport.
struct TransportCheck {
  bool required = false;  // spec.network.rdma.require
  bool spans_nodes = false;
  std::optional<NcclLogSettings> log;           // none: nothing is read
  std::shared_ptr<TemporaryDirectory> scratch;  // of our own log, until the rank ends
};

}  // namespace trireme
