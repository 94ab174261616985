#include "trainer/data/dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <fstream>
#include <set>

#include "base/error.h"
#include "base/fs.h"

namespace trireme {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;

const std::filesystem::path kFixtures = "tests/unit/data";

class DatasetTest : public testing::Test {
 protected:
  DatasetTest() {
    make_byte_tokenizer(dir_.path() / "model");
    tokenizer_ = Tokenizer::load(dir_.path() / "model");
  }

  std::string write(const std::string& name, const std::string& text) const {
    write_file_atomic(dir_.path() / name, text);
    return (dir_.path() / name).string();
  }
  static std::string gzip(const std::string& text) {
    std::string out(compressBound(text.size()) + 64, '\0');
    z_stream stream{};
    EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
    stream.avail_in = static_cast<uInt>(text.size());
    stream.next_out = reinterpret_cast<Bytef*>(out.data());
    stream.avail_out = static_cast<uInt>(out.size());
    EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
    out.resize(stream.total_out);
    deflateEnd(&stream);
    return out;
  }
  // Rows 0..count-1 with input "q<i>" and output "<i>".
  static std::string rows(int count) {
    std::string text;
    for (int i = 0; i < count; ++i)
      text += json{{"input", "q" + std::to_string(i)}, {"output", std::to_string(i)}}.dump() + "\n";
    return text;
  }
  DataOptions raw(const std::string& path) const {
    DataOptions options;
    options.path = path;
    options.apply_chat_template = false;
    options.shuffle = false;
    return options;
  }
  std::string open_error(const DataOptions& options) const {
    try {
      Dataset::open(options, tokenizer_);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  }
  std::vector<int64_t> indices(PromptStream* stream, int64_t count) const {
    std::vector<int64_t> out;
    for (const PromptExample& example : stream->take(count)) out.push_back(example.index);
    return out;
  }

  TemporaryDirectory dir_;
  std::shared_ptr<const Tokenizer> tokenizer_;
};

TEST_F(DatasetTest, ReadsPromptsAndGold) {
  const std::string path = write("d.jsonl",
                                 "\xEF\xBB\xBF{\"question\": \"2+2?\", \"answer\": \"2+2=4\\n#### 4\", \"id\": "
                                 "\"x\"}\r\n\r\n{\"question\": \"ü\", \"answer\": \"5\"}");
  PromptStream stream(raw(path), tokenizer_);
  EXPECT_EQ(stream.size(), 2);
  const PromptExample first = stream.next();
  EXPECT_EQ(first.prompt_text, "2+2?");
  EXPECT_THAT(first.prompt_ids, ElementsAre('2', '+', '2', '?'));
  EXPECT_EQ(first.gold, "4");
  EXPECT_EQ(first.extra["id"], "x");
  EXPECT_EQ(first.index, 0);
  EXPECT_TRUE(first.completion_ids.empty());
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

TEST_F(DatasetTest, BadLinesAreCountedUpToTheLimit) {
  const std::string path = write("d.jsonl",
                                 "{\"input\": \"a\", \"output\": \"1\"}\nnot json\n{\"inputs\": \"b\", \"output\": "
                                 "\"2\"}\n{\"input\": \"c\", \"output\": \"3\"}\n");
  DataOptions options = raw(path);
  EXPECT_THAT(open_error(options), HasSubstr("d.jsonl line 2: not valid JSON at byte"));
  options.max_bad_lines = 1;
  EXPECT_THAT(open_error(options), HasSubstr("d.jsonl line 3: no key \"input\"; did you mean \"inputs\"?; that is bad "
                                             "row 2, data.max_bad_lines is 1; the first was"));
  options.max_bad_lines = 2;
  PromptStream stream(options, tokenizer_);
  EXPECT_EQ(stream.dataset().bad_rows(), 2);
  EXPECT_THAT(indices(&stream, 3), ElementsAre(0, 3, 0));
}

TEST_F(DatasetTest, FilesThatCannotBeUsed) {
  EXPECT_THAT(open_error(raw("")), HasSubstr("no data file is set"));
  EXPECT_THAT(open_error(raw((dir_.path() / "none.jsonl").string())), HasSubstr("none.jsonl: No such file"));
  EXPECT_THAT(open_error(raw(dir_.path().string())), HasSubstr("is a folder"));
  EXPECT_THAT(open_error(raw(write("empty.jsonl", ""))), HasSubstr("empty.jsonl is empty"));
  EXPECT_THAT(open_error(raw(write("blank.jsonl", "\n \n"))), HasSubstr("has no usable row"));
  EXPECT_THAT(open_error(raw(write("other.jsonl", "{\"text\": \"a\"}\n"))), HasSubstr("none of the known layouts"));
  EXPECT_THAT(open_error(raw(write("x.gz", "plain text"))), HasSubstr("is not a gzip file"));
  EXPECT_THAT(open_error(raw(write("x.parquet", "plain text"))), HasSubstr("is not a Parquet file"));
  EXPECT_THAT(open_error(raw(write("x.zst", "\x28\xB5\x2F\xFDmore"))), HasSubstr("compressed with zstd"));
  DataOptions options = raw(write("d.jsonl", rows(2)));
  options.format = "csv";
  EXPECT_THAT(open_error(options), HasSubstr("data format \"csv\" is unknown"));
  options.format = "parquet";
  EXPECT_THAT(open_error(options), HasSubstr("is not a Parquet file"));
}

TEST_F(DatasetTest, HugeLine) {
  const std::string big = "{\"input\": \"" + std::string(1 << 20, 'x') + "\", \"output\": \"1\"}\n";
  PromptStream stream(raw(write("big.jsonl", rows(1) + big + rows(1))), tokenizer_);
  stream.next();
  EXPECT_EQ(stream.next().prompt_ids.size(), size_t{1} << 20);
  DataOptions options = raw(write("toobig.jsonl", rows(1) + "{\"input\": \"" + std::string(kMaxLineBytes, 'x') +
                                                      "\", \"output\": \"1\"}\n" + rows(1)));
  EXPECT_THAT(open_error(options), HasSubstr("line 2: longer than 64.0 MiB"));
  options.max_bad_lines = 1;
  EXPECT_EQ(Dataset::open(options, tokenizer_)->size(), 2);
}

TEST_F(DatasetTest, Gzip) {
  const std::string text = rows(500);
  PromptStream plain(raw(write("d.jsonl", text)), tokenizer_);
  // Two members one after the other are one file.
  PromptStream packed(raw(write("d.jsonl.gz", gzip(text.substr(0, 1000)) + gzip(text.substr(1000)))), tokenizer_);
  ASSERT_EQ(packed.size(), 500);
  for (int i = 0; i < 500; ++i) {
    const PromptExample a = plain.next();
    const PromptExample b = packed.next();
    EXPECT_EQ(a.prompt_ids, b.prompt_ids);
    EXPECT_EQ(a.gold, b.gold);
  }
  const std::string whole = gzip(text);
  for (const size_t keep : {size_t{3}, size_t{12}, whole.size() / 2, whole.size() - 1}) {
    EXPECT_THAT(open_error(raw(write("cut.jsonl.gz", whole.substr(0, keep)))), HasSubstr("cut.jsonl.gz is truncated"))
        << keep;
  }
  std::string damaged = whole;
  damaged[damaged.size() - 6] ^= 1;  // the checksum
  EXPECT_THAT(open_error(raw(write("bad.jsonl.gz", damaged))), HasSubstr("bad.jsonl.gz is damaged"));
  EXPECT_THAT(open_error(raw(write("tail.jsonl.gz", whole + "trailing"))), HasSubstr("tail.jsonl.gz is damaged"));
  DataOptions options = raw(write("d.jsonl.gz", whole));
  options.scratch_dir = dir_.path() / "missing";
  EXPECT_THAT(open_error(options), HasSubstr("cannot create a temporary file in"));
}

TEST_F(DatasetTest, Parquet) {
  for (const char* name : {"numbers_snappy.parquet", "numbers_gzip.parquet", "numbers_lz4.parquet"}) {
    SCOPED_TRACE(name);
    PromptStream stream(raw((kFixtures / name).string()), tokenizer_);
    ASSERT_EQ(stream.size(), 10);
    for (int i = 0; i < 10; ++i) {
      const PromptExample example = stream.next();
      EXPECT_EQ(example.index, i);
      EXPECT_EQ(example.prompt_text,
                "What is " + std::to_string(i) + " + " + std::to_string(i) + "? ü" + std::to_string(i));
      EXPECT_EQ(example.gold, std::to_string(2 * i));
    }
  }
  PromptStream stream(raw((kFixtures / "numbers_snappy.parquet").string()), tokenizer_);
  const auto examples = stream.take(4);
  EXPECT_EQ(
      examples[1].extra,
      json::parse(
          R"({"answer": "2", "level": 1, "weight": 0.25, "hard": true, "tags": ["a", "t1"], "source": {"name": "made", "page": 1}})"));
  EXPECT_TRUE(examples[3].extra["tags"].is_null());

  DataOptions chats = raw((kFixtures / "chats.parquet").string());
  chats.apply_chat_template = true;
  const PromptExample chat = PromptStream(chats, tokenizer_).next();
  EXPECT_EQ(chat.prompt_text, "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(chat.gold, "answer 0");
}

TEST_F(DatasetTest, ParquetThatCannotBeRead) {
  EXPECT_THAT(open_error(raw((kFixtures / "numbers_zstd.parquet").string())),
              HasSubstr("codecs that can be read: none, snappy, gzip, lz4"));
  const std::string bytes = read_file(kFixtures / "numbers_snappy.parquet");
  EXPECT_THAT(open_error(raw(write("cut.parquet", bytes.substr(0, bytes.size() - 20)))), HasSubstr("cannot open"));
  DataOptions options = raw((kFixtures / "numbers_snappy.parquet").string());
  options.input_key = "problems";
  options.output_key = "answer";
  EXPECT_THAT(open_error(options),
              HasSubstr("numbers_snappy.parquet row 1: no key \"problems\"; did you mean \"problem\"?"));
  options.format = "jsonl";
  EXPECT_THAT(open_error(options), HasSubstr("is a Parquet file, but the format asked for is jsonl"));
  // Every damaged byte gives rows or an error with the file's name, never a crash.
  for (size_t at = 4; at < bytes.size(); at += 7) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x55);
    std::ofstream(dir_.path() / "damaged.parquet", std::ios::binary) << damaged;  // quicker than write(), which syncs
    const std::string error = open_error(raw((dir_.path() / "damaged.parquet").string()));
    EXPECT_TRUE(error == "no error" || error.find("damaged.parquet") != std::string::npos) << error;
  }
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
  try {
    PromptStream(options, tokenizer_).next();
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("none of the 4 prompts"));
  }
  options.max_input_seq_length = 5;
  options.fail_on_long_prompt = true;
  PromptStream strict(options, tokenizer_);
  strict.next();
  try {
    strict.next();
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("d.jsonl line 2: the prompt has 25 tokens, more than data.max_input_seq_length=5"));
  }
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
  options.split_validation_size = 100;
  EXPECT_THAT(open_error(options), HasSubstr("nothing is left to train on"));
  options.split_validation_size = 0;
  options.split = DataOptions::Split::kValidation;
  EXPECT_THAT(open_error(options), HasSubstr("validation split of"));
}

