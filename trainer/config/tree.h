// A configuration file as a tree that remembers where each value was written. Internal to trainer/config.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace trireme::config {

// Of keys whose values may be secrets, which no message repeats.
inline constexpr const char* kSecretKeys = "env.http.";

// Whether a node's origin is an override, not a file.
bool is_override(const std::string& origin);

struct NodeEntry;

struct Node {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  std::string text;                // kScalar
  bool quoted = false;             // kScalar: written in quotes, so never a number, a truth value or null
  std::vector<Node> items;         // kList
  std::vector<NodeEntry> entries;  // kMap, in the order written; keys are unique
  std::string origin;              // "file:line", or "override 'a.b=c'"

  Node* find(std::string_view key);
  const Node* find(std::string_view key) const;
  // The node at "a.b.c" (list items by number); nullptr when there is none.
  const Node* at(std::string_view path) const;
  // Makes the maps on the way. Throws Error(kUser) when one of them is a list or a scalar.
  Node& make(std::string_view path, const std::string& origin);
};

struct NodeEntry {
  NodeEntry(std::string key, Node value) : first(std::move(key)), second(std::move(value)) {}
  std::string first;
  Node second;
};

// `name` is put into origins. Throws Error(kUser): syntax, duplicate keys, too deep, too large.
Node parse_yaml(const std::string& text, const std::string& name);

// Child over parent: maps merge key by key, all else replaces; `_override_: true` in a child's map replaces too.
void merge(Node& parent, Node child);

// Reads a file with all it inherits through `defaults:`.
Node load_tree(const std::filesystem::path& path);
Node load_tree_text(const std::string& text, const std::filesystem::path& origin);

// "a.b=value", "+a.b=value" or "++a.b=value".
void apply_override(Node& root, const std::string& text);

using TextLookup = std::function<std::optional<std::string>(const std::string&)>;

// Replaces ${a.b}, ${.b} (beside the value itself; one dot more is one level up), ${mul:x,y} (also div, add, sub, min,
// max) and ${oc.env:NAME}, ${oc.env:NAME,default} everywhere. `fallback` gives the value of a path that no file sets,
// `environment` that of a variable; without it ${oc.env:...} is an error.
void interpolate(Node& root, const TextLookup& fallback, const TextLookup& environment = {});

}  // namespace trireme::config
