// Checkpoints that are written while the run goes on.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <future>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/checkpoint/tiny.h"
#include "tests/unit/parallel/listening.h"
#include "trainer/checkpoint/checkpoint.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

// A disk that writes when it is let, and is full after so many bytes.
struct Disk {
  std::mutex mutex;
  std::condition_variable changed;
  bool open = true;
  int64_t room = int64_t{1} << 40;
  int64_t slow_writes = 0;  // the next so many take so long each
  Milliseconds slowness{0};

  void set_open(bool now) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      open = now;
    }
    changed.notify_all();
  }
  void take(size_t bytes) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return open; });
    if (slow_writes > 0) {
      --slow_writes;
      std::this_thread::sleep_for(slowness);
    }
    room -= static_cast<int64_t>(bytes);
    if (room < 0) fail_io("cannot write: No space left on device");
  }
};

class DiskFile final : public ByteSink {
 public:
  DiskFile(const fs::path& path, Disk& disk) : file_(path), disk_(disk) {}
  void write(const void* data, size_t bytes) override {
    disk_.take(bytes);
    file_.write(data, bytes);
  }
  void finish() override { file_.finish(); }

 private:
  AtomicFile file_;
  Disk& disk_;
};

struct TestRank {
  TestRank(const fs::path& dir, Disk& disk, std::function<void(CheckpointOptions&)> change = {})
      : TestRank(dir, disk, std::make_unique<ParallelContext>(), std::move(change)) {}
  TestRank(const fs::path& dir, Disk& disk, std::unique_ptr<ParallelContext> ranks,
           std::function<void(CheckpointOptions&)> change = {})
      : context(std::move(ranks)), model(tiny(), {}), optimizer(model, context->data_parallel(), small_buckets()) {
    init_parameters(model, 1);
    optimizer.reset_master_from_weights();
    CheckpointOptions options;
    options.directory = dir;
    options.keep_top_k = 0;
    options.staging_block_bytes = 4096;
    options.open_file = [&disk](const fs::path& path) { return std::make_unique<DiskFile>(path, disk); };
    if (change) change(options);
    manager = std::make_unique<CheckpointManager>(options, nlohmann::json{{"model", 1}}, *context);
    optimizer.before_update = [this] { manager->wait_copied(); };
  }
  static AdamWOptions small_buckets() {
    AdamWOptions options;
    options.bucket_elements = 1000;
    return options;
  }
  void step() {
    for (Parameter& parameter : model.parameters()) parameter.tensor.mutable_grad().fill_(0.5);
    optimizer.step(0.1, 0.01, 1);
  }
  void begin(int64_t step) { manager->begin_save(step, model, optimizer, {{"position", step}}, {}, "a: 1\n"); }
  at::Tensor weights() const { return model.flat_parameters().detach().clone(); }

  std::unique_ptr<ParallelContext> context;
  Model model;
  DistributedAdamW optimizer;
  std::unique_ptr<CheckpointManager> manager;
};

