#include "operator/controller/network_policy.h"

#include <algorithm>
#include <initializer_list>

#include "api/runtime.h"
#include "base/error.h"
#include "base/text.h"
#include "operator/controller/observed.h"

namespace trireme::controller {
namespace {

void check_members(const Json& object, std::initializer_list<const char*> known, const std::string& where) {
  if (!object.is_object()) fail_user(where + " must be an object");
  for (const auto& [key, value] : object.items()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) fail_user(where + " has the unknown key " + key);
  }
}

Json texts(const Json& list, const std::string& where) {
  const bool right =
      list.is_array() && std::all_of(list.begin(), list.end(), [](const Json& item) { return item.is_string(); });
  if (!right) fail_user(where + " must be a list of strings");
  return list;
}

Json requirement(const Json& given, const std::string& where) {
  check_members(given, {"key", "operator", "values"}, where);
  const auto text = [&](const char* key) {
    const auto found = given.find(key);
    return found != given.end() && found->is_string() ? found->get<std::string>() : std::string();
  };
  Json out = {{"key", text("key")}, {"operator", text("operator")}};
  if (text("key").empty()) fail_user(where + " has no key");
  const std::string wanted = text("operator");
  const bool takes_values = wanted == "In" || wanted == "NotIn";
  if (!takes_values && wanted != "Exists" && wanted != "DoesNotExist")
    fail_user(where + ".operator must be In, NotIn, Exists or DoesNotExist");
  const Json values = given.contains("values") ? texts(given["values"], where + ".values") : Json::array();
  if (takes_values == values.empty())
    fail_user(where + (takes_values ? " needs values" : " takes no values") + " with " + wanted);
  if (takes_values) out["values"] = values;
  return out;
}

Json selector(const Json& given, const std::string& where) {
  check_members(given, {"matchLabels", "matchExpressions"}, where);
  Json out = Json::object();
  if (const auto labels = given.find("matchLabels"); labels != given.end() && !labels->is_null()) {
    if (!labels->is_object()) fail_user(where + ".matchLabels must be an object");
    for (const auto& [key, value] : labels->items()) {
      if (!value.is_string()) fail_user(where + ".matchLabels." + key + " must be a string");
    }
    if (!labels->empty()) out["matchLabels"] = *labels;
  }
  if (const auto list = given.find("matchExpressions"); list != given.end() && !list->is_null()) {
    const std::string at = where + ".matchExpressions";
    if (!list->is_array()) fail_user(at + " must be a list");
    for (size_t i = 0; i < list->size(); ++i)
      out["matchExpressions"].push_back(requirement((*list)[i], at + "[" + std::to_string(i) + "]"));
  }
  return out;
}

Json ip_block(const Json& given, const std::string& where) {
  check_members(given, {"cidr", "except"}, where);
  const auto cidr = given.find("cidr");
  if (cidr == given.end() || !cidr->is_string() || cidr->get_ref<const std::string&>().find('/') == std::string::npos)
    fail_user(where + ".cidr must be addresses such as 10.0.0.0/8");
  Json out = {{"cidr", *cidr}};
  if (given.contains("except")) {
    const Json except = texts(given["except"], where + ".except");
    if (!except.empty()) out["except"] = except;
  }
  return out;
}

Json peer(const Json& given, const std::string& where) {
  check_members(given, {"namespaceSelector", "podSelector", "ipBlock"}, where);
  if (given.empty()) fail_user(where + " is empty: it needs a namespaceSelector, a podSelector or an ipBlock");
  Json out = Json::object();
  if (const auto block = given.find("ipBlock"); block != given.end()) {
    if (given.size() > 1) fail_user(where + " has an ipBlock, beside which it may have no selector");
    out["ipBlock"] = ip_block(*block, where + ".ipBlock");
  }
  for (const char* key : {"namespaceSelector", "podSelector"}) {
    if (given.contains(key)) out[key] = selector(given[key], where + "." + key);
  }
  return out;
}

}  // namespace

bool wants_network_policy(const RLJob& job, const ObjectOptions& options) {
  if (!options.network_policies) return false;
  const std::vector<RoleRef> roles = roles_of(job.spec);
  return std::none_of(roles.begin(), roles.end(),
                      [&](const RoleRef& role) { return uses_host_network(job.spec, *role.spec); });
}

Json network_policy(const AttemptContext& c) {
  const RLJob& job = c.job;
  const Json own_pods = {{"matchLabels", {{kLabelJobUid, job.metadata.uid}}}};
  Json ingress = Json::array();
  ingress.push_back({{"from", Json::array({{{"podSelector", own_pods}}})}});
  if (!c.options.scraped_by.empty()) {
    const Json metrics = {{"port", job.spec.network.metrics_port}, {"protocol", "TCP"}};
    ingress.push_back({{"from", c.options.scraped_by}, {"ports", Json::array({metrics})}});
  }
  return {{"apiVersion", "networking.k8s.io/v1"},
          {"kind", "NetworkPolicy"},
          {"metadata",
           {{"name", network_policy_name(job.metadata.name)},
            {"namespace", job.metadata.namespace_},
            {"labels", job_labels(job)},
            {"ownerReferences", Json::array({owner_reference(job)})}}},
          {"spec",
           {{"podSelector", own_pods}, {"policyTypes", Json::array({"Ingress"})}, {"ingress", std::move(ingress)}}}};
}

uint64_t policy_fingerprint(const Json& spec) { return hash64(spec.dump()); }

Json parse_policy_peers(std::string_view text) {
  const Json given = parse_json_bounded(text, "the list of peers");
  if (!given.is_array()) fail_user("the list of peers must be a JSON list, such as [{\"namespaceSelector\": {}}]");
  Json out = Json::array();
  for (size_t i = 0; i < given.size(); ++i) out.push_back(peer(given[i], "peer [" + std::to_string(i) + "]"));
  return out;
}

}  // namespace trireme::controller
