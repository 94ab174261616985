// On a GPU: log-probs, entropy, gradients, filters and sampling against the CPU ops and against float64 on the same
// bf16 logits, and the invariant that sampler and loss give a row the same bits in every batch, eagerly or from a
// graph.
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "tests/gpu/device.h"
#include "trainer/ops/cuda/vocabulary/vocabulary_kernels.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/linear.h"
#include "trainer/ops/ops.h"
#include "trainer/ops/philox.h"

namespace trireme {
namespace {

using testing::equal_bits;
using testing::gpu;
using testing::gpu_randn;
using testing::seed_gpu;
using Tensors = std::vector<at::Tensor>;

class Vocabulary : public testing::GpuTest {};

LogprobOptions with(double temperature, int64_t top_k = 0, double top_p = 1.0, double min_p = 0.0) {
  LogprobOptions options;
  options.temperature = temperature;
  options.top_k = top_k;
  options.top_p = top_p;
  options.min_p = min_p;
  options.allow_filtered = true;
  return options;
}
std::vector<LogprobOptions> all_options() {
  return {with(1.0),
          with(0.7),
          with(1.0, 5),
          with(1.0, 0, 0.8),
          with(1, 0, 1, 0.05),
          with(1, 0, 0.999),
          with(1, 1),
          with(1.3, 40, 0.9, .02),
          with(0.6, 300, 0.95, 0.1),
          with(1, 0, 1e-6),
          with(1, 0, 1, 1),
          with(2.5, 0, 0.3)};
}

// hidden and head whose logits have the given spread.
struct Case {
  at::Tensor hidden, head;
  Case(int64_t rows, int64_t vocab, double spread = 3.0, uint64_t seed = 11) {
    seed_gpu(seed);
    hidden = gpu_randn({rows, 64});
    head = gpu_randn({vocab, 64}, spread / 8);
  }
  at::Tensor logits() const { return linear_forward(hidden, head, {}); }  // bf16
};
// Any logits at all: the product with the unit matrix is exact.
Case with_logits(const at::Tensor& logits) {
  Case c(1, 8);
  c.hidden = logits.to(gpu(), at::kBFloat16).contiguous();
  c.head = at::eye(logits.size(1), c.hidden.options());
  return c;
}
at::Tensor on_cpu(const at::Tensor& x) { return x.to(at::kCPU, at::kFloat); }
at::Tensor ids_on_gpu(const std::vector<int64_t>& ids) { return at::tensor(ids, at::kLong).to(gpu()); }

// Every other row its most likely token, the others any.
at::Tensor some_targets(const at::Tensor& logits) {
  at::Tensor ids = std::get<1>(on_cpu(logits).max(-1));
  for (int64_t r = 0; r < ids.size(0); r += 2) {
    ids.data_ptr<int64_t>()[r] =
        static_cast<int64_t>(philox_uniform(5, 1, static_cast<uint64_t>(r)) * static_cast<double>(logits.size(1)));
  }
  return ids;
}

std::vector<SampleRow> sample_rows(int64_t rows, const LogprobOptions& options, uint64_t seed) {
  std::vector<SampleRow> keys(static_cast<size_t>(rows));
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = {options, {seed, i / 3, 1000 + i}, false};
  return keys;
}

DeviceSampling on_device(const std::vector<SampleRow>& rows) {
  DeviceSampling out;
  const auto count = static_cast<int64_t>(rows.size());
  at::Tensor keys = at::empty({count, 3}, at::kLong), parameters = at::empty({count, 4}),
             top_k = at::empty({count}, at::kInt);
  for (int64_t i = 0; i < count; ++i) {
    const SampleRow& row = rows[static_cast<size_t>(i)];
    const uint64_t key[3] = {row.key.seed, row.key.sample_id, row.key.position};
    for (int64_t j = 0; j < 3; ++j) keys.data_ptr<int64_t>()[3 * i + j] = static_cast<int64_t>(key[j]);
    const double values[4] = {row.options.temperature, row.options.top_p, row.options.min_p, row.greedy ? 1.0 : 0.0};
    for (int64_t j = 0; j < 4; ++j) parameters.data_ptr<float>()[4 * i + j] = static_cast<float>(values[j]);
    top_k.data_ptr<int32_t>()[i] = static_cast<int32_t>(row.options.top_k);
    out.any_filter = out.any_filter || row.options.filters();
  }
  out.keys = keys.to(gpu());
  out.parameters = parameters.to(gpu());
  out.top_k = top_k.to(gpu());
  return out;
}

// ---- values and gradients -----------------------------------------------------------------------------------------

TEST_F(Vocabulary, LogprobsAndEntropyMatchTheCpuOps) {
  const at::NoGradGuard no_grad;
  const Case c = with_logits(Case(40, 600).logits());
  const at::Tensor logits = on_cpu(c.hidden), unit = on_cpu(c.head), targets = some_targets(logits);
  for (const LogprobOptions& options : all_options()) {
    const LogprobResult ours = token_logprobs_and_entropy(c.hidden, c.head, targets.to(gpu()), options);
    const LogprobResult cpu = token_logprobs_and_entropy(logits, unit, targets, options);
    ASSERT_EQ(ours.logprobs.scalar_type(), at::kFloat);
    const at::Tensor dropped = cpu.logprobs == -INFINITY;
    EXPECT_TRUE(at::equal(on_cpu(ours.logprobs) == -INFINITY, dropped));
    EXPECT_LE((on_cpu(ours.logprobs) - cpu.logprobs).masked_fill(dropped, 0).abs().max().item<float>(), 1e-5);
    EXPECT_LE((on_cpu(ours.entropy) - cpu.entropy).abs().max().item<float>(), 1e-5);
    EXPECT_TRUE(equal_bits(token_logprobs(c.hidden, c.head, targets.to(gpu()), options), ours.logprobs))
        << "the entropy changes nothing";
  }
}

// d(logits) alone: with the unit matrix as head it is the gradient of hidden, rounded to bf16.
TEST_F(Vocabulary, GradientsOfTheLogitsMatchTheCpuOps) {
  const Case c = with_logits(Case(24, 600).logits());
  const at::Tensor targets = some_targets(c.hidden);
  const at::Tensor up = at::linspace(-1.5, 2.0, 24), up_entropy = at::linspace(0.7, -0.4, 24);
  for (const LogprobOptions& options : all_options()) {
    const auto gradients = [&](const at::Tensor& hidden, const at::Tensor& head) {
      const at::AutoGradMode record(true);
      const Tensors leaves = {hidden.detach().clone().set_requires_grad(true),
                              head.detach().clone().set_requires_grad(true)};
      const at::Device device = hidden.device();
      const LogprobResult r = token_logprobs_and_entropy(leaves[0], leaves[1], targets.to(device), options);
      const at::Tensor kept = r.logprobs.masked_fill(r.logprobs == -INFINITY, 0);
      return torch::autograd::grad({(kept * up.to(device)).sum() + (r.entropy * up_entropy.to(device)).sum()}, leaves);
    };
    const auto ours = gradients(c.hidden, c.head), cpu = gradients(on_cpu(c.hidden), on_cpu(c.head));
    for (size_t i = 0; i < 2; ++i) ASSERT_EQ(ours[i].scalar_type(), at::kBFloat16);
    const at::Tensor error = (on_cpu(ours[0]) - cpu[0]).abs();
    EXPECT_TRUE((error <= cpu[0].abs() * 0.004 + 2e-6).all().item<bool>()) << error.max().item<float>();
    // Where one token is kept the gradient is zero up to rounding.
    EXPECT_LE((on_cpu(ours[1]) - cpu[1]).abs().max().item<float>(), 0.01F * cpu[1].abs().max().item<float>() + 1e-4F);
  }
}

TEST_F(Vocabulary, LargeVocabulariesMatchFloat64) {
  for (const int64_t vocab : {8192, 8200, 128256, 151936}) {
    const Case c(6, vocab);
    const at::Tensor logits = c.logits().to(at::kCPU, at::kDouble), targets = some_targets(c.logits());
    LogprobOptions options;
    options.temperature = 0.5;
    const at::Tensor up = at::linspace(-1.0, 2.0, 6);

    const Tensors leaves = {c.hidden.clone().set_requires_grad(true), c.head.clone().set_requires_grad(true)};
    const LogprobResult r = token_logprobs_and_entropy(leaves[0], leaves[1], targets.to(gpu()), options);
    const Tensors ours =
        torch::autograd::grad({(r.logprobs * up.to(gpu())).sum() + (r.entropy * up.to(gpu())).sum()}, leaves);

    const at::Tensor z = logits.clone().set_requires_grad(true);
    const at::Tensor log_p = at::log_softmax(z / options.temperature, -1);
    const at::Tensor expected = log_p.gather(1, targets.unsqueeze(1)).squeeze(1);
    const at::Tensor entropy = -(log_p.exp() * log_p).sum(-1);
    EXPECT_LE((on_cpu(r.logprobs) - expected).abs().max().item<double>(), 1e-5) << vocab;
    EXPECT_LE((on_cpu(r.entropy) - entropy).abs().max().item<double>(), 1e-5) << vocab;
    const at::Tensor dz = torch::autograd::grad({((expected + entropy) * up).sum()}, {z})[0];
    const Tensors cpu = {dz.mm(c.head.to(at::kCPU, at::kDouble)), dz.t().mm(c.hidden.to(at::kCPU, at::kDouble))};
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_LE(((on_cpu(ours[i]) - cpu[i]).abs().max() / cpu[i].abs().max()).item<double>(), 0.01) << vocab;
    }
  }
}

// Widths that the products do not take still have kernels: rows that no vector load fits.
TEST_F(Vocabulary, RowsOffTheVectorSizeHaveTheBitsOfAlignedOnes) {
  constexpr int64_t kRows = 5, kVocab = 8200, kOdd = 8193;
  at::Tensor wide = Case(kRows, kVocab).logits();
  wide.narrow(1, kOdd, kVocab - kOdd).fill_(-INFINITY);  // weight 0: the sums are those of the narrow row
  const at::Tensor narrow = wide.narrow(1, 0, kOdd).contiguous();
  const at::Tensor targets = ids_on_gpu({0, 1, 8191, 8192, 77});
  const auto run = [&](const at::Tensor& z, bool filters) {
    const cuda::Logits logits{static_cast<const uint16_t*>(z.const_data_ptr()), kRows, z.size(1)};
    const auto floats = z.options().dtype(at::kFloat);
    const int64_t slices = cuda::slices_of(z.size(1));
    const at::Tensor found = at::empty({kRows, 2}, floats), partials = at::empty({kRows, slices, 2}, floats),
                     dots = at::empty({kRows, slices}, floats), statistics = at::empty({kRows, 4}, floats),
                     logprobs = at::empty({kRows}, floats), entropies = at::empty({kRows}, floats);
    const at::Tensor gradient = z.clone();
    cuda::RowOptions options;
    options.temperature = 0.9f;
    if (filters) options.top_p = 0.95f;
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    auto* filter = filters ? static_cast<cuda::RowFilter*>(found.mutable_data_ptr()) : nullptr;
    if (filters) cuda::find_filters(logits, options, filter, stream);
    auto* slice = static_cast<cuda::SlicePartial*>(partials.mutable_data_ptr());
    cuda::slice_partials(logits, options, filter, slice, dots.mutable_data_ptr<float>(), stream);
    cuda::LogprobOutputs outputs{logprobs.mutable_data_ptr<float>(), entropies.mutable_data_ptr<float>(),
                                 static_cast<cuda::RowStatistics*>(statistics.mutable_data_ptr())};
    cuda::finish_logprobs(logits, options, filter, targets.const_data_ptr<int64_t>(), true, slice,
                          dots.const_data_ptr<float>(), outputs, stream);
    const at::Tensor up = at::linspace(0.5, 1.0, kRows, floats);
    cuda::logits_gradient(static_cast<uint16_t*>(gradient.mutable_data_ptr()), kRows, z.size(1), z.size(1), options,
                          filter, targets.const_data_ptr<int64_t>(), outputs.statistics, up.const_data_ptr<float>(),
                          up.const_data_ptr<float>(), stream);
    return Tensors{statistics, entropies, gradient.narrow(1, 0, kOdd)};
  };
  for (const bool filters : {false, true}) {
    const Tensors a = run(wide, filters), b = run(narrow, filters);
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(equal_bits(a[i], b[i])) << i << (filters ? " filtered" : "");
    EXPECT_TRUE(b[0].isfinite().narrow(1, 0, 3).all().item<bool>());
  }
}

TEST_F(Vocabulary, GradientsAreTheSameAgainAndWhenLogitsAreMadeAgain) {
  const Case c(50, 8200);
  const at::Tensor targets = some_targets(c.logits()).to(gpu());
  const Tensors leaves = {c.hidden.clone().set_requires_grad(true), c.head.clone().set_requires_grad(true)};
  const auto loss = [&] { return token_logprobs(leaves[0], leaves[1], targets, with(0.8)).sum(); };
  const at::Tensor one = loss();
  const Tensors first = torch::autograd::grad({one}, leaves, {}, /*retain_graph=*/true);
  const Tensors again = torch::autograd::grad({one}, leaves);  // the kept logits are spent
  const Tensors other = torch::autograd::grad({loss()}, leaves);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(equal_bits(first[i], again[i]));
    EXPECT_TRUE(equal_bits(first[i], other[i]));
  }
}

