// A mixture of experts split over ranks against the whole one, bit for bit: dispatch and combine by a loop over tokens,
// hidden states, log-probs; gradients, ranks and passes without rows.
#include <ATen/ATen.h>

#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>

#include "base/clock.h"
#include "base/fs.h"
#include "tests/unit/model/split_models.h"
#include "tests/unit/parallel/ranks.h"
#include "trainer/model/context_rows.h"
#include "trainer/model/model.h"
#include "trainer/model/split_experts.h"
#include "trainer/ops/router_watch.h"
#include "trainer/parallel/dispatch.h"

namespace trireme {
namespace {

using testing::fill;
using testing::is_expert;
using testing::part_of;
using testing::random_tokens;
using testing::same_bits;
using testing::small_config;
using testing::split_options;
using testing::sum_over_tensor_ranks;

constexpr int64_t kWide = 12, kNarrow = 8, kExperts = 8;

Layout expert_parallel(int64_t ep, int64_t dp = 0) { return {.ep = ep, .dp = dp == 0 ? ep : dp}; }

void expect_close(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  if (wanted.numel() == 0) return;
  const double largest = wanted.abs().max().item<double>();
  EXPECT_LE((got - wanted).abs().max().item<double>(), 1e-5 * std::max(largest, 1e-3)) << what;
}

struct Mixture {
  at::Tensor router, gate_up, down;
};

at::Tensor drawn(std::vector<int64_t> sizes, double scale, uint64_t seed, at::ScalarType dtype) {
  at::Tensor values = at::empty(sizes, at::kFloat);
  for (int64_t i = 0; i < values.numel(); ++i)
    values.mutable_data_ptr<float>()[i] = static_cast<float>(scale * philox_normal(seed, 3, static_cast<uint64_t>(i)));
  return values.to(dtype);
}

Mixture mixture(at::ScalarType dtype) {
  return {drawn({kExperts, kWide}, 1, 1, dtype), drawn({kExperts * 2 * kNarrow, kWide}, 0.4, 2, dtype),
          drawn({kExperts * kWide, kNarrow}, 0.4, 3, dtype)};
}

// What each of `ranks` ranks has of rows: kinds of work that a run can meet.
struct Work {
  const char* name;
  std::function<at::Tensor(int64_t rank, at::ScalarType dtype)> rows;
  std::function<void(Mixture&)> change = nullptr;
};

std::vector<Work> works() {
  const auto plenty = [](int64_t rank, at::ScalarType dtype) {
    return drawn({17 + 5 * rank, kWide}, 1, static_cast<uint64_t>(10 + rank), dtype);
  };
  const auto none_first = [plenty](int64_t rank, at::ScalarType dtype) {
    return rank == 0 ? plenty(0, dtype).narrow(0, 0, 0) : plenty(rank, dtype);
  };
  const auto one_last = [plenty](int64_t rank, at::ScalarType dtype) {
    return plenty(rank, dtype).narrow(0, 0, rank == 1 ? 1 : 0);
  };
  const auto nothing = [plenty](int64_t rank, at::ScalarType dtype) { return plenty(rank, dtype).narrow(0, 0, 0); };
  return {{"plenty", plenty},
          {"a rank with none", none_first},
          {"one row", one_last},
          {"no rows", nothing},
          // Equal logits: the experts of lowest id, which lie on one rank.
          {"ties", plenty, [](Mixture& m) { m.router.zero_(); }},
          {"two equal experts", plenty, [](Mixture& m) { m.router[7].copy_(m.router[1]); }}};
}

// By its own arithmetic: for each token, of each block the weighted outputs by ascending expert, then the blocks.
at::Tensor by_tokens(const at::Tensor& x, const Mixture& m, const ExpertShape& shape) {
  const at::Tensor logits = at::linear(x.to(at::kDouble), m.router.to(at::kDouble));
  at::Tensor y = at::zeros({x.size(0), kWide}, at::kDouble);
  const int64_t of_block = shape.experts / shape.combine_blocks;
  for (int64_t token = 0; token < x.size(0); ++token) {
    std::vector<int64_t> order(static_cast<size_t>(shape.experts));
    for (size_t e = 0; e < order.size(); ++e) order[e] = static_cast<int64_t>(e);
    const at::Tensor row = logits[token];
    const auto* logit = row.const_data_ptr<double>();
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logit[a] > logit[b]; });
    order.resize(static_cast<size_t>(shape.per_token));
    std::sort(order.begin(), order.end());
    double sum = 0;
    for (const int64_t e : order) sum += std::exp(logit[e] - logit[order[0]]);
    std::vector<at::Tensor> blocks(static_cast<size_t>(shape.combine_blocks), at::zeros({kWide}, at::kDouble));
    for (const int64_t e : order) {
      const at::Tensor both = at::linear(x[token].to(at::kDouble).unsqueeze(0),
                                         m.gate_up.narrow(0, e * 2 * kNarrow, 2 * kNarrow).to(at::kDouble));
      const at::Tensor active = at::silu(both.narrow(1, 0, kNarrow)) * both.narrow(1, kNarrow, kNarrow);
      const at::Tensor out = at::linear(active, m.down.narrow(0, e * kWide, kWide).to(at::kDouble))[0];
      at::Tensor& block = blocks[static_cast<size_t>(e / of_block)];
      block = block + out * (std::exp(logit[e] - logit[order[0]]) / sum);
    }
    for (const at::Tensor& block : blocks) y[token] += block;
  }
  return y;
}

