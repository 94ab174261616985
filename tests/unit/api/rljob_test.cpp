#include "api/rljob.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "api/validate.h"
#include "tests/unit/api/helpers.h"

namespace trireme {
namespace {

using test::job_yaml;
using test::parse_error;
using testing::HasSubstr;

TEST(Parse, ReadsEveryKindOfFieldAndDefaults) {
  const RLJob job = parse_rljob(R"(
apiVersion: trireme.dev/v1alpha1
kind: RLJob
metadata:
  name: a
  namespace: team
  labels: {app.kubernetes.io/part-of: x}
spec:
  algorithm: SFT
  suspend: true
  config:
    inline:
      grpo: {num_prompts_per_step: 4}
    overrides: [a.b=c]
  roles:
    actor:
      replicas: 8
      gpusPerPod: 8
      parallelism: {tp: 4, pp: 4}
      template:
        spec: {containers: [{name: trainer, anything: {goes: [1, 2.5, null]}}]}
  failurePolicy:
    rules:
      - {onExitCodes: [21, 30], onPodReasons: [OOMKilled], roles: [actor], action: AvoidNodeAndRestart}
  health:
    phaseTimeoutSeconds: {generation: 100}
  network:
    rdma: {resourceName: rdma/ib}
  activeDeadlineSeconds: 60
)",
                                "f.yaml");
  EXPECT_EQ(job.metadata.namespace_, "team");
  EXPECT_EQ(job.metadata.labels.at("app.kubernetes.io/part-of"), "x");
  EXPECT_EQ(job.spec.algorithm, Algorithm::kSft);
  EXPECT_TRUE(job.spec.suspend);
  EXPECT_EQ(job.spec.config.inline_config["grpo"]["num_prompts_per_step"], 4);
  EXPECT_EQ(job.spec.config.overrides, std::vector<std::string>{"a.b=c"});
  EXPECT_EQ(job.spec.roles.actor->parallelism.pp, 4);
  EXPECT_EQ(job.spec.roles.actor->parallelism.cp, 1);
  EXPECT_FALSE(job.spec.roles.actor->parallelism.dp);
  EXPECT_EQ(job.spec.roles.actor->pod_template["spec"]["containers"][0]["anything"]["goes"].dump(), "[1,2.5,null]");
  EXPECT_EQ(job.spec.failure_policy.rules.at(0).on_exit_codes, (std::vector<int64_t>{21, 30}));
  EXPECT_EQ(job.spec.failure_policy.rules.at(0).action, FailureAction::kAvoidNodeAndRestart);
  EXPECT_EQ(job.spec.failure_policy.max_restarts, 3);
  EXPECT_EQ(job.spec.health.phase_timeout_seconds.at("generation"), 100);
  EXPECT_EQ(job.spec.network.rdma->count, 1);
  EXPECT_EQ(job.spec.active_deadline_seconds, 60);
  EXPECT_EQ(job.spec.image, kDefaultImage);
  EXPECT_FALSE(job.spec.roles.critic);
}

TEST(Parse, JsonRoundTripIsExact) {
  RLJob job = parse_rljob(test::read_example("eight-nodes-tp4-pp4.rljob.yaml"), "f");
  job.metadata.uid = "u";
  job.metadata.resource_version = "7";
  job.metadata.generation = 3;
  job.status.phase = "Running";
  job.status.conditions = {{"Running", "True", "R", "m", "2024-01-01T00:00:00Z", 3}};
  job.status.progress =
      Progress{.step = 4, .max_steps = 9, .phase = "generation", .reward = 0.25, .phase_seconds = {{"training", 1.5}}};
  job.status.last_failure = LastFailure{.role = "actor", .rank = 0, .exit_code = 21};
  const Json once = to_json(job);
  EXPECT_EQ(to_json(rljob_from_json(once)), once);
  EXPECT_EQ(rljob_from_json(once).status.progress->reward, 0.25);
  EXPECT_EQ(to_json(rljob_from_json(once)).dump(), once.dump());
  // Defaults are written out, so that a defaulting webhook can diff.
  EXPECT_EQ(once["spec"]["health"]["startupDeadlineSeconds"], 1800);
  EXPECT_FALSE(to_json(parse_rljob(job_yaml(), "f")).contains("status"));
}

TEST(Parse, ErrorsNameFileLineFieldAndNearestKey) {
  EXPECT_EQ(parse_error(job_yaml("  algoritm: GRPO\n")),
            "f.yaml:8: spec.algoritm: unknown field \"algoritm\"; did you mean \"algorithm\"?");
  EXPECT_EQ(parse_error(job_yaml("  health:\n    heartbeatTimeoutSecond: 3\n")),
            "f.yaml:9: spec.health.heartbeatTimeoutSecond: unknown field \"heartbeatTimeoutSecond\"; did you mean "
            "\"heartbeatTimeoutSeconds\"?");
  EXPECT_EQ(parse_error(job_yaml("  algorithm: GPRO\n")),
            "f.yaml:8: spec.algorithm: must be one of GRPO, SFT, PPO, not \"GPRO\"");
  EXPECT_EQ(parse_error(job_yaml("  roles:\n    actor:\n      replicas: two\n")),
            "f.yaml:9: spec.roles.actor.replicas: must be a whole number, not a string (\"two\")");
  EXPECT_EQ(parse_error(job_yaml("  roles:\n    actor:\n      replicas: 1.5\n")),
            "f.yaml:9: spec.roles.actor.replicas: must be a whole number, not a number with decimals");
  EXPECT_EQ(parse_error(job_yaml("  roles:\n    actor:\n      replicas: 0\n")),
            "f.yaml:9: spec.roles.actor.replicas: 0 is outside 1 to 4096");
  EXPECT_EQ(parse_error(job_yaml("  queueName: 12\n")),
            "f.yaml:8: spec.queueName: must be a string (write it in quotes), not a number");
  EXPECT_EQ(parse_error(job_yaml("  failurePolicy:\n    rules:\n      - {action: Restart}\n      - actoin: FailJob\n")),
            "f.yaml:11: spec.failurePolicy.rules[1].actoin: unknown field \"actoin\"; did you mean \"action\"?");
  EXPECT_EQ(parse_error(job_yaml("  roles: [1]\n")), "f.yaml:7: spec.roles: must be an object, not a list");
  EXPECT_EQ(parse_error("apiVersion: trireme.dev/v1\nkind: RLJob\nmetadata: {name: a}\nspec: {}\n"),
            "f.yaml:1: apiVersion: must be trireme.dev/v1alpha1, not \"trireme.dev/v1\"");
  EXPECT_THAT(parse_error(job_yaml("  wholly_unlike_anything: 1\n")), HasSubstr("known fields: algorithm, suspend"));
  EXPECT_THAT(parse_error("apiVersion: trireme.dev/v1alpha1\nkind: RLJob\nmetadta: {name: a}\nspec: {}\n"),
              HasSubstr("did you mean \"metadata\"?"));
  // All issues at once, one per line.
  EXPECT_EQ(parse_error(job_yaml("  suspend: 3\n  image: {}\n")),
            "f.yaml:8: spec.suspend: must be true or false, not a number\nf.yaml:9: spec.image: must be a string, not "
            "an object");
}

TEST(Parse, YamlErrorsNameTheLine) {
  EXPECT_THAT(parse_error("a: 1\na: 2\n"), HasSubstr("f.yaml:2: the key \"a\" appears twice"));
  EXPECT_THAT(parse_error("a:\n  b: 1\n  b: 2\n"), HasSubstr("f.yaml:3: the key \"b\" appears twice in a"));
  EXPECT_THAT(parse_error("a: [1\nb: 2\n"), HasSubstr("f.yaml:"));
  EXPECT_THAT(parse_error("a: !!binary aGk=\n"), HasSubstr("f.yaml:1: the YAML tag"));
  EXPECT_THAT(parse_error("{\"apiVersion\": "), HasSubstr("f.yaml: parse error at line 1"));
  EXPECT_THAT(parse_error(""), HasSubstr("no RLJob"));
  EXPECT_THAT(parse_error("- a\n"), HasSubstr("must be an object with apiVersion and kind"));
}

TEST(Parse, ScalarsAreReadAsKubectlDoes) {
  const RLJob job = parse_rljob(job_yaml(R"(  config:
    inline: {a: yes, b: "yes", c: 0644, d: 0x10, e: 1e3, f: ~, g: 1.50, h: '1', i: 12abc, )"
                                         R"(j: -5, k: +7, l: 2024-01-01, m: .5,
             n: 9223372036854775807, o: !!str 5, p: Off, q: 08}
)"),
                                "f");
  EXPECT_EQ(job.spec.config.inline_config.dump(),
            R"({"a":true,"b":"yes","c":420,"d":16,"e":1000.0,"f":null,"g":1.5,"h":"1","i":"12abc","j":-5,"k":7,)"
            R"("l":"2024-01-01","m":0.5,"n":9223372036854775807,"o":"5","p":false,"q":8.0})");
}

