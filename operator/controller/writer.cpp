#include "operator/controller/writer.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "operator/controller/cache.h"
#include "operator/controller/network_policy.h"
#include "operator/kube/api_error.h"
#include "operator/kube/controller.h"

namespace trireme::controller {
namespace {

using kube::ApiError;
using kube::ObjectKey;

// What became of one write: the API server understood it and would not.
struct Refused {
  std::string kind;
  ApiError error;
};

// Kueue makes a group's Workload itself; its owners are the group's pods.
bool owned_by_pods(const Json& object, const std::string& job) {
  const Json metadata = object.value("metadata", Json::object());
  const Json owners = metadata.value("ownerReferences", Json::array());
  return owners.is_array() && std::any_of(owners.begin(), owners.end(), [&](const Json& owner) {
           return owner.is_object() && owner.value("kind", std::string()) == "Pod" &&
                  starts_with(owner.value("name", std::string()), job + "-actor-");
         });
}

// Takes the progress out of a status.
Json take_progress(Json& status) {
  const auto found = status.find("progress");
  if (found == status.end()) return {};
  Json progress = std::move(*found);
  status.erase(found);
  return progress;
}

}  // namespace

StatusChange change_of(const RLJobStatus& from, const RLJobStatus& to) {
  Json before = status_to_json(from), after = status_to_json(to);
  const Json progress_before = take_progress(before), progress_after = take_progress(after);
  if (before != after) return StatusChange::kMore;
  // The time of a heartbeat alone shows that the job lives, so it is progress.
  return progress_before == progress_after ? StatusChange::kNothing : StatusChange::kProgress;
}

Milliseconds status_interval(StatusChange change, const Load& load, const WriterOptions& options) {
  // All jobs together write at most about a hundred progress updates a second.
  if (change == StatusChange::kProgress) return std::max(options.progress_interval, Milliseconds(10 * load.jobs));
  // While many jobs wait in the queue, making their objects comes before describing those of others.
  return std::max(options.status_interval, Milliseconds(std::min<size_t>(10 * load.queued, 10000)));
}

bool makes_pods(const std::vector<Action>& actions) {
  return std::any_of(actions.begin(), actions.end(),
                     [](const Action& a) { return a.kind == Action::Kind::kCreate && a.resource.plural == "pods"; });
}

Json merge_diff(const Json& from, const Json& to) {
  Json patch = Json::object();
  if (!from.is_object() || !to.is_object()) return to;
  for (const auto& [key, value] : from.items()) {
    if (!to.contains(key)) patch[key] = nullptr;
  }
  for (const auto& [key, value] : to.items()) {
    const auto before = from.find(key);
    if (before == from.end()) {
      patch[key] = value;
    } else if (*before != value) {
      patch[key] = before->is_object() && value.is_object() ? merge_diff(*before, value) : value;
    }
  }
  return patch;
}

Writer::Writer(const kube::Client& client, WriterOptions options, Pool& pool, std::function<Load()> load)
    : client_(client), options_(std::move(options)), pool_(pool), load_(std::move(load)) {}

void Writer::check_may_write() const {
  if (options_.may_write && !options_.may_write()) throw kube::NotLeading{};
}

// ---- the status
// ------------------------------------------------------------------------------------------------------

RLJob Writer::write_status(const ObjectKey& key, const RLJob& job, const RLJobStatus& status,
                           const Deadline& deadline) const {
  check_may_write();
  Json patch = {{"metadata", {{"resourceVersion", job.metadata.resource_version}, {"uid", job.metadata.uid}}},
                {"status", merge_diff(status_to_json(job.status), status_to_json(status))}};
  const Json answer = client_.patch(kube::resources::kRlJobs, key, patch, kube::PatchType::kMerge, "status", deadline);
  std::vector<Issue> ignored;
  return rljob_from_json(answer, ignored, {.strict = false});
}

RLJob Writer::decide(const ObjectKey& key, const RLJob& job, const RLJobStatus& status,
                     const std::vector<EventNote>& events, const Deadline& deadline) {
  RLJob written = write_status(key, job, status, deadline);
  memory_.of(key).status_written = SteadyClock::now();
  emit(written, events);
  return written;
}

Writer::Described Writer::describe(const ObjectKey& key, const RLJob& job, const RLJobStatus& status,
                                   const std::vector<EventNote>& events, const Deadline& deadline) {
  const StatusChange change = change_of(job.status, status);
  if (change == StatusChange::kNothing) return {};
  Memory& memory = memory_.of(key);
  const Milliseconds interval = status_interval(change, load_(), options_);
  const auto since = std::chrono::duration_cast<Milliseconds>(SteadyClock::now() - memory.status_written);
  const bool before = memory.status_written != SteadyClock::time_point{};
  // What is also an event is told at once: the actions that follow may leave nothing to tell of.
  if (before && since < interval && events.empty()) return {std::nullopt, interval - since};
  RLJob written = write_status(key, job, status, deadline);
  memory.status_written = SteadyClock::now();
  emit(job, events);
  return {std::move(written), std::nullopt};
}

void Writer::emit(const RLJob& job, const std::vector<EventNote>& notes) const {
  for (const EventNote& note : notes) {
    log(note.warning ? LogLevel::kWarn : LogLevel::kInfo, "controller",
        job.metadata.namespace_ + "/" + job.metadata.name + ": " + note.reason + ": " + note.message);
    if (!options_.events) continue;
    options_.events->event({kApiVersion, kRLJobKind, job.metadata.namespace_, job.metadata.name, job.metadata.uid},
                           note.warning ? kube::EventType::kWarning : kube::EventType::kNormal, note.reason,
                           note.message);
  }
}

// ---- objects
// ---------------------------------------------------------------------------------------------------------

// The user has to see what the API server would not take; each other answer is logged once.
bool Writer::carry_out(const ObjectKey& key, const RLJob& job, std::vector<Action> actions, const Deadline& deadline) {
  const bool pods = makes_pods(actions);
  std::optional<Refusal>& refusal = memory_.of(key).answers.refusal;
  try {
    run_waves(key, job, std::move(actions), deadline);
    if (pods) refusal.reset();
    return true;
  } catch (const Refused& e) {
    if (!pods) throw ApiError(e.error);
    refusal = refused(refusal, job.metadata.uid, job.status.attempt, e.kind, e.error, SteadyClock::now(),
                      options_.refusal_min, options_.refusal_max);
    if (refusal->in_a_row == 1) log_warn("controller", key.str() + ": " + e.error.what());
    return false;
  }
}

// What the tasks of a wave tell each other. Pods of a role are as good as equal: the API server would refuse the others
// of a gang, too, and a server that asks for less (429) is sent no more at all.
class Writer::Wave final {
 public:
  bool may_ask(const Action& action) {
    if (action.kind != Action::Kind::kCreate) return true;
    std::lock_guard lock(mutex_);
    return !busy_ && refused_.count(like(action)) == 0;
  }
  void refused(const Action& action) {
    std::lock_guard lock(mutex_);
    refused_.insert(like(action));
  }
  void server_is_busy() {
    std::lock_guard lock(mutex_);
    busy_ = true;
  }

