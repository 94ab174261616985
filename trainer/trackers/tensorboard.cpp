#include "trainer/trackers/tensorboard.h"

#include <unistd.h>

#include <chrono>
#include <cmath>

#include "base/clock.h"
#include "trainer/trackers/append_file.h"
#include "trainer/trackers/wire.h"

namespace trireme {
namespace {

// Field numbers of tensorflow's event.proto, summary.proto and tensor.proto.
enum EventField { kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7 };
enum SummaryField { kValue = 1 };
enum ValueField { kTag = 1, kSimpleValue = 2, kTensor = 8, kMetadata = 9 };
enum TensorField { kDtype = 1, kShape = 2, kStringValue = 8 };
constexpr uint64_t kDtString = 7;
constexpr uint64_t kSessionStart = 1;

uint32_t masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xa282ead8U; }

std::string record(const std::string& event) {
  const std::string length = little_endian(event.size(), 8);
  return length + little_endian(masked(crc32c(length)), 4) + event + little_endian(masked(crc32c(event)), 4);
}

// Markdown: the page shows text summaries as such.
WireMessage text_value(const std::string& tag, const std::string& text) {
  WireMessage metadata, plugin, tensor, shape, dimension, value;
  plugin.bytes(1, "text");
  metadata.message(1, plugin);
  dimension.varint(1, 1);
  shape.message(2, dimension);
  tensor.varint(kDtype, kDtString).message(kShape, shape).bytes(kStringValue, text);
  value.bytes(kTag, tag).message(kTensor, tensor).message(kMetadata, metadata);
  return value;
}

class Tensorboard final : public Tracker {
 public:
  explicit Tensorboard(std::filesystem::path folder) : folder_(std::move(folder)) {}
  const char* name() const override { return "TensorBoard"; }

  void begin(const TrackedRun& run) override {
    char host[256] = "host";
    ::gethostname(host, sizeof host - 1);
    file_ = std::make_unique<AppendFile>(folder_ /
                                         ("events.out.tfevents." + std::to_string(static_cast<int64_t>(unix_now_s())) +
                                          "." + host + "." + std::to_string(::getpid())));
    std::string bytes =
        record(WireMessage().fixed64(kWallTime, unix_now_s()).bytes(kFileVersion, "brain.Event:2").text());
    if (run.resumed_step > 0) {
      WireMessage session;
      session.varint(1, kSessionStart);
      bytes += record(event(unix_now_s(), run.resumed_step + 1).message(kSessionLog, session).text());
    }
    WireMessage summary;
    summary.message(kValue, text_value("config", "```\n" + run.config.dump(2) + "\n```"));
    bytes += record(event(unix_now_s(), run.resumed_step).message(kSummary, summary).text());
    file_->append(bytes);
  }

  void log(const TrackedStep& step) override {
    WireMessage summary;
    for (const auto& [tag, value] : step.values) {
      if (!std::isfinite(value)) continue;
      WireMessage scalar;
      scalar.bytes(kTag, tag).fixed32(kSimpleValue, static_cast<float>(value));
      summary.message(kValue, scalar);
    }
    file_->append(record(event(step.wall_time_s, step.step).message(kSummary, summary).text()));
  }

  void end(bool) override { file_.reset(); }

 private:
  static WireMessage event(double wall_time, int64_t step) {
    WireMessage message;
    message.fixed64(kWallTime, wall_time).varint(kStep, static_cast<uint64_t>(step));
    return message;
  }

  const std::filesystem::path folder_;
  std::unique_ptr<AppendFile> file_;
};

}  // namespace

std::unique_ptr<Tracker> make_tensorboard(const std::filesystem::path& folder) {
  return std::make_unique<Tensorboard>(folder);
}

}  // namespace trireme
