// The CRD and the C++ types say the same: every field is in both, with equal types, limits, enums and defaults.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <yaml-cpp/yaml.h>

#include <set>

#include "api/fields.h"
#include "tests/unit/api/helpers.h"

namespace trireme {
namespace {

using fields::Limits;

// Walks a schema node together with a default-made object of the type.
class SchemaComparer final {
 public:
  size_t compared = 0;

  template <class T>
  void compare_object(const YAML::Node& schema, const T& value, const std::string& path, bool defaults) {
    expect_type(schema, "object", path);
    const YAML::Node outer_schema = schema_;
    std::set<std::string> outer_seen = std::exchange(seen_, {});
    const std::string outer_path = std::exchange(path_, path);
    const bool outer_defaults = std::exchange(defaults_, defaults);
    schema_.reset(schema["properties"]);
    ASSERT_TRUE(schema_.IsMap()) << path << " has no properties";
    fields::visit_fields(*this, value);
    for (const auto& property : schema_) {
      EXPECT_TRUE(seen_.count(property.first.as<std::string>()))
          << path << "." << property.first << " is not a field of the C++ type";
    }
    schema_.reset(outer_schema);
    seen_ = std::move(outer_seen);
    path_ = outer_path;
    defaults_ = outer_defaults;
  }

  template <class T>
  void operator()(const char* name, const T& member, Limits limits) {
    seen_.insert(name);
    ++compared;
    const YAML::Node property = schema_[name];
    if (!property) {
      ADD_FAILURE() << path_ << "." << name << " is not in the CRD";
      return;
    }
    compare(property, member, path_ + "." + name, limits);
  }

 private:
  void expect_type(const YAML::Node& schema, const std::string& type, const std::string& path) {
    EXPECT_EQ(schema["type"].as<std::string>(""), type) << path;
  }
  void expect_default(const YAML::Node& schema, const std::string& expected, const std::string& zero,
                      const std::string& path) {
    if (!defaults_) return;
    EXPECT_EQ(schema["default"].as<std::string>(zero), expected) << path << ": the default differs";
  }
  void expect_limit(const YAML::Node& schema, const char* key, int64_t expected, const std::string& path) {
    EXPECT_EQ(schema[key].as<int64_t>(-1), expected) << path << ": " << key;
  }

