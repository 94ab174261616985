#include "operator/telemetry/path_probe.h"

#include <gtest/gtest.h>
#include <httplib.h>

#include <memory>

#include "tests/unit/kube/fake_types.h"

namespace trireme::telemetry {
namespace {

using kube::testing::eventually;

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
  std::this_thread::sleep_for(Milliseconds(100));
  EXPECT_FALSE(probe.broken()) << "404 is an answer";
  stop();
  EXPECT_TRUE(eventually([&] { return probe.broken(); }));
  start();
  EXPECT_TRUE(eventually([&] { return !probe.broken(); }));
  stop();
}

}  // namespace
}  // namespace trireme::telemetry
