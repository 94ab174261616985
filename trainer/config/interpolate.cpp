// ${a.b}, ${.b}, ${mul:a,b} and ${oc.env:NAME}: values that refer to other values.
#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "trainer/config/tree.h"

namespace trireme::config {
namespace {

constexpr size_t kMaxText = 64 << 10;
constexpr size_t kMaxResolved = 100000;
constexpr size_t kMaxNested = 32;

class Interpolator final {
 public:
  Interpolator(const Node& root, const TextLookup& fallback, const TextLookup& environment)
      : root_(root), fallback_(fallback), environment_(environment) {}

  // `path`: where the node stands, "" for the root.
  Node resolve(const Node& node, const std::string& path) {
    if (++resolved_ > kMaxResolved) fail_user(node.origin + ": interpolations make the configuration too large");
    if (node.kind == Node::Kind::kScalar) return resolve_scalar(node, path);
    Node copy = node;
    const std::string prefix = path.empty() ? "" : path + ".";
    for (size_t i = 0; i < copy.items.size(); ++i) copy.items[i] = resolve(copy.items[i], prefix + std::to_string(i));
    for (auto& [key, value] : copy.entries) value = resolve(value, prefix + key);
    return copy;
  }

 private:
  Node resolve_scalar(const Node& node, const std::string& place) {
    if (node.text.find("${") == std::string::npos) return node;
    const std::string& text = node.text;
    std::string built;
    size_t at = 0;
    while (at < text.size()) {
      const size_t open = text.find("${", at);
      if (open == std::string::npos) {
        built += text.substr(at);
        break;
      }
      if (open > at && text[open - 1] == '\\') {  // \${ stands for itself
        built += text.substr(at, open - 1 - at) + "${";
        at = open + 2;
        continue;
      }
      const size_t close = closing(text, open + 2, node.origin);
      Node value = evaluate(text.substr(open + 2, close - open - 2), node.origin, place);
      if (open == 0 && close + 1 == text.size()) {
        value.origin = node.origin;
        return value;
      }
      if (value.kind != Node::Kind::kScalar) {
        fail_user(node.origin + ": '" + text + "': only a plain value can be put inside a text");
      }
      built += text.substr(at, open - at) + value.text;
      if (built.size() > kMaxText)
        fail_user(node.origin + ": interpolation makes a text longer than " + format_bytes(kMaxText));
      at = close + 1;
    }
    Node copy = node;
    copy.text = built;
    return copy;
  }

  static size_t closing(const std::string& text, size_t from, const std::string& origin) {
    int depth = 1;
    for (size_t i = from; i < text.size(); ++i) {
      if (text[i] == '{') ++depth;
      if (text[i] == '}' && --depth == 0) return i;
    }
    fail_user(origin + ": '" + text + "': '${' without '}'");
  }

  // "..a" at "x.y.z" is "x.a": one dot is the mapping that holds the value, each further one a level above.
  static std::string absolute(const std::string& path, const std::string& place, const std::string& origin) {
    size_t dots = 0;
    while (dots < path.size() && path[dots] == '.') ++dots;
    if (dots == 0) return path;
    std::vector<std::string> parts = split(place, '.');
    if (dots > parts.size()) fail_user(origin + ": '${" + path + "}' goes above the top of the file");
    parts.resize(parts.size() - dots);
    parts.push_back(path.substr(dots));
    return join(parts, ".");
  }

  // `inside` is what stands between ${ and }; `place` the path of the value it stands in.
  Node evaluate(const std::string& inside, const std::string& origin, const std::string& place) {
    if (stack_.size() >= kMaxNested)
      fail_user(origin + ": interpolations nested more than " + std::to_string(kMaxNested) + " deep");
    const size_t colon = inside.find(':');
    if (colon != std::string::npos)
      return call(std::string(trim(inside.substr(0, colon))), inside.substr(colon + 1), origin, place);
    const std::string path = absolute(std::string(trim(inside)), place, origin);
    if (std::find(stack_.begin(), stack_.end(), path) != stack_.end()) {
      fail_user(origin + ": values refer to each other in a circle: " + join(stack_, " -> ") + " -> " + path);
    }
    if (const Node* target = root_.at(path)) {
      stack_.push_back(path);
      Node value = resolve(*target, path);
      stack_.pop_back();
      return value;
    }
    if (const auto text = fallback_(path)) {
      Node value = parse_yaml(*text, origin);
      value.origin = origin;
      return value;
    }
    fail_user(origin + ": '${" + inside + "}': there is no key '" + path + "'");
  }

