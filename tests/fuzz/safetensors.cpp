// libFuzzer target: any bytes are a header or an Error, and what is accepted describes ranges inside the file.
#include "base/safetensors.h"

#include <cstdlib>
#include <string_view>

#include "base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const trireme::SafetensorsHeader header = trireme::parse_safetensors_header(bytes, size, "fuzz");
    uint64_t at = 0;
    for (const trireme::SafetensorsEntry& entry : header.entries) {
      if (entry.begin != at || entry.end < entry.begin || header.data_start + entry.end > size) std::abort();
      at = entry.end;
    }
    trireme::parse_safetensors_header(trireme::make_safetensors_header(header.entries, header.metadata),
                                      trireme::make_safetensors_header(header.entries, header.metadata).size() + at,
                                      "again");
  } catch (const trireme::Error&) {
  }
  return 0;
}
