#include "trainer/bench/work.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace trireme::bench {
double layer_matrix_elements(const ModelConfig& c) {
  const double h = real(c.hidden_size), q = real(c.num_heads * c.head_dim), kv = real(c.num_kv_heads * c.head_dim);
  const double sparse = real(c.layers_with_experts()) / real(c.num_layers);
  const double dense = 3 * h * real(c.intermediate_size);
  const double experts = 3 * h * real(c.experts_per_token * c.moe_intermediate_size) + h * real(c.num_experts);
  return h * (q + 2 * kv) + q * h + (1 - sparse) * dense + sparse * experts;
}

double forward_flops(const ModelConfig& c, const std::vector<Piece>& pieces, int64_t scored_rows) {
  const double q = real(c.num_heads * c.head_dim), layers = real(c.num_layers);
  double tokens = 0, attention = 0;
  for (const Piece& piece : pieces) {
    tokens += real(piece.tokens);
    attention += 2 * q * real(piece.tokens) * (real(piece.tokens + 1) + 2 * real(piece.prefix));
  }
  const double outputs = c.value_head ? 1 : real(c.vocab_size);
  return layers * (2 * layer_matrix_elements(c) * tokens + attention) +
         2 * real(c.hidden_size) * outputs * real(scored_rows);
}

double training_flops(const ModelConfig& config, const std::vector<Piece>& pieces, int64_t scored_rows) {
  return 3 * forward_flops(config, pieces, scored_rows);
}

double forward_flops(const ModelConfig& config, const std::vector<int64_t>& lengths, int64_t scored_rows) {
  std::vector<Piece> pieces;
  for (const int64_t length : lengths) pieces.push_back({length, 0});
  return forward_flops(config, pieces, scored_rows);
}

double training_flops(const ModelConfig& config, const std::vector<int64_t>& lengths, int64_t scored_rows) {
  return 3 * forward_flops(config, lengths, scored_rows);
}

std::vector<Piece> training_pieces(const std::vector<int64_t>& prompts, const std::vector<int64_t>& outputs,
                                   bool share_prompts) {
  TRIREME_CHECK(!prompts.empty() && outputs.size() % prompts.size() == 0,
                "training_pieces: as many responses a prompt");
  const size_t samples = outputs.size() / prompts.size();
  std::vector<Piece> pieces;
  for (size_t p = 0; p < prompts.size(); ++p) {
    if (share_prompts) pieces.push_back({prompts[p], 0});
    for (size_t i = p * samples; i < (p + 1) * samples; ++i) {
      pieces.push_back(share_prompts ? Piece{outputs[i] - 1, prompts[p]} : Piece{prompts[p] + outputs[i] - 1, 0});
    }
  }
  return pieces;
}

namespace {

double all_expert_elements(const ModelConfig& c) {
  return real(c.layers_with_experts() * c.num_experts) * real(3 * c.hidden_size * c.moe_intermediate_size);
}

}  // namespace

double decode_expert_bytes(const ModelConfig& c, int64_t element_bytes, double alive) {
  if (c.num_experts == 0) return 0;
  const double unread = std::pow(1 - real(c.experts_per_token) / real(c.num_experts), alive);
  return (1 - unread) * all_expert_elements(c) * real(element_bytes);
}

double decode_weight_bytes(const ModelConfig& c, int64_t element_bytes, double alive) {
  // All parameters but the embedding's table, which as the head is read when it is tied.
  const int64_t table = c.tie_word_embeddings ? 0 : c.vocab_size * c.hidden_size;
  const double others = real(c.parameter_count() - table) - (c.num_experts > 0 ? all_expert_elements(c) : 0);
  return others * real(element_bytes) + decode_expert_bytes(c, element_bytes, alive);
}

double context_bytes_per_token(const ModelConfig& c, int64_t element_bytes) {
  return real(2 * c.num_layers * c.num_kv_heads * c.head_dim * element_bytes);
}

RolloutWork rollout_work(const ModelConfig& config, const std::vector<int64_t>& prompts,
                         const std::vector<int64_t>& outputs, int64_t element_bytes, int64_t max_sequences,
                         int64_t devices) {
  TRIREME_CHECK(prompts.size() == outputs.size() && max_sequences > 0, "rollout_work: a prompt for each output");
  RolloutWork work;
  int64_t total = 0;
  double context = 0;  // tokens read
  for (size_t s = 0; s < outputs.size(); ++s) {
    const int64_t n = outputs[s];
    work.steps = std::max(work.steps, n);
    total += n;
    context += real(n - 1) * real(prompts[s]) + real(n) * real(n - 1) / 2;
  }
  const int64_t longest = work.steps;
  work.steps = std::max(work.steps, (total + max_sequences - 1) / max_sequences);
  const auto add_steps = [&](double steps, double alive) {
    const double each = std::min(alive, real(max_sequences)) / real(devices);
    work.weight_bytes += steps * decode_weight_bytes(config, element_bytes, each);
    work.expert_bytes += steps * decode_expert_bytes(config, element_bytes, each);
  };
  if (work.steps > longest) {
    add_steps(real(work.steps), real(total) / real(work.steps));
  } else {
    std::vector<int64_t> sorted = outputs;  // how many responses are longer than t: those that step t is for
    std::sort(sorted.begin(), sorted.end());
    size_t ended = 0;
    for (int64_t t = 0; t < longest; ++t) {
      while (ended < sorted.size() && sorted[ended] <= t) ++ended;
      add_steps(1, real(static_cast<int64_t>(sorted.size() - ended)));
    }
  }
  work.context_bytes = context * context_bytes_per_token(config, element_bytes);
  return work;
}

}  // namespace trireme::bench
