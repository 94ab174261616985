// The byte-level tokenizer that init-model gives its models: 256 byte tokens and three special ones, no merges.
#include "base/error.h"
#include "base/fs.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {
namespace {

using nlohmann::ordered_json;

std::string utf8(uint32_t code_point) {  // below U+0800
  if (code_point < 0x80) return std::string(1, static_cast<char>(code_point));
  return {static_cast<char>(0xC0 | (code_point >> 6)), static_cast<char>(0x80 | (code_point & 0x3F))};
}

// Byte-level vocabularies spell each byte as a printable character: itself where it is printable Latin-1, else the next
// free one from U+0100 on.
std::string byte_spelling(int byte, uint32_t* next_free) {
  const bool printable =
      (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
  return utf8(printable ? static_cast<uint32_t>(byte) : (*next_free)++);
}

constexpr const char* kChatTemplate =
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "{{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n";

}  // namespace

void make_byte_tokenizer(const std::filesystem::path& dir) {
  ordered_json vocabulary = ordered_json::object();
  uint32_t next_free = 0x100;
  for (int byte = 0; byte < 256; ++byte) vocabulary[byte_spelling(byte, &next_free)] = byte;
  ordered_json added = ordered_json::array();
  ordered_json decoder = ordered_json::object();
  const std::pair<int32_t, const char*> specials[] = {
      {kByteEndOfText, "<|endoftext|>"}, {kByteImStart, "<|im_start|>"}, {kByteImEnd, "<|im_end|>"}};
  for (const auto& [id, content] : specials) {
    ordered_json token = {{"content", content}, {"single_word", false}, {"lstrip", false},
                          {"rstrip", false},    {"normalized", false},  {"special", true}};
    decoder[std::to_string(id)] = token;
    token["id"] = id;
    added.push_back(token);
  }
  const ordered_json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const ordered_json tokenizer = {{"version", "1.0"},
                                  {"truncation", nullptr},
                                  {"padding", nullptr},
                                  {"added_tokens", added},
                                  {"normalizer", nullptr},
                                  {"pre_tokenizer", byte_level},
                                  {"post_processor", nullptr},
                                  {"decoder", byte_level},
                                  {"model",
                                   {{"type", "BPE"},
                                    {"dropout", nullptr},
                                    {"unk_token", nullptr},
                                    {"continuing_subword_prefix", nullptr},
                                    {"end_of_word_suffix", nullptr},
                                    {"fuse_unk", false},
                                    {"byte_fallback", false},
                                    {"ignore_merges", false},
                                    {"vocab", vocabulary},
                                    {"merges", ordered_json::array()}}}};
  const ordered_json config = {{"added_tokens_decoder", decoder},
                               {"bos_token", nullptr},
                               {"clean_up_tokenization_spaces", false},
                               {"eos_token", "<|im_end|>"},
                               {"model_max_length", 1000000},
                               {"pad_token", "<|endoftext|>"},
                               {"tokenizer_class", "PreTrainedTokenizerFast"}};
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error) fail_io("cannot create " + dir.string() + ": " + error.message());
  write_file_atomic(dir / "tokenizer.json", tokenizer.dump(1) + "\n");
  write_file_atomic(dir / "tokenizer_config.json", config.dump(2) + "\n");
  write_file_atomic(dir / "chat_template.jinja", kChatTemplate);
}

}  // namespace trireme
