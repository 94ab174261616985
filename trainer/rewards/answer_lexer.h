// Tokens of a final answer: plain text, LaTeX and the usual Unicode signs in one alphabet.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

enum class TokenKind {
  kNumber,
  kSymbol,
  kFunction,
  kWord,
  kSign,
  kFraction,
  kRoot,
  kBinomial,
  kMatrixBegin,
  kMatrixEnd,
  kEnd
};

// Signs that have no ASCII character of their own; the others are themselves ('+', '(', '=', ...).
// '{' and '}' are LaTeX grouping; kSetOpen and kSetClose the visible braces.
namespace sign {
constexpr char kSetOpen = 'S', kSetClose = 's', kAngleOpen = 'A', kAngleClose = 'a', kFloorOpen = 'F',
               kFloorClose = 'f';
constexpr char kCeilOpen = 'C', kCeilClose = 'c', kLessEqual = 'l', kGreaterEqual = 'g', kNotEqual = 'n', kApprox = '~';
constexpr char kPlusMinus = 'p', kMinusPlus = 'm', kUnion = 'U', kIntersection = 'I', kIn = 'E', kDifference = 'D';
constexpr char kDegree = 'd', kRowBreak = 'R', kCell = '&';
}  // namespace sign

struct Token {
  TokenKind kind = TokenKind::kEnd;
  char sign = 0;         // kSign
  std::string text;      // number: digits with at most one '.'; word: lower case; symbol, function: name
  std::string repeat;    // number: digits of the period, as in 0.1\overline{6}
  int64_t exponent = 0;  // number: power of ten
  bool space_before = false;
};

struct LexOptions {
  bool commas_group_digits = true;  // 1,234 is one number; else a list of two
};

// The tokens, ending with kEnd; nothing when the text has a character no answer has, or too many tokens.
std::optional<std::vector<Token>> lex_final_answer(std::string_view text, const LexOptions& options);

// The words of an answer that is words only ("\text{No solution}." -> "no solution"), else nothing.
std::optional<std::string> plain_words(std::string_view text);

// The balanced {...} that opens at text[open]; the index of its closing brace, or npos. Knows \{ and \}.
size_t matching_brace(std::string_view text, size_t open);

}  // namespace trireme
