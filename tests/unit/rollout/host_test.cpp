// An engine behind a queue: requests from other threads, weights that change between two of its steps.
#include "trainer/rollout/host.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "tests/unit/rollout/byte_model.h"

namespace trireme {
namespace {

using test::byte_model;

SamplingOptions sampling() {
  SamplingOptions options;
  options.max_new_tokens = 40;
  options.seed = 42;
  return options;
}

// A host over weights of seed 1, and what it has finished.
class HostTest : public testing::Test {
 protected:
  void start(int64_t places = 8) {
    host_ = std::make_unique<EngineHost>(
        [this, places] {
          return std::make_unique<Engine>(*model_, nullptr, EngineOptions{.cache_rows = 2000, .max_sequences = places},
                                          sampling());
        },
        [this](GeneratedGroup group) {
          const std::lock_guard lock(mutex_);
          groups_.push_back(std::move(group));
        });
  }
  static GroupRequest request(int64_t group) {
    GroupRequest request;
    request.group_id = group;
    request.prompt = {5, 6, static_cast<int32_t>(7 + group)};
    request.samples = 4;
    request.first_sample_id = static_cast<uint64_t>(group * 4);
    return request;
  }
  void wait_until_idle() {
    const Deadline deadline = Deadline::after(Milliseconds(60000));
    while (host_->unfinished() > 0 && !deadline.passed())
      host_->wait_for_places(host_->places(), Deadline::after(Milliseconds(50)));
    ASSERT_EQ(host_->unfinished(), 0);
  }
  // Versions 1, 2, ... while responses are generated: weights of seed 1 + version.
  void change_weights(KeptCache kept) {
    for (int64_t version = 1; version <= 4; ++version) {
      const int64_t begun = host_->steps();
      const Deadline deadline = Deadline::after(Milliseconds(60000));
      while (host_->steps() < begun + 6 && host_->unfinished() > 0 && !deadline.passed()) host_->check();
      host_->between_steps(
          [&](Engine& engine) {
            init_parameters(*model_, 1 + static_cast<uint64_t>(version));
            engine.weights_changed(version, kept);
          },
          deadline);
    }
  }
  // Tokens whose log-prob is not, by memcmp, what a forward pass under the weights of their version gives; and how many
  // samples have tokens of several versions.
  std::pair<int64_t, int64_t> differing() {
    const at::NoGradGuard no_grad;
    int64_t tokens = 0, spanning = 0;
    for (const GeneratedGroup& group : groups_) {
      for (const GeneratedSample& sample : group.samples) {
        spanning += sample.versions.size() > 1 ? 1 : 0;
        std::vector<int32_t> ids = group.prompt;
        ids.insert(ids.end(), sample.response.begin(), sample.response.end());
        for (const VersionSpan& span : sample.versions) {
          const auto model = byte_model(1 + static_cast<uint64_t>(span.version));
          const at::Tensor hidden = model->forward(PackedBatch::from_sequences({ids}));
          const auto first = static_cast<int64_t>(group.prompt.size()) - 1;
          const std::vector<int64_t> of_span(sample.response.begin() + span.from, sample.response.begin() + span.to);
          const at::Tensor logprobs =
              token_logprobs(hidden.slice(0, first + span.from, first + span.to), model->head_weight(),
                             at::tensor(of_span, at::kLong), sampling().logprob_options())
                  .contiguous();
          for (int64_t t = span.from; t < span.to; ++t) {
            const float* there = logprobs.data_ptr<float>() + t - span.from;
            tokens += std::memcmp(there, &sample.logprobs[static_cast<size_t>(t)], sizeof(float)) != 0 ? 1 : 0;
          }
        }
      }
    }
    return {tokens, spanning};
  }

