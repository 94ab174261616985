#include "trainer/data/row_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "rust_bridge.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

constexpr size_t kChunkBytes = size_t{1} << 20;

std::string errno_text() { return std::strerror(errno); }

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

int open_for_reading(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0)
    throw Error(errno == ENOENT ? ErrorKind::kNotFound : ErrorKind::kIo,
                "cannot open data file " + path.string() + ": " + errno_text());
  struct stat info {};
  if (::fstat(fd, &info) == 0 && S_ISDIR(info.st_mode)) {
    ::close(fd);
    fail_user("data file " + path.string() + " is a folder");
  }
  return fd;
}

size_t read_some(int fd, char* buffer, size_t size, const fs::path& path) {
  while (true) {
    const ssize_t got = ::read(fd, buffer, size);
    if (got >= 0) return static_cast<size_t>(got);
    if (errno != EINTR) fail_io("cannot read " + path.string() + ": " + errno_text());
  }
}

size_t read_at(int fd, char* buffer, size_t size, int64_t offset, const fs::path& path) {
  while (true) {
    const ssize_t got = ::pread(fd, buffer, size, offset);
    if (got >= 0) return static_cast<size_t>(got);
    if (errno != EINTR) fail_io("cannot read " + path.string() + ": " + errno_text());
  }
}

void write_all(int fd, std::string_view bytes, const fs::path& path, const fs::path& folder) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail_io("cannot unpack " + path.string() + " into " + folder.string() + ": " + errno_text());
    bytes.remove_prefix(static_cast<size_t>(put));
  }
}

// A file that no name leads to: it vanishes with its descriptor, even after a kill.
int open_nameless(const fs::path& folder) {
  std::string name = (folder / "trireme-data-XXXXXX").string();
  const int fd = ::mkostemp(name.data(), O_CLOEXEC);
  if (fd < 0) fail_io("cannot create a temporary file in " + folder.string() + ": " + errno_text());
  ::unlink(name.c_str());
  return fd;
}

class Inflater final {
 public:
  explicit Inflater(const fs::path& path) : path_(path) {
    if (inflateInit2(&stream_, 15 + 16) != Z_OK) fail_internal("zlib cannot start");
  }
  ~Inflater() { inflateEnd(&stream_); }

  void feed(char* input, size_t size, const std::function<void(std::string_view)>& sink) {
    stream_.next_in = reinterpret_cast<Bytef*>(input);
    stream_.avail_in = static_cast<uInt>(size);
    while (stream_.avail_in > 0) {
      if (member_ended_ && !start_next_member()) return;
      const int64_t at = consumed_ + static_cast<int64_t>(size - stream_.avail_in);
      stream_.next_out = reinterpret_cast<Bytef*>(output_.data());
      stream_.avail_out = static_cast<uInt>(output_.size());
      const int code = inflate(&stream_, Z_NO_FLUSH);
      if (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR) {
        fail_data(path_.string() + " is damaged: gzip data near byte " + std::to_string(at) + ": " +
                  (stream_.msg ? stream_.msg : "unreadable"));
      }
      if (const size_t got = output_.size() - stream_.avail_out; got > 0) sink({output_.data(), got});
      member_ended_ = code == Z_STREAM_END;
    }
    consumed_ += static_cast<int64_t>(size);
  }
  void finish() const {
    if (!member_ended_) {
      fail_data(path_.string() + " is truncated: the gzip data ends after " + std::to_string(consumed_) +
                " bytes in the middle of the stream");
    }
  }

 private:
  // Files may be several gzip members one after the other, and padded with zeros.
  bool start_next_member() {
    while (stream_.avail_in > 0 && *stream_.next_in == 0) {
      ++stream_.next_in;
      --stream_.avail_in;
    }
    if (stream_.avail_in == 0) return false;
    inflateReset(&stream_);
    member_ended_ = false;
    return true;
  }

  const fs::path& path_;
  z_stream stream_{};
  std::string output_ = std::string(kChunkBytes, '\0');
  int64_t consumed_ = 0;
  bool member_ended_ = false;
};

std::string bridge_error() {
  size_t length = 0;
  const char* text = rb_last_error(&length);
  return std::string(text, length);
}

