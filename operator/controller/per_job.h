// PerJob: what a part of the reconciler remembers of each job between reconciles. None of it is needed for correctness:
// an operator that starts again has none.
#pragma once

#include <memory>
#include <mutex>
#include <unordered_map>

#include "operator/kube/resource.h"

namespace trireme::controller {

template <class T>
class PerJob final {
 public:
  // Made when there is none; stays in its place until forget(). A job is never with two workers at once, so whoever has
  // it reads and writes without a lock.
  T& of(const kube::ObjectKey& job) {
    std::lock_guard lock(mutex_);
    auto& memory = memory_[job];
    if (!memory) memory = std::make_unique<T>();
    return *memory;
  }
  void forget(const kube::ObjectKey& job) {
    std::lock_guard lock(mutex_);
    memory_.erase(job);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<kube::ObjectKey, std::unique_ptr<T>> memory_;
};

}  // namespace trireme::controller