std::vector<std::string> names(const fs::path& dir) {
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(dir)) {
    if (entry.path().filename().string().front() != '.') found.push_back(entry.path().filename().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

template <typename Work>
auto beside(Work work) {
  return std::async(std::launch::async, std::move(work));
}
template <typename Future>
bool goes_on(Future& future) {
  return future.wait_for(std::chrono::milliseconds(60)) == std::future_status::timeout;
}

TEST(BackgroundSave, TheRunGoesOnAndTheBitsAreThoseOfTheCall) {
  const TemporaryDirectory dir, expected;
  Disk disk;
  TestRank run(dir.path(), disk);
  run.step();
  const at::Tensor before = run.weights();
  save_model(run.model, expected.path(), {});
  run.optimizer.save(expected.path());
  disk.set_open(false);
  run.begin(1);
  run.step();  // its wait ends although nothing is written yet
  EXPECT_FALSE(at::equal(run.weights(), before));
  EXPECT_TRUE(steps(dir.path()).empty());
  EXPECT_FALSE(run.manager->take_saved());
  disk.set_open(true);
  run.manager->finish();
  const auto saved = run.manager->take_saved();
  ASSERT_TRUE(saved);
  EXPECT_EQ(saved->step, 1);
  EXPECT_GT(saved->bytes, 4 * before.numel());
  EXPECT_FALSE(run.manager->take_saved()) << "told once";
  const fs::path policy = dir.path() / "step_1" / "policy";
  for (const char* name : {"model.safetensors", "config.json", "generation_config.json"})
    EXPECT_EQ(read_file(policy / "weights" / name), read_file(expected.path() / name)) << name;
  EXPECT_EQ(read_file(policy / "optimizer" / "rank_00000.safetensors"),
            read_file(expected.path() / "rank_00000.safetensors"));
  EXPECT_EQ(names(dir.path()), std::vector<std::string>{"step_1"});
}

TEST(BackgroundSave, AnOptimizerStepWaitsForWhatDoesNotFitIntoTheMemory) {
  const TemporaryDirectory dir, expected;
  Disk disk;
  TestRank run(dir.path(), disk, [](CheckpointOptions& options) {
    options.staging_bytes = 1;  // two blocks
    options.staging_block_bytes = 512;
  });
  run.step();
  run.optimizer.save(expected.path());
  const at::Tensor before = run.weights();
  disk.set_open(false);
  run.begin(1);
  auto step = beside([&] { run.step(); });
  EXPECT_TRUE(goes_on(step));
  EXPECT_TRUE(at::equal(run.weights(), before)) << "nothing is written while it is still to be read";
  disk.set_open(true);
  step.get();
  run.manager->finish();
  EXPECT_EQ(read_file(dir.path() / "step_1" / "policy" / "optimizer" / "rank_00000.safetensors"),
            read_file(expected.path() / "rank_00000.safetensors"));
  TestRank second(dir.path(), disk);
  second.manager->load_latest(second.model, second.optimizer);
  EXPECT_TRUE(at::equal(second.weights(), before));
}

// Of a split model a file's tensors were gathered for it: they go one file after the other, before the disk has any.
TEST(BackgroundSave, WhatWasGatheredForAFileIsFreeOnceItIsCopied) {
  const TemporaryDirectory dir;
  Disk disk;
  disk.set_open(false);
  StagingPool pool(at::kCPU, 1 << 20, 4096);
  StateReader reader(at::kCPU);
  BackgroundSave::Work work;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> gathered;
  for (int64_t file = 0; file < 2; ++file) {
    const at::Tensor tensor = at::full({3000}, static_cast<double>(file));
    gathered.emplace_back(tensor.storage().getWeakStorageImpl());
    work.files.push_back({"file_" + std::to_string(file), {{"a", tensor}}, {}});
  }
  work.folder = dir.path();
  work.open = [&](const fs::path& path) { return std::make_unique<DiskFile>(path, disk); };
  work.commit = [](const std::atomic<bool>&) {};
  reader.mark();
  BackgroundSave save(std::move(work), pool, reader);
  ASSERT_TRUE(save.wait_copied(Milliseconds(60000)));
  for (const auto& storage : gathered) EXPECT_TRUE(storage.expired());
  disk.set_open(true);
  ASSERT_TRUE(save.wait_finished(Milliseconds(60000)));
  EXPECT_FALSE(save.failed());
  const SafetensorsFile second(dir.path() / "file_1");
  EXPECT_TRUE(second.tensor("a").eq(1).all().item<bool>());
}

TEST(BackgroundSave, ASecondSaveWaitsForTheFirst) {
  const TemporaryDirectory dir;
  Disk disk;
  TestRank run(dir.path(), disk);
  disk.set_open(false);
  run.begin(1);
  auto second = beside([&] { run.begin(2); });
  EXPECT_TRUE(goes_on(second));
  disk.set_open(true);
  second.get();
  EXPECT_EQ(run.manager->last_saved_step(), 2);
  EXPECT_EQ(run.manager->take_saved()->step, 1);
  run.manager->finish();
  EXPECT_EQ(steps(dir.path()), (std::vector<int64_t>{1, 2}));
}

TEST(BackgroundSave, AFullDiskIsSeenLaterAndTheOlderCheckpointStays) {
  const TemporaryDirectory dir;
  Disk disk;
  TestRank run(dir.path(), disk);
  run.begin(1);
  run.manager->finish();
  EXPECT_EQ(run.manager->take_saved()->step, 1);
  disk.room = 6000;
  run.begin(2);
  const Deadline deadline = Deadline::after(Milliseconds(60000));
  while (!run.manager->failed() && !deadline.passed()) std::this_thread::sleep_for(Milliseconds(5));
  ASSERT_TRUE(run.manager->failed());
  EXPECT_FALSE(run.manager->take_saved());
  run.step();  // does not wait for what will not come
  try {
    run.manager->abandon();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_NE(std::string(error.what()).find("step_2 failed: cannot write: No space left"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(names(dir.path()), std::vector<std::string>{"step_1"});
  disk.room = int64_t{1} << 40;
  run.begin(3);
  run.manager->finish();
  EXPECT_EQ(steps(dir.path()), (std::vector<int64_t>{1, 3}));
}

TEST(BackgroundSave, OfASingleRankThatFailsElsewhereItIsFinished) {
  const TemporaryDirectory dir;
  Disk disk;
  disk.set_open(false);
  auto run = std::make_unique<TestRank>(dir.path(), disk);
  run->begin(4);
  auto end = beside([&] { run.reset(); });
  EXPECT_TRUE(goes_on(end));
  disk.set_open(true);
  end.get();
  EXPECT_EQ(steps(dir.path()), std::vector<int64_t>{4});
}

TEST(BackgroundSave, ADiskThatStandsStillIsAnError) {
  const TemporaryDirectory dir;
  Disk disk;
  TestRank run(dir.path(), disk, [](CheckpointOptions& options) { options.patience = Milliseconds(10); });
  disk.set_open(false);
  run.begin(1);
  try {
    run.manager->finish();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_NE(std::string(error.what()).find("nothing has been written"), std::string::npos) << error.what();
  }
  disk.set_open(true);
}

TEST(BackgroundSave, AnOlderAttemptGivesNothingItsName) {
  const TemporaryDirectory dir;
  Disk disk;
  const auto attempt = [](int64_t number) {
    return [number](CheckpointOptions& options) {
      options.job = "uid";
      options.attempt = number;
    };
  };
  TestRank old(dir.path(), disk, attempt(1));
  old.begin(1);
  old.manager->finish();
  disk.set_open(false);
  old.begin(2);
  TestRank newer(dir.path(), disk, attempt(2));
  EXPECT_EQ(newer.manager->load_latest(newer.model, newer.optimizer)->step, 1);
  disk.set_open(true);
  try {
    old.manager->finish();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConflict) << error.what();
    EXPECT_NE(std::string(error.what()).find("belongs to attempt 2 of this job"), std::string::npos) << error.what();
  }
  EXPECT_EQ(names(dir.path()), std::vector<std::string>{"step_1"});
  newer.begin(2);
  newer.manager->finish();
  EXPECT_EQ(steps(dir.path()), (std::vector<int64_t>{1, 2}));
  TestRank late(dir.path(), disk, attempt(1));
  EXPECT_THROW(late.manager->load_latest(late.model, late.optimizer), Error);
}

// Runs both ranks of a job and returns what each threw.
std::vector<std::string> two_ranks(const fs::path& dir, std::vector<Disk>& disks, Milliseconds patience,
                                   const std::function<void(TestRank&, int rank)>& work,
                                   Milliseconds timeout = Milliseconds(120000)) {
  ListeningPort port;
  std::vector<std::string> errors(2);
  disable_flight_recorder();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Layout layout;
        layout.dp = 2;
        TestRank run(dir, disks[static_cast<size_t>(rank)],
                     std::make_unique<ParallelContext>(layout, port.place(rank, 2, timeout)),
                     [&](CheckpointOptions& options) {
                       options.patience = patience;
                       options.staging_block_bytes = 512;
                     });
        try {
          work(run, rank);
        } catch (const Error& error) {
          errors[static_cast<size_t>(rank)] = error.what();
        }
        run.context->world().barrier();
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = std::string("outside: ") + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

TEST(BackgroundSave, RankZeroWaitsForTheOthersPartsWhileAllTrain) {
  const TemporaryDirectory dir;
  std::vector<Disk> disks(2);
  disks[1].set_open(false);
  at::Tensor before;
  const auto errors = two_ranks(dir.path(), disks, Milliseconds(120000), [&](TestRank& run, int rank) {
    run.step();
    if (rank == 0) before = run.weights();
    run.begin(1);
    run.step();  // collectives go on beside the save
    run.step();
    EXPECT_TRUE(steps(dir.path()).empty());
    run.context->world().barrier();
    if (rank == 1) disks[1].set_open(true);
    run.manager->finish();
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"", ""}));
  EXPECT_EQ(steps(dir.path()), std::vector<int64_t>{1});
  EXPECT_EQ(names(dir.path() / "step_1" / "policy" / "optimizer").size(), 2u);
  Disk disk;
  TestRank alone(dir.path(), disk);
  alone.manager->load_latest(alone.model, alone.optimizer);
  EXPECT_TRUE(at::equal(alone.weights(), before));
}

TEST(BackgroundSave, AFullDiskOfOneRankIsToldToAll) {
  const TemporaryDirectory dir;
  std::vector<Disk> disks(2);
  const auto errors = two_ranks(dir.path(), disks, Milliseconds(120000), [&](TestRank& run, int rank) {
    run.begin(1);
    run.manager->finish();
    if (rank == 1) disks[1].room = 100;
    run.begin(2);
    const Deadline deadline = Deadline::after(Milliseconds(60000));
    while (!run.manager->failed() && !deadline.passed()) std::this_thread::sleep_for(Milliseconds(5));
    EXPECT_TRUE(run.manager->failed()) << "rank 0 hears of it too";
    run.manager->abandon();
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("step_2 failed on rank 1: cannot write: No space left"), std::string::npos) << error;
  EXPECT_EQ(names(dir.path()), std::vector<std::string>{"step_1"});
}

// Of a rank whose disk is slow the others wait longer than a collective's deadline, and than a save may stand still.
TEST(BackgroundSave, ASlowDiskOfOneRankIsWaitedForWhileItWrites) {
  const Milliseconds patience(2500), deadline(4000), slowness(450);
  const int64_t writes = 12;
  for (const size_t slow : {0, 1}) {
    const TemporaryDirectory dir;
    std::vector<Disk> disks(2);
    disks[slow].slow_writes = writes;
    disks[slow].slowness = slowness;
    const Stopwatch watch;
    const auto errors = two_ranks(
        dir.path(), disks, patience,
        [&](TestRank& run, int) {
          int waits = 0;
          run.manager->on_wait = [&] { ++waits; };
          run.begin(1);
          run.manager->finish();
          EXPECT_GT(waits, 0) << "who watches the run hears that it goes on";
        },
        deadline);
    EXPECT_EQ(errors, (std::vector<std::string>{"", ""})) << "rank " << slow << " is slow";
    EXPECT_EQ(disks[slow].slow_writes, 0) << "it was slow to the end";
    EXPECT_GT(watch.seconds(), std::chrono::duration<double>(writes * slowness).count());
    EXPECT_EQ(steps(dir.path()), std::vector<int64_t>{1});
  }
}

TEST(BackgroundSave, ARankWhosePartDoesNotComeIsNamed) {
  const TemporaryDirectory dir;
  std::vector<Disk> disks(2);
  disks[1].set_open(false);
  const auto errors = two_ranks(dir.path(), disks, Milliseconds(300), [&](TestRank& run, int rank) {
    run.begin(1);
    if (rank == 0) {
      const Deadline deadline = Deadline::after(Milliseconds(60000));
      while (!run.manager->failed() && !deadline.passed()) std::this_thread::sleep_for(Milliseconds(5));
      disks[1].set_open(true);
    }
    run.context->world().barrier();
    run.manager->abandon();
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("the part of these ranks is not written: 1"), std::string::npos) << error;
  EXPECT_TRUE(names(dir.path()).empty());
}

}  // namespace
}  // namespace trireme
