// Informer<T>: a local copy of one resource that keeps only what a projection keeps, with handlers on every change.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "operator/kube/heap.h"
#include "operator/kube/json_scan.h"
#include "operator/kube/reflector.h"

namespace trireme::kube {

template <class T>
struct InformerHandlers {
  // Run on the informer's thread, in order, without a lock held; they should only queue keys. All may be empty.
  // The initial list arrives as add; in_initial_list tells it from later news.
  std::function<void(const ObjectKey&, const std::shared_ptr<const T>&, bool in_initial_list)> on_add;
  std::function<void(const ObjectKey&, const std::shared_ptr<const T>& old_object,
                     const std::shared_ptr<const T>& new_object)>
      on_update;
  std::function<void(const ObjectKey&, const std::shared_ptr<const T>& last)> on_delete;
};

template <class T>
class Informer final : private ReflectorSink {
 public:
  using Ptr = std::shared_ptr<const T>;
  // Gets the object reduced to `fields` (metadata.{namespace,name,uid,resourceVersion,labels} are always there).
  // An exception drops the object with a log line (a later event may bring a good one).
  using Projection = std::function<T(const nlohmann::json&)>;

  struct Options {
    ReflectorOptions reflector;
    JsonFields fields;        // empty: whole objects
    std::string index_label;  // label whose value by_label() finds; "" none
  };

  Informer(const Client& client, Options options, Projection projection, InformerHandlers<T> handlers = {})
      : options_(std::move(options)), projection_(std::move(projection)), handlers_(std::move(handlers)) {
    if (!options_.fields.empty()) {
      for (const char* f :
           {"metadata.namespace", "metadata.name", "metadata.uid", "metadata.resourceVersion", "metadata.labels"})
        options_.fields.add(f);
    }
    reflector_ = std::make_unique<Reflector>(client, options_.reflector, static_cast<ReflectorSink&>(*this));
  }
  ~Informer() override { stop(); }

  void start() { reflector_->start(); }
  void stop() { reflector_->stop(); }
  // True once the first list is in the store and its handlers have run.
  bool synced() const {
    std::lock_guard lock(sync_mutex_);
    return synced_;
  }
  bool wait_synced(const Deadline& deadline) const {
    std::unique_lock lock(sync_mutex_);
    return sync_changed_.wait_until(lock, deadline.at(), [&] { return synced_; });
  }

  Ptr get(const ObjectKey& key) const {
    std::shared_lock lock(mutex_);
    const auto it = store_.find(key);
    return it == store_.end() ? nullptr : it->second.object;
  }
  size_t size() const {
    std::shared_lock lock(mutex_);
    return store_.size();
  }
  // Under the read lock: keep it short, call nothing of this informer.
  void for_each(const std::function<void(const ObjectKey&, const T&)>& fn) const {
    std::shared_lock lock(mutex_);
    for (const auto& [key, entry] : store_) fn(key, *entry.object);
  }
  // Objects whose index_label has this value, ordered by key.
  std::vector<std::pair<ObjectKey, Ptr>> by_label(const std::string& value) const {
    std::shared_lock lock(mutex_);
    std::vector<std::pair<ObjectKey, Ptr>> out;
    const auto it = index_.find(value);
    if (it != index_.end()) {
      for (const auto* node : it->second) out.emplace_back(node->first, node->second.object);
    }
    lock.unlock();
    std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    return out;
  }
  const Reflector& reflector() const { return *reflector_; }

 private:
  struct Entry {
    Ptr object;
    // Of resourceVersion and uid, which are only compared; tens of thousands of entries are kept.
    uint64_t version_hash = 0;
    uint64_t uid_hash = 0;
    const std::string* label = nullptr;  // value of index_label: the key in index_
    uint64_t generation = 0;             // of the list that saw it last
  };
  using Store = std::unordered_map<ObjectKey, Entry>;

  void list_started() override { ++generation_; }
  void list_item(std::string_view object) override { upsert(object); }
  void list_finished(const std::string&) override {
    std::vector<std::pair<ObjectKey, Ptr>> gone;
    {
      std::unique_lock lock(mutex_);
      for (auto it = store_.begin(); it != store_.end();) {
        if (it->second.generation == generation_) {
          ++it;
          continue;
        }
        gone.emplace_back(it->first, it->second.object);
        unindex(*it);
        it = store_.erase(it);
      }
    }
    for (const auto& [key, object] : gone) {
      if (handlers_.on_delete) handlers_.on_delete(key, object);
    }
    {
      std::lock_guard lock(sync_mutex_);
      if (synced_) return;
      synced_ = true;
    }
    sync_changed_.notify_all();
    trim_heap();
  }
  void event(WatchEventType type, std::string_view object) override {
    if (type == WatchEventType::kDeleted) {
      erase(object);
    } else {
      upsert(object);
    }
  }

