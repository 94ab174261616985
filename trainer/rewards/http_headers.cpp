#include "trainer/rewards/http_headers.h"

#include <algorithm>
#include <cctype>
#include <fstream>

#include "base/error.h"
#include "base/text.h"

namespace trireme {
namespace {

constexpr size_t kMaxFileBytes = 64 << 10;
constexpr size_t kShortestSecret = 4;  // a shorter one is part of many words
constexpr std::string_view kVariable = "{env:", kFile = "{file:";

// Calls text(part) and reference(mark, inner) for what a value is made of.
template <class Text, class Reference>
void take_apart(const std::string& header, std::string_view value, Text&& text, Reference&& reference) {
  while (!value.empty()) {
    const size_t from = std::min(value.find(kVariable), value.find(kFile));
    if (from == std::string_view::npos) break;
    if (from > 0) text(value.substr(0, from));
    const std::string_view mark = starts_with(value.substr(from), kVariable) ? kVariable : kFile;
    const size_t end = value.find('}', from);
    if (end == std::string_view::npos || end == from + mark.size())
      fail_user("header " + header + ": '" + std::string(mark) + "' needs a name and a '}' behind it");
    reference(mark, std::string(value.substr(from + mark.size(), end - from - mark.size())));
    value.remove_prefix(end + 1);
  }
  if (!value.empty()) text(value);
}

bool is_token(std::string_view name) {
  constexpr std::string_view kSigns = "!#$%&'*+-.^_`|~";
  return !name.empty() && std::all_of(name.begin(), name.end(), [&](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) != 0 || kSigns.find(c) != std::string_view::npos;
  });
}

bool has_control(std::string_view text) {
  return std::any_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return (byte < 0x20 && c != '\t') || byte == 0x7f;
  });
}

std::string read_secret(const std::string& header, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxFileBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(0, file.gcount())));
  if (!file.is_open() || file.bad()) fail_io("header " + header + ": cannot read " + path);
  if (text.size() > kMaxFileBytes) fail_io("header " + header + ": " + path + " is longer than 64 KiB");
  const std::string_view inner = trim(text);
  if (inner.empty()) fail_io("header " + header + ": " + path + " is empty");
  if (has_control(inner))
    fail_io("header " + header + ": " + path + " holds more than one line, or control characters");
  return std::string(inner);
}

// Name and value; throws for a line that is none.
std::pair<std::string, std::string_view> split_line(std::string_view line) {
  const size_t colon = line.find(':');
  const std::string_view name = trim(line.substr(0, colon));
  if (colon == std::string_view::npos || !is_token(name))
    fail_user("a header must be \"Name: value\", and its name without blanks");  // not quoted: it may hold a secret
  return {std::string(name), trim(line.substr(colon + 1))};
}

}  // namespace

HttpHeaders::HttpHeaders(const std::vector<std::string>& lines, const std::map<std::string, std::string>& environment) {
  for (const std::string& line : lines) {
    const auto [name, value] = split_line(line);
    Header header;
    header.name = name;
    take_apart(
        name, value,
        [&, &its_name = name](std::string_view text) {
          if (has_control(text)) fail_user("header " + its_name + " holds control characters");
          header.pieces.push_back({Piece::Kind::kText, std::string(text)});
        },
        [&, &its_name = name](std::string_view mark, const std::string& inner) {
          if (mark == kFile) {
            header.pieces.push_back({Piece::Kind::kFile, inner});
            return;
          }
          const auto found = environment.find(inner);
          if (found == environment.end() || found->second.empty())
            fail_user("header " + its_name + ": the environment variable " + inner + " is not set");
          if (has_control(found->second))
            fail_user("header " + its_name + ": the environment variable " + inner + " holds control characters");
          header.pieces.push_back({Piece::Kind::kVariable, found->second});
        });
    headers_.push_back(std::move(header));
  }
}

std::vector<std::pair<std::string, std::string>> HttpHeaders::values() {
  std::vector<std::pair<std::string, std::string>> values;
  std::vector<std::string> secrets;
  for (const Header& header : headers_) {
    std::string value;
    for (const Piece& piece : header.pieces) {
      const std::string part = piece.kind == Piece::Kind::kFile ? read_secret(header.name, piece.text) : piece.text;
      if (piece.kind != Piece::Kind::kText) secrets.push_back(part);
      value += part;
    }
    values.emplace_back(header.name, std::move(value));
  }
  secrets_ = std::move(secrets);
  return values;
}

std::string HttpHeaders::redact(std::string text) const {
  for (const std::string& secret : secrets_) {
    if (secret.size() >= kShortestSecret) text = replace_all(std::move(text), secret, "***");
  }
  return text;
}

std::vector<std::string> environment_of_headers(const std::vector<std::string>& lines) {
  std::vector<std::string> names;
  for (const std::string& line : lines) {
    const auto [name, value] = split_line(line);
    take_apart(
        name, value, [](std::string_view) {},
        [&](std::string_view mark, const std::string& inner) {
          if (mark == kVariable) names.push_back(inner);
        });
  }
  return names;
}

}  // namespace trireme
