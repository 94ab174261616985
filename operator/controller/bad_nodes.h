// BadNodes: the nodes that are not ready or gone, since when, and whether they are so many at once that it is the
// cluster's trouble and not theirs. All calls from any thread; the clock is the caller's.
#pragma once

#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

#include "operator/controller/observed.h"

namespace trireme::controller {

class BadNodes final {
 public:
  // What was heard of a node, when there are `nodes` of them. Returns the nodes whose pods' jobs that concerns: itself
  // unless nothing is new, and every bad one when a time of doubt begins or ends.
  std::set<std::string> heard(const std::string& node, NodeState state, size_t nodes, SteadyClock::time_point now);
  // Since when the node has been bad; after a time of doubt every node gets the whole grace again. Nothing: it is not
  // bad, as far as we heard, or has been gone for a day.
  std::optional<SteadyClock::time_point> since(const std::string& node) const;
  bool in_doubt() const;

 private:
  bool too_many(size_t nodes) const;
  struct Bad {
    NodeState state;
    SteadyClock::time_point since;
  };
  mutable std::mutex mutex_;
  std::unordered_map<std::string, Bad> bad_;
  bool doubt_ = false;
  SteadyClock::time_point doubt_ended_{};
};

}  // namespace trireme::controller
