#include "topology/refit.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>

#include "base/error.h"
#include "topology/owned_ranges.h"

namespace trireme {
namespace {

int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Chooses who sends.
class Senders final {
 public:
  Senders(int64_t ranks, int64_t of_node)
      : of_node_(of_node > 0 ? of_node : ranks), near_(static_cast<size_t>(ranks), 0), far_(near_) {}

  // `owners` ascend.
  int64_t choose(const std::vector<int64_t>& owners, int64_t to, int64_t bytes) {
    TRIREME_CHECK(!owners.empty(), "no rank trains what another generates with");
    if (std::binary_search(owners.begin(), owners.end(), to)) return to;
    const int64_t host = slot_of(to, of_node_).node;
    auto first = std::lower_bound(owners.begin(), owners.end(), host * of_node_);
    auto last = std::lower_bound(first, owners.end(), (host + 1) * of_node_);
    const bool near = first != last;
    if (!near) {
      first = owners.begin();
      last = owners.end();
    }
    std::vector<int64_t>& sent = near ? near_ : far_;
    const int64_t from = *std::min_element(
        first, last, [&](int64_t a, int64_t b) { return sent[static_cast<size_t>(a)] < sent[static_cast<size_t>(b)]; });
    sent[static_cast<size_t>(from)] += bytes;
    return from;
  }

 private:
  const int64_t of_node_;
  std::vector<int64_t> near_, far_;  // bytes that each rank has sent within its host, and to others
};

std::vector<int64_t> all_ranks(int64_t world) {
  std::vector<int64_t> ranks(static_cast<size_t>(world));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return ranks;
}

// The ranks that `rank` is connected with by copies, itself too.
std::vector<int64_t> connected(const RefitPlan& plan, int64_t rank) {
  std::vector<int64_t> leader = all_ranks(plan.ranks);
  const auto find = [&](int64_t of) {
    while (leader[static_cast<size_t>(of)] != of) {
      int64_t& next = leader[static_cast<size_t>(of)];
      next = leader[static_cast<size_t>(next)];
      of = next;
    }
    return of;
  };
  for (const RefitCopy& copy : plan.copies) {
    const int64_t a = find(copy.from), b = find(copy.to);
    leader[static_cast<size_t>(std::max(a, b))] = std::min(a, b);
  }
  std::vector<int64_t> group;
  for (int64_t other = 0; other < plan.ranks; ++other) {
    if (find(other) == find(rank)) group.push_back(other);
  }
  return group;
}

// The most bytes that a rank of the group sends, or receives.
int64_t largest_load(const RefitPlan& plan, const std::vector<int64_t>& group) {
  std::vector<int64_t> sent(static_cast<size_t>(plan.ranks), 0), received(sent);
  for (const RefitCopy& copy : plan.copies) {
    if (copy.from == copy.to) continue;
    sent[static_cast<size_t>(copy.from)] += copy.bytes();
    received[static_cast<size_t>(copy.to)] += copy.bytes();
  }
  int64_t most = 0;
  for (const int64_t rank : group)
    most = std::max({most, sent[static_cast<size_t>(rank)], received[static_cast<size_t>(rank)]});
  return most;
}

// What goes one way between two ranks, in as many parts as there are buckets: an index belongs to the part that its
// first byte is in, of equal parts of all bytes.
void share_out(const std::vector<RefitCopy>& copies, std::vector<RefitBucket>& buckets,
               std::vector<RefitCopy> RefitBucket::*list) {
  const auto count = static_cast<int64_t>(buckets.size());
  int64_t total = 0, before = 0;
  for (const RefitCopy& copy : copies) total += copy.bytes();
  for (const RefitCopy& copy : copies) {
    for (int64_t index = 0; index < copy.range.size();) {
      const int64_t part = (before + index * copy.unit_bytes) * count / total;
      const int64_t bytes_until_next = quotient_up((part + 1) * total, count) - before;
      const int64_t end = std::min(copy.range.size(), quotient_up(bytes_until_next, copy.unit_bytes));
      RefitCopy& piece = (buckets[static_cast<size_t>(part)].*list).emplace_back(copy);
      piece.range = {copy.range.begin + index, copy.range.begin + end};
      index = end;
    }
    before += copy.bytes();
  }
}

}  // namespace

Layout generation_layout(const Layout& training, int64_t tp, bool fold) {
  Layout layout{.tp = tp > 0 ? tp : training.tp, .pp = fold ? 1 : training.pp};
  layout.dp = std::max<int64_t>(1, training.world() / (layout.tp * layout.pp));
  return layout;
}

RefitPlan refit_plan(const ModelShape& shape, const std::vector<ModelParameter>& parameters,
                     const RefitLayouts& layouts, int64_t element_bytes) {
  RefitPlan plan{.ranks = layouts.training.world()};
  TRIREME_CHECK(layouts.generation.world() == plan.ranks, "generation in " + to_string(layouts.generation) +
                                                              " has other ranks than training in " +
                                                              to_string(layouts.training));
  const std::vector<int64_t> ranks = all_ranks(plan.ranks);
  RankSlices training(shape, layouts.training, layouts.training_stages, ranks);
  RankSlices generation(shape, layouts.generation, layouts.generation_stages, ranks);
  Senders senders(plan.ranks, layouts.of_node);
  for (size_t p = 0; p < parameters.size(); ++p) {
    training.look_at(parameters[p]);
    generation.look_at(parameters[p]);
    const std::vector<OwnedRange> owned = owned_ranges(training);
    for (const int64_t to : ranks) {
      const ParameterSlice* wanted = generation.slice(static_cast<size_t>(to));
      if (wanted == nullptr) continue;
      const auto choose = [&](const std::vector<int64_t>& owners, int64_t bytes) {
        return senders.choose(owners, to, bytes);
      };
      const RefitCopy like{.to = to, .parameter = static_cast<int64_t>(p)};
      const bool whole = add_copies(*wanted, owned, like, element_bytes, choose, plan.copies);
      TRIREME_CHECK(whole, "no rank trains all of " + parameters[p].name);
    }
  }
  return plan;
}

RankRefit rank_refit(const RefitPlan& plan, int64_t rank, int64_t bucket_bytes) {
  RankRefit refit{.group = connected(plan, rank)};
  refit.buckets.resize(static_cast<size_t>(quotient_up(largest_load(plan, refit.group), bucket_bytes)));
  std::map<int64_t, std::vector<RefitCopy>> to, from;  // by the other rank
  for (const RefitCopy& copy : plan.copies) {
    if (copy.from == rank && copy.to == rank) {
      refit.own.push_back(copy);
    } else if (copy.from == rank) {
      to[copy.to].push_back(copy);
    } else if (copy.to == rank) {
      from[copy.from].push_back(copy);
    }
  }
  for (const auto& [other, copies] : to) share_out(copies, refit.buckets, &RefitBucket::sends);
  for (const auto& [other, copies] : from) share_out(copies, refit.buckets, &RefitBucket::receives);
  return refit;
}

}  // namespace trireme
