// The math verifier: finds the final answer in a response and decides whether it means the same as the gold.
// Pure functions of their arguments; they never throw and their work is bounded whatever the text.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

// The final answer of a response, by the first rule that finds one: last \boxed{...}, last "#### x", last
// "answer is x" / "answer: x", last number. A finished <think> block is skipped. Nothing when no rule applies.
std::optional<std::string> extract_final_answer(std::string_view response);

// The same with every way the end of a response without a mark may be read: the right side of its last formula or its
// last number, the formula as a whole, a response of one short line itself.
std::vector<std::string> extract_final_answers(std::string_view response);

// Only the rules with an explicit mark (boxed, ####, "answer is"), not the last number.
std::optional<std::string> extract_marked_final_answer(std::string_view response);

// Whether two final answers mean the same. Marks (boxed, ####) inside either are taken off first, so that a whole
// solution may be given as gold. What counts as the same: trainer/rewards/README.md.
bool math_equal(std::string_view gold, std::string_view final_answer);

}  // namespace trireme
