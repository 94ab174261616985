// A small cluster as plain data, for tests of the planner: pods, Services, a job, and an operator that may die between
// any two writes or look at old copies. No threads, no clock but its own.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "api/runtime.h"
#include "operator/controller/ages.h"
#include "operator/controller/failure.h"
#include "operator/controller/network_policy.h"
#include "operator/controller/plan.h"
#include "operator/kube/events.h"

namespace trireme::controller::testing {

inline RLJob make_job(const std::string& spec_yaml, const std::string& name = "quick") {
  RLJob job = parse_rljob("apiVersion: trireme.dev/v1alpha1\nkind: RLJob\nmetadata: {name: " + name +
                              ", namespace: team}\nspec:\n" + spec_yaml,
                          "test");
  job.metadata.uid = "uid-" + name;
  job.metadata.generation = 1;
  job.metadata.resource_version = "1";
  return job;
}

inline const char* kTwoPods =
    "  algorithm: GRPO\n"
    "  model: {source: /models/tiny}\n"
    "  config: {path: configs/quickstart.yaml}\n"
    "  roles: {actor: {replicas: 2}}\n";

struct World {
  RLJob job;
  PlanOptions options;
  std::map<std::string, ObservedPod> pods;
  std::set<int64_t> services;
  std::optional<ObservedPolicy> policy;
  std::optional<Report> report;
  std::map<std::string, NodeState> nodes;
  int64_t now_ms = 1'800'000'000'000;
  std::map<std::string, int64_t> since;  // tag -> now_ms when first seen
  Ages ages;
  std::vector<EventNote> events;
  // How many more pods the API server would take now; empty: any number.
  std::function<int64_t()> room;
  int64_t rejected_attempt = -1;
  int64_t retry_at = 0;

  // What must never happen, found while it happens.
  std::vector<std::string> violations;
  std::map<std::string, bool> ever;  // pod name -> somebody but the operator took it away
  int64_t created_total = 0;
  int64_t uid_counter = 0;
  int64_t version = 1;

  // Older copies, newest last.
  std::deque<RLJob> old_jobs;
  std::deque<std::map<std::string, ObservedPod>> old_pods;

  explicit World(RLJob j) : job(std::move(j)) { options.objects.status_url = "http://status:8090"; }

  void remember() {
    old_jobs.push_back(job);
    old_pods.push_back(pods);
    while (old_jobs.size() > 6) old_jobs.pop_front();
    while (old_pods.size() > 6) old_pods.pop_front();
  }

  Milliseconds age(const std::string& tag, bool holds) {
    if (!holds) {
      since.erase(tag);
      return Milliseconds(0);
    }
    return Milliseconds(now_ms - since.emplace(tag, now_ms).first->second);
  }

  Observed observe(const RLJob& seen_job, const std::map<std::string, ObservedPod>& seen_pods, bool live) {
    Observed o;
    o.job = seen_job;
    o.live = live;
    for (const int64_t attempt : services) o.services[attempt] = {"service-" + std::to_string(attempt), ""};
    o.services_known = true;
    o.policies_known = options.objects.network_policies;
    if (o.policies_known) o.policy = policy;
    o.now_ms = now_ms;
    for (const auto& [name, pod] : seen_pods) {
      ObservedPod copy = pod;
      const auto node = nodes.find(pod.node);
      if (!pod.node.empty()) copy.node_state = node == nodes.end() ? NodeState::kReady : node->second;
      copy.node_bad_for = age("node " + pod.node, copy.node_state == NodeState::kNotReady);
      o.pods.push_back(std::move(copy));
    }
    if (report) {
      o.report = report;
      o.report->age = age("report", true);
    }
    if (rejected_attempt == seen_job.status.attempt) {
      o.rejection = "pods is forbidden: exceeded quota: team";
      o.rejection_wait = Milliseconds(std::max<int64_t>(0, retry_at - now_ms));
    }
    ages.fill(o, now_ms);
    return o;
  }
  Observed observe() { return observe(job, pods, false); }

  static int64_t number_of(const Json& labels, const char* label) {
    return labels.contains(label) ? std::stoll(labels[label].get<std::string>()) : 0;
  }

