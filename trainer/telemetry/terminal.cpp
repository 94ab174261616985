#include "trainer/telemetry/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/text.h"

namespace trireme {
namespace {

int columns(int fd) {
  winsize size{};
  return ::ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

std::string rate_text(double value) {
  if (value >= 1e6) return format_fixed(value / 1e6, 2) + "M";
  if (value >= 1e4) return format_fixed(value / 1e3, 1) + "k";
  return format_fixed(value, 0);
}

std::string duration_text(double seconds) {
  const auto whole = static_cast<int64_t>(std::min(seconds, 1e9) + 0.5);
  const auto two = [](int64_t value) { return (value < 10 ? "0" : "") + std::to_string(value); };
  if (whole < 3600) return std::to_string(whole / 60) + ":" + two(whole % 60);
  return std::to_string(whole / 3600) + ":" + two(whole / 60 % 60) + ":" + two(whole % 60);
}

}  // namespace

std::string step_line(const StepRecord& record) {
  const auto flat = record.flat();
  std::string text =
      "step " + std::to_string(record.step) + (record.max_steps > 0 ? "/" + std::to_string(record.max_steps) : "");
  const auto show = [&](const char* title, const char* name, int decimals) {
    const auto found = flat.find(name);
    if (found != flat.end()) text += std::string("  ") + title + " " + format_fixed(found->second, decimals);
  };
  if (flat.count("train/reward") == 0) show("loss", "train/loss", 4);
  show("reward", "train/reward", 3);
  show("length", "train/mean_gen_tokens_per_sample", 1);
  show("val accuracy", "validation/accuracy", 3);
  show("val loss", "validation/loss", 4);
  const double total = record.phases.total_s;
  text += "  " + format_fixed(total, 2) + " s";
  std::vector<std::string> parts;
  for (const Phase phase : all_phases()) {
    const double seconds = record.phases.of(phase);
    if (seconds >= 0.005 * total && seconds > 0)
      parts.push_back(std::string(to_string(phase)) + " " + format_fixed(seconds, 2));
  }
  if (!parts.empty()) text += " (" + join(parts, ", ") + ")";
  if (const auto found = flat.find("performance/tokens_per_sec"); found != flat.end())
    text += "  " + rate_text(found->second) + " tokens/s";
  return text;
}

TerminalView::TerminalView(std::FILE* out) : TerminalView(out, ::isatty(::fileno(out)) == 1, columns(::fileno(out))) {}
TerminalView::TerminalView(std::FILE* out, bool bar, int width) : out_(out), bar_(bar), width_(width) {}
TerminalView::~TerminalView() { clear(); }

void TerminalView::clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", out_);
  std::fflush(out_);
  drawn_ = false;
}

void TerminalView::draw(const std::string& bar) {
  std::fputs(("\r\033[K" + bar).c_str(), out_);
  std::fflush(out_);
  drawn_ = true;
}

void TerminalView::line(const std::string& text) {
  clear();
  std::fputs((text + "\n").c_str(), out_);
  std::fflush(out_);
}

void TerminalView::step(const StepRecord& record) {
  mean_step_s_ = mean_step_s_ == 0 ? record.phases.total_s : 0.8 * mean_step_s_ + 0.2 * record.phases.total_s;
  line(step_line(record));
  next_draw_ = Deadline::after(Milliseconds(0));
}

void TerminalView::progress(int64_t step, int64_t max_steps, Phase phase, double fraction) {
  if (!bar_ || !next_draw_.passed()) return;
  next_draw_ = Deadline::after(Milliseconds(100));
  std::string tail =
      " " + std::to_string(step) + (max_steps > 0 ? "/" + std::to_string(max_steps) : "") + " " + to_string(phase);
  if (fraction >= 0) tail += " " + format_fixed(100 * std::min(fraction, 1.0), 0) + "%";
  const int64_t left = max_steps - step + 1;
  if (mean_step_s_ > 0 && left > 0 && max_steps > 0)
    tail += "  " + duration_text(mean_step_s_ * static_cast<double>(left)) + " left";
  const int cells = std::clamp(width_ - static_cast<int>(tail.size()) - 3, 0, 40);
  const double done = max_steps > 0 ? static_cast<double>(step - 1) / static_cast<double>(max_steps) : 0;
  const int filled = std::clamp(static_cast<int>(std::lround(done * cells)), 0, cells);
  draw("[" + std::string(static_cast<size_t>(filled), '#') + std::string(static_cast<size_t>(cells - filled), '.') +
       "]" + tail);
}

}  // namespace trireme
