#include "trainer/tokenizer/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"
#include "base/fs.h"

namespace trireme {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;
using testing::ElementsAre;
using testing::HasSubstr;

const std::filesystem::path kTemplates = "tests/parity/tokenizer";

class TokenizerTest : public testing::Test {
 protected:
  TokenizerTest() { make_byte_tokenizer(dir_.path()); }

  std::filesystem::path file(const std::string& name) const { return dir_.path() / name; }
  void write(const std::string& name, const std::string& text) const { write_file_atomic(file(name), text); }
  // Changes keys of one of the folder's JSON files.
  void patch(const std::string& name, const json& change) const {
    json value = std::filesystem::exists(file(name)) ? json::parse(read_file(file(name))) : json::object();
    value.merge_patch(change);
    write(name, value.dump());
  }
  std::shared_ptr<const Tokenizer> load() const { return Tokenizer::load(dir_.path()); }
  std::string load_error() const {
    try {
      load();
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }

  TemporaryDirectory dir_;
};

json user(const std::string& text) { return json::array({{{"role", "user"}, {"content", text}}}); }

TEST_F(TokenizerTest, EveryByteIsItsOwnToken) {
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer->vocab_size(), kByteVocabSize);
  std::string ascii;
  for (int c = 0; c < 128; ++c) ascii += static_cast<char>(c);
  const auto ids = tokenizer->encode(ascii);
  ASSERT_EQ(ids.size(), 128u);
  for (int c = 0; c < 128; ++c) EXPECT_EQ(ids[static_cast<size_t>(c)], c);
  const std::string text = "naïve 漢字 🙂\r\n\t e\u0301 \xC2\x80\xC3\xBF";
  const auto bytes = tokenizer->encode(text);
  ASSERT_EQ(bytes.size(), text.size());
  for (size_t i = 0; i < text.size(); ++i) EXPECT_EQ(bytes[i], static_cast<uint8_t>(text[i]));
  EXPECT_EQ(tokenizer->decode(bytes), text);
  EXPECT_TRUE(tokenizer->encode("").empty());
  EXPECT_EQ(tokenizer->decode(nullptr, 0), "");
}

TEST_F(TokenizerTest, SpecialTokens) {
  const auto tokenizer = load();
  EXPECT_THAT(tokenizer->encode("a<|im_end|>b<|im_end"),
              ElementsAre('a', kByteImEnd, 'b', '<', '|', 'i', 'm', '_', 'e', 'n', 'd'));
  EXPECT_EQ(tokenizer->decode({'a', kByteImEnd, 'b'}), "ab");
  EXPECT_EQ(tokenizer->decode({'a', kByteImEnd, 'b'}, false), "a<|im_end|>b");
  EXPECT_EQ(tokenizer->token_to_id("<|im_start|>"), kByteImStart);
  EXPECT_EQ(tokenizer->token_to_id("no such token"), std::nullopt);
  EXPECT_EQ(tokenizer->id_to_token(kByteEndOfText), "<|endoftext|>");
  EXPECT_EQ(tokenizer->id_to_token(259), std::nullopt);
  EXPECT_EQ(tokenizer->pad_id(), kByteEndOfText);
  EXPECT_EQ(tokenizer->eos_id(), kByteImEnd);
  EXPECT_THAT(tokenizer->eos_ids(), ElementsAre(kByteImEnd));
  EXPECT_EQ(tokenizer->bos_id(), std::nullopt);
}

TEST_F(TokenizerTest, IdsWithoutTextAndBrokenUtf8) {
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer->decode({'a', 5000, -1, 'b'}), "ab");
  EXPECT_EQ(tokenizer->decode({'a', 0xE6, 0xBC}), "a\uFFFD");
  try {
    tokenizer->encode("ab\xFF");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kData);
    EXPECT_THAT(e.what(), HasSubstr("UTF-8 (byte 2)"));
  }
}

