#include "trainer/data/dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <fstream>
#include <limits>
#include <map>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/errors.h"

namespace trireme {
namespace {

using nlohmann::json;
using test::error_of;
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

  // What the loss counts.
  std::string learnt_text(const PromptExample& example) const {
    std::vector<int32_t> learnt;
    for (size_t i = 0; i < example.response.size(); ++i) {
      if (example.response_mask[i] != 0) learnt.push_back(example.response[i]);
    }
    return tokenizer_->decode(learnt, false);
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
  EXPECT_THAT(open_error(raw(write("x.zst", "\x28\xB5\x2F\xFDmore"))), HasSubstr("x.zst is"));
  EXPECT_THAT(open_error(raw(write("x.jsonl.zst", "plain text"))), HasSubstr("is not a zstd file"));
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
  EXPECT_EQ(stream.next().prompt.size(), size_t{1} << 20);
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
    EXPECT_EQ(a.prompt, b.prompt);
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

TEST_F(DatasetTest, Zstd) {
  const std::string text = rows(5000);
  const auto packed = [](const std::string& plain) {
    std::string out(ZSTD_compressBound(plain.size()), '\0');
    out.resize(ZSTD_compress(out.data(), out.size(), plain.data(), plain.size(), 3));
    return out;
  };
  // Two frames one after the other are one file.
  const std::string whole = packed(text.substr(0, 1000)) + packed(text.substr(1000));
  PromptStream stream(raw(write("d.jsonl.zst", whole)), tokenizer_);
  ASSERT_EQ(stream.size(), 5000);
  EXPECT_EQ(stream.take(5000).back().gold, "4999");
  for (const size_t keep : {size_t{5}, whole.size() / 2, whole.size() - 1}) {
    EXPECT_THAT(open_error(raw(write("cut.jsonl.zst", whole.substr(0, keep)))), HasSubstr("cut.jsonl.zst is truncated"))
        << keep;
  }
  EXPECT_THAT(open_error(raw(write("tail.jsonl.zst", whole + "trailing"))), HasSubstr("tail.jsonl.zst is damaged"));
}

TEST_F(DatasetTest, JsonArray) {
  const json rows = json::parse(R"([{"input": "a ] } \"b\\", "output": "1"}, {"input": "ü, [", "output": "2",
    "list": [1, [2], {"x": "]"}]},   {"input": "last", "output": "3"}])");
  for (const std::string& text : {rows.dump(), "\xEF\xBB\xBF \n" + rows.dump(4) + "\n\n", gzip(rows.dump(2))}) {
    PromptStream stream(raw(write("d.json", text)), tokenizer_);
    ASSERT_EQ(stream.size(), 3);
    for (size_t k = 0; k < 3; ++k) {
      const PromptExample example = stream.next();
      EXPECT_EQ(example.prompt_text, rows[k]["input"]);
      EXPECT_EQ(example.gold, rows[k]["output"]);
      EXPECT_EQ(example.index, static_cast<int64_t>(k));
    }
  }
  const auto error = [&](const std::string& text) { return open_error(raw(write("w.json", text))); };
  EXPECT_THAT(error(R"([{"input": "a", "output": "1"})"), HasSubstr("w.json is truncated: its array has no end"));
  EXPECT_THAT(error(R"([{"input": "a", "output": "1"}, 7])"), HasSubstr("w.json element 2: "));
  EXPECT_THAT(error(R"([{"input": "a", "output": "1"},, 7])"), HasSubstr("nothing between two commas"));
  EXPECT_THAT(error(R"([{"input": "a", "output": "1"}] {})"), HasSubstr("text after the end of the array"));
  EXPECT_THAT(error("[{\"input\": \"a\nb\", \"output\": \"1\"}]"), HasSubstr("element 1: a text has a line feed"));
  EXPECT_THAT(error("[]"), HasSubstr("is empty"));
}

