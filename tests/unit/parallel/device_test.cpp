#include "trainer/parallel/device.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace trireme {
namespace {

std::string refusal(const std::string& name, int major, int minor) {
  try {
    require_hopper(name, major, minor);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    return error.what();
  }
  return {};
}

TEST(Device, EveryHopperIsTakenAndNothingElse) {
  for (const char* name : {"NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB"})
    EXPECT_EQ(refusal(name, 9, 0), "") << name;
  const std::string a100 = refusal("NVIDIA A100-SXM4-80GB", 8, 0);
  EXPECT_NE(a100.find("NVIDIA A100-SXM4-80GB (compute capability 8.0)"), std::string::npos) << a100;
  EXPECT_NE(a100.find("cluster.device=cpu"), std::string::npos) << a100;
  EXPECT_NE(refusal("NVIDIA B200", 10, 0), "");
  EXPECT_NE(refusal("NVIDIA GeForce RTX 4090", 8, 9), "");
}

TEST(Device, TheCpuNeedsNoGpu) { EXPECT_TRUE(choose_device("cpu", 3).is_cpu()); }

}  // namespace
}  // namespace trireme
