#include "api/names.h"

#include <set>

#include "base/text.h"

namespace trireme::names {

std::string quoted(const std::string& text) { return "\"" + text.substr(0, 64) + (text.size() > 64 ? "...\"" : "\""); }

bool only(std::string_view text, std::string_view allowed) {
  return text.find_first_not_of(allowed) == std::string_view::npos;
}

bool is_dns_label(std::string_view text) {
  return !text.empty() && text.size() <= 63 && only(text, kLowerLabel) && text[0] >= 'a' && text[0] <= 'z' &&
         text.back() != '-';
}

bool is_dns_subdomain(std::string_view text) {
  if (text.empty() || text.size() > 253) return false;
  for (const std::string& part : split(text, '.')) {
    if (part.empty() || !only(part, kLowerLabel) || part.front() == '-' || part.back() == '-') return false;
  }
  return true;
}

bool is_qualified_name(std::string_view text) {
  const size_t slash = text.find('/');
  if (slash != std::string_view::npos && !is_dns_subdomain(text.substr(0, slash))) return false;
  const std::string_view name = slash == std::string_view::npos ? text : text.substr(slash + 1);
  const std::string_view marks = "-_.";
  return !name.empty() && name.size() <= 63 && only(name, kNameChars) &&
         marks.find(name.front()) == std::string_view::npos && marks.find(name.back()) == std::string_view::npos;
}

bool is_quantity(std::string_view text) {
  const size_t end = text.find_first_not_of("0123456789.");
  const std::string_view digits = text.substr(0, end);
  const std::string_view unit = end == std::string_view::npos ? "" : text.substr(end);
  static const std::set<std::string_view> kUnits = {"", "Ki", "Mi", "Gi", "Ti", "k", "M", "G", "T"};
  const auto value = parse_double(digits);
  return value && *value > 0 && digits.front() != '.' && digits.back() != '.' && kUnits.count(unit) > 0;
}

std::string image_problem(const std::string& image) {
  if (image.empty()) return "is empty";
  return image.find_first_of(" \t\r\n") != std::string::npos ? quoted(image) + " contains blanks" : "";
}

}  // namespace trireme::names