TEST_F(DatasetTest, ShardsAreOneDataSet) {
  const std::string text = rows(30);
  const size_t cut = text.find("q12") - 10;
  DataOptions whole = raw(write("whole.jsonl", text));
  DataOptions shards = raw("");
  shards.sources = {{{write("a.jsonl", text.substr(0, cut)), write("b.jsonl.gz", gzip(text.substr(cut)))}, "", "", 0}};
  for (DataOptions* options : {&whole, &shards}) {
    options->shuffle = true;
    options->split_validation_size = 7;
    options->split = DataOptions::Split::kTrain;
  }
  PromptStream one(whole, tokenizer_);
  PromptStream two(shards, tokenizer_);
  ASSERT_EQ(two.size(), 23);
  for (int k = 0; k < 60; ++k) {
    const PromptExample a = one.next();
    const PromptExample b = two.next();
    EXPECT_EQ(a.prompt_text, b.prompt_text);
    EXPECT_EQ(a.index, b.index);
  }
  EXPECT_EQ(one.state(), two.state());
  shards.sources[0].files.push_back(write("c.jsonl", R"({"question": "x", "answer": "#### 1"})"));
  EXPECT_THAT(open_error(shards), HasSubstr("c.jsonl has the columns \"question\" and \"answer\""));
}

TEST_F(DatasetTest, MixturesFollowTheirWeights) {
  DataOptions options = raw("");
  options.shuffle = true;
  options.sources = {{{write("a.jsonl", rows(100))}, "", "", 3},
                     {{write("b.jsonl", R"({"question": "x", "answer": "#### 1"})")}, "", "", 1}};
  PromptStream stream(options, tokenizer_);
  EXPECT_EQ(stream.size(), 101);
  std::vector<std::string> drawn;
  std::set<std::string> of_a;
  int64_t of_b = 0;
  for (int k = 1; k <= 400; ++k) {
    drawn.push_back(stream.next().prompt_text);
    of_b += drawn.back() == "x";
    if (k <= 133 && drawn.back() != "x") of_a.insert(drawn.back());
    EXPECT_LE(std::abs(static_cast<double>(of_b) - k / 4.0), 1.0) << k;
  }
  EXPECT_EQ(of_a.size(), 100U);  // the first 100 of the larger source are all of it
  // A stream that goes on from a saved state draws the same.
  PromptStream first(options, tokenizer_);
  first.take(250);
  PromptStream second(options, tokenizer_);
  second.restore(first.state());
  for (size_t k = 250; k < 400; ++k) EXPECT_EQ(second.next().prompt_text, drawn[k]);
  options.sources[1].weight = 2;
  PromptStream other(options, tokenizer_);
  EXPECT_THROW(other.restore(first.state()), Error);
  options.sources[1].weight = 0;
  EXPECT_THAT(open_error(options), HasSubstr("give all of them one"));
}

TEST_F(DatasetTest, ANodeReadsAFileOnce) {
  const std::string path = write("d.jsonl.gz", gzip(rows(50) + "broken\n" + rows(3)));
  RowFile::Options options;
  options.scratch_dir = dir_.path();
  options.max_bad_rows = 1;
  options.shared_as = "same";
  int64_t seen = 0;
  RowFile::Reader reader;
  reader.check = [&](std::string_view line) {
    ++seen;
    parse_json_object(line);
  };
  reader.facts = [&] { return json{"facts"}; };
  const auto folder = [&] { return dir_.path() / ("trireme-" + std::to_string(::geteuid())); };
  {
    const RowFile first(path, options, reader);
    EXPECT_EQ(seen, 54);
    const RowFile second(path, options, reader);
    EXPECT_EQ(seen, 54) << "the second user read the file again";
    EXPECT_EQ(second.size(), 53);
    EXPECT_EQ(second.line(52), first.line(52));
    EXPECT_EQ(second.file_row(52), 53);
    EXPECT_EQ(second.bad_rows(), 1);
    EXPECT_EQ(second.facts(), json{"facts"});
    options.shared_as = "another check";
    const RowFile third(path, options, reader);
    EXPECT_EQ(seen, 108);
    std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() + std::chrono::seconds(9));
    const RowFile fourth(path, options, reader);
    EXPECT_EQ(seen, 162) << "a file that was written to has an index of its own";
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder())) << "the last user removes everything";
  options.max_bad_rows = 0;
  EXPECT_THROW(RowFile(path, options, reader), Error);
  EXPECT_TRUE(std::filesystem::is_empty(folder())) << "a file that is refused leaves nothing";
}

TEST_F(DatasetTest, ManyProcessesShareAnIndexAndKilledOnesLeaveNothing) {
  const std::string path = write("d.jsonl.gz", gzip(rows(2000)));
  RowFile::Options options;
  options.scratch_dir = dir_.path();
  options.shared_as = "same";
  RowFile::Reader reader;
  reader.check = [](std::string_view) {};
  const auto log = dir_.path() / "builders";
  reader.facts = [&] {  // once for each process that reads the file
    std::ofstream(log, std::ios::app) << "x";
    return json{};
  };
  int opened[2], go[2];  // a byte of each that has it open, or never will; the end, when all may leave
  ASSERT_EQ(::pipe(opened) + ::pipe(go), 0);
  std::vector<pid_t> children;
  for (int child = 0; child < 8; ++child) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      ::close(go[1]);
      int code = 1;
      char byte = 'x';
      try {
        const RowFile file(path, options, reader);
        code = file.size() == 2000 && file.line(1999).find("q1999") != std::string::npos ? 0 : 2;
        if (::write(opened[1], &byte, 1) != 1 || ::read(go[0], &byte, 1) != 0) code = 3;
        if (child == 7) ::raise(SIGKILL);
      } catch (...) {
        if (::write(opened[1], &byte, 1) != 1) code = 4;
      }
      ::_exit(code);
    }
    children.push_back(pid);
  }
  for (size_t k = 0; k < children.size(); ++k) {
    pollfd ready{opened[0], POLLIN, 0};
    char byte;
    ASSERT_EQ(::poll(&ready, 1, 120000), 1) << k << " of them have opened it";
    EXPECT_EQ(::read(opened[0], &byte, 1), 1);
  }
  for (const int fd : {opened[0], opened[1], go[0], go[1]}) ::close(fd);
  for (size_t k = 0; k < children.size(); ++k) {
    int status = 0;
    ASSERT_EQ(::waitpid(children[k], &status, 0), children[k]);
    if (k < 7) {
      EXPECT_EQ(status, 0) << k;
    }
  }
  EXPECT_LE(read_file(log).size(), 3U) << "eight processes, and nearly each read the file";
  // What the killed one holds open goes with it; another file's user sweeps its names up if it was the last.
  const RowFile other(write("e.jsonl.gz", gzip(rows(2))), options, reader);
  size_t locks = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(dir_.path() / ("trireme-" + std::to_string(::geteuid()))))
    locks += entry.path().extension() == ".lock";
  EXPECT_EQ(locks, 1U);
}

TEST_F(DatasetTest, AFolderOfSomebodyElsesIsNotUsed) {
  const auto folder = dir_.path() / ("trireme-" + std::to_string(::geteuid()));
  std::filesystem::create_directory(folder);
  std::filesystem::permissions(folder, std::filesystem::perms::all);
  EXPECT_THROW(IndexStore(dir_.path()), Error);
  DataOptions options = raw(write("d.jsonl", rows(2)));
  options.scratch_dir = dir_.path();
  options.shared_as = "same";
  EXPECT_EQ(Dataset::open(options, tokenizer_)->size(), 2);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
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
  EXPECT_EQ(examples[1].extra, json::parse(R"({"answer": "2", "level": 1, "weight": 0.25, "hard": true, )"
                                           R"("tags": ["a", "t1"], "source": {"name": "made", "page": 1}})"));
  EXPECT_TRUE(examples[3].extra["tags"].is_null());

  DataOptions chats = raw((kFixtures / "chats.parquet").string());
  chats.apply_chat_template = true;
  const PromptExample chat = PromptStream(chats, tokenizer_).next();
  EXPECT_EQ(chat.prompt_text, "<|im_start|>user\nquestion 0<|im_end|>\n<|im_start|>assistant\n");
  EXPECT_EQ(chat.gold, "answer 0");

  DataOptions nested = raw((kFixtures / "numbers_snappy.parquet").string());
  nested.input_key = "problem";
  nested.output_key = "source.page";
  nested.system_key = "tags[1]";
  EXPECT_THAT(open_error(nested), HasSubstr("row 4: \"tags\" has no element 1"));  // its list is null
  nested.max_bad_lines = 1;
  const auto paths = PromptStream(nested, tokenizer_).take(4);
  EXPECT_EQ(paths[3].prompt_text, "t4\n\nWhat is 4 + 4? ü4");
  EXPECT_EQ(paths[3].gold, "4");
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

TEST_F(DatasetTest, ChangedFileIsNoticed) {
  const std::string path = write("d.jsonl", rows(3));
  PromptStream stream(raw(path), tokenizer_);
  stream.next();
  std::ofstream(path, std::ios::app) << "{}\n";
  EXPECT_THAT(error_of([&] { stream.next(); }), HasSubstr("d.jsonl changed while it was in use"));
}

}  // namespace
}  // namespace trireme
