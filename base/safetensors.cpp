#include "base/safetensors.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "base/error.h"
#include "base/json_events.h"

namespace trireme {
namespace {

// The reference implementation refuses longer headers too.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;

class RepeatedKeys final : public JsonEvents {
 public:
  bool start_object(size_t) override {
    open_.emplace_back();
    return true;
  }
  bool end_object() override {
    open_.pop_back();
    return true;
  }
  bool key(string_t& key) override {
    if (!open_.back().insert(key).second) last = key;
    return true;
  }
  std::string last;  // empty: there is none

 private:
  std::vector<std::set<std::string>> open_;
};

// nlohmann keeps the last of two equal keys silently; a tensor named twice must be an error.
nlohmann::json parse_unique(std::string_view text, const std::string& source) {
  RepeatedKeys repeated;
  (void)nlohmann::json::sax_parse(text, &repeated);
  nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_discarded() || !json.is_object()) fail_data(source + ": the safetensors header is not a JSON object");
  if (!repeated.last.empty()) fail_data(source + ": the header names " + repeated.last + " twice");
  return json;
}

uint64_t unsigned_number(const nlohmann::json& json, const std::string& what) {
  if (!json.is_number_unsigned()) fail_data(what + " is not a non-negative integer");
  return json.get<uint64_t>();
}

SafetensorsEntry parse_entry(const std::string& name, const nlohmann::json& json, const std::string& source) {
  const std::string where = source + ": tensor " + name;
  if (!json.is_object() || !json.contains("dtype") || !json.contains("shape") || !json.contains("data_offsets")) {
    fail_data(where + " lacks dtype, shape or data_offsets");
  }
  SafetensorsEntry entry;
  entry.name = name;
  if (!json["dtype"].is_string()) fail_data(where + ": dtype is not a string");
  entry.dtype = json["dtype"].get<std::string>();
  const uint64_t item = safetensors_item_bytes(entry.dtype);
  if (item == 0) fail_data(where + ": unknown dtype " + entry.dtype);
  const nlohmann::json& shape = json["shape"];
  if (!shape.is_array()) fail_data(where + ": shape is not a list");
  unsigned __int128 bytes = item;
  for (const nlohmann::json& size : shape) {
    const uint64_t value = unsigned_number(size, where + ": a size of its shape");
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) fail_data(where + ": shape overflows");
    bytes *= value;
    if (bytes > std::numeric_limits<int64_t>::max()) fail_data(where + ": shape overflows");
    entry.shape.push_back(static_cast<int64_t>(value));
  }
  const nlohmann::json& offsets = json["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2) fail_data(where + ": data_offsets is not a pair");
  entry.begin = unsigned_number(offsets[0], where + ": data_offsets[0]");
  entry.end = unsigned_number(offsets[1], where + ": data_offsets[1]");
  if (entry.end < entry.begin) fail_data(where + ": data_offsets end before they begin");
  if (entry.end - entry.begin != static_cast<uint64_t>(bytes)) {
    fail_data(where + ": data_offsets hold " + std::to_string(entry.end - entry.begin) +
              " bytes, its shape and dtype need " + std::to_string(static_cast<uint64_t>(bytes)));
  }
  return entry;
}

}  // namespace

uint64_t safetensors_item_bytes(std::string_view dtype) {
  if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 8;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 4;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 2;
  if (dtype == "I8" || dtype == "U8" || dtype == "BOOL" || dtype == "F8_E4M3" || dtype == "F8_E5M2") return 1;
  return 0;
}

SafetensorsHeader parse_safetensors_header(std::string_view bytes, uint64_t file_size, const std::string& source) {
  if (bytes.size() < 8 || file_size < 8) {
    fail_data(source + " is truncated: " + std::to_string(file_size) + " bytes are no safetensors file");
  }
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(bytes[static_cast<size_t>(i)]);
  if (length > kMaxHeaderBytes) {
    fail_data(source + ": header length " + std::to_string(length) + " is beyond " + std::to_string(kMaxHeaderBytes) +
              "; this is no safetensors file");
  }
  if (length + 8 > file_size || length + 8 > bytes.size()) {
    fail_data(source + " is truncated: its header needs " + std::to_string(length + 8) + " bytes, the file has " +
              std::to_string(file_size));
  }
  SafetensorsHeader header;
  header.data_start = length + 8;
  const nlohmann::json json = parse_unique(bytes.substr(8, length), source);
  for (const auto& [name, value] : json.items()) {
    if (name != "__metadata__") {
      header.entries.push_back(parse_entry(name, value, source));
      continue;
    }
    if (!value.is_object()) fail_data(source + ": __metadata__ is not an object");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) fail_data(source + ": __metadata__." + key + " is not a string");
      header.metadata[key] = text.get<std::string>();
    }
  }
  std::sort(header.entries.begin(), header.entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return a.begin != b.begin ? a.begin < b.begin : (a.end != b.end ? a.end < b.end : a.name < b.name);
  });
  const uint64_t data_bytes = file_size - header.data_start;
  uint64_t at = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    if (entry.begin < at) fail_data(source + ": tensor " + entry.name + " overlaps the one before it");
    if (entry.begin > at) fail_data(source + ": there is a gap before tensor " + entry.name);
    if (entry.end > data_bytes) {
      fail_data(source + " is truncated: tensor " + entry.name + " ends at byte " +
                std::to_string(header.data_start + entry.end) + ", the file has " + std::to_string(file_size));
    }
    at = entry.end;
  }
  if (at != data_bytes) {
    fail_data(source + ": " + std::to_string(data_bytes - at) + " bytes after the last tensor belong to none");
  }
  return header;
}

std::string make_safetensors_header(const std::vector<SafetensorsEntry>& entries,
                                    const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata.empty()) json["__metadata__"] = metadata;
  for (const SafetensorsEntry& entry : entries) {
    json[entry.name] = {{"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {entry.begin, entry.end}}};
  }
  std::string text = json.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(text.size() >> (8 * i) & 0xff);
  return bytes + text;
}

}  // namespace trireme