// Of a rank's experts, `tensor` ranks in a row share each by its width.
Mixture own_part(const Mixture& m, int64_t rank, int64_t experts, int64_t tensor = 1) {
  const int64_t first = rank / tensor * experts, width = kNarrow / tensor, begin = rank % tensor * width;
  const at::Tensor gate_up =
      m.gate_up.view({kExperts, 2, kNarrow, kWide}).narrow(0, first, experts).narrow(2, begin, width);
  const at::Tensor down = m.down.view({kExperts, kWide, kNarrow}).narrow(0, first, experts).narrow(2, begin, width);
  return {m.router.clone(), gate_up.reshape({experts * 2 * width, kWide}).clone(),
          down.reshape({experts * kWide, width}).clone()};
}

Mixture& record(Mixture& m) {
  for (at::Tensor* tensor : {&m.router, &m.gate_up, &m.down}) tensor->set_requires_grad(true);
  return m;
}

TEST(Dispatch, RowsGoOnceToEachRankThatWantsThemAndComeBackInOrder) {
  test::on_layout(expert_parallel(4), [&](ParallelContext& context) {
    Communicator& group = context.group(Axis::kEtpEp);
    const int64_t rank = group.rank(), rows = rank == 2 ? 0 : 5 + rank;
    at::Tensor wanted = at::zeros({rows, 4}, at::kBool);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t to = 0; to < 4; ++to) wanted[r][to] = (r + rank) % (to + 1) == 0;
    const at::Tensor numbers = at::tensor({10 * rank, 10 * rank + 1, 10 * rank + 2, 10 * rank + 3}, at::kLong);
    std::vector<std::vector<int64_t>> told;
    const Dispatch plan = plan_dispatch(group, wanted, numbers.unsqueeze(1), &told);
    for (int64_t from = 0; from < 4; ++from)
      EXPECT_EQ(told[static_cast<size_t>(from)], (std::vector<int64_t>{10 * from + rank, 10 * rank + from}));
    const at::Tensor own = at::arange(rows, at::kLong) + 100 * rank;
    std::vector<int64_t> expected;
    for (int64_t from = 0; from < 4; ++from) {
      const int64_t theirs = from == 2 ? 0 : 5 + from;
      int64_t count = 0;
      for (int64_t r = 0; r < theirs; ++r) {
        if ((r + from) % (rank + 1) != 0) continue;
        expected.push_back(100 * from + r);
        ++count;
      }
      EXPECT_EQ(plan.from[static_cast<size_t>(from)], count);
    }
    const std::vector<at::Tensor> both = dispatch_rows(group, plan, {own.unsqueeze(1), own.to(at::kInt)});
    const at::Tensor got = both[0].view({-1});
    EXPECT_TRUE(at::equal(got, at::tensor(expected, at::kLong)));
    EXPECT_TRUE(at::equal(both[1], got.to(at::kInt)));
    // Each rank gives its number plus one back: a row's sum says who had it.
    const at::Tensor back = return_rows(group, plan, {at::full({got.size(0), 1}, double(1 << rank), at::kDouble)})[0];
    const at::Tensor sums = add_returned(plan, back, rows);
    for (int64_t r = 0; r < rows; ++r) {
      double all = 0;
      for (int64_t to = 0; to < 4; ++to) all += (r + rank) % (to + 1) == 0 ? 1 << to : 0;
      EXPECT_EQ(sums[r].item<double>(), all);
    }
  });
}

// gathered_mixture_of_experts of the work's rows here, where each rank brings as many as has the one with most.
at::Tensor gathered(const Work& work, const Mixture& own, const ExpertShape& shape, const ExpertRanks& ranks,
                    at::ScalarType dtype) {
  int64_t most = 0;
  for (int64_t r = 0; r < ranks.group->size(); ++r) most = std::max(most, work.rows(r, dtype).size(0));
  const at::Tensor x = work.rows(ranks.group->rank(), dtype);
  const at::Tensor even = at::constant_pad_nd(x, {0, 0, 0, most - x.size(0)});
  const at::Tensor got = gathered_mixture_of_experts(even, {own.router, own.gate_up, own.down}, shape, ranks);
  EXPECT_EQ(got.size(0), most);
  return got.narrow(0, 0, x.size(0));
}

