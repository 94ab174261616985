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
      {.name = "gsm8k", .hub_id = "openai/gsm8k", .input_key = "question", .output_key = "answer"},
      {.name = "DeepScaler",
       .hub_id = "agentica-org/DeepScaleR-Preview-Dataset",
       .input_key = "problem",
       .output_key = "answer",
       .train_files = {"deepscaler.json"},
       .validation_set = "AIME2024",
       .validation_split = "train",
       .validation_repeat = 16},
      {.name = "OpenMathInstruct-2",
       .hub_id = "nvidia/OpenMathInstruct-2",
       .input_key = "problem",
       .output_key = "expected_answer",
       .split = "train_1M",
       .held_out = 0.05},
      {.name = "AIME2024", .hub_id = "HuggingFaceH4/aime_2024", .input_key = "problem", .output_key = "answer"},
      {.name = "squad",
       .hub_id = "rajpurkar/squad",
       .input_key = "question",
       .output_key = "answers.text[0]",
       .system_key = "context",
       .validation_set = "squad",
       .validation_split = "validation"},
      {.name = "DAPOMath17K",
       .hub_id = "BytedTsinghua-SIA/DAPO-Math-17k",
       .input_key = "prompt[0].content",
       .output_key = "reward_model.ground_truth"},
      {.name = "DAPOMathAIME2024",
       .hub_id = "BytedTsinghua-SIA/AIME-2024",
       .input_key = "prompt[0].content",
       .output_key = "reward_model.ground_truth"},
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
