// Bodies between engines and actor: what is written reads back as itself, and what is malformed is refused.
#include "trainer/work/wire.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace trireme {
namespace {

const Caller kCaller{3, "session-1", "desk-1"};

Sample sample_of(int64_t index) {
  Sample sample;
  sample.index = index;
  sample.response = {1, 2, 3};
  sample.generation_logprobs = {-0.5F, -0.25F, -0.125F};
  sample.weight_versions = {{4, 0, 2}, {5, 2, 3}};
  sample.raw_reward = 0.5;
  sample.reward_parts = {0.5, 1};
  return sample;
}

TEST(Wire, EveryBodyReadsBackAsItself) {
  const JoinRequest join{"engine-0", "s", "policy: {}", "m", "t", 16, "p"};
  EXPECT_EQ(parse_join_request(to_body(join)), join);
  const JoinReply joined{2, "desk-1", 8, true, 3000};
  EXPECT_EQ(parse_join_reply(to_body(joined)), joined);
  const LeaseRequest lease{kCaller, 5, 3, 4, 100, 2000, true, 0.5, 0.25, 7};
  EXPECT_EQ(parse_lease_request(to_body(lease)), lease);
  LeaseReply leased;
  leased.runs = {{11, 4, 2, 2, 66, {5, 6}, "what is \"1+1\"?\n", "2", {{"level", {1, 2}}}, {10, 12}}};
  leased.left = leased.over = true;
  EXPECT_EQ(parse_lease_reply(to_body(leased)), leased);
  for (const auto result : {GroupsReply::Result::kCounted, GroupsReply::Result::kTooOld})
    EXPECT_EQ(parse_groups_reply(to_body(GroupsReply{result})).result, result);
  const WeightsRequest ask{kCaller, 4, 1000};
  EXPECT_EQ(parse_weights_query(to_query(ask)), ask);
  const WeightsReply weights{5, 1, "desk-1-7", true, false};
  EXPECT_EQ(parse_weights_reply(to_body(weights)), weights);
  const LeaveRequest leave{kCaller, "no room", true, 1};
  EXPECT_EQ(parse_leave_request(to_body(leave)), leave);
}

TEST(Wire, AProbeOfRewardsReadsBackAsItself) {
  const RewardRequest probe{"what is \"1+1\"?\n", "2", "so it is\n#### 2", {{"level", {1, 2}}}, true};
  const RewardRequest read = parse_probe(to_body(probe));
  EXPECT_EQ(read.prompt, probe.prompt);
  EXPECT_EQ(read.response, probe.response);
  EXPECT_EQ(read.gold, probe.gold);
  EXPECT_EQ(read.extra, probe.extra);
  EXPECT_TRUE(read.truncated);
  for (const char* bad :
       {"", "[]", "{}", R"({"prompt": 1, "response": "", "gold": "", "extra": null, "truncated": false})",
        R"({"prompt": "", "response": "", "gold": "", "truncated": false})"})
    EXPECT_THROW(parse_probe(bad), Error) << bad;
  EXPECT_THROW(parse_probe(to_body(RewardRequest{std::string(kMaxWireText + 1, 'x'), "", "", {}, false})), Error);
}

TEST(Wire, SamplesComeWithTheirCounters) {
  GroupsRequest request;
  request.caller = kCaller;
  request.run = 9;
  request.group = 4;
  request.first_sample = 2;
  request.counters = {{"math", 10, 2, 1, 0.5, "no answer"}};
  request.samples = {sample_of(2), sample_of(3)};
  const GroupsRequest read = parse_groups_request(to_body(request));
  EXPECT_EQ(read.caller, kCaller);
  EXPECT_EQ(read.run, 9);
  EXPECT_EQ(read.group, 4);
  EXPECT_EQ(read.first_sample, 2);
  ASSERT_EQ(read.counters.size(), 1u);
  EXPECT_EQ(read.counters[0].failed, 2);
  EXPECT_EQ(read.counters[0].last_error, "no answer");
  EXPECT_EQ(pack_samples(read.samples), pack_samples(request.samples));
}

TEST(Wire, MalformedBodiesAreRefused) {
  const auto bad = [](const std::string& body) {
    EXPECT_THROW(parse_lease_request(body), Error) << body;
    EXPECT_THROW(parse_groups_request(body), Error) << body;
    EXPECT_THROW(parse_join_request(body), Error) << body;
    EXPECT_THROW(parse_leave_request(body), Error) << body;
    EXPECT_THROW(parse_lease_reply(body), Error) << body;
  };
  bad("");
  bad("[]");
  bad("{}");
  bad("{\"engine\":-1}");
  bad(std::string(100, '['));
  std::string body = to_body(LeaseRequest{kCaller, 5, 3, 2});
  EXPECT_THROW(parse_lease_request(body), Error) << "it has fetched older weights than it has";
  body = to_body(LeaseRequest{kCaller, 5, 3, 3, 1, kMaxWireWait_ms + 1});
  EXPECT_THROW(parse_lease_request(body), Error);
  GroupsRequest request;
  request.caller = kCaller;
  EXPECT_THROW(parse_groups_request(to_body(request)), Error) << "no samples";
  request.samples = {sample_of(0)};
  body = to_body(request);
  for (size_t cut = 1; cut < 40; ++cut)
    EXPECT_THROW(parse_groups_request(std::string_view(body).substr(0, body.size() - cut)), Error) << cut;
  request.samples[0].group = 1;
  EXPECT_THROW(parse_groups_request(to_body(request)), Error) << "a group that the line ahead does not name";
  EXPECT_THROW(parse_weights_query("engine=1"), Error);
  EXPECT_THROW(parse_weights_query("engine=x&session=s&desk=d&after=1&wait_ms=0"), Error);
}

}  // namespace
}  // namespace trireme
