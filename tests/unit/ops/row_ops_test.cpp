#include "base/error.h"
#include "tests/unit/ops/testing.h"
#include "trainer/ops/cpu_kernels.h"
#include "trainer/ops/ops.h"

namespace trireme {
namespace {

using testing::expect_matches;
using testing::random;
using testing::random_ids;
using testing::relative_error;
using testing::same_bits;
using Tensors = std::vector<at::Tensor>;

double tolerance(at::ScalarType type) { return type == at::kDouble ? 1e-11 : 2e-6; }

TEST(Philox, KnownAnswers) {
  using Counter = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Counter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t all = 0xffffffff;
  EXPECT_EQ(philox4x32({all, all, all, all}, {all, all}), (Counter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Counter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, MomentsOfUniformAndNormal) {
  double sum = 0, squares = 0, mean = 0;
  constexpr int kCount = 20000;
  for (uint64_t i = 0; i < kCount; ++i) {
    const double u = philox_uniform(1, 2, i), z = philox_normal(3, 4, i);
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    mean += u / kCount, sum += z / kCount, squares += z * z / kCount;
  }
  EXPECT_NEAR(mean, 0.5, 0.01);
  EXPECT_NEAR(sum, 0.0, 0.03);
  EXPECT_NEAR(squares, 1.0, 0.04);
  EXPECT_NE(philox_uniform(1, 2, 3), philox_uniform(1, 3, 2));
  EXPECT_NE(philox_uniform(1, 2, 3), philox_uniform(2, 2, 3));
  EXPECT_NE(philox_uniform(1, 2, 3, 0), philox_uniform(1, 2, 3, 1));
}

class BothTypes : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Ops, BothTypes, ::testing::Values(at::kDouble, at::kFloat));

TEST_P(BothTypes, LinearMatchesLibrary) {
  const auto type = GetParam();
  for (const auto& [m, n, k] : {std::tuple<int, int, int>{1, 5, 7}, {3, 33, 16}, {37, 70, 50}, {130, 64, 128}}) {
    expect_matches(
        {random({m, k}, 1, type), random({n, k}, 2, type), random({n}, 3, type)},
        [](const Tensors& t) { return trireme::linear(t[0], t[1], t[2]); },
        [](const Tensors& t) { return at::linear(t[0], t[1], t[2]); }, tolerance(type));
    expect_matches(
        {random({m, k}, 1, type), random({n, k}, 2, type)},
        [](const Tensors& t) { return trireme::linear(t[0], t[1], at::Tensor()); },
        [](const Tensors& t) { return at::linear(t[0], t[1]); }, tolerance(type));
  }
}

TEST_P(BothTypes, RmsNormMatchesComposition) {
  const auto type = GetParam();
  for (const int width : {5, 16, 64, 100}) {
    expect_matches(
        {random({300, width}, 1, type), random({width}, 2, type)},
        [](const Tensors& t) { return rms_norm(t[0], t[1], 1e-5); },
        [](const Tensors& t) { return t[0] * at::rsqrt(t[0].square().mean(-1, true) + 1e-5) * t[1]; },
        tolerance(type) * 3);
  }
}

// Of padded rows the padding counts in no mean, and stays zero.
TEST_P(BothTypes, RmsNormOfPaddedRows) {
  const auto type = GetParam();
  constexpr int64_t kWidth = 24, kCounted = 19;
  const auto pad = [](const at::Tensor& x) { return at::constant_pad_nd(x, {0, kWidth - kCounted}); };
  const at::Tensor x = random({40, kCounted}, 1, type), delta = random({40, kCounted}, 2, type),
                   weight = random({kCounted}, 3, type), upstream = random({40, kCounted}, 4, type);
  const auto run = [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& w, const at::Tensor& dy,
                       int64_t counted) {
    Tensors leaves;
    for (const at::Tensor& t : {a, b, w}) leaves.push_back(t.clone().set_requires_grad(true));
    const NormResult result = add_rms_norm(leaves[0], leaves[1], leaves[2], 1e-5, counted);
    Tensors all = torch::autograd::grad({result.normed}, leaves, {dy});
    all.push_back(result.normed.detach());
    all.push_back(rms_norm(a, w, 1e-5, counted));
    return all;
  };
  const Tensors expected = run(x, delta, weight, upstream, 0);
  // What comes from behind may be anything there: weights of zero hold it back.
  const at::Tensor from_behind = at::cat({upstream, random({40, kWidth - kCounted}, 5, type)}, 1);
  const Tensors got = run(pad(x), pad(delta), pad(weight), from_behind, kCounted);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(same_bits(got[i], pad(expected[i]))) << i;
}

TEST_P(BothTypes, RmsNormOfHeads) {
  const auto type = GetParam();
  expect_matches(
      {random({9, 4, 24}, 1, type), random({24}, 2, type)}, [](const Tensors& t) { return rms_norm(t[0], t[1], 1e-6); },
      [](const Tensors& t) { return t[0] * at::rsqrt(t[0].square().mean(-1, true) + 1e-6) * t[1]; },
      tolerance(type) * 3);
}

TEST_P(BothTypes, SwigluMatchesComposition) {
  const auto type = GetParam();
  expect_matches(
      {random({41, 37}, 1, type, 4.0), random({41, 37}, 2, type)}, [](const Tensors& t) { return swiglu(t[0], t[1]); },
      [](const Tensors& t) { return at::silu(t[0]) * t[1]; }, tolerance(type));
}

TEST(Swiglu, ExtremeGates) {
  const at::Tensor gate = at::tensor({-200.0f, -90.0f, 0.0f, 90.0f, 200.0f}).view({1, 5});
  const at::Tensor y = swiglu(gate, at::ones({1, 5}));
  EXPECT_LE((y - at::silu(gate)).abs().max().item<float>(), 1e-30f);
}

TEST_P(BothTypes, EmbedMatchesIndexSelect) {
  const auto type = GetParam();
  const at::Tensor ids = at::cat({random_ids(50, 11, 5), at::tensor({3, 3, 3}, at::kLong)});
  expect_matches(
      {random({11, 19}, 1, type)}, [&](const Tensors& t) { return embed(t[0], ids); },
      [&](const Tensors& t) { return t[0].index_select(0, ids); }, tolerance(type));
}

TEST(Embed, NamesTheTokenOutsideTheVocabulary) {
  try {
    embed(at::zeros({10, 4}), at::tensor({1, 2, 10}, at::kLong));
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("token 2 has id 10"), std::string::npos) << error.what();
  }
}

at::Tensor rotate_reference(const at::Tensor& x, const at::Tensor& table) {
  const at::Tensor cos = table.select(1, 0).repeat({1, 2}).unsqueeze(1),
                   sin = table.select(1, 1).repeat({1, 2}).unsqueeze(1);
  const auto halves = x.chunk(2, -1);
  return x * cos + at::cat({-halves[1], halves[0]}, -1) * sin;
}

TEST_P(BothTypes, RopeMatchesRotateHalf) {
  const auto type = GetParam();
  RopeOptions options;
  options.head_dim = 24;
  const at::Tensor table = rope_table(random_ids(31, 4000, 8), options, type);
  expect_matches(
      {random({31, 3, 24}, 1, type)}, [&](const Tensors& t) { return rope(t[0], table); },
      [&](const Tensors& t) { return rotate_reference(t[0], table); }, tolerance(type));
}

TEST(RopeTable, PlainAnglesAndPositionsAreIndependentOfTheBatch) {
  RopeOptions options;
  options.head_dim = 8;
  const at::Tensor positions = at::tensor({0, 1, 5, 77}, at::kLong);
  const at::Tensor table = rope_table(positions, options, at::kDouble);
  for (int64_t i = 0; i < 4; ++i) {
    const double angle = 77.0 / std::pow(10000.0, 2.0 * static_cast<double>(i) / 8.0);
    EXPECT_NEAR(table[3][0][i].item<double>(), std::cos(angle), 1e-5);
    EXPECT_NEAR(table[3][1][i].item<double>(), std::sin(angle), 1e-5);
  }
  const at::Tensor all = rope_table(at::arange(100, at::kLong), options);
  EXPECT_TRUE(same_bits(rope_table(positions, options), all.index_select(0, positions)));
}

TEST(RopeTable, Llama3ScalesLongWavesOnly) {
  RopeOptions plain;
  plain.head_dim = 64;
  plain.theta = 500000.0;
  RopeOptions scaled = plain;
  scaled.scaling = RopeOptions::Scaling::kLlama3;
  scaled.factor = 8.0;
  scaled.original_max_position = 8192;
  const at::Tensor one = at::tensor({1}, at::kLong);
  const at::Tensor a = rope_table(one, plain, at::kDouble), b = rope_table(one, scaled, at::kDouble);
  EXPECT_EQ(a[0][1][0].item<double>(), b[0][1][0].item<double>());                  // shortest wave untouched
  EXPECT_NEAR(a[0][1][31].item<double>() / b[0][1][31].item<double>(), 8.0, 1e-3);  // longest divided by the factor
}

TEST(RowOps, BitsDoNotDependOnTheBatch) {
  const at::NoGradGuard no_grad;
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor x = random({101, 70}, 1, type), w = random({70}, 2, type), up = random({101, 70}, 3, type);
    const at::Tensor normed = rms_norm(x, w, 1e-6), gated = swiglu(x, up);
    for (const int64_t from : {0, 1, 17, 100}) {
      for (const int64_t count : {1, 2, 33, 101}) {
        if (from + count > 101) continue;
        EXPECT_TRUE(same_bits(rms_norm(x.narrow(0, from, count), w, 1e-6), normed.narrow(0, from, count)));
        EXPECT_TRUE(
            same_bits(swiglu(x.narrow(0, from, count), up.narrow(0, from, count)), gated.narrow(0, from, count)));
      }
    }
  }
}

TEST(Linear, RowsAreExactByConstruction) {
  const std::vector<LinearShape> shapes = {{128, 128}, {128, 260}, {50, 33}, {512, 128}, {16, 7}, {1000, 64}};
  EXPECT_EQ(linear_mode(), LinearMode::kRows);
  EXPECT_TRUE(linear_rows_are_exact(shapes, at::kFloat));
  EXPECT_TRUE(linear_rows_are_exact(shapes, at::kBFloat16));
  EXPECT_TRUE(linear_rows_are_exact(shapes, at::kDouble));
}

TEST(Linear, ThreadsDoNotChangeBits) {
  const at::NoGradGuard no_grad;
  const int threads = at::get_num_threads();
  const at::Tensor x = random({90, 256}, 1), w = random({300, 256}, 2);
  at::set_num_threads(1);
  const at::Tensor one = trireme::linear(x, w, at::Tensor());
  at::set_num_threads(3);
  EXPECT_TRUE(same_bits(one, trireme::linear(x, w, at::Tensor())));
  at::set_num_threads(threads);
}

TEST(Linear, LibraryModeIsCheckedAndLeft) {
  const std::vector<LinearShape> shapes = {{64, 96}};
  set_linear_mode(LinearMode::kLibrary);
  const bool exact = linear_rows_are_exact(shapes, at::kFloat);
  EXPECT_EQ(choose_linear_mode(shapes, at::kFloat), exact ? LinearMode::kLibrary : LinearMode::kRows);
  const at::Tensor x = random({3, 64}, 1), w = random({96, 64}, 2);
  EXPECT_LE(relative_error(trireme::linear(x, w, at::Tensor()), at::linear(x, w)), 2e-6);
  set_linear_mode(LinearMode::kRows);
}

TEST(RowOps, BFloat16IsFloat32Rounded) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = random({20, 48}, 1, at::kBFloat16), w = random({30, 48}, 2, at::kBFloat16),
                   n = random({48}, 3, at::kBFloat16);
  EXPECT_TRUE(same_bits(trireme::linear(x, w, at::Tensor()),
                        trireme::linear(x.to(at::kFloat), w.to(at::kFloat), at::Tensor()).to(at::kBFloat16)));
  EXPECT_TRUE(same_bits(rms_norm(x, n, 1e-6), rms_norm(x.to(at::kFloat), n.to(at::kFloat), 1e-6).to(at::kBFloat16)));
}