void read_parquet(const fs::path& path, const std::function<void(std::string_view)>& sink) {
  const std::string name = path.string();
  const std::unique_ptr<rb_parquet, void (*)(rb_parquet*)> file(rb_parquet_open(name.data(), name.size()),
                                                                rb_parquet_free);
  if (!file) fail_data("cannot open " + name + " as Parquet: " + bridge_error());
  int64_t rows = 0;
  while (true) {
    size_t length = 0;
    char* text = rb_parquet_next(file.get(), 256, kChunkBytes, &length);
    if (!text) {
      fail_data("cannot read " + name + " after row " + std::to_string(rows) + ": " + bridge_error() +
                " (codecs that can be read: none, snappy, gzip, lz4)");
    }
    const std::unique_ptr<char, std::function<void(char*)>> owner(text,
                                                                  [length](char* p) { rb_string_free(p, length); });
    if (length == 0) break;
    rows += std::count(text, text + length, '\n');
    sink({text, length});
  }
  if (rows != rb_parquet_rows(file.get())) {
    fail_data(name + " is damaged: it announces " + std::to_string(rb_parquet_rows(file.get())) + " rows and holds " +
              std::to_string(rows));
  }
}

}  // namespace

void LineSplitter::emit(std::string_view text) {
  int64_t offset = offset_;
  if (offset == 0 && starts_with(text, "\xEF\xBB\xBF")) {
    text.remove_prefix(3);
    offset = 3;
  }
  if (!text.empty() && text.back() == '\r') text.remove_suffix(1);
  sink_({offset, too_long_ ? std::string_view() : text, too_long_});
}

void LineSplitter::feed(std::string_view chunk) {
  while (!chunk.empty()) {
    const size_t end = chunk.find('\n');
    const std::string_view part = chunk.substr(0, end);
    pending_bytes_ += static_cast<int64_t>(part.size());
    too_long_ = too_long_ || static_cast<size_t>(pending_bytes_) > max_line_bytes_;
    if (end == std::string_view::npos) {
      if (too_long_) {
        pending_ = std::string();
      } else {
        pending_ += part;
      }
      return;
    }
    if (pending_.empty()) {
      emit(part);
    } else {
      pending_ += part;
      emit(pending_);
    }
    offset_ += pending_bytes_ + 1;
    pending_.clear();
    pending_bytes_ = 0;
    too_long_ = false;
    chunk.remove_prefix(end + 1);
  }
}

void LineSplitter::finish() {
  if (pending_bytes_ > 0) emit(pending_);
  pending_.clear();
  pending_bytes_ = 0;
}

FileKind file_kind(const fs::path& path, const std::string& format) {
  if (format != "auto" && format != "jsonl" && format != "parquet") {
    fail_user("data format \"" + format + "\" is unknown: auto, jsonl or parquet");
  }
  Descriptor file{open_for_reading(path)};
  char head[4] = {};
  const size_t got = read_some(file.fd, head, sizeof head, path);
  const std::string_view start(head, got);
  const std::string extension = to_lower(path.extension().string());
  if (start == "PAR1") {
    if (format == "jsonl") fail_user(path.string() + " is a Parquet file, but the format asked for is jsonl");
    return FileKind::kParquet;
  }
  if (format == "parquet" || (format == "auto" && extension == ".parquet"))
    fail_data(path.string() + " is not a Parquet file: it does not start with PAR1");
  if (starts_with(start, "\x1f\x8b")) return FileKind::kGzipLines;
  if (extension == ".gz" && got > 0) fail_data(path.string() + " is not a gzip file");
  if (start == "\x28\xB5\x2F\xFD") fail_user(path.string() + " is compressed with zstd: unpack it, or use gzip");
  return FileKind::kLines;
}

void read_as_lines(const fs::path& path, FileKind kind, const std::function<void(std::string_view)>& sink) {
  if (kind == FileKind::kParquet) return read_parquet(path, sink);
  Descriptor file{open_for_reading(path)};
  std::string buffer(kChunkBytes, '\0');
  if (kind == FileKind::kLines) {
    while (const size_t got = read_some(file.fd, buffer.data(), buffer.size(), path)) sink({buffer.data(), got});
    return;
  }
  Inflater inflater(path);
  while (const size_t got = read_some(file.fd, buffer.data(), buffer.size(), path))
    inflater.feed(buffer.data(), got, sink);
  inflater.finish();
}

