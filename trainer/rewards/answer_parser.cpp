#include "trainer/rewards/answer_parser.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/text.h"
#include "trainer/rewards/answer_matrix.h"
#include "trainer/rewards/answer_nodes.h"
#include "trainer/rewards/answer_relation.h"
#include "trainer/rewards/answer_units.h"

namespace trireme {
namespace {

constexpr int kMaxDepth = 60;

// Words before or after a number that change what it says.
bool turns_meaning(const std::string& word) {
  static const std::array<std::string_view, 12> words = {"not",  "least", "most",  "more",  "less",  "than",
                                                         "over", "under", "fewer", "below", "above", "except"};
  return std::find(words.begin(), words.end(), word) != words.end();
}

class Parser final {
 public:
  Parser(std::vector<Token> tokens, bool letter_units) : tokens_(std::move(tokens)), letter_units_(letter_units) {}

  NodePtr run() {
    std::vector<NodePtr> items;
    std::string separators;
    if (!list(items, &separators) || peek().kind != TokenKind::kEnd) return nullptr;
    return gather(points(std::move(items), separators), NodeKind::kList);
  }

 private:
  struct Deeper {
    explicit Deeper(int& depth) : depth_(depth) { ++depth_; }
    ~Deeper() { --depth_; }
    int& depth_;
  };

  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  bool at_sign(char sign, size_t ahead = 0) const {
    return peek(ahead).kind == TokenKind::kSign && peek(ahead).sign == sign;
  }
  bool at_word(size_t ahead = 0) const { return peek(ahead).kind == TokenKind::kWord; }
  bool at_number(size_t ahead = 0) const { return peek(ahead).kind == TokenKind::kNumber; }
  bool accept(char sign) {
    if (!at_sign(sign)) return false;
    ++at_;
    return true;
  }
  bool at_separator() const {
    return at_sign(',') || at_sign(';') || (at_word() && (peek().text == "and" || peek().text == "or"));
  }

  // The one item itself, or a list (set) of them, with every plus-minus written out as two.
  static NodePtr gather(std::vector<NodePtr> items, NodeKind kind) {
    auto node = make(kind);
    for (NodePtr& item : items) {
      if (has_either_sign(*item)) {
        node->children.push_back(with_sign(*item, true));
        node->children.push_back(with_sign(*item, false));
      } else {
        node->children.push_back(std::move(item));
      }
    }
    if (kind == NodeKind::kList && node->children.size() == 1) return std::move(node->children[0]);
    return node;
  }

  // separators: the sign between each item and the next (',' for a word).
  bool list(std::vector<NodePtr>& items, std::string* separators = nullptr) {
    while (true) {
      NodePtr one = item();
      if (!one) return false;
      items.push_back(std::move(one));
      if (!at_separator()) return true;
      if (separators) *separators += at_sign(';') ? ';' : ',';
      while (at_separator()) ++at_;
      if (peek().kind == TokenKind::kEnd) return true;
    }
  }

  NodePtr item() {
    const Deeper deeper(depth_);
    if (depth_ > kMaxDepth) return nullptr;
    std::string words;
    bool negative = false;
    while (at_word() && !at_separator()) {
      const std::string& word = peek().text;
      if (!words.empty()) words += ' ';
      words += word;
      negative = word == "negative" || word == "minus";
      ++at_;
    }
    if (!words.empty()) {
      if (peek().kind == TokenKind::kEnd || at_separator() || at_closing()) return make(NodeKind::kText, words);
      for (const std::string& word : split(words, ' ')) {
        if (turns_meaning(word)) return nullptr;
      }
      if (!accept('=') && !accept(sign::kApprox)) accept(':');
    } else if (at_sign(sign::kApprox)) {
      ++at_;
    }
    NodePtr first = operand();
    if (!first) return nullptr;
    std::vector<NodePtr> operands;
    std::vector<char> signs;
    operands.push_back(std::move(first));
    while (at_relation()) {
      signs.push_back(peek().sign);
      ++at_;
      NodePtr next = operand();
      if (!next) return nullptr;
      operands.push_back(std::move(next));
    }
    NodePtr whole = signs.empty() ? std::move(operands[0]) : make_relation(std::move(operands), signs);
    if (whole && negative) {
      auto flipped = negated(std::move(whole));
      flipped->unit = flipped->children[0]->unit;
      flipped->percent = flipped->children[0]->percent;
      return flipped;
    }
    return whole;
  }