  std::unique_ptr<Model> model_ = byte_model(1);
  std::mutex mutex_;
  std::vector<GeneratedGroup> groups_;
  std::unique_ptr<EngineHost> host_;
};

TEST_F(HostTest, WhatIsSubmittedComesBack) {
  start();
  for (int64_t group = 0; group < 6; ++group) host_->submit(request(group));
  wait_until_idle();
  EXPECT_EQ(groups_.size(), 6u);
  EXPECT_EQ(host_->places(), 8);
  EXPECT_GT(host_->steps(), 40);
  Engine alone(*model_, nullptr, {.cache_rows = 2000}, sampling());
  std::map<int64_t, GeneratedGroup> expected;
  for (int64_t group = 0; group < 6; ++group) alone.submit(request(group));
  for (GeneratedGroup& group : alone.run()) expected[group.group_id] = std::move(group);
  for (const GeneratedGroup& group : groups_) {
    for (size_t i = 0; i < 4; ++i)
      EXPECT_EQ(group.samples[i].response, expected.at(group.group_id).samples[i].response);
  }
}

TEST_F(HostTest, EveryTokenHasTheLogProbOfItsWeightsUnlessKeysAreKept) {
  start();
  for (int64_t group = 0; group < 6; ++group) host_->submit(request(group));
  change_weights(KeptCache::kNothing);
  wait_until_idle();
  const auto [exact, spanning] = differing();
  EXPECT_EQ(exact, 0);
  EXPECT_GT(spanning, 0);
  host_.reset();
  groups_.clear();
  model_ = byte_model(1);
  start();
  for (int64_t group = 0; group < 6; ++group) host_->submit(request(group));
  change_weights(KeptCache::kKept);
  wait_until_idle();
  EXPECT_GT(differing().first, 0) << "else this test would notice nothing";
}

// What has begun may use what is its caller's, however long it takes; what has not begun at its deadline never does.
TEST_F(HostTest, WhatHasBegunIsWaitedForBeyondItsDeadline) {
  start();
  host_->between_steps([](Engine&) {}, Deadline::after(Milliseconds(60000)));  // the engine is made
  std::promise<void> begun, released;
  std::shared_future<void> release = released.get_future().share();
  std::future<bool> slow = std::async(std::launch::async, [&] {
    bool ended = false;
    host_->between_steps(
        [&](Engine&) {
          begun.set_value();
          release.wait();
          ended = true;
        },
        Deadline::after(Milliseconds(5000)));
    return ended;
  });
  EXPECT_EQ(begun.get_future().wait_for(Milliseconds(60000)), std::future_status::ready);
  bool called = false;
  try {
    host_->between_steps([&](Engine&) { called = true; }, Deadline::after(Milliseconds(20)));
    ADD_FAILURE() << "the host was at work on something else";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout) << error.what();
  }
  EXPECT_EQ(slow.wait_for(Milliseconds(6000)), std::future_status::timeout);
  released.set_value();
  EXPECT_TRUE(slow.get());
  host_->between_steps([](Engine&) {}, Deadline::after(Milliseconds(60000)));
  EXPECT_FALSE(called);
}

// No token is drawn from weights of no version, and whoever calls hears why.
TEST_F(HostTest, AnEngineThatIsUnusableTakesNoStep) {
  start();
  const Deadline deadline = Deadline::after(Milliseconds(60000));
  int64_t steps = 0;
  const auto breaks = [&](Engine&) {
    host_->submit(request(0));  // there would be something to do
    steps = host_->steps();
    throw UnusableEngine(ErrorKind::kUnavailable, "half of the weights came");
  };
  const auto expect_told = [](const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "the host went on";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnavailable);
      EXPECT_STREQ(error.what(), "half of the weights came");
    }
  };
  host_->submit(request(1));
  expect_told([&] { host_->between_steps(breaks, deadline); });
  expect_told([&] { host_->check(); });
  expect_told([&] { host_->submit(request(2)); });
  expect_told([&] { host_->between_steps([](Engine&) {}, deadline); });
  std::this_thread::sleep_for(Milliseconds(200));
  EXPECT_EQ(host_->steps(), steps);
  EXPECT_TRUE(groups_.empty());
}

TEST_F(HostTest, ErrorsReachWhoCalls) {
  start();
  const Deadline deadline = Deadline::after(Milliseconds(60000));
  EXPECT_THROW(host_->between_steps([](Engine&) { fail_user("no"); }, deadline), Error);
  host_->submit(request(0));
  wait_until_idle();
  GroupRequest impossible = request(1);
  impossible.prompt.assign(600, 1);  // longer than the model has positions
  host_->submit(impossible);
  while (!deadline.passed()) {
    try {
      host_->check();
    } catch (const Error&) {
      break;
    }
  }
  EXPECT_THROW(host_->submit(request(2)), Error);
  EXPECT_THROW(host_->between_steps([](Engine&) {}, deadline), Error);
  host_.reset();
  host_ =
      std::make_unique<EngineHost>([]() -> std::unique_ptr<Engine> { fail_user("no model"); }, [](GeneratedGroup) {});
  EXPECT_THROW(host_->between_steps([](Engine&) {}, deadline), Error);
  host_.reset();
  start();
  host_->submit(request(3));
  host_.reset();  // with samples unfinished
}

}  // namespace
}  // namespace trireme
