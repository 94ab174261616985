#include "operator/webhook/admission.h"

#include <gtest/gtest.h>

#include <chrono>

#include "operator/kube/client_config.h"

namespace trireme::webhook {
namespace {

Json good_job() {
  return Json::parse(
      R"({"apiVersion":"trireme.dev/v1alpha1","kind":"RLJob","metadata":{"name":"quick","namespace":"team"},
    "spec":{"model":{"source":"/m"},"config":{"path":"c.yaml"},"roles":{"actor":{"replicas":2}}}})");
}

Json review(const std::string& operation, Json object, Json old_object = nullptr) {
  return {{"apiVersion", "admission.k8s.io/v1"},
          {"kind", "AdmissionReview"},
          {"request",
           {{"uid", "u-1"},
            {"operation", operation},
            {"kind", {{"group", "trireme.dev"}, {"version", "v1alpha1"}, {"kind", "RLJob"}}},
            {"object", std::move(object)},
            {"oldObject", std::move(old_object)}}}};
}

Json response_of(const AdmissionAnswer& answer) {
  EXPECT_EQ(answer.http_status, 200) << answer.body;
  const Json body = Json::parse(answer.body);
  EXPECT_EQ(body["kind"], "AdmissionReview");
  EXPECT_EQ(body["apiVersion"], "admission.k8s.io/v1");
  EXPECT_EQ(body["response"]["uid"], "u-1");
  EXPECT_EQ(body["response"]["allowed"], answer.allowed);
  return body["response"];
}

TEST(Validating, GoodJobIsAllowed) {
  const Json response = response_of(review_validating(review("CREATE", good_job()).dump()));
  EXPECT_EQ(response["allowed"], true);
}

TEST(Validating, ImpossibleLayoutIsRefusedWithTheReason) {
  Json job = good_job();
  job["spec"]["roles"]["actor"]["parallelism"] = {{"pp", 3}};
  const Json response = response_of(review_validating(review("CREATE", job).dump()));
  EXPECT_EQ(response["allowed"], false);
  EXPECT_EQ(response["status"]["code"], 422);
  EXPECT_NE(response["status"]["message"].get<std::string>().find("spec.roles.actor"), std::string::npos)
      << response.dump();
}

TEST(Validating, WrongTypesAreRefusedNotFatal) {
  Json job = good_job();
  job["spec"]["roles"]["actor"]["replicas"] = "two";
  EXPECT_EQ(response_of(review_validating(review("CREATE", job).dump()))["allowed"], false);
  job = good_job();
  job["spec"] = 7;
  EXPECT_EQ(response_of(review_validating(review("CREATE", job).dump()))["allowed"], false);
  job = good_job();
  job["spec"]["roles"]["actor"]["replicas"] = 9223372036854775807;
  EXPECT_EQ(response_of(review_validating(review("CREATE", job).dump()))["allowed"], false);
  EXPECT_EQ(response_of(review_validating(review("CREATE", nullptr).dump()))["allowed"], false);
}

TEST(Validating, UpdatesMayAlwaysLeaveTheSpecificationAlone) {
  Json bad = good_job();
  bad["spec"]["roles"]["actor"]["parallelism"] = {{"pp", 3}};
  Json labelled = bad;
  labelled["metadata"]["labels"] = {{"a", "b"}};
  EXPECT_EQ(response_of(review_validating(review("UPDATE", labelled, bad).dump()))["allowed"], true);
  Json going = bad;
  going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z";
  EXPECT_EQ(response_of(review_validating(review("UPDATE", going, good_job()).dump()))["allowed"], true);
  EXPECT_EQ(response_of(review_validating(review("UPDATE", bad, good_job()).dump()))["allowed"], false);
}

TEST(Validating, ImmutableFieldsStay) {
  Json changed = good_job();
  changed["spec"]["algorithm"] = "SFT";
  EXPECT_EQ(response_of(review_validating(review("UPDATE", changed, good_job()).dump()))["allowed"], false);
  Json suspended = good_job();
  suspended["spec"]["suspend"] = true;
  EXPECT_EQ(response_of(review_validating(review("UPDATE", suspended, good_job()).dump()))["allowed"], true);
}

TEST(Validating, OtherThingsAreNotOurBusiness) {
  EXPECT_EQ(response_of(review_validating(review("DELETE", nullptr, good_job()).dump()))["allowed"], true);
  Json other = review("CREATE", 5);
  other["request"]["kind"] = {{"group", "apps"}, {"version", "v1"}, {"kind", "Deployment"}};
  EXPECT_EQ(response_of(review_validating(other.dump()))["allowed"], true);
  Json status = review("UPDATE", 5, 6);
  status["request"]["subResource"] = "status";
  EXPECT_EQ(response_of(review_validating(status.dump()))["allowed"], true);
}

TEST(Admission, HostileBodiesGetFourHundred) {
  const std::string deep = std::string(100000, '[');
  const std::string deep_object = [] {
    std::string s;
    for (int i = 0; i < 50000; ++i) s += "{\"a\":";
    return s;
  }();
  for (const std::string& body :
       {std::string(), std::string("null"), std::string("{}"), std::string("[]"),
        std::string("{\"kind\":\"AdmissionReview\"}"), deep, deep_object,
        std::string(
            "{\"apiVersion\":\"admission.k8s.io/v1beta1\",\"kind\":\"AdmissionReview\",\"request\":{\"uid\":\"x\"}}"),
        std::string("{\"apiVersion\":\"admission.k8s.io/v1\",\"kind\":\"AdmissionReview\",\"request\":{\"uid\":7}}"),
        std::string("{\"apiVersion\":\"admission.k8s.io/v1\",\"kind\":\"AdmissionReview\",\"request\":[]}"),
        std::string("\xff\xfe\x00garbage", 10)}) {
    EXPECT_EQ(review_validating(body).http_status, 400) << body.substr(0, 60);
    EXPECT_EQ(review_defaulting(body, {}).http_status, 400) << body.substr(0, 60);
  }
}

TEST(Admission, WhatTheServerKeepsBesideTheSpecificationDoesNotCount) {
  Json old_job = good_job();
  Json fields = Json::object();
  for (int i = 0; i < 60000; ++i) fields["f:" + std::to_string(i)] = Json::object();
  old_job["metadata"]["managedFields"] = {{{"manager", "kubectl"}, {"fieldsV1", {{"f:spec", fields}}}}};
  old_job["status"] = {{"conditions", std::vector<int>(60000, 0)}};
  Json job = old_job;
  job["spec"]["health"] = {{"heartbeatTimeoutSeconds", 60}};
  const std::string body = review("UPDATE", job, old_job).dump();
  ASSERT_LT(body.size(), 4u << 20);
  EXPECT_EQ(response_of(review_validating(body))["allowed"], true);
  EXPECT_EQ(response_of(review_defaulting(body, {}))["allowed"], true);
}

TEST(Admission, TheLargestSpecificationsFitIntoOneReview) {
  Json job = good_job();
  job["spec"]["roles"]["actor"]["template"] = {{"spec", {{"tolerations", std::vector<int>(39000, 0)}}}};
  Json suspended = job;
  suspended["spec"]["suspend"] = true;
  const std::string body = review("UPDATE", suspended, job).dump();
  EXPECT_EQ(response_of(review_validating(body))["allowed"], true);
  EXPECT_EQ(response_of(review_defaulting(body, {}))["allowed"], true);
}

TEST(Admission, TreesAreBounded) {
  std::string many = "{}";
  for (int i = 0; i < 500000; ++i) many += ",{}";
  const auto begin = std::chrono::steady_clock::now();
  const std::string front = R"({"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"u-1",)";
  const std::string kind = R"("operation":"CREATE","kind":{"group":"trireme.dev","kind":"RLJob"},)";
  const std::string body = front + kind + R"("object":{"spec":{"a":[)" + many + "]}}}}";
  for (const AdmissionAnswer& answer : {review_validating(body), review_defaulting(body, {})}) {
    EXPECT_EQ(answer.http_status, 400);
    EXPECT_EQ(answer.body, "AdmissionReview: more than 100000 values");
  }
  // An API server waits 10 s; with a look through all elements at the end of each it was 40 s a review.
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  Json named = review("CREATE", good_job());
  named["request"]["uid"] = std::string(257, 'u');
  EXPECT_EQ(review_validating(named.dump()).body, "request.uid is longer than 256 bytes");
}