  static std::vector<std::string> split_arguments(const std::string& text) {
    std::vector<std::string> parts(1);
    int depth = 0;
    for (const char c : text) {
      depth += c == '{' ? 1 : c == '}' ? -1 : 0;
      if (c == ',' && depth == 0) {
        parts.emplace_back();
      } else {
        parts.back() += c;
      }
    }
    return parts;
  }

  // ${oc.env:NAME} and ${oc.env:NAME,default}.
  Node variable(const std::vector<std::string>& parts, const std::string& origin, const std::string& place) {
    const std::string name(trim(parts[0]));
    if (parts.size() > 2) fail_user(origin + ": '${oc.env:...}': expected a variable and at most one default");
    const auto value = environment_ ? environment_(name) : std::nullopt;
    Node node;
    node.kind = Node::Kind::kScalar;
    node.origin = origin;
    if (!value && parts.size() == 1)
      fail_user(origin + ": '${oc.env:" + name + "}': the environment has no variable " + name);
    node.text = value ? *value : std::string(trim(parts[1]));
    if (value) return node;
    stack_.push_back("oc.env(...)" + std::to_string(stack_.size()));
    node = resolve_scalar(node, place);
    stack_.pop_back();
    if (node.kind == Node::Kind::kScalar && (node.text == "null" || node.text.empty())) node.kind = Node::Kind::kNull;
    return node;
  }

  Node call(const std::string& name, const std::string& arguments, const std::string& origin,
            const std::string& place) {
    static const std::vector<std::string> kNames = {"mul", "div", "add", "sub", "min", "max"};
    const std::vector<std::string> parts = split_arguments(arguments);
    if (name == "oc.env") return variable(parts, origin, place);
    if (std::find(kNames.begin(), kNames.end(), name) == kNames.end()) {
      fail_user(origin + ": '${" + name + ":...}': unknown function; there are " + join(kNames, ", ") + ", oc.env");
    }
    if (parts.size() != 2)
      fail_user(origin + ": '${" + name + ":...}': expected two numbers, got " + std::to_string(parts.size()));
    stack_.push_back(name + "(...)" + std::to_string(stack_.size()));  // counts as a level of nesting
    std::optional<int64_t> whole[2];
    double number[2];
    for (int i = 0; i < 2; ++i) {
      Node argument;
      argument.kind = Node::Kind::kScalar;
      argument.text = trim(parts[i]);
      argument.origin = origin;
      const Node value = resolve_scalar(argument, place);
      const auto parsed = value.kind == Node::Kind::kScalar ? parse_double(value.text) : std::nullopt;
      if (!parsed) fail_user(origin + ": '${" + name + ":...}': '" + argument.text + "' is not a number");
      number[i] = *parsed;
      whole[i] = parse_int(value.text);
    }
    stack_.pop_back();
    Node node;
    node.kind = Node::Kind::kScalar;
    node.origin = origin;
    node.text = whole[0] && whole[1] ? compute_whole(name, *whole[0], *whole[1], origin)
                                     : compute(name, number[0], number[1], origin);
    return node;
  }

  static std::string compute_whole(const std::string& name, int64_t a, int64_t b, const std::string& origin) {
    int64_t result = 0;
    bool overflow = false;
    if (name == "mul") {
      overflow = __builtin_mul_overflow(a, b, &result);
    } else if (name == "add") {
      overflow = __builtin_add_overflow(a, b, &result);
    } else if (name == "sub") {
      overflow = __builtin_sub_overflow(a, b, &result);
    } else if (name == "min") {
      result = std::min(a, b);
    } else if (name == "max") {
      result = std::max(a, b);
    } else {
      if (b != 0 && b != -1 && a % b == 0) return std::to_string(a / b);
      return compute(name, static_cast<double>(a), static_cast<double>(b), origin);
    }
    if (overflow) fail_user(origin + ": '${" + name + ":...}': the result is too large");
    return std::to_string(result);
  }

  static std::string compute(const std::string& name, double a, double b, const std::string& origin) {
    if (name == "div" && b == 0) fail_user(origin + ": '${div:...}': division by zero");
    return format_double(name == "mul"   ? a * b
                         : name == "div" ? a / b
                         : name == "add" ? a + b
                         : name == "sub" ? a - b
                         : name == "min" ? std::min(a, b)
                                         : std::max(a, b));
  }

  const Node& root_;
  const TextLookup& fallback_;
  const TextLookup& environment_;
  std::vector<std::string> stack_;
  size_t resolved_ = 0;
};

}  // namespace

void interpolate(Node& root, const TextLookup& fallback, const TextLookup& environment) {
  root = Interpolator(root, fallback, environment).resolve(root, "");
}

}  // namespace trireme::config