 private:
  static std::string like(const Action& action) { return action.resource.plural + "/" + action.role; }

  std::mutex mutex_;
  std::set<std::string> refused_;
  bool busy_ = false;
};

void Writer::run_waves(const ObjectKey& key, const RLJob& job, std::vector<Action> actions, const Deadline& deadline) {
  std::stable_sort(actions.begin(), actions.end(), [](const Action& a, const Action& b) { return a.wave < b.wave; });
  for (size_t begin = 0; begin < actions.size();) {
    size_t end = begin;
    Wave wave;
    std::vector<std::function<void()>> tasks;
    while (end < actions.size() && actions[end].wave == actions[begin].wave) {
      Action& action = actions[end++];
      tasks.push_back([&, this] { carry_out_one(key, job, action, wave, deadline); });
    }
    pool_.run(std::move(tasks));
    begin = end;
  }
}

void Writer::carry_out_one(const ObjectKey& key, const RLJob& job, Action& action, Wave& wave,
                           const Deadline& deadline) {
  if (!wave.may_ask(action)) return;  // whose failure that was throws it
  try {
    if (action.kind == Action::Kind::kDelete) {
      remove(key, job.metadata.uid, action, deadline);
    } else {
      create(key, job, action, deadline);
    }
  } catch (const ApiError& e) {
    if (e.status() == 429) wave.server_is_busy();
    if (!is_refusal(e)) throw;
    wave.refused(action);
    throw Refused{action.resource.kind, e};
  }
}

void Writer::create(const ObjectKey& key, const RLJob& job, Action& action, const Deadline& deadline) {
  check_may_write();
  const bool apply = action.kind == Action::Kind::kApply;
  try {
    if (apply) {
      compare(key, job, action, client_.create(action.resource, action.body, deadline));
    } else {
      client_.post(action.resource, action.make ? action.make() : std::move(action.body), deadline);
    }
    return;
  } catch (const ApiError& e) {
    if (!e.already_exists()) throw;
  }
  const ObjectKey name{job.metadata.namespace_, action.name};
  const auto existing = client_.find(action.resource, name, deadline);
  if (!existing) throw kube::Requeue{action.resource.plural + " " + name.str() + " came and went"};
  const Json metadata = existing->value("metadata", Json::object());
  if (metadata.contains("deletionTimestamp"))
    throw kube::Requeue{action.resource.plural + " " + name.str() + " is still being deleted"};
  if (controlled_by(*existing, job.metadata.uid)) {
    if (apply) make_so(key, job, action, *existing, deadline);
    return;
  }
  // Of an earlier job of the same name: the garbage collector is on its way. Anybody else's: the user has to act.
  const std::string message =
      action.resource.kind + " " + action.name + " exists and belongs to somebody else; delete it or rename the job";
  emit(job, {{true, "NameTaken", message}});
  throw kube::Requeue{message};
}

// In one write, without a moment in which the object is not there. Labels of others stay.
void Writer::make_so(const ObjectKey& key, const RLJob& job, const Action& action, const Json& existing,
                     const Deadline& deadline) {
  const Json& metadata = existing["metadata"];
  Json labels = metadata.value("labels", Json::object());
  labels.update(action.body["metadata"]["labels"]);
  const Json spec = existing.value("spec", Json::object());
  const Rewrite seen{policy_fingerprint(action.body["spec"]), policy_fingerprint(spec)};
  const bool right = seen.wanted == seen.got || seen == memory_.of(key).answers.policy;
  if (right && labels == metadata.value("labels", Json::object())) return;
  const ObjectKey name{metadata["namespace"].get<std::string>(), action.name};
  const Json patch = {{"metadata", {{"resourceVersion", metadata["resourceVersion"]}, {"labels", labels}}},
                      {"spec", merge_diff(spec, action.body["spec"])}};
  check_may_write();
  log_info("controller", action.resource.plural + " " + name.str() + " was changed by somebody else; it is put right");
  compare(key, job, action, client_.patch(action.resource, name, patch, kube::PatchType::kMerge, "", deadline));
}

// What an admission webhook makes of our spec it would make of it again: it is told once, and stays until we want
// another spec or somebody else changes it. (Of a job's actions one at most applies, so nobody else has its memory.)
void Writer::compare(const ObjectKey& key, const RLJob& job, const Action& action, const Json& answer) {
  const Rewrite seen{policy_fingerprint(action.body["spec"]), policy_fingerprint(answer.value("spec", Json::object()))};
  Rewrite& known = memory_.of(key).answers.policy;
  const bool told = known == seen;
  known = seen.wanted == seen.got ? Rewrite{} : seen;
  if (seen.wanted == seen.got || told) return;
  emit(job, {{true, "PolicyRewritten",
              "an admission webhook of this cluster rewrites the spec of " + action.resource.kind + " " + action.name +
                  "; it is left as the webhook made it"}});
}

void Writer::remove(const ObjectKey& key, const std::string& job_uid, const Action& action, const Deadline& deadline) {
  const ObjectKey name{key.ns, action.name};
  kube::DeleteOptions options;
  options.uid = action.uid;
  options.grace_period_seconds = action.grace_period_s;
  if (options.uid.empty()) {
    const auto found = client_.find(action.resource, name, deadline);
    if (!found || !(controlled_by(*found, job_uid) || owned_by_pods(*found, key.name))) return;
    options.uid = found->value("metadata", Json::object()).value("uid", std::string());
  }
  check_may_write();
  try {
    client_.remove(action.resource, name, options, deadline);
  } catch (const ApiError& e) {
    // Another object of that name: ours is gone.
    if (!e.conflict()) throw;
  }
}

}  // namespace trireme::controller
