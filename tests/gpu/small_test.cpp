// On a GPU: every kernel of the project once, with sizes small enough for compute-sanitizer (scripts/sanitize_gpu.sh),
// which slows a kernel down a hundredfold. That results are right is tested elsewhere, with real sizes; here they are
// compared once more, so that a kernel that did nothing is seen.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <random>

#include "tests/gpu/device.h"
#include "tests/gpu/skinny_gemm.h"
#include "tests/unit/model/tiny.h"
#include "trainer/model/model.h"
#include "trainer/ops/cuda/attention/attention.h"
#include "trainer/ops/cuda/gemm/skinny_gemm_mma.h"
#include "trainer/ops/cuda/gemm/skinny_gemm_wgmma.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/parallel/device.h"
#include "trainer/rollout/engine.h"

namespace trireme {
namespace {

using testing::equal_bits, testing::gpu, testing::gpu_randn, testing::seed_gpu;

class Small : public testing::GpuTest {};

TEST_F(Small, AttentionPackedSharedAndItsGradients) {
  for (const int64_t head_dim : {64, 128}) {
    seed_gpu(1);
    const std::vector<int64_t> starts = {0, 3, 70, 135};
    const at::Tensor q = gpu_randn({135, 4, head_dim}), k = gpu_randn({135, 2, head_dim}), v = gpu_randn(k.sizes());
    for (const bool shared : {false, true}) {
      std::vector<at::Tensor> leaves;
      for (const at::Tensor& x : {q, k, v}) leaves.push_back(x.clone().set_requires_grad(true));
      const at::AutoGradMode record(true);
      const at::Tensor out = shared ? attention_shared(leaves[0], leaves[1], leaves[2], starts, {-1, 0, 0})
                                    : attention_packed(leaves[0], leaves[1], leaves[2], starts);
      for (const at::Tensor& gradient : torch::autograd::grad({out}, leaves, {gpu_randn(out.sizes())}))
        EXPECT_TRUE(gradient.isfinite().all().item<bool>());
    }
  }
}

TEST_F(Small, AttentionOfEveryDecodeKernel) {
  const at::NoGradGuard no_grad;
  for (const auto& [group, head_dim] : std::vector<std::pair<int64_t, int64_t>>{{4, 128}, {12, 128}, {2, 64}}) {
    seed_gpu(2);
    const std::vector<int64_t> lengths = {1, 64, 130, 600};
    std::vector<int64_t> starts{0};
    std::vector<CacheRun> runs, whole;
    for (const int64_t n : lengths) {
      runs.push_back({starts.back(), n - 1, 1});
      whole.push_back({starts.back(), 0, n});
      starts.push_back(starts.back() + n);
    }
    const at::Tensor q = gpu_randn({starts.back(), 2 * group, head_dim}), k = gpu_randn({starts.back(), 2, head_dim}),
                     v = gpu_randn(k.sizes());
    const at::Tensor arena_k = at::zeros_like(k), arena_v = at::zeros_like(v);
    append_cached(k, v, arena_k, arena_v, make_cache_plan(whole, group, gpu()));
    std::vector<int64_t> last;
    for (size_t i = 1; i < starts.size(); ++i) last.push_back(starts[i] - 1);
    const at::Tensor index = at::tensor(last, at::kLong).to(gpu());
    const at::Tensor expected = attention_packed(q, k, v, starts).index_select(0, index);
    const CachePlan plan = make_cache_plan(runs, group, gpu());
    for (const DecodeKernel kernel : {DecodeKernel::kShared, DecodeKernel::kSharedDeep, DecodeKernel::kCluster2,
                                      DecodeKernel::kCluster4, DecodeKernel::kCluster8}) {
      EXPECT_TRUE(
          equal_bits(cuda::attention_decode(q.index_select(0, index), arena_k, arena_v, plan, 0.0, kernel), expected))
          << static_cast<int>(kernel);
    }
  }
}

// Some plans of each kernel, among them those with clusters, and the fused activation.
TEST_F(Small, SkinnyGemmsByMmaAndWgmma) {
  const at::NoGradGuard no_grad;
  seed_gpu(3);
  const int64_t out = 328, in = 256;
  const at::Tensor x = gpu_randn({70, in}), weight = gpu_randn({2 * out, in}, 0.05), bias = gpu_randn({2 * out});
  const auto some = [](const auto& plans) {
    std::remove_cvref_t<decltype(plans)> few;
    const size_t step = std::max<size_t>(1, plans.size() / 6);
    for (size_t i = 0; i < plans.size(); i += step) few.push_back(plans[i]);
    return few;
  };
  for (const bool swiglu : {false, true}) {
    const at::Tensor unfused = testing::by_library(x, weight, swiglu ? at::Tensor() : bias);
    const at::Tensor whole = swiglu ? cuda::swiglu_halves(unfused) : unfused;
    for (const int64_t rows : {int64_t{5}, int64_t{40}, int64_t{70}}) {
      const at::Tensor part = x.narrow(0, 0, rows), y = at::empty({rows, whole.size(1)}, x.options());
      const cuda::SkinnyGemmArgs args = testing::args_of(part, weight, swiglu ? at::Tensor() : bias, y, swiglu);
      const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
      if (rows <= cuda::kMostMmaRows) {
        for (const cuda::SkinnyMmaPlan& plan : some(cuda::skinny_gemm_mma_plans(args))) {
          ASSERT_EQ(cuda::skinny_gemm_mma(args, plan, stream), cudaSuccess);
          EXPECT_EQ(testing::differing(y, whole.narrow(0, 0, rows)), 0) << rows << " rows, mma";
        }
      }
      for (const cuda::SkinnyWgmmaPlan& plan : some(cuda::skinny_gemm_wgmma_plans(args))) {
        ASSERT_EQ(cuda::skinny_gemm_wgmma(args, plan, stream), cudaSuccess);
        EXPECT_EQ(testing::differing(y, whole.narrow(0, 0, rows)), 0) << rows << " rows, wgmma";
      }
    }
  }
}

// A vocabulary that is no multiple of 8, filters on and off, gradients, two optimizer steps, samples.
TEST_F(Small, AModelGeneratesLearnsAndGeneratesAgain) {
  const ModelConfig config = test::tiny_config({.vocab = 1003,
                                                .hidden = 128,
                                                .intermediate = 192,
                                                .layers = 2,
                                                .heads = 2,
                                                .kv_heads = 1,
                                                .head_dim = 64,
                                                .positions = 256,
                                                .initializer_range = 0.1,
                                                .tied = false});
  ModelOptions options;
  options.dtype = at::kBFloat16;
  options.device = choose_device("cuda", 0);
  Model model(config, options);
  init_parameters(model, 5);
  Communicator alone;
  DistributedAdamW optimizer(model, alone, {});
  for (const bool filters : {false, true}) {
    SamplingOptions sampling;
    sampling.seed = 9;
    if (filters) sampling.top_k = 20, sampling.top_p = 0.9, sampling.min_p = 0.01;
    EngineOptions settings;
    settings.cache_rows = 600;
    settings.max_sequences = 3;
    settings.max_total_length = 160;
    Engine engine(model, nullptr, settings, sampling);
    GroupRequest request;
    request.samples = 3;
    std::mt19937 random(4);
    for (int i = 0; i < 70; ++i) request.prompt.push_back(static_cast<int32_t>(random() % 1000));
    request.forced_lengths = {3, 2, 4};
    engine.submit(request);
    std::vector<std::vector<int32_t>> sequences;
    std::vector<int64_t> rows, targets;
    std::vector<float> expected;
    for (const GeneratedGroup& group : engine.run()) {
      for (const GeneratedSample& sample : group.samples) {
        std::vector<int32_t> ids = group.prompt;
        int64_t before = 0;
        for (const auto& sequence : sequences) before += static_cast<int64_t>(sequence.size());
        for (size_t i = 0; i < sample.response.size(); ++i) {
          rows.push_back(before + static_cast<int64_t>(ids.size()) - 1);
          targets.push_back(sample.response[i]);
          EXPECT_LT(sample.response[i], config.vocab_size);
          expected.push_back(sample.logprobs[i]);
          ids.push_back(sample.response[i]);
        }
        sequences.push_back(ids);
      }
    }
    ASSERT_EQ(expected.size(), 9u);
    PackedBatch batch = PackedBatch::from_sequences(sequences);
    batch.ids = batch.ids.to(gpu());
    batch.positions = batch.positions.to(gpu());
    const at::Tensor hidden = model.forward(batch).index_select(0, at::tensor(rows, at::kLong).to(gpu()));
    const LogprobResult result = token_logprobs_and_entropy(
        hidden, model.head_weight(), at::tensor(targets, at::kLong).to(gpu()), sampling.logprob_options());
    EXPECT_TRUE(equal_bits(result.logprobs.detach(), at::tensor(expected)));
    (result.logprobs.mean() + 0.01 * result.entropy.mean()).backward();
    EXPECT_GT(optimizer.step(1e-3, 0.01, 1.0).grad_norm, 0.0);
  }
}

}  // namespace
}  // namespace trireme
