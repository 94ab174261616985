#include "operator/controller/bad_nodes.h"

#include <algorithm>

namespace trireme::controller {
namespace {

constexpr std::chrono::hours kGoneFor{24};  // a node that is gone is remembered

}  // namespace

std::set<std::string> BadNodes::heard(const std::string& node, NodeState state, size_t nodes,
                                      SteadyClock::time_point now) {
  std::lock_guard lock(mutex_);
  // An autoscaler gives each node another name. A pod that is still on one of them is on a node that is not known.
  std::erase_if(bad_, [&](const auto& known) {
    return known.first != node && known.second.state == NodeState::kGone && now - known.second.since >= kGoneFor;
  });
  const auto before = bad_.find(node);
  const bool same = before == bad_.end() ? state == NodeState::kReady : before->second.state == state;
  if (state == NodeState::kReady) {
    bad_.erase(node);
  } else {
    bad_.emplace(node, Bad{state, now}).first->second.state = state;
  }
  const bool doubt = too_many(nodes);
  if (same && doubt_ == doubt) return {};
  std::set<std::string> concerned = {node};
  if (doubt_ != doubt) {
    if (doubt_) doubt_ended_ = now;
    for (const auto& [name, bad] : bad_) concerned.insert(name);
  }
  doubt_ = doubt;
  return concerned;
}

// As Kubernetes judges a zone: more than two and at least 55 of a hundred, or all of several.
bool BadNodes::too_many(size_t nodes) const {
  const size_t bad = static_cast<size_t>(std::count_if(
      bad_.begin(), bad_.end(), [](const auto& node) { return node.second.state == NodeState::kNotReady; }));
  return bad >= 2 && (bad >= nodes || (bad > 2 && bad * 100 >= nodes * 55));
}

std::optional<SteadyClock::time_point> BadNodes::since(const std::string& node) const {
  std::lock_guard lock(mutex_);
  const auto found = bad_.find(node);
  if (found == bad_.end()) return std::nullopt;
  return std::max(found->second.since, doubt_ended_);
}

bool BadNodes::in_doubt() const {
  std::lock_guard lock(mutex_);
  return doubt_;
}

}  // namespace trireme::controller