TEST(RowOps, UnknownDtypeIsAClearError) {
  try {
    trireme::linear(at::zeros({2, 4}, at::kHalf), at::zeros({3, 4}, at::kHalf), at::Tensor());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    EXPECT_NE(std::string(error.what()).find("linear has no implementation for cpu Half"), std::string::npos)
        << error.what();
  }
}

#if defined(__x86_64__)
TEST(CpuKernels, Avx2AndAvx512GiveTheSameBits) {
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512bw")) {
    GTEST_SKIP() << "this machine has no AVX-512";
  }
  const CpuKernels<float>* tables[] = {&kernels_avx512(), &kernels_avx2()};
  for (const int64_t n : {1, 3, 16, 21, 50, 128}) {
    const at::Tensor x = random({n}, 1, at::kFloat, 3.0), w = random({n}, 2), z = random({n}, 3);
    std::vector<at::Tensor> results[2];
    for (int i = 0; i < 2; ++i) {
      const auto& k = *tables[i];
      const auto run = [&](auto f) {
        at::Tensor out = at::zeros({n}), extra = at::zeros({n});
        f(out.data_ptr<float>(), extra.data_ptr<float>());
        results[i].push_back(out);
        results[i].push_back(extra);
      };
      const float *px = x.data_ptr<float>(), *pw = w.data_ptr<float>(), *pz = z.data_ptr<float>();
      run([&](float* out, float* extra) { extra[0] = k.exp_sum(px, 0.5f, out, n); });
      run([&](float* out, float* extra) { extra[0] = k.rms_norm(px, pw, 1e-6f, out, n); });
      run([&](float* out, float* extra) { k.rms_norm_backward(px, pw, pz, 0.3f, out, extra, n); });
      run([&](float* out, float*) { k.swiglu(px, pw, out, n); });
      run([&](float* out, float* extra) { k.swiglu_backward(px, pw, pz, out, extra, n); });
      run([&](float* out, float*) { k.gated_line(px, pw, 0.1f, 0.7f, out, n); });
      run([&](float* out, float*) { out[0] = k.dot(px, pw, n), out[0] += k.max(px, n); });
      run([&](float* out, float*) { k.rotate(px, pw, pz, 1.0f, out, n / 2); });
      at::Tensor product = at::zeros({5, 5});
      const at::Tensor a = random({5, n}, 7), b = random({5, n}, 8);
      k.gemm_nt(a.data_ptr<float>(), n, 5, b.data_ptr<float>(), n, 5, n, nullptr, product.data_ptr<float>(), 5);
      results[i].push_back(product);
    }
    for (size_t j = 0; j < results[0].size(); ++j)
      EXPECT_TRUE(same_bits(results[0][j], results[1][j])) << "n " << n << " kernel result " << j;
  }
}

