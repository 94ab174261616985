// Brute force over every legal layout of worlds up to 64, against a naive construction that shares no code with
// topology/: nested loops in Megatron's order number the ranks, groups are found by comparing coordinates.
#include "topology/topology.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "base/error.h"

namespace trireme {
namespace {

using testing::HasSubstr;
using Group = std::vector<int64_t>;

// Coordinates in the order tp cp dp pp (dense grid) and etp ep edp pp (expert grid).
struct NaiveRank {
  std::array<int64_t, 4> dense, expert;
};

std::vector<NaiveRank> naive(const Layout& l) {
  std::vector<NaiveRank> ranks(l.world());
  int64_t next = 0;
  for (int64_t pp = 0; pp < l.pp; ++pp)
    for (int64_t dp = 0; dp < l.dp; ++dp)
      for (int64_t cp = 0; cp < l.cp; ++cp)
        for (int64_t tp = 0; tp < l.tp; ++tp) ranks[next++].dense = {tp, cp, dp, pp};
  next = 0;
  const int64_t edp_size = l.world() / (l.etp * l.ep * l.pp);
  for (int64_t pp = 0; pp < l.pp; ++pp)
    for (int64_t edp = 0; edp < edp_size; ++edp)
      for (int64_t ep = 0; ep < l.ep; ++ep)
        for (int64_t etp = 0; etp < l.etp; ++etp) ranks[next++].expert = {etp, ep, edp, pp};
  return ranks;
}

struct AxisNames {
  Axis axis;
  bool expert;
  std::array<bool, 4> free;  // the coordinates that vary inside a group
};

// Groups: ranks that agree in every coordinate of the grid but the free ones; in order of their first rank.
std::vector<Group> naive_groups(const std::vector<NaiveRank>& ranks, const AxisNames& names) {
  std::map<std::array<int64_t, 4>, size_t> index;
  std::vector<Group> result;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    std::array<int64_t, 4> key = names.expert ? ranks[rank].expert : ranks[rank].dense;
    for (size_t i = 0; i < 4; ++i) key[i] = names.free[i] ? 0 : key[i];
    const auto [it, fresh] = index.emplace(key, result.size());
    if (fresh) result.emplace_back();
    result[it->second].push_back(static_cast<int64_t>(rank));
  }
  return result;
}

constexpr AxisNames kAxisNames[] = {
    {Axis::kTp, false, {true, false, false, false}},   {Axis::kCp, false, {false, true, false, false}},
    {Axis::kDp, false, {false, false, true, false}},   {Axis::kPp, false, {false, false, false, true}},
    {Axis::kPp, true, {false, false, false, true}},    {Axis::kEtp, true, {true, false, false, false}},
    {Axis::kEp, true, {false, true, false, false}},    {Axis::kEdp, true, {false, false, true, false}},
    {Axis::kDpCp, false, {false, true, true, false}},  {Axis::kTpCp, false, {true, true, false, false}},
    {Axis::kTpPp, false, {true, false, false, true}},  {Axis::kEtpEp, true, {true, true, false, false}},
    {Axis::kEtpEpPp, true, {true, true, false, true}},
};

std::vector<Layout> every_layout(int64_t world) {
  std::vector<Layout> layouts;
  for (int64_t tp = 1; tp <= world; ++tp)
    for (int64_t cp = 1; cp <= world; ++cp)
      for (int64_t pp = 1; pp <= world; ++pp) {
        if (world % (tp * cp * pp) != 0) continue;
        for (int64_t ep = 1; ep <= world; ++ep)
          for (int64_t etp = 1; etp <= world; ++etp) {
            if (world % (etp * ep * pp) != 0) continue;
            layouts.push_back({.tp = tp, .cp = cp, .ep = ep, .dp = world / (tp * cp * pp), .pp = pp, .etp = etp});
          }
      }
  return layouts;
}

TEST(Topology, EveryLayoutOfWorldsUpTo64MatchesTheNaiveConstruction) {
  size_t checked = 0;
  for (int64_t world = 1; world <= 64; ++world) {
    for (const Layout& layout : every_layout(world)) {
      ++checked;
      ASSERT_TRUE(check_layout(layout, {.world = world}).ok()) << to_string(layout);
      const std::vector<NaiveRank> expected = naive(layout);
      for (int64_t rank = 0; rank < world; ++rank) {
        const Coordinates at = coordinates(layout, rank);
        const bool equal = std::array{at.tp, at.cp, at.dp, at.pp} == expected[rank].dense &&
                           std::array{at.etp, at.ep, at.edp, at.pp} == expected[rank].expert &&
                           rank_of(layout, at.tp, at.cp, at.dp, at.pp) == rank &&
                           expert_rank_of(layout, at.etp, at.ep, at.edp, at.pp) == rank;
        ASSERT_TRUE(equal) << to_string(layout) << " rank " << rank;
      }
      for (const AxisNames& names : kAxisNames) {
        const auto actual = groups(layout, names.axis);
        ASSERT_EQ(actual, naive_groups(expected, names)) << to_string(layout) << " axis " << to_string(names.axis);
        std::vector<int> seen(world, 0);
        for (const Group& group : actual) {
          ASSERT_EQ(static_cast<int64_t>(group.size()), group_size(layout, names.axis));
          for (const int64_t rank : group) ++seen[rank];
          ASSERT_EQ(group_of(layout, names.axis, group.front()), group);
          ASSERT_EQ(group_of(layout, names.axis, group[group.size() / 2]), group);
        }
        ASSERT_EQ(seen, std::vector<int>(world, 1)) << "not a partition: " << to_string(layout);
      }
    }
  }
  EXPECT_GT(checked, 3000u);
}

// Whether no group of the axis has ranks both inside and outside of the set.
bool holds_whole_groups(const Group& ranks, const std::vector<Group>& groups) {
  return std::all_of(groups.begin(), groups.end(), [&](const Group& group) {
    const auto inside = std::count_if(
        group.begin(), group.end(), [&](int64_t rank) { return std::binary_search(ranks.begin(), ranks.end(), rank); });
    return inside == 0 || inside == static_cast<int64_t>(group.size());
  });
}

// The ranks that are reached from `rank` by going from group to group: by the naive construction's groups.
Group closure(int64_t rank, const std::vector<std::vector<Group>>& axes) {
  std::set<int64_t> reached{rank};
  for (size_t before = 0; before != reached.size();) {
    before = reached.size();
    for (const std::vector<Group>& groups : axes) {
      for (const Group& group : groups) {
        if (std::any_of(group.begin(), group.end(), [&](int64_t one) { return reached.count(one) > 0; }))
          reached.insert(group.begin(), group.end());
      }
    }
  }
  return {reached.begin(), reached.end()};
}

// Who makes passes or steps together leaves nobody waiting outside, and is no larger than that takes.
TEST(Topology, PassesAndCopiesAreClosed) {
  constexpr AxisNames kTensor{Axis::kTp, false, {true, false, false, false}},
      kContext{Axis::kTpCp, false, {true, true, false, false}},
      kExperts{Axis::kEtpEp, true, {true, true, false, false}};
  for (const int64_t world : {1, 2, 6, 8, 12, 16, 18, 24}) {
    for (const Layout& layout : every_layout(world)) {
      const std::vector<NaiveRank> ranks = naive(layout);
      const auto tensor = naive_groups(ranks, kTensor), context = naive_groups(ranks, kContext),
                 experts = naive_groups(ranks, kExperts);
      for (const auto& [axis, inner] : {std::pair{Axis::kCopy, &tensor}, std::pair{Axis::kPasses, &context}}) {
        std::vector<int> seen(static_cast<size_t>(world), 0);
        for (const Group& group : groups(layout, axis)) {
          ASSERT_EQ(static_cast<int64_t>(group.size()), group_size(layout, axis));
          ASSERT_TRUE(holds_whole_groups(group, *inner) && holds_whole_groups(group, experts)) << to_string(layout);
          for (const int64_t rank : group) ++seen[static_cast<size_t>(rank)];
          ASSERT_EQ(group_of(layout, axis, group.back()), group);
          ASSERT_EQ(coordinates(layout, group.front()).pp, coordinates(layout, group.back()).pp);
          ASSERT_EQ(group, closure(group[group.size() / 2], {*inner, experts}))
              << to_string(layout) << " " << to_string(axis);
        }
        ASSERT_EQ(seen, std::vector<int>(static_cast<size_t>(world), 1)) << "not a partition: " << to_string(layout);
      }
      for (int64_t rank = 0; rank < world; ++rank) {  // the same run of every stage
        Group whole;
        for (const int64_t stage : group_of(layout, Axis::kPp, rank)) {
          const Group of_stage = group_of(layout, Axis::kCopy, stage);
          whole.insert(whole.end(), of_stage.begin(), of_stage.end());
        }
        ASSERT_EQ(group_of(layout, Axis::kCopyPp, rank), whole) << to_string(layout);
      }
    }
  }
}

TEST(Topology, AxesOfOneGridAreOrthogonal) {
  // Two groups of different axes of a grid share at most one rank, and the axes together span the world.
  for (const int64_t world : {8, 12, 16, 32}) {
    for (const Layout& layout : every_layout(world)) {
      for (const auto& grid : {std::vector<Axis>{Axis::kTp, Axis::kCp, Axis::kDp, Axis::kPp},
                               std::vector<Axis>{Axis::kEtp, Axis::kEp, Axis::kEdp, Axis::kPp}}) {
        int64_t product = 1;
        for (const Axis a : grid) {
          product *= group_size(layout, a);
          const Group mine = group_of(layout, a, world / 2);
          for (const Axis b : grid) {
            if (a == b) continue;
            const Group other = group_of(layout, b, world / 2);
            Group common;
            std::set_intersection(mine.begin(), mine.end(), other.begin(), other.end(), std::back_inserter(common));
            ASSERT_EQ(common, Group{world / 2}) << to_string(layout);
          }
        }
        ASSERT_EQ(product, world) << to_string(layout);
      }
    }
  }
}

TEST(Topology, MegatronExamplesByHand) {
  // 16 ranks, tp 2, pp 4, so dp 2: the example of Megatron's initialize_model_parallel.
  const Layout a{.tp = 2, .dp = 2, .pp = 4};
  EXPECT_EQ(groups(a, Axis::kTp).at(1), (Group{2, 3}));
  EXPECT_EQ(groups(a, Axis::kDp).at(0), (Group{0, 2}));
  EXPECT_EQ(groups(a, Axis::kPp).at(0), (Group{0, 4, 8, 12}));
  EXPECT_EQ(groups(a, Axis::kTpPp).at(0), (Group{0, 1, 4, 5, 8, 9, 12, 13}));
  // EP folds over TP x CP x DP: 8 ranks, tp 2, cp 2, ep 8 with dp 2.
  const Layout b{.tp = 2, .cp = 2, .ep = 8, .dp = 2};
  EXPECT_EQ(groups(b, Axis::kEp).at(0), (Group{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(b.expert_dp(), 1);
  EXPECT_EQ(groups(b, Axis::kDpCp).at(0), (Group{0, 2, 4, 6}));
}

TEST(Topology, LayoutTextRoundTrips) {
  const Layout layout{.tp = 4, .cp = 2, .ep = 8, .dp = 3, .pp = 5, .etp = 2};
  EXPECT_EQ(to_string(layout), "tp=4,cp=2,ep=8,dp=3,pp=5,etp=2");
  EXPECT_EQ(parse_layout(to_string(layout)), layout);
  EXPECT_EQ(parse_layout("tp=2"), (Layout{.tp = 2}));
  EXPECT_EQ(parse_layout(""), Layout{});
  for (const char* bad : {"xp=2", "tp", "tp=0", "tp=x", "tp=99999999", "tp=-1"})
    EXPECT_THROW(parse_layout(bad), Error) << bad;
}

std::string first_error(const Layout& layout, const LayoutCheck& check) {
  const LayoutReport report = check_layout(layout, check);
  return report.ok() ? "" : report.errors.front();
}

TEST(Validity, NamesTheLegalValues) {
  const ModelShape llama = *known_model_shape("meta-llama/Llama-3.1-8B");
  EXPECT_EQ(
      first_error({.tp = 3}, {.world = 24, .gpus_per_node = 8}),
      "tp 3 does not divide the 8 GPUs of a node (tensor parallel ranks must share a node); legal values of tp here: "
      "1, 2, 4, 8");
  EXPECT_THAT(first_error({.tp = 16}, {.world = 16, .gpus_per_node = 16, .shape = &llama}),
              HasSubstr("tp 16 does not divide the 8 key/value heads; legal values of tp here: 1, 2, 4, 8"));
  ModelShape narrow = llama;
  narrow.intermediate = 14338;
  EXPECT_THAT(first_error({.tp = 4}, {.world = 4, .shape = &narrow}),
              HasSubstr("tp 4 does not divide the 14338 rows of the MLP; legal values of tp here: 1, 2"));
  ModelShape experts = *known_model_shape("Qwen/Qwen3-30B-A3B");
  experts.moe_intermediate = 770;
  EXPECT_THAT(first_error({.dp = 4, .etp = 4}, {.world = 4, .shape = &experts}),
              HasSubstr("etp 4 does not divide the 770 rows of an expert; legal values of etp here: 1, 2"));
  EXPECT_THAT(first_error({.pp = 3}, {.world = 48, .gpus_per_node = 8, .shape = &llama}),
              HasSubstr("pp 3 does not divide the 32 layers; legal values of pp here: 1, 2, 4, 8, 16"));
  EXPECT_THAT(
      first_error({.tp = 4, .pp = 4}, {.world = 8, .gpus_per_node = 8}),
      HasSubstr("tp 4 x cp 1 x pp 4 = 16 does not divide the 8 ranks; with the others as they are, tp can be 1, 2, "
                "or pp can be 1, 2"));
  EXPECT_THAT(first_error({.ep = 4, .dp = 8}, {.world = 8, .shape = &llama}),
              HasSubstr("without experts; ep must be 1"));
  EXPECT_THAT(first_error({.dp = 8, .etp = 2}, {.world = 8, .shape = &llama}),
              HasSubstr("etp 2 for a model without experts; etp must be 1"));
  EXPECT_THAT(first_error({.dp = 3}, {.world = 8}), HasSubstr("dp must be 8"));
  EXPECT_THAT(first_error({.tp = 0}, {.world = 8}), HasSubstr("tp is 0; it must be from 1"));
  EXPECT_THAT(first_error({.tp = 1 << 16, .cp = 1 << 16, .pp = 1 << 16}, {.world = 8}), HasSubstr("more than"));
  const ModelShape moe = *known_model_shape("Qwen/Qwen3-30B-A3B");
  EXPECT_THAT(first_error({.ep = 3, .dp = 24}, {.world = 24, .gpus_per_node = 8, .shape = &moe}),
              HasSubstr("ep 3 does not divide the 128 experts; legal values of ep here: 1, 2, 4, 8"));
  EXPECT_THAT(
      first_error({.ep = 16, .dp = 8}, {.world = 8, .shape = &moe}),
      HasSubstr(
          "etp 1 x ep 16 x pp 1 = 16 does not divide the 8 ranks; with the others as they are, ep can be 1, 2, 4, 8"));
}

TEST(Validity, ProductsAreJudgedOfAnySizes) {
  EXPECT_TRUE(product_problems({.tp = 2, .ep = 4, .pp = 2}, 8).empty());
  const std::vector<ProductProblem> both = product_problems({.tp = 4, .cp = 4, .ep = 16}, 8, 2);
  ASSERT_EQ(both.size(), 2u);
  EXPECT_EQ(to_string(both[0]),
            "tp 4 x cp 4 x pp 1 = 16 does not divide the 8 ranks; with the others as they are, tp "
            "can be 1, 2, or cp can be 1, 2");
  EXPECT_EQ(both[0].sizes[0].legal, (std::vector<int64_t>{1, 2}));
  EXPECT_TRUE(both[0].sizes[2].legal.empty());
  ProductProblem one = both[1];
  std::erase_if(one.sizes, [](const ProductProblem::Size& size) { return size.size == 1; });
  one.sizes.front().name = "experts";
  EXPECT_EQ(to_string(one), "experts 16 does not divide the 8 ranks; experts can be 1, 2, 4, 8");
  const std::vector<ProductProblem> large = product_problems({.tp = INT64_MAX, .cp = INT64_MAX - 1, .pp = 7}, 9);
  ASSERT_EQ(large.size(), 1u);
  EXPECT_THAT(to_string(large[0]),
              HasSubstr(" = 9223372036854775807 does not divide the 9 ranks; the product can be 1, "
                        "3, 9"));
  // More ranks than can be: no divisors are looked for.
  EXPECT_EQ(to_string(product_problems({.tp = 2}, INT64_MAX).at(0)),
            "tp 2 x cp 1 x pp 1 = 2 does not divide the 9223372036854775807 ranks");
}

TEST(Validity, ContextAndExpertsAcrossNodesOnlyWarn) {
  const LayoutReport cp = check_layout({.tp = 4, .cp = 4}, {.world = 16, .gpus_per_node = 8});
  EXPECT_TRUE(cp.ok());
  ASSERT_EQ(cp.warnings.size(), 1u);
  EXPECT_THAT(cp.warnings[0], HasSubstr("tp 4 x cp 4 spans nodes of 8 GPUs"));
  EXPECT_TRUE(check_layout({.tp = 4, .cp = 2, .dp = 2}, {.world = 16, .gpus_per_node = 8}).warnings.empty());
  EXPECT_EQ(check_layout({.ep = 16, .dp = 16}, {.world = 16, .gpus_per_node = 8}).warnings.size(), 1u);
  EXPECT_TRUE(check_layout({.ep = 8, .dp = 16}, {.world = 16, .gpus_per_node = 8}).warnings.empty());
}

TEST(Validity, LegalLayoutsAreExactlyThoseThatPass) {
  const ModelShape moe = *known_model_shape("Qwen3-30B-A3B");
  const LayoutCheck check{.world = 16, .gpus_per_node = 8, .shape = &moe};
  for (const int64_t etp : {1, 2, 8}) {
    std::set<std::string> expected;
    for (const Layout& layout : every_layout(16)) {
      if (layout.etp == etp && check_layout(layout, check).ok()) expected.insert(to_string(layout));
    }
    std::set<std::string> actual;
    for (const Layout& layout : legal_layouts(check, etp)) actual.insert(to_string(layout));
    EXPECT_EQ(actual, expected) << etp;
    EXPECT_FALSE(expected.empty()) << etp;
  }
  EXPECT_EQ(legal_layouts(check), legal_layouts(check, 1));
  const ModelShape dense = *known_model_shape("Qwen3-8B");
  EXPECT_TRUE(legal_layouts({.world = 16, .shape = &dense}, 2).empty());
  for (const int64_t none : {0, 3, 16}) EXPECT_TRUE(legal_layouts(check, none).empty()) << none;
  EXPECT_EQ(derive_dp({.tp = 4, .pp = 4}, 64), 4);
  EXPECT_FALSE(derive_dp({.tp = 3}, 64));
}

TEST(Placement, RanksFillNodesAndTensorPeersShareOne) {
  EXPECT_EQ(slot_of(13, 8).node, 1);
  EXPECT_EQ(slot_of(13, 8).local_rank, 5);
  for (const Layout& layout : every_layout(32)) {
    if (!check_layout(layout, {.world = 32, .gpus_per_node = 8}).ok()) continue;
    EXPECT_TRUE(inside_node(layout, Axis::kTp, 8)) << to_string(layout);
  }
  EXPECT_FALSE(inside_node({.tp = 4, .dp = 4, .pp = 4}, Axis::kPp, 8));
  EXPECT_TRUE(inside_node({.tp = 4, .cp = 2, .dp = 4}, Axis::kTpCp, 8));
}

TEST(Memory, ParameterCountsAreThePublishedOnes) {
  const std::map<std::string, int64_t> published = {
      {"meta-llama/Llama-3.1-8B-Instruct", 8030261248},
      {"meta-llama/Llama-3.2-1B", 1235814400},
      {"meta-llama/Llama-3.1-70B", 70553706496},
      {"Qwen/Qwen2.5-0.5B-Instruct", 494032768},
      {"Qwen/Qwen2.5-1.5B", 1543714304},
      {"Qwen/Qwen2.5-7B", 7615616512},
      {"Qwen/Qwen3-0.6B", 596049920},
      {"Qwen/Qwen3-8B", 8190735360},
      {"Qwen/Qwen3-30B-A3B", 30532122624},
  };
  for (const auto& [name, count] : published) {
    ASSERT_TRUE(known_model_shape(name)) << name;
    EXPECT_EQ(parameter_count(*known_model_shape(name)), count) << name;
  }
  EXPECT_FALSE(known_model_shape("someone/else"));
  for (const char* name : {"mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1",
                           "Qwen/Qwen3-30B-A3B-Thinking-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507"}) {
    EXPECT_TRUE(known_model_shape(name)) << name;
  }
  EXPECT_FALSE(known_model_shape(""));
  EXPECT_FALSE(known_model_shape("///"));
}

TEST(Memory, ShardsAddUpToTheModel) {
  const ModelShape shape = *known_model_shape("Qwen3-30B-A3B");
  const int64_t replicated =
      shape.layers * (2 * shape.hidden + 2 * shape.head_dim + shape.hidden * shape.experts) + shape.hidden;
  for (const Layout& layout : legal_layouts({.world = 32, .gpus_per_node = 8, .shape = &shape})) {
    int64_t dense = 0, expert = 0;
    for (int64_t rank = 0; rank < layout.world(); ++rank) {
      const RankMemory memory = rank_memory(shape, layout, rank);
      // One copy of the dense weights is one tp-pp group; one copy of the experts is one etp-ep-pp group.
      const Coordinates at = coordinates(layout, rank);
      if (at.cp == 0 && at.dp == 0) dense += memory.dense_params;
      if (at.edp == 0) expert += memory.expert_params;
      EXPECT_LE(memory.total_bytes(), peak_memory(shape, layout).total_bytes());
    }
    EXPECT_EQ(expert, shape.layers * shape.experts * 3 * shape.hidden * shape.moe_intermediate) << to_string(layout);
    EXPECT_EQ(dense + expert - (layout.tp - 1) * replicated, parameter_count(shape)) << to_string(layout);
  }
}

TEST(Memory, ZeroOneSlicesTheOptimizerOnly) {
  const ModelShape shape = *known_model_shape("Llama-3.1-8B");
  const int64_t params = parameter_count(shape);
  const RankMemory one = peak_memory(shape, {});
  EXPECT_EQ(one.weights_bytes, 2 * params);
  EXPECT_EQ(one.grads_bytes, 4 * params);
  EXPECT_EQ(one.optimizer_bytes, 12 * params);
  const RankMemory eight = peak_memory(shape, {.dp = 8});
  EXPECT_EQ(eight.weights_bytes, one.weights_bytes);
  EXPECT_EQ(eight.optimizer_bytes, 12 * (params / 8));
  EXPECT_EQ(peak_memory(shape, {.dp = 8}, {.shard_optimizer = false}).optimizer_bytes, one.optimizer_bytes);
  EXPECT_EQ(peak_memory(shape, {}, {.reference_weights = true}).weights_bytes, 4 * params);
}

TEST(Memory, TiedEmbeddingIsOnBothEndsOfAPipeline) {
  const ModelShape shape = *known_model_shape("Qwen3-0.6B");
  const Layout layout{.pp = 4};
  int64_t total = 0;
  for (int64_t rank = 0; rank < 4; ++rank) total += rank_memory(shape, layout, rank).dense_params;
  EXPECT_EQ(total, parameter_count(shape) + shape.vocab * shape.hidden);
}

}  // namespace
}  // namespace trireme
