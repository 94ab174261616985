#include "base/clock.h"

#include <ctime>

namespace trireme {

std::string utc_time(int64_t unix_s) {
  const std::time_t time = static_cast<std::time_t>(unix_s);
  std::tm parts{};
  ::gmtime_r(&time, &parts);
  char text[64];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

std::string utc_now() { return utc_time(std::time(nullptr)); }

}  // namespace trireme
