// Who may write to a folder of checkpoints.
#include "trainer/checkpoint/fence.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/error.h"
#include "base/fs.h"

namespace trireme {
namespace {

Claim claim(const std::string& job, int64_t attempt) { return {job, attempt, random_owner()}; }

// The kind and text of what the fence says; "" when it lets the work run.
std::pair<ErrorKind, std::string> guarded(const Fence& fence) {
  bool ran = false;
  try {
    fence.guard([&] { ran = true; });
  } catch (const Error& error) {
    EXPECT_FALSE(ran);
    return {error.kind(), error.what()};
  }
  EXPECT_TRUE(ran);
  return {ErrorKind::kInternal, ""};
}

TEST(Fence, ANewerAttemptTakesTheFolderFromAnOlderOne) {
  const TemporaryDirectory dir;
  const Fence old(dir.path() / "checkpoints", claim("uid", 2));
  EXPECT_EQ(guarded(old).second, "");
  const Fence newer(dir.path() / "checkpoints", claim("uid", 3));
  const auto [kind, text] = guarded(old);
  EXPECT_EQ(kind, ErrorKind::kConflict);
  EXPECT_NE(text.find("belongs to attempt 3 of this job"), std::string::npos) << text;
  EXPECT_NE(text.find("this process is of attempt 2"), std::string::npos) << text;
  EXPECT_EQ(guarded(newer).second, "");
}

TEST(Fence, AnOlderAttemptThatComesLateIsRefused) {
  const TemporaryDirectory dir;
  const Fence newer(dir.path(), claim("uid", 3));
  try {
    Fence(dir.path(), claim("uid", 2));
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kConflict);
  }
  EXPECT_EQ(guarded(newer).second, "") << "the refused one has changed nothing";
}

TEST(Fence, AJobMadeAnewBeginsWithItsFirstAttempt) {
  const TemporaryDirectory dir;
  const Fence deleted(dir.path(), claim("one", 7));
  const Fence made_anew(dir.path(), claim("two", 1));
  EXPECT_EQ(guarded(made_anew).second, "");
  const auto [kind, text] = guarded(deleted);
  EXPECT_EQ(kind, ErrorKind::kUser);
  EXPECT_NE(text.find("was taken by another run"), std::string::npos) << text;
}

TEST(Fence, OfTwoRunsByHandTheLaterHasTheFolder) {
  const TemporaryDirectory dir;
  const Fence first(dir.path(), claim("", 0)), second(dir.path(), claim("", 0));
  EXPECT_EQ(guarded(first).first, ErrorKind::kUser);
  EXPECT_EQ(guarded(second).second, "");
}

TEST(Fence, IsNotTakenWhileACheckpointGetsItsName) {
  const TemporaryDirectory dir;
  const Fence old(dir.path(), claim("uid", 1));
  std::thread taker;
  bool renamed = false, seen = false;
  old.guard([&] {
    taker = std::thread([&] {
      const Fence newer(dir.path(), claim("uid", 2));
      seen = renamed;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    old.check();  // still ours
    renamed = true;
  });
  taker.join();
  EXPECT_TRUE(seen);
}

TEST(Fence, ADamagedFileCountsAsNone) {
  const TemporaryDirectory dir;
  write_file_atomic(dir.path() / ".fence", "{\"job\": 3");
  const Fence fence(dir.path(), claim("uid", 1));
  EXPECT_EQ(guarded(fence).second, "");
}

}  // namespace
}  // namespace trireme
