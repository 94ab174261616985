#include "api/validate_template.h"

#include <algorithm>
#include <set>

#include "api/names.h"
#include "base/nccl.h"
#include "base/text.h"

namespace trireme {
namespace {

using names::kLowerAlnum;
using names::kLowerLabel;
using names::only;
using names::quoted;

class TemplateChecker final {
 public:
  TemplateChecker(const RLJobSpec& spec, const RoleRef& role, const std::string& main_container,
                  std::vector<Issue>& errors)
      : network_(spec.network),
        role_(*role.spec),
        needs_rdma_(needs_rdma(spec, role.name)),
        main_container_(main_container),
        errors_(errors) {}

  void check(const std::string& path) {
    const Json& pod_template = role_.pod_template;
    if (pod_template.is_null()) return;
    for (const auto& [key, value] : pod_template.items()) {
      if (key != "metadata" && key != "spec")
        error(path, "unknown field " + quoted(key) + "; a pod template has metadata and spec");
      if (!value.is_object() && !value.is_null()) error(path + "." + key.substr(0, 64), "must be an object");
    }
    const auto metadata = pod_template.find("metadata");
    if (metadata != pod_template.end() && metadata->is_object()) check_metadata(*metadata, path + ".metadata");
    const auto spec = pod_template.find("spec");
    if (spec != pod_template.end() && spec->is_object()) check_pod_spec(*spec, path + ".spec");
    if (untold_ > 0) errors_.push_back({path, "and " + std::to_string(untold_) + " more errors in this template"});
  }

 private:
  // A template has room for millions of mistakes.
  void error(const std::string& path, const std::string& message) {
    if (errors_.size() < kMaxIssues) {
      errors_.push_back({path, message});
    } else {
      ++untold_;
    }
  }

  void check_metadata(const Json& metadata, const std::string& path) {
    for (const char* section : {"labels", "annotations"}) {
      const auto it = metadata.find(section);
      if (it == metadata.end() || it->is_null()) continue;
      if (!it->is_object()) {
        error(path + "." + section, "must be an object");
        continue;
      }
      for (const auto& [key, value] : it->items()) {
        if (!value.is_string()) error(path + "." + section, quoted(key) + " must be a string");
        if (starts_with(key, "trireme.dev/"))
          error(path + "." + section, quoted(key) + " is set by the operator; names under trireme.dev/ are reserved");
      }
    }
    for (const char* key : {"name", "generateName", "namespace"}) {
      if (metadata.contains(key)) error(path + "." + key, "is set by the operator");
    }
  }

  void check_pod_spec(const Json& pod, const std::string& path) {
    for (const char* key : {"hostname", "subdomain", "nodeName"}) {
      if (pod.contains(key)) error(path + "." + key, "is set by the operator");
    }
    if (const auto it = pod.find("restartPolicy"); it != pod.end() && *it != "Never") {
      error(path + ".restartPolicy", "must be Never: restarts are the failure policy's");
    }
    if (const auto it = pod.find("hostNetwork"); it != pod.end() && *it != network_.host_network) {
      error(path + ".hostNetwork", "is set by spec.network.hostNetwork");
    }
    for (const char* list : {"containers", "initContainers", "volumes"}) {
      const auto it = pod.find(list);
      if (it == pod.end() || it->is_null()) continue;
      const std::string at = path + "." + list;
      if (!it->is_array() || it->size() > 256) {
        error(at, it->is_array() ? "has more than 256 entries" : "must be a list");
        continue;
      }
      std::set<std::string> seen;
      for (size_t i = 0; i < it->size(); ++i) {
        const std::string item_path = at + "[" + std::to_string(i) + "]";
        const Json& item = (*it)[i];
        const auto name = item.is_object() ? item.find("name") : item.end();
        if (!item.is_object() || name == item.end() || !name->is_string() ||
            !is_container_name(name->get<std::string>())) {
          error(item_path, "must be an object with a name of lower-case letters, digits and '-'");
          continue;
        }
        if (!seen.insert(name->get<std::string>()).second)
          error(item_path + ".name", quoted(name->get<std::string>()) + " appears twice");
        if (std::string_view(list) != "volumes") check_container(item, item_path, *name == main_container_, pod);
      }
    }
  }

  static bool is_container_name(const std::string& name) {
    return !name.empty() && name.size() <= 63 && only(name, kLowerLabel) && only(name.substr(0, 1), kLowerAlnum) &&
           name.back() != '-';
  }

