// Protocol Buffers' wire format, as far as event files need it: messages are written field by field into a string.
// https://protobuf.dev/programming-guides/encoding
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace trireme {

class WireMessage final {
 public:
  WireMessage& varint(int field, uint64_t value) {
    tag(field, 0);
    return raw_varint(value);
  }
  WireMessage& fixed64(int field, double value) {
    tag(field, 1);
    return raw(&value, sizeof value);
  }
  WireMessage& fixed32(int field, float value) {
    tag(field, 5);
    return raw(&value, sizeof value);
  }
  WireMessage& bytes(int field, std::string_view value) {
    tag(field, 2);
    raw_varint(value.size());
    return raw(value.data(), value.size());
  }
  WireMessage& message(int field, const WireMessage& value) { return bytes(field, value.text()); }
  const std::string& text() const { return text_; }

 private:
  void tag(int field, int type) { raw_varint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(type)); }
  WireMessage& raw_varint(uint64_t value) {
    for (; value >= 0x80; value >>= 7) text_.push_back(static_cast<char>(value | 0x80));
    text_.push_back(static_cast<char>(value));
    return *this;
  }
  WireMessage& raw(const void* data, size_t size) {  // numbers are little-endian, as on every machine we build for
    text_.append(static_cast<const char*>(data), size);
    return *this;
  }

  std::string text_;
};

// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78).
inline uint32_t crc32c(std::string_view bytes) {
  uint32_t crc = ~0U;
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (0x82f63b78U & (0U - (crc & 1U)));
  }
  return ~crc;
}

// `value` as `size` little-endian bytes.
inline std::string little_endian(uint64_t value, size_t size) {
  std::string text(size, '\0');
  std::memcpy(text.data(), &value, size);
  return text;
}

}  // namespace trireme
