#include "trainer/algorithms/engine_fault.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace trireme {
namespace {

TEST(EngineFault, IsParsedOrRefused) {
  EXPECT_EQ(parse_engine_fault("").kind, EngineFault::Kind::kNone);
  const EngineFault kill = parse_engine_fault("kill@3:applying");
  EXPECT_EQ(kill.kind, EngineFault::Kind::kKill);
  EXPECT_EQ(kill.time, 3);
  EXPECT_EQ(kill.phase, "applying");
  const EngineFault cut = parse_engine_fault("cut@2:3");
  EXPECT_EQ(cut.kind, EngineFault::Kind::kCut);
  EXPECT_EQ(cut.phase, "transfer");
  EXPECT_EQ(cut.time, 2);
  EXPECT_EQ(cut.in_row, 3);
  EXPECT_EQ(parse_engine_fault("cut@2").in_row, 1);
  for (const char* wrong : {"kill", "kill@", "kill@2", "kill@0:rewards", "kill@x:rewards", "kill@1:training",
                            "kill@1:rewards:2", "cut", "cut@0", "cut@1:0", "cut@1:2:3", "nan@2:1", "@1:rewards"})
    EXPECT_THROW(parse_engine_fault(wrong), Error) << wrong;
}

TEST(EngineFault, ACutIsOfSoManyTransfersInARowAndOfNothingElse) {
  EngineFaults faults(parse_engine_fault("cut@2:2"));
  faults.begins("fetching");
  faults.begins("applying");
  faults.begins("transfer");
  for (int i = 0; i < 2; ++i) {
    try {
      faults.begins("transfer");
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnavailable) << "it may be asked for again";
    }
    faults.begins("rewards");
  }
  faults.begins("transfer");
  EngineFaults none({});
  none.begins("transfer");
  none.begins("");
}

TEST(EngineFault, AKillIsNotBeforeItsTimeNorInAnotherPhase) {
  EngineFaults faults(parse_engine_fault("kill@2:brought"));
  faults.begins("brought");
  for (int i = 0; i < 3; ++i) faults.begins("bringing");
}

}  // namespace
}  // namespace trireme
