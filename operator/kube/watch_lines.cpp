#include "operator/kube/watch_lines.h"

#include <cstring>

#include "base/error.h"

namespace trireme::kube {

bool WatchLines::feed(std::string_view chunk, const std::function<bool(std::string_view)>& on_line) {
  while (!chunk.empty()) {
    const void* found = std::memchr(chunk.data(), '\n', chunk.size());
    const size_t take = found ? static_cast<size_t>(static_cast<const char*>(found) - chunk.data()) : chunk.size();
    if (buffer_.size() + take > max_line_bytes_) {
      reset();
      fail_data("a line of the stream is over " + std::to_string(max_line_bytes_) + " bytes");
    }
    if (!found) {
      buffer_.append(chunk);
      return true;
    }
    std::string_view line = chunk.substr(0, take);
    chunk.remove_prefix(take + 1);
    std::string whole;
    if (!buffer_.empty()) {
      buffer_.append(line);
      whole.swap(buffer_);  // on_line may throw: the splitter must be clean then
      line = whole;
    }
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    if (!line.empty() && !on_line(line)) return false;
  }
  return true;
}

}  // namespace trireme::kube
