#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>

namespace trireme {
namespace {

// Never destroyed, nor is the logger: threads that are given up at the end of the process may have something to say
// after main().
LogOptions& g_options = *new LogOptions;  // written once by log_setup before threads start

spdlog::logger& logger() {
  static spdlog::logger* const instance = [] {
    auto* made = new spdlog::logger("trireme", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("%v");
    made->set_level(spdlog::level::trace);
    made->flush_on(spdlog::level::trace);
    return made;
  }();
  return *instance;
}

const char* name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarn:
      return "warn";
    case LogLevel::kError:
      return "error";
  }
  return "info";
}

std::string timestamp() {
  const auto now = std::chrono::system_clock::now();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count();
  const std::time_t seconds = static_cast<std::time_t>(ms / 1000);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[96];
  std::snprintf(text, sizeof text, "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ", utc.tm_year + 1900, utc.tm_mon + 1,
                utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, static_cast<int>(ms % 1000));
  return text;
}

}  // namespace

void log_setup(const LogOptions& options) { g_options = options; }

void log(LogLevel level, std::string_view component, std::string_view message) {
  if (level < g_options.level) return;
  std::string line;
  if (g_options.format == LogFormat::kJson) {
    nlohmann::json object = {
        {"time", timestamp()}, {"level", name(level)}, {"component", component}, {"message", message}};
    if (!g_options.tag.empty()) object["tag"] = g_options.tag;
    line = object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  } else {
    line = timestamp() + " " + name(level) + " ";
    if (!g_options.tag.empty()) line += "[" + g_options.tag + "] ";
    line.append(component).append(": ").append(message);
  }
  logger().info(spdlog::string_view_t(line.data(), line.size()));
}

}  // namespace trireme
