// The math verifier: finds the final answer in a response and decides whether it means the same as the reference.
// Pure functions of their arguments; they never throw and their work is bounded whatever the text.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace trireme {

// The final answer of a response, by the first rule that finds one: last \boxed{...}, last "#### x", last
// "answer is x" / "answer: x", last number. A finished <think> block is skipped. Nothing when no rule applies.
std::optional<std::string> extract_answer(std::string_view response);

// Only the rules with an explicit mark (boxed, ####, "answer is"), not the last number.
std::optional<std::string> extract_marked_answer(std::string_view response);

// Whether two final answers mean the same. Marks (boxed, ####) inside either are taken off first, so that a whole
// reference solution may be given as gold. What counts as the same: trainer/rewards/README.md.
bool math_equal(std::string_view gold, std::string_view answer);

}  // namespace trireme
