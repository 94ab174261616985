// TerminalView: what a person sees of a run: one line a step, and below it a progress bar when the output is a
// terminal.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "base/clock.h"
#include "trainer/telemetry/step_log.h"

namespace trireme {

// "step 12/200  reward 0.512  length 23.1  1.24 s (generation 0.61, training 0.58, idle 0.05)  12.3k tokens/s"
std::string step_line(const StepRecord& record);

// One thread (rank 0's main). Writes to `out`, which it does not close.
class TerminalView final {
 public:
  explicit TerminalView(std::FILE* out);              // a bar if `out` is a terminal
  TerminalView(std::FILE* out, bool bar, int width);  // for tests
  ~TerminalView();                                    // clears the bar

  // A line of its own, above the bar.
  void line(const std::string& text);
  // A finished step: its line (validation included when there was one).
  void step(const StepRecord& record);
  // Inside step `step`: a phase and how much of it is done (0..1; below 0: unknown). Drawn at most ten times a second.
  void progress(int64_t step, int64_t max_steps, Phase phase, double fraction);

 private:
  void clear();
  void draw(const std::string& bar);
  std::FILE* out_;
  bool bar_;
  int width_;
  bool drawn_ = false;
  double mean_step_s_ = 0;  // running mean, for the time left
  Deadline next_draw_ = Deadline::after(Milliseconds(0));
};

}  // namespace trireme
