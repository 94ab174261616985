// A sample: one response to a prompt, its log-probs, its rewards and what it counts in training.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trainer/batch/packing.h"
#include "trainer/batch/versions.h"

namespace trireme {

// Tokens that several samples share and nobody changes: a group's prompt. A copy costs a pointer.
class SharedTokens final {
 public:
  SharedTokens() : SharedTokens(std::vector<int32_t>()) {}
  SharedTokens(std::initializer_list<int32_t> tokens) : SharedTokens(std::vector<int32_t>(tokens)) {}
  explicit SharedTokens(std::vector<int32_t> tokens)
      : tokens_(std::make_shared<const std::vector<int32_t>>(std::move(tokens))) {}

  const std::vector<int32_t>& operator*() const { return *tokens_; }
  const int32_t* data() const { return tokens_->data(); }
  size_t size() const { return tokens_->size(); }
  bool empty() const { return tokens_->empty(); }
  friend bool operator==(const SharedTokens& a, const SharedTokens& b) {
    return a.tokens_ == b.tokens_ || *a.tokens_ == *b.tokens_;
  }

 private:
  std::shared_ptr<const std::vector<int32_t>> tokens_;
};

struct Sample {
  int64_t group = 0;  // position of its prompt in the rollout
  int64_t index = 0;  // in the group
  SharedTokens prompt;
  std::vector<int32_t> response;           // its stop token included
  std::vector<float> generation_logprobs;  // one per token of the response, from the sampler
  std::vector<float> reference_logprobs;   // the same under the reference model; empty: not computed yet
  VersionSpans weight_versions;            // of the weights that drew it
  bool mixed_context = false;              // some of its log-probs were computed over keys and values of older weights
  std::vector<float> previous_logprobs;    // the same under the policy before this rollout's first optimizer step
  bool truncated = false;                  // ended at a length limit
  bool dropped = false;                    // its reward failed under the policy "drop"
  double raw_reward = 0;                   // as the rewards gave it: the weighted sum of the parts
  std::vector<double> reward_parts;        // of each reward, in the configuration's order, before weighting
  std::optional<float> score;              // a reward model's, where it came beside generation
  double reward = 0;                       // of the whole response, after scaling and shaping
  double loss_multiplier = 1;              // 0: stays in the baseline, not in the loss
  bool trained_early = false;              // its gradient is in the sums of the first optimizer step already
  // One for each token of the response; empty: not made (of a GRPO run only the advantages are).
  std::vector<uint8_t> loss_mask;  // 0: the token is none of the policy's. Empty: all are
  std::vector<float> values;       // of the state before the token, from the critic
  std::vector<double> rewards;     // the response's own at its last valid token; a KL taken off
  std::vector<double> advantages;
  std::vector<double> returns;  // what the critic learns

  // Its log-probs are those of weights of `version`, bit for bit where rows are exact.
  bool is_of(int64_t version) const { return !mixed_context && all_of_version(weight_versions, version); }
  int64_t length() const { return static_cast<int64_t>(prompt.size() + response.size()); }
  // Whether token t of the response is in the loss.
  bool counts(size_t t) const { return loss_multiplier > 0 && (loss_mask.empty() || loss_mask[t] != 0); }
  int64_t valid_tokens() const;
  // The mean over its tokens; where they are equal, exactly that. 0 without tokens.
  double mean_advantage() const;
  // Of each token the same.
  void set_advantage(double advantage) { advantages.assign(response.size(), advantage); }
};

// The wire form between ranks: binary, little-endian, without prompts, which every rank has. unpack takes prompts[i]
// for group i; throws Error(kData) on a malformed buffer.
std::string pack_samples(const std::vector<Sample>& samples);
std::vector<Sample> unpack_samples(std::string_view bytes, const std::vector<SharedTokens>& prompts);

// Micro-batches of `members` (positions in `samples`) for each rank; they hold positions in `samples` too.
std::vector<std::vector<Members>> make_micro_batches(const std::vector<Sample>& samples, const Members& members,
                                                     const MicroBatchOptions& options, int64_t ranks);

}  // namespace trireme
