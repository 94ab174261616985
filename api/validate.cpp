#include "api/validate.h"

#include <algorithm>
#include <utility>

#include "api/fields.h"
#include "api/names.h"
#include "api/runtime.h"
#include "api/validate_template.h"
#include "base/text.h"
#include "topology/combine_blocks.h"
#include "topology/topology.h"

namespace trireme {
namespace {

using fields::Limits;
using names::is_dns_label;
using names::is_dns_subdomain;
using names::is_qualified_name;
using names::is_quantity;
using names::kLowerLabel;
using names::kNameChars;
using names::only;
using names::quoted;

// The longest generated name, NAME-generation-9999-a999, must fit a DNS label (63).
constexpr size_t kMaxNameLength = 40;
constexpr const char* kMultiKueue = "kueue.x-k8s.io/multikueue";
const std::string kStageSection = "policy.megatron_cfg.";  // of the keys by which layers are dealt to stages

const std::vector<std::string>& phase_names() {
  static const std::vector<std::string> names = {"generation", "rewards",    "logprobs", "refit",
                                                 "training",   "checkpoint", "idle"};
  return names;
}

// Re-checks the field limits, for jobs that were not read by the parser.
class LimitChecker final {
 public:
  explicit LimitChecker(std::vector<Issue>& errors) : errors_(errors) {}

  template <class T>
  void operator()(const char* name, const T& member, Limits limits) {
    check(member, path_ + "." + name, limits);
  }
  template <class T>
  void check_object(const T& value, const std::string& path) {
    const std::string outer = std::exchange(path_, path);
    fields::visit_fields(*this, value);
    path_ = outer;
  }

 private:
  void range(int64_t number, const std::string& path, Limits limits, int64_t max) {
    if (number < limits.min || number > max) {
      errors_.push_back(
          {path, std::to_string(number) + " is outside " + std::to_string(limits.min) + " to " + std::to_string(max)});
    }
  }
  void check(int64_t value, const std::string& path, Limits limits) {
    range(value, path, limits, fields::max_of<int64_t>(limits));
  }
  void check(const std::string& value, const std::string& path, Limits limits) {
    if (static_cast<int64_t>(value.size()) > fields::max_of<std::string>(limits))
      errors_.push_back({path, "is too long"});
  }
  void check(bool, const std::string&, Limits) {}
  void check(const Json&, const std::string&, Limits) {}
  template <class E>
  requires std::is_enum_v<E>
  void check(E, const std::string&, Limits) {}
  template <class T>
  void check(const std::optional<T>& value, const std::string& path, Limits limits) {
    if (value) check(*value, path, limits);
  }
  template <class T>
  void check(const std::vector<T>& values, const std::string& path, Limits limits) {
    if (static_cast<int64_t>(values.size()) > fields::max_of<std::vector<T>>(limits))
      return errors_.push_back({path, "has too many entries"});
    for (size_t i = 0; i < values.size(); ++i) check(values[i], path + "[" + std::to_string(i) + "]", {});
  }
  template <class T>
  void check(const std::map<std::string, T>& values, const std::string& path, Limits limits) {
    if (static_cast<int64_t>(values.size()) > fields::max_of<std::map<std::string, T>>(limits))
      return errors_.push_back({path, "has too many entries"});
    for (const auto& [key, value] : values) check(value, path + "." + key, {});
  }
  template <class T>
  requires std::is_class_v<T>
  void check(const T& value, const std::string& path, Limits) { check_object(value, path); }

  std::vector<Issue>& errors_;
  std::string path_;
};

class Validator final {
 public:
  explicit Validator(const RLJob& job) : job_(job), spec_(job.spec) {}

  Validation run() {
    if (auto issue = size_issue(spec_)) {
      result_.errors.push_back(std::move(*issue));
      return std::move(result_);
    }
    LimitChecker(result_.errors).check_object(spec_, "spec");
    if (!result_.ok()) return std::move(result_);  // later sums rely on the limits
    check_metadata();
    check_scalars();
    check_roles();
    check_config();
    check_scheduling_and_network();
    check_failure_policy();
    check_health();
    warn_about_restarts();
    return std::move(result_);
  }

 private:
  void error(const std::string& path, const std::string& message) { result_.errors.push_back({path, message}); }
  void warn(const std::string& path, const std::string& message) { result_.warnings.push_back({path, message}); }

