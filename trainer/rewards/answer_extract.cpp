// Finds the final answer in a response.
#include <algorithm>
#include <array>

#include "base/text.h"
#include "trainer/rewards/answer_lexer.h"
#include "trainer/rewards/math.h"

namespace trireme {
namespace {

constexpr int kMaxOpenBoxes = 32;  // boxes without an end looked at; each is a scan of the rest

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// What follows the reasoning: the text behind the last </think>, or all of it.
std::string_view after_thinking(std::string_view text) {
  const size_t end = text.rfind("</think>");
  return end == std::string_view::npos ? text : text.substr(end + 8);
}

// The last complete \boxed{...} (or \fbox{...}, or "\boxed 5"); a box cut off by the length limit does not count.
std::optional<std::string> boxed(std::string_view text) {
  size_t limit = std::string_view::npos;
  for (int tries = 0; tries < kMaxOpenBoxes; ++tries) {
    const size_t box = text.rfind("\\boxed", limit), frame = text.rfind("\\fbox", limit);
    const bool is_box = box != std::string_view::npos && (frame == std::string_view::npos || box > frame);
    const size_t at = is_box ? box : frame;
    if (at == std::string_view::npos) return std::nullopt;
    size_t open = at + (is_box ? 6 : 5);
    while (open < text.size() && text[open] == ' ') ++open;
    if (open < text.size() && text[open] == '{') {
      const size_t close = matching_brace(text, open);
      if (close != std::string_view::npos) return std::string(trim(text.substr(open + 1, close - open - 1)));
    } else if (open < text.size() && open > at + (is_box ? 6 : 5)) {
      size_t end = open;
      while (end < text.size() && text[end] != ' ' && text[end] != '$' && text[end] != '\n') ++end;
      if (end > open) return std::string(text.substr(open, end - open));
    }
    if (at == 0) return std::nullopt;
    limit = at - 1;
  }
  return std::nullopt;
}

std::string_view first_line(std::string_view text) {
  text = trim(text);
  return trim(text.substr(0, text.find('\n')));
}

std::optional<std::string> hashed(std::string_view text) {
  const size_t at = text.rfind("####");
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view line = first_line(text.substr(at + 4));
  if (line.empty()) return std::nullopt;
  return std::string(line);
}

// Up to the end of the sentence: a full stop (or '!', '?') before a blank or the end, or the line's end.
std::string_view sentence(std::string_view text) {
  text = first_line(text);
  for (size_t i = 0; i < text.size(); ++i) {
    const bool last = i + 1 == text.size();
    if ((text[i] == '.' || text[i] == '?') && (last || text[i + 1] == ' ') && !(i > 0 && !last && text[i - 1] == '.'))
      return text.substr(0, i);
  }
  return text;
}

// The mathematics of a phrase when it holds exactly one $...$ (or \(...\)) and that has something to say.
std::string_view only_maths(std::string_view phrase) {
  for (const auto& [open, close] : {std::pair<std::string_view, std::string_view>{"$", "$"}, {"\\(", "\\)"}}) {
    const size_t start = phrase.find(open);
    if (start == std::string_view::npos) continue;
    const size_t end = phrase.find(close, start + open.size());
    if (end == std::string_view::npos || phrase.find(open, end + close.size()) != std::string_view::npos) continue;
    const std::string_view inside = trim(phrase.substr(start + open.size(), end - start - open.size()));
    if (!inside.empty()) return inside;
  }
  return phrase;
}

std::optional<std::string> announced(std::string_view text) {
  const std::string lower = to_lower(text);
  size_t best = std::string::npos, length = 0;
  for (const std::string_view phrase :
       {std::string_view("answer is"), std::string_view("answer:"), std::string_view("answer**:"),
        std::string_view("answer is:"), std::string_view("answer :"), std::string_view("answer\xef\xbc\x9a"),
        std::string_view("answer ="), std::string_view("answers are"), std::string_view("<answer>")}) {
    const size_t at = lower.rfind(phrase);
    if (at == std::string::npos) continue;
    if (best == std::string::npos || at > best || (at == best && phrase.size() > length))
      best = at, length = phrase.size();
  }
  if (best == std::string::npos) return std::nullopt;
  std::string_view rest = text.substr(best + length);
  const size_t tag = rest.find("</answer>");
  if (tag != std::string_view::npos) rest = rest.substr(0, tag);
  rest = trim(rest);
  while (!rest.empty() && (rest.front() == ':' || rest.front() == '*' || rest.front() == ' ')) rest.remove_prefix(1);
  const std::string_view phrase = trim(only_maths(sentence(rest)));
  if (phrase.empty()) return std::nullopt;
  return std::string(phrase);
}

// The last number with its sign, grouping commas, decimals, fraction and percent sign; a last $...$ that holds it as a
// whole.
std::optional<std::string> last_number(std::string_view text) {
  size_t end = text.size();
  while (end > 0 && !is_digit(text[end - 1])) --end;
  if (end == 0) return std::nullopt;
  // Inside the last formula: what stands behind its last '='.
  const size_t close = text.find('$', end);
  if (close != std::string_view::npos && close > 0) {
    const size_t open = text.rfind('$', end - 1);
    const bool balanced = std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(close), '$') % 2 == 1;
    if (open != std::string_view::npos && balanced && text.find('$', close + 1) == std::string_view::npos) {
      std::string_view formula = text.substr(open + 1, close - open - 1);
      const size_t equals = formula.rfind('=');
      if (equals != std::string_view::npos) formula = formula.substr(equals + 1);
      if (!trim(formula).empty()) return std::string(trim(formula));
    }
  }
  size_t start = end;
  const auto number_start = [&](size_t from) {
    size_t s = from;
    while (s > 0) {
      const char c = text[s - 1];
      const bool grouping =
          (c == ',' || c == '.') && s < text.size() && is_digit(text[s]) && s >= 2 && is_digit(text[s - 2]);
      const bool leading_dot = c == '.' && s < text.size() && is_digit(text[s]) && (s < 2 || !is_digit(text[s - 2]));
      if (!is_digit(c) && !grouping && !leading_dot) break;
      --s;
    }
    return s;
  };
  start = number_start(end);
  if (start > 1 && text[start - 1] == '/' && is_digit(text[start - 2])) start = number_start(start - 1);
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
  return number;
}

}  // namespace

std::optional<std::string> extract_marked_answer(std::string_view response) {
  const std::string_view text = after_thinking(response);
  if (auto found = boxed(text)) return found;
  if (auto found = hashed(text)) return found;
  return announced(text);
}

std::optional<std::string> extract_answer(std::string_view response) {
  if (auto found = extract_marked_answer(response)) return found;
  return last_number(after_thinking(response));
}

}  // namespace trireme
