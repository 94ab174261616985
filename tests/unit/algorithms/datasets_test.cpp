// What a configuration says of its data reaches the data sets.
#include "trainer/algorithms/datasets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/error.h"
#include "base/fs.h"

namespace trireme {
namespace {

TEST(OpenDatasets, TellsTheDataSetsWhatTheConfigurationSays) {
  const TemporaryDirectory dir;
  make_byte_tokenizer(dir.path() / "model");
  const std::shared_ptr<const Tokenizer> tokenizer = Tokenizer::load(dir.path() / "model");
  write_file_atomic(dir.path() / "d.jsonl",
                    "{\"q\": \"short\", \"a\": \"1\"}\nno row\n{\"q\": \"this one is too long\", \"a\": \"2\"}\n");
  Config config;
  config.data.train.data_path = (dir.path() / "d.jsonl").string();
  config.data.train.input_key = "q";
  config.data.train.output_key = "a";
  config.data.train.split_validation_size = 0;
  config.data.apply_chat_template = false;
  config.data.shuffle = false;
  config.data.max_bad_lines = 1;
  config.data.max_input_seq_length = 9;
  derive_defaults(config);
  const Datasets datasets = open_datasets(config, tokenizer, dir.path(), /*completions=*/false);
  ASSERT_EQ(datasets.train->size(), 2);
  EXPECT_EQ(datasets.train->bad_rows(), 1);
  EXPECT_EQ(datasets.train->example(0)->prompt_text, "short");
  EXPECT_FALSE(datasets.train->example(1).has_value());
  EXPECT_FALSE(datasets.train->options().shuffle);
  EXPECT_EQ(datasets.train->options().seed, config.grpo.seed);
  EXPECT_TRUE(datasets.train->options().add_bos);
  config.data.add_bos = false;
  EXPECT_FALSE(open_datasets(config, tokenizer, dir.path(), /*completions=*/false).train->options().add_bos);

  config.data.fail_on_long_prompt = true;
  const Datasets strict = open_datasets(config, tokenizer, dir.path(), /*completions=*/false);
  EXPECT_THROW(strict.train->example(1), Error);
}

TEST(OpenDatasets, RowsAreRepeatedWhereTheConfigurationSaysSo) {
  const TemporaryDirectory dir;
  make_byte_tokenizer(dir.path() / "model");
  write_file_atomic(dir.path() / "d.jsonl", "{\"q\": \"one\", \"a\": \"1\"}\n{\"q\": \"two\", \"a\": \"2\"}\n");
  Config config;
  for (DatasetConfig* dataset : {&config.data.train, &config.data.validation}) {
    dataset->data_path = (dir.path() / "d.jsonl").string();
    dataset->input_key = "q";
    dataset->output_key = "a";
  }
  config.data.validation.repeat = 16;
  derive_defaults(config);
  const auto tokenizer = Tokenizer::load(dir.path() / "model");
  Datasets datasets = open_datasets(config, tokenizer, dir.path(), /*completions=*/false);
  EXPECT_EQ(datasets.train->size(), 2);
  EXPECT_EQ(datasets.validation->size(), 32);
  config.data.validation = {};  // rows held out
  config.data.validation.repeat = 5;
  config.data.train.split_validation_size = 1;
  derive_defaults(config);
  datasets = open_datasets(config, tokenizer, dir.path(), /*completions=*/false);
  EXPECT_EQ(datasets.train->size(), 1);
  EXPECT_EQ(datasets.validation->size(), 5);
}

TEST(OpenDatasets, SquadsRowsAsItsNameSays) {
  const TemporaryDirectory dir;
  make_byte_tokenizer(dir.path() / "model");
  write_file_atomic(dir.path() / "d.jsonl",
                    "{\"context\": \"c\", \"question\": \"q\", \"answers\": {\"text\": [\"a\"]}}\n");
  Config config;
  config.algorithm = "sft";
  config.data.train.dataset_name = "squad";
  config.data.train.data_path = (dir.path() / "d.jsonl").string();
  config.data.train.split_validation_size = 0;
  derive_defaults(config);
  const Datasets datasets =
      open_datasets(config, Tokenizer::load(dir.path() / "model"), dir.path(), /*completions=*/true);
  const auto example = datasets.train->example(0);
  ASSERT_TRUE(example.has_value());
  EXPECT_EQ(example->prompt_text, "<|im_start|>system\nc<|im_end|>\n<|im_start|>user\nq<|im_end|>\n");
  EXPECT_EQ(example->gold, "a");
}

}  // namespace
}  // namespace trireme