  void check_metadata() {
    const std::string& name = job_.metadata.name;
    if (name.empty()) {
      error("metadata.name", "is missing");
    } else if (!is_dns_label(name)) {
      error("metadata.name",
            quoted(name) + " must be lower-case letters, digits and '-', start with a letter and not end with '-'");
    } else if (name.size() > kMaxNameLength) {
      error("metadata.name", "is " + std::to_string(name.size()) + " characters long; at most " +
                                 std::to_string(kMaxNameLength) + ", so that the names of its pods stay below 64");
    }
    if (const std::string& space = job_.metadata.namespace_; !space.empty()) {
      if (space.size() > 63 || !only(space, kLowerLabel) || space.front() == '-' || space.back() == '-') {
        error("metadata.namespace", quoted(space) + " is not a namespace name");
      }
    }
  }

  void check_name(const std::string& path, const std::string& value) {
    if (!value.empty() && !is_dns_subdomain(value)) error(path, quoted(value) + " is not an object name");
  }

  void check_scalars() {
    if (spec_.managed_by != kDefaultManager && spec_.managed_by != kMultiKueue) {
      error("spec.managedBy",
            "must be " + std::string(kDefaultManager) + " or " + kMultiKueue + ", not " + quoted(spec_.managed_by));
    }
    check_name("spec.queueName", spec_.queue_name);
    check_name("spec.priorityClassName", spec_.priority_class_name);
    if (const std::string problem = names::image_problem(spec_.image); !problem.empty()) error("spec.image", problem);
    static const std::vector<std::string> policies = {"", "Always", "IfNotPresent", "Never"};
    if (std::find(policies.begin(), policies.end(), spec_.image_pull_policy) == policies.end()) {
      error("spec.imagePullPolicy", "must be Always, IfNotPresent or Never, not " + quoted(spec_.image_pull_policy));
    }
  }

  // ---- roles

  void check_roles() {
    if (!spec_.roles.actor) error("spec.roles.actor", "is missing; it is the role that trains");
    for (const RoleRef& role : roles_of(spec_)) {
      const std::string path = "spec.roles." + role.name;
      if (!is_qualified_name(role.spec->gpu_resource)) {
        error(path + ".gpuResource",
              quoted(role.spec->gpu_resource) + " is not a resource name such as nvidia.com/gpu");
      }
      if (role.name != "generation" && role.spec->min_replicas)
        error(path + ".minReplicas", "is for the generation role; of the others every pod must be there");
      if (role.name == "reward") {
        check_reward(*role.spec, path);
      } else if (role.name == "generation") {
        check_generation(*role.spec, path);
      } else if (role.name == "critic") {
        check_critic(*role.spec, path);
      } else {
        check_trainer_role(*role.spec, path, model_name());
      }
      const char* main_container = role.name == "reward" ? kRewardContainer : kTrainerContainer;
      check_template(spec_, role, path + ".template", main_container, result_.errors);
    }
    warn_about_claims();
  }

  void check_reward(const RoleSpec& role, const std::string& path) {
    if (!role.port) error(path + ".port", "is missing; it is where the reward service listens");
    if (!(layout_sizes(role) == Layout{}) || role.parallelism.dp)
      error(path + ".parallelism", "has no meaning for reward pods");
    if (role.processes_per_pod) error(path + ".processesPerPod", "has no meaning for reward pods");
    const PodView view = pod_view({.image = ""}, role, kRewardContainer);
    if (view.container(kRewardContainer)->image.empty()) {
      error(path + ".template", "needs a container named reward with an image");
    }
  }

  void check_generation(const RoleSpec& role, const std::string& path) {
    if (spec_.algorithm == Algorithm::kSft)
      error(path, "has no meaning for algorithm SFT, which generates nothing; leave the role out");
    if (role.port) error(path + ".port", "is for the reward role; the trainer's ports are in spec.network");
    if (const auto& actor = spec_.roles.actor; actor && actor->parallelism.etp > 1) {
      error("spec.roles.actor.parallelism.etp", "is " + std::to_string(actor->parallelism.etp) +
                                                    ", and engines get no weights of experts whose width " +
                                                    "ranks share: set etp to 1, or leave " + path + " out");
    }
    if (check_processes(role, path)) check_engines(role, path);
    if (role.min_replicas.value_or(1) > role.replicas) {
      error(path + ".minReplicas", "is " + std::to_string(*role.min_replicas) + ", more than replicas, which is " +
                                       std::to_string(role.replicas));
    }
    if (spec_.network.work_port == spec_.network.master_port || spec_.network.work_port == spec_.network.metrics_port)
      error("spec.network.workPort", "is the same as masterPort or metricsPort");
  }

  // A size of engines, and where it is said: by the role or, where that leaves it out (1), by the configuration.
  struct EngineSize {
    int64_t size = 1;
    std::string at;
  };
  EngineSize engine_size(int64_t of_role, const std::string& path, const char* key) const {
    const auto said = of_role > 1 ? std::nullopt : setting(key);
    const int64_t size = said ? parse_int(said->value).value_or(0) : 0;
    return size > 1 ? EngineSize{size, said->at} : EngineSize{of_role, path};
  }

