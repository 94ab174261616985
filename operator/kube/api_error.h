// ApiError: what the Kubernetes API (or the way to it) answered, typed so that callers branch on kind() and never on
// text.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "base/clock.h"

namespace trireme::kube {

enum class ApiErrorKind {
  kNotFound,       // 404
  kConflict,       // 409: the object changed since it was read; read again and retry
  kAlreadyExists,  // 409 on create: somebody (perhaps we, before a lost answer) made it
  kGone,           // 410: resourceVersion or continue token too old; list again
  kInvalid,        // any other 4xx: the request itself is wrong (422), or admission denied it and named no code (400)
  kForbidden,      // 401, 403
  kUnavailable,    // 429, 5xx, connection refused or cut: try again later
  kTimeout,        // our deadline passed; whether the server acted is not known
};

const char* to_string(ApiErrorKind kind);

class ApiError final : public std::runtime_error {
 public:
  ApiError(ApiErrorKind kind, int status, std::string reason, const std::string& message,
           std::optional<Milliseconds> retry_after = std::nullopt)
      : std::runtime_error(message),
        kind_(kind),
        status_(status),
        reason_(std::move(reason)),
        retry_after_(retry_after) {}

  ApiErrorKind kind() const { return kind_; }
  int status() const { return status_; }                 // HTTP status; 0 when no answer came
  const std::string& reason() const { return reason_; }  // Status.reason, e.g. "AlreadyExists"; may be empty
  std::optional<Milliseconds> retry_after() const { return retry_after_; }  // from Retry-After
  bool not_found() const { return kind_ == ApiErrorKind::kNotFound; }
  bool conflict() const { return kind_ == ApiErrorKind::kConflict; }
  bool already_exists() const { return kind_ == ApiErrorKind::kAlreadyExists; }
  // Worth the same request again later.
  bool retryable() const { return kind_ == ApiErrorKind::kUnavailable || kind_ == ApiErrorKind::kTimeout; }

  // From an HTTP answer: `what` names the request ("create pods ns/name"), `body` may hold a metav1.Status. Of either
  // only a bounded piece is kept, on one line and as valid UTF-8.
  static ApiError from_response(std::string_view what, int status, std::string_view body,
                                std::optional<Milliseconds> retry_after);

 private:
  ApiErrorKind kind_;
  int status_;
  std::string reason_;
  std::optional<Milliseconds> retry_after_;
};

}  // namespace trireme::kube