  bool at_closing() const {
    if (peek().kind == TokenKind::kMatrixEnd) return true;
    if (peek().kind != TokenKind::kSign) return false;
    switch (peek().sign) {
      case ')':
      case ']':
      case '}':
      case '|':
      case sign::kSetClose:
      case sign::kAngleClose:
      case sign::kFloorClose:
      case sign::kCeilClose:
      case sign::kRowBreak:
      case sign::kCell:
        return true;
      default:
        return false;
    }
  }

  bool at_relation() const {
    if (peek().kind != TokenKind::kSign) return false;
    switch (peek().sign) {
      case '=':
      case '<':
      case '>':
      case sign::kLessEqual:
      case sign::kGreaterEqual:
      case sign::kNotEqual:
      case sign::kApprox:
      case sign::kIn:
        return true;
      default:
        return false;
    }
  }

  // A set expression with its unit.
  NodePtr operand() {
    NodePtr node = set_expression();
    if (!node) return nullptr;
    if (node->kind == NodeKind::kPercent) {
      node = std::move(node->children[0]);
      node->percent = true;
    } else if (node->kind == NodeKind::kDegrees) {
      const std::string scale = node->text.empty() ? "degree" : node->text;
      node = std::move(node->children[0]);
      node->unit = scale;
    } else if (node->kind == NodeKind::kSum && node->children.size() == 1 &&
               (node->children[0]->kind == NodeKind::kPercent ||
                node->children[0]->kind == NodeKind::kDegrees)) {  // -5%
      node->percent = node->children[0]->kind == NodeKind::kPercent;
      if (!node->percent) node->unit = node->children[0]->text.empty() ? "degree" : node->children[0]->text;
      node->children[0] = std::move(node->children[0]->children[0]);
    }
    return unit(std::move(node));
  }

  bool at_unit_letter(size_t ahead) const {
    const Token& token = peek(ahead);
    if (token.kind != TokenKind::kSymbol || token.text.size() != 1) return false;
    return std::string_view("msghlLNJWVAK").find(token.text[0]) != std::string_view::npos;
  }
  // "5 m", "3 m/s", "4 m^2": a letter that is a unit rather than a factor.
  bool at_bare_unit() const {
    if (!at_unit_letter(0) || at_ == 0 || tokens_[at_ - 1].kind != TokenKind::kNumber) return false;
    if (!peek().space_before && !letter_units_) return false;
    if (at_sign('/', 1)) return at_word(2) || at_unit_letter(2);
    if (at_sign('^', 1)) return true;
    const Token& next = peek(1);
    return next.kind == TokenKind::kEnd || next.kind == TokenKind::kWord || at_sign(',', 1) || at_sign(')', 1) ||
           at_sign(';', 1);
  }

