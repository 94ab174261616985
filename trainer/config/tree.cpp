#include "trainer/config/tree.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"

namespace trireme::config {
namespace {

constexpr size_t kMaxFileBytes = 1 << 20;
constexpr int kMaxDepth = 64;
const std::string kOverride = "override '";
constexpr size_t kMaxNodes = 100000;  // aliases can blow a small file up
constexpr size_t kMaxInherited = 32;

struct Converter {
  const std::string& name;
  size_t nodes = 0;

  std::string origin(const YAML::Node& node) const {
    const int line = node.Mark().line;
    return line >= 0 ? name + ":" + std::to_string(line + 1) : name;
  }

  Node convert(const YAML::Node& yaml, int depth) {
    Node node;
    node.origin = origin(yaml);
    if (depth > kMaxDepth) fail_user(node.origin + ": nested more than " + std::to_string(kMaxDepth) + " levels deep");
    if (++nodes > kMaxNodes) fail_user(node.origin + ": more than " + std::to_string(kMaxNodes) + " values");
    switch (yaml.Type()) {
      case YAML::NodeType::Undefined:
      case YAML::NodeType::Null:
        break;
      case YAML::NodeType::Scalar:
        node.text = yaml.Scalar();
        node.quoted = yaml.Tag() == "!" || yaml.Tag() == "tag:yaml.org,2002:str";
        node.kind = Node::Kind::kScalar;
        break;
      case YAML::NodeType::Sequence:
        node.kind = Node::Kind::kList;
        for (const auto& item : yaml) node.items.push_back(convert(item, depth + 1));
        break;
      case YAML::NodeType::Map:
        node.kind = Node::Kind::kMap;
        for (const auto& entry : yaml) {
          if (!entry.first.IsScalar()) fail_user(origin(entry.first) + ": a key must be plain text");
          const std::string& key = entry.first.Scalar();
          if (node.find(key)) fail_user(origin(entry.first) + ": key '" + key + "' is given twice");
          Node value = convert(entry.second, depth + 1);
          value.origin = origin(entry.first);
          node.entries.emplace_back(key, std::move(value));
        }
        break;
    }
    return node;
  }
};

bool replaces(const Node& child) {
  const Node* mark = child.find("_override_");
  if (!mark) return false;
  if (mark->kind != Node::Kind::kScalar || (mark->text != "true" && mark->text != "false")) {
    fail_user(mark->origin + ": _override_: must be true or false");
  }
  return mark->text == "true";
}

void strip_override_marks(Node& node) {
  replaces(node);  // checks a mark that no merge has read
  auto& entries = node.entries;
  entries.erase(std::remove_if(entries.begin(), entries.end(), [](const auto& e) { return e.first == "_override_"; }),
                entries.end());
  for (auto& [key, value] : entries) strip_override_marks(value);
  for (Node& item : node.items) strip_override_marks(item);
}

void merge_marked(Node& parent, Node child) {
  if (parent.kind != Node::Kind::kMap || child.kind != Node::Kind::kMap || replaces(child)) {
    parent = std::move(child);
    return;
  }
  for (auto& [key, value] : child.entries) {
    if (Node* existing = parent.find(key)) {
      merge_marked(*existing, std::move(value));
    } else {
      parent.entries.emplace_back(key, std::move(value));
    }
  }
}

Node load_with_defaults(const std::string& text, const std::filesystem::path& path,
                        std::vector<std::filesystem::path>& chain);

Node load_file(const std::filesystem::path& path, const std::string& asked_by,
               std::vector<std::filesystem::path>& chain) {
  std::error_code ignored;
  const auto absolute = std::filesystem::weakly_canonical(path, ignored);
  const auto key = absolute.empty() ? path : absolute;
  if (std::find(chain.begin(), chain.end(), key) != chain.end()) {
    std::string names;
    for (const auto& link : chain) names += link.filename().string() + " -> ";
    fail_user(asked_by + ": defaults: files inherit each other in a circle: " + names + path.filename().string());
  }
  if (chain.size() >= kMaxInherited)
    fail_user(asked_by + ": defaults: more than " + std::to_string(kMaxInherited) + " files deep");
  std::string text;
  try {
    if (std::filesystem::file_size(path, ignored) > kMaxFileBytes && !ignored) {
      fail_user(path.string() + ": larger than " + format_bytes(kMaxFileBytes) + ": not a configuration file");
    }
    text = read_file(path);
  } catch (const Error& error) {
    if (asked_by.empty() || error.kind() == ErrorKind::kUser) throw;
    fail_user(asked_by + ": defaults: " + error.what());
  }
  chain.push_back(key);
  Node node = load_with_defaults(text, path, chain);
  chain.pop_back();
  return node;
}

Node load_with_defaults(const std::string& text, const std::filesystem::path& path,
                        std::vector<std::filesystem::path>& chain) {
  Node child = parse_yaml(text, path.string());
  if (child.kind == Node::Kind::kNull) child.kind = Node::Kind::kMap;
  if (child.kind != Node::Kind::kMap) fail_user(child.origin + ": expected a mapping of sections, e.g. 'grpo:'");
  Node merged;
  merged.kind = Node::Kind::kMap;
  merged.origin = child.origin;
  if (const Node* defaults = child.find("defaults")) {
    std::vector<const Node*> parents;
    if (defaults->kind == Node::Kind::kList) {
      for (const Node& item : defaults->items) parents.push_back(&item);
    } else {
      parents.push_back(defaults);
    }
    for (const Node* parent : parents) {
      if (parent->kind != Node::Kind::kScalar || parent->text.empty()) {
        fail_user(parent->origin + ": defaults: expected a file name or a list of them");
      }
      if (parent->text == "_self_") continue;  // Hydra's mark for "this file", always last here
      merge_marked(merged, load_file(path.parent_path() / parent->text, parent->origin, chain));
    }
    child.entries.erase(
        std::find_if(child.entries.begin(), child.entries.end(), [](const auto& e) { return e.first == "defaults"; }));
  }
  merge_marked(merged, std::move(child));
  return merged;
}

}  // namespace

Node* Node::find(std::string_view key) {
  for (auto& [name, value] : entries) {
    if (name == key) return &value;
  }
  return nullptr;
}

const Node* Node::find(std::string_view key) const { return const_cast<Node*>(this)->find(key); }

const Node* Node::at(std::string_view path) const {
  const Node* node = this;
  for (const std::string& part : split(path, '.')) {
    if (node->kind == Kind::kList) {
      const auto index = parse_int(part);
      if (!index || *index < 0 || *index >= static_cast<int64_t>(node->items.size())) return nullptr;
      node = &node->items[static_cast<size_t>(*index)];
    } else {
      node = node->find(part);
    }
    if (!node) return nullptr;
  }
  return node;
}

Node& Node::make(std::string_view path, const std::string& where) {
  Node* node = this;
  for (const std::string& part : split(path, '.')) {
    if (part.empty()) fail_user(where + ": '" + std::string(path) + "' is not a key");
    if (node->kind == Kind::kNull) {
      node->kind = Kind::kMap;
      node->origin = where;
    }
    if (node->kind != Kind::kMap) {
      fail_user(where + ": '" + part + "' is below a value that is not a mapping (" + node->origin +
                "); set that value as a whole");
    }
    Node* next = node->find(part);
    if (!next) {
      node->entries.emplace_back(part, Node{});
      next = &node->entries.back().second;
      next->origin = where;
    }
    node = next;
  }
  return *node;
}

Node parse_yaml(const std::string& text, const std::string& name) {
  if (text.size() > kMaxFileBytes)
    fail_user(name + ": larger than " + format_bytes(kMaxFileBytes) + ": not a configuration");
  if (!is_valid_utf8(text)) fail_user(name + ": not UTF-8 text");
  try {
    Converter converter{name};
    return converter.convert(YAML::Load(text), 0);
  } catch (const YAML::Exception& error) {
    fail_user(name + (error.mark.is_null() ? "" : ":" + std::to_string(error.mark.line + 1)) +
              ": not YAML: " + error.msg);
  }
}

void merge(Node& parent, Node child) {
  merge_marked(parent, std::move(child));
  strip_override_marks(parent);
}

Node load_tree(const std::filesystem::path& path) {
  std::vector<std::filesystem::path> chain;
  Node node = load_file(path, "", chain);
  strip_override_marks(node);
  return node;
}

Node load_tree_text(const std::string& text, const std::filesystem::path& origin) {
  std::vector<std::filesystem::path> chain;
  Node node = load_with_defaults(text, origin, chain);
  strip_override_marks(node);
  return node;
}

bool is_override(const std::string& origin) { return starts_with(origin, kOverride); }

void apply_override(Node& root, const std::string& text) {
  const size_t equals = text.find('=');
  std::string_view key = trim(std::string_view(text).substr(0, equals));
  for (int i = 0; i < 2 && starts_with(key, "+"); ++i) key.remove_prefix(1);
  // A secret that was put where none belongs is not repeated.
  const bool hidden = starts_with(key, kSecretKeys);
  const std::string origin = kOverride + (hidden ? text.substr(0, equals) + "=..." : text) + "'";
  if (equals == std::string::npos) fail_user(origin + ": expected key.sub=value");
  const std::string value = text.substr(equals + 1);
  Node node;
  if (trim(value).empty()) {
    node.kind = Node::Kind::kScalar;  // "key=" is empty text; "key=null" is null
    node.quoted = true;
  } else if (starts_with(trim(value), "${")) {  // would read as YAML's flow mapping
    node.kind = Node::Kind::kScalar;
    node.text = trim(value);
  } else {
    node = parse_yaml(value, origin);
  }
  const std::function<void(Node&)> mark = [&](Node& part) {
    part.origin = origin;
    for (Node& item : part.items) mark(item);
    for (auto& entry : part.entries) mark(entry.second);
  };
  mark(node);
  merge(root.make(key, origin), std::move(node));
}

}  // namespace trireme::config