TEST(Parse, AnchorsAndSeveralDocuments) {
  const Manifest manifest = parse_manifest("---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n---\n" +
                                               job_yaml("  health: {action: &x Event}\n  podRetention: All\n") +
                                               "---\n---\n" + job_yaml("", "second"),
                                           "f");
  ASSERT_EQ(manifest.jobs.size(), 2u);
  ASSERT_EQ(manifest.others.size(), 1u);
  EXPECT_EQ(manifest.others[0]["kind"], "ConfigMap");
  EXPECT_EQ(manifest.jobs[0].spec.health.action, HangAction::kEvent);
  EXPECT_EQ(manifest.jobs[1].metadata.name, "second");
  EXPECT_EQ(manifest.line_of(0, "spec.health.action"), 13);
  EXPECT_EQ(manifest.line_of(0, "spec.health.noSuch[3].field"), 13);
  EXPECT_EQ(manifest.line_of(5, "spec"), 0);
  std::vector<Issue> issues = {{"spec.health", "m"}};
  manifest.add_lines(0, issues);
  EXPECT_EQ(to_string(issues, "f"), "f:13: spec.health: m");
  EXPECT_THAT(test::user_error_of([] { parse_rljob(job_yaml() + "---\n" + job_yaml(), "f"); }),
              HasSubstr("2 RLJobs where one is wanted"));
  const RLJob shared = parse_rljob(job_yaml("  config:\n    inline: {a: &n [1, {b: 2}], c: *n}\n"), "f");
  EXPECT_EQ(shared.spec.config.inline_config["c"].dump(), "[1,{\"b\":2}]");
  const RLJob nested = parse_rljob(job_yaml("  config:\n    inline: {a: [[[1], [2, []]], [{}]]}\n"), "f");
  EXPECT_EQ(nested.spec.config.inline_config["a"].dump(), "[[[1],[2,[]]],[{}]]");
}

