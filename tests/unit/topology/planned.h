// What the tests of plans plan.
#pragma once

#include <cstdint>

#include "topology/plan.h"

namespace trireme::test {

inline constexpr int64_t kGiB = int64_t{1} << 30;

inline ModelShape shape_of_eight_layers() {
  return {.layers = 8, .hidden = 256, .heads = 8, .kv_heads = 4, .head_dim = 32, .intermediate = 512, .vocab = 1000};
}

inline ModelShape mixture_of_four_layers() {
  ModelShape shape = shape_of_eight_layers();
  shape.layers = 4;
  shape.intermediate = 0;
  shape.experts = 16;
  shape.experts_per_token = 3;
  shape.moe_intermediate = 64;
  return shape;
}

inline Workload small_work() {
  Workload work;
  work.prompts = {30, 17};
  work.outputs = {5, 60, 33, 8, 90, 12, 41, 77};
  work.longest = 128;
  work.optimizer_steps = 2;
  work.train_tokens = work.logprob_tokens = 256;
  work.places = 3;
  work.reference = true;
  work.prefill_tokens = 64;
  return work;
}

inline PlanDevices devices_of(int64_t bytes) {
  PlanDevices devices{.rates = *device_rates("h200")};
  devices.memory_bytes = bytes;
  return devices;
}

}  // namespace trireme::test
