// Keys of what is read and what grades it: data and env.
#include "trainer/config/field_table.h"

namespace trireme::config {

#define DATASET(which)                                                                                               \
  KEY(data.which.dataset_name)                                                                                       \
  ("a known data set (see below), the Hub's id of any other (org/name), or any name with data_path").null_default(); \
  KEY(data.which.data_path)                                                                                          \
  ("a file (.jsonl, .json, .parquet; .gz, .zst), a pattern with *, or a folder: all its files, or those of split")   \
      .null_default();                                                                                               \
  OURS(data.which.mixture)                                                                                           \
  ("instead: \"WEIGHT SOURCE\" each, with a path as above, or a data set and its split (gsm8k, org/name:split)")     \
      .null_default();                                                                                               \
  OURS(data.which.format)("format of the files").one_of({"auto", "jsonl", "parquet"});                               \
  KEY(data.which.input_key)                                                                                          \
  ("name of the prompt's column, or a path into one: prompt[0].content")                                             \
      .from("from the data set, else from its columns");                                                             \
  KEY(data.which.output_key)                                                                                         \
  ("name of the column of golds, or a path: answers.text[0]").from("from the data set, else from its columns");      \
  OURS(data.which.system_key)                                                                                        \
  ("name of a column, or a path, with the system message of each row").from("from the data set, else none");         \
  KEY(data.which.split)                                                                                              \
  ("its name, as the files have it: SPLIT.*, SPLIT-00000-of-00002.*").from("from the data set, else `train`");       \
  KEY(data.which.repeat)("times that each row counts, as if its file held it so often").at_least(1);                 \
  KEY(data.which.prompt_file)("text with {} where the prompt goes").null_default();                                  \
  KEY(data.which.system_prompt_file)("system message of rows without their own").null_default();                     \
  KEY(data.which.env_name)("only this env grades; empty: every enabled one, weighted").null_default()

void add_data(std::vector<Field>& table) {
  KEY(data.max_input_seq_length)
  ("longer prompts are skipped and counted").from("policy.max_total_sequence_length").at_least(1);
  KEY(data.shuffle)("a new order in every epoch, by seed");
  OURS(data.seed)("seed of that order").from("grpo.seed or sft.seed").at_least(0);
  OURS(data.max_bad_lines)("malformed lines that may be skipped before the run stops").at_least(0);
  OURS(data.fail_on_long_prompt)("a prompt longer than max_input_seq_length stops the run instead");
  OURS(data.apply_chat_template)("render prompts with the chat template; false: as they stand in the file");
  KEY(data.add_bos)
  ("SFT: the tokenizer's bos_token, if it has one, goes before a conversation whose chat template does not write it");
  KEY(data.add_generation_prompt)
  ("SFT: the chat template's header of a response counts as a part of the prompt; false: of the response, and is "
   "learnt");
  KEY(data.add_eos)
  ("SFT: the end token goes behind a conversation that, line feeds apart, does not end with it");
  OURS(data.drop_line_feeds)
  ("SFT: line feeds at the end of a conversation, as ChatML has one behind its end token, are left out");
  DATASET(train);
  KEY(data.train.split_validation_size)
  ("held out for validation where data.validation names no data: a share, or rows when 1 or more; without effect where "
   "dataset_name alone names a known data set other than OpenMathInstruct-2")
      .from("0.05 of OpenMathInstruct-2, else 0")
      .at_least(0);
  KEY(data.train.seed)("seed of the hold-out").at_least(0).null_default();
  DATASET(validation);
}

#define REWARD(which)                                                                        \
  OURS(env.which.enabled)("use this reward");                                                \
  OURS(env.which.weight)("its weight in the sum");                                           \
  KEY(env.which.num_workers)("responses to prompts graded at once").at_least(1);             \
  OURS(env.which.timeout_s)("seconds the responses to a prompt may take together").above(0); \
  OURS(env.which.failure_policy)                                                             \
  ("a reward that fails counts 0, leaves its sample out, or stops the run")

void add_env(std::vector<Field>& table) {
  OURS(env.max_failed_share)
  ("the run stops when a reward fails for more than this share of a step's responses").at_least(0).at_most(1);
  OURS(env.startup_timeout_s)
  ("seconds in which each reward must answer a probe before the first step; 0: no probe").at_least(0);
  REWARD(math);
  KEY(env.math.math_verify_impl)
  ("the built-in verifier under any of its names").one_of({"trireme", "hf_math_verify", "dapo_math_verify"});
  REWARD(format);
  OURS(env.format.pattern)("RE2 expression that must be found in the response");
  OURS(env.format.tags)("<tag>...</tag> blocks that must stand exactly once each, in this order").null_default();
  REWARD(command);
  OURS(env.command.command)("program and arguments; gets one JSON object a line, answers one a line").null_default();
  OURS(env.command.answer_timeout_s)("seconds one response may take; 0: only timeout_s").at_least(0);
  REWARD(http);
  OURS(env.http.url)("responses are POSTed to it; empty: to TRIREME_REWARD_URL, which the operator sets");
  OURS(env.http.headers)
  ("\"Name: value\" of each request; {env:NAME} and {file:PATH} in a value are read when it is sent and kept nowhere")
      .null_default();
  OURS(env.http.ca_file)("PEM file of the authorities that may sign the server's certificate; empty: the system's");
  OURS(env.http.max_batch)("responses in one POST").at_least(1);
  OURS(env.http.max_attempts)("tries of one POST").at_least(1);
  OURS(env.reward_model.enabled)
  ("use the score of a reward model on the trainer's devices; also by data.train.env_name reward_model");
  KEY(env.reward_model.model_name)
  ("folder of a ...ForSequenceClassification with one label and the policy's vocabulary, or a Hub id in the local "
   "cache");
  OURS(env.reward_model.weight)("its weight in the sum");
}

}  // namespace trireme::config
