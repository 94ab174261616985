// Facts: what is read for one look at a job, before anything is made of it; and observe(), which makes of it what the
// planner sees. Pure: the clock is among the facts.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "operator/controller/ages.h"
#include "operator/controller/answers.h"
#include "operator/controller/cache.h"
#include "operator/controller/observed.h"
#include "operator/controller/reports.h"
#include "operator/kube/resource.h"

namespace trireme::controller {

// A job and its own pods, as they were read together.
struct Snapshot {
  RLJob job;
  std::vector<Issue> issues;
  std::vector<ObservedPod> pods;
  bool live = false;      // from the API server itself, or just written there
  bool as_stored = true;  // false: a copy of ours, of which it is not known what could not be read
};

struct NodeFact {
  std::optional<NodeState> cached;                   // nothing: the cache does not hold it
  std::optional<SteadyClock::time_point> bad_since;  // nothing: it was not heard of as bad
  bool gone = false;                                 // the API server itself said that there is none of the name
};

struct Facts {
  kube::ObjectKey key;
  Snapshot snapshot;
  SteadyClock::time_point now;
  int64_t now_ms = 0;  // wall clock, unix
  bool services_known = false;
  std::vector<std::pair<kube::ObjectKey, std::shared_ptr<const CachedService>>> services;  // with the job's uid label
  bool policies_known = false;
  std::shared_ptr<const CachedPolicy> policy;  // whatever has the name of the job's; null: nothing
  std::map<std::string, std::vector<std::string>> claim_modes;
  std::optional<Report> report;
  ReportStore::Path path;  // of everybody's reports
  Answers answers;
  bool nodes_known = false;
  bool nodes_in_doubt = false;
  std::map<std::string, NodeFact> nodes;  // that pods which have not ended are on
};

// What has to be seen twice before it can be said how long it lasts.
struct Sightings {
  Ages ages;
  std::map<std::string, SteadyClock::time_point> unknown_nodes;
};

// Nodes to ask the API server itself about: the cache does not hold them, and they were heard to go or have been
// unknown for `unknown_node`. Before that a pod's node that nobody heard of is news on its way.
std::vector<std::string> nodes_to_ask(const Facts& facts, const Sightings& sightings, SteadyClock::time_point now,
                                      Milliseconds unknown_node);

// The watch of nodes may be behind: only one that the API server does not have (NodeFact::gone) or that is tainted
// out-of-service is kGone.
Observed observe(Facts facts, Sightings& sightings);

// Within such a silence of everybody a job cannot be told from one that hangs; at most half of its shortest limit.
Milliseconds silence_window(const Health& health, Milliseconds least);

}  // namespace trireme::controller