  // Reads "cm^2", "km per hour", "square metres", "million dollars", "apples" behind a number.
  NodePtr unit(NodePtr node) {
    if (at_sign('(') && at_word(1) && at_sign(')', 2)) {  // 5 (cm)
      tokens_[at_ + 2].sign = 0;
      ++at_;
    }
    if (!at_word() && !at_bare_unit()) return node;
    if (at_separator()) return node;
    std::string above, below;
    std::string prefix;
    bool per = false;
    while (true) {
      if (at_sign(0)) {
        ++at_;
        continue;
      }
      if (at_sign('/') && (at_word(1) || at_unit_letter(1))) {
        per = true;
        ++at_;
        continue;
      }
      if ((at_sign('*') || at_sign('-')) && at_word(1)) {
        ++at_;
        continue;
      }
      const bool letter = at_unit_letter(0);
      if ((!at_word() || at_separator()) && !letter) break;
      const std::string word = to_lower(peek().text);
      if (turns_meaning(word)) return nullptr;
      ++at_;
      if (word == "per")
        per = true;
      else if (word == "percent" || word == "percentage")
        node->percent = true;
      else if (word == "square" || word == "sq")
        prefix = "2";
      else if (word == "cubic" || word == "cu")
        prefix = "3";
      else if (const auto scale = scale_word(word); scale && above.empty()) {
        auto scaled = make(NodeKind::kProduct, std::move(node), number(*scale));
        scaled->flags = {kPlain, kPlain};
        scaled->unit = std::exchange(scaled->children[0]->unit, "");
        node = std::move(scaled);
      } else {
        std::string exponent = std::exchange(prefix, "");
        if (at_word() && (peek().text == "squared" || peek().text == "cubed")) {
          exponent = peek().text == "squared" ? "2" : "3";
          ++at_;
        }
        bool inverse = per;
        if (at_sign('^')) {
          size_t k = 1;
          const bool braced = at_sign('{', k);
          if (braced) ++k;
          if (at_sign('-', k)) {
            inverse = true;
            ++k;
          }
          if (!at_number(k)) return nullptr;
          exponent = peek(k).text == "1" ? "" : peek(k).text;
          ++k;
          if (braced && !at_sign('}', k)) return nullptr;
          at_ += k + (braced ? 1 : 0);
        }
        const std::string canonical = canonical_unit(word);
        if (canonical == "celsius" || canonical == "fahrenheit") above.clear();  // degrees of that scale
        if (!canonical.empty())
          (inverse ? below : above) += (inverse ? "/" : (above.empty() ? "" : "*")) + canonical + exponent;
        per = false;
      }
    }
    if (!(above + below).empty()) node->unit = above + below;
    return node;
  }

  NodePtr set_expression() {
    NodePtr left = ratio();
    while (left && peek().kind == TokenKind::kSign &&
           (peek().sign == sign::kUnion || peek().sign == sign::kIntersection || peek().sign == sign::kDifference)) {
      const NodeKind kind = at_sign(sign::kUnion)          ? NodeKind::kUnion
                            : at_sign(sign::kIntersection) ? NodeKind::kIntersection
                                                           : NodeKind::kDifference;
      ++at_;
      NodePtr right = ratio();
      if (!right) return nullptr;
      if (left->kind == kind && kind != NodeKind::kDifference)
        left->children.push_back(std::move(right));
      else if (++nested_sets_ > kMaxDepth)
        return nullptr;
      else
        left = make(kind, std::move(left), std::move(right));
    }
    return left;
  }

  NodePtr ratio() {
    NodePtr first = sum();
    if (!first || !at_sign(':')) return first;
    auto node = make(NodeKind::kRatio, std::move(first));
    while (accept(':')) {
      NodePtr next = sum();
      if (!next) return nullptr;
      node->children.push_back(std::move(next));
    }
    return node;
  }

  static std::optional<uint8_t> additive(const Token& token) {
    if (token.kind != TokenKind::kSign) return std::nullopt;
    switch (token.sign) {
      case '+':
        return kPlain;
      case '-':
        return kInverse;
      case sign::kPlusMinus:
        return kEitherSign;
      case sign::kMinusPlus:
        return kOtherSign;
      default:
        return std::nullopt;
    }
  }

