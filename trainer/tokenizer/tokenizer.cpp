#include "trainer/tokenizer/tokenizer.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "rust_bridge.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

std::string last_error() {
  size_t length = 0;
  const char* text = rb_last_error(&length);
  return std::string(text, length);
}

std::string take_text(char* text, size_t length) {
  std::string copy(text, length);
  rb_string_free(text, length);
  return copy;
}

// An optional file: empty object when it is not there.
json read_json_if_there(const fs::path& path) {
  if (!fs::exists(path)) return json::object();
  try {
    json value = json::parse(read_file(path));
    if (!value.is_object()) fail_user(path.string() + ": a JSON object is expected");
    return value;
  } catch (const json::exception& e) {
    fail_user(path.string() + " is not valid JSON: " + e.what());
  }
}

// A special token is written as text or as {"content": text, ...}.
std::optional<std::string> token_text(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object() && value.contains("content") && value["content"].is_string())
    return value["content"].get<std::string>();
  return std::nullopt;
}

bool flag(const json& object, const char* key, bool fallback) {
  const auto it = object.find(key);
  return it != object.end() && it->is_boolean() ? it->get<bool>() : fallback;
}

constexpr const char* kNamedTokens[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                        "pad_token", "cls_token", "mask_token"};

// Token ids in a "*_token_id" value: a number, or a list of them.
std::vector<int32_t> token_ids(const json& config, const char* key, const fs::path& file) {
  std::vector<int32_t> ids;
  const auto it = config.find(key);
  if (it == config.end() || it->is_null()) return ids;
  const json list = it->is_array() ? *it : json::array({*it});
  for (const json& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > std::numeric_limits<int32_t>::max()) {
      fail_user(file.string() + ": " + key + " must be a token id or a list of them, found " + id.dump());
    }
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

void add_once(std::vector<int32_t>* ids, int32_t id) {
  if (std::find(ids->begin(), ids->end(), id) == ids->end()) ids->push_back(id);
}

// Reasoning is stored under several names; templates read reasoning_content (gpt-oss: thinking). As transformers does.
void alias_reasoning(ordered_json* messages) {
  for (ordered_json& message : *messages) {
    if (!message.is_object()) continue;
    for (const char* key : {"reasoning_content", "thinking", "reasoning"}) {
      const auto it = message.find(key);
      if (it == message.end() || it->is_null()) continue;
      const ordered_json reasoning = *it;
      if (!message.contains("thinking")) message["thinking"] = reasoning;
      message["reasoning_content"] = reasoning;
      break;
    }
  }
}

}  // namespace

std::shared_ptr<const Tokenizer> Tokenizer::load(const fs::path& model_dir) { return load_with(model_dir, nullptr); }

std::shared_ptr<const Tokenizer> Tokenizer::load(const fs::path& model_dir, std::string_view chat_template) {
  return load_with(model_dir, &chat_template);
}

std::shared_ptr<const Tokenizer> Tokenizer::load_with(const fs::path& model_dir,
                                                      const std::string_view* chat_template) {
  std::shared_ptr<Tokenizer> tokenizer(new Tokenizer());
  tokenizer->model_dir_ = model_dir;
  const fs::path config_path = model_dir / "tokenizer_config.json";
  json config = read_json_if_there(config_path);
  const json old_map = read_json_if_there(model_dir / "special_tokens_map.json");
  for (const auto& [key, value] : old_map.items()) {
    if (!config.contains(key)) config[key] = value;
  }
  tokenizer->load_vocabulary(config);
  tokenizer->load_special_tokens(config);
  tokenizer->load_eos_ids();

  const fs::path template_path = model_dir / "chat_template.jinja";
  if (chat_template) {
    tokenizer->load_template(std::string(*chat_template), "policy.tokenizer.chat_template");
  } else if (fs::exists(template_path)) {
    tokenizer->load_template(read_file(template_path), template_path.string());
  } else if (const auto it = config.find("chat_template"); it != config.end() && !it->is_null()) {
    if (it->is_string()) {
      tokenizer->load_template(it->get<std::string>(), config_path.string());
    } else if (it->is_array()) {  // several templates by name: the one called default
      for (const json& entry : *it) {
        if (entry.is_object() && entry.value("name", json()) == "default" &&
            entry.value("template", json()).is_string()) {
          tokenizer->load_template(entry["template"].get<std::string>(), config_path.string());
        }
      }
    } else {
      fail_user(config_path.string() + ": chat_template must be text or a list of {name, template}");
    }
  }
  return tokenizer;
}

