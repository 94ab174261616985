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
#include "trainer/rollout/driver.h"

namespace trireme {

namespace {

using Json = nlohmann::ordered_json;

struct Prompt {
  std::string text;
  std::vector<int32_t> ids;
};

Prompt read_prompt(const std::string& line, const Tokenizer& tokenizer, const GenerateOptions& options,
                   int64_t vocab_size) {
  Json json;
  try {
    json = Json::parse(line);
  } catch (const Json::parse_error& e) {
    fail_data(std::string("not valid JSON: ") + e.what());
  }
  if (!json.is_object()) fail_data("not a JSON object");
  Json messages;
  if (json.contains("messages")) {
    if (!json["messages"].is_array()) fail_data("\"messages\" is not an array");
    messages = json["messages"];
  } else if (options.chat && json.contains("prompt") && json["prompt"].is_string()) {
    messages = Json::array({Json{{"role", "user"}, {"content", json["prompt"]}}});
  }
  if (!messages.is_null()) {
    if (json.contains("add_special") || json.contains("ids"))
      fail_data("\"add_special\" and \"ids\" do not go with the chat template, which writes special tokens itself");
    std::string text = tokenizer.render_chat_ordered(messages, /*add_generation_prompt=*/true);
    std::vector<int32_t> ids = tokenizer.encode(text, /*add_special=*/false);
    return {std::move(text), std::move(ids)};
  }
  if (!json.contains("prompt") && !json.contains("ids"))
    fail_data("has neither a text \"prompt\" nor \"ids\" nor \"messages\"");
  std::vector<int32_t> ids = tokens_of_line(json, "prompt", tokenizer, options.add_special, vocab_size);
  std::string text =
      json.contains("ids") ? tokenizer.decode(ids, /*skip_special=*/false) : json["prompt"].get<std::string>();
  return {std::move(text), std::move(ids)};
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

// The prompts of a file as groups, in the order of its lines; a long file is not read at once.
class LineSource final : public SampleSource {
 public:
  LineSource(Lines& lines, const Tokenizer& tokenizer, const GenerateOptions& options, int64_t vocab_size,
             int64_t places, const std::string& name)
      : lines_(lines),
        tokenizer_(tokenizer),
        options_(options),
        vocab_size_(vocab_size),
        places_(places),
        name_(name) {}

  int64_t places() const override { return places_; }
  std::vector<SampleSpan> take(int64_t room) override {
    std::vector<SampleSpan> spans;
    std::string line;
    // Responses wait for those of earlier prompts, which bounds how far ahead prompts are taken.
    while (room > 0 && (read_ - written) * options_.samples < 2 * places_ + options_.samples && lines_.next(line)) {
      ++line_number_;
      if (trim(line).empty()) continue;
      Pending pending;
      pending.line = line_number_;
      try {
        Prompt prompt = read_prompt(line, tokenizer_, options_, vocab_size_);
        pending.ids = std::move(prompt.ids);
        pending.text = std::move(prompt.text);
      } catch (const Error& error) {
        throw Error(error.kind(), at_line(line_number_) + error.what());
      }
      pending_.emplace(read_, std::move(pending));
      spans.push_back({read_++, 0, options_.samples});
      room -= options_.samples;
    }
    return spans;
  }

  const std::vector<int32_t>& prompt(int64_t group) const { return pending_.at(group).ids; }
  std::string place(int64_t group) const { return at_line(pending_.at(group).line); }
  // The text of a prompt that has its responses.
  std::string forget(int64_t group) { return std::move(pending_.extract(group).mapped().text); }

  int64_t written = 0;  // prompts whose responses are written

 private:
  struct Pending {
    std::string text;
    std::vector<int32_t> ids;
    int64_t line = 0;
  };
  std::string at_line(int64_t line) const { return name_ + ":" + std::to_string(line) + ": "; }

  Lines& lines_;
  const Tokenizer& tokenizer_;
  const GenerateOptions& options_;
  const int64_t vocab_size_, places_;
  const std::string& name_;
  std::map<int64_t, Pending> pending_;  // by group
  int64_t read_ = 0, line_number_ = 0;
};

// Writes groups in their order; complete ones wait for the earlier ones.
class Responses final {
 public:
  Responses(const Tokenizer& tokenizer, const GenerateOptions& options, std::ostream& output)
      : tokenizer_(tokenizer), options_(options), output_(output) {}

  void add(int64_t group, std::string prompt, GeneratedGroup responses) {
    complete_.emplace(group, std::pair(std::move(prompt), std::move(responses)));
    while (!complete_.empty() && complete_.begin()->first == written_groups_) {
      write(complete_.begin()->second.first, complete_.begin()->second.second);
      complete_.erase(complete_.begin());
      ++written_groups_;
    }
    if (!output_) fail_io("generate: cannot write the responses (disk full?)");
  }
  int64_t written_groups() const { return written_groups_; }
  int64_t written() const { return written_; }  // lines

 private:
  void write(const std::string& prompt, const GeneratedGroup& group) {
    for (size_t i = 0; i < group.samples.size(); ++i, ++written_) {
      const GeneratedSample& sample = group.samples[i];
      Json json;
      json["prompt"] = prompt;
      json["sample"] = i;
      json["text"] = tokenizer_.decode(sample.response);
      json["tokens"] = sample.response;
      if (options_.logprobs) json["logprobs"] = sample.logprobs;
      json["finish_reason"] = to_string(sample.finish);
      json["weight_versions"] = Json::array();
      for (const VersionSpan& span : sample.versions)
        json["weight_versions"].push_back(Json{{"version", span.version}, {"from", span.from}, {"to", span.to}});
      output_ << json.dump(-1, ' ', false, Json::error_handler_t::replace) << '\n';
    }
  }

  const Tokenizer& tokenizer_;
  const GenerateOptions& options_;
  std::ostream& output_;
  std::map<int64_t, std::pair<std::string, GeneratedGroup>> complete_;  // waiting for an earlier one
  int64_t written_groups_ = 0, written_ = 0;
};

}  // namespace

std::vector<int32_t> tokens_of_line(const Json& line, const char* key, const Tokenizer& tokenizer, bool add_special,
                                    int64_t vocab_size) {
  const std::string name = std::string("\"") + key + "\"";
  if (!line.is_object() || line.contains("ids") == line.contains(key))
    fail_data("a line must hold either a text " + name + " or \"ids\"");
  if (line.contains("ids")) {
    if (line.contains("add_special")) fail_data("\"add_special\" goes with " + name + ": ids are taken as they are");
    const Json& ids = line["ids"];
    const bool whole = ids.is_array() && std::all_of(ids.begin(), ids.end(), [&](const Json& id) {
                         return id.is_number_integer() && id.get<int64_t>() >= 0 && id.get<int64_t>() < vocab_size;
                       });
    if (!whole) fail_data("\"ids\" must be a list of tokens from 0 to " + std::to_string(vocab_size - 1));
    return ids.get<std::vector<int32_t>>();
  }
  if (!line[key].is_string()) fail_data(name + " is not a text");
  if (line.contains("add_special")) {
    if (!line["add_special"].is_boolean()) fail_data("\"add_special\" must be true or false");
    add_special = line["add_special"].get<bool>();
  }
  return tokenizer.encode(line[key].get<std::string>(), add_special);
}

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
  LineSource source(lines, tokenizer, options, model.config().vocab_size, settings.max_sequences, input_name);
  Responses responses(tokenizer, options, output);
  DriverHooks hooks;
  hooks.request = [&](const SampleSpan& span) {
    GroupRequest request;
    request.prompt = source.prompt(span.group);
    request.first_sample_id = static_cast<uint64_t>(span.group * options.samples);
    return request;
  };
  hooks.origin = [&](const SampleSpan& span) { return source.place(span.group); };
  hooks.complete = [&](const SampleSpan& span, GeneratedGroup group) {
    responses.add(span.group, source.forget(span.group), std::move(group));
    source.written = responses.written_groups();
  };
  drive_rollout(engine, source, hooks);
  output.flush();
  if (!output) fail_io("generate: cannot write the responses (disk full?)");
  return responses.written();
}

}  // namespace trireme