  void check_container(const Json& container, const std::string& path, bool main, const Json& pod) {
    for (const char* key : {"command", "args"}) {
      const auto it = container.find(key);
      if (it == container.end() || it->is_null()) continue;
      const bool texts =
          it->is_array() && std::all_of(it->begin(), it->end(), [](const Json& item) { return item.is_string(); });
      if (!texts) error(path + "." + key, "must be a list of strings");
    }
    check_env(container, path, main);
    if (const auto image = container.find("image"); image != container.end() && !image->is_null()) {
      if (image->is_string()) {
        const std::string problem = names::image_problem(image->get<std::string>());
        if (!problem.empty()) error(path + ".image", problem);
      } else {
        error(path + ".image", "must be a string");
      }
    }
    check_mounts(container, path, pod);
    if (main) check_gpu_resources(container, path);
  }

  void check_env(const Json& container, const std::string& path, bool main) {
    const auto env = container.find("env");
    if (env == container.end() || env->is_null()) return;
    if (!env->is_array()) return error(path + ".env", "must be a list");
    for (size_t i = 0; i < env->size() && i < 1024; ++i) {
      const Json& item = (*env)[i];
      const std::string at = path + ".env[" + std::to_string(i) + "]";
      const auto name = item.is_object() ? item.find("name") : item.end();
      if (!item.is_object() || name == item.end() || !name->is_string()) {
        error(at, "must be an object with a name");
        continue;
      }
      if (is_reserved_env(name->get<std::string>())) {
        error(at, quoted(name->get<std::string>()) + " is set by Trireme and may not be set in the template");
        continue;
      }
      const auto value = item.find("value");
      if (value == item.end() || value->is_null()) continue;
      if (!value->is_string()) {
        error(at + ".value", "must be a string (write it in quotes)");
      } else if (main && needs_rdma_ && *name == "NCCL_NET" && is_sockets(value->get_ref<const std::string&>())) {
        error(at + ".value", "NCCL_NET is " + quoted(value->get<std::string>()) +
                                 ", which goes over sockets, but spec.network.rdma.require is true: leave NCCL_NET "
                                 "out, name the network of an RDMA plugin, or set spec.network.rdma.require to false");
      }
    }
  }

  void check_mounts(const Json& container, const std::string& path, const Json& pod) {
    const auto mounts = container.find("volumeMounts");
    if (mounts == container.end() || mounts->is_null()) return;
    if (!mounts->is_array()) return error(path + ".volumeMounts", "must be a list");
    std::vector<std::string> volumes;
    if (const auto list = pod.find("volumes"); list != pod.end() && list->is_array()) {
      for (const Json& item : *list) {
        if (item.is_object() && item.contains("name") && item["name"].is_string())
          volumes.push_back(item["name"].get<std::string>());
      }
    }
    for (size_t i = 0; i < mounts->size() && i < 256; ++i) {
      const Json& item = (*mounts)[i];
      const std::string at = path + ".volumeMounts[" + std::to_string(i) + "]";
      if (!item.is_object() || !item.contains("name") || !item["name"].is_string() || !item.contains("mountPath") ||
          !item["mountPath"].is_string()) {
        error(at, "must be an object with name and mountPath");
        continue;
      }
      const std::string& name = item["name"].get_ref<const std::string&>();
      if (std::find(volumes.begin(), volumes.end(), name) == volumes.end()) {
        error(at + ".name", "there is no volume " + quoted(name) + " in the template; volumes: " +
                                (volumes.empty() ? "none" : join(volumes, ", ").substr(0, 200)));
      }
      const std::string& mount_path = item["mountPath"].get_ref<const std::string&>();
      if (mount_path.empty() || mount_path[0] != '/')
        error(at + ".mountPath", quoted(mount_path) + " must be an absolute path");
    }
  }

  void check_gpu_resources(const Json& container, const std::string& path) {
    const auto resources = container.find("resources");
    if (resources == container.end() || !resources->is_object()) return;
    for (const char* section : {"limits", "requests"}) {
      const auto it = resources->find(section);
      if (it == resources->end() || !it->is_object()) continue;
      const auto value = it->find(role_.gpu_resource);
      if (value == it->end()) continue;
      const std::string count = value->is_string() ? value->get<std::string>() : value->dump();
      if (count != std::to_string(role_.gpus_per_pod)) {
        error(path + ".resources." + section, role_.gpu_resource + " is " + quoted(count) + ", but gpusPerPod is " +
                                                  std::to_string(role_.gpus_per_pod) +
                                                  "; leave it out of the template");
      }
    }
  }

  const Network& network_;
  const RoleSpec& role_;
  const bool needs_rdma_;
  const std::string& main_container_;
  std::vector<Issue>& errors_;
  size_t untold_ = 0;
};

}  // namespace

void check_template(const RLJobSpec& spec, const RoleRef& role, const std::string& path,
                    const std::string& main_container, std::vector<Issue>& errors) {
  TemplateChecker(spec, role, main_container, errors).check(path);
}

}  // namespace trireme
