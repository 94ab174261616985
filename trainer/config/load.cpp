// From the merged tree to a typed, checked Config.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/text.h"
#include "trainer/config/config.h"
#include "trainer/config/fields.h"
#include "trainer/config/rules.h"
#include "trainer/config/tree.h"

namespace trireme {
namespace {

using config::Field;
using config::FieldRef;
using config::Node;

constexpr size_t kMaxProblems = 20;  // shown at once

std::optional<bool> parse_bool(const Node& node) {
  if (node.quoted) return std::nullopt;
  const std::string lower = to_lower(node.text);
  if (lower == "true" || lower == "yes" || lower == "on") return true;
  if (lower == "false" || lower == "no" || lower == "off") return false;
  return std::nullopt;
}

std::optional<double> parse_number(const Node& node) {
  if (node.kind != Node::Kind::kScalar || node.quoted) return std::nullopt;
  const auto value = parse_double(node.text);
  return value && std::isfinite(*value) ? value : std::nullopt;
}

std::optional<int64_t> parse_whole(const Node& node) {
  if (node.kind != Node::Kind::kScalar || node.quoted) return std::nullopt;
  if (const auto value = parse_int(node.text)) return value;
  const auto value = parse_double(node.text);  // 1e6, 512.0
  if (value && std::abs(*value) < 9e15 && *value == std::floor(*value)) return static_cast<int64_t>(*value);
  return std::nullopt;
}

nlohmann::json to_json(const Node& node) {
  switch (node.kind) {
    case Node::Kind::kNull:
      return nullptr;
    case Node::Kind::kScalar: {
      if (const auto value = parse_bool(node)) return *value;
      if (!node.quoted) {
        if (const auto value = parse_int(node.text)) return *value;
      }
      if (const auto value = parse_number(node)) return *value;
      return node.text;
    }
    case Node::Kind::kList: {
      auto list = nlohmann::json::array();
      for (const Node& item : node.items) list.push_back(to_json(item));
      return list;
    }
    case Node::Kind::kMap: {
      auto map = nlohmann::json::object();
      for (const auto& [key, value] : node.entries) map[key] = to_json(value);
      return map;
    }
  }
  return nullptr;
}

std::string describe(const Node& node) {
  switch (node.kind) {
    case Node::Kind::kNull:
      return "null";
    case Node::Kind::kList:
      return "a list";
    case Node::Kind::kMap:
      return "a mapping";
    case Node::Kind::kScalar:
      break;
  }
  const bool text = node.quoted || (!parse_number(node) && !parse_bool(node));
  return (text ? "the text '" : "'") + node.text.substr(0, 60) + "'";
}

// Whether a key holds anything: not null, false, 0, "", [] or {}.
bool is_set(const Node& node) {
  switch (node.kind) {
    case Node::Kind::kNull:
      return false;
    case Node::Kind::kList:
      return !node.items.empty();
    case Node::Kind::kMap:
      return !node.entries.empty();
    case Node::Kind::kScalar:
      break;
  }
  return !node.text.empty() && parse_bool(node) != false && parse_number(node) != 0.0;
}

bool switched_on(const config::FeatureKey& key, const Node& node) {
  using When = config::FeatureKey::When;
  switch (key.when) {
    case When::kSet:
      return is_set(node);
    case When::kEnabled: {
      const Node* enabled = node.find("enabled");
      return enabled && is_set(*enabled);
    }
    case When::kAboveOne:
      return parse_number(node).value_or(0) > 1;
    case When::kIs:
      return node.kind == Node::Kind::kScalar && node.text == key.value;
    case When::kList:
      return node.kind == Node::Kind::kList;
    case When::kGrades:  // seen in data's env_name by validate_supported
    case When::kNever:
      return false;
  }
  return false;
}

class Loader final {
 public:
  Config load(Node root, const std::vector<std::string>& overrides, std::vector<std::string>* warnings,
              const EnvironmentLookup& environment) {
    for (const std::string& text : overrides) config::apply_override(root, text);
    choose_algorithm(root);
    const Node* algorithm = root.find("algorithm");
    ppo_ = algorithm && algorithm->text == "ppo";
    choose_version(root);
    config::interpolate(
        root, [this](const std::string& path) { return plain_default(path); }, environment);
    apply_version_defaults(root);
    apply_aliases(root);
    packing_yields_to_dynamic_batching(root);
    recomputation_needs_its_switch(root, "policy.megatron_cfg.");
    recomputation_needs_its_switch(root, "value.megatron_cfg.");
    range_alone_truncates(root);
    find_missing_features(root);
    for (const auto& [key, value] : root.entries) {
      if (!starts_with(key, "_")) visit(key, value);  // else a holder of values for ${...}
    }
    raise_problems();  // ranges of values that were never read would only confuse
    const double held_out = config_.data.train.split_validation_size;
    derive_defaults(config_);
    if (held_out > 0 && config_.data.train.split_validation_size == 0) {
      warnings_.push_back("data.train.split_validation_size has no effect here: no rows of " +
                          config_.data.train.dataset_name + " are held out, as in NeMo-RL; see data.validation");
    }
    if (config::unsupported_features(config_).empty()) {
      for (const auto& [key, message] : config::cross_check(config_)) problem(key, message);
    }
    raise_problems();
    if (warnings) *warnings = std::move(warnings_);
    return std::move(config_);
  }

