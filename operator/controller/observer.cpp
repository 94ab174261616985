#include "operator/controller/observer.h"

#include <algorithm>
#include <utility>

#include "api/runtime.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/kube/api_error.h"
#include "operator/kube/events.h"

namespace trireme::controller {
namespace {

using kube::ApiError;
using kube::ObjectKey;

constexpr Milliseconds kLongestEcho{60000};  // of ObserverOptions::create_echo, doubled while the watch is late
constexpr int kMostClaims = 16;              // that are read for an attempt
constexpr Milliseconds kClaimReads{3000};    // for them all together
constexpr Milliseconds kNodeReads{5000};     // for the nodes of a job that are asked about, all together

// Is resource version `a` newer than `b`? They are numbers in every API server so far; if not, the watch's word counts.
bool newer(const std::string& a, const std::string& b) {
  const auto x = parse_int(a), y = parse_int(b);
  return x && y ? *x > *y : false;
}

int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(SteadyClock::now().time_since_epoch()).count();
}

// Every pod of an attempt that waits for nodes is there, and none is going.
bool whole(const Snapshot& seen) {
  const int64_t pods = std::count_if(seen.pods.begin(), seen.pods.end(), [&](const ObservedPod& pod) {
    return pod.attempt == seen.job.status.attempt && !pod.deleting;
  });
  return seen.job.status.phase == phase::kQueued && pods >= total_pods(seen.job.spec);
}

}  // namespace

Observer::Observer(const kube::Client& client, ObserverOptions options, const Watches& watches, ReportStore& reports,
                   Pool& pool)
    : client_(client), options_(std::move(options)), watches_(watches), reports_(reports), pool_(pool) {}

// ---- the job and its pods
// --------------------------------------------------------------------------------------------

std::optional<Snapshot> Observer::cached(const ObjectKey& key) {
  const std::shared_ptr<const CachedJob> cached = watches_.jobs().get(key);
  if (!cached) return std::nullopt;
  std::unique_ptr<const CachedJob>& written = memory_.of(key).written;
  Snapshot seen;
  if (written && written->uid == cached->uid && newer(written->resource_version, cached->resource_version)) {
    std::vector<Issue> ignored;
    seen.job = rljob_from_json(written->json(), ignored, {.strict = false});
    seen.as_stored = false;
  } else {
    written.reset();
    seen.job = rljob_from_json(cached->json(), seen.issues, {.strict = false});
  }
  for (const auto& [pod_key, pod] : watches_.pods().by_label(cached->uid)) {
    if (is_own(pod_key, *pod, key)) seen.pods.push_back(controller::observe(pod_key.name, *pod));
  }
  return seen;
}

std::optional<Snapshot> Observer::live(const ObjectKey& key, const RLJobStatus& before, const Deadline& deadline) {
  Memory& memory = memory_.of(key);
  const bool awaited = memory.echo.awaits(before);
  const auto object = client_.find(kube::resources::kRlJobs, key, deadline);
  if (!object) return std::nullopt;
  Snapshot seen;
  seen.live = true;
  seen.job = rljob_from_json(*object, seen.issues, {.strict = false});
  const std::string& uid = seen.job.metadata.uid;
  std::vector<std::string> cached;
  for (const auto& [pod_key, pod] : watches_.pods().by_label(uid)) {
    if (is_own(pod_key, *pod, key)) cached.push_back(pod_key.name);
  }
  const auto names = memory.names.ask(seen.job, std::move(cached));
  const bool by_name = names && static_cast<int64_t>(names->size()) * options_.pods_a_get <=
                                    static_cast<int64_t>(watches_.pods().size());
  seen.pods = by_name ? get_pods(key, uid, *names, deadline) : list_pods(key, uid, deadline);
  memory.names.saw(seen.job, seen.pods);
  if (whole(seen))
    memory.echo.late(awaited, seen.job.status.attempt, SteadyClock::now(), options_.create_echo, kLongestEcho);
  return seen;
}