class SplitExperts : public ::testing::TestWithParam<std::tuple<int, at::ScalarType>> {};
INSTANTIATE_TEST_SUITE_P(ExpertParallel, SplitExperts,
                         ::testing::Combine(::testing::Values(2, 4), ::testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& info) {
                           return "ep" + std::to_string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) == at::kFloat ? "_float32" : "_bfloat16");
                         });

TEST_P(SplitExperts, HaveTheBitsOfOneRankAndTheSumsOfALoopOverTokens) {
  const auto [ep, dtype] = GetParam();
  const std::vector<Work> all_works = works();
  test::on_layout(expert_parallel(ep), [&, dtype = dtype, ep = int64_t{ep}](ParallelContext& context) {
    for (size_t i = 0; i < 2 * all_works.size(); ++i) {
      // Of four ranks each has two experts: by two a token's ties all go to one rank, and the others get nothing.
      const ExpertShape shape{.experts = kExperts, .per_token = i % 2 == 0 ? 3 : 2, .combine_blocks = 4};
      const Work& work = all_works[i / 2];
      Mixture whole = mixture(dtype);
      if (work.change) work.change(whole);
      const int64_t rank = context.group(Axis::kEtpEp).rank();
      const Mixture own = own_part(whole, rank, kExperts / ep);
      const at::Tensor x = work.rows(rank, dtype);
      const at::Tensor wanted = mixture_of_experts(x, {whole.router, whole.gate_up, whole.down}, shape);
      if (dtype == at::kFloat) expect_close(wanted.to(at::kDouble), by_tokens(x, whole, shape), work.name);
      for (const int64_t at_once : {1 << 13, 3, 1}) {
        const at::Tensor got = split_mixture_of_experts(
            x, {own.router, own.gate_up, own.down}, shape,
            {.group = &context.group(Axis::kEtpEp), .experts = kExperts / ep, .rows_at_once = at_once});
        EXPECT_TRUE(same_bits(got, wanted)) << work.name << ", " << at_once << " rows at once";
      }
      const at::Tensor got =
          gathered(work, own, shape, {.group = &context.group(Axis::kEtpEp), .experts = kExperts / ep}, dtype);
      EXPECT_TRUE(same_bits(got, wanted)) << work.name << ", gathered";
    }
  });
}

// Experts that ranks share by their width have other bits than whole ones, but the same over one expert part and two.
TEST(ExpertParallel, SharedWidthsHaveTheSameBitsOverAnyNumberOfExpertRanks) {
  const ExpertShape shape{.experts = kExperts, .per_token = 3, .combine_blocks = 4};
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t tensor : {2, 4}) {
      std::map<std::string, at::Tensor> first;
      for (const int64_t ep : {1, 2}) {
        if (ep * tensor > 4) continue;
        std::mutex mutex;
        test::on_layout({.ep = ep, .dp = ep * tensor, .etp = tensor}, [&, ep = ep](ParallelContext& context) {
          Communicator& group = context.group(Axis::kEtpEp);
          for (const Work& work : works()) {
            Mixture whole = mixture(dtype);
            if (work.change) work.change(whole);
            const Mixture own = own_part(whole, group.rank(), kExperts / ep, tensor);
            const at::Tensor x = work.rows(group.rank(), dtype);
            const at::Tensor wanted = mixture_of_experts(x, {whole.router, whole.gate_up, whole.down}, shape);
            at::Tensor got;
            for (const int64_t at_once : {1 << 13, 3}) {
              const at::Tensor again = split_mixture_of_experts(
                  x, {own.router, own.gate_up, own.down}, shape,
                  {.group = &group, .experts = kExperts / ep, .tensor = tensor, .rows_at_once = at_once});
              if (got.defined()) {
                EXPECT_TRUE(same_bits(again, got)) << work.name;
              }
              got = again;
            }
            if (dtype == at::kFloat) expect_close(got, wanted, work.name);
            const at::Tensor together =
                gathered(work, own, shape, {.group = &group, .experts = kExperts / ep, .tensor = tensor}, dtype);
            EXPECT_TRUE(same_bits(together, got)) << work.name << ", gathered";
            const std::lock_guard<std::mutex> lock(mutex);
            const auto [known, is_new] = first.emplace(work.name + std::to_string(group.rank()), got);
            if (!is_new) {
              EXPECT_TRUE(same_bits(got, known->second)) << work.name << ", ep " << ep;
            }
          }
        });
      }
    }
  }
}

// Each rank's own rows, inputs' gradients from them, experts' from everybody's.
class SplitExpertGradients : public ::testing::TestWithParam<std::tuple<int, int, bool>> {};
INSTANTIATE_TEST_SUITE_P(ExpertParallel, SplitExpertGradients,
                         ::testing::Values(std::tuple{2, 1, false}, std::tuple{2, 1, true}, std::tuple{4, 1, false},
                                           std::tuple{4, 1, true}, std::tuple{1, 2, true}, std::tuple{2, 2, false},
                                           std::tuple{2, 2, true}));

