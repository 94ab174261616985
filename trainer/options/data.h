// What rows become prompts, and how: the keys of data.*, as trainer/data/dataset.h takes them.
#pragma once

#include <cstdint>
#include <string>

namespace trireme {

// Of one data set: data.train, data.validation.
struct RowLayout {
  std::string format = "auto";  // (ours) auto (by a file's first bytes) | jsonl | parquet
  // Names of the columns. Both empty, or "input" and "output" where there is no "input": found from a source's first
  // row (messages; question/answer; problem/answer; input/output). An input_key that holds an array is read as OpenAI
  // messages. Empty output_key with a set input_key: no gold. A key may be a path into a column: "answers.text[0]".
  // Of a configuration: derived by its dataset_name.
  std::string input_key, output_key;
  std::string system_key;   // (ours) of a column with each row's system message; empty: none. Derived likewise
  std::string prompt_file;  // text with one "{}" for the problem ("{{" and "}}" are braces); empty: the problem itself
  std::string system_prompt_file;  // of rows without one of their own; empty: no system message
};

// Of all data sets of a run: data.
struct PromptOptions {
  int64_t max_input_seq_length = 0;  // prompt tokens; 0: no limit. Of a configuration: derived
  bool shuffle = true;
  int64_t seed = 42;                 // (ours) of the order of rows. Of a configuration: derived
  int64_t max_bad_lines = 0;         // (ours) rows that may be skipped because they break a rule, of all files together
  bool fail_on_long_prompt = false;  // (ours) a longer prompt is an Error; else it is skipped and counted
  bool apply_chat_template = true;   // (ours) false: system prompt, blank line, prompt as they stand
  // SFT only.
  bool add_bos = true;  // the tokenizer's bos_token, if it has one, ahead of rendered text that does not begin with it
  // The template's header of a response belongs to the message before it and is not learnt; false: to the response.
  bool add_generation_prompt = false;
  bool add_eos = true;           // the end token behind a last response that, line feeds apart, does not end with it
  bool drop_line_feeds = false;  // (ours) at the end of the last response
};

}  // namespace trireme