  NodePtr sum() {
    const Deeper deeper(depth_);
    if (depth_ > kMaxDepth) return nullptr;
    auto node = make(NodeKind::kSum);
    uint8_t flag = kPlain;
    if (const auto leading = additive(peek())) {
      flag = *leading;
      ++at_;
    }
    while (true) {
      NodePtr term = product();
      if (!term) return nullptr;
      node->children.push_back(std::move(term));
      node->flags.push_back(flag);
      const auto next = additive(peek());
      if (!next) break;
      flag = *next;
      ++at_;
    }
    if (node->children.size() == 1 && node->flags[0] == kPlain) return std::move(node->children[0]);
    return with_matrices_computed(std::move(node));
  }

  bool at_primary() const {
    const Token& token = peek();
    switch (token.kind) {
      case TokenKind::kSymbol:
        return !at_bare_unit();
      case TokenKind::kFunction:
      case TokenKind::kFraction:
      case TokenKind::kRoot:
      case TokenKind::kBinomial:
      case TokenKind::kMatrixBegin:
        return true;
      case TokenKind::kNumber:
        return at_ > 0 && tokens_[at_ - 1].kind != TokenKind::kNumber;
      case TokenKind::kSign:
        return (token.sign == '(' && !(at_word(1) && at_sign(')', 2))) || token.sign == '{' ||
               token.sign == sign::kFloorOpen || token.sign == sign::kCeilOpen ||
               (token.sign == '|' && bars_ == 0 && sets_ == 0) ||
               (token.sign == '[' && at_ > 0 && tokens_[at_ - 1].kind != TokenKind::kSign);
      default:
        return false;
    }
  }

  NodePtr product() {
    auto node = make(NodeKind::kProduct);
    NodePtr first = signed_factor();
    if (!first) return nullptr;
    node->children.push_back(std::move(first));
    node->flags.push_back(kPlain);
    while (true) {
      uint8_t flag = kPlain;
      if (at_sign('*') && at_word(1)) break;  // N * m
      if (at_sign('/') && at_word(1)) break;  // 5 /hour
      if (accept('*'))
        flag = kPlain;
      else if (accept('/'))
        flag = kInverse;
      else if (!at_primary())
        break;
      NodePtr next = signed_factor();
      if (!next) return nullptr;
      node->children.push_back(std::move(next));
      node->flags.push_back(flag);
    }
    if (node->children.size() == 1) return std::move(node->children[0]);
    return with_matrices_computed(std::move(node));
  }

  NodePtr signed_factor() {
    const Deeper deeper(depth_);
    if (depth_ > kMaxDepth) return nullptr;
    if (accept('-')) {
      NodePtr child = signed_factor();
      return child ? negated(std::move(child)) : nullptr;
    }
    accept('+');
    return factor();
  }

  // An angle, or a temperature when a scale follows (its name in text).
  NodePtr degrees(NodePtr child) {
    auto node = make(NodeKind::kDegrees, std::move(child));
    const std::string scale = at_word() || peek().kind == TokenKind::kSymbol ? to_lower(peek().text) : "";
    if (scale != "c" && scale != "f") return node;
    ++at_;
    node->text = scale == "c" ? "celsius" : "fahrenheit";
    return node;
  }

  NodePtr factor() {
    NodePtr base = primary();
    int posts = 0;
    while (base) {
      if (++posts > 8) return nullptr;
      if (accept('!'))
        base = make(NodeKind::kFactorial, std::move(base));
      else if (accept('%'))
        base = make(NodeKind::kPercent, std::move(base));
      else if (accept(sign::kDegree))
        base = degrees(std::move(base));
      else if (at_sign('^')) {
        ++at_;
        if (accept(sign::kDegree))
          base = degrees(std::move(base));
        else if (at_sign('{') && at_sign(sign::kDegree, 1) && at_sign('}', 2)) {
          at_ += 3;
          base = degrees(std::move(base));
        } else {
          NodePtr exponent = power_argument();
          if (!exponent) return nullptr;
          base = make(NodeKind::kPower, std::move(base), std::move(exponent));
        }
      } else {
        return base;
      }
    }
    return base;
  }

