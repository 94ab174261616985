// Safetensors headers: parsing with full validation, and writing. No tensors here, so that it can be fuzzed on its own.
// Format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the data.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  // "F32", "BF16", ...
  std::vector<int64_t> shape;
  uint64_t begin = 0;  // bytes from data_start
  uint64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // by ascending begin
  std::map<std::string, std::string> metadata;
  uint64_t data_start = 0;  // bytes from the start of the file
};

// Bytes of an element; 0 for an unknown dtype.
uint64_t safetensors_item_bytes(std::string_view dtype);

// `bytes` is the file from its start (the whole header at least), `file_size` its full size, `source` its name in
// errors. Throws Error(kData) naming the file and the tensor: truncated, bad JSON, unknown dtype, offsets that overlap,
// leave gaps, run past the end or do not match the shape.
SafetensorsHeader parse_safetensors_header(std::string_view bytes, uint64_t file_size, const std::string& source);

// The first bytes of a file (length and JSON, padded with blanks so that the data starts at a multiple of 8). Entries'
// offsets are used as they are.
std::string make_safetensors_header(const std::vector<SafetensorsEntry>& entries,
                                    const std::map<std::string, std::string>& metadata);

}  // namespace trireme
