#include "trainer/telemetry/report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/fs.h"
#include "base/text.h"

namespace trireme {
namespace {

const char* const kUplotScript =
#include "uPlot.iife.min.js.inc"
    ;
const char* const kUplotStyle =
#include "uPlot.min.css.inc"
    ;

const char* const kStyle =
    R"css(
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5c6570; --line: #d8dde3; --page: #ffffff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4af; --line: #363d46; )css"
    R"css(--page: #14171b; --card: #1c2127; } }
body { margin: 0 auto; padding: 24px; max-width: 1240px; font: 14px/1.5 system-ui, "DejaVu Sans", sans-serif; )css"
    R"css(color: var(--ink); background: var(--page); }
h1 { font-size: 22px; margin: 0 0 4px; } .soft { color: var(--soft); }
.figures { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0; }
.figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; )css"
    R"css(padding: 10px 16px; min-width: 120px; }
.figure b { display: block; font-size: 20px; font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); gap: 16px; }
.chart { background: var(--card); border: 1px solid var(--line); border-radius: 8px; )css"
    R"css(padding: 12px 8px 4px; overflow: hidden; }
.chart h2 { font-size: 15px; margin: 0 0 4px 12px; } .wide { grid-column: 1 / -1; }
.u-legend { font-size: 12px; text-align: left; } .u-legend .u-value { min-width: 4.5em; display: inline-block; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px; overflow: auto; }
details { margin-top: 18px; } summary { cursor: pointer; }
.phases { border-collapse: collapse; margin-top: 18px; } )css"
    R"css(.phases td, .phases th { border: 1px solid var(--line); padding: 4px 10px; text-align: right; }
)css";

const char* const kCode =
    R"js(
const data = JSON.parse(document.getElementById('data').textContent);
const ink = getComputedStyle(document.body).color, )js"
    R"js(grid = getComputedStyle(document.documentElement).getPropertyValue('--line');
const axis = () => ({stroke: ink, grid: {stroke: grid, width: 1}, ticks: {stroke: grid}});
const shown = v => v == null ? '-' : Math.abs(v) >= 1000 ? v.toFixed(0) : )js"
    R"js(Math.abs(v) >= 0.01 || v === 0 ? v.toFixed(3) : v.toExponential(2);
const plots = [];
function chart(title, series, options = {}) {
  const some = series.filter(s => s.values.some(v => v != null));
  if (some.length === 0) return;
  const box = document.createElement('div');
  box.className = 'chart' + (options.wide ? ' wide' : '');
  box.innerHTML = '<h2></h2>';
  box.firstChild.textContent = title;
  document.getElementById('charts').append(box);
  let columns = some.map(s => s.values), order = some;
  if (options.stacked) {  // drawn from the whole down to the first part, )js"
    R"js(so that each part shows above the ones below it
    const sums = data.step.map(() => 0);
    columns = some.map(s => s.values.map((v, i) => v == null ? null : sums[i] += v)).reverse();
    order = some.slice().reverse();
  }
  const plot = new uPlot({
    width: box.clientWidth - 16, height: options.wide ? 300 : 240,
    scales: {x: {time: false}, y: options.range ? {range: options.range} : {}},
    axes: [axis(), {...axis(), size: 60}],
    series: [{label: 'step'}, ...order.map(s => ({
      label: s.name, stroke: s.color, width: options.stacked ? 1 : 1.5, )js"
    R"js(fill: options.stacked ? s.color : undefined, spanGaps: true,
      points: {show: s.values.filter(v => v != null).length < 60 && !options.stacked},
      value: (u, v, k, i) => shown(i == null ? s.values[s.values.length - 1] : s.values[i])}))]
  }, [data.step, ...columns], box);
  plots.push([plot, box]);
}
const line = (name, title, color, options) => )js"
    R"js(chart(title, [{name: title, color, values: data.values[name] || []}], options);
line('train/reward', 'reward', '#0072b2');
line('validation/accuracy', 'validation accuracy', '#009e73', {range: [0, 1]});
line('train/mean_gen_tokens_per_sample', 'response length (tokens)', '#cc79a7');
line('performance/tokens_per_sec', 'tokens/s', '#e69f00');
chart('step time by phase (s)', data.phases, {wide: true, stacked: true, range: (u, low, high) => [0, high * 1.05]});
line('train/loss', 'loss', '#d55e00');
line('validation/loss', 'validation loss', '#009e73');
line('train/grad_norm', 'gradient norm', '#56b4e9');
line('train/kl_penalty', 'KL to the reference', '#666699');
line('train/approx_entropy', 'entropy', '#8c6d31');
line('train/truncation_rate', 'share of truncated responses', '#999999', {range: [0, 1]});
addEventListener('resize', () => { )js"
    R"js(for (const [plot, box] of plots) plot.setSize({width: box.clientWidth - 16, height: plot.height}); });
)js";

const char* phase_color(Phase phase) {
  static const char* const kColors[kPhaseCount] = {"#0072b2", "#e69f00", "#56b4e9", "#cc79a7",
                                                   "#009e73", "#d55e00", "#b8bec5"};
  return kColors[static_cast<size_t>(phase)];
}

std::string escape_html(const std::string& text) {
  return replace_all(replace_all(replace_all(text, "&", "&amp;"), "<", "&lt;"), ">", "&gt;");
}

// Mean of a value over steps [from, to) that have it; null when none has.
nlohmann::json mean_of(const std::vector<LoggedStep>& steps, size_t from, size_t to, const std::string& name) {
  double sum = 0;
  int64_t count = 0;
  for (size_t i = from; i < to; ++i) {
    const auto value = steps[i].find(name);
    if (!value) continue;
    sum += *value;
    ++count;
  }
  if (count == 0) return nullptr;
  return sum / static_cast<double>(count);
}

