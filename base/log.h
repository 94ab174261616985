// Logging: log_info("engine", "..."). One line a message on stderr, as text or JSON.
#pragma once

#include <string>
#include <string_view>

namespace trireme {

enum class LogLevel { kDebug, kInfo, kWarn, kError };
enum class LogFormat { kText, kJson };

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
  std::string tag;  // shown in every line, e.g. "rank 3"; empty: nothing
};

// Called once from main, before threads start.
void log_setup(const LogOptions& options);

void log(LogLevel level, std::string_view component, std::string_view message);
inline void log_debug(std::string_view component, std::string_view message) {
  log(LogLevel::kDebug, component, message);
}
inline void log_info(std::string_view component, std::string_view message) { log(LogLevel::kInfo, component, message); }
inline void log_warn(std::string_view component, std::string_view message) { log(LogLevel::kWarn, component, message); }
inline void log_error(std::string_view component, std::string_view message) {
  log(LogLevel::kError, component, message);
}

}  // namespace trireme
