#include "trainer/telemetry/rollout_log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/fs.h"

namespace trireme {
namespace {

RolloutLine line() {
  RolloutLine line;
  line.group = 3;
  line.index = 1;
  line.prompt = "2+2?";
  line.response = "\"4\"\n";
  line.raw_reward = 1.5;
  line.reward = 0.75;
  line.rewards = {{"math", 1}, {"format", 0.5}};
  line.advantage = -0.25;
  line.truncated = true;
  line.prompt_tokens = 4;
  line.response_tokens = 2;
  line.weight_versions = {{4, 0, 1}, {5, 1, 2}};
  return line;
}

TEST(RolloutLog, ALineHasPromptResponseRewardsByNameAndAdvantage) {
  const std::string text = rollout_line(7, line(), 100);
  EXPECT_EQ(text.find('\n'), std::string::npos);
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json.at("step"), 7);
  EXPECT_EQ(json.at("group"), 3);
  EXPECT_EQ(json.at("index"), 1);
  EXPECT_EQ(json.at("prompt"), "2+2?");
  EXPECT_EQ(json.at("response"), "\"4\"\n");
  EXPECT_EQ(json.at("reward"), 0.75);
  EXPECT_EQ(json.at("raw_reward"), 1.5);
  EXPECT_EQ(json.at("rewards"), nlohmann::json({{"math", 1.0}, {"format", 0.5}}));
  EXPECT_EQ(json.at("advantage"), -0.25);
  EXPECT_EQ(json.at("truncated"), true);
  EXPECT_EQ(json.at("dropped"), false);
  EXPECT_EQ(json.at("response_tokens"), 2);
  EXPECT_EQ(json.at("weight_versions"), nlohmann::json::parse(R"([{"version": 4, "from": 0, "to": 1},
                                                                  {"version": 5, "from": 1, "to": 2}])"));
  EXPECT_FALSE(json.contains("cut"));
}

TEST(RolloutLog, LongTextsAreCutAtACharacterAndBadBytesReplaced) {
  RolloutLine one = line();
  one.response = "ab\xC3\xA9";  // the last character has two bytes
  const auto json = nlohmann::json::parse(rollout_line(1, one, 3));
  EXPECT_EQ(json.at("response"), "ab");
  EXPECT_EQ(json.at("cut"), true);
  one.response = "a\xFFz";
  EXPECT_EQ(nlohmann::json::parse(rollout_line(1, one, 100)).at("response"), "a\xEF\xBF\xBDz");
}

TEST(RolloutLog, TheNewestFilesAreKeptAndAResumedRunDropsLaterOnes) {
  const TemporaryDirectory dir;
  RolloutLogOptions options;
  options.directory = dir.path() / "logs";
  options.keep_steps = 3;
  const auto there = [&](int64_t step) {
    return std::filesystem::exists(options.directory / RolloutLog::file_name(step));
  };
  RolloutLog log(options, 0);
  for (int64_t step = 8; step <= 12; ++step) log.write(step, {line(), line()});
  for (int64_t step = 8; step <= 12; ++step) EXPECT_EQ(there(step), step >= 10) << step;
  const std::string text = read_file(options.directory / "train_data_step_12.jsonl");
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
  const RolloutLog resumed(options, 11);
  EXPECT_TRUE(there(10) && there(11));
  EXPECT_FALSE(there(12));
  write_file_atomic(options.directory / "train_data_step_0012.jsonl", "not ours");
  const RolloutLog anew(options, 0);
  EXPECT_FALSE(there(10) || there(11));
  EXPECT_TRUE(std::filesystem::exists(options.directory / "train_data_step_0012.jsonl"));
}

TEST(RolloutLog, AFolderThatCannotBeWrittenStopsNothing) {
  const TemporaryDirectory dir;
  write_file_atomic(dir.path() / "file", "x");
  RolloutLogOptions options;
  options.directory = dir.path() / "file";
  RolloutLog log(options, 0);
  EXPECT_NO_THROW(log.write(1, {line()}));
}

}  // namespace
}  // namespace trireme
