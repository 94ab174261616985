// The whole way of untrusted bytes of a watch or a list: line splitter, list splitter, field selection. Invariants, not
// only crashes: chunk borders must not matter.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "base/error.h"
#include "operator/kube/json_scan.h"
#include "operator/kube/watch_lines.h"

namespace {

using trireme::Error;
using namespace trireme::kube;

constexpr size_t kMaxLine = 64;

// Lines, and at the end whether a line was too long.
std::vector<std::string> lines_of(std::string_view text, size_t chunk) {
  WatchLines splitter(kMaxLine);
  std::vector<std::string> out;
  try {
    for (size_t at = 0; at < text.size(); at += chunk) {
      splitter.feed(text.substr(at, chunk), [&](std::string_view line) {
        if (line.size() > kMaxLine || line.find('\n') != std::string_view::npos || line.empty()) std::abort();
        out.emplace_back(line);
        return true;
      });
      if (splitter.pending() > kMaxLine) std::abort();
    }
  } catch (const Error&) {
    out.emplace_back("<too long>");
  }
  return out;
}

std::vector<std::string> items_of(std::string_view text, size_t chunk) {
  std::vector<std::string> out;
  ListSplitter splitter([&](std::string_view item) { out.emplace_back(item); }, 256);
  try {
    for (size_t at = 0; at < text.size(); at += chunk) splitter.feed(text.substr(at, chunk));
    splitter.finish();
    out.push_back(splitter.metadata());
  } catch (const Error&) {
    out.emplace_back("<error>");
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const size_t chunk = 1 + data[0] % 31;
  const std::string_view text(reinterpret_cast<const char*>(data + 1), size - 1);
  // A chunk of many lines may report lines before one that is too long; the lines themselves are the same.
  if (lines_of(text, chunk) != lines_of(text, 1)) std::abort();
  if (items_of(text, chunk) != items_of(text, 1)) std::abort();
  static const JsonFields fields({"metadata.name", "metadata.labels", "status.*.state", "a.b.c"});
  for (const std::string& item : items_of(text, 4096)) {
    try {
      const std::string once = fields.select(item);
      if (fields.select(once) != once) std::abort();  // selecting twice changes nothing
      fields.parse(item);
    } catch (const Error&) {
    }
  }
  try {
    fields.parse(text);
  } catch (const Error&) {
  }
  (void)top_level_string(text, "type");
  (void)top_level_member(text, "object");
  return 0;
}
