#include "trainer/rewards/math.h"

#include <algorithm>
#include <vector>

#include "base/text.h"
#include "trainer/rewards/answer_compare.h"
#include "trainer/rewards/answer_lexer.h"
#include "trainer/rewards/answer_parser.h"
#include "trainer/rewards/answer_units.h"

namespace trireme {
namespace {

constexpr size_t kMaxAnswerBytes = 4096;  // longer answers are right only when they are the same text

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

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
        strip_pair("\\(", "\\)") || strip_pair("`", "`") || strip_pair("\"", "\"");
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

struct Reading {
  NodePtr node;
  bool letter_unit = false;
};

// The ways an answer may be read: digits grouped by commas or a list of them, a letter behind a number as factor or
// unit.
std::vector<Reading> readings(std::string_view text) {
  std::vector<Reading> all;
  const auto read = [&](bool grouped, bool letter_units) {
    auto tokens = lex_answer(text, {grouped});
    if (!tokens) return;
    NodePtr node = parse_answer(std::move(*tokens), letter_units);
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
  const auto tokens = lex_answer(text, {});
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
bool same_choice(std::string_view gold, std::string_view answer) {
  if (gold.size() == 3 && gold.front() == '(' && gold.back() == ')') gold = gold.substr(1, 1);
  if (gold.size() != 1 || gold[0] < 'A' || gold[0] > 'J' || answer.size() < 2) return false;
  const bool open = answer.front() == '(';
  const size_t at = open ? 1 : 0;
  if (at + 1 >= answer.size() || answer[at] != gold[0]) return false;
  const char after = answer[at + 1];
  return after == ')' || (!open && (after == '.' || after == ':'));
}

bool same_text(std::string_view gold, std::string_view answer) {
  gold = bare(gold);
  answer = bare(answer);
  if (gold.empty() || answer.empty()) return false;
  if (gold == answer || same_choice(gold, answer)) return true;
  if (gold.size() > kMaxAnswerBytes || answer.size() > kMaxAnswerBytes) return false;
  const auto gold_words = plain_words(gold), answer_words = plain_words(answer);
  if (gold_words && answer_words) return *gold_words == *answer_words;
  if (gold_words || answer_words) {
    const auto value = number_word(gold_words ? *gold_words : *answer_words);
    if (value)
      return same_text(gold_words ? std::to_string(*value) : gold, answer_words ? std::to_string(*value) : answer);
  }
  const std::vector<Reading> golds = readings(gold), answers = readings(answer);
  for (const Reading& g : golds) {
    for (const Reading& a : answers) {
      // A bare letter is taken for a unit only where the other side has the unit in plain view.
      if (g.letter_unit && !a.letter_unit && a.node->unit.empty()) continue;
      if (a.letter_unit && !g.letter_unit && g.node->unit.empty()) continue;
      if (same_answer(*g.node, *a.node)) return true;
    }
  }
  if (answers.empty()) {
    const std::string number = only_number(answer);
    if (!number.empty() && number != answer && !golds.empty()) {
      auto tokens = lex_answer(number, {});
      const NodePtr node = tokens ? parse_answer(std::move(*tokens), false) : nullptr;
      if (node && same_answer(*golds[0].node, *node)) return true;
    }
  }
  if (golds.empty() || answers.empty()) return loose_text(gold) == loose_text(answer);
  return false;
}

}  // namespace

bool math_equal(std::string_view gold, std::string_view answer) {
  const auto unmarked = [](std::string_view text) {
    const bool marked = text.find("\\boxed") != std::string_view::npos ||
                        text.find("\\fbox") != std::string_view::npos || text.find("####") != std::string_view::npos ||
                        text.find("answer is") != std::string_view::npos;
    auto inside = marked ? extract_marked_answer(text) : std::nullopt;
    return inside ? *inside : std::string(text);
  };
  return same_text(unmarked(gold), unmarked(answer));
}

}  // namespace trireme
