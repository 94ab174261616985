#include "trainer/algorithms/datasets.h"

#include "base/error.h"

namespace trireme {
namespace {

bool names_data(const DatasetConfig& dataset) {
  return !dataset.data_path.empty() || !dataset.dataset_name.empty() || !dataset.mixture.empty();
}

// `mixed`: prompts by the sources' weights; else each row of all of them once.
DataOptions options_of(const Config& config, const DatasetConfig& dataset, const std::filesystem::path& hf_home,
                       bool completions, bool mixed) {
  DataOptions o;
  static_cast<RowLayout&>(o) = dataset;
  static_cast<PromptOptions&>(o) = config.data;
  for (const DatasetFiles& from : resolve_dataset(dataset, hf_home)) {
    DataSource& source = o.sources.emplace_back();
    for (const auto& file : from.files) source.files.push_back(file.string());
    source.input_key = from.input_key;
    source.output_key = from.output_key;
    source.system_key = from.system_key;
    source.weight = mixed ? from.weight : 0;
  }
  // Ranks of a node run the same program over the same files: what tells tokenizers apart is where they are from.
  o.shared_as = config.policy.tokenizer.name + "\n" + config.policy.tokenizer.chat_template;
  if (!completions) o.max_total_length = config.policy.max_total_sequence_length;
  o.split_validation_size = !names_data(config.data.validation) ? config.data.train.split_validation_size : 0;
  o.split_seed = config.data.train.seed;
  o.chat_template_kwargs = config.policy.tokenizer.chat_template_kwargs;
  o.completions = completions;
  o.repeat = dataset.repeat;
  return o;
}

}  // namespace

Datasets open_datasets(const Config& config, std::shared_ptr<const Tokenizer> tokenizer,
                       const std::filesystem::path& hf_home, bool completions) {
  Datasets datasets;
  DataOptions train = options_of(config, config.data.train, hf_home, completions, true);
  const bool split = train.split_validation_size > 0;
  train.split = split ? DataOptions::Split::kTrain : DataOptions::Split::kAll;
  datasets.train = Dataset::open(train, tokenizer);
  if (split) {
    DataOptions held_out = train;
    held_out.split = DataOptions::Split::kValidation;
    held_out.repeat = config.data.validation.repeat;
    datasets.validation = Dataset::open(held_out, tokenizer);
  } else if (names_data(config.data.validation)) {
    DataOptions validation = options_of(config, config.data.validation, hf_home, completions, false);
    validation.split = DataOptions::Split::kAll;
    datasets.validation = Dataset::open(validation, tokenizer);
  }
  return datasets;
}

bool validates(int64_t period, int64_t steps, bool at_start, bool at_end) {
  return (period > 0 && period <= steps) || at_start || at_end;
}

void check_validation_data(const Datasets& datasets, const std::string& key, int64_t period, int64_t steps,
                           bool at_start, bool at_end) {
  if (datasets.validation && datasets.validation->size() > 0) return;
  if (!validates(period, steps, at_start, at_end)) return;
  const bool periodic = period > 0 && period <= steps;
  fail_user((periodic ? key + ".val_period is " + std::to_string(period)
                      : key + (at_start ? ".val_at_start" : ".val_at_end") + " is true") +
            " but there is no validation data: name some in data.validation, or set data.train.split_validation_size "
            "(without effect on most data sets that are known by name), or " +
            (periodic ? "val_period to 0" : "it to false"));
}

}  // namespace trireme