  void compare(const YAML::Node& schema, bool value, const std::string& path, Limits) {
    expect_type(schema, "boolean", path);
    expect_default(schema, value ? "true" : "false", "false", path);
  }
  void compare(const YAML::Node& schema, int64_t value, const std::string& path, Limits limits) {
    expect_type(schema, "integer", path);
    compare_range(schema, path, limits);
    expect_default(schema, std::to_string(value), "0", path);
  }
  // Counters of the status carry no limits in the schema.
  void compare_range(const YAML::Node& schema, const std::string& path, Limits limits) {
    if (limits.max == fields::kAnyInt.max) {
      EXPECT_FALSE(schema["maximum"]) << path;
      return;
    }
    expect_limit(schema, "minimum", limits.min, path);
    expect_limit(schema, "maximum", fields::max_of<int64_t>(limits), path);
  }
  void compare(const YAML::Node& schema, double, const std::string& path, Limits) {
    expect_type(schema, "number", path);
  }
  void compare(const YAML::Node& schema, const std::string& value, const std::string& path, Limits limits) {
    expect_type(schema, "string", path);
    expect_limit(schema, "maxLength", fields::max_of<std::string>(limits), path);
    expect_default(schema, value, "", path);
  }
  template <class E>
  requires std::is_enum_v<E>
  void compare(const YAML::Node& schema, E value, const std::string& path, Limits) {
    expect_type(schema, "string", path);
    std::vector<std::string> names;
    for (const auto& [item, name] : fields::EnumNames<E>::kNames) names.push_back(name);
    EXPECT_EQ(schema["enum"].as<std::vector<std::string>>(std::vector<std::string>{}), names) << path;
    expect_default(schema, to_string(value), "", path);
  }
  void compare(const YAML::Node& schema, const Json&, const std::string& path, Limits) {
    expect_type(schema, "object", path);
    EXPECT_TRUE(schema["x-kubernetes-preserve-unknown-fields"].as<bool>(false)) << path << " must be open";
    EXPECT_FALSE(schema["properties"]) << path;
  }
  template <class T>
  void compare(const YAML::Node& schema, const std::optional<T>& value, const std::string& path, Limits limits) {
    EXPECT_FALSE(schema["default"]) << path << " is optional and has a default";
    if constexpr (std::same_as<T, int64_t>) {
      expect_type(schema, "integer", path);
      compare_range(schema, path, limits);
    } else if constexpr (std::same_as<T, double>) {
      expect_type(schema, "number", path);
    } else {
      compare_object(schema, T{}, path, defaults_);
    }
  }
  template <class T>
  void compare(const YAML::Node& schema, const std::vector<T>&, const std::string& path, Limits limits) {
    expect_type(schema, "array", path);
    expect_limit(schema, "maxItems", fields::max_of<std::vector<T>>(limits), path);
    const YAML::Node items = schema["items"];
    if constexpr (std::same_as<T, int64_t>) {
      expect_type(items, "integer", path);
    } else if constexpr (std::same_as<T, std::string>) {
      expect_type(items, "string", path);
    } else {
      compare_object(items, T{}, path + "[]", defaults_);
    }
  }
  template <class T>
  void compare(const YAML::Node& schema, const std::map<std::string, T>&, const std::string& path, Limits limits) {
    expect_type(schema, "object", path);
    expect_limit(schema, "maxProperties", fields::max_of<std::map<std::string, T>>(limits), path);
    expect_type(schema["additionalProperties"], std::same_as<T, double> ? "number" : "integer", path);
  }
  template <class T>
  requires std::is_class_v<T>
  void compare(const YAML::Node& schema, const T& value, const std::string& path, Limits) {
    compare_object(schema, value, path, defaults_);
  }

