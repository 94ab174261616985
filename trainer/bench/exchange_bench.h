// trireme bench exchange: exchanges of rows between the ranks of a group, their time and their bits.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <vector>

#include "trainer/bench/report.h"

namespace trireme::bench {

struct ExchangeBenchOptions {
  CommonOptions common;  // its shape gives the width
  std::vector<int64_t> rows = {1, 4, 16, 64, 128, 256};
  int64_t large_mebibytes = 64;  // of a training exchange
};
// Collective over `context`, whose ranks are one tensor parallel group. Each exchange is compared bit for bit with its
// definition, made from whole parts that the communicator brings. The first rank prints and writes.
nlohmann::json bench_exchange(const ExchangeBenchOptions& options, ParallelContext& context, std::ostream& out);

}  // namespace trireme::bench
