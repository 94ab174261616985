// Sums of what micro-batches measure, over micro-batches, ranks and optimizer steps.
#pragma once

#include <map>
#include <string>

namespace trireme {

class Communicator;

using MetricSums = std::map<std::string, double>;

// Names that end in _min and _max keep their extreme; all others add up.
bool is_extreme(const std::string& name);
void add_metrics(MetricSums& sums, const MetricSums& more);
// Everything but extremes.
void divide_metrics(MetricSums& sums, double by);

// Over ranks, the same on all. Collective. Ranks may have different names: some need a token.
MetricSums reduce_metrics(const MetricSums& own, Communicator& ranks);

}  // namespace trireme
