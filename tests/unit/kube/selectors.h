// Label and field selectors as the fake apiserver understands them: equality, sets, existence; any field path.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.h"

namespace trireme::kube::testing {

using Json = nlohmann::json;

inline bool labels_match(const Json& object, const std::string& selector) {
  std::vector<std::string> terms;  // commas inside parentheses do not separate
  std::string term;
  int depth = 0;
  for (const char c : selector) {
    depth += c == '(' ? 1 : c == ')' ? -1 : 0;
    if (c == ',' && depth == 0) {
      terms.push_back(term);
      term.clear();
    } else {
      term += c;
    }
  }
  terms.push_back(term);
  const Json labels = object["metadata"].value("labels", Json::object());
  for (const std::string& raw : terms) {
    const std::string t(trim(raw));
    if (t.empty()) continue;
    const auto label = [&](std::string_view key) { return labels.value(std::string(trim(key)), std::string("\x01")); };
    const size_t set = t.find(" in ");
    const size_t not_set = t.find(" notin ");
    if (set != std::string::npos || not_set != std::string::npos) {
      const size_t at = set != std::string::npos ? set : not_set;
      const size_t open = t.find('('), close = t.rfind(')');
      if (open == std::string::npos || close == std::string::npos) return false;
      bool in = false;
      for (const std::string& value : split(t.substr(open + 1, close - open - 1), ','))
        in = in || label(t.substr(0, at)) == trim(value);
      if (in != (set != std::string::npos)) return false;
    } else if (const size_t ne = t.find("!="); ne != std::string::npos) {
      if (label(t.substr(0, ne)) == trim(t.substr(ne + 2))) return false;
    } else if (const size_t eq = t.find('='); eq != std::string::npos) {
      const size_t value = t.find_first_not_of('=', eq);
      if (label(t.substr(0, eq)) !=
          trim(value == std::string::npos ? std::string_view() : std::string_view(t).substr(value)))
        return false;
    } else if (t[0] == '!') {
      if (label(t.substr(1)) != "\x01") return false;
    } else if (label(t) == "\x01") {
      return false;
    }
  }
  return true;
}
inline bool fields_match(const Json& object, const std::string& selector) {
  for (const std::string& term : split(selector, ',')) {
    if (term.empty()) continue;
    const bool negated = term.find("!=") != std::string::npos;
    const size_t eq = term.find('=');
    if (eq == std::string::npos) return false;
    const Json* at = &object;
    for (const std::string& part : split(term.substr(0, negated ? eq - 1 : eq), '.')) {
      static const Json kNothing;
      at = at->is_object() && at->contains(part) ? &(*at)[part] : &kNothing;
    }
    const size_t value = term.find_first_not_of('=', eq);
    const std::string wanted = value == std::string::npos ? "" : term.substr(value);
    if (((at->is_string() ? at->get<std::string>() : "") == wanted) == negated) return false;
  }
  return true;
}

}  // namespace trireme::kube::testing
