#include "trainer/parallel/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <thread>

namespace trireme {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

// A line as NCCL writes it.
std::string line(const std::string& message) { return "node-a:4242:4311 [3] NCCL INFO " + message + "\n"; }

const std::string kRoce = "NCCL version 2.28.9+cuda13.0\n" + line("Bootstrap: Using eth0:10.0.0.7<0>") +
                          line("NET/Plugin: Could not find: libnccl-net.so.") +
                          line("NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.7<0>") +
                          line("Initialized NET plugin IB") + line("Assigned NET plugin IB to comm") +
                          line("Using network IB") + line("Channel 00/02 : 0 1 2 3") +
                          line("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read") +
                          line("Channel 01/0 : 3[3] -> 4[0] [send] via NET/IB/1(2)/GDRDMA/Shared") +
                          line("Channel 00/0 : 7[3] -> 0[0] [receive] via NET/IB/0/GDRDMA") +
                          line("Connected all rings, use ring PXN 0 GDR 1");

const std::string kSockets = line("NET/IB : No device found.") +
                             line("NET/Socket : Using [0]eth0:10.0.0.7<0> [1]eth1:10.1.0.7<0>") +
                             line("Using network Socket") + line("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct") +
                             line("Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0");

const std::string kEfa = line("NET/OFI Selected provider is efa, fabric is efa (found 4 nics)") +
                         line("Using network AWS Libfabric") +
                         line("Channel 00/0 : 1[1] -> 2[0] [send] via NET/AWS Libfabric/1/GDRDMA(PCI)");

TEST(NcclLog, NamesNetworkDevicesAndChannels) {
  const NcclTransport roce = parse_nccl_log(kRoce);
  EXPECT_EQ(roce.network, "IB");
  EXPECT_THAT(roce.devices, ElementsAre(Pair("IB", "mlx5_0:1/RoCE mlx5_1:1/RoCE")));
  EXPECT_THAT(roce.channels, UnorderedElementsAre("P2P/CUMEM", "NET/IB/GDRDMA"));
  EXPECT_EQ(describe(roce), "IB (mlx5_0:1/RoCE mlx5_1:1/RoCE), GPU Direct RDMA");

  const NcclTransport sockets = parse_nccl_log(kSockets);
  EXPECT_EQ(sockets.network, "Socket");
  EXPECT_THAT(sockets.channels, UnorderedElementsAre("SHM", "NET/Socket"));
  EXPECT_EQ(describe(sockets), "Socket (eth0:10.0.0.7<0> eth1:10.1.0.7<0>)");

  const NcclTransport efa = parse_nccl_log(kEfa);
  EXPECT_EQ(efa.network, "AWS Libfabric");
  EXPECT_EQ(efa.provider, "efa");
  EXPECT_THAT(efa.channels, UnorderedElementsAre("NET/AWS Libfabric/GDRDMA"));
  EXPECT_EQ(describe(efa), "AWS Libfabric over efa, GPU Direct RDMA");
}

TEST(NcclLog, OlderAndOtherForms) {
  const std::string text = line("Channel 00 : 0[3000] -> 1[4000] via direct shared memory") +
                           line("Channel 00/0 : 0[0] -> 1[1] via P2P/IPC") +
                           line("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer") +
                           line("Channel 00/0 : 0[0] -> 5[1] via P2P/indirect/3[3]") +
                           line("CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA") +
                           line("NET/OFI Selected Provider is tcp (found 1 nics)") +
                           "[2026-11-23 10:00:00] node-a:1:2 [0] NCCL INFO Using network IBext_v10 \n";
  const NcclTransport found = parse_nccl_log(text);
  EXPECT_THAT(found.channels,
              UnorderedElementsAre("SHM", "P2P/IPC", "P2P/direct pointer", "P2P/indirect", "COLLNET/SHARP/GDRDMA"));
  EXPECT_EQ(found.network, "IBext_v10");
  EXPECT_EQ(found.provider, "tcp");
}

TEST(NcclLog, JunkSaysNothing) {
  const std::string junk = "Using network IB\nvia NET/IB/0\n NCCL INFO \n" + line("") + line("Channel ") +
                           line("Channel 00 via ") + line("NET/") + line("NET/IB") + line("NET/IB : Using") +
                           line("NET/IB : Using [x]a [ [] [0] ]") + line("NET/OFI Selected ") + line("CollNet via /") +
                           line("reward says via NET/IB/0/GDRDMA") +
                           std::string("\0\xff\n NCCL WARN Using network IB\n", 31);
  const NcclTransport found = parse_nccl_log(junk);
  EXPECT_EQ(found.network, "");
  EXPECT_EQ(found.provider, "");
  for (const auto& [network, devices] : found.devices) EXPECT_EQ(devices, "") << network;
  EXPECT_EQ(describe(NcclTransport{}), "unknown");
}

// A log that is being written may end anywhere: what is not finished must not pass for something else.
TEST(NcclLog, NoPrefixSaysMoreThanTheWhole) {
  for (const std::string& text : {kRoce, kSockets, kEfa}) {
    const NcclTransport whole = parse_nccl_log(text);
    for (size_t n = 0; n <= text.size(); ++n) {
      const NcclTransport part = parse_nccl_log(std::string_view(text).substr(0, n));
      EXPECT_TRUE(part.network.empty() || part.network == whole.network) << n << ": " << part.network;
      EXPECT_TRUE(part.provider.empty() || part.provider == whole.provider) << n << ": " << part.provider;
      for (const std::string& channel : part.channels) EXPECT_EQ(whole.channels.count(channel), 1U) << channel;
      for (const auto& [network, devices] : part.devices) EXPECT_EQ(devices, whole.devices.at(network));
    }
  }
}

LookUp with(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
  };
}

