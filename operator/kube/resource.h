// Resource: what a REST path needs to know about a kind. ObjectKey: namespace and name.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace trireme::kube {

struct Resource {
  std::string group;    // "" for core
  std::string version;  // "v1"
  std::string plural;   // "pods"
  std::string kind;     // "Pod"
  bool namespaced = true;

  std::string api_version() const { return group.empty() ? version : group + "/" + version; }
  // "/api/v1/namespaces/NS/pods[/NAME[/SUB]]". An empty namespace of a namespaced kind means all namespaces (no name
  // then).
  std::string path(std::string_view ns, std::string_view name = {}, std::string_view subresource = {}) const;
  // "/api/v1" or "/apis/GROUP/VERSION": the discovery document that lists this kind.
  std::string group_path() const;
};

// "scheduling.k8s.io/v1alpha2" + "podgroups"; a group version without a slash is core.
Resource resource_of(const std::string& group_version, const std::string& plural, const std::string& kind = {});

struct ObjectKey {
  std::string ns;  // empty for cluster-scoped objects
  std::string name;

  std::string str() const { return ns.empty() ? name : ns + "/" + name; }
  static ObjectKey parse(std::string_view text);  // the inverse of str()
  friend bool operator==(const ObjectKey& a, const ObjectKey& b) { return a.ns == b.ns && a.name == b.name; }
  friend bool operator<(const ObjectKey& a, const ObjectKey& b) { return a.ns != b.ns ? a.ns < b.ns : a.name < b.name; }
};

namespace resources {
inline const Resource kPods{"", "v1", "pods", "Pod", true};
inline const Resource kServices{"", "v1", "services", "Service", true};
inline const Resource kConfigMaps{"", "v1", "configmaps", "ConfigMap", true};
inline const Resource kSecrets{"", "v1", "secrets", "Secret", true};
inline const Resource kEvents{"", "v1", "events", "Event", true};
inline const Resource kNodes{"", "v1", "nodes", "Node", false};
inline const Resource kPersistentVolumeClaims{"", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", true};
inline const Resource kNetworkPolicies{"networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy", true};
inline const Resource kLeases{"coordination.k8s.io", "v1", "leases", "Lease", true};
inline const Resource kCustomResourceDefinitions{"apiextensions.k8s.io", "v1", "customresourcedefinitions",
                                                 "CustomResourceDefinition", false};
inline const Resource kValidatingWebhooks{"admissionregistration.k8s.io", "v1", "validatingwebhookconfigurations",
                                          "ValidatingWebhookConfiguration", false};
inline const Resource kMutatingWebhooks{"admissionregistration.k8s.io", "v1", "mutatingwebhookconfigurations",
                                        "MutatingWebhookConfiguration", false};
inline const Resource kTokenReviews{"authentication.k8s.io", "v1", "tokenreviews", "TokenReview", false};
inline const Resource kRlJobs{"trireme.dev", "v1alpha1", "rljobs", "RLJob", true};
}  // namespace resources

// RFC 3986: everything but unreserved characters becomes %XX.
std::string url_encode(std::string_view text);

}  // namespace trireme::kube

template <>
struct std::hash<trireme::kube::ObjectKey> {
  size_t operator()(const trireme::kube::ObjectKey& k) const noexcept {
    return std::hash<std::string>()(k.ns) * 1000003u ^ std::hash<std::string>()(k.name);
  }
};