  // An engine is tp processes of a pod, which split the model's heads by tp and its experts by ep.
  void check_engines(const RoleSpec& role, const std::string& role_path) {
    const std::string path = role_path + ".parallelism";
    const Parallelism& p = role.parallelism;
    if (p.dp) {
      return error(path + ".dp", "is " + std::to_string(*p.dp) + ", but how many engines there are follows from the " +
                                     "role's processes: leave it out");
    }
    for (const auto& [axis, size] : {std::pair{".cp", p.cp}, std::pair{".pp", p.pp}, std::pair{".etp", p.etp}}) {
      if (size == 1) continue;
      return error(path + axis, "is " + std::to_string(size) +
                                    ", but the ranks of an engine split the model by tp and ep only: leave it out");
    }
    const EngineSize tp = engine_size(p.tp, path + ".tp", kEngineTensorKey);
    // What the configuration says of ep means something beside a tp that is known.
    const bool known = p.tp > 1 || setting(kEngineTensorKey) || whole_configuration();
    const EngineSize ep = known ? engine_size(p.ep, path + ".ep", kEngineExpertKey) : EngineSize{p.ep, path + ".ep"};
    const auto refuse = [&](const EngineSize& size, const std::string& message) {
      error(size.at, starts_with(size.at, path) ? message : "of the engines of " + role_path + ": " + message);
    };
    const int64_t ranks = p.ep > 1 ? p.tp : tp.size;  // the role's own, as the CRD's rule sees it
    if (ranks % ep.size != 0) {
      return refuse(ep, "ep " + std::to_string(ep.size) + " does not divide tp, which is " + std::to_string(ranks) +
                            ": the ranks of an engine share its experts" +
                            (p.ep > 1 && p.tp == 1 ? "; set parallelism.tp of the role" : ""));
    }
    const int64_t processes = processes_per_pod(role);
    const std::optional<ModelShape> shape = known_model_shape(model_name());
    const Layout pod{.tp = tp.size, .ep = ep.size, .dp = std::max<int64_t>(1, processes / tp.size)};
    const LayoutReport report =
        check_layout(pod, {.world = processes, .gpus_per_node = processes, .shape = shape ? &*shape : nullptr});
    if (!report.ok()) return refuse(starts_with(report.errors.front(), "ep ") ? ep : tp, report.errors.front());
    if (shape && shape->experts > 0) {
      // Their experts are added up in training's blocks.
      const int64_t training = spec_.roles.actor ? spec_.roles.actor->parallelism.ep : 1;
      const int64_t blocks = combine_blocks(shape->experts, asked_blocks(), training);
      if (shape->experts % blocks == 0) {
        for (const std::string& message : combine_block_problems(shape->experts, blocks, ep.size)) refuse(ep, message);
      }
    }
  }

  // Of a key that the RLJob leaves to the configuration: what stands inline or, which wins, in an override; and where.
  // Nothing where a file behind a config map or path may say it.
  struct Setting {
    std::string value, at;
  };
  std::optional<Setting> setting(const std::string& key) const {
    std::optional<Setting> found;
    if (const Json* value = config_value(key); value && !value->is_structured())
      found = {value->is_string() ? value->get<std::string>() : value->dump(), "spec.config.inline." + key};
    for (size_t i = 0; i < spec_.config.overrides.size(); ++i) {
      const std::string& text = spec_.config.overrides[i];
      if (overridden(text) == key)
        found = {text.substr(text.find('=') + 1), "spec.config.overrides[" + std::to_string(i) + "]"};
    }
    return found;
  }

  // The key of an override, which may begin with + or ++; empty where it is none.
  static std::string_view overridden(std::string_view text) {
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos) return {};
    std::string_view key = trim(text.substr(0, equals));
    for (int i = 0; i < 2 && starts_with(key, "+"); ++i) key.remove_prefix(1);
    return key;
  }

  // The same, `otherwise` where the key has its default for certain, and nothing where the manifest does not hold it.
  std::optional<std::string> known_setting(const std::string& key, const std::string& otherwise) const {
    const std::optional<Setting> said = setting(key);
    if (!said && !whole_configuration()) return std::nullopt;
    // A section may come from elsewhere as a whole: by ${...}, or by an override.
    for (size_t dot = key.find('.'); dot != std::string::npos; dot = key.find('.', dot + 1)) {
      const std::string section = key.substr(0, dot);
      const Json* value = config_value(section);
      if (value && !value->is_object() && !value->is_null()) return std::nullopt;
      for (const std::string& text : spec_.config.overrides)
        if (overridden(text) == section) return std::nullopt;
    }
    return said ? said->value : otherwise;
  }

