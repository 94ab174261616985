// What a text without marks says last: its last number and its last formula.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace trireme {

struct Closing {
  std::string text;
  size_t begin = 0, end = 0;  // in the text it was found in
};

// Without what may follow an answer and says nothing: "I hope it is correct.", a chat template's next turn.
std::string_view without_farewell(std::string_view text);

// The last number with its sign, grouping commas, decimals, fraction and percent sign.
std::optional<Closing> last_number(std::string_view text);

// The inside of the last $...$, $$...$$, \(...\) or \[...\], where no number follows it and the words around it present
// it as the result; no mere name ("$n$", "$f(x)$").
std::optional<std::string> closing_formula(std::string_view text);

// The last formula or number of prose, where the words before and after it present it as the result ("... we find that
// $x < 3$.", "... increases by 100%."). Nothing for "3 or 4", "at least 5", "is not 5", for two that are joined, or for
// a text of fewer than three words.
std::optional<std::string> closing_final_answer(std::string_view text);

}  // namespace trireme
