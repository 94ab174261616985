#include "trainer/algorithms/engine_identity.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"

namespace trireme {
namespace {

constexpr const char* kTokenizerFiles[] = {"tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                           "special_tokens_map.json", "chat_template.jinja"};

// Of each file that a tokenizer is read from: its digest, so that the one that differs can be named.
nlohmann::json digests_of_tokenizer(const Config& config, const std::filesystem::path& model_dir,
                                    const std::filesystem::path& hf_home) {
  const TokenizerConfig& t = config.policy.tokenizer;
  const std::filesystem::path dir =
      t.name.empty() || t.name == config.policy.model_name ? model_dir : resolve_model(t.name, hf_home);
  nlohmann::json digests = nlohmann::json::object();
  const auto add = [&](const std::string& name, const std::filesystem::path& file) {
    std::error_code ignored;
    if (std::filesystem::is_regular_file(file, ignored)) digests[name] = std::to_string(hash64(read_file(file)));
  };
  for (const char* name : kTokenizerFiles) add(name, dir / name);
  if (!t.chat_template.empty()) add("policy.tokenizer.chat_template", t.chat_template);
  return digests;
}

// Another process's words: no object where they are none, or nested as no model's description is.
nlohmann::json parsed_or_empty(const std::string& text) {
  constexpr int kMaxNesting = 32;
  nlohmann::json json;
  if (json_depth(text) <= kMaxNesting) json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  return json.is_object() ? json : nlohmann::json::object();
}

std::string shown(const nlohmann::json& value) {
  constexpr size_t kMost = 80;
  const std::string text = value.is_null() ? "missing" : value.dump();
  return text.size() > kMost ? text.substr(0, kMost) + "..." : text;
}

// "hidden_size is 64 there and 128 here", of the first key in alphabetical order.
std::optional<std::string> first_other_key(const nlohmann::json& there, const nlohmann::json& here,
                                           const std::string& path) {
  if (there == here) return std::nullopt;
  if (!there.is_object() || !here.is_object())
    return path + " is " + shown(there) + " there and " + shown(here) + " here";
  nlohmann::json keys = there;
  keys.update(here);
  for (const auto& [key, unused] : keys.items()) {
    const auto of = [&key = key](const nlohmann::json& json) {
      return json.contains(key) ? json[key] : nlohmann::json();
    };
    if (auto found = first_other_key(of(there), of(here), path.empty() ? key : path + "." + key)) return found;
  }
  return std::nullopt;  // a key that is null on one side and absent on the other
}

}  // namespace

JoinRequest identity_of(const Config& config, const ModelConfig& model, const std::filesystem::path& model_dir,
                        const std::filesystem::path& hf_home) {
  JoinRequest request;
  request.config = to_yaml(config);
  request.model = model.to_json().dump();
  request.tokenizer = digests_of_tokenizer(config, model_dir, hf_home).dump();
  request.places = config.policy.generation.max_running_samples;
  request.program = std::to_string(hash64(read_file("/proc/self/exe")));
  return request;
}

std::optional<std::string> difference_of_engine(const JoinRequest& actor, const Config& config,
                                                const JoinRequest& engine) {
  if (engine.program != actor.program) return "runs another program than the actor, of another version or build";
  std::vector<std::string> ignored;
  Config other = load_config_text(engine.config, {}, &ignored, "the configuration of engine " + engine.name);
  // What generation does not depend on, or another machine has otherwise.
  other.cluster = config.cluster;
  other.checkpointing = config.checkpointing;
  other.policy.generation.kv_cache_tokens = config.policy.generation.kv_cache_tokens;
  other.policy.generation.max_running_samples = config.policy.generation.max_running_samples;
  if (const auto difference = first_difference(config, other))
    return "has other settings than the actor: " + *difference;
  if (engine.model != actor.model) {
    const auto key = first_other_key(parsed_or_empty(actor.model), parsed_or_empty(engine.model), "");
    return "has another model than the actor" + (key ? ": " + *key : std::string());
  }
  if (engine.tokenizer != actor.tokenizer) {
    const nlohmann::json there = parsed_or_empty(actor.tokenizer), here = parsed_or_empty(engine.tokenizer);
    nlohmann::json files = there;
    files.update(here);
    for (const auto& [name, unused] : files.items()) {
      if (!here.contains(name)) return "has another tokenizer than the actor: it has no " + name;
      if (!there.contains(name)) return "has another tokenizer than the actor, which has no " + name;
      if (there[name] != here[name]) return "has another tokenizer than the actor: its " + name + " is another one";
    }
    return "has another tokenizer than the actor";
  }
  return std::nullopt;
}

}  // namespace trireme