Tokenizer::~Tokenizer() {
  rb_tokenizer_free(handle_);
  rb_template_free(template_);
}

void Tokenizer::load_vocabulary(const json& config) {
  const fs::path path = model_dir_ / "tokenizer.json";
  if (!fs::exists(path)) {
    fail_user(
        path.string() +
        " is missing: the model folder needs a tokenizer.json (transformers: save_pretrained of a fast tokenizer)");
  }
  // What transformers adds on top of tokenizer.json.
  json additions = {{"tokens", json::array()}, {"special", json::array()}};
  std::map<int64_t, std::string> expected_ids;
  std::map<int64_t, json> tokens;
  if (const auto it = config.find("added_tokens_decoder"); it != config.end() && it->is_object()) {
    for (const auto& [key, token] : it->items()) {
      const auto id = parse_int(key);
      const auto content = token_text(token);
      if (!id || !content) {
        fail_user((model_dir_ / "tokenizer_config.json").string() + ": added_tokens_decoder entry \"" + key +
                  "\" is not an id with a content");
      }
      const bool special = flag(token, "special", false);
      tokens[*id] = {{"content", *content},
                     {"single_word", flag(token, "single_word", false)},
                     {"lstrip", flag(token, "lstrip", false)},
                     {"rstrip", flag(token, "rstrip", false)},
                     {"normalized", flag(token, "normalized", !special)},
                     {"special", special}};
      expected_ids[*id] = *content;
    }
  }
  for (const auto& [id, token] : tokens) additions["tokens"].push_back(token);
  for (const char* name : kNamedTokens) {
    if (const auto it = config.find(name); it != config.end()) {
      if (const auto text = token_text(*it); text && !text->empty()) additions["special"].push_back(*text);
    }
  }
  for (const char* name : {"additional_special_tokens", "extra_special_tokens"}) {
    const auto it = config.find(name);
    if (it == config.end() || !it->is_structured()) continue;
    for (const json& token : *it) {
      if (const auto text = token_text(token); text && !text->empty()) additions["special"].push_back(*text);
    }
  }
  const std::string text = read_file(path);
  const std::string extra = additions.dump(-1, ' ', false, json::error_handler_t::replace);
  handle_ = rb_tokenizer_new(text.data(), text.size(), extra.data(), extra.size());
  if (!handle_) fail_user(path.string() + " is not a tokenizer that can be loaded: " + last_error());
  vocab_size_ = rb_tokenizer_vocab_size(handle_);
  if (vocab_size_ <= 0) fail_user(path.string() + ": the vocabulary is empty");
  for (const auto& [id, content] : expected_ids) {
    if (token_to_id(content) != static_cast<int32_t>(id)) {
      fail_user((model_dir_ / "tokenizer_config.json").string() + " gives token " + content + " the id " +
                std::to_string(id) + ", but tokenizer.json gives it " +
                std::to_string(token_to_id(content).value_or(-1)));
    }
  }
}

void Tokenizer::load_special_tokens(const json& config) {
  for (const char* name : kNamedTokens) {
    const auto it = config.find(name);
    if (it == config.end()) continue;
    if (const auto text = token_text(*it)) special_tokens_[name] = *text;
  }
  if (const auto it = special_tokens_.find("bos_token"); it != special_tokens_.end()) bos_id_ = token_to_id(it->second);
  if (const auto it = special_tokens_.find("eos_token"); it != special_tokens_.end())
    config_eos_id_ = token_to_id(it->second);
  // With these keys transformers puts its own BOS and EOS in place of the post-processor's.
  if (config.contains("add_bos_token") || config.contains("add_eos_token")) {
    own_specials_ = true;
    add_bos_ = flag(config, "add_bos_token", false) && bos_id_;
    add_eos_ = flag(config, "add_eos_token", false) && config_eos_id_;
  }
}

void Tokenizer::load_eos_ids() {
  std::optional<int32_t> pad;
  if (const auto it = special_tokens_.find("pad_token"); it != special_tokens_.end()) pad = token_to_id(it->second);
  for (const char* name : {"generation_config.json", "config.json"}) {
    const fs::path path = model_dir_ / name;
    const json config = read_json_if_there(path);
    for (const int32_t id : token_ids(config, "eos_token_id", path)) add_once(&eos_ids_, id);
    const auto pads = token_ids(config, "pad_token_id", path);
    if (!pad && !pads.empty()) pad = pads.front();
  }
  if (config_eos_id_) add_once(&eos_ids_, *config_eos_id_);
  pad_id_ = pad.value_or(config_eos_id_.value_or(eos_ids_.empty() ? 0 : eos_ids_.front()));
}

