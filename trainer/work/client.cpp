#include "trainer/work/client.h"

#include <httplib.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace trireme {
namespace {

constexpr Milliseconds kConnect{5000}, kPause{200};
constexpr size_t kMaxReason = 64 << 10;

}  // namespace

struct WorkClient::Impl {
  Impl(const WorkClientOptions& given, const std::atomic<bool>* asked) : options(given), stop(asked), http(given.url) {
    if (!http.is_valid()) fail_user("TRIREME_WORK_URL: '" + options.url + "' is no http://host:port");
    http.set_connection_timeout(kConnect);
    http.set_write_timeout(options.answer);
    http.set_keep_alive(true);
    http.set_tcp_nodelay(true);
    http.set_bearer_token_auth(options.ticket);
  }

  bool stopping() const { return stop != nullptr && stop->load(); }

  // The body of a 200. Tried again where nobody has answered, which the other side must not mind.
  std::string ask(const std::string& method, const std::string& path, const std::string& body, int64_t wait_ms,
                  size_t limit) {
    const Deadline deadline = Deadline::after(options.patience);
    while (true) {
      if (stopping()) throw Error(ErrorKind::kUnavailable, "the engine was asked to stop");
      std::string answer;
      bool too_long = false;
      httplib::Request request;
      request.method = method;
      request.path = path;
      request.body = body;
      if (method == "POST") request.set_header("Content-Type", "application/octet-stream");
      request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
        too_long = answer.size() + size > limit;
        if (!too_long) answer.append(data, size);
        return !too_long;
      };
      http.set_read_timeout(options.answer + Milliseconds(wait_ms));
      const httplib::Result result = http.send(request);
      if (too_long) fail_data("the actor's answer to " + path.substr(0, path.find('?')) + " is too long");
      if (result && result->status == 200) return answer;
      if (result && result->status != 500 && result->status != 503) refuse(result->status, answer);
      if (deadline.passed()) {
        throw Error(ErrorKind::kUnavailable,
                    "the actor at " + options.url + " does not answer: " +
                        (result ? "status " + std::to_string(result->status) + ", " + answer.substr(0, kMaxReason)
                                : httplib::to_string(result.error())));
      }
      std::this_thread::sleep_for(std::min(kPause, deadline.remaining() + Milliseconds(1)));
    }
  }

  [[noreturn]] static void refuse(int status, const std::string& answer) {
    const std::string why = answer.substr(0, kMaxReason);
    if (status == 403) fail_user(why);
    if (status == 409) throw Error(ErrorKind::kConflict, why);
    if (status == 401)
      throw Error(ErrorKind::kConflict, "the actor does not know this ticket: it is of another job or attempt");
    fail_data("the actor refuses a request with status " + std::to_string(status) + ": " + why);
  }

  const WorkClientOptions options;
  const std::atomic<bool>* stop;
  httplib::Client http;
};

WorkClient::WorkClient(const WorkClientOptions& options, const std::atomic<bool>* stop)
    : impl_(std::make_unique<Impl>(options, stop)) {}
WorkClient::~WorkClient() = default;

JoinReply WorkClient::join(const JoinRequest& request) {
  return parse_join_reply(impl_->ask("POST", "/v1/join", to_body(request), 0, kMaxWireHead));
}

LeaseReply WorkClient::lease(const LeaseRequest& request) {
  return parse_lease_reply(impl_->ask("POST", "/v1/lease", to_body(request), request.wait_ms, kMaxLeaseReply));
}

GroupsReply WorkClient::send_groups(const GroupsRequest& request) {
  return parse_groups_reply(impl_->ask("POST", "/v1/groups", to_body(request), 0, kMaxWireHead));
}

WeightsReply WorkClient::weights(const WeightsRequest& request) {
  return parse_weights_reply(impl_->ask("GET", "/v1/weights?" + to_query(request), "", request.wait_ms, kMaxWireHead));
}

void WorkClient::leave(const LeaveRequest& request) noexcept {
  try {
    impl_->http.set_read_timeout(kConnect);
    impl_->http.set_write_timeout(kConnect);
    (void)impl_->http.Post("/v1/leave", to_body(request), "application/octet-stream");
  } catch (...) {  // its leases go back at their deadline
    return;
  }
}

}  // namespace trireme
