// The data sets a configuration names: training rows and the held-out ones.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "trainer/config/config.h"
#include "trainer/data/dataset.h"

namespace trireme {

struct Datasets {
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> validation;  // null: none configured and nothing held out
};

// `completions`: fill in the responses for SFT.
Datasets open_datasets(const Config& config, std::shared_ptr<const Tokenizer> tokenizer,
                       const std::filesystem::path& hf_home, bool completions);

// Whether a run validates: every `period` steps, of `steps`; at the start; at the end.
bool validates(int64_t period, int64_t steps, bool at_start, bool at_end);
// Throws Error(kUser) when it would and there is nothing to validate with. `key`: "grpo" or "sft".
void check_validation_data(const Datasets& datasets, const std::string& key, int64_t period, int64_t steps,
                           bool at_start, bool at_end);

}  // namespace trireme
