// On a GPU: the row-local ops and fused steps against the CPU's in float64 on the same bfloat16 numbers; rows have the
// same bits alone and in any batch; backward passes have the same bits in every run.
#include <ATen/core/grad_mode.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>

#include "base/error.h"
#include "tests/gpu/device.h"
#include "trainer/model/kv_arena.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

using testing::equal_bits;
using testing::gpu;
using testing::gpu_randn;
using testing::seed_gpu;
using Tensors = std::vector<at::Tensor>;

constexpr double kEps = 1e-6;

at::Tensor exact(const at::Tensor& x) { return x.defined() ? x.detach().cpu().to(at::kDouble) : x; }

// Each element within one rounding to bfloat16 (half a unit in the last place is 2^-8 of the value at most).
void expect_rounded_once(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), at::kBFloat16) << what;
  const at::Tensor error = (exact(actual) - expected).abs();
  const at::Tensor allowed = expected.abs() * (1.01 / 256) + expected.abs().max() * 1e-6;
  EXPECT_LE((error - allowed).max().item<double>(), 0.0) << what;
}

// Within 1e-2 of the largest value.
void expect_gradient(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  const double largest = expected.abs().max().item<double>();
  ASSERT_GT(largest, 0.0) << what;
  EXPECT_LE((exact(actual) - expected).abs().max().item<double>(), 1e-2 * largest) << what;
}

using Op = std::function<Tensors(const Tensors&)>;

Tensors leaves_of(const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) leaves.push_back(input.detach().clone().set_requires_grad(true));
  return leaves;
}

Tensors gradients(const Tensors& inputs, const Tensors& douts, const Op& op) {
  const at::AutoGradMode record(true);
  const Tensors leaves = leaves_of(inputs);
  return torch::autograd::grad(op(leaves), leaves, douts);
}

// Gradients of `on_gpu` twice (same bits) and against those of `on_cpu` in float64.
void expect_gradients(const Tensors& inputs, const Op& on_gpu, const Op& on_cpu, const std::string& what) {
  Tensors douts, exact_inputs, exact_douts;
  {
    const at::NoGradGuard no_grad;
    for (const at::Tensor& out : on_gpu(inputs)) douts.push_back(gpu_randn(out.sizes()));
  }
  for (const at::Tensor& input : inputs) exact_inputs.push_back(exact(input));
  for (const at::Tensor& dout : douts) exact_douts.push_back(exact(dout));
  const Tensors actual = gradients(inputs, douts, on_gpu), again = gradients(inputs, douts, on_gpu);
  const Tensors expected = gradients(exact_inputs, exact_douts, on_cpu);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::string which = what + ", gradient of input " + std::to_string(i);
    expect_gradient(actual[i], expected[i], which);
    EXPECT_TRUE(equal_bits(actual[i], again[i])) << which;
  }
}

// What `op` gives for some rows of `inputs` has the bits of those rows of what it gives for all.
void expect_rows_alone(const Tensors& inputs, const Op& op, const std::string& what) {
  const at::NoGradGuard no_grad;
  const int64_t rows = inputs[0].size(0);
  const Tensors whole = op(inputs);
  for (const int64_t count : {int64_t{1}, int64_t{2}, int64_t{33}, int64_t{256}, rows}) {
    for (const int64_t from : {int64_t{0}, int64_t{1}, int64_t{17}, rows - count}) {
      if (from < 0 || from + count > rows) continue;
      Tensors some;
      for (const at::Tensor& input : inputs) some.push_back(input.narrow(0, from, count));
      const Tensors part = op(some);
      for (size_t i = 0; i < part.size(); ++i) {
        EXPECT_TRUE(equal_bits(part[i], whole[i].narrow(0, from, count)))
            << what << ", output " << i << ", rows " << from << " to " << from + count << " of " << rows;
      }
    }
  }
}

class GpuRows : public testing::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (!IsSkipped() && !HasFatalFailure()) seed_gpu(20);
  }
};

// Both sides of where threads, chunks of a thread and blocks of a row change.
const std::vector<int64_t> kNormWidths = {64,   72,   128,  256,  264,  512,  520,    1024,  2048,
                                          2056, 3072, 4096, 5120, 8192, 8200, 12'288, 16'384};

