// BackgroundSave: one rank's files of one checkpoint, copied and written beside the training thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/atomic_file.h"
#include "base/clock.h"
#include "trainer/checkpoint/staging.h"
#include "trainer/model/safetensors.h"

namespace trireme {

using OpenSink = std::function<std::unique_ptr<ByteSink>(const std::filesystem::path&)>;

// Two threads: one copies live tensors into blocks of host memory, file by file, and one writes the blocks and gives
// them back. So the tensors may be written again when copied() says so, long before the disk has them all.
class BackgroundSave final {
 public:
  struct Work {
    std::vector<TensorFile> files;  // names below `folder`; contiguous tensors
    std::filesystem::path folder;
    OpenSink open;
    std::function<void()> prepare;  // on the writing thread: makes folders, writes small files
    std::function<void()> written;  // there too, after each block, the last of a file is durable then
    std::function<void(const std::atomic<bool>& cancelled)> commit;  // there too, when all files are durable
    std::function<void(const std::exception&)> failed;               // there too, when any of it went wrong
  };

  // Begins. `reader` has been told with mark() what is to be read. Both must outlive this.
  BackgroundSave(Work work, StagingPool& pool, StateReader& reader);
  // Gives up what is not done, and waits for the threads.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  // Nothing reads the tensors any more, be it since all are copied or since it failed.
  bool copied() const;
  // Everything has ended, well or not.
  bool finished() const;
  // Returns when it is so, or false after `time`.
  bool wait_copied(Milliseconds time) const;
  bool wait_finished(Milliseconds time) const;
  // What went wrong, once finished; null: nothing did.
  std::exception_ptr error() const;
  bool failed() const;

  void cancel();

  int64_t bytes() const { return bytes_; }                          // of the files, without their headers
  int64_t moved() const { return read_.load() + written_.load(); }  // bytes so far, to see that it goes on
  double seconds() const;                                           // from the beginning to the end

 private:
  struct Piece {
    size_t file = 0;
    uint8_t* block = nullptr;  // null: no bytes
    int64_t bytes = 0;
    bool last = false;  // of its file
  };
  void copy_all();
  void write_all();
  void copy_file(size_t index);
  void push(const Piece& piece);
  bool pop(Piece& piece);  // false: there will be none
  void fail(std::exception_ptr error);

  Work work_;
  StagingPool& pool_;
  StateReader& reader_;
  std::vector<std::string> headers_;  // of the files, whose tensors go once they are copied
  int64_t bytes_ = 0;
  std::atomic<int64_t> read_{0}, written_{0};
  std::atomic<bool> cancelled_{false};
  const SteadyClock::time_point start_ = SteadyClock::now();
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Piece> pieces_;  // under mutex_, as the rest but the threads
  bool copied_ = false, finished_ = false;
  SteadyClock::time_point end_{};
  std::exception_ptr error_;
  std::thread copier_, writer_;
};

}  // namespace trireme
