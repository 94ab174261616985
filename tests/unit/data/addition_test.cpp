#include "trainer/data/addition.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "base/error.h"
#include "base/fs.h"

namespace trireme {
namespace {

TEST(Addition, DisjointSetsThatTogetherAreAllPairs) {
  const TemporaryDirectory dir;
  AdditionTask task;
  task.smallest = 3;
  task.largest = 12;
  task.warm_start = 20;
  task.held_out = 30;
  const AdditionCounts counts = write_addition_task(task, dir.path());
  EXPECT_EQ(counts.train, 50);
  std::set<std::string> inputs;
  for (const char* name : {"warm_start.jsonl", "train.jsonl", "held_out.jsonl"}) {
    std::istringstream lines(read_file(dir.path() / name));
    for (std::string line; std::getline(lines, line);) {
      const auto row = nlohmann::json::parse(line);
      const std::string input = row.at("input");
      EXPECT_TRUE(inputs.insert(input).second) << input;
      const size_t plus = input.find('+');
      EXPECT_EQ(std::stoll(input.substr(0, plus)) + std::stoll(input.substr(plus + 1)),
                std::stoll(row.at("output").get<std::string>()));
    }
  }
  EXPECT_EQ(inputs.size(), 100u);
  const std::string first = read_file(dir.path() / "held_out.jsonl");
  write_addition_task(task, dir.path());
  EXPECT_EQ(read_file(dir.path() / "held_out.jsonl"), first);
  task.seed = 2;
  write_addition_task(task, dir.path());
  EXPECT_NE(read_file(dir.path() / "held_out.jsonl"), first);
}

TEST(Addition, SizesThatDoNotFitAreRefused) {
  const TemporaryDirectory dir;
  AdditionTask task;
  task.largest = 11;
  task.held_out = 4;
  EXPECT_THROW(write_addition_task(task, dir.path()), Error);
  task.largest = 5;
  EXPECT_THROW(write_addition_task(task, dir.path()), Error);
}

}  // namespace
}  // namespace trireme