  void check_critic(const RoleSpec& role, const std::string& path) {
    if (spec_.algorithm != Algorithm::kPpo) {
      error(path, std::string("is for algorithm PPO only, not ") + to_string(spec_.algorithm));
      return;
    }
    if (const auto name = setting("ppo.adv_estimator.name"); name && name->value == "raw_reward")
      error(name->at, "ppo.adv_estimator.name is raw_reward, which has no critic: leave spec.roles.critic out");
    check_trainer_role(role, path, "");
    // Its own ranks share its batch, which is the policy's where the whole configuration is here and says no other.
    std::optional<Setting> batch = setting("value.train_global_batch_size");
    if (!batch && whole_configuration()) batch = setting("policy.train_global_batch_size");
    const int64_t samples = batch ? parse_int(batch->value).value_or(0) : 0, dp = layout_of(role).dp;
    if (samples > 0 && dp > 0 && samples % dp != 0)
      error(batch->at, "is " + std::to_string(samples) + ", which the " + std::to_string(dp) +
                           " data parallel ranks of spec.roles.critic cannot share evenly: set "
                           "value.train_global_batch_size to a multiple");
    warn_about_critics_checkpoints(role, path);
  }

  // The claim, or another volume, that holds `folder` in a role's pods; empty: none.
  std::string volume_of(const RoleSpec& role, const std::string& folder) const {
    const PodView view = pod_view(spec_, role);
    const MountView* over = nullptr;
    for (const MountView& mount : view.container(kTrainerContainer)->mounts) {
      const std::string inside = ends_with(mount.path, "/") ? mount.path : mount.path + "/";
      const bool holds = starts_with(folder + "/", inside);
      if (holds && (over == nullptr || over->path.size() < mount.path.size())) over = &mount;
    }
    if (over == nullptr) return "";
    for (const VolumeView& volume : view.volumes) {
      if (volume.name == over->volume) return volume.source.empty() ? volume.name : volume.source;
    }
    return over->volume;
  }

  // Its pods save beside the actor's steps, and a job goes on only from steps that both have.
  void warn_about_critics_checkpoints(const RoleSpec& role, const std::string& path) {
    const auto said = setting("checkpointing.checkpoint_dir");
    const std::string folder = said ? said->value : spec_.checkpoint.directory;
    if (folder.empty() || !spec_.roles.actor) return;
    const std::string actors = volume_of(*spec_.roles.actor, folder);
    if (actors.empty() || volume_of(role, folder) == actors) return;
    warn(path + ".template", "does not mount the volume " + quoted(actors) + " at " + quoted(folder) +
                                 ", where the actor's pods have their checkpoints: the critic's would go with its "
                                 "pods, and a restart would find none");
  }

  static Layout layout_sizes(const RoleSpec& role) {
    const Parallelism& p = role.parallelism;
    return {.tp = p.tp, .cp = p.cp, .ep = p.ep, .pp = p.pp, .etp = p.etp};
  }

  std::string model_name() const {
    if (!spec_.model.source.empty()) return spec_.model.source;
    const auto said = setting("policy.model_name");
    return said ? said->value : std::string();
  }

  // 0: derived.
  int64_t asked_blocks() const {
    const auto said = setting("policy.moe_combine_blocks");
    return said ? std::max<int64_t>(0, parse_int(said->value).value_or(0)) : 0;
  }

  // How the trainer deals the policy's layers to pipeline stages; nothing where the manifest does not hold all that
  // says it.
  std::optional<StageOptions> stages() const {
    const std::optional<std::string> enabled = known_setting(kStageSection + "enabled", "false");
    const std::string said = to_lower(enabled.value_or(""));
    if (said == "false" || said == "no" || said == "off") return StageOptions{};
    if (said != "true" && said != "yes" && said != "on") return std::nullopt;
    StageOptions options;
    for (const auto& [key, member] :
         {std::pair{"num_layers_in_first_pipeline_stage", &StageOptions::first_layers},
          std::pair{"num_layers_in_last_pipeline_stage", &StageOptions::last_layers},
          std::pair{"virtual_pipeline_model_parallel_size", &StageOptions::virtual_stages}}) {
      const std::optional<std::string> text = known_setting(kStageSection + key, "null");
      if (!text) return std::nullopt;
      if (*text == "null" || *text == "~") continue;  // the default
      const std::optional<int64_t> value = parse_int(*text);
      if (!value || *value < 1) return std::nullopt;  // ${...}, or for the trainer to refuse
      options.*member = *value;
    }
    return options;
  }

  bool check_processes(const RoleSpec& role, const std::string& path) {
    if (role.gpus_per_pod == 0 || role.processes_per_pod.value_or(role.gpus_per_pod) == role.gpus_per_pod) return true;
    error(path + ".processesPerPod", "is " + std::to_string(*role.processes_per_pod) + ", but a pod has " +
                                         std::to_string(role.gpus_per_pod) +
                                         " GPUs and there is one process per GPU; leave it out");
    return false;
  }

