// Text: split, join, trim, strict number parsing, and the nearest known word for "did you mean".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

std::vector<std::string> split(std::string_view text, char separator);
std::string join(const std::vector<std::string>& parts, std::string_view separator);
std::string_view trim(std::string_view text);
bool starts_with(std::string_view text, std::string_view prefix);
bool ends_with(std::string_view text, std::string_view suffix);
std::string replace_all(std::string text, std::string_view from, std::string_view to);
std::string to_lower(std::string_view text);

// The whole text must be the number; no locale, no leading or trailing blanks.
std::optional<int64_t> parse_int(std::string_view text);
std::optional<double> parse_double(std::string_view text);

// Shortest text that reads back as the same double.
std::string format_double(double value);
// Fixed decimals, e.g. format_fixed(1.25, 1) == "1.2".
std::string format_fixed(double value, int decimals);
// 1536 -> "1.5 KiB".
std::string format_bytes(uint64_t bytes);

// The candidate with the smallest edit distance, if it is close enough to be a likely typo.
std::optional<std::string> nearest(std::string_view word, const std::vector<std::string>& candidates);

bool is_valid_utf8(std::string_view text);
// What a stranger sent, for a message: valid UTF-8 of at most `limit` bytes, without control characters.
std::string one_line(std::string_view text, size_t limit);

// How deep brackets and braces of a JSON text are nested, those in strings left out. The text need not be JSON: what a
// recursive parser must not see is found before it.
int json_depth(std::string_view text);

// 64 random bits in hexadecimal digits, from the system: a name that nobody else takes.
std::string random_hex();

// FNV-1a, stable across machines; for fingerprints, not for security.
uint64_t hash64(std::string_view bytes, uint64_t seed = 0xcbf29ce484222325ULL);

}  // namespace trireme