  void act(const Action& action) {
    const std::string& kind = action.resource.plural;
    if (kind == "networkpolicies") {
      if (action.kind == Action::Kind::kApply) {
        const std::string uid = policy ? policy->uid : "policy-" + std::to_string(++uid_counter);
        policy = {uid, policy_fingerprint(action.body["spec"])};
      } else if (policy && policy->uid == action.uid) {
        for (const auto& [name, pod] : pods) {
          if (pod.alive()) violations.push_back("the NetworkPolicy went before " + name);
        }
        policy.reset();
      }
      return;
    }
    if (action.kind == Action::Kind::kCreate) {
      const Json body = action.content();
      const Json& labels = body["metadata"]["labels"];
      const int64_t attempt = labels.contains(kLabelAttempt) ? std::stoll(labels[kLabelAttempt].get<std::string>()) : 0;
      if (kind == "services" && attempt > 0) services.insert(attempt);
      if (kind != "pods" || pods.count(action.name) > 0) return;  // AlreadyExists
      if (room && room() <= 0) {
        rejected_attempt = attempt;
        retry_at = now_ms + 5000;
        return;
      }
      if (const auto before = ever.find(action.name); before != ever.end() && !before->second) {
        violations.push_back(action.name + " was created twice");
      }
      if (options.objects.network_policies && !policy)
        violations.push_back(action.name + " was created before the NetworkPolicy");
      const std::string role = labels[kLabelRole].get<std::string>();
      const int64_t rank = std::stoll(labels[kLabelRank].get<std::string>());
      const int64_t incarnation = number_of(labels, kLabelIncarnation);
      for (const auto& [name, pod] : pods) {
        if (pod.attempt != attempt && pod.alive())
          violations.push_back(action.name + " created while " + name + " lives");
        const bool same_place = pod.attempt == attempt && pod.role == role && pod.rank == rank;
        if (same_place && pod.alive() && !pod.deleting && nodes.count(pod.node) == 0)
          violations.push_back(action.name + " created beside " + name + ", which is well");
      }
      for (const RoleStatus& row : job.status.roles) {
        if (row.name == role && incarnation > row.restarts)
          violations.push_back(action.name + " is not counted by the status");
      }
      if (attempt != job.status.attempt)
        violations.push_back(action.name + " is not of attempt " + std::to_string(job.status.attempt));
      ObservedPod pod;
      pod.name = action.name;
      pod.uid = "pod-" + std::to_string(++uid_counter);
      pod.role = role;
      pod.rank = rank;
      pod.incarnation = incarnation;
      pod.failures_before = number_of(labels, kLabelFailures);
      pod.status_ca = labels.value(kLabelStatusCa, "");
      pod.attempt = attempt;
      pods[action.name] = pod;
      ever[action.name] = false;
      ++created_total;
      return;
    }
    if (kind == "services")
      std::erase_if(services, [&](int64_t a) { return attempt_service_name(job.metadata.name, a) == action.name; });
    if (kind != "pods") return;
    const auto found = pods.find(action.name);
    if (found == pods.end() || (!action.uid.empty() && found->second.uid != action.uid)) return;
    if (is_service_role(found->second.role)) ever[action.name] = true;  // fewer, and then more again
    if (action.grace_period_s == 0 || found->second.ended() || found->second.node.empty()) {
      pods.erase(found);
    } else {
      found->second.deleting = true;
    }
  }

  void write(const RLJobStatus& status) {
    job.status = status;
    job.metadata.resource_version = std::to_string(++version);
  }

  // One reconcile. `dies` is asked before every write; true ends it there. Lags: how old the copies are that it starts
  // from.
  void reconcile(const std::function<bool()>& dies = {}, size_t job_lag = 0, size_t pod_lag = 0) {
    auto old_job = [&]() -> const RLJob& {
      return job_lag == 0 || job_lag > old_jobs.size() ? job : old_jobs[old_jobs.size() - job_lag];
    };
    auto old_pod = [&]() -> const auto& {
      return pod_lag == 0 || pod_lag > old_pods.size() ? pods : old_pods[old_pods.size() - pod_lag];
    };
    Observed o = observe(old_job(), old_pod(), false);
    for (int round = 0; round < 10; ++round) {
      Plan p = plan(o, options);
      if (p.needs_live) {
        if (o.live) {
          violations.push_back("asked twice for the live state");
          return;
        }
        o = observe(job, pods, true);
        continue;
      }
      if (dies && dies()) return;
      if (p.decision) {
        if (!p.actions.empty()) violations.push_back("a decision with actions");
        if (o.job.metadata.resource_version != job.metadata.resource_version) return;  // conflict
        const int64_t before = job.status.attempt;
        write(*p.decision);
        for (const EventNote& e : p.events) events.push_back(e);
        const bool live = o.live || (before == 0 && job.status.attempt == 1);
        const bool own_pods = live && !o.live;
        o = observe(job, own_pods ? old_pod() : pods, live);
        continue;
      }
      std::stable_sort(p.actions.begin(), p.actions.end(),
                       [](const Action& a, const Action& b) { return a.wave < b.wave; });
      const int64_t refused = rejected_attempt;
      rejected_attempt = -1;
      for (const Action& action : p.actions) {
        if (dies && dies()) return;
        act(action);
      }
      if (p.actions.empty()) rejected_attempt = refused;
      if (o.job.metadata.resource_version == job.metadata.resource_version &&
          status_to_json(p.status) != status_to_json(job.status)) {
        if (dies && dies()) return;
        write(p.status);
      }
      return;
    }
    violations.push_back("more than ten rounds in phase " + job.status.phase);
  }

