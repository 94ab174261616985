#include "trainer/telemetry/rollout_log.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"

namespace trireme {
namespace {

constexpr std::string_view kPrefix = "train_data_step_", kSuffix = ".jsonl";

// At a character's first byte, so that no half of one is left.
std::string cut(const std::string& text, size_t most) {
  if (text.size() <= most) return text;
  size_t end = most;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end);
}

}  // namespace

std::string rollout_line(int64_t step, const RolloutLine& line, size_t max_text_bytes) {
  nlohmann::ordered_json json;
  json["step"] = step;
  json["group"] = line.group;
  json["index"] = line.index;
  json["prompt"] = cut(line.prompt, max_text_bytes);
  json["response"] = cut(line.response, max_text_bytes);
  if (std::max(line.prompt.size(), line.response.size()) > max_text_bytes) json["cut"] = true;
  json["reward"] = line.reward;
  json["raw_reward"] = line.raw_reward;
  json["rewards"] = nlohmann::ordered_json::object();
  for (const auto& [name, value] : line.rewards) json["rewards"][name] = value;
  json["advantage"] = line.advantage;
  json["truncated"] = line.truncated;
  json["dropped"] = line.dropped;
  json["prompt_tokens"] = line.prompt_tokens;
  json["response_tokens"] = line.response_tokens;
  json["weight_versions"] = nlohmann::ordered_json::array();
  for (const auto& [version, from, to] : line.weight_versions)
    json["weight_versions"].push_back({{"version", version}, {"from", from}, {"to", to}});
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

RolloutLog::RolloutLog(RolloutLogOptions options, int64_t resumed_step) : options_(std::move(options)) {
  for (const int64_t step : steps()) {
    if (step > resumed_step) remove(step);
  }
}

std::vector<int64_t> RolloutLog::steps() const {
  std::vector<int64_t> found;
  std::error_code error;  // a folder that is not there yet, or that its server has lost meanwhile
  for (std::filesystem::directory_iterator entry(options_.directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!starts_with(name, kPrefix) || name.size() <= kPrefix.size() + kSuffix.size()) continue;
    const auto step =
        parse_int(std::string_view(name).substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size()));
    if (step && *step >= 0 && name == file_name(*step)) found.push_back(*step);
  }
  std::sort(found.begin(), found.end());
  return found;
}

void RolloutLog::remove(int64_t step) const {
  std::error_code ignored;
  std::filesystem::remove(options_.directory / file_name(step), ignored);
}

void RolloutLog::write(int64_t step, const std::vector<RolloutLine>& lines) {
  std::string text;
  for (const RolloutLine& line : lines) text += rollout_line(step, line, options_.max_text_bytes) + "\n";
  try {
    std::filesystem::create_directories(options_.directory);
    write_file_atomic(options_.directory / file_name(step), text);
  } catch (const std::exception& error) {
    if (!warned_)
      log_warn("telemetry", std::string("cannot write the log of rollouts: ") + error.what() +
                                "; the run goes on without this step's");
    warned_ = true;
  }
  const std::vector<int64_t> kept = steps();
  const auto most = static_cast<size_t>(options_.keep_steps);
  for (size_t i = 0; i + most < kept.size(); ++i) remove(kept[i]);
}

}  // namespace trireme
