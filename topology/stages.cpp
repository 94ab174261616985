#include "topology/stages.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"

namespace trireme {
namespace {

constexpr const char* kFirst = "num_layers_in_first_pipeline_stage";
constexpr const char* kLast = "num_layers_in_last_pipeline_stage";
constexpr const char* kVirtual = "virtual_pipeline_model_parallel_size";
constexpr const char* kStages = "pipeline_model_parallel_size";
constexpr int64_t kMostLayers = 4096;  // that values are looked for in; models have some hundred

std::string text(const std::string& section, const char* key, int64_t value) {
  return section + key + " " + std::to_string(value);
}
std::string count(int64_t number, const std::string& word) {
  return std::to_string(number) + " " + word + (number == 1 ? "" : "s");
}

// Layers of the first, the last and any other stage.
struct StageCounts {
  int64_t first = 0, last = 0, between = 0;
};

int64_t layers_of(const StageCounts& counts, int64_t pp, int64_t stage) {
  return stage == 0 ? counts.first : stage == pp - 1 ? counts.last : counts.between;
}

// What is wrong with each number by itself; empty: nothing.
std::string number_error(int64_t layers, int64_t pp, const StageOptions& o, const std::string& section) {
  if (layers < 1) return count(layers, "layer") + " are no model";
  if (pp < 1) return text(section, kStages, pp) + " is no number of stages";
  if (o.virtual_stages < 1) return text(section, kVirtual, o.virtual_stages) + " is no number of pieces";
  if (o.virtual_stages > 1 && pp == 1)
    return text(section, kVirtual, o.virtual_stages) + " needs a pipeline, and " + text(section, kStages, pp) +
           " is none";
  for (const auto& [key, value] : {std::pair{kFirst, o.first_layers}, std::pair{kLast, o.last_layers}}) {
    if (value < 0 || value > layers)
      return text(section, key, value) + " is no number of layers of a model that has " + std::to_string(layers);
    if (pp == 1 && value != 0 && value != layers)
      return text(section, key, value) + " is not all of the " + count(layers, "layer") + " of the only stage";
  }
  return "";
}

// Fills `counts`, or says what is wrong.
std::string deal(int64_t layers, int64_t pp, const StageOptions& o, const std::string& section, StageCounts& counts) {
  if (std::string error = number_error(layers, pp, o, section); !error.empty()) return error;
  counts = {layers, layers, layers};
  if (pp == 1) return "";
  std::vector<std::string> named;
  if (o.first_layers > 0) named.push_back(text(section, kFirst, o.first_layers));
  if (o.last_layers > 0) named.push_back(text(section, kLast, o.last_layers));
  const int64_t others = pp - static_cast<int64_t>(named.size()), rest = layers - o.first_layers - o.last_layers;
  if (others == 0 && rest != 0)
    return join(named, " and ") + " do not add up to the " + count(layers, "layer") + " of " +
           text(section, kStages, pp);
  if (others > 0 && (rest < others || rest % others != 0)) {
    if (named.empty()) return text(section, kStages, pp) + " does not divide the " + count(layers, "layer");
    return join(named, " and ") + (named.size() > 1 ? " leave " : " leaves ") + count(rest, "layer") + " for the " +
           (others == 1 ? "other stage" : std::to_string(others) + " other stages") + " of " +
           text(section, kStages, pp);
  }
  counts.between = others > 0 ? rest / others : 0;
  counts.first = o.first_layers > 0 ? o.first_layers : counts.between;
  counts.last = o.last_layers > 0 ? o.last_layers : counts.between;
  for (const int64_t stage : {int64_t{0}, int64_t{1}, pp - 1}) {
    const int64_t own = layers_of(counts, pp, stage);
    if (own % o.virtual_stages != 0)
      return text(section, kVirtual, o.virtual_stages) + " does not divide the " + count(own, "layer") + " of stage " +
             std::to_string(stage);
  }
  return "";
}

// "1, 2, 4"; of many the first ones and the last.
std::string some(const std::vector<int64_t>& values) {
  constexpr size_t kShown = 8;
  std::vector<std::string> texts;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i >= kShown && i + 1 < values.size()) continue;
    if (i > kShown) texts.push_back("...");
    texts.push_back(std::to_string(values[i]));
  }
  return join(texts, ", ");
}

// The values from 1 on that `fits` says yes to.
template <typename Fits>
std::vector<int64_t> legal_sizes(int64_t layers, const Fits& fits) {
  std::vector<int64_t> legal;
  for (int64_t value = 1; value <= std::min(layers, kMostLayers); ++value) {
    if (fits(value)) legal.push_back(value);
  }
  return legal;
}

}  // namespace

bool stages_fit(int64_t layers, int64_t pp, const StageOptions& options) {
  StageCounts counts;
  return deal(layers, pp, options, "", counts).empty();
}

std::optional<std::string> stage_error(int64_t layers, int64_t pp, const StageOptions& options,
                                       const std::string& section) {
  StageCounts counts;
  const std::string sentence = deal(layers, pp, options, section, counts);
  if (sentence.empty()) return std::nullopt;
  std::vector<std::string> hints;
  const auto hint = [&](const char* key, const std::vector<int64_t>& legal) {
    if (!legal.empty()) hints.push_back(section + key + " can be " + some(legal));
  };
  hint(kStages, legal_sizes(layers, [&](int64_t value) { return stages_fit(layers, value, options); }));
  const auto hint_option = [&](const char* key, int64_t StageOptions::*member) {
    hint(key, legal_sizes(layers, [&](int64_t value) {
           StageOptions other = options;
           other.*member = value;
           return stages_fit(layers, pp, other);
         }));
  };
  hint_option(kFirst, &StageOptions::first_layers);
  hint_option(kLast, &StageOptions::last_layers);
  hint_option(kVirtual, &StageOptions::virtual_stages);
  if (!hints.empty()) return sentence + "; with the others as they are, " + join(hints, ", or ");
  hint(kStages, legal_sizes(layers, [&](int64_t value) { return stages_fit(layers, value); }));
  return sentence + (hints.empty() ? "" : "; with nothing else set, " + hints.front());
}

std::vector<Range> stage_pieces(int64_t layers, int64_t pp, int64_t stage, const StageOptions& options) {
  StageCounts counts;
  const bool fits = deal(layers, pp, options, "", counts).empty();
  TRIREME_CHECK(fits && stage >= 0 && stage < pp, "stage " + std::to_string(stage) + " of " + std::to_string(layers) +
                                                      " layers in " + std::to_string(pp) + " stages");
  const int64_t pieces = options.virtual_stages;
  std::vector<Range> ranges;
  int64_t layer = 0;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    for (int64_t s = 0; s < pp; ++s) {
      const int64_t size = layers_of(counts, pp, s) / pieces;
      if (s == stage) ranges.push_back({layer, layer + size});
      layer += size;
    }
  }
  return ranges;
}

}  // namespace trireme
