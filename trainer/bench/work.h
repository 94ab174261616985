// Work: the floating point operations and bytes a model needs, as arithmetic. Pure.
//
// With h = hidden, q = query heads x head dim, kv = key heads x head dim, i = intermediate, L = layers, V = vocabulary:
//
//   matrices of a layer   P = h (q + 2 kv) + q h + 3 h i         (q k v, output, gate up down; with experts i is the
//                         chosen experts' width together, and the router's h E is added)
//   products              2 L P for each token of the input (a multiplication and an addition are 2 operations)
//   head                  2 h V for each row whose log-prob is taken: prompts' rows are not; a critic's head is 2 h
//   attention             a sequence of n tokens has n (n + 1) / 2 pairs of query and key, half of the square: 4 q of
//                         operations a pair (q . k and p . v are 2 q each), 2 q n (n + 1) a layer
//
// A prompt that several responses share in training is one piece, and each response to it a piece with that prefix: its
// queries meet the prompt's keys too.
//
// Training is three times the forward: the backward of a product is two products (gradients of input and weight), that
// of attention is counted likewise. What is recomputed (a layer's activations, attention's probabilities, logits) is
// not counted: a faster program must not look slower. Norms, rotations, the softmax and the optimizer are not counted.
//
//   decode step           reads the layers' matrices, norms and biases, the head, and keys and values of every context:
//                         2 kv L elements for each token of it. The embedding's few rows, activations and the new rows
//                         written are not counted. Of n tokens' experts, k of E each, E (1 - (1 - k / E)^n) are read:
//                         as many as are chosen where every choice is as likely as another.
#pragma once

#include <cstdint>
#include <vector>

#include "trainer/model/config.h"

namespace trireme::bench {

inline double real(int64_t value) { return static_cast<double>(value); }

double layer_matrix_elements(const ModelConfig& config);  // P; of a mixture of experts the mean over its layers
// `tokens` of a sequence that are computed over `prefix` tokens whose keys and values are there.
struct Piece {
  int64_t tokens = 0, prefix = 0;
};
// `scored_rows` rows go through the head.
double forward_flops(const ModelConfig& config, const std::vector<Piece>& pieces, int64_t scored_rows);
double training_flops(const ModelConfig& config, const std::vector<Piece>& pieces, int64_t scored_rows);
// Whole sequences of these lengths.
double forward_flops(const ModelConfig& config, const std::vector<int64_t>& lengths, int64_t scored_rows);
double training_flops(const ModelConfig& config, const std::vector<int64_t>& lengths, int64_t scored_rows);
// What a pass over a rollout's samples computes: all but the last token of each. With `share_prompts` a prompt once for
// all its responses, which is what policy.sequence_packing.share_prompts comes to at best.
std::vector<Piece> training_pieces(const std::vector<int64_t>& prompts, const std::vector<int64_t>& outputs,
                                   bool share_prompts);

// Of a decode step of `alive` samples: all weights, and of them the experts'.
double decode_expert_bytes(const ModelConfig& config, int64_t element_bytes, double alive);
double decode_weight_bytes(const ModelConfig& config, int64_t element_bytes, double alive);
double context_bytes_per_token(const ModelConfig& config, int64_t element_bytes);

// Samples of `prompts[s]` and `outputs[s]` tokens: the first token of a response comes from the prompt's pass, each
// other one from a decode step over prompt + earlier tokens. At best all samples decode side by side.
struct RolloutWork {
  int64_t steps = 0;  // passes over the weights at best: the longest response, or tokens / max_sequences if that is
                      // more
  double weight_bytes = 0;   // of the whole rollout, on each device
  double expert_bytes = 0;   // of these, experts'
  double context_bytes = 0;  // of the whole rollout, of all devices
  double bytes() const { return weight_bytes + context_bytes; }
};
// `devices` share the samples evenly, `max_sequences` places of all together.
RolloutWork rollout_work(const ModelConfig& config, const std::vector<int64_t>& prompts,
                         const std::vector<int64_t>& outputs, int64_t element_bytes, int64_t max_sequences,
                         int64_t devices = 1);

}  // namespace trireme::bench
