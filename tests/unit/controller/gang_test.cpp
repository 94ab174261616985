#include "operator/scheduling/gang.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace trireme::scheduling {
namespace {

using nlohmann::json;

Gang a_gang() {
  Gang gang;
  gang.name = "quick-a1";
  gang.namespace_ = "team";
  gang.owner = {{"kind", "RLJob"}, {"uid", "u"}};
  gang.labels = {{"trireme.dev/job", "quick"}};
  gang.job_name = "quick";
  gang.pods = 4;
  gang.schedule_timeout_s = 600;
  return gang;
}

json with_meta(const char* text) {
  json j = json::parse(text);
  j["metadata"] = json::parse(R"({"name":"quick-a1","namespace":"team","labels":{"trireme.dev/job":"quick"},)"
                              R"("ownerReferences":[{"kind":"RLJob","uid":"u"}]})");
  return j;
}

json bare_pod() { return json::parse(R"({"metadata":{"labels":{"a":"b"}},"spec":{"containers":[]}})"); }

TEST(Gang, DiscoveryChooses) {
  EXPECT_EQ(choose_backend("auto", false, {}).kind, BackendKind::kNone);
  const Discovery all = {{"scheduling.k8s.io/v1alpha2", {"workloads", "podgroups"}},
                         {"kueue.x-k8s.io/v1beta1", {"workloads"}},
                         {"scheduling.volcano.sh/v1beta1", {"podgroups"}}};
  EXPECT_EQ(choose_backend("Auto", false, all).kind, BackendKind::kKubernetes);
  EXPECT_EQ(choose_backend("Auto", false, all).version, "v1alpha2");
  EXPECT_EQ(choose_backend("Auto", true, all).kind, BackendKind::kKueue);
  EXPECT_EQ(choose_backend("Volcano", true, all).kind, BackendKind::kVolcano);
  EXPECT_EQ(choose_backend("None", true, all).kind, BackendKind::kNone);
  EXPECT_THROW(choose_backend("KAI", false, all), Error);
  EXPECT_THROW(choose_backend("slurm", false, all), Error);
  EXPECT_EQ(
      choose_backend("auto", false,
                     {{"scheduling.k8s.io/v1beta1", {"podgroups"}}, {"scheduling.k8s.io/v1alpha2", {"podgroups"}}})
          .version,
      "v1beta1");
}

TEST(Gang, KubernetesV1Alpha2) {
  const Backend backend{BackendKind::kKubernetes, "v1alpha2"};
  const auto objects = gang_objects(backend, a_gang());
  ASSERT_EQ(objects.size(), 2u);
  EXPECT_EQ(objects[0].body, with_meta(R"({"apiVersion":"scheduling.k8s.io/v1alpha2","kind":"Workload","spec":{
    "controllerRef":{"apiGroup":"trireme.dev","kind":"RLJob","name":"quick"},
    "podGroupTemplates":[{"name":"gang","schedulingPolicy":{"gang":{"minCount":4}}}]}})"));
  EXPECT_EQ(objects[1].resource, "podgroups");
  EXPECT_EQ(objects[1].body, with_meta(R"({"apiVersion":"scheduling.k8s.io/v1alpha2","kind":"PodGroup","spec":{
    "podGroupTemplateRef":{"workload":{"workloadName":"quick-a1","podGroupTemplateName":"gang"}},
    "schedulingPolicy":{"gang":{"minCount":4}}}})"));
  json pod = bare_pod();
  join_gang(backend, a_gang(), "actor", pod);
  EXPECT_EQ(pod, json::parse(R"({"metadata":{"labels":{"a":"b"}},)"
                             R"("spec":{"containers":[],"schedulingGroup":{"podGroupName":"quick-a1"}}})"));
}

TEST(Gang, KubernetesV1Beta1) {
  Gang gang = a_gang();
  gang.priority_class = "high";
  gang.topology_key = "rack";
  gang.topology_required = true;
  const auto objects = gang_objects({BackendKind::kKubernetes, "v1beta1"}, gang);
  ASSERT_EQ(objects.size(), 2u);
  EXPECT_EQ(objects[1].body, with_meta(R"({"apiVersion":"scheduling.k8s.io/v1beta1","kind":"PodGroup","spec":{
    "workloadRef":{"workloadName":"quick-a1","templateName":"gang"},"schedulingPolicy":{"gang":{"minCount":4}},
    "schedulingConstraints":{"topology":[{"key":"rack"}]},"disruptionMode":{"all":{}},"priorityClassName":"high"}})"));
}

