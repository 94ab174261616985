#include "api/validate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "api/runtime.h"
#include "tests/unit/api/helpers.h"

namespace trireme {
namespace {

using test::job_yaml;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// "path: message" of the errors, one per line; empty if the job is accepted.
std::string errors_of(const std::string& spec, const std::string& name = "job") {
  return to_string(validate(parse_rljob(job_yaml(spec, name), "f")).errors);
}
std::string warnings_of(const std::string& spec) {
  return to_string(validate(parse_rljob(job_yaml(spec), "f")).warnings);
}

std::string actor(const std::string& fields) { return "  roles: {actor: {" + fields + "}}\n"; }

TEST(Validate, AcceptsADefaultJob) {
  EXPECT_EQ(errors_of(""), "");
  EXPECT_EQ(warnings_of(""), "");
}

TEST(Validate, SpecificationsHaveABound) {
  RLJob job = parse_rljob(job_yaml(), "f");
  Json& note = job.spec.roles.actor->pod_template["metadata"]["annotations"]["a"];
  note = "";
  const size_t rest = to_json(job)["spec"].dump().size();
  note = std::string((256 << 10) - rest, 'x');
  EXPECT_EQ(to_string(validate(job).errors), "");
  note = std::string((256 << 10) - rest + 1, 'x');
  EXPECT_EQ(to_string(validate(job).errors),
            "spec: is 262145 bytes long as JSON; at most 262144 are allowed; put files and long lists into the image, "
            "a volume or a ConfigMap");
  note = "";
  Json& list = job.spec.roles.actor->pod_template["spec"]["tolerations"];
  list = std::vector<int>(39000, 0);
  EXPECT_EQ(to_string(validate(job).errors), "");
  list = std::vector<int>(40000, 0);
  EXPECT_THAT(to_string(validate(job).errors), HasSubstr("values and keys; at most 40000 are allowed"));
}

TEST(Validate, MistakesInATemplateAreBounded) {
  RLJob job = parse_rljob(job_yaml(), "f");
  Json containers = Json::array();
  for (int i = 0; i < 250; ++i)
    containers.push_back({{"name", "c" + std::to_string(i)}, {"env", {Json::object(), Json::object()}}});
  job.spec.roles.actor->pod_template = {{"spec", {{"containers", containers}}}};
  const std::vector<Issue> errors = validate(job).errors;
  EXPECT_EQ(errors.size(), 201u);
  EXPECT_EQ(to_string({errors.at(200)}), "spec.roles.actor.template: and 300 more errors in this template");
}

TEST(Validate, Names) {
  EXPECT_EQ(errors_of("", std::string(40, 'a')), "");
  EXPECT_THAT(errors_of("", std::string(41, 'a')), HasSubstr("metadata.name: is 41 characters long; at most 40"));
  for (const char* bad : {"Upper", "1digit", "under_score", "dot.ted", "end-", "\"sp ace\"", "\"\""}) {
    EXPECT_THAT(errors_of("", bad), HasSubstr("metadata.name")) << bad;
  }
  EXPECT_LE(pod_name(std::string(40, 'a'), "generation", 4095, 999).size(), 63u);
  EXPECT_LE(topology_config_map_name(std::string(40, 'a'), 999).size(), 63u);
}

TEST(Validate, LayoutsAreRefusedWithTheLegalOnesNamed) {
  EXPECT_EQ(errors_of(actor("replicas: 3, gpusPerPod: 8, parallelism: {tp: 3}")),
            "spec.roles.actor.parallelism.tp: tp 3 does not divide the 8 GPUs of a node (tensor parallel ranks must "
            "share a node); "
            "legal values of tp here: 1, 2, 4, 8");
  EXPECT_EQ(errors_of(actor("replicas: 2, gpusPerPod: 8, parallelism: {tp: 4, pp: 8}")),
            "spec.roles.actor.parallelism: tp 4 x cp 1 x pp 8 = 32 does not divide the 16 ranks; with the others as "
            "they are, tp can "
            "be 1, 2, or pp can be 1, 2, 4");
  EXPECT_EQ(errors_of(actor("replicas: 2, gpusPerPod: 8, parallelism: {dp: 4}")),
            "spec.roles.actor.parallelism.dp: dp 4 gives 4 ranks, not 16; dp must be 16");
  // The model is known by its name: in the RLJob, or in the inline configuration.
  EXPECT_THAT(errors_of(actor("replicas: 1, gpusPerPod: 8, parallelism: {tp: 8}") +
                        "  model: {source: Qwen/Qwen2.5-0.5B-Instruct}\n"),
              HasSubstr("tp 8 does not divide the 14 attention heads; legal values of tp here: 1, 2"));
  EXPECT_THAT(errors_of(actor("replicas: 3, gpusPerPod: 8, parallelism: {pp: 3}") +
                        "  config: {inline: {policy: {model_name: meta-llama/Llama-3.1-8B}}}\n"),
              HasSubstr("pp 3 does not divide the 32 layers; legal values of pp here: 1, 2, 4, 8"));
  EXPECT_THAT(errors_of(actor("replicas: 1, gpusPerPod: 8, parallelism: {ep: 8}") + "  model: {source: Qwen3-8B}\n"),
              HasSubstr("without experts"));
  EXPECT_THAT(warnings_of(actor("replicas: 2, gpusPerPod: 8, parallelism: {tp: 4, cp: 4}")),
              HasSubstr("spans nodes of 8 GPUs"));
  EXPECT_THAT(errors_of(actor("gpusPerPod: 8, processesPerPod: 4")),
              HasSubstr("processesPerPod: is 4, but a pod has 8 GPUs"));
}

// Of 94 layers in eight stages; `config` is the RLJob's.
std::string in_stages(const std::string& config, const std::string& pp = "8") {
  return errors_of(actor("replicas: 8, gpusPerPod: 8, parallelism: {tp: 2, pp: " + pp + "}") +
                   "  model: {source: Qwen/Qwen3-235B-A22B}\n  config: " + config + "\n");
}
std::string in_megatron_stages(const std::string& keys, const std::string& pp = "8") {
  return in_stages("{inline: {policy: {megatron_cfg: {" + keys + "}}}}", pp);
}
const char* const kUneven =
    "spec.roles.actor.parallelism.pp: pp 8 does not divide the 94 layers; legal values of pp here: 1, 2";
const std::string kFirst = "num_layers_in_first_pipeline_stage", kLast = "num_layers_in_last_pipeline_stage";

TEST(Validate, StagesMayBeUnevenWhereTheConfigurationSaysSo) {
  EXPECT_EQ(in_megatron_stages("enabled: true, " + kFirst + ": 11, " + kLast + ": 11"), "");
  EXPECT_EQ(in_stages("{inline: {policy: {megatron_cfg: {enabled: true}}}, overrides: [policy.megatron_cfg." + kFirst +
                      "=11, ++policy.megatron_cfg." + kLast + "=11]}"),
            "");
  EXPECT_EQ(in_stages("{inline: {}}"), kUneven);
  EXPECT_EQ(in_megatron_stages("enabled: true, " + kFirst + ": null, virtual_pipeline_model_parallel_size: null"),
            kUneven);
  // Keys of a back-end that is off mean nothing.
  EXPECT_EQ(in_megatron_stages(kFirst + ": 11, " + kLast + ": 11"), kUneven);
  EXPECT_EQ(in_megatron_stages("enabled: false, " + kFirst + ": 11, " + kLast + ": 11"), kUneven);
  EXPECT_EQ(in_stages("{path: a, overrides: [policy.megatron_cfg.enabled=false]}"), kUneven);
  EXPECT_THAT(in_megatron_stages("enabled: true, " + kFirst + ": 11, " + kLast + ": 12"),
              HasSubstr("spec.roles.actor.parallelism.pp: policy.megatron_cfg.num_layers_in_first_pipeline_stage 11 "
                        "and policy.megatron_cfg.num_layers_in_last_pipeline_stage 12 leave 71 layers for the 6 other "
                        "stages of pp 8; with the others as they are, pp can be 3, 73, or policy.megatron_cfg.num_"));
  EXPECT_THAT(in_megatron_stages("enabled: true, virtual_pipeline_model_parallel_size: 2", "2"),
              HasSubstr("spec.roles.actor.parallelism.pp: policy.megatron_cfg.virtual_pipeline_model_parallel_size 2 "
                        "does not divide the 47 layers of stage 0; with"));
}

// The trainer sees all of it.
TEST(Validate, LayersAreNotJudgedWhereTheConfigurationIsElsewhere) {
  EXPECT_EQ(in_stages("{path: a}"), "");
  EXPECT_EQ(in_stages("{configMapRef: {name: a}}"), "");
  EXPECT_EQ(in_stages("{inline: {defaults: base.yaml}}"), "");
  EXPECT_EQ(in_stages("{path: a, overrides: [policy.megatron_cfg.enabled=true, policy.megatron_cfg." + kFirst + "=9]}"),
            "");
  EXPECT_EQ(in_stages("{inline: {}, overrides: [\"policy.megatron_cfg={enabled: true, " + kFirst + ": 24}\"]}"), "");
  EXPECT_EQ(in_stages("{inline: {policy: {megatron_cfg: \"${shared.megatron}\"}}}"), "");
  EXPECT_EQ(in_megatron_stages("enabled: \"${a.b}\""), "");
  EXPECT_EQ(in_megatron_stages("enabled: true, " + kFirst + ": \"${a.b}\""), "");
  // All else that the shape says is.
  EXPECT_THAT(errors_of(actor("gpusPerPod: 8, parallelism: {tp: 8}") +
                        "  model: {source: Qwen/Qwen3-235B-A22B}\n  config: {path: a}\n"),
              HasSubstr("tp 8 does not divide the 4 key/value heads"));
}

TEST(Validate, LegalLayoutsAreAcceptedOnCpusAndGpus) {
  EXPECT_EQ(errors_of(actor("replicas: 8, gpusPerPod: 8, parallelism: {tp: 4, pp: 4}")), "");
  EXPECT_EQ(errors_of(actor("replicas: 2, gpusPerPod: 8, parallelism: {cp: 2}")), "");
  EXPECT_EQ(errors_of(actor("replicas: 2, processesPerPod: 2, parallelism: {cp: 2}")), "");
  EXPECT_EQ(errors_of(actor("replicas: 2, processesPerPod: 2, parallelism: {tp: 2}")), "");  // on CPUs
  EXPECT_EQ(errors_of(actor("replicas: 2, processesPerPod: 2, parallelism: {pp: 2, tp: 2}")), "");
  EXPECT_EQ(errors_of(actor("gpusPerPod: 8, parallelism: {ep: 8, etp: 1}")), "");
  EXPECT_EQ(errors_of(actor("gpusPerPod: 8, parallelism: {ep: 4, etp: 2}")), "");
  EXPECT_EQ(errors_of(actor("replicas: 2, processesPerPod: 2, parallelism: {ep: 4}")), "");
  EXPECT_EQ(errors_of(actor("replicas: 2, processesPerPod: 4, parallelism: {ep: 4, tp: 2, cp: 2}")), "");
  EXPECT_EQ(errors_of(actor("replicas: 2, processesPerPod: 4, parallelism: {ep: 2, tp: 2, pp: 2}")), "");
  EXPECT_EQ(errors_of(actor("gpusPerPod: 8, parallelism: {ep: 2, pp: 2}")), "");
  EXPECT_EQ(errors_of(actor("replicas: 2, processesPerPod: 2, parallelism: {etp: 2}")), "");
  EXPECT_EQ(errors_of(actor("replicas: 8, gpusPerPod: 8, parallelism: {dp: 64}")), "");
}

TEST(Validate, ExpertParallelRanksHoldWholeBlocksOfExperts) {
  const auto with_blocks = [](const std::string& blocks) {
    return errors_of(
        actor("processesPerPod: 4, parallelism: {ep: 4}") +
        "  model: {source: Qwen/Qwen3-30B-A3B}\n  config: {inline: {policy: {moe_combine_blocks: " + blocks + "}}}\n");
  };
  EXPECT_EQ(with_blocks("0"), "");
  EXPECT_EQ(with_blocks("16"), "");
  EXPECT_THAT(with_blocks("2"), HasSubstr("spec.roles.actor.parallelism.ep: ep 4 does not divide the 2 blocks"));
  EXPECT_THAT(with_blocks("3"), HasSubstr("policy.moe_combine_blocks is 3, which does not divide the model's 128"));
}

std::string with_critic(const std::string& fields, const std::string& config = "{path: a}") {
  return "  algorithm: PPO\n  roles: {actor: {}, critic: {" + fields + "}}\n  config: " + config + "\n";
}

TEST(Validate, CriticPods) {
  EXPECT_EQ(errors_of("  algorithm: PPO\n"), "");  // the actor's pods hold the critic
  EXPECT_EQ(errors_of(with_critic("")), "");
  EXPECT_EQ(errors_of(with_critic("replicas: 2, gpusPerPod: 8")), "");
  EXPECT_EQ(errors_of(with_critic("replicas: 3, processesPerPod: 2, parallelism: {dp: 6}")), "");
  EXPECT_EQ(errors_of("  roles: {actor: {}, critic: {}}\n"), "spec.roles.critic: is for algorithm PPO only, not GRPO");
  EXPECT_EQ(errors_of("  algorithm: SFT\n  roles: {actor: {}, critic: {}}\n"),
            "spec.roles.critic: is for algorithm PPO only, not SFT");
  for (const char* axis : {"tp", "cp", "ep", "pp", "etp"}) {
    EXPECT_EQ(errors_of(with_critic("replicas: 2, gpusPerPod: 8, parallelism: {" + std::string(axis) + ": 2}")), "")
        << axis;
  }
  EXPECT_THAT(errors_of(with_critic("gpusPerPod: 8, parallelism: {tp: 3}")),
              HasSubstr("spec.roles.critic.parallelism.tp: tp 3 does not divide the 8 GPUs of a node"));
  EXPECT_THAT(errors_of(with_critic("replicas: 2, parallelism: {dp: 3}")),
              HasSubstr("spec.roles.critic.parallelism.dp: dp 3 gives 3 ranks, not 2"));
  EXPECT_THAT(errors_of(with_critic("gpusPerPod: 8, processesPerPod: 4")),
              HasSubstr("spec.roles.critic.processesPerPod: is 4, but a pod has 8 GPUs"));
  // Its batch is shared by its own ranks.
  const std::string three = "replicas: 3", own = "{path: a, overrides: [value.train_global_batch_size=";
  EXPECT_EQ(errors_of(with_critic(three, own + "12]}")), "");
  EXPECT_EQ(
      errors_of(with_critic(three, own + "16]}")),
      "spec.config.overrides[0]: is 16, which the 3 data parallel ranks of spec.roles.critic cannot share evenly: "
      "set value.train_global_batch_size to a multiple");
  EXPECT_EQ(errors_of(with_critic("replicas: 3, processesPerPod: 2, parallelism: {tp: 2}", own + "12]}")), "");
  const std::string policys = "policy: {model_name: m, train_global_batch_size: 16}";
  EXPECT_THAT(errors_of(with_critic(three, "{inline: {" + policys + "}}")),
              HasSubstr("spec.config.inline.policy.train_global_batch_size: is 16, which the 3 data parallel ranks"));
  EXPECT_EQ(errors_of(with_critic(three, "{inline: {" + policys + ", value: {train_global_batch_size: 9}}}")), "");
  EXPECT_EQ(errors_of(with_critic(three, "{path: a, overrides: [policy.train_global_batch_size=16]}")), "")
      << "the file may say another";
  EXPECT_THAT(errors_of(with_critic("port: 80")), HasSubstr("spec.roles.critic.port: is for the reward role"));
  EXPECT_THAT(errors_of(with_critic("minReplicas: 1")),
              HasSubstr("spec.roles.critic.minReplicas: is for the generation role"));
  EXPECT_THAT(errors_of("  roles: {}\n"), HasSubstr("spec.roles.actor: is missing"));
}

TEST(Validate, ACriticWithoutValuesIsRefused) {
  const std::string sentence =
      ": ppo.adv_estimator.name is raw_reward, which has no critic: leave spec.roles.critic out";
  EXPECT_EQ(errors_of(with_critic("", "{inline: {ppo: {adv_estimator: {name: raw_reward}}}}")),
            "spec.config.inline.ppo.adv_estimator.name" + sentence);
  EXPECT_EQ(errors_of(with_critic("", "{path: a, overrides: [ppo.adv_estimator.name=raw_reward]}")),
            "spec.config.overrides[0]" + sentence);
  EXPECT_EQ(errors_of(with_critic("",
                                  "{inline: {ppo: {adv_estimator: {name: raw_reward}}}, overrides: "
                                  "[ppo.adv_estimator.name=gae]}")),
            "");
}

TEST(Validate, ACriticWhoseCheckpointsWouldGoWithItsPodsIsAWarning) {
  const auto template_of = [](const std::string& claim, const std::string& path) {
    return "template: {spec: {containers: [{name: trainer, volumeMounts: [{name: v, mountPath: " + path +
           "}]}], volumes: [{name: v, persistentVolumeClaim: {claimName: " + claim + "}}]}}";
  };
  const auto warned = [&](const std::string& critic, const std::string& more = "  checkpoint: {directory: /runs/x}\n") {
    return warnings_of("  algorithm: PPO\n  roles: {actor: {" + template_of("runs", "/runs") + "}, critic: {" + critic +
                       "}}\n" + more);
  };
  const std::string sentence =
      "spec.roles.critic.template: does not mount the volume \"runs\" at \"/runs/x\", where the actor's pods have "
      "their checkpoints: the critic's would go with its pods, and a restart would find none";
  EXPECT_EQ(warned(""), sentence);
  EXPECT_EQ(warned(template_of("runs", "/other")).substr(0, sentence.size()), sentence);
  EXPECT_EQ(warned(template_of("others", "/runs")), sentence);
  EXPECT_THAT(warned(template_of("runs", "/runs/")), Not(HasSubstr("does not mount")));
  EXPECT_THAT(warned(template_of("runs", "/runs/")),
              HasSubstr("spec.roles.actor.template.spec.volumes: the claim \"runs\" is used by 2 pods"));
  EXPECT_EQ(warned("", "  checkpoint: {directory: /elsewhere}\n"), "");
  EXPECT_EQ(warned("", "  config: {path: a, overrides: [checkpointing.checkpoint_dir=/runs/x]}\n"), sentence);
}

TEST(Validate, SizesLiveInTheRLJob) {
  const std::string head = actor("replicas: 2, gpusPerPod: 8");
  const auto with = [&](const std::string& config) { return errors_of(head + "  config: {inline: " + config + "}\n"); };
  EXPECT_EQ(with("{policy: {megatron_cfg: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1}}, cluster: "
                 "{num_nodes: 2, gpus_per_node: 8}}"),
            "");
  EXPECT_EQ(with("{policy: {megatron_cfg: {tensor_model_parallel_size: 4}}}"),
            "spec.config.inline.policy.megatron_cfg.tensor_model_parallel_size: is 4, but "
            "spec.roles.actor.parallelism.tp is 1; the RLJob "
            "decides sizes: leave the key out");
  for (const char* key : {"pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
                          "expert_tensor_parallel_size"}) {
    EXPECT_THAT(with(std::string("{policy: {megatron_cfg: {") + key + ": 2}}}"),
                HasSubstr(std::string(key) + ": is 2, but spec.roles.actor.parallelism."))
        << key;
  }
  EXPECT_THAT(with("{policy: {dtensor_cfg: {tensor_parallel_size: 2}}}"), HasSubstr("tensor_parallel_size: is 2"));
  EXPECT_THAT(with("{policy: {dtensor_cfg: {expert_parallel_size: 2}}}"),
              HasSubstr("expert_parallel_size: is 2, but spec.roles.actor.parallelism.ep is 1"));
  EXPECT_EQ(with("{policy: {dtensor_cfg: {enabled: false, tensor_parallel_size: 2}}}"), "");  // a back-end that is off
  EXPECT_THAT(with("{cluster: {num_nodes: 1}}"), HasSubstr("but spec.roles.actor.replicas is 2"));
  EXPECT_THAT(with("{cluster: {gpus_per_node: 4}}"), HasSubstr("is 4, but the processes of an actor pod is 8"));
  EXPECT_THAT(
      errors_of(head + "  config: {path: a, overrides: [cluster.num_nodes=4]}\n"),
      HasSubstr("spec.config.overrides[0]: \"cluster.num_nodes=4\" contradicts spec.roles.actor.replicas, which is 2"));
  EXPECT_EQ(errors_of(head + "  config: {path: a, overrides: [cluster.num_nodes=2, grpo.seed=1]}\n"), "");
  EXPECT_THAT(errors_of(head + "  config: {path: a, overrides: [nonsense]}\n"),
              HasSubstr("must have the form key.sub=value"));
  EXPECT_THAT(errors_of("  model: {source: /a}\n  config: {inline: {policy: {model_name: /b}}}\n"),
              HasSubstr("leave one of them out"));
  EXPECT_THAT(errors_of("  algorithm: SFT\n  config: {inline: {algorithm: grpo}}\n"),
              HasSubstr("but spec.algorithm is \"sft\""));
  EXPECT_EQ(errors_of("  config: {inline: {algorithm: grpo}}\n"), "");
  EXPECT_THAT(errors_of("  checkpoint: {directory: /a}\n  config: {inline: {checkpointing: {checkpoint_dir: /b}}}\n"),
              HasSubstr("spec.checkpoint.directory"));
}

TEST(Validate, ConfigComesFromExactlyOnePlace) {
  EXPECT_EQ(errors_of("  config: {}\n"), "spec.config: needs one of inline, configMapRef, path");
  EXPECT_EQ(errors_of("  config: {inline: {}, path: a}\n"),
            "spec.config: may have only one of inline, configMapRef, path");
  EXPECT_EQ(errors_of("  config: {configMapRef: {name: c}}\n"), "");
  EXPECT_THAT(errors_of("  config: {configMapRef: {name: C!}}\n"), HasSubstr("is not an object name"));
}

std::string with_pod(const std::string& pod) {
  return errors_of(actor("gpusPerPod: 8, template: {spec: " + pod + "}"));
}

TEST(Validate, PodTemplates) {
  EXPECT_EQ(with_pod("{containers: [{name: trainer, env: [{name: A, value: b}]}], nodeSelector: {a: b}}"), "");
  for (const char* name : {"MASTER_ADDR", "RANK", "WORLD_SIZE", "PET_NNODES", "TRIREME_JOB"}) {
    EXPECT_THAT(with_pod(std::string("{containers: [{name: trainer, env: [{name: ") + name + ", value: x}]}]}"),
                HasSubstr("template.spec.containers[0].env[0]: \"" + std::string(name) + "\" is set by Trireme"))
        << name;
  }
  EXPECT_THAT(with_pod("{containers: [{name: trainer, env: [{name: A, value: 1}]}]}"),
              HasSubstr("env[0].value: must be a string"));
  EXPECT_THAT(with_pod("{restartPolicy: Always}"), HasSubstr("must be Never"));
  EXPECT_THAT(with_pod("{hostname: x}"), HasSubstr("template.spec.hostname: is set by the operator"));
  EXPECT_THAT(with_pod("{hostNetwork: true}"), HasSubstr("spec.network.hostNetwork"));
  EXPECT_THAT(with_pod("{containers: {}}"), HasSubstr("containers: must be a list"));
  EXPECT_THAT(with_pod("{containers: [{name: a}, {name: a}]}"), HasSubstr("containers[1].name: \"a\" appears twice"));
  std::string many = "{name: v0}";
  for (int i = 1; i < 256; ++i) many += ", {name: v" + std::to_string(i) + "}";
  EXPECT_EQ(with_pod("{volumes: [" + many + "]}"), "");
  EXPECT_THAT(with_pod("{volumes: [" + many + ", {name: last}]}"), HasSubstr("volumes: has more than 256 entries"));
  EXPECT_THAT(with_pod("{containers: [{name: trainer, volumeMounts: [{name: d, mountPath: /d}]}]}"),
              HasSubstr("there is no volume \"d\""));
  EXPECT_THAT(
      with_pod("{containers: [{name: trainer, volumeMounts: [{name: d, mountPath: d}]}], volumes: [{name: d}]}"),
      HasSubstr("absolute path"));
  EXPECT_THAT(with_pod("{containers: [{name: trainer, resources: {limits: {nvidia.com/gpu: 4}}}]}"),
              HasSubstr("but gpusPerPod is 8"));
  EXPECT_EQ(with_pod("{containers: [{name: trainer, resources: {limits: {nvidia.com/gpu: \"8\"}}}]}"), "");
  EXPECT_THAT(with_pod("{containers: [{name: trainer, command: trireme}]}"),
              HasSubstr("command: must be a list of strings"));
  EXPECT_THAT(errors_of(actor("template: {metadata: {labels: {trireme.dev/job: x}}}")),
              HasSubstr("names under trireme.dev/ are reserved"));
  EXPECT_THAT(errors_of(actor("template: {spce: {}}")), HasSubstr("a pod template has metadata and spec"));
  EXPECT_THAT(warnings_of(actor(
                  "replicas: 2, template: {spec: {volumes: [{name: d, persistentVolumeClaim: {claimName: c}}]}}")),
              HasSubstr("ReadWriteMany"));
}

// NCCL_NET of a template counts before the operator's, so that it could undo spec.network.rdma.require.
TEST(Validate, NoTemplateNamesSocketsWhereRdmaIsRequired) {
  const auto job = [](const std::string& rdma, const std::string& algorithm, const std::string& roles) {
    return errors_of("  algorithm: " + algorithm + "\n  network: {rdma: {resourceName: rdma/ib" + rdma +
                     "}}\n  roles: {" + roles + "}\n");
  };
  const auto role = [](const std::string& fields, const std::string& network, const std::string& main = "trainer") {
    return "{" + fields + ", template: {spec: {containers: [{name: side, env: [{name: NCCL_NET, value: Socket}]}, " +
           "{name: " + main + ", env: [{name: A, value: b}, {name: NCCL_NET, " + network + "}]}]}}}";
  };
  const std::string whole = "{replicas: 2, gpusPerPod: 8}";
  EXPECT_EQ(job("", "GRPO", "actor: " + role("replicas: 2, gpusPerPod: 8", "value: Socket")),
            "spec.roles.actor.template.spec.containers[1].env[1].value: NCCL_NET is \"Socket\", which goes over "
            "sockets, but spec.network.rdma.require is true: leave NCCL_NET out, name the network of an RDMA plugin, "
            "or set spec.network.rdma.require to false");
  for (const char* sockets : {"value: socket", "value: FastSocket", "value: GPUDirectTCPX_v7"})
    EXPECT_THAT(job("", "GRPO", "actor: " + role("replicas: 2, gpusPerPod: 8", sockets)),
                HasSubstr("which goes over sockets"))
        << sockets;
  EXPECT_THAT(job("", "PPO", "actor: " + whole + ", critic: " + role("replicas: 2, gpusPerPod: 8", "value: Socket")),
              HasSubstr("spec.roles.critic.template.spec.containers[1].env[1].value: NCCL_NET"));
  EXPECT_THAT(job("", "GRPO", "actor: {gpusPerPod: 1}, generation: " + role("gpusPerPod: 1", "value: Socket")),
              HasSubstr("spec.roles.generation.template.spec.containers[1].env[1].value: NCCL_NET"));
  EXPECT_THAT(job("", "GRPO", "generation: {gpusPerPod: 1}, actor: " + role("gpusPerPod: 1", "value: Socket")),
              HasSubstr("spec.roles.actor.template.spec.containers[1].env[1].value: NCCL_NET"))
      << "its weights go to other pods";
  for (const char* other :
       {"value: IB", "value: UCX", "value: AWS Libfabric", "valueFrom: {configMapKeyRef: {name: c, key: k}}"})
    EXPECT_EQ(job("", "GRPO", "actor: " + role("replicas: 2, gpusPerPod: 8", other)), "") << other;
  EXPECT_EQ(job(", require: false", "GRPO", "actor: " + role("replicas: 2, gpusPerPod: 8", "value: Socket")), "");
  EXPECT_EQ(job("", "GRPO", "actor: " + role("replicas: 1, gpusPerPod: 8", "value: Socket")), "")
      << "one pod has no network to use";
  EXPECT_EQ(job("", "PPO", "actor: " + whole + ", critic: " + role("replicas: 1, gpusPerPod: 8", "value: Socket")), "")
      << "its ranks share a pod, and talk by NCCL to no other";
  EXPECT_EQ(job("", "GRPO",
                "actor: " + whole +
                    ", reward: {port: 80, template: {spec: {containers: [{name: reward, image: r, env: [{name: "
                    "NCCL_NET, value: Socket}]}]}}}"),
            "")
      << "it speaks HTTP";
}

TEST(Validate, RewardPods) {
  const auto reward = [](const std::string& fields) {
    return errors_of("  roles: {actor: {}, reward: {" + fields + "}}\n");
  };
  EXPECT_EQ(reward("port: 80, template: {spec: {containers: [{name: reward, image: r}]}}"), "");
  EXPECT_THAT(reward("template: {spec: {containers: [{name: reward, image: r}]}}"),
              HasSubstr("spec.roles.reward.port: is missing"));
  EXPECT_THAT(reward("port: 80"), HasSubstr("needs a container named reward with an image"));
  EXPECT_THAT(reward("port: 80, parallelism: {tp: 2}, template: {spec: {containers: [{name: reward, image: r}]}}"),
              HasSubstr("no meaning"));
  EXPECT_THAT(errors_of(actor("port: 80")), HasSubstr("is for the reward role"));
}

std::string generation(const std::string& fields, const std::string& more = "",
                       const std::string& colocated = "false") {
  return errors_of("  roles: {actor: {}, generation: {" + fields + "}}\n" + more +
                   "  config: {path: a, overrides: [policy.generation.colocated.enabled=" + colocated + "]}\n");
}

TEST(Validate, GenerationPods) {
  EXPECT_EQ(generation("replicas: 3, minReplicas: 2, gpusPerPod: 1"), "");
  EXPECT_EQ(generation(""), "");
  EXPECT_EQ(generation("", "  algorithm: PPO\n"), "");
  EXPECT_EQ(generation("replicas: 2, minReplicas: 3"),
            "spec.roles.generation.minReplicas: is 3, more than replicas, which is 2");
  EXPECT_EQ(generation("gpusPerPod: 8"), "");
  EXPECT_EQ(generation("processesPerPod: 2"), "");
  EXPECT_THAT(generation("gpusPerPod: 8, processesPerPod: 2"),
              HasSubstr("spec.roles.generation.processesPerPod: is 2, but a pod has 8 GPUs"));
  EXPECT_THAT(generation("port: 80"), HasSubstr("is for the reward role"));
  EXPECT_THAT(generation("", "  algorithm: SFT\n"),
              HasSubstr("spec.roles.generation: has no meaning for algorithm SFT"));
  EXPECT_THAT(generation("", "  network: {workPort: 9400}\n"), HasSubstr("spec.network.workPort: is the same as"));
  EXPECT_EQ(errors_of("  network: {metricsPort: 29501}\n"), "") << "nobody listens on the work port";
  EXPECT_THAT(errors_of(actor("replicas: 2, minReplicas: 1")),
              HasSubstr("spec.roles.actor.minReplicas: is for the generation role"));
}

TEST(Validate, AnEnginesRanksShareAPod) {
  for (const char* good : {"gpusPerPod: 8, parallelism: {tp: 4}", "gpusPerPod: 8, parallelism: {tp: 8}",
                           "replicas: 3, processesPerPod: 2, parallelism: {tp: 2}",
                           "replicas: 2, gpusPerPod: 8, parallelism: {tp: 4, ep: 2}"}) {
    EXPECT_EQ(generation(good), "") << good;
  }
  EXPECT_EQ(
      generation("replicas: 2, parallelism: {tp: 2}"),
      "spec.roles.generation.parallelism.tp: tp 2 does not divide the 1 GPUs of a node (tensor parallel ranks must "
      "share a node); legal values of tp here: 1");
  EXPECT_EQ(
      generation("gpusPerPod: 8, parallelism: {tp: 3}"),
      "spec.roles.generation.parallelism.tp: tp 3 does not divide the 8 GPUs of a node (tensor parallel ranks must "
      "share a node); legal values of tp here: 1, 2, 4, 8");
  EXPECT_THAT(generation("gpusPerPod: 8, parallelism: {tp: 16}"), HasSubstr("tp 16 does not divide the 8 GPUs"));
  for (const char* axis : {"cp", "pp", "etp"}) {
    EXPECT_EQ(generation("gpusPerPod: 8, parallelism: {tp: 2, " + std::string(axis) + ": 2}"),
              "spec.roles.generation.parallelism." + std::string(axis) +
                  ": is 2, but the ranks of an engine split the model by tp and ep only: leave it out");
  }
  // As many as there are would be wrong behind kubectl scale.
  EXPECT_EQ(generation("replicas: 2, gpusPerPod: 8, parallelism: {tp: 4, dp: 4}"),
            "spec.roles.generation.parallelism.dp: is 4, but how many engines there are follows from the role's "
            "processes: leave it out");
  EXPECT_THAT(generation("parallelism: {dp: 1}"), HasSubstr("parallelism.dp: is 1, but"));
}

TEST(Validate, AnEnginesLayoutFitsTheModel) {
  const auto of = [](const std::string& model, const std::string& parallelism, const std::string& actor = "",
                     const std::string& config = "") {
    return errors_of("  model: {source: " + model + "}\n  roles: {actor: {" + actor +
                     "}, generation: {gpusPerPod: 8, parallelism: {" + parallelism +
                     "}}}\n  config: {inline: {policy: {" + config + "generation: {colocated: {enabled: false}}}}}\n");
  };
  EXPECT_EQ(of("meta-llama/Llama-3.1-70B", "tp: 8"), "");
  EXPECT_EQ(of("Qwen/Qwen2.5-0.5B-Instruct", "tp: 8"),
            "spec.roles.generation.parallelism.tp: tp 8 does not divide the 14 attention heads; legal values of tp "
            "here: 1, 2");
  EXPECT_EQ(of("Qwen/Qwen3-8B", "tp: 4, ep: 2"),
            "spec.roles.generation.parallelism.ep: ep 2 for a model without experts; ep must be 1");
  const std::string mixture = "Qwen/Qwen3-30B-A3B";  // 128 experts, 4 key heads
  EXPECT_EQ(of(mixture, "tp: 4, ep: 4"), "");
  EXPECT_EQ(of(mixture, "tp: 4, ep: 2"), "");
  EXPECT_EQ(
      of(mixture, "tp: 2, ep: 4"),
      "spec.roles.generation.parallelism.ep: ep 4 does not divide tp, which is 2: the ranks of an engine share its "
      "experts");
  EXPECT_THAT(of(mixture, "ep: 2"), HasSubstr("parallelism.ep: ep 2 does not divide tp, which is 1"));
  EXPECT_THAT(
      of(mixture, "tp: 4", "gpusPerPod: 8, parallelism: {ep: 4, etp: 2}"),
      HasSubstr("spec.roles.actor.parallelism.etp: is 2, and engines get no weights of experts whose width ranks "
                "share: set etp to 1, or leave spec.roles.generation out"));
  EXPECT_THAT(
      generation("gpusPerPod: 8, parallelism: {tp: 8}", "", "false, policy.model_name=Qwen/Qwen2.5-0.5B-Instruct"),
      HasSubstr("parallelism.tp: tp 8 does not divide the 14 attention heads"));
  // In blocks of training's: two are too few for four ranks, whoever said it.
  const std::string few = "spec.roles.generation.parallelism.ep: ep 4 does not divide the 2 blocks";
  EXPECT_THAT(of(mixture, "tp: 4, ep: 4", "", "moe_combine_blocks: 2, "), HasSubstr(few));
  EXPECT_EQ(of(mixture, "tp: 4, ep: 2", "", "moe_combine_blocks: 2, "), "");
  EXPECT_EQ(of(mixture, "tp: 4, ep: 4", "gpusPerPod: 8, replicas: 2, parallelism: {ep: 16}"), "");
  EXPECT_THAT(generation("processesPerPod: 4, parallelism: {tp: 4, ep: 4}", "  model: {source: " + mixture + "}\n",
                         "false, policy.moe_combine_blocks=2"),
              HasSubstr(few));
  EXPECT_THAT(of(mixture, "tp: 4, ep: 4", "", "moe_combine_blocks: 3, "),
              AllOf(HasSubstr("which does not divide the model's 128"), Not(HasSubstr("roles.generation"))));
}

TEST(Validate, AnEnginesSizesAreSaidTheSameTwice) {
  const std::string two = "gpusPerPod: 8, parallelism: {tp: 4, ep: 2}";
  const std::string off = "{policy: {generation: {colocated: {enabled: false}, ";
  const auto inlined = [&](const std::string& fields, const std::string& keys) {
    return errors_of("  roles: {actor: {}, generation: {" + fields + "}}\n  config: {inline: " + off + keys + "}}}}\n");
  };
  const auto overridden = [](const std::string& fields, const std::string& override_text) {
    return generation(fields, "", "false, policy.generation." + override_text);
  };
  EXPECT_EQ(inlined(two, "tensor_parallel_size: 4, expert_parallel_size: 2"), "");
  for (const char* size : {"0", "1", "2", "8"}) {
    EXPECT_EQ(inlined(two, "tensor_parallel_size: " + std::string(size)),
              "spec.config.inline.policy.generation.tensor_parallel_size: is " + std::string(size) +
                  ", but spec.roles.generation.parallelism.tp is 4; the RLJob decides sizes: leave the key out");
  }
  EXPECT_THAT(inlined(two, "expert_parallel_size: 4"), HasSubstr("but spec.roles.generation.parallelism.ep is 2"));
  EXPECT_EQ(overridden(two, "tensor_parallel_size=2"),
            "spec.config.overrides[1]: \"policy.generation.tensor_parallel_size=2\" contradicts "
            "spec.roles.generation.parallelism.tp, which is 4");
  EXPECT_THAT(overridden(two, "expert_parallel_size=4"), HasSubstr("parallelism.ep, which is 2"));
  EXPECT_EQ(errors_of("  config: {inline: {policy: {generation: {tensor_parallel_size: 2}}}}\n"), "")
      << "of the actor's own";
  // Where the role says nothing, the configuration does.
  EXPECT_EQ(inlined("gpusPerPod: 8", "tensor_parallel_size: 4, expert_parallel_size: 2"), "");
  EXPECT_EQ(inlined("", "tensor_parallel_size: 1"), "");
  EXPECT_EQ(overridden("processesPerPod: 2", "tensor_parallel_size=2"), "");
  EXPECT_EQ(inlined("processesPerPod: 3", "tensor_parallel_size: 2"),
            "spec.config.inline.policy.generation.tensor_parallel_size: of the engines of spec.roles.generation: tp 2 "
            "does not divide the 3 GPUs of a node (tensor parallel ranks must share a node); legal values of tp here: "
            "1, 3");
  EXPECT_THAT(
      overridden("gpusPerPod: 4", "tensor_parallel_size=8"),
      HasSubstr("spec.config.overrides[1]: of the engines of spec.roles.generation: tp 8 does not divide the 4"));
  EXPECT_THAT(inlined("gpusPerPod: 8", "tensor_parallel_size: 2, expert_parallel_size: 4"),
              HasSubstr("expert_parallel_size: of the engines of spec.roles.generation: ep 4 does not divide tp, which "
                        "is 2"));
  EXPECT_EQ(overridden("gpusPerPod: 8", "expert_parallel_size=4"), "") << "the file may say tp";
  const std::string one = "of the engines of spec.roles.generation: ep 2 does not divide tp, which is 1";
  EXPECT_THAT(inlined("gpusPerPod: 8", "expert_parallel_size: 2"), HasSubstr(one)) << "the whole configuration is here";
  EXPECT_THAT(overridden("gpusPerPod: 8", "expert_parallel_size=2, policy.generation.tensor_parallel_size=1"),
              HasSubstr(one));
  EXPECT_THAT(overridden("gpusPerPod: 8, parallelism: {ep: 2}", "tensor_parallel_size=4"),
              HasSubstr("which is 1: the ranks of an engine share its experts; set parallelism.tp of the role"));
}

TEST(Validate, WhoGeneratesIsSaidTheSameTwice) {
  EXPECT_THAT(generation("", "", "true"), HasSubstr("spec.config.overrides[0]: the job has generation pods, which need "
                                                    "policy.generation.colocated.enabled: false in the configuration"));
  const auto inlined = [](const std::string& roles, const std::string& config) {
    return errors_of("  roles: {" + roles + "}\n  config: {inline: " + config + "}\n");
  };
  const std::string off = "{policy: {generation: {colocated: {enabled: false}}}}";
  EXPECT_EQ(inlined("actor: {}, generation: {}", off), "");
  EXPECT_THAT(
      inlined("actor: {}", off),
      HasSubstr("spec.config.inline.policy.generation.colocated.enabled: policy.generation.colocated.enabled is "
                "false, which needs spec.roles.generation"));
  EXPECT_THAT(inlined("actor: {}, generation: {}", "{}"), HasSubstr("spec.config.inline: the job has generation pods"));
  EXPECT_EQ(inlined("actor: {}, generation: {}", "{defaults: grpo.yaml}"), "") << "the trainer compares";
  EXPECT_EQ(errors_of("  roles: {actor: {}, generation: {}}\n  config: {configMapRef: {name: c}}\n"), "");
}

TEST(Validate, SmallThings) {
  EXPECT_THAT(errors_of("  managedBy: me\n"),
              HasSubstr("spec.managedBy: must be trireme.dev/operator or kueue.x-k8s.io/multikueue"));
  EXPECT_THAT(errors_of("  scheduling: {backend: Kueue}\n"), HasSubstr("spec.queueName: is missing"));
  EXPECT_THAT(errors_of("  scheduling: {requiredTopology: 'a b'}\n"), HasSubstr("is not a node label"));
  EXPECT_EQ(errors_of("  scheduling: {requiredTopology: topology.kubernetes.io/zone, preferredTopology: rack}\n"), "");
  EXPECT_THAT(errors_of("  network: {masterPort: 9400}\n"), HasSubstr("is the same as masterPort"));
  for (const char* good : {"8Gi", "1.5G", "1000", "512Mi"})
    EXPECT_EQ(errors_of(std::string("  network: {sharedMemory: \"") + good + "\"}\n"), "") << good;
  for (const char* bad : {"8 GiB", "Gi", "-1Gi", "0", "", "1.Gi", "1e3x"}) {
    EXPECT_THAT(errors_of(std::string("  network: {sharedMemory: \"") + bad + "\"}\n"),
                testing::AnyOf(HasSubstr("is not a quantity")))
        << bad;
  }
  EXPECT_THAT(errors_of("  network: {rdma: {resourceName: ''}}\n"), HasSubstr("rdma/ib"));
  const std::string ib = "rdma: {resourceName: rdma/ib";
  EXPECT_EQ(errors_of("  network: {fabric: InfiniBand, " + ib + "}}\n"), "");
  EXPECT_EQ(errors_of("  network: {fabric: RoCE, " + ib + ", devices: '=mlx5_0:1,mlx5_1:1', gidIndex: 3}}\n"), "");
  EXPECT_EQ(errors_of("  network: {fabric: None}\n"), "");
  EXPECT_THAT(errors_of("  network: {fabric: RoCE}\n"), HasSubstr("spec.network.fabric: RoCE needs spec.network.rdma"));
  EXPECT_THAT(errors_of("  network: {fabric: None, " + ib + "}}\n"), HasSubstr("leave one out"));
  EXPECT_THAT(errors_of("  network: {" + ib + ", gidIndex: 3}}\n"), HasSubstr("is for RoCE, but spec.network.fabric"));
  EXPECT_THAT(errors_of("  network: {" + ib + ", devices: 'a b'}}\n"), HasSubstr("is not a list of devices"));
  EXPECT_THAT(errors_of("  network: {" + ib + "}}\n" + actor("replicas: 2")),
              HasSubstr("spec.network.rdma: is for pods with GPUs"));
  EXPECT_THAT(errors_of("  imagePullPolicy: Sometimes\n"), HasSubstr("Always, IfNotPresent or Never"));
  EXPECT_THAT(errors_of("  image: a b\n"), HasSubstr("contains blanks"));
  EXPECT_THAT(errors_of("  failurePolicy: {rules: [{onExitCodes: [0]}]}\n"), HasSubstr("is not a failure's exit code"));
  EXPECT_THAT(errors_of("  failurePolicy: {rules: [{onSignals: [99]}]}\n"), HasSubstr("is not a signal"));
  EXPECT_THAT(errors_of("  failurePolicy: {rules: [{roles: [acter]}]}\n"), HasSubstr("did you mean \"actor\"?"));
  EXPECT_THAT(warnings_of("  failurePolicy: {rules: [{action: Restart}, {onSignals: [9]}]}\n"),
              HasSubstr("never used"));
  EXPECT_THAT(errors_of("  health: {phaseTimeoutSeconds: {trainning: 3}}\n"), HasSubstr("did you mean \"training\"?"));
  EXPECT_THAT(errors_of("  health: {phaseTimeoutSeconds: {training: 0}}\n"), HasSubstr("must be at least 1"));
  EXPECT_THAT(warnings_of("  config: {inline: {checkpointing: {enabled: false}}}\n"),
              HasSubstr("every restart begins at step 0"));
}

TEST(Validate, LimitsAreCheckedOnJobsThatNoParserSaw) {
  RLJob job = parse_rljob(job_yaml(), "f");
  job.spec.roles.actor->replicas = int64_t{1} << 62;
  job.spec.roles.actor->gpus_per_pod = int64_t{1} << 62;
  EXPECT_THAT(to_string(validate(job).errors),
              HasSubstr("spec.roles.actor.replicas: 4611686018427387904 is outside 1 to 4096"));
}

TEST(ValidateUpdate, WhatMayChangeAndWhen) {
  const RLJob running = parse_rljob(job_yaml(), "f");
  RLJob suspended = running;
  suspended.spec.suspend = true;
  const auto paths = [](const RLJob& from, const std::string& spec) {
    std::vector<std::string> result;
    for (const Issue& issue : validate_update(from, parse_rljob(job_yaml(spec), "f")).errors)
      result.push_back(issue.path);
    return result;
  };
  EXPECT_THAT(paths(running, ""), IsEmpty());
  EXPECT_THAT(paths(running, "  suspend: true\n"), IsEmpty());
  EXPECT_THAT(paths(running, "  ttlSecondsAfterFinished: 5\n  failurePolicy: {maxRestarts: 9}\n"), IsEmpty());
  EXPECT_THAT(paths(running, actor("replicas: 1, gpusPerPod: 8")), ElementsAre("spec.roles"));
  EXPECT_THAT(paths(suspended, actor("replicas: 1, gpusPerPod: 8")), IsEmpty());
  EXPECT_THAT(paths(running, "  image: other\n"), ElementsAre("spec.image"));
  EXPECT_THAT(paths(suspended, "  algorithm: SFT\n"), ElementsAre("spec.algorithm"));
  EXPECT_THAT(paths(running, "  managedBy: kueue.x-k8s.io/multikueue\n"), ElementsAre("spec.managedBy"));
  const std::string pods = "  roles: {actor: {}, generation: {replicas: ";
  const RLJob generating = parse_rljob(job_yaml(pods + "2}}\n"), "f");
  EXPECT_THAT(paths(generating, pods + "4}}\n"), IsEmpty());
  EXPECT_THAT(paths(generating, pods + "2, gpusPerPod: 1}}\n"), ElementsAre("spec.roles"));
  EXPECT_THAT(paths(generating, pods + "2, parallelism: {tp: 2}}}\n"), ElementsAre("spec.roles"));
  EXPECT_THAT(paths(generating, "  roles: {actor: {}}\n"), ElementsAre("spec.roles"));
  const std::string wide = "gpusPerPod: 8, parallelism: {tp: 4";
  const RLJob counted = parse_rljob(job_yaml(pods + "2, " + wide + ", dp: 4}}}\n"), "f");
  EXPECT_THAT(paths(counted, pods + "3, " + wide + "}}}\n"), IsEmpty()) << "dp is no size of an engine";
  EXPECT_THAT(paths(counted, pods + "2, " + wide + ", ep: 2}}}\n"), ElementsAre("spec.roles"));
  EXPECT_THAT(paths(generating, "  roles: {actor: {replicas: 2}, generation: {replicas: 4}}\n"),
              ElementsAre("spec.roles"));
  const std::string critic = "  algorithm: PPO\n  roles: {actor: {}, critic: {replicas: ";
  const RLJob valued = parse_rljob(job_yaml(critic + "1}}\n"), "f");
  EXPECT_THAT(paths(valued, critic + "2}}\n"), ElementsAre("spec.roles"));
  EXPECT_THAT(paths(valued, "  algorithm: PPO\n  roles: {actor: {}}\n"), ElementsAre("spec.roles"));
  for (const char* backend : {"Auto", "Kueue", "Volcano"}) {
    const std::string queue = std::string("  queueName: q\n  scheduling: {backend: ") + backend + "}\n";
    const std::vector<std::string> refused =
        paths(parse_rljob(job_yaml(pods + "2}}\n" + queue), "f"), pods + "4}}\n" + queue);
    EXPECT_EQ(refused.size(), std::string_view(backend) == "Volcano" ? 0u : 1u) << backend;
  }
  // A default that is written out is not a change.
  EXPECT_THAT(paths(running, "  image: docker.io/trireme/trainer:0.1.0\n  podRetention: Failed\n"), IsEmpty());
}

}  // namespace
}  // namespace trireme
