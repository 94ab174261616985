#include "trainer/telemetry/step_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/fs.h"
#include "base/text.h"

namespace trireme {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

StepRecord record(int64_t step, double reward = 0.5) {
  StepRecord r;
  r.step = step;
  r.phases.total_s = 4;
  r.phases.seconds[static_cast<size_t>(Phase::kGeneration)] = 1;
  r.phases.seconds[static_cast<size_t>(Phase::kTraining)] = 2;
  r.phases.seconds[static_cast<size_t>(Phase::kIdle)] = 1;
  r.train["reward"] = reward;
  return r;
}

std::vector<int64_t> steps_of(const std::filesystem::path& path, int64_t* bad = nullptr) {
  std::vector<int64_t> steps;
  for (const auto& logged : read_step_log(path, bad)) steps.push_back(logged.step);
  return steps;
}

TEST(StepRecord, NamesAreNemoRls) {
  StepRecord r = record(7);
  r.validation["accuracy"] = 0.75;
  r.timing["train/data_processing"] = 0.125;
  fill_performance(r, {.samples = 8, .total_tokens = 400, .generated_tokens = 300, .ranks = 2});
  const auto flat = r.flat();
  EXPECT_EQ(flat.at("train/reward"), 0.5);
  EXPECT_EQ(flat.at("validation/accuracy"), 0.75);
  EXPECT_EQ(flat.at("timing/train/data_processing"), 0.125);
  EXPECT_EQ(flat.at("timing/train/total_step_time"), 4);
  EXPECT_EQ(flat.at("timing/train/generation"), 1);
  EXPECT_EQ(flat.at("timing/train/policy_training"), 2);
  EXPECT_EQ(flat.at("timing/train/prepare_for_generation"), 0);
  EXPECT_EQ(flat.at("timing/train/prepare_for_generation/total"), 0);
  EXPECT_EQ(flat.at("performance/tokens_per_sec"), 100);
  EXPECT_EQ(flat.at("performance/tokens_per_sec_per_gpu"), 50);
  EXPECT_EQ(flat.at("performance/generation_tokens_per_sec_per_gpu"), 150);
  EXPECT_EQ(flat.at("performance/policy_training_tokens_per_sec_per_gpu"), 100);
  EXPECT_EQ(flat.count("performance/policy_and_reference_logprobs_tokens_per_sec_per_gpu"),
            0u);  // no time in it, no rate
  // Dynamic sampling: a quarter of what was generated is trained.
  fill_performance(r, {.samples = 8, .total_tokens = 400, .generated_tokens = 300, .trained_tokens = 100, .ranks = 2});
  EXPECT_EQ(r.performance.at("tokens_per_sec"), 100);
  EXPECT_EQ(r.performance.at("generation_tokens_per_sec_per_gpu"), 150);
  EXPECT_EQ(r.performance.at("policy_training_tokens_per_sec_per_gpu"), 25);
}

TEST(StepLog, LinesAreWholeJsonAndReadBack) {
  TemporaryDirectory folder;
  const auto path = folder.path() / "logs" / "steps.jsonl";
  StepLog log(path, 0);
  StepRecord nan = record(1);
  nan.train["grad_norm"] = std::nan("");
  log.append(nan);
  log.append(record(2, 0.625));
  const auto first = nlohmann::json::parse(split(read_file(path), '\n').front());
  EXPECT_EQ(first.at("step"), 1);
  EXPECT_TRUE(first.at("train/grad_norm").is_null());
  const auto steps = read_step_log(path);
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[1].find("train/reward"), 0.625);
  EXPECT_EQ(steps[0].find("train/grad_norm"), std::nullopt);
  EXPECT_EQ(steps[0].time.size(), 20u);
}

