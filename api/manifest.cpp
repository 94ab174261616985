// Manifest files: YAML or JSON text to Json with the line of every field, bounded in size, depth and number of values.
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <sstream>

#include "api/rljob.h"
#include "base/error.h"
#include "base/json_events.h"
#include "base/text.h"

namespace trireme {
namespace {

constexpr size_t kMaxKeyBytes = 1024;
// Lines are kept for paths that a message can name; deep parts of a pod template fall back to their nearest parent.
constexpr size_t kMaxPathBytes = 256;

struct Document {
  Json value;
  std::map<std::string, int> lines;
};

bool is_one_of(std::string_view text, std::initializer_list<std::string_view> words) {
  return std::find(words.begin(), words.end(), text) != words.end();
}

bool all_of_class(std::string_view text, std::string_view allowed) {
  return !text.empty() && text.find_first_not_of(allowed) == std::string_view::npos;
}

std::optional<Json> parse_radix(std::string_view digits, int radix, bool negative) {
  int64_t number = 0;
  for (const char c : digits) {
    const int digit = c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10;
    if (number > (std::numeric_limits<int64_t>::max() - digit) / radix) return std::nullopt;
    number = number * radix + digit;
  }
  return Json(negative ? -number : number);
}

// A plain scalar as kubectl reads it (YAML 1.1: yes/no/on/off are booleans, 0644 is octal).
Json resolve_plain(const std::string& text) {
  if (is_one_of(text, {"", "~", "null", "Null", "NULL"})) return Json();
  if (is_one_of(text, {"true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON"})) return true;
  if (is_one_of(text, {"false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF"})) return false;
  const bool negative = text[0] == '-';
  const std::string_view body = std::string_view(text).substr(negative || text[0] == '+' ? 1 : 0);
  std::optional<Json> number;
  if (starts_with(body, "0x") && all_of_class(body.substr(2), "0123456789abcdefABCDEF")) {
    number = parse_radix(body.substr(2), 16, negative);
  } else if (starts_with(body, "0o") && all_of_class(body.substr(2), "01234567")) {
    number = parse_radix(body.substr(2), 8, negative);
  } else if (body.size() > 1 && body[0] == '0' && all_of_class(body, "01234567")) {
    number = parse_radix(body, 8, negative);
  } else if (all_of_class(body, "0123456789") && !(body.size() > 1 && body[0] == '0')) {
    number = parse_radix(body, 10, negative);
  }
  if (number) return *number;
  const bool like_float = all_of_class(body, "0123456789.eE+-") &&
                          (body[0] == '.' || (body[0] >= '0' && body[0] <= '9')) &&
                          body.find_first_of("0123456789") != std::string_view::npos;
  if (like_float) {
    if (const auto value = parse_double(negative ? text : std::string(body))) {
      if (*value - *value == 0.0) return *value;  // finite
    }
  }
  return text;
}

// What a copy of a value costs against kMaxValues: its nodes, and its text by the 64 bytes.
size_t cost_of(const Json& value) {
  size_t cost = 1;
  if (value.is_structured()) {
    for (const Json& item : value) cost += cost_of(item);
  } else if (value.is_string()) {
    cost += value.get_ref<const std::string&>().size() / 64;
  }
  return cost;
}

// Builds the documents from yaml-cpp's events. Its limits hold before anything deep or large exists.
class Builder final : public YAML::EventHandler {
 public:
  explicit Builder(std::string file) : file_(std::move(file)) {}
  std::vector<Document> documents;

