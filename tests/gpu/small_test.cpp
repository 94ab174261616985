// On a GPU: every kernel of the project once, with sizes small enough for compute-sanitizer (scripts/sanitize_gpu.sh),
// which slows a kernel down a hundredfold. That results are right is tested elsewhere, with real sizes; here they are
// compared once more, so that a kernel that did nothing is seen.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <vector>

#include "tests/gpu/device.h"
#include "tests/gpu/skinny_gemm.h"
#include "tests/unit/model/tiny.h"
#include "trainer/model/kv_arena.h"
#include "trainer/model/model.h"
#include "trainer/ops/cuda/attention/attention.h"
#include "trainer/ops/cuda/exchange/peer_kernels.h"
#include "trainer/ops/cuda/gemm/skinny_gemm_mma.h"
#include "trainer/ops/cuda/gemm/skinny_gemm_wgmma.h"
#include "trainer/ops/expert_rows.h"
#include "trainer/ops/experts.h"
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

// Decode attention by each of `kernels`, against the packed pass.
void expect_decodes_as_packed(const std::vector<DecodeKernel>& kernels) {
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
    for (const DecodeKernel kernel : kernels) {
      EXPECT_TRUE(
          equal_bits(cuda::attention_decode(q.index_select(0, index), arena_k, arena_v, plan, 0.0, kernel), expected))
          << static_cast<int>(kernel);
    }
  }
}

TEST_F(Small, DecodeAttentionByOneBlock) {
  expect_decodes_as_packed({DecodeKernel::kShared, DecodeKernel::kSharedDeep});
}

TEST_F(Small, DecodeAttentionByClusters) {
  expect_decodes_as_packed({DecodeKernel::kCluster2, DecodeKernel::kCluster4, DecodeKernel::kCluster8});
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

TEST_F(Small, RowsOfTheCacheMove) {
  const at::NoGradGuard no_grad;
  ModelConfig config;
  config.num_layers = 2;
  config.num_kv_heads = 1;
  config.head_dim = 64;
  KvArena arena(config, 200, at::kBFloat16, gpu()), expected(config, 200, at::kBFloat16, at::kCPU);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    arena.keys(layer).normal_();
    arena.values(layer).normal_();
    expected.keys(layer).copy_(arena.keys(layer));
    expected.values(layer).copy_(arena.values(layer));
  }
  // All at once, and one after another where they meet, down and up.
  const std::vector<std::vector<RowMove>> calls = {
      {{0, 100, 40}, {50, 150, 33}, {199, 90, 1}}, {{10, 15, 60}}, {{80, 72, 50}, {70, 85, 7}}};
  for (size_t i = 0; i < calls.size(); ++i) {
    arena.move_all(calls[i]);
    expected.move_all(calls[i]);
    for (int64_t layer = 0; layer < config.num_layers; ++layer) {
      EXPECT_TRUE(equal_bits(arena.keys(layer), expected.keys(layer))) << i;
      EXPECT_TRUE(equal_bits(arena.values(layer), expected.values(layer))) << i;
    }
  }
}

constexpr int64_t kExpertHidden = 128, kExpertWidth = 64;  // the least that the kernels take

struct Mixture {
  Mixture(int64_t rows, int64_t experts, int64_t per_token, bool wide)
      : shape{.experts = experts,
              .per_token = per_token,
              .normalize = true,
              .wide_router = wide,
              .combine_blocks = experts / 2},
        x(gpu_randn({rows, kExpertHidden})),
        weights{gpu_randn({experts, kExpertHidden}, 0.2), gpu_randn({experts * 2 * kExpertWidth, kExpertHidden}, 0.05),
                gpu_randn({experts * kExpertHidden, kExpertWidth}, 0.05)} {}
  std::vector<at::Tensor> inputs() const { return {x, weights.router, weights.gate_up, weights.down}; }
  ExpertShape shape;
  at::Tensor x;
  ExpertWeights weights;
};

