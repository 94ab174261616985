#include "trainer/algorithms/reference_stream.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {

ReferenceStream::ReferenceStream(const Model& model, const LogprobOptions& options, bool share_prompts,
                                 std::shared_ptr<const DevicePartition> partition, double timeout_s,
                                 std::function<void(const std::string&)> on_stuck, int64_t micro_batch_tokens)
    : model_(model),
      options_(options),
      share_prompts_(share_prompts),
      partition_(std::move(partition)),
      timeout_s_(timeout_s),
      on_stuck_(std::move(on_stuck)),
      micro_batch_tokens_(micro_batch_tokens),
      thread_([this] { work(); }) {}

ReferenceStream::~ReferenceStream() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ReferenceStream::add(RolloutSample sample) {
  if (sample.tokens.empty()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.push_back(std::move(sample));
}

void ReferenceStream::after_step(Engine& engine) {
  const bool few = engine.unfinished_samples() <= kSharedDeviceSamples && !engine.idle();
  bool work = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    may_compute_ = few && !out_of_memory_ && error_ == nullptr;
    work = (may_compute_ && !waiting_.empty()) || computing_;
  }
  if (work != shared_) engine.share_device(work);
  shared_ = work;
  if (work) changed_.notify_all();
}

int64_t ReferenceStream::computed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(done_.size());
}

int64_t ReferenceStream::finish(Engine& engine, std::vector<RolloutSample>& samples) {
  std::vector<RolloutSample> done;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    may_compute_ = false;
    waiting_.clear();
    if (!changed_.wait_for(lock, std::chrono::duration<double>(timeout_s_), [this] { return !computing_; })) {
      const std::string what =
          "reference log-probs that were begun while answers were generated have not ended after " +
          format_fixed(timeout_s_, 0) +
          " s (cluster.collective_timeout_s); policy.generation.background_processors=0 computes them afterwards";
      if (on_stuck_) on_stuck_(what);
      fail_internal(what);
    }
    done = std::move(done_);
    done_.clear();
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }
  if (shared_) engine.share_device(false);
  shared_ = false;
  std::map<std::pair<int64_t, int64_t>, std::vector<float>*> by_place;
  for (RolloutSample& sample : done) by_place[{sample.group, sample.index}] = &sample.reference_logprobs;
  int64_t filled = 0;
  for (RolloutSample& sample : samples) {
    const auto found = by_place.find({sample.group, sample.index});
    if (found == by_place.end()) continue;
    TRIREME_CHECK(found->second->size() == sample.tokens.size(), "reference log-probs of another answer");
    sample.reference_logprobs = std::move(*found->second);
    ++filled;
  }
  return filled;
}

// Answers of one group stay together: they may share their prompt.
std::vector<RolloutSample> ReferenceStream::take_batch() {
  std::stable_sort(waiting_.begin(), waiting_.end(), [](const RolloutSample& a, const RolloutSample& b) {
    return a.group != b.group ? a.group < b.group : a.index < b.index;
  });
  size_t count = 0;
  for (int64_t tokens = 0; count < waiting_.size(); ++count) {
    tokens += waiting_[count].length();
    if (count > 0 && tokens > micro_batch_tokens_) break;
  }
  const auto end = waiting_.begin() + static_cast<std::ptrdiff_t>(count);
  std::vector<RolloutSample> batch(std::make_move_iterator(waiting_.begin()), std::make_move_iterator(end));
  waiting_.erase(waiting_.begin(), end);
  return batch;
}

std::vector<std::vector<float>> ReferenceStream::compute(const std::vector<RolloutSample>& samples) const {
  const c10::NoGradGuard no_grad;
  const c10::DeviceGuard device(model_.options().device);
  std::optional<PartitionScope> part;
  if (partition_ != nullptr) part.emplace(*partition_, PartitionScope::Part::kBackground);
  Bin bin;
  for (size_t i = 0; i < samples.size(); ++i) bin.push_back(static_cast<int64_t>(i));
  const MicroBatch batch = make_micro_batch(samples, bin, share_prompts_);
  const at::Tensor all = answer_logprobs(model_, batch, options_).to(at::kCPU, at::kFloat).contiguous();
  const float* value = all.const_data_ptr<float>();
  std::vector<std::vector<float>> of_samples;
  for (const RolloutSample& sample : samples) {
    of_samples.emplace_back(value, value + sample.tokens.size());
    value += sample.tokens.size();
  }
  return of_samples;
}

SamplesToReference::SamplesToReference(Engine& engine, ReferenceStream* stream, const std::vector<SampleRun>& runs)
    : engine_(engine), stream_(stream) {
  if (stream == nullptr) return;
  engine_.on_sample = [stream, &runs](const GroupRequest& group, int64_t index, const GeneratedSample& generated) {
    const SampleRun& run = runs[static_cast<size_t>(group.group_id)];
    RolloutSample sample;
    sample.group = run.group;
    sample.index = run.first_sample + index;
    sample.prompt = group.prompt;
    sample.tokens = generated.tokens;
    stream->add(std::move(sample));
  };
}

SamplesToReference::~SamplesToReference() {
  engine_.on_sample = nullptr;
  if (stream_ != nullptr) stream_->forget();
}

void ReferenceStream::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++rollout_;
  may_compute_ = false;
  waiting_.clear();
  done_.clear();
}

void ReferenceStream::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stop_ || (may_compute_ && !waiting_.empty()); });
    if (stop_) return;
    computing_ = true;
    std::vector<RolloutSample> batch = take_batch();
    const int64_t rollout = rollout_;
    lock.unlock();
    std::vector<std::vector<float>> logprobs;
    std::exception_ptr error;
    bool no_memory = false;
    try {
      logprobs = compute(batch);
    } catch (const c10::OutOfMemoryError&) {
      no_memory = true;
      log_warn("train",
               "no memory for reference log-probs while answers are generated: they are computed afterwards from now "
               "on; lower policy.generation.kv_cache_tokens or kv_cache_memory_fraction");
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    for (size_t i = 0; i < logprobs.size() && rollout == rollout_; ++i) {
      batch[i].reference_logprobs = std::move(logprobs[i]);
      done_.push_back(std::move(batch[i]));
    }
    if (error != nullptr) error_ = error;
    out_of_memory_ = out_of_memory_ || no_memory;
    if (no_memory || error != nullptr) may_compute_ = false;
    computing_ = false;
    changed_.notify_all();
  }
}

}  // namespace trireme