TEST_F(TokenizerTest, EndTokensComeFromAllFiles) {
  patch("generation_config.json", {{"eos_token_id", {257, 256}}, {"pad_token_id", 256}});
  patch("config.json", {{"eos_token_id", 256}});
  const auto tokenizer = load();
  EXPECT_THAT(tokenizer->eos_ids(), ElementsAre(257, 256, 258));
  EXPECT_EQ(tokenizer->eos_id(), 258);
  patch("tokenizer_config.json", {{"eos_token", nullptr}, {"pad_token", nullptr}});
  EXPECT_THAT(load()->eos_ids(), ElementsAre(257, 256));
  EXPECT_EQ(load()->eos_id(), 257);
  EXPECT_EQ(load()->pad_id(), 256);
  std::filesystem::remove(file("generation_config.json"));
  std::filesystem::remove(file("config.json"));
  EXPECT_THROW(load()->eos_id(), Error);
  patch("config.json", {{"eos_token_id", "two"}});
  EXPECT_THAT(load_error(), HasSubstr("config.json: eos_token_id must be a token id"));
}

TEST_F(TokenizerTest, TokensOfTheConfigurationAreAdded) {
  patch("tokenizer_config.json",
        {{"bos_token", {{"content", "<s>"}}}, {"additional_special_tokens", {"<|im_start|>", "<extra>"}}});
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer->bos_id(), 259);
  EXPECT_EQ(tokenizer->token_to_id("<extra>"), 260);
  EXPECT_EQ(tokenizer->vocab_size(), 261);
  EXPECT_THAT(tokenizer->encode("x<s>"), ElementsAre('x', 259));
  EXPECT_THAT(tokenizer->encode("x", true), ElementsAre('x'));
  patch("tokenizer_config.json", {{"add_bos_token", true}, {"add_eos_token", true}});
  EXPECT_THAT(load()->encode("x", true), ElementsAre(259, 'x', kByteImEnd));
  EXPECT_THAT(load()->encode("x"), ElementsAre('x'));
  patch("tokenizer_config.json", {{"added_tokens_decoder", {{"300", {{"content", "<|im_end|>"}, {"special", true}}}}}});
  EXPECT_THAT(load_error(), HasSubstr("gives token <|im_end|> the id 300, but tokenizer.json gives it 258"));
}

TEST_F(TokenizerTest, MergesPostProcessorAndNoTruncation) {
  json tokenizer_json = json::parse(read_file(file("tokenizer.json")));
  tokenizer_json["model"]["vocab"]["he"] = 256;
  tokenizer_json["model"]["vocab"]["ll"] = 257;
  tokenizer_json["model"]["vocab"]["hell"] = 258;
  tokenizer_json["model"]["merges"] = {"h e", "l l", "he ll"};
  for (int i = 0; i < 3; ++i) tokenizer_json["added_tokens"][static_cast<size_t>(i)]["id"] = 259 + i;
  tokenizer_json["truncation"] = {
      {"direction", "Right"}, {"max_length", 2}, {"strategy", "LongestFirst"}, {"stride", 0}};
  tokenizer_json["post_processor"] = json::parse(R"({"type": "TemplateProcessing", "pair": [],
      "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
      "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [260], "tokens": ["<|im_start|>"]}}})");
  write("tokenizer.json", tokenizer_json.dump());
  patch("tokenizer_config.json", {{"added_tokens_decoder", nullptr}});
  const auto tokenizer = load();
  EXPECT_EQ(tokenizer->vocab_size(), 262);
  EXPECT_THAT(tokenizer->encode("hello hel<|im_end|>"), ElementsAre(258, 'o', ' ', 256, 'l', 261));
  EXPECT_THAT(tokenizer->encode("he", true), ElementsAre(260, 256));
  EXPECT_EQ(tokenizer->decode({258, 'o'}), "hello");
}

TEST_F(TokenizerTest, WrongFilesAreNamed) {
  write("tokenizer_config.json", "{");
  EXPECT_THAT(load_error(), HasSubstr("tokenizer_config.json is not valid JSON"));
  write("tokenizer_config.json", "[]");
  EXPECT_THAT(load_error(), HasSubstr("tokenizer_config.json: a JSON object is expected"));
  std::filesystem::remove(file("tokenizer_config.json"));
  write("chat_template.jinja", "{% for x in y %}");
  EXPECT_THAT(load_error(), HasSubstr("chat_template.jinja) does not compile"));
  write("tokenizer.json", "{\"model\": 3}");
  EXPECT_THAT(load_error(), HasSubstr("tokenizer.json is not a tokenizer"));
  write("tokenizer.json", std::string(100000, '['));
  EXPECT_THAT(load_error(), HasSubstr("tokenizer.json is not a tokenizer"));
  std::filesystem::remove(file("tokenizer.json"));
  EXPECT_THAT(load_error(), HasSubstr("tokenizer.json is missing"));
}