std::vector<ObservedPod> Observer::list_pods(const ObjectKey& job, const std::string& uid,
                                             const Deadline& deadline) const {
  std::vector<ObservedPod> pods;
  kube::ListOptions list;
  list.label_selector = std::string(kLabelJobUid) + "=" + uid;
  client_.list_each(
      kube::resources::kPods, job.ns, list,
      [&](std::string_view text) {
        static const kube::JsonFields kFields = pod_fields();
        const Json reduced = kFields.parse(text);
        const std::string name = reduced["metadata"]["name"].get<std::string>();
        if (const CachedPod pod = read_pod(reduced); is_own({job.ns, name}, pod, job))
          pods.push_back(controller::observe(name, pod));
      },
      deadline);
  return pods;
}

// Not of one moment, as a list is. Nobody but this worker makes pods of the job, and what was seen to have ended or to
// be gone stays so.
std::vector<ObservedPod> Observer::get_pods(const ObjectKey& job, const std::string& uid,
                                            const std::vector<std::string>& names, const Deadline& deadline) const {
  std::vector<std::optional<ObservedPod>> found(names.size());
  std::vector<std::function<void()>> reads;
  for (size_t i = 0; i < names.size(); ++i) {
    reads.push_back([&, i] {
      const auto object = client_.find(kube::resources::kPods, {job.ns, names[i]}, deadline);
      if (!object || !controlled_by(*object, uid)) return;
      if (const CachedPod pod = read_pod(*object); is_own({job.ns, names[i]}, pod, job))
        found[i] = controller::observe(names[i], pod);
    });
  }
  pool_.run(std::move(reads));
  std::vector<ObservedPod> pods;
  for (auto& pod : found) {
    if (pod) pods.push_back(std::move(*pod));
  }
  return pods;
}

std::optional<Milliseconds> Observer::wait_for_watch(const ObjectKey& key, const RLJobStatus& cached) {
  return memory_.of(key).echo.left(cached, SteadyClock::now());
}

// ---- what is around them
// ---------------------------------------------------------------------------------------------

Observed Observer::observe(const ObjectKey& key, Snapshot snapshot, const Answers& answers, const Deadline& deadline) {
  Memory& memory = memory_.of(key);
  const RLJob& job = snapshot.job;
  read_claims(key, job, memory, deadline);
  Facts facts;
  facts.key = key;
  facts.now_ms = options_.now_ms ? options_.now_ms() : kube::unix_now_ms();
  facts.services_known = watches_.services().synced();
  facts.services = watches_.services().by_label(job.metadata.uid);
  if (const auto* policies = watches_.policies()) {
    facts.policies_known = policies->synced();
    facts.policy = policies->get({key.ns, network_policy_name(key.name)});
  }
  if (memory.claims_attempt == job.status.attempt) facts.claim_modes = memory.claims;
  facts.answers = answers;
  facts.report = reports_.get(key, job.metadata.uid);
  const size_t expected = running_jobs();
  const OwnPath own = options_.own_path ? options_.own_path() : OwnPath{};
  facts.path = reports_.path(silence_window(job.spec.health, options_.least_silence), expected, own);
  facts.snapshot = std::move(snapshot);
  read_nodes(facts);
  ask_for_nodes(facts, memory.sightings, deadline);
  facts.now = SteadyClock::now();  // last: nothing that was read is younger
  return controller::observe(std::move(facts), memory.sightings);
}

// Once an attempt, while it is being placed: a claim that several pods cannot share is told to the user. Nothing else
// depends on it, so a worker does not wait long: the first claim that cannot be read ends it.
void Observer::read_claims(const ObjectKey& key, const RLJob& job, Memory& memory, const Deadline& deadline) const {
  if (job.status.phase != phase::kQueued || memory.claims_attempt == job.status.attempt) return;
  memory.claims_attempt = job.status.attempt;
  memory.claims.clear();
  const Deadline soon(std::min(deadline.at(), SteadyClock::now() + kClaimReads));
  int reads = 0;
  for (const ClaimUse& use : claim_uses(job.spec)) {
    if (use.pods < 2) continue;
    if (++reads > kMostClaims) return;
    try {
      const auto claim = client_.find(kube::resources::kPersistentVolumeClaims, {key.ns, use.claim}, soon);
      if (!claim) continue;
      std::vector<std::string>& modes = memory.claims[use.claim];
      for (const Json& mode : claim->value("spec", Json::object()).value("accessModes", Json::array())) {
        if (mode.is_string()) modes.push_back(mode.get<std::string>());
      }
    } catch (const ApiError& e) {
      log_debug("controller", key.str() + ": claim " + use.claim + " and those after it were not checked: " + e.what());
      return;
    }
  }
}

