#include "operator/kube/api_error.h"

#include <nlohmann/json.hpp>

#include "base/text.h"

namespace trireme::kube {
namespace {

constexpr size_t kMostReasonBytes = 100;
constexpr size_t kMostMessageBytes = 1024;
constexpr size_t kMostBodyBytes = 200;  // of an answer that is no Status: a proxy's page, say

}  // namespace

const char* to_string(ApiErrorKind kind) {
  switch (kind) {
    case ApiErrorKind::kNotFound:
      return "not found";
    case ApiErrorKind::kConflict:
      return "conflict";
    case ApiErrorKind::kAlreadyExists:
      return "already exists";
    case ApiErrorKind::kGone:
      return "gone";
    case ApiErrorKind::kInvalid:
      return "invalid";
    case ApiErrorKind::kForbidden:
      return "forbidden";
    case ApiErrorKind::kUnavailable:
      return "unavailable";
    case ApiErrorKind::kTimeout:
      return "timeout";
  }
  return "unknown";
}

ApiError ApiError::from_response(std::string_view what, int status, std::string_view body,
                                 std::optional<Milliseconds> retry_after) {
  std::string reason;
  std::string detail;
  const nlohmann::json json = nlohmann::json::parse(body, nullptr, false);
  if (json.is_object()) {
    const auto text = [&](const char* key) {
      const auto it = json.find(key);
      return it != json.end() && it->is_string() ? it->get<std::string>() : std::string();
    };
    reason = text("reason");
    detail = text("message");
    if (!retry_after && json.contains("details") && json["details"].is_object()) {
      const auto it = json["details"].find("retryAfterSeconds");
      if (it != json["details"].end() && it->is_number_integer()) {
        const int64_t seconds = it->get<int64_t>();
        if (seconds > 0 && seconds <= 3600) retry_after = Milliseconds(seconds * 1000);
      }
    }
  }
  // They go into log lines, events and statuses, which must be JSON.
  reason = one_line(reason, kMostReasonBytes);
  detail = detail.empty() ? one_line(body, kMostBodyBytes) : one_line(detail, kMostMessageBytes);
  ApiErrorKind kind = ApiErrorKind::kInvalid;
  if (status == 404) {
    kind = ApiErrorKind::kNotFound;
  } else if (status == 409) {
    kind = reason == "AlreadyExists" ? ApiErrorKind::kAlreadyExists : ApiErrorKind::kConflict;
  } else if (status == 410) {
    kind = ApiErrorKind::kGone;
  } else if (status == 401 || status == 403) {
    kind = ApiErrorKind::kForbidden;
  } else if (status == 429 || status >= 500 || status < 200) {
    kind = ApiErrorKind::kUnavailable;
  }
  return ApiError(kind, status, std::move(reason),
                  std::string(what) + ": HTTP " + std::to_string(status) + ": " + detail, retry_after);
}

}  // namespace trireme::kube
