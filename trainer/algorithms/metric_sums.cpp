#include "trainer/algorithms/metric_sums.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "trainer/parallel/communicator.h"

namespace trireme {

bool is_extreme(const std::string& name) { return ends_with(name, "_min") || ends_with(name, "_max"); }

void add_metrics(MetricSums& sums, const MetricSums& more) {
  for (const auto& [name, value] : more) {
    const auto [at, inserted] = sums.emplace(name, value);
    if (inserted) continue;
    if (ends_with(name, "_min")) {
      at->second = std::min(at->second, value);
    } else if (ends_with(name, "_max")) {
      at->second = std::max(at->second, value);
    } else {
      at->second += value;
    }
  }
}

void divide_metrics(MetricSums& sums, double by) {
  for (auto& [name, value] : sums) {
    if (!is_extreme(name)) value /= by;
  }
}

MetricSums reduce_metrics(const MetricSums& own, Communicator& ranks) {
  if (ranks.size() == 1) return own;
  MetricSums all;
  const std::vector<uint8_t> bytes = nlohmann::json::to_cbor(own);  // as text a number that is not finite is lost
  for (const std::string& of_rank : ranks.all_gather_bytes(std::string(bytes.begin(), bytes.end())))
    add_metrics(all, nlohmann::json::from_cbor(of_rank).get<MetricSums>());
  return all;
}

}  // namespace trireme