 private:
  // `origin` is a copy: making a node may move the one that it was taken from.
  static void set(Node& root, const std::string& path, const std::string& text, std::string origin) {
    Node& node = root.make(path, origin);
    node.kind = Node::Kind::kScalar;
    node.text = text;
    node.quoted = false;
  }

  // NeMo-RL's files do not say what they are for: its scripts do.
  static void choose_algorithm(Node& root) {
    const auto holds = [&](const char* section) {
      const Node* node = root.find(section);
      return node && node->kind == Node::Kind::kMap;
    };
    for (const auto& [section, what] : config::algorithm_sections()) {
      if (holds(section.c_str()))
        fail_user(root.find(section)->origin + ": " + section + ": " + what +
                  " is not supported yet by this version, which runs grpo, ppo and sft");
    }
    if (root.find("algorithm") || holds("grpo")) return;
    if (holds("ppo")) {
      set(root, "algorithm", "ppo", "its section ppo");
    } else if (holds("sft")) {
      set(root, "algorithm", "sft", "its section sft");
    }
  }

  void choose_version(Node& root) {
    const Node* mark = root.at("policy.fsdp_offload_enabled");
    const Node* asked = root.find("compatibility");
    if (mark && (!asked || asked->kind == Node::Kind::kNull)) set(root, "compatibility", "v0.3", mark->origin);
    asked = root.find("compatibility");
    v03_ = asked && asked->text == "v0.3";
  }

  void apply_version_defaults(Node& root) const {
    if (!v03_) return;
    for (const auto& entry : config::version_defaults()) {
      if (root.at(entry.path)) continue;
      const Node* section = root.at(entry.path.substr(0, entry.path.rfind('.')));
      if (section && section->kind != Node::Kind::kMap && section->kind != Node::Kind::kNull) continue;
      root.make(entry.path, "compatibility v0.3") = config::parse_yaml(entry.v03, "compatibility v0.3");
    }
  }

  // The default of a field, for ${...} of a key that no file sets.
  std::optional<std::string> plain_default(const std::string& path) const {
    for (const auto& entry : config::version_defaults()) {
      if (v03_ && entry.path == path) return entry.v03;
    }
    for (const Field& field : config::fields()) {
      if (field.path != path) continue;
      Config defaults;
      const FieldRef ref = field.get(defaults);
      if (config::is_derived_mark(field, ref)) return std::nullopt;
      return config::flow_text(ref);
    }
    return std::nullopt;
  }

  void apply_aliases(Node& root) {
    for (const auto& alias : config::alias_keys()) {
      const Node* source = root.at(alias.path);
      if (!source) continue;
      const Node value = *source;
      for (const std::string& target : alias.targets) {
        if (root.at(target) && alias.old)
          add_problem(value.origin, alias.path, "is the older name of " + target + ", which is set too: leave out one");
        // What was typed after a file says more than the file, whichever of its names was used.
        const Node* there = root.at(target);
        const bool typed = config::is_override(value.origin) && there && !config::is_override(there->origin);
        if (there && !alias.wins && !typed) continue;
        const Node* section = root.at(target.substr(0, target.rfind('.')));
        if (section && section->kind != Node::Kind::kMap && section->kind != Node::Kind::kNull) continue;  // see visit
        root.make(target, value.origin) = value;
      }
    }
  }

  static void packing_yields_to_dynamic_batching(Node& root) {
    for (const std::string section : {"policy.", "value."}) {
      const Node* dynamic = root.at(section + "dynamic_batching.enabled");
      if (!dynamic || parse_bool(*dynamic) != true || root.at(section + "sequence_packing.enabled")) continue;
      set(root, section + "sequence_packing.enabled", "false", dynamic->origin);
    }
  }

