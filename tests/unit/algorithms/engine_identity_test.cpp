// What an engine is refused for: the first thing that is another one than the actor's, by its key or file.
#include "trainer/algorithms/engine_identity.h"

#include <gtest/gtest.h>

#include "base/fs.h"
#include "tests/unit/errors.h"
#include "tests/unit/model/tiny.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

// An actor, and engines beside it.
class EngineIdentity : public ::testing::Test {
 protected:
  EngineIdentity() : config_(load_config_text("", {"policy.model_name=" + model().string()})) {
    for (const fs::path& dir : {model(), model("other")}) {
      fs::create_directories(dir);
      write_file_atomic(dir / "tokenizer.json", "{}\n");
      write_file_atomic(dir / "tokenizer_config.json", "{\"a\": 1}\n");
    }
  }

  fs::path model(const std::string& name = "model") const { return dir_.path() / name; }
  JoinRequest identity(const ModelConfig& shape, const std::string& folder = "model") const {
    JoinRequest request = identity_of(config_, shape, model(folder), dir_.path());
    request.name = "odd";
    return request;
  }
  std::string difference(const JoinRequest& engine) const {
    return difference_of_engine(identity(shape_), config_, engine).value_or("none");
  }

  const TemporaryDirectory dir_;
  const Config config_;
  const ModelConfig shape_ = test::tiny_config({});
};

TEST_F(EngineIdentity, WhatGeneratesTheSameMayJoin) {
  EXPECT_EQ(difference(identity(shape_)), "none");
  EXPECT_EQ(difference(identity(shape_, "other")), "none") << "equal files in another folder";
  JoinRequest engine = identity(shape_);
  engine.config = to_yaml(
      load_config_text("", {"policy.model_name=" + model().string(), "policy.generation.max_running_samples=3"}));
  EXPECT_EQ(difference(engine), "none") << "another machine has other places";
}

TEST_F(EngineIdentity, AnotherProgramOrSettingIsNamed) {
  JoinRequest engine = identity(shape_);
  engine.program += "1";
  EXPECT_EQ(difference(engine), "runs another program than the actor, of another version or build");
  engine = identity(shape_);
  engine.config = to_yaml(load_config_text("", {"policy.model_name=" + model().string(), "grpo.seed=7"}));
  EXPECT_EQ(difference(engine), "has other settings than the actor: grpo.seed is " + std::to_string(config_.grpo.seed) +
                                    " there and 7 here");
  engine.config = "grpo: {sead: 7}\n";
  EXPECT_MENTIONS(test::user_error_of([&] { (void)difference(engine); }), "the configuration of engine odd");
}

TEST_F(EngineIdentity, TheFirstKeyOfAnotherModelIsNamed) {
  ModelConfig other = shape_;
  other.rms_norm_eps = 0.5;
  other.rope.theta = 77;
  const std::string found = difference(identity(other));
  EXPECT_EQ(found.find("has another model than the actor: rms_norm_eps is "), 0u) << found;
  EXPECT_MENTIONS(found, " there and 0.5 here");
  EXPECT_LT(found.size(), 120u) << "no whole configuration";
  other = shape_;
  other.rope.theta = 77;
  EXPECT_MENTIONS(difference(identity(other)), "rope_parameters.rope_theta is ");
  EXPECT_MENTIONS(difference(identity(shape_.with_value_head())), "architectures is [");
}

TEST_F(EngineIdentity, TheFileOfAnotherTokenizerIsNamed) {
  write_file_atomic(model("other") / "tokenizer_config.json", "{\"a\": 2}\n");
  EXPECT_EQ(difference(identity(shape_, "other")),
            "has another tokenizer than the actor: its tokenizer_config.json is another one");
  fs::remove(model("other") / "tokenizer_config.json");
  EXPECT_EQ(difference(identity(shape_, "other")),
            "has another tokenizer than the actor: it has no tokenizer_config.json");
  write_file_atomic(model("other") / "tokenizer_config.json", "{\"a\": 1}\n");
  write_file_atomic(model("other") / "chat_template.jinja", "{{ messages }}");
  EXPECT_EQ(difference(identity(shape_, "other")),
            "has another tokenizer than the actor, which has no chat_template.jinja");
}

TEST_F(EngineIdentity, AnyTextIsAnAnswerAndNoCrash) {
  for (const std::string& text :
       {std::string("not JSON"), std::string("[1]"), std::string(), std::string(100000, '[') + std::string(100000, ']'),
        "{\"hidden_size\": \"" + std::string(5000, 'x') + "\"}"}) {
    JoinRequest engine = identity(shape_);
    engine.model = text;
    EXPECT_EQ(difference(engine).find("has another model than the actor"), 0u);
    EXPECT_LT(difference(engine).size(), 300u);
    engine = identity(shape_);
    engine.tokenizer = text;
    EXPECT_EQ(difference(engine).find("has another tokenizer than the actor"), 0u);
  }
}

}  // namespace
}  // namespace trireme