// As c10d throws it.
const std::string kNoNetwork =
    "NCCL error in: /torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:93, invalid usage, NCCL version 2.28.9\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Failed to initialize any NET plugin\nException raised from";

TEST(Rdma, TheReasonIsNcclsLastError) {
  EXPECT_EQ(nccl_reason(kNoNetwork),
            "NCCL error in: /torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:93, invalid usage, NCCL version 2.28.9 "
            "(Failed to initialize any NET plugin)");
  for (const std::string text :
       {"Connection reset", "Connection reset\nLast error:", "Connection reset\nLast error:\n\n"})
    EXPECT_EQ(nccl_reason(text), "Connection reset");
  EXPECT_EQ(nccl_reason(""), "");
}

TEST(Rdma, WhereNcclCannotTheErrorNamesNetworkNodeAndInterface) {
  const std::string error = "rank 8 (dp 8) on node-b: all_reduce_sum number 1 failed: " + nccl_reason(kNoNetwork);
  EXPECT_THAT(rdma_failure(error, with({{"NCCL_NET", "IB"}, {"NCCL_SOCKET_IFNAME", "eth0"}, {"NCCL_IB_HCA", "mlx5"}}),
                           "node-b"),
              AllOf(HasSubstr("Failed to initialize any NET plugin"), HasSubstr("spec.network.rdma.require"),
                    HasSubstr("NCCL_NET 'IB' from node node-b, interface NCCL_SOCKET_IFNAME 'eth0', devices "
                              "NCCL_IB_HCA 'mlx5'; give the pods their RDMA devices")));
  EXPECT_THAT(rdma_failure(error, with({}), "node-b"),
              HasSubstr("NCCL_NET unset from node node-b, interface NCCL_SOCKET_IFNAME of NCCL's choice, devices "
                        "NCCL_IB_HCA that the pod sees"));
}

TEST(Rdma, AnotherRanksEndIsNoFaultOfTheNetwork) {
  EXPECT_TRUE(is_nccls_own(kNoNetwork));
  for (const std::string other :
       {"; rank 3 has died in phase start", "; rank 3 has not come", " ncclRemoteError: A call"})
    EXPECT_FALSE(is_nccls_own(kNoNetwork + other)) << other;
  EXPECT_FALSE(is_nccls_own("Connection closed by peer"));
}

TransportCheck required(std::map<std::string, std::string> variables, bool has_log = true) {
  TransportCheck check;
  check.required = check.spans_nodes = true;
  check.environment = with(std::move(variables));
  if (has_log) check.log.emplace();
  return check;
}

