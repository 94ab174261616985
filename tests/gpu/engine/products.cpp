// Products of any number of rows by the library: exact with the workspace that the trainer gives it, and right.
#include <algorithm>
#include <optional>

#include "tests/gpu/engine/models.h"
#include "trainer/ops/cuda/gemm/linear.h"

namespace trireme::gpu {
namespace {

TEST(Linear, TheStartUpTestCoversBiasesAndTheRowsOfAMicroBatch) {
  const at::Device device = choose_device("cuda", 0);
  ModelConfig config = config_of(ModelFamily::kQwen2);
  config.vocab_size += 5;
  const std::vector<LinearShape> shapes = config.linear_shapes();
  EXPECT_TRUE(shapes[0].bias);
  EXPECT_TRUE(shapes.back().head);
  for (const int64_t rows : {0, 5000, 16384, 40001})
    EXPECT_TRUE(linear_rows_are_exact(shapes, at::kBFloat16, device, rows)) << rows;
}

// The bits hold because the library may not split sums: with its usual workspace they do not.
TEST(Linear, TheDefaultWorkspaceIsNotExact) {
  const at::Device device = choose_device("cuda", 0);
  const std::vector<LinearShape> shapes = {{4096, 4096}, {14336, 4096}, {2048, 6144}};
  const int64_t limit = cuda::own_rows_limit();
  cuda::set_own_rows_limit(0);  // the library alone
  EXPECT_TRUE(linear_rows_are_exact(shapes, at::kBFloat16, device));
  const size_t bytes = cuda::forward_workspace_bytes();
  cuda::set_forward_workspace_bytes(size_t{32} << 20);
  EXPECT_FALSE(linear_rows_are_exact(shapes, at::kBFloat16, device));
  cuda::set_forward_workspace_bytes(bytes);
  EXPECT_TRUE(linear_rows_are_exact(shapes, at::kBFloat16, device));
  cuda::set_own_rows_limit(limit);
}

// Small layers too, whose sums are short: every number of rows that a batch may have.
TEST(Linear, EveryRowCountGivesTheSameBits) {
  const at::NoGradGuard no_grad;
  const at::Device device = choose_device("cuda", 0);
  for (const auto& [in, out] : std::vector<std::array<int64_t, 2>>{{256, 264},
                                                                   {256, 512},
                                                                   {256, 1024},
                                                                   {512, 256},
                                                                   {768, 259},
                                                                   {256, 259},
                                                                   {512, 5},
                                                                   {768, 264},
                                                                   {768, 768},
                                                                   {768, 2304},
                                                                   {768, 4096},
                                                                   {2048, 768},
                                                                   {1024, 4096},
                                                                   {3072, 1024},
                                                                   {2048, 2048}}) {
    const auto random = [&](std::vector<int64_t> shape) {
      return at::randn(shape, at::TensorOptions().device(device)).to(at::kBFloat16);
    };
    const at::Tensor x = random({4096, in}), weight = random({out, in});
    const at::Tensor whole = trireme::linear(x, weight, {}).view(at::kShort);
    at::Tensor bad = at::zeros({}, at::TensorOptions().dtype(at::kLong).device(device));
    for (int64_t rows = 1; rows <= 4096; rows += rows < 700 ? 1 : 61) {
      const int64_t from = (rows * 37) % (4097 - rows);
      std::optional<cuda::DecodeScope> decoding;  // as a decode step computes it
      if (rows <= 256 && rows % 2 == 0) decoding.emplace();
      bad +=
          (trireme::linear(x.narrow(0, from, rows), weight, {}).view(at::kShort) != whole.narrow(0, from, rows)).sum();
    }
    EXPECT_EQ(bad.item<int64_t>(), 0) << in << " -> " << out;
  }
}

TEST(Linear, ForwardAndBackwardAreThoseOfFloat32) {
  const at::Device device = choose_device("cuda", 0);
  for (const auto& [rows, in, out] :
       std::vector<std::array<int64_t, 3>>{{1, 64, 128}, {37, 512, 1536}, {600, 1024, 200}}) {
    const auto random = [&](std::vector<int64_t> shape) {
      return at::randn(shape, at::TensorOptions().device(device)).to(at::kBFloat16);
    };
    at::Tensor x = random({rows, in}).set_requires_grad(true), w = random({out, in}).set_requires_grad(true),
               b = random({out}).set_requires_grad(true);
    const at::Tensor dy = random({rows, out});
    const at::Tensor y = trireme::linear(x, w, b);
    y.backward(dy);
    const auto wide = [](const at::Tensor& t) { return t.detach().to(at::kDouble); };
    const auto near = [&](const at::Tensor& got, const at::Tensor& want, const char* name) {
      EXPECT_LE(((wide(got) - want).abs().max() / want.abs().max()).item<double>(), 5e-3)
          << name << " of " << rows << " x " << in << " x " << out;
    };
    near(y, wide(x).mm(wide(w).t()) + wide(b), "y");
    near(x.grad(), wide(dy).mm(wide(w)), "dx");
    near(w.grad(), wide(dy).t().mm(wide(x)), "dw");
    near(b.grad(), wide(dy).sum(0), "db");
    const at::Tensor first = w.grad().clone();  // a second backward adds to the same buffer
    trireme::linear(x, w, b).backward(dy);
    near(w.grad(), 2 * wide(first), "accumulated dw");
  }
}

}  // namespace
}  // namespace trireme::gpu
