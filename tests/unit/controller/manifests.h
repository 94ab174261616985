// Manifests that tests of objects share, and what is needed to make objects of one.
#pragma once

#include <string>

#include "operator/controller/network_policy.h"
#include "operator/controller/objects.h"
#include "tests/unit/controller/world.h"

namespace trireme::controller::testing {

// The least a specification says beside its roles.
inline const std::string kModelAndConfig = "  model: {source: /m}\n  config: {path: c.yaml}\n";
// For the end of `roles:`.
inline const std::string kRewardRole =
    "    reward: {port: 8000, template: {spec: {containers: [{name: reward, image: r}]}}}\n";

// A job on the way to its second attempt, whose objects any of the makers can be asked for.
struct Made {
  RLJob job;
  scheduling::Backend backend;
  ObjectOptions options;
  AttemptContext context() const { return {job, 2, backend, options}; }
};

inline Made made(const std::string& spec_yaml) {
  Made m{make_job(spec_yaml), {}, {}};
  m.options.status_url = "http://status.trireme-system:8090";
  return m;
}

// With a NetworkPolicy that lets these peers scrape.
inline Made made(const std::string& spec_yaml, const std::string& scraped_by) {
  Made m = made(spec_yaml);
  m.options.network_policies = true;
  m.options.scraped_by = parse_policy_peers(scraped_by);
  return m;
}

}  // namespace trireme::controller::testing
