// A model's folder for who writes the weights by other means than save_model.
#pragma once

#include <filesystem>

#include "trainer/model/model.h"

namespace trireme {

// What save_model writes besides the weights: config.json, generation_config.json, the tokenizer's files. Makes the
// folder. Reads nothing of the model that ever changes, so any thread may call it.
void save_model_description(const Model& model, const std::filesystem::path& dir, const SaveOptions& options);

}  // namespace trireme
