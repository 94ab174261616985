// What fine-tuning learns: responses of pairs and conversations, and the tokens of them that count.
#include <gmock/gmock.h>

#include <filesystem>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/data/dataset_fixture.h"
#include "tests/unit/errors.h"

namespace trireme {
namespace {

using nlohmann::json;
using test::error_of;
using testing::ElementsAre;
using testing::HasSubstr;

TEST_F(DatasetTest, CompletionsOfPairs) {
  DataOptions options = raw(write("d.jsonl", R"({"input": "1+1=", "output": "2"})"));
  options.completions = true;
  const PromptExample example = PromptStream(options, tokenizer_).next();
  EXPECT_THAT(example.prompt, ElementsAre('1', '+', '1', '='));
  EXPECT_THAT(example.response, ElementsAre('2', kByteImEnd));
  EXPECT_THAT(example.response_mask, ElementsAre(1, 1));
  options.apply_chat_template = true;
  options.add_generation_prompt = true;
  const PromptExample chat = PromptStream(options, tokenizer_).next();
  EXPECT_EQ(chat.prompt_text, "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_THAT(chat.response, ElementsAre('2', kByteImEnd, '\n'));
  EXPECT_THAT(chat.response_mask, ElementsAre(1, 1, 1));
  options.path = write("d.jsonl", R"({"input": "1+1=", "output": ""})");
  EXPECT_THAT(open_error(options), HasSubstr("nothing to learn"));
  options.path = write("long.jsonl", R"({"input": "1", "output": "long answer"})"
                                     "\n"
                                     R"({"input": "1", "output": "2"})");
  options.apply_chat_template = false;
  options.max_input_seq_length = 5;
  PromptStream limited(options, tokenizer_);
  EXPECT_THAT(indices(&limited, 2), ElementsAre(1, 1));
}

TEST_F(DatasetTest, AConversationBeginsWithTheTokenizersFirstToken) {
  DataOptions options = raw(write("d.jsonl", R"({"input": "1", "output": "2"})"));
  options.completions = true;
  options.apply_chat_template = true;
  const std::string text = "{% for m in messages %}{{ ' Q:' if m.role == 'user' else ' ' }}{{ m.content }}{% endfor %}";
  const auto first = [&](const std::string& chat_template) {
    return PromptStream(options, Tokenizer::load(dir_.path() / "model", chat_template)).next();
  };
  EXPECT_THAT(first(text).prompt, ElementsAre(' ', 'Q', ':', '1')) << "this tokenizer has none";

  const std::filesystem::path config = dir_.path() / "model" / "tokenizer_config.json";
  json changed = json::parse(read_file(config));
  changed["bos_token"] = "<|endoftext|>";
  write_file_atomic(config, changed.dump());
  const PromptExample added = first(text);
  EXPECT_EQ(added.prompt_text, "<|endoftext|> Q:1");
  EXPECT_THAT(added.prompt, ElementsAre(kByteEndOfText, ' ', 'Q', ':', '1'));
  EXPECT_THAT(added.response, ElementsAre(' ', '2', kByteImEnd));
  EXPECT_THAT(first("{{ bos_token }}" + text).prompt, ElementsAre(kByteEndOfText, ' ', 'Q', ':', '1'));
  options.max_input_seq_length = 7;  // of 8 with it
  EXPECT_THAT(error_of([&] { first(text); }), HasSubstr("none of the 1 prompts"));
  options.add_bos = false;
  EXPECT_THAT(first(text).prompt, ElementsAre(' ', 'Q', ':', '1'));
  options.add_bos = true;
  options.completions = false;  // generation begins with what the template writes
  EXPECT_THAT(first(text).prompt, ElementsAre(' ', 'Q', ':', '1'));
}

TEST_F(DatasetTest, HowAConversationEnds) {
  DataOptions options = raw(write("d.jsonl", R"({"input": "1", "output": "2\n"})"));
  options.completions = true;
  const auto first = [&] { return PromptStream(options, tokenizer_).next(); };
  // Text, its line feed, the end token: as it stands, and without line feeds.
  EXPECT_THAT(first().response, ElementsAre('2', '\n', kByteImEnd));
  options.drop_line_feeds = true;
  EXPECT_THAT(first().response, ElementsAre('2', kByteImEnd));
  options.add_eos = false;
  EXPECT_THAT(first().response, ElementsAre('2'));
  EXPECT_THAT(first().response_mask, ElementsAre(1));
  options.drop_line_feeds = false;
  EXPECT_THAT(first().response, ElementsAre('2', '\n'));
  // Of a conversation, only the end of the last response.
  options = raw(write("c.jsonl", R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": )"
                                 R"("b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})"));
  options.completions = options.apply_chat_template = options.add_generation_prompt = true;
  EXPECT_EQ(learnt_text(first()), "b<|im_end|>\nd<|im_end|>\n");
  options.drop_line_feeds = true;
  EXPECT_EQ(learnt_text(first()), "b<|im_end|>\nd<|im_end|>");
  // The end token is the tokenizer's, whatever else ends generation.
  write_file_atomic(dir_.path() / "model" / "generation_config.json", R"({"eos_token_id": [256, 258]})");
  tokenizer_ = Tokenizer::load(
      dir_.path() / "model",
      "{% for m in messages %}{{ m.content }}{{ '<|endoftext|>' if m.role == 'assistant' }}{% endfor %}");
  EXPECT_EQ(learnt_text(first()), "b<|endoftext|>d<|endoftext|><|im_end|>");
}

TEST_F(DatasetTest, ARowsOwnSystemMessage) {
  DataOptions options = raw(write("d.jsonl", R"({"context": "c", "question": "q", "answers": {"text": ["a", "b"]}})"
                                             "\n"
                                             R"({"context": "", "question": "r", "answers": {"text": ["b"]}})"));
  options.input_key = "question";
  options.output_key = "answers.text[0]";
  options.system_key = "context";
  options.system_prompt_file = write("system.txt", "of the file");
  options.completions = true;
  options.apply_chat_template = true;
  options.add_generation_prompt = true;
  PromptStream stream(options, tokenizer_);
  const PromptExample own = stream.next();
  EXPECT_EQ(own.prompt_text, "<|im_start|>system\nc<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_THAT(own.response, ElementsAre('a', kByteImEnd, '\n'));
  EXPECT_THAT(stream.next().prompt_text, HasSubstr("<|im_start|>system\nof the file<|im_end|>"));
  // Of a source with keys of its own, its own.
  DataOptions mixed = options;
  mixed.path.clear();
  mixed.sources = {{{options.path}, "question", "answers.text[0]", 0, "question"}};
  EXPECT_THAT(PromptStream(mixed, tokenizer_).next().prompt_text, HasSubstr("<|im_start|>system\nq<|im_end|>"));
}

TEST_F(DatasetTest, CompletionsOfConversations) {
  DataOptions options =
      raw(write("d.jsonl", R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, )"
                           R"({"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})"));
  options.completions = true;
  EXPECT_THAT(open_error(options), HasSubstr("holds conversations, which need the chat template"));
  options.apply_chat_template = true;
  options.add_generation_prompt = true;
  const PromptExample example = PromptStream(options, tokenizer_).next();
  EXPECT_EQ(example.prompt_text, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(tokenizer_->decode(example.response, false),
            "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n");
  ASSERT_EQ(example.response_mask.size(), example.response.size());
  EXPECT_EQ(learnt_text(example), "b<|im_end|>\nd<|im_end|>\n");

  // A template that shows only the last response whole: the first is not learnt.
  const auto rewriting = Tokenizer::load(dir_.path() / "model",
                                         "{% for m in messages %}{{ m.role[0] }}:{{ m.content if m.role == 'user' or "
                                         "loop.last else '-' }};{% endfor %}{{ 'a:' if add_generation_prompt }}");
  const PromptExample last = PromptStream(options, rewriting).next();
  EXPECT_EQ(last.prompt_text, "u:a;a:-;u:c;a:");
  EXPECT_EQ(rewriting->decode(last.response, false), "d;<|im_end|>");
  const auto foreign = Tokenizer::load(dir_.path() / "model", "{{ add_generation_prompt }}");
  EXPECT_THAT(error_of([&] { PromptStream stream(options, foreign); }),
              HasSubstr("line 1: the chat template does not render the prompt as the beginning"));
}

TEST_F(DatasetTest, TheHeaderOfAResponseIsLearntUnlessItIsAPartOfThePrompt) {
  DataOptions options =
      raw(write("d.jsonl", R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, )"
                           R"({"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}, )"
                           R"({"role": "assistant", "content": "e"}]})"));
  options.completions = true;
  options.apply_chat_template = true;
  const PromptExample whole = PromptStream(options, tokenizer_).next();
  EXPECT_EQ(whole.prompt_text, "<|im_start|>user\na<|im_end|>\n");
  EXPECT_EQ(learnt_text(whole),
            "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
            "<|im_start|>assistant\ne<|im_end|>\n");
  options.add_generation_prompt = true;
  const PromptExample content = PromptStream(options, tokenizer_).next();
  EXPECT_EQ(content.prompt_text, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(learnt_text(content), "b<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\ne<|im_end|>\n")
      << "a header behind another response is of no prompt";
  for (const PromptExample* example : {&whole, &content}) {
    EXPECT_EQ(example->prompt_text + tokenizer_->decode(example->response, false),
              "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
              "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\ne<|im_end|>\n");
  }
}

TEST_F(DatasetTest, TemplateRefusalIsABadRow) {
  DataOptions options = raw(write("d.jsonl", R"({"messages": [{"role": "user", "content": "a"}]})"
                                             "\n"
                                             R"({"messages": [{"role": "nobody", "content": "a"}]})"
                                             "\n"));
  options.apply_chat_template = true;
  tokenizer_ = Tokenizer::load(
      dir_.path() / "model",
      "{% if messages[0].role != 'user' %}{{ raise_exception('who?') }}{% endif %}{{ messages[0].content }}");
  EXPECT_THAT(
      open_error(options),
      HasSubstr("d.jsonl line 2: the chat template (policy.tokenizer.chat_template) refused a conversation: who?"));
  options.max_bad_lines = 1;
  EXPECT_EQ(Dataset::open(options, tokenizer_)->size(), 1);
}

}  // namespace
}  // namespace trireme