  // Right-associative: 2^3^4 = 2^(3^4).
  NodePtr power_argument() {
    const Deeper deeper(depth_);
    if (depth_ > kMaxDepth) return nullptr;
    if (accept('-')) {
      NodePtr child = power_argument();
      return child ? negated(std::move(child)) : nullptr;
    }
    accept('+');
    NodePtr base = primary();
    if (!base || !accept('^')) return base;
    NodePtr exponent = power_argument();
    return exponent ? make(NodeKind::kPower, std::move(base), std::move(exponent)) : nullptr;
  }

  // The argument of \frac, \sqrt, \binom: {...}, or one digit, or one symbol.
  NodePtr argument() {
    if (at_number() && peek().text.size() > 1 && peek().text.find('.') == std::string::npos && peek().exponent == 0) {
      Token& token = tokens_[at_];
      NodePtr digit = make(NodeKind::kNumber, token.text.substr(0, 1));
      token.text.erase(0, 1);
      return digit;
    }
    return primary();
  }

  NodePtr primary() {
    const Deeper deeper(depth_);
    if (depth_ > kMaxDepth) return nullptr;
    const Token token = peek();
    switch (token.kind) {
      case TokenKind::kNumber:
        return number_or_mixed();
      case TokenKind::kSymbol: {
        ++at_;
        auto node = make(NodeKind::kSymbol, token.text);
        if (accept('_')) {
          const std::string subscript = subscript_text();
          if (subscript.empty()) return nullptr;
          node->text += "_" + subscript;
        }
        return node;
      }
      case TokenKind::kFunction:
        return function();
      case TokenKind::kFraction: {
        ++at_;
        NodePtr top = argument();
        NodePtr bottom = top ? argument() : nullptr;
        if (!bottom) return nullptr;
        auto node = make(NodeKind::kProduct, std::move(top), std::move(bottom));
        node->flags = {kPlain, kInverse};
        return node;
      }
      case TokenKind::kRoot: {
        ++at_;
        NodePtr index = number(token.text == "3" ? 3 : 2);
        if (token.text.empty() && accept('[')) {
          index = sum();
          if (!index || !accept(']')) return nullptr;
        }
        NodePtr radicand = token.text.empty() ? argument() : primary();
        return radicand ? make(NodeKind::kRoot, std::move(radicand), std::move(index)) : nullptr;
      }
      case TokenKind::kBinomial: {
        ++at_;
        NodePtr n = argument();
        NodePtr k = n ? argument() : nullptr;
        return k ? make(NodeKind::kBinomial, std::move(n), std::move(k)) : nullptr;
      }
      case TokenKind::kMatrixBegin:
        return matrix();
      case TokenKind::kSign:
        return bracketed(token.sign);
      default:
        return nullptr;
    }
  }

  std::string subscript_text() {
    std::string text;
    if (!at_sign('{')) {
      if (peek().kind == TokenKind::kNumber || peek().kind == TokenKind::kSymbol || at_word())
        text = tokens_[at_++].text;
      return text;
    }
    ++at_;
    while (!at_sign('}')) {
      if (peek().kind == TokenKind::kEnd || text.size() > 64) return "";
      text += peek().kind == TokenKind::kSign ? std::string(1, peek().sign) : peek().text;
      ++at_;
    }
    ++at_;
    return text;
  }

