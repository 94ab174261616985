// Finds the final answer in a response.
#include <algorithm>
#include <array>
#include <vector>

#include "base/text.h"
#include "trainer/rewards/answer_closing.h"
#include "trainer/rewards/answer_lexer.h"
#include "trainer/rewards/characters.h"
#include "trainer/rewards/math.h"

namespace trireme {
namespace {

constexpr int kMaxOpenBoxes = 32;         // boxes without an end looked at; each is a scan of the rest
constexpr size_t kMaxBoxGap = 80;         // bytes between two boxes of one answer
constexpr size_t kMaxJoinedBoxes = 32;    // boxes of one answer
constexpr size_t kMaxJoinedBytes = 2048;  // how far before a box its neighbour is looked for
constexpr size_t kMaxWholeAnswer = 200;   // a response of one line and no more may be the answer itself

// What follows the reasoning: the text behind the last </think>, or all of it.
std::string_view after_thinking(std::string_view text) {
  const size_t end = text.rfind("</think>");
  return end == std::string_view::npos ? text : text.substr(end + 8);
}

struct Box {
  size_t begin = 0, end = 0;
  std::string text;
};

// The last complete \boxed{...} (or \fbox{...}, or "\boxed 5") that ends by `limit`; a box cut off by the length limit
// does not count.
std::optional<Box> box_before(std::string_view whole, size_t end_limit) {
  const std::string_view text = whole.substr(0, end_limit);
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
      if (close != std::string_view::npos)
        return Box{at, close + 1, std::string(trim(text.substr(open + 1, close - open - 1)))};
    } else if (open < text.size() && open > at + (is_box ? 6 : 5)) {
      size_t end = open;
      while (end < text.size() && text[end] != ' ' && text[end] != '$' && text[end] != '\n') ++end;
      if (end > open) return Box{at, end, std::string(text.substr(open, end - open))};
    }
    if (at == 0) return std::nullopt;
    limit = at - 1;
  }
  return std::nullopt;
}

// Whether what stands between two boxes joins them to one answer: nothing, a comma, "and", "or" with a few words or a
// name ("x_2 =") around them. Words of reasoning between them make the first a step on the way to the second.
bool joins_boxes(std::string_view gap) {
  static constexpr std::array<std::string_view, 22> reasoning = {
      "so",  "thus", "hence", "therefore", "then", "since", "because", "gives", "which",   "implies",  "where",
      "but", "not",  "is",    "are",       "now",  "we",    "finally", "next",  "correct", "actually", "instead"};
  static constexpr std::array<std::string_view, 14> markup = {"text",  "textbf", "textrm", "mathrm", "quad",
                                                              "qquad", "left",   "right",  "mbox",   "ldots",
                                                              "dots",  "cdots",  "hspace", "space"};
  if (gap.size() > kMaxBoxGap) return false;
  gap = trim(gap);
  if (ends_with(gap, "=")) {  // the name of the next box
    gap = trim(gap.substr(0, gap.size() - 1));
    while (!gap.empty() && (is_digit(gap.back()) || gap.back() == '_' || gap.back() == '{' || gap.back() == '}'))
      gap.remove_suffix(1);
    if (gap.empty() || !is_letter(gap.back()) || (gap.size() > 1 && is_letter(gap[gap.size() - 2]))) return false;
    gap.remove_suffix(1);
  }
  int words = 0;
  bool separated = false;
  for (size_t i = 0; i < gap.size();) {
    const char c = gap[i];
    if (c == '\\' || is_letter(c)) {
      const bool command = c == '\\';
      const size_t start = i + (command ? 1 : 0);
      size_t end = start;
      while (end < gap.size() && is_letter(gap[end])) ++end;
      const std::string word = to_lower(gap.substr(start, end - start));
      i = end;
      if (command) {
        if (word.empty()) {
          ++i;  // \, \) and the like
        } else if (std::find(markup.begin(), markup.end(), word) == markup.end()) {
          return false;
        }
        continue;
      }
      if (std::find(reasoning.begin(), reasoning.end(), word) != reasoning.end()) return false;
      separated = separated || word == "and" || word == "or";
      if (word != "and" && word != "or") ++words;
    } else if (c == ',' || c == ';' || c == '&') {
      separated = true;
      ++i;
    } else if (std::string_view(" \n\t${}()[]").find(c) != std::string_view::npos) {
      ++i;
    } else {
      return false;
    }
  }
  return words == 0 || (separated && words <= 4);
}

