#include "base/error.h"

namespace trireme {

const char* to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kUser:
      return "user";
    case ErrorKind::kIo:
      return "io";
    case ErrorKind::kTimeout:
      return "timeout";
    case ErrorKind::kUnavailable:
      return "unavailable";
    case ErrorKind::kNotFound:
      return "not found";
    case ErrorKind::kConflict:
      return "conflict";
    case ErrorKind::kData:
      return "data";
    case ErrorKind::kInternal:
      return "internal";
  }
  return "unknown";
}

}  // namespace trireme
