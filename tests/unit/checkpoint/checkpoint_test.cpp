#include "trainer/checkpoint/checkpoint.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/checkpoint/tiny.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

// A model with its optimizer and a manager whose fingerprint knows it as `name`.
struct ManagedModel {
  ManagedModel(const char* name, const CheckpointOptions& options, int64_t hidden, uint64_t seed)
      : model(tiny(hidden), {}), optimizer(model, context.data_parallel(), {}) {
    init_parameters(model, seed);
    manager = std::make_unique<CheckpointManager>(
        options, nlohmann::json{{"algorithm", "grpo"}, {name, model.config().to_json()}}, context);
  }
  ParallelContext context;
  Model model;
  DistributedAdamW optimizer;
  std::unique_ptr<CheckpointManager> manager;
};

struct TestRun : ManagedModel {
  explicit TestRun(const fs::path& dir, int64_t hidden = 16, int64_t keep = 2)
      : ManagedModel("model", {.directory = dir, .metric_name = "val:accuracy", .keep_top_k = keep}, hidden, 1) {}
  void save(int64_t step, double accuracy) {
    manager->save(step, model, optimizer, {{"position", step}}, {{"val:accuracy", accuracy}}, "a: 1\n");
  }
};

TEST(Checkpoint, RoundTrip) {
  const TemporaryDirectory dir;
  TestRun first(dir.path());
  first.save(5, 0.5);
  TestRun second(dir.path());
  init_parameters(second.model, 99);
  const auto info = second.manager->load_latest(second.model, second.optimizer);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->step, 5);
  EXPECT_EQ(info->state.at("position"), 5);
  EXPECT_TRUE(at::equal(first.model.flat_parameters(), second.model.flat_parameters()));
  EXPECT_EQ(read_file(info->path / "config.yaml"), "a: 1\n");
  EXPECT_TRUE(fs::exists(info->path / "policy" / "weights" / "config.json"));
}

TEST(Checkpoint, NothingThereIsNoError) {
  const TemporaryDirectory dir;
  TestRun run(dir.path() / "missing");
  EXPECT_FALSE(run.manager->load_latest(run.model, run.optimizer));
}

TEST(Checkpoint, KeepsTheBestAndTheNewest) {
  const TemporaryDirectory dir;
  TestRun run(dir.path());
  run.save(1, 0.9);
  run.save(2, 0.1);
  run.save(3, 0.8);
  run.save(4, 0.2);
  EXPECT_EQ(steps(dir.path()), (std::vector<int64_t>{1, 3, 4}));
}

TEST(Checkpoint, AnOlderProgramsScoreOfAnEarlierValidationCountsNothing) {
  const TemporaryDirectory dir;
  TestRun run(dir.path());
  const auto save = [&](int64_t step, double accuracy) {
    run.manager->save(step, run.model, run.optimizer, {{"validated_step", step / 3 * 3}},
                      {{"val:accuracy", accuracy}, {"train:reward", 0.1}}, "a: 1\n");
  };
  for (const int64_t step : {3, 4, 5}) save(step, 0.9);  // 4 and 5 have it from 3
  save(6, 0.5);
  save(7, 0.5);
  EXPECT_EQ(steps(dir.path()), (std::vector<int64_t>{3, 6, 7}));
  for (const CheckpointInfo& info : list_checkpoints(dir.path())) {
    EXPECT_EQ(info.metrics.count("val:accuracy"), info.step == 7 ? 0u : 1u);
    EXPECT_EQ(info.metrics.at("train:reward"), 0.1);
  }
}

TEST(Checkpoint, DamagedOnesAreIgnoredWithAWarning) {
  const TemporaryDirectory dir;
  TestRun run(dir.path(), 16, 0);
  run.save(1, 0.1);
  run.save(2, 0.2);
  run.save(3, 0.3);
  fs::resize_file(dir.path() / "step_3" / "policy" / "weights" / "model.safetensors", 100);
  fs::remove(dir.path() / "step_2" / "manifest.json");
  fs::create_directories(dir.path() / "tmp_step_9" / "policy");
  std::vector<std::string> warnings;
  EXPECT_EQ(list_checkpoints(dir.path(), &warnings).size(), 1u);
  EXPECT_EQ(warnings.size(), 2u);
  TestRun again(dir.path());
  EXPECT_EQ(again.manager->load_latest(again.model, again.optimizer)->step, 1);
  EXPECT_FALSE(fs::exists(dir.path() / "tmp_step_9")) << "unfinished folders are removed at the start";
}

