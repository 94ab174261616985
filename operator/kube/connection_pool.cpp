#include "operator/kube/connection_pool.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <sys/socket.h>

#include "base/error.h"
#include "base/sigpipe.h"

namespace trireme::kube {
namespace {

constexpr auto kMaxIdle = std::chrono::seconds(60);  // below the apiserver's own limit

thread_local std::string t_verify_error;

int on_verify(int ok, X509_STORE_CTX* context) {
  if (!ok) t_verify_error = X509_verify_cert_error_string(X509_STORE_CTX_get_error(context));
  return ok;
}

bool is_address(const std::string& host) {
  unsigned char buffer[16];
  return inet_pton(AF_INET, host.c_str(), buffer) == 1 || inet_pton(AF_INET6, host.c_str(), buffer) == 1;
}

void set_socket_options(socket_t socket) {
  const auto set = [&](int level, int name, int value) { setsockopt(socket, level, name, &value, sizeof value); };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);  // finds a dead peer under a silent watch
  set(IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 30000);
}

// OpenSSL itself verifies chain and name during the handshake. The library's own check is off: it would also trust the
// system's CAs, and compares names with code of its own.
void set_up_tls(SSL_CTX* context, const ClientConfig& config, const TlsMaterial& tls) {
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_mode(context,
                   SSL_MODE_RELEASE_BUFFERS);  // 34 KiB a connection, of which a burst opens more than a hundred
  SSL_CTX_set1_cert_store(context, tls.store.get());
  X509_VERIFY_PARAM* parameters = SSL_CTX_get0_param(context);
  const std::string& name = config.server_name.empty() ? config.host : config.server_name;
  const bool set = is_address(name) ? X509_VERIFY_PARAM_set1_ip_asc(parameters, name.c_str()) == 1
                                    : X509_VERIFY_PARAM_set1_host(parameters, name.data(), name.size()) == 1;
  if (!set) fail_user("'" + name + "' is no host name or address that a certificate can be checked for");
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, on_verify);
  if (tls.identity) {
    bool ok = SSL_CTX_use_certificate(context, tls.identity->certificate.get()) == 1 &&
              SSL_CTX_use_PrivateKey(context, tls.identity->key.get()) == 1;
    for (const X509Ptr& link : tls.identity->chain) ok = ok && SSL_CTX_add1_chain_cert(context, link.get()) == 1;
    if (!ok) fail_data("the client certificate cannot be used: " + openssl_error());
  }
}

}  // namespace

std::string take_verify_error() {
  std::string out;
  out.swap(t_verify_error);
  return out;
}

std::unique_ptr<Connection> ConnectionPool::make() {
  ignore_sigpipe();
  auto connection = std::make_unique<Connection>();
  if (config_.scheme == "https") {
    connection->tls = credentials_.tls();
    auto client = std::make_unique<httplib::SSLClient>(config_.host, config_.port);
    if (!client->is_valid()) fail_internal("a TLS context could not be made: " + openssl_error());
    client->enable_server_certificate_verification(false);
    set_up_tls(static_cast<SSL_CTX*>(client->tls_context()), config_, *connection->tls);
    connection->http = std::move(client);
  } else {
    connection->http = std::make_unique<httplib::ClientImpl>(config_.host, config_.port);
  }
  connection->http->set_keep_alive(true);
  connection->http->set_tcp_nodelay(true);
  connection->http->set_decompress(false);
  connection->http->set_path_encode(false);
  connection->http->set_follow_location(false);
  connection->http->set_socket_options(set_socket_options);
  return connection;
}

std::unique_ptr<Connection> ConnectionPool::acquire(const Deadline& deadline, bool fresh) {
  {
    std::unique_lock lock(mutex_);
    if (!freed_.wait_until(lock, deadline.at(), [&] { return in_use_ < max_connections_; })) return nullptr;
    ++in_use_;
  }
  try {
    const uint64_t generation = config_.scheme == "https" ? credentials_.tls()->generation : 0;
    while (!fresh) {
      std::unique_ptr<Connection> connection;
      {
        std::lock_guard lock(mutex_);
        if (idle_.empty()) break;
        connection = std::move(idle_.back());
        idle_.pop_back();
      }
      const bool current = !connection->tls || connection->tls->generation == generation;
      if (current && SteadyClock::now() - connection->idle_since < kMaxIdle) return connection;
    }
    return make();
  } catch (...) {
    release(nullptr, false);
    throw;
  }
}

void ConnectionPool::release(std::unique_ptr<Connection> connection, bool reusable) {
  std::unique_ptr<Connection> old;
  {
    std::lock_guard lock(mutex_);
    --in_use_;
    if (connection && reusable) {
      connection->idle_since = SteadyClock::now();
      idle_.push_back(std::move(connection));
    }
    if (!idle_.empty() && SteadyClock::now() - idle_.front()->idle_since >= kMaxIdle) {
      old = std::move(idle_.front());
      idle_.pop_front();
    }
  }
  freed_.notify_one();
}

void set_timeouts(httplib::ClientImpl& http, Milliseconds connect, Milliseconds read, Milliseconds write) {
  const auto at_least = [](Milliseconds t) { return std::max(t, Milliseconds(1)); };
  http.set_connection_timeout(at_least(connect));
  http.set_read_timeout(at_least(read));
  http.set_write_timeout(at_least(write));
  // The library puts its time-outs on the socket only when it connects; a kept connection would have the first
  // request's.
  if (!http.is_socket_open()) return;
  const auto set = [&](int name, Milliseconds t) {
    const timeval value{static_cast<time_t>(t.count() / 1000), static_cast<suseconds_t>(t.count() % 1000 * 1000)};
    setsockopt(http.socket(), SOL_SOCKET, name, &value, sizeof value);
  };
  set(SO_RCVTIMEO, at_least(read));
  set(SO_SNDTIMEO, at_least(write));
}

}  // namespace trireme::kube
