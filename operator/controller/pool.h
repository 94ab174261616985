// Pool: a few threads that run the independent requests of one wave (creates, deletes) side by side.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace trireme::controller {

class Pool final {
 public:
  explicit Pool(int threads);
  ~Pool();  // no run() may be in progress
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs every task and returns when all have ended; then throws the first exception, if there was one. Several callers
  // may run at once; they share the threads. The caller works too, so a call makes progress even when all threads are
  // busy.
  void run(std::vector<std::function<void()>> tasks);

 private:
  struct Batch;
  void work();
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Batch>> batches_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace trireme::controller
