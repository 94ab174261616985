#include "trainer/launch/output_tail.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"

namespace trireme {
namespace {

constexpr size_t kMostAfterStop = 1 << 20;  // of a pipe that somebody keeps filling
constexpr size_t kLongestLine = 1 << 16;    // a longer one is cut in pieces

}  // namespace

OutputTail::OutputTail(int fd, size_t keep) : keep_(keep), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (wake_ < 0) fail_io(std::string("cannot make an eventfd: ") + std::strerror(errno));
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  reader_ = std::thread([this, fd] { read_all(fd); });
}

OutputTail::~OutputTail() {
  stop();
  reader_.join();
  ::close(wake_);
}

void OutputTail::stop() {
  const std::lock_guard<std::mutex> lock(mutex_);
  stopping_ = true;
  const uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
}

std::vector<std::string> OutputTail::lines(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait_until(lock, deadline.at(), [&] { return done_; });
  return {lines_.begin(), lines_.end()};
}

void OutputTail::take(const std::string& line) {
  const std::string out = line + "\n";
  (void)!::write(STDERR_FILENO, out.data(), out.size());
  const std::lock_guard<std::mutex> lock(mutex_);
  lines_.push_back(line.substr(0, 2000));
  if (lines_.size() > keep_) lines_.pop_front();
}

void OutputTail::read_all(int fd) {
  std::string rest;
  char buffer[8192];
  size_t after_stop = 0;
  while (true) {
    bool last = false;  // asked before it is read: what was written before stop() is there
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      last = stopping_;
    }
    const ssize_t got = ::read(fd, buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN && !last) {
      pollfd fds[2] = {{fd, POLLIN, 0}, {wake_, POLLIN, 0}};
      ::poll(fds, 2, -1);  // stop() ends it
      continue;
    }
    if (got <= 0) break;
    rest.append(buffer, static_cast<size_t>(got));
    size_t end;
    while ((end = rest.find('\n')) != std::string::npos) {
      take(rest.substr(0, end));
      rest.erase(0, end + 1);
    }
    if (rest.size() > kLongestLine) {
      take(rest);
      rest.clear();
    }
    if (last && (after_stop += static_cast<size_t>(got)) > kMostAfterStop) break;
  }
  if (!rest.empty()) take(rest);
  const std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  ended_.notify_all();
}

}  // namespace trireme
