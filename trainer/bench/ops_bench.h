// trireme bench ops: single operations with the sizes of a shape, against the device's ceilings.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <vector>

#include "trainer/bench/report.h"

namespace trireme::bench {

struct OpsBenchOptions {
  CommonOptions common;
  std::vector<int64_t> rows = {16, 64, 256, 4096, 16384};  // of the linear layers
  std::vector<int64_t> decode_samples = {256, 32, 8};
  int64_t decode_context = 1000;
  int64_t packed_tokens = 16384;  // cut into sequences of 1/16, 1/4 and all of them
};
// `floor` of an op is the larger of its bytes over the copy's speed and its operations over the product's; bytes are
// those of inputs and outputs, once each.
nlohmann::json bench_ops(const OpsBenchOptions& options, std::ostream& out);

}  // namespace trireme::bench
