#include "trainer/data/row.h"

#include <algorithm>
#include <array>
#include <vector>

#include "base/error.h"
#include "base/text.h"

namespace trireme {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

// Deeper rows are refused before parsing: several steps further on are recursive.
constexpr int kMaxDepth = 100;

// nlohmann's message without its prefix, bounded: it quotes the last token, which can be the whole line.
std::string parse_reason(const json::parse_error& e) {
  std::string text = e.what();
  if (const size_t at = text.find(": "); at != std::string::npos) text = text.substr(at + 2);
  if (text.size() > 160) text = text.substr(0, 120) + "...";
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7E) c = '?';
  }
  return "not valid JSON at byte " + std::to_string(e.byte) + ": " + text;
}

// What a path's steps after the column find: ".name" in an object, "[N]" in a list; `at` is where they begin in `key`.
const ordered_json& value_in(const ordered_json& column, const std::string& key, size_t at) {
  const ordered_json* value = &column;
  while (at < key.size()) {
    const std::string so_far = "\"" + key.substr(0, at) + "\"";
    const size_t end = std::min(key.find_first_of(".[", at + 1), key.size());
    const std::string step = key.substr(at + 1, end - at - 1);
    if (key[at] == '.') {
      const auto it = value->is_object() ? value->find(step) : value->end();
      if (it == value->end()) fail_data(so_far + " has no \"" + step + "\" (for \"" + key + "\")");
      value = &*it;
    } else {
      const auto index = ends_with(step, "]") ? parse_int(step.substr(0, step.size() - 1)) : std::nullopt;
      if (!index || *index < 0) fail_data("\"" + key + "\" is no path: an element of a list is NAME[0]");
      if (!value->is_array() || static_cast<size_t>(*index) >= value->size())
        fail_data(so_far + " has no element " + std::to_string(*index) + " (for \"" + key + "\")");
      value = &(*value)[static_cast<size_t>(*index)];
    }
    at = end;
  }
  return *value;
}

// A column whose name has dots or brackets is found before a path.
const ordered_json& column(const ordered_json& object, const std::string& key) {
  const auto it = object.find(key);
  if (it != object.end()) return *it;
  if (const size_t steps = key.find_first_of(".["); steps != std::string::npos) {
    if (const auto first = object.find(key.substr(0, steps)); first != object.end())
      return value_in(*first, key, steps);
  }
  std::vector<std::string> keys;
  for (const auto& [name, value] : object.items()) keys.push_back(name);
  std::string message = "no key \"" + key + "\"";
  if (const auto near = nearest(key, keys)) {
    message += "; did you mean \"" + *near + "\"?";
  } else {
    if (keys.size() > 12) keys.resize(12);
    message += "; it has " + (keys.empty() ? std::string("no keys") : join(keys, ", "));
  }
  fail_data(message);
}

std::string scalar_text(const ordered_json& value, const std::string& key) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number() || value.is_boolean()) return value.dump();
  fail_data("\"" + key + "\" is " + (value.is_null() ? "null" : "of type " + std::string(value.type_name())) +
            ", text is expected");
}

void check_messages(const ordered_json& messages, const std::string& key) {
  if (messages.empty()) fail_data("\"" + key + "\" is an empty list of messages");
  for (size_t i = 0; i < messages.size(); ++i) {
    const ordered_json& message = messages[i];
    const std::string name = "\"" + key + "\"[" + std::to_string(i) + "]";
    if (!message.is_object()) fail_data(name + " is not a message object");
    if (!message.contains("role") || !message["role"].is_string()) fail_data(name + " has no text \"role\"");
    const auto content = message.find("content");
    const bool calls_tools = message.contains("tool_calls");
    if (content == message.end() || content->is_null()) {
      if (!calls_tools) fail_data(name + " has no \"content\"");
    } else if (!content->is_string() && !content->is_array()) {
      fail_data(name + ".content is neither text nor a list of parts");
    }
  }
}

}  // namespace

ordered_json parse_json_object(std::string_view line) {
  if (json_depth(line) > kMaxDepth) fail_data("nested deeper than " + std::to_string(kMaxDepth) + " levels");
  ordered_json value;
  try {
    value = ordered_json::parse(line);
  } catch (const json::parse_error& e) {
    fail_data(parse_reason(e));
  } catch (const json::exception& e) {  // a number out of range
    fail_data(std::string("not valid JSON: ") + e.what());
  }
  if (!value.is_object()) fail_data("a JSON object is expected, found " + std::string(value.type_name()));
  return value;
}