// Routing by one block and by several, with logits in float64 and in float32; products by our kernel for few and for
// more rows of an expert and by the library's, with the activation and without.
TEST_F(Small, AMixtureOfExpertsAndItsGradients) {
  for (const auto& [rows, experts, per_token, wide] :
       {std::tuple<int64_t, int64_t, int64_t, bool>{40, 8, 2, true}, {1400, 40, 3, false}}) {
    seed_gpu(6);
    const Mixture m(rows, experts, per_token, wide);
    std::vector<at::Tensor> device, host;
    for (const at::Tensor& t : m.inputs()) {
      device.push_back(t.clone().set_requires_grad(true));
      host.push_back(t.cpu().to(at::kDouble));
    }
    const at::AutoGradMode record(true);
    const at::Tensor y = mixture_of_experts(device[0], {device[1], device[2], device[3]}, m.shape);
    for (const at::Tensor& gradient : torch::autograd::grad({y}, device, {gpu_randn(y.sizes())})) {
      EXPECT_TRUE(gradient.isfinite().all().item<bool>());
      EXPECT_GT(gradient.abs().max().item<double>(), 0);
    }
    const at::NoGradGuard no_grad;
    const at::Tensor expected = mixture_of_experts(host[0], {host[1], host[2], host[3]}, m.shape);
    // Of the mean: a row whose experts were a matter of rounding may have gone elsewhere.
    const at::Tensor error = (y.detach().cpu().to(at::kDouble) - expected).abs().mean() / expected.abs().mean();
    EXPECT_LT(error.item<double>(), 0.03);
    for (const int64_t count : {5, 20, 40}) {
      EXPECT_TRUE(
          equal_bits(mixture_of_experts(m.x.narrow(0, 0, count), m.weights, m.shape), y.detach().narrow(0, 0, count)))
          << count << " rows";
    }
  }
}

// What ranks that share the experts do between the products: sums of blocks, and products of a part of the experts.
TEST_F(Small, PartsOfAMixtureOfExperts) {
  const at::NoGradGuard no_grad;
  seed_gpu(7);
  constexpr int64_t kRows = 20, kChoices = 3;
  const Mixture m(kRows, 8, kChoices, true);
  const int64_t blocks = m.shape.combine_blocks, of_block = m.shape.experts / blocks;
  const Routes routes = route(m.x, m.weights.router, m.shape, true);
  const at::Tensor y = gpu_randn({kRows * kChoices, kExpertHidden});
  const at::Tensor whole = combine(y, routes, m.shape);
  EXPECT_TRUE(equal_bits(sum_in_order(part_block_sums(y, routes, m.shape, 0, blocks)), whole));
  // The same from sums of the blocks that a row has chosen only.
  const at::Tensor experts = routes.experts.cpu(), places = routes.places.cpu(), weights = routes.weights.cpu();
  std::vector<int32_t> place, begins{0}, order, of_rows{0};
  std::vector<float> weight;
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t j = 0; j < kChoices; ++j) {
      const bool same =
          j > 0 && experts[row][j].item<int32_t>() / of_block == experts[row][j - 1].item<int32_t>() / of_block;
      if (!same) order.push_back(static_cast<int32_t>(order.size())), begins.push_back(begins.back());
      place.push_back(places[row][j].item<int32_t>());
      weight.push_back(weights[row][j].item<float>());
      ++begins.back();
    }
    of_rows.push_back(static_cast<int32_t>(order.size()));
  }
  const auto ints = [](const std::vector<int32_t>& values) { return at::tensor(values, at::kInt).to(gpu()); };
  const at::Tensor sums = block_sums(y, ints(place), at::tensor(weight, at::kFloat).to(gpu()), ints(begins));
  EXPECT_TRUE(equal_bits(sum_blocks(sums, ints(order), ints(of_rows)), whole));
  // Experts 2 to 5.
  const at::Tensor sorted = gather_rows_by(m.x, routes.rows), offsets = routes.offsets.narrow(0, 2, 5);
  const at::Tensor matrices = m.weights.gate_up.narrow(0, 2 * 2 * kExpertWidth, 4 * 2 * kExpertWidth);
  const int64_t first = offsets[0].item<int32_t>(), count = offsets[4].item<int32_t>() - first;
  ASSERT_GT(count, 0);
  const at::Tensor part = gather_part(m.x, routes.rows, offsets);  // others' rows are not written
  EXPECT_TRUE(equal_bits(part.narrow(0, first, count), sorted.narrow(0, first, count)));
  const at::Tensor product = grouped_linear(sorted, m.weights.gate_up, routes.offsets, kRows);
  EXPECT_TRUE(equal_bits(grouped_part(part, matrices, offsets, false).narrow(0, first, count),
                         product.narrow(0, first, count)));
  EXPECT_TRUE(equal_bits(grouped_part(part, matrices, offsets, true).narrow(0, first, count),
                         swiglu_halves(product).narrow(0, first, count)));
}