  // `model`: its name where it is known, whose shape the layout must fit.
  void check_trainer_role(const RoleSpec& role, const std::string& path, const std::string& model) {
    if (role.port) error(path + ".port", "is for the reward role; the trainer's ports are in spec.network");
    if (!check_processes(role, path)) return;
    Layout layout = layout_sizes(role);
    const int64_t world = world_size(role);
    layout.dp = role.parallelism.dp.value_or(derive_dp(layout, world).value_or(1));
    std::optional<ModelShape> shape = known_model_shape(model);
    const std::optional<StageOptions> dealt = stages();
    if (shape && !dealt) shape->layers = 0;  // 0: any pp goes, and the trainer says whether it fits them
    const LayoutReport report = check_layout(layout, {.world = world,
                                                      .gpus_per_node = processes_per_pod(role),
                                                      .shape = shape ? &*shape : nullptr,
                                                      .stages = dealt.value_or(StageOptions{}),
                                                      .stage_section = kStageSection});
    for (const std::string& message : report.errors) report_layout(path, message);
    for (const std::string& message : report.warnings) warn(axis_path(path, message), message);
    if (!report.ok()) return;
    if (!shape || shape->experts == 0) return;
    for (const std::string& message : combine_block_problems(shape->experts, asked_blocks(), layout.ep))
      error(axis_path(path, message), message);
  }

  // A sentence about stages names keys of the configuration; how many stages there are is the RLJob's.
  void report_layout(const std::string& path, const std::string& message) {
    const std::string by_axis = replace_all(message, kStageSection + "pipeline_model_parallel_size", "pp");
    const bool of_stages = message.find(kStageSection) != std::string::npos;
    error(of_stages ? path + ".parallelism.pp" : axis_path(path, message), by_axis);
  }

  // The messages of topology start with the axis they are about, or with a product ("tp 4 x ...").
  static std::string axis_path(const std::string& path, const std::string& message) {
    static const std::vector<std::string> axes = {"tp", "cp", "ep", "dp", "pp", "etp"};
    const std::string word = message.substr(0, message.find(' '));
    const bool product = message.find(" x ") != std::string::npos;
    if (product || std::find(axes.begin(), axes.end(), word) == axes.end()) return path + ".parallelism";
    return path + ".parallelism." + word;
  }

  void warn_about_claims() {
    for (const ClaimUse& use : claim_uses(spec_)) {
      if (use.pods < 2) continue;
      warn("spec.roles." + use.roles.front() + ".template.spec.volumes",
           "the claim " + quoted(use.claim) + " is used by " + std::to_string(use.pods) +
               " pods: it must be ReadWriteMany unless they share a node");
    }
  }

  // ---- trainer configuration

  // Value of "a.b" in the inline configuration; null if it is not there.
  const Json* config_value(const std::string& key) const {
    const Json* at = &spec_.config.inline_config;
    for (const std::string& part : split(key, '.')) {
      if (!at->is_object()) return nullptr;
      const auto it = at->find(part);
      if (it == at->end()) return nullptr;
      at = &*it;
    }
    return at;
  }

  // Whether all of it is here, so that a key that is not has its default.
  bool whole_configuration() const {
    return spec_.config.inline_config.is_object() && config_value("defaults") == nullptr;
  }

  // By key: the size that the RLJob decides, and its field. What the configuration says must agree.
  using DecidedSizes = std::vector<std::pair<std::string, std::pair<int64_t, std::string>>>;
  DecidedSizes decided_sizes() const {
    const RoleSpec& actor = *spec_.roles.actor;
    const Layout layout = layout_of(actor);
    DecidedSizes sizes = {
        {"policy.megatron_cfg.tensor_model_parallel_size", {layout.tp, "spec.roles.actor.parallelism.tp"}},
        {"policy.megatron_cfg.pipeline_model_parallel_size", {layout.pp, "spec.roles.actor.parallelism.pp"}},
        {"policy.megatron_cfg.context_parallel_size", {layout.cp, "spec.roles.actor.parallelism.cp"}},
        {"policy.megatron_cfg.expert_model_parallel_size", {layout.ep, "spec.roles.actor.parallelism.ep"}},
        {"policy.megatron_cfg.expert_tensor_parallel_size", {layout.etp, "spec.roles.actor.parallelism.etp"}},
        {"policy.dtensor_cfg.tensor_parallel_size", {layout.tp, "spec.roles.actor.parallelism.tp"}},
        {"policy.dtensor_cfg.context_parallel_size", {layout.cp, "spec.roles.actor.parallelism.cp"}},
        {"policy.dtensor_cfg.expert_parallel_size", {layout.ep, "spec.roles.actor.parallelism.ep"}},
        {"cluster.num_nodes", {actor.replicas, "spec.roles.actor.replicas"}},
        {"cluster.gpus_per_node", {processes_per_pod(actor), "the processes of an actor pod"}},
    };
    if (!spec_.roles.generation) return sizes;
    const Parallelism& engine = spec_.roles.generation->parallelism;
    if (engine.tp > 1) sizes.push_back({kEngineTensorKey, {engine.tp, "spec.roles.generation.parallelism.tp"}});
    if (engine.ep > 1) sizes.push_back({kEngineExpertKey, {engine.ep, "spec.roles.generation.parallelism.ep"}});
    return sizes;
  }

