// model_speed [HIDDEN LAYERS VOCAB]: tokens/s of packed forward, forward with log-probs and backward, prefill and
// decode, for a Qwen3-shaped model with random weights in float32 on this machine's CPU.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdio>
#include <ctime>

#include "base/clock.h"
#include "trainer/model/model.h"
#include "trainer/ops/cpu_kernels.h"

namespace trireme {
namespace {

// Wall time and CPU time of one call; on a busy machine only the second means anything.
struct Cost {
  double wall_s, cpu_s;
};

template <class F>
Cost cost_of(F&& f) {
  f();
  const Stopwatch total;
  const std::clock_t start = std::clock();
  int runs = 0;
  do {
    f();
    ++runs;
  } while (total.seconds() < 1.0);
  return {total.seconds() / runs, static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC / runs};
}

void print(const char* what, double tokens, const Cost& cost) {
  std::printf("  %-28s %8.0f tokens/s, %8.0f per CPU second\n", what, tokens / cost.wall_s, tokens / cost.cpu_s);
}

PackedBatch batch_of(int64_t sequences, int64_t length, int64_t vocab) {
  std::vector<std::vector<int32_t>> ids(static_cast<size_t>(sequences),
                                        std::vector<int32_t>(static_cast<size_t>(length)));
  for (size_t s = 0; s < ids.size(); ++s) {
    for (size_t i = 0; i < ids[s].size(); ++i)
      ids[s][i] = static_cast<int32_t>((s * 31 + i * 7) % static_cast<size_t>(vocab));
  }
  return PackedBatch::from_sequences(ids);
}

void run(int64_t hidden, int64_t layers, int64_t vocab) {
  ModelConfig config;
  config.family = ModelFamily::kQwen3, config.qk_norm = true, config.tie_word_embeddings = true;
  config.vocab_size = vocab, config.hidden_size = hidden, config.intermediate_size = 4 * hidden,
  config.num_layers = layers;
  config.head_dim = config.rope.head_dim = 32, config.num_heads = hidden / 32,
  config.num_kv_heads = std::max<int64_t>(1, hidden / 64);
  config.max_position_embeddings = 4096;
  Model model(config, {});
  init_parameters(model, 1);
  std::printf("hidden %ld, layers %ld, vocab %ld: %ld parameters; %s kernels, %d threads\n", hidden, layers, vocab,
              config.parameter_count(), cpu_kernels<float>().name, at::get_num_threads());
  for (const auto& [sequences, length] : {std::pair<int64_t, int64_t>{64, 32}, {16, 128}, {1, 2048}}) {
    const PackedBatch batch = batch_of(sequences, length, vocab);
    const double tokens = static_cast<double>(batch.tokens());
    std::printf("%ld x %ld tokens\n", sequences, length);
    print("forward", tokens, cost_of([&] {
            const at::NoGradGuard no_grad;
            model.forward(batch);
          }));
    print("forward and log-probs", tokens, cost_of([&] {
            const at::NoGradGuard no_grad;
            token_logprobs(model.forward(batch), model.head_weight(), batch.ids, {});
          }));
    print("forward and backward", tokens,
          cost_of([&] { token_logprobs(model.forward(batch), model.head_weight(), batch.ids, {}).mean().backward(); }));
  }
  for (const int64_t rows : {1, 16, 64, 256}) {
    const int64_t past = 64;
    KvArena arena(config, rows * 80, at::kFloat, at::kCPU);
    CachedBatch batch;
    std::vector<int64_t> ids, positions;
    std::vector<SampleRow> options;
    for (int64_t r = 0; r < rows; ++r) {
      ids.push_back(r % vocab), positions.push_back(past);
      batch.plan.host_runs.push_back({r * 80, past, 1});
      options.push_back({{}, {1, static_cast<uint64_t>(r), 2}, false});
    }
    batch.ids = at::tensor(ids, at::kLong), batch.positions = at::tensor(positions, at::kLong);
    std::printf("decode, %ld rows at position %ld\n", rows, past);
    print("forward", static_cast<double>(rows), cost_of([&] { model.forward_cached(batch, arena); }));
    print("forward and sample", static_cast<double>(rows),
          cost_of([&] { sample_tokens(model.forward_cached(batch, arena), model.head_weight(), options); }));
  }
}

}  // namespace
}  // namespace trireme

int main(int argc, char** argv) {
  const auto number = [&](int i, int64_t fallback) { return argc > i ? std::stoll(argv[i]) : fallback; };
  trireme::run(number(1, 128), number(2, 4), number(3, 260));
}
