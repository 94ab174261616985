#include "trainer/parallel/weight_protocol.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/host.h"
#include "base/log.h"
#include "trainer/parallel/flat_bytes.h"

namespace trireme {
namespace {

constexpr size_t kLongestLink = 128;
constexpr int64_t kWord = 8;
constexpr int64_t kWordsAtOnce = int64_t{4} << 20;  // of the device's reduction, which needs this much memory once more

uint64_t checksum_on_host(const uint8_t* bytes, int64_t size) {
  uint64_t sum = 0, word = 0;
  const auto words = static_cast<uint64_t>(size / kWord);
  for (uint64_t i = 0; i < words; ++i) {
    std::memcpy(&word, bytes + i * kWord, kWord);
    sum += word * (2 * i + 1);
  }
  if (size % kWord != 0) {
    word = 0;
    std::memcpy(&word, bytes + words * kWord, static_cast<size_t>(size % kWord));
    sum += word * (2 * words + 1);
  }
  return sum;
}

}  // namespace

uint64_t weight_checksum_by_reduction(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor bytes = flat_bytes(tensor);
  const int64_t count = bytes.numel() / kWord;
  const at::Tensor words = bytes.narrow(0, 0, count * kWord).view(at::kLong);
  at::Tensor sum = at::zeros({}, words.options());
  const at::Tensor odd = at::arange(1, 2 * std::min(count, kWordsAtOnce) + 1, 2, words.options());
  for (int64_t begin = 0; begin < count; begin += kWordsAtOnce) {
    const at::Tensor part = words.narrow(0, begin, std::min(kWordsAtOnce, count - begin));
    sum += (part * odd.narrow(0, 0, part.numel())).sum() + part.sum() * (2 * begin);
  }
  auto total = static_cast<uint64_t>(sum.item<int64_t>());
  if (bytes.numel() % kWord != 0) {
    const at::Tensor rest = bytes.narrow(0, count * kWord, bytes.numel() % kWord).cpu();
    total += checksum_on_host(rest.const_data_ptr<uint8_t>(), rest.numel()) * (2 * static_cast<uint64_t>(count) + 1);
  }
  return total;
}

uint64_t weight_checksum(const at::Tensor& tensor) {
  TRIREME_CHECK(tensor.is_contiguous(), "a checksum is of a contiguous tensor");
  if (!tensor.is_cpu()) return weight_checksum_by_reduction(tensor);
  return checksum_on_host(static_cast<const uint8_t*>(tensor.const_data_ptr()), static_cast<int64_t>(tensor.nbytes()));
}

WeightMessage message_about(const WeightView& weights, const WeightPart& part, WeightMessage::Kind kind,
                            int64_t version) {
  WeightMessage message;
  message.kind = kind;
  message.version = version;
  message.bytes =
      part.whole ? static_cast<int64_t>(weights.flat.nbytes()) : part.elements * weights.flat.element_size();
  message.dtype = static_cast<int64_t>(weights.flat.scalar_type());
  message.layout = part.whole ? weights.layout : part.digest;
  message.on_device = weights.flat.is_cuda() ? 1 : 0;
  const std::string host = host_name();
  std::memcpy(message.host, host.data(), std::min(host.size(), sizeof message.host - 1));
  return message;
}

void send_message(LinkPair& pair, const WeightMessage& message, const Deadline& deadline) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof message)}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), &message, sizeof message);
  pair.send(bytes, deadline);
}

WeightMessage receive_message(LinkPair& pair, const Deadline& deadline) {
  at::Tensor bytes = at::empty({static_cast<int64_t>(sizeof(WeightMessage))}, at::kByte);
  pair.receive(bytes, deadline);
  WeightMessage message;
  std::memcpy(&message, bytes.const_data_ptr(), sizeof message);
  if (message.magic != WeightMessage::kMagic)
    throw Error(ErrorKind::kUnavailable, "what came is no message of a weight link of this version");
  message.host[sizeof message.host - 1] = '\0';
  return message;
}

void expect(const WeightMessage& message, WeightMessage::Kind kind) {
  if (message.kind == kind) return;
  throw Error(ErrorKind::kUnavailable, "a message of a weight link came out of turn (" + std::to_string(message.kind) +
                                           " instead of " + std::to_string(kind) + ")");
}

std::string misfit(const WeightMessage& actor, const WeightMessage& engine) {
  const auto dtype = [](const WeightMessage& of) -> std::string {
    const bool known = of.dtype >= 0 && of.dtype < static_cast<int64_t>(at::ScalarType::NumOptions);
    return known ? at::toString(static_cast<at::ScalarType>(of.dtype)) : "of an unknown dtype";
  };
  const auto device = [](const WeightMessage& of) { return std::string(of.on_device != 0 ? "a GPU" : "a CPU"); };
  if (actor.dtype != engine.dtype) {
    return "the actor's weights are " + dtype(actor) + ", the engine's " + dtype(engine) +
           "; give both the same policy.precision";
  }
  if (actor.bytes != engine.bytes) {
    return "the actor's weights have " + std::to_string(actor.bytes) + " bytes, the engine's " +
           std::to_string(engine.bytes) + "; give both the same policy.model_name";
  }
  if (actor.layout != engine.layout) {
    return "the actor's parameters have other names, shapes or places than the engine's; give both the same "
           "policy.model_name and configuration";
  }
  if (actor.on_device != engine.on_device) {
    return "the actor's weights are on " + device(actor) + ", the engine's on " + device(engine) +
           "; give both the same cluster.device";
  }
  return "";
}

void judge_transport(const TransportCheck& check, bool on_device, const std::string& other_host) {
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::kUnavailable, "weights between " + host_name() + " and " + other_host + ": " + why);
  };
  if (!on_device) {
    if (check.required)
      refuse("the manifest requires RDMA (spec.network.rdma.require) but weights go over TCP on the CPU");
    return;
  }
  if (other_host == host_name()) return;
  if (const auto problem = socket_setting(check)) refuse(*problem);
  if (!check.log) return;
  const NcclTransport transport = parse_nccl_log(read_nccl_log(check.log->file, Milliseconds(5000)));
  if (const auto problem = socket_choice(check, transport)) refuse(*problem);
  log_info("parallel", "weights come from " + other_host + " over " + describe(transport));
}

std::string failure_of_transfer(const TransportCheck& check, const std::string& what) {
  const bool of_nccl = what.find("NCCL: ") != std::string::npos;
  if (!of_nccl || !check.required || !check.spans_nodes || !check.environment) return what;
  return rdma_failure(what, check.environment, host_name());
}

std::string engine_name(const WeightLinkOptions& options, int64_t number) {
  const int64_t ranks = options.engine_ranks;
  if (ranks == 1) return "engine " + std::to_string(number);
  return "engine " + std::to_string(number / ranks) + " rank " + std::to_string(number % ranks);
}

void check_link_name(const std::string& link) {
  const bool word = !link.empty() && link.size() <= kLongestLink && std::all_of(link.begin(), link.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
           c == '-';
  });
  if (!word)
    fail_user("the name of a weight link must be a word of at most " + std::to_string(kLongestLink) +
              " letters, digits, '.', '_' and '-'");
}

std::string link_key(const std::string& link, int64_t actor_rank, const std::string& what) {
  return "weights/link/" + link + "/" + std::to_string(actor_rank) + "/" + what;
}

}  // namespace trireme