TEST_F(DatasetTest, CompletionsOfPairs) {
  DataOptions options = raw(write("d.jsonl", R"({"input": "1+1=", "output": "2"})"));
  options.completions = true;
  const PromptExample example = PromptStream(options, tokenizer_).next();
  EXPECT_THAT(example.prompt_ids, ElementsAre('1', '+', '1', '='));
  EXPECT_THAT(example.completion_ids, ElementsAre('2', kByteImEnd));
  EXPECT_THAT(example.completion_mask, ElementsAre(1, 1));
  options.apply_chat_template = true;
  const PromptExample chat = PromptStream(options, tokenizer_).next();
  EXPECT_EQ(chat.prompt_text, "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_THAT(chat.completion_ids, ElementsAre('2', kByteImEnd));  // not the template's line feed
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

TEST_F(DatasetTest, CompletionsOfConversations) {
  DataOptions options = raw(write(
      "d.jsonl",
      R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})"));
  options.completions = true;
  EXPECT_THAT(open_error(options), HasSubstr("holds conversations, which need the chat template"));
  options.apply_chat_template = true;
  const PromptExample example = PromptStream(options, tokenizer_).next();
  EXPECT_EQ(example.prompt_text, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(tokenizer_->decode(example.completion_ids, false),
            "b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>");
  ASSERT_EQ(example.completion_mask.size(), example.completion_ids.size());
  std::vector<int32_t> learnt;
  for (size_t i = 0; i < example.completion_ids.size(); ++i) {
    if (example.completion_mask[i]) learnt.push_back(example.completion_ids[i]);
  }
  EXPECT_THAT(learnt, ElementsAre('b', kByteImEnd, 'd', kByteImEnd));

  // A template that shows only the last answer whole: the first is not learnt.
  const auto rewriting = Tokenizer::load(dir_.path() / "model",
                                         "{% for m in messages %}{{ m.role[0] }}:{{ m.content if m.role == 'user' or "
                                         "loop.last else '-' }};{% endfor %}{{ 'a:' if add_generation_prompt }}");
  const PromptExample last = PromptStream(options, rewriting).next();
  EXPECT_EQ(last.prompt_text, "u:a;a:-;u:c;a:");
  EXPECT_EQ(rewriting->decode(last.completion_ids, false), "d;<|im_end|>");
  const auto foreign = Tokenizer::load(dir_.path() / "model", "{{ add_generation_prompt }}");
  try {
    PromptStream(options, foreign);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("line 1: the chat template does not render the prompt as the beginning"));
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

TEST_F(DatasetTest, ChangedFileIsNoticed) {
  const std::string path = write("d.jsonl", rows(3));
  PromptStream stream(raw(path), tokenizer_);
  stream.next();
  std::ofstream(path, std::ios::app) << "{}\n";
  try {
    stream.next();
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("d.jsonl changed while it was in use"));
  }
}

}  // namespace
}  // namespace trireme