// The last box, or the list of the last boxes where they are joined.
std::optional<Box> boxed(std::string_view text) {
  const auto last = box_before(text, text.size());
  if (!last) return std::nullopt;
  std::vector<std::string> parts = {last->text};
  size_t begin = last->begin;
  while (parts.size() < kMaxJoinedBoxes) {
    const size_t from = begin > kMaxJoinedBytes ? begin - kMaxJoinedBytes : 0;
    const auto previous = box_before(text.substr(from), begin - from);
    if (!previous || !joins_boxes(text.substr(from + previous->end, begin - from - previous->end))) break;
    begin = from + previous->begin;
    if (std::find(parts.begin(), parts.end(), previous->text) == parts.end()) parts.push_back(previous->text);
  }
  Box joined{begin, last->end, ""};
  for (size_t k = parts.size(); k-- > 0;) joined.text += parts[k] + (k > 0 ? ", " : "");
  return joined;
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
  const std::string_view said = sentence(rest);
  if (auto closing = closing_final_answer(said)) return closing;  // "The largest $n$ is 34"
  const std::string_view phrase = trim(only_maths(said));
  if (phrase.empty()) return std::nullopt;
  return std::string(phrase);
}

// Brackets, bars or inequality signs and no word; an equation's right side may be read by itself.
bool is_bare_formula(std::string_view text) {
  if (text.find_first_of("([|<>") == std::string_view::npos || text.find('=') != std::string_view::npos) return false;
  size_t letters = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    letters = is_letter(text[i]) ? letters + 1 : text[i] == '\\' ? kMaxWholeAnswer : 0;
    if (letters >= 3 && letters < kMaxWholeAnswer) return false;
    if (letters > kMaxWholeAnswer) letters = kMaxWholeAnswer;  // a command's name
  }
  return true;
}

// What stands behind the last '=' of the last formula, when that holds the last number.
std::optional<std::string> last_right_side(std::string_view text) {
  size_t end = text.size();
  while (end > 0 && !is_digit(text[end - 1])) --end;
  if (end == 0) return std::nullopt;
  const size_t close = text.find('$', end);
  if (close == std::string_view::npos || close == 0) return std::nullopt;
  const size_t open = text.rfind('$', end - 1);
  const bool balanced = std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(close), '$') % 2 == 1;
  if (open == std::string_view::npos || !balanced || text.find('$', close + 1) != std::string_view::npos)
    return std::nullopt;
  std::string_view formula = text.substr(open + 1, close - open - 1);
  const size_t equals = formula.rfind('=');
  const bool relation = equals != std::string_view::npos && equals > 0 &&
                        (formula[equals - 1] == '<' || formula[equals - 1] == '>' || formula[equals - 1] == '!');
  if (equals != std::string_view::npos && !relation) formula = formula.substr(equals + 1);
  if (trim(formula).empty()) return std::nullopt;
  return std::string(trim(formula));
}

}  // namespace

std::optional<std::string> extract_marked_final_answer(std::string_view response) {
  const std::string_view text = without_farewell(after_thinking(response));
  const auto box = boxed(text);
  if (box) {
    // "Final Answer: ..." behind the box is the later word.
    const std::string_view rest = text.substr(box->end);
    const std::string lower = to_lower(rest);
    const size_t final = lower.rfind("final answer");
    if (final != std::string::npos) {
      if (auto found = announced(rest.substr(final))) return found;
    }
    return box->text;
  }
  if (auto found = hashed(text)) return found;
  return announced(text);
}

std::optional<std::string> extract_final_answer(std::string_view response) {
  const auto found = extract_final_answers(response);
  if (found.empty()) return std::nullopt;
  // Words alone, unmarked, are compared as a whole but are no answer that was found.
  const std::string& first = found.front();
  if (first == trim(response) && std::none_of(first.begin(), first.end(), is_digit)) return std::nullopt;
  return first;
}

std::vector<std::string> extract_final_answers(std::string_view response) {
  if (auto found = extract_marked_final_answer(response)) return {*found};
  const std::string_view text = without_farewell(after_thinking(response));
  std::vector<std::string> found;
  const auto take = [&](std::optional<std::string> one) {
    if (one && !one->empty() && std::find(found.begin(), found.end(), *one) == found.end())
      found.push_back(std::move(*one));
  };
  const std::string_view whole = trim(text);
  const bool short_line = whole.size() <= kMaxWholeAnswer && whole.find('\n') == std::string_view::npos;
  // "(0,5]" is no number 5: what has signs and no words is read as a whole.
  if (!short_line || !is_bare_formula(whole)) {
    take(last_right_side(text));
    const auto number = last_number(text);
    if (found.empty() && number) take(number->text);
    take(closing_formula(text));
  }
  if (short_line) take(std::string(whole));
  return found;
}

}  // namespace trireme