TEST(Checkpoint, AnotherModelIsRefusedWithTheDifference) {
  const TemporaryDirectory dir;
  TestRun(dir.path()).save(1, 0.5);
  TestRun other(dir.path(), 32);
  try {
    other.manager->load_latest(other.model, other.optimizer);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    EXPECT_NE(std::string(error.what()).find("model.hidden_size is 16 there and 32 here"), std::string::npos)
        << error.what();
  }
}

TEST(Checkpoint, AFailedSaveLeavesTheOthersAndNoRubbish) {
  const TemporaryDirectory dir;
  TestRun run(dir.path());
  run.save(1, 0.5);
  // Permissions do not stop root: the folder of checkpoints is a file instead.
  CheckpointOptions options;
  options.directory = dir.path() / "blocked";
  std::ofstream(options.directory) << "not a folder";
  CheckpointManager blocked(options, nlohmann::json::object(), run.context);
  EXPECT_THROW(blocked.save(2, run.model, run.optimizer, {}, {}, ""), Error);
  EXPECT_EQ(steps(dir.path()), std::vector<int64_t>{1});
}

TEST(Checkpoint, TheBestIsThatOfTheMetric) {
  std::vector<CheckpointInfo> all(4);
  for (int64_t i = 0; i < 4; ++i) all[static_cast<size_t>(i)].step = i + 1;
  EXPECT_EQ(best_checkpoint(all, "m", true), nullptr) << "none has it";
  all[0].metrics["m"] = all[2].metrics["m"] = 3;
  all[1].metrics["m"] = 1;
  EXPECT_EQ(best_checkpoint(all, "m", true)->step, 3) << "the newer of equals";
  EXPECT_EQ(best_checkpoint(all, "m", false)->step, 2);
  EXPECT_EQ(best_checkpoint(all, "", true), nullptr);
}

