#include "trainer/trackers/wandb.h"

#include <unistd.h>
#include <zlib.h>

#include <chrono>
#include <cmath>
#include <ctime>
#include <optional>
#include <random>

#include "base/clock.h"
#include "base/error.h"
#include "base/fs.h"
#include "trainer/trackers/append_file.h"
#include "trainer/trackers/wire.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

// Field numbers of wandb_internal.proto.
enum RecordField { kNum = 1, kHistory = 2, kRun = 17, kExit = 18, kHeader = 21 };
enum RunField { kRunId = 1, kEntity, kProject, kConfig, kGroup = 6, kDisplayName = 8, kTags = 10, kHost = 13 };
enum RunFieldLater { kStartingStep = 14, kStartTime = 17, kResumed = 18 };
enum ItemField { kKey = 1, kNestedKey = 2, kValueJson = 16 };

// LevelDB's log: blocks of 32 KiB, each piece with CRC, length and kind; a record may go over several blocks.
// https://github.com/google/leveldb/blob/main/doc/log_format.md
class TransactionLog final {
 public:
  explicit TransactionLog(const fs::path& path) : file_(path) {
    file_.append(std::string(":W&B") + little_endian(0xBEE1, 2) + little_endian(0, 1));
  }

  void append(const std::string& record) {
    std::string bytes;
    size_t at = 0;
    bool first = true;
    do {
      const size_t left = kBlock - (file_.size() + bytes.size()) % kBlock;
      if (left < kHead) {
        bytes.append(left, '\0');
        continue;
      }
      const size_t piece = std::min(left - kHead, record.size() - at);
      const bool last = at + piece == record.size();
      const char kind = static_cast<char>(first ? (last ? 1 : 2) : (last ? 4 : 3));
      std::string checked(1, kind);
      checked.append(record, at, piece);
      const uLong crc = ::crc32(0, reinterpret_cast<const Bytef*>(checked.data()), static_cast<uInt>(checked.size()));
      bytes += little_endian(crc, 4) + little_endian(piece, 2) + checked;
      at += piece;
      first = false;
    } while (at < record.size() || first);
    file_.append(bytes);
  }

 private:
  static constexpr size_t kBlock = 32768, kHead = 7;
  AppendFile file_;
};

std::string local_stamp() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::localtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y%m%d_%H%M%S", &parts);
  return text;
}

std::string random_id() {
  static const char kLetters[] = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device device;
  std::string id;
  for (int k = 0; k < 8; ++k) id.push_back(kLetters[device() % 36]);
  return id;
}

class Wandb final : public Tracker {
 public:
  explicit Wandb(WandbOptions options) : options_(std::move(options)) {}
  const char* name() const override { return "W&B"; }

  void begin(const TrackedRun& run) override {
    id_ = random_id();
    if (run.resumed_step > 0) read_state();
    started_s_ = unix_now_s();
    const fs::path folder = options_.folder / ("offline-run-" + local_stamp() + "-" + id_);
    log_ = std::make_unique<TransactionLog>(folder / ("run-" + id_ + ".wandb"));
    fs::create_directories(folder / "files");  // `wandb sync` expects it
    records_ = 0;
    WireMessage version, header;
    version.bytes(1, "trireme").bytes(2, "0.70.0");
    header.message(1, version);
    append(kHeader, header);
    append(kRun, run_record(run));
    write_state();
  }

  void log(const TrackedStep& step) override {
    if (step.step <= written_) return;
    if (row_ && row_->step != step.step) write_row();
    if (!row_) {
      row_ = step;
    } else {
      for (const auto& [name, value] : step.values) row_->values[name] = value;
    }
  }

  void end(bool succeeded) override {
    if (row_) write_row();
    WireMessage exit;
    exit.varint(1, succeeded ? 0 : 1).varint(2, static_cast<uint64_t>(unix_now_s() - started_s_));
    append(kExit, exit);
    log_.reset();
  }

 private:
  fs::path state_path() const { return options_.folder / "trireme_run.json"; }

  // A state that is not there or not readable means a run of its own.
  void read_state() {
    if (!fs::exists(state_path())) return;
    const auto state = nlohmann::json::parse(read_file(state_path()), nullptr, false);
    if (!state.is_object() || !state.value("id", nlohmann::json()).is_string()) return;
    id_ = state["id"].get<std::string>();
    written_ = state.value("step", int64_t{-1});
  }

  void write_state() { write_file_atomic(state_path(), nlohmann::json{{"id", id_}, {"step", written_}}.dump() + "\n"); }

  WireMessage run_record(const TrackedRun& run) const {
    WireMessage config, record, start;
    for (const auto& [key, value] : run.config.items()) {
      config.message(1, WireMessage().bytes(kKey, key).bytes(kValueJson, value.dump()));
    }
    char host[256] = "host";
    ::gethostname(host, sizeof host - 1);
    record.bytes(kRunId, id_);
    if (!options_.entity.empty()) record.bytes(kEntity, options_.entity);
    record.bytes(kProject, options_.project).message(kConfig, config);
    if (!options_.group.empty()) record.bytes(kGroup, options_.group);
    if (!options_.name.empty()) record.bytes(kDisplayName, options_.name);
    for (const std::string& tag : options_.tags) record.bytes(kTags, tag);
    record.bytes(kHost, host);
    if (written_ >= 0) record.varint(kStartingStep, static_cast<uint64_t>(written_ + 1));
    start.varint(1, static_cast<uint64_t>(started_s_));
    record.message(kStartTime, start);
    if (written_ >= 0) record.varint(kResumed, 1);
    return record;
  }

  void write_row() {
    WireMessage history, step;
    const auto item = [&](const std::string& key, const std::string& json) {
      history.message(1, WireMessage().bytes(kNestedKey, key).bytes(kValueJson, json));
    };
    item("_step", std::to_string(row_->step));
    item("_timestamp", nlohmann::json(row_->wall_time_s).dump());
    item("_runtime", nlohmann::json(row_->wall_time_s - started_s_).dump());
    for (const auto& [name, value] : row_->values) {
      if (std::isfinite(value)) item(name, nlohmann::json(value).dump());
    }
    step.varint(1, static_cast<uint64_t>(row_->step));
    history.message(2, step);
    append(kHistory, history);
    written_ = row_->step;
    row_.reset();
    write_state();
  }

  void append(int field, const WireMessage& payload) {
    WireMessage record, info;
    info.bytes(1, id_);  // _RecordInfo.stream_id
    record.varint(kNum, static_cast<uint64_t>(records_ + 1)).message(field, payload).message(200, info);
    log_->append(record.text());
    ++records_;
  }

  const WandbOptions options_;
  std::unique_ptr<TransactionLog> log_;
  std::string id_;
  int64_t written_ = -1;  // last step in the file
  int64_t records_ = 0;
  double started_s_ = 0;
  std::optional<TrackedStep> row_;  // the newest step, which may still get values
};

}  // namespace

std::unique_ptr<Tracker> make_wandb(const WandbOptions& options) { return std::make_unique<Wandb>(options); }

}  // namespace trireme
