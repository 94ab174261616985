// Model shapes for benchmarks: the real dimensions, random weights, no files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "trainer/model/model.h"

namespace trireme::bench {

// llama-3.1-8b, llama-3.1-70b, qwen3-1.7b, qwen3-8b, qwen3-32b, qwen2.5-1.5b, and tiny (a model for tests).
std::vector<std::string> shape_names();
// The shape with `layers` of its layers (0: all): one of these names, a config.json (any file whose name ends in
// .json), or a folder that has one. Throws Error(kUser) that names the known shapes, the mistake in the file, or the
// legal number of layers.
ModelConfig find_shape(const std::string& name, int64_t layers = 0);

// Its weights by draw_parameters.
std::unique_ptr<Model> make_random_model(const ModelConfig& config, const ModelOptions& options, uint64_t seed);

}  // namespace trireme::bench
