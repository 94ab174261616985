// What devices and the links between them do: the numbers of a plan that are not counted from shapes. One table a kind
// of device, with the source of each.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

// One message between ranks: a latency, its first bytes at one rate and those behind them at a better one.
struct LinkRates {
  double latency_s = 0;
  double first_bytes = 0;  // that go at first_rate
  double first_rate = 1;   // bytes/s that leave a rank
  double further_rate = 1;
  double seconds(double bytes) const {
    const double first = bytes < first_bytes ? bytes : first_bytes;
    return latency_s + first / first_rate + (bytes - first) / further_rate;
  }
};

struct DeviceRates {
  std::string name;
  int64_t memory_bytes = 0;   // of the device
  int64_t outside_bytes = 0;  // of it that tensors never have: driver, kernels, NCCL
  int64_t processors = 1;     // streaming multiprocessors
  bool measured = false;      // else some are scaled from published figures
  // A decode step: bytes of weights, keys and values at decode_read, and for each layer a time, one for each sample
  // alive and one where it has experts.
  double decode_read = 1;
  double decode_layer_s = 0, decode_sample_s = 0, decode_experts_s = 0;
  // A pass over many rows: operations at the rate of their kind, and what a layer keeps for backward is moved
  // `moves` times at `copy`.
  double products = 1, attention = 1, experts_forward = 1, experts_backward = 1;
  double moves = 0;
  double copy = 1;
  LinkRates in_node, between_nodes;
  // Of a decode step, inside a node: what a sum over tensor ranks takes besides the norm that is launched with it.
  LinkRates decode_in_node;
};

// "h200", "h100"; nothing: not known.
std::optional<DeviceRates> device_rates(std::string_view name);
std::vector<std::string> known_device_rates();

}  // namespace trireme
