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

// Every model of the process counts: a critic's stages beside an actor that has none.
TEST(Device, TheDriverIsToldOfEveryModelsSplit) {
  using Settings = std::vector<std::pair<std::string, std::string>>;
  const Settings queues{{"CUDA_DEVICE_MAX_CONNECTIONS", "32"}};
  const Settings eager{{"CUDA_DEVICE_MAX_CONNECTIONS", "32"}, {"CUDA_MODULE_LOADING", "EAGER"}};
  EXPECT_EQ(driver_settings({}), Settings{});
  EXPECT_EQ(driver_settings({{.dp = 4}, {.cp = 2, .dp = 2}}), Settings{});
  EXPECT_EQ(driver_settings({{.tp = 2}}), queues);
  EXPECT_EQ(driver_settings({{.dp = 2}, {.tp = 2}}), queues);
  EXPECT_EQ(driver_settings({{.pp = 2}}), eager);
  EXPECT_EQ(driver_settings({{.tp = 2}, {.pp = 2}}), eager);
}

TEST(Device, TheCpuNeedsNoGpu) { EXPECT_TRUE(choose_device("cpu", 3).is_cpu()); }

}  // namespace
}  // namespace trireme
