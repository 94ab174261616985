// Gate: what stands in front of a server's threads, as a buffering reverse proxy would: it takes connections and lets
// whole requests in. One thread reads all connections and waits for none of them, so a peer that sends slowly, or
// nothing, costs a socket and a little memory but no thread; only what scan_request finds whole and within its limits
// reaches the threads that answer. Internal to HttpServer.
#pragma once

#include <httplib.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "operator/kube/request_scan.h"
#include "operator/kube/tls.h"

namespace trireme::kube {

struct GateOptions {
  std::string name = "http";  // in log lines
  std::string address = "0.0.0.0";
  int port = 0;  // 0: the system chooses
  RequestLimits limits;
  int threads = 8;                // requests answered at once
  size_t max_waiting = 256;       // whole requests that wait for a thread; more get 503
  size_t max_connections = 1024;  // over it the one that has made us wait longest is closed, as below
  size_t max_per_peer = 64;       // connections of one address
  // Of requests that are not whole yet, all connections together; and once more of whole ones, where more get 503.
  size_t max_buffered_bytes = 16 << 20;
  Milliseconds request_timeout{10000};  // for one request to become whole, TLS handshake included
  Milliseconds keep_alive{5000};        // between two requests
  Milliseconds answer_timeout{30000};   // for the peer to take an answer
};

class Gate final {
 public:
  // One request and where its answer goes, as the library's stream. Used by one thread.
  class Exchange;
  // Called on one of `threads`; returns whether the connection may be kept.
  using Serve = std::function<bool(Exchange&)>;
  // The certificate of a new handshake; null: plain HTTP.
  using FindIdentity = std::function<std::shared_ptr<const Identity>()>;

  Gate(GateOptions options, Serve serve, FindIdentity identity);
  ~Gate();  // stops
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void start();  // throws Error(kIo) naming address and port
  // No new requests; waits for those that are being answered.
  void stop();
  int port() const { return port_; }

 private:
  struct Connection;
  using Connections = std::unordered_map<int, std::unique_ptr<Connection>>;

  void listen();
  void run();
  void accept_some();
  void on_event(Connection& c);
  bool shake_hands(Connection& c);
  void read_some(Connection& c);
  void advance(Connection& c);
  void dispatch(Connection& c);
  void answer_now(Connection& c, int status, const std::string& message);
  void go_on(Connection& c);
  void take_returned();
  void drain(Connection& c);
  void expire();
  bool evict(const std::string* peer);
  void arm(Connection& c, uint32_t events);
  void close(Connection& c);
  void wake();

  const GateOptions options_;
  const Serve serve_;
  const FindIdentity find_identity_;
  std::unique_ptr<SSL_CTX, OpenSslFree<SSL_CTX_free>> context_;
  int listener_ = -1, epoll_ = -1, wake_ = -1;
  int port_ = 0;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::unique_ptr<httplib::ThreadPool> pool_;

  // The thread's:
  Connections connections_;
  std::map<std::string, size_t> peers_;
  size_t buffered_ = 0;  // of requests that are not whole
  size_t busy_ = 0;      // of those that wait for an answer
  SteadyClock::time_point next_look_{};

  std::mutex returned_mutex_;
  std::vector<int> returned_;
};

}  // namespace trireme::kube
