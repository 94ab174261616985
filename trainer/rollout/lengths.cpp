#include "trainer/rollout/lengths.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "trainer/ops/philox.h"

namespace trireme {
namespace {

constexpr int64_t kLongest = int64_t{1} << 24;  // no model knows more positions
constexpr double kSigma = 0.8;
constexpr const char* kForm = "synthetic:PROMPTSxSAMPLES:mean=M[:max=X][:prompt=P][:seed=S]";

std::vector<int64_t> numbers(const nlohmann::json& json, const std::string& key, const std::string& source) {
  if (!json.contains(key)) fail_user(source + ": key " + key + " is missing");
  const nlohmann::json& values = json.at(key);
  if (!values.is_array() || values.empty()) fail_user(source + ": " + key + " must be a list of token counts");
  std::vector<int64_t> result;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!values[i].is_number_integer() || values[i].get<int64_t>() < 1 || values[i].get<int64_t>() > kLongest) {
      fail_user(source + ": " + key + "[" + std::to_string(i) + "] is " + values[i].dump() +
                ", not a number of tokens (1.." + std::to_string(kLongest) + ")");
    }
    result.push_back(values[i].get<int64_t>());
  }
  return result;
}

int64_t positive(const std::string& text, const std::string& what, const std::string& description) {
  const auto value = parse_int(text);
  if (!value || *value < 1 || *value > kLongest) {
    fail_user("lengths '" + description + "': " + what + " is '" + text + "', not a positive number; the form is " +
              kForm);
  }
  return *value;
}

}  // namespace

int64_t RolloutLengths::longest() const {
  int64_t result = 0;
  for (int64_t s = 0; s < samples(); ++s) result = std::max(result, total_of(s));
  return result;
}

int64_t RolloutLengths::output_tokens() const { return std::accumulate(outputs.begin(), outputs.end(), int64_t{0}); }

RolloutLengths RolloutLengths::part(int64_t part, int64_t parts) const {
  const auto count = static_cast<int64_t>(prompts.size());
  if (count % parts != 0) {
    fail_user(name + ": its " + std::to_string(count) + " prompts are no equal shares of " + std::to_string(parts) +
              " replicas");
  }
  const int64_t own = count / parts, first = part * own, of_prompt = samples_per_prompt();
  RolloutLengths result;
  result.name = name;
  result.prompts.assign(prompts.begin() + first, prompts.begin() + first + own);
  result.outputs.assign(outputs.begin() + first * of_prompt, outputs.begin() + (first + own) * of_prompt);
  return result;
}

std::vector<int64_t> RolloutLengths::prompt_of_each_sample() const {
  std::vector<int64_t> result;
  for (int64_t s = 0; s < samples(); ++s) result.push_back(prompt_of(s));
  return result;
}

RolloutLengths parse_lengths(std::string_view text, const std::string& source) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded()) fail_user(source + " is not valid JSON");
  if (!json.is_object()) fail_user(source + " must be an object with prompt_lengths and output_lengths");
  for (const auto& [key, value] : json.items()) {
    if (key != "about" && key != "prompt_lengths" && key != "output_lengths") {
      fail_user(source + ": unknown key " + key + "; known are about, prompt_lengths, output_lengths");
    }
  }
  RolloutLengths lengths;
  lengths.name = source;
  lengths.prompts = numbers(json, "prompt_lengths", source);
  lengths.outputs = numbers(json, "output_lengths", source);
  if (lengths.outputs.size() % lengths.prompts.size() != 0) {
    fail_user(source + ": " + std::to_string(lengths.outputs.size()) + " output_lengths do not divide evenly among " +
              std::to_string(lengths.prompts.size()) + " prompts");
  }
  return lengths;
}