TEST_F(GpuRows, RmsNormIsOneRoundingFromFloat64) {
  const at::NoGradGuard no_grad;
  for (const int64_t width : kNormWidths) {
    const at::Tensor x = gpu_randn({37, width}, 3.0), w = gpu_randn({width});
    expect_rounded_once(trireme::rms_norm(x, w, kEps), trireme::rms_norm(exact(x), exact(w), kEps),
                        "width " + std::to_string(width));
  }
  const at::Tensor heads = gpu_randn({5, 3, 128}), w = gpu_randn({128});
  expect_rounded_once(trireme::rms_norm(heads, w, kEps), trireme::rms_norm(exact(heads), exact(w), kEps), "heads");
  EXPECT_EQ(trireme::rms_norm(gpu_randn({0, 128}), w, kEps).size(0), 0);
}

TEST_F(GpuRows, AddRmsNormIsTheSumAndItsNorm) {
  const at::NoGradGuard no_grad;
  for (const int64_t width : kNormWidths) {
    const std::string what = "width " + std::to_string(width);
    const at::Tensor x = gpu_randn({37, width}, 3.0), delta = gpu_randn({37, width}), w = gpu_randn({width});
    const NormResult result = add_rms_norm(x, delta, w, kEps);
    EXPECT_TRUE(equal_bits(result.sum, x.cpu() + delta.cpu())) << what;
    EXPECT_TRUE(equal_bits(result.normed, trireme::rms_norm(result.sum, w, kEps))) << what;
    expect_rounded_once(result.normed, trireme::rms_norm(exact(result.sum), exact(w), kEps), what);
    const NormResult first = add_rms_norm(x, at::Tensor(), w, kEps);
    EXPECT_TRUE(equal_bits(first.sum, x)) << what;
    EXPECT_TRUE(equal_bits(first.normed, trireme::rms_norm(x, w, kEps))) << what;
  }
}

