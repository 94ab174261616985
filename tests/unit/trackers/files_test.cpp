// Event files and W&B's log, read back by readers written from the formats' descriptions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "base/fs.h"
#include "trainer/trackers/mlflow.h"
#include "trainer/trackers/tensorboard.h"
#include "trainer/trackers/wandb.h"
#include "trainer/trackers/wire.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

template <class T>
T number_at(std::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.substr(at, sizeof value).data(), sizeof value);
  return value;
}

// A message's fields in the order written: number -> payload (varints as 8 bytes).
std::vector<std::pair<int, std::string>> fields_of(std::string_view bytes) {
  std::vector<std::pair<int, std::string>> fields;
  size_t at = 0;
  const auto varint = [&] {
    uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<uint8_t>(bytes.at(at++));
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < bytes.size()) {
    const uint64_t tag = varint();
    size_t size = (tag & 7) == 1 ? 8 : 4;
    if ((tag & 7) == 0) {
      fields.emplace_back(static_cast<int>(tag >> 3), little_endian(varint(), 8));
      continue;
    }
    if ((tag & 7) == 2) size = varint();
    fields.emplace_back(static_cast<int>(tag >> 3), std::string(bytes.substr(at, size)));
    at += size;
  }
  return fields;
}

std::string field(std::string_view bytes, int number) {
  for (const auto& [found, payload] : fields_of(bytes)) {
    if (found == number) return payload;
  }
  return "";
}

// Castagnoli's polynomial bit by bit from the other end (not reflected), to share nothing with the code.
uint32_t plain_crc32c(std::string_view bytes) {
  const auto reversed = [](uint32_t value, int bits) {
    uint32_t out = 0;
    for (int k = 0; k < bits; ++k) out |= ((value >> k) & 1U) << (bits - 1 - k);
    return out;
  };
  uint32_t crc = 0xffffffffU;
  for (const char byte : bytes) {
    crc ^= reversed(static_cast<uint8_t>(byte), 8) << 24;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 0x80000000U) ? (crc << 1) ^ 0x1EDC6F41U : crc << 1;
  }
  return ~reversed(crc, 32);
}

std::vector<std::string> read_events(const fs::path& folder) {
  std::vector<fs::path> files(fs::directory_iterator(folder), fs::directory_iterator{});
  EXPECT_EQ(files.size(), 1U);
  const std::string bytes = read_file(files.at(0));
  std::vector<std::string> events;
  const auto check = [&](size_t at, std::string_view of) {
    const uint32_t crc = plain_crc32c(of);
    EXPECT_EQ(number_at<uint32_t>(bytes, at), ((crc >> 15) | (crc << 17)) + 0xa282ead8U);
  };
  for (size_t at = 0; at < bytes.size();) {
    const auto length = number_at<uint64_t>(bytes, at);
    check(at + 8, std::string_view(bytes).substr(at, 8));
    events.push_back(bytes.substr(at + 12, length));
    check(at + 12 + length, events.back());
    at += length + 16;
  }
  return events;
}

std::map<std::string, float> scalars_of(const std::string& event) {
  std::map<std::string, float> values;
  for (const auto& [number, value] : fields_of(field(event, 5))) {
    const std::string scalar = field(value, 2);
    if (!scalar.empty()) values[field(value, 1)] = number_at<float>(scalar, 0);
  }
  return values;
}

TEST(Wire, ChecksumIsCastagnolis) { EXPECT_EQ(crc32c("123456789"), 0xE3069283U); }

TEST(Tensorboard, EventFileHoldsStepsAndConfiguration) {
  TemporaryDirectory folder;
  const auto board = make_tensorboard(folder.path() / "tensorboard");
  board->begin({{{"grpo", {{"seed", 7}}}}, 0});
  board->log({3, 1000.5, {{"train/reward", 0.25}, {"train/none", std::nan("")}}});
  board->end(true);
  const auto events = read_events(folder.path() / "tensorboard");
  ASSERT_EQ(events.size(), 3U);
  EXPECT_EQ(field(events[0], 3), "brain.Event:2");
  EXPECT_THAT(events[1], HasSubstr("\"seed\": 7"));
  EXPECT_EQ(number_at<double>(field(events[2], 1), 0), 1000.5);
  EXPECT_EQ(number_at<int64_t>(field(events[2], 2), 0), 3);
  EXPECT_THAT(scalars_of(events[2]), ElementsAre(Pair("train/reward", 0.25F)));
}

TEST(Tensorboard, AResumedRunTellsWhichStepsAreDoneAnew) {
  TemporaryDirectory folder;
  const auto board = make_tensorboard(folder.path());
  board->begin({{}, 40});
  board->end(true);
  const auto events = read_events(folder.path());
  const std::string start = events.at(1);
  EXPECT_EQ(number_at<int64_t>(field(start, 2), 0), 41);
  EXPECT_EQ(number_at<int64_t>(field(field(start, 7), 1), 0), 1);  // SessionLog.START
}

