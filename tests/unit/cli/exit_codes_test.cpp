// Exit codes: what a failure policy is told.
#include "trainer/cli/exit_codes.h"

#include <gtest/gtest.h>

#include "api/runtime.h"
#include "base/error.h"

namespace trireme {
namespace {

TEST(ExitCodes, FollowTheKindOfTheError) {
  EXPECT_EQ(exit_code_of(Error(ErrorKind::kUser, "x")), kExitConfig);
  EXPECT_EQ(exit_code_of(Error(ErrorKind::kNotFound, "x")), kExitConfig);
  EXPECT_EQ(exit_code_of(Error(ErrorKind::kTimeout, "x")), kExitCommunication);
  EXPECT_EQ(exit_code_of(Error(ErrorKind::kUnavailable, "x")), kExitCommunication);
  EXPECT_EQ(exit_code_of(Error(ErrorKind::kData, "x")), kExitNumerics);
  EXPECT_EQ(exit_code_of(Error(ErrorKind::kIo, "x")), 1);
  EXPECT_EQ(exit_code_of(std::runtime_error("x")), 1);
}

TEST(ExitCodes, AFaultyDeviceIsTheNodesFaultWhoeverNoticesIt) {
  EXPECT_EQ(exit_code_of(std::runtime_error("CUDA error: uncorrectable ECC error encountered")), kExitNode);
  EXPECT_EQ(exit_code_of(Error(ErrorKind::kUnavailable, "all-reduce failed: uncorrectable ECC error encountered")),
            kExitNode);
  EXPECT_TRUE(is_device_fault("CUDA error: no CUDA-capable device is detected"));
  // What the program did itself.
  EXPECT_FALSE(is_device_fault("CUDA error: an illegal memory access was encountered"));
  EXPECT_FALSE(is_device_fault("CUDA out of memory. Tried to allocate 2.00 GiB"));
  EXPECT_FALSE(is_device_fault("CUDA error: device-side assert triggered"));
}

}  // namespace
}  // namespace trireme
