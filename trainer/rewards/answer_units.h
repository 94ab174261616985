// Units of measure in answers: names to one spelling, and the factor between two units of one dimension.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace trireme {

// Lower-case word, plural or not.
bool known_unit(std::string_view word);
// "metres" -> "m", "mph" -> "mi/h", "$" -> "dollar"; empty for words that are no unit (apples).
std::string canonical_unit(std::string_view word);
// hundred, thousand, million, billion, trillion, dozen: the power of ten (or 12).
std::optional<int64_t> scale_word(std::string_view word);
// How many small units are in each, when both are simple units of one dimension: ("m", "cm") -> (1000, 10).
std::optional<std::pair<int64_t, int64_t>> unit_factors(std::string_view a, std::string_view b);
// "twenty-five", "twelve" -> 25, 12 (0 to 99).
std::optional<int64_t> number_word(std::string_view words);

}  // namespace trireme
