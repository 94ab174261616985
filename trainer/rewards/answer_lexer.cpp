#include "trainer/rewards/answer_lexer.h"

#include <array>
#include <unordered_map>
#include <unordered_set>

#include "base/text.h"
#include "trainer/rewards/answer_units.h"
#include "trainer/rewards/characters.h"

namespace trireme {
namespace {

constexpr size_t kMaxTokens = 3000;
constexpr int kMaxTextDepth = 8;

bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

// Unicode signs, rewritten to what a person without them would have typed.
constexpr std::array<std::pair<std::string_view, std::string_view>, 85> kUnicode = {{
    {"\u00a0", " "},
    {"\u2009", " "},
    {"\u202f", " "},
    {"\u2002", " "},
    {"\u2003", " "},
    {"\u200b", ""},
    {"\ufeff", ""},
    {"\u2212", "-"},
    {"\u2013", "-"},
    {"\u2014", "-"},
    {"\u00d7", "*"},
    {"\u00b7", "*"},
    {"\u22c5", "*"},
    {"\u2217", "*"},
    {"\u00f7", "/"},
    {"\u2044", "/"},
    {"\u2215", "/"},
    {"\u2264", "\\le "},
    {"\u2265", "\\ge "},
    {"\u2260", "\\ne "},
    {"\u2a7d", "\\le "},
    {"\u2a7e", "\\ge "},
    {"\u2248", "\\approx "},
    {"\u00b1", "\\pm "},
    {"\u2213", "\\mp "},
    {"\u221e", "\\infty "},
    {"\u222a", "\\cup "},
    {"\u2229", "\\cap "},
    {"\u2208", "\\in "},
    {"\u2216", "\\setminus "},
    {"\u2205", "\\emptyset "},
    {"\u211d", "\\mathbb{R}"},
    {"\u2124", "\\mathbb{Z}"},
    {"\u00b0", "\\degree "},
    {"\u221a", "\\sqrt "},
    {"\u00b2", "^{2}"},
    {"\u00b3", "^{3}"},
    {"\u00b9", "^{1}"},
    {"\u2070", "^{0}"},
    {"\u2074", "^{4}"},
    {"\u2075", "^{5}"},
    {"\u2076", "^{6}"},
    {"\u2077", "^{7}"},
    {"\u2078", "^{8}"},
    {"\u2079", "^{9}"},
    {"\u00bd", "\\frac{1}{2}"},
    {"\u00bc", "\\frac{1}{4}"},
    {"\u00be", "\\frac{3}{4}"},
    {"\u2153", "\\frac{1}{3}"},
    {"\u2154", "\\frac{2}{3}"},
    {"\u215b", "\\frac{1}{8}"},
    {"\u03c0", "\\pi "},
    {"\u03b1", "\\alpha "},
    {"\u03b2", "\\beta "},
    {"\u03b3", "\\gamma "},
    {"\u03b4", "\\delta "},
    {"\u03b8", "\\theta "},
    {"\u03bb", "\\lambda "},
    {"\u03bc", "\\mu "},
    {"\u03c3", "\\sigma "},
    {"\u03c6", "\\phi "},
    {"\u03d5", "\\phi "},
    {"\u03c9", "\\omega "},
    {"\u2032", "'"},
    {"\u2018", "'"},
    {"\u2019", "'"},
    {"\u201c", ""},
    {"\u201d", ""},
    {"\u20ac", "\\euro "},
    {"\u00a3", "\\pounds "},
    {"\u00a5", "\\yen "},
    {"\u20b9", "\\rupee "},
    {"\u00a2", " cents"},
    {"\u2026", "\\dots "},
    {"\u27e8", "\\langle "},
    {"\u27e9", "\\rangle "},
    {"\u230a", "\\lfloor "},
    {"\u230b", "\\rfloor "},
    {"\u2308", "\\lceil "},
    {"\u2309", "\\rceil "},
    {"\u2080", "_0"},
    {"\u2081", "_1"},
    {"\u2082", "_2"},
    {"\u2083", "_3"},
    {"\uff0c", ", "},
}};

std::string without_unicode(std::string_view text) {
  std::string plain;
  plain.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    if (static_cast<unsigned char>(text[i]) < 0x80) {
      plain += text[i++];
      continue;
    }
    bool found = false;
    for (const auto& [from, to] : kUnicode) {
      if (starts_with(text.substr(i), from)) {
        plain += to;
        i += from.size();
        found = true;
        break;
      }
    }
    if (!found) plain += text[i++];
  }
  return plain;
}

enum class CommandKind { kSkip, kSkipWithArgument, kTransparent, kText, kSign, kSymbol, kFunction, kCurrency, kOther };
struct Command {
  CommandKind kind = CommandKind::kOther;
  char sign = 0;
  std::string_view name{};
};

constexpr std::pair<const char*, char> kSigns[] = {{"cdot", '*'},
                                                   {"times", '*'},
                                                   {"ast", '*'},
                                                   {"bullet", '*'},
                                                   {"div", '/'},
                                                   {"pm", sign::kPlusMinus},
                                                   {"mp", sign::kMinusPlus},
                                                   {"le", sign::kLessEqual},
                                                   {"leq", sign::kLessEqual},
                                                   {"leqslant", sign::kLessEqual},
                                                   {"leqq", sign::kLessEqual},
                                                   {"ge", sign::kGreaterEqual},
                                                   {"geq", sign::kGreaterEqual},
                                                   {"geqslant", sign::kGreaterEqual},
                                                   {"geqq", sign::kGreaterEqual},
                                                   {"ne", sign::kNotEqual},
                                                   {"neq", sign::kNotEqual},
                                                   {"lt", '<'},
                                                   {"gt", '>'},
                                                   {"approx", sign::kApprox},
                                                   {"simeq", sign::kApprox},
                                                   {"cup", sign::kUnion},
                                                   {"bigcup", sign::kUnion},
                                                   {"cap", sign::kIntersection},
                                                   {"in", sign::kIn},
                                                   {"setminus", sign::kDifference},
                                                   {"backslash", sign::kDifference},
                                                   {"smallsetminus", sign::kDifference},
                                                   {"circ", sign::kDegree},
                                                   {"degree", sign::kDegree},
                                                   {"langle", sign::kAngleOpen},
                                                   {"rangle", sign::kAngleClose},
                                                   {"lfloor", sign::kFloorOpen},
                                                   {"rfloor", sign::kFloorClose},
                                                   {"lceil", sign::kCeilOpen},
                                                   {"rceil", sign::kCeilClose},
                                                   {"lbrace", sign::kSetOpen},
                                                   {"rbrace", sign::kSetClose},
                                                   {"vert", '|'},
                                                   {"lvert", '|'},
                                                   {"rvert", '|'},
                                                   {"mid", '|'},
                                                   {"lbrack", '['},
                                                   {"rbrack", ']'},
                                                   {"lparen", '('},
                                                   {"rparen", ')'},
                                                   {"colon", ':'},
                                                   {"equiv", '='},
                                                   {"land", ','},
                                                   {"lor", ','},
                                                   {"slash", '/'}};

const std::unordered_map<std::string_view, Command>& commands() {
  using K = CommandKind;
  static const std::unordered_map<std::string_view, Command> table = [] {
    std::unordered_map<std::string_view, Command> t;
    for (const char* name :
         {"left",   "right",     "big",   "Big",       "bigg",     "Bigg",       "bigl",         "bigr",
          "Bigl",   "Bigr",      "biggl", "biggr",     "quad",     "qquad",      "displaystyle", "textstyle",
          "limits", "mathstrut", "strut", "thinspace", "medspace", "thickspace", "negthinspace", "enspace",
          "space",  "nobreak",   "hfill", "rm",        "bf"}) {
      t[name] = {K::kSkip};
    }
    for (const char* name : {"hspace", "vspace", "phantom", "hphantom", "color", "label", "tag"})
      t[name] = {K::kSkipWithArgument};
    for (const char* name :
         {"mathbf", "boldsymbol", "bm", "mathit", "mathcal", "vec", "hat", "overrightarrow", "widehat", "underline",
          "boxed", "fbox", "mathnormal", "bold", "overleftrightarrow", "cancel"}) {
      t[name] = {K::kTransparent};
    }
    for (const char* name : {"text", "textbf", "textit", "textrm", "textnormal", "texttt", "textsf", "mathrm", "mathsf",
                             "mathtt", "mbox", "hbox", "operatorname", "emph"}) {
      t[name] = {K::kText};
    }
    for (const auto& [name, sign] : kSigns) {
      t[name] = {K::kSign, sign};
    }
    for (const char* name : {"sin",  "cos",  "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh",
                             "cosh", "tanh", "ln",  "log", "lg",  "exp", "max",    "min",    "gcd",    "lcm"}) {
      t[name] = {K::kFunction, 0, name};
    }
    for (const char* name : {"euro", "pounds", "yen", "rupee"}) t[name] = {K::kCurrency, 0, name};
    t["varnothing"] = {K::kSymbol, 0, "emptyset"};
    t["ldots"] = t["cdots"] = {K::kSymbol, 0, "dots"};
    t["varphi"] = {K::kSymbol, 0, "phi"};
    t["varepsilon"] = {K::kSymbol, 0, "epsilon"};
    return t;
  }();
  return table;
}

const std::unordered_set<std::string_view>& plain_functions() {
  static const std::unordered_set<std::string_view> names = {
      "sin",  "cos", "tan", "cot", "sec",  "csc", "arcsin", "arccos", "arctan", "sinh", "cosh",
      "tanh", "ln",  "log", "exp", "sqrt", "abs", "cbrt",   "asin",   "acos",   "atan"};
  return names;
}

class Lexer final {
 public:
  explicit Lexer(const LexOptions& options) : options_(options) {}