  YAML::Node schema_;
  std::set<std::string> seen_;
  std::string path_;
  bool defaults_ = true;
};

std::string crd_text() { return read_file(test::source_dir() / "crds" / "trireme.dev_rljobs.yaml"); }

YAML::Node version() { return YAML::Load(crd_text())["spec"]["versions"][0]; }

TEST(Crd, FieldsTypesLimitsAndDefaultsAreThoseOfTheTypes) {
  const YAML::Node schema = version()["schema"]["openAPIV3Schema"]["properties"];
  SchemaComparer comparer;
  comparer.compare_object(schema["spec"], RLJobSpec{}, "spec", true);
  comparer.compare_object(schema["status"], RLJobStatus{}, "status", false);
  EXPECT_GT(comparer.compared, 150u);  // it did walk the whole tree
}

TEST(Crd, StaysSmall) { EXPECT_LE(crd_text().size(), 60u * 1024); }

TEST(Crd, NamesColumnsAndSubresources) {
  const YAML::Node crd = YAML::Load(crd_text());
  EXPECT_EQ(crd["metadata"]["name"].as<std::string>(), std::string(kRLJobPlural) + "." + kApiGroup);
  EXPECT_EQ(crd["spec"]["group"].as<std::string>(), kApiGroup);
  EXPECT_EQ(crd["spec"]["names"]["kind"].as<std::string>(), kRLJobKind);
  EXPECT_EQ(crd["spec"]["names"]["shortNames"][0].as<std::string>(), "rlj");
  EXPECT_EQ(std::string(kApiGroup) + "/" + version()["name"].as<std::string>(), kApiVersion);
  EXPECT_TRUE(version()["subresources"]["status"].IsMap());
  for (const char* key : {"specReplicasPath", "statusReplicasPath", "labelSelectorPath"}) {
    YAML::Node at = version()["schema"]["openAPIV3Schema"];
    const std::string path = version()["subresources"]["scale"][key].as<std::string>("");
    ASSERT_FALSE(path.empty()) << key;
    EXPECT_EQ(path.find('['), std::string::npos) << "the API server takes no lists here";
    std::istringstream parts(path.substr(1));
    for (std::string part; std::getline(parts, part, '.');) at.reset(at["properties"][part]);
    EXPECT_TRUE(at.IsMap()) << path;
  }
  std::vector<std::string> columns;
  for (const auto& column : version()["additionalPrinterColumns"]) {
    if (!column["priority"]) columns.push_back(column["name"].as<std::string>());
    // A column's path is a field of the schema.
    YAML::Node at = version()["schema"]["openAPIV3Schema"];
    const std::string path = column["jsonPath"].as<std::string>();
    if (path == ".metadata.creationTimestamp") continue;
    std::istringstream parts(path.substr(1));
    for (std::string part; std::getline(parts, part, '.');) at.reset(at["properties"][part]);
    EXPECT_TRUE(at.IsMap()) << path;
  }
  EXPECT_EQ(columns, (std::vector<std::string>{"Phase", "Step", "Steps", "Reward", "Step-Seconds", "Tokens/s",
                                               "Restarts", "Waiting", "Failure", "Age"}));
}

// What a structural schema may not have, everywhere below a node.
void expect_structural(const YAML::Node& node, const std::string& path) {
  ASSERT_TRUE(node.IsMap()) << path;
  EXPECT_TRUE(node["type"]) << path << " has no type";
  EXPECT_FALSE(node["$ref"]) << path;
  if (const YAML::Node rules = node["x-kubernetes-validations"]) {
    for (const auto& rule : rules) {
      EXPECT_FALSE(rule["rule"].as<std::string>("").empty()) << path;
      EXPECT_FALSE(rule["message"].as<std::string>("").empty()) << path;
    }
  }
  if (node["type"].as<std::string>() == "array") {
    EXPECT_TRUE(node["x-kubernetes-list-type"]) << path;
    expect_structural(node["items"], path + "[]");
  }
  if (const YAML::Node properties = node["properties"]) {
    for (const auto& property : properties)
      expect_structural(property.second, path + "." + property.first.as<std::string>());
    for (const auto& required : node["required"])
      EXPECT_TRUE(properties[required.as<std::string>()]) << path << " " << required;
  }
}

TEST(Crd, IsStructural) { expect_structural(version()["schema"]["openAPIV3Schema"], ""); }

TEST(Crd, RulesCoverWhatMustHoldWithoutTheWebhook) {
  const std::string text = crd_text();
  for (const char* message :
       {"parallelism.tp must divide the processes of a pod", "tp x cp x pp must divide", "etp x ep x pp must divide",
        "algorithm cannot be changed", "managedBy cannot be changed", "a critic role is for algorithm PPO only",
        "a critic role can only be added, removed or given other sizes while the job is suspended",
        "needs exactly one of inline, configMapRef, path", "can only be changed while the job is suspended",
        "at most 40 characters", "minReplicas must be at most replicas", "workPort must differ",
        "parallelism.ep of an engine must divide its tp", "the ranks of an engine split the model by tp and ep only",
        "dp of a generation role follows from its processes"}) {
    EXPECT_THAT(text, testing::HasSubstr(message));
  }
}

// Whatever of a running job's sizes the webhook refuses to change.
TEST(Crd, RulesKeepTheSizesOfRunningPods) {
  const YAML::Node rules = version()["schema"]["openAPIV3Schema"]["properties"]["spec"]["x-kubernetes-validations"];
  std::string text;
  for (const auto& rule : rules) text += rule["rule"].as<std::string>() + "\n";
  for (const char* key :
       {"actor.replicas", "actor.gpusPerPod", "actor.processesPerPod", "actor.parallelism.tp", "critic.replicas",
        "critic.gpusPerPod", "critic.processesPerPod", "critic.parallelism", "generation.gpusPerPod",
        "generation.processesPerPod", "generation.parallelism.tp", "generation.parallelism.ep"}) {
    const std::string field = std::string("roles.") + key;
    EXPECT_THAT(text, testing::HasSubstr("self." + field + " == oldSelf." + field));
  }
}

}  // namespace
}  // namespace trireme
