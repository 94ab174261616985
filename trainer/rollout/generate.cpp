#include "trainer/rollout/generate.h"

#include <istream>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace trireme {

namespace {

using Json = nlohmann::ordered_json;

struct Prompt {
  std::string text;
  bool templated = false;  // then the template has written the special tokens
};

Prompt read_prompt(const std::string& line, const Tokenizer& tokenizer, bool chat) {
  Json json;
  try {
    json = Json::parse(line);
  } catch (const Json::parse_error& e) {
    fail_data(std::string("not valid JSON: ") + e.what());
  }
  if (!json.is_object()) fail_data("not a JSON object");
  if (json.contains("messages")) {
    if (!json["messages"].is_array()) fail_data("\"messages\" is not an array");
    return {tokenizer.render_chat_ordered(json["messages"], /*add_generation_prompt=*/true), true};
  }
  if (!json.contains("prompt") || !json["prompt"].is_string())
    fail_data("has neither a text \"prompt\" nor \"messages\"");
  std::string text = json["prompt"];
  if (!chat) return {std::move(text), false};
  const Json messages = Json::array({Json{{"role", "user"}, {"content", text}}});
  return {tokenizer.render_chat_ordered(messages, /*add_generation_prompt=*/true), true};
}

}  // namespace

int64_t generate_jsonl(const Model& model, const Tokenizer& tokenizer, const EngineOptions& engine_options,
                       const SamplingOptions& sampling, const GenerateOptions& options, std::istream& input,
                       const std::string& input_name, std::ostream& output) {
  if (options.samples < 1) fail_user("generate: samples must be at least 1");
  Engine engine(model, &tokenizer, engine_options, sampling);
  std::map<int64_t, std::string> prompts;      // unfinished ones, by group
  std::map<int64_t, GeneratedGroup> complete;  // waiting for an earlier one
  int64_t read = 0;
  int64_t written_groups = 0;
  int64_t written = 0;
  int64_t line_number = 0;
  bool more = true;
  std::string line;
  while (more || !engine.idle()) {
    // Enough to keep the engine full, so that a long file is not read at once.
    while (more && (read - written_groups) * options.samples < 2 * engine.options().max_sequences + options.samples) {
      more = static_cast<bool>(std::getline(input, line));
      if (!more) break;
      ++line_number;
      if (trim(line).empty()) continue;
      GroupRequest request;
      request.group_id = read;
      request.samples = options.samples;
      request.first_sample_id = static_cast<uint64_t>(read * options.samples);
      try {
        Prompt prompt = read_prompt(line, tokenizer, options.chat);
        request.prompt = tokenizer.encode(prompt.text, /*add_special=*/!prompt.templated);
        engine.submit(std::move(request));
        prompts.emplace(read, std::move(prompt.text));
      } catch (const Error& e) {
        throw Error(e.kind(), input_name + ":" + std::to_string(line_number) + ": " + e.what());
      }
      ++read;
    }
    for (GeneratedGroup& group : engine.step()) complete.emplace(group.group_id, std::move(group));
    for (auto next = complete.begin(); next != complete.end() && next->first == written_groups;
         next = complete.begin()) {
      for (size_t i = 0; i < next->second.samples.size(); ++i) {
        const GeneratedSample& sample = next->second.samples[i];
        Json json;
        json["prompt"] = prompts.at(next->first);
        json["sample"] = i;
        json["text"] = tokenizer.decode(sample.tokens);
        json["tokens"] = sample.tokens;
        if (options.logprobs) json["logprobs"] = sample.logprobs;
        json["finish_reason"] = to_string(sample.finish);
        output << json.dump(-1, ' ', false, Json::error_handler_t::replace) << '\n';
        ++written;
      }
      prompts.erase(next->first);
      complete.erase(next);
      ++written_groups;
    }
    if (!output) fail_io("generate: cannot write the answers (disk full?)");
  }
  output.flush();
  if (!output) fail_io("generate: cannot write the answers (disk full?)");
  return written;
}

}  // namespace trireme