TEST_F(GpuRows, NormGradients) {
  const Op norm = [](const Tensors& t) { return Tensors{trireme::rms_norm(t[0], t[1], kEps)}; };
  const Op add = [](const Tensors& t) {
    const NormResult result = add_rms_norm(t[0], t[1], t[2], kEps);
    return Tensors{result.sum, result.normed};
  };
  for (const int64_t width : {64, 72, 520, 2048, 4096, 8192, 8200, 16'384}) {
    for (const int64_t rows : {1, 3, 1037}) {  // fewer and more than there are partial sums
      const std::string what = std::to_string(rows) + " rows of " + std::to_string(width);
      const at::Tensor x = gpu_randn({rows, width}), delta = gpu_randn({rows, width}), w = gpu_randn({width});
      expect_gradients({x, w}, norm, norm, "rms_norm, " + what);
      expect_gradients({x, delta, w}, add, add, "add_rms_norm, " + what);
    }
  }
}

TEST_F(GpuRows, AddRmsNormWithOneGradientOnly) {
  const at::Tensor x = gpu_randn({50, 256}), delta = gpu_randn({50, 256}), w = gpu_randn({256});
  const Op normed = [](const Tensors& t) { return Tensors{add_rms_norm(t[0], t[1], t[2], kEps).normed}; };
  expect_gradients({x, delta, w}, normed, normed, "normed only");
  const at::Tensor dout = gpu_randn({50, 256});
  const Op sum = [&](const Tensors& t) { return Tensors{add_rms_norm(t[0], t[1], w, kEps).sum}; };
  for (const at::Tensor& gradient : gradients({x, delta}, {dout}, sum)) EXPECT_TRUE(equal_bits(gradient, dout));
}

TEST_F(GpuRows, NormRowsAlone) {
  for (const int64_t width : {64, 520, 2048, 4096, 8200, 16'384}) {
    const at::Tensor x = gpu_randn({1037, width}, 2.0), delta = gpu_randn({1037, width}), w = gpu_randn({width});
    expect_rows_alone(
        {x, delta},
        [&](const Tensors& t) {
          const NormResult result = add_rms_norm(t[0], t[1], w, kEps);
          return Tensors{result.sum, result.normed, trireme::rms_norm(t[0], w, kEps)};
        },
        "width " + std::to_string(width));
  }
}

TEST_F(GpuRows, SwigluIsOneRoundingFromFloat64) {
  const at::NoGradGuard no_grad;
  for (const int64_t width : {8, 64, 72, 2048, 2056, 2568, 14'336, 25'600}) {
    const at::Tensor gate = gpu_randn({21, width}, 5.0), up = gpu_randn({21, width});
    const at::Tensor y = swiglu(gate, up);
    expect_rounded_once(y, swiglu(exact(gate), exact(up)), "width " + std::to_string(width));
    EXPECT_TRUE(equal_bits(swiglu_halves(at::cat({gate, up}, 1)), y)) << width;
  }
  const at::Tensor gate =
      at::tensor({-300.0, -90.0, -88.0, -87.0, 0.0, 88.0, 90.0, 300.0}).view({1, 8}).to(at::kBFloat16);
  const at::Tensor extreme = exact(swiglu(gate.to(gpu()), at::ones_like(gate).to(gpu())));
  EXPECT_LE((extreme - at::silu(exact(gate))).abs().max().item<double>(), 300.0 / 256);
  EXPECT_LE(extreme.narrow(1, 0, 5).abs().max().item<double>(), 1e-30);
  EXPECT_TRUE(extreme.isfinite().all().item<bool>());
}

TEST_F(GpuRows, SwigluGradientsAndRowsAlone) {
  const Op separate = [](const Tensors& t) { return Tensors{swiglu(t[0], t[1])}; };
  const Op halves = [](const Tensors& t) { return Tensors{swiglu_halves(t[0])}; };
  for (const int64_t width : {8, 72, 2056, 6144}) {
    const std::string what = "width " + std::to_string(width);
    expect_gradients({gpu_randn({35, width}, 3.0), gpu_randn({35, width})}, separate, separate, what);
    expect_gradients({gpu_randn({35, 2 * width}, 3.0)}, halves, halves, what + " in halves");
    expect_rows_alone({gpu_randn({1037, 2 * width}, 3.0)}, halves, what);
  }
}

TEST_F(GpuRows, EmbedCopiesRows) {
  const at::NoGradGuard no_grad;
  for (const int64_t width : {8, 2048, 2056, 4096}) {
    const at::Tensor weight = gpu_randn({301, width});
    const at::Tensor ids = at::randint(0, 301, {777}, at::TensorOptions().device(gpu()).dtype(at::kLong));
    EXPECT_TRUE(equal_bits(embed(weight, ids), weight.index_select(0, ids))) << width;
  }
  cuda::throw_on_bad_ids(gpu());
}

TEST_F(GpuRows, AnIdOutsideTheVocabularyIsNaNAndNamedLater) {
  const at::NoGradGuard no_grad;
  const at::Tensor weight = gpu_randn({10, 64});
  const at::Tensor y = embed(weight, at::tensor({3, 9, 10, 0}, at::kLong).to(gpu()));
  EXPECT_TRUE(equal_bits(y.narrow(0, 0, 2), weight.index_select(0, at::tensor({3, 9}, at::kLong).to(gpu()))));
  EXPECT_TRUE(y[2].isnan().all().item<bool>());
  EXPECT_TRUE(equal_bits(y[3], weight[0]));
  try {
    cuda::throw_on_bad_ids(gpu());
    FAIL() << "the id was not noted";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("token 2 of a batch has id 10"), std::string::npos) << error.what();
  }
  cuda::throw_on_bad_ids(gpu());  // forgotten
  EXPECT_TRUE(embed(weight, at::tensor({-1}, at::kLong).to(gpu())).isnan().all().item<bool>());
  EXPECT_THROW(cuda::throw_on_bad_ids(gpu()), Error);
}

// The parts of an embedding add up to the whole, padded rows are zeros, and each part gets its own rows' gradient.
TEST_F(GpuRows, PartsOfAnEmbedding) {
  const at::Tensor weight = gpu_randn({300, 256});
  const at::Tensor ids = at::randint(0, 300, {777}, at::TensorOptions().device(gpu()).dtype(at::kLong));
  const at::Tensor dout = gpu_randn({780, 256});
  const auto whole = [&](const Tensors& leaves) -> Tensors { return {embed(leaves[0], ids)}; };
  const at::Tensor expected = gradients({weight}, {dout.narrow(0, 0, 777)}, whole)[0];
  at::Tensor sum = at::zeros({780, 256}, weight.options());
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 104}, {104, 196}}) {
    const EmbeddingPart part{first, 300, 780};
    const at::Tensor own = weight.narrow(0, first, count);
    {
      const at::NoGradGuard no_grad;
      sum.add_(embed_part(own, ids, part));
    }
    const auto op = [&](const Tensors& leaves) -> Tensors { return {embed_part(leaves[0], ids, part)}; };
    EXPECT_TRUE(equal_bits(gradients({own}, {dout}, op)[0], expected.narrow(0, first, count))) << first;
  }
  EXPECT_TRUE(equal_bits(sum.narrow(0, 0, 777), weight.index_select(0, ids)));
  EXPECT_EQ(sum.narrow(0, 777, 3).abs().max().item<double>(), 0.0);
}

