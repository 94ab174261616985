#include <gtest/gtest.h>

#include "base/error.h"
#include "base/fs.h"
#include "base/subprocess.h"
#include "base/text.h"

namespace trireme {
namespace {

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

TEST(Text, Utf8) {
  EXPECT_TRUE(is_valid_utf8("a\xC3\xA9\xF0\x9F\x98\x80"));
  EXPECT_FALSE(is_valid_utf8("\xC0\x80"));      // overlong
  EXPECT_FALSE(is_valid_utf8("\xED\xA0\x80"));  // surrogate
  EXPECT_FALSE(is_valid_utf8("\xE2\x82"));      // cut
}

TEST(Files, AtomicWriteReplacesAndCleansUp) {
  TemporaryDirectory folder;
  const auto path = folder.path() / "x";
  write_file_atomic(path, "one");
  write_file_atomic(path, "two");
  EXPECT_EQ(read_file(path), "two");
  EXPECT_THROW(write_file_atomic(folder.path() / "missing" / "x", "y"), Error);
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

}  // namespace
}  // namespace trireme
