// The table of accepted keys: path, place in Config, limits, meaning. Internal to trainer/config (and its tests).
#pragma once

#include <limits>
#include <string>
#include <variant>
#include <vector>

#include "trainer/config/config.h"

namespace trireme::config {

using FieldRef = std::variant<bool*, int64_t*, double*, std::optional<double>*, std::string*, std::vector<int64_t>*,
                              std::vector<double>*, std::vector<std::string>*, nlohmann::json*, SchedulerConfig*>;

struct Field {
  std::string path;
  FieldRef (*get)(Config&) = nullptr;
  std::string doc;
  bool ours = false;  // not a NeMo-RL key
  double minimum = -std::numeric_limits<double>::infinity();
  double maximum = std::numeric_limits<double>::infinity();
  bool above_minimum = false;  // minimum itself is excluded
  bool below_maximum = false;
  std::vector<std::string> choices;       // texts only; empty: any
  std::string derived;                    // how an unset value is found; empty: it has a plain default
  std::optional<std::string> null_means;  // the scalar that null stands for
  bool null_is_default = false;

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

// Another spelling of a key; its value is copied to the targets that are not set themselves.
struct AliasKey {
  std::string path;
  std::vector<std::string> targets;
  bool wins = false;  // over a target that is set
};

const std::vector<Field>& fields();
const std::vector<IgnoredKey>& ignored_keys();
const std::vector<AliasKey>& alias_keys();

const char* type_name(const FieldRef& ref);
// The value as one YAML flow scalar or list, e.g. 3, true, "text", [1, 2], null.
std::string flow_text(const FieldRef& ref);
// Whether the value is the "derived" mark.
bool is_derived_mark(const Field& field, const FieldRef& ref);

// Known learning-rate schedulers: short name -> kwargs with torch's defaults (NaN: required).
const std::map<std::string, std::map<std::string, double>>& known_schedulers();

struct KnownDataset {
  std::string name, hub_id, input_key, output_key;
  std::vector<std::string> train_files, test_files;  // below the snapshot, tried in order; a folder's first match
};
const std::vector<KnownDataset>& known_datasets();

struct Problem {
  std::string key, message;
};
std::vector<Problem> cross_check(const Config& config);

}  // namespace trireme::config