TEST_P(SplitExpertGradients, AreThoseOfOneRank) {
  const auto [ep, etp, normalize] = GetParam();
  const ExpertShape shape{
      .experts = kExperts, .per_token = ep == 4 ? 2 : 3, .normalize = normalize, .combine_blocks = 4};
  const Layout layout{.ep = ep, .dp = ep * etp, .etp = etp};
  test::on_layout(layout, [&, ep = int64_t{ep}, tensor = int64_t{etp}](ParallelContext& context) {
    Communicator& group = context.group(Axis::kEtpEp);
    for (const Work& work : works()) {
      Mixture whole = mixture(at::kFloat);
      if (work.change) work.change(whole);
      Mixture own = own_part(whole, group.rank(), kExperts / ep, tensor);
      record(whole);
      record(own);
      at::Tensor wanted_x;
      for (int64_t rank = 0; rank < ep * tensor; ++rank) {
        const at::Tensor x = work.rows(rank, at::kFloat).clone().set_requires_grad(true);
        const at::Tensor y = mixture_of_experts(x, {whole.router, whole.gate_up, whole.down}, shape);
        (y * at::linspace(-1, 2, y.numel()).view(y.sizes())).sum().backward();
        if (rank == group.rank()) wanted_x = x.grad();
      }
      for (const int64_t at_once : {1 << 13, 4}) {
        std::vector<at::Tensor> kept;  // gradients where gate and up were kept: with their bits where they were not
        for (const bool again : {false, true}) {
          for (at::Tensor* tensor : {&own.router, &own.gate_up, &own.down}) tensor->mutable_grad().reset();
          const at::Tensor x = work.rows(group.rank(), at::kFloat).clone().set_requires_grad(true);
          const at::Tensor y = split_mixture_of_experts(
              x, {own.router, own.gate_up, own.down}, shape,
              {.group = &group, .experts = kExperts / ep, .tensor = tensor, .rows_at_once = at_once}, nullptr, again);
          (y * at::linspace(-1, 2, y.numel()).view(y.sizes())).sum().backward();
          expect_close(x.grad(), wanted_x, work.name);
          const auto or_zeros = [](const at::Tensor& t) { return t.grad().defined() ? t.grad() : at::zeros_like(t); };
          at::Tensor router = or_zeros(own.router).detach().clone();
          group.all_reduce_sum(router);
          expect_close(router, or_zeros(whole.router), work.name);
          const Mixture part = own_part({or_zeros(whole.router), or_zeros(whole.gate_up), or_zeros(whole.down)},
                                        group.rank(), kExperts / ep, tensor);
          expect_close(or_zeros(own.gate_up), part.gate_up, work.name);
          expect_close(or_zeros(own.down), part.down, work.name);
          const std::vector<at::Tensor> found = {x.grad().clone(), or_zeros(own.router).clone(),
                                                 or_zeros(own.gate_up).clone(), or_zeros(own.down).clone()};
          for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(same_bits(found[i], kept[i])) << work.name << " " << i;
          kept = found;
        }
      }
    }
  });
}

ModelConfig with_experts(ModelFamily family) {
  ModelConfig config = small_config(family);
  return config;
}

class SplitMixture : public ::testing::TestWithParam<std::tuple<ModelFamily, int, at::ScalarType>> {};
INSTANTIATE_TEST_SUITE_P(ExpertParallel, SplitMixture,
                         ::testing::Combine(::testing::Values(ModelFamily::kQwen3Moe, ModelFamily::kMixtral),
                                            ::testing::Values(1, 2, 4, 8),
                                            ::testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& info) {
                           return std::string(to_string(std::get<0>(info.param))) + "_ep" +
                                  std::to_string(std::get<1>(info.param)) +
                                  (std::get<2>(info.param) == at::kFloat ? "_float32" : "_bfloat16");
                         });

PackedBatch batch_of(int64_t rank, bool none) {
  if (none) return PackedBatch::from_sequences({});
  return PackedBatch::from_sequences(
      {random_tokens(17, static_cast<uint64_t>(2 * rank + 1)), random_tokens(9 + rank, static_cast<uint64_t>(rank))});
}

struct Passed {
  at::Tensor hidden, logprobs;
};

Passed pass(Model& model, const PackedBatch& batch) {
  const at::Tensor hidden = model.forward(batch);
  if (batch.tokens() == 0) {
    hidden.sum().backward();
    return {hidden.detach(), {}};
  }
  const at::Tensor logprobs = model.logprobs(hidden, batch.ids.roll(1), {});
  (logprobs * at::linspace(-1, 2, logprobs.size(0))).sum().backward();
  return {hidden.detach(), logprobs.detach()};
}

