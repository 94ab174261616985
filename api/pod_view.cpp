// The parts of an open pod template that the operator and the local runner look at.
#include <map>

#include "api/runtime.h"

namespace trireme {
namespace {

std::string text_at(const Json& object, const char* key) {
  if (!object.is_object()) return "";
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : std::string();
}

const Json& member(const Json& object, const char* key) {
  static const Json kNull;
  if (!object.is_object()) return kNull;
  const auto it = object.find(key);
  return it != object.end() ? *it : kNull;
}

std::vector<std::string> texts(const Json& list) {
  std::vector<std::string> result;
  if (!list.is_array()) return result;
  for (const Json& item : list) {
    if (item.is_string()) result.push_back(item.get<std::string>());
  }
  return result;
}

ContainerView view_container(const Json& container, const std::string& default_image) {
  ContainerView view;
  view.name = text_at(container, "name");
  view.image = text_at(container, "image");
  if (view.image.empty()) view.image = default_image;
  view.command = texts(member(container, "command"));
  view.args = texts(member(container, "args"));
  view.working_dir = text_at(container, "workingDir");
  if (const Json& env = member(container, "env"); env.is_array()) {
    for (const Json& item : env) {
      const std::string name = text_at(item, "name");
      if (name.empty()) continue;
      if (member(item, "valueFrom").is_null()) {
        view.env.emplace_back(name, text_at(item, "value"));
      } else {
        view.env_from_cluster.push_back(name);
      }
    }
  }
  if (const Json& mounts = member(container, "volumeMounts"); mounts.is_array()) {
    for (const Json& item : mounts) {
      const Json& read_only = member(item, "readOnly");
      view.mounts.push_back({text_at(item, "name"), text_at(item, "mountPath"), text_at(item, "subPath"),
                             read_only.is_boolean() && read_only.get<bool>()});
    }
  }
  return view;
}

VolumeView view_volume(const Json& volume) {
  VolumeView view;
  view.name = text_at(volume, "name");
  struct Source {
    const char* key;
    VolumeKind kind;
    const char* name;
  };
  static constexpr Source kSources[] = {{"persistentVolumeClaim", VolumeKind::kClaim, "claimName"},
                                        {"emptyDir", VolumeKind::kEmptyDir, ""},
                                        {"configMap", VolumeKind::kConfigMap, "name"},
                                        {"secret", VolumeKind::kSecret, "secretName"},
                                        {"hostPath", VolumeKind::kHostPath, "path"}};
  for (const Source& source : kSources) {
    const Json& value = member(volume, source.key);
    if (!value.is_object()) continue;
    view.kind = source.kind;
    view.source = text_at(value, source.name);
    break;
  }
  return view;
}

}  // namespace

const ContainerView* PodView::container(const std::string& name) const {
  for (const ContainerView& view : containers) {
    if (view.name == name) return &view;
  }
  return nullptr;
}

PodView pod_view(const RLJobSpec& spec, const RoleSpec& role, const std::string& main_container) {
  PodView view;
  const Json& pod = member(role.pod_template, "spec");
  if (const Json& list = member(pod, "initContainers"); list.is_array()) {
    for (const Json& item : list) view.init_containers.push_back(view_container(item, spec.image));
  }
  if (const Json& list = member(pod, "containers"); list.is_array()) {
    for (const Json& item : list) view.containers.push_back(view_container(item, spec.image));
  }
  if (const Json& list = member(pod, "volumes"); list.is_array()) {
    for (const Json& item : list) view.volumes.push_back(view_volume(item));
  }
  if (!view.container(main_container)) {
    ContainerView main;
    main.name = main_container;
    main.image = spec.image;
    view.containers.insert(view.containers.begin(), std::move(main));
  }
  return view;
}

std::vector<ClaimUse> claim_uses(const RLJobSpec& spec) {
  std::vector<ClaimUse> uses;
  std::map<std::string, size_t> places;  // of claims in `uses`: a template may name thousands
  for (const RoleRef& role : roles_of(spec)) {
    for (const VolumeView& volume : pod_view(spec, *role.spec).volumes) {
      if (volume.kind != VolumeKind::kClaim) continue;
      const auto [place, is_new] = places.emplace(volume.source, uses.size());
      if (is_new) uses.push_back({volume.source, 0, {}});
      ClaimUse& use = uses[place->second];
      if (!use.roles.empty() && use.roles.back() == role.name) continue;  // under another volume's name
      use.pods += role.spec->replicas;
      use.roles.push_back(role.name);
    }
  }
  return uses;
}

}  // namespace trireme
