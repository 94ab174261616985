#include "trainer/rewards/failures.h"

#include "base/error.h"
#include "base/text.h"

namespace trireme {

std::vector<RewardCounters> counted_since(const std::vector<RewardCounters>& now,
                                          const std::vector<RewardCounters>& before) {
  TRIREME_CHECK(now.size() == before.size(), "counters of two pools");
  std::vector<RewardCounters> difference = now;
  for (size_t i = 0; i < now.size(); ++i) {
    difference[i].scored -= before[i].scored;
    difference[i].failed -= before[i].failed;
    difference[i].dropped -= before[i].dropped;
    difference[i].busy_seconds -= before[i].busy_seconds;
    if (difference[i].failed == 0) difference[i].last_error.clear();
  }
  return difference;
}

std::string pack_counters(const std::vector<RewardCounters>& counters) {
  nlohmann::json all = nlohmann::json::array();
  for (const RewardCounters& one : counters)
    all.push_back({one.name, one.scored, one.failed, one.dropped, one.busy_seconds, one.last_error});
  return all.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::vector<RewardCounters> sum_counters(const std::vector<std::string>& of_ranks) {
  std::vector<RewardCounters> sum;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    try {
      const nlohmann::json all = nlohmann::json::parse(of_ranks[rank]);
      if (rank == 0) sum.resize(all.size());
      for (size_t i = 0; i < sum.size(); ++i) {
        const nlohmann::json& one = all.at(i);
        if (rank == 0) sum[i].name = one.at(0).get<std::string>();
        sum[i].scored += one.at(1).get<int64_t>();
        sum[i].failed += one.at(2).get<int64_t>();
        sum[i].dropped += one.at(3).get<int64_t>();
        sum[i].busy_seconds += one.at(4).get<double>();
        const auto error = one.at(5).get<std::string>();
        if (sum[i].last_error.empty() && !error.empty())
          sum[i].last_error = of_ranks.size() > 1 ? "rank " + std::to_string(rank) + ": " + error : error;
      }
    } catch (const nlohmann::json::exception& error) {
      fail_data("reward counters of rank " + std::to_string(rank) + ": " + error.what());
    }
  }
  return sum;
}

void add_counters(std::vector<RewardCounters>& sum, const std::vector<RewardCounters>& more) {
  if (sum.empty()) {
    sum = more;
    return;
  }
  TRIREME_CHECK(sum.size() == more.size(), "counters of two pools");
  for (size_t i = 0; i < sum.size(); ++i) {
    sum[i].scored += more[i].scored;
    sum[i].failed += more[i].failed;
    sum[i].dropped += more[i].dropped;
    sum[i].busy_seconds += more[i].busy_seconds;
    if (!more[i].last_error.empty()) sum[i].last_error = more[i].last_error;
  }
}

std::optional<std::string> too_many_failed(const std::vector<RewardCounters>& counted, double share) {
  for (const RewardCounters& one : counted) {
    if (static_cast<double>(one.failed) <= share * static_cast<double>(one.scored)) continue;
    return "reward '" + one.name + "' failed for " + std::to_string(one.failed) + " of " + std::to_string(one.scored) +
           " responses, more than env.max_failed_share " + format_double(share) + "; the last error: " + one.last_error;
  }
  return std::nullopt;
}

}  // namespace trireme