TEST_F(Vocabulary, TheHeadsGradientBufferTakesTheProducts) {
  for (const int64_t rows : {20, 4500}) {  // one chunk; several
    constexpr int64_t kVocab = 64000;
    ASSERT_EQ(cuda::vocabulary_chunk_rows(rows, kVocab) >= rows, rows == 20);
    const Case c(rows, kVocab);
    const at::Tensor targets = at::arange(rows, at::TensorOptions().device(gpu()).dtype(at::kLong));
    const Tensors leaves = {c.hidden.clone().set_requires_grad(true), c.head.clone().set_requires_grad(true)};
    const at::Tensor expected =
        torch::autograd::grad({token_logprobs(leaves[0], leaves[1], targets, {}).mean()}, leaves)[1];
    const at::Tensor start = gpu_randn(c.head.sizes(), 1e-3);
    leaves[1].mutable_grad() = start.clone();
    token_logprobs(leaves[0], leaves[1], targets, {}).mean().backward();
    const at::Tensor added = leaves[1].grad().to(at::kFloat) - start.to(at::kFloat);
    EXPECT_EQ(leaves[1].grad().scalar_type(), at::kBFloat16);
    const at::Tensor error = (added - expected.to(at::kFloat)).abs();
    // Two roundings to bf16 lie between the two.
    const at::Tensor bound = (start.to(at::kFloat).abs() + expected.to(at::kFloat).abs()) * 0.009 + 1e-8;
    EXPECT_TRUE((error <= bound).all().item<bool>()) << rows;
    EXPECT_GT(expected.abs().max().item<float>(), 0.0f);
  }
}