// A rank of several on one device. What the others send lies in its receive buffers before a kernel asks for it, so
// that no kernel waits for another one; what it sends goes to memory of this device too.
class LoneRank {
 public:
  LoneRank(int rank, int ranks, int64_t slot_bytes) {
    view_.rank = rank;
    view_.ranks = ranks;
    view_.slot_bytes = slot_bytes;
    view_.patience_ns = 10'000'000'000;
    const auto ints = at::TensorOptions().device(gpu()).dtype(at::kInt);
    for (int r = 0; r < ranks; ++r) {
      memory_.push_back(at::zeros({cuda::kPeerBuffers, ranks, slot_bytes / 4}, ints));
      view_.receive[r] = memory_.back().mutable_data_ptr();
      cuda::empty_receive_buffers(view_.receive[r], memory_.back().numel(), stream());
    }
    state_ = at::zeros({cuda::kPeerStateWords}, ints);
    absent_ = at::zeros({1}, ints);
    view_.state = static_cast<uint32_t*>(state_.mutable_data_ptr());
    view_.absent = static_cast<uint32_t*>(absent_.mutable_data_ptr());
  }
  static cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }
  const cuda::PeerMemoryView& view() const { return view_; }

  // Before an exchange in which rank r sends what[r]; the own one is not looked at.
  void others_send(const std::vector<at::Tensor>& what) {
    buffer_ = (buffer_ + 1) % cuda::kPeerBuffers;
    for (int r = 0; r < view_.ranks; ++r) {
      const at::Tensor& sent = what[static_cast<size_t>(r)];
      if (r != view_.rank) slot(view_.rank, r, words(sent).numel()).copy_(words(sent));
    }
  }
  // Behind it: whether this rank has sent `what` to `rank`.
  bool has_sent(int rank, const at::Tensor& what) {
    return equal_bits(slot(rank, view_.rank, words(what).numel()), words(what));
  }
  // Nobody was waited for in vain, and what earlier exchanges have received is empty again.
  void expect_order() {
    EXPECT_EQ(absent_.item<int32_t>(), 0);
    for (int64_t buffer = 0; buffer < cuda::kPeerBuffers; ++buffer) {
      if (buffer == buffer_) continue;
      EXPECT_TRUE(
          memory_[static_cast<size_t>(view_.rank)][buffer].eq(static_cast<int32_t>(cuda::kNothing)).all().item<bool>())
          << "buffer " << buffer << ", the last one was " << buffer_;
    }
  }

 private:
  static at::Tensor words(const at::Tensor& x) { return x.contiguous().view({-1}).view(at::kInt); }
  at::Tensor slot(int of, int from, int64_t count) const {
    return memory_[static_cast<size_t>(of)][buffer_][from].narrow(0, 0, count);
  }

  cuda::PeerMemoryView view_;
  std::vector<at::Tensor> memory_;  // of each rank
  at::Tensor state_, absent_;
  int64_t buffer_ = 0;
};

const cuda::Bf16* elements(const at::Tensor& x) { return static_cast<const cuda::Bf16*>(x.const_data_ptr()); }
cuda::Bf16* elements_of(const at::Tensor& x) { return static_cast<cuda::Bf16*>(x.mutable_data_ptr()); }

// In float32 from +0 in the order of ranks, rounded once.
at::Tensor summed(const std::vector<at::Tensor>& parts) {
  at::Tensor sum = at::zeros(parts[0].sizes(), parts[0].options().dtype(at::kFloat));
  for (const at::Tensor& part : parts) sum = sum + part.to(at::kFloat);
  return sum.to(at::kBFloat16);
}

