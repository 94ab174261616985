// ReviewShares: how many TokenReviews may be asked for on one pod's account, so that whoever sends junk in the name of
// a pod uses up that pod's share and nobody else's. Pure: the time is an argument.
#pragma once

#include <map>
#include <string>

#include "base/clock.h"

namespace trireme::telemetry {

struct ReviewShareOptions {
  double per_second = 0.2;  // a pod needs one review a token
  double burst = 5;
  size_t most = 20000;  // accounts that are remembered
};

class ReviewShares final {
 public:
  explicit ReviewShares(ReviewShareOptions options) : options_(options) {}
  // One more review on this account; false: not now.
  bool take(const std::string& account, SteadyClock::time_point now);
  size_t size() const { return shares_.size(); }

 private:
  struct Share {
    double left;
    SteadyClock::time_point at;
  };
  double left(const Share& share, SteadyClock::time_point now) const;
  void make_room(SteadyClock::time_point now);

  const ReviewShareOptions options_;
  std::map<std::string, Share> shares_;
};

}  // namespace trireme::telemetry