// ---- rows and batches ---------------------------------------------------------------------------------------------

TEST_F(Vocabulary, ARowDoesNotDependOnItsBatchOrChunk) {
  const at::NoGradGuard no_grad;
  constexpr int64_t kVocab = 128256;
  const int64_t chunk = cuda::vocabulary_chunk_rows(1 << 20, kVocab), rows = chunk + 300;
  const Case c(rows, kVocab);
  const at::Tensor targets = at::arange(rows, at::TensorOptions().device(gpu()).dtype(at::kLong));
  for (const LogprobOptions& options : {with(1.0), with(0.7, 50, 0.9, 0.01)}) {
    const LogprobResult whole = token_logprobs_and_entropy(c.hidden, c.head, targets, options);
    const auto keys = sample_rows(rows, options, 3);
    const SampleResult samples = sample_tokens(c.hidden, c.head, keys);
    for (const int64_t from : {int64_t{0}, int64_t{1}, chunk - 1, chunk, rows - 33}) {
      for (const int64_t count : {1, 2, 16, 17, 33}) {
        const auto part = [&](const at::Tensor& x) { return x.narrow(0, from, count); };
        const LogprobResult some = token_logprobs_and_entropy(part(c.hidden), c.head, part(targets), options);
        EXPECT_TRUE(equal_bits(some.logprobs, part(whole.logprobs))) << from << " " << count;
        EXPECT_TRUE(equal_bits(some.entropy, part(whole.entropy))) << from << " " << count;
        const SampleResult drawn =
            sample_tokens(part(c.hidden), c.head, {keys.begin() + from, keys.begin() + from + count});
        for (int64_t i = 0; i < count; ++i) {
          EXPECT_EQ(drawn.ids[static_cast<size_t>(i)], samples.ids[static_cast<size_t>(from + i)]);
          EXPECT_EQ(drawn.logprobs[static_cast<size_t>(i)], samples.logprobs[static_cast<size_t>(from + i)]);
        }
      }
    }
  }
}

