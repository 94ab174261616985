#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "base/atomic_file.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/fs.h"
#include "base/host.h"
#include "base/log.h"
#include "base/log_limit.h"
#include "base/sigpipe.h"
#include "base/subprocess.h"
#include "base/text.h"
#include "base/url.h"

namespace trireme {
namespace {

// Made before main(), and so destroyed behind whatever the first line of the log has made.
struct LastWords {
  ~LastWords() {
    if (armed) log_info("test", "after the end of main");
  }
  bool armed = false;
} last_words;

// As a thread does that was given up. A sanitizer sees a logger that is gone.
TEST(LogDeathTest, TakesLinesAfterTheEndOfMain) {
  const auto end = [] {
    log_setup({.level = LogLevel::kInfo, .format = LogFormat::kText, .tag = "a tag that is no short string"});
    log_info("test", "within main");
    last_words.armed = true;
    std::exit(0);
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(0), "a tag that is no short string. test: after the end of main");
}

TEST(Text, ParsesOnlyWholeNumbers) {
  EXPECT_EQ(parse_int("42"), 42);
  EXPECT_EQ(parse_int("-7"), -7);
  EXPECT_FALSE(parse_int("4x"));
  EXPECT_FALSE(parse_int(""));
  EXPECT_FALSE(parse_int("99999999999999999999"));
  EXPECT_EQ(parse_double("1e-3"), 1e-3);
  EXPECT_FALSE(parse_double("1.0 "));
}

TEST(Text, NearestFindsTypos) {
  EXPECT_EQ(nearest("num_promts", {"num_prompts", "seed"}), "num_prompts");
  EXPECT_FALSE(nearest("zzzz", {"num_prompts", "seed"}));
}

TEST(Text, DepthOfJsonLeavesStringsOut) {
  EXPECT_EQ(json_depth(""), 0);
  EXPECT_EQ(json_depth("{\"a\": [1, {}], \"b\": [[]]}"), 3);
  EXPECT_EQ(json_depth("[]{}[]"), 1);
  EXPECT_EQ(json_depth("[\"[[[\\\"{{{\"]"), 1);  // an escaped quote ends no string
  EXPECT_EQ(json_depth("[\"\\\\\", [[]]]"), 3);  // an escaped backslash escapes nothing
  EXPECT_EQ(json_depth("]]][["), 0);             // no JSON
  EXPECT_EQ(json_depth("[\"open [[ \\"), 1);     // nor this
  EXPECT_EQ(json_depth(std::string(100000, '[')), 100000);
}

TEST(Text, Utf8) {
  EXPECT_TRUE(is_valid_utf8("a\xC3\xA9\xF0\x9F\x98\x80"));
  EXPECT_FALSE(is_valid_utf8("\xC0\x80"));          // overlong
  EXPECT_FALSE(is_valid_utf8("\xED\xA0\x80"));      // surrogate
  EXPECT_FALSE(is_valid_utf8("\xE2\x82"));          // cut
  EXPECT_FALSE(is_valid_utf8("\xF4\x90\x80\x80"));  // beyond the last
  EXPECT_FALSE(is_valid_utf8("\xFF"));
  EXPECT_TRUE(is_valid_utf8(""));
}

TEST(Text, WhatAStrangerSentBecomesALine) {
  EXPECT_EQ(one_line("denied: \xC3\xA9", 100), "denied: \xC3\xA9");
  EXPECT_EQ(one_line("a\r\nb\x1B[31m\x7F", 100), "a  b [31m ");
  EXPECT_EQ(one_line("\xFFok\xE2\x82", 100), "?ok??");
  EXPECT_EQ(one_line("abc", 2), "ab");
  EXPECT_EQ(one_line("a\xC3\xA9", 2), "a") << "no half of a character";
  EXPECT_EQ(one_line("\xFF\xFF", 1), "?");
  EXPECT_EQ(one_line("abc", 0), "");
}

TEST(LogLimit, OneLineInAWhileSaysHowManyWereLeftOut) {
  const auto at = [](int s) { return SteadyClock::time_point{} + std::chrono::seconds(s); };
  LogLimit limit(Milliseconds(10000));
  EXPECT_EQ(limit.due(at(0)), "") << "the first is not kept back";
  EXPECT_EQ(limit.due(at(1)), std::nullopt);
  EXPECT_EQ(limit.due(at(9)), std::nullopt);
  EXPECT_EQ(limit.due(at(10)), " (and 2 more like it before)");
  EXPECT_EQ(limit.due(at(30)), "");
}

TEST(Clock, TimesOfDayAreRfc3339) {
  EXPECT_EQ(utc_time(0), "1970-01-01T00:00:00Z");
  EXPECT_EQ(utc_time(1'767'323'045), "2026-01-02T03:04:05Z");
  EXPECT_EQ(utc_now().size(), utc_time(0).size());
}

TEST(Clock, ADeadlineBehindTheEndOfTheClockIsNever) {
  for (const Milliseconds time : {Milliseconds(10'000'000'000'000), Milliseconds::max()}) {
    const Deadline far = Deadline::after(time);
    EXPECT_FALSE(far.passed());
    EXPECT_GT(far.remaining().count(), int64_t{1} << 40);
  }
}

TEST(Urls, AreSplitIntoWhereAndWhat) {
  const Url full = split_url("https://host:8443/v1/score?key=a/b@c");
  EXPECT_EQ(full.scheme, "https");
  EXPECT_EQ(full.authority, "host:8443");
  EXPECT_EQ(full.origin(), "https://host:8443");
  EXPECT_EQ(full.path, "/v1/score?key=a/b@c");
  EXPECT_TRUE(full.is_http());
  EXPECT_FALSE(full.names_user()) << "an @ behind the host is of the query";

  EXPECT_EQ(split_url("http://host").path, "");
  EXPECT_EQ(split_url("http://host?a=b").path, "?a=b");
  EXPECT_EQ(split_url("http://[::1]:80/").origin(), "http://[::1]:80");
  EXPECT_TRUE(split_url("http://me:secret@host/").names_user());
  EXPECT_EQ(split_url("host:80/path").origin(), "host:80");
  for (const char* no_url : {"", "host", "host:80/path", "ftp://host", "http://", "https:///path", "/path"})
    EXPECT_FALSE(split_url(no_url).is_http()) << no_url;
}

TEST(Files, AtomicWriteReplacesAndCleansUp) {
  TemporaryDirectory folder;
  const auto path = folder.path() / "x";
  write_file_atomic(path, "one");
  write_file_atomic(path, "two");
  EXPECT_EQ(read_file(path), "two");
  write_file_atomic(folder.path() / "x", "");
  EXPECT_EQ(read_file(path), "");
  EXPECT_THROW(write_file_atomic(folder.path() / "missing" / "x", "y"), Error);
  std::filesystem::create_directory(folder.path() / "taken");
  try {
    write_file_atomic(folder.path() / "taken", "a folder has this name");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_NE(std::string(error.what()).find("rename to " + (folder.path() / "taken").string()), std::string::npos);
  }
  std::filesystem::remove(folder.path() / "taken");
  size_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder.path())) ++files;
  EXPECT_EQ(files, 1u);
  try {
    read_file(folder.path() / "no");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kNotFound);
    EXPECT_NE(std::string(error.what()).find("/no"), std::string::npos);
  }
}

TEST(Files, WritersWithTheSameProcessNumberDoNotMeet) {
  const TemporaryDirectory dir;
  const std::filesystem::path path = dir.path() / "x";
  // What a process of another machine, with this one's number, is writing.
  std::vector<std::filesystem::path> others;
  for (int i = 0; i < 1000; ++i) {
    others.push_back(path.string() + ".tmp-" + std::to_string(::getpid()) + "-" + std::to_string(i));
    std::ofstream(others.back()) << "half";
  }
  write_file_atomic(path, "whole");
  for (const std::filesystem::path& other : others) EXPECT_TRUE(std::filesystem::exists(other)) << other;
  EXPECT_NE(random_hex(), random_hex());
}

TEST(Files, LargeOnesAreThereWhenTheyAreWhole) {
  const TemporaryDirectory dir;
  const std::filesystem::path path = dir.path() / "large";
  write_file_atomic(path, "old");
  const std::string part(int64_t{40} << 20, 'x');  // more than the kernel is told to begin with
  {
    AtomicFile file(path);
    file.write(part.data(), part.size());
  }
  EXPECT_EQ(read_file(path), "old") << "never finished";
  AtomicFile file(path);
  file.write(part.data(), part.size());
  file.write("end", 3);
  EXPECT_EQ(read_file(path), "old");
  file.finish();
  EXPECT_EQ(read_file(path), part + "end");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), std::filesystem::directory_iterator()), 1);
  EXPECT_THROW(AtomicFile("/nonexistent/folder/x"), Error);
}

