// On a GPU: the fused optimizer step against the CPU's, its sum of squares against float64, and that neither buckets
// nor repetition change a bit.
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAStream.h>

#include <cmath>

#include "base/error.h"
#include "base/fs.h"
#include "tests/gpu/device.h"
#include "tests/unit/model/tiny.h"
#include "trainer/model/model.h"
#include "trainer/model/safetensors.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/optimizer/cuda/adamw.h"

namespace trireme {
namespace {

using testing::equal_bits;
using testing::gpu;
using testing::gpu_randn;
using testing::seed_gpu;

class AdamWOnGpu : public testing::GpuTest {};

ModelConfig small() {
  return test::tiny_config(
      {.vocab = 512, .hidden = 64, .intermediate = 96, .layers = 2, .head_dim = 16, .positions = 64});
}

AdamWOptions options(int64_t bucket, bool decay_all) {
  AdamWOptions o;
  o.bucket_elements = bucket;
  o.decay_all = decay_all;
  return o;
}

struct Types {
  at::ScalarType weights, gradients;
};

// A model on the GPU and one on the CPU in float32 with the same numbers.
struct Pair {
  Model on_gpu, on_cpu;
  explicit Pair(Types types) : on_gpu(small(), model_options(types)), on_cpu(small(), {}) {
    const c10::NoGradGuard no_grad;
    init_parameters(on_cpu, 3);
    const at::Tensor weights = on_cpu.flat_parameters().to(types.weights);
    on_gpu.flat_parameters().detach().copy_(weights);
    on_cpu.flat_parameters().detach().copy_(weights);
  }
  static ModelOptions model_options(Types types) {
    ModelOptions o;
    o.dtype = types.weights;
    o.gradient_dtype = types.gradients;
    o.device = gpu();
    return o;
  }
  // Values of very different size, zero in the gaps.
  void fill_gradients(int step) {
    const c10::NoGradGuard no_grad;
    for (const Parameter& p : on_cpu.parameters()) {
      const at::Tensor x = at::arange(p.size, at::kFloat).mul(0.37).add(static_cast<double>(step * 7 + p.offset % 101));
      const at::Tensor g = (x.sin() * (x * 0.013).cos().pow(5)).to(on_gpu.flat_gradients().scalar_type());
      on_cpu.flat_gradients().narrow(0, p.offset, p.size).copy_(g);
      on_gpu.flat_gradients().narrow(0, p.offset, p.size).copy_(g);
    }
  }
};

// master, exp_avg and exp_avg_sq of the parameters, without the padding of the last bucket.
std::vector<at::Tensor> state_of(const DistributedAdamW& optimizer, int64_t elements) {
  const TemporaryDirectory dir;
  optimizer.save(dir.path());
  const SafetensorsFile file(dir.path() / "rank_00000.safetensors");
  std::vector<at::Tensor> out;
  for (const char* name : {"master", "exp_avg", "exp_avg_sq"}) {
    out.push_back(file.tensor(name).narrow(0, 0, elements).clone());
  }
  return out;
}

double relative_error(const at::Tensor& actual, const at::Tensor& expected, double floor) {
  const at::Tensor a = actual.to(at::kDouble), e = expected.to(at::kDouble);
  return ((a - e).abs() / e.abs().clamp_min(floor)).max().item<double>();
}

TEST_F(AdamWOnGpu, FiveStepsMatchTheCpu) {
  const Types all_types[] = {{at::kBFloat16, at::kBFloat16}, {at::kBFloat16, at::kFloat}, {at::kFloat, at::kFloat}};
  for (const Types types : all_types) {
    for (const int64_t bucket : {int64_t{1} << 24, int64_t{4096}, int64_t{1003}}) {
      for (const bool decay_all : {true, false}) {
        Pair pair(types);
        Communicator alone;
        DistributedAdamW ours(pair.on_gpu, alone, options(bucket, decay_all));
        DistributedAdamW cpu(pair.on_cpu, alone, options(bucket, decay_all));
        for (int t = 1; t <= 5; ++t) {
          pair.fill_gradients(t);
          const double clip = t == 2 ? 0.0 : t == 3 ? 1e6 : 1.0;
          const OptimizerStep a = ours.step(0.01, 0.1, clip), e = cpu.step(0.01, 0.1, clip);
          EXPECT_NEAR(a.grad_norm, e.grad_norm, e.grad_norm * 1e-9);
          EXPECT_NEAR(a.clip_factor, e.clip_factor, 1e-9);
          EXPECT_EQ(pair.on_gpu.flat_gradients().abs().max().item<double>(), 0) << "gradients are consumed";
        }
        const int64_t elements = pair.on_cpu.flat_parameters().numel();
        const auto a = state_of(ours, elements), e = state_of(cpu, elements);
        const double floors[] = {5e-2, 2e-2, 1e-6};  // of the size of the values themselves
        for (size_t i = 0; i < 3; ++i) EXPECT_LE(relative_error(a[i], e[i], floors[i]), 1e-6) << i << " " << bucket;
        EXPECT_TRUE(equal_bits(pair.on_gpu.flat_parameters(), a[0].to(types.weights)))
            << "the live weights are the rounded master weights";
      }
    }
  }
}

TEST_F(AdamWOnGpu, NeitherBucketsNorRepetitionChangeABit) {
  at::Tensor expected;
  std::vector<at::Tensor> expected_state;
  double expected_norm = 0;
  for (const int64_t bucket : {int64_t{1} << 24, int64_t{1} << 24, int64_t{4096}, int64_t{1003}, int64_t{777}}) {
    Pair pair({at::kBFloat16, at::kBFloat16});
    Communicator alone;
    DistributedAdamW optimizer(pair.on_gpu, alone, options(bucket, false));
    double norm = 0;
    for (int t = 1; t <= 3; ++t) {
      pair.fill_gradients(t);
      norm = optimizer.step(0.01, 0.1, 1.0).grad_norm;
    }
    const auto state = state_of(optimizer, pair.on_cpu.flat_parameters().numel());
    if (!expected.defined()) {
      expected = pair.on_gpu.flat_parameters().clone();
      expected_state = state;
      expected_norm = norm;
    }
    EXPECT_TRUE(equal_bits(pair.on_gpu.flat_parameters(), expected)) << bucket;
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(equal_bits(state[i], expected_state[i])) << i << " " << bucket;
    EXPECT_EQ(norm, expected_norm) << bucket;
  }
}

TEST_F(AdamWOnGpu, NonFiniteGradientNamesTheParameterAndChangesNothing) {
  for (const double poison : {std::nan(""), HUGE_VAL}) {
    Pair pair({at::kBFloat16, at::kBFloat16});
    Communicator alone;
    DistributedAdamW optimizer(pair.on_gpu, alone, options(4096, true));
    const at::Tensor before = pair.on_gpu.flat_parameters().clone();
    const auto state = state_of(optimizer, before.numel());
    pair.fill_gradients(1);
    const Parameter* victim = pair.on_gpu.find("model.layers.1.mlp.down_proj.weight");
    ASSERT_NE(victim, nullptr);
    pair.on_gpu.flat_gradients()[victim->offset + 3] = poison;
    try {
      optimizer.step(0.01, 0.1, 1);
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(victim->name), std::string::npos) << error.what();
    }
    EXPECT_TRUE(equal_bits(pair.on_gpu.flat_parameters(), before));
    const auto after = state_of(optimizer, before.numel());
    for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(equal_bits(after[i], state[i]));
    EXPECT_EQ(optimizer.steps_done(), 0);
  }
}

TEST_F(AdamWOnGpu, SavedStateContinuesBitForBitInOtherBuckets) {
  const TemporaryDirectory dir;
  Communicator alone;
  const Types types = {at::kBFloat16, at::kBFloat16};
  Pair whole(types), first(types), second(types);
  DistributedAdamW one(whole.on_gpu, alone, options(1 << 24, true)), two(first.on_gpu, alone, options(1 << 24, true));
  for (int t = 1; t <= 2; ++t) {
    whole.fill_gradients(t);
    one.step(0.01, 0.1, 1);
    first.fill_gradients(t);
    two.step(0.01, 0.1, 1);
  }
  two.save(dir.path());
  DistributedAdamW three(second.on_gpu, alone, options(5000, true));
  three.load(dir.path());
  EXPECT_TRUE(equal_bits(first.on_gpu.flat_parameters(), second.on_gpu.flat_parameters()));
  whole.fill_gradients(3);
  one.step(0.01, 0.1, 1);
  second.fill_gradients(3);
  three.step(0.01, 0.1, 1);
  EXPECT_TRUE(equal_bits(whole.on_gpu.flat_parameters(), second.on_gpu.flat_parameters()));
}

TEST_F(AdamWOnGpu, SquaresAreSummedInFloat64InOneOrder) {
  seed_gpu(1);
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    for (const int64_t n : {1, 3, 1024, 32767, 32768, 32769, 5'000'003}) {
      const at::Tensor values = gpu_randn({n + 1}, 3.0, type);
      values[0] = 1e25;  // its square is no float
      const auto sum = [&](const at::Tensor& x) {
        const int64_t blocks = cuda::squares_blocks(x.numel());
        const at::Tensor out = at::full({blocks + 1}, std::nan(""), x.options().dtype(at::kDouble));
        double* data = out.mutable_data_ptr<double>();
        cuda::sum_of_squares(x.const_data_ptr(), type == at::kFloat ? cuda::Element::kFloat : cuda::Element::kBFloat16,
                             x.numel(), data, data + blocks, c10::cuda::getCurrentCUDAStream());
        return out[blocks].item<double>();
      };
      const auto expected = [](const at::Tensor& x) { return x.cpu().to(at::kDouble).square().sum().item<double>(); };
      const at::Tensor head = values.narrow(0, 0, n), tail = values.narrow(0, 1, n);  // tail: off the vector size
      EXPECT_NEAR(sum(head), expected(head), expected(head) * 1e-12) << n;
      EXPECT_NEAR(sum(tail), expected(tail), expected(tail) * 1e-12) << n;
      EXPECT_EQ(sum(tail), sum(tail.clone())) << n << ": alignment changes the loads, not the order";
    }
  }
}

}  // namespace
}  // namespace trireme