void Observer::read_nodes(Facts& facts) const {
  const auto* nodes = watches_.nodes();
  if (!nodes) return;
  facts.nodes_known = true;
  facts.nodes_in_doubt = watches_.bad_nodes().in_doubt();  // first: the end of a doubt begins each node's time anew
  for (const ObservedPod& pod : facts.snapshot.pods) {
    if (pod.node.empty() || pod.ended()) continue;
    NodeFact& fact = facts.nodes[pod.node];
    if (const auto node = nodes->get({"", pod.node})) fact.cached = node->state;
    if (fact.cached == NodeState::kReady) continue;
    fact.bad_since = watches_.bad_nodes().since(pod.node);
  }
}

// The watch may lag or be without rights while an autoscaler brings nodes: that a node is gone is the API server's word
// alone, for a second gang would start beside pods that live.
void Observer::ask_for_nodes(Facts& facts, const Sightings& sightings, const Deadline& deadline) {
  const auto now = SteadyClock::now();
  const Deadline soon(std::min(deadline.at(), now + kNodeReads));
  std::vector<std::function<void()>> reads;
  for (const std::string& name : nodes_to_ask(facts, sightings, now, options_.unknown_node)) {
    bool& gone = facts.nodes.at(name).gone;
    reads.push_back([this, name, soon, &gone] { gone = is_gone(name, soon); });
  }
  pool_.run(std::move(reads));
}

bool Observer::is_gone(const std::string& node, const Deadline& deadline) {
  {
    std::lock_guard lock(nodes_mutex_);
    const auto now = SteadyClock::now();
    std::erase_if(node_answers_, [&](const auto& known) { return now - known.second.at >= options_.node_answer; });
    if (const auto known = node_answers_.find(node); known != node_answers_.end()) return known->second.gone;
  }
  bool gone = false;
  try {
    gone = !client_.find(kube::resources::kNodes, {"", node}, deadline);
  } catch (const ApiError& e) {
    log_debug("controller", "node " + node + " is not known, and was not read: " + e.what());
  }
  std::lock_guard lock(nodes_mutex_);
  node_answers_[node] = {SteadyClock::now(), gone};
  return gone;
}

// A new leader has heard nobody yet; then all that run should have spoken. Counted seldom: there may be thousands.
size_t Observer::running_jobs() {
  if (reports_.size() == 0 && steady_ns() - counted_ns_ > 5'000'000'000) {
    int64_t running = 0;
    watches_.jobs().for_each(
        [&](const ObjectKey&, const CachedJob& job) { running += job.managed && job.phase == phase::kRunning; });
    running_jobs_ = running;
    counted_ns_ = steady_ns();
  }
  return static_cast<size_t>(running_jobs_.load());
}

// ---- what the others tell
// --------------------------------------------------------------------------------------------

void Observer::wrote(const ObjectKey& key, const RLJob& job) {
  memory_.of(key).names.wrote(job.status);
  memory_.of(key).written = std::make_unique<const CachedJob>(read_job(to_json(job), ""));
}

void Observer::first_attempt_begins(const ObjectKey& key, const RLJob& job) { memory_.of(key).names.begin(job); }

void Observer::expect_no_pods(const ObjectKey& key) { memory_.of(key).echo.nothing(); }

void Observer::made_pods(const ObjectKey& key, int64_t attempt) {
  memory_.of(key).echo.made(attempt, SteadyClock::now(), options_.create_echo);
}

void Observer::forget(const ObjectKey& key) { memory_.forget(key); }

}  // namespace trireme::controller