TEST_P(SplitMixture, HasTheBitsOfTheWholeOne) {
  const auto [family, ep, dtype] = GetParam();
  const ModelConfig config = with_experts(family);
  ModelOptions plain;
  plain.dtype = dtype;
  plain.freeze_router = false;
  Model whole(config, plain);
  fill(whole);
  TemporaryDirectory dir;
  save_model(whole, dir.path(), {});
  const auto none = [ep = ep](int64_t rank) { return ep > 1 && rank == 1; };  // a rank without rows
  std::vector<Passed> wanted;
  for (int64_t rank = 0; rank < ep; ++rank) {
    const PackedBatch batch = batch_of(rank, false);
    wanted.push_back(none(rank) ? Passed{} : pass(whole, batch));
  }
  test::on_layout(expert_parallel(ep), [&, &config = config, dtype = dtype](ParallelContext& context) {
    ModelOptions options = split_options(context, config);
    options.dtype = dtype;
    options.freeze_router = false;
    Model model(config, options);
    load_parameters(model, dir.path());
    const int64_t held = std::count_if(model.parameters().begin(), model.parameters().end(), [](const Parameter& p) {
      return p.name.find(".experts.") != std::string::npos;
    });
    EXPECT_EQ(held, config.layers_with_experts() * 3 * config.num_experts / context.layout().ep);
    const PackedBatch batch = batch_of(context.rank(), none(context.rank()));
    const Passed got = pass(model, batch);
    if (batch.tokens() > 0) {
      EXPECT_TRUE(same_bits(got.hidden, wanted[static_cast<size_t>(context.rank())].hidden));
      EXPECT_TRUE(same_bits(got.logprobs, wanted[static_cast<size_t>(context.rank())].logprobs));
    }
    // Dense parameters: the ranks' sum. Experts: already everybody's.
    for (const Parameter& parameter : model.parameters()) {
      if (dtype != at::kFloat) break;
      at::Tensor gradient = parameter.tensor.grad().clone();
      if (parameter.name.find(".experts.") == std::string::npos) context.data_parallel().all_reduce_sum(gradient);
      expect_close(gradient, part_of(parameter, whole.find(parameter.name)->tensor.grad()), parameter.name);
    }
    const at::Tensor gradients = model.flat_gradients().clone();
    for (const Recompute& recompute :
         {Recompute{1, 1}, Recompute{.expert_layers = 3}, Recompute{1, 1, true, true, 2}}) {
      model.zero_gradients();
      model.set_recompute(recompute);
      (void)pass(model, batch);
      EXPECT_TRUE(same_bits(model.flat_gradients(), gradients)) << "recomputed";
    }
  });
}

// With the other splits: a replica's batch over its tensor and context ranks, against the same layout with all experts
// on each rank, or on the ranks that share their width, bit for bit, and the gradients of all replicas together against
// one rank's. Expert groups that are a part of a replica, several replicas, or end inside of one.
struct SplitCase {
  Layout layout;
  int64_t experts = 8;
};

class SplitMixtureInLayouts : public ::testing::TestWithParam<SplitCase> {};
INSTANTIATE_TEST_SUITE_P(ExpertParallel, SplitMixtureInLayouts,
                         ::testing::Values(SplitCase{{.tp = 2, .ep = 2}}, SplitCase{{.tp = 4, .ep = 2}},
                                           SplitCase{{.tp = 2, .ep = 4, .dp = 2}}, SplitCase{{.cp = 2, .ep = 2}},
                                           SplitCase{{.cp = 2, .ep = 4, .dp = 2}},
                                           SplitCase{{.tp = 2, .cp = 2, .ep = 4}},
                                           SplitCase{{.tp = 2, .ep = 3, .dp = 3}, 6}, SplitCase{{.dp = 2, .etp = 2}},
                                           SplitCase{{.ep = 2, .dp = 4, .etp = 2}}, SplitCase{{.tp = 2, .etp = 2}},
                                           SplitCase{{.tp = 2, .ep = 2, .dp = 2, .etp = 2}},
                                           SplitCase{{.dp = 4, .etp = 4}}, SplitCase{{.cp = 2, .etp = 2}}),
                         [](const auto& info) {
                           const Layout& l = info.param.layout;
                           return "tp" + std::to_string(l.tp) + "_cp" + std::to_string(l.cp) + "_ep" +
                                  std::to_string(l.ep) + "_dp" + std::to_string(l.dp) + "_etp" + std::to_string(l.etp);
                         });

// The rank's part of a replica's batch, every row with another weight, the same one wherever it is computed.
Passed pass_in(Model& model, const PackedBatch& whole) {
  const PackedBatch part = context_part(model, whole);
  const at::Tensor hidden = model.forward(part);
  if (whole.tokens() == 0) {
    hidden.sum().backward();
    return {hidden.detach(), {}};
  }
  std::vector<int64_t> all(static_cast<size_t>(whole.tokens()));
  std::iota(all.begin(), all.end(), int64_t{0});
  const at::Tensor rows = at::tensor(part.context ? part.context->rows : all, at::kLong);
  const at::Tensor targets = whole.ids.roll(1).index_select(0, rows);
  const at::Tensor logprobs = model.logprobs(hidden, targets, {});
  (logprobs * at::linspace(-1, 2, whole.tokens()).index_select(0, rows)).sum().backward();
  return {hidden.detach(), logprobs.detach()};
}

