#include "operator/telemetry/review_shares.h"

#include <algorithm>
#include <chrono>

namespace trireme::telemetry {

double ReviewShares::left(const Share& share, SteadyClock::time_point now) const {
  const double passed_s = std::chrono::duration<double>(now - share.at).count();
  return std::min(options_.burst, share.left + passed_s * options_.per_second);
}

bool ReviewShares::take(const std::string& account, SteadyClock::time_point now) {
  auto found = shares_.find(account);
  if (found == shares_.end()) {
    make_room(now);
    found = shares_.emplace(account, Share{options_.burst, now}).first;
  }
  Share& share = found->second;
  share = {left(share, now), now};
  if (share.left < 1) return false;
  share.left -= 1;
  return true;
}

// A share that is whole again is as one that is not there. Where none is, the one that was longest left alone goes.
void ReviewShares::make_room(SteadyClock::time_point now) {
  if (shares_.size() < options_.most) return;
  std::erase_if(shares_, [&](const auto& entry) { return left(entry.second, now) >= options_.burst; });
  if (shares_.size() < options_.most) return;
  shares_.erase(std::min_element(shares_.begin(), shares_.end(),
                                 [](const auto& a, const auto& b) { return a.second.at < b.second.at; }));
}

}  // namespace trireme::telemetry
