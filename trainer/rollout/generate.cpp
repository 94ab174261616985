#include "trainer/rollout/generate.h"

#include <algorithm>
#include <deque>
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

// Lines of a stream, of which some may have been looked for already.
class Lines {
 public:
  explicit Lines(std::istream& input) : input_(input) {}
  bool next(std::string& line) {
    if (ahead_.empty()) return static_cast<bool>(std::getline(input_, line));
    line = std::move(ahead_.front());
    ahead_.pop_front();
    return true;
  }
  // How many there are, at most `most`.
  int64_t count(int64_t most) {
    std::string line;
    while (static_cast<int64_t>(ahead_.size()) < most && std::getline(input_, line)) ahead_.push_back(std::move(line));
    return static_cast<int64_t>(ahead_.size());
  }

 private:
  std::istream& input_;
  std::deque<std::string> ahead_;
};

}  // namespace

int64_t generate_jsonl(const Model& model, const Tokenizer& tokenizer, const EngineOptions& engine_options,
                       const SamplingOptions& sampling, const GenerateOptions& options, std::istream& input,
                       const std::string& input_name, std::ostream& output) {
  if (options.samples < 1) fail_user("generate: samples must be at least 1");
  // An engine for no more than there is to do starts sooner.
  Lines lines(input);
  EngineOptions settings = engine_options;
  if (settings.max_sequences > 1) {
    const int64_t enough = (settings.max_sequences + options.samples - 1) / options.samples;
    settings.max_sequences =
        std::clamp<int64_t>(lines.count(enough) * options.samples, 1, engine_options.max_sequences);
  }
  Engine engine(model, &tokenizer, settings, sampling);
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
      more = lines.next(line);
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
