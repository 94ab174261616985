// generate_jsonl: the `trireme generate` verb. JSON lines of prompts in, JSON lines of responses out.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trainer/rollout/engine.h"

namespace trireme {

struct GenerateOptions {
  int64_t samples = 1;      // responses for each prompt
  bool chat = false;        // a plain "prompt" becomes the user message of the chat template
  bool logprobs = true;     // write them
  bool add_special = true;  // what the tokenizer puts around plain text (a begin token), unless the line says
};

// The tokens of one line of input: {"ids": [...]} as they are, or the text under `key` with what the tokenizer puts
// around it when `add_special` or, where it is there, the line's "add_special" says so. Throws Error(kData) for a line
// that holds neither or both, and for ids outside the vocabulary of `vocab_size`.
std::vector<int32_t> tokens_of_line(const nlohmann::ordered_json& line, const char* key, const Tokenizer& tokenizer,
                                    bool add_special, int64_t vocab_size);

// Reads {"prompt": text}, {"ids": [...]} or {"messages": [...]} (rendered by the chat template, which writes special
// tokens itself) a line; blank lines are skipped. For ids the output's "prompt" is their text.
// Writes, in the order of the input, one line a sample: {"prompt", "sample", "text", "tokens", "logprobs",
// "finish_reason", "weight_versions"}, the last a list of {"version", "from", "to"}: which weights drew which tokens.
// Sample s of input n is drawn as sample id n * samples + s. `input_name` is for messages: a bad line throws
// Error(kData) with its number. Returns the number of lines written.
int64_t generate_jsonl(const Model& model, const Tokenizer& tokenizer, const EngineOptions& engine_options,
                       const SamplingOptions& sampling, const GenerateOptions& options, std::istream& input,
                       const std::string& input_name, std::ostream& output);

}  // namespace trireme