TEST_F(GpuRows, SumsInTheOrderOfRanks) {
  const at::Tensor parts = gpu_randn({3, 17, 264});
  at::Tensor expected = at::zeros({17, 264}, parts.options().dtype(at::kFloat));
  for (int64_t rank = 0; rank < 3; ++rank) expected.add_(parts[rank]);
  EXPECT_TRUE(equal_bits(cuda::ordered_sum(parts), expected.to(at::kBFloat16)));
}

// A rank may have none of a micro-batch.
TEST_F(GpuRows, ProductsOfNoRows) {
  const at::Tensor weight = gpu_randn({96, 64}), none = gpu_randn({0, 64});
  const auto op = [&](const Tensors& leaves) -> Tensors { return {trireme::linear(leaves[0], leaves[1], {})}; };
  const Tensors found = gradients({none, weight}, {gpu_randn({0, 96})}, op);
  EXPECT_EQ(found[0].sizes(), none.sizes());
  EXPECT_EQ(found[1].abs().max().item<double>(), 0.0);
}

TEST_F(GpuRows, EmbedGradient) {
  for (const int64_t width : {64, 520, 4096}) {
    const at::Tensor weight = gpu_randn({101, width});
    // Ids that never, once, and very often occur; more of one id than a block looks at at once.
    const at::Tensor ids = at::cat({at::randint(2, 90, {500}, at::kLong), at::full({300}, 7, at::kLong),
                                    at::tensor({0, 100}, at::kLong), at::full({64}, 95, at::kLong)})
                               .index_select(0, at::randperm(866));
    const at::Tensor on_gpu = ids.to(gpu());
    const std::string what = "width " + std::to_string(width);
    expect_gradients(
        {weight}, [&](const Tensors& t) { return Tensors{embed(t[0], on_gpu)}; },
        [&](const Tensors& t) { return Tensors{embed(t[0], ids)}; }, what);
    const at::Tensor dy = gpu_randn({866, width});
    const at::Tensor expected = at::zeros({101, width}, at::kDouble).index_add_(0, ids, exact(dy));
    for (const auto type : {at::kFloat, at::kBFloat16}) {  // straight into the gradient's buffer
      at::Tensor leaf = weight.clone().set_requires_grad(true);
      const at::Tensor before = gpu_randn({101, width}, 1.0, type);
      leaf.mutable_grad() = before.clone();
      const at::AutoGradMode record(true);
      torch::autograd::backward({embed(leaf, on_gpu)}, {dy});
      const at::NoGradGuard no_grad;
      expect_gradient(leaf.grad(), exact(before) + expected, what + " accumulated");
      EXPECT_TRUE(equal_bits(leaf.grad()[1], before[1])) << "a row that no token has was written";
      if (type == at::kFloat) {
        EXPECT_LE((exact(leaf.grad()) - exact(before) - expected).abs().max().item<double>(), 1e-3) << what;
      }
    }
  }
}

struct Heads {
  int64_t q, kv, dim;
};
const std::vector<Heads> kHeads = {{32, 8, 128}, {16, 8, 128},  {1, 1, 64},  {14, 2, 64},
                                   {64, 8, 128}, {40, 40, 128}, {8, 4, 256}, {5, 1, 256}};

struct QkvCase {
  QkvLayout layout;
  at::Tensor qkv, q_norm, k_norm, table, positions;

