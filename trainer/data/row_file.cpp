#include "trainer/data/row_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

size_t read_at(int fd, char* buffer, size_t size, int64_t offset, const fs::path& path) {
  while (true) {
    const ssize_t got = ::pread(fd, buffer, size, offset);
    if (got >= 0) return static_cast<size_t>(got);
    if (errno != EINTR) fail_io("cannot read " + path.string() + ": " + errno_text());
  }
}

void write_all(int fd, std::string_view bytes, const fs::path& path) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail_io("cannot unpack " + path.string() + ": " + errno_text());
    bytes.remove_prefix(static_cast<size_t>(put));
  }
}

std::string place_of(const fs::path& path, RowWord word, int64_t row) {
  const char* const name = word == RowWord::kRow ? " row " : word == RowWord::kElement ? " element " : " line ";
  return path.string() + name + std::to_string(row + 1);
}

// Reads a file from start to end: which rows there are, which of them are good.
class Indexer final {
 public:
  Indexer(const fs::path& path, FileKind kind, const RowFile::Options& options, const RowFile::Reader& reader)
      : path_(path), kind_(kind), options_(options), reader_(reader) {
    if (kind == FileKind::kParquet) word_ = RowWord::kRow;
    if (kind == FileKind::kJsonArray) word_ = RowWord::kElement;
  }

  RowIndex run(int copy_fd) {
    int64_t bytes = 0;
    LineSplitter splitter([&](const LineSplitter::Line& line) { add(line); });
    word_ = read_as_lines(path_, kind_, [&](std::string_view chunk) {
      if (copy_fd >= 0) write_all(copy_fd, chunk, path_);
      bytes += static_cast<int64_t>(chunk.size());
      splitter.feed(chunk);
    });
    splitter.finish();
    if (index_.offsets.empty()) {
      fail_data("data file " + path_.string() + (bytes == 0 ? " is empty" : " has no usable row") +
                (first_reasons_.empty() ? "" : " (" + first_reasons_.front() + ")"));
    }
    index_.offsets.shrink_to_fit();
    index_.facts = {{"bytes", bytes},
                    {"rows", rows_},
                    {"bad", bad_},
                    {"word", static_cast<int>(word_)},
                    {"reader", reader_.facts()}};
    return std::move(index_);
  }

 private:
  void add(const LineSplitter::Line& line) {
    const int64_t row = rows_++;
    if (line.too_long) return reject(row, "longer than " + format_bytes(kMaxLineBytes));
    if (trim(line.text).empty()) {
      index_.skipped.push_back(row);
      return;
    }
    try {
      reader_.check(line.text);
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::kData) throw;
      return reject(row, e.what());
    }
    index_.offsets.push_back(line.offset);
  }

  void reject(int64_t row, const std::string& reason) {
    const std::string message = place_of(path_, word_, row) + ": " + reason;
    ++bad_;
    if (bad_ > options_.max_bad_rows) {
      if (options_.max_bad_rows == 0) fail_data(message + " (data.max_bad_lines is 0)");
      fail_data(message + "; that is bad row " + std::to_string(bad_) + ", data.max_bad_lines is " +
                std::to_string(options_.max_bad_rows) + "; the first was " + first_reasons_.front());
    }
    if (first_reasons_.size() < 5) first_reasons_.push_back(message);
    if (bad_ <= 10) log_warn("data", "skipped " + message);
    index_.skipped.push_back(row);
  }

  const fs::path& path_;
  const FileKind kind_;
  const RowFile::Options& options_;
  const RowFile::Reader& reader_;
  RowWord word_ = RowWord::kLine;
  RowIndex index_;
  std::vector<std::string> first_reasons_;
  int64_t rows_ = 0, bad_ = 0;
};

// A file's content stands under this name as long as nobody writes to it.
std::string key_of(const fs::path& path, const RowFile::Options& options) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) fail_io("cannot read " + path.string() + ": " + errno_text());
  std::error_code ignored;
  const nlohmann::json facts = {fs::absolute(path, ignored).string(),
                                info.st_dev,
                                info.st_ino,
                                info.st_size,
                                info.st_mtim.tv_sec,
                                info.st_mtim.tv_nsec,
                                info.st_ctim.tv_sec,
                                info.st_ctim.tv_nsec,
                                options.format,
                                options.max_bad_rows,
                                options.shared_as};
  const std::string text = facts.dump();
  char name[40];
  std::snprintf(name, sizeof name, "%016llx%016llx", static_cast<unsigned long long>(hash64(text)),
                static_cast<unsigned long long>(hash64(text, 0x9e3779b97f4a7c15ULL)));
  return name;
}

SharedIndex index_of(const fs::path& path, FileKind kind, const RowFile::Options& options,
                     const RowFile::Reader& reader) {
  const bool unpacks = kind != FileKind::kLines;
  const fs::path scratch = options.scratch_dir.empty() ? fs::temp_directory_path() : options.scratch_dir;
  const auto build = [&](int copy_fd) { return Indexer(path, kind, options, reader).run(copy_fd); };
  std::unique_ptr<IndexStore> store;
  if (!options.shared_as.empty()) {
    try {
      store = std::make_unique<IndexStore>(scratch);
    } catch (const Error& error) {
      log_info("data", std::string(error.what()) + ": every rank reads the data files by itself");
    }
  }
  return store ? store->get(key_of(path, options), unpacks, build, options.most_wait)
               : build_alone(scratch, unpacks, build);
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

int64_t nth_outside(std::span<const int64_t> sorted, int64_t n) {
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

RowFile::RowFile(const fs::path& path, const Options& options, const Reader& reader)
    : path_(path), options_(options), kind_(file_kind(path, options.format)) {
  index_ = index_of(path_, kind_, options_, reader);
  word_ = static_cast<RowWord>(index_.facts.at("word").get<int>());
  bytes_ = index_.facts.at("bytes").get<int64_t>();
  file_rows_ = index_.facts.at("rows").get<int64_t>();
  bad_rows_ = index_.facts.at("bad").get<int64_t>();
  facts_ = index_.facts.at("reader");
  fd_ = kind_ == FileKind::kLines ? open_for_reading(path_) : index_.fd;
}

RowFile::~RowFile() {
  if (kind_ == FileKind::kLines && fd_ >= 0) ::close(fd_);
}

std::string RowFile::where(int64_t row) const { return place_of(path_, word_, row); }

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
  int64_t offset = index_.offsets[static_cast<size_t>(i)];
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
