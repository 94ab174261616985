// The table of accepted keys: path, place in Config, limits, meaning. Internal to trainer/config (and its tests).
#pragma once

#include <functional>
#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "trainer/config/config.h"

namespace trireme::config {

// Where a value of an enum with names lies.
class ChoiceRef {
 public:
  template <Named E>
  explicit ChoiceRef(E* at)
      : names(names_of(*at)),
        at_(at),
        get_([](const void* from) { return static_cast<size_t>(*static_cast<const E*>(from)); }),
        set_([](void* to, size_t value) { *static_cast<E*>(to) = static_cast<E>(value); }) {}
  const char* name() const { return names[get_(at_)]; }
  bool set(const std::string& name) const;  // false: there is no such name

  Names names;

 private:
  void* at_;
  size_t (*get_)(const void*);
  void (*set_)(void*, size_t);
};

using FieldRef =
    std::variant<bool*, int64_t*, double*, std::optional<double>*, std::string*, std::vector<int64_t>*,
                 std::vector<double>*, std::vector<std::string>*, nlohmann::json*, SchedulerConfig*, ChoiceRef>;

struct Field {
  std::string path;
  std::function<FieldRef(Config&)> get;
  // Where the same key of ppo.* (of grpo.*), of value.* (of policy.*) lies in what the two have in common; null: it has
  // none.
  FieldRef (*of_rollout)(RolloutConfig&) = nullptr;
  FieldRef (*of_model)(ModelTrainingConfig&) = nullptr;
  FieldRef (*of_async)(AsyncGrpoConfig&) = nullptr;  // likewise: of ppo.async_ppo.* and grpo.async_grpo.*
  std::string doc;
  bool ours = false;  // not a NeMo-RL key
  double minimum = -std::numeric_limits<double>::infinity();
  double maximum = std::numeric_limits<double>::infinity();
  bool above_minimum = false;  // minimum itself is excluded
  bool below_maximum = false;
  std::vector<std::string> choices;       // texts and enums, which have their names; empty: any
  std::string derived;                    // how an unset value is found; empty: it has a plain default
  std::optional<std::string> null_means;  // the scalar that null stands for
  bool null_is_default = false;
  bool may_be_auto = false;  // "auto" is kAutoSize

  Field& at_least(double value) {
    minimum = value;
    return *this;
  }
  Field& above(double value) {
    minimum = value;
    above_minimum = true;
    return *this;
  }
  Field& at_most(double value) {
    maximum = value;
    return *this;
  }
  Field& below(double value) {
    maximum = value;
    below_maximum = true;
    return *this;
  }
  Field& one_of(std::vector<std::string> values) {
    choices = std::move(values);
    return *this;
  }
  Field& from(std::string text) {
    derived = std::move(text);
    null_is_default = true;
    return *this;
  }
  Field& null_as(std::string text) {
    null_means = std::move(text);
    return *this;
  }
  Field& or_auto() {
    may_be_auto = true;
    return *this;
  }
  Field& null_default() {
    null_is_default = true;
    return *this;
  }
};

// Keys of NeMo-RL without a meaning here. `path` names a key or a whole section below it.
struct IgnoredKey {
  std::string path;
  std::string reason;
};

// A key of NeMo-RL, or a section with all below it, that belongs to something this program does not do. Where it is
// switched on the configuration is refused by the feature; where it is off there is nothing to say.
struct FeatureKey {
  enum class When {
    kSet,       // anything but null, false, 0, "", [] or {}
    kEnabled,   // its key `enabled` is true
    kAboveOne,  // a number above 1
    kIs,        // `value`
    kList,      // a list instead of a mapping
    kGrades,    // an environment that data's env_name names
    kNever,     // says more about a feature that another key switches on
  };
  std::string path;
  When when = When::kSet;
  std::string feature;  // "low-rank adapters (LoRA)"
  std::string value;    // kIs
};

// A section that makes a file one of an algorithm that is not here.
struct AlgorithmSection {
  std::string section, what;
};

// Hub ids that begin so are of a family whose architecture this program does not have.
struct ModelFamily {
  std::string prefix, family;
};

// A key whose default differs between NeMo-RL's versions; Config's own default is main's.
struct VersionDefault {
  std::string path, v03, main, why;
};

// Another spelling of a key; its value is copied to the targets that are not set themselves.
struct AliasKey {
  std::string path;
  std::vector<std::string> targets;
  bool wins = false;  // over a target that is set
  bool old = false;   // a name of before: an error beside the new one, which would pass it over
};

const std::vector<Field>& fields();
const std::vector<IgnoredKey>& ignored_keys();
const std::vector<FeatureKey>& feature_keys();
const std::vector<AlgorithmSection>& algorithm_sections();
const std::vector<ModelFamily>& unsupported_families();
const std::vector<VersionDefault>& version_defaults();
const std::vector<AliasKey>& alias_keys();

const char* type_name(const FieldRef& ref);
// The value as one YAML flow scalar or list, e.g. 3, true, "text", [1, 2], null.
std::string flow_text(const FieldRef& ref);
// As a file says it: null of a derived one that is unset, auto of a size that is.
std::string file_text(const Field& field, const FieldRef& ref);
// Whether the value is the "derived" mark.
bool is_derived_mark(const Field& field, const FieldRef& ref);

// Known learning-rate schedulers: short name -> kwargs with torch's defaults (NaN: required).
const std::map<std::string, std::map<std::string, double>>& known_schedulers();

struct KnownDataset {
  std::string name, hub_id, input_key, output_key;  // the keys as RowLayout has them
  std::vector<std::string> train_files = {};        // below the snapshot, where the file is not named for the split
  std::string system_key = {};
  std::string split = "train";  // where a file names none
  double held_out = 0;          // by default, a share; 0: nothing of the whole set, whatever a file says
  // What v0.3 validates on when a file names only this set: a known set, its split, how often each row counts. Empty:
  // nothing.
  std::string validation_set = {}, validation_split = {};
  int64_t validation_repeat = 1;
};
const std::vector<KnownDataset>& known_datasets();
// By Hub id, or by name whatever its case and hyphens; nullptr: unknown.
const KnownDataset* find_dataset(const std::string& name);

}  // namespace trireme::config