  static std::string text_at(const nlohmann::json& metadata, const char* key) {
    const auto it = metadata.find(key);
    return it != metadata.end() && it->is_string() ? it->get<std::string>() : std::string();
  }
  void upsert(std::string_view text) {
    nlohmann::json json;
    ObjectKey key;
    Entry entry;
    std::string label;
    try {
      json = options_.fields.parse(text);
      const nlohmann::json& metadata = json.at("metadata");
      key = {text_at(metadata, "namespace"), text_at(metadata, "name")};
      if (key.name.empty()) throw Error(ErrorKind::kData, "an object without metadata.name");
      entry.version_hash = hash64(text_at(metadata, "resourceVersion"));
      entry.uid_hash = hash64(text_at(metadata, "uid"));
      if (!options_.index_label.empty() && metadata.contains("labels") && metadata["labels"].is_object())
        label = text_at(metadata["labels"], options_.index_label.c_str());
    } catch (const std::exception& e) {
      log_error("informer",
                options_.reflector.resource.plural + ": an object that cannot be read was skipped: " + e.what());
      return;
    }
    Ptr old;
    {
      std::unique_lock lock(mutex_);
      const auto it = store_.find(key);
      if (it != store_.end()) {
        it->second.generation = generation_;
        static const uint64_t kNoVersion = hash64("");
        if (it->second.version_hash == entry.version_hash && entry.version_hash != kNoVersion) return;
      }
    }
    try {
      entry.object = std::make_shared<const T>(projection_(json));
    } catch (const std::exception& e) {
      log_error("informer", options_.reflector.resource.plural + " " + key.str() + ": skipped: " + e.what());
      return;
    }
    entry.generation = generation_;
    const Ptr added = entry.object;
    bool replaced = false;  // same name, new uid: the delete in between was not seen
    {
      std::unique_lock lock(mutex_);
      auto it = store_.find(key);
      if (it != store_.end()) {
        old = it->second.object;
        replaced = it->second.uid_hash != entry.uid_hash;
        unindex(*it);
        it->second = std::move(entry);
      } else {
        it = store_.emplace(key, std::move(entry)).first;
      }
      if (!label.empty()) {
        auto& indexed = *index_.try_emplace(std::move(label)).first;
        indexed.second.push_back(&*it);
        it->second.label = &indexed.first;
      }
    }
    if (replaced && handlers_.on_delete) handlers_.on_delete(key, old);
    if (old && !replaced) {
      if (handlers_.on_update) handlers_.on_update(key, old, added);
    } else if (handlers_.on_add) {
      handlers_.on_add(key, added, !synced());
    }
  }
  void erase(std::string_view text) {
    static const JsonFields kNames({"metadata.namespace", "metadata.name"});
    ObjectKey key;
    try {
      const nlohmann::json json = kNames.parse(text);
      key = {text_at(json.at("metadata"), "namespace"), text_at(json.at("metadata"), "name")};
    } catch (const std::exception& e) {
      log_error("informer",
                options_.reflector.resource.plural + ": a deletion that cannot be read was skipped: " + e.what());
      return;
    }
    Ptr last;
    {
      std::unique_lock lock(mutex_);
      const auto it = store_.find(key);
      if (it == store_.end()) return;
      last = it->second.object;
      unindex(*it);
      store_.erase(it);
    }
    if (handlers_.on_delete) handlers_.on_delete(key, last);
  }
  void unindex(const typename Store::value_type& node) {
    if (!node.second.label) return;
    const auto it = index_.find(*node.second.label);
    if (it == index_.end()) return;
    std::erase(it->second, &node);
    if (it->second.empty()) index_.erase(it);
  }

  Options options_;
  Projection projection_;
  InformerHandlers<T> handlers_;
  mutable std::shared_mutex mutex_;
  Store store_;
  std::unordered_map<std::string, std::vector<const typename Store::value_type*>> index_;  // store nodes do not move
  uint64_t generation_ = 0;                                                                // reflector thread only
  mutable std::mutex sync_mutex_;
  mutable std::condition_variable sync_changed_;
  bool synced_ = false;
  std::unique_ptr<Reflector> reflector_;  // last: its thread uses all of the above
};

}  // namespace trireme::kube