  // In NeMo-RL recompute_granularity counts where activation_checkpointing is true, which its files always say.
  static void recomputation_needs_its_switch(Node& root, const std::string& section) {
    const Node* granularity = root.at(section + "recompute_granularity");
    if (!granularity || granularity->kind != Node::Kind::kScalar || granularity->text == "auto") return;
    const Node* enabled = root.at(section + "activation_checkpointing");
    if (!enabled) {
      set(root, section + "activation_checkpointing", "true", granularity->origin);
    } else if (parse_bool(*enabled) == false) {
      set(root, section + "recompute_granularity", "auto", enabled->origin);
    }
  }

  // NeMo-RL v0.4 and v0.5 have no type yet: their range alone clamps the weights from above.
  static void range_alone_truncates(Node& root) {
    const Node* range = root.at("loss_fn.truncated_importance_sampling_ratio");
    const Node* type = root.at("loss_fn.truncated_importance_sampling_type");
    if (!range || range->kind == Node::Kind::kNull) return;
    if (type && (type->kind != Node::Kind::kScalar || !type->text.empty())) return;
    set(root, "loss_fn.truncated_importance_sampling_type", "tis", range->origin);
  }

  // One sentence a feature, by the first key that switches it on.
  void find_missing_features(const Node& root) {
    std::vector<std::string> told;
    for (const auto& key : config::feature_keys()) {
      const Node* node = root.at(key.path);
      if (!node || !switched_on(key, *node) || std::find(told.begin(), told.end(), key.feature) != told.end()) continue;
      told.push_back(key.feature);
      config_.missing_features.push_back(key.path + ": " + key.feature);
    }
  }

  void visit(const std::string& path, const Node& node) {
    for (const auto& alias : config::alias_keys()) {
      if (alias.path == path) return;
    }
    for (const auto& ignored : config::ignored_keys()) {
      if (ignored.path != path) continue;
      warnings_.push_back(node.origin + ": " + path + " has no effect here: " + ignored.reason);
      return;
    }
    for (const auto& feature : config::feature_keys()) {
      const bool list_only = feature.when == config::FeatureKey::When::kList;
      if (feature.path == path && (!list_only || node.kind == Node::Kind::kList)) return;
    }
    for (const Field& field : config::fields()) {
      if (field.path != path) continue;
      origins_[path] = node.origin;
      if (node.kind == Node::Kind::kScalar && node.text == std::string(3, '?')) {  // OmegaConf's mark
        add_problem(node.origin, path, "must be set: the file leaves it open with three question marks");
      } else {
        assign(field, node);
      }
      return;
    }
    const std::vector<std::string> children = known_below(path + ".");
    if (children.empty()) return unknown(path, node);
    if (node.kind == Node::Kind::kNull) return;  // a section taken back: its defaults
    if (node.kind != Node::Kind::kMap) {
      add_problem(node.origin, path,
                  "expected a mapping with keys such as '" + children.front() + "', got " + describe(node));
      return;
    }
    for (const auto& [key, value] : node.entries) visit(path + "." + key, value);
  }

  // The next part of every known key that begins with `prefix`.
  static std::vector<std::string> known_below(const std::string& prefix) {
    std::vector<std::string> names;
    const auto consider = [&](const std::string& path) {
      if (!starts_with(path, prefix)) return;
      const std::string name = path.substr(prefix.size(), path.find('.', prefix.size()) - prefix.size());
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    };
    for (const Field& field : config::fields()) consider(field.path);
    for (const auto& alias : config::alias_keys()) consider(alias.path);
    for (const auto& ignored : config::ignored_keys()) consider(ignored.path);
    for (const auto& feature : config::feature_keys()) consider(feature.path);
    return names;
  }

  void unknown(const std::string& path, const Node& node) {
    const size_t dot = path.rfind('.');
    const std::string prefix = dot == std::string::npos ? "" : path.substr(0, dot + 1);
    const std::string name = path.substr(prefix.size());
    std::string hint;
    if (const auto near = nearest(name, known_below(prefix))) {
      hint = "; did you mean '" + *near + "'?";
    } else {
      std::vector<std::string> same_name;  // right key, wrong section
      for (const Field& field : config::fields()) {
        // The rollout's keys are those of grpo or of ppo; the critic's are the policy's.
        const bool twin = starts_with(field.path, "value.") || starts_with(field.path, ppo_ ? "grpo." : "ppo.");
        if (ends_with(field.path, "." + name) && !twin) same_name.push_back(field.path);
      }
      if (same_name.size() == 1) hint = "; did you mean '" + same_name.front() + "'?";
    }
    add_problem(node.origin, path, "unknown key" + hint);
  }

