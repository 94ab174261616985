// RLJob <-> JSON through the field lists of fields.h.
#include "api/rljob.h"

#include <algorithm>
#include <cmath>

#include "api/fields.h"
#include "base/error.h"
#include "base/text.h"

namespace trireme {
namespace {

using fields::Limits;

// A user's value in a message: short, on one line, valid UTF-8.
std::string shown(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, 64)) result += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? '?' : c;
  while (!is_valid_utf8(result)) result.pop_back();
  return "\"" + result + (text.size() > 64 ? "...\"" : "\"");
}

const char* type_name(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "a list";
    case Json::value_t::string:
      return "a string";
    case Json::value_t::boolean:
      return "true or false";
    case Json::value_t::number_float:
      return "a number with decimals";
    default:
      return "a number";
  }
}

class Reader final {
 public:
  Reader(std::vector<Issue>& issues, bool strict) : issues_(issues), strict_(strict) {}

  template <class T>
  void read_object(const Json& value, T& target, const std::string& path, const std::vector<std::string>& also = {}) {
    if (!value.is_object()) return wrong_type(path, "an object", value);
    const Json* outer = object_;
    const std::string outer_path = path_;
    std::vector<std::string> outer_known = std::move(known_);
    object_ = &value;
    path_ = path;
    known_ = also;
    fields::visit_fields(*this, target);
    if (strict_) report_unknown();
    object_ = outer;
    path_ = outer_path;
    known_ = std::move(outer_known);
  }

  template <class T>
  void operator()(const char* name, T& member, Limits limits) {
    known_.push_back(name);
    const auto it = object_->find(name);
    if (it == object_->end() || it->is_null()) return;  // null means absent, as in the API server
    read(*it, member, path_ + "." + name, limits);
  }

 private:
  void add(const std::string& path, const std::string& message) {
    if (issues_.size() < kMaxIssues) issues_.push_back({path, message});
  }
  void wrong_type(const std::string& path, const char* wanted, const Json& value) {
    std::string message = std::string("must be ") + wanted + ", not " + type_name(value);
    if (value.is_string()) message += " (" + shown(value.get_ref<const std::string&>()) + ")";
    add(path, message);
  }

  void report_unknown() {
    for (const auto& [key, value] : object_->items()) {
      if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
      std::string message = "unknown field " + shown(key);
      // The edit distance is quadratic in the length, and nothing we know is that long.
      const auto near = key.size() <= 64 ? nearest(key, known_) : std::nullopt;
      message += near ? "; did you mean \"" + *near + "\"?" : "; known fields: " + join(known_, ", ");
      add(path_ + "." + key.substr(0, 128), message);
    }
  }

  bool within(int64_t number, const std::string& path, const char* what, int64_t min, int64_t max) {
    if (number >= min && number <= max) return true;
    add(path, std::string(what) + std::to_string(number) + " is outside " + std::to_string(min) + " to " +
                  std::to_string(max));
    return false;
  }

