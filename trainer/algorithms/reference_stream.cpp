#include "trainer/algorithms/reference_stream.h"

#include <c10/core/AutogradState.h>
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

TokenScorer reference_scorer(const Model& model, const LogprobOptions& options, bool share_prompts) {
  TokenScorer scorer;
  scorer.model = &model;
  scorer.numbers = [&model, options](const at::Tensor& hidden, const MicroBatch& batch, const std::vector<Sample>&) {
    return response_logprobs(model, hidden, batch, options);
  };
  scorer.keep = [](Sample& sample, std::vector<float> numbers) { sample.reference_logprobs = std::move(numbers); };
  scorer.share_prompts = share_prompts;
  return scorer;
}

ReferenceStream::ReferenceStream(std::vector<TokenScorer> scorers, std::shared_ptr<const DevicePartition> partition,
                                 double timeout_s, std::function<void(const std::string&)> on_stuck,
                                 int64_t micro_batch_tokens)
    : partition_(std::move(partition)),
      timeout_s_(timeout_s),
      on_stuck_(std::move(on_stuck)),
      micro_batch_tokens_(micro_batch_tokens) {
  for (TokenScorer& scorer : scorers) works_.push_back({std::move(scorer), {}, {}});
  thread_ = std::thread([this] { work(); });
}

ReferenceStream::~ReferenceStream() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ReferenceStream::add(const FinishedSample& finished) {
  if (finished.generated.response.empty()) return;
  Sample sample;
  sample.group = finished.span.group;
  sample.index = finished.index;
  sample.prompt = SharedTokens(finished.request.prompt);
  sample.response = finished.generated.response;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Work& of : works_) of.waiting.push_back(sample);
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
    const bool waiting = std::any_of(works_.begin(), works_.end(), [](const Work& of) { return !of.waiting.empty(); });
    work = (may_compute_ && (waiting || !untrained_.empty())) || computing_;
  }
  if (work != shared_) engine.share_device(work);
  shared_ = work;
  if (work) changed_.notify_all();
}

int64_t ReferenceStream::computed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (works_.empty()) return 0;
  const auto fewest = std::min_element(
      works_.begin(), works_.end(), [](const Work& a, const Work& b) { return a.numbers.size() < b.numbers.size(); });
  return static_cast<int64_t>(fewest->numbers.size());
}

int64_t ReferenceStream::finish(Engine& engine, std::vector<Sample>& samples) {
  std::vector<std::map<Place, std::vector<float>>> numbers;
  std::set<Place> trained;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    may_compute_ = false;
    for (Work& of : works_) of.waiting.clear();
    untrained_.clear();
    if (!changed_.wait_for(lock, std::chrono::duration<double>(timeout_s_), [this] { return !computing_; })) {
      const std::string what =
          "log-probs, values or gradients that were begun while responses were generated have not ended after " +
          format_fixed(timeout_s_, 0) +
          " s (cluster.collective_timeout_s); policy.generation.background_sms=0 computes them afterwards";
      if (on_stuck_) on_stuck_(what);
      fail_internal(what);
    }
    for (Work& of : works_) numbers.push_back(std::exchange(of.numbers, {}));
    trained = std::exchange(trained_, {});
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }
  if (shared_) engine.share_device(false);
  shared_ = false;
  int64_t filled = 0;
  for (Sample& sample : samples) {
    const Place place{sample.group, sample.index};
    sample.trained_early = trained.count(place) > 0;
    for (size_t w = 0; w < works_.size(); ++w) {
      const auto found = numbers[w].find(place);
      if (found == numbers[w].end()) continue;
      const TokenScorer& scorer = works_[w].scorer;
      TRIREME_CHECK(found->second.size() == sample.response.size() + (scorer.behind ? 1 : 0),
                    "numbers of another response");
      scorer.keep(sample, std::move(found->second));
      ++filled;
    }
  }
  return filled;
}

// Of the model that has most to do, so that none waits for all of another's.
ReferenceStream::Batch ReferenceStream::take_batch() {
  const auto most = std::max_element(works_.begin(), works_.end(),
                                     [](const Work& a, const Work& b) { return a.waiting.size() < b.waiting.size(); });
  // Passes for numbers first: gradients need them.
  if (most == works_.end() || most->waiting.empty()) return {take_training_batch(), nullptr};
  return {take_some(most->waiting, micro_batch_tokens_, [](const Sample&) { return true; }), &*most};
}

std::vector<Sample> ReferenceStream::take_training_batch() {
  std::vector<Sample> batch = take_some(untrained_, micro_batch_tokens_, [this](const Sample& sample) {
    return std::all_of(works_.begin(), works_.end(), [&](const Work& of) {
      return of.numbers.count({sample.group, sample.index}) > 0;
    });
  });
  for (Sample& sample : batch) {
    for (const Work& of : works_) of.scorer.keep(sample, of.numbers.at({sample.group, sample.index}));
  }
  return batch;
}

void ReferenceStream::forget() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++rollout_;
  may_compute_ = false;
  for (Work& of : works_) {
    of.waiting.clear();
    of.numbers.clear();
  }
  untrained_.clear();
  trained_.clear();  // only where the run ends: nothing takes a gradient back
}

std::vector<std::vector<float>> ReferenceStream::compute(const Batch& batch, std::exception_ptr* error,
                                                         bool* no_memory) const {
  try {
    std::optional<PartitionScope> part;
    if (partition_ != nullptr) part.emplace(*partition_, PartitionScope::Part::kBackground);
    if (batch.of != nullptr) return score_samples(batch.of->scorer, batch.samples);
    train(batch.samples);
  } catch (const c10::OutOfMemoryError&) {
    *no_memory = batch.of != nullptr;
    if (*no_memory) {
      log_warn("train",
               "no memory for passes over finished responses while others are generated: they follow generation from "
               "now on; lower policy.generation.kv_cache_tokens or kv_cache_memory_fraction");
      return {};
    }
    // Half a gradient may be in the sums: that cannot be taken back.
    log_error("train",
              "no memory for gradients while responses are generated: set grpo.early_gradients to false or lower "
              "policy.generation.kv_cache_memory_fraction");
    *error = std::current_exception();
  } catch (...) {
    *error = std::current_exception();
  }
  return {};
}

void ReferenceStream::work() {
  // Backward in this thread, where the partition is this thread's.
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    Batch batch;
    changed_.wait(lock, [&] {
      if (stop_) return true;
      if (!may_compute_) return false;
      batch = take_batch();
      return !batch.samples.empty();
    });
    if (stop_) return;
    computing_ = true;
    const int64_t rollout = rollout_;
    lock.unlock();
    std::exception_ptr error;
    bool no_memory = false;
    std::vector<std::vector<float>> numbers = compute(batch, &error, &no_memory);
    lock.lock();
    for (size_t i = 0; i < batch.samples.size() && error == nullptr && !no_memory && rollout == rollout_; ++i) {
      const Place place{batch.samples[i].group, batch.samples[i].index};
      if (batch.of != nullptr) {
        batch.of->numbers[place] = std::move(numbers[i]);
      } else {
        trained_.insert(place);
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