TEST_F(Vocabulary, TheSamplersLogprobsHaveTheBitsOfTheLoss) {
  for (const int64_t vocab : {600, 8200, 151936}) {
    const Case c(100, vocab);
    for (const LogprobOptions& options : all_options()) {
      auto rows = sample_rows(100, options, 5);
      rows[7].greedy = rows[50].greedy = true;
      const DeviceSamples drawn = sample_tokens_on_device(c.hidden, c.head, on_device(rows));
      const SampleResult host = sample_tokens(c.hidden, c.head, rows);
      EXPECT_TRUE(equal_bits(drawn.logprobs, at::tensor(host.logprobs, at::kFloat)));
      EXPECT_TRUE(equal_bits(drawn.ids, at::tensor(host.ids, at::kLong)));
      EXPECT_TRUE(drawn.logprobs.isfinite().all().item<bool>());
      const at::Tensor leaf = c.hidden.clone().set_requires_grad(true);
      LogprobOptions strict = options;
      strict.allow_filtered = false;
      EXPECT_TRUE(equal_bits(token_logprobs(leaf, c.head, drawn.ids, strict).detach(), drawn.logprobs)) << vocab;
      EXPECT_TRUE(
          equal_bits(token_logprobs_and_entropy(leaf, c.head, drawn.ids, strict).logprobs.detach(), drawn.logprobs));
    }
  }
}

