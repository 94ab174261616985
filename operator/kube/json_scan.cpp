#include "operator/kube/json_scan.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"
#include "base/text.h"

namespace trireme::kube {
namespace {

constexpr int kMaxDepth = 200;

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }
bool ends_scalar(char c) { return c == ',' || c == '}' || c == ']' || is_space(c); }

// Characters that matter outside strings.
constexpr std::array<bool, 256> make_structural() {
  std::array<bool, 256> table{};
  for (const unsigned char c : {'{', '}', '[', ']', '"'}) table[c] = true;
  return table;
}
constexpr std::array<bool, 256> kStructural = make_structural();

[[noreturn]] void cut() { fail_data("JSON text ends too early"); }

void skip_space(std::string_view text, size_t& at) {
  while (at < text.size() && is_space(text[at])) ++at;
}

char peek(std::string_view text, size_t& at) {
  skip_space(text, at);
  if (at >= text.size()) cut();
  return text[at];
}

// at is on the opening quote; afterwards behind the closing one. Returns the raw text between.
std::string_view skip_string(std::string_view text, size_t& at) {
  const size_t begin = ++at;
  while (true) {
    const void* quote = at < text.size() ? std::memchr(text.data() + at, '"', text.size() - at) : nullptr;
    if (!quote) cut();
    const size_t end = static_cast<size_t>(static_cast<const char*>(quote) - text.data());
    size_t backslashes = 0;
    while (end - backslashes > begin && text[end - backslashes - 1] == '\\') ++backslashes;
    at = end + 1;
    if (backslashes % 2 == 0) return text.substr(begin, end - begin);
  }
}

// at is on the first character of a value; afterwards behind its last.
void skip_value(std::string_view text, size_t& at) {
  const char first = peek(text, at);
  if (first == '"') {
    skip_string(text, at);
    return;
  }
  if (first != '{' && first != '[') {
    const size_t begin = at;
    while (at < text.size() && !ends_scalar(text[at])) ++at;
    if (at == begin) fail_data("a JSON value is missing");
    return;
  }
  int depth = 0;
  while (at < text.size()) {
    const char c = text[at];
    if (!kStructural[static_cast<unsigned char>(c)]) {
      ++at;
    } else if (c == '"') {
      skip_string(text, at);
    } else {
      ++at;
      depth += c == '{' || c == '[' ? 1 : -1;
      if (depth == 0) return;
    }
  }
  cut();
}

// Calls member(key, at): `at` is on the value and must be moved behind it. member returns false to stop.
template <class Member>
void for_members(std::string_view text, size_t& at, const Member& member) {
  if (peek(text, at) != '{') fail_data("a JSON object was expected");
  ++at;
  if (peek(text, at) == '}') {
    ++at;
    return;
  }
  while (true) {
    if (peek(text, at) != '"') fail_data("a JSON key was expected");
    const std::string_view key = skip_string(text, at);
    if (peek(text, at) != ':') fail_data("a colon was expected after a JSON key");
    ++at;
    peek(text, at);
    if (!member(key, at)) return;
    const char c = peek(text, at);
    ++at;
    if (c == '}') return;
    if (c != ',') fail_data("a comma was expected in a JSON object");
  }
}

}  // namespace

JsonFields::JsonFields(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) add(path);
}

void JsonFields::add(std::string_view path) {
  Node* node = &root_;
  for (const std::string& key : split(path, '.')) {
    auto it = std::find_if(node->children.begin(), node->children.end(), [&](const Node& n) { return n.key == key; });
    if (it == node->children.end()) it = node->children.insert(it, Node{key, false, {}});
    node = &*it;
  }
  node->keep = true;
}

const JsonFields::Node* JsonFields::Node::child(std::string_view name) const {
  const Node* any = nullptr;
  for (const Node& node : children) {
    if (node.key == name) return &node;
    if (node.key == "*") any = &node;
  }
  return any;
}

