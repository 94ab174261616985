#include "trainer/work/server.h"

#include <httplib.h>

#include <atomic>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"

namespace trireme {
namespace {

// An engine has at most three requests under way; each waits on a thread.
constexpr size_t kThreads = 8, kMostThreads = 512, kMostWaiting = 1024;

// In a time that does not tell how much of it is right.
bool same_secret(const std::string& a, const std::string& b) {
  unsigned char differs = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < a.size() && !b.empty(); ++i)
    differs = static_cast<unsigned char>(differs | (a[i] ^ b[i % b.size()]));
  return differs == 0;
}

int status_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUser:
      return 403;
    case ErrorKind::kData:
      return 400;
    case ErrorKind::kConflict:
      return 409;
    default:
      return 500;
  }
}

}  // namespace

struct WorkServer::Impl {
  Impl(const WorkServerOptions& given, SharedDesk& shared) : options(given), desk(shared) {
    // The library's default sets SO_REUSEPORT, under which a second server on the port would silently share it.
    server.set_socket_options([](socket_t socket) {
      const int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    });
    server.new_task_queue = [] { return new httplib::ThreadPool(kThreads, kMostThreads, kMostWaiting); };
    server.set_payload_max_length(options.max_body_bytes);
    server.set_keep_alive_timeout(5);
    server.set_keep_alive_max_count(1 << 20);
    server.set_read_timeout(30);
    server.set_write_timeout(30);
    server.set_tcp_nodelay(true);
    server.set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      if (same_secret(request.get_header_value("Authorization"), "Bearer " + options.ticket))
        return httplib::Server::HandlerResponse::Unhandled;
      response.status = 401;
      response.set_header("Connection", "close");
      response.set_content("the ticket of this job is missing\n", "text/plain");
      return httplib::Server::HandlerResponse::Handled;
    });
    routes();
    if (options.port == 0) {
      bound_port = server.bind_to_any_port(options.address);
    } else {
      bound_port = server.bind_to_port(options.address, options.port) ? options.port : -1;
    }
    if (bound_port <= 0) {
      fail_io("the work server of generation processes cannot listen on " + options.address + ":" +
              std::to_string(options.port) + " (TRIREME_WORK_PORT): the port is in use or not allowed");
    }
    thread = std::thread([this] {
      server.listen_after_bind();
      ended = true;
    });
  }

  ~Impl() {
    desk.stop();
    // Once, and only when its loop runs: before that stop() does nothing, and a second time it asserts.
    for (bool told = false; !ended.load(); std::this_thread::sleep_for(Milliseconds(1))) {
      if (told || !server.is_running()) continue;
      server.stop();
      told = true;
    }
    thread.join();
  }

  // `answer` makes the body of a 200.
  template <typename Answer>
  void respond(httplib::Response& response, Answer&& answer) {
    try {
      response.set_content(answer(), "application/json");
    } catch (const Error& error) {
      response.status = status_of(error.kind());
      response.set_content(error.what(), "text/plain");
      if (response.status != 409) log_warn("engines", error.what());
    } catch (const std::exception& error) {
      response.status = 500;
      response.set_content(error.what(), "text/plain");
      log_error("engines", std::string("the work server: ") + error.what());
    }
  }

  void routes() {
    server.Post("/v1/join", [this](const httplib::Request& request, httplib::Response& response) {
      respond(response, [&] { return to_body(desk.join(parse_join_request(request.body))); });
    });
    server.Post("/v1/lease", [this](const httplib::Request& request, httplib::Response& response) {
      respond(response,
              [&] { return to_body(desk.lease(parse_lease_request(request.body), request.is_connection_closed)); });
    });
    server.Post("/v1/groups", [this](const httplib::Request& request, httplib::Response& response) {
      respond(response, [&] { return to_body(desk.take_groups(parse_groups_request(request.body))); });
    });
    server.Get("/v1/weights", [this](const httplib::Request& request, httplib::Response& response) {
      respond(response, [&] {
        const size_t sign = request.target.find('?');
        const std::string query = sign == std::string::npos ? "" : request.target.substr(sign + 1);
        return to_body(desk.weights(parse_weights_query(query), request.is_connection_closed));
      });
    });
    server.Post("/v1/leave", [this](const httplib::Request& request, httplib::Response& response) {
      respond(response, [&] {
        desk.leave(parse_leave_request(request.body));
        return std::string("{}");
      });
    });
  }

  const WorkServerOptions options;
  SharedDesk& desk;
  httplib::Server server;
  int bound_port = 0;
  std::atomic<bool> ended{false};
  std::thread thread;
};

WorkServer::WorkServer(const WorkServerOptions& options, SharedDesk& desk)
    : impl_(std::make_unique<Impl>(options, desk)) {}
WorkServer::~WorkServer() = default;

int WorkServer::port() const { return impl_->bound_port; }

}  // namespace trireme