  void check_config() {
    const ConfigSource& config = spec_.config;
    const int sources = !config.inline_config.is_null() + config.config_map_ref.has_value() + !config.path.empty();
    if (sources == 0) error("spec.config", "needs one of inline, configMapRef, path");
    if (sources > 1) error("spec.config", "may have only one of inline, configMapRef, path");
    if (config.config_map_ref) {
      if (!is_dns_subdomain(config.config_map_ref->name)) {
        error("spec.config.configMapRef.name", quoted(config.config_map_ref->name) + " is not an object name");
      }
      if (config.config_map_ref->key.empty() || !only(config.config_map_ref->key, kNameChars)) {
        error("spec.config.configMapRef.key", quoted(config.config_map_ref->key) + " is not a key of a config map");
      }
    }
    if (!spec_.roles.actor) return;
    const DecidedSizes sizes = decided_sizes();
    for (const auto& [key, expected] : sizes) {
      const auto& [size, field] = expected;
      const std::string section = key.substr(0, key.rfind('.'));
      const Json* enabled = config_value(section + ".enabled");
      const bool off = enabled && enabled->is_boolean() && !enabled->get<bool>();
      if (const Json* value = config_value(key); value && !off) check_size(*value, key, size, field);
    }
    check_text_setting("algorithm", to_lower(to_string(spec_.algorithm)), "spec.algorithm");
    check_text_setting("policy.model_name", spec_.model.source, "spec.model.source");
    check_text_setting("checkpointing.checkpoint_dir", spec_.checkpoint.directory, "spec.checkpoint.directory");
    check_overrides(sizes);
    check_colocated();
  }

  // Who generates is said twice, and both must agree. A configuration behind a config map or path is compared by the
  // trainer.
  void check_colocated() {
    static const std::string kKey = "policy.generation.colocated.enabled";
    const bool dedicated = spec_.roles.generation.has_value();
    std::optional<bool> colocated;
    std::string at = "spec.config.inline";
    if (const Json* value = config_value(kKey); value && value->is_boolean()) {
      colocated = value->get<bool>();
      at += "." + kKey;
    } else if (!value && whole_configuration()) {
      colocated = true;  // the key's default
    }
    for (size_t i = 0; i < spec_.config.overrides.size(); ++i) {
      const std::string& text = spec_.config.overrides[i];
      if (!starts_with(text, kKey + "=")) continue;
      const std::string value = text.substr(kKey.size() + 1);
      if (value == "true" || value == "false") colocated = value == "true";
      at = "spec.config.overrides[" + std::to_string(i) + "]";
    }
    if (!colocated || *colocated != dedicated) return;
    if (dedicated) {
      error(at, "the job has generation pods, which need " + kKey + ": false in the configuration");
    } else {
      error(at, kKey + " is false, which needs spec.roles.generation: there is nobody to generate");
    }
  }

  void check_size(const Json& value, const std::string& key, int64_t size, const std::string& field) {
    if (!value.is_number_integer() || value == size) return;
    error("spec.config.inline." + key, "is " + value.dump() + ", but " + field + " is " + std::to_string(size) +
                                           "; the RLJob decides sizes: leave the key out");
  }

  void check_text_setting(const std::string& key, const std::string& expected, const std::string& field) {
    const Json* value = config_value(key);
    if (expected.empty() || !value || !value->is_string() || *value == expected) return;
    error("spec.config.inline." + key, "is " + quoted(value->get<std::string>()) + ", but " + field + " is " +
                                           quoted(expected) + "; leave one of them out");
  }