// More rows than a piece of a sequence, so that context ranks cut it; the second replica has none.
PackedBatch batch_of_replica(int64_t replica) {
  if (replica == 1) return PackedBatch::from_sequences({});
  return PackedBatch::from_sequences({random_tokens(300 + replica, static_cast<uint64_t>(2 * replica + 1)),
                                      random_tokens(9, static_cast<uint64_t>(replica + 40))});
}

TEST_P(SplitMixtureInLayouts, HasTheBitsOfWholeExperts) {
  const SplitCase& which = GetParam();
  ModelConfig config = testing::eight_heads(ModelFamily::kQwen3Moe, false);
  config.num_experts = which.experts;
  ModelOptions plain;
  plain.freeze_router = false;
  Model one(config, plain);
  fill(one);
  std::vector<at::Tensor> of_one;  // hidden states
  for (int64_t replica = 0; replica < which.layout.dp; ++replica)
    of_one.push_back(pass_in(one, batch_of_replica(replica)).hidden);
  Layout unsplit = which.layout;
  unsplit.ep = 1;
  std::vector<Passed> wanted(static_cast<size_t>(unsplit.world()));
  const auto options_of = [&](ParallelContext& context) {
    ModelOptions options = split_options(context, config);
    options.freeze_router = false;
    return options;
  };
  test::on_layout(unsplit, [&](ParallelContext& context) {
    Model model(config, options_of(context));
    fill(model);
    wanted[static_cast<size_t>(context.rank())] = pass_in(model, batch_of_replica(context.coordinates().dp));
  });
  test::on_layout(which.layout, [&](ParallelContext& context) {
    Model model(config, options_of(context));
    fill(model);
    const PackedBatch batch = batch_of_replica(context.coordinates().dp);
    const Passed got = pass_in(model, batch), &want = wanted[static_cast<size_t>(context.rank())];
    EXPECT_TRUE(same_bits(got.hidden, want.hidden));
    if (which.layout.cp == 1) {
      expect_close(got.hidden, of_one[static_cast<size_t>(context.coordinates().dp)], "hidden");
    }
    if (batch.tokens() > 0) {
      EXPECT_TRUE(same_bits(got.logprobs, want.logprobs));
    }
    for (const Parameter& parameter : model.parameters()) {
      at::Tensor gradient = parameter.tensor.grad().clone();
      if (is_expert(parameter)) {
        context.group(Axis::kEdp).all_reduce_sum(gradient);
      } else {
        gradient = sum_over_tensor_ranks(context, parameter);
        context.data_parallel().all_reduce_sum(gradient);
      }
      expect_close(gradient, part_of(parameter, one.find(parameter.name)->tensor.grad()), parameter.name);
    }
    // What backward computes again, exchanges among it, changes no bit.
    const at::Tensor gradients = model.flat_gradients().clone();
    for (const Recompute& recompute :
         {Recompute{1, 0}, Recompute{0, 2}, Recompute{3, 0}, Recompute{.expert_layers = 3}}) {
      model.zero_gradients();
      model.set_recompute(recompute);
      (void)pass_in(model, batch);
      EXPECT_TRUE(same_bits(model.flat_gradients(), gradients));
    }
  });
}

// Another token, a longer sequence, a shorter one: whichever experts that fills or leaves empty, no other sequence is
// touched, of the own micro-batch or of another expert rank's, and of the changed one nothing before the change.
TEST(ExpertParallel, ChangingASequenceChangesNoBitOfAnother) {
  const ModelConfig config = testing::eight_heads(ModelFamily::kQwen3Moe, false);
  using Sequences = std::vector<std::vector<int32_t>>;
  const auto sequences_of = [](int64_t replica) {
    const auto seed = static_cast<uint64_t>(10 * replica);
    return Sequences{random_tokens(17, seed + 1), random_tokens(9 + replica, seed + 2), random_tokens(6, seed + 3)};
  };
  const std::vector<std::function<void(std::vector<int32_t>&)>> changes = {
      [](std::vector<int32_t>& sequence) { sequence[4] = (sequence[4] + 1) % 61; },
      [](std::vector<int32_t>& sequence) {
        const std::vector<int32_t> more = random_tokens(40, 99);
        sequence.insert(sequence.end(), more.begin(), more.end());
      },
      [](std::vector<int32_t>& sequence) { sequence.resize(4); }};
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const Layout& layout :
         {Layout{}, Layout{.ep = 2, .dp = 2}, Layout{.ep = 4, .dp = 4}, Layout{.tp = 2, .ep = 2},
          Layout{.tp = 2, .ep = 4, .dp = 2}, Layout{.dp = 2, .etp = 2}, Layout{.ep = 2, .dp = 4, .etp = 2}}) {
      test::on_layout(layout, [&](ParallelContext& context) {
        ModelOptions options = split_options(context, config);
        options.dtype = dtype;
        Model model(config, options);
        fill(model);
        const int64_t replica = context.coordinates().dp;
        const auto hidden_of = [&](const Sequences& sequences) {
          const PackedBatch batch = PackedBatch::from_sequences(sequences);
          return std::pair(model.forward(batch).detach(), batch.starts);
        };
        const auto [before, starts] = hidden_of(sequences_of(replica));
        for (const int64_t changed : {int64_t{0}, layout.dp - 1}) {
          for (size_t i = 0; i < changes.size(); ++i) {
            Sequences sequences = sequences_of(replica);
            if (replica == changed) changes[i](sequences[1]);
            const auto [after, begins] = hidden_of(sequences);
            for (size_t s = 0; s < 3; ++s) {
              const bool other = replica != changed || s != 1;
              const int64_t whole = starts[s + 1] - starts[s], same = other ? whole : i == 1 ? whole : 4;
              EXPECT_TRUE(same_bits(after.narrow(0, begins[s], same), before.narrow(0, starts[s], same)))
                  << to_string(layout) << ", change " << i << " of replica " << changed << ", sequence " << s << " of "
                  << replica;
            }
            if (replica != changed || i != 0) continue;
            EXPECT_FALSE(same_bits(after.narrow(0, begins[1] + 4, 1), before.narrow(0, starts[1] + 4, 1)))
                << "nothing was changed";
          }
        }
      });
    }
  }
}