// Rows of everybody, and their sums, whole and of own rows.
void exchange_rows(LoneRank& self, const std::vector<at::Tensor>& parts) {
  const auto ranks = static_cast<int64_t>(parts.size());
  const int64_t rows = parts[0].size(0), width = parts[0].size(1), own_rows = rows / ranks, rank = self.view().rank;
  const at::Tensor own = parts[static_cast<size_t>(rank)];
  const at::Tensor all = at::empty({ranks * rows, width}, own.options()), sum = at::empty_like(own),
                   of_own = at::empty({own_rows, width}, own.options());
  cuda::PeerRows call{.in = elements(own),
                      .in_row = width,
                      .out = elements_of(all),
                      .out_rank = rows * width,
                      .out_row = width,
                      .rows = rows,
                      .width = width};
  self.others_send(parts);
  cuda::exchange_copies(self.view(), call, LoneRank::stream(), /*early=*/false);
  EXPECT_TRUE(equal_bits(all, at::cat(parts)));
  for (int r = 0; r < ranks; ++r) EXPECT_TRUE(r == rank || self.has_sent(r, own)) << r;
  call.out = elements_of(sum);
  self.others_send(parts);
  cuda::exchange_sums(self.view(), call, LoneRank::stream(), /*early=*/false);
  EXPECT_TRUE(equal_bits(sum, summed(parts)));
  std::vector<at::Tensor> mine;
  for (const at::Tensor& part : parts) mine.push_back(part.narrow(0, rank * own_rows, own_rows));
  call.in_rank = own_rows * width;
  call.out = elements_of(of_own);
  call.rows = own_rows;
  self.others_send(mine);
  cuda::exchange_sums(self.view(), call, LoneRank::stream(), /*early=*/false);
  EXPECT_TRUE(equal_bits(of_own, summed(mine)));
  for (int r = 0; r < ranks; ++r)
    EXPECT_TRUE(r == rank || self.has_sent(r, own.narrow(0, r * own_rows, own_rows))) << r;
}

// A sum with the norm behind it, and the samples of everybody.
void exchange_step(LoneRank& self, const std::vector<at::Tensor>& parts) {
  const auto ranks = static_cast<int64_t>(parts.size());
  const int64_t rows = parts[0].size(0), width = parts[0].size(1), rank = self.view().rank;
  const at::Tensor x = gpu_randn({rows, width}), weight = gpu_randn({width}), sum = at::empty_like(x),
                   normed = at::empty_like(x);
  self.others_send(parts);
  cuda::exchange_add_rms_norm(self.view(), elements(x), elements(parts[static_cast<size_t>(rank)]), elements(weight),
                              1e-6f, {rows, width, width}, elements_of(sum), elements_of(normed), LoneRank::stream(),
                              /*early=*/false);
  const NormResult expected = add_rms_norm(x, summed(parts), weight, 1e-6);
  EXPECT_TRUE(equal_bits(sum, expected.sum));
  EXPECT_TRUE(equal_bits(normed, expected.normed));
  std::vector<at::Tensor> ids, logprobs, pieces;
  for (int64_t r = 0; r < ranks; ++r) {
    const auto longs = at::TensorOptions().device(gpu()).dtype(at::kLong);
    ids.push_back(at::arange(rows, longs) * 7 + 1000 * r);
    logprobs.push_back(gpu_randn({rows}, 1.0, at::kFloat));
    const at::Tensor id = ids.back().to(at::kInt), zeros = at::zeros_like(id);
    pieces.push_back(at::stack({id, logprobs.back().view(at::kInt), zeros, zeros}, 1));
  }
  const at::Tensor all_ids = at::empty({ranks * rows}, ids[0].options()),
                   all_logprobs = at::empty({ranks * rows}, logprobs[0].options());
  self.others_send(pieces);
  cuda::exchange_samples(self.view(), ids[static_cast<size_t>(rank)].const_data_ptr<int64_t>(),
                         logprobs[static_cast<size_t>(rank)].const_data_ptr<float>(), rows,
                         all_ids.mutable_data_ptr<int64_t>(), all_logprobs.mutable_data_ptr<float>(),
                         LoneRank::stream());
  EXPECT_TRUE(equal_bits(all_ids, at::cat(ids)));
  EXPECT_TRUE(equal_bits(all_logprobs, at::cat(logprobs)));
}

// The second size is more than the threads of a launch take at once.
TEST_F(Small, ExchangesOfRanks) {
  const at::NoGradGuard no_grad;
  for (const auto& [rank, ranks, rows, width] :
       {std::tuple<int, int, int64_t, int64_t>{0, 2, 6, 72}, {1, 3, 6, 72}, {2, 3, 1200, 2048}}) {
    seed_gpu(8);
    std::vector<at::Tensor> parts;
    for (int r = 0; r < ranks; ++r) parts.push_back(gpu_randn({rows, width}));
    LoneRank self(rank, ranks, rows * width * 2);
    exchange_rows(self, parts);
    exchange_step(self, parts);
    self.expect_order();
    const at::Tensor stacked = at::stack(parts);
    EXPECT_TRUE(equal_bits(cuda::ordered_sum(stacked), summed(parts)));
  }
}

}  // namespace
}  // namespace trireme
