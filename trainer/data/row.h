// Row: one line of a data file as text and messages; which columns hold what; prompt templates.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

namespace trireme {

// Which columns of a file are read. A key is a column's name, or a path into one: "answers.text[0]".
struct RowSchema {
  std::string input_key;        // a column of text, or of OpenAI messages
  std::string output_key;       // of the gold, with SFT of the response; empty: none
  bool require_output = false;  // SFT: a row without a response breaks the rule
  std::string system_key;       // of the system message; empty: none
};

struct Row {
  int64_t index = 0;                // in the file, from 0
  std::string problem;              // the input when it is text
  std::string system;               // the row's own system message, or empty
  nlohmann::ordered_json messages;  // the input when it is a conversation, a last assistant message removed; else null
  nlohmann::ordered_json response;  // that assistant message, or null
  nlohmann::ordered_json tools;     // the row's tools for the chat template, or null
  std::string output;               // the whole text of the response (SFT)
  std::string gold;                 // what a reward compares with
  nlohmann::json extra;             // the other columns
};

// Parses one line. Throws Error(kData) whose message is the reason only; the caller knows file and line.
nlohmann::ordered_json parse_json_object(std::string_view line);

// The schema for files whose rows look like `row`: the given keys, or those of a known layout (messages; question and
// answer as GSM8K; problem and answer as DeepScaleR; input and output) when none are given, or when the default names
// "input" and "output" are given and the row has no "input".
RowSchema detect_schema(const nlohmann::ordered_json& row, const std::string& input_key, const std::string& output_key);

// Throws Error(kData) with the reason: a missing key (and the nearest one there is), a wrong type, a malformed message.
Row parse_row(const nlohmann::ordered_json& object, const RowSchema& schema);

// Solutions of GSM8K end with a line "#### 18": the text after it. Any other text: itself without surrounding blanks.
std::string gold_of(std::string_view output);

// Text of a message: its content, or the text parts of a content list joined.
std::string message_text(const nlohmann::ordered_json& message);

// Splits a prompt template at its single "{}" or "{0}"; "{{" and "}}" stand for braces (Python's str.format).
// Throws Error(kUser) naming `source`.
std::pair<std::string, std::string> parse_prompt_template(std::string_view text, const std::string& source);

}  // namespace trireme
