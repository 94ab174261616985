// RowFile: random access to the rows of a data file (JSON lines or array, plain or packed; Parquet) through an index.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "trainer/data/index_store.h"
#include "trainer/data/unpack.h"

namespace trireme {

inline constexpr size_t kMaxLineBytes = size_t{64} << 20;

// Cuts a stream of bytes into lines. Ends of line are LF or CRLF; a UTF-8 byte-order mark at the start is dropped.
class LineSplitter final {
 public:
  struct Line {
    int64_t offset;         // of the first byte in the stream
    std::string_view text;  // without its end; empty when too_long
    bool too_long;          // longer than kMaxLineBytes
  };
  using Sink = std::function<void(const Line&)>;
  explicit LineSplitter(Sink sink, size_t max_line_bytes = kMaxLineBytes)
      : sink_(std::move(sink)), max_line_bytes_(max_line_bytes) {}
  void feed(std::string_view chunk);
  void finish();  // a last line without an end

 private:
  void emit(std::string_view text);
  Sink sink_;
  size_t max_line_bytes_;
  std::string pending_;        // the start of a line whose end has not come yet
  int64_t pending_bytes_ = 0;  // its length so far, kept or not
  int64_t offset_ = 0;         // of the pending line
  bool too_long_ = false;
};

// The n-th (from 0) natural number that is not in `sorted` (ascending, no repeats).
int64_t nth_outside(std::span<const int64_t> sorted, int64_t n);

// A plain file of lines is read in place. All else has no cheap random access and is unpacked once, into a file that is
// gone when nobody uses it. Index and copy are shared by the processes of a node (index_store.h), so that of all ranks
// and splits one reads the file. Memory: 8 bytes a row and node. Thread-safe once built.
class RowFile final {
 public:
  struct Options {
    std::string format = "auto";
    std::filesystem::path scratch_dir;  // empty: the system's
    int64_t max_bad_rows = 0;
    // Whatever `check` depends on: users that give the same text share an index. Empty: the index is not shared.
    std::string shared_as;
    Milliseconds most_wait{std::chrono::minutes(30)};  // for another process that reads the file
  };
  // What is done with the lines when the file is read; not called when somebody else on the node has read it.
  struct Reader {
    // Sees every line that is not blank and throws Error to call the row bad. Bad rows up to the limit are logged,
    // counted and left out; one more is an Error naming the first ones.
    std::function<void(std::string_view)> check;
    // Asked after the last line; found again by facts().
    std::function<nlohmann::json()> facts = [] { return nlohmann::json(); };
  };
  RowFile(const std::filesystem::path& path, const Options& options, const Reader& reader);
  ~RowFile();
  RowFile(const RowFile&) = delete;
  RowFile& operator=(const RowFile&) = delete;

  int64_t size() const { return static_cast<int64_t>(index_.offsets.size()); }
  // Text of good row i. Throws Error(kIo) when a plain file changed its size since it was indexed.
  std::string line(int64_t i) const;
  // Its place in the file, from 0, blank and bad lines counted.
  int64_t file_row(int64_t i) const { return nth_outside(index_.skipped, i); }
  // "data.jsonl line 12" | "data.json element 12" | "data.parquet row 12"; from 1, `row` from 0.
  std::string where(int64_t row) const;
  const std::filesystem::path& path() const { return path_; }
  int64_t file_rows() const { return file_rows_; }  // blank and bad ones counted
  int64_t bad_rows() const { return bad_rows_; }
  int64_t bytes() const { return bytes_; }  // of the lines, unpacked
  const nlohmann::json& facts() const { return facts_; }

 private:
  std::filesystem::path path_;
  Options options_;
  FileKind kind_;
  SharedIndex index_;
  int fd_ = -1;  // the plain file (owned), or the unpacked copy (the index's)
  RowWord word_ = RowWord::kLine;
  int64_t bytes_ = 0, file_rows_ = 0, bad_rows_ = 0;
  nlohmann::json facts_;
};

}  // namespace trireme
