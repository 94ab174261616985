// Server and client over a socket: tickets, waits that end, an actor that goes.
#include "trainer/work/server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>

#include <atomic>
#include <memory>
#include <thread>

#include "base/error.h"
#include "trainer/work/client.h"

namespace trireme {
namespace {

using testing::HasSubstr;

DeskOptions desk_options() {
  DeskOptions options;
  options.ledger = {.groups_per_step = 1, .samples_per_group = 2};
  options.vocabulary = 10;
  options.name = "desk";
  options.prompt = [](int64_t, bool) {
    WorkPrompt prompt;
    prompt.example.prompt = {1, 2};
    prompt.example.extra = {{"level", 3}};
    return prompt;
  };
  options.refuses = [](const JoinRequest& request) -> std::optional<std::string> {
    if (request.model == "other") return "has another model than the actor: other";
    return std::nullopt;
  };
  return options;
}

class WorkServerTest : public testing::Test {
 protected:
  WorkServerTest() : desk_(desk_options(), [this](int64_t engine, const std::string&) { served_ = engine; }) {
    server_ = std::make_unique<WorkServer>(WorkServerOptions{"127.0.0.1", 0, "secret", 4096}, desk_);
    url_ = "http://127.0.0.1:" + std::to_string(server_->port());
    desk_.with([](Desk& desk) {
      desk.open();
      desk.publish();
    });
  }

  WorkClient client(const std::string& ticket = "secret") {
    return WorkClient({url_, ticket, Milliseconds(300), Milliseconds(120000)}, &stop_);
  }
  static JoinRequest join_as(const std::string& name) { return {name, name, "", "", "", 4}; }

  std::atomic<int64_t> served_{-1};
  SharedDesk desk_;
  std::unique_ptr<WorkServer> server_;
  std::string url_;
  std::atomic<bool> stop_{false};
};

TEST_F(WorkServerTest, WorkGoesOutAndSamplesComeIn) {
  WorkClient engine = client();
  const JoinReply joined = engine.join(join_as("e"));
  const Caller caller{joined.engine, "e", joined.desk};
  const WeightsReply weights = engine.weights({caller, -1, 1000});
  EXPECT_EQ(weights.version, 0);
  EXPECT_EQ(served_.load(), 0);
  LeaseRequest ask;
  ask.caller = caller;
  ask.places = 4;
  ask.version = ask.fetched = 0;
  const LeaseReply leased = engine.lease(ask);
  ASSERT_EQ(leased.runs.size(), 1u);
  EXPECT_EQ(leased.runs[0].extra.at("level"), 3);
  GroupsRequest samples;
  samples.caller = caller;
  for (int64_t i = 0; i < 2; ++i) {
    Sample& sample = samples.samples.emplace_back();
    sample.index = i;
    sample.response = {3};
    sample.generation_logprobs = {-1};
    sample.weight_versions = {{0, 0, 1}};
  }
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(engine.send_groups(samples).result, GroupsReply::Result::kCounted) << "the second time too";
  EXPECT_TRUE(desk_.wait([](Desk& desk) { return desk.complete(); }, Milliseconds(5000), {}));
  samples.run = 5;
  EXPECT_THROW(engine.send_groups(samples), Error);
  samples.samples[0].response.assign(5000, 3);
  samples.samples[0].generation_logprobs.assign(5000, -1);
  EXPECT_THROW(engine.send_groups(samples), Error) << "a body beyond the bound";
}

TEST_F(WorkServerTest, RefusesWithoutTheTicketAndWhoDoesNotFit) {
  WorkClient stranger = client("guess");
  try {
    stranger.join(join_as("e"));
    ADD_FAILURE() << "joined without the ticket";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("ticket"));
  }
  httplib::Client raw(url_);
  const auto nothing = raw.Post("/v1/leave", "{}", "application/json");
  ASSERT_TRUE(nothing);
  EXPECT_EQ(nothing->status, 401);
  raw.set_bearer_token_auth("secret");
  EXPECT_EQ(raw.Post("/v1/leave", "{}", "application/json")->status, 400);
  EXPECT_EQ(raw.Get("/v1/weights?engine=x")->status, 400);
  EXPECT_EQ(raw.Get("/")->status, 404);
  WorkClient engine = client();
  JoinRequest other = join_as("e");
  other.model = "other";
  try {
    engine.join(other);
    ADD_FAILURE() << "joined with another model";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    EXPECT_THAT(error.what(), HasSubstr("has another model than the actor: other"));
  }
  const JoinReply joined = engine.join(join_as("e"));
  LeaseRequest ask;
  ask.caller = {joined.engine, "e", "another desk"};
  try {
    engine.lease(ask);
    ADD_FAILURE() << "an engine of another actor got an answer";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConflict);
  }
}

TEST_F(WorkServerTest, AWaitEndsWhenThereIsWork) {
  WorkClient engine = client(), second = client();
  const JoinReply joined = engine.join(join_as("e"));
  LeaseRequest ask;
  ask.caller = {joined.engine, "e", joined.desk};
  ask.places = 4;
  ask.version = ask.fetched = 0;
  ASSERT_EQ(engine.lease(ask).runs.size(), 1u);
  ask.wait_ms = 20000;
  LeaseReply waited;
  std::thread waits([&] { waited = engine.lease(ask); });
  desk_.with([&](Desk& desk) { desk.leave({ask.caller, "", false, 0}, SteadyClock::now()); });
  waits.join();
  EXPECT_FALSE(waited.known) << "its leases went back while it waited";
  const JoinReply again = second.join(join_as("f"));
  WeightsReply weights;
  std::thread looks([&] { weights = second.weights({{again.engine, "f", again.desk}, 0, 20000}); });
  desk_.with([](Desk& desk) { desk.end(); });
  looks.join();
  EXPECT_TRUE(weights.over);
}

// An engine that comes while training writes the weights waits here, where no deadline of a transfer runs.
TEST_F(WorkServerTest, WhoComesWhileWeightsAreWrittenWaitsUntilTheyAreWhole) {
  desk_.with([](Desk& desk) { desk.retract(); });
  WorkClient engine = client();
  const JoinReply joined = engine.join(join_as("e"));
  EXPECT_EQ(engine.weights({{joined.engine, "e", joined.desk}, -1, 300}).version, -1);
  EXPECT_EQ(served_.load(), -1) << "somebody was asked to send them";
  WeightsReply weights;
  std::thread waits([&] { weights = engine.weights({{joined.engine, "e", joined.desk}, -1, 20000}); });
  desk_.with([](Desk& desk) { desk.publish(); });
  waits.join();
  EXPECT_EQ(weights.version, 0);
  EXPECT_EQ(served_.load(), joined.engine);
}

TEST_F(WorkServerTest, AnActorThatHasGoneIsNoticedSoon) {
  WorkClient engine = client();
  const JoinReply joined = engine.join(join_as("e"));
  LeaseRequest ask;
  ask.caller = {joined.engine, "e", joined.desk};
  server_.reset();
  const Stopwatch watch;
  try {
    engine.lease(ask);
    ADD_FAILURE() << "nobody answers";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
  }
  EXPECT_LT(watch.seconds(), 60) << "as long as an answer may take";
  stop_ = true;
  EXPECT_THROW(engine.lease(ask), Error);
  engine.leave({ask.caller, "", false, 0});
}

}  // namespace
}  // namespace trireme