  void OnDocumentStart(const YAML::Mark&) override {
    documents.emplace_back();
    anchors_.clear();
    stack_.clear();
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    if (!stack_.empty() && stack_.back().is_map && !stack_.back().key) fail(mark, "a key must be a string");
    add(mark, anchor, Json());
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto it = anchors_.find(anchor);
    if (it == anchors_.end()) fail(mark, "an alias inside of its own anchor");
    charge(mark, cost_of(it->second));
    if (!stack_.empty() && stack_.back().is_map && !stack_.back().key) fail(mark, "an alias cannot be a key");
    add(mark, 0, it->second);
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    if (!stack_.empty() && stack_.back().is_map && !stack_.back().key) return set_key(mark, value);
    if (tag.empty() || tag == "?") return add(mark, anchor, resolve_plain(value));
    if (tag == "!" || tag == "tag:yaml.org,2002:str") return add(mark, anchor, value);
    if (is_one_of(tag, {"tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool",
                        "tag:yaml.org,2002:null"})) {
      return add(mark, anchor, resolve_plain(value));
    }
    fail(mark, "the YAML tag " + tag.substr(0, 64) + " is not supported");
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(mark, anchor, false);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(mark, anchor, true);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Frame {
    bool is_map = false;
    Json value;
    std::optional<std::string> key;  // of the entry being read
    int key_line = 0;
    std::string path;  // of this container; meaningless once too long
    bool path_known = true;
    YAML::anchor_t anchor = 0;
    YAML::Mark mark;
  };

  [[noreturn]] void fail(const YAML::Mark& mark, const std::string& message) const {
    fail_user(file_ + ":" + std::to_string(mark.line + 1) + ": " + message);
  }

  void set_key(const YAML::Mark& mark, const std::string& key) {
    if (key.size() > kMaxKeyBytes) fail(mark, "a key of " + std::to_string(key.size()) + " bytes");
    Frame& frame = stack_.back();
    if (frame.value.contains(key)) {
      fail(mark,
           "the key \"" + key.substr(0, 64) + "\" appears twice" + (frame.path.empty() ? "" : " in " + frame.path));
    }
    frame.key = key;
    frame.key_line = mark.line + 1;
    charge(mark, 1);
  }

  void charge(const YAML::Mark& mark, size_t cost) {
    nodes_ += cost;
    if (nodes_ > kMaxValues) fail(mark, "more than " + std::to_string(kMaxValues) + " values");
  }

  void keep_anchor(const YAML::Mark& mark, YAML::anchor_t anchor, const Json& value) {
    charge(mark, cost_of(value));
    anchors_[anchor] = value;
  }

  // The path of the value about to be added, and its line.
  std::pair<std::string, bool> next_path() const {
    if (stack_.empty()) return {"", true};
    const Frame& frame = stack_.back();
    if (!frame.path_known) return {"", false};
    std::string path = frame.path;
    if (frame.is_map) {
      path += (path.empty() ? "" : ".") + *frame.key;
    } else {
      path += "[" + std::to_string(frame.value.size()) + "]";
    }
    const bool known = path.size() <= kMaxPathBytes;
    return {known ? path : "", known};
  }

  void add(const YAML::Mark& mark, YAML::anchor_t anchor, Json value) {
    charge(mark, 1);
    if (anchor != 0) keep_anchor(mark, anchor, value);
    attach(std::move(value), mark.line + 1);
  }

  void attach(Json value, int line) {
    const auto [path, known] = next_path();
    if (stack_.empty()) {
      documents.back().value = std::move(value);
      return;
    }
    Frame& frame = stack_.back();
    if (known) documents.back().lines[path] = frame.is_map ? frame.key_line : line;
    if (frame.is_map) {
      frame.value[*frame.key] = std::move(value);
      frame.key.reset();
    } else {
      frame.value.push_back(std::move(value));
    }
  }

  void open(const YAML::Mark& mark, YAML::anchor_t anchor, bool is_map) {
    if (!stack_.empty() && stack_.back().is_map && !stack_.back().key) fail(mark, "a key must be a string");
    if (stack_.size() >= static_cast<size_t>(kMaxDepth))
      fail(mark, "nested deeper than " + std::to_string(kMaxDepth) + " levels");
    charge(mark, 1);
    const auto [path, known] = next_path();
    Frame frame;
    frame.is_map = is_map;
    frame.value = is_map ? Json::object() : Json::array();
    frame.path = path;
    frame.path_known = known;
    frame.anchor = anchor;
    frame.mark = mark;
    stack_.push_back(std::move(frame));
  }

  void close() {
    Frame frame = std::move(stack_.back());
    stack_.pop_back();
    if (frame.anchor != 0) keep_anchor(frame.mark, frame.anchor, frame.value);
    attach(std::move(frame.value), frame.mark.line + 1);
  }

  std::string file_;
  std::vector<Frame> stack_;
  std::map<YAML::anchor_t, Json> anchors_;
  size_t nodes_ = 0;
};

std::vector<Document> parse_yaml(std::string_view text, const std::string& file) {
  Builder builder(file);
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const Error&) {
    throw;
  } catch (const YAML::Exception& e) {
    fail_user(file + ":" + std::to_string(e.mark.line + 1) + ": " + e.msg);
  } catch (const std::exception& e) {
    fail_user(file + ": not readable as YAML: " + e.what());
  }
  return std::move(builder.documents);
}

void check_text(std::string_view text, std::string_view what) {
  if (text.size() > kMaxManifestBytes) {
    fail_user(std::string(what) + ": " + format_bytes(text.size()) + " is larger than the limit of " +
              format_bytes(kMaxManifestBytes));
  }
  if (!is_valid_utf8(text)) fail_user(std::string(what) + ": not valid UTF-8");
}

// Containers may hold each other only this deep; with aliases a built value can be deeper than its text.
int depth_of(const Json& value, int limit) {
  if (!value.is_structured()) return 0;
  if (limit == 0) return 1;
  int depth = 0;
  for (const Json& item : value) depth = std::max(depth, depth_of(item, limit - 1));
  return depth + 1;
}

// Counts what a text holds, keys too.
class JsonBounds final : public JsonEvents {
 public:
  explicit JsonBounds(std::string_view what) : what_(what) {}
  bool null() override { return value(); }
  bool boolean(bool) override { return value(); }
  bool number_integer(number_integer_t) override { return value(); }
  bool number_unsigned(number_unsigned_t) override { return value(); }
  bool number_float(number_float_t, const string_t&) override { return value(); }
  bool string(string_t&) override { return value(); }
  bool key(string_t&) override { return value(); }
  bool start_object(size_t) override { return opened(); }
  bool start_array(size_t) override { return opened(); }
  bool end_object() override { return closed(); }
  bool end_array() override { return closed(); }

