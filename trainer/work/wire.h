// What generation processes and the actor's work server say to each other: JSON, and packed samples behind a line of
// JSON. Every parser is pure, bounds what it reads before it builds anything, and throws Error(kData) otherwise.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "trainer/batch/sample.h"
#include "trainer/rewards/pool.h"

namespace trireme {

// POST /v1/join. An engine that comes back joins again.
struct JoinRequest {
  std::string name;       // the engine's, for messages; who joins under it takes the place of who had it
  std::string session;    // of this process
  std::string config;     // as YAML: what generation depends on must be the actor's
  std::string model;      // its configuration, as JSON
  std::string tokenizer;  // its tokenizer's files, as JSON: a digest of each
  int64_t places = 0;     // samples that it decodes at once
  std::string program;    // a digest: another build may compute other bits
  bool operator==(const JoinRequest&) const = default;
};
struct JoinReply {
  int64_t engine = 0;          // its number: that of its weights' link
  std::string desk;            // of this life of the actor
  int64_t group_size = 1;      // samples of a group
  bool in_flight = false;      // it takes new weights between two steps, unfinished samples or not
  int64_t silence_ms = 10000;  // it is heard of more often, or is lost
  bool operator==(const JoinReply&) const = default;
};

// Who asks. Of every request behind the join.
struct Caller {
  int64_t engine = 0;
  std::string session;
  std::string desk;
  bool operator==(const Caller&) const = default;
};

// POST /v1/lease: also the engine's sign of life.
struct LeaseRequest {
  Caller caller;
  int64_t places = 0;           // free ones; 0: it only says that it is there
  int64_t version = -1;         // of its weights; -1: it has none yet
  int64_t fetched = -1;         // of those that it has beside them, or of these
  int64_t steps = 0;            // engine steps so far, and looks for rewards that are under way
  int64_t wait_ms = 0;          // how long the answer may take where nothing may begin
  bool may_change = false;      // it takes newer weights next, unless samples are left for these: no wait without any
  double transfer_s = 0;        // of the last transfer of weights
  double stall_s = 0;           // that decoding stood still for it
  int64_t recomputed_rows = 0;  // so far
  bool operator==(const LeaseRequest&) const = default;
};
// Samples next to each other of one group.
struct LeasedWork {
  int64_t run = 0;
  int64_t group = 0, first_sample = 0, count = 0;
  uint64_t first_sample_id = 0;
  std::vector<int32_t> prompt;
  std::string prompt_text, gold;
  nlohmann::json extra;                 // the data row's other columns
  std::vector<int64_t> forced_lengths;  // of these samples, for measurements; empty: off
  bool operator==(const LeasedWork&) const = default;
};
struct LeaseReply {
  std::vector<LeasedWork> runs;
  // Samples that its weights may begin and that nobody has. An engine of one version stays with its weights till then:
  // with an even share already in hand it is given none of them, and nobody else may have these weights any more.
  bool left = false;
  bool known = true;  // false: its leases went back, since it was not heard of; it joins again
  bool over = false;  // the run has ended: it leaves
  bool operator==(const LeaseReply&) const = default;
};

// POST /v1/groups: a run's samples with their rewards.
struct GroupsRequest {
  Caller caller;
  int64_t run = 0, group = 0, first_sample = 0;
  std::vector<RewardCounters> counters;  // of the engine's rewards, since it began
  std::vector<Sample> samples;           // in order; group 0 and without prompts, which the actor has
};
struct GroupsReply {
  enum class Result {
    kCounted,  // now, or before
    kTooOld,   // they were drawn from older weights than they may be, and are generated again
  };
  Result result = Result::kCounted;
  bool operator==(const GroupsReply&) const = default;
};

// GET /v1/weights?after=V
struct WeightsRequest {
  Caller caller;
  int64_t after = -1;   // the newest version that it has fetched
  int64_t wait_ms = 0;  // -1: it only says what it has fetched
  bool operator==(const WeightsRequest&) const = default;
};
struct WeightsReply {
  int64_t version = -1;  // that there is, newer than `after`; -1: none. The transfer may bring a newer one
  int64_t engine = 0;    // whose they are: which ranks send them follows from its number
  std::string link;      // WeightReceiver::fetch
  bool known = true;     // as LeaseReply
  bool over = false;
  bool operator==(const WeightsReply&) const = default;
};

// POST /v1/leave: what it has goes back at once.
struct LeaveRequest {
  Caller caller;
  std::string why;
  bool fatal = false;  // another engine would fail likewise: the run ends with `why`
  int64_t kind = 0;    // of the error, as ErrorKind
  bool operator==(const LeaveRequest&) const = default;
};

// Bounds of what is read.
inline constexpr size_t kMaxWireText = 4 << 20;       // a prompt, a configuration
inline constexpr size_t kMaxWireHead = 1 << 20;       // the line ahead of samples
inline constexpr size_t kMaxLeaseReply = 256u << 20;  // all runs of one answer
inline constexpr int64_t kMaxWireRuns = 1 << 16;
inline constexpr int64_t kMaxWireWait_ms = 30000;

// A response to score before anything is generated. It is no request to the actor, but lies in the job's store.
std::string to_body(const RewardRequest& probe);
std::string to_body(const JoinRequest& request);
std::string to_body(const JoinReply& reply);
std::string to_body(const LeaseRequest& request);
std::string to_body(const LeaseReply& reply);
std::string to_body(const GroupsRequest& request);
std::string to_body(const GroupsReply& reply);
std::string to_body(const WeightsReply& reply);
std::string to_body(const LeaveRequest& request);
// "engine=3&session=...": of GET /v1/weights, whose names and values need no escapes.
std::string to_query(const WeightsRequest& request);

RewardRequest parse_probe(std::string_view body);
JoinRequest parse_join_request(std::string_view body);
JoinReply parse_join_reply(std::string_view body);
LeaseRequest parse_lease_request(std::string_view body);
LeaseReply parse_lease_reply(std::string_view body);
GroupsRequest parse_groups_request(std::string_view body);
GroupsReply parse_groups_reply(std::string_view body);
WeightsReply parse_weights_reply(std::string_view body);
LeaveRequest parse_leave_request(std::string_view body);
WeightsRequest parse_weights_query(std::string_view query);

}  // namespace trireme