  void check_overrides(const DecidedSizes& sizes) {
    for (size_t i = 0; i < spec_.config.overrides.size(); ++i) {
      const std::string path = "spec.config.overrides[" + std::to_string(i) + "]";
      const std::string& text = spec_.config.overrides[i];
      const size_t equals = text.find('=');
      if (equals == std::string::npos || equals == 0 || text[0] == '-') {
        error(path, quoted(text) + " must have the form key.sub=value");
        continue;
      }
      const std::string key = text.substr(0, equals);
      for (const auto& [name, expected] : sizes) {
        if (key != name || parse_int(text.substr(equals + 1)) == expected.first) continue;
        error(path, quoted(text) + " contradicts " + expected.second + ", which is " + std::to_string(expected.first));
      }
      if (key == "policy.model_name" && !spec_.model.source.empty()) error(path, "contradicts spec.model.source");
      if (key == "checkpointing.checkpoint_dir" && !spec_.checkpoint.directory.empty())
        error(path, "contradicts spec.checkpoint.directory");
    }
  }

  // ---- the rest

  void check_scheduling_and_network() {
    const Scheduling& scheduling = spec_.scheduling;
    check_name("spec.scheduling.schedulerName", scheduling.scheduler_name);
    for (const auto& [path, key] : {std::pair{"spec.scheduling.requiredTopology", &scheduling.required_topology},
                                    std::pair{"spec.scheduling.preferredTopology", &scheduling.preferred_topology}}) {
      if (!key->empty() && !is_qualified_name(*key))
        error(path, quoted(*key) + " is not a node label such as topology.kubernetes.io/zone");
    }
    if (scheduling.backend == GangBackend::kKueue && spec_.queue_name.empty()) {
      error("spec.queueName", "is missing; the Kueue backend needs it");
    }
    const Network& network = spec_.network;
    if (network.master_port == network.metrics_port) error("spec.network.metricsPort", "is the same as masterPort");
    if (!is_quantity(network.shared_memory))
      error("spec.network.sharedMemory", quoted(network.shared_memory) + " is not a quantity such as 8Gi");
    if (!only(network.socket_interface, std::string(kNameChars) + "^=,:@")) {
      error("spec.network.socketInterface", quoted(network.socket_interface) + " is not an interface name");
    }
    if (network.rdma && !is_qualified_name(network.rdma->resource_name)) {
      error("spec.network.rdma.resourceName",
            quoted(network.rdma->resource_name) + " is not a resource name such as rdma/ib");
    }
    check_fabric(network);
  }

  void check_fabric(const Network& network) {
    const std::string fabric = to_string(network.fabric);
    if (!network.rdma) {
      if (network.fabric == Fabric::kInfiniBand || network.fabric == Fabric::kRoce)
        error("spec.network.fabric", fabric + " needs spec.network.rdma, which names the devices that pods ask for");
      return;
    }
    const Rdma& rdma = *network.rdma;
    if (network.fabric == Fabric::kNone)
      error("spec.network.fabric", "is None, so no pod would use the devices of spec.network.rdma: leave one out");
    const std::vector<RoleRef> roles = roles_of(spec_);
    const bool used =
        std::any_of(roles.begin(), roles.end(), [&](const RoleRef& role) { return uses_rdma(spec_, role.name); });
    if (!used) {
      error("spec.network.rdma",
            "is for pods with GPUs, and no role of the trainer has gpusPerPod above 0: only NCCL uses RDMA");
    }
    if (!only(rdma.devices, std::string(kNameChars) + "^=,:"))
      error("spec.network.rdma.devices", quoted(rdma.devices) + " is not a list of devices such as mlx5_0,mlx5_1");
    if (rdma.gid_index && network.fabric != Fabric::kRoce)
      error("spec.network.rdma.gidIndex", "is for RoCE, but spec.network.fabric is " + fabric);
  }

  void check_failure_policy() {
    static const std::vector<std::string> role_names = {"actor", "critic", "generation", "reward"};
    const std::vector<FailureRule>& rules = spec_.failure_policy.rules;
    for (size_t i = 0; i < rules.size(); ++i) {
      const FailureRule& rule = rules[i];
      const std::string path = "spec.failurePolicy.rules[" + std::to_string(i) + "]";
      for (const int64_t code : rule.on_exit_codes) {
        if (code < 1 || code > 255)
          error(path + ".onExitCodes", std::to_string(code) + " is not a failure's exit code (1 to 255)");
      }
      for (const int64_t signal : rule.on_signals) {
        if (signal < 1 || signal > 64)
          error(path + ".onSignals", std::to_string(signal) + " is not a signal (1 to 64)");
      }
      for (const std::string& reason : rule.on_pod_reasons) {
        if (reason.empty()) error(path + ".onPodReasons", "has an empty entry");
      }
      for (const std::string& role : rule.roles) {
        if (std::find(role_names.begin(), role_names.end(), role) != role_names.end()) continue;
        const auto near = role.size() <= 64 ? nearest(role, role_names) : std::nullopt;
        error(path + ".roles", "unknown role " + quoted(role) +
                                   (near ? "; did you mean \"" + *near + "\"?" : "; roles: " + join(role_names, ", ")));
      }
      const bool matches_all =
          rule.on_exit_codes.empty() && rule.on_signals.empty() && rule.on_pod_reasons.empty() && rule.roles.empty();
      if (matches_all && i + 1 < rules.size())
        warn(path, "matches every failure, so the rules after it are never used");
    }
  }

