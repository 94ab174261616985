#include "trainer/algorithms/datasets.h"

namespace trireme {
namespace {

DataOptions options_of(const Config& config, const DatasetConfig& dataset, const std::filesystem::path& path,
                       bool completions) {
  DataOptions o;
  o.path = path.string();
  o.format = dataset.format;
  o.input_key = dataset.input_key;
  o.output_key = dataset.output_key;
  o.prompt_file = dataset.prompt_file;
  o.system_prompt_file = dataset.system_prompt_file;
  o.max_input_seq_length = config.data.max_input_seq_length;
  o.shuffle = config.data.shuffle;
  o.seed = config.data.seed;
  o.split_validation_size = config.data.validation.data_path.empty() ? config.data.train.split_validation_size : 0;
  o.split_seed = config.data.train.seed;
  o.max_bad_lines = config.data.max_bad_lines;
  o.apply_chat_template = config.data.apply_chat_template;
  o.chat_template_kwargs = config.policy.tokenizer.chat_template_kwargs;
  o.completions = completions;
  return o;
}

}  // namespace

Datasets open_datasets(const Config& config, std::shared_ptr<const Tokenizer> tokenizer,
                       const std::filesystem::path& hf_home, bool completions) {
  Datasets datasets;
  const std::filesystem::path train_path = resolve_dataset(config.data.train, hf_home);
  DataOptions train = options_of(config, config.data.train, train_path, completions);
  const bool split = train.split_validation_size > 0;
  train.split = split ? DataOptions::Split::kTrain : DataOptions::Split::kAll;
  datasets.train = Dataset::open(train, tokenizer);
  if (split) {
    DataOptions held_out = train;
    held_out.split = DataOptions::Split::kValidation;
    datasets.validation = Dataset::open(held_out, tokenizer);
  } else if (!config.data.validation.data_path.empty()) {
    DataOptions validation =
        options_of(config, config.data.validation, resolve_dataset(config.data.validation, hf_home), completions);
    validation.split = DataOptions::Split::kAll;
    datasets.validation = Dataset::open(validation, tokenizer);
  }
  return datasets;
}

}  // namespace trireme
