#include "trainer/rewards/grade.h"

#include <fstream>
#include <ostream>

#include "base/error.h"
#include "base/text.h"
#include "trainer/rewards/math.h"
#include "trainer/rewards/reward_types.h"

namespace trireme {
namespace {

std::string text_of(const nlohmann::json& row, const char* key, const std::string& where) {
  const nlohmann::json& value = row[key];
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number()) return value.dump();
  fail_data(where + ": \"" + key + "\" is neither text nor a number");
}

}  // namespace

GradeTotals grade_pairs(const std::filesystem::path& file, const RewardOptions& options, std::ostream& out) {
  std::ifstream in(file);
  if (!in) throw Error(ErrorKind::kNotFound, "cannot open " + file.string());
  const std::unique_ptr<Reward> reward = make_reward(options);
  GradeTotals totals;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    if (trim(line).empty()) continue;
    const std::string where = file.string() + ":" + std::to_string(number);
    const nlohmann::json row = nlohmann::json::parse(line, nullptr, false);
    if (!row.is_object()) fail_data(where + ": not a JSON object");
    const bool whole_response = row.contains("response");
    const char* key = whole_response ? "response" : "answer";
    if (!row.contains("gold") || !row.contains(key))
      fail_data(where + ": needs \"gold\" and \"answer\" (or \"response\")");
    if (row.contains("label") && !row["label"].is_boolean()) fail_data(where + ": \"label\" must be true or false");
    RewardRequest request;
    request.gold = text_of(row, "gold", where);
    request.response = text_of(row, key, where);
    if (row.contains("prompt")) request.prompt = text_of(row, "prompt", where);
    if (row.contains("extra")) request.extra = row["extra"];
    RewardResult result;
    if (options.type == "math" && !whole_response) {
      result.reward = math_equal(request.gold, request.response) ? 1.0 : 0.0;
    } else {
      const auto results =
          reward->score({request}, Deadline::after(Milliseconds(static_cast<int64_t>(options.timeout_s * 1000))));
      result = results.empty() ? failed_result("no result") : results[0];
    }
    const bool correct = !result.failed && result.reward > 0;
    nlohmann::ordered_json verdict = {{"line", number},
                                      {"correct", correct},
                                      {"reward", result.reward},
                                      {"gold", request.gold},
                                      {key, request.response}};
    if (whole_response && options.type == "math")
      verdict["extracted"] = extract_final_answer(request.response).value_or("");
    if (result.failed) verdict["error"] = result.error;
    if (row.contains("label")) {
      const bool label = row["label"].get<bool>();
      verdict["label"] = label;
      verdict["agrees"] = label == correct;
      ++totals.labelled;
      totals.disagreements += label == correct ? 0 : 1;
    }
    out << verdict.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << '\n';
    ++totals.pairs;
    totals.correct += correct ? 1 : 0;
    totals.failed += result.failed ? 1 : 0;
    totals.reward_sum += result.reward;
  }
  nlohmann::ordered_json total = {{"pairs", totals.pairs},
                                  {"correct", totals.correct},
                                  {"failed", totals.failed},
                                  {"reward_sum", totals.reward_sum}};
  if (totals.labelled > 0) {
    total["labelled"] = totals.labelled;
    total["disagreements"] = totals.disagreements;
  }
  out << nlohmann::ordered_json{{"total", total}}.dump() << '\n';
  return totals;
}

}  // namespace trireme