// One filtered row sends all through the slower kernels; the others must not notice.
TEST_F(Vocabulary, RowsWithoutFiltersKeepTheirBitsAmongFilteredOnes) {
  const Case c(60, 8200);
  const auto plain = sample_rows(60, with(1.1), 5);
  auto mixed = plain;
  for (size_t i = 0; i < mixed.size(); i += 3) mixed[i].options.top_p = 0.5;
  const SampleResult a = sample_tokens(c.hidden, c.head, plain), b = sample_tokens(c.hidden, c.head, mixed);
  int64_t changed = 0;
  for (size_t i = 0; i < mixed.size(); ++i) {
    if (i % 3 == 0) {
      changed += a.logprobs[i] != b.logprobs[i];
    } else {
      EXPECT_EQ(a.ids[i], b.ids[i]);
      EXPECT_EQ(a.logprobs[i], b.logprobs[i]);
    }
  }
  EXPECT_GE(changed, 15);
}

TEST_F(Vocabulary, AGraphReplaysOverNewContents) {
  const at::NoGradGuard no_grad;
  const Case one(20, 128256, 3.0, 1), two(20, 128256, 3.0, 2);
  for (const bool filters : {false, true}) {
    const LogprobOptions options = filters ? with(0.9, 100, 0.9) : with(0.9);
    const auto rows_one = sample_rows(20, options, 1), rows_two = sample_rows(20, options, 2);
    const SampleResult expected_one = sample_tokens(one.hidden, one.head, rows_one);
    const SampleResult expected_two = sample_tokens(two.hidden, one.head, rows_two);
    const at::Tensor hidden = one.hidden.clone();
    const DeviceSampling sampling = on_device(rows_one);
    c10::cuda::device_synchronize();
    const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
    sample_tokens_on_device(hidden, one.head, sampling);
    c10::cuda::device_synchronize();
    at::cuda::CUDAGraph graph;
    graph.capture_begin();
    const DeviceSamples drawn = sample_tokens_on_device(hidden, one.head, sampling);
    graph.capture_end();
    graph.replay();
    EXPECT_TRUE(equal_bits(drawn.ids, at::tensor(expected_one.ids, at::kLong)));
    EXPECT_TRUE(equal_bits(drawn.logprobs, at::tensor(expected_one.logprobs, at::kFloat)));
    hidden.copy_(two.hidden);
    sampling.keys.copy_(on_device(rows_two).keys);
    graph.replay();
    EXPECT_TRUE(equal_bits(drawn.ids, at::tensor(expected_two.ids, at::kLong)));
    EXPECT_TRUE(equal_bits(drawn.logprobs, at::tensor(expected_two.logprobs, at::kFloat)));
  }
}

// ---- filters ------------------------------------------------------------------------------------------------------

std::vector<std::pair<std::string, at::Tensor>> filter_logits(int64_t vocab) {
  const at::Tensor normal = on_cpu(Case(3, (vocab + 7) / 8 * 8).logits()).narrow(1, 0, vocab).contiguous();
  at::Tensor zeros = at::zeros({2, vocab});  // +0 and -0 are equal
  zeros.slice(1, 0, vocab, 3).fill_(-0.0);
  zeros[1][vocab / 2] = 1.0;
  at::Tensor infinite = normal.clone();
  infinite.slice(1, 1, vocab, 2).fill_(-INFINITY);
  return {{"normal", normal},
          {"coarse", normal.round()},
          {"negative", (normal - 100.0).to(at::kBFloat16).to(at::kFloat)},
          {"positive", (normal + 100.0).to(at::kBFloat16).to(at::kFloat)},
          {"peaked", (normal * 20.0).to(at::kBFloat16).to(at::kFloat)},
          {"flat", at::full({1, vocab}, -2.5)},
          {"zeros", zeros},
          {"minus infinity", infinite}};
}