RolloutLengths synthetic_lengths(const std::string& description) {
  const std::vector<std::string> parts = split(description, ':');
  const std::vector<std::string> counts = parts.size() > 1 ? split(parts[1], 'x') : std::vector<std::string>();
  if (parts[0] != "synthetic" || counts.size() != 2)
    fail_user("lengths '" + description + "' have not the form " + kForm);
  const int64_t prompts = positive(counts[0], "the number of prompts", description);
  const int64_t samples = prompts * positive(counts[1], "the number of samples", description);
  if (samples > kLongest)
    fail_user("lengths '" + description + "': more than " + std::to_string(kLongest) + " samples");
  int64_t mean = 0, max = 0, prompt = 200, seed = 1;
  for (size_t i = 2; i < parts.size(); ++i) {
    const size_t equals = parts[i].find('=');
    const std::string key = parts[i].substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : parts[i].substr(equals + 1);
    int64_t* target = key == "mean"     ? &mean
                      : key == "max"    ? &max
                      : key == "prompt" ? &prompt
                      : key == "seed"   ? &seed
                                        : nullptr;
    if (target == nullptr) {
      fail_user("lengths '" + description + "': unknown part '" + parts[i] + "'; known are mean, max, prompt, seed");
    }
    *target = positive(value, key, description);
  }
  if (mean == 0) fail_user("lengths '" + description + "': mean= is missing; the form is " + kForm);
  if (max == 0) max = 5 * mean;
  if (max < mean) fail_user("lengths '" + description + "': max is below mean");

  RolloutLengths lengths;
  lengths.name = description;
  const auto key = static_cast<uint64_t>(seed);
  for (int64_t p = 0; p < prompts; ++p) {
    const double spread = max == mean ? 0.0 : 0.8 * philox_uniform(key, 0, static_cast<uint64_t>(p)) - 0.4;
    lengths.prompts.push_back(std::max<int64_t>(1, std::llround(static_cast<double>(prompt) * (1 + spread))));
  }
  // One scale for all draws, found by halving, such that the clipped lengths have the mean; then one is the longest.
  std::vector<double> draws;
  for (int64_t s = 0; s < samples; ++s)
    draws.push_back(max == mean ? 1.0 : std::exp(kSigma * philox_normal(key, 1, static_cast<uint64_t>(s))));
  const size_t top = static_cast<size_t>(std::max_element(draws.begin(), draws.end()) - draws.begin());
  const auto clipped = [&](double scale) {
    std::vector<int64_t> result;
    for (const double draw : draws) result.push_back(std::clamp<int64_t>(std::llround(scale * draw), 1, max));
    if (samples > 1) result[top] = max;
    return result;
  };
  const double wanted = static_cast<double>(mean) * static_cast<double>(samples);
  double low = 0, high = static_cast<double>(max) / *std::min_element(draws.begin(), draws.end());
  for (int round = 0; round < 60; ++round) {
    const double middle = (low + high) / 2;
    const std::vector<int64_t> trial = clipped(middle);
    const double sum = static_cast<double>(std::accumulate(trial.begin(), trial.end(), int64_t{0}));
    (sum < wanted ? low : high) = middle;
  }
  lengths.outputs = clipped(high);
  if (static_cast<double>(lengths.output_tokens()) - wanted > static_cast<double>(samples) / 2) {
    fail_user("lengths '" + description + "': " + std::to_string(samples) + " responses with a longest of " +
              std::to_string(max) + " tokens cannot have the mean " + std::to_string(mean));
  }
  return lengths;
}

RolloutLengths load_lengths(const std::string& description_or_file) {
  if (starts_with(description_or_file, "synthetic:")) return synthetic_lengths(description_or_file);
  try {
    return parse_lengths(read_file(description_or_file), description_or_file);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kNotFound) throw;
    fail_user("no lengths file " + description_or_file + "; give a file or " + kForm);
  }
}

int64_t wanted_cache_rows(const RolloutLengths& lengths, int64_t max_sequences, int64_t ranks) {
  std::vector<int64_t> totals;
  for (int64_t s = 0; s < lengths.samples(); ++s) totals.push_back(lengths.total_of(s));
  std::sort(totals.rbegin(), totals.rend());
  const int64_t all = std::accumulate(totals.begin(), totals.end(), int64_t{0});
  totals.resize(std::min(totals.size(), static_cast<size_t>(max_sequences)));
  const int64_t together = std::accumulate(totals.begin(), totals.end(), int64_t{0});
  const int64_t rows = std::max(lengths.longest(), std::min(together, (all + ranks - 1) / ranks));
  return rows + rows / 4 + 128;
}

}  // namespace trireme