  QkvCase(const Heads& heads, int64_t tokens, bool norm) : layout{heads.q, heads.kv, heads.dim, 1e-5} {
    qkv = gpu_randn({tokens, (heads.q + 2 * heads.kv) * heads.dim}, 2.0);
    if (norm) q_norm = gpu_randn({heads.dim}), k_norm = gpu_randn({heads.dim});
    RopeOptions options;
    options.head_dim = heads.dim;
    table = rope_table(at::arange(3000, at::kLong), options).to(gpu());
    positions = at::randint(0, 3000, {tokens}, at::TensorOptions().device(gpu()).dtype(at::kLong));
  }
  std::string name() const {
    return std::to_string(layout.q_heads) + "/" + std::to_string(layout.kv_heads) + " heads of " +
           std::to_string(layout.head_dim) + (q_norm.defined() ? ", norms" : "");
  }
  Tensors inputs() const { return q_norm.defined() ? Tensors{qkv, q_norm, k_norm} : Tensors{qkv}; }
  // Of bfloat16 on the GPU, or float64 on the CPU.
  Tensors split(const Tensors& t) const {
    const at::Tensor none;
    const bool norm = t.size() > 1;
    const Qkv out =
        t[0].is_cuda() ? split_qkv(t[0], norm ? t[1] : none, norm ? t[2] : none, table, positions, layout)
                       : split_qkv(t[0], norm ? t[1] : none, norm ? t[2] : none, exact(table), positions.cpu(), layout);
    return {out.q, out.k, out.v};
  }
};

TEST_F(GpuRows, SplitQkvIsOneRoundingFromFloat64) {
  const at::NoGradGuard no_grad;
  for (const Heads& heads : kHeads) {
    for (const bool norm : {false, true}) {
      const QkvCase c(heads, 41, norm);
      const Tensors actual = c.split(c.inputs());
      Tensors exact_inputs;
      for (const at::Tensor& input : c.inputs()) exact_inputs.push_back(exact(input));
      const Tensors expected = c.split(exact_inputs);
      for (const size_t i : {0, 1})
        expect_rounded_once(actual[i], expected[i], c.name() + ", output " + std::to_string(i));
      EXPECT_TRUE(equal_bits(actual[2], expected[2].to(at::kBFloat16))) << c.name();
      const at::AutoGradMode record(true);  // may copy v; same bits
      const Tensors recorded = c.split(leaves_of(c.inputs()));
      for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(equal_bits(recorded[i].detach(), actual[i])) << c.name();
    }
  }
}

TEST_F(GpuRows, SplitQkvGradients) {
  for (const Heads& heads : kHeads) {
    for (const bool norm : {false, true}) {
      for (const int64_t tokens : {1, 50, 1037}) {
        const QkvCase c(heads, tokens, norm);
        const Op split = [&](const Tensors& t) { return c.split(t); };
        expect_gradients(c.inputs(), split, split, c.name() + ", " + std::to_string(tokens) + " tokens");
      }
    }
  }
}

TEST_F(GpuRows, SplitQkvWhereOnlySomeOutputsAreUsed) {
  const QkvCase c({4, 2, 64}, 30, true);
  for (size_t i = 0; i < 3; ++i) {
    const Op one = [&, i](const Tensors& t) { return Tensors{c.split(t)[i]}; };
    const at::AutoGradMode record(true);
    const Tensors leaves = leaves_of({c.qkv}), exact_leaves = leaves_of({exact(c.qkv)});
    const at::Tensor dout = gpu_randn({30, i == 0 ? 4 : 2, 64});
    const auto gradient = [&](const Tensors& leaf, const at::Tensor& q_norm, const at::Tensor& k_norm,
                              const at::Tensor& d) {
      return torch::autograd::grad(one({leaf[0], q_norm, k_norm}), leaf, {d})[0];
    };
    expect_gradient(gradient(leaves, c.q_norm, c.k_norm, dout),
                    gradient(exact_leaves, exact(c.q_norm), exact(c.k_norm), exact(dout)),
                    "output " + std::to_string(i));
  }
}

TEST_F(GpuRows, SplitQkvRowsAlone) {
  for (const Heads& heads : kHeads) {
    const QkvCase c(heads, 1037, true);
    expect_rows_alone(
        {c.qkv, c.positions},
        [&](const Tensors& t) {
          const Qkv out = split_qkv(t[0], c.q_norm, c.k_norm, c.table, t[1], c.layout);
          return Tensors{out.q, out.k, out.v};
        },
        c.name());
  }
}

