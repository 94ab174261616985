// Prompts and their order.
#include <gmock/gmock.h>

#include <limits>
#include <map>
#include <set>

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

TEST_F(DatasetTest, ReadsPromptsAndGold) {
  const std::string path = write("d.jsonl",
                                 "\xEF\xBB\xBF{\"question\": \"2+2?\", \"answer\": \"2+2=4\\n#### 4\", \"id\": "
                                 "\"x\"}\r\n\r\n{\"question\": \"ü\", \"answer\": \"5\"}");
  PromptStream stream(raw(path), tokenizer_);
  EXPECT_EQ(stream.size(), 2);
  const PromptExample first = stream.next();
  EXPECT_EQ(first.prompt_text, "2+2?");
  EXPECT_THAT(first.prompt, ElementsAre('2', '+', '2', '?'));
  EXPECT_EQ(first.gold, "4");
  EXPECT_EQ(first.extra["id"], "x");
  EXPECT_EQ(first.index, 0);
  EXPECT_TRUE(first.response.empty());
  const PromptExample second = stream.next();
  EXPECT_EQ(second.prompt_text, "ü");
  EXPECT_EQ(second.index, 2);  // the blank line counts
  EXPECT_EQ(stream.epoch(), 1);
}

TEST_F(DatasetTest, PromptAndSystemFiles) {
  DataOptions options = raw(write("d.jsonl", rows(1)));
  options.prompt_file = write("prompt.txt", "Solve {} in \\boxed{{}}");
  options.system_prompt_file = write("system.txt", "Be brief.");
  EXPECT_EQ(PromptStream(options, tokenizer_).next().prompt_text, "Be brief.\n\nSolve q0 in \\boxed{}");
  options.apply_chat_template = true;
  EXPECT_EQ(PromptStream(options, tokenizer_).next().prompt_text,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSolve q0 in "
            "\\boxed{}<|im_end|>\n<|im_start|>assistant\n");
  options.prompt_file = write("prompt.txt", "nothing");
  EXPECT_THAT(open_error(options), HasSubstr("prompt.txt has no {}"));
  options.prompt_file = (dir_.path() / "missing.txt").string();
  EXPECT_THAT(open_error(options), HasSubstr("missing.txt"));
}

TEST_F(DatasetTest, TemplateVariables) {
  DataOptions options =
      raw(write("d.jsonl", R"({"messages": [{"role": "user", "content": "hi"}], "tools": [{"z": 1, "a": 2}]})"));
  options.apply_chat_template = true;
  options.chat_template_kwargs = {{"mood", "calm"}};
  tokenizer_ = Tokenizer::load(dir_.path() / "model", "{{ messages[0].content }} {{ mood }} {{ tools | tojson }}");
  EXPECT_EQ(PromptStream(options, tokenizer_).next().prompt_text, R"(hi calm [{"z": 1, "a": 2}])");
}

TEST_F(DatasetTest, LongPromptsAreSkippedOrRefused) {
  std::string text;
  for (const char* input : {"short", "this one is much too long", "brief", "again far too long to fit"})
    text += json{{"input", input}, {"output", "1"}}.dump() + "\n";
  DataOptions options = raw(write("d.jsonl", text));
  options.max_input_seq_length = 5;
  PromptStream stream(options, tokenizer_);
  EXPECT_THAT(indices(&stream, 3), ElementsAre(0, 2, 0));
  EXPECT_EQ(stream.skipped_long(), 2);
  PromptStream once(options, tokenizer_);
  int seen = 0;
  while (once.next_in_epoch()) ++seen;
  EXPECT_EQ(seen, 2);
  EXPECT_EQ(once.epoch(), 1);
  EXPECT_TRUE(once.next_in_epoch().has_value());
  options.max_input_seq_length = 2;
  EXPECT_THAT(error_of([&] { PromptStream(options, tokenizer_).next(); }), HasSubstr("none of the 4 prompts"));
  options.max_input_seq_length = 5;
  options.fail_on_long_prompt = true;
  PromptStream strict(options, tokenizer_);
  strict.next();
  EXPECT_THAT(error_of([&] { strict.next(); }),
              HasSubstr("d.jsonl line 2: the prompt has 25 tokens, more than data.max_input_seq_length=5"));
}

