// WatchLines: cuts a byte stream into lines. Chunk borders may fall anywhere; a line has a maximum size.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace trireme::kube {

class WatchLines final {
 public:
  // Events are at most about 1.5 MB (etcd's limit) plus managed fields; the default leaves room.
  explicit WatchLines(size_t max_line_bytes = 16u << 20) : max_line_bytes_(max_line_bytes) {}

  // Calls on_line(line) for each line completed by this chunk, without "\n" or "\r\n"; empty lines are skipped. on_line
  // may return false: the rest of the chunk is dropped and feed returns false. Throws Error(kData) when a line passes
  // the maximum; the splitter is then empty and usable again.
  bool feed(std::string_view chunk, const std::function<bool(std::string_view)>& on_line);

  // Bytes of the line that is not complete yet. A stream that ends with pending() > 0 was cut in the middle of a line.
  size_t pending() const { return buffer_.size(); }
  void reset() { buffer_.clear(); }

 private:
  size_t max_line_bytes_;
  std::string buffer_;
};

}  // namespace trireme::kube