  bool run(std::string_view text, int text_depth) {
    size_t i = 0;
    while (i < text.size()) {
      if (tokens_.size() > kMaxTokens || !step(text, i, text_depth)) return false;
    }
    return true;
  }

  std::vector<Token> take() {
    add(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  void add(TokenKind kind, std::string text, char sign = 0) {
    Token token;
    token.kind = kind;
    token.text = std::move(text);
    token.sign = sign;
    token.space_before = space_;
    space_ = false;
    tokens_.push_back(std::move(token));
    if (!currency_.empty() && kind == TokenKind::kNumber) {  // "$5" is "5 dollars"
      Token unit;
      unit.kind = TokenKind::kWord;
      unit.text = std::exchange(currency_, "");
      unit.space_before = true;
      tokens_.push_back(std::move(unit));
    }
  }
  void add_sign(char sign) { add(TokenKind::kSign, "", sign); }

  bool step(std::string_view text, size_t& i, int text_depth) {
    const char c = text[i];
    if (is_blank(c) || c == '~' || c == '"' || c == '`') {
      space_ = true;
      ++i;
      return true;
    }
    if (is_digit(c) || (c == '.' && i + 1 < text.size() && is_digit(text[i + 1]))) return number(text, i);
    if (is_letter(c) || static_cast<unsigned char>(c) >= 0x80) return letters(text, i, text_depth > 0);
    if (c == '\\') return command(text, i, text_depth);
    ++i;
    switch (c) {
      case '$':
        // Pairs of '$' are maths; a single one before a number is money.
        if (i < text.size() && is_digit(text[i]) && text.find('$', i) == std::string_view::npos && dollars_ % 2 == 0)
          currency_ = "dollars";
        ++dollars_;
        return true;
      case '*':
        if (i < text.size() && text[i] == '*') {
          ++i;
          add_sign('^');
        } else {
          add_sign('*');
        }
        return true;
      case '<':
      case '>':
        if (i < text.size() && text[i] == '=') {
          ++i;
          add_sign(c == '<' ? sign::kLessEqual : sign::kGreaterEqual);
        } else {
          add_sign(c);
        }
        return true;
      case '!':
        if (i < text.size() && text[i] == '=') {
          ++i;
          add_sign(sign::kNotEqual);
        } else {
          add_sign('!');
        }
        return true;
      case '=':
        if (i < text.size() && text[i] == '=') ++i;
        add_sign('=');
        return true;
      case '\'':
        if (!tokens_.empty() && tokens_.back().kind == TokenKind::kSymbol) tokens_.back().text += '\'';
        return true;
      case '.':
        return true;  // the end of a sentence, or what \left. leaves
      case '+':
      case '-':
      case '/':
      case '^':
      case '_':
      case '%':
      case '(':
      case ')':
      case '[':
      case ']':
      case '{':
      case '}':
      case ',':
      case ';':
      case ':':
      case '|':
      case '&':
        add_sign(c);
        return true;
      default:
        return false;
    }
  }

  // Digits grouped by commas, thin spaces or blanks, each group of three: the end of the run, or `start` when not
  // grouped.
  size_t grouped_end(std::string_view text, size_t start) const {
    size_t first = start;
    while (first < text.size() && is_digit(text[first])) ++first;
    if (first - start > 3 || first == start) return start;
    const auto separator_at = [&](size_t at) -> size_t {
      for (const std::string_view s :
           {std::string_view(","), std::string_view("{,}"), std::string_view("\\,"), std::string_view(" ")}) {
        if (starts_with(text.substr(at), s)) {
          size_t length = s.size();
          if (s == "," && starts_with(text.substr(at), ",\\!")) {
            length = 3;
            while (at + length < text.size() && text[at + length] == ' ') ++length;
          }
          return length;
        }
      }
      return 0;
    };
    size_t end = first;
    std::string_view kind;
    while (true) {
      const size_t length = separator_at(end);
      if (length == 0) break;
      const std::string_view used = text.substr(end, length);
      if (used == "," && !options_.commas_group_digits) return start;
      if (!kind.empty() && used != kind) break;
      size_t k = end + length;
      const size_t digits = k;
      while (k < text.size() && is_digit(text[k])) ++k;
      if (k - digits == 0 && used != ",") break;
      if (k - digits != 3) return used == " " ? (end == first ? start : end) : start;
      kind = used;
      end = k;
    }
    // "2 345/678" is a mixed number, "1 234" a grouped one.
    if (kind == " " && end < text.size() && text[end] == '/') return start;
    return end == first ? start : end;
  }

  bool number(std::string_view text, size_t& i) {
    std::string digits, repeat;
    int64_t exponent = 0;
    const size_t grouped = grouped_end(text, i);
    if (grouped != i) {
      for (; i < grouped; ++i) {
        if (is_digit(text[i])) digits += text[i];
      }
    }
    while (i < text.size() && is_digit(text[i])) digits += text[i++];
    if (i < text.size() && text[i] == '.' && !starts_with(text.substr(i), "...")) {
      const bool fraction =
          i + 1 < text.size() && (is_digit(text[i + 1]) || starts_with(text.substr(i + 1), "\\overline") ||
                                  starts_with(text.substr(i + 1), "\\bar"));
      if (fraction) {
        digits += '.';
        ++i;
        while (i < text.size() && is_digit(text[i])) digits += text[i++];
      } else {
        ++i;
      }
    }
    if (digits.find('.') != std::string::npos) {
      for (const std::string_view mark : {std::string_view("\\overline{"), std::string_view("\\bar{")}) {
        if (!starts_with(text.substr(i), mark)) continue;
        size_t k = i + mark.size();
        while (k < text.size() && is_digit(text[k])) repeat += text[k++];
        if (repeat.empty() || k >= text.size() || text[k] != '}') return false;
        i = k + 1;
      }
      for (const std::string_view mark :
           {std::string_view("..."), std::string_view("\\ldots"), std::string_view("\\dots")}) {
        if (!starts_with(text.substr(i), mark)) continue;
        const size_t n = digits.size();
        if (n < 4 || digits[n - 1] != digits[n - 2] || digits[n - 2] != digits[n - 3])
          return false;  // 3.14...: no number
        repeat = digits.back();
        i += mark.size();
      }
    }
    if (i + 1 < text.size() && (text[i] == 'e' || text[i] == 'E')) {
      size_t k = i + 1;
      const bool negative = text[k] == '-';
      if (text[k] == '-' || text[k] == '+') ++k;
      const size_t start = k;
      while (k < text.size() && is_digit(text[k])) ++k;
      if (k > start && (k >= text.size() || !is_letter(text[k]))) {
        const auto value = parse_int(text.substr(start, k - start));
        if (!value) return false;
        exponent = negative ? -*value : *value;
        i = k;
      }
    }
    // "2x10^3", "3 x 4": the letter between two numbers is a product.
    if (tokens_.size() >= 2 && tokens_.back().kind == TokenKind::kSymbol && tokens_.back().text == "x" &&
        tokens_[tokens_.size() - 2].kind == TokenKind::kNumber) {
      tokens_.back().kind = TokenKind::kSign;
      tokens_.back().sign = '*';
    }
    add(TokenKind::kNumber, digits);
    Token& token = tokens_.back().kind == TokenKind::kNumber ? tokens_.back() : tokens_[tokens_.size() - 2];
    token.repeat = repeat;
    token.exponent = exponent;
    return true;
  }

  bool letters(std::string_view text, size_t& i, bool in_text) {
    const size_t start = i;
    bool ascii = true;
    while (i < text.size()) {
      const char c = text[i];
      const bool high = static_cast<unsigned char>(c) >= 0x80;
      const bool inner =
          (c == '-' || c == '\'') && i > start + 1 && i + 1 < text.size() && is_letter(text[i + 1]) && i - start >= 3;
      if (!is_letter(c) && !high && !inner) break;
      ascii = ascii && !high;
      ++i;
    }
    const std::string run(text.substr(start, i - start));
    const std::string lower = to_lower(run);
    const bool after_number = !tokens_.empty() && tokens_.back().kind == TokenKind::kNumber;
    const auto split_symbols = [&] {
      for (const char c : run) {
        if (is_letter(c))
          add(TokenKind::kSymbol, std::string(1, c));
        else
          add_sign('-');
      }
    };
    if (!ascii) {
      add(TokenKind::kWord, lower);
      return true;
    }
    if (in_text) {
      if (run == "e" || run == "i")
        add(TokenKind::kSymbol, run);
      else
        add(TokenKind::kWord, lower);
      return true;
    }
    if (run == "pi")
      add(TokenKind::kSymbol, "pi");
    else if (run == "infinity" || run == "inf" || run == "oo" || run == "Infinity")
      add(TokenKind::kSymbol, "infty");
    else if (run == "theta" || run == "alpha" || run == "beta" || run == "lambda")
      add(TokenKind::kSymbol, run);
    else if (run == "U")
      add_sign(sign::kUnion);
    else if (plain_functions().count(run) > 0)
      function(run);
    else if (run.size() == 1)
      add(TokenKind::kSymbol, run);
    else if (lower == "or" || lower == "and" || known_unit(lower))
      add(TokenKind::kWord, lower);
    else if (run.size() >= 4)
      add(TokenKind::kWord, lower);
    else if (run.size() == 3 && !(after_number && !space_) &&
             run.find_first_not_of("abcxyzpqrmnkuvwhd") != std::string::npos) {
      add(TokenKind::kWord, lower);
    } else if (run.size() == 2 && after_number && space_ &&
               run.find_first_not_of("abcxyzpqrmnkuvw") != std::string::npos) {
      add(TokenKind::kWord, lower);
    } else {
      split_symbols();
    }
    return true;
  }

  void function(const std::string& name) {
    if (name == "sqrt")
      add(TokenKind::kRoot, "2");
    else if (name == "cbrt")
      add(TokenKind::kRoot, "3");
    else if (name == "asin" || name == "acos" || name == "atan")
      add(TokenKind::kFunction, "arc" + name.substr(1));
    else
      add(TokenKind::kFunction, name);
  }

  // What begins with a backslash at text[i]; i ends behind it. False: no answer is written so.
  bool command(std::string_view text, size_t& i, int text_depth) {
    ++i;
    if (i >= text.size()) return false;
    if (!is_letter(text[i])) return escaped(text[i++]);
    const size_t start = i;
    while (i < text.size() && is_letter(text[i])) ++i;
    std::string name(text.substr(start, i - start));
    if (starts_with(name, "quad") && name.size() > 4 && name.size() < 7) {  // "\\quadx": the blank before it is missing
      i = start + 4;
      space_ = true;
      return true;
    }
    if (name == "frac" || name == "dfrac" || name == "tfrac" || name == "cfrac" || name == "nicefrac" ||
        name == "sfrac") {
      add(TokenKind::kFraction, "");
      return true;
    }
    if (name == "sqrt") return add(TokenKind::kRoot, ""), true;
    if (name == "binom" || name == "dbinom" || name == "tbinom") return add(TokenKind::kBinomial, ""), true;
    if (name == "begin" || name == "end") return environment(name == "begin", text, i);
    if (name == "mathbb" || name == "Bbb") return blackboard(text, i);
    const auto found = commands().find(name);
    if (found == commands().end()) return add(TokenKind::kSymbol, std::move(name)), true;
    return known(found->second, name, text, i, text_depth);
  }

  // A backslash before what is no letter.
  bool escaped(char c) {
    switch (c) {
      case '{':
        add_sign(sign::kSetOpen);
        return true;
      case '}':
        add_sign(sign::kSetClose);
        return true;
      case '%':
        add_sign('%');
        return true;
      case '$':
        currency_ = "dollars";
        return true;
      case '|':
        add_sign('|');
        return true;
      case '\\':
        add_sign(sign::kRowBreak);
        return true;
      case '(':
      case ')':
      case '[':
      case ']':
        return true;  // maths delimiters
      case '&':
        add(TokenKind::kWord, "and");
        return true;
      case '!':
        return true;
      case ',':
      case ';':
      case ':':
      case '>':
      case ' ':
      case '\n':
        space_ = true;
        return true;
      case '#':
      case '_':
        return true;
      default:
        return false;
    }
  }

  // {name} behind \begin or \end.
  bool environment(bool begins, std::string_view text, size_t& i) {
    const size_t open = text.find_first_not_of(' ', i);
    if (open == std::string_view::npos || text[open] != '{') return false;
    const size_t close = matching_brace(text, open);
    if (close == std::string_view::npos) return false;
    const std::string_view name = text.substr(open + 1, close - open - 1);
    i = close + 1;
    if (name == "array" && begins && i < text.size() && text[i] == '{') {
      const size_t columns = matching_brace(text, i);
      if (columns == std::string_view::npos) return false;
      i = columns + 1;
    }
    if (name != "array" && name.find("matrix") == std::string_view::npos) return name == "aligned" || name == "align*";
    add(begins ? TokenKind::kMatrixBegin : TokenKind::kMatrixEnd, std::string(name));
    return true;
  }

  // {R} or R behind \mathbb.
  bool blackboard(std::string_view text, size_t& i) {
    const size_t open = text.find_first_not_of(' ', i);
    if (open == std::string_view::npos) return false;
    const bool braced = text[open] == '{';
    const size_t at = braced ? open + 1 : open;
    if (at >= text.size() || !is_letter(text[at])) return false;
    add(TokenKind::kSymbol, std::string("mathbb") + text[at]);
    i = at + 1;
    if (braced && i < text.size() && text[i] == '}') ++i;
    return true;
  }

  // {words} behind \text and its kin.
  bool words(std::string_view name, std::string_view text, size_t& i, int text_depth) {
    if (i < text.size() && text[i] == '*') ++i;
    const size_t open = text.find_first_not_of(' ', i);
    if (open == std::string_view::npos || text[open] != '{') return true;
    const size_t close = matching_brace(text, open);
    if (close == std::string_view::npos || text_depth >= kMaxTextDepth) return false;
    i = close + 1;
    const std::string_view inside = text.substr(open + 1, close - open - 1);
    if (name == "operatorname" && plain_functions().count(inside) > 0) return function(std::string(inside)), true;
    space_ = true;
    if (!run(inside, text_depth + 1)) return false;
    space_ = true;
    return true;
  }

  bool known(const Command& command, std::string_view name, std::string_view text, size_t& i, int text_depth) {
    switch (command.kind) {
      case CommandKind::kSkip:
      case CommandKind::kTransparent:
        space_ = true;
        return true;
      case CommandKind::kSkipWithArgument: {
        if (i >= text.size() || text[i] != '{') return true;
        const size_t close = matching_brace(text, i);
        if (close == std::string_view::npos) return false;
        i = close + 1;
        return true;
      }
      case CommandKind::kText:
        return words(name, text, i, text_depth);
      case CommandKind::kSign:
        add_sign(command.sign);
        return true;
      case CommandKind::kFunction:
        add(TokenKind::kFunction, std::string(command.name));
        return true;
      case CommandKind::kCurrency:
        currency_ = command.name == "pounds" ? "gbp" : command.name;
        return true;
      case CommandKind::kSymbol:
      case CommandKind::kOther:
        add(TokenKind::kSymbol, std::string(command.name));
        return true;
    }
    return false;
  }

  LexOptions options_;
  std::vector<Token> tokens_;
  std::string currency_;
  int dollars_ = 0;
  bool space_ = false;
};

}  // namespace

size_t matching_brace(std::string_view text, size_t open) {
  int depth = 0;
  for (size_t i = open; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '{') {
      ++depth;
    } else if (text[i] == '}') {
      if (--depth == 0) return i;
    }
  }
  return std::string_view::npos;
}

std::optional<std::vector<Token>> lex_final_answer(std::string_view text, const LexOptions& options) {
  Lexer lexer(options);
  if (!lexer.run(without_unicode(text), 0)) return std::nullopt;
  return lexer.take();
}

std::optional<std::string> plain_words(std::string_view text) {
  std::string words;
  bool letters = false, space = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\\') {
      size_t end = i + 1;
      while (end < text.size() && is_letter(text[end])) ++end;
      const auto found = commands().find(text.substr(i + 1, end - i - 1));
      if (end == i + 1) {  // \, and the like
        if (end < text.size() && (is_blank(text[end]) || text[end] == ',' || text[end] == ';' || text[end] == '!')) {
          space = true;
          ++i;
          continue;
        }
        return std::nullopt;
      }
      if (found == commands().end() ||
          (found->second.kind != CommandKind::kText && found->second.kind != CommandKind::kTransparent &&
           found->second.kind != CommandKind::kSkip)) {
        return std::nullopt;
      }
      i = end - 1;
      continue;
    }
    if (is_letter(c) || static_cast<unsigned char>(c) >= 0x80) {
      if (static_cast<unsigned char>(c) >= 0x80) {
        for (const auto& [from, to] : kUnicode) {
          if (starts_with(text.substr(i), from)) return std::nullopt;  // a mathematical sign
        }
      }
      if (space && !words.empty()) words += ' ';
      space = false;
      letters = true;
      words += c;
    } else if (is_blank(c) || c == '~') {
      space = true;
    } else if ((c == '-' || c == '\'') && i > 0 && i + 1 < text.size() && is_letter(text[i - 1]) &&
               is_letter(text[i + 1])) {
      space = c == '-';
    } else if (c == '.' || c == '"' || c == '$' || c == '{' || c == '}' ||
               (c == '!' && i + 1 == text.size() && words.size() > 2) || (c == '(' && words.empty()) ||
               (c == ')' && text.find_first_not_of(" })", i) == std::string_view::npos)) {
      // marks that carry no meaning around words
    } else {
      return std::nullopt;
    }
  }
  if (!letters) return std::nullopt;
  words = to_lower(words);
  for (const std::string_view article : {std::string_view("the "), std::string_view("a "), std::string_view("an ")}) {
    if (starts_with(words, article)) words = words.substr(article.size());
  }
  return words;
}

}  // namespace trireme