  // Kubelet, scheduler, trainer
  // --------------------------------------------------------------------------------------------

  void place_all(const std::string& node_prefix = "node-") {
    int n = 0;
    for (auto& [name, pod] : pods) {
      if (!pod.alive() || pod.deleting || pod.gated) continue;
      if (pod.node.empty()) pod.node = node_prefix + std::to_string(n % 3);
      ++n;
      pod.scheduled = true;
      pod.phase = PodPhase::kRunning;
      pod.ready = true;
    }
  }
  void finish_deletions() {
    std::erase_if(pods, [](const auto& entry) { return entry.second.deleting; });
  }
  void rendezvous() {
    Report r;
    r.attempt = job.status.attempt;
    r.rendezvous_done = true;
    r.progress.step = report ? report->progress.step + 1 : 1;
    r.progress.phase = "training";
    report = r;
    since.erase("report");
  }
  void fail_pod(const std::string& name, int64_t exit_code, const std::string& reason = "Error") {
    ObservedPod& pod = pods.at(name);
    pod.phase = PodPhase::kFailed;
    pod.ready = false;
    pod.exit_code = exit_code;
    pod.reason = reason;
    pod.finished_ms = now_ms;
    pod.log = "last words of " + name;
  }
  void succeed_all() {
    for (auto& [name, pod] : pods) {
      if (pod.attempt != job.status.attempt || is_service_role(pod.role)) continue;
      pod.phase = PodPhase::kSucceeded;
      pod.ready = false;
    }
  }
  std::string actor(int64_t rank) const { return pod_name(job.metadata.name, "actor", rank, job.status.attempt); }
  // The pod that counts in a place; null: none.
  ObservedPod* newest(const std::string& role, int64_t rank) {
    ObservedPod* found = nullptr;
    for (auto& [name, pod] : pods) {
      if (pod.attempt != job.status.attempt || pod.role != role || pod.rank != rank) continue;
      if (!found || found->incarnation < pod.incarnation) found = &pod;
    }
    return found;
  }
  // Somebody other than the operator takes it away, at once.
  void take(const std::string& name) {
    ever[name] = true;
    pods.erase(name);
  }
  void scale(int64_t replicas) {
    job.spec.roles.generation->replicas = replicas;
    ++job.metadata.generation;
    job.metadata.resource_version = std::to_string(++version);
  }
  // From nothing to Running.
  void run() {
    reconcile();
    place_all();
    reconcile();
    rendezvous();
    reconcile();
  }
  int64_t alive() const {
    return std::count_if(pods.begin(), pods.end(), [](const auto& entry) { return entry.second.alive(); });
  }
  const Condition* condition(const std::string& type) const { return find_condition(job.status, type); }
};

inline const ObservedPod* pod_of(const World& w, const std::string& name) {
  const auto found = w.pods.find(name);
  return found == w.pods.end() ? nullptr : &found->second;
}
inline int count_events(const World& w, const std::string& reason) {
  return static_cast<int>(
      std::count_if(w.events.begin(), w.events.end(), [&](const EventNote& e) { return e.reason == reason; }));
}
// A plan that waits for room: nothing is written, nor is the API server asked what there is, for some seconds.
inline void expect_asked_seldom(const Plan& plan) {
  EXPECT_TRUE(plan.actions.empty());
  EXPECT_FALSE(plan.needs_live);
  ASSERT_TRUE(plan.requeue_after);
  EXPECT_LE(plan.requeue_after->count(), 5000);
}

// As reconcile, but with the events that come with a late status.
inline void reconcile_and_hear(World& w) {
  const Plan p = plan(w.observe(), w.options);
  if (!p.decision && !p.needs_live) {
    for (const EventNote& e : p.events) w.events.push_back(e);
  }
  w.reconcile();
}

}  // namespace trireme::controller::testing
