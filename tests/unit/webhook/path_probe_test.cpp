#include "operator/telemetry/path_probe.h"

#include <gtest/gtest.h>
#include <httplib.h>

#include <memory>

#include "tests/unit/kube/fake_types.h"

namespace trireme::telemetry {
namespace {

using kube::testing::eventually;

TEST(PathProbe, CountsForHowLongItHadAnswers) {
  const auto at = [](int s) { return SteadyClock::time_point{} + std::chrono::seconds(1000 + s); };
  const auto seconds = [](const controller::OwnPath& path) { return path.answers_for.count() / 1000; };
  PathAnswers answers{Milliseconds(39000)};
  EXPECT_FALSE(answers.at(at(0)).broken) << "nothing was asked yet";
  EXPECT_EQ(seconds(answers.at(at(0))), 0);
  for (int s = 0; s <= 50; s += 10) answers.note(true, at(s));
  EXPECT_EQ(seconds(answers.at(at(55))), 55);
  answers.note(false, at(60));
  EXPECT_FALSE(answers.at(at(60)).broken) << "one question may get lost";
  EXPECT_EQ(seconds(answers.at(at(60))), 60);
  answers.note(true, at(70));
  EXPECT_EQ(seconds(answers.at(at(75))), 75);
  answers.note(false, at(80));
  answers.note(false, at(90));
  EXPECT_TRUE(answers.at(at(90)).broken);
  EXPECT_EQ(seconds(answers.at(at(90))), 0);
  answers.note(true, at(100));
  EXPECT_FALSE(answers.at(at(105)).broken);
  EXPECT_EQ(seconds(answers.at(at(105))), 5) << "the time begins anew";
  EXPECT_EQ(seconds(answers.at(at(200))), 0) << "this process stood still";
  answers.note(true, at(200));
  EXPECT_EQ(seconds(answers.at(at(203))), 3) << "who knows what was in between";
}

TEST(PathProbe, TellsWhetherAnythingAnswers) {
  std::unique_ptr<httplib::Server> server;
  std::thread thread;
  int port = 0;
  const auto start = [&] {
    server = std::make_unique<httplib::Server>();
    server->set_keep_alive_max_count(1);
    if (port == 0) {
      port = server->bind_to_any_port("127.0.0.1");
    } else {
      ASSERT_TRUE(eventually([&] { return server->bind_to_port("127.0.0.1", port); }));
    }
    thread = std::thread([&] { server->listen_after_bind(); });
    ASSERT_TRUE(eventually([&] { return server->is_running(); }));
  };
  const auto stop = [&] {
    server->stop();
    thread.join();
    server.reset();
  };
  start();
  PathProbe probe("http://127.0.0.1:" + std::to_string(port) + "/v1/status/team/job", Milliseconds(5),
                  Milliseconds(2000));
  EXPECT_TRUE(eventually([&] { return probe.found().answers_for > Milliseconds(20); })) << "404 is an answer";
  EXPECT_FALSE(probe.found().broken);
  stop();
  EXPECT_TRUE(eventually([&] { return probe.found().broken; }));
  EXPECT_EQ(probe.found().answers_for.count(), 0);
  start();
  EXPECT_TRUE(eventually([&] { return !probe.found().broken; }));
  stop();
}

}  // namespace
}  // namespace trireme::telemetry