  NodePtr number_or_mixed() {
    const Token token = tokens_[at_++];
    auto node = make(NodeKind::kNumber, token.text);
    node->repeat = token.repeat;
    node->exponent = token.exponent;
    const auto whole = [](const Token& t) {
      return t.kind == TokenKind::kNumber && t.text.find('.') == std::string::npos && t.exponent == 0;
    };
    if (accept('_')) {
      const std::string base = subscript_text();
      if (base.empty()) return nullptr;
      node->unit = "base" + (number_word(base) ? std::to_string(*number_word(base)) : base);
      return node;
    }
    if (!whole(token)) return node;
    // 3 1/2 and 3\frac{1}{2} are mixed numbers; 3\frac{5}{2} is a product.
    NodePtr part;
    const auto proper = [](const std::string& a, const std::string& b) {
      return a.size() < b.size() || (a.size() == b.size() && a < b);
    };
    if (whole(peek()) && at_sign('/', 1) && whole(peek(2)) && proper(peek().text, peek(2).text)) {
      part = make(NodeKind::kProduct, make(NodeKind::kNumber, peek().text), make(NodeKind::kNumber, peek(2).text));
      at_ += 3;
    } else if (peek().kind == TokenKind::kFraction) {
      size_t top = 0, bottom = 0, end = 0;
      if (at_sign('{', 1) && whole(peek(2)) && at_sign('}', 3) && at_sign('{', 4) && whole(peek(5)) && at_sign('}', 6))
        top = 2, bottom = 5, end = 7;
      else if (whole(peek(1)) && peek(1).text.size() == 2 && peek(1).text[0] < peek(1).text[1]) {  // 3\frac12
        part = make(NodeKind::kProduct, make(NodeKind::kNumber, peek(1).text.substr(0, 1)),
                    make(NodeKind::kNumber, peek(1).text.substr(1)));
        at_ += 2;
      }
      if (end > 0 && proper(peek(top).text, peek(bottom).text)) {
        part = make(NodeKind::kProduct, make(NodeKind::kNumber, peek(top).text),
                    make(NodeKind::kNumber, peek(bottom).text));
        at_ += end;
      }
    }
    if (!part) return node;
    part->flags = {kPlain, kInverse};
    auto mixed = make(NodeKind::kSum, std::move(node), std::move(part));
    mixed->flags = {kPlain, kPlain};
    return mixed;
  }

  NodePtr function() {
    std::string name = tokens_[at_++].text;
    NodePtr base, exponent;
    if (name == "log" && accept('_')) {
      base = argument();
      if (!base) return nullptr;
    }
    if (accept('^')) {
      exponent = power_argument();
      if (!exponent) return nullptr;
      const bool inverse = exponent->kind == NodeKind::kSum && exponent->children.size() == 1 &&
                           exponent->flags[0] == kInverse && exponent->children[0]->kind == NodeKind::kNumber &&
                           exponent->children[0]->text == "1";
      if (inverse && (name == "sin" || name == "cos" || name == "tan")) {
        name = "arc" + name;
        exponent = nullptr;
      }
    }
    NodePtr inner;
    if (at_sign('(') || at_sign('{') || at_sign('[')) {
      inner = primary();
    } else {
      auto factors = make(NodeKind::kProduct);
      do {
        NodePtr next = factor();
        if (!next) return nullptr;
        factors->children.push_back(std::move(next));
        factors->flags.push_back(kPlain);
      } while (at_primary() && peek().kind != TokenKind::kFunction);
      inner = factors->children.size() == 1 ? std::move(factors->children[0]) : std::move(factors);
    }
    if (!inner) return nullptr;
    auto node = make(NodeKind::kFunction, std::move(inner), std::move(base));
    node->text = name;
    return exponent ? make(NodeKind::kPower, std::move(node), std::move(exponent)) : std::move(node);
  }

  NodePtr matrix() {
    ++at_;
    auto node = make(NodeKind::kMatrix);
    auto row = make(NodeKind::kList);
    while (true) {
      NodePtr cell = item();
      if (!cell) return nullptr;
      row->children.push_back(std::move(cell));
      if (accept(sign::kCell)) continue;
      const bool more = accept(sign::kRowBreak);
      node->children.push_back(std::exchange(row, make(NodeKind::kList)));
      if (peek().kind == TokenKind::kMatrixEnd) break;
      if (!more) return nullptr;
    }
    ++at_;
    return node;
  }

