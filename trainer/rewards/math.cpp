#include "trainer/rewards/math.h"

#include <algorithm>
#include <array>
#include <vector>

#include "base/text.h"
#include "trainer/rewards/answer_closing.h"
#include "trainer/rewards/answer_compare.h"
#include "trainer/rewards/answer_lexer.h"
#include "trainer/rewards/answer_parser.h"
#include "trainer/rewards/answer_units.h"
#include "trainer/rewards/characters.h"

namespace trireme {
namespace {

constexpr size_t kMaxFinalAnswerBytes = 4096;  // longer answers are right only when they are the same text

// What may mark the answer inside a text given as gold or as an answer.
constexpr std::array<std::string_view, 6> kMarks = {"\\boxed",   "\\fbox",        "####",
                                                    "answer is", "Final Answer:", "final answer:"};

// Without what surrounds an answer and means nothing: $...$, **...**, a full stop, "approximately".
std::string_view bare(std::string_view text) {
  const auto strip_pair = [&](std::string_view open, std::string_view close) {
    if (text.size() < open.size() + close.size() || !starts_with(text, open) || !ends_with(text, close)) return false;
    text = trim(text.substr(open.size(), text.size() - open.size() - close.size()));
    return true;
  };
  while (true) {
    text = trim(text);
    const size_t before = text.size();
    if (!text.empty() && (text.back() == '.' || text.back() == ',' || text.back() == ';') && !ends_with(text, ".."))
      text.remove_suffix(1);
    strip_pair("$$", "$$") || strip_pair("$", "$") || strip_pair("**", "**") || strip_pair("\\[", "\\]") ||
        strip_pair("\\(", "\\)") || strip_pair("`", "`") || strip_pair("\"", "\"") || strip_pair("\\\"", "\\\"");
    while (!text.empty() && text.front() == '*') text.remove_prefix(1);
    while (ends_with(text, "**")) text.remove_suffix(2);
    for (const std::string_view filler :
         {std::string_view("about "), std::string_view("approximately "), std::string_view("roughly "),
          std::string_view("exactly "), std::string_view("\\approx"), std::string_view("is ")}) {
      if (starts_with(text, filler)) text.remove_prefix(filler.size());
    }
    if (text.size() == before) return text;
  }
}

// "\\\\frac" for "\\frac" all through: a text that was escaped twice on its way here. A row break before a letter alone
// says nothing; any command with one backslash says that the text is as it should be.
std::string once_escaped(std::string_view text) {
  bool doubled = false;
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    if (text[i] != '\\') continue;
    size_t slashes = i;
    while (slashes < text.size() && text[slashes] == '\\') ++slashes;
    const size_t count = slashes - i;
    const bool command = slashes + 1 < text.size() && is_letter(text[slashes]) && is_letter(text[slashes + 1]);
    if (count == 1 && slashes < text.size() && (is_letter(text[slashes]) || text[slashes] == '{'))
      return std::string(text);
    doubled = doubled || (command && count == 2);
    i = slashes;
  }
  return doubled ? replace_all(std::string(text), "\\\\", "\\") : std::string(text);
}

struct Reading {
  NodePtr node;
  bool letter_unit = false;
};

// The ways an answer may be read: digits grouped by commas or a list of them, a letter behind a number as factor or
// unit.
std::vector<Reading> readings(std::string_view text) {
  std::vector<Reading> all;
  const auto read = [&](bool grouped, bool letter_units) {
    auto tokens = lex_final_answer(text, {grouped});
    if (!tokens) return;
    NodePtr node = parse_final_answer(std::move(*tokens), letter_units);
    if (node) all.push_back({std::move(node), letter_units});
  };
  read(true, false);
  if (text.find(',') != std::string_view::npos) read(false, false);
  if (!text.empty() && is_letter(text.back())) read(true, true);
  return all;
}

// Lower case, single spaces only between letters or digits, no LaTeX spacing: for answers no grammar knows.
std::string loose_text(std::string_view text) {
  std::string plain(text);
  for (const std::string_view gone :
       {std::string_view("\\left"), std::string_view("\\right"), std::string_view("\\text"),
        std::string_view("\\mathrm"), std::string_view("\\,"), std::string_view("\\;"), std::string_view("\\!"),
        std::string_view("$"), std::string_view("\""), std::string_view("**")}) {
    plain = replace_all(std::move(plain), gone, " ");
  }
  plain = to_lower(plain);
  std::string key;
  bool space = false;
  const auto word = [](char c) {
    return is_letter(c) || (c >= '0' && c <= '9') || static_cast<unsigned char>(c) >= 0x80;
  };
  for (const char c : plain) {
    if (c == ' ' || c == '\n' || c == '\t' || c == '\r') {
      space = true;
      continue;
    }
    if (space && !key.empty() && word(key.back()) && word(c)) key += ' ';
    space = false;
    key += c;
  }
  return key;
}

// The only number in a phrase ("there are 5 apples left"), with its sign; nothing for two numbers or "at least 5".
std::string only_number(std::string_view text) {
  const auto tokens = lex_final_answer(text, {});
  if (!tokens) return "";
  std::string found;
  std::string before;
  for (size_t k = 0; k < tokens->size(); ++k) {
    const Token& token = (*tokens)[k];
    if (token.kind == TokenKind::kNumber) {
      if (!found.empty() || token.exponent != 0 || !token.repeat.empty()) return "";
      const bool minus = before == "negative" || before == "minus" || (k > 0 && (*tokens)[k - 1].sign == '-');
      found = (minus ? "-" : "") + token.text;
    } else if (token.kind == TokenKind::kWord) {
      for (const std::string_view turn :
           {std::string_view("not"), std::string_view("least"), std::string_view("most"), std::string_view("more"),
            std::string_view("less"), std::string_view("than")}) {
        if (token.text == turn) return "";
      }
      before = token.text;
    } else if (token.kind != TokenKind::kEnd && token.kind != TokenKind::kSymbol &&
               !(token.kind == TokenKind::kSign && (token.sign == '-' || token.sign == ','))) {
      return "";
    }
  }
  return found;
}

// Gold is a choice letter: "C" in "(C) 12", "C. twelve", "C: 12".
bool same_choice(std::string_view gold, std::string_view final_answer) {
  if (gold.size() == 3 && gold.front() == '(' && gold.back() == ')') gold = gold.substr(1, 1);
  if (gold.size() != 1 || gold[0] < 'A' || gold[0] > 'J' || final_answer.size() < 2) return false;
  const bool open = final_answer.front() == '(';
  const size_t at = open ? 1 : 0;
  if (at + 1 >= final_answer.size() || final_answer[at] != gold[0]) return false;
  const char after = final_answer[at + 1];
  return after == ')' || (!open && (after == '.' || after == ':'));
}

// "3,75" as 3.75 where the other side is written with a point and no comma. Not for 1,234, which groups its digits, nor
// inside brackets, where a comma parts coordinates. An answer of "3,14" may be the list it looks like, so there the
// part before the comma must be 0 or have four digits at least ("1000,99"); a gold that is a list has no such
// answer.
std::optional<std::string> with_decimal_point(std::string_view text, std::string_view other, bool is_gold) {
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  const size_t comma = text.find(',');
  if (comma == std::string_view::npos || comma == 0 || text.find(',', comma + 1) != std::string_view::npos ||
      text.find_first_of(".()[]{};") != std::string_view::npos || other.find(',') != std::string_view::npos ||
      other.find('.') == std::string_view::npos) {
    return std::nullopt;
  }
  size_t start = comma, end = comma + 1;
  while (start > 0 && digit(text[start - 1])) --start;
  while (end < text.size() && digit(text[end])) ++end;
  const size_t whole = comma - start, places = end - comma - 1;
  if (whole == 0 || places == 0) return std::nullopt;
  const bool zero = whole == 1 && text[start] == '0';
  if (!zero && (is_gold ? places == 3 && whole <= 3 : whole < 4)) return std::nullopt;
  std::string point(text);
  point[comma] = '.';
  return point;
}

bool same_text(std::string_view gold, std::string_view final_answer) {
  gold = bare(gold);
  final_answer = bare(final_answer);
  if (gold.empty() || final_answer.empty()) return false;
  if (gold == final_answer || same_choice(gold, final_answer)) return true;
  if (gold.size() > kMaxFinalAnswerBytes || final_answer.size() > kMaxFinalAnswerBytes) return false;
  const auto gold_words = plain_words(gold), final_words = plain_words(final_answer);
  if (gold_words && final_words) return *gold_words == *final_words;
  if (gold_words || final_words) {
    const auto value = number_word(gold_words ? *gold_words : *final_words);
    if (value)
      return same_text(gold_words ? std::to_string(*value) : gold, final_words ? std::to_string(*value) : final_answer);
  }
  const std::vector<Reading> golds = readings(gold), final_answers = readings(final_answer);
  for (const Reading& g : golds) {
    for (const Reading& a : final_answers) {
      // A bare letter is taken for a unit only where the other side has the unit in plain view.
      if (g.letter_unit && !a.letter_unit && a.node->unit.empty()) continue;
      if (a.letter_unit && !g.letter_unit && g.node->unit.empty()) continue;
      if (same_final_answer(*g.node, *a.node)) return true;
    }
  }
  if (final_answers.empty()) {
    const std::string number = only_number(final_answer);
    if (!number.empty() && number != final_answer && !golds.empty()) {
      auto tokens = lex_final_answer(number, {});
      const NodePtr node = tokens ? parse_final_answer(std::move(*tokens), false) : nullptr;
      if (node && same_final_answer(*golds[0].node, *node)) return true;
    }
  }
  if ((golds.empty() || final_answers.empty()) && loose_text(gold) == loose_text(final_answer)) return true;
  if (const auto point = with_decimal_point(gold, final_answer, true)) return same_text(*point, final_answer);
  if (const auto point = with_decimal_point(final_answer, gold, false)) return same_text(gold, *point);
  return false;
}

}  // namespace

bool math_equal(std::string_view gold_text, std::string_view final_answer_text) {
  const std::string gold = once_escaped(gold_text), final_answer = once_escaped(final_answer_text);
  const auto unmarked = [](std::string_view text) {
    const bool marked = std::any_of(kMarks.begin(), kMarks.end(),
                                    [&](std::string_view mark) { return text.find(mark) != std::string_view::npos; });
    auto inside = marked ? extract_marked_final_answer(text) : std::nullopt;
    return inside ? once_escaped(*inside) : std::string(text);
  };
  const std::string right = unmarked(gold), said = unmarked(final_answer);
  if (same_text(right, said)) return true;
  const auto closing = closing_final_answer(said);
  return closing && same_text(right, *closing);
}

}  // namespace trireme