bool JsonFields::copy(std::string_view text, size_t& at, const Node& node, std::string& out, int depth) {
  if (depth > kMaxDepth) fail_data("JSON text is nested too deep");
  const char first = peek(text, at);
  const size_t begin = at;
  if (node.keep) {
    skip_value(text, at);
    out.append(text.substr(begin, at - begin));
    return true;
  }
  if (first == '{') {
    out += '{';
    bool any_member = false;
    for_members(text, at, [&](std::string_view key, size_t& value) {
      const Node* child = node.child(key);
      if (!child) {
        skip_value(text, value);
        return true;
      }
      const size_t mark = out.size();
      if (any_member) out += ',';
      out += '"';
      out.append(key);
      out += "\":";
      if (copy(text, value, *child, out, depth + 1)) {
        any_member = true;
      } else {
        out.resize(mark);
      }
      return true;
    });
    out += '}';
    return true;
  }
  if (first == '[') {
    out += '[';
    ++at;
    bool any_element = false;
    if (peek(text, at) == ']') {
      ++at;
    } else {
      while (true) {
        const size_t mark = out.size();
        if (any_element) out += ',';
        if (copy(text, at, node, out, depth + 1)) {
          any_element = true;
        } else {
          out.resize(mark);
        }
        const char c = peek(text, at);
        ++at;
        if (c == ']') break;
        if (c != ',') fail_data("a comma was expected in a JSON array");
      }
    }
    out += ']';
    return true;
  }
  skip_value(text, at);
  return false;
}

std::string JsonFields::select(std::string_view json) const {
  if (empty()) return std::string(json);
  size_t at = 0;
  std::string out;
  const char first = peek(json, at);
  if (first != '{' && first != '[') fail_data("a JSON object or array was expected");
  copy(json, at, root_, out, 0);
  skip_space(json, at);
  if (at != json.size()) fail_data("text follows the JSON value");
  return out;
}

nlohmann::json JsonFields::parse(std::string_view json) const {
  std::string reduced;
  if (!empty()) {
    reduced = select(json);
    json = reduced;
  }
  try {
    return nlohmann::json::parse(json);
  } catch (const nlohmann::json::exception& e) {
    fail_data(std::string("malformed JSON: ") + e.what());
  }
}

std::optional<std::string_view> top_level_member(std::string_view object, std::string_view key) {
  std::optional<std::string_view> found;
  try {
    size_t at = 0;
    for_members(object, at, [&](std::string_view name, size_t& value) {
      const size_t begin = value;
      skip_value(object, value);
      if (name != key) return true;
      found = object.substr(begin, value - begin);
      return false;
    });
  } catch (const Error&) {
    return std::nullopt;
  }
  return found;
}

std::optional<std::string> top_level_string(std::string_view object, std::string_view key) {
  const auto raw = top_level_member(object, key);
  if (!raw || raw->size() < 2 || raw->front() != '"') return std::nullopt;
  if (raw->find('\\') == std::string_view::npos) return std::string(raw->substr(1, raw->size() - 2));
  const nlohmann::json value = nlohmann::json::parse(*raw, nullptr, false);
  if (!value.is_string()) return std::nullopt;
  return value.get<std::string>();
}

ListSplitter::ListSplitter(std::function<void(std::string_view)> on_item, size_t max_item_bytes)
    : on_item_(std::move(on_item)), max_item_bytes_(max_item_bytes) {}

void ListSplitter::begin_value(char first) {
  value_.clear();
  depth_ = 0;
  in_string_ = false;
  escaped_ = false;
  scalar_ = first != '{' && first != '[' && first != '"';
  if (scalar_ && ends_scalar(first)) fail_data("a JSON value is missing in a list");
}