TEST(Rdma, SocketsThatTheEnvironmentNamesAreRefusedBeforeNcclIsAsked) {
  for (const std::string sockets : {"Socket", "socket", "FastSocket", "GPUDirectTCPX_v7"}) {
    for (const bool has_log : {true, false})
      EXPECT_THAT(socket_setting(required({{"NCCL_NET", sockets}}, has_log)).value_or("none"),
                  AllOf(HasSubstr("requires RDMA (spec.network.rdma.require) but NCCL_NET is '" + sockets + "', which"),
                        HasSubstr("; leave NCCL_NET out of the pods' template")));
  }
  for (const std::string other : {"IB", "AWS Libfabric", "UCX"}) {
    for (const bool has_log : {true, false})
      EXPECT_EQ(socket_setting(required({{"NCCL_NET", other}}, has_log)), std::nullopt) << other;
  }
  EXPECT_EQ(socket_setting(required({})), std::nullopt) << "the log will say it";
  for (const std::string unset : {"", " "})
    EXPECT_THAT(socket_setting(required({{"NCCL_NET", unset}}, /*has_log=*/false)).value_or("none"),
                HasSubstr("NCCL_NET is not set, and NCCL's log"));
  TransportCheck free = required({{"NCCL_NET", "Socket"}});
  free.required = false;
  EXPECT_EQ(socket_setting(free), std::nullopt);
}

TEST(Rdma, SocketsThatTheLogNamesAreRefused) {
  TransportCheck check = required({{"NCCL_NET", "IB"}});
  EXPECT_THAT(socket_choice(check, parse_nccl_log(kSockets)).value_or("none"),
              HasSubstr("requires RDMA (spec.network.rdma.require) but NCCL took sockets, Socket (eth0:10.0.0.7<0> "
                        "eth1:10.1.0.7<0>); leave NCCL_NET as the operator sets it"));
  for (const std::string network : {"FastSocket", "GPUDirectTCPX_v7"})
    EXPECT_THAT(socket_choice(check, parse_nccl_log(line("Using network " + network))).value_or("none"),
                HasSubstr("NCCL took sockets, " + network));
  const std::string tcp = line("NET/OFI Selected provider is tcp, fabric is TCP-IP (found 1 nics)");
  EXPECT_THAT(socket_choice(check, parse_nccl_log(tcp + line("Using network AWS Libfabric"))).value_or("none"),
              HasSubstr("NCCL took sockets, AWS Libfabric over tcp"));
  for (const std::string& text : {kRoce, kEfa, std::string()})
    EXPECT_EQ(socket_choice(check, parse_nccl_log(text)), std::nullopt) << text;
  check.required = false;
  EXPECT_EQ(socket_choice(check, parse_nccl_log(kSockets)), std::nullopt);
}

TEST(LogSettings, OurOwnWhereNothingIsSet) {
  const auto settings = nccl_log_settings(with({}), "/tmp/own 5%/log");
  ASSERT_TRUE(settings);
  EXPECT_THAT(settings->set, UnorderedElementsAre(Pair("NCCL_DEBUG", "INFO"), Pair("NCCL_DEBUG_SUBSYS", "INIT,NET"),
                                                  Pair("NCCL_DEBUG_FILE", "/tmp/own 5%%/log")));
  EXPECT_EQ(settings->file, "/tmp/own 5%/log");
}

TEST(LogSettings, TheUsersAreLeftAlone) {
  for (const std::string name : {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"})
    EXPECT_FALSE(nccl_log_settings(with({{name, "INFO"}}), "/tmp/own")) << name;
}

TEST(ReadLog, WaitsForTheNetworkAndNotForEver) {
  const TemporaryDirectory folder;
  const std::filesystem::path file = folder.path() / "log";
  EXPECT_EQ(read_nccl_log(file, Milliseconds(30)), "");
  std::ofstream(file) << line("Bootstrap");
  EXPECT_EQ(read_nccl_log(file, Milliseconds(30)), line("Bootstrap"));
  std::thread writer([&] {
    std::this_thread::sleep_for(Milliseconds(50));
    std::ofstream(file, std::ios::app) << line("Using network IB");
  });
  EXPECT_EQ(parse_nccl_log(read_nccl_log(file, Milliseconds(60000))).network, "IB");
  writer.join();
  EXPECT_EQ(read_nccl_log(folder.path(), Milliseconds(0)), "");
}

TEST(ReadLog, IsBounded) {
  const TemporaryDirectory folder;
  const std::filesystem::path file = folder.path() / "log";
  std::ofstream(file) << line("Using network IB") << std::string(5 << 20, 'x') << "\n" << line("Using network Socket");
  const std::string text = read_nccl_log(file, Milliseconds(0));
  EXPECT_EQ(text.size(), 4U << 20);
  EXPECT_EQ(parse_nccl_log(text).network, "IB");
}

}  // namespace
}  // namespace trireme