RowSchema detect_schema(const ordered_json& row, const std::string& input_key, const std::string& output_key) {
  // "input" and "output" are also the configuration's defaults: a file that has neither may still have a known layout.
  const bool defaults = input_key == "input" && output_key == "output" && !row.contains("input");
  if (!input_key.empty() && !defaults) return {input_key, output_key};
  static constexpr std::array<std::pair<const char*, const char*>, 4> kLayouts = {
      {{"messages", ""}, {"question", "answer"}, {"problem", "answer"}, {"input", "output"}}};
  for (const auto& [input, output] : kLayouts) {
    const std::string gold = output_key.empty() || defaults ? output : output_key;
    if (row.contains(input) && (gold.empty() || row.contains(gold))) return {input, gold};
  }
  if (defaults) return {input_key, output_key};  // parse_row names the nearest key
  std::vector<std::string> keys;
  for (const auto& [name, value] : row.items()) keys.push_back(name);
  if (keys.size() > 12) keys.resize(12);
  fail_data("the columns (" + join(keys, ", ") +
            ") are none of the known layouts (messages; question, answer; problem, answer; input, output): set "
            "data.train.input_key and output_key");
}

std::string message_text(const ordered_json& message) {
  const auto content = message.find("content");
  if (content == message.end()) return "";
  if (content->is_string()) return content->get<std::string>();
  std::string text;
  if (content->is_array()) {
    for (const ordered_json& part : *content) {
      if (part.is_object() && part.contains("text") && part["text"].is_string())
        text += part["text"].get<std::string>();
    }
  }
  return text;
}

std::string gold_of(std::string_view output) {
  const std::string_view text = trim(output);
  const size_t line_start = text.rfind('\n') == std::string_view::npos ? 0 : text.rfind('\n') + 1;
  const std::string_view last_line = trim(text.substr(line_start));
  return std::string(starts_with(last_line, "####") ? trim(last_line.substr(4)) : text);
}

Row parse_row(const ordered_json& object, const RowSchema& schema) {
  Row row;
  const ordered_json& input = column(object, schema.input_key);
  if (input.is_array()) {
    check_messages(input, schema.input_key);
    row.messages = input;
    if (row.messages.back()["role"] == "assistant") {
      row.response = row.messages.back();
      row.messages.erase(row.messages.size() - 1);
      row.output = message_text(row.response);
      if (row.messages.empty()) fail_data("\"" + schema.input_key + "\" holds a response but no prompt");
    }
    if (const auto it = object.find("tools"); it != object.end() && it->is_array()) row.tools = *it;
  } else if (input.is_string()) {
    row.problem = input.get<std::string>();
    if (trim(row.problem).empty()) fail_data("\"" + schema.input_key + "\" is empty");
  } else {
    fail_data("\"" + schema.input_key + "\" is " +
              (input.is_null() ? "null" : "of type " + std::string(input.type_name())) +
              ", text or a list of messages is expected");
  }
  if (!schema.output_key.empty()) {
    const std::string output = scalar_text(column(object, schema.output_key), schema.output_key);
    if (row.response.is_null()) row.output = output;
    row.gold = gold_of(output);
  } else {
    row.gold = gold_of(row.output);
  }
  if (schema.require_output && row.output.empty() && row.response.is_null()) {
    fail_data(row.messages.is_null() ? "the response is empty, nothing to learn"
                                     : "the conversation does not end with an assistant message to learn");
  }
  if (!schema.system_key.empty()) row.system = scalar_text(column(object, schema.system_key), schema.system_key);
  row.extra = json::object();
  for (const auto& [key, value] : object.items()) {
    if (key != schema.input_key) row.extra[key] = json(value);
  }
  return row;
}

std::pair<std::string, std::string> parse_prompt_template(std::string_view text, const std::string& source) {
  std::string parts[2];
  int seen = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c != '{' && c != '}') {
      parts[seen] += c;
    } else if (i + 1 < text.size() && text[i + 1] == c) {
      parts[seen] += c;
      ++i;
    } else if (c == '{' && (starts_with(text.substr(i), "{}") || starts_with(text.substr(i), "{0}"))) {
      if (++seen > 1) fail_user("prompt file " + source + " has more than one {}: write {{}} for braces that are text");
      i += text[i + 1] == '}' ? 1 : 2;
    } else {
      const size_t line =
          1 + static_cast<size_t>(std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(i), '\n'));
      fail_user("prompt file " + source + " line " + std::to_string(line) + ": a single " + c +
                " that is not part of {}: write {{ or }} for a brace that is text");
    }
  }
  if (seen == 0) fail_user("prompt file " + source + " has no {} where the problem goes");
  return {parts[0], parts[1]};
}

}  // namespace trireme
