#include "operator/kube/request_scan.h"

#include <optional>

#include "base/text.h"

namespace trireme::kube {
namespace {

RequestScan refused(int status, const char* why) {
  RequestScan scan;
  scan.state = RequestScan::State::kRefused;
  scan.status = status;
  scan.why = why;
  return scan;
}

bool is_token(std::string_view text) {
  for (const char c : text) {
    const bool alphanumeric = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
    if (!alphanumeric && std::string_view("!#$%&'*+-.^_`|~").find(c) == std::string_view::npos) return false;
  }
  return !text.empty();
}

bool is_value(std::string_view text) {
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte < 0x20 && c != '\t') || byte == 0x7f) return false;
  }
  return true;
}

// Of a Content-Length; digits only, as the standard has it.
std::optional<size_t> length_of(std::string_view value) {
  if (value.empty() || value.size() > 18) return std::nullopt;
  size_t length = 0;
  for (const char c : value) {
    if (c < '0' || c > '9') return std::nullopt;
    length = length * 10 + static_cast<size_t>(c - '0');
  }
  return length;
}

}  // namespace

RequestScan scan_request(std::string_view bytes, const RequestLimits& limits) {
  constexpr std::string_view kEnd = "\r\n\r\n";
  const size_t end = bytes.substr(0, limits.max_head_bytes).find(kEnd);
  if (end == std::string_view::npos) {
    if (bytes.size() >= limits.max_head_bytes) return refused(431, "the headers are too long");
    return {};
  }
  const size_t head_size = end + kEnd.size();
  const std::string_view head = bytes.substr(0, end + 2);  // every line with its end
  size_t at = head.find("\r\n");
  if (at == 0 || !is_value(head.substr(0, at))) return refused(400, "no request line");
  at += 2;
  std::optional<size_t> length;
  RequestScan scan;
  for (size_t headers = 1; at < head.size(); ++headers) {
    if (headers > limits.max_headers) return refused(431, "too many headers");
    const size_t line_end = head.find("\r\n", at);
    const std::string_view line = head.substr(at, line_end - at);
    const size_t colon = line.find(':');
    if (colon == std::string_view::npos || !is_token(line.substr(0, colon))) return refused(400, "a line is no header");
    const std::string_view value = trim(line.substr(colon + 1));
    if (!is_value(value)) return refused(400, "a header holds control characters");
    const std::string name = to_lower(std::string(line.substr(0, colon)));
    if (name == "transfer-encoding") return refused(411, "the body needs a Content-Length");
    if (name == "content-encoding" && to_lower(std::string(value)) != "identity")
      return refused(415, "the body must not be compressed");
    if (name == "content-length") {
      const auto said = length_of(value);
      if (!said || (length && *length != *said)) return refused(400, "no valid Content-Length");
      length = said;
    }
    if (name == "expect") {
      if (to_lower(std::string(value)) != "100-continue") return refused(417, "only 100-continue can be expected");
      scan.expect_at = at;
    }
    at = line_end + 2;
  }
  const size_t body = length.value_or(0);
  if (body > limits.max_body_bytes) return refused(413, "the body is too long");
  if (bytes.size() - head_size < body) return scan;
  scan.state = RequestScan::State::kWhole;
  scan.size = head_size + body;
  return scan;
}

}  // namespace trireme::kube