TEST(Admission, HugeNamesAndLongMessagesStayBounded) {
  Json job = good_job();
  job["metadata"]["name"] = std::string(100000, 'a');
  for (int i = 0; i < 2000; ++i) job["spec"]["roles"]["actor"]["unknown" + std::to_string(i)] = i;
  const AdmissionAnswer answer = review_validating(review("CREATE", job).dump());
  EXPECT_FALSE(answer.allowed);
  EXPECT_LT(answer.body.size(), 200000u);
}

TEST(Admission, GenerationPodsOfARunningJobMayBeMoreOrFewer) {
  Json job = good_job();
  job["spec"]["roles"]["generation"] = {{"replicas", 2}};
  Json scaled = job;
  scaled["spec"]["roles"]["generation"]["replicas"] = 5;
  EXPECT_TRUE(review_validating(review("UPDATE", scaled, job).dump()).allowed);
  EXPECT_EQ(response_of(review_defaulting(review("UPDATE", scaled, job).dump(), {}))["allowed"], true);
  scaled["spec"]["roles"]["actor"]["replicas"] = 5;
  EXPECT_FALSE(review_validating(review("UPDATE", scaled, job).dump()).allowed);
  Json few = job;
  few["spec"]["roles"]["generation"]["minReplicas"] = 3;
  EXPECT_FALSE(review_validating(review("CREATE", few).dump()).allowed);
}

