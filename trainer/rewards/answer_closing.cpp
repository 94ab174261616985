#include "trainer/rewards/answer_closing.h"

#include <algorithm>
#include <array>
#include <vector>

#include "base/text.h"
#include "trainer/rewards/characters.h"

namespace trireme {
namespace {

constexpr int kMaxWordsBack = 8;  // words looked at between a value and the verb before it

struct Formula {
  size_t begin = 0, end = 0;      // with the delimiters
  size_t inside = 0, length = 0;  // without
};

// Every formula in order. A money sign without a partner begins none.
std::vector<Formula> formulas(std::string_view text) {
  std::vector<Formula> found;
  bool round = true, square = true;  // whether a closing delimiter may still come
  for (size_t i = 0; i < text.size();) {
    std::string_view close;
    size_t open = 2;
    if (starts_with(text.substr(i), "\\(") && round) {
      close = "\\)";
    } else if (starts_with(text.substr(i), "\\[") && square) {
      close = "\\]";
    } else if (text[i] == '\\') {
      i += 2;
      continue;
    } else if (starts_with(text.substr(i), "$$")) {
      close = "$$";
    } else if (text[i] == '$') {
      close = "$";
      open = 1;
    } else {
      ++i;
      continue;
    }
    size_t end = text.find(close, i + open);
    while (close[0] == '$' && end != std::string_view::npos && text[end - 1] == '\\') end = text.find(close, end + 1);
    if (end == std::string_view::npos) {
      if (close[0] == '$') break;
      (close == "\\)" ? round : square) = false;
      i += open;
      continue;
    }
    found.push_back({i, end + close.size(), i + open, end - i - open});
    i = end + close.size();
  }
  return found;
}

// n, S_n, f(x), \triangle ABC: what is talked about rather than said of it.
bool mere_name(std::string_view formula) {
  for (const std::string_view sign :
       {std::string_view("\\frac"), std::string_view("\\sqrt"), std::string_view("\\pi"), std::string_view("\\infty"),
        std::string_view("\\text"), std::string_view("\\begin"), std::string_view("\\le"), std::string_view("\\ge"),
        std::string_view("\\lt"), std::string_view("\\gt"), std::string_view("\\ne"), std::string_view("\\in"),
        std::string_view("\\cup")}) {
    if (formula.find(sign) != std::string_view::npos) return false;
  }
  return std::none_of(formula.begin(), formula.end(), [](char c) {
    return is_digit(c) || c == '=' || c == '<' || c == '>' || c == '+' || c == '-' || c == '/' || c == '*' || c == '^';
  });
}

// Back from `end` over one number with grouping commas and decimals.
size_t number_start(std::string_view text, size_t end) {
  size_t s = end;
  while (s > 0) {
    const char c = text[s - 1];
    const bool grouping =
        (c == ',' || c == '.') && s < text.size() && is_digit(text[s]) && s >= 2 && is_digit(text[s - 2]);
    const bool leading_dot = c == '.' && s < text.size() && is_digit(text[s]) && (s < 2 || !is_digit(text[s - 2]));
    if (!is_digit(c) && !grouping && !leading_dot) break;
    --s;
  }
  return s;
}

template <size_t N>
bool one_of(std::string_view word, const std::array<std::string_view, N>& words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// Whether the words before a value lead to it: back to a verb, a colon or an equals sign, past nothing that denies,
// bounds or joins.
bool presented(std::string_view before, bool formula) {
  static constexpr std::array<std::string_view, 13> verbs = {"is",  "are", "it's", "equals", "was",   "be",    "by",
                                                             "get", "got", "find", "that",   "gives", "obtain"};
  static constexpr std::array<std::string_view, 24> against = {
      "not",   "no",    "least", "most",   "more",    "less", "than", "over",  "under",  "or",    "and",    "either",
      "below", "above", "fewer", "except", "between", "from", "if",   "never", "cannot", "isn't", "aren't", "nor"};
  for (int words = 0; words < kMaxWordsBack; ++words) {
    while (!before.empty() && (before.back() == ' ' || before.back() == '\n' || before.back() == '*' ||
                               before.back() == '(' || before.back() == '"')) {
      before.remove_suffix(1);
    }
    if (before.empty()) return formula;
    if (before.back() == ':' || before.back() == '=') return true;
    if (before.back() == '.') return formula;
    if (before.back() == ',' && before.size() > 1 && is_letter(before[before.size() - 2])) {  // "Hence, $x < 3$"
      before.remove_suffix(1);
      continue;
    }
    size_t start = before.size();
    while (start > 0 && (is_letter(before[start - 1]) || before[start - 1] == '\'')) --start;
    if (start == before.size()) return false;
    const std::string word = to_lower(before.substr(start));
    if (one_of(word, against)) return false;
    if (one_of(word, verbs)) {  // "it is not that x < 3"
      const std::string_view earlier = trim(before.substr(0, start));
      return !ends_with(earlier, " not") && !ends_with(earlier, " never");
    }
    before.remove_suffix(before.size() - start);
  }
  return formula;
}

// Whether the words behind a value leave it as it is.
bool undisputed(std::string_view after) {
  static constexpr std::array<std::string_view, 17> against = {
      "or",    "not",       "no",    "more",  "less",  "least", "most",   "than",   "wrong",
      "false", "incorrect", "never", "above", "below", "if",    "except", "instead"};
  for (size_t i = 0; i < after.size();) {
    if (!is_letter(after[i])) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < after.size() && is_letter(after[end])) ++end;
    if (one_of(to_lower(after.substr(i, end - i)), against)) return false;
    i = end;
  }
  return true;
}

// The last formula that is no mere name, where no number follows it.
std::optional<Closing> last_formula(std::string_view text) {
  const std::vector<Formula> all = formulas(text);
  for (size_t k = all.size(); k-- > 0;) {
    const std::string_view inside = trim(text.substr(all[k].inside, all[k].length));
    const size_t after = all[k].end, next = k + 1 < all.size() ? all[k + 1].begin : text.size();
    const std::string_view between = text.substr(after, next - after);
    if (std::any_of(between.begin(), between.end(), is_digit)) return std::nullopt;
    if (!inside.empty() && !mere_name(inside)) return Closing{std::string(inside), all[k].begin, all[k].end};
  }
  return std::nullopt;
}

int words_outside(std::string_view text, const std::vector<Formula>& inside) {
  int words = 0;
  size_t next = 0;
  for (size_t i = 0; i < text.size();) {
    if (next < inside.size() && i == inside[next].begin) {
      i = inside[next++].end;
      continue;
    }
    if (!is_letter(text[i])) {
      ++i;
      continue;
    }
    const size_t start = i;
    while (i < text.size() && is_letter(text[i])) ++i;
    if (i - start >= 2 && (start == 0 || (text[start - 1] != '\\' && text[start - 1] != '{'))) ++words;
  }
  return words;
}

}  // namespace

std::string_view without_farewell(std::string_view text) {
  while (true) {
    text = trim(text);
    const size_t size = text.size();
    const size_t turn = text.rfind("<|");
    if (turn != std::string_view::npos && turn > 0) {
      const size_t end = text.find("|>", turn);
      if (end != std::string_view::npos && text.size() - end <= 2 + std::string_view("assistant").size() &&
          std::all_of(text.begin() + static_cast<std::ptrdiff_t>(end) + 2, text.end(), is_letter)) {
        text = text.substr(0, turn);
      }
    }
    for (const std::string_view farewell :
         {std::string_view("I hope it is correct."), std::string_view("I hope it is correct"),
          std::string_view("I hope this is correct.")}) {
      if (ends_with(text, farewell) && text.size() > farewell.size()) text.remove_suffix(farewell.size());
    }
    if (text.size() == size) return text;
  }
}

std::optional<Closing> last_number(std::string_view text) {
  size_t end = text.size();
  while (true) {
    while (end > 0 && !is_digit(text[end - 1])) --end;
    if (end == 0) return std::nullopt;
    size_t first = end;
    while (first > 0 && is_digit(text[first - 1])) --first;
    // A digit between letters (AZ2B) is a part of a name.
    const bool in_name = first > 1 && end < text.size() && is_letter(text[first - 1]) && is_letter(text[first - 2]) &&
                         is_letter(text[end]);
    if (!in_name) break;
    end = first;
  }
  size_t start = number_start(text, end);
  if (start > 1 && text[start - 1] == '/' && is_digit(text[start - 2])) start = number_start(text, start - 1);
  std::string number(text.substr(start, end - start));
  if (number.find("..") != std::string::npos) number = number.substr(number.rfind("..") + 2);
  size_t before = start;
  if (before > 0 && text[before - 1] == '$') --before;
  const bool minus =
      before > 0 && text[before - 1] == '-' &&
      (before < 2 || !(is_digit(text[before - 2]) || is_letter(text[before - 2]) || text[before - 2] == ')'));
  if (minus) number = "-" + number;
  if (end < text.size() && text[end] == '%') number += "%";
  if (end + 1 < text.size() && text[end] == '\\' && text[end + 1] == '%') number += "%";
  return Closing{number, minus ? before - 1 : before, end};
}

std::optional<std::string> closing_formula(std::string_view text) {
  const auto found = last_formula(text);
  if (!found || !presented(text.substr(0, found->begin), true) || !undisputed(text.substr(found->end)))
    return std::nullopt;
  return found->text;
}

std::optional<std::string> closing_final_answer(std::string_view text) {
  text = without_farewell(text);
  if (words_outside(text, formulas(text)) < 3) return std::nullopt;
  if (last_formula(text)) return closing_formula(text);
  const auto found = last_number(text);
  if (!found || !presented(text.substr(0, found->begin), false) || !undisputed(text.substr(found->end)))
    return std::nullopt;
  return found->text;
}

}  // namespace trireme