// The kept tokens of each row must be a prefix of the order (logit descending, id ascending), and as long as the
// definition in ops.h says, in float64; at the edge of top_p masses may differ by float32's rounding.
TEST_F(Vocabulary, FiltersKeepThePrefixThatTheDefinitionAsksFor) {
  for (const int64_t vocab : {600, 1001, 8193, 128256}) {
    for (const auto& [name, logits] : filter_logits(vocab)) {
      const at::Tensor bits = logits.to(gpu(), at::kBFloat16).contiguous();
      const int64_t rows = logits.size(0);
      for (const LogprobOptions& options : all_options()) {
        if (!options.filters()) continue;
        const std::string what = name + ", vocabulary " + std::to_string(vocab) + ", top_k " +
                                 std::to_string(options.top_k) + ", top_p " + std::to_string(options.top_p) +
                                 ", min_p " + std::to_string(options.min_p);
        cuda::RowOptions of_rows;
        of_rows.temperature = static_cast<float>(options.temperature);
        of_rows.top_k = static_cast<int32_t>(options.top_k);
        of_rows.top_p = static_cast<float>(options.top_p);
        of_rows.min_p = static_cast<float>(options.min_p);
        const at::Tensor found = at::empty({rows, 2}, bits.options().dtype(at::kFloat));
        cuda::find_filters({static_cast<const uint16_t*>(bits.const_data_ptr()), rows, vocab}, of_rows,
                           static_cast<cuda::RowFilter*>(found.mutable_data_ptr()), c10::cuda::getCurrentCUDAStream());
        const at::Tensor filters = found.cpu();
        const at::Tensor scaled = logits * (1.0f / of_rows.temperature);
        for (int64_t r = 0; r < rows; ++r) {
          const cuda::RowFilter filter = static_cast<const cuda::RowFilter*>(filters.const_data_ptr())[r];
          const float* z = scaled.const_data_ptr<float>() + r * vocab;
          std::vector<int64_t> order(static_cast<size_t>(vocab));
          std::iota(order.begin(), order.end(), 0);
          std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return z[a] > z[b]; });
          const auto at_rank = [&](int64_t rank) { return z[order[static_cast<size_t>(rank)]]; };
          const float max = at_rank(0);
          int64_t by_k = vocab, by_min = vocab;
          if (options.top_k > 0 && options.top_k < vocab) {
            for (by_k = options.top_k; by_k < vocab && at_rank(by_k) == at_rank(options.top_k - 1);) ++by_k;
          }
          if (options.min_p > 0) {
            const float least = max + static_cast<float>(std::log(static_cast<double>(of_rows.min_p)));
            for (by_min = 1; by_min < vocab && at_rank(by_min) >= least;) ++by_min;
          }
          int64_t least_kept = by_k, most_kept = by_k;
          if (options.top_p < 1) {
            double total = 0, mass = 0;
            for (int64_t i = 0; i < by_k; ++i) total += std::exp(static_cast<double>(at_rank(i)) - max);
            least_kept = most_kept = 0;
            for (int64_t i = 0; i < by_k && most_kept == 0; ++i) {
              mass += std::exp(static_cast<double>(at_rank(i)) - max);
              if (least_kept == 0 && mass >= of_rows.top_p * total * (1 - 1e-6)) least_kept = i + 1;
              if (mass >= of_rows.top_p * total * (1 + 1e-6)) most_kept = i + 1;
            }
            if (most_kept == 0) most_kept = by_k;
          }
          least_kept = std::min(least_kept, by_min);
          most_kept = std::min(most_kept, by_min);
          int64_t kept = 0;
          const auto keeps = [&](int64_t id) {
            return !(z[id] < filter.threshold || (z[id] == filter.threshold && id >= filter.limit));
          };
          while (kept < vocab && keeps(order[static_cast<size_t>(kept)])) ++kept;
          for (int64_t i = kept; i < vocab; ++i) {
            ASSERT_FALSE(keeps(order[static_cast<size_t>(i)])) << what << ": rank " << i << " after " << kept;
          }
          EXPECT_GE(kept, least_kept) << what << ", row " << r;
          EXPECT_LE(kept, most_kept) << what << ", row " << r;
        }
      }
    }
  }
}

TEST_F(Vocabulary, ADroppedTargetIsMinusInfinityWithZeroGradientOrNan) {
  const Case c = with_logits(at::tensor({3.0f, 2.0f, 2.0f, 1.0f, 0.5f, 0.5f, -1.0f, -2.0f}).repeat({4, 1}));
  const at::Tensor targets = ids_on_gpu({0, 2, 3, 7});  // ties of the second stay
  LogprobOptions options = with(1.0, 2);
  const at::Tensor leaf = c.hidden.clone().set_requires_grad(true);
  const at::Tensor out = token_logprobs(leaf, c.head, targets, options);
  const double total = std::exp(3.0) + 2 * std::exp(2.0);
  EXPECT_NEAR(out[0].item<float>(), 3.0 - std::log(total), 1e-6);
  EXPECT_NEAR(out[1].item<float>(), 2.0 - std::log(total), 1e-6);
  EXPECT_EQ(out[2].item<float>(), -INFINITY);
  EXPECT_EQ(out[3].item<float>(), -INFINITY);
  const at::Tensor up = at::ones({4}, out.options());
  const at::Tensor gradient = torch::autograd::grad({out}, {leaf}, {up})[0];
  EXPECT_EQ(gradient.narrow(0, 2, 2).abs().max().item<float>(), 0.0f);
  EXPECT_GT(gradient.narrow(0, 0, 2).abs().max().item<float>(), 0.1f);
  options.allow_filtered = false;
  const at::Tensor strict = token_logprobs(c.hidden, c.head, targets, options).isnan().cpu();
  EXPECT_TRUE(at::equal(strict, at::tensor({0, 0, 1, 1}).to(at::kBool)));
}

