// `trireme generate`: lines in, lines out, in order; a bad line is named.
#include "trainer/rollout/generate.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "base/fs.h"

namespace trireme {
namespace {

class GenerateJsonl : public ::testing::Test {
 protected:
  GenerateJsonl() {
    make_byte_tokenizer(dir_.path());
    tokenizer_ = Tokenizer::load(dir_.path());
    ModelConfig config;
    config.family = ModelFamily::kLlama;
    config.vocab_size = kByteVocabSize;
    config.hidden_size = 32;
    config.intermediate_size = 64;
    config.num_layers = 1;
    config.num_heads = 2;
    config.num_kv_heads = 1;
    config.head_dim = 16;
    config.max_position_embeddings = 256;
    config.rope.head_dim = 16;
    ModelOptions options;
    options.trainable = false;
    model_ = std::make_unique<Model>(config, options);
    choose_linear_mode(config.linear_shapes(), at::kFloat);
    init_parameters(*model_, 5);
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

TEST_F(GenerateJsonl, ABadLineIsNamed) {
  EXPECT_NE(error_of("{\"prompt\": \"a\"}\n{\"prompt\": \n").find("prompts.jsonl:2: not valid JSON"),
            std::string::npos);
  EXPECT_NE(error_of("[1]\n").find("prompts.jsonl:1: not a JSON object"), std::string::npos);
  EXPECT_NE(error_of("{\"text\": \"a\"}\n").find("neither a text \"prompt\" nor \"messages\""), std::string::npos);
  EXPECT_NE(
      error_of("{\"prompt\": \"" + std::string(300, 'x') + "\"}\n").find("prompts.jsonl:1: group 0: its prompt of 300"),
      std::string::npos);
  EXPECT_EQ(run("").size(), 0u);
}

}  // namespace
}  // namespace trireme