TEST(Parse, LenientReadingIgnoresNewerFields) {
  Json object = to_json(parse_rljob(job_yaml(), "f"));
  object["spec"]["fromTheFuture"] = 1;
  object["spec"]["health"]["newer"] = Json::array();
  std::vector<Issue> issues;
  const RLJob job = rljob_from_json(object, issues, {.strict = false});
  EXPECT_TRUE(issues.empty());
  EXPECT_EQ(job.metadata.name, "job");
  rljob_from_json(object, issues);
  EXPECT_EQ(issues.size(), 2u);
  // Server-side metadata is never an unknown field.
  object = to_json(job);
  object["metadata"]["managedFields"] = Json::array();
  object["metadata"]["finalizers"] = {"x"};
  issues.clear();
  rljob_from_json(object, issues);
  EXPECT_TRUE(issues.empty()) << to_string(issues);
}

TEST(Hostile, BoundsHoldAndNothingCrashes) {
  const std::string many(100000, '[');
  EXPECT_THAT(parse_error(many), testing::Ne(""));
  EXPECT_THAT(parse_error("a: " + many), testing::Ne(""));
  EXPECT_THAT(parse_error("a: " + std::string(1000, '[') + "1" + std::string(1000, ']')),
              HasSubstr("nested deeper than 64"));
  EXPECT_THAT(test::user_error_of([&] { parse_json_bounded(many, "x"); }), HasSubstr("nested deeper than 64"));
  const auto zeros = [](size_t count) {
    std::string text = "[0";
    for (size_t i = 1; i < count; ++i) text += ",0";
    return text + "]";
  };
  EXPECT_EQ(parse_json_bounded(zeros(99999), "x").size(), 99999u) << "the list is a value, too";
  EXPECT_EQ(test::user_error_of([&] { parse_json_bounded(zeros(100000), "x"); }), "x: more than 100000 values");
  std::string keys = "{\"a\":{}";
  for (int i = 0; i < 60000; ++i) keys += ",\"" + std::to_string(i) + "\":0";
  EXPECT_THAT(test::user_error_of([&] { parse_json_bounded(keys + "}", "x"); }), HasSubstr("more than 100000 values"));
  EXPECT_THAT(parse_error(keys + "}"), HasSubstr("more than 100000 values"));
  std::string deep_map;
  for (int i = 0; i < 5000; ++i) deep_map += "{\"a\":";
  EXPECT_THAT(parse_error(deep_map), HasSubstr("nested deeper than 64"));
  std::string indented;
  for (int i = 0; i < 500; ++i) indented += std::string(i, ' ') + "a:\n";
  EXPECT_THAT(parse_error(indented), HasSubstr("nested deeper than 64"));
  EXPECT_THAT(parse_error(std::string(kMaxManifestBytes + 1, 'a')), HasSubstr("larger than the limit"));
  EXPECT_THAT(parse_error("a: \"\xff\xfe\"\n"), HasSubstr("not valid UTF-8"));
  EXPECT_THAT(parse_error("? [a, b]\n: 1\n"), HasSubstr("a key must be a string"));
  EXPECT_THAT(parse_error("a: 1\n: 2\n"), HasSubstr("f.yaml:2: a key must be a string"));
  EXPECT_THAT(parse_error("a: {b: 1, ? , c: 2}\n"), HasSubstr("a key must be a string"));
  EXPECT_THAT(parse_error("a: &x [*x]\n"), testing::Ne(""));
  EXPECT_THAT(parse_error(std::string(5000, 'k') + ": 1\n"), testing::Ne(""));
  // Aliases that would expand to 10^9 values.
  std::string bomb = "a: &a [1,1,1,1,1,1,1,1,1,1]\n";
  for (char c = 'b'; c <= 'i'; ++c) {
    const std::string previous = std::string("*") + static_cast<char>(c - 1);
    bomb += std::string(1, c) + ": &" + c + " [";
    for (int i = 0; i < 10; ++i) bomb += (i ? "," : "") + previous + " ";
    bomb += "]\n";
  }
  EXPECT_THAT(parse_error(bomb), HasSubstr("more than 100000 values"));
  // Large text by aliases counts, too.
  std::string wide = "a: &a " + std::string(100000, 'x') + "\nb: [";
  for (int i = 0; i < 1000; ++i) wide += "*a , ";
  EXPECT_THAT(parse_error(wide + "]\n"), HasSubstr("more than 100000 values"));
}

