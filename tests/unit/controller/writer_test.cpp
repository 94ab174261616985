// What the writer decides by itself: whether a status says something new, how long it may wait, when to ask again for
// what was refused. No API server.
#include "operator/controller/writer.h"

#include <gtest/gtest.h>

namespace trireme::controller {
namespace {

using kube::ApiError;
using kube::ApiErrorKind;

TEST(Writer, AStatusIsNewsByWhatItSays) {
  RLJobStatus before;
  before.phase = "Running";
  RLJobStatus after = before;
  EXPECT_EQ(change_of(before, after), StatusChange::kNothing);
  after.progress = Progress{};
  after.progress->step = 3;
  EXPECT_EQ(change_of(before, after), StatusChange::kProgress);
  EXPECT_EQ(change_of(after, before), StatusChange::kProgress);
  before = after;
  after.progress->last_heartbeat_time = "2026-01-01T00:00:00Z";
  EXPECT_EQ(change_of(before, after), StatusChange::kProgress) << "it shows that the job lives";
  after.waiting = "Unschedulable";
  EXPECT_EQ(change_of(before, after), StatusChange::kMore);
}

TEST(Writer, DescribingWaitsForThoseWhoAreBusy) {
  const WriterOptions options;
  using std::chrono::seconds;
  EXPECT_EQ(status_interval(StatusChange::kMore, {.jobs = 10000, .queued = 0}, options), seconds(1));
  EXPECT_EQ(status_interval(StatusChange::kMore, {.jobs = 1, .queued = 500}, options), seconds(5));
  EXPECT_EQ(status_interval(StatusChange::kMore, {.jobs = 1, .queued = 5000}, options), seconds(10));
  EXPECT_EQ(status_interval(StatusChange::kProgress, {.jobs = 10, .queued = 5000}, options), seconds(10));
  EXPECT_EQ(status_interval(StatusChange::kProgress, {.jobs = 3000, .queued = 0}, options), seconds(30))
      << "all jobs together about a hundred a second";
}

TEST(Refusal, IsAskedAboutMoreAndMoreSeldom) {
  const SteadyClock::time_point now{};
  const ApiError quota(ApiErrorKind::kForbidden, 403, "Forbidden", "exceeded quota");
  const auto next = [&](const std::optional<Refusal>& before, int64_t attempt, const ApiError& error,
                        const char* kind = "Pod") {
    return refused(before, "uid", attempt, kind, error, now, Milliseconds(1000), Milliseconds(30000));
  };
  std::optional<Refusal> refusal;
  for (const int wait : {1000, 2000, 4000, 8000, 16000, 30000, 30000}) {
    const bool first = !refusal;
    refusal = next(refusal, 2, quota);
    EXPECT_EQ(refusal->retry_at - now, Milliseconds(wait));
    EXPECT_EQ(look_after(*refusal, now), Milliseconds(first ? 1 : wait)) << "the status has to say why, once";
  }
  EXPECT_EQ(look_after(*refusal, now + std::chrono::hours(1)), Milliseconds(1));
  EXPECT_EQ(refusal->in_a_row, 7);
  EXPECT_EQ(refusal->message, "exceeded quota");
  EXPECT_FALSE(refusal->is_final);
  EXPECT_EQ(next(refusal, 3, quota).retry_at - now, Milliseconds(1000)) << "another attempt begins anew";
  refusal->job_uid = "of an earlier job of the name";
  EXPECT_EQ(next(refusal, 2, quota).in_a_row, 1) << "another job does, too";
  const ApiError patient(ApiErrorKind::kForbidden, 403, "", "later", Milliseconds(5000));
  EXPECT_EQ(next({}, 1, patient).retry_at - now, Milliseconds(5000));
  const ApiError invalid(ApiErrorKind::kInvalid, 422, "Invalid", "no such field");
  EXPECT_TRUE(next({}, 1, invalid).is_final);
  EXPECT_FALSE(next({}, 1, invalid, "NetworkPolicy").is_final) << "it is ours, and not what the user wrote";
  EXPECT_FALSE(next({}, 1, ApiError(ApiErrorKind::kInvalid, 400, "", "admission webhook denied")).is_final);
  EXPECT_TRUE(is_refusal(quota));
  EXPECT_FALSE(is_refusal(ApiError(ApiErrorKind::kUnavailable, 503, "", "")));
}

TEST(MergeDiff, PatchTurnsOneIntoTheOther) {
  const Json from = Json::parse(R"({"a":1,"b":{"c":2,"d":3},"e":[1,2],"f":"x"})");
  const Json to = Json::parse(R"({"a":1,"b":{"c":5},"e":[1],"g":{"h":1}})");
  Json copy = from;
  copy.merge_patch(merge_diff(from, to));
  EXPECT_EQ(copy, to);
  EXPECT_EQ(merge_diff(from, from), Json::object());
}

}  // namespace
}  // namespace trireme::controller