  void read(const Json& value, bool& target, const std::string& path, Limits) {
    if (!value.is_boolean()) return wrong_type(path, "true or false", value);
    target = value.get<bool>();
  }
  void read(const Json& value, int64_t& target, const std::string& path, Limits limits) {
    if (!value.is_number_integer()) return wrong_type(path, "a whole number", value);
    if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
      return add(path, "the number is too large");
    }
    const int64_t number = value.get<int64_t>();
    if (within(number, path, "", limits.min, fields::max_of<int64_t>(limits))) target = number;
  }
  void read(const Json& value, double& target, const std::string& path, Limits) {
    if (!value.is_number()) return wrong_type(path, "a number", value);
    target = value.get<double>();
  }
  void read(const Json& value, std::string& target, const std::string& path, Limits limits) {
    if (!value.is_string()) {
      std::string wanted = "a string";
      if (value.is_number() || value.is_boolean()) wanted += " (write it in quotes)";
      return wrong_type(path, wanted.c_str(), value);
    }
    const std::string& text = value.get_ref<const std::string&>();
    const int64_t max = fields::max_of<std::string>(limits);
    if (static_cast<int64_t>(text.size()) > max) {
      return add(path,
                 "is " + std::to_string(text.size()) + " bytes long; at most " + std::to_string(max) + " are allowed");
    }
    if (text.find('\0') != std::string::npos) return add(path, "contains a NUL character");
    target = text;
  }
  template <class E>
  requires std::is_enum_v<E>
  void read(const Json& value, E& target, const std::string& path, Limits) {
    std::vector<std::string> names;
    for (const auto& [item, name] : fields::EnumNames<E>::kNames) {
      if (value.is_string() && value.get_ref<const std::string&>() == name) {
        target = item;
        return;
      }
      names.push_back(name);
    }
    add(path, "must be one of " + join(names, ", ") +
                  (value.is_string() ? ", not " + shown(value.get_ref<const std::string&>()) : ""));
  }
  // Verbatim parts.
  void read(const Json& value, Json& target, const std::string& path, Limits) {
    if (!value.is_object()) return wrong_type(path, "an object", value);
    target = value;
  }
  template <class T>
  void read(const Json& value, std::optional<T>& target, const std::string& path, Limits limits) {
    T item{};
    const size_t before = issues_.size();
    read(value, item, path, limits);
    if constexpr (std::is_class_v<T> && !std::same_as<T, std::string>) {
      if (value.is_object()) target = std::move(item);
    } else {
      if (issues_.size() == before) target = std::move(item);
    }
  }
  template <class T>
  void read(const Json& value, std::vector<T>& target, const std::string& path, Limits limits) {
    if (!value.is_array()) return wrong_type(path, "a list", value);
    if (!within(static_cast<int64_t>(value.size()), path, "the number of entries ", 0,
                fields::max_of<std::vector<T>>(limits)))
      return;
    for (size_t i = 0; i < value.size(); ++i) {
      T item{};
      read(value[i], item, path + "[" + std::to_string(i) + "]", {});
      target.push_back(std::move(item));
    }
  }
  template <class T>
  void read(const Json& value, std::map<std::string, T>& target, const std::string& path, Limits limits) {
    if (!value.is_object()) return wrong_type(path, "an object", value);
    if (!within(static_cast<int64_t>(value.size()), path, "the number of entries ", 0,
                fields::max_of<std::map<std::string, T>>(limits)))
      return;
    // Annotations may hold whole manifests (kubectl's last-applied-configuration).
    const Limits item_limits = std::same_as<T, std::string> ? Limits{0, 1 << 20} : Limits{};
    for (const auto& [key, item] : value.items()) {
      T result{};
      const size_t before = issues_.size();
      read(item, result, path + "." + key.substr(0, 128), item_limits);
      if (issues_.size() == before) target[key] = std::move(result);
    }
  }
  template <class T>
  requires std::is_class_v<T>
  void read(const Json& value, T& target, const std::string& path, Limits) { read_object(value, target, path); }

  std::vector<Issue>& issues_;
  bool strict_;
  const Json* object_ = nullptr;
  std::string path_;
  std::vector<std::string> known_;
};

class Writer final {
 public:
  Json result = Json::object();

  template <class T>
  void operator()(const char* name, const T& member, Limits) {
    Json value = write(member);
    if (!value.is_null()) result[name] = std::move(value);
  }

 private:
  static Json write(bool value) { return value; }
  static Json write(int64_t value) { return value; }
  // JSON has no infinities.
  static Json write(double value) { return std::isfinite(value) ? Json(value) : Json(); }
  static Json write(const std::string& value) { return value.empty() ? Json() : Json(value); }
  static Json write(const Json& value) { return value; }
  template <class E>
  requires std::is_enum_v<E>
  static Json write(E value) { return to_string(value); }
  template <class T>
  static Json write(const std::optional<T>& value) {
    return value ? write(*value) : Json();
  }
  template <class T>
  static Json write(const std::vector<T>& values) {
    if (values.empty()) return Json();
    Json list = Json::array();
    for (const T& value : values) list.push_back(write(value));
    return list;
  }
  template <class T>
  static Json write(const std::map<std::string, T>& values) {
    if (values.empty()) return Json();
    Json object = Json::object();
    for (const auto& [key, value] : values) object[key] = value;
    return object;
  }
  template <class T>
  requires std::is_class_v<T>
  static Json write(const T& value) {
    Writer writer;
    fields::visit_fields(writer, value);
    return writer.result;
  }
};

template <class T>
Json write_object(const T& value) {
  Writer writer;
  fields::visit_fields(writer, value);
  return writer.result;
}

