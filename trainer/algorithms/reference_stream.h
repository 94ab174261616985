// ReferenceStream: what models say of finished responses (log-probs of a reference, values of a critic, scores of a
// reward model), and gradients of whole groups, while the last responses are still generated.
//
// The last responses of a rollout leave a GPU's arithmetic idle: a decode step of few samples reads the weights and
// does little else. Responses have all that such a model reads as soon as they end; the rows of a forward do not depend
// on each other, so that the numbers are those of the pass after generation, bit for bit. Nobody writes the models
// meanwhile: a critic trains after its values were taken.
//
// One thread owns a stream and calls everything here; a thread of its own computes.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "trainer/algorithms/token_passes.h"
#include "trainer/batch/micro_batch.h"
#include "trainer/model/model.h"
#include "trainer/ops/partition.h"
#include "trainer/rollout/driver.h"
#include "trainer/rollout/engine.h"

namespace trireme {

inline constexpr int64_t kStreamTokens = 4096;

// Sample::reference_logprobs.
TokenScorer reference_scorer(const Model& model, const LogprobOptions& options, bool share_prompts);

class ReferenceStream final {
 public:
  // The models of `scorers`, which may be none, outlive the stream; nobody writes them from add() to finish() or
  // forget(). `partition`: whose background computes; null: the thread shares the device as it is (CPU). `timeout_s`
  // bounds the wait of finish(); after it `on_stuck` is called with what has happened and must end the process: the
  // thread cannot be ended. `micro_batch_tokens`: of a forward, of one model; small ones end soon when generation does.
  ReferenceStream(std::vector<TokenScorer> scorers, std::shared_ptr<const DevicePartition> partition, double timeout_s,
                  std::function<void(const std::string&)> on_stuck, int64_t micro_batch_tokens = kStreamTokens);
  ~ReferenceStream();
  ReferenceStream(const ReferenceStream&) = delete;
  ReferenceStream& operator=(const ReferenceStream&) = delete;

  // Adds the gradients of samples (PolicyTrainer::train_early), from the thread. Set before the first add_group().
  std::function<void(const std::vector<Sample>&)> train;

  // A finished sample, which is kept until there is room to compute.
  void add(const FinishedSample& sample);
  // All samples of a group of the first optimizer step, ready to be trained but for what the scorers say of them, which
  // the stream has or will have of add().
  void add_group(std::vector<Sample> samples);
  // Called between the engine's steps: lets the thread compute, and the engine make room, while few samples are left
  // and there is something to compute.
  void after_step(Engine& engine);
  // What was added is forgotten, what is being computed too.
  void forget();
  // Samples of which every scorer has computed its numbers since the last finish(), at least.
  int64_t computed() const;
  // Generation is over: what is not begun is forgotten, what is begun is waited for. Fills in what the scorers keep of
  // the samples they got to, and trained_early; returns how many samples of how many scorers. Throws what the thread
  // has met; a shortage of memory for passes only ends the overlap, with a warning.
  int64_t finish(Engine& engine, std::vector<Sample>& samples);

 private:
  using Place = std::pair<int64_t, int64_t>;  // group, index
  struct Work {                               // of one scorer
    TokenScorer scorer;
    std::vector<Sample> waiting;
    std::map<Place, std::vector<float>> numbers;
  };
  struct Batch {
    std::vector<Sample> samples;
    Work* of = nullptr;  // null: they are trained
  };

  void work();
  Batch take_batch();                         // locked; no samples: nothing is ready
  std::vector<Sample> take_training_batch();  // locked; empty: none is ready
  // Empty where there was no memory for it, or with *error.
  std::vector<std::vector<float>> compute(const Batch& batch, std::exception_ptr* error, bool* no_memory) const;

  const std::shared_ptr<const DevicePartition> partition_;
  const double timeout_s_;
  const std::function<void(const std::string&)> on_stuck_;
  const int64_t micro_batch_tokens_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> works_;  // one a scorer; its end never changes
  std::vector<Sample> untrained_;
  std::set<Place> trained_;
  std::exception_ptr error_;
  int64_t rollout_ = 0;  // forget() begins another
  bool may_compute_ = false, computing_ = false, stop_ = false;
  bool shared_ = false;  // the engine has made room; owner's thread only
  bool out_of_memory_ = false;
  std::thread thread_;
};

// One rollout of a stream (nothing when null): at its end the stream forgets what finish() has not taken, however the
// rollout ended, and at its beginning what came to it after the one before.
class ReferenceRollout final {
 public:
  explicit ReferenceRollout(ReferenceStream* stream) : stream_(stream) {
    if (stream_ != nullptr) stream_->forget();
  }
  ~ReferenceRollout() {
    if (stream_ != nullptr) stream_->forget();
  }
  ReferenceRollout(const ReferenceRollout&) = delete;
  ReferenceRollout& operator=(const ReferenceRollout&) = delete;

 private:
  ReferenceStream* stream_;
};

}  // namespace trireme
