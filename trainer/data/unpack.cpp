#include "trainer/data/unpack.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/host.h"
#include "base/text.h"
#include "rust_bridge.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

constexpr size_t kChunkBytes = size_t{1} << 20;

struct Descriptor {
  int fd = -1;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

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

// Frames of zstd, one after the other.
class ZstdReader final {
 public:
  explicit ZstdReader(const fs::path& path) : path_(path), stream_(ZSTD_createDStream(), ZSTD_freeDStream) {
    if (!stream_) fail_internal("zstd cannot start");
    // A frame may ask for a window of up to 2 GiB; 128 MiB is what `zstd --ultra` writes without --long.
    ZSTD_DCtx_setParameter(stream_.get(), ZSTD_d_windowLogMax, 27);
  }

  void feed(const char* input, size_t size, const std::function<void(std::string_view)>& sink) {
    ZSTD_inBuffer in{input, size, 0};
    bool full = false;
    while (in.pos < in.size || (full && left_ != 0)) {
      ZSTD_outBuffer out{output_.data(), output_.size(), 0};
      left_ = ZSTD_decompressStream(stream_.get(), &out, &in);
      if (ZSTD_isError(left_)) {
        fail_data(path_.string() + " is damaged: zstd data near byte " +
                  std::to_string(consumed_ + static_cast<int64_t>(in.pos)) + ": " + ZSTD_getErrorName(left_));
      }
      if (out.pos > 0) sink({output_.data(), out.pos});
      full = out.pos == out.size;
    }
    consumed_ += static_cast<int64_t>(size);
  }
  void finish() const {
    if (left_ != 0) {
      fail_data(path_.string() + " is truncated: the zstd data ends after " + std::to_string(consumed_) +
                " bytes in the middle of a frame");
    }
  }

 private:
  const fs::path& path_;
  std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> stream_;
  std::string output_ = std::string(kChunkBytes, '\0');
  int64_t consumed_ = 0;
  size_t left_ = 1;  // 0: a frame ended here
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

// The first character of the file's text, a byte-order mark and blanks left out; 0 for none in the first chunk.
char first_character(int fd, const fs::path& path) {
  std::string buffer(1 << 16, '\0');
  std::string_view text(buffer.data(), read_some(fd, buffer.data(), buffer.size(), path));
  if (starts_with(text, "\xEF\xBB\xBF")) text.remove_prefix(3);
  const size_t at = text.find_first_not_of(" \t\r\n");
  return at == std::string_view::npos ? '\0' : text[at];
}

}  // namespace

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
  if (starts_with(start, "\x1f\x8b")) return FileKind::kGzip;
  if (extension == ".gz" && got > 0) fail_data(path.string() + " is not a gzip file");
  if (start == "\x28\xB5\x2F\xFD") return FileKind::kZstd;
  if (extension == ".zst" && got > 0) fail_data(path.string() + " is not a zstd file");
  if (::lseek(file.fd, 0, SEEK_SET) != 0) fail_io("cannot read " + path.string() + ": " + errno_text());
  return first_character(file.fd, path) == '[' ? FileKind::kJsonArray : FileKind::kLines;
}

RowWord read_as_lines(const fs::path& path, FileKind kind, const std::function<void(std::string_view)>& sink) {
  if (kind == FileKind::kParquet) {
    read_parquet(path, sink);
    return RowWord::kRow;
  }
  Descriptor file{open_for_reading(path)};
  std::string buffer(kChunkBytes, '\0');
  const auto read_all = [&](const auto& each) {
    while (const size_t got = read_some(file.fd, buffer.data(), buffer.size(), path)) each(buffer.data(), got);
  };
  if (kind == FileKind::kLines) {
    read_all([&](char* data, size_t size) { sink({data, size}); });
    return RowWord::kLine;
  }
  ArrayLines lines(path, sink);
  const auto text = [&](std::string_view chunk) { lines.feed(chunk); };
  if (kind == FileKind::kGzip) {
    Inflater inflater(path);
    read_all([&](char* data, size_t size) { inflater.feed(data, size, text); });
    inflater.finish();
  } else if (kind == FileKind::kZstd) {
    ZstdReader reader(path);
    read_all([&](char* data, size_t size) { reader.feed(data, size, text); });
    reader.finish();
  } else {
    read_all([&](char* data, size_t size) { text({data, size}); });
  }
  lines.finish();
  return lines.is_array() ? RowWord::kElement : RowWord::kLine;
}

void ArrayLines::feed(std::string_view chunk) {
  if (state_ == State::kStart) {
    held_ += chunk;
    std::string_view text = held_;
    if (starts_with(text, "\xEF\xBB\xBF")) text.remove_prefix(3);
    const size_t at = text.find_first_not_of(" \t\r\n");
    if (at == std::string_view::npos && held_.size() < kChunkBytes) return;
    const bool array = at != std::string_view::npos && text[at] == '[';
    const std::string begun = std::exchange(held_, {});
    if (!array) {
      state_ = State::kPlain;
      return sink_(begun);
    }
    state_ = State::kElement;
    const size_t skip = begun.find('[') + 1;
    return feed(std::string_view(begun).substr(skip));
  }
  if (state_ == State::kPlain) return sink_(chunk);
  for (const char c : chunk) take(c);
  if (!held_.empty()) sink_(held_);
  held_.clear();
}

void ArrayLines::take(char c) {
  const bool blank = c == ' ' || c == '\t' || c == '\r' || c == '\n';
  if (state_ == State::kAfter) {
    if (!blank) fail_data(path_.string() + ": there is text after the end of the array");
    return;
  }
  if (in_text_) {
    if (c == '\n') {
      fail_data(path_.string() + " element " + std::to_string(elements_ + 1) + ": a text has a line feed in it");
    }
    held_ += c;
    in_text_ = escaped_ || c != '"';
    escaped_ = !escaped_ && c == '\\';
    return;
  }
  if (depth_ == 0 && (c == ',' || c == ']')) return end_element(c);
  if (blank) {
    if (!empty_) held_ += ' ';
    return;
  }
  empty_ = false;
  if (c == '[' || c == '{') ++depth_;
  if ((c == ']' || c == '}') && depth_ > 0) --depth_;
  in_text_ = c == '"';
  held_ += c;
}

void ArrayLines::end_element(char by) {
  const bool empty_array = by == ']' && elements_ == 0 && empty_;
  if (empty_ && !empty_array)
    fail_data(path_.string() + " element " + std::to_string(elements_ + 1) + ": there is nothing between two commas");
  if (!empty_array) {
    held_ += '\n';
    ++elements_;
  }
  empty_ = true;
  if (by == ']') state_ = State::kAfter;
}

void ArrayLines::finish() {
  if (state_ == State::kStart && !held_.empty()) sink_(held_);
  if (state_ == State::kElement)
    fail_data(path_.string() + " is truncated: its array has no end after element " + std::to_string(elements_));
}

}  // namespace trireme