// A balancing loss counts the rows of whole micro-batches, whichever ranks share them.
TEST(ExpertParallel, BalancingLossesAreThoseOfWholeMicroBatches) {
  const ModelConfig config = testing::eight_heads(ModelFamily::kQwen3Moe, false);
  using Kind = BalanceOptions::Kind;
  for (const Kind kind : {Kind::kMicroBatch, Kind::kSample}) {
    const auto watch_of = [&] {
      auto watch =
          std::make_shared<RouterWatch>(config.num_layers, config.num_experts, BalanceOptions{kind, 3}, at::kCPU);
      watch->set_valid_tokens(100);
      return watch;
    };
    ModelOptions plain;
    plain.freeze_router = false;
    Model one(config, plain);
    fill(one);
    one.router_watch = watch_of();
    for (int64_t replica = 0; replica < 2; ++replica) (void)pass_in(one, batch_of_replica(replica));
    const at::Tensor sums = one.router_watch->take().of_layers;
    for (const Layout& layout :
         {Layout{.tp = 2}, Layout{.cp = 2}, Layout{.tp = 2, .cp = 2}, Layout{.tp = 2, .ep = 4, .dp = 2},
          Layout{.cp = 2, .ep = 2}, Layout{.dp = 2, .etp = 2}, Layout{.tp = 2, .ep = 2, .dp = 2, .etp = 2}}) {
      test::on_layout(layout, [&](ParallelContext& context) {
        ModelOptions options = split_options(context, config);
        options.freeze_router = false;
        Model model(config, options);
        fill(model);
        model.router_watch = watch_of();
        model.router_watch->over_ranks = [&](at::Tensor counts) {
          if (counts.numel() > 0) context.group(Axis::kTpCp).all_reduce_sum(std::move(counts));
        };
        (void)pass_in(model, batch_of_replica(context.coordinates().dp));
        at::Tensor seen = model.router_watch->take().of_layers;
        context.world().all_reduce_sum(seen);
        expect_close(seen, sums, to_string(layout) + " sums");
        for (const Parameter& parameter : model.parameters()) {
          if (parameter.name.find("mlp.gate.weight") == std::string::npos) continue;
          at::Tensor gradient = sum_over_tensor_ranks(context, parameter);
          context.data_parallel().all_reduce_sum(gradient);
          expect_close(gradient, one.find(parameter.name)->tensor.grad(), to_string(layout) + " " + parameter.name);
        }
      });
    }
  }
}

