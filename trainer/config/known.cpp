// What is known by name: schedulers and data sets.
#include <cctype>
#include <cmath>

#include "base/text.h"
#include "trainer/config/fields.h"

namespace trireme::config {

const std::map<std::string, std::map<std::string, double>>& known_schedulers() {
  static const double kRequired = std::nan("");
  static const std::map<std::string, std::map<std::string, double>> kSchedulers = {
      {"LinearLR", {{"start_factor", 1.0 / 3.0}, {"end_factor", 1.0}, {"total_iters", 5}}},
      {"ConstantLR", {{"factor", 1.0 / 3.0}, {"total_iters", 5}}},
      {"CosineAnnealingLR", {{"T_max", kRequired}, {"eta_min", 0.0}}},
      {"ExponentialLR", {{"gamma", kRequired}}},
  };
  return kSchedulers;
}

const std::vector<KnownDataset>& known_datasets() {
  static const std::vector<KnownDataset> kDatasets = {
      {"gsm8k", "openai/gsm8k", "question", "answer"},
      {"DeepScaler", "agentica-org/DeepScaleR-Preview-Dataset", "problem", "answer", {"deepscaler.json"}},
      {"OpenMathInstruct-2", "nvidia/OpenMathInstruct-2", "problem", "expected_answer"},
      {"squad", "rajpurkar/squad", "question", "answers.text[0]", {}, "context", "validation"},
      {"DAPOMath17K", "BytedTsinghua-SIA/DAPO-Math-17k", "prompt[0].content", "reward_model.ground_truth"},
      {"DAPOMathAIME2024", "BytedTsinghua-SIA/AIME-2024", "prompt[0].content", "reward_model.ground_truth"},
  };
  return kDatasets;
}

const KnownDataset* find_dataset(const std::string& name) {
  const auto letters = [](const std::string& text) {  // "openmathinstruct2", as v0.3 writes it, is OpenMathInstruct-2
    std::string kept;
    for (const char c : to_lower(text)) {
      if (std::isalnum(static_cast<unsigned char>(c))) kept += c;
    }
    return kept;
  };
  for (const KnownDataset& known : known_datasets()) {
    if (name == known.hub_id || letters(name) == letters(known.name)) return &known;
  }
  return nullptr;
}

}  // namespace trireme::config
