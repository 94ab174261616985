#include "operator/kube/informer.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>

#include "operator/kube/metrics.h"
#include "tests/unit/kube/fake_apiserver.h"

namespace trireme::kube {
namespace {

using testing::eventually;
using testing::FakeApiServer;
using testing::Json;

struct PodView {
  std::string name;
  std::string phase;
  std::string text;  // everything the projection saw
};
using Pods = Informer<PodView>;

Json pod(const std::string& name, const std::string& phase = "Pending", const std::string& job = "") {
  Json out{{"metadata", {{"namespace", "ns"}, {"name", name}}},
           {"spec", {{"secret", "not kept"}}},
           {"status", {{"phase", phase}}}};
  if (!job.empty()) out["metadata"]["labels"] = {{"job", job}};
  return out;
}

// Collects handler calls.
struct Log {
  std::mutex mutex;
  std::vector<std::string> lines;
  void add(const std::string& line) {
    std::lock_guard lock(mutex);
    lines.push_back(line);
  }
  std::vector<std::string> take() {
    std::lock_guard lock(mutex);
    return std::move(lines);
  }
  bool has(const std::string& line) {
    std::lock_guard lock(mutex);
    return std::find(lines.begin(), lines.end(), line) != lines.end();
  }
};

Pods::Options pod_options() {
  Pods::Options options;
  options.reflector.resource = resources::kPods;
  options.reflector.page_limit = 3;
  options.reflector.backoff_min = Milliseconds(5);
  options.reflector.backoff_max = Milliseconds(50);
  options.fields = JsonFields({"status.phase"});
  options.index_label = "job";
  return options;
}

PodView project(const Json& object) {
  if (object["status"].value("phase", "") == "Poison") throw std::runtime_error("poison");
  return {object["metadata"]["name"], object["status"].value("phase", ""), object.dump()};
}

InformerHandlers<PodView> logging(Log& log) {
  InformerHandlers<PodView> h;
  h.on_add = [&](const ObjectKey& key, const auto& now, bool initial) {
    log.add((initial ? "initial " : "add ") + key.str() + " " + now->phase);
  };
  h.on_update = [&](const ObjectKey& key, const auto& old, const auto& now) {
    log.add("update " + key.str() + " " + old->phase + " " + now->phase);
  };
  h.on_delete = [&](const ObjectKey& key, const auto& last) { log.add("delete " + key.str() + " " + last->phase); };
  return h;
}

const Deadline kLong() { return Deadline::after(Milliseconds(60000)); }

TEST(Informer, ListsWatchesAndKeepsTheProjectionOnly) {
  FakeApiServer server;
  for (int i = 0; i < 8; ++i) server.put(resources::kPods, pod("p" + std::to_string(i), "Pending", i < 3 ? "a" : "b"));
  Client client(server.config());
  Log log;
  Pods pods(client, pod_options(), project, logging(log));
  EXPECT_FALSE(pods.wait_synced(Deadline::after(Milliseconds(1))));
  pods.start();
  ASSERT_TRUE(pods.wait_synced(kLong()));
  EXPECT_EQ(pods.size(), 8u);
  EXPECT_EQ(log.take().size(), 8u);
  EXPECT_EQ(server.count("GET", "limit=3"), 3);
  EXPECT_EQ(pods.get({"ns", "p0"})->text.find("not kept"), std::string::npos);
  EXPECT_EQ(pods.by_label("a").size(), 3u);
  EXPECT_TRUE(pods.by_label("none").empty());

  server.put(resources::kPods, pod("new", "Running", "a"));
  ASSERT_TRUE(eventually([&] { return log.has("add ns/new Running"); }));
  EXPECT_EQ(pods.by_label("a").size(), 4u);
  server.modify(resources::kPods, {"ns", "new"}, [](Json& j) {
    j["status"]["phase"] = "Failed";
    j["metadata"]["labels"]["job"] = "b";
  });
  ASSERT_TRUE(eventually([&] { return log.has("update ns/new Running Failed"); }));
  EXPECT_EQ(pods.by_label("a").size(), 3u);
  EXPECT_EQ(pods.by_label("b").size(), 6u);
  server.erase(resources::kPods, {"ns", "new"});
  ASSERT_TRUE(eventually([&] { return log.has("delete ns/new Failed"); }));
  EXPECT_EQ(pods.get({"ns", "new"}), nullptr);
  EXPECT_EQ(pods.by_label("b").size(), 5u);
  size_t n = 0;
  pods.for_each([&](const ObjectKey&, const PodView&) { ++n; });
  EXPECT_EQ(n, 8u);
  pods.stop();
  pods.stop();
}

TEST(Informer, SelectorsAndNamespace) {
  FakeApiServer server;
  server.put(resources::kPods, pod("in", "Pending", "a"));
  server.put(resources::kPods, pod("out", "Pending", "b"));
  Json elsewhere = pod("in", "Pending", "a");
  elsewhere["metadata"]["namespace"] = "other";
  server.put(resources::kPods, elsewhere);
  Client client(server.config());
  Pods::Options options = pod_options();
  options.reflector.ns = "ns";
  options.reflector.label_selector = "job=a";
  Pods pods(client, options, project);
  pods.start();
  ASSERT_TRUE(pods.wait_synced(kLong()));
  EXPECT_EQ(pods.size(), 1u);
  // An object that leaves the selection is a deletion, one that enters it an addition.
  server.modify(resources::kPods, {"ns", "in"}, [](Json& j) { j["metadata"]["labels"]["job"] = "b"; });
  server.modify(resources::kPods, {"ns", "out"}, [](Json& j) { j["metadata"]["labels"]["job"] = "a"; });
  EXPECT_TRUE(eventually([&] { return pods.size() == 1 && pods.get({"ns", "out"}); }));
}

TEST(Informer, CutWatchesResumeWithoutAListAndBookmarksMoveOn) {
  FakeApiServer server({.bookmark_interval = Milliseconds(20)});
  server.put(resources::kPods, pod("p"));
  Client client(server.config());
  Metrics metrics;
  Pods::Options options = pod_options();
  options.reflector.metrics = &metrics;
  Pods pods(client, options, project);
  pods.start();
  ASSERT_TRUE(pods.wait_synced(kLong()));
  EXPECT_NE(metrics.text().find("rljob_watch_reconnects_total"), std::string::npos) << "zero is a value, too";
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(eventually([&] { return server.watches_opened() > i; }));
    server.cut_watches();
    server.modify(resources::kPods, {"ns", "p"}, [&](Json& j) { j["status"]["phase"] = "phase" + std::to_string(i); });
    ASSERT_TRUE(eventually([&] { return pods.get({"ns", "p"})->phase == "phase" + std::to_string(i); }));
  }
  EXPECT_EQ(pods.reflector().lists(), 1);
  EXPECT_GE(pods.reflector().watches(), 5);
  // Other kinds push the version on; only bookmarks tell a quiet watch. Without them the next watch would be too old.
  server.put(resources::kConfigMaps, {{"metadata", {{"namespace", "ns"}, {"name", "noise"}}}});
  const std::string version = std::to_string(server.resource_version());
  ASSERT_TRUE(eventually([&] {
    server.cut_watches();
    std::this_thread::sleep_for(Milliseconds(60));
    return server.count("GET", "resourceVersion=" + version) > 0;
  }));
  EXPECT_EQ(pods.reflector().lists(), 1);
}

TEST(Informer, GoneMeansListAgainAndDeletionsInBetweenAreNoticed) {
  FakeApiServer server;
  for (const char* name : {"keep", "gone", "again"}) server.put(resources::kPods, pod(name));
  Client client(server.config());
  Log log;
  Pods pods(client, pod_options(), project, logging(log));
  pods.start();
  ASSERT_TRUE(pods.wait_synced(kLong()));
  ASSERT_TRUE(eventually([&] { return server.open_watches() == 1; }));
  log.take();
  // While the watch is cut and refused, history moves on and is forgotten.
  server.inject({.method = "GET", .path_part = "watch=1", .status = 503, .times = -1});
  server.inject({.method = "GET", .path_part = "limit=", .status = 503, .times = -1});
  server.cut_watches();
  ASSERT_TRUE(eventually([&] { return server.open_watches() == 0; }));
  server.erase(resources::kPods, {"ns", "gone"});
  server.erase(resources::kPods, {"ns", "again"});
  server.put(resources::kPods, pod("again", "Running"));  // another object under the same name
  server.expire_history();
  server.clear_faults();
  ASSERT_TRUE(eventually([&] { return log.has("delete ns/gone Pending") && log.has("add ns/again Running"); }));
  EXPECT_TRUE(log.has("delete ns/again Pending"));
  EXPECT_FALSE(log.has("update ns/keep Pending Pending"));  // unchanged: nothing to tell
  EXPECT_EQ(pods.size(), 2u);
  EXPECT_EQ(pods.reflector().lists(), 2);
  // An ERROR 410 inside an open watch does the same. The third watch: the first was cut, the second was too old.
  ASSERT_TRUE(eventually([&] { return server.watches_opened() == 3; }));
  server.expire_history();
  ASSERT_TRUE(eventually([&] { return pods.reflector().lists() == 3; }));
}

TEST(Informer, ExpiredContinueTokenListsWithoutPages) {
  FakeApiServer server;
  for (int i = 0; i < 7; ++i) server.put(resources::kPods, pod("p" + std::to_string(i)));
  std::atomic<bool> expired{false};
  server.set_observer([&](const testing::RecordedRequest& r) {
    if (r.query.find("continue=") != std::string::npos && !expired.exchange(true)) server.expire_history();
  });
  Client client(server.config());
  Pods pods(client, pod_options(), project);
  pods.start();
  ASSERT_TRUE(pods.wait_synced(kLong()));
  EXPECT_EQ(pods.size(), 7u);
  EXPECT_TRUE(expired);
}

TEST(Informer, MalformedLinesAndPoisonDoNotStopIt) {
  FakeApiServer server;
  server.put(resources::kPods, pod("p"));
  server.put(resources::kPods, pod("bad", "Poison"));
  Client client(server.config());
  Pods pods(client, pod_options(), project);
  pods.start();
  ASSERT_TRUE(pods.wait_synced(kLong()));
  EXPECT_EQ(pods.size(), 1u);
  const std::vector<std::string> hostile{
      "not json\n",
      "{}\n",
      R"({"type":"ADDED"})"
      "\n",
      R"({"type":"ODD","object":{}})"
      "\n",
      R"({"type":"ADDED","object":[1]})"
      "\n",
      R"({"type":"ADDED","object":{"metadata":7}})"
      "\n",
      R"({"type":"MODIFIED","object":{"metadata":{"name":"x","labels":3},"status":[]}})"
      "\n",
      R"({"type":"DELETED","object":null})"
      "\n",
      R"({"type":"ERROR","object":{"code":500}})"
      "\n",
      std::string("\0\xff\n", 3)};
  for (const std::string& bytes : hostile) {
    ASSERT_TRUE(eventually([&] { return server.open_watches() == 1; }));
    server.write_to_watches(resources::kPods, bytes);
  }
  server.modify(resources::kPods, {"ns", "bad"}, [](Json& j) { j["status"]["phase"] = "Cured"; });
  ASSERT_TRUE(eventually([&] { return pods.get({"ns", "bad"}) != nullptr; }));
  EXPECT_EQ(pods.get({"ns", "p"})->phase, "Pending");
}

TEST(Informer, AnObjectOverTheMaximumLineDoesNotGrowMemory) {
  FakeApiServer server;
  Client client(server.config());
  Pods::Options options = pod_options();
  options.reflector.max_object_bytes = 10000;
  Pods pods(client, options, project);
  pods.start();
  ASSERT_TRUE(pods.wait_synced(kLong()));
  ASSERT_TRUE(eventually([&] { return server.open_watches() == 1; }));
  server.write_to_watches(resources::kPods, std::string(20000, 'x'));
  ASSERT_TRUE(eventually([&] { return pods.reflector().lists() >= 2; }));
}

TEST(Informer, ServerRestartAndStormsConverge) {
  FakeApiServer server;
  Client client(server.config());
  Log log;
  Pods pods(client, pod_options(), project, logging(log));
  server.inject({.method = "GET", .status = 429, .times = 2});
  server.inject({.method = "GET", .status = 500, .times = 2});
  server.inject({.method = "GET", .cut = true, .times = 2});
  pods.start();
  ASSERT_TRUE(pods.wait_synced(kLong()));
  std::mt19937 random(7);
  for (int round = 0; round < 6; ++round) {
    if (round == 2) server.stop();
    for (int i = 0; i < 30; ++i) {
      const std::string name = "p" + std::to_string(random() % 10);
      if (random() % 3 == 0) {
        server.erase(resources::kPods, {"ns", name});
      } else {
        server.put(resources::kPods, pod(name, "s" + std::to_string(random() % 100), std::to_string(random() % 3)));
      }
      if (random() % 10 == 0) server.cut_watches();
      if (random() % 15 == 0) server.expire_history();
    }
    if (round == 2) server.start();
    const auto same = [&] {
      const auto truth = server.list(resources::kPods);
      if (truth.size() != pods.size()) return false;
      size_t indexed = 0;
      for (const char* label : {"0", "1", "2"}) indexed += pods.by_label(label).size();
      if (indexed != truth.size()) return false;
      for (const Json& object : truth) {
        const auto mine = pods.get({"ns", object["metadata"]["name"]});
        if (!mine || mine->phase != object["status"]["phase"].get<std::string>()) return false;
      }
      return true;
    };
    ASSERT_TRUE(eventually(same)) << round;
  }
  // What the handlers were told adds up to what is there.
  pods.stop();
  std::set<std::string> known;
  for (const std::string& line : log.take()) {
    const auto words = split(line, ' ');
    if (words[0] == "delete") {
      EXPECT_EQ(known.erase(words[1]), 1u) << line;
    } else if (words[0] == "update") {
      EXPECT_EQ(known.count(words[1]), 1u) << line;
    } else {
      EXPECT_TRUE(known.insert(words[1]).second) << line;
    }
  }
  EXPECT_EQ(known.size(), pods.size());
}

TEST(Informer, StopsAtAnyMoment) {
  FakeApiServer server({.bookmark_interval = Milliseconds(100000)});
  for (int i = 0; i < 20; ++i) server.put(resources::kPods, pod("p" + std::to_string(i)));
  Client client(server.config());
  for (int i = 0; i < 15; ++i) {
    Pods::Options options = pod_options();
    options.reflector.backoff_min = Milliseconds(600000);  // a stop must end the back-off too
    options.reflector.backoff_max = Milliseconds(600000);
    if (i % 3 == 0) server.inject({.method = "GET", .status = 500});
    Pods pods(client, options, project);
    pods.start();
    if (i % 3 == 1) pods.wait_synced(kLong());
    if (i % 3 == 2) std::this_thread::sleep_for(Milliseconds(i));
    server.clear_faults();
  }
}

}  // namespace
}  // namespace trireme::kube