// Over ranks it is the one whose sample it is that says so; the others hear that it has gone.
TEST(ExpertParallel, ARowWhoseRouterFailsIsNamedByItsOwnRank) {
  const ModelConfig config = testing::eight_heads(ModelFamily::kQwen3Moe, false);
  for (const Layout& layout : {Layout{.ep = 2, .dp = 2}, Layout{.tp = 2, .ep = 4, .dp = 2}}) {
    ListeningPort port;
    const auto world = static_cast<int>(layout.world());
    std::vector<int> replicas(static_cast<size_t>(world));
    std::atomic<int> gone{0};
    const auto errors = test::on_ranks(world, [&](int rank) {
      RendezvousOptions rendezvous = port.place(rank, world, Milliseconds(10000));
      rendezvous.on_stuck = [](const std::string&) {};
      ParallelContext context(layout, rendezvous);
      const auto replica = static_cast<int64_t>(context.coordinates().dp);
      replicas[static_cast<size_t>(rank)] = static_cast<int>(replica);
      Model model(config, split_options(context, config));
      fill(model);
      {
        const at::NoGradGuard no_grad;
        const Parameter& embedding = *model.find("model.embed_tokens.weight");  // of tensor ranks a part of its rows
        const int64_t row = 60 - embedding.slice.range.begin;
        if (row >= 0 && row < embedding.tensor.size(0)) embedding.tensor[row].fill_(std::nanf(""));
      }
      PackedBatch batch = PackedBatch::from_sequences({{1, 2, 3, 4, 5}, {replica == 1 ? 60 : 6, 7}});
      batch.names = std::make_shared<const std::vector<SequenceName>>(
          std::vector<SequenceName>{{10 + replica, 0, 3}, {10 + replica, 1, 1}});
      std::string error;
      try {
        (void)model.forward(batch);
      } catch (const std::exception& e) {
        error = e.what();
      }
      ++gone;  // rank 0 serves the store: it leaves last
      const Deadline limit = Deadline::after(Milliseconds(100000));
      while (rank == 0 && gone < world && !limit.passed()) std::this_thread::sleep_for(Milliseconds(10));
      if (!error.empty()) throw std::runtime_error(error);
    });
    int named = 0;
    for (size_t rank = 0; rank < errors.size(); ++rank) {
      EXPECT_NE(errors[rank], "") << to_string(layout) << " rank " << rank;
      if (errors[rank].find("router's logits") == std::string::npos) continue;
      ++named;
      EXPECT_EQ(errors[rank],
                "layer 0: the router's logits are not finite at token 0 of the prompt of response 1 to prompt 11");
      EXPECT_EQ(replicas[rank], 1);
    }
    EXPECT_GE(named, 1);
  }
}

// One copy of the weights, whose ranks are tensor ranks of several replicas, gathers each parameter once.
TEST(ExpertParallel, ACopyOfTheWeightsGathersWholeParameters) {
  const ModelConfig config = testing::eight_heads(ModelFamily::kQwen3Moe, false);
  Model whole(config, {});
  fill(whole);
  for (const Layout& layout : {Layout{.tp = 2, .ep = 2, .dp = 2}, Layout{.tp = 2, .ep = 4, .dp = 2},
                               Layout{.tp = 4, .ep = 2}, Layout{.tp = 2, .ep = 4, .dp = 4}}) {
    test::on_layout(layout, [&](ParallelContext& context) {
      Model model(config, split_options(context, config));
      fill(model);
      EXPECT_EQ(context.holders().size(), layout.copy_ranks());
      EXPECT_EQ(context.copies() * layout.copy_ranks(), layout.world());
      EXPECT_EQ(context.copy(), context.rank() / layout.copy_ranks());
      for (const char* name :
           {"model.layers.0.mlp.experts.5.up_proj.weight", "model.layers.2.mlp.experts.0.down_proj.weight",
            "model.layers.0.mlp.gate.weight", "model.layers.1.self_attn.q_proj.weight",
            "model.layers.1.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight",
            "model.embed_tokens.weight", "model.norm.weight"}) {
        const at::Tensor gathered = gather_parameter(model, context.holders(), name, 1);
        ASSERT_EQ(gathered.defined(), context.holders().rank() == 1);
        if (!gathered.defined()) continue;
        EXPECT_TRUE(same_bits(gathered, whole.find(name)->tensor.detach())) << to_string(layout) << " " << name;
      }
    });
  }
}

// As many groups as there are copies of the experts; each has its own exchanges.
TEST(ExpertParallel, GroupsAreIndependent) {
  const ModelConfig config = with_experts(ModelFamily::kQwen3Moe);
  Model whole(config, {});
  fill(whole);
  std::vector<at::Tensor> wanted;
  for (int64_t rank = 0; rank < 4; ++rank) wanted.push_back(whole.forward(batch_of(rank, false)).detach());
  test::on_layout(expert_parallel(2, 4), [&](ParallelContext& context) {
    Model model(config, split_options(context, config));
    fill(model);
    EXPECT_EQ(model.split().experts.begin, context.rank() % 2 * 4);
    EXPECT_TRUE(same_bits(model.forward(batch_of(context.rank(), false)).detach(),
                          wanted[static_cast<size_t>(context.rank())]));
    // Another number of passes in the other group.
    for (int i = 0; i < context.rank() / 2; ++i) (void)model.forward(batch_of(i, i == 0));
    for (const char* name : {"model.layers.0.mlp.experts.5.up_proj.weight", "model.layers.0.mlp.gate.weight",
                             "model.layers.1.self_attn.q_proj.weight"}) {
      const at::Tensor gathered = gather_parameter(model, context.holders(), name, 1);
      ASSERT_EQ(gathered.defined(), context.holders().rank() == 1);
      if (!gathered.defined()) continue;
      EXPECT_TRUE(same_bits(gathered, whole.find(name)->tensor.detach())) << name;
    }
  });
}

}  // namespace
}  // namespace trireme
