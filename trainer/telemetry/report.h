// report.html: one self-contained page with the curves of a run.
#pragma once

#include <filesystem>
#include <string>

#include "trainer/telemetry/step_log.h"

namespace trireme {

struct ReportOptions {
  std::string title = "Trireme run";
  std::string config_yaml;   // shown folded; empty: left out
  size_t max_points = 2000;  // a longer run is averaged over equal spans of steps
};

// The page for a log: reward, validation accuracy, response length, stacked phase times, loss and gradient norm,
// throughput. Works without a network: the plotting library is inside.
std::string report_html(const std::vector<LoggedStep>& steps, const ReportOptions& options);

// Reads the step log and writes the page (atomically).
void write_report(const std::filesystem::path& step_log, const std::filesystem::path& page,
                  const ReportOptions& options);

}  // namespace trireme
