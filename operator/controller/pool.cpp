#include "operator/controller/pool.h"

#include <utility>

namespace trireme::controller {

struct Pool::Batch {
  std::mutex mutex;
  std::condition_variable done;
  std::vector<std::function<void()>> tasks;
  size_t next = 0;
  size_t ended = 0;
  std::exception_ptr failure;

  // One task, on this thread; false when none is left to begin.
  bool step() {
    size_t mine;
    {
      std::lock_guard lock(mutex);
      if (next == tasks.size()) return false;
      mine = next++;
    }
    std::exception_ptr thrown;
    try {
      tasks[mine]();
    } catch (...) {
      thrown = std::current_exception();
    }
    std::lock_guard lock(mutex);
    if (thrown && !failure) failure = thrown;
    if (++ended == tasks.size()) done.notify_all();
    return true;
  }
};

Pool::Pool(int threads) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
}

Pool::~Pool() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::run(std::vector<std::function<void()>> tasks) {
  if (tasks.empty()) return;
  auto batch = std::make_shared<Batch>();
  batch->tasks = std::move(tasks);
  if (batch->tasks.size() > 1) {
    {
      std::lock_guard lock(mutex_);
      batches_.push_back(batch);
    }
    wake_.notify_all();
  }
  while (batch->step()) {
  }
  std::unique_lock lock(batch->mutex);
  batch->done.wait(lock, [&] { return batch->ended == batch->tasks.size(); });
  // The last owner of the batch may be another thread: what was thrown is to end here, with who reads it.
  if (const std::exception_ptr failure = std::exchange(batch->failure, nullptr)) std::rethrow_exception(failure);
}

void Pool::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stopping_ || !batches_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<Batch> batch = batches_.front();
    lock.unlock();
    const bool more = batch->step();
    lock.lock();
    if (more) {
      // Another batch's turn: callers share the threads fairly.
      if (batches_.size() > 1 && batches_.front() == batch) {
        batches_.pop_front();
        batches_.push_back(batch);
      }
    } else {
      std::erase(batches_, batch);
    }
  }
}

}  // namespace trireme::controller
