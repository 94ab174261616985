// generate_jsonl: the `trireme generate` verb. JSON lines of prompts in, JSON lines of answers out.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

#include "trainer/rollout/engine.h"

namespace trireme {

struct GenerateOptions {
  int64_t samples = 1;   // answers for each prompt
  bool chat = false;     // a plain "prompt" becomes the user message of the chat template
  bool logprobs = true;  // write them
};

// Reads {"prompt": text} or {"messages": [...]} (rendered by the chat template) a line; blank lines are skipped.
// Writes, in the order of the input, one line a sample: {"prompt", "sample", "text", "tokens", "logprobs",
// "finish_reason"}. Sample s of input n is drawn as sample id n * samples + s. `input_name` is for messages: a bad line
// throws Error(kData) with its number. Returns the number of lines written.
int64_t generate_jsonl(const Model& model, const Tokenizer& tokenizer, const EngineOptions& engine_options,
                       const SamplingOptions& sampling, const GenerateOptions& options, std::istream& input,
                       const std::string& input_name, std::ostream& output);

}  // namespace trireme