void Tokenizer::load_template(const std::string& text, const std::string& source) {
  if (text.empty()) return;
  template_source_ = source;
  template_ = rb_template_new(text.data(), text.size());
  if (!template_) fail_user("the chat template (" + source + ") does not compile: " + last_error());
}

int32_t Tokenizer::eos_id() const {
  if (config_eos_id_) return *config_eos_id_;
  if (eos_ids_.empty()) {
    fail_user(model_dir_.string() +
              " names no end-of-sequence token: set eos_token in tokenizer_config.json or eos_token_id in config.json");
  }
  return eos_ids_.front();
}

std::string Tokenizer::bos_token() const { return bos_id_ ? special_tokens_.at("bos_token") : ""; }

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_special) const {
  size_t count = 0;
  uint32_t* ids = rb_tokenizer_encode(handle_, text.data(), text.size(), add_special && !own_specials_, &count);
  if (!ids) fail_data("cannot tokenise a text of " + std::to_string(text.size()) + " bytes: " + last_error());
  std::vector<int32_t> out;
  out.reserve(count + 2);
  if (add_special && add_bos_) out.push_back(*bos_id_);
  for (size_t i = 0; i < count; ++i) out.push_back(static_cast<int32_t>(ids[i]));
  if (add_special && add_eos_) out.push_back(*config_eos_id_);
  rb_ids_free(ids, count);
  return out;
}

std::string Tokenizer::decode(const int32_t* ids, size_t count, bool skip_special) const {
  // A negative id becomes one above every vocabulary, which has no text.
  size_t length = 0;
  char* text = rb_tokenizer_decode(handle_, reinterpret_cast<const uint32_t*>(ids), count, skip_special, &length);
  if (!text) fail_data("cannot decode " + std::to_string(count) + " tokens: " + last_error());
  return take_text(text, length);
}

std::optional<int32_t> Tokenizer::token_to_id(std::string_view token) const {
  const int64_t id = rb_tokenizer_token_to_id(handle_, token.data(), token.size());
  if (id < 0) return std::nullopt;
  return static_cast<int32_t>(id);
}

std::optional<std::string> Tokenizer::id_to_token(int32_t id) const {
  size_t length = 0;
  char* text = id < 0 ? nullptr : rb_tokenizer_id_to_token(handle_, static_cast<uint32_t>(id), &length);
  if (!text) return std::nullopt;
  return take_text(text, length);
}

std::string Tokenizer::render_chat(const json& messages, bool add_generation_prompt, const json& extra) const {
  return render_chat_ordered(ordered_json(messages), add_generation_prompt, ordered_json(extra));
}

std::string Tokenizer::render_chat_ordered(const ordered_json& messages, bool add_generation_prompt,
                                           const ordered_json& extra) const {
  if (!template_) {
    fail_user(model_dir_.string() +
              " has no chat template: put chat_template.jinja there, set policy.tokenizer.chat_template, or set "
              "data.apply_chat_template=false to use prompts as they are");
  }
  if (!messages.is_array())
    fail_data("a conversation must be a list of messages, found " + std::string(messages.type_name()));
  // transformers defines tools and documents even when there are none.
  ordered_json variables = {{"messages", messages}, {"tools", nullptr}, {"documents", nullptr}};
  alias_reasoning(&variables["messages"]);
  for (const auto& [name, text] : special_tokens_) variables[name] = text;
  if (extra.is_object()) {
    for (const auto& [key, value] : extra.items()) variables[key] = value;
  }
  variables["add_generation_prompt"] = add_generation_prompt;
  std::string text;
  try {
    text = variables.dump();
  } catch (const json::exception& e) {  // text that is not UTF-8
    fail_data(std::string("a conversation cannot be rendered: ") + e.what());
  }
  size_t length = 0;
  char* rendered = rb_template_render(template_, text.data(), text.size(), &length);
  if (!rendered) fail_data("the chat template (" + template_source_ + ") refused a conversation: " + last_error());
  return take_text(rendered, length);
}

}  // namespace trireme