TEST(StepLog, ResumeDropsWorkThatIsDoneAnewAndATornLine) {
  TemporaryDirectory folder;
  const auto path = folder.path() / "steps.jsonl";
  {
    StepLog log(path, 0);
    for (int64_t step = 1; step <= 5; ++step) log.append(record(step, 0.1));
  }
  std::ofstream(path, std::ios::app) << "{\"step\": 6, \"train/rew";  // killed here
  {
    StepLog log(path, 3);
    log.append(record(4, 0.9));
  }
  int64_t bad = -1;
  EXPECT_THAT(steps_of(path, &bad), ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(bad, 0);
  EXPECT_EQ(read_step_log(path)[3].find("train/reward"), 0.9);
}

TEST(StepLog, AFreshRunMovesAnOldLogAside) {
  TemporaryDirectory folder;
  const auto path = folder.path() / "steps.jsonl";
  { StepLog(path, 0).append(record(1)); }
  { StepLog(path, 0).append(record(2)); }
  StepLog third(path, 0);
  EXPECT_THAT(steps_of(path), ElementsAre());
  EXPECT_THAT(steps_of(path.string() + ".1"), ElementsAre(1));
  EXPECT_THAT(steps_of(path.string() + ".2"), ElementsAre(2));
}

TEST(StepLog, ReaderSkipsRubbishAndTakesTheLastOfAStep) {
  TemporaryDirectory folder;
  const auto path = folder.path() / "steps.jsonl";
  EXPECT_TRUE(read_step_log(path).empty());
  std::ofstream(path) << "{\"step\": 2, \"a\": 1}\n\nnot json\n[1]\n{\"a\": 3}\n{\"step\": 1, \"a\": 5}\n{\"step\": 2, "
                         "\"a\": 7, \"b\": \"text\"}\n";
  int64_t bad = 0;
  const auto steps = read_step_log(path, &bad);
  EXPECT_EQ(bad, 3);
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].find("a"), 5);
  EXPECT_EQ(steps[1].find("a"), 7);
  EXPECT_EQ(steps[1].find("b"), std::nullopt);
}

TEST(StepLog, ValidationsOutsideAStepJoinItsLine) {
  TemporaryDirectory folder;
  const auto path = folder.path() / "steps.jsonl";
  {
    StepLog log(path, 0);
    log.append(0, {{"validation/accuracy", 0.25}});
    log.append(record(1, 0.5));
    log.append(1, {{"validation/accuracy", 0.75}});
  }
  const auto steps = read_step_log(path);
  ASSERT_EQ(steps.size(), 2u);
  EXPECT_EQ(steps[0].step, 0);
  EXPECT_EQ(steps[0].find("validation/accuracy"), 0.25);
  EXPECT_EQ(steps[0].find("timing/train/total_step_time"), std::nullopt);
  EXPECT_EQ(steps[1].find("validation/accuracy"), 0.75);
  EXPECT_EQ(steps[1].find("train/reward"), 0.5);
}

TEST(StepLog, AFullDiskIsCountedAndDoesNotThrow) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full on this system";
  StepLog log("/dev/full", 1);
  EXPECT_NO_THROW(log.append(record(1)));
  EXPECT_EQ(log.failed_writes(), 1);
}

TEST(PhaseTable, MeansOverTheSpan) {
  TemporaryDirectory folder;
  const auto path = folder.path() / "steps.jsonl";
  StepLog log(path, 0);
  for (int64_t step = 1; step <= 4; ++step) {
    StepRecord r = record(step);
    r.phases.total_s = static_cast<double>(step) * 10;
    log.append(r);
  }
  const std::string table = phase_table_markdown(read_step_log(path), 2, 4);
  EXPECT_THAT(
      table,
      HasSubstr("| steps | total step (s) | policy training (s) | refit (s) | generation (s) | get logprobs (s) |"));
  EXPECT_THAT(table, HasSubstr("| 2-4 | 30.0 | 2.00 | 0.00 | 1.00 | 0.00 | - | - |"));
}

}  // namespace
}  // namespace trireme
