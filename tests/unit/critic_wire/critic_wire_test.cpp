// What actor and critic ranks write to each other: it comes back, and what is none of it is refused.
#include "trainer/algorithms/critic_wire.h"

#include <gtest/gtest.h>

#include <limits>

#include "base/error.h"
#include "tests/unit/errors.h"

namespace trireme {
namespace {

// Two groups of two, with all that a critic reads; the third sample has no token.
std::vector<Sample> samples_of_two_groups() {
  const SharedTokens prompts[] = {{1, 2, 3}, {4}};
  std::vector<Sample> samples;
  for (int64_t i = 0; i < 4; ++i) {
    Sample& s = samples.emplace_back();
    s.group = 100 + i / 2;
    s.index = i % 2;
    s.prompt = prompts[i / 2];
    const size_t tokens = i == 2 ? 0 : static_cast<size_t>(i) + 1;
    for (size_t t = 0; t < tokens; ++t) {
      s.response.push_back(static_cast<int32_t>(10 * i) + static_cast<int32_t>(t));
      s.generation_logprobs.push_back(-0.25f * static_cast<float>(t + 1));
      s.values.push_back(static_cast<float>(i) + 0.5f);
      s.returns.push_back(static_cast<double>(i) - 0.125);
    }
  }
  samples[1].loss_mask = {1, 0};
  samples[3].loss_multiplier = 0;
  return samples;
}

template <typename F>
void expect_refused(F&& read, const std::string& part, const std::string& what = "") {
  try {
    read();
    ADD_FAILURE() << what << " was read";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kData) << what;
    EXPECT_MENTIONS(error.what(), part);
  }
}

// Puts a number into a message.
template <typename T>
std::string with(std::string bytes, size_t at, T number) {
  return bytes.replace(at, sizeof number, reinterpret_cast<const char*>(&number), sizeof number);
}

TEST(CriticWire, SamplesComeBackAsACriticReadsThem) {
  const std::vector<Sample> samples = samples_of_two_groups();
  const std::string bytes = pack_for_critic(samples);
  const std::vector<Sample> back = unpack_for_critic(bytes);
  ASSERT_EQ(back.size(), samples.size());
  for (size_t i = 0; i < samples.size(); ++i) {
    EXPECT_EQ(back[i].group, samples[i].group);
    EXPECT_EQ(back[i].index, samples[i].index);
    EXPECT_TRUE(back[i].prompt == samples[i].prompt);
    EXPECT_EQ(back[i].response, samples[i].response);
    EXPECT_EQ(back[i].generation_logprobs, samples[i].generation_logprobs);
    EXPECT_EQ(back[i].loss_multiplier, samples[i].loss_multiplier);
    EXPECT_EQ(back[i].loss_mask, samples[i].loss_mask);
    EXPECT_EQ(back[i].values, samples[i].values);
    EXPECT_EQ(back[i].returns, samples[i].returns);
  }
  EXPECT_EQ(pack_for_critic(back), bytes);
}

TEST(CriticWire, SamplesThatAreCutOffOrNameMoreThanThereIsAreRefused) {
  const std::string bytes = pack_for_critic(samples_of_two_groups());
  for (size_t length = 0; length < bytes.size(); ++length) {
    try {
      (void)unpack_for_critic(std::string_view(bytes).substr(0, length));  // whole samples may be left
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kData);
    }
  }
  const size_t tokens = 2 * sizeof(uint64_t);  // behind the number of prompts and the first one's group
  for (const uint64_t most : {std::numeric_limits<uint64_t>::max(), uint64_t{1} << 62, (uint64_t{1} << 62) + 1,
                              static_cast<uint64_t>(bytes.size()) / 4}) {
    expect_refused([&] { (void)unpack_for_critic(with(bytes, 0, most)); }, "parts, more than it holds");
    expect_refused([&] { (void)unpack_for_critic(with(bytes, tokens, most)); }, "parts, more than it holds");
  }
}

TEST(CriticWire, CallsAndAnswersComeBack) {
  CriticCall call;
  call.kind = CriticCall::Kind::kSave;
  call.step = 7;
  call.passes = 3;
  call.stopped = true;
  call.metrics = {{"val:accuracy", 0.5}, {"", -1}};
  const CriticCall back = unpack_call(pack_call(call));
  EXPECT_EQ(back.kind, call.kind);
  EXPECT_EQ(back.step, 7);
  EXPECT_EQ(back.passes, 3);
  EXPECT_TRUE(back.stopped);
  EXPECT_EQ(back.metrics, call.metrics);
  EXPECT_TRUE(back.samples.empty());
  call.samples = samples_of_two_groups();
  EXPECT_EQ(unpack_call(pack_call(call)).samples.size(), 4u);
  const CriticTrained trained = unpack_trained(pack_trained({{{"loss", 0.125}, {"lr", 1e-5}}, 2.5}));
  EXPECT_EQ(trained.seconds, 2.5);
  EXPECT_EQ(trained.metrics.at("loss"), 0.125);
  EXPECT_EQ(trained.metrics.at("lr"), 1e-5);
}

TEST(CriticWire, CallsAndAnswersThatAreNoneAreRefused) {
  CriticCall call;
  call.metrics = {{"loss", 0.5}};
  const std::string bytes = pack_call(call);
  for (size_t length = 0; length < bytes.size(); ++length)
    expect_refused([&] { (void)unpack_call(std::string_view(bytes).substr(0, length)); }, "a message between",
                   std::to_string(length) + " bytes");
  constexpr size_t kStep = 1, kPasses = 9, kMetrics = 18, kName = 26;  // where they stand
  expect_refused([&] { (void)unpack_call(with(bytes, 0, uint8_t{4})); }, "something that it does not know: 4");
  expect_refused([&] { (void)unpack_call(with(bytes, kStep, int64_t{-1})); }, "in step -1");
  expect_refused([&] { (void)unpack_call(with(bytes, kPasses, int64_t{-5})); }, "for -5 passes");
  expect_refused([&] { (void)unpack_call(with(bytes, kMetrics, uint64_t{4})); }, "parts, more than it holds");
  expect_refused([&] { (void)unpack_call(with(bytes, kMetrics, UINT64_MAX)); }, "parts, more than it holds");
  expect_refused([&] { (void)unpack_call(with(bytes, kName, UINT64_MAX)); }, "is cut off");
  const std::string trained = pack_trained({{{"loss", 0.125}}, 2.5});
  for (size_t length = 0; length < trained.size(); ++length)
    expect_refused([&] { (void)unpack_trained(std::string_view(trained).substr(0, length)); }, "a message between",
                   std::to_string(length) + " bytes");
  expect_refused([&] { (void)unpack_trained(trained + "x"); }, "goes on behind its end");
}

TEST(CriticWire, ValuesAreThoseOfAllTokensAndNoMore) {
  const std::vector<Sample> samples = samples_of_two_groups();
  const std::string values = pack_values(samples);
  std::vector<Sample> others = samples;
  for (Sample& s : others) s.values.clear();
  unpack_values(values, others);
  for (size_t i = 0; i < samples.size(); ++i) EXPECT_EQ(others[i].values, samples[i].values);
  expect_refused([&] { unpack_values(values + "1234", others); }, "more values than there are tokens");
  expect_refused([&] { unpack_values(std::string_view(values).substr(4), others); }, "is cut off");
  others[0].values.clear();
  EXPECT_THROW(pack_values(others), Error);  // nobody has given them
}

}  // namespace
}  // namespace trireme