TEST_F(GpuRows, SplitQkvCachedHasTheBitsOfSplitQkv) {
  const at::NoGradGuard no_grad;
  for (const Heads& heads : kHeads) {
    for (const bool norm : {false, true}) {
      const int64_t tokens = 67, capacity = 200;
      const QkvCase c(heads, tokens, norm);
      const Tensors parts = c.split(c.inputs());
      const at::Tensor arena_k = gpu_randn({capacity, heads.kv, heads.dim}), arena_v = gpu_randn(arena_k.sizes());
      at::Tensor expected_k = arena_k.clone(), expected_v = arena_v.clone();
      CachePlan plan;
      plan.token_rows = at::randperm(capacity).narrow(0, 0, tokens).to(gpu());
      plan.token_rows[5] = -1;
      const at::Tensor stored = plan.token_rows.ge(0).nonzero().flatten();
      const at::Tensor rows = plan.token_rows.index_select(0, stored);
      expected_k.index_copy_(0, rows, parts[1].index_select(0, stored));
      expected_v.index_copy_(0, rows, parts[2].index_select(0, stored));
      const at::Tensor q =
          split_qkv_cached(c.qkv, c.q_norm, c.k_norm, c.table, c.positions, c.layout, arena_k, arena_v, plan);
      EXPECT_TRUE(equal_bits(q, parts[0])) << c.name();
      EXPECT_TRUE(equal_bits(arena_k, expected_k)) << c.name();
      EXPECT_TRUE(equal_bits(arena_v, expected_v)) << c.name();
    }
  }
}

TEST_F(GpuRows, APositionOutsideTheTableIsNaN) {
  const at::NoGradGuard no_grad;
  QkvCase c({2, 1, 64}, 4, false);
  c.positions = at::tensor({0, 3000, -1, 2999}, at::kLong).to(gpu());
  const Tensors parts = c.split(c.inputs());
  for (const size_t i : {0, 1}) {
    const at::Tensor nan = parts[i].isnan().flatten(1);
    EXPECT_TRUE(equal_bits(nan.any(1), at::tensor({0, 1, 1, 0}).to(at::kBool)));
    EXPECT_TRUE(equal_bits(nan.all(1), at::tensor({0, 1, 1, 0}).to(at::kBool)));
  }
}

TEST_F(GpuRows, AGraphReplaysOverNewContents) {
  const at::NoGradGuard no_grad;
  const QkvCase c({4, 2, 64}, 16, true);
  const at::Tensor weight = gpu_randn({50, 512}), norm = gpu_randn({512}), delta = gpu_randn({16, 512});
  const at::Tensor ids = at::zeros({16}, at::TensorOptions().device(gpu()).dtype(at::kLong));
  const at::Tensor arena_k = at::zeros({40, 2, 64}, weight.options()), arena_v = at::zeros_like(arena_k);
  CachePlan plan;
  plan.token_rows = at::arange(16, ids.options());
  const auto pass = [&] {
    const NormResult normed = add_rms_norm(embed(weight, ids), delta, norm, kEps);
    const at::Tensor q =
        split_qkv_cached(normed.normed, c.q_norm, c.k_norm, c.table, c.positions, c.layout, arena_k, arena_v, plan);
    return Tensors{normed.sum, q, swiglu_halves(normed.normed)};
  };
  at::cuda::CUDAGraph graph;
  Tensors captured;
  {
    const c10::cuda::CUDAStreamGuard stream(c10::cuda::getStreamFromPool());
    c10::cuda::device_synchronize();
    pass();
    c10::cuda::device_synchronize();
    graph.capture_begin();
    captured = pass();
    graph.capture_end();
    for (const int64_t turn : {1, 2, 3}) {
      ids.random_(0, 50);
      c.positions.random_(0, 3000);
      plan.token_rows.copy_(at::randperm(40).narrow(0, 0, 16).to(gpu()));
      delta.normal_();
      arena_k.zero_(), arena_v.zero_();
      graph.replay();
      const at::Tensor replayed_k = arena_k.clone(), replayed_v = arena_v.clone();
      arena_k.zero_(), arena_v.zero_();
      const Tensors eager = pass();
      for (size_t i = 0; i < eager.size(); ++i) EXPECT_TRUE(equal_bits(captured[i], eager[i])) << turn << " " << i;
      EXPECT_TRUE(equal_bits(replayed_k, arena_k)) << turn;
      EXPECT_TRUE(equal_bits(replayed_v, arena_v)) << turn;
    }
    c10::cuda::device_synchronize();
  }
}

