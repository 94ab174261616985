// ConnectionPool: HTTP(S) connections to one apiserver; one request at a time on each. Internal to the client.
#pragma once

#include <httplib.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include "base/clock.h"
#include "operator/kube/client_config.h"
#include "operator/kube/credentials.h"

namespace trireme::kube {

struct Connection {
  std::unique_ptr<httplib::ClientImpl> http;
  std::shared_ptr<const TlsMaterial> tls;  // keeps the store and key alive; null over plain HTTP
  bool reused = false;                     // has answered a request before
  SteadyClock::time_point idle_since{};
};

// Why OpenSSL refused the server's certificate in this thread's last handshake, "" if it did not; read once.
std::string take_verify_error();

class ConnectionPool final {
 public:
  ConnectionPool(const ClientConfig& config, Credentials& credentials, int max_connections)
      : config_(config), credentials_(credentials), max_connections_(max_connections) {}

  // A connection of nobody else, kept or new (not yet connected). Null: none came free before the deadline.
  std::unique_ptr<Connection> acquire(const Deadline& deadline, bool fresh);
  void release(std::unique_ptr<Connection> connection, bool reusable);
  // Outside the pool's count.
  std::unique_ptr<Connection> make();

 private:
  const ClientConfig& config_;
  Credentials& credentials_;
  const int max_connections_;
  std::mutex mutex_;
  std::condition_variable freed_;
  int in_use_ = 0;
  std::deque<std::unique_ptr<Connection>> idle_;  // newest at the back
};

// How long the next request on this connection may wait for the server at each step.
void set_timeouts(httplib::ClientImpl& http, Milliseconds connect, Milliseconds read, Milliseconds write);

}  // namespace trireme::kube
