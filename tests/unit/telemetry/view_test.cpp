// The terminal view and the report page.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "base/fs.h"
#include "trainer/telemetry/report.h"
#include "trainer/telemetry/terminal.h"

namespace trireme {
namespace {

using testing::HasSubstr;
using testing::Not;

StepRecord record(int64_t step) {
  StepRecord r;
  r.step = step;
  r.max_steps = 200;
  r.phases.total_s = 1.25;
  r.phases.seconds[static_cast<size_t>(Phase::kGeneration)] = 0.75;
  r.phases.seconds[static_cast<size_t>(Phase::kTraining)] = 0.375;
  r.phases.seconds[static_cast<size_t>(Phase::kRewards)] = 0.001;
  r.phases.seconds[static_cast<size_t>(Phase::kIdle)] = 0.124;
  r.train = {{"reward", 0.5}, {"mean_gen_tokens_per_sample", 23.25}};
  r.performance = {{"tokens_per_sec", 12345}};
  return r;
}

// What a view writes, as text.
class Screen {
 public:
  std::FILE* file() { return file_; }
  std::string text() {
    std::fflush(file_);
    std::string text(static_cast<size_t>(std::ftell(file_)), '\0');
    std::rewind(file_);
    text.resize(std::fread(text.data(), 1, text.size(), file_));
    return text;
  }
  ~Screen() { std::fclose(file_); }

