#include "trainer/parallel/transport.h"

#include <algorithm>
#include <fstream>
#include <thread>
#include <vector>

#include "base/nccl.h"
#include "base/text.h"

namespace trireme {
namespace {

constexpr size_t kMostBytes = 4 << 20;
constexpr std::string_view kMark = " NCCL INFO ";

// What follows `prefix`, when `text` begins with it.
std::optional<std::string_view> after(std::string_view text, std::string_view prefix) {
  if (!starts_with(text, prefix)) return std::nullopt;
  return text.substr(prefix.size());
}

// "NET/IB/0(8)/GDRDMA/Shared" -> "NET/IB/GDRDMA"; "P2P/CUMEM/read" -> "P2P/CUMEM"; "SHM/direct/direct" -> "SHM".
std::string channel_of(std::string_view via) {
  if (starts_with(via, "direct shared memory")) return "SHM";  // before NCCL 2.10
  const std::vector<std::string> parts = split(trim(via), '/');
  if (parts[0] == "SHM" || parts.size() == 1) return parts[0];
  const bool direct = std::any_of(parts.begin() + 2, parts.end(), [](const std::string& part) {
    return part == "GDRDMA" || starts_with(part, "GDRDMA(");
  });
  return parts[0] + "/" + parts[1] + (direct ? "/GDRDMA" : "");
}

// "Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>" -> "mlx5_0:1/RoCE mlx5_1:1/RoCE".
std::string devices_of(std::string_view text) {
  std::vector<std::string> devices;
  for (const std::string& word : split(text.substr(0, text.find(';')), ' ')) {
    const size_t end = word.find(']');
    if (!starts_with(word, "[") || end == std::string::npos || end + 1 == word.size()) continue;
    if (parse_int(word.substr(1, end - 1))) devices.push_back(word.substr(end + 1));
  }
  return join(devices, " ");
}

constexpr const char* kRequired = "the manifest requires RDMA (spec.network.rdma.require) but ";

void parse_message(std::string_view message, NcclTransport& found) {
  if (const auto name = after(message, "Using network ")) {
    // Of several communicators the one over sockets is who to speak of.
    if (!is_sockets(found.network)) found.network = std::string(trim(*name));
  } else if (starts_with(message, "Channel ") || starts_with(message, "CollNet ")) {
    const size_t via = message.find(" via ");
    if (via != std::string_view::npos && via + 5 < message.size())
      found.channels.insert(channel_of(message.substr(via + 5)));
  } else if (const auto ofi = after(message, "NET/OFI Selected ")) {
    // "Provider is efa (found 4 nics)", "provider is efa, fabric is efa (found 4 nics)"
    const size_t is = ofi->find(" is ");
    if (is == std::string_view::npos) return;
    const std::string_view rest = ofi->substr(is + 4);
    found.provider = std::string(rest.substr(0, rest.find_first_of(" ,;")));
  } else if (const auto net = after(message, "NET/")) {
    const size_t colon = net->find(':');
    if (colon == std::string_view::npos) return;
    if (const auto devices = after(trim(net->substr(colon + 1)), "Using"))
      found.devices.emplace(trim(net->substr(0, colon)), devices_of(*devices));
  }
}

}  // namespace

NcclTransport parse_nccl_log(std::string_view text) {
  NcclTransport found;
  for (size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n')) {
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(end + 1);
    const size_t mark = line.find(kMark);
    if (mark != std::string_view::npos) parse_message(line.substr(mark + kMark.size()), found);
  }
  return found;
}

std::string describe(const NcclTransport& transport) {
  std::string text = transport.network.empty() ? "unknown" : transport.network;
  if (!transport.provider.empty()) text += " over " + transport.provider;
  const auto devices = transport.devices.find(transport.network);
  if (devices != transport.devices.end() && !devices->second.empty()) text += " (" + devices->second + ")";
  for (const std::string& channel : transport.channels)
    if (starts_with(channel, "NET/") && ends_with(channel, "/GDRDMA")) return text + ", GPU Direct RDMA";
  return text;
}

std::string nccl_reason(std::string_view error) {
  std::string reason(error.substr(0, error.find('\n')));
  constexpr std::string_view kLast = "Last error:\n";
  const size_t last = error.find(kLast);
  if (last == std::string_view::npos) return reason;
  const std::string_view rest = error.substr(last + kLast.size());
  const std::string_view words = trim(rest.substr(0, rest.find('\n')));
  return words.empty() ? reason : reason + " (" + std::string(words) + ")";
}

bool is_nccls_own(std::string_view error) {
  const auto says = [&](std::string_view words) { return error.find(words) != std::string_view::npos; };
  return says("NCCL error") && !says("ncclRemoteError") && !says("remote process") && !says(" has died") &&
         !says(" has not come");
}

std::string rdma_failure(const std::string& error, const LookUp& environment, const std::string& host) {
  const auto named = [&](const char* name, const char* otherwise) {
    const std::string value = environment(name).value_or("");
    return std::string(name) + (value.empty() ? std::string(" ") + otherwise : " '" + value + "'");
  };
  return error + "; the manifest requires RDMA (spec.network.rdma.require), so NCCL may use only " +
         named("NCCL_NET", "unset") + " from node " + host + ", interface " +
         named("NCCL_SOCKET_IFNAME", "of NCCL's choice") + ", devices " + named("NCCL_IB_HCA", "that the pod sees") +
         "; give the pods their RDMA devices (spec.network.rdma.resourceName, memory locking), name another network "
         "by NCCL_NET in the pods' template, or set spec.network.rdma.require to false";
}

std::optional<NcclLogSettings> nccl_log_settings(const LookUp& environment, const std::string& own_file) {
  for (const char* name : {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"})
    if (!environment(name).value_or("").empty()) return std::nullopt;
  return NcclLogSettings{{{"NCCL_DEBUG", "INFO"},
                          {"NCCL_DEBUG_SUBSYS", "INIT,NET"},
                          {"NCCL_DEBUG_FILE", replace_all(own_file, "%", "%%")}},
                         own_file};
}

std::optional<std::string> socket_setting(const TransportCheck& check) {
  if (!check.required || !check.environment) return std::nullopt;
  const std::string network(trim(check.environment("NCCL_NET").value_or("")));
  std::string what;
  if (is_sockets(network)) {
    what = "NCCL_NET is '" + network + "', which goes over sockets";
  } else if (network.empty() && !check.log && check.spans_nodes) {  // a transfer of weights is judged when it is made
    what = "NCCL_NET is not set, and NCCL's log, which would say whether it takes sockets, is not read";
  } else {
    return std::nullopt;
  }
  return kRequired + what +
         "; leave NCCL_NET out of the pods' template, so that the operator sets it, or name the network of an RDMA "
         "plugin there, or set spec.network.rdma.require to false";
}

std::optional<std::string> socket_choice(const TransportCheck& check, const NcclTransport& transport) {
  if (!check.required || (!is_sockets(transport.network) && !is_sockets(transport.provider))) return std::nullopt;
  return kRequired + ("NCCL took sockets, " + describe(transport)) +
         "; leave NCCL_NET as the operator sets it, or set spec.network.rdma.require to false";
}

std::string read_nccl_log(const std::filesystem::path& file, Milliseconds patience) {
  const Deadline limit = Deadline::after(patience);
  for (;;) {
    std::string text(kMostBytes, '\0');
    std::ifstream stream(file, std::ios::binary);
    stream.read(text.data(), static_cast<std::streamsize>(text.size()));
    text.resize(static_cast<size_t>(std::max<std::streamsize>(0, stream.gcount())));
    if (!parse_nccl_log(text).network.empty() || limit.passed()) return text;
    std::this_thread::sleep_for(std::min(Milliseconds(20), limit.remaining() + Milliseconds(1)));
  }
}

}  // namespace trireme