TEST(Defaulting, WritesOnlyWhatIsMissing) {
  Json job = good_job();
  job["spec"]["failurePolicy"] = {{"maxRestarts", 9}};
  const Json response = response_of(review_defaulting(review("CREATE", job).dump(), {.image = "registry/trainer:2"}));
  ASSERT_TRUE(response.contains("patch"));
  EXPECT_EQ(response["patchType"], "JSONPatch");
  const Json patch = Json::parse(*kube::base64_decode(response["patch"].get<std::string>()));
  for (const Json& operation : patch) EXPECT_EQ(operation["op"], "add");
  const Json patched = job.patch(patch);
  EXPECT_EQ(patched["spec"]["image"], "registry/trainer:2");
  EXPECT_EQ(patched["spec"]["failurePolicy"]["maxRestarts"], 9);
  EXPECT_EQ(patched["spec"]["model"], job["spec"]["model"]);
  EXPECT_TRUE(review_validating(review("CREATE", patched).dump()).allowed);
  // A second time there is nothing left to add.
  EXPECT_FALSE(
      response_of(review_defaulting(review("UPDATE", patched, job).dump(), {.image = "other"})).contains("patch"));
}

TEST(Defaulting, SaysWhatIsWrongBeforeTheSchemaDoes) {
  Json job = good_job();
  job["spec"]["roles"]["actor"] = {{"replicas", 2}, {"gpusPerPod", 8}, {"parallelism", {{"tp", 3}}}};
  const Json response = response_of(review_defaulting(review("CREATE", job).dump(), {}));
  EXPECT_EQ(response["allowed"], false);
  EXPECT_EQ(response["status"]["code"], 422);
  EXPECT_FALSE(response.contains("patch"));
  EXPECT_NE(response["status"]["message"].get<std::string>().find("legal values of tp here: 1, 2, 4, 8"),
            std::string::npos)
      << response.dump();
  EXPECT_EQ(response["status"], response_of(review_validating(review("CREATE", job).dump()))["status"]);
  // Whatever the one webhook refuses of an object that can be read, the other does, too.
  EXPECT_EQ(response_of(review_defaulting(review("UPDATE", job, good_job()).dump(), {}))["allowed"], false);
  Json changed = good_job();
  changed["spec"]["algorithm"] = "SFT";
  EXPECT_EQ(response_of(review_defaulting(review("UPDATE", changed, good_job()).dump(), {}))["allowed"], false);
  // What is wrong already may get labels and lose finalizers.
  Json labelled = job;
  labelled["metadata"]["labels"] = {{"a", "b"}};
  EXPECT_EQ(response_of(review_defaulting(review("UPDATE", labelled, job).dump(), {}))["allowed"], true);
  Json going = job;
  going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z";
  EXPECT_EQ(response_of(review_defaulting(review("UPDATE", going, good_job()).dump(), {}))["allowed"], true);
  // Wrong types are the schema's to name.
  Json unreadable = good_job();
  unreadable["spec"]["roles"]["actor"]["replicas"] = "two";
  EXPECT_EQ(response_of(review_defaulting(review("CREATE", unreadable).dump(), {}))["allowed"], true);
}

