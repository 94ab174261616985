// Rollouts compared.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "trainer/batch/sample.h"

namespace trireme::test {

// The same samples in the same order: responses, rewards, versions, and log-probs bit for bit.
inline void expect_same(const std::vector<Sample>& a, const std::vector<Sample>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t s = 0; s < a.size(); ++s) {
    EXPECT_EQ(a[s].group, b[s].group);
    EXPECT_EQ(a[s].index, b[s].index);
    EXPECT_EQ(a[s].response, b[s].response);
    EXPECT_EQ(a[s].raw_reward, b[s].raw_reward);
    EXPECT_EQ(a[s].weight_versions, b[s].weight_versions);
    ASSERT_EQ(a[s].generation_logprobs.size(), b[s].generation_logprobs.size());
    EXPECT_EQ(0, std::memcmp(a[s].generation_logprobs.data(), b[s].generation_logprobs.data(),
                             a[s].generation_logprobs.size() * sizeof(float)));
  }
}

}  // namespace trireme::test