nlohmann::json page_data(const std::vector<LoggedStep>& steps, size_t max_points) {
  static const char* const kLines[] = {"train/reward",
                                       "validation/accuracy",
                                       "train/mean_gen_tokens_per_sample",
                                       "performance/tokens_per_sec",
                                       "train/loss",
                                       "validation/loss",
                                       "train/grad_norm",
                                       "train/kl_penalty",
                                       "train/approx_entropy",
                                       "train/truncation_rate"};
  const size_t points = std::min(steps.size(), std::max<size_t>(max_points, 2));
  const auto start = [&](size_t point) { return point * steps.size() / points; };
  nlohmann::json data = {
      {"step", nlohmann::json::array()}, {"values", nlohmann::json::object()}, {"phases", nlohmann::json::array()}};
  for (size_t p = 0; p < points; ++p) data["step"].push_back(steps[start(p + 1) - 1].step);
  const auto column = [&](const std::string& name) {
    auto values = nlohmann::json::array();
    for (size_t p = 0; p < points; ++p) values.push_back(mean_of(steps, start(p), start(p + 1), name));
    return values;
  };
  for (const char* name : kLines) data["values"][name] = column(name);
  for (const Phase phase : all_phases()) {
    data["phases"].push_back(
        {{"name", to_string(phase)}, {"color", phase_color(phase)}, {"values", column(timing_name(phase))}});
  }
  return data;
}

std::string figure(const std::string& value, const std::string& name) {
  return "<div class=\"figure\"><b>" + escape_html(value) + "</b><span class=\"soft\">" + escape_html(name) +
         "</span></div>\n";
}

// Seconds of all steps, and how many have any: the validation before the first step is not one.
std::pair<double, double> step_seconds(const std::vector<LoggedStep>& steps) {
  double seconds = 0, count = 0;
  for (const LoggedStep& step : steps) {
    const auto value = step.find("timing/train/total_step_time");
    if (!value) continue;
    seconds += *value;
    ++count;
  }
  return {seconds, std::max(1.0, count)};
}

std::string figures(const std::vector<LoggedStep>& steps) {
  std::string html = figure(std::to_string(steps.back().step), "steps");
  const auto last = [&](const std::string& name) -> std::optional<double> {
    for (size_t i = steps.size(); i-- > 0;) {
      if (const auto value = steps[i].find(name)) return value;
    }
    return std::nullopt;
  };
  const auto first = [&](const std::string& name) -> std::optional<double> {
    for (const LoggedStep& step : steps) {
      if (const auto value = step.find(name)) return value;
    }
    return std::nullopt;
  };
  const auto change = [&](const std::string& name, const std::string& title, int decimals) {
    if (!first(name)) return;
    html += figure(format_fixed(*first(name), decimals) + " \u2192 " + format_fixed(*last(name), decimals), title);
  };
  change("train/reward", "reward", 3);
  change("validation/accuracy", "validation accuracy", 3);
  change("validation/loss", "validation loss", 4);
  const auto [total, count] = step_seconds(steps);
  html += figure(format_fixed(total / count, 2) + " s", "mean step");
  html += figure(format_fixed(total / 60, 1) + " min", "all steps");
  return html;
}

std::string phase_table(const std::vector<LoggedStep>& steps) {
  std::string head = "<tr><th>phase</th>", seconds = "<tr><td>mean seconds</td>", shares = "<tr><td>share</td>";
  const auto [total, count] = step_seconds(steps);
  for (const Phase phase : all_phases()) {
    double sum = 0;
    for (const LoggedStep& step : steps) sum += step.find(timing_name(phase)).value_or(0);
    head += std::string("<th>") + to_string(phase) + "</th>";
    seconds += "<td>" + format_fixed(sum / count, 3) + "</td>";
    shares += "<td>" + (total > 0 ? format_fixed(100 * sum / total, 1) + " %" : "-") + "</td>";
  }
  return "<table class=\"phases\">" + head + "</tr>" + seconds + "</tr>" + shares + "</tr></table>\n";
}

}  // namespace

std::string report_html(const std::vector<LoggedStep>& steps, const ReportOptions& options) {
  std::string html =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width, initial-scale=1\">\n<title>" +
      escape_html(options.title) + "</title>\n<style>" + kUplotStyle + kStyle + "</style></head><body>\n<h1>" +
      escape_html(options.title) + "</h1>\n";
  if (steps.empty()) return html + "<p>No step has finished yet.</p>\n</body></html>\n";
  html +=
      "<div class=\"soft\">" + escape_html(steps.front().time) + " to " + escape_html(steps.back().time) + "</div>\n";
  html += "<div class=\"figures\">" + figures(steps) + "</div>\n<div class=\"charts\" id=\"charts\"></div>\n" +
          phase_table(steps);
  if (!options.config_yaml.empty()) {
    html += "<details><summary>configuration</summary><pre>" + escape_html(options.config_yaml) + "</pre></details>\n";
  }
  // "</" inside the data would end its script element.
  html += "<script id=\"data\" type=\"application/json\">" +
          replace_all(page_data(steps, options.max_points).dump(), "</", "<\\/") + "</script>\n";
  html += std::string("<script>") + kUplotScript + "</script>\n<script>" + kCode + "</script>\n</body></html>\n";
  return html;
}

void write_report(const std::filesystem::path& step_log, const std::filesystem::path& page,
                  const ReportOptions& options) {
  write_file_atomic(page, report_html(read_step_log(step_log), options));
}

}  // namespace trireme