TEST(Defaulting, ThePatchCountsWhenAChangeIsJudged) {
  // The image that a change leaves out comes as the schema's default, and what we wrote once is written again: that is
  // no change of a running job.
  Json old_job = good_job();
  old_job["spec"]["image"] = "mirror/t:2";
  Json changed = good_job();
  changed["spec"]["image"] = kDefaultImage;
  changed["spec"]["ttlSecondsAfterFinished"] = 60;
  EXPECT_EQ(
      response_of(review_defaulting(review("UPDATE", changed, old_job).dump(), {.image = "mirror/t:2"}))["allowed"],
      true);
  EXPECT_EQ(response_of(review_defaulting(review("UPDATE", changed, old_job).dump(), {.image = "other"}))["allowed"],
            false);
}

TEST(Defaulting, TheSchemasImageGivesWayToTheOperators) {
  // The API server fills in the schema's default before it calls a webhook.
  auto image_after = [](const char* operation, const Json& job, const Json& old) {
    const Json response = response_of(review_defaulting(review(operation, job, old).dump(), {.image = "mirror/t:2"}));
    if (!response.contains("patch")) return job["spec"]["image"].get<std::string>();
    const Json patch = Json::parse(*kube::base64_decode(response["patch"].get<std::string>()));
    return job.patch(patch)["spec"]["image"].get<std::string>();
  };
  Json job = good_job();
  job["spec"]["image"] = kDefaultImage;
  EXPECT_EQ(image_after("CREATE", job, Json()), "mirror/t:2");
  Json stored = job;
  EXPECT_EQ(image_after("UPDATE", job, stored), kDefaultImage) << "a running job keeps its image";
  stored["spec"]["image"] = "mirror/t:2";
  EXPECT_EQ(image_after("UPDATE", job, stored), "mirror/t:2") << "the same manifest applied again changes nothing";
  job["spec"]["image"] = "own/t:3";
  EXPECT_EQ(image_after("CREATE", job, Json()), "own/t:3");
}

TEST(Defaulting, UnreadableJobIsLeftToValidation) {
  Json job = good_job();
  job["spec"]["roles"] = "none";
  const Json response = response_of(review_defaulting(review("CREATE", job).dump(), {}));
  EXPECT_EQ(response["allowed"], true);
  EXPECT_FALSE(response.contains("patch"));
}

TEST(Defaulting, AdditionsEscapePointers) {
  const Json given = Json::parse(R"({"a/b":{"x":1}})");
  const Json full = Json::parse(R"({"a/b":{"x":2,"y~z":3}})");
  const Json patch = additions(given, full, "");
  ASSERT_EQ(patch.size(), 1u);
  EXPECT_EQ(given.patch(patch), Json::parse(R"({"a/b":{"x":1,"y~z":3}})"));
}

}  // namespace
}  // namespace trireme::webhook
