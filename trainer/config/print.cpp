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
  return type + (field.may_be_auto ? " or `auto`" : "") + (parts.empty() ? "" : ", " + join(parts, ", "));
}

std::string switch_text(const config::FeatureKey& key) {
  using When = config::FeatureKey::When;
  switch (key.when) {
    case When::kSet:
      return "is set";
    case When::kEnabled:
      return "is enabled";
    case When::kAboveOne:
      return "is above 1";
    case When::kIs:
      return "is `" + key.value + "`";
    case When::kList:
      return "is a list";
    case When::kGrades:
      return "is named by `env_name`";
    case When::kNever:
      return "(with another)";
  }
  return "";
}

nlohmann::json value_json(const FieldRef& ref) {
  return std::visit(
      [&](const auto& value) -> nlohmann::json {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::optional<double>*>) {
          return *value ? nlohmann::json(**value) : nlohmann::json();
        } else if constexpr (std::is_same_v<T, SchedulerConfig*>) {
          return config::flow_text(ref);
        } else if constexpr (std::is_same_v<T, config::ChoiceRef>) {
          return value.name();
        } else {
          return *value;
        }
      },
      ref);
}

std::string columns_of(const config::KnownDataset& known) {
  const std::string system = known.system_key.empty() ? "" : "; system message: `" + known.system_key + "`";
  return "`" + known.input_key + "`, `" + known.output_key + "`" + system;
}

// "`squad` on `squad`, split `validation`", of each set that has some in v0.3.
std::string validation_of_sets() {
  std::vector<std::string> parts;
  for (const auto& known : config::known_datasets()) {
    if (known.validation_set.empty()) continue;
    const std::string times =
        known.validation_repeat > 1 ? ", " + std::to_string(known.validation_repeat) + " times" : "";
    parts.push_back("`" + known.name + "` on `" + known.validation_set + "`, split `" + known.validation_split + "`" +
                    times);
  }
  return join(parts, "; ");
}

// A section of the reference page.
std::string defaults_by_version() {
  std::string out =
      "\n"
      "## Defaults by version\n"
      "\n"
      "Where NeMo-RL's versions differ in what they do when a file says nothing, `compatibility` chooses. It is "
      "`v0.3` by\n"
      "itself for a file with `policy.fsdp_offload_enabled`, a key that only v0.3 has, and `main` for all others.\n"
      "\n"
      "| key | `v0.3` | `main` | |\n"
      "|---|---|---|---|\n";
  for (const auto& entry : config::version_defaults())
    out += "| `" + entry.path + "` | `" + entry.v03 + "` | `" + entry.main + "` | " + entry.why + " |\n";
  out += "\nWhere the file only names its data set, `v0.3` validates on data that the set brings:\n" +
         validation_of_sets() +
         ".\nIn all other cases only what `data.validation` or `data.train.split_validation_size` says.\n";
  return out;
}

}  // namespace

nlohmann::json to_json(const Config& config) {
  Config copy = config;
  nlohmann::json out = nlohmann::json::object();
  for (const Field& field : config::fields()) {
    const FieldRef ref = field.get(copy);
    nlohmann::json* at = &out;
    for (const std::string& name : split(field.path, '.')) at = &(*at)[name];
    *at = config::is_derived_mark(field, ref) ? nlohmann::json() : value_json(ref);
  }
  return out;
}

std::string to_yaml(const Config& config, std::string_view below) {
  Config copy = config;
  // derive_defaults copies ppo.async_ppo there. Written, it would be a key that somebody had set, and ppo's could not
  // be switched off in what was printed.
  if (config.algorithm == "ppo") copy.grpo.async_grpo = {};
  std::vector<std::pair<std::string, std::string>> rows;
  for (const Field& field : config::fields()) {
    if (!starts_with(field.path, below)) continue;
    const FieldRef ref = field.get(copy);
    rows.emplace_back(field.path, config::file_text(field, ref));
  }
  std::string out;
  print_section(out, std::move(rows), 0);
  return out;
}

std::string config_reference_markdown() {
  std::string out =
      "# Configuration\n\n"
      "Made from the table that parses the files (`trainer/config/fields.cpp`; its README says how); do not edit.\n\n"
      "Keys are NeMo-RL's, of its tag v0.3.0 and of its main branch; keys marked * exist only here. Every key of its "
      "recipes is\n"
      "known: it is used, or has no effect here (said once at start), or belongs to a feature that is not here, by "
      "which the\n"
      "file is then refused. [recipes.md](recipes.md) lists its files one by one.\n"
      "\n"
      "A file may inherit others (`defaults: base.yaml`, or a list; later ones and the file itself win, `_override_: "
      "true` in a\n"
      "mapping replaces it instead of merging), refer to other values (`${policy.train_micro_batch_size}`, "
      "`${mul:a,b}`, also\n"
      "`div`, `add`, `sub`, `min`, `max`, `${.beside}`, `${oc.env:NAME,default}`), and every key can be set on the "
      "command line\n"
      "(`key.sub=value`, `++key.sub=value`). Top-level keys that begin with `_` only hold values for others. Unknown "
      "keys are\n"
      "errors. `trireme train --print-config` shows the result.\n";
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
  out += defaults_by_version();
  out += "\n## Other spellings\n\n| key | stands for |\n|---|---|\n";
  for (const auto& alias : config::alias_keys()) {
    std::vector<std::string> targets;
    for (const std::string& target : alias.targets) targets.push_back("`" + target + "`");
    out += "| `" + alias.path + "` | " + join(targets, ", ") + " |\n";
  }
  out +=
      "\n## Known data sets\n\nWithout `data_path` they are looked up in the local Hugging Face cache. The split "
      "is that of\na file that names none.\n\n| "
      "dataset_name | Hub id | columns | split |\n|---|---|---|---|\n";
  for (const auto& known : config::known_datasets()) {
    out += "| `" + known.name + "` | " + known.hub_id + " | " + columns_of(known) + " | `" + known.split + "` |\n";
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
      "\n## Features that are not here\n\nA file that switches one on is refused with its name; switched off, the key "
      "and all below it say nothing.\n\n| key | on when it | feature |\n|---|---|---|\n";
  for (const auto& key : config::feature_keys())
    out += "| `" + key.path + "` | " + switch_text(key) + " | " + key.feature + " |\n";
  for (const auto& section : config::algorithm_sections())
    out += "| `" + section.section + "` | is there | " + section.what + " |\n";
  std::vector<std::string> families;
  for (const auto& family : config::unsupported_families()) families.push_back("`" + family.prefix + "`");
  out += "\nSo are Hub ids of families whose architecture is not here: those that begin with " + join(families, ", ") +
         ".\n";
  out +=
      "\n## Keys without a meaning here\n\nAccepted, with one warning each.\n\n| key (and all below it) | why "
      "|\n|---|---|\n";
  for (const auto& ignored : config::ignored_keys()) out += "| `" + ignored.path + "` | " + ignored.reason + " |\n";
  return out;
}

}  // namespace trireme