// ---- sampling -----------------------------------------------------------------------------------------------------

// With equal weights the draw is floor(u * vocabulary), which shows the bits of u.
TEST_F(Vocabulary, EqualWeightsShowThePhiloxNumbers) {
  constexpr int64_t kRows = 3000, kVocab = 1 << 16;
  seed_gpu(1);
  const at::Tensor hidden = at::zeros({kRows, 16}, at::TensorOptions().device(gpu()).dtype(at::kBFloat16));
  const at::Tensor head = gpu_randn({kVocab, 16});
  auto rows = sample_rows(kRows, with(1.0), 0xfedcba9876543210ull);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].key.sample_id = philox4x32({static_cast<uint32_t>(i), 0, 0, 0}, {1, 2})[0] * 0x100000001ull;
    rows[i].key.position = i * 0x40000001ull;
  }
  const SampleResult drawn = sample_tokens(hidden, head, rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    const double u = philox_uniform(rows[i].key.seed, rows[i].key.sample_id, rows[i].key.position);
    EXPECT_EQ(drawn.ids[i], static_cast<int64_t>(std::floor(u * kVocab))) << i;
    EXPECT_NEAR(drawn.logprobs[i], -std::log(static_cast<double>(kVocab)), 2e-6);
  }
}

TEST_F(Vocabulary, DrawsInvertTheCdfInIdOrder) {
  for (const int64_t vocab : {600, 8200, 151936}) {
    const Case c(200, vocab);
    const at::Tensor logits = on_cpu(c.logits());
    for (const LogprobOptions& options : all_options()) {
      const float inverse = 1.0f / static_cast<float>(options.temperature);
      const auto rows = sample_rows(200, options, 9);
      const SampleResult drawn = sample_tokens(c.hidden, c.head, rows);
      int64_t exact = 0, checked = 0;
      for (int64_t r = 0; r<200; r += vocab> 10000 ? 20 : 5, ++checked) {
        // Which tokens are kept is another test's matter.
        at::Tensor weights = (logits[r] * inverse).to(at::kDouble);
        if (options.filters()) {
          const at::Tensor found = at::empty({1, 2}, c.hidden.options().dtype(at::kFloat));
          const at::Tensor row = c.logits()[r].contiguous();
          cuda::RowOptions of_row;
          of_row.temperature = static_cast<float>(options.temperature);
          of_row.top_k = static_cast<int32_t>(options.top_k);
          of_row.top_p = static_cast<float>(options.top_p);
          of_row.min_p = static_cast<float>(options.min_p);
          cuda::find_filters({static_cast<const uint16_t*>(row.const_data_ptr()), 1, vocab}, of_row,
                             static_cast<cuda::RowFilter*>(found.mutable_data_ptr()),
                             c10::cuda::getCurrentCUDAStream());
          const at::Tensor host = found.cpu();
          const auto filter = *static_cast<const cuda::RowFilter*>(host.const_data_ptr());
          double* w = weights.data_ptr<double>();
          for (int64_t j = 0; j < vocab; ++j) {
            const auto z = static_cast<float>(w[j]);
            if (z < filter.threshold || (z == filter.threshold && j >= filter.limit)) w[j] = -INFINITY;
          }
        }
        weights = (weights - weights.max()).exp();
        const at::Tensor running = weights.cumsum(0);
        const double* upto = running.const_data_ptr<double>();
        const double total = upto[vocab - 1];
        const SampleKey& key = rows[static_cast<size_t>(r)].key;
        const double u = philox_uniform(key.seed, key.sample_id, key.position);
        const int64_t id = drawn.ids[static_cast<size_t>(r)];
        const int64_t expected = std::min<int64_t>(vocab - 1, std::upper_bound(upto, upto + vocab, u * total) - upto);
        exact += id == expected;
        EXPECT_GT(weights[id].item<double>(), 0.0);
        EXPECT_GE(upto[id], (u - 1e-6) * total) << vocab << " row " << r;
        EXPECT_LE(id > 0 ? upto[id - 1] : 0.0, (u + 1e-6) * total) << vocab << " row " << r;
        EXPECT_NEAR(drawn.logprobs[static_cast<size_t>(r)], std::log(weights[id].item<double>() / total), 1e-5);
      }
      EXPECT_GE(exact, checked - 1) << vocab;
    }
  }
}

