// OutputTail: forwards a rank's stderr and keeps its last lines.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace trireme {

// Copies what comes out of a pipe to our stderr line by line, on a thread of its own. The pipe may be held open by
// processes that nobody waits for: after stop() what it holds is taken, and its end is not waited for.
class OutputTail final {
 public:
  OutputTail(int fd, size_t keep);  // does not own the descriptor, which must stay open as long as this
  ~OutputTail();
  OutputTail(const OutputTail&) = delete;
  OutputTail& operator=(const OutputTail&) = delete;

  // The writer is gone: the thread takes what is left and ends.
  void stop();
  // The last lines. Waits for the thread's end, at most until the deadline.
  std::vector<std::string> lines(const Deadline& deadline);

 private:
  void take(const std::string& line);
  void read_all(int fd);

  const size_t keep_;
  int wake_ = -1;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::deque<std::string> lines_;
  bool done_ = false;
  bool stopping_ = false;
  std::thread reader_;
};

}  // namespace trireme