TEST(Hostile, EveryFieldOfEveryWrongTypeIsAnErrorNotACrash) {
  const Json good = to_json(parse_rljob(test::read_example("eight-nodes-tp4-pp4.rljob.yaml"), "f"));
  const std::vector<Json> values = {nullptr,
                                    true,
                                    -1,
                                    1e300,
                                    18446744073709551615ull,
                                    "text",
                                    std::string(100000, 'x'),
                                    std::string(1, '\0'),
                                    Json::array(),
                                    Json::array({nullptr, 1, "a", Json::object()}),
                                    Json::object(),
                                    {{"a", {{"b", 1}}}}};
  size_t tried = 0;
  const Json flat = good.flatten();
  std::vector<std::string> pointers;
  for (const auto& [pointer, value] : flat.items()) {
    // Every leaf and every container on the way to it.
    for (size_t at = pointer.find('/', 1); at != std::string::npos; at = pointer.find('/', at + 1))
      pointers.push_back(pointer.substr(0, at));
    pointers.push_back(pointer);
  }
  std::sort(pointers.begin(), pointers.end());
  pointers.erase(std::unique(pointers.begin(), pointers.end()), pointers.end());
  for (const std::string& pointer : pointers) {
    for (const Json& value : values) {
      Json bad = good;
      bad[Json::json_pointer(pointer)] = value;
      std::vector<Issue> issues;
      const RLJob job = rljob_from_json(bad, issues);
      const Validation validation = validate(job);
      to_json(job).dump();
      to_string(issues, "f");
      to_string(validation.errors);
      ++tried;
    }
  }
  EXPECT_GT(tried, 500u);
}

TEST(Hostile, HugeNamesStayShortInMessages) {
  const std::string huge(200000, 'n');
  EXPECT_LT(parse_error(job_yaml("  algorithm: " + huge + "\n")).size(), 400u);
  EXPECT_LT(parse_error(job_yaml("  image: " + huge + "\n")).size(), 400u);
  std::vector<Issue> issues;
  rljob_from_json(
      {{"apiVersion", kApiVersion}, {"kind", kRLJobKind}, {"metadata", {{"name", "a"}}}, {"spec", {{huge, 1}}}},
      issues);
  ASSERT_EQ(issues.size(), 1u);
  EXPECT_LT(to_string(issues).size(), 1000u);
}

}  // namespace
}  // namespace trireme