template <class F>
void expect_error(ErrorKind kind, const std::string& part, F&& call) {
  try {
    call();
    ADD_FAILURE() << "no error with " << part;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

// A manager of a further model in a directory of its own, DIR/value, beside an actor's in DIR.
struct ValueRun : ManagedModel {
  explicit ValueRun(const fs::path& dir)
      : ManagedModel("value", {.directory = dir / "value", .folder = "value", .follows = dir}, 16, 7) {}
  void save(int64_t step) { manager->save(step, model, optimizer, {}, {}, "a: 1\n"); }
};

TEST(Checkpoint, AFollowerKeepsTheStepsOfTheOtherDirectory) {
  const TemporaryDirectory dir;
  ValueRun value(dir.path());
  value.save(1);  // the other has none yet: nothing is removed
  TestRun actor(dir.path());
  value.save(2);
  EXPECT_EQ(steps(dir.path() / "value"), (std::vector<int64_t>{1, 2}));
  actor.save(2, 0.5);
  value.save(4);
  EXPECT_EQ(steps(dir.path() / "value"), (std::vector<int64_t>{2, 4}));  // 1 is not the other's, 4 will be
  actor.save(3, 0.5);
  value.manager->tidy();
  EXPECT_EQ(steps(dir.path() / "value"), (std::vector<int64_t>{2, 4}));
  actor.save(5, 0.1);
  value.manager->tidy();
  EXPECT_EQ(steps(dir.path() / "value"), (std::vector<int64_t>{2}));  // the other has left 4 out
}

TEST(Checkpoint, AFollowerKeepsAStepThatCannotBeReadInTheOtherDirectory) {
  const TemporaryDirectory dir;
  ValueRun value(dir.path());
  TestRun actor(dir.path());
  for (const int64_t step : {1, 2}) {
    value.save(step);
    actor.save(step, 0.5);
  }
  const fs::path manifest = dir.path() / "step_1" / "manifest.json";
  fs::rename(manifest, dir.path() / "away");
  value.save(3);
  EXPECT_EQ(steps(dir.path() / "value"), (std::vector<int64_t>{1, 2, 3}));
}

TEST(Checkpoint, ASaveDoesNotFailByWhatCannotBePruned) {
  const TemporaryDirectory dir;
  const fs::path loop = dir.path() / "loop";
  fs::create_symlink(loop, loop);  // listing it fails
  ManagedModel value("value", {.directory = dir.path() / "value", .folder = "value", .follows = loop}, 16, 7);
  for (const int64_t step : {1, 2})
    EXPECT_NO_THROW(value.manager->save(step, value.model, value.optimizer, {}, {}, "a: 1\n"));
  value.manager->tidy();
  EXPECT_EQ(steps(dir.path() / "value"), (std::vector<int64_t>{1, 2}));
}

TEST(Checkpoint, AFolderThatCannotBeListedIsNoEmptyOne) {
  const TemporaryDirectory dir;
  EXPECT_TRUE(list_checkpoints(dir.path() / "none").empty());
  const fs::path loop = dir.path() / "loop";
  fs::create_symlink(loop, loop);
  expect_error(ErrorKind::kIo, "cannot list the checkpoints in " + loop.string(),
               [&] { (void)list_checkpoints(loop); });
}

TEST(Checkpoint, TheStepThatIsAskedForIsLoadedOrNamed) {
  const TemporaryDirectory dir;
  ValueRun first(dir.path());
  first.save(1);
  first.save(2);
  ValueRun second(dir.path());
  init_parameters(second.model, 99);
  EXPECT_EQ(second.manager->load_step(1, dir.path(), second.model, second.optimizer).step, 1);
  EXPECT_TRUE(at::equal(first.model.flat_parameters(), second.model.flat_parameters()));
  expect_error(ErrorKind::kUser, "step_5 has no value",
               [&] { second.manager->load_step(5, dir.path(), second.model, second.optimizer); });
}

// What ranks of their own have saved is loaded where the model is on these ranks, and the other way round.
TEST(Checkpoint, AFurtherModelIsFoundInEitherPlace) {
  const TemporaryDirectory dir;
  const auto both = [&](TestRun& run, ValueRun& value) {
    run.manager = std::make_unique<CheckpointManager>(
        CheckpointOptions{.directory = dir.path()},
        nlohmann::json{{"algorithm", "grpo"}, {"value", value.model.config().to_json()}}, run.context);
    run.manager->add("value", value.model, value.optimizer, {});
  };
  const auto alone = [&](TestRun& run, const ValueRun& value) {
    run.manager = std::make_unique<CheckpointManager>(
        CheckpointOptions{.directory = dir.path()},
        nlohmann::json{{"algorithm", "grpo"}, {"value", value.model.config().to_json()}}, run.context);
  };
  ValueRun apart(dir.path());
  TestRun actor(dir.path());
  alone(actor, apart);
  apart.save(1);
  actor.save(1, 0.5);
  {
    TestRun resumed(dir.path());
    ValueRun beside(dir.path());
    init_parameters(beside.model, 99);
    both(resumed, beside);
    ASSERT_TRUE(resumed.manager->load_latest(resumed.model, resumed.optimizer));
    EXPECT_TRUE(at::equal(apart.model.flat_parameters(), beside.model.flat_parameters()));
    resumed.save(2, 0.5);  // holds both
  }
  ValueRun again(dir.path());
  init_parameters(again.model, 98);
  const CheckpointInfo info = again.manager->load_step(2, dir.path(), again.model, again.optimizer);
  EXPECT_EQ(info.path, dir.path() / "step_2");
  EXPECT_TRUE(at::equal(apart.model.flat_parameters(), again.model.flat_parameters()));
  fs::remove_all(dir.path() / "step_2");
  fs::remove_all(dir.path() / "value");
  TestRun resumed(dir.path());
  ValueRun beside(dir.path());
  both(resumed, beside);
  expect_error(ErrorKind::kUser, "has no value",
               [&] { (void)resumed.manager->load_latest(resumed.model, resumed.optimizer); });
}

TEST(Checkpoint, WhatACommitWaitsForDecidesAboutIt) {
  const TemporaryDirectory dir;
  TestRun run(dir.path());
  std::vector<int64_t> waited, committed;
  run.manager->before_commit = [&](int64_t step, const std::atomic<bool>&, const std::function<void()>& moves) {
    moves();
    waited.push_back(step);
    if (step == 2) throw Error(ErrorKind::kUnavailable, "critic rank 0 has died");
  };
  run.manager->committed = [&](int64_t step) { committed.push_back(step); };
  run.save(1, 0.5);
  expect_error(ErrorKind::kUnavailable, "critic rank 0 has died", [&] { run.save(2, 0.5); });
  run.save(3, 0.5);
  EXPECT_EQ(waited, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(committed, (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(steps(dir.path()), (std::vector<int64_t>{1, 3}));
}

TEST(Checkpoint, PruningIsPure) {
  std::vector<CheckpointInfo> all(4);
  for (int64_t i = 0; i < 4; ++i) all[static_cast<size_t>(i)].step = i + 1;
  all[0].metrics["m"] = 3;
  all[1].metrics["m"] = 1;
  EXPECT_EQ(steps_to_remove(all, "m", true, 1), (std::vector<int64_t>{2, 3}));  // best 1, newest 4
  EXPECT_EQ(steps_to_remove(all, "m", false, 1), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(steps_to_remove(all, "", true, 2), (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(steps_to_remove(all, "m", true, 0).empty());
}

}  // namespace
}  // namespace trireme