int64_t nth_outside(const std::vector<int64_t>& sorted, int64_t n) {
  // The answer is n + k, where k entries lie at or before it: the first k with sorted[k] - k > n.
  size_t low = 0;
  size_t high = sorted.size();
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (sorted[middle] - static_cast<int64_t>(middle) > n) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return n + static_cast<int64_t>(low);
}

RowFile::RowFile(const fs::path& path, const Options& options, const std::function<void(std::string_view)>& check)
    : path_(path), options_(options), kind_(file_kind(path, options.format)) {
  try {
    build(check);
  } catch (...) {
    if (fd_ >= 0) ::close(fd_);
    throw;
  }
}

RowFile::~RowFile() {
  if (fd_ >= 0) ::close(fd_);
}

void RowFile::build(const std::function<void(std::string_view)>& check) {
  const bool unpack = kind_ != FileKind::kLines;
  const fs::path scratch = options_.scratch_dir.empty() ? fs::temp_directory_path() : options_.scratch_dir;
  fd_ = unpack ? open_nameless(scratch) : open_for_reading(path_);
  LineSplitter splitter([&](const LineSplitter::Line& line) { add_line(line, check); });
  read_as_lines(path_, kind_, [&](std::string_view chunk) {
    if (unpack) write_all(fd_, chunk, path_, scratch);
    bytes_ += static_cast<int64_t>(chunk.size());
    splitter.feed(chunk);
  });
  splitter.finish();
  if (offsets_.empty()) {
    fail_data("data file " + path_.string() + (bytes_ == 0 ? " is empty" : " has no usable row") +
              (first_reasons_.empty() ? "" : " (" + first_reasons_.front() + ")"));
  }
  offsets_.shrink_to_fit();
}

void RowFile::add_line(const LineSplitter::Line& line, const std::function<void(std::string_view)>& check) {
  const int64_t row = lines_++;
  if (line.too_long) return reject(row, "longer than " + format_bytes(kMaxLineBytes));
  if (trim(line.text).empty()) {
    skipped_.push_back(row);
    return;
  }
  try {
    check(line.text);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kData) throw;
    return reject(row, e.what());
  }
  offsets_.push_back(line.offset);
}

void RowFile::reject(int64_t row, const std::string& reason) {
  const std::string message = where(row) + ": " + reason;
  ++bad_rows_;
  if (bad_rows_ > options_.max_bad_rows) {
    if (options_.max_bad_rows == 0) fail_data(message + " (data.max_bad_lines is 0)");
    fail_data(message + "; that is bad row " + std::to_string(bad_rows_) + ", data.max_bad_lines is " +
              std::to_string(options_.max_bad_rows) + "; the first was " + first_reasons_.front());
  }
  if (first_reasons_.size() < 5) first_reasons_.push_back(message);
  if (bad_rows_ <= 10) log_warn("data", "skipped " + message);
  skipped_.push_back(row);
}

std::string RowFile::where(int64_t row) const {
  return path_.string() + (kind_ == FileKind::kParquet ? " row " : " line ") + std::to_string(row + 1);
}

std::string RowFile::line(int64_t i) const {
  TRIREME_CHECK(i >= 0 && i < size(), "row " + std::to_string(i) + " of " + std::to_string(size()));
  if (kind_ == FileKind::kLines) {
    struct stat now {};
    if (::fstat(fd_, &now) != 0 || now.st_size != bytes_) {
      fail_io("data file " + path_.string() + " changed while it was in use");
    }
  }
  std::string text;
  char buffer[1 << 14];
  int64_t offset = offsets_[static_cast<size_t>(i)];
  while (const size_t got = read_at(fd_, buffer, sizeof buffer, offset, path_)) {
    const std::string_view part(buffer, got);
    const size_t end = part.find('\n');
    text += part.substr(0, end);
    if (end != std::string_view::npos) break;
    offset += static_cast<int64_t>(got);
  }
  if (!text.empty() && text.back() == '\r') text.pop_back();
  return text;
}

}  // namespace trireme
