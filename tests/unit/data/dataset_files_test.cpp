// Files of rows: formats, shards, mixtures, the index that a node shares, and files that cannot be used.
#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <filesystem>
#include <fstream>
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

const std::filesystem::path kFixtures = "tests/unit/data";

std::string gzip(const std::string& text) {
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

TEST_F(DatasetTest, ChangedFileIsNoticed) {
  const std::string path = write("d.jsonl", rows(3));
  PromptStream stream(raw(path), tokenizer_);
  stream.next();
  std::ofstream(path, std::ios::app) << "{}\n";
  EXPECT_THAT(error_of([&] { stream.next(); }), HasSubstr("d.jsonl changed while it was in use"));
}

}  // namespace
}  // namespace trireme
