#include "api/runtime.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "api/validate.h"
#include "base/text.h"
#include "tests/unit/api/helpers.h"

namespace trireme {
namespace {

using test::job_yaml;
using test::read_example;
using testing::ElementsAre;

void expect_set(const std::map<std::string, std::string>& env, const std::map<std::string, std::string>& wanted) {
  for (const auto& [name, value] : wanted) {
    const auto found = env.find(name);
    EXPECT_EQ(found == env.end() ? "(unset)" : found->second, value) << name;
  }
}

TEST(Sizes, FollowTheRoles) {
  const RLJob job =
      parse_rljob(job_yaml("  roles:\n    actor: {replicas: 8, gpusPerPod: 8, parallelism: {tp: 4, pp: 4}}\n"
                           "    reward: {replicas: 3, port: 80, gpusPerPod: 1}\n"),
                  "f");
  EXPECT_EQ(total_pods(job.spec), 11);
  EXPECT_EQ(total_gpus(job.spec), 67);
  EXPECT_EQ(world_size(*job.spec.roles.actor), 64);
  EXPECT_EQ(layout_of(*job.spec.roles.actor), (Layout{.tp = 4, .dp = 4, .pp = 4}));
  EXPECT_EQ(processes_per_pod(RoleSpec{}), 1);
  EXPECT_EQ(processes_per_pod(RoleSpec{.processes_per_pod = 3}), 3);
  ASSERT_EQ(roles_of(job.spec).size(), 2u);
  EXPECT_EQ(roles_of(job.spec)[1].name, "reward");
  EXPECT_THROW(actor_of(RLJobSpec{}), Error);
}

TEST(Sizes, TheCoreOfAGangIsWhatNoStepEndsWithout) {
  const auto core = [](const std::string& generation) {
    return core_pods(
        parse_rljob(
            job_yaml("  roles:\n    actor: {replicas: 2}\n    reward: {replicas: 3, port: 80}\n    generation: {" +
                     generation + "}\n"),
            "f")
            .spec);
  };
  EXPECT_EQ(core("replicas: 4"), 6);
  EXPECT_EQ(core("replicas: 4, minReplicas: 3"), 8);
  EXPECT_EQ(core("replicas: 4, minReplicas: 9"), 9) << "what nobody validated";
  const RLJob ppo = parse_rljob(
      job_yaml("  algorithm: PPO\n  roles: {actor: {replicas: 2}, critic: {replicas: 3, gpusPerPod: 2}}\n"), "f");
  EXPECT_EQ(core_pods(ppo.spec), 5);
  EXPECT_EQ(total_gpus(ppo.spec), 6);
}

TEST(Trainer, CommandLine) {
  const RLJob job = parse_rljob(read_example("eight-nodes-tp4-pp4.rljob.yaml"), "f");
  EXPECT_THAT(trainer_command(job, "/etc/trireme/config/config.yaml"),
              ElementsAre("trireme", "launch", "--nproc-per-node", "8", "--", "train", "--algorithm", "grpo",
                          "--config", "configs/llama3.1_70b.yaml", "--layout", "tp=4,cp=1,ep=1,dp=4,pp=4,etp=1",
                          "policy.model_name=meta-llama/Llama-3.1-70B",
                          "checkpointing.checkpoint_dir=/runs/llama-70b-8x8/checkpoints", "cluster.num_nodes=8",
                          "cluster.gpus_per_node=8", "logger.log_dir=/runs/llama-70b-8x8/logs"));
  RLJob with_inline = job;
  with_inline.spec.config = {};
  with_inline.spec.config.inline_config = Json::object();
  EXPECT_EQ(trainer_command(with_inline, "/c.yaml")[9], "/c.yaml");
}

TEST(Trainer, Environment) {
  RLJob job = parse_rljob(job_yaml("  network: {socketInterface: eth0, rdma: {resourceName: rdma/ib}}\n"), "f");
  job.metadata.uid = "5e9c";
  const auto env = pod_environment(
      job, {.index = 1, .attempt = 3, .master_address = "job-actor-0.job-a3", .topology_file = "/t.json"});
  expect_set(env, {{"MASTER_ADDR", "job-actor-0.job-a3"},
                   {"MASTER_PORT", "29500"},
                   {"NODE_RANK", "1"},
                   {"NNODES", "2"},
                   {"PET_NPROC_PER_NODE", "8"},
                   {"TRIREME_ATTEMPT", "3"},
                   {"TRIREME_JOB_UID", job.metadata.uid},
                   {"TRIREME_TOPOLOGY_FILE", "/t.json"},
                   {"NCCL_SOCKET_IFNAME", "eth0"},
                   {"TRIREME_REQUIRE_RDMA", "1"}});
  EXPECT_EQ(parse_layout(env.at("TRIREME_LAYOUT")), (Layout{.dp = 16}));
  EXPECT_FALSE(env.count("RANK"));  // per process: set by launch
  EXPECT_FALSE(env.count("WORLD_SIZE"));
  EXPECT_EQ(pod_environment(job, {.master_port = 1234}).at("MASTER_PORT"), "1234");
  // What we set, users may not (NCCL and Gloo settings are theirs to override).
  for (const auto& [name, value] : env) {
    EXPECT_TRUE(is_reserved_env(name) || starts_with(name, "NCCL_") || starts_with(name, "GLOO_")) << name;
  }
  EXPECT_FALSE(is_reserved_env("PATH"));
  EXPECT_FALSE(is_reserved_env("RANKS"));
}

TEST(Trainer, FabricsSetWhatNcclCannotFindOut) {
  const auto nccl = [](const std::string& network, const std::string& role = "actor") {
    const RLJob job = parse_rljob(job_yaml("  network: " + network + "\n"), "f");
    std::map<std::string, std::string> out;
    for (const auto& [name, value] : pod_environment(job, {.role = role})) {
      if (starts_with(name, "NCCL_") || name == "TRIREME_REQUIRE_RDMA") out[name] = value;
    }
    return out;
  };
  using Env = std::map<std::string, std::string>;
  EXPECT_EQ(nccl("{}"), Env{});
  EXPECT_EQ(nccl("{fabric: None}"), (Env{{"NCCL_IB_DISABLE", "1"}}));
  EXPECT_EQ(nccl("{fabric: InfiniBand, rdma: {resourceName: rdma/ib, devices: 'mlx5_0:1,mlx5_1:1'}}"),
            (Env{{"NCCL_IB_DISABLE", "0"},
                 {"NCCL_IB_HCA", "mlx5_0:1,mlx5_1:1"},
                 {"NCCL_NET", "IB"},
                 {"TRIREME_REQUIRE_RDMA", "1"}}));
  EXPECT_EQ(nccl("{rdma: {resourceName: vpc.amazonaws.com/efa}}"),
            (Env{{"NCCL_NET", "AWS Libfabric"}, {"TRIREME_REQUIRE_RDMA", "1"}}));
  EXPECT_EQ(nccl("{fabric: RoCE, rdma: {resourceName: r/r, gidIndex: 3, trafficClass: 106, require: false}}"),
            (Env{{"NCCL_IB_DISABLE", "0"},
                 {"NCCL_IB_ROCE_VERSION_NUM", "2"},
                 {"NCCL_IB_GID_INDEX", "3"},
                 {"NCCL_IB_TC", "106"}}));
  EXPECT_EQ(nccl("{fabric: RoCE, rdma: {resourceName: r/r}}").count("NCCL_IB_GID_INDEX"), 0u) << "NCCL finds it";
}

TEST(Trainer, OnePodHasNoNetworkToFind) {
  const RLJob job = parse_rljob(job_yaml("  network: {rdma: {resourceName: rdma/ib}}\n"
                                         "  roles: {actor: {replicas: 1, gpusPerPod: 8}}\n"),
                                "f");
  const auto env = pod_environment(job, {});
  EXPECT_EQ(env.at("TRIREME_REQUIRE_RDMA"), "1");
  EXPECT_FALSE(env.count("NCCL_NET"));
}

TEST(Trainer, WhoUsesRdmaAndTheNodesNetwork) {
  const auto spec = [](const std::string& yaml) { return parse_rljob(job_yaml(yaml), "f").spec; };
  const char* rdma = "  network: {rdma: {resourceName: rdma/ib}}\n";
  const std::string roles = "  roles: {actor: {gpusPerPod: 1}, reward: {gpusPerPod: 1, port: 80}}\n";
  EXPECT_TRUE(uses_rdma(spec(rdma + roles), "actor"));
  EXPECT_FALSE(uses_rdma(spec(rdma + roles), "reward"));
  EXPECT_FALSE(uses_rdma(spec(rdma + roles), "critic"));
  EXPECT_FALSE(uses_rdma(spec(roles), "actor"));
  EXPECT_FALSE(uses_rdma(spec(rdma + std::string("  roles: {actor: {}}\n")), "actor"));
  const auto host = [&](const std::string& yaml) {
    const RLJobSpec s = spec(yaml);
    return uses_host_network(s, *s.roles.actor);
  };
  EXPECT_FALSE(host(""));
  EXPECT_TRUE(host("  network: {hostNetwork: true}\n"));
  EXPECT_TRUE(host("  roles: {actor: {template: {spec: {hostNetwork: true}}}}\n"));
  EXPECT_FALSE(host("  roles: {actor: {template: {spec: {hostNetwork: 'yes'}}}}\n"));
}

TEST(Trainer, RewardPodsGetNoRanks) {
  const RLJob job = parse_rljob(job_yaml("  roles: {actor: {}, reward: {port: 8080}}\n"), "f");
  const auto env = pod_environment(job, {.role = "reward"});
  EXPECT_EQ(env.at("TRIREME_REWARD_PORT"), "8080");
  EXPECT_FALSE(env.count("MASTER_ADDR"));
  EXPECT_EQ(pod_environment(job, {}).at("TRIREME_REWARD_URL"), "http://job-reward:8080");
}

TEST(Trainer, AGenerationPodOfSeveralProcessesLaunchesThem) {
  const RLJob job = parse_rljob(job_yaml("  roles: {actor: {}, generation: {replicas: 2, gpusPerPod: 4}}\n"), "f");
  EXPECT_THAT(
      role_command(job, "generation", "/c.yaml"),
      ElementsAre("trireme", "launch", "--nproc-per-node", "4", "--", "engine", "--config", "configs/quickstart.yaml",
                  "algorithm=grpo", "cluster.num_nodes=1", "cluster.gpus_per_node=1"));
}

TEST(Trainer, GenerationPodsJoinActor0) {
  RLJob job = parse_rljob(job_yaml("  roles: {actor: {replicas: 2}, generation: {replicas: 2}}\n"
                                   "  network: {workPort: 777, rdma: {resourceName: rdma/ib}}\n"
                                   "  config: {path: c.yaml, overrides: [grpo.seed=1]}\n"),
                          "f");
  job.metadata.uid = "5e9c";
  const PodPlace place{
      .role = "generation", .index = 1, .attempt = 3, .incarnation = 2, .master_address = "job-actor-0.job-a3"};
  const auto env = pod_environment(job, place);
  expect_set(env, {{"TRIREME_ROLE", "generation"},
                   {"TRIREME_JOB_UID", "5e9c"},
                   {"TRIREME_ATTEMPT", "3"},
                   {"MASTER_ADDR", "job-actor-0.job-a3"},
                   {"MASTER_PORT", "29500"},
                   {"TRIREME_WORK_URL", "http://job-actor-0.job-a3:777"},
                   {"TRIREME_ENGINE_NAME", "job-generation-1-a3-i2"}});
  for (const char* name : {"NODE_RANK", "NNODES", "PET_NNODES", "TRIREME_LAYOUT", "TRIREME_WORK_PORT"})
    EXPECT_FALSE(env.count(name)) << name;
  EXPECT_EQ(pod_environment(job, {}).at("TRIREME_WORK_PORT"), "777");
  EXPECT_FALSE(pod_environment(parse_rljob(job_yaml(), "f"), {}).count("TRIREME_WORK_PORT"));
  EXPECT_EQ(pod_environment(job, {.role = "generation", .work_port = 5}).at("TRIREME_WORK_URL"), "http://:5");
  EXPECT_THAT(role_command(job, "generation", "/c.yaml"),
              ElementsAre("trireme", "engine", "--config", "c.yaml", "algorithm=grpo", "cluster.num_nodes=2",
                          "cluster.gpus_per_node=1", "grpo.seed=1"));
  EXPECT_EQ(role_command(job, "actor", "/c.yaml"), trainer_command(job, "/c.yaml"));
  EXPECT_THAT(role_command(job, "reward", "/c.yaml"), testing::IsEmpty());
}

TEST(Trainer, AnEnginesSizesGoToEveryRole) {
  RLJob job = parse_rljob(
      job_yaml("  algorithm: PPO\n"
               "  roles: {actor: {gpusPerPod: 8, parallelism: {tp: 4, pp: 2}}, critic: {}, generation: {replicas: 2, "
               "gpusPerPod: 8, parallelism: {tp: 4}}}\n  config: {path: c.yaml, overrides: [ppo.seed=1]}\n"),
      "f");
  const std::string tp = "policy.generation.tensor_parallel_size=4", ep = "policy.generation.expert_parallel_size=2";
  EXPECT_THAT(trainer_overrides(job), ElementsAre("cluster.num_nodes=1", "cluster.gpus_per_node=8", tp, "ppo.seed=1"))
      << "the user's come last";
  // The pod starts its processes; which engine each is in, and as which rank, they find out.
  EXPECT_THAT(role_command(job, "generation", "/c.yaml"),
              ElementsAre("trireme", "launch", "--nproc-per-node", "8", "--", "engine", "--config", "c.yaml",
                          "algorithm=ppo", "cluster.num_nodes=1", "cluster.gpus_per_node=8", tp, "ppo.seed=1"));
  job.spec.roles.generation->parallelism.ep = 2;
  EXPECT_THAT(trainer_overrides(job),
              ElementsAre("cluster.num_nodes=1", "cluster.gpus_per_node=8", tp, ep, "ppo.seed=1"));
  for (const char* role : {"actor", "critic", "generation"})
    EXPECT_THAT(role_command(job, role, "/c.yaml"), testing::IsSupersetOf({tp, ep})) << role;
  EXPECT_EQ(layout_of(*job.spec.roles.generation), (Layout{.tp = 4, .ep = 2, .dp = 4})) << "four engines";
  job.spec.roles.generation.reset();
  EXPECT_THAT(trainer_overrides(job), testing::Not(testing::Contains(testing::HasSubstr("policy.generation"))));
}

TEST(Trainer, CriticPodsAreRanksBehindTheActors) {
  RLJob job = parse_rljob(job_yaml("  algorithm: PPO\n"
                                   "  roles: {actor: {replicas: 2, gpusPerPod: 8}, "
                                   "critic: {replicas: 3, gpusPerPod: 4}, generation: {}}\n"
                                   "  network: {rdma: {resourceName: rdma/ib}}\n"
                                   "  config: {path: c.yaml, overrides: [ppo.seed=1]}\n"),
                          "f");
  const PodPlace place{.role = "critic", .index = 2, .attempt = 3, .master_address = "job-actor-0.job-a3"};
  const auto env = pod_environment(job, place);
  EXPECT_EQ(env.at("TRIREME_ROLE"), "critic");
  EXPECT_EQ(env.at("TRIREME_ATTEMPT"), "3");
  EXPECT_EQ(env.at("MASTER_ADDR"), "job-actor-0.job-a3");
  EXPECT_EQ(env.at("MASTER_PORT"), "29500");
  EXPECT_EQ(env.at("NODE_RANK"), "2");
  EXPECT_EQ(env.at("NNODES"), "3");
  EXPECT_EQ(env.at("PET_NPROC_PER_NODE"), "4");
  EXPECT_EQ(env.at("TRIREME_ACTOR_RANKS"), "16");
  EXPECT_EQ(env.at("TRIREME_CRITIC_RANKS"), "12");
  EXPECT_EQ(env.at("TRIREME_METRICS_PORT"), "9400");
  EXPECT_EQ(env.at("TRIREME_CHECKPOINT_ON_TERMINATION"), "1");
  EXPECT_EQ(env.at("NCCL_NET"), "IB");
  EXPECT_EQ(parse_layout(env.at("TRIREME_LAYOUT")), (Layout{.dp = 12}));
  EXPECT_FALSE(env.count("TRIREME_WORK_PORT")) << "the actor's first pod gives work out";
  const auto of_actor = pod_environment(job, {});
  EXPECT_EQ(of_actor.at("NNODES"), "2");
  EXPECT_EQ(of_actor.at("TRIREME_CRITIC_RANKS"), "12");
  EXPECT_FALSE(of_actor.count("TRIREME_ACTOR_RANKS"));
  EXPECT_FALSE(pod_environment(job, {.role = "generation"}).count("TRIREME_CRITIC_RANKS"));
  EXPECT_FALSE(pod_environment(parse_rljob(job_yaml(), "f"), {}).count("TRIREME_CRITIC_RANKS"));
  EXPECT_THAT(role_command(job, "critic", "/c.yaml"),
              ElementsAre("trireme", "launch", "--nproc-per-node", "4", "--", "train", "--algorithm", "ppo", "--config",
                          "c.yaml", "--layout", "tp=1,cp=1,ep=1,dp=12,pp=1,etp=1", "cluster.num_nodes=2",
                          "cluster.gpus_per_node=8", "ppo.seed=1"));
  job.spec.roles.critic->parallelism.tp = 2;
  EXPECT_EQ(parse_layout(pod_environment(job, place).at("TRIREME_LAYOUT")), (Layout{.tp = 2, .dp = 6}));
  EXPECT_THAT(role_command(job, "critic", "/c.yaml"), testing::Contains("tp=2,cp=1,ep=1,dp=6,pp=1,etp=1"));
  job.spec.roles.critic->replicas = 1;
  EXPECT_FALSE(pod_environment(job, place).count("NCCL_NET")) << "its ranks share a pod, and talk by NCCL to no other";
  job.spec.roles.critic.reset();
  EXPECT_THROW(pod_environment(job, place), Error);
}

TEST(Trainer, WhatInitContainersRunIsNoRankOfTheJob) {
  const RLJob job = parse_rljob(job_yaml("  algorithm: PPO\n  roles: {actor: {}, critic: {}, generation: {}}\n"), "f");
  for (const char* role : {"actor", "critic"}) {
    const auto env = init_environment(pod_environment(job, {.role = role}));
    for (const char* name : {"TRIREME_CRITIC_RANKS", "TRIREME_ACTOR_RANKS", "TRIREME_WORK_PORT"})
      EXPECT_FALSE(env.count(name)) << role << " " << name;
    EXPECT_EQ(env.at("TRIREME_ROLE"), role);
    EXPECT_EQ(env.at("NODE_RANK"), "0");
  }
}

TEST(Names, AreStablePerAttempt) {
  EXPECT_EQ(pod_hostname("j", "actor", 2), "j-actor-2");
  EXPECT_EQ(pod_name("j", "actor", 2, 5), "j-actor-2-a5");
  EXPECT_EQ(pod_name("j", "reward", 2, 5, 3), "j-reward-2-a5-i3");
  EXPECT_EQ(attempt_service_name("j", 5), "j-a5");
  EXPECT_EQ(pod_address("j", "actor", 0, 5), "j-actor-0.j-a5");
}

TEST(TopologyDocument, RanksOfEveryPodAndGroups) {
  const RLJob job =
      parse_rljob(job_yaml("  roles: {actor: {replicas: 2, processesPerPod: 4, parallelism: {tp: 2, pp: 2}}}\n"), "f");
  const Json document = topology_document(job, 2, {"h0", "h1"});
  EXPECT_EQ(document["worldSize"], 8);
  EXPECT_EQ(document["attempt"], 2);
  EXPECT_EQ(document["layout"]["dp"], 2);
  EXPECT_EQ(document["nodes"][1].dump(), R"({"host":"h1","index":1,"ranks":[4,7],"role":"actor"})");
  EXPECT_EQ(document["groups"]["tp"].dump(), "[[0,1],[2,3],[4,5],[6,7]]");
  EXPECT_EQ(document["groups"]["pp"].dump(), "[[0,4],[1,5],[2,6],[3,7]]");
  EXPECT_FALSE(document["groups"].contains("cp"));
  EXPECT_EQ(document["roles"].dump(), R"([{"name":"actor","processesPerPod":4,"replicas":2}])");
  const RLJob roles =
      parse_rljob(job_yaml("  roles: {actor: {}, critic: {replicas: 2, processesPerPod: 4}, "
                           "generation: {replicas: 3, gpusPerPod: 1}, reward: {replicas: 2, port: 80}}\n"),
                  "f");
  EXPECT_EQ(topology_document(roles, 2, {"h0"}, {"c0", "c1"})["nodes"].dump(),
            R"([{"host":"h0","index":0,"ranks":[0,0],"role":"actor"},)"
            R"({"host":"c0","index":0,"ranks":[1,4],"role":"critic"},)"
            R"({"host":"c1","index":1,"ranks":[5,8],"role":"critic"}])")
      << "behind the actor's";
  EXPECT_EQ(topology_document(roles, 2, {"h0"})["roles"].dump(),
            R"([{"name":"actor","processesPerPod":1,"replicas":1},)"
            R"({"name":"critic","processesPerPod":4,"replicas":2},)"
            R"({"name":"generation","processesPerPod":1,"replicas":3},)"
            R"({"name":"reward","processesPerPod":1,"replicas":2}])");
  const RLJob split = parse_rljob(job_yaml("  roles: {actor: {parallelism: {tp: 2}, processesPerPod: 2}, generation: "
                                           "{processesPerPod: 4, parallelism: {tp: 4, ep: 2}}}\n"),
                                  "f");
  const Json of_engines = topology_document(split, 2, {"h0"});
  EXPECT_EQ(of_engines["roles"].dump(),
            R"([{"name":"actor","processesPerPod":2,"replicas":1},)"
            R"({"engine":{"ep":2,"tp":4},"name":"generation","processesPerPod":4,"replicas":1}])");
  RLJob by_configuration = split;
  by_configuration.spec.roles.generation->parallelism.ep = 1;
  EXPECT_EQ(topology_document(by_configuration, 2, {"h0"})["roles"][1]["engine"].dump(), R"({"tp":4})");
  EXPECT_NO_THROW(check_topology_document(of_engines, "t.json", {.world = 2, .layout = {.tp = 2}}))
      << "the actor's ranks look at their own";
}

TEST(PodView, SeesWhatTheLocalRunnerNeeds) {
  const RLJob job = parse_rljob(job_yaml(R"(  image: ours
  roles:
    actor:
      template:
        spec:
          initContainers: [{name: data, image: other, command: [trireme, x], )"
                                         R"(args: [--y], workingDir: /w}, {name: second}]
          containers:
            - name: trainer
              env: [{name: A, value: "1"}, {name: B, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
              volumeMounts: [{name: data, mountPath: /data, subPath: s, readOnly: true}]
          volumes: [{name: data, persistentVolumeClaim: {claimName: c}}, {name: tmp, emptyDir: {}}, )"
                                         R"({name: cfg, configMap: {name: m}},
                    {name: sec, secret: {secretName: n}}, {name: host, hostPath: {path: /h}}, {name: nfs, nfs: {}}]
)"),
                                "f");
  EXPECT_EQ(to_string(validate(job).errors), "");
  const PodView view = pod_view(job.spec, *job.spec.roles.actor);
  ASSERT_EQ(view.init_containers.size(), 2u);
  EXPECT_THAT(view.init_containers[0].command, ElementsAre("trireme", "x"));
  EXPECT_THAT(view.init_containers[0].args, ElementsAre("--y"));
  EXPECT_EQ(view.init_containers[0].working_dir, "/w");
  EXPECT_EQ(view.init_containers[0].image, "other");
  EXPECT_EQ(view.init_containers[1].image, "ours");
  const ContainerView* trainer = view.container(kTrainerContainer);
  ASSERT_NE(trainer, nullptr);
  EXPECT_THAT(trainer->env, ElementsAre(testing::Pair("A", "1")));
  EXPECT_THAT(trainer->env_from_cluster, ElementsAre("B"));
  ASSERT_EQ(trainer->mounts.size(), 1u);
  EXPECT_EQ(trainer->mounts[0].path, "/data");
  EXPECT_EQ(trainer->mounts[0].sub_path, "s");
  EXPECT_TRUE(trainer->mounts[0].read_only);
  std::vector<std::pair<VolumeKind, std::string>> volumes;
  for (const VolumeView& volume : view.volumes) volumes.emplace_back(volume.kind, volume.source);
  using testing::Pair;
  EXPECT_THAT(volumes, ElementsAre(Pair(VolumeKind::kClaim, "c"), Pair(VolumeKind::kEmptyDir, ""),
                                   Pair(VolumeKind::kConfigMap, "m"), Pair(VolumeKind::kSecret, "n"),
                                   Pair(VolumeKind::kHostPath, "/h"), Pair(VolumeKind::kOther, "")));
  // No template: the trainer's container is there anyway.
  const PodView empty = pod_view(job.spec, RoleSpec{});
  ASSERT_EQ(empty.containers.size(), 1u);
  EXPECT_EQ(empty.containers[0].name, kTrainerContainer);
  EXPECT_EQ(empty.container("other"), nullptr);
}

TEST(PodView, ToleratesNonsense) {
  for (const char* text :
       {"1", "[]", "{}", R"({"spec":1})", R"({"spec":{"containers":1,"volumes":{},"initContainers":[1,null,[]]}})",
        R"({"spec":{"containers":[{"name":1,"env":[1,{"name":2}],"volumeMounts":[[]],"command":["a",1]}]}})"}) {
    RoleSpec role;
    role.pod_template = Json::parse(text);
    EXPECT_NE(pod_view({}, role).container(kTrainerContainer), nullptr) << text;
  }
}

TEST(Examples, AllAreAccepted) {
  size_t accepted = 0;
  for (const auto& entry : std::filesystem::directory_iterator(test::source_dir() / "examples")) {
    const std::string name = entry.path().filename().string();
    if (!ends_with(name, ".rljob.yaml")) continue;
    const RLJob job = parse_rljob(read_file(entry.path()), name);
    EXPECT_EQ(to_string(validate(job).errors), "") << name;
    ++accepted;
    // A recipe that an example names is one of ours.
    if (!job.spec.config.path.empty()) {
      EXPECT_TRUE(std::filesystem::exists(test::source_dir() / job.spec.config.path))
          << name << " " << job.spec.config.path;
    }
  }
  EXPECT_EQ(accepted, 12u);
  for (const Issue& warning : validate(parse_rljob(read_example("ppo-critic.rljob.yaml"), "f")).warnings)
    EXPECT_THAT(warning.message, testing::HasSubstr("ReadWriteMany"));
  const RLJob moe = parse_rljob(read_example("experts-ep8.rljob.yaml"), "f");
  EXPECT_EQ(layout_of(*moe.spec.roles.actor), (Layout{.tp = 2, .ep = 8, .dp = 32}));
  const RLJob context = parse_rljob(read_example("context-parallel-16k.rljob.yaml"), "f");
  EXPECT_EQ(layout_of(*context.spec.roles.actor), (Layout{.tp = 4, .cp = 2, .dp = 4, .pp = 4}));
  const RLJob engines = parse_rljob(read_example("dedicated-generation-tp.rljob.yaml"), "f");
  EXPECT_EQ(layout_of(*engines.spec.roles.actor), (Layout{.tp = 4, .dp = 4, .pp = 2}));
  EXPECT_EQ(layout_of(*engines.spec.roles.generation), (Layout{.tp = 4, .dp = 4})) << "two pods of two engines";
  // CP stays inside a node: the only warning is about the claims that sixteen pods share.
  for (const Issue& warning : validate(context).warnings)
    EXPECT_THAT(warning.message, testing::HasSubstr("ReadWriteMany"));
}

TEST(Topology, ARankComparesTheDocumentWithWhatItWasGiven) {
  const RLJob job = parse_rljob(read_example("eight-nodes-tp4-pp4.rljob.yaml"), "f");
  std::vector<std::string> hosts;
  for (int i = 0; i < 8; ++i) hosts.push_back("h" + std::to_string(i));
  const Json document = topology_document(job, 3, hosts);
  const RankPlace place{.rank = 13, .world = 64, .attempt = 3, .node_rank = 1, .layout = layout_of(actor_of(job.spec))};
  EXPECT_NO_THROW(check_topology_document(document, "t.json", place));
  EXPECT_NO_THROW(check_topology_document(document, "t.json", {.rank = 13, .world = 64, .layout = place.layout}));
  const auto error = [&](const Json& other, const RankPlace& mine) -> std::string {
    try {
      check_topology_document(other, "t.json", mine);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  };
  RankPlace mine = place;
  mine.attempt = 2;
  EXPECT_THAT(error(document, mine), testing::StartsWith("t.json says attempt 3, but this rank was started with 2"));
  mine = place;
  mine.world = 32;
  EXPECT_THAT(error(document, mine), testing::HasSubstr("worldSize 64, but this rank was started with 32"));
  mine = place;
  mine.layout.tp = 8;
  mine.layout.dp = 2;
  EXPECT_THAT(error(document, mine), testing::HasSubstr("layout tp=4"));
  mine = place;
  mine.node_rank = 4;
  EXPECT_THAT(error(document, mine), testing::HasSubstr("rank 13 lies in pod 1"));
  Json changed = document;
  changed["nodes"].push_back({{"index", 0}, {"role", "critic"}, {"host", "c0"}, {"ranks", {13, 13}}});
  EXPECT_EQ(error(changed, place), "") << "pods of other roles are none of its";
  changed = document;
  changed["groups"]["tp"][0][0] = 1;
  EXPECT_THAT(error(changed, place), testing::HasSubstr("other tp groups"));
  changed = document;
  changed["nodes"].erase(1);
  EXPECT_EQ(error(changed, place), "t.json names no pod for rank 13");
  changed.erase("nodes");
  EXPECT_THAT(error(changed, place), testing::HasSubstr("is not a topology document"));
  EXPECT_THAT(error(Json::parse("[", nullptr, false), place), testing::HasSubstr("is not a topology document"));
}

}  // namespace
}  // namespace trireme
