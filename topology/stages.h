// Which layers a pipeline stage has, in how many pieces. The keys and rules are Megatron's (policy.megatron_cfg).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

// [begin, end) of layers, heads, rows: whatever is counted.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Range&) const = default;
};

// How the layers are dealt to the stages beyond the number of stages. Stages whose number of layers is not named share
// the others evenly.
struct StageOptions {
  int64_t first_layers = 0;    // num_layers_in_first_pipeline_stage; 0: not named
  int64_t last_layers = 0;     // num_layers_in_last_pipeline_stage; 0: not named
  int64_t virtual_stages = 1;  // virtual_pipeline_model_parallel_size: pieces of each stage
  bool operator==(const StageOptions&) const = default;
};

// Whether every stage gets at least one layer in each of its pieces, as many in each, and none is left over. Total.
bool stages_fit(int64_t layers, int64_t pp, const StageOptions& options = {});
// Nothing when they fit. Else one sentence that names key and value, and for each key by which alone it could be put
// right the values that do. `section` stands before each key, as policy.megatron_cfg. does in a configuration.
std::optional<std::string> stage_error(int64_t layers, int64_t pp, const StageOptions& options = {},
                                       const std::string& section = {});

// Layers of each piece of `stage`, ascending. The pieces of all stages in the order of the layers: piece 0 of every
// stage, then piece 1 of every stage, and so on. Only where stages_fit.
std::vector<Range> stage_pieces(int64_t layers, int64_t pp, int64_t stage, const StageOptions& options = {});

}  // namespace trireme