 private:
  bool value() {
    if (++values_ > kMaxValues) fail_user(what_ + ": more than " + std::to_string(kMaxValues) + " values");
    return true;
  }
  bool opened() {
    if (++depth_ > kMaxDepth) fail_user(what_ + ": nested deeper than " + std::to_string(kMaxDepth) + " levels");
    return value();
  }
  bool closed() {
    --depth_;
    return true;
  }

  const std::string what_;
  size_t values_ = 0;
  int depth_ = 0;
};

}  // namespace

Json parse_json_bounded(std::string_view text, std::string_view what) {
  check_text(text, what);
  JsonBounds bounds(what);
  (void)Json::sax_parse(text, &bounds);
  try {
    return Json::parse(text);
  } catch (const Json::exception& e) {
    std::string message = e.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    const size_t start = message.find("] ");
    fail_user(std::string(what) + ": " + (start == std::string::npos ? message : message.substr(start + 2, 300)));
  }
}

int Manifest::line_of(size_t job, const std::string& path) const {
  if (job >= lines.size()) return 0;
  for (std::string at = path; !at.empty();) {
    const auto it = lines[job].find(at);
    if (it != lines[job].end()) return it->second;
    const size_t end = at.find_last_of(".[");
    at.erase(end == std::string::npos ? 0 : end);
  }
  return 0;
}

void Manifest::add_lines(size_t job, std::vector<Issue>& issues) const {
  for (Issue& issue : issues) {
    if (issue.line == 0) issue.line = line_of(job, issue.path);
  }
}

Manifest parse_manifest(std::string_view text, std::string_view file) {
  check_text(text, file);
  const std::string name(file);
  std::vector<Document> documents;
  if (starts_with(trim(text), "{")) {
    documents.push_back({parse_json_bounded(text, file), {}});
  } else {
    documents = parse_yaml(text, name);
  }
  Manifest manifest;
  std::vector<Issue> issues;
  for (Document& document : documents) {
    if (document.value.is_null()) continue;  // an empty document between two separators
    if (!document.value.is_object()) fail_user(name + ": a manifest must be an object with apiVersion and kind");
    if (depth_of(document.value, kMaxDepth + 1) > kMaxDepth) {
      fail_user(name + ": nested deeper than " + std::to_string(kMaxDepth) + " levels");
    }
    const auto kind = document.value.find("kind");
    const auto api_version = document.value.find("apiVersion");
    const bool foreign = kind != document.value.end() && kind->is_string() && *kind != kRLJobKind &&
                         api_version != document.value.end() && api_version->is_string() &&
                         !starts_with(api_version->get_ref<const std::string&>(), kApiGroup);
    if (foreign) {
      manifest.others.push_back(std::move(document.value));
      continue;
    }
    std::vector<Issue> job_issues;
    manifest.jobs.push_back(rljob_from_json(document.value, job_issues));
    manifest.lines.push_back(std::move(document.lines));
    manifest.add_lines(manifest.jobs.size() - 1, job_issues);
    issues.insert(issues.end(), job_issues.begin(), job_issues.end());
  }
  if (!issues.empty()) fail_user(to_string(issues, name));
  if (manifest.jobs.empty()) fail_user(name + ": no RLJob in it");
  return manifest;
}

RLJob parse_rljob(std::string_view text, std::string_view file) {
  Manifest manifest = parse_manifest(text, file);
  if (manifest.jobs.size() != 1) {
    fail_user(std::string(file) + ": " + std::to_string(manifest.jobs.size()) + " RLJobs where one is wanted");
  }
  return std::move(manifest.jobs.front());
}

}  // namespace trireme
