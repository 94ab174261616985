// A job's NetworkPolicy: who may open connections to its pods. Its own pods may on every port (the rendezvous store,
// NCCL's and Gloo's ports, which the system chooses, and the reward service), those who scrape on the metrics port, and
// nobody else. What the pods themselves open is not limited. It spans attempts; policies add up, so that a user lets
// others in by one of their own.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "operator/controller/objects.h"

namespace trireme::controller {

// Pods in their node's network are beyond policies, and come to the others of their job from the node's address: a job
// that has any gets none.
bool wants_network_policy(const RLJob& job, const ObjectOptions& options);
// Only when it is wanted. In the form that the API server answers, so that it can be compared.
Json network_policy(const AttemptContext& context);
// Fingerprint of a policy's spec.
uint64_t policy_fingerprint(const Json& spec);

// A JSON list of NetworkPolicyPeers in the same form: empty selectors stay, empty parts of selectors go. Throws
// Error(kUser) that names the entry for what the API server would not take.
Json parse_policy_peers(std::string_view text);

}  // namespace trireme::controller
