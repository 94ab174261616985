// A model split over tensor ranks against the whole one: slices, hidden states, log-probs, gradients.
#include <ATen/ATen.h>

#include <set>

#include "base/fs.h"
#include "base/text.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/model/model.h"

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
