// FakeStore: what the fake apiserver keeps: objects by kind and key, each change with a rising resourceVersion and in
// the log that watches read; finalizers and the garbage collector. Whoever calls what ends in _locked holds `mutex_`.
#pragma once

#include <condition_variable>
#include <cstdio>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "operator/kube/events.h"
#include "operator/kube/resource.h"
#include "tests/unit/kube/selectors.h"

namespace trireme::kube::testing {

using Json = nlohmann::json;

class FakeStore {
 protected:
  struct Kind {
    Resource resource;
    bool status_subresource = false;
  };
  struct LogEntry {
    int64_t version;
    std::string kind;
    ObjectKey key;
    std::shared_ptr<const Json> old_object;  // null: created
    std::shared_ptr<const Json> new_object;  // null: deleted
    std::shared_ptr<const Json> last;        // what a DELETED event shows
  };
  using Params = std::map<std::string, std::string>;

  explicit FakeStore(bool graceful_pods) : graceful_pods_(graceful_pods) {}
  ~FakeStore() = default;

  static std::string kind_id(const Resource& r) { return r.group_path() + "/" + r.plural; }

  Json* find_locked(const std::string& id, const ObjectKey& key) {
    const auto kind = store_.find(id);
    if (kind == store_.end()) return nullptr;
    const auto it = kind->second.find(key);
    return it == kind->second.end() ? nullptr : &it->second;
  }
  void log_locked(const std::string& id, const ObjectKey& key, const Json* old_object, const Json* new_object,
                  const Json* last) {
    const auto share = [](const Json* j) { return j ? std::make_shared<const Json>(*j) : nullptr; };
    log_.push_back({version_, id, key, share(old_object), share(new_object), share(last)});
    changed_.notify_all();
  }
  Json insert_locked(const Resource& resource, const ObjectKey& key, Json object) {
    Json& metadata = object["metadata"];
    char uid[64];
    std::snprintf(uid, sizeof uid, "00000000-0000-4000-8000-%012llx", static_cast<unsigned long long>(++uids_));
    metadata["uid"] = uid;
    metadata["name"] = key.name;
    if (!metadata.contains("creationTimestamp")) metadata["creationTimestamp"] = format_time(unix_now_ms());
    metadata["generation"] = 1;
    metadata["resourceVersion"] = std::to_string(++version_);
    if (!object.contains("kind")) object["kind"] = resource.kind;
    if (!object.contains("apiVersion")) object["apiVersion"] = resource.api_version();
    store_[kind_id(resource)][key] = object;
    log_locked(kind_id(resource), key, nullptr, &object, nullptr);
    return object;
  }
  Json replace_locked(const Resource& resource, const ObjectKey& key, Json object) {
    Json& slot = *find_locked(kind_id(resource), key);
    const Json old = slot;
    object["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"];
    object["metadata"]["generation"] = old["metadata"]["generation"];
    if (object == old) return old;
    if (object.value("spec", Json()) != old.value("spec", Json())) {
      object["metadata"]["generation"] = old["metadata"].value("generation", 1) + 1;
    }
    object["metadata"]["resourceVersion"] = std::to_string(++version_);
    slot = object;
    log_locked(kind_id(resource), key, &old, &object, nullptr);
    const Json& metadata = object["metadata"];
    const bool held = metadata.contains("finalizers") && !metadata["finalizers"].empty();
    const bool graceful_pod = resource.kind == "Pod" && graceful_pods_;
    if (metadata.contains("deletionTimestamp") && !held && !graceful_pod) erase_locked(resource, key);
    return object;
  }
  bool erase_locked(const Resource& resource, const ObjectKey& key) {
    Json* found = find_locked(kind_id(resource), key);
    if (!found) return false;
    const Json old = *found;
    store_[kind_id(resource)].erase(key);
    Json last = old;
    last["metadata"]["resourceVersion"] = std::to_string(++version_);
    log_locked(kind_id(resource), key, &old, nullptr, &last);
    cascade_locked(old["metadata"].value("uid", ""));
    return true;
  }
  void cascade_locked(const std::string& uid) {
    collected_.insert(uid);
    std::vector<std::pair<Resource, ObjectKey>> dependents;
    for (const auto& [id, kind] : kinds_) {
      const auto objects = store_.find(id);
      if (objects == store_.end()) continue;
      for (const auto& [key, object] : objects->second) {
        const auto owners = object["metadata"].find("ownerReferences");
        if (owners == object["metadata"].end()) continue;
        for (const Json& owner : *owners) {
          if (owner.value("uid", "") == uid) dependents.emplace_back(kind.resource, key);
        }
      }
    }
    for (const auto& [resource, key] : dependents) delete_locked(resource, key);
  }
  void delete_locked(const Resource& resource, const ObjectKey& key) {
    Json* found = find_locked(kind_id(resource), key);
    if (!found) return;
    const bool held = found->at("metadata").contains("finalizers") && !found->at("metadata")["finalizers"].empty();
    if (!held && !(resource.kind == "Pod" && graceful_pods_)) {
      erase_locked(resource, key);
      return;
    }
    if (found->at("metadata").contains("deletionTimestamp")) return;
    Json object = *found;
    object["metadata"]["deletionTimestamp"] = format_time(unix_now_ms());
    replace_locked(resource, key, std::move(object));
  }

  static bool selected(const Json& object, const ObjectKey& key, const std::string& ns, const Params& params) {
    if (!ns.empty() && key.ns != ns) return false;
    const auto value = [&](const char* name) {
      const auto it = params.find(name);
      return it == params.end() ? std::string() : it->second;
    };
    return labels_match(object, value("labelSelector")) && fields_match(object, value("fieldSelector"));
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Kind> kinds_;
  std::map<std::string, std::map<ObjectKey, Json>> store_;
  std::set<std::string> collected_;  // uids of objects that are gone
  std::deque<LogEntry> log_;
  int64_t version_ = 1000;

 private:
  const bool graceful_pods_;  // deleting a pod only sets deletionTimestamp
  uint64_t uids_ = 0;
};

}  // namespace trireme::kube::testing