TEST(CpuKernels, ExpIsAccurateAndHandlesSpecialNumbers) {
  std::vector<float> x;
  for (float value = -87.0f; value < 88.0f; value += 0.0437f) x.push_back(value);
  x.insert(x.end(), {-INFINITY, -1e30f, -100.0f, INFINITY, NAN});
  std::vector<float> e(x.size());
  cpu_kernels<float>().exp_sum(x.data(), 0.0f, e.data(), static_cast<int64_t>(x.size()));
  const size_t plain = x.size() - 5;
  for (size_t i = 0; i < plain; ++i) EXPECT_NEAR(e[i] / std::exp(static_cast<double>(x[i])), 1.0, 2.5e-7) << x[i];
  EXPECT_EQ(e[plain], 0.0f);
  EXPECT_EQ(e[plain + 1], 0.0f);
  EXPECT_EQ(e[plain + 2], 0.0f);
  EXPECT_EQ(e[plain + 3], INFINITY);
  EXPECT_TRUE(std::isnan(e[plain + 4]));
}
#endif

// What is given again is not kept, is asked for once, and changes no bit of a gradient.
TEST(Linear, InputGivenAgainIsNotKept) {
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const at::Tensor source = testing::random({9, 12}, 1, type), weight = testing::random({5, 12}, 2, type);
    const at::Tensor dy = testing::random({9, 5}, 3, type);
    int calls = 0;
    std::vector<std::vector<at::Tensor>> gradients;
    for (const bool again : {false, true}) {
      const at::Tensor leaf = source.detach().clone().set_requires_grad(true);
      const at::Tensor w = weight.detach().clone().set_requires_grad(true);
      at::Tensor x = leaf * 2;
      const size_t before = x.use_count();
      const at::Tensor y = again ? linear_again(x, w, {},
                                                [&] {
                                                  ++calls;
                                                  return source * 2;
                                                })
                                 : trireme::linear(x, w, {});
      EXPECT_EQ(x.use_count() > before, !again);
      EXPECT_EQ(calls, 0);
      gradients.push_back(torch::autograd::grad({y}, {leaf, w}, {dy}));
    }
    EXPECT_EQ(calls, 1);
    for (size_t i = 0; i < 2; ++i) EXPECT_TRUE(testing::same_bits(gradients[0][i], gradients[1][i]));
  }
}

}  // namespace
}  // namespace trireme