  void assign(const Field& field, const Node& node) {
    const FieldRef ref = field.get(config_);
    if (node.kind == Node::Kind::kNull) {
      if (field.null_means) {
        Node stand_in = node;
        stand_in.kind = Node::Kind::kScalar;
        stand_in.text = *field.null_means;
        assign(field, stand_in);
      } else if (auto* optional = std::get_if<std::optional<double>*>(&ref)) {
        (*optional)->reset();
      } else if (!field.null_is_default) {
        add_problem(node.origin, field.path, std::string("expected ") + config::type_name(ref) + ", got null");
      }
      return;  // else: the default, which config_ holds already
    }
    std::string wrong;
    std::visit([&](const auto& to) { wrong = read_into(field, node, to); }, ref);
    if (wrong == "type") {
      const std::string got = starts_with(field.path, config::kSecretKeys) ? "something else" : describe(node);
      add_problem(node.origin, field.path, std::string("expected ") + config::type_name(ref) + ", got " + got);
    } else if (!wrong.empty()) {
      add_problem(node.origin, field.path, wrong);
    }
  }

  // Each read gives "" when all is well, "type", or what is wrong.
  template <class T>
  static std::string read_into(const Field& field, const Node& node, T* value) {
    return read(field, node, *value);
  }
  static std::string read_into(const Field& field, const Node& node, const config::ChoiceRef& value) {
    if (node.kind != Node::Kind::kScalar) return "type";
    return value.set(node.text) ? "" : no_choice(field, node.text);
  }
  static std::string range(const Field& field, double value) {
    const bool low = field.above_minimum ? value <= field.minimum : value < field.minimum;
    const bool high = field.below_maximum ? value >= field.maximum : value > field.maximum;
    if (!low && !high) return "";
    std::vector<std::string> limits;
    if (std::isfinite(field.minimum))
      limits.push_back((field.above_minimum ? "above " : "at least ") + format_double(field.minimum));
    if (std::isfinite(field.maximum))
      limits.push_back((field.below_maximum ? "below " : "at most ") + format_double(field.maximum));
    return "must be " + join(limits, " and ") + ", got " + format_double(value);
  }
  static std::string read(const Field&, const Node& node, bool& value) {
    const auto parsed = node.kind == Node::Kind::kScalar ? parse_bool(node) : std::nullopt;
    if (!parsed) return "type";
    value = *parsed;
    return "";
  }
  static std::string read(const Field& field, const Node& node, int64_t& value) {
    if (field.may_be_auto && node.kind == Node::Kind::kScalar && node.text == "auto") {
      value = kAutoSize;
      return "";
    }
    const auto parsed = parse_whole(node);
    if (!parsed) return "type";
    value = *parsed;
    return range(field, static_cast<double>(value));
  }
  static std::string read(const Field& field, const Node& node, double& value) {
    const auto parsed = parse_number(node);
    if (!parsed) return "type";
    value = *parsed;
    return range(field, value);
  }
  static std::string read(const Field& field, const Node& node, std::optional<double>& value) {
    value.emplace();
    return read(field, node, *value);
  }
  static std::string read(const Field& field, const Node& node, std::string& value) {
    if (node.kind != Node::Kind::kScalar) return "type";
    value = node.text;
    if (field.choices.empty() || std::find(field.choices.begin(), field.choices.end(), value) != field.choices.end())
      return "";
    return no_choice(field, value);
  }
  static std::string no_choice(const Field& field, const std::string& value) {
    std::vector<std::string> named;
    for (const std::string& choice : field.choices) {
      if (!choice.empty()) named.push_back(choice);
    }
    const auto near = nearest(value, named);
    return "must be one of " + join(named, ", ") + ", got '" + value + "'" +
           (near ? "; did you mean '" + *near + "'?" : "");
  }
  template <class T>
  static std::string read(const Field& field, const Node& node, std::vector<T>& value) {
    if (node.kind != Node::Kind::kList) return "type";
    value.clear();
    for (const Node& item : node.items) {
      T one{};
      if (const std::string wrong = read(field, item, one); !wrong.empty()) return wrong;
      value.push_back(one);
    }
    return "";
  }
  static std::string read(const Field&, const Node& node, nlohmann::json& value) {
    if (node.kind != Node::Kind::kMap) return "type";
    value = to_json(node);
    return "";
  }
  static std::string read(const Field& field, const Node& node, SchedulerConfig& value) {
    if (node.kind != Node::Kind::kList) return "type";
    value = {};
    for (const Node& item : node.items) {
      if (item.kind != Node::Kind::kMap)
        return "expected entries such as {name: ..., kwargs: {...}}, got " + describe(item);
      if (const Node* milestones = item.find("milestones")) {
        if (&item != &node.items.back() || item.entries.size() != 1) return "milestones must be the last entry, alone";
        if (const std::string wrong = read(field, *milestones, value.milestones); !wrong.empty())
          return "milestones must be a list of integers";
        continue;
      }
      SchedulerPiece piece;
      if (const std::string wrong = read_piece(item, piece); !wrong.empty()) return wrong;
      value.pieces.push_back(std::move(piece));
    }
    return "";
  }
  static std::string read_piece(const Node& item, SchedulerPiece& piece) {
    static const std::string kPrefix = "torch.optim.lr_scheduler.";
    const auto& known = config::known_schedulers();
    for (const auto& [key, unused] : item.entries) {
      if (key != "name" && key != "kwargs")
        return "unknown key '" + key + "' in a scheduler; there are name and kwargs";
    }
    const Node* name = item.find("name");
    if (!name || name->kind != Node::Kind::kScalar) return "a scheduler needs a name";
    piece.name = starts_with(name->text, kPrefix) ? name->text.substr(kPrefix.size()) : name->text;
    const auto found = known.find(piece.name);
    if (found == known.end()) {
      std::vector<std::string> names;
      for (const auto& entry : known) names.push_back(entry.first);
      return "unknown scheduler '" + name->text + "'; there are " + join(names, ", ");
    }
    piece.kwargs = found->second;
    if (const Node* kwargs = item.find("kwargs"); kwargs && kwargs->kind != Node::Kind::kNull) {
      if (kwargs->kind != Node::Kind::kMap) return "kwargs of " + piece.name + " must be a mapping";
      for (const auto& [key, number] : kwargs->entries) {
        const auto slot = piece.kwargs.find(key);
        if (slot == piece.kwargs.end()) {
          std::vector<std::string> names;
          for (const auto& entry : piece.kwargs) names.push_back(entry.first);
          return piece.name + " has no '" + key + "'; it has " + join(names, ", ");
        }
        const auto value = parse_number(number);
        if (!value) return piece.name + "." + key + ": expected a number, got " + describe(number);
        slot->second = *value;
      }
    }
    for (const auto& [key, number] : piece.kwargs) {
      if (std::isnan(number)) return piece.name + " needs '" + key + "'";
      const bool positive = key == "T_max" || key == "total_iters";
      if (positive ? number < 1 : number < 0)
        return piece.name + "." + key + " must be at least " + (positive ? "1" : "0");
    }
    return "";
  }

