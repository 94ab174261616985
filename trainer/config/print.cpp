// The resolved configuration as YAML, and the reference page.
#include <algorithm>

#include "base/text.h"
#include "trainer/config/config.h"
#include "trainer/config/fields.h"

namespace trireme {
namespace {

using config::Field;
using config::FieldRef;

// Fields in the order of the table, nested sections opened as they come; a section is visited once because the table
// keeps its fields together (a test checks it).
void print_section(std::string& out, std::vector<std::pair<std::string, std::string>> rows, int indent) {
  for (size_t i = 0; i < rows.size();) {
    const std::string pad(static_cast<size_t>(indent) * 2, ' ');
    const size_t dot = rows[i].first.find('.');
    if (dot == std::string::npos) {
      out += pad + rows[i].first + ": " + rows[i].second + "\n";
      ++i;
      continue;
    }
    const std::string section = rows[i].first.substr(0, dot + 1);
    std::vector<std::pair<std::string, std::string>> inner;
    for (; i < rows.size() && starts_with(rows[i].first, section); ++i)
      inner.emplace_back(rows[i].first.substr(dot + 1), rows[i].second);
    out += pad + section.substr(0, dot) + ":\n";
    print_section(out, std::move(inner), indent + 1);
  }
}

std::string default_text(const Field& field) {
  if (!field.derived.empty()) return "= " + field.derived;
  Config defaults;
  const std::string text = config::flow_text(field.get(defaults));
  return text == "\"\"" ? "empty" : "`" + text + "`";
}

std::string limits_text(const Field& field) {
  if (!field.choices.empty()) {
    std::vector<std::string> named;
    for (const std::string& choice : field.choices) {
      if (!choice.empty()) named.push_back("`" + choice + "`");
    }
    return join(named, ", ");
  }
  std::vector<std::string> parts;
  if (field.minimum > -1e300) parts.push_back((field.above_minimum ? "> " : ">= ") + format_double(field.minimum));
  if (field.maximum < 1e300) parts.push_back((field.below_maximum ? "< " : "<= ") + format_double(field.maximum));
  Config defaults;
  const std::string type = config::type_name(field.get(defaults));
  return type + (parts.empty() ? "" : ", " + join(parts, ", "));
}

}  // namespace

std::string to_yaml(const Config& config) {
  Config copy = config;
  std::vector<std::pair<std::string, std::string>> rows;
  for (const Field& field : config::fields()) {
    const FieldRef ref = field.get(copy);
    rows.emplace_back(field.path, config::is_derived_mark(field, ref) ? "null" : config::flow_text(ref));
  }
  std::string out;
  print_section(out, std::move(rows), 0);
  return out;
}

std::string config_reference_markdown() {
  std::string out =
      "# Configuration\n\n"
      "Made from the table that parses the files (`trainer/config/fields.cpp`; its README says how); do not edit.\n\n"
      "Keys are those of NeMo-RL v0.3 and a few later ones, so that its recipes run as they are; keys marked * exist "
      "only here.\n"
      "A file may inherit others (`defaults: base.yaml`, or a list; later ones and the file itself win, `_override_: "
      "true` in a\n"
      "mapping replaces it instead of merging), refer to other values (`${policy.train_micro_batch_size}`,\n"
      "`${mul:a,b}`, also `div`, `add`, `sub`, `min`, `max`), and every key can be set on the command line\n"
      "(`key.sub=value`, `++key.sub=value`). Unknown keys are errors. `trireme train --print-config` shows the "
      "result.\n";
  std::string section;
  for (const Field& field : config::fields()) {
    const size_t dot = field.path.rfind('.');
    const std::string parent = dot == std::string::npos ? "top level" : field.path.substr(0, dot);
    if (parent != section) {
      section = parent;
      out += "\n## " + section + "\n\n| key | default | values | meaning |\n|---|---|---|---|\n";
    }
    const std::string name = field.path.substr(dot == std::string::npos ? 0 : dot + 1);
    out += "| `" + name + "`" + (field.ours ? " *" : "") + " | " + default_text(field) + " | " + limits_text(field) +
           " | " + field.doc + " |\n";
  }
  out += "\n## Other spellings\n\n| key | stands for |\n|---|---|\n";
  for (const auto& alias : config::alias_keys()) {
    std::vector<std::string> targets;
    for (const std::string& target : alias.targets) targets.push_back("`" + target + "`");
    out += "| `" + alias.path + "` | " + join(targets, ", ") + " |\n";
  }
  out +=
      "\n## Known data sets\n\nWithout `data_path` they are looked up in the local Hugging Face cache.\n\n| "
      "dataset_name | Hub id | columns |\n|---|---|---|\n";
  for (const auto& known : config::known_datasets()) {
    out += "| `" + known.name + "` | " + known.hub_id + " | `" + known.input_key + "`, `" + known.output_key + "` |\n";
  }
  out +=
      "\n## Schedulers\n\nEntries of `policy.scheduler`, with or without `torch.optim.lr_scheduler.` before the "
      "name.\n\n| name | kwargs |\n|---|---|\n";
  for (const auto& [name, kwargs] : config::known_schedulers()) {
    std::vector<std::string> names;
    for (const auto& entry : kwargs) names.push_back("`" + entry.first + "`");
    out += "| `" + name + "` | " + join(names, ", ") + " |\n";
  }
  out +=
      "\n## Keys without a meaning here\n\nAccepted, with one warning each.\n\n| key (and all below it) | why "
      "|\n|---|---|\n";
  for (const auto& ignored : config::ignored_keys()) out += "| `" + ignored.path + "` | " + ignored.reason + " |\n";
  return out;
}

}  // namespace trireme