 private:
  std::FILE* file_ = std::tmpfile();
};

TEST(Terminal, StepLineShowsWhatMatters) {
  EXPECT_EQ(
      step_line(record(12)),
      "step 12/200  reward 0.500  length 23.2  1.25 s (generation 0.75, training 0.38, idle 0.12)  12.3k tokens/s");
  StepRecord validated = record(12);
  validated.validation["accuracy"] = 0.875;
  EXPECT_THAT(step_line(validated), HasSubstr("val accuracy 0.875"));
  StepRecord sft;
  sft.step = 3;
  sft.phases.total_s = 0.5;
  sft.train["loss"] = 1.5;
  EXPECT_EQ(step_line(sft), "step 3  loss 1.5000  0.50 s");
}

TEST(Terminal, PlainOutputIsLinesOnly) {
  Screen screen;
  {
    TerminalView view(screen.file());  // a file is no terminal
    view.progress(1, 200, Phase::kGeneration, 0.5);
    view.step(record(1));
    view.line("checkpoint written");
  }
  EXPECT_EQ(screen.text(), step_line(record(1)) + "\ncheckpoint written\n");
}

TEST(Terminal, BarIsRedrawnBelowTheLinesAndCleared) {
  Screen screen;
  {
    TerminalView view(screen.file(), true, 80);
    view.progress(1, 4, Phase::kGeneration, 0.25);
    StepRecord first = record(1);
    first.max_steps = 4;
    view.step(first);
    view.progress(2, 4, Phase::kTraining, -1);
  }
  const std::string text = screen.text();
  EXPECT_THAT(text, HasSubstr("[........................................] 1/4 generation 25%"));
  EXPECT_THAT(text, HasSubstr("\r\033[Kstep 1/4"));  // the bar goes before a line comes
  EXPECT_THAT(text, HasSubstr("2/4 training  0:04 left"));
  EXPECT_EQ(text.substr(text.size() - 4), "\r\033[K");
  const size_t bar = text.rfind('[', text.find(" 2/4"));
  EXPECT_LE(text.find("left") + 4 - bar, 80u);  // fits the width
}

// A made-up run: reward rises, responses grow, validation every tenth step.
std::vector<LoggedStep> made_up_run(int64_t steps) {
  std::vector<LoggedStep> run;
  for (int64_t i = 1; i <= steps; ++i) {
    const double x = static_cast<double>(i) / static_cast<double>(steps);
    LoggedStep step;
    step.step = i;
    step.time = "2026-01-01T00:00:00Z";
    const double wave = std::sin(static_cast<double>(i) * 0.7);
    step.values = {{"train/reward", 0.2 + 0.7 * x + 0.03 * wave},
                   {"train/mean_gen_tokens_per_sample", 20 + 8 * x + wave},
                   {"train/loss", -0.01 * wave},
                   {"train/grad_norm", 0.5 + 0.2 * wave},
                   {"performance/tokens_per_sec", 15000 + 800 * wave},
                   {"timing/train/total_step_time", 1.1 + 0.1 * wave},
                   {"timing/train/generation", 0.6 + 0.1 * wave},
                   {"timing/train/reward_calculation", 0.02},
                   {"timing/train/policy_and_reference_logprobs", 0.05},
                   {"timing/train/prepare_for_generation/total", 0.0},
                   {"timing/train/policy_training", 0.4},
                   {"timing/train/checkpointing", i % 25 == 0 ? 0.2 : 0.0},
                   {"timing/train/idle", 0.03}};
    if (i % 10 == 0) step.values["validation/accuracy"] = 0.3 + 0.65 * x;
    run.push_back(std::move(step));
  }
  return run;
}

nlohmann::json data_of(const std::string& page) {
  const std::string open = "<script id=\"data\" type=\"application/json\">";
  const size_t start = page.find(open) + open.size();
  return nlohmann::json::parse(page.substr(start, page.find("</script>", start) - start));
}

TEST(Report, CarriesEverythingInside) {
  ReportOptions options;
  options.title = "A <b>run</b> & more";
  options.config_yaml = "grpo:\n  seed: 42\n# </pre><script>\n";
  const std::string page = report_html(made_up_run(200), options);
  EXPECT_THAT(page, HasSubstr("A &lt;b&gt;run&lt;/b&gt; &amp; more"));
  EXPECT_THAT(page, HasSubstr("# &lt;/pre&gt;&lt;script&gt;"));
  EXPECT_THAT(page, HasSubstr("uPlot"));
  for (const char* outside : {"src=\"", "href=\"", "@import", "url(http"}) EXPECT_THAT(page, Not(HasSubstr(outside)));
  const auto data = data_of(page);
  EXPECT_EQ(data["step"].size(), 200u);
  EXPECT_EQ(data["values"]["train/reward"].size(), 200u);
  EXPECT_TRUE(data["values"]["validation/accuracy"][0].is_null());
  EXPECT_NEAR(data["values"]["validation/accuracy"][199].get<double>(), 0.95, 1e-12);
  ASSERT_EQ(data["phases"].size(), kPhaseCount);
  EXPECT_EQ(data["phases"][4]["name"], "training");
  EXPECT_EQ(data["phases"][4]["values"][0], 0.4);
  EXPECT_THAT(page, HasSubstr("<td>0.400</td>"));
  if (const char* path = std::getenv("TRIREME_WRITE_REPORT")) write_file_atomic(path, page);  // to look at it
}

TEST(Report, TheValidationBeforeTheFirstStepIsAPointAndNoStep) {
  std::vector<LoggedStep> run = made_up_run(20);
  LoggedStep start;
  start.values = {{"validation/accuracy", 0.125}};
  run.insert(run.begin(), start);
  const std::string page = report_html(run, {});
  const auto data = data_of(page);
  EXPECT_EQ(data["step"][0], 0);
  EXPECT_EQ(data["values"]["validation/accuracy"][0], 0.125);
  EXPECT_TRUE(data["phases"][4]["values"][0].is_null());
  EXPECT_THAT(page, HasSubstr("<td>0.400</td>")) << "means are over the steps";
}

TEST(Report, LongRunsAreAveraged) {
  ReportOptions options;
  options.max_points = 100;
  const auto data = data_of(report_html(made_up_run(1000), options));
  ASSERT_EQ(data["step"].size(), 100u);
  EXPECT_EQ(data["step"][0], 10);
  EXPECT_EQ(data["step"][99], 1000);
  EXPECT_NEAR(data["values"]["validation/accuracy"][99].get<double>(), 0.95, 1e-12);  // the one value in the span
}

TEST(Report, NoStepsYet) {
  EXPECT_THAT(report_html({}, {}), HasSubstr("No step has finished yet"));
  TemporaryDirectory folder;
  write_report(folder.path() / "missing.jsonl", folder.path() / "report.html", {});
  EXPECT_THAT(read_file(folder.path() / "report.html"), HasSubstr("<!doctype html>"));
}

}  // namespace
}  // namespace trireme
