#include "operator/controller/objects.h"

#include <gtest/gtest.h>

#include <set>

#include "operator/controller/actions.h"
#include "operator/controller/cache.h"
#include "tests/unit/controller/manifests.h"

namespace trireme::controller {
namespace {

using testing::kModelAndConfig;
using testing::kTwoPods;
using testing::Made;
using testing::made;

const Json* named(const Json& list, const std::string& name) {
  for (const Json& entry : list) {
    if (entry.value("name", "") == name) return &entry;
  }
  return nullptr;
}

std::string env(const Json& pod, const std::string& name) {
  const Json* entry = named(pod["spec"]["containers"][0]["env"], name);
  return entry ? entry->value("value", "(from the cluster)") : "(none)";
}

TEST(Objects, PodHasItsPlace) {
  const Made m = made(kTwoPods);
  const Json p = pod(m.context(), "actor", 1);
  EXPECT_EQ(p["metadata"]["name"], "quick-actor-1-a2");
  EXPECT_EQ(p["metadata"]["namespace"], "team");
  EXPECT_EQ(p["metadata"]["labels"][kLabelRank], "1");
  EXPECT_EQ(p["metadata"]["labels"][kLabelAttempt], "2");
  EXPECT_EQ(p["metadata"]["labels"][kLabelJobUid], "uid-quick");
  EXPECT_EQ(p["metadata"]["ownerReferences"][0]["uid"], "uid-quick");
  EXPECT_EQ(p["metadata"]["ownerReferences"][0]["controller"], true);
  const Json& spec = p["spec"];
  EXPECT_EQ(spec["hostname"], "quick-actor-1") << "the host name does not change with the attempt";
  EXPECT_EQ(spec["subdomain"], "quick-a2");
  EXPECT_EQ(spec["restartPolicy"], "Never");
  EXPECT_EQ(spec["enableServiceLinks"], false);
  EXPECT_EQ(spec["automountServiceAccountToken"], false);
  EXPECT_EQ(env(p, "MASTER_ADDR"), "quick-actor-0.quick-a2");
  EXPECT_EQ(env(p, "NODE_RANK"), "1");
  EXPECT_EQ(env(p, "NNODES"), "2");
  EXPECT_EQ(env(p, "PET_NNODES"), "2");
  EXPECT_EQ(env(p, "TRIREME_ATTEMPT"), "2");
  EXPECT_EQ(env(p, "TRIREME_TERMINATION_LOG"), "/dev/termination-log");
  EXPECT_EQ(env(p, "TRIREME_STATUS_URL"), "http://status.trireme-system:8090/v1/status/team/quick");
  const Json& container = spec["containers"][0];
  EXPECT_EQ(container["name"], "trainer");
  EXPECT_EQ(container["command"][1], "launch");
  EXPECT_EQ(container["securityContext"]["allowPrivilegeEscalation"], false);
  EXPECT_EQ(container["securityContext"]["capabilities"]["drop"][0], "ALL");
  EXPECT_EQ(container["terminationMessagePolicy"], "FallbackToLogsOnError");
  EXPECT_EQ(spec["securityContext"]["runAsNonRoot"], true);
  EXPECT_EQ(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
  ASSERT_NE(named(spec["volumes"], "trireme-shm"), nullptr);
  EXPECT_EQ((*named(spec["volumes"], "trireme-shm"))["emptyDir"]["medium"], "Memory");
  const Json& token = (*named(spec["volumes"], "trireme-status"))["projected"]["sources"][0]["serviceAccountToken"];
  EXPECT_EQ(token["audience"], kStatusTokenAudience);
}

TEST(Objects, PodsGetTheAuthorityOfTheStatusServer) {
  Made m = made(kTwoPods);
  EXPECT_FALSE(attempt_config_map(m.context())["data"].contains("ca.crt"));
  EXPECT_EQ(env(pod(m.context(), "actor", 0), "TRIREME_STATUS_CA_FILE"), "(none)");
  m.options.status_url = "https://status.trireme-system:8090";
  m.options.status_ca = [] { return std::string("PEM"); };
  const Json map = attempt_config_map(m.context());
  EXPECT_EQ(map["data"]["ca.crt"], "PEM");
  const Json p = pod(m.context(), "actor", 0);
  const std::string file = env(p, "TRIREME_STATUS_CA_FILE");
  const Json& sources = (*named(p["spec"]["volumes"], "trireme-status"))["projected"]["sources"];
  EXPECT_EQ(sources[1]["configMap"]["name"], map["metadata"]["name"]);
  EXPECT_EQ(sources[1]["configMap"]["items"][0]["key"], "ca.crt");
  EXPECT_EQ(file,
            std::string(kStatusTokenMountPath) + "/" + sources[1]["configMap"]["items"][0]["path"].get<std::string>());
}

TEST(Objects, PodsAreMarkedWithTheAuthorityThatTheyGot) {
  Made m = made(kTwoPods);
  const auto mark = [&](const char* pem) {
    m.options.status_ca = [pem] { return std::string(pem); };
    const Json p = pod(m.context(), "actor", 0);
    const std::string seen = observe("x", read_pod(pod_fields().parse(p.dump()))).status_ca;
    EXPECT_EQ(p["metadata"]["labels"].value(kLabelStatusCa, ""), seen);
    EXPECT_EQ(seen, status_ca_mark(m.options));
    EXPECT_LE(seen.size(), 63u) << "a label's value";
    return seen;
  };
  EXPECT_EQ(mark(""), "");
  EXPECT_NE(mark("ONE"), "");
  EXPECT_EQ(mark("ONE"), mark("ONE"));
  EXPECT_NE(mark("ONE"), mark("TWO"));
  m.options.status_url.clear();
  EXPECT_FALSE(pod(m.context(), "actor", 0)["metadata"]["labels"].contains(kLabelStatusCa)) << "no reports, no CA";
}

TEST(Objects, PodsOfARoleDifferOnlyInTheirPlace) {
  const Made m = made(kTwoPods);
  Json a = pod(m.context(), "actor", 0), b = pod(m.context(), "actor", 1);
  for (Json* p : {&a, &b}) {
    (*p)["metadata"].erase("name");
    (*p)["metadata"]["labels"].erase(kLabelRank);
    (*p)["spec"].erase("hostname");
    for (Json& e : (*p)["spec"]["containers"][0]["env"]) {
      const std::string name = e["name"];
      if (name == "NODE_RANK" || name == "PET_NODE_RANK" || name == "TRIREME_POD_INDEX") e["value"] = "";
    }
  }
  EXPECT_EQ(a, b);
}

TEST(Objects, TemplateIsKeptAndReservedNamesAreOurs) {
  const Made m = made(
      kModelAndConfig +
      "  image: default:1\n"
      "  roles:\n    actor:\n      gpusPerPod: 4\n      template:\n        metadata: {labels: {team: blue}, "
      "annotations: {note: x}}\n"
      "        spec:\n          nodeSelector: {pool: gpu}\n          containers:\n          - name: sidecar\n          "
      "  image: side:1\n"
      "          - name: trainer\n            env: [{name: MINE, value: $(TRIREME_JOB)}, {name: NODE_RANK, value: "
      "'9'}]\n"
      "            securityContext: {privileged: true}\n"
      "            resources: {limits: {cpu: '8'}}\n");
  const Json p = pod(m.context(), "actor", 0);
  EXPECT_EQ(p["metadata"]["labels"]["team"], "blue");
  EXPECT_EQ(p["metadata"]["annotations"]["note"], "x");
  EXPECT_EQ(p["spec"]["nodeSelector"]["pool"], "gpu");
  const Json& containers = p["spec"]["containers"];
  ASSERT_EQ(containers.size(), 2u);
  const Json& trainer = *named(containers, "trainer");
  EXPECT_EQ((*named(containers, "sidecar"))["image"], "side:1");
  EXPECT_EQ(trainer["image"], "default:1");
  EXPECT_EQ((*named(trainer["env"], "MINE"))["value"], "$(TRIREME_JOB)");
  EXPECT_EQ((*named(trainer["env"], "NODE_RANK"))["value"], "0");
  EXPECT_EQ(std::count_if(trainer["env"].begin(), trainer["env"].end(),
                          [](const Json& e) { return e["name"] == "NODE_RANK"; }),
            1);
  EXPECT_EQ(trainer["resources"]["limits"]["cpu"], "8");
  EXPECT_EQ(trainer["resources"]["limits"]["nvidia.com/gpu"], "4");
  EXPECT_FALSE(trainer["securityContext"].contains("allowPrivilegeEscalation"));
  EXPECT_EQ(p["spec"]["tolerations"][0]["key"], "nvidia.com/gpu");
}

const std::string kRdmaJob =
    kModelAndConfig +
    "  network: {fabric: RoCE, socketInterface: eth0, rdma: {resourceName: rdma/roce, count: 8, devices: mlx5, "
    "gidIndex: 3}}\n"
    "  roles:\n"
    "    actor: {replicas: 2, gpusPerPod: 8%s}\n"
    "    reward: {port: 8000, gpusPerPod: 1, template: {spec: {containers: [{name: reward, image: r}]}}}\n";

std::string rdma_job(const std::string& trainer = "") {
  std::string yaml = kRdmaJob;
  yaml.replace(yaml.find("%s"), 2,
               trainer.empty() ? "" : ", template: {spec: {containers: [{name: trainer, " + trainer + "}]}}");
  return yaml;
}

TEST(Objects, PodsThatUseRdmaMayLockMemoryAndNoOthers) {
  const Made m = made(rdma_job());
  const Json actor = pod(m.context(), "actor", 0);
  const Json& trainer = actor["spec"]["containers"][0];
  EXPECT_EQ(trainer["securityContext"]["capabilities"], Json::parse(R"({"drop":["ALL"],"add":["IPC_LOCK"]})"));
  EXPECT_EQ(trainer["securityContext"]["allowPrivilegeEscalation"], false);
  EXPECT_EQ(trainer["resources"]["limits"]["rdma/roce"], "8");
  EXPECT_EQ(env(actor, "NCCL_IB_GID_INDEX"), "3");
  EXPECT_EQ(env(actor, "TRIREME_REQUIRE_RDMA"), "1");
  EXPECT_EQ(env(actor, "NCCL_NET"), "IB");
  const Json reward = pod(m.context(), "reward", 0);
  const Json& server = reward["spec"]["containers"][0];
  EXPECT_EQ(server["securityContext"]["capabilities"], Json::parse(R"({"drop":["ALL"]})"));
  EXPECT_FALSE(server["resources"]["limits"].contains("rdma/roce")) << "it speaks HTTP";
  EXPECT_EQ(env(reward, "TRIREME_REQUIRE_RDMA"), "(none)");
  const Json plain = pod(made(kTwoPods).context(), "actor", 0);
  EXPECT_FALSE(plain["spec"]["containers"][0]["securityContext"]["capabilities"].contains("add"));
}

TEST(Objects, ATemplateDecidesAboutItsCapabilities) {
  const auto capabilities = [](const std::string& given) {
    const Made m = made(rdma_job("securityContext: {capabilities: " + given + "}"));
    return pod(m.context(), "actor", 0)["spec"]["containers"][0]["securityContext"]["capabilities"];
  };
  EXPECT_EQ(capabilities("{add: [SYS_NICE]}"), Json::parse(R"({"add":["SYS_NICE","IPC_LOCK"]})"));
  EXPECT_EQ(capabilities("{add: [IPC_LOCK]}"), Json::parse(R"({"add":["IPC_LOCK"]})"));
  EXPECT_EQ(capabilities("{add: [ALL]}"), Json::parse(R"({"add":["ALL"]})"));
  EXPECT_EQ(capabilities("{drop: [IPC_LOCK]}"), Json::parse(R"({"drop":["IPC_LOCK"]})"));
  const Made m = made(rdma_job("securityContext: {privileged: true}"));
  EXPECT_EQ(pod(m.context(), "actor", 0)["spec"]["containers"][0]["securityContext"],
            Json::parse(R"({"privileged":true})"));
}

TEST(Objects, TheTemplatesSettingsOfNcclWin) {
  const Made m =
      made(rdma_job("env: [{name: NCCL_IB_GID_INDEX, value: '5'}, {name: NCCL_NET, value: UCX}, {name: "
                    "NCCL_SOCKET_IFNAME, valueFrom: {fieldRef: "
                    "{fieldPath: spec.nodeName}}}, {name: TRIREME_REQUIRE_RDMA, value: '0'}]"));
  const Json p = pod(m.context(), "actor", 0);
  EXPECT_EQ(env(p, "NCCL_IB_GID_INDEX"), "5");
  EXPECT_EQ(env(p, "NCCL_NET"), "UCX");
  EXPECT_EQ(env(p, "NCCL_SOCKET_IFNAME"), "(from the cluster)");
  EXPECT_EQ(env(p, "GLOO_SOCKET_IFNAME"), "eth0");
  EXPECT_EQ(env(p, "NCCL_IB_HCA"), "mlx5");
  EXPECT_EQ(env(p, "TRIREME_REQUIRE_RDMA"), "1") << "a reserved name";
  std::set<std::string> names;
  for (const Json& entry : p["spec"]["containers"][0]["env"])
    EXPECT_TRUE(names.insert(entry["name"].get<std::string>()).second) << entry;
}

TEST(Objects, AutoscalersAreAskedToLeavePodsWhereTheyAre) {
  Made m = made(kModelAndConfig +
                "  roles: {actor: {template: {metadata: {annotations: {karpenter.sh/do-not-disrupt: 'false'}}}}}\n");
  const Json asked = pod(m.context(), "actor", 0)["metadata"]["annotations"];
  EXPECT_EQ(asked["cluster-autoscaler.kubernetes.io/safe-to-evict"], "false");
  EXPECT_EQ(asked["karpenter.sh/do-not-disrupt"], "false") << "the template's own word";
  EXPECT_EQ(pod(made(kTwoPods).context(), "actor", 1)["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"],
            "true");
  m = made(kTwoPods);
  m.options.do_not_disrupt = false;
  EXPECT_FALSE(pod(m.context(), "actor", 0)["metadata"].contains("annotations"));
}

TEST(Objects, InlineConfigurationLiesInTheConfigMap) {
  const Made m =
      made("  model: {source: /m}\n  config: {inline: {grpo: {max_num_steps: 5}}}\n  roles: {actor: {replicas: 2}}\n");
  const Json map = attempt_config_map(m.context());
  EXPECT_EQ(map["immutable"], true);
  EXPECT_EQ(Json::parse(map["data"]["config.yaml"].get<std::string>())["grpo"]["max_num_steps"], 5);
  const Json topology = Json::parse(map["data"]["topology.json"].get<std::string>());
  EXPECT_EQ(topology["attempt"], 2);
  EXPECT_EQ(topology["nodes"][1]["host"], "quick-actor-1.quick-a2");
  const Json p = pod(m.context(), "actor", 0);
  EXPECT_EQ((*named(p["spec"]["volumes"], "trireme-config"))["configMap"]["name"], map["metadata"]["name"]);
  const Json& command = p["spec"]["containers"][0]["command"];
  EXPECT_NE(std::find(command.begin(), command.end(), "/etc/trireme/config/config.yaml"), command.end());
}

TEST(Objects, AvoidedNodesAreExcludedInEveryTerm) {
  Made m = made(
      kModelAndConfig +
      "  roles:\n    actor:\n      template:\n        spec:\n         "
      " affinity:\n"
      "            nodeAffinity:\n              requiredDuringSchedulingIgnoredDuringExecution:\n                "
      "nodeSelectorTerms:\n"
      "                - matchExpressions: [{key: a, operator: Exists}]\n                - matchExpressions: [{key: b, "
      "operator: Exists}]\n");
  m.job.status.avoided_nodes = {{"bad-1", "x", ""}, {"bad-2", "x", ""}};
  const Json p = pod(m.context(), "actor", 0);
  const Json& terms =
      p["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
  ASSERT_EQ(terms.size(), 2u);
  for (const Json& term : terms) {
    ASSERT_EQ(term["matchFields"].size(), 2u);
    EXPECT_EQ(term["matchFields"][0]["values"].size(), 1u) << "the API server takes one value per field selector";
    EXPECT_EQ(term["matchExpressions"].size(), 1u);
  }
}

TEST(Objects, HeadlessServicePublishesEarly) {
  const Made m = made(kTwoPods);
  const Json s = headless_service(m.context());
  EXPECT_EQ(s["metadata"]["name"], "quick-a2");
  EXPECT_EQ(s["spec"]["clusterIP"], "None");
  EXPECT_EQ(s["spec"]["publishNotReadyAddresses"], true);
  EXPECT_EQ(s["spec"]["selector"][kLabelAttempt], "2");
}

TEST(Objects, ServiceComesFirstAndPodsLast) {
  Made m = made(kTwoPods);
  m.backend = {scheduling::BackendKind::kKubernetes, "v1alpha2"};
  const std::vector<Action> actions = create_actions(m.context(), wanted_pods(m.job, 2));
  ASSERT_EQ(actions.size(), 6u);
  EXPECT_EQ(actions.front().resource.plural, "services");
  EXPECT_EQ(actions[2].resource.plural, "workloads");
  EXPECT_EQ(actions[3].resource.plural, "podgroups");
  EXPECT_GT(actions[3].wave, actions[2].wave);
  EXPECT_EQ(actions[4].resource.plural, "pods");
  EXPECT_GT(actions[4].wave, actions[3].wave);
  EXPECT_EQ(actions[4].content()["spec"]["schedulingGroup"]["podGroupName"], "quick-a2");
}

TEST(Objects, APodsBodyIsMadeWhenItIsAskedFor) {
  std::vector<Action> actions;
  std::vector<WantedPod> wanted;
  {
    const Made m = made(kTwoPods);
    wanted = wanted_pods(m.job, 2);
    actions = pod_actions(m.context(), wanted, 1);
  }
  ASSERT_EQ(actions.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(actions[i].body.is_null());
    EXPECT_EQ(actions[i].name, wanted[i].name);
    EXPECT_EQ(actions[i].role, "actor");
    EXPECT_EQ(actions[i].content()["metadata"]["name"], wanted[i].name) << "the plan's context is gone";
  }
}

// ---- what the caches make of objects
// ---------------------------------------------------------------------------------

CachedPod pod_of(const char* json) { return read_pod(pod_fields().parse(json)); }

TEST(Cache, FailedPodTellsWhy) {
  const CachedPod p =
      pod_of(R"({"metadata":{"name":"x","uid":"u","labels":{"trireme.dev/job":"j","trireme.dev/role":"actor",
    "trireme.dev/rank":"3","trireme.dev/attempt":"2"}},"spec":{"nodeName":"n1"},"status":{"phase":"Failed",)"
             R"("containerStatuses":[
    {"name":"side","state":{"terminated":{"exitCode":1,"reason":"Error"}}},
    {"name":"trainer","state":{"terminated":{"exitCode":137,"signal":9,"reason":"OOMKilled",)"
             R"("message":"log","finishedAt":"2026-01-01T00:00:01Z"}}}]}})");
  EXPECT_EQ(p.phase, PodPhase::kFailed);
  EXPECT_EQ(p.rank, 3);
  EXPECT_EQ(p.attempt, 2);
  ASSERT_TRUE(p.trouble);
  EXPECT_EQ(p.trouble->exit_code, 137);
  EXPECT_EQ(p.trouble->reason, "OOMKilled");
  EXPECT_EQ(p.trouble->log, "log");
  EXPECT_GT(p.trouble->finished_ms, 0);
}

TEST(Cache, WhatAKubeletDoesNotAdmitIsRejected) {
  const auto reason_of = [](const char* said) {
    const Json status = {{"phase", "Failed"}, {"reason", said}, {"message", "Pod was rejected"}};
    return read_pod(Json{{"metadata", {{"name", "x"}}}, {"status", status}}).trouble->reason;
  };
  for (const char* said : {"UnexpectedAdmissionError", "NodeAffinity", "OutOfcpu", "OutOfnvidia.com/gpu",
                           "TopologyAffinityError", "SMTAlignmentError", "inconsistentCPUAllocationError",
                           "SysctlForbidden", "TaintToleration", "VolumeAttachmentLimitExceeded"})
    EXPECT_EQ(reason_of(said), "AdmissionRejected") << said;
  EXPECT_EQ(reason_of("Evicted"), "Evicted");
  EXPECT_EQ(reason_of("DeadlineExceeded"), "DeadlineExceeded");
  EXPECT_EQ(reason_of("NodeShutdown"), "NodeShutdown");
}

TEST(Cache, ALaunchersAccountIsReadAndHostileOnesAreText) {
  auto trouble = [](const std::string& said) {
    const Json ended = {{"exitCode", 21}, {"message", said}};
    const Json status = {
        {"phase", "Failed"},
        {"containerStatuses", Json::array({{{"name", "trainer"}, {"state", {{"terminated", ended}}}}})}};
    return std::move(*read_pod(Json{{"metadata", {{"name", "x"}}}, {"status", status}}).trouble);
  };
  const auto account = trouble(R"({"rank":5,"cause":"exit code 21","exitCode":21,"logTail":"loss is nan\nbye"})");
  EXPECT_EQ(account.message, "rank 5 failed first (exit code 21)");
  EXPECT_EQ(account.log, "loss is nan\nbye");
  const auto of_critic = trouble(R"({"rank":0,"role":"critic","cause":"exit code 1","exitCode":1,"logTail":""})");
  EXPECT_EQ(of_critic.message, "critic rank 0 failed first (exit code 1)");
  for (const char* said : {R"({"rank":5,"cause":"cut)", "{}", "{{{", R"({"rank":5})", "plain text"}) {
    EXPECT_EQ(trouble(said).log, said);
    EXPECT_EQ(trouble(said).message, "");
  }
  EXPECT_NO_THROW(trouble(R"({"rank":[],"cause":7,"logTail":{}})"));
}

TEST(Cache, TheMainContainerDecides) {
  const auto pod = [](const std::string& phase, int main, const std::string& sidecar) {
    const Json status = {
        {"phase", phase},
        {"containerStatuses", Json::array({{{"name", "side"}, {"state", Json::parse(sidecar)}},
                                           {{"name", "trainer"}, {"state", {{"terminated", {{"exitCode", main}}}}}}})}};
    return observe("x", read_pod(pod_fields().parse(Json{{"metadata", {{"name", "x"}}}, {"status", status}}.dump())));
  };
  const char* runs = R"({"running":{}})";
  const char* failed = R"({"terminated":{"exitCode":143}})";
  EXPECT_TRUE(pod("Running", 0, runs).done());
  EXPECT_TRUE(pod("Running", 0, runs).alive()) << "and has to be taken away";
  EXPECT_TRUE(pod("Failed", 0, failed).done());
  EXPECT_FALSE(pod("Failed", 0, failed).failed());
  EXPECT_TRUE(pod("Running", 3, runs).failed());
  EXPECT_EQ(pod("Running", 3, runs).exit_code, 3);
}

TEST(Cache, APodThatIsMadeAgainTellsWhichItIs) {
  const Made m = made(std::string(kTwoPods) + "");
  Json object = pod(m.context(), "actor", 1, 3, 2);
  EXPECT_EQ(object["metadata"]["name"], "quick-actor-1-a2-i3");
  const CachedPod cached = read_pod(pod_fields().parse(object.dump()));
  EXPECT_EQ(observe("x", cached).incarnation, 3);
  EXPECT_EQ(observe("x", cached).failures_before, 2);
  EXPECT_TRUE(is_own({"team", "quick-actor-1-a2-i3"}, cached, {"team", "quick"}));
  EXPECT_FALSE(is_own({"team", "quick-actor-1-a2"}, cached, {"team", "quick"}));
  const CachedPod first = read_pod(pod_fields().parse(pod(m.context(), "actor", 1).dump()));
  EXPECT_EQ(observe("x", first).incarnation, 0);
}

TEST(Pod, OfGenerationRunsAnEngineAndReportsNothing) {
  const Made m = made(kModelAndConfig + "  roles:\n    actor: {}\n    generation: {replicas: 2, gpusPerPod: 1}\n");
  const Json p = pod(m.context(), "generation", 1, 4);
  const Json& main = p["spec"]["containers"][0];
  EXPECT_EQ(main["command"], Json(engine_command(m.job, "/etc/trireme/config/config.yaml")));
  EXPECT_EQ(env(p, "TRIREME_WORK_URL"), "http://quick-actor-0.quick-a2:29501");
  EXPECT_EQ(env(p, "TRIREME_ENGINE_NAME"), p["metadata"]["name"]);
  EXPECT_EQ(env(p, "TRIREME_STATUS_URL"), "(none)");
  EXPECT_EQ(p["spec"]["terminationGracePeriodSeconds"], 30) << "it has nothing to save";
  EXPECT_EQ(main["resources"]["limits"]["nvidia.com/gpu"], "1");
  EXPECT_EQ(env(pod(m.context(), "actor", 0), "TRIREME_WORK_PORT"), "29501");
  EXPECT_EQ(pod(m.context(), "actor", 0)["spec"]["terminationGracePeriodSeconds"], 300);
}

TEST(Pod, OfTheCriticIsARankThatReportsNothing) {
  const Made m = made("  algorithm: PPO\n" + kModelAndConfig +
                      "  network: {rdma: {resourceName: rdma/ib}}\n"
                      "  roles:\n    actor: {replicas: 2, gpusPerPod: 8}\n    critic: {replicas: 2, gpusPerPod: 4}\n");
  const Json p = pod(m.context(), "critic", 1);
  const Json& main = p["spec"]["containers"][0];
  const Json map = attempt_config_map(m.context());
  const Json nodes = Json::parse(map["data"]["topology.json"].get<std::string>())["nodes"];
  ASSERT_EQ(nodes.size(), 4u);
  EXPECT_EQ(nodes[3].dump(), R"({"host":"quick-critic-1.quick-a2","index":1,"ranks":[20,23],"role":"critic"})");
  EXPECT_EQ(p["metadata"]["name"], "quick-critic-1-a2");
  EXPECT_EQ(p["spec"]["hostname"], "quick-critic-1");
  EXPECT_EQ(p["spec"]["subdomain"], "quick-a2");
  EXPECT_EQ(main["command"], Json(trainer_command(m.job, "/etc/trireme/config/config.yaml", "critic")));
  EXPECT_EQ(env(p, "MASTER_ADDR"), "quick-actor-0.quick-a2");
  EXPECT_EQ(env(p, "NODE_RANK"), "1");
  EXPECT_EQ(env(p, "TRIREME_ACTOR_RANKS"), "16");
  EXPECT_EQ(env(p, "TRIREME_CRITIC_RANKS"), "8");
  EXPECT_EQ(env(p, "TRIREME_STATUS_URL"), "(none)");
  EXPECT_EQ(named(p["spec"]["volumes"], "trireme-status"), nullptr);
  EXPECT_NE(named(p["spec"]["volumes"], "trireme-topology"), nullptr);
  EXPECT_EQ(p["spec"]["terminationGracePeriodSeconds"], 300) << "it saves as the actor does";
  EXPECT_EQ(main["resources"]["limits"]["nvidia.com/gpu"], "4");
  EXPECT_EQ(main["resources"]["limits"]["rdma/ib"], "1");
  const Json of_actor = pod(m.context(), "actor", 0);
  EXPECT_EQ(env(of_actor, "TRIREME_CRITIC_RANKS"), "8");
  EXPECT_NE(named(of_actor["spec"]["volumes"], "trireme-status"), nullptr);
}

TEST(Pod, InitContainersAreNoRanks) {
  const Made m = made("  algorithm: PPO\n" + kModelAndConfig +
                      "  roles:\n    actor: {template: {spec: {initContainers: [{name: first}]}}}\n    critic: {}\n"
                      "    generation: {}\n");
  const Json p = pod(m.context(), "actor", 0);
  for (const char* name : {"TRIREME_CRITIC_RANKS", "TRIREME_WORK_PORT", "TRIREME_STATUS_URL"}) {
    EXPECT_EQ(named(p["spec"]["initContainers"][0]["env"], name), nullptr) << name;
    EXPECT_NE(env(p, name), "(none)") << name;
  }
  EXPECT_NE(named(p["spec"]["initContainers"][0]["env"], "NODE_RANK"), nullptr) << "trireme once asks for it";
}

TEST(Cache, OnlyTheControllerMakesAPodTheJobsOwn) {
  const Made m = made(kTwoPods);
  Json object = pod(m.context(), "actor", 1);
  const kube::ObjectKey job{"team", "quick"}, key{"team", "quick-actor-1-a2"};
  const auto own = [&](const kube::ObjectKey& at) {
    return is_own(at, read_pod(pod_fields().parse(object.dump())), job);
  };
  EXPECT_TRUE(own(key));
  EXPECT_FALSE(own({"others", key.name}));
  EXPECT_FALSE(own({"team", "quick-actor-2-a2"}));
  object["metadata"]["ownerReferences"][0]["uid"] = "another";
  EXPECT_FALSE(own(key));
  object["metadata"]["ownerReferences"][0]["uid"] = "uid-quick";
  object["metadata"]["ownerReferences"][0]["controller"] = false;
  EXPECT_FALSE(own(key));
  object["metadata"].erase("ownerReferences");
  EXPECT_FALSE(own(key));
}

TEST(Cache, DisruptionsHaveOneVocabulary) {
  auto reason = [](const std::string& status) {
    const CachedPod p = pod_of(("{\"metadata\":{\"name\":\"x\"},\"status\":" + status + "}").c_str());
    return p.trouble ? p.trouble->reason : "";
  };
  EXPECT_EQ(reason(R"({"phase":"Failed","conditions":[{"type":"DisruptionTarget","status":"True",)"
                   R"("reason":"PreemptionByScheduler"}]})"),
            "Preempted");
  EXPECT_EQ(reason(R"({"phase":"Running","conditions":[{"type":"DisruptionTarget","status":"True",)"
                   R"("reason":"DeletionByTaintManager"}]})"),
            "NodeLost");
  EXPECT_EQ(reason(R"({"phase":"Failed","reason":"Evicted","message":"disk"})"), "Evicted");
  EXPECT_EQ(reason(R"({"phase":"Failed","reason":"OutOfcpu"})"), "AdmissionRejected");
  EXPECT_EQ(reason(R"({"phase":"Failed","reason":"UnexpectedAdmissionError"})"), "AdmissionRejected");
  EXPECT_EQ(reason(R"({"phase":"Failed","reason":"Terminated"})"), "NodeShutdown");
  EXPECT_EQ(reason(R"({"phase":"Failed"})"), "Error");
}

TEST(Cache, PendingPodTellsWhatItWaitsFor) {
  const CachedPod unplaced =
      pod_of(R"({"metadata":{"name":"x"},"spec":{"schedulingGates":[{"name":"g"}]},"status":{"phase":"Pending",
    "conditions":[{"type":"PodScheduled","status":"False","reason":"Unschedulable","message":"0/3 nodes"}]}})");
  EXPECT_TRUE(unplaced.gated);
  EXPECT_EQ(unplaced.trouble->message, "0/3 nodes");
  const CachedPod pulling = pod_of(
      R"({"metadata":{"name":"x"},"spec":{"nodeName":"n"},"status":{"phase":"Pending",
    "conditions":[{"type":"PodScheduled","status":"True"}],)"
      R"("containerStatuses":[{"name":"trainer","state":{"waiting":{"reason":"ErrImagePull","message":"no"}}}]}})");
  EXPECT_EQ(pulling.trouble->message, "ErrImagePull: no");
  EXPECT_EQ(pulling.trouble->waiting, "ErrImagePull");
  const CachedPod waits = pod_of(R"({"metadata":{"name":"x"},"status":{"phase":"Pending","containerStatuses":[
    {"name":"trainer","state":{"waiting":{"reason":"ImagePullBackOff"}}}]}})");
  EXPECT_EQ(waits.trouble->waiting, "ErrImagePull") << "by turns, and one trouble";
}

TEST(Cache, JobsArePackedAndComeBackAsTheyWere) {
  Json object = to_json(parse_rljob(
      "apiVersion: trireme.dev/v1alpha1\nkind: RLJob\nmetadata: {name: packed, namespace: team}\nspec:\n"
      "  model: {source: /models/tiny}\n  config: {path: configs/quickstart.yaml}\n  roles: {actor: {replicas: 2}}\n",
      "test"));
  object["metadata"]["uid"] = "5e1f2a90-0000-4000-8000-000000000001";
  object["status"] = {{"phase", "Starting"}, {"attempt", 3}, {"text", std::string("\0\xc3\xa9 quoted \"", 12)}};
  const CachedJob job = read_job(object, "m");
  EXPECT_EQ(job.json(), object);
  EXPECT_LT(job.packed.size() * 3, job.unpacked_size);
  for (int i = 0; i < 3000; ++i) object["spec"]["config"]["overrides"].push_back("key." + std::to_string(i * 7919));
  const CachedJob large = read_job(object, "m");
  EXPECT_EQ(large.json(), object);
}

TEST(Cache, HostileObjectsDoNotThrow) {
  for (const char* text : {R"({})", R"({"metadata":[],"status":7})",
                           R"({"metadata":{"labels":{"trireme.dev/rank":5}},"status":{"conditions":{"a":1}}})",
                           R"({"metadata":{"labels":{"trireme.dev/rank":"99999999999999999999"}},)"
                           R"("status":{"containerStatuses":[[],3,null]}})"}) {
    EXPECT_NO_THROW(read_pod(Json::parse(text)));
    EXPECT_NO_THROW(read_job(Json::parse(text), "m"));
    EXPECT_NO_THROW(read_node(Json::parse(text)));
    EXPECT_NO_THROW(read_service(Json::parse(text)));
  }
}

}  // namespace
}  // namespace trireme::controller
