// A model split over tensor ranks against the whole one: slices, hidden states, log-probs, gradients.
#include <ATen/ATen.h>

#include <set>

#include "base/fs.h"
#include "base/text.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/model/model.h"
#include "trainer/model/split_linear.h"
#include "trainer/ops/linear.h"
#include "trainer/parallel/exchange.h"

namespace trireme {
namespace {

using testing::random_tokens;
using testing::same_bits;

using testing::eight_heads;
using testing::fill;
using testing::part_of;
using testing::split_options;
using testing::sum_over_tensor_ranks;

Layout tensor_parallel(int64_t tp) {
  Layout layout;
  layout.tp = tp;
  return layout;
}

// 26 rows, or 40 with two responses behind a shared prompt: no multiple of 4 in one case.
PackedBatch some_batch(bool shared) {
  if (!shared) return PackedBatch::from_sequences({random_tokens(17, 1), random_tokens(9, 2)});
  PackedBatch batch = PackedBatch::from_sequences({random_tokens(20, 1), random_tokens(11, 2), random_tokens(9, 3)});
  batch.prefix = {-1, 0, 0};
  for (const int64_t s : {1, 2}) {
    const int64_t begin = batch.starts[static_cast<size_t>(s)];
    batch.positions.narrow(0, begin, batch.starts[static_cast<size_t>(s) + 1] - begin).add_(20);
  }
  return batch;
}

struct Result {
  at::Tensor hidden, logprobs;
};

// Every target counts, each with another weight.
Result forward_and_backward(Model& model, const PackedBatch& batch, const LogprobOptions& options) {
  const at::Tensor hidden = model.forward(batch);
  const at::Tensor logprobs = model.logprobs(hidden, batch.ids.roll(1), options);
  (logprobs * at::linspace(-1, 2, logprobs.size(0))).sum().backward();
  return {hidden.detach(), logprobs.detach()};
}

void expect_near(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  if (wanted.numel() == 0) return;
  const double largest = wanted.abs().max().item<double>();
  EXPECT_LE((got - wanted).abs().max().item<double>(), 1e-5 * std::max(largest, 1e-3)) << what;
}

class Split : public ::testing::TestWithParam<std::tuple<ModelFamily, bool, int>> {};
INSTANTIATE_TEST_SUITE_P(
    TensorParallel, Split,
    ::testing::Values(std::tuple{ModelFamily::kLlama, false, 2}, std::tuple{ModelFamily::kLlama, false, 4},
                      std::tuple{ModelFamily::kQwen2, false, 4}, std::tuple{ModelFamily::kQwen3, true, 2},
                      std::tuple{ModelFamily::kQwen3, true, 4}, std::tuple{ModelFamily::kQwen3Moe, false, 2},
                      std::tuple{ModelFamily::kQwen3Moe, false, 4}, std::tuple{ModelFamily::kMixtral, false, 4}),
    [](const auto& info) {
      return std::string(to_string(std::get<0>(info.param))) + (std::get<1>(info.param) ? "_tied" : "") + "_tp" +
             std::to_string(std::get<2>(info.param));
    });

TEST_P(Split, SlicesAreDrawnAndReadAsTheWholeIs) {
  const auto [family, tied, tp] = GetParam();
  const ModelConfig config = eight_heads(family, tied);
  Model whole(config, {});
  fill(whole);
  TemporaryDirectory dir;
  save_model(whole, dir.path(), {});
  test::on_layout(tensor_parallel(tp), [&, &config = config](ParallelContext& context) {
    Model drawn(config, split_options(context, config)), read(config, split_options(context, config));
    fill(drawn);
    load_parameters(read, dir.path());
    for (const Model* model : {&drawn, &read}) {
      std::set<std::string> names;
      int64_t elements = 0;  // each lies once, frozen routers behind all others
      for (const Parameter& parameter : model->parameters()) {
        EXPECT_TRUE(names.insert(parameter.name).second) << parameter.name;
        EXPECT_GE(parameter.offset, elements) << parameter.name;
        elements = parameter.offset + parameter.size;
        EXPECT_TRUE(
            same_bits(parameter.tensor.detach(), part_of(parameter, whole.find(parameter.name)->tensor.detach())))
            << parameter.name;
      }
    }
  });
}

TEST_P(Split, GivesTheAnswerOfTheWhole) {
  const auto [family, tied, tp] = GetParam();
  const ModelConfig config = eight_heads(family, tied);
  for (const bool shared : {false, true}) {
    const PackedBatch batch = some_batch(shared);
    LogprobOptions sampling;
    sampling.temperature = 0.7;
    if (shared) {
      sampling.top_k = 40;
      sampling.allow_filtered = true;
    }
    ModelOptions trained;
    trained.freeze_router = false;
    Model whole(config, trained);
    fill(whole);
    // A filtered target has log-prob -inf: it counts in no loss.
    const Result wanted = forward_and_backward(whole, batch, sampling);
    test::on_layout(tensor_parallel(tp), [&, &config = config](ParallelContext& context) {
      ModelOptions options = split_options(context, config);
      options.freeze_router = false;
      Model model(config, options);
      fill(model);
      const Result got = forward_and_backward(model, batch, sampling);
      expect_near(got.hidden, wanted.hidden, "hidden");
      const at::Tensor kept = at::isfinite(wanted.logprobs);
      EXPECT_TRUE(at::equal(at::isfinite(got.logprobs), kept));
      expect_near(got.logprobs.masked_select(kept), wanted.logprobs.masked_select(kept), "log-probs");
      // The same on all ranks, bit for bit.
      const auto bytes = [](const at::Tensor& x) {
        const at::Tensor y = x.contiguous();
        return std::string(static_cast<const char*>(y.const_data_ptr()), y.nbytes());
      };
      for (const at::Tensor& x : {got.hidden, got.logprobs}) {
        for (const std::string& other : context.world().all_gather_bytes(bytes(x))) EXPECT_EQ(other, bytes(x));
      }
      for (const Parameter& parameter : model.parameters()) {
        const at::Tensor gradient = sum_over_tensor_ranks(context, parameter);
        expect_near(gradient, part_of(parameter, whole.find(parameter.name)->tensor.grad()), parameter.name);
      }
      // What backward computes again changes no bit.
      const at::Tensor gradients = model.flat_gradients().clone();
      for (const Recompute& recompute : {Recompute{1, 0}, Recompute{0, 2}, Recompute{1, 2}}) {
        model.zero_gradients();
        model.set_recompute(recompute);
        const Result again = forward_and_backward(model, batch, sampling);
        EXPECT_TRUE(same_bits(again.logprobs, got.logprobs));
        EXPECT_TRUE(same_bits(model.flat_gradients(), gradients));
      }
    });
  }
}

at::Tensor numbers(int64_t rows, int64_t columns, double step, at::ScalarType dtype) {
  return (at::arange(rows * columns, at::kDouble) * step).sin().mul(2).to(dtype).view({rows, columns});
}

struct ProductResult {
  at::Tensor out, dx, dweight, dbias;
};

// `product(x, weight, bias)` and its gradients, each row of the result counting otherwise.
template <typename Product>
ProductResult differentiated(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Product&& product) {
  const auto leaf = [](const at::Tensor& t) { return t.defined() ? t.detach().clone().set_requires_grad(true) : t; };
  const at::Tensor a = leaf(x), w = leaf(weight), b = leaf(bias);
  const at::Tensor out = product(a, w, b);
  (out * numbers(out.size(0), out.size(1), 0.31, out.scalar_type())).sum().backward();
  return {out.detach(), a.grad(), w.grad(), b.defined() ? b.grad() : at::Tensor()};
}

// Cut by rank and overlapped, against whole products between whole exchanges.
TEST(TensorParallel, ProductsBesideExchangesHaveTheBitsOfThoseBehindThem) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int tp : {2, 3, 4}) {
      test::on_layout(tensor_parallel(tp), [&](ParallelContext& context) {
        Communicator& group = context.tensor_parallel();
        const int rank = group.rank();
        // Of some rows a rank has one less, or none.
        for (const int64_t rows : {int64_t{0}, int64_t{1}, int64_t{5}, int64_t{36}, int64_t{83}}) {
          const int64_t each = (rows + tp - 1) / tp, padding = each * tp - rows;
          const at::Tensor own = numbers(each, 16, 0.7 + 0.1 * rank, dtype);
          const at::Tensor all = numbers(rows, 24, 0.4 + 0.1 * rank, dtype);
          const at::Tensor wide = numbers(24, 16, 0.23 + 0.1 * rank, dtype);
          const at::Tensor flat = numbers(16, 24, 0.19 + 0.1 * rank, dtype);
          const at::Tensor bias = numbers(1, 24, 0.27, dtype).view({24});
          const at::Tensor first = rank == 0 ? numbers(1, 16, 0.29, dtype).view({16}) : at::Tensor();
          const auto gathered = [&](const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
            return linear(gather_rows(group, x).narrow(0, 0, rows), w, b);
          };
          const auto summed = [&](const at::Tensor& x, const at::Tensor& w, const at::Tensor& b) {
            return sum_to_rows(group, at::constant_pad_nd(linear(x, w, b), {0, 0, 0, padding}));
          };
          const ProductResult wanted_first = differentiated(own, wide, bias, gathered);
          const ProductResult wanted_last = differentiated(all, flat, first, summed);
          std::vector<ProductResult> got_first, got_last;
          for (const bool beside : {true, false}) {
            for (const bool again : {false, true}) {
              const SplitRows split{&group, rows, beside};
              const auto of = [&](const at::Tensor& x) {
                Activation activation{x, {}};
                if (again) activation.again = [kept = x.detach()] { return kept.clone(); };
                return activation;
              };
              got_first.push_back(differentiated(own, wide, bias, [&](const auto& x, const auto& w, const auto& b) {
                return gathered_linear(split, of(x), w, b);
              }));
              got_last.push_back(differentiated(all, flat, first, [&](const auto& x, const auto& w, const auto& b) {
                return summed_linear(split, of(x), w, b);
              }));
            }
          }
          const double near = dtype == at::kFloat ? 1e-6 : 2e-2;
          for (const auto& [got, wanted] : {std::pair{&got_first, &wanted_first}, {&got_last, &wanted_last}}) {
            for (const ProductResult& one : *got) {
              EXPECT_TRUE(same_bits(one.out, wanted->out)) << "tp " << tp << ", " << rows << " rows";
              const ProductResult& other = got->front();
              for (const auto& [a, b, c] : {std::tuple{one.dx, other.dx, wanted->dx},
                                            {one.dweight, other.dweight, wanted->dweight},
                                            {one.dbias, other.dbias, wanted->dbias}}) {
                ASSERT_EQ(a.defined(), c.defined());
                if (!a.defined() || a.numel() == 0) continue;
                EXPECT_TRUE(same_bits(a, b)) << "overlap and recomputation change no bit: " << rows << " rows";
                const double largest = std::max(1.0, c.abs().max().template item<double>());
                EXPECT_LE((a - c).abs().max().template item<double>(), near * largest) << rows << " rows";
              }
            }
          }
          const at::NoGradGuard no_grad;
          const SplitRows split{&group, rows, true};
          EXPECT_TRUE(same_bits(gathered_linear(split, {own, {}}, wide, bias), wanted_first.out));
          EXPECT_TRUE(same_bits(summed_linear(split, {all, {}}, flat, first), wanted_last.out));
        }
      });
    }
  }
}

