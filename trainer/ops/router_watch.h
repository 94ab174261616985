// What training passes measure of a model's routers, and the loss that balances their experts. It is told the routes of
// each layer that records gradients, once a micro-batch, also where backward computes a layer again.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "trainer/ops/experts.h"

namespace trireme {

// The loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6) for `per_token` choices, as Megatron-Core has
// it: coefficient * experts / per_token * sum over experts of the share of tokens that chose it times its mean
// probability. Each token weighs as in the policy's loss: what is trained is the sum over micro-batches or samples of
// this times their tokens, divided by the valid tokens of the step (as NeMo-RL scales it).
struct BalanceOptions {
  enum class Kind {
    kNone,
    kMicroBatch,  // aux_loss: of the tokens of a micro-batch together
    kSample,      // seq_aux_loss: of each sample, prompt included, however samples are packed
  };
  Kind kind = Kind::kNone;
  double coefficient = 0;
};

// Which rows of a micro-batch make samples, for a balancing loss. A prompt that several responses share counts as often
// as it is shared. Sequences are the whole micro-batch's, also where ranks share its rows.
struct WatchedRows {
  at::Tensor sequence;    // [own rows] int64
  at::Tensor of_samples;  // [sequences, sequences] float64: 1 where the row's sample has the column's sequence
  at::Tensor lengths;     // [sequences] float64: tokens of the sequence

  // starts, prefix: the whole micro-batch's, as PackedBatch has them. `rows` [own rows] int64: its rows that this
  // rank's routers see; undefined: all.
  static WatchedRows of(const std::vector<int64_t>& starts, const std::vector<int64_t>& prefix, const at::Tensor& rows,
                        at::Device device);
};

// What was seen since the last take: sums over micro-batches, float64 on the model's device. Of a layer: how often each
// expert was chosen, then rows, the entropy of the probabilities of all experts (nats), the balancing loss times its
// tokens, these tokens.
struct RouterSums {
  at::Tensor of_layers;  // [layers, experts + 4]
  int64_t experts() const { return of_layers.size(1) - 4; }
};

// Calls come one at a time, from any thread. Layers without experts stay zero.
class RouterWatch final {
 public:
  RouterWatch(int64_t layers, int64_t experts, const BalanceOptions& balance, at::Device device);

  const BalanceOptions& balance() const { return balance_; }
  // Of the optimizer step that follows, over all ranks.
  void set_valid_tokens(double tokens) { valid_tokens_ = std::max(1.0, tokens); }

  // Adds counts up, in place, over the ranks that share the rows of each micro-batch. These all call add() in the same
  // order, also without rows. Empty: a rank has all rows of its micro-batches. Only called where there is a loss.
  std::function<void(at::Tensor counts)> over_ranks;

  // Of a pass: WatchedRows::of. Empty where there is no balancing loss.
  std::shared_ptr<const WatchedRows> rows_of(const std::vector<int64_t>& starts, const std::vector<int64_t>& prefix,
                                             const at::Tensor& rows) const;
  // routes.probabilities are there. With a balancing loss its gradient by the probabilities, in their dtype, of each
  // sequence: [sequences, experts]; else undefined. `rows`: rows_of the pass.
  at::Tensor add(int64_t layer, const Routes& routes, const ExpertShape& shape, const WatchedRows& rows);

  RouterSums take();

 private:
  BalanceOptions balance_;
  double valid_tokens_ = 1;
  RouterSums sums_;
};

// What a layer's call tells: which watch, which layer, which rows.
struct RouterCall {
  std::shared_ptr<RouterWatch> watch;
  int64_t layer = 0;
  std::shared_ptr<const WatchedRows> rows;
};

// What add gave -> the gradient by the logits [rows, experts], in the probabilities' dtype.
at::Tensor balance_by_logits(const at::Tensor& gradient, const at::Tensor& sequence, const at::Tensor& probabilities);

}  // namespace trireme