  void problem(const std::string& key, const std::string& message) {
    const auto origin = origins_.find(key);
    add_problem(origin == origins_.end() ? "" : origin->second, key, message);
  }
  void add_problem(const std::string& origin, const std::string& key, const std::string& message) {
    problems_.push_back((origin.empty() ? "" : origin + ": ") + key + ": " + message);
  }
  void raise_problems() {
    if (problems_.empty()) return;
    if (problems_.size() > kMaxProblems) {
      const size_t more = problems_.size() - kMaxProblems;
      problems_.resize(kMaxProblems);
      problems_.push_back("and " + std::to_string(more) + " more");
    }
    fail_user(join(problems_, "\n"));
  }

  Config config_;
  bool v03_ = false;  // whose defaults count
  bool ppo_ = false;
  std::map<std::string, std::string> origins_;
  std::vector<std::string> problems_, warnings_;
};

}  // namespace

Config load_config(const std::filesystem::path& path, const std::vector<std::string>& overrides,
                   std::vector<std::string>* warnings, const EnvironmentLookup& environment) {
  return Loader().load(config::load_tree(path), overrides, warnings, environment);
}

Config load_config_text(const std::string& text, const std::vector<std::string>& overrides,
                        std::vector<std::string>* warnings, const std::filesystem::path& origin,
                        const EnvironmentLookup& environment) {
  return Loader().load(config::load_tree_text(text, origin), overrides, warnings, environment);
}

}  // namespace trireme