  // What a bracket encloses, as part of an expression when it is one thing.
  static NodePtr as_term(NodePtr node) {
    if (node->percent) {
      node->percent = false;
      return make(NodeKind::kPercent, std::move(node));
    }
    if (node->unit == "degree") {
      node->unit.clear();
      return make(NodeKind::kDegrees, std::move(node));
    }
    return node;
  }

  NodePtr bracketed(char open) {
    std::vector<NodePtr> items;
    ++at_;
    switch (open) {
      case '|': {
        ++bars_;
        NodePtr inside = sum();
        --bars_;
        if (!inside || !accept('|')) return nullptr;
        auto node = make(NodeKind::kFunction, std::move(inside));
        node->text = "abs";
        return node;
      }
      case sign::kFloorOpen:
      case sign::kCeilOpen: {
        NodePtr inside = sum();
        if (!inside || !accept(open == sign::kFloorOpen ? sign::kFloorClose : sign::kCeilClose)) return nullptr;
        auto node = make(NodeKind::kFunction, std::move(inside));
        node->text = open == sign::kFloorOpen ? "floor" : "ceil";
        return node;
      }
      case sign::kSetOpen:
        return set();
      case '{': {
        if (accept('}')) return make(NodeKind::kSet);
        const int bars = std::exchange(bars_, 0), sets = std::exchange(sets_, 0);
        const bool read = list(items);
        bars_ = bars, sets_ = sets;
        if (!read || !accept('}')) return nullptr;
        if (items.size() == 1 && !has_either_sign(*items[0])) return as_term(std::move(items[0]));
        if (items.size() == 1) return std::move(items[0]);
        NodePtr node = gather(std::move(items), NodeKind::kSet);
        node->text = "{}";  // braces nobody sees: a set or a list
        return node;
      }
      case '(':
      case '[':
      case sign::kAngleOpen: {
        auto node = make(NodeKind::kGroup);
        const int bars = std::exchange(bars_, 0), sets = std::exchange(sets_, 0);
        const bool empty = at_sign(')') || at_sign(']');
        const bool read = empty || list(items);
        bars_ = bars, sets_ = sets;
        if (!read) return nullptr;
        char close = 0;
        if (accept(')'))
          close = ')';
        else if (accept(']'))
          close = ']';
        else if (accept(sign::kAngleClose))
          close = sign::kAngleClose;
        if (close == 0 || (open == sign::kAngleOpen) != (close == sign::kAngleClose)) return nullptr;
        node->text = open == sign::kAngleOpen ? "()" : std::string{open, close};
        if (items.size() == 1) return (open == '(') == (close == ')') ? as_term(std::move(items[0])) : nullptr;
        node->children = std::move(items);
        return node;
      }
      default:
        return nullptr;
    }
  }

  NodePtr set() {
    if (accept(sign::kSetClose)) return make(NodeKind::kSet);
    std::vector<NodePtr> items;
    const int bars = std::exchange(bars_, 0);
    ++sets_;
    const bool read = list(items);
    --sets_;
    bars_ = bars;
    if (!read) return nullptr;
    if (items.size() == 1 && accept('|')) {  // {x | x > 2}: the condition says it
      items.clear();
      if (!list(items) || !accept(sign::kSetClose)) return nullptr;
      return gather(std::move(items), NodeKind::kList);
    }
    if (!accept(sign::kSetClose)) return nullptr;
    return gather(std::move(items), NodeKind::kSet);
  }

  std::vector<Token> tokens_;
  size_t at_ = 0;
  int depth_ = 0;
  int nested_sets_ = 0;
  int bars_ = 0;  // open absolute values
  int sets_ = 0;  // open set braces, where '|' means "such that"
  bool letter_units_;
};

}  // namespace

NodePtr parse_final_answer(std::vector<Token> tokens, bool letter_units) {
  return Parser(std::move(tokens), letter_units).run();
}

}  // namespace trireme