// Moves over the value that begin_value started; returns true when it is complete, with `at` behind it.
bool ListSplitter::scan_value(std::string_view chunk, size_t& at, bool capture) {
  const size_t begin = at;
  bool complete = false;
  while (at < chunk.size() && !complete) {
    if (scalar_) {
      if (ends_scalar(chunk[at])) {
        complete = true;
      } else {
        ++at;
      }
    } else if (escaped_) {
      escaped_ = false;
      ++at;
    } else if (in_string_) {
      while (at < chunk.size() && chunk[at] != '"' && chunk[at] != '\\') ++at;
      if (at == chunk.size()) break;
      if (chunk[at++] == '\\') {
        escaped_ = true;
      } else {
        in_string_ = false;
        complete = depth_ == 0;
      }
    } else {
      while (at < chunk.size() && !kStructural[static_cast<unsigned char>(chunk[at])]) ++at;
      if (at == chunk.size()) break;
      const char c = chunk[at++];
      if (c == '"') {
        in_string_ = true;
      } else if (c == '{' || c == '[') {
        ++depth_;
      } else {
        complete = --depth_ == 0;
      }
    }
  }
  if (capture) {
    if (value_.size() + (at - begin) > max_item_bytes_) {
      fail_data("an item of a list is over " + std::to_string(max_item_bytes_) + " bytes");
    }
    value_.append(chunk.substr(begin, at - begin));
  }
  return complete;
}

void ListSplitter::feed(std::string_view chunk) {
  size_t at = 0;
  while (at < chunk.size()) {
    switch (state_) {
      case State::kKey:
        scan_key(chunk, at);
        break;
      case State::kValue:
        scan_member(chunk, at);
        break;
      case State::kItem:
        scan_item(chunk, at);
        break;
      default:
        if (is_space(chunk[at]) || step(chunk[at])) ++at;
    }
  }
}

bool ListSplitter::step(char c) {
  switch (state_) {
    case State::kStart:
      if (c != '{') fail_data("the answer to a list is no JSON object");
      state_ = State::kKeyOrEnd;
      return true;
    case State::kKeyOrEnd:
      begin_key(c);
      return true;
    case State::kColon:
      if (c != ':') fail_data("a colon was expected after a JSON key in a list");
      state_ = State::kBeforeValue;
      return true;
    case State::kBeforeValue:
      return begin_member(c);
    case State::kItemOrEnd:
      return begin_item(c);
    case State::kAfterItem:
      separate(c, ']', State::kAfterValue, State::kItemOrEnd, "a comma was expected between items of a list");
      return true;
    case State::kAfterValue:
      separate(c, '}', State::kDone, State::kKeyOrEnd, "a comma was expected in a list");
      return true;
    default:
      fail_data("text follows the end of a list");
  }
}

void ListSplitter::begin_key(char c) {
  if (c == '"') {
    key_.clear();
    escaped_ = false;
    state_ = State::kKey;
  } else if (c == '}') {
    state_ = State::kDone;
  } else {
    fail_data("a JSON key was expected in a list");
  }
}

bool ListSplitter::begin_member(char c) {
  if (key_ == "items" && c == '[') {
    state_ = State::kItemOrEnd;
    return true;
  }
  begin_value(c);
  state_ = State::kValue;
  return false;
}

bool ListSplitter::begin_item(char c) {
  if (c == ']') {
    state_ = State::kAfterValue;
    return true;
  }
  if (c != '{') fail_data("an item of a list is no JSON object");
  begin_value(c);
  state_ = State::kItem;
  return false;
}

void ListSplitter::separate(char c, char end, State ended, State next, const char* otherwise) {
  if (c != end && c != ',') fail_data(otherwise);
  state_ = c == end ? ended : next;
}

void ListSplitter::scan_key(std::string_view chunk, size_t& at) {
  constexpr size_t kMaxKey = 4096;
  while (at < chunk.size()) {
    const char c = chunk[at++];
    if (!escaped_ && c == '"') {
      state_ = State::kColon;
      return;
    }
    escaped_ = !escaped_ && c == '\\';
    key_ += c;
    if (key_.size() > kMaxKey) fail_data("a JSON key in a list is too long");
  }
}

void ListSplitter::scan_member(std::string_view chunk, size_t& at) {
  const bool is_metadata = key_ == "metadata";
  if (!scan_value(chunk, at, is_metadata)) return;
  if (is_metadata) metadata_ = value_;
  state_ = State::kAfterValue;
}

void ListSplitter::scan_item(std::string_view chunk, size_t& at) {
  if (!scan_value(chunk, at, true)) return;
  state_ = State::kAfterItem;
  on_item_(value_);
}

void ListSplitter::finish() {
  if (state_ != State::kDone) fail_data("the answer to a list was cut");
}

}  // namespace trireme::kube
