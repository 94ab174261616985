#include "trainer/algorithms/failure.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <new>

#include "base/error.h"

namespace trireme {
namespace {

TEST(Failure, AMemoryShortageIsOneSentenceWithThePhaseTheAmountAndTheKeys) {
  // As LibTorch 2.11 words it.
  const c10::OutOfMemoryError device(
      {"f", "file", 1},
      "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.19 GiB is "
      "free. Including non-PyTorch memory, this process has 138.61 GiB memory in use.\nSee documentation");
  const std::string training = describe_memory_shortage(device, "training").value();
  EXPECT_EQ(
      training.find("out of memory in phase training: 20.00 GiB were asked for where 1.19 GiB of the GPU's 139.80 "
                    "GiB were free; lower the micro-batch (policy.sequence_packing.train_mb_tokens"),
      0u)
      << training;
  EXPECT_NE(training.find("policy.activation_checkpointing"), std::string::npos);
  EXPECT_NE(training.find("policy.generation.kv_cache_tokens"), std::string::npos);
  EXPECT_EQ(training.find('\n'), std::string::npos);
  const std::string generation = describe_memory_shortage(device, "generation").value();
  EXPECT_NE(generation.find("lower policy.generation.kv_cache_tokens"), std::string::npos) << generation;
  EXPECT_NE(describe_memory_shortage(device, "logprobs")->find("logprob_mb_tokens"), std::string::npos);
  EXPECT_TRUE(describe_memory_shortage(std::bad_alloc(), "training"));
  EXPECT_TRUE(describe_memory_shortage(std::runtime_error("CUDA error: out of memory"), ""));
  EXPECT_FALSE(describe_memory_shortage(std::runtime_error("no space left on device"), "training"));
}

TEST(Failure, TheAllocatorOfTheHostIsUnderstood) {
  try {
    (void)at::empty({int64_t{1} << 50}, at::kByte);
    FAIL();
  } catch (const std::exception& error) {
    const std::string text = describe_memory_shortage(error, "training").value_or(error.what());
    EXPECT_EQ(text.find("out of memory in phase training: 1.0 PiB were asked for of the machine's memory"), 0u) << text;
  }
}

TEST(Failure, ALoopOfOneRankThrowsItsOwnError) {
  ParallelContext alone;
  try {
    run_and_report(alone, [] { fail_data("a number was not finite"); });
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kData);
    EXPECT_STREQ(error.what(), "a number was not finite");
  }
  bool ran = false;
  run_and_report(alone, [&] { ran = true; });
  EXPECT_TRUE(ran);
}

TEST(Failure, FaultsAreParsedOrRefused) {
  EXPECT_EQ(parse_fault("").kind, Fault::Kind::kNone);
  const Fault fault = parse_fault("device-hang@3:1");
  EXPECT_EQ(fault.kind, Fault::Kind::kDeviceHang);
  EXPECT_EQ(fault.step, 3);
  EXPECT_EQ(fault.rank, 1);
  EXPECT_EQ(parse_fault("nan@2").rank, 0);
  EXPECT_EQ(parse_fault("stay@2:1").kind, Fault::Kind::kStay);
  EXPECT_EQ(parse_fault("kill@2:1").phase, "training");
  EXPECT_EQ(parse_fault("kill@2:3:rollout exchange").phase, "rollout exchange");
  EXPECT_EQ(parse_fault("kill@2:3:refit").rank, 3);
  for (const char* wrong :
       {"nan", "nan@", "nan@0", "flood@2:1", "nan@2:x", "@2:1", "nan@2:1:refit", "kill@2:1:", "kill@2:1:refit:3"}) {
    EXPECT_THROW(parse_fault(wrong), Error) << wrong;
  }
}

}  // namespace
}  // namespace trireme