template <class E>
const char* name_of(E value) {
  for (const auto& [item, name] : fields::EnumNames<E>::kNames) {
    if (item == value) return name;
  }
  return "?";
}

const std::vector<std::string>& other_metadata_fields() {
  static const std::vector<std::string> names = {
      "generateName", "deletionGracePeriodSeconds", "ownerReferences", "finalizers", "managedFields", "selfLink"};
  return names;
}

}  // namespace

const char* to_string(Algorithm value) { return name_of(value); }
const char* to_string(GangBackend value) { return name_of(value); }
const char* to_string(FailureAction value) { return name_of(value); }
const char* to_string(HangAction value) { return name_of(value); }
const char* to_string(PodRetention value) { return name_of(value); }
const char* to_string(Fabric value) { return name_of(value); }

std::string to_string(const std::vector<Issue>& issues, std::string_view file, size_t limit) {
  std::string text;
  for (size_t i = 0; i < issues.size() && i < limit; ++i) {
    if (i > 0) text += "\n";
    if (!file.empty()) text += std::string(file) + ":";
    if (issues[i].line > 0) text += std::to_string(issues[i].line) + ":";
    if (!text.empty() && text.back() == ':') text += " ";
    if (!issues[i].path.empty()) text += issues[i].path + ": ";
    text += issues[i].message;
  }
  if (issues.size() > limit) text += "\n(and " + std::to_string(issues.size() - limit) + " more)";
  return text;
}

RLJob rljob_from_json(const Json& object, std::vector<Issue>& issues, const ParseOptions& options) {
  RLJob job;
  if (!object.is_object()) {
    issues.push_back({"", "an RLJob must be an object"});
    return job;
  }
  const auto text_of = [&](const char* key) {
    const auto it = object.find(key);
    return it != object.end() && it->is_string() ? it->get<std::string>() : std::string();
  };
  if (text_of("apiVersion") != kApiVersion) {
    issues.push_back({"apiVersion", std::string("must be ") + kApiVersion + ", not " + shown(text_of("apiVersion"))});
  }
  if (text_of("kind") != kRLJobKind) {
    issues.push_back({"kind", std::string("must be ") + kRLJobKind + ", not " + shown(text_of("kind"))});
  }
  const std::vector<std::string> known = {"apiVersion", "kind", "metadata", "spec", "status"};
  for (const auto& [key, value] : object.items()) {
    if (!options.strict || std::find(known.begin(), known.end(), key) != known.end()) continue;
    const auto near = key.size() <= 64 ? nearest(key, known) : std::nullopt;
    issues.push_back({key.substr(0, 128),
                      "unknown field " + shown(key) +
                          (near ? "; did you mean \"" + *near + "\"?" : "; known fields: " + join(known, ", "))});
    if (issues.size() > 50) break;
  }
  Reader reader(issues, options.strict);
  if (const auto it = object.find("metadata"); it != object.end()) {
    reader.read_object(*it, job.metadata, "metadata", other_metadata_fields());
  } else {
    issues.push_back({"metadata", "is missing; metadata.name is required"});
  }
  if (const auto it = object.find("spec"); it != object.end()) {
    reader.read_object(*it, job.spec, "spec");
  } else {
    issues.push_back({"spec", "is missing"});
  }
  if (const auto it = object.find("status"); it != object.end() && !it->is_null()) {
    Reader status_reader(issues, false);  // a status is never the user's: a newer operator may have written it
    status_reader.read_object(*it, job.status, "status");
  }
  return job;
}

RLJob rljob_from_json(const Json& object, const ParseOptions& options) {
  std::vector<Issue> issues;
  RLJob job = rljob_from_json(object, issues, options);
  if (!issues.empty()) fail_user(to_string(issues));
  return job;
}

Json spec_to_json(const RLJobSpec& spec) { return write_object(spec); }
Json status_to_json(const RLJobStatus& status) { return write_object(status); }

Json to_json(const RLJob& job) {
  Json object = {{"apiVersion", kApiVersion}, {"kind", kRLJobKind}};
  object["metadata"] = write_object(job.metadata);
  if (job.metadata.generation == 0) object["metadata"].erase("generation");
  object["spec"] = spec_to_json(job.spec);
  Json status = status_to_json(job.status);
  if (status != status_to_json(RLJobStatus{})) object["status"] = std::move(status);
  return object;
}

}  // namespace trireme
