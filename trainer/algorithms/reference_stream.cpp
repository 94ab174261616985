#include "trainer/algorithms/reference_stream.h"

#include <ATen/ATen.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <optional>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {

namespace {

// Samples that are `ready`, at least one if there is any and no more than so many tokens. Responses of one group stay
// together: they may share their prompt.
template <typename Ready>
std::vector<Sample> take_some(std::vector<Sample>& from, int64_t most_tokens, const Ready& ready) {
  std::stable_sort(from.begin(), from.end(), [](const Sample& a, const Sample& b) {
    return a.group != b.group ? a.group < b.group : a.index < b.index;
  });
  std::vector<Sample> taken, rest;
  int64_t tokens = 0;
  for (Sample& sample : from) {
    const bool fits = taken.empty() || tokens + sample.length() <= most_tokens;
    if (fits && ready(sample)) {
      tokens += sample.length();
      taken.push_back(std::move(sample));
    } else {
      rest.push_back(std::move(sample));
    }
  }
  from = std::move(rest);
  return taken;
}

}  // namespace

ReferenceStream::ReferenceStream(const Model* model, const LogprobOptions& options, bool share_prompts,
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

void ReferenceStream::add(const FinishedSample& finished) {
  if (model_ == nullptr || finished.generated.response.empty()) return;
  Sample sample;
  sample.group = finished.span.group;
  sample.index = finished.index;
  sample.prompt = SharedTokens(finished.request.prompt);
  sample.response = finished.generated.response;
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_.push_back(std::move(sample));
}

void ReferenceStream::add_group(std::vector<Sample> samples) {
  TRIREME_CHECK(train != nullptr, "nobody trains early");
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Sample& sample : samples) {
    if (!sample.response.empty()) untrained_.push_back(std::move(sample));
  }
}

void ReferenceStream::after_step(Engine& engine) {
  const bool few = engine.unfinished_samples() <= kSharedDeviceSamples && !engine.idle();
  bool work = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    may_compute_ = few && !out_of_memory_ && error_ == nullptr;
    work = (may_compute_ && (!waiting_.empty() || !untrained_.empty())) || computing_;
  }
  if (work != shared_) engine.share_device(work);
  shared_ = work;
  if (work) changed_.notify_all();
}

int64_t ReferenceStream::computed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(references_.size());
}

int64_t ReferenceStream::finish(Engine& engine, std::vector<Sample>& samples) {
  std::map<Place, std::vector<float>> references;
  std::set<Place> trained;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    may_compute_ = false;
    waiting_.clear();
    untrained_.clear();
    if (!changed_.wait_for(lock, std::chrono::duration<double>(timeout_s_), [this] { return !computing_; })) {
      const std::string what =
          "reference log-probs or gradients that were begun while responses were generated have not ended after " +
          format_fixed(timeout_s_, 0) +
          " s (cluster.collective_timeout_s); policy.generation.background_sms=0 computes them afterwards";
      if (on_stuck_) on_stuck_(what);
      fail_internal(what);
    }
    references = std::exchange(references_, {});
    trained = std::exchange(trained_, {});
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }
  if (shared_) engine.share_device(false);
  shared_ = false;
  int64_t filled = 0;
  for (Sample& sample : samples) {
    const Place place{sample.group, sample.index};
    sample.trained_early = trained.count(place) > 0;
    const auto found = references.find(place);
    if (found == references.end()) continue;
    TRIREME_CHECK(found->second.size() == sample.response.size(), "reference log-probs of another response");
    sample.reference_logprobs = std::move(found->second);
    ++filled;
  }
  return filled;
}

std::vector<Sample> ReferenceStream::take_batch() {
  return take_some(waiting_, micro_batch_tokens_, [](const Sample&) { return true; });
}

std::vector<Sample> ReferenceStream::take_training_batch() {
  std::vector<Sample> batch = take_some(untrained_, micro_batch_tokens_, [this](const Sample& sample) {
    return model_ == nullptr || references_.count({sample.group, sample.index}) > 0;
  });
  for (Sample& sample : batch) {
    if (model_ != nullptr) sample.reference_logprobs = references_.at({sample.group, sample.index});
  }
  return batch;
}

std::vector<std::vector<float>> ReferenceStream::compute(const std::vector<Sample>& samples) const {
  const c10::NoGradGuard no_grad;
  const c10::DeviceGuard device(model_->options().device);
  Members members;
  for (size_t i = 0; i < samples.size(); ++i) members.push_back(static_cast<int64_t>(i));
  const MicroBatch batch = make_micro_batch(samples, members, share_prompts_);
  const at::Tensor all = response_logprobs(*model_, batch, options_).to(at::kCPU, at::kFloat).contiguous();
  const float* value = all.const_data_ptr<float>();
  std::vector<std::vector<float>> of_samples;
  for (const Sample& sample : samples) {
    of_samples.emplace_back(value, value + sample.response.size());
    value += sample.response.size();
  }
  return of_samples;
}

void ReferenceStream::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++rollout_;
  may_compute_ = false;
  waiting_.clear();
  untrained_.clear();
  references_.clear();
  trained_.clear();  // only where the run ends: nothing takes a gradient back
}

void ReferenceStream::work() {
  // Backward in this thread, where the partition is this thread's.
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    std::vector<Sample> batch;
    bool training = false;
    // References first: gradients need them.
    changed_.wait(lock, [&] {
      if (stop_) return true;
      if (!may_compute_) return false;
      batch = take_batch();
      training = batch.empty();
      if (training) batch = take_training_batch();
      return !batch.empty();
    });
    if (stop_) return;
    computing_ = true;
    const int64_t rollout = rollout_;
    lock.unlock();
    std::vector<std::vector<float>> logprobs;
    std::exception_ptr error;
    bool no_memory = false;
    try {
      std::optional<PartitionScope> part;
      if (partition_ != nullptr) part.emplace(*partition_, PartitionScope::Part::kBackground);
      if (training) {
        train(batch);
      } else {
        logprobs = compute(batch);
      }
    } catch (const c10::OutOfMemoryError&) {
      // Half a gradient may be in the sums: that cannot be taken back.
      if (training) {
        log_error("train",
                  "no memory for gradients while responses are generated: set grpo.early_gradients to false or lower "
                  "policy.generation.kv_cache_memory_fraction");
        error = std::current_exception();
      }
      no_memory = !training;
      if (no_memory) {
        log_warn(
            "train",
            "no memory for reference log-probs while responses are generated: they are computed afterwards from now "
            "on; lower policy.generation.kv_cache_tokens or kv_cache_memory_fraction");
      }
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    for (size_t i = 0; i < batch.size() && error == nullptr && !no_memory && rollout == rollout_; ++i) {
      const Place place{batch[i].group, batch[i].index};
      if (training) {
        trained_.insert(place);
      } else {
        references_[place] = std::move(logprobs[i]);
      }
    }
    if (error != nullptr) error_ = error;
    out_of_memory_ = out_of_memory_ || no_memory;
    if (no_memory || error != nullptr) may_compute_ = false;
    computing_ = false;
    changed_.notify_all();
  }
}

}  // namespace trireme
