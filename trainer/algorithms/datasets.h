// The data sets a configuration names: training rows and the held-out ones.
#pragma once

#include <filesystem>
#include <memory>

#include "trainer/config/config.h"
#include "trainer/data/dataset.h"

namespace trireme {

struct Datasets {
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> validation;  // null: none configured and nothing held out
};

// `completions`: fill in the answers for SFT.
Datasets open_datasets(const Config& config, std::shared_ptr<const Tokenizer> tokenizer,
                       const std::filesystem::path& hf_home, bool completions);

}  // namespace trireme
