// Values of fields as text.
#include <algorithm>

#include "base/text.h"
#include "trainer/config/fields.h"

namespace trireme::config {

namespace {

std::string quote(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

template <class T, class F>
std::string list_text(const std::vector<T>& values, F&& one) {
  std::vector<std::string> parts;
  for (const auto& value : values) parts.push_back(one(value));
  return "[" + join(parts, ", ") + "]";
}

std::string scheduler_text(const SchedulerConfig& scheduler) {
  std::vector<std::string> parts;
  for (const auto& piece : scheduler.pieces) {
    std::vector<std::string> kwargs;
    for (const auto& [name, value] : piece.kwargs) kwargs.push_back(name + ": " + format_double(value));
    parts.push_back("{name: torch.optim.lr_scheduler." + piece.name + ", kwargs: {" + join(kwargs, ", ") + "}}");
  }
  if (!scheduler.milestones.empty()) {
    parts.push_back("{milestones: " + list_text(scheduler.milestones, [](int64_t v) { return std::to_string(v); }) +
                    "}");
  }
  return "[" + join(parts, ", ") + "]";
}

}  // namespace

bool ChoiceRef::set(const std::string& name) const {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return false;
  set_(at_, static_cast<size_t>(found - names.begin()));
  return true;
}

const char* type_name(const FieldRef& ref) {
  static const char* const kNames[] = {
      "true or false",     "an integer",      "a number",  "a number or null",     "text", "a list of integers",
      "a list of numbers", "a list of texts", "a mapping", "a list of schedulers", "text"};
  return kNames[ref.index()];
}

std::string flow_text(const FieldRef& ref) {
  struct Visitor {
    std::string operator()(bool* v) const { return *v ? "true" : "false"; }
    std::string operator()(int64_t* v) const { return std::to_string(*v); }
    std::string operator()(double* v) const { return format_double(*v); }
    std::string operator()(std::optional<double>* v) const { return *v ? format_double(**v) : "null"; }
    std::string operator()(std::string* v) const { return quote(*v); }
    std::string operator()(std::vector<int64_t>* v) const {
      return list_text(*v, [](int64_t x) { return std::to_string(x); });
    }
    std::string operator()(std::vector<double>* v) const {
      return list_text(*v, [](double x) { return format_double(x); });
    }
    std::string operator()(std::vector<std::string>* v) const { return list_text(*v, quote); }
    std::string operator()(nlohmann::json* v) const {
      return v->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    }
    std::string operator()(SchedulerConfig* v) const { return scheduler_text(*v); }
    std::string operator()(const ChoiceRef& v) const { return quote(v.name()); }
  };
  return std::visit(Visitor{}, ref);
}

std::string file_text(const Field& field, const FieldRef& ref) {
  if (is_derived_mark(field, ref)) return "null";
  const auto* number = std::get_if<int64_t*>(&ref);
  if (field.may_be_auto && number != nullptr && **number == kAutoSize) return "auto";
  return flow_text(ref);
}

bool is_derived_mark(const Field& field, const FieldRef& ref) {
  if (field.derived.empty()) return false;
  if (const auto* number = std::get_if<int64_t*>(&ref)) return **number == kDerived;
  if (const auto* number = std::get_if<double*>(&ref)) return **number == static_cast<double>(kDerived);
  if (const auto* text = std::get_if<std::string*>(&ref)) return (*text)->empty();
  return false;
}

}  // namespace trireme::config