TEST_F(DatasetTest, APromptThatLeavesNoRoomForAnAnswerIsTooLong) {
  std::string text;
  for (const char* input : {"1234", "12345", "123456", "1"})
    text += json{{"input", input}, {"output", "1"}}.dump() + "\n";
  DataOptions options = raw(write("d.jsonl", text));
  options.max_total_length = 5;
  options.max_input_seq_length = 5;
  PromptStream stream(options, tokenizer_);
  EXPECT_THAT(indices(&stream, 3), ElementsAre(0, 3, 0));
  EXPECT_EQ(stream.skipped_long(), 2);
  options.fail_on_long_prompt = true;
  PromptStream strict(options, tokenizer_);
  strict.next();
  EXPECT_THAT(error_of([&] { strict.next(); }),
              HasSubstr("the prompt has 5 tokens, which leaves none for a response in "
                        "policy.max_total_sequence_length=5"));
}

TEST_F(DatasetTest, EachEpochHasEveryRowOnceInAnotherOrder) {
  DataOptions options = raw(write("d.jsonl", rows(57)));
  options.shuffle = true;
  PromptStream stream(options, tokenizer_);
  const auto first = indices(&stream, 57);
  EXPECT_EQ(stream.epoch(), 1);
  const auto second = indices(&stream, 57);
  EXPECT_EQ(std::set<int64_t>(first.begin(), first.end()).size(), 57u);
  EXPECT_EQ(std::set<int64_t>(second.begin(), second.end()).size(), 57u);
  EXPECT_NE(first, second);
  EXPECT_FALSE(std::is_sorted(first.begin(), first.end()));
  PromptStream again(options, tokenizer_);
  EXPECT_EQ(indices(&again, 57), first);
  options.seed = 43;
  PromptStream other(options, tokenizer_);
  EXPECT_NE(indices(&other, 57), first);
  options.shuffle = false;
  PromptStream ordered(options, tokenizer_);
  const auto plain = indices(&ordered, 57);
  EXPECT_TRUE(std::is_sorted(plain.begin(), plain.end()));
}

TEST_F(DatasetTest, AnEpochCountsItsWholeBatches) {
  DataOptions options = raw(write("d.jsonl", rows(23)));
  PromptStream stream(options, tokenizer_);
  EXPECT_EQ(stream.rows_of_epochs(1, 10), 20);
  EXPECT_EQ(stream.rows_of_epochs(3, 10), 60) << "not 69, which are nearly seven";
  EXPECT_EQ(stream.rows_of_epochs(3, 23), 69);
  EXPECT_EQ(stream.rows_of_epochs(3, 24), 69) << "no whole batch";
  EXPECT_EQ(stream.rows_of_epochs(std::numeric_limits<int64_t>::max() / 2, 10), std::numeric_limits<int64_t>::max());
  EXPECT_EQ(stream.drawn(), 0);
  stream.take(30);
  EXPECT_EQ(stream.drawn(), 30);
  PromptStream resumed(options, tokenizer_);
  resumed.restore(stream.state());
  EXPECT_EQ(resumed.drawn(), 30);
  options.max_input_seq_length = 2;  // rows 10 to 22 have three tokens
  PromptStream with_long(options, tokenizer_);
  with_long.take(11);
  EXPECT_EQ(with_long.drawn(), 24) << "those that are skipped are rows of the epoch too";
}

TEST_F(DatasetTest, RestoreContinuesExactly) {
  std::string text = rows(20);
  text += json{{"input", std::string(100, 'x')}, {"output", "1"}}.dump() + "\n";
  DataOptions options = raw(write("d.jsonl", text));
  options.shuffle = true;
  options.max_input_seq_length = 50;
  for (int64_t cut = 0; cut <= 45; ++cut) {
    PromptStream whole(options, tokenizer_);
    indices(&whole, cut);
    const std::string state = whole.state().dump();
    PromptStream resumed(options, tokenizer_);
    resumed.restore(json::parse(state));
    EXPECT_EQ(resumed.epoch(), whole.epoch());
    EXPECT_EQ(indices(&resumed, 30), indices(&whole, 30)) << cut;
    EXPECT_EQ(resumed.state(), whole.state());
  }
}