TEST_F(GpuRows, ArenaMovesAreThoseOfTheCpu) {
  const at::NoGradGuard no_grad;
  ModelConfig config;
  config.num_layers = 3;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  KvArena arena(config, 3000, at::kBFloat16, gpu()), expected(config, 3000, at::kBFloat16, at::kCPU);
  for (int64_t layer = 0; layer < 3; ++layer) {
    arena.keys(layer).normal_();
    arena.values(layer).normal_();
    expected.keys(layer).copy_(arena.keys(layer));
    expected.values(layer).copy_(arena.values(layer));
  }
  std::vector<std::vector<RowMove>> calls = {
      {{0, 1500, 1000}, {7, 2600, 1}, {20, 2700, 33}, {0, 2800, 0}, {5, 5, 10}},  // one launch
      {{100, 150, 100}},                                                          // overlaps itself
      {{0, 400, 50}, {430, 600, 40}},                            // the second reads what the first wrote
      {{700, 800, 10}, {710, 805, 10}},                          // both write some rows
      {{1000, 1100, 100}, {1200, 1300, 100}, {1250, 1400, 50}},  // next to each other only
      {},
  };
  // Compactions: extents in a row go down, then others up, by less than their lengths.
  for (const int64_t gap : {1, 31, 32, 33, 70}) {
    std::vector<RowMove> down, up;
    for (int64_t i = 0; i < 12; ++i) down.push_back({(i + 1) * gap + i * 100, i * 101, 100});
    for (int64_t i = 11; i >= 0; --i) up.push_back({i * 101, (i + 1) * gap + i * 100, 100});
    calls.push_back(down);
    calls.push_back(up);
  }
  for (size_t i = 0; i < calls.size(); ++i) {
    arena.move_all(calls[i]);
    expected.move_all(calls[i]);
    for (int64_t layer = 0; layer < 3; ++layer) {
      EXPECT_TRUE(equal_bits(arena.keys(layer), expected.keys(layer))) << "call " << i << ", layer " << layer;
      EXPECT_TRUE(equal_bits(arena.values(layer), expected.values(layer))) << "call " << i << ", layer " << layer;
    }
  }
  EXPECT_THROW(arena.move_all({{0, 1, 1}, {2999, 0, 2}}), Error);
}

TEST_F(GpuRows, UnsupportedShapesAndDtypesAreNamed) {
  const auto message = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  const auto expect = [&](const std::function<void()>& call, const std::string& part) {
    const std::string text = message(call);
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  const at::Tensor none;
  const auto floats = at::TensorOptions().device(gpu());
  expect(
      [&] {
        trireme::rms_norm(at::ones({2, 64}, floats), at::ones({64}, floats), kEps);
      },
      "rms_norm has no implementation for cuda:0 Float");
  expect([&] { trireme::rms_norm(gpu_randn({2, 60}), gpu_randn({60}), kEps); }, "not 60");
  expect([&] { add_rms_norm(gpu_randn({2, 16'392}), gpu_randn({2, 16'392}), gpu_randn({16'392}), kEps); }, "not 16392");
  expect([&] { swiglu_halves(gpu_randn({2, 24})); }, "not 12");
  expect([&] { embed(gpu_randn({3, 12}), at::zeros({1}, floats.dtype(at::kLong))); }, "not 12");
  expect([&] { rope(gpu_randn({2, 1, 64}), at::ones({2, 2, 32}, floats)); }, "rope has no implementation for cuda:0");
  const QkvLayout layout{1, 1, 80, 1e-6};
  expect(
      [&] {
        split_qkv(gpu_randn({2, 240}), none, none, at::ones({4, 2, 40}, floats),
                  at::zeros({2}, floats.dtype(at::kLong)), layout);
      },
      "head_dim 64, 128 and 256, not 80");
}

}  // namespace
}  // namespace trireme