TEST(TensorParallel, OverlapChangesNoBitOfAPass) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const ModelConfig config = eight_heads(ModelFamily::kQwen2, false);  // with biases
    const PackedBatch batch = some_batch(true);
    test::on_layout(tensor_parallel(4), [&](ParallelContext& context) {
      ModelOptions options = split_options(context, config);
      options.dtype = dtype;
      if (dtype == at::kBFloat16) options.gradient_dtype = at::kFloat;
      Model beside(config, options);
      options.overlap_exchanges = false;
      Model behind(config, options);
      fill(beside);
      fill(behind);
      const Result one = forward_and_backward(beside, batch, {}), other = forward_and_backward(behind, batch, {});
      EXPECT_TRUE(same_bits(one.hidden, other.hidden));
      EXPECT_TRUE(same_bits(one.logprobs, other.logprobs));
      EXPECT_TRUE(same_bits(beside.flat_gradients(), behind.flat_gradients()));
      EXPECT_GT(beside.flat_gradients().abs().max().item<double>(), 0);
    });
  }
}

// A row's bits do not depend on what else is in the micro-batch, nor on how many rows it has, nor on whether it is
// computed against an arena: one to three rows there, of which some ranks have none to send to experts.
TEST(TensorParallel, RowsAreExact) {
  struct Case {
    ModelFamily family;
    int64_t tp;
  };
  for (const Case& which : {Case{ModelFamily::kQwen3, 2},
                            {ModelFamily::kQwen3Moe, 2},
                            {ModelFamily::kQwen3Moe, 4},
                            {ModelFamily::kMixtral, 4}}) {
    const ModelConfig config = eight_heads(which.family, false);
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      test::on_layout(tensor_parallel(which.tp), [&](ParallelContext& context) {
        ModelOptions options = split_options(context, config);
        options.dtype = dtype;
        options.trainable = false;
        Model model(config, options);
        fill(model);
        const at::NoGradGuard no_grad;
        const auto own = random_tokens(23, 5);
        const auto rows = [&](const std::vector<std::vector<int32_t>>& sequences, size_t which_one) {
          const PackedBatch batch = PackedBatch::from_sequences(sequences);
          const at::Tensor hidden = model.forward(batch);
          const at::Tensor logprobs = model.logprobs(hidden, batch.ids.roll(-1), {});
          const int64_t begin = batch.starts[which_one], count = batch.starts[which_one + 1] - begin;
          return std::pair(hidden.narrow(0, begin, count), logprobs.narrow(0, begin, count - 1));
        };
        const auto [hidden, logprobs] = rows({own}, 0);
        for (const auto& others :
             {std::vector{random_tokens(9, 6), own}, {random_tokens(40, 7), own, random_tokens(3, 8)}}) {
          const auto [again, of_them] = rows(others, 1);
          EXPECT_TRUE(same_bits(again, hidden));
          EXPECT_TRUE(same_bits(of_them, logprobs));
        }
        KvArena arena(model.local(), 40, dtype, at::kCPU);
        const PackedBatch packed = PackedBatch::from_sequences({own});
        const int64_t parts[] = {7, 1, 2, 3, 1, 9};
        int64_t past = 0;
        for (const int64_t count : parts) {
          const CachedBatch batch{
              packed.ids.narrow(0, past, count), packed.positions.narrow(0, past, count), {{{5, past, count}}}};
          EXPECT_TRUE(same_bits(model.forward_cached(batch, arena), hidden.narrow(0, past, count))) << count << " rows";
          past += count;
        }
        EXPECT_EQ(past, 23);
      });
    }
  }
}

}  // namespace
}  // namespace trireme