// Records of the one .wandb file below `folder` whose folder's name ends as given.
std::vector<std::string> read_wandb(const fs::path& file) {
  const std::string bytes = read_file(file);
  EXPECT_EQ(bytes.substr(0, 4), ":W&B");
  EXPECT_EQ(number_at<uint16_t>(bytes, 4), 0xBEE1);
  std::vector<std::string> records;
  std::string record;
  for (size_t at = 7; at < bytes.size();) {
    const size_t left = 32768 - at % 32768;
    if (left < 7) {
      at += left;
      continue;
    }
    const auto length = number_at<uint16_t>(bytes, at + 4);
    const std::string checked = bytes.substr(at + 6, 1U + length);
    EXPECT_EQ(number_at<uint32_t>(bytes, at),
              ::crc32(0, reinterpret_cast<const Bytef*>(checked.data()), static_cast<uInt>(checked.size())));
    record += checked.substr(1);
    if (checked[0] == 1 || checked[0] == 4) records.push_back(std::move(record)), record.clear();
    at += 7U + length;
  }
  EXPECT_THAT(record, IsEmpty());
  return records;
}

std::vector<fs::path> wandb_files(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() == ".wandb") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::map<std::string, std::string> row_of(const std::string& record) {
  std::map<std::string, std::string> row;
  for (const auto& [number, item] : fields_of(field(record, 2))) {
    if (number == 1) row[field(item, 2)] = field(item, 16);
  }
  return row;
}

TEST(Wandb, OfflineRunHoldsRunAndHistory) {
  TemporaryDirectory folder;
  WandbOptions options;
  options.folder = folder.path();
  options.project = "sums";
  options.name = "first";
  options.tags = {"a", "b"};
  const auto run = make_wandb(options);
  const std::string large(100000, 'x');  // its record goes over four blocks
  run->begin({{{"seed", 7}, {"text", large}}, 0});
  run->log({1, 1000, {{"train/reward", 0.5}}});
  run->log({1, 1001, {{"validation/accuracy", 0.25}}});
  run->log({2, 1002, {{"train/reward", std::numeric_limits<double>::infinity()}}});
  run->end(true);
  const auto files = wandb_files(folder.path());
  ASSERT_EQ(files.size(), 1U);
  const auto records = read_wandb(files[0]);
  ASSERT_EQ(records.size(), 5U);
  const std::string described = field(records[1], 17);
  EXPECT_EQ("run-" + field(described, 1) + ".wandb", files[0].filename());
  EXPECT_EQ(field(described, 3), "sums");
  EXPECT_EQ(field(described, 8), "first");
  EXPECT_THAT(field(described, 4), HasSubstr(large));
  const auto first = row_of(records[2]);
  EXPECT_EQ(first.at("_step"), "1");
  EXPECT_EQ(first.at("train/reward"), "0.5");
  EXPECT_EQ(first.at("validation/accuracy"), "0.25");
  EXPECT_EQ(row_of(records[3]).count("train/reward"), 0U);
  EXPECT_EQ(number_at<int64_t>(field(records[4], 1), 0), 5);
  EXPECT_NE(field(records[4], 18), "");
}

TEST(Wandb, AResumedRunKeepsItsIdAndLeavesOutWhatIsThere) {
  TemporaryDirectory folder;
  WandbOptions options;
  options.folder = folder.path();
  const auto first = make_wandb(options);
  first->begin({{}, 0});
  for (int64_t step = 1; step <= 5; ++step) first->log({step, 1.0, {{"x", 1}}});
  first->end(false);
  fs::rename(wandb_files(folder.path()).at(0).parent_path(), folder.path() / "offline-run-0");
  const auto second = make_wandb(options);
  second->begin({{}, 3});
  for (int64_t step = 4; step <= 6; ++step) second->log({step, 1.0, {{"x", 2}}});
  second->end(true);
  const auto files = wandb_files(folder.path());
  ASSERT_EQ(files.size(), 2U);
  EXPECT_EQ(files[0].filename(), files[1].filename());
  const auto records = read_wandb(files[1]);
  ASSERT_EQ(records.size(), 4U);
  EXPECT_EQ(row_of(records[2]).at("_step"), "6");
}

// For tests/parity/trackers_parity.py, which reads what is written with the trackers' own packages.
TEST(Trackers, WriteForTheirOwnReaders) {
  const char* folder = std::getenv("TRIREME_WRITE_TRACKERS");
  if (!folder) GTEST_SKIP() << "TRIREME_WRITE_TRACKERS names no folder";
  WandbOptions options;
  options.folder = fs::path(folder) / "wandb";
  options.project = "sums";
  options.name = "first";
  std::vector<std::unique_ptr<Tracker>> trackers;
  trackers.push_back(make_tensorboard(fs::path(folder) / "tensorboard"));
  trackers.push_back(make_wandb(options));
  if (const char* uri = std::getenv("TRIREME_MLFLOW_URI")) {
    MlflowOptions mlflow;
    mlflow.tracking_uri = uri;
    mlflow.experiment_name = "sums & more";
    mlflow.run_name = "first";
    mlflow.state_file = fs::path(folder) / "mlflow_run.json";
    trackers.push_back(make_mlflow(mlflow));
  }
  for (const auto& tracker : trackers) {
    tracker->begin({{{"grpo", {{"seed", 7}}}, {"text", std::string(100000, 'x')}}, 0});
    for (int64_t step = 1; step <= 500; ++step)
      tracker->log({step, 1000.0 + static_cast<double>(step), {{"train/reward", 1.0 / static_cast<double>(step)}}});
    tracker->end(true);
  }
}

}  // namespace
}  // namespace trireme