TEST_F(DatasetTest, RestoreRefusesOtherData) {
  DataOptions options = raw(write("d.jsonl", rows(20)));
  options.shuffle = true;
  const json state = PromptStream(options, tokenizer_).state();
  const auto error = [&](const DataOptions& other, const json& from) -> std::string {
    try {
      PromptStream(other, tokenizer_).restore(from);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(error(options, state), "no error");
  DataOptions seed = options;
  seed.seed = 1;
  EXPECT_THAT(error(seed, state), HasSubstr("seed was 42, is 1"));
  DataOptions split = options;
  split.split_validation_size = 5;
  split.split = DataOptions::Split::kTrain;
  EXPECT_THAT(error(split, state), HasSubstr("of other data"));
  EXPECT_THAT(error(raw(write("e.jsonl", rows(21))), state), HasSubstr("e.jsonl"));
  json of_mixture = state;
  of_mixture["data"]["weights"] = {0.5, 0.5};
  EXPECT_THAT(error(options, of_mixture), HasSubstr("weights was [0.5,0.5], is null"));
  json bad = state;
  bad["position"] = 21;
  EXPECT_THAT(error(options, bad), HasSubstr("beyond the 20 rows"));
  EXPECT_THAT(error(options, json::array()), HasSubstr("saved data position"));
  bad["position"] = "x";
  EXPECT_THAT(error(options, bad), HasSubstr("no valid \"position\""));
}

TEST_F(DatasetTest, SplitIsAPartition) {
  DataOptions options = raw(write("d.jsonl", rows(100)));
  const auto all_of = [&](DataOptions::Split split) {
    options.split = split;
    PromptStream stream(options, tokenizer_);
    return indices(&stream, stream.size());
  };
  for (const double size : {0.05, 0.5, 7.0}) {
    options.split_validation_size = size;
    const auto train = all_of(DataOptions::Split::kTrain);
    const auto held = all_of(DataOptions::Split::kValidation);
    EXPECT_EQ(held.size(), size < 1 ? static_cast<size_t>(size * 100) : static_cast<size_t>(size));
    std::set<int64_t> together(train.begin(), train.end());
    together.insert(held.begin(), held.end());
    EXPECT_EQ(together.size(), 100u);
    EXPECT_EQ(train.size() + held.size(), 100u);
    EXPECT_TRUE(std::is_sorted(train.begin(), train.end()));
    EXPECT_TRUE(std::is_sorted(held.begin(), held.end()));
    EXPECT_EQ(all_of(DataOptions::Split::kAll).size(), 100u);
    options.seed = 7;  // the order's seed does not change the split
    EXPECT_EQ(all_of(DataOptions::Split::kValidation), held);
    options.split_seed = 43;
    EXPECT_NE(all_of(DataOptions::Split::kValidation), held);
    options.split_seed = 42;
  }
  options.split_validation_size = 0.023;
  EXPECT_EQ(all_of(DataOptions::Split::kValidation).size(), 3u) << "a share is rounded up, as in NeMo-RL";
  options.split_validation_size = 100;
  EXPECT_THAT(open_error(options), HasSubstr("nothing is left to train on"));
  options.split_validation_size = 0;
  options.split = DataOptions::Split::kValidation;
  EXPECT_THAT(open_error(options), HasSubstr("validation split of"));
}

TEST_F(DatasetTest, RepeatedRowsComeSoOftenInEachEpoch) {
  DataOptions options = raw(write("d.jsonl", rows(10)));
  const std::string plain = PromptStream(options, tokenizer_).state()["data"].dump();
  options.repeat = 3;
  PromptStream stream(options, tokenizer_);
  ASSERT_EQ(stream.size(), 30);
  EXPECT_NE(stream.state()["data"].dump(), plain);
  std::map<int64_t, int> seen;
  for (const int64_t index : indices(&stream, 30)) ++seen[index];
  EXPECT_EQ(seen.size(), 10u);
  for (const auto& [index, times] : seen) EXPECT_EQ(times, 3) << index;
  // Of a split its rows, all of them before the first comes again.
  options.split_validation_size = 4;
  options.split = DataOptions::Split::kValidation;
  const std::shared_ptr<const Dataset> held = Dataset::open(options, tokenizer_);
  ASSERT_EQ(held->size(), 12);
  for (int64_t i = 0; i < 4; ++i) {
    for (const int64_t later : {i + 4, i + 8}) EXPECT_EQ(held->example(later)->index, held->example(i)->index);
    EXPECT_NE(held->example(i)->index, held->example(i + 1)->index);
  }
}

}  // namespace
}  // namespace trireme