  void check_health() {
    for (const auto& [phase, seconds] : spec_.health.phase_timeout_seconds) {
      const std::string path = "spec.health.phaseTimeoutSeconds";
      if (std::find(phase_names().begin(), phase_names().end(), phase) == phase_names().end()) {
        const auto near = phase.size() <= 64 ? nearest(phase, phase_names()) : std::nullopt;
        error(path + "." + phase.substr(0, 64),
              "unknown phase " + quoted(phase) +
                  (near ? "; did you mean \"" + *near + "\"?" : "; phases: " + join(phase_names(), ", ")));
      } else if (seconds < 1) {
        error(path + "." + phase, "must be at least 1");
      }
    }
  }

  void warn_about_restarts() {
    const Json* enabled = config_value("checkpointing.enabled");
    const bool off = enabled && enabled->is_boolean() && !enabled->get<bool>();
    if (off && spec_.failure_policy.max_restarts > 0) {
      warn("spec.failurePolicy.maxRestarts", "checkpointing is off, so every restart begins at step 0");
    }
  }

  const RLJob& job_;
  const RLJobSpec& spec_;
  Validation result_;
};

}  // namespace

namespace {

size_t count_values(const Json& value) {
  size_t count = 1;
  if (!value.is_structured()) return count;
  if (value.is_object()) count += value.size();  // the keys
  for (const Json& item : value) count += count_values(item);
  return count;
}

// Of the sizes of roles, the number of generation pods may change while the job runs.
void check_sizes(const RLJobSpec& before, const RLJobSpec& after, Validation& result) {
  const auto refuse = [&](const char* path, const char* why) { result.errors.push_back({path, why}); };
  RLJobSpec same = after;
  if (before.roles.generation && same.roles.generation) {
    same.roles.generation->replicas = before.roles.generation->replicas;
    same.roles.generation->parallelism.dp = before.roles.generation->parallelism.dp;  // no size of an engine's
  }
  if (spec_to_json(before).value("roles", Json()) != spec_to_json(same).value("roles", Json())) {
    refuse("spec.roles",
           "can only be changed while the job is suspended (spec.suspend: true), but for generation.replicas");
  } else if (before.roles.generation && before.roles.generation->replicas != after.roles.generation->replicas &&
             !before.queue_name.empty() &&
             (before.scheduling.backend == GangBackend::kAuto || before.scheduling.backend == GangBackend::kKueue)) {
    refuse("spec.roles.generation.replicas",
           "can only be changed while the job is suspended (spec.suspend: true): Kueue admits a job's pods as a whole");
  }
}

}  // namespace

std::optional<Issue> size_issue(const RLJobSpec& spec) {
  const Json json = spec_to_json(spec);
  const std::string remedy = "; put files and long lists into the image, a volume or a ConfigMap";
  const size_t bytes = json.dump(-1, ' ', false, Json::error_handler_t::replace).size();
  if (bytes > kMaxSpecBytes) {
    return Issue{"spec", "is " + std::to_string(bytes) + " bytes long as JSON; at most " +
                             std::to_string(kMaxSpecBytes) + " are allowed" + remedy};
  }
  const size_t values = count_values(json);
  if (values <= kMaxSpecValues) return std::nullopt;
  return Issue{"spec", "has " + std::to_string(values) + " values and keys; at most " + std::to_string(kMaxSpecValues) +
                           " are allowed" + remedy};
}

Validation validate(const RLJob& job) { return Validator(job).run(); }

Validation validate_update(const RLJob& old_job, const RLJob& new_job) {
  Validation result;
  const Json before = spec_to_json(old_job.spec);
  const Json after = spec_to_json(new_job.spec);
  const auto differs = [&](const char* key) { return before.value(key, Json()) != after.value(key, Json()); };
  for (const char* key : {"algorithm", "managedBy"}) {
    if (differs(key)) result.errors.push_back({std::string("spec.") + key, "cannot be changed; make a new RLJob"});
  }
  if (old_job.spec.suspend) return result;
  check_sizes(old_job.spec, new_job.spec, result);
  for (const char* key : {"model", "config", "image", "imagePullPolicy", "network", "scheduling", "checkpoint",
                          "priorityClassName", "queueName"}) {
    if (differs(key)) {
      result.errors.push_back(
          {std::string("spec.") + key, "can only be changed while the job is suspended (spec.suspend: true)"});
    }
  }
  return result;
}

}  // namespace trireme