TEST(Clock, PatienceBeginsAnewWithEachNewCountOnly) {
  Patience patience(Milliseconds(1000));
  EXPECT_TRUE(patience.moved(0));
  EXPECT_FALSE(patience.moved(0));
  EXPECT_FALSE(patience.passed());
  std::this_thread::sleep_for(Milliseconds(1010));
  EXPECT_FALSE(patience.moved(0));
  EXPECT_TRUE(patience.passed());
  EXPECT_TRUE(patience.moved(3));
  EXPECT_FALSE(patience.passed());
  EXPECT_EQ(patience.seconds(), 1);
}

TEST(Files, OneAtATimeHasTheLock) {
  const TemporaryDirectory dir;
  const std::filesystem::path path = dir.path() / "lock";
  {
    const FileLock first(path, Deadline::after(Milliseconds(0)));
    ASSERT_TRUE(first.supported());
    EXPECT_THROW(FileLock(path, Deadline::after(Milliseconds(30))), Error);
  }
  EXPECT_NO_THROW(FileLock(path, Deadline::after(Milliseconds(0))));
}

TEST(Processes, CollectOutputStatusAndDeadline) {
  SpawnOptions cat;
  cat.argv = {"cat"};
  const std::string big(1 << 20, 'x');
  RunResult echoed = run_process(cat, big, Deadline::after(Milliseconds(60000)));
  EXPECT_TRUE(echoed.status.ok());
  EXPECT_EQ(echoed.output, big);

  SpawnOptions failing;
  failing.argv = {"sh", "-c", "exit 3"};
  EXPECT_EQ(run_process(failing, big, Deadline::after(Milliseconds(60000))).status.code, 3);

  SpawnOptions sleeping;
  sleeping.argv = {"sh", "-c", "sleep 600 & wait"};
  Stopwatch watch;
  RunResult killed = run_process(sleeping, "", Deadline::after(Milliseconds(100)));
  EXPECT_TRUE(killed.timed_out);
  EXPECT_EQ(killed.status.signal, 9);
  EXPECT_LT(watch.seconds(), 60);

  SpawnOptions missing;
  missing.argv = {"/no/such/program"};
  EXPECT_THROW(Subprocess::spawn(missing), Error);
}

