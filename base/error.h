// Error: the one exception type of the libraries, with a kind that decides exit codes and retries.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace trireme {

enum class ErrorKind {
  kUser,         // a mistake in a file, flag or manifest: one sentence, no stack trace
  kIo,           // the disk or the network said no
  kTimeout,      // a deadline passed
  kUnavailable,  // try again later (429, 5xx, connection refused)
  kNotFound,     // the named thing is not there
  kConflict,     // somebody else changed it first
  kData,         // input data broke a rule (malformed line, truncated tensor file)
  kInternal,     // a bug of ours
};

const char* to_string(ErrorKind kind);

// Derived from by errors that say more to whoever can use it; what catches them as Error loses nothing of theirs.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

[[noreturn]] inline void fail_user(const std::string& message) { throw Error(ErrorKind::kUser, message); }
[[noreturn]] inline void fail_io(const std::string& message) { throw Error(ErrorKind::kIo, message); }
[[noreturn]] inline void fail_data(const std::string& message) { throw Error(ErrorKind::kData, message); }
[[noreturn]] inline void fail_internal(const std::string& message) { throw Error(ErrorKind::kInternal, message); }
[[noreturn]] inline void fail_timeout(const std::string& message) { throw Error(ErrorKind::kTimeout, message); }

// A broken invariant of ours (never a user's mistake).
#define TRIREME_CHECK(condition, message)                                                                \
  do {                                                                                                   \
    if (!(condition))                                                                                    \
      ::trireme::fail_internal(std::string(__FILE__ ":") + std::to_string(__LINE__) + ": " + (message)); \
  } while (0)

}  // namespace trireme
