// A data file as a stream of JSON lines, whatever it is: JSON lines, a JSON array, packed by gzip or zstd, Parquet.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

namespace trireme {

enum class FileKind { kLines, kJsonArray, kGzip, kZstd, kParquet };

// By the file's first bytes; `format` (auto | jsonl | parquet) must agree. Throws Error.
FileKind file_kind(const std::filesystem::path& path, const std::string& format);

// What a row is called in messages: a line, an element of an array, a row of a table.
enum class RowWord { kLine, kElement, kRow };

// Reads the file from start to end and passes its JSON lines on in chunks: packed files unpacked, an array with one
// line an element, a Parquet file with one line a row. Throws Error(kData) for a truncated or damaged file.
RowWord read_as_lines(const std::filesystem::path& path, FileKind kind,
                      const std::function<void(std::string_view)>& sink);

// Turns the elements of a JSON array into lines; text that does not begin with '[' goes through as it is.
class ArrayLines final {
 public:
  using Sink = std::function<void(std::string_view)>;
  ArrayLines(const std::filesystem::path& path, Sink sink) : path_(path), sink_(std::move(sink)) {}
  void feed(std::string_view chunk);
  void finish();
  bool is_array() const { return state_ != State::kStart && state_ != State::kPlain; }

 private:
  enum class State { kStart, kPlain, kElement, kAfter };
  void take(char c);
  void end_element(char by);

  const std::filesystem::path& path_;
  Sink sink_;
  State state_ = State::kStart;
  std::string held_;  // kStart: what came before the first character; later: output that is not passed on yet
  int64_t elements_ = 0;
  int64_t depth_ = 0;  // of brackets inside the element
  bool in_text_ = false, escaped_ = false, empty_ = true;
};

// Files below, with the path in every message. Throw Error.
int open_for_reading(const std::filesystem::path& path);
size_t read_some(int fd, char* buffer, size_t size, const std::filesystem::path& path);

}  // namespace trireme
