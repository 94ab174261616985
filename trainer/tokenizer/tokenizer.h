// Tokenizer: Hugging Face tokenizer.json and chat templates (Rust crates behind include/rust_bridge.h), and
// make_byte_tokenizer for models made here.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

struct rb_tokenizer;
struct rb_template;

namespace trireme {

// Immutable after load; every method may be called from any thread at once.
class Tokenizer final {
 public:
  // Reads from a model folder: tokenizer.json (required), tokenizer_config.json, special_tokens_map.json,
  // chat_template.jinja, generation_config.json, config.json (optional). Throws Error naming the file that is missing
  // or wrong. A folder without a chat template is fine until render_chat is called.
  static std::shared_ptr<const Tokenizer> load(const std::filesystem::path& model_dir);
  // The same with another chat template: the template's text, or empty for none (policy.tokenizer.chat_template).
  static std::shared_ptr<const Tokenizer> load(const std::filesystem::path& model_dir, std::string_view chat_template);
  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // `add_special` adds what the tokenizer's post-processor adds (e.g. BOS); chat templates write those themselves.
  // Special tokens that occur in the text as text are recognised either way, as Hugging Face does.
  // Throws Error(kData) for text that is not UTF-8.
  std::vector<int32_t> encode(std::string_view text, bool add_special = false) const;

  // Ids that the tokenizer does not know (a padded vocabulary has such rows) give no text. Incomplete UTF-8 gives
  // U+FFFD.
  std::string decode(const int32_t* ids, size_t count, bool skip_special = true) const;
  std::string decode(const std::vector<int32_t>& ids, bool skip_special = true) const {
    return decode(ids.data(), ids.size(), skip_special);
  }

  std::optional<int32_t> token_to_id(std::string_view token) const;
  std::optional<std::string> id_to_token(int32_t id) const;  // the vocabulary's spelling, not text

  int64_t vocab_size() const { return vocab_size_; }  // highest id + 1, added tokens included
  // pad_token of the tokenizer, else pad_token_id of the generation or model configuration, else eos_id().
  int32_t pad_id() const { return pad_id_; }
  // The token that ends a response in training data: eos_token of tokenizer_config.json, else eos_ids().front().
  // Throws Error when the folder names none.
  int32_t eos_id() const;
  // Every id that ends generation: of generation_config.json, config.json and tokenizer_config.json, without repeats.
  const std::vector<int32_t>& eos_ids() const { return eos_ids_; }
  std::optional<int32_t> bos_id() const { return bos_id_; }
  std::string bos_token() const;  // its text; empty where there is no bos_id()

  bool has_chat_template() const { return template_ != nullptr; }
  // `messages`: array of {"role", "content", ...}. `extra`: further variables of the template (tools, date_string,
  // enable_thinking, ...). The text of transformers' apply_chat_template(tokenize=False). Throws Error with the
  // template's own message (raise_exception) or its line.
  // A template that calls strftime_now prints today's date: set its variable (usually date_string) in `extra` when
  // prompts must be the same after a resume on another day.
  std::string render_chat(const nlohmann::json& messages, bool add_generation_prompt,
                          const nlohmann::json& extra = {}) const;
  // The same for JSON that keeps the order of keys, which a template that prints objects (tools) shows.
  std::string render_chat_ordered(const nlohmann::ordered_json& messages, bool add_generation_prompt,
                                  const nlohmann::ordered_json& extra = {}) const;

  const std::filesystem::path& model_dir() const { return model_dir_; }

 private:
  Tokenizer() = default;
  static std::shared_ptr<const Tokenizer> load_with(const std::filesystem::path& model_dir,
                                                    const std::string_view* chat_template);
  void load_vocabulary(const nlohmann::json& config);
  void load_special_tokens(const nlohmann::json& config);
  void load_eos_ids();
  void load_template(const std::string& text, const std::string& source);

  std::filesystem::path model_dir_;
  rb_tokenizer* handle_ = nullptr;
  rb_template* template_ = nullptr;
  std::string template_source_;                        // file, for messages
  std::map<std::string, std::string> special_tokens_;  // "eos_token" -> "<|im_end|>"; template variables
  int64_t vocab_size_ = 0;
  int32_t pad_id_ = 0;
  std::optional<int32_t> bos_id_;
  std::optional<int32_t> config_eos_id_;  // eos_token of tokenizer_config.json
  std::vector<int32_t> eos_ids_;
  bool own_specials_ = false, add_bos_ = false,
       add_eos_ = false;  // add_bos_token / add_eos_token are in the configuration
};

// Ids of make_byte_tokenizer: byte b is id b, so every ASCII character is one token.
inline constexpr int32_t kByteEndOfText = 256;  // <|endoftext|>, also the padding
inline constexpr int32_t kByteImStart = 257;    // <|im_start|>
inline constexpr int32_t kByteImEnd = 258;      // <|im_end|>, the eos_token
inline constexpr int64_t kByteVocabSize = 259;

// Writes tokenizer.json, tokenizer_config.json and chat_template.jinja of a byte-level tokenizer into `dir` (created if
// missing). Hugging Face transformers loads it too. generation_config.json and config.json stay the model writer's.
void make_byte_tokenizer(const std::filesystem::path& dir);

}  // namespace trireme
