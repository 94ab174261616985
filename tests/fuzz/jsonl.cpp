// libFuzzer: bytes as a JSONL file, through line splitting, parsing, layout detection and row rules.
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "base/error.h"
#include "trainer/data/row.h"
#include "trainer/data/row_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace trireme;
  if (size == 0) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t chunk = 1 + data[0] % 64;
  int64_t last_offset = -1;
  LineSplitter splitter(
      [&](const LineSplitter::Line& line) {
        if (line.offset <= last_offset || static_cast<size_t>(line.offset) + line.text.size() > bytes.size())
          std::abort();
        last_offset = line.offset;
        if (!line.too_long && bytes.substr(static_cast<size_t>(line.offset), line.text.size()) != line.text)
          std::abort();
        try {
          const auto object = parse_json_object(line.text);
          const Row row = parse_row(object, detect_schema(object, "", ""));
          if (row.problem.empty() && row.messages.empty()) std::abort();
          (void)row.extra.dump();
        } catch (const Error& e) {
          if (e.kind() != ErrorKind::kData) std::abort();
        }
        try {
          const auto object = parse_json_object(line.text);
          for (const char* path : {"a", "a.b", "a[0]", "a[0].b", "a.b[1]"})
            (void)parse_row(object, {path, path, false, path});
        } catch (const Error& e) {
          if (e.kind() != ErrorKind::kData) std::abort();
        }
      },
      4096);
  for (size_t at = 0; at < bytes.size(); at += chunk) splitter.feed(bytes.substr(at, chunk));
  splitter.finish();
  try {
    (void)parse_prompt_template(bytes.substr(0, 200), "fuzz");
  } catch (const Error&) {
  }
  return 0;
}