TEST(Gang, KubernetesV1Alpha1) {
  const Backend backend{BackendKind::kKubernetes, "v1alpha1"};
  const auto objects = gang_objects(backend, a_gang());
  ASSERT_EQ(objects.size(), 1u);
  EXPECT_EQ(objects[0].body["spec"]["podGroups"], json::parse(R"([{"name":"gang","policy":{"gang":{"minCount":4}}}])"));
  json pod = bare_pod();
  join_gang(backend, a_gang(), "actor", pod);
  EXPECT_EQ(pod["spec"]["workloadRef"], json::parse(R"({"name":"quick-a1","podGroup":"gang"})"));
}

TEST(Gang, Kueue) {
  Gang gang = a_gang();
  gang.queue = "team-queue";
  gang.topology_key = "rack";
  const Backend backend{BackendKind::kKueue, "v1beta2"};
  EXPECT_TRUE(gang_objects(backend, gang).empty());
  json pod = bare_pod();
  join_gang(backend, gang, "actor", pod);
  EXPECT_EQ(
      pod["metadata"],
      json::parse(
          R"({"labels":{"a":"b","kueue.x-k8s.io/pod-group-name":"quick-a1","kueue.x-k8s.io/queue-name":"team-queue"},
    "annotations":{"kueue.x-k8s.io/pod-group-total-count":"4",
    "kueue.x-k8s.io/podset-preferred-topology":"rack"}})"));
  const auto cleanup = gang_cleanup(backend, "quick-a1");
  ASSERT_EQ(cleanup.size(), 1u);
  EXPECT_EQ(cleanup[0].group_version, "kueue.x-k8s.io/v1beta2");
  EXPECT_EQ(cleanup[0].resource, "workloads");
}

TEST(Gang, Volcano) {
  Gang gang = a_gang();
  gang.queue = "q";
  const Backend backend{BackendKind::kVolcano, "v1beta1"};
  const auto objects = gang_objects(backend, gang);
  ASSERT_EQ(objects.size(), 1u);
  EXPECT_EQ(
      objects[0].body,
      with_meta(
          R"({"apiVersion":"scheduling.volcano.sh/v1beta1","kind":"PodGroup","spec":{"minMember":4,"queue":"q"}})"));
  json pod = bare_pod();
  join_gang(backend, gang, "actor", pod);
  EXPECT_EQ(pod["spec"]["schedulerName"], "volcano");
  EXPECT_EQ(pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"], "quick-a1");
}

TEST(Gang, Coscheduling) {
  const Backend backend{BackendKind::kCoscheduling, "v1alpha1"};
  const auto objects = gang_objects(backend, a_gang());
  ASSERT_EQ(objects.size(), 1u);
  EXPECT_EQ(objects[0].body, with_meta(R"({"apiVersion":"scheduling.x-k8s.io/v1alpha1","kind":"PodGroup",)"
                                       R"("spec":{"minMember":4,"scheduleTimeoutSeconds":600}})"));
  json pod = bare_pod();
  pod["spec"]["schedulerName"] = "mine";
  join_gang(backend, a_gang(), "actor", pod);
  EXPECT_EQ(pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"], "quick-a1");
  EXPECT_EQ(pod["spec"]["schedulerName"], "mine");
}

TEST(Gang, Kai) {
  Gang gang = a_gang();
  gang.topology_key = "rack";
  gang.topology_required = true;
  const Backend backend{BackendKind::kKai, "v2alpha2"};
  const auto objects = gang_objects(backend, gang);
  ASSERT_EQ(objects.size(), 1u);
  EXPECT_EQ(
      objects[0].body,
      with_meta(R"({"apiVersion":"scheduling.run.ai/v2alpha2","kind":"PodGroup","spec":{"minMember":4,"queue":"default",
    "topologyConstraint":{"requiredTopologyLevel":"rack"}}})"));
  json pod = bare_pod();
  join_gang(backend, gang, "actor", pod);
  EXPECT_EQ(pod["metadata"]["annotations"]["pod-group-name"], "quick-a1");
  EXPECT_EQ(pod["metadata"]["labels"]["kai.scheduler/queue"], "default");
}

}  // namespace
}  // namespace trireme::scheduling