TEST_F(TokenizerTest, TemplateSources) {
  EXPECT_EQ(load()->render_chat(user("hi"), true), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
  const auto other = Tokenizer::load(dir_.path(), "{{ messages[0].content }}{{ eos_token }}{{ mood }}");
  EXPECT_EQ(other->render_chat(user("hi"), true, {{"mood", "!"}}), "hi<|im_end|>!");
  EXPECT_FALSE(Tokenizer::load(dir_.path(), "")->has_chat_template());

  std::filesystem::remove(file("chat_template.jinja"));
  EXPECT_FALSE(load()->has_chat_template());
  try {
    load()->render_chat(user("hi"), true);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("has no chat template"));
  }
  patch("tokenizer_config.json", {{"chat_template", "one"}});
  EXPECT_EQ(load()->render_chat(user("hi"), true), "one");
  patch("tokenizer_config.json",
        {{"chat_template", {{{"name", "tool_use"}, {"template", "t"}}, {{"name", "default"}, {"template", "d"}}}}});
  EXPECT_EQ(load()->render_chat(user("hi"), true), "d");
}

TEST_F(TokenizerTest, TemplateErrors) {
  const auto tokenizer = Tokenizer::load(dir_.path(),
                                         "{% if messages|length != 1 %}{{ raise_exception('one message only') }}{% "
                                         "endif %}\n{{ messages[0].content.nothing() }}");
  const auto error = [&](const json& messages) -> std::string {
    try {
      tokenizer->render_chat(messages, false);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  json two = user("a");
  two.push_back(two[0]);
  EXPECT_THAT(error(two),
              HasSubstr("the chat template (policy.tokenizer.chat_template) refused a conversation: one message only"));
  EXPECT_THAT(error(user("a")), HasSubstr("template line 2"));
  EXPECT_THAT(error("text"), HasSubstr("a conversation must be a list of messages"));
  EXPECT_THAT(error(user("\xFF")), HasSubstr("UTF-8"));
}

// The prompts in expected.json are transformers' own (tests/parity/tokenizer_parity.py --write-expected).
TEST_F(TokenizerTest, TemplatesRenderAsTransformersDoes) {
  const ordered_json expected = ordered_json::parse(read_file(kTemplates / "expected.json"));
  const ordered_json conversations = ordered_json::parse(read_file(kTemplates / "conversations.json"));
  ASSERT_EQ(expected.size(), 4u);
  for (const auto& [name, replies] : expected.items()) {
    if (name.starts_with("llama3")) patch("tokenizer_config.json", {{"bos_token", "<|begin_of_text|>"}});
    const auto tokenizer = Tokenizer::load(dir_.path(), read_file(kTemplates / name));
    ASSERT_EQ(replies.size(), conversations.size());
    for (size_t i = 0; i < replies.size(); ++i) {
      SCOPED_TRACE(name + " conversation " + std::to_string(i));
      const ordered_json& conversation = conversations[i];
      try {
        const std::string text = tokenizer->render_chat_ordered(
            conversation["messages"], conversation["add_generation_prompt"], conversation["extra"]);
        EXPECT_EQ(text, replies[i].value("text", "an error"));
      } catch (const Error& e) {
        EXPECT_THAT(e.what(), HasSubstr(replies[i].value("error", "no error")));
      }
    }
  }
}

TEST_F(TokenizerTest, DateOfToday) {
  const auto tokenizer =
      Tokenizer::load(dir_.path(), "{{ strftime_now('%d %b %Y') | length }}|{{ strftime_now('%%') }}");
  EXPECT_EQ(tokenizer->render_chat(user("x"), false), "11|%");
}

TEST_F(TokenizerTest, ThreadsShareIt) {
  const auto tokenizer = load();
  const std::string text = "the same text 漢字 <|im_end|> again and again";
  const auto ids = tokenizer->encode(text);
  const std::string prompt = tokenizer->render_chat(user(text), true);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        if (tokenizer->encode(text) != ids || tokenizer->decode(ids, false) != text ||
            tokenizer->render_chat(user(text), true) != prompt)
          ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace trireme
