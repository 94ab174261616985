// Byte-level JSON scanning: pick fields out of big objects and cut list answers into items without building trees.
// The scanner trusts strings and brackets only; what it keeps is parsed properly afterwards by nlohmann::json.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::kube {

// A set of field paths to keep, e.g. {"metadata.name", "metadata.labels", "status.containerStatuses.state"}.
// Dots separate keys, "*" is any key that has no path of its own; arrays are transparent (the rest of the path applies
// to every element); a path's end keeps the whole value below it. An empty set keeps everything. Immutable and
// thread-safe after construction.
class JsonFields final {
 public:
  JsonFields() = default;
  explicit JsonFields(const std::vector<std::string>& paths);
  void add(std::string_view path);
  bool empty() const { return root_.children.empty(); }
  // The kept part of `json` as text. Throws Error(kData) on text that is cut or not an object or array, or nested
  // deeper than 200.
  std::string select(std::string_view json) const;
  // select and parse. Throws Error(kData) (also for malformed kept values).
  nlohmann::json parse(std::string_view json) const;

 private:
  struct Node {
    std::string key;    // "*" any
    bool keep = false;  // the whole value
    std::vector<Node> children;

    const Node* child(std::string_view name) const;
  };
  static bool copy(std::string_view text, size_t& at, const Node& node, std::string& out, int depth);
  Node root_;
};

// The raw text of a top-level member of an object; nothing when it is not there or the text is malformed.
std::optional<std::string_view> top_level_member(std::string_view object, std::string_view key);
// The same for a string member, unescaped.
std::optional<std::string> top_level_string(std::string_view object, std::string_view key);

// Cuts a streamed `{"kind":"PodList","metadata":{...},"items":[{...},{...}]}` into the texts of its items, holding one
// item at a time. Chunks may break anywhere. Throws Error(kData) from feed()/finish() on text that is no list, is cut,
// or has an item over max_item_bytes.
class ListSplitter final {
 public:
  explicit ListSplitter(std::function<void(std::string_view item)> on_item, size_t max_item_bytes = 16u << 20);
  void feed(std::string_view chunk);
  void finish();                                             // the whole answer was fed
  const std::string& metadata() const { return metadata_; }  // text of the list's "metadata" ("" when there was none)

 private:
  enum class State {
    kStart,
    kKeyOrEnd,
    kKey,
    kColon,
    kBeforeValue,
    kValue,
    kItemOrEnd,
    kItem,
    kAfterItem,
    kAfterValue,
    kDone
  };
  // Between two tokens: what `c`, which is no space, begins or ends. False leaves it to the value whose first it is.
  bool step(char c);
  void begin_key(char c);
  bool begin_member(char c);
  bool begin_item(char c);
  void separate(char c, char end, State ended, State next, const char* otherwise);
  void begin_value(char first);
  // Inside a token: as far as the chunk goes.
  void scan_key(std::string_view chunk, size_t& at);
  void scan_member(std::string_view chunk, size_t& at);
  void scan_item(std::string_view chunk, size_t& at);
  bool scan_value(std::string_view chunk, size_t& at, bool capture);
  std::function<void(std::string_view)> on_item_;
  size_t max_item_bytes_;
  State state_ = State::kStart;
  std::string key_;
  std::string value_;  // the captured value so far
  std::string metadata_;
  int depth_ = 0;  // inside the current value
  bool in_string_ = false;
  bool escaped_ = false;
  bool scalar_ = false;
};

}  // namespace trireme::kube
