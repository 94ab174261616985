// `trireme generate`: lines in, lines out, in order; a bad line is named.
#include "trainer/rollout/generate.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/model/tiny.h"

namespace trireme {
namespace {

class GenerateJsonl : public ::testing::Test {
 protected:
  GenerateJsonl() {
    make_byte_tokenizer(dir_.path());
    tokenizer_ = Tokenizer::load(dir_.path());
    model_ = test::tiny_model({.family = ModelFamily::kLlama,
                               .vocab = kByteVocabSize,
                               .intermediate = 64,
                               .heads = 2,
                               .kv_heads = 1,
                               .head_dim = 16,
                               .positions = 256,
                               .tied = false},
                              5);
    choose_linear_mode(model_->config().linear_shapes(), at::kFloat);
    sampling_.max_new_tokens = 6;
    sampling_.seed = 3;
  }

  std::vector<nlohmann::json> run(const std::string& text, const EngineOptions& engine = {}) {
    std::istringstream input(text);
    std::ostringstream output;
    const int64_t lines =
        generate_jsonl(*model_, *tokenizer_, engine, sampling_, options_, input, "prompts.jsonl", output);
    std::vector<nlohmann::json> result;
    std::istringstream read(output.str());
    for (std::string line; std::getline(read, line);) result.push_back(nlohmann::json::parse(line));
    EXPECT_EQ(lines, static_cast<int64_t>(result.size()));
    return result;
  }
  std::string error_of(const std::string& text) {
    try {
      run(text);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }

  TemporaryDirectory dir_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::unique_ptr<Model> model_;
  SamplingOptions sampling_;
  GenerateOptions options_;
};

TEST_F(GenerateJsonl, AnswersComeInTheOrderOfTheInput) {
  options_.samples = 2;
  std::string text;
  for (int i = 0; i < 20; ++i) text += "{\"prompt\": \"question " + std::string(20 - i, '?') + "\"}\n\n";
  const auto lines = run(text);
  ASSERT_EQ(lines.size(), 40u);
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(lines[i]["prompt"], "question " + std::string(20 - i / 2, '?'));
    EXPECT_EQ(lines[i]["sample"], i % 2);
    EXPECT_EQ(lines[i]["tokens"].size(), 6u);
    EXPECT_EQ(lines[i]["logprobs"].size(), 6u);
    EXPECT_EQ(lines[i]["finish_reason"], "length");
    EXPECT_EQ(lines[i]["weight_versions"], nlohmann::json::parse(R"([{"version": 0, "from": 0, "to": 6}])"));
    EXPECT_EQ(lines[i]["text"], tokenizer_->decode(lines[i]["tokens"].get<std::vector<int32_t>>()));
  }
  for (const int64_t places : {1, 3, 20, 40, 41}) EXPECT_EQ(run(text, {.max_sequences = places}), lines) << places;
}

TEST_F(GenerateJsonl, MessagesGoThroughTheChatTemplate) {
  const auto messages = run("{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n");
  ASSERT_EQ(messages.size(), 1u);
  options_.chat = true;
  options_.logprobs = false;
  const auto chat = run("{\"prompt\": \"hi\"}");
  EXPECT_EQ(chat[0]["prompt"], messages[0]["prompt"]);
  EXPECT_NE(chat[0]["prompt"], "hi");
  EXPECT_EQ(chat[0]["tokens"], messages[0]["tokens"]);
  EXPECT_FALSE(chat[0].contains("logprobs"));
}

// A tokenizer that puts a begin token before a text, as Llama's does.
std::shared_ptr<const Tokenizer> with_begin_token(const std::filesystem::path& dir) {
  make_byte_tokenizer(dir);
  nlohmann::json json = nlohmann::json::parse(read_file(dir / "tokenizer.json"));
  const nlohmann::json begin = {{"SpecialToken", {{"id", "<|im_start|>"}, {"type_id", 0}}}};
  const nlohmann::json text = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  json["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"single", {begin, text}},
      {"pair", {begin, text, {{"Sequence", {{"id", "B"}, {"type_id", 1}}}}}},
      {"special_tokens",
       {{"<|im_start|>", {{"id", "<|im_start|>"}, {"ids", {kByteImStart}}, {"tokens", {"<|im_start|>"}}}}}}};
  write_file_atomic(dir / "tokenizer.json", json.dump());
  return Tokenizer::load(dir);
}

TEST_F(GenerateJsonl, TheBeginTokenFollowsTheTokenizerUnlessALineSaysOtherwise) {
  tokenizer_ = with_begin_token(dir_.path() / "begin");
  const auto tokens = [&](const char* line, bool add_special) {
    return tokens_of_line(nlohmann::ordered_json::parse(line), "text", *tokenizer_, add_special, kByteVocabSize);
  };
  const std::vector<int32_t> with = {kByteImStart, 'h', 'i'}, without = {'h', 'i'};
  EXPECT_EQ(tokens("{\"text\": \"hi\"}", true), with);
  EXPECT_EQ(tokens("{\"text\": \"hi\"}", false), without);
  EXPECT_EQ(tokens("{\"text\": \"hi\", \"add_special\": false}", true), without);
  EXPECT_EQ(tokens("{\"text\": \"hi\", \"add_special\": true}", false), with);
  EXPECT_EQ(tokens("{\"ids\": [104, 105]}", true), without);
  // The answers, which show what the model was given.
  const auto answer = [&](const char* line) { return run(line)[0]["tokens"]; };
  EXPECT_EQ(answer("{\"prompt\": \"hi\"}"), answer("{\"ids\": [257, 104, 105]}"));
  EXPECT_EQ(answer("{\"prompt\": \"hi\", \"add_special\": false}"), answer("{\"ids\": [104, 105]}"));
  EXPECT_NE(run("{\"prompt\": \"hi\"}")[0]["logprobs"], run("{\"ids\": [104, 105]}")[0]["logprobs"]);
  options_.add_special = false;
  EXPECT_EQ(answer("{\"prompt\": \"hi\"}"), answer("{\"ids\": [104, 105]}"));
  EXPECT_EQ(run("{\"ids\": [257, 104, 105]}")[0]["prompt"], "<|im_start|>hi");
}

TEST_F(GenerateJsonl, ABadLineIsNamed) {
  for (const char* line : {"{\"ids\": [259]}", "{\"ids\": [-1]}", "{\"ids\": [1.5]}", "{\"ids\": \"1\"}"})
    EXPECT_NE(error_of(line).find("prompts.jsonl:1: \"ids\" must be a list of tokens from 0 to 258"),
              std::string::npos);
  EXPECT_NE(error_of("{\"ids\": [1], \"prompt\": \"a\"}").find("either a text"), std::string::npos);
  EXPECT_NE(error_of("{\"prompt\": \"a\", \"add_special\": 1}").find("true or false"), std::string::npos);
  EXPECT_NE(error_of("{\"messages\": [], \"add_special\": true}").find("chat template"), std::string::npos);
  EXPECT_NE(error_of("{\"prompt\": \"a\"}\n{\"prompt\": \n").find("prompts.jsonl:2: not valid JSON"),
            std::string::npos);
  EXPECT_NE(error_of("[1]\n").find("prompts.jsonl:1: not a JSON object"), std::string::npos);
  EXPECT_NE(error_of("{\"text\": \"a\"}\n").find("neither a text \"prompt\" nor \"ids\" nor \"messages\""),
            std::string::npos);
  EXPECT_NE(
      error_of("{\"prompt\": \"" + std::string(300, 'x') + "\"}\n").find("prompts.jsonl:1: group 0: its prompt of 300"),
      std::string::npos);
  EXPECT_EQ(run("").size(), 0u);
}

}  // namespace
}  // namespace trireme