// Writes into a pipe that nobody reads any more; the error.
int write_to_nobody() {
  int ends[2];
  if (::pipe(ends) != 0) return -1;
  ::close(ends[0]);
  const int error = ::write(ends[1], "x", 1) < 0 ? errno : 0;
  ::close(ends[1]);
  return error;
}

TEST(Sigpipe, BlockedInAScopeAndTakenBackAtItsEnd) {
  const auto before = ::signal(SIGPIPE, SIG_DFL);  // whatever raises it now ends this program
  {
    const SigpipeBlocked outer;
    {
      const SigpipeBlocked inner;
      EXPECT_EQ(write_to_nobody(), EPIPE);
    }
    EXPECT_EQ(write_to_nobody(), EPIPE) << "still blocked: the scope around it has not ended";
  }
  sigset_t now;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &now);
  EXPECT_EQ(sigismember(&now, SIGPIPE), 0);
  ignore_sigpipe();
  EXPECT_EQ(write_to_nobody(), EPIPE);
  ::signal(SIGPIPE, before);
}

TEST(Subprocess, AChildHasNoDescriptorThatItIsNotGiven) {
  // Without O_CLOEXEC, as libraries open sockets.
  const int left = ::fcntl(2, F_DUPFD, 100), given = ::fcntl(2, F_DUPFD, 100);
  ASSERT_GE(left, 100);
  ASSERT_GE(given, 100);
  SpawnOptions spawn;
  spawn.argv = {"sh", "-c",
                "for fd in " + std::to_string(left) + " " + std::to_string(given) +
                    "; do [ -e /proc/$$/fd/$fd ] && echo there || echo none; done"};
  spawn.keep_fd = given;
  const RunResult result = run_process(spawn, "", Deadline::after(Milliseconds(60000)));
  ::close(left);
  ::close(given);
  EXPECT_EQ(result.output, "none\nthere\n");
}

TEST(Subprocess, AGroupEndsWhenItsFirstProcessHasEnded) {
  SpawnOptions spawn;
  spawn.argv = {"sh", "-c", "sleep 900 & exit 3"};
  spawn.pipe_stdout = true;
  Subprocess child = Subprocess::spawn(spawn);
  const auto status = child.wait(Deadline::after(Milliseconds(60000)));
  ASSERT_TRUE(status);
  EXPECT_EQ(status->code, 3);
  // The pipe ends when nobody holds it any more.
  pollfd fd{child.stdout_fd(), POLLIN, 0};
  ASSERT_EQ(::poll(&fd, 1, 60000), 1);
  char byte;
  EXPECT_EQ(::read(child.stdout_fd(), &byte, 1), 0);
}

TEST(Host, AContainersQuotaIsRoundedUpToCpus) {
  EXPECT_EQ(cpus_of_quota("200000 100000"), 2);
  EXPECT_EQ(cpus_of_quota("150000 100000\n"), 2);
  EXPECT_EQ(cpus_of_quota("1000 100000"), 1);
  for (const char* none : {"max 100000", "", "-1 100000", "100000", "100000 0"})
    EXPECT_EQ(cpus_of_quota(none), 0) << none;
  EXPECT_GE(usable_cpus(), 1);
}

}  // namespace
}  // namespace trireme
