#include "topology/rates.h"

namespace trireme {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Measured on H200 (SXM, 141 GB), NVLink between two devices; bench/results/h200 has the files.
DeviceRates h200() {
  DeviceRates r;
  r.name = "h200";
  r.measured = true;
  r.memory_bytes = 143'156 * kMiB;  // 139.8 GiB, as the driver says
  r.processors = 132;               // of an H100 too
  r.outside_bytes = 3072 * kMiB;    // assumed; the fullest run that went well had 134.6 GiB of tensors
  // Fitted to the rows of decode-llama-3.1-8b and decode-qwen3-30b-a3b; no rollout was used.
  r.decode_read = 4.3e12;
  r.decode_layer_s = 13.6e-6;
  r.decode_sample_s = 0.16e-6;
  r.decode_experts_s = 20e-6;
  // Products and moves by least squares over forward and backward of train-llama-3.1-8b and train-llama-3.1-8b-x2, and
  // reference and training of step-qwen3-1.7b-shared; experts to train-qwen3-30b-a3b-6-layers, the only file that has
  // some.
  r.products = 730e12;
  r.attention = 400e12;  // docs/performance.md: 420 forward, 366 backward at 1,024 tokens
  r.experts_forward = 420e12;
  r.experts_backward = 238e12;
  r.moves = 3.5;
  r.copy = 4.26e12;
  // NCCL between two devices: small messages 8.6 us + bytes / 130 GB/s, 201 to 270 GB/s at 64 MiB.
  r.in_node = {.latency_s = 8.6e-6, .first_bytes = 16.0 * 1024 * 1024, .first_rate = 130e9, .further_rate = 300e9};
  // Kernels over peer memory, in graphs: fused_microseconds less norm_microseconds of exchange-llama-3.1-8b and -70b of
  // two H100, whose links are the same (2.4 us for 128 KiB, 4.2 for 512 KiB, 13.1 for 4 MiB).
  r.decode_in_node = {.latency_s = 1.9e-6, .first_bytes = 512.0 * 1024, .first_rate = 230e9, .further_rate = 410e9};
  // Between nodes nothing was measured: 400 Gbit/s a device at 90 %, and what such networks take for a message.
  r.between_nodes = {.latency_s = 25e-6, .first_bytes = 0, .first_rate = 45e9, .further_rate = 45e9};
  return r;
}

// Nothing was measured: an H200 with the published memory (80 of 141 GB, 3.35 of 4.8 TB/s).
DeviceRates h100() {
  DeviceRates r = h200();
  r.name = "h100";
  r.measured = false;
  r.memory_bytes = 81'079 * kMiB;
  r.decode_read *= 3.35 / 4.8;
  r.copy *= 3.35 / 4.8;
  return r;
}

}  // namespace

std::optional<DeviceRates> device_rates(std::string_view name) {
  for (const DeviceRates& rates : {h200(), h100()}) {
    if (rates.name == name) return rates;
  }
  return std::nullopt;
}

std::vector<std::string> known_device_rates() { return {h200().name, h100().name}; }

}  // namespace trireme
