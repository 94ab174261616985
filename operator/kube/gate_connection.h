// One connection of a Gate: its socket, bytes in and out, and the library's view of one request on it.
#pragma once

#include <sys/epoll.h>

#include <string>

#include "operator/kube/gate.h"

namespace trireme::kube {

enum class Io { kDone, kWantRead, kWantWrite, kDead };

// Of the gate's thread, but while it is busy of the thread that answers.
struct Gate::Connection {
  enum class State { kHandshake, kReading, kBusy, kWriting, kDraining };

  Connection(int socket, std::string address) : fd(socket), peer(std::move(address)) {}
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void wait_until(Milliseconds most) {
    since = SteadyClock::now();
    until = since + most;
  }
  Io handshake();
  // Appends to `in` until nothing is there (kWantRead, kWantWrite), the peer has ended (eof) or `in` holds `most`
  // bytes.
  Io read(size_t most);
  bool pending() const { return ssl && SSL_pending(ssl.get()) > 0; }  // decrypted and not read: no event tells of it
  Io flush();
  // flush, but waits for the peer until `until`. False: it did not take it.
  bool flush_all();
  // Overwrites the name of an Expect header that has been answered.
  void hide_expectation(size_t at) { in.replace(at, 6, "x-wait"); }
  void say_goodbye();
  // Takes what still comes; false when nothing more will, or more than `most` came.
  bool discard(size_t most);

  const int fd;
  const std::string peer;
  std::unique_ptr<SSL, OpenSslFree<SSL_free>> ssl;
  State state = State::kReading;
  SteadyClock::time_point since{}, until{};
  std::string in, out;
  size_t request_size = 0;  // at the front of `in`, while busy
  size_t counted = 0;       // of `in`, in the gate's sum
  size_t discarded = 0;
  uint32_t want = EPOLLIN;
  int served = 0;
  bool keep = false;
  bool eof = false;
  bool dead = false;
};

class Gate::Exchange final : public httplib::Stream {
 public:
  explicit Exchange(Connection& connection) : c_(connection) {}
  const std::string& peer() const { return c_.peer; }
  bool said_close() const { return said_close_; }
  bool failed() const { return failed_; }

  bool is_readable() const override { return at_ < c_.request_size; }
  bool wait_readable() const override { return is_readable(); }
  bool wait_writable() const override { return !failed_; }
  ssize_t read(char* to, size_t size) override;
  ssize_t write(const char* from, size_t size) override;
  void get_remote_ip_and_port(std::string& ip, int& port) const override;
  void get_local_ip_and_port(std::string& ip, int& port) const override;
  socket_t socket() const override { return c_.fd; }
  time_t duration() const override { return 0; }

 private:
  Connection& c_;
  size_t at_ = 0;
  bool began_ = false, said_close_ = false, failed_ = false;
};

}  // namespace trireme::kube
