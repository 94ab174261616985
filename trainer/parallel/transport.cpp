#include "trainer/parallel/transport.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <thread>
#include <vector>

#include "base/error.h"
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

bool is_sockets(const std::string& network) {
  const std::string name = to_lower(network);  // "Socket", "FastSocket", "GPUDirectTCPX_v7"
  return name.find("socket") != std::string::npos || name.find("tcp") != std::string::npos;
}

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

bool has_network_channel(const NcclTransport& transport, bool over_sockets) {
  return std::any_of(transport.channels.begin(), transport.channels.end(), [&](const std::string& channel) {
    return starts_with(channel, "NET/") && is_sockets(channel) == over_sockets;
  });
}

// NCCL's own: %h, %p and %%; what else follows a % stays as it is.
std::string expand(const std::string& pattern, const std::string& host, int64_t pid) {
  std::string out;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char next = pattern[i] == '%' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (next == 'h') out += host.substr(0, host.find('.'));
    if (next == 'p') out += std::to_string(pid);
    if (next == '%') out += '%';
    if (next == 'h' || next == 'p' || next == '%')
      ++i;
    else
      out += pattern[i];
  }
  return out;
}

// NCCL_DEBUG_SUBSYS with INIT in it, under which NCCL logs both the network and the channels.
std::string with_init(const std::string& given) {
  if (given.empty()) return "INIT,NET";
  const bool excludes = given[0] == '^';
  bool named = false;
  for (const std::string& part : split(given.substr(excludes ? 1 : 0), ',')) {
    const std::string name = to_lower(trim(part));
    named = named || name == "init" || name == "all";
  }
  if (excludes) return named ? "INIT,NET" : given;
  return named ? given : given + ",INIT";
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

std::optional<std::string> rdma_problem(const NcclTransport& transport, bool spans_nodes) {
  if (!spans_nodes) return std::nullopt;
  const std::string demand = "the manifest requires RDMA (spec.network.rdma.require) but ";
  if (is_sockets(transport.network) || is_sockets(transport.provider) || has_network_channel(transport, true)) {
    return demand + "NCCL goes between the nodes over TCP sockets: " + describe(transport) +
           "; give the pods their RDMA devices (spec.network.rdma.resourceName, memory locking, NCCL_IB_HCA), or set "
           "spec.network.rdma.require to false";
  }
  if (transport.network.empty() && !has_network_channel(transport, false)) {
    return demand +
           "NCCL's log does not say what it goes over between the nodes; take NCCL_DEBUG, NCCL_DEBUG_SUBSYS and "
           "NCCL_DEBUG_FILE out of the pods' environment (a file that ranks share needs %p in its name), or set "
           "spec.network.rdma.require to false";
  }
  return std::nullopt;
}

std::optional<NcclLogSettings> nccl_log_settings(const LookUp& environment, const std::string& own_file, bool required,
                                                 const std::string& host, int64_t pid) {
  const std::string level = environment("NCCL_DEBUG").value_or("");
  const std::string parts = environment("NCCL_DEBUG_SUBSYS").value_or("");
  const std::string file = environment("NCCL_DEBUG_FILE").value_or("");
  if (!required && !(level + parts + file).empty()) return std::nullopt;
  NcclLogSettings settings;
  const std::string detail = to_lower(level);
  if (detail != "info" && detail != "trace") settings.set["NCCL_DEBUG"] = "INFO";
  if (const std::string wanted = with_init(parts); wanted != parts) settings.set["NCCL_DEBUG_SUBSYS"] = wanted;
  if (file.empty()) {
    settings.set["NCCL_DEBUG_FILE"] = replace_all(own_file, "%", "%%");
    settings.file = own_file;
    settings.echo = !level.empty();
    return settings;
  }
  settings.file = expand(file, host, pid);
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(settings.file, ignored);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    fail_user(
        "NCCL_DEBUG_FILE is '" + file +
        "', which is no file that can be read again, as spec.network.rdma.require has to; name a file, or unset it");
  }
  return settings;
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
