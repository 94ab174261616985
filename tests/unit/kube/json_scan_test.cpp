#include "operator/kube/json_scan.h"

#include <gtest/gtest.h>

#include <random>

#include "base/error.h"
#include "operator/kube/watch_lines.h"

namespace trireme::kube {
namespace {

using Json = nlohmann::json;

TEST(JsonFields, KeepsOnlyThePathsThroughArraysAndAnyKeys) {
  const Json object = Json::parse(R"({
    "kind": "Pod", "metadata": {"name": "a\"b\\", "labels": {"x.y/z": "1"}, "managedFields": [{"f": {}}]},
    "spec": {"containers": [{"name": "c", "image": "i", "env": [1, 2]}, {"name": "d"}, 7]},
    "status": {"phase": "Running", "containerStatuses": [{"state": {"terminated": {"exitCode": 3}}, "image": "i"}]}})");
  const JsonFields fields({"metadata.name", "metadata.labels", "spec.containers.name", "status.containerStatuses.state",
                           "status.*.reason"});
  for (const int indent : {-1, 2}) {
    const Json kept = fields.parse(object.dump(indent));
    EXPECT_EQ(kept, Json::parse(
                        R"({"metadata": {"name": "a\"b\\", "labels": {"x.y/z": "1"}}, 
      "spec": {"containers": [{"name": "c"}, {"name": "d"}]},
      "status": {"containerStatuses": [{"state": {"terminated": {"exitCode": 3}}}]}})"));
  }
  EXPECT_EQ(JsonFields().parse(object.dump()), object);
}

TEST(JsonFields, RefusesCutAndNonsense) {
  const JsonFields fields({"a.b", "c"});
  const std::string good = R"({"a":{"b":"x\"}"},"c":[1,{"d":null}],"e":{"f":[[]]}})";
  EXPECT_EQ(fields.parse(good).dump(), R"({"a":{"b":"x\"}"},"c":[1,{"d":null}]})");
  for (size_t cut = 0; cut < good.size(); ++cut) EXPECT_THROW(fields.parse(good.substr(0, cut)), Error) << cut;
  for (const char* bad :
       {"", "1", "\"a\"", "{]", "{\"a\" 1}", "{\"a\":}", "{\"c\":tru}", "{} x", "{\"a\":1,,}", "{,}"}) {
    EXPECT_THROW(fields.parse(bad), Error) << bad;
  }
  EXPECT_THROW(JsonFields({"a"}).parse(std::string(100000, '[')), Error);
  EXPECT_THROW(JsonFields({"*.*"}).parse("{\"a\":" + std::string(100000, '[') + "}"), Error);
}

TEST(JsonScan, TopLevelMembers) {
  const std::string text = R"( {"type":"ADDED", "n": -1.5e3 ,"object":{"type":"inner","s":"}"},"esc":"a\nA"} )";
  EXPECT_EQ(top_level_string(text, "type"), "ADDED");
  EXPECT_EQ(top_level_member(text, "object"), R"({"type":"inner","s":"}"})");
  EXPECT_EQ(top_level_member(text, "n"), "-1.5e3");
  EXPECT_EQ(top_level_string(text, "esc"), "a\nA");
  EXPECT_EQ(top_level_string(text, "n"), std::nullopt);
  EXPECT_EQ(top_level_member(text, "s"), std::nullopt);
  EXPECT_EQ(top_level_member("[1]", "s"), std::nullopt);
  EXPECT_EQ(top_level_member("{\"a\":\"", "a"), std::nullopt);
}

std::pair<std::vector<std::string>, std::string> split_list(const std::string& text, size_t chunk) {
  std::vector<std::string> items;
  ListSplitter splitter([&](std::string_view item) { items.emplace_back(item); });
  for (size_t at = 0; at < text.size(); at += chunk) splitter.feed(std::string_view(text).substr(at, chunk));
  splitter.finish();
  return {items, splitter.metadata()};
}

TEST(ListSplitter, EveryChunkSizeGivesTheSameItems) {
  const std::string text =
      "{\"kind\":\"PodList\" , \"x\" : [ {\"items\":[]} , 3 ] "
      ",\"metadata\":{\"resourceVersion\":\"7\",\"continue\":\"t}\"},\n"
      "\"n\":12,\"items\":[{\"a\":\"]}\\\"\"},\n {\"b\":[{},[]]} ] , \"z\": null}\n";
  for (size_t chunk = 1; chunk <= text.size(); ++chunk) {
    const auto [items, metadata] = split_list(text, chunk);
    ASSERT_EQ(items, (std::vector<std::string>{R"({"a":"]}\""})", R"({"b":[{},[]]})"})) << chunk;
    ASSERT_EQ(metadata, R"({"resourceVersion":"7","continue":"t}"})");
  }
  EXPECT_TRUE(split_list(R"({"items":null,"metadata":{}})", 3).first.empty());
  EXPECT_TRUE(split_list(R"({"items":[]})", 100).first.empty());
}

TEST(ListSplitter, RefusesCutNoListAndTooBig) {
  const std::string text = R"({"metadata":{"resourceVersion":"7"},"items":[{"a":1},{"b":2}]})";
  for (size_t cut = 0; cut < text.size(); ++cut) EXPECT_THROW(split_list(text.substr(0, cut), 5), Error) << cut;
  for (const char* bad : {"[]", "<html>", "{\"items\":[1]}", "{\"items\":[{} {}]}", "{\"items\":[{}]}}", "{\"a\":,}"}) {
    EXPECT_THROW(split_list(bad, 2), Error) << bad;
  }
  ListSplitter small([](std::string_view) {}, 100);
  small.feed(R"({"items":[)");
  EXPECT_THROW(small.feed("{\"a\":\"" + std::string(200, 'x')), Error);
}

TEST(WatchLines, AnyChunksGiveTheSameLines) {
  const std::string text = "one\ntwo\r\n\n\nthree is longer\n" + std::string(10000, 'x') + "\nrest";
  const std::vector<std::string> expected{"one", "two", "three is longer", std::string(10000, 'x')};
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    WatchLines lines;
    std::vector<std::string> got;
    for (size_t at = 0; at < text.size();) {
      const size_t n = trial == 0 ? 1 : 1 + random() % (trial % 2 == 0 ? 7 : 5000);
      EXPECT_TRUE(lines.feed(std::string_view(text).substr(at, n), [&](std::string_view line) {
        got.emplace_back(line);
        return true;
      }));
      at += n;
    }
    ASSERT_EQ(got, expected);
    ASSERT_EQ(lines.pending(), 4u);
  }
}

TEST(WatchLines, LimitStopAndThrowLeaveItUsable) {
  WatchLines lines(10);
  int count = 0;
  const auto take = [&](std::string_view) { return ++count < 2; };
  EXPECT_TRUE(lines.feed("0123456789\n", take));  // exactly the maximum
  EXPECT_THROW(lines.feed("01234567890\n", take), Error);
  EXPECT_EQ(lines.pending(), 0u);
  EXPECT_TRUE(lines.feed("012345", take));
  EXPECT_THROW(lines.feed("67890", take), Error);
  EXPECT_FALSE(lines.feed("a\nb\n", take));
  EXPECT_EQ(count, 2);
  EXPECT_TRUE(lines.feed("he", take));
  EXPECT_THROW(lines.feed("llo\n", [](std::string_view) -> bool { throw std::runtime_error("x"); }),
               std::runtime_error);
  std::string last;
  EXPECT_TRUE(lines.feed("next\n", [&](std::string_view line) {
    last = line;
    return true;
  }));
  EXPECT_EQ(last, "next");
}

}  // namespace
}  // namespace trireme::kube
