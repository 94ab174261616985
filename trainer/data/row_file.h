// RowFile: random access to the rows of a JSONL (plain or gzip) or Parquet file through an index of offsets.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

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

enum class FileKind { kLines, kGzipLines, kParquet };

// By the file's first bytes; `format` (auto | jsonl | parquet) must agree. Throws Error.
FileKind file_kind(const std::filesystem::path& path, const std::string& format);

// Reads the file from start to end and passes its JSON lines on in chunks: a gzip file unpacked, a Parquet file with
// one line a row. Throws Error(kData) for a truncated or damaged file.
void read_as_lines(const std::filesystem::path& path, FileKind kind, const std::function<void(std::string_view)>& sink);

// The n-th (from 0) natural number that is not in `sorted` (ascending, no repeats).
int64_t nth_outside(const std::vector<int64_t>& sorted, int64_t n);

// A plain file is read in place. Gzip and Parquet files have no cheap random access, so they are unpacked once into a
// nameless temporary file (gone when the process is). Memory: 8 bytes a row. Thread-safe once built.
class RowFile final {
 public:
  struct Options {
    std::string format = "auto";
    std::filesystem::path scratch_dir;  // empty: the system's
    int64_t max_bad_rows = 0;
  };
  // `check` sees every line that is not blank and throws Error to call the row bad. Bad rows up to the limit are
  // logged, counted and left out; one more is an Error naming the first ones.
  RowFile(const std::filesystem::path& path, const Options& options,
          const std::function<void(std::string_view)>& check);
  ~RowFile();
  RowFile(const RowFile&) = delete;
  RowFile& operator=(const RowFile&) = delete;

  int64_t size() const { return static_cast<int64_t>(offsets_.size()); }
  // Text of good row i. Throws Error(kIo) when a plain file changed its size since it was indexed.
  std::string line(int64_t i) const;
  // Its place in the file, from 0, blank and bad lines counted.
  int64_t file_row(int64_t i) const { return nth_outside(skipped_, i); }
  // "data.jsonl line 12" | "data.parquet row 12"; from 1, `row` from 0.
  std::string where(int64_t row) const;
  int64_t bad_rows() const { return bad_rows_; }
  int64_t bytes() const { return bytes_; }  // of the lines, unpacked

 private:
  void build(const std::function<void(std::string_view)>& check);
  void add_line(const LineSplitter::Line& line, const std::function<void(std::string_view)>& check);
  void reject(int64_t row, const std::string& reason);

  std::filesystem::path path_;
  Options options_;
  FileKind kind_;
  int fd_ = -1;  // the plain file, or the unpacked copy
  int64_t bytes_ = 0;
  int64_t lines_ = 0;
  int64_t bad_rows_ = 0;
  std::vector<std::string> first_reasons_;
  std::vector<int64_t> skipped_;  // rows of the file that are not in the index, ascending
  std::vector<int64_t> offsets_;  // of the good rows in fd_
};

}  // namespace trireme