TEST_F(Vocabulary, GreedyTakesTheFirstLargest) {
  for (const int64_t vocab : {600, 128256}) {
    at::Tensor logits = on_cpu(Case(4, vocab).logits()).clamp_max(9.0);
    logits[0][vocab - 1] = logits[0][17] = 9.5;
    logits[1][vocab - 1] = 9.5;
    logits[2][0] = 9.5;
    logits.select(1, vocab / 2).fill_(9.5);
    seed_gpu(3);
    // logits = hidden . head^T with a unit matrix of rows: hidden picks a column of head.
    const at::Tensor hidden = at::eye(8, at::TensorOptions().device(gpu()).dtype(at::kBFloat16)).narrow(0, 0, 4);
    const at::Tensor head = at::cat({logits, at::zeros({4, vocab})}).t().contiguous().to(gpu(), at::kBFloat16);
    for (const LogprobOptions& options : all_options()) {
      auto rows = sample_rows(4, options, 1);
      for (SampleRow& row : rows) row.greedy = true;
      const SampleResult drawn = sample_tokens(hidden, head, rows);
      EXPECT_EQ(drawn.ids, (std::vector<int64_t>{17, vocab / 2, 0, vocab / 2}));
      EXPECT_TRUE(equal_bits(at::tensor(drawn.logprobs, at::kFloat),
                             token_logprobs(hidden, head, ids_on_gpu(drawn.ids), options)));
    }
  }
}

TEST_F(Vocabulary, RowsThatAreNotFiniteShowAndDisturbNoOther) {
  const Case clean(6, 8200);
  Case c = clean;
  c.hidden = clean.hidden.clone();
  c.hidden[2][5] = NAN;
  c.hidden[4].fill_(INFINITY);
  const at::Tensor targets = at::arange(6, at::TensorOptions().device(gpu()).dtype(at::kLong));
  const at::Tensor bad = at::tensor({0, 0, 1, 0, 1, 0}).to(at::kBool), good = bad.logical_not();
  for (const LogprobOptions& options : {with(1.0), with(1.0, 30, 0.9, 0.001)}) {
    const auto expect_like = [&](const at::Tensor& dirty, const at::Tensor& reference) {
      EXPECT_TRUE(at::equal(dirty.cpu().isnan(), bad));
      EXPECT_TRUE(equal_bits(dirty.cpu().masked_select(good), reference.cpu().masked_select(good)));
    };
    expect_like(token_logprobs(c.hidden, c.head, targets, options),
                token_logprobs(clean.hidden, c.head, targets, options));
    const auto rows = sample_rows(6, options, 4);
    const DeviceSamples drawn = sample_tokens_on_device(c.hidden, c.head, on_device(rows));
    const DeviceSamples expected = sample_tokens_on_device(clean.hidden, c.head, on_device(rows));
    expect_like(drawn.logprobs, expected.logprobs);
    EXPECT_TRUE(equal_bits(drawn.ids.cpu().masked_select(good), expected.ids.cpu().masked_select(good)));
    try {
      sample_tokens(c.hidden, c.head, rows);
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("row 2"), std::string::npos) << error.what();
    }
  }
  at::Tensor outside = targets.clone();
  outside[1] = 8200;
  outside[3] = -1;
  EXPECT_TRUE(at::equal(token_logprobs(clean.hidden, c.head, outside, {}).isnan().cpu(),
                        at::tensor({0, 1, 0, 1, 0, 0}).to(at::kBool)));
}

TEST_F(Vocabulary, ArgumentsThatDoNotFitAreNamed) {
  const Case c(4, 600);
  const at::Tensor targets = ids_on_gpu({1, 2, 3, 4});
  EXPECT_THROW(token_logprobs(c.hidden, c.head, targets, with(0.0)), Error);
  EXPECT_THROW(token_logprobs(c.hidden.to(at::kFloat), c.head.to(at::kFloat), targets, {}), Error);
  EXPECT_THROW(token_logprobs(c.hidden, c.head, targets.cpu(), {}), Error);
  DeviceSampling sampling = on_device(sample_rows(4, {}, 1));
  sampling.top_k = sampling.top_k.cpu();
  EXPECT_THROW(sample_tokens_on_device(c.hidden, c.head, sampling), Error);
  EXPECT_THROW(sample_tokens_on_device(c.hidden, c.head, on_device(sample_rows(3, {}, 1))), Error);
}

}  // namespace
}  // namespace trireme
