#include "trainer/batch/packing.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "base/error.h"

namespace trireme {
namespace {

struct OpenBin {
  Members items;
  int64_t load = 0;
};

void put(OpenBin& bin, int64_t item, const std::vector<int64_t>& lengths) {
  bin.items.push_back(item);
  bin.load += lengths[static_cast<size_t>(item)];
}

std::vector<Members> strip(const std::vector<OpenBin>& bins) {
  std::vector<Members> result;
  for (const OpenBin& bin : bins) result.push_back(bin.items);
  return result;
}

// Longest first; equal lengths keep the order of their index.
std::vector<int64_t> descending(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> order(lengths.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return lengths[static_cast<size_t>(a)] > lengths[static_cast<size_t>(b)];
  });
  return order;
}

std::vector<OpenBin> first_fit(const std::vector<int64_t>& order, const std::vector<int64_t>& lengths,
                               int64_t capacity) {
  std::vector<OpenBin> bins;
  for (const int64_t item : order) {
    const int64_t length = lengths[static_cast<size_t>(item)];
    auto fits =
        std::find_if(bins.begin(), bins.end(), [&](const OpenBin& bin) { return bin.load + length <= capacity; });
    if (fits == bins.end()) fits = bins.insert(bins.end(), OpenBin{});
    put(*fits, item, lengths);
  }
  return bins;
}

std::vector<OpenBin> modified_first_fit_decreasing(const std::vector<int64_t>& lengths, int64_t capacity) {
  const auto length_of = [&](int64_t item) { return lengths[static_cast<size_t>(item)]; };
  std::vector<int64_t> medium, small, tiny;  // each descending
  std::vector<OpenBin> bins;
  std::vector<bool> has_medium;
  for (const int64_t item : descending(lengths)) {
    const int64_t length = length_of(item);
    if (2 * length > capacity) {
      bins.emplace_back();
      put(bins.back(), item, lengths);
    } else if (3 * length > capacity) {
      medium.push_back(item);
    } else if (6 * length > capacity) {
      small.push_back(item);
    } else {
      tiny.push_back(item);
    }
  }
  has_medium.assign(bins.size(), false);
  for (size_t b = 0; b < bins.size(); ++b) {  // the largest medium that fits
    const auto fits = std::find_if(medium.begin(), medium.end(),
                                   [&](int64_t item) { return bins[b].load + length_of(item) <= capacity; });
    if (fits == medium.end()) continue;
    put(bins[b], *fits, lengths);
    medium.erase(fits);
    has_medium[b] = true;
  }
  for (size_t b = bins.size(); b-- > 0;) {  // two smalls: the smallest, and the largest that still fits
    if (has_medium[b] || small.size() < 2) continue;
    const int64_t smallest = small.back();
    if (bins[b].load + length_of(smallest) + length_of(small[small.size() - 2]) > capacity) continue;
    put(bins[b], smallest, lengths);
    small.pop_back();
    const auto fits = std::find_if(small.begin(), small.end(),
                                   [&](int64_t item) { return bins[b].load + length_of(item) <= capacity; });
    put(bins[b], *fits, lengths);
    small.erase(fits);
  }
  std::vector<int64_t> rest = medium;
  rest.insert(rest.end(), small.begin(), small.end());
  rest.insert(rest.end(), tiny.begin(), tiny.end());
  std::vector<int64_t> left;
  for (const int64_t item : rest) {
    const auto fits = std::find_if(bins.begin(), bins.end(),
                                   [&](const OpenBin& bin) { return bin.load + length_of(item) <= capacity; });
    if (fits == bins.end())
      left.push_back(item);
    else
      put(*fits, item, lengths);
  }
  for (const int64_t item : left) {  // the least filled bin that has room, else a new one
    OpenBin* best = nullptr;
    for (OpenBin& bin : bins) {
      if (bin.load + length_of(item) <= capacity && (best == nullptr || bin.load < best->load)) best = &bin;
    }
    if (best == nullptr) best = &bins.emplace_back();
    put(*best, item, lengths);
  }
  return bins;
}

// `count` bins of about equal load: the largest item into the emptiest bin (Graham, "Bounds on multiprocessing timing
// anomalies", 1969). Nothing where a bin gets too full.
std::vector<OpenBin> deal_evenly(const std::vector<int64_t>& lengths, int64_t count, int64_t capacity) {
  std::vector<OpenBin> bins(static_cast<size_t>(count));
  for (const int64_t item : descending(lengths)) {
    put(*std::min_element(bins.begin(), bins.end(), [](const OpenBin& a, const OpenBin& b) { return a.load < b.load; }),
        item, lengths);
  }
  const bool fits = std::all_of(bins.begin(), bins.end(), [&](const OpenBin& bin) { return bin.load <= capacity; });
  return fits ? bins : std::vector<OpenBin>();
}

struct Dealt {
  std::vector<std::vector<Members>> per_rank;
  int64_t fullest = 0;  // load of the rank that has most
};

// As many bins for each rank; the fullest first to the rank that has least.
Dealt deal_to_ranks(std::vector<OpenBin> bins, int64_t ranks) {
  std::stable_sort(bins.begin(), bins.end(), [](const OpenBin& a, const OpenBin& b) { return a.load > b.load; });
  const size_t each = bins.size() / static_cast<size_t>(ranks);
  std::vector<std::vector<Members>> per_rank(static_cast<size_t>(ranks));
  std::vector<int64_t> loads(static_cast<size_t>(ranks), 0);
  for (OpenBin& bin : bins) {
    size_t least = per_rank.size();
    for (size_t r = 0; r < per_rank.size(); ++r) {
      if (per_rank[r].size() < each && (least == per_rank.size() || loads[r] < loads[least])) least = r;
    }
    loads[least] += bin.load;
    per_rank[least].push_back(std::move(bin.items));
  }
  return {std::move(per_rank), *std::max_element(loads.begin(), loads.end())};
}

// The samples of a group.
struct PromptGroup {
  Members members;
  int64_t prompt = 0;
  int64_t responses = 0;  // tokens of all
  int64_t longest = 0;    // of a response
};

// `count` bins of about equal load, group after group: each bin takes from the group at hand the largest responses that
// its share of what is left has room for, so that a group is cut only where a bin ends. Nothing where a bin gets too
// full.
std::vector<OpenBin> fill_evenly(const std::vector<PromptGroup>& groups, const std::vector<int64_t>& lengths,
                                 int64_t count, int64_t capacity) {
  struct Rest {
    std::vector<int64_t> members;  // the longest first
    int64_t prompt, responses;
  };
  std::vector<Rest> rest;
  int64_t left = 0;
  for (const PromptGroup& group : groups) {
    Rest& of = rest.emplace_back(Rest{group.members, group.prompt, group.responses});
    std::stable_sort(of.members.begin(), of.members.end(), [&](int64_t a, int64_t b) {
      return lengths[static_cast<size_t>(a)] > lengths[static_cast<size_t>(b)];
    });
    left += group.prompt + group.responses;
  }
  std::vector<OpenBin> bins(static_cast<size_t>(count));
  size_t at = 0;
  for (int64_t b = 0; b < count; ++b) {
    OpenBin& bin = bins[static_cast<size_t>(b)];
    const bool last = b + 1 == count;
    // Each cut makes the next bin hold a prompt once more.
    const int64_t prompt = at < rest.size() ? rest[at].prompt : 0;
    const int64_t share = (left + prompt * (count - b - 1) + count - b - 1) / (count - b);
    while (at < rest.size()) {
      Rest& group = rest[at];
      const bool whole = last || bin.load + group.prompt + group.responses <= share;
      int64_t load = bin.load + group.prompt;
      std::vector<int64_t> kept;
      for (const int64_t item : group.members) {
        const int64_t response = lengths[static_cast<size_t>(item)] - group.prompt;
        // An empty bin takes something in any case.
        if (whole || load + response <= share || (bin.items.empty() && load == group.prompt)) {
          bin.items.push_back(item);
          load += response;
          group.responses -= response;
        } else {
          kept.push_back(item);
        }
      }
      const bool took = kept.size() < group.members.size();
      if (took) {
        left -= load - bin.load - (kept.empty() ? 0 : group.prompt);
        bin.load = load;
      }
      group.members = std::move(kept);
      if (!group.members.empty()) break;
      ++at;
    }
    if (bin.load > capacity) return {};
  }
  return bins;
}

void check_lengths(const std::vector<int64_t>& lengths, int64_t capacity) {
  for (size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] > capacity) {
      fail_user("sequence " + std::to_string(i) + " has " + std::to_string(lengths[i]) +
                " tokens, more than a micro-batch holds (" + std::to_string(capacity) +
                "); raise policy.sequence_packing.train_mb_tokens");
    }
  }
}

int64_t bins_for_ranks(const std::vector<Members>& packed, int64_t ranks) {
  return std::max(ranks, (static_cast<int64_t>(packed.size()) + ranks - 1) / ranks * ranks);
}

}  // namespace

PackingAlgorithm parse_packing_algorithm(const std::string& name) {
  if (name == "concatenative") return PackingAlgorithm::kConcatenative;
  if (name == "first_fit_decreasing") return PackingAlgorithm::kFirstFitDecreasing;
  if (name == "first_fit_shuffle") return PackingAlgorithm::kFirstFitShuffle;
  if (name == "modified_first_fit_decreasing") return PackingAlgorithm::kModifiedFirstFitDecreasing;
  fail_user("unknown packing algorithm '" + name +
            "'; known are concatenative, first_fit_decreasing, first_fit_shuffle, modified_first_fit_decreasing");
}

std::vector<Members> pack_bins(const std::vector<int64_t>& lengths, int64_t capacity, PackingAlgorithm algorithm,
                               uint64_t seed) {
  check_lengths(lengths, capacity);
  switch (algorithm) {
    case PackingAlgorithm::kConcatenative: {
      std::vector<OpenBin> bins;
      for (size_t i = 0; i < lengths.size(); ++i) {
        if (bins.empty() || bins.back().load + lengths[i] > capacity) bins.emplace_back();
        put(bins.back(), static_cast<int64_t>(i), lengths);
      }
      return strip(bins);
    }
    case PackingAlgorithm::kFirstFitDecreasing:
      return strip(first_fit(descending(lengths), lengths, capacity));
    case PackingAlgorithm::kFirstFitShuffle: {
      std::vector<int64_t> order(lengths.size());
      std::iota(order.begin(), order.end(), int64_t{0});
      std::mt19937_64 generator(seed);
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[generator() % i]);
      return strip(first_fit(order, lengths, capacity));
    }
    case PackingAlgorithm::kModifiedFirstFitDecreasing:
      return strip(modified_first_fit_decreasing(lengths, capacity));
  }
  fail_internal("unhandled packing algorithm");
}

std::vector<Members> balance_bins(std::vector<Members> bins, int64_t minimum, int64_t multiple) {
  int64_t wanted = std::max<int64_t>(minimum, static_cast<int64_t>(bins.size()));
  wanted = (wanted + multiple - 1) / multiple * multiple;
  while (static_cast<int64_t>(bins.size()) < wanted) {
    bins.emplace_back();
    const auto fullest = std::max_element(bins.begin(), bins.end() - 1,
                                          [](const Members& a, const Members& b) { return a.size() < b.size(); });
    if (fullest == bins.end() - 1 || fullest->size() < 2) continue;  // nothing to move: the new bin stays empty
    bins.back().push_back(fullest->back());
    fullest->pop_back();
  }
  return bins;
}

std::vector<std::vector<Members>> packed_micro_batches(const std::vector<int64_t>& lengths, int64_t capacity,
                                                       int64_t ranks, PackingAlgorithm algorithm, uint64_t seed) {
  const std::vector<Members> packed = pack_bins(lengths, capacity, algorithm, seed);
  if (ranks == 1) return {balance_bins(packed, 1, 1)};
  const int64_t wanted = bins_for_ranks(packed, ranks);
  if (std::vector<OpenBin> even = deal_evenly(lengths, wanted, capacity); !even.empty())
    return deal_to_ranks(std::move(even), ranks).per_rank;
  std::vector<OpenBin> bins;
  for (const Members& bin : balance_bins(packed, ranks, ranks)) {
    OpenBin& open = bins.emplace_back();
    for (const int64_t item : bin) put(open, item, lengths);
  }
  return deal_to_ranks(std::move(bins), ranks).per_rank;
}

std::vector<std::vector<Members>> shared_micro_batches(const SharedLengths& samples, int64_t capacity, int64_t ranks,
                                                       PackingAlgorithm algorithm, uint64_t seed) {
  const auto& [lengths, prompts, groups] = samples;
  TRIREME_CHECK(prompts.size() == lengths.size() && groups.size() == lengths.size(),
                "shared_micro_batches: a prompt's length and a group for each sample expected");
  check_lengths(lengths, capacity);
  std::vector<PromptGroup> order;  // by first member
  std::map<int64_t, size_t> place;
  int64_t responses_of_all = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const auto [found, fresh] = place.try_emplace(groups[i], order.size());
    if (fresh) order.push_back({{}, prompts[i], 0, 0});
    PromptGroup& group = order[found->second];
    TRIREME_CHECK(group.prompt == prompts[i] && prompts[i] <= lengths[i],
                  "shared_micro_batches: the samples of group " + std::to_string(groups[i]) +
                      " have prompts of different lengths");
    group.members.push_back(static_cast<int64_t>(i));
    group.responses += lengths[i] - prompts[i];
    group.longest = std::max(group.longest, lengths[i] - prompts[i]);
    responses_of_all += lengths[i] - prompts[i];
  }
  const int64_t share = (responses_of_all + ranks - 1) / ranks;
  std::vector<Members> parts;
  std::vector<int64_t> loads;
  for (const PromptGroup& group : order) {
    const int64_t room = std::max<int64_t>(1, std::min(capacity - group.prompt, std::max(group.longest, share)));
    const int64_t wanted = std::max<int64_t>(1, (group.responses + room - 1) / room);
    const int64_t even = (group.responses + wanted - 1) / wanted;
    Members part;
    int64_t responses = 0;
    const auto close = [&] {
      if (part.empty()) return;
      parts.push_back(std::move(part));
      loads.push_back(group.prompt + responses);
      part = {};
      responses = 0;
    };
    for (const int64_t i : group.members) {
      const int64_t own = lengths[static_cast<size_t>(i)] - group.prompt;
      if (responses + own > room) close();
      part.push_back(i);
      responses += own;
      if (responses >= even) close();
    }
    close();
  }
  std::vector<Members> packed = pack_bins(loads, capacity, algorithm, seed);
  const int64_t wanted_bins = bins_for_ranks(packed, ranks);
  std::vector<Members> bins;
  for (Members& of_parts : packed) {
    std::sort(of_parts.begin(), of_parts.end());  // a group's parts next to each other
    Members& bin = bins.emplace_back();
    for (const int64_t p : of_parts) {
      const Members& part = parts[static_cast<size_t>(p)];
      bin.insert(bin.end(), part.begin(), part.end());
    }
  }
  bins = balance_bins(std::move(bins), ranks, ranks);
  if (ranks == 1) return {std::move(bins)};
  std::vector<OpenBin> with_loads;
  for (Members& bin : bins) {
    OpenBin& open = with_loads.emplace_back();
    std::set<int64_t> seen;
    for (const int64_t i : bin) {
      const auto at = static_cast<size_t>(i);
      open.load += lengths[at] - (seen.insert(groups[at]).second ? 0 : prompts[at]);
    }
    open.items = std::move(bin);
  }
  Dealt dealt = deal_to_ranks(std::move(with_loads), ranks);
  std::vector<OpenBin> even = fill_evenly(order, lengths, wanted_bins, capacity);
  if (even.empty()) return dealt.per_rank;
  Dealt evenly = deal_to_ranks(std::move(even), ranks);
  return evenly.fullest <= dealt.fullest ? evenly.per_rank : dealt.per_rank;
}

std::vector<std::vector<Members>> dynamic_micro_batches(const std::vector<int64_t>& lengths, int64_t token_budget,
                                                        int64_t round, int64_t ranks) {
  const auto rounded = [&](int64_t length) { return (length + round - 1) / round * round; };
  std::vector<int64_t> order = descending(lengths);
  std::reverse(order.begin(), order.end());
  const size_t count = static_cast<size_t>(ranks);
  std::vector<std::vector<Members>> per_rank(count);
  size_t in_batch = 0;
  for (size_t start = 0; start < order.size(); start += count) {
    const size_t end = std::min(order.size(), start + count);
    const int64_t longest =
        rounded(lengths[static_cast<size_t>(order[end - 1])]);  // ascending: the last is the longest
    if (longest > token_budget) {
      fail_user("a sequence of " + std::to_string(lengths[static_cast<size_t>(order[end - 1])]) +
                " tokens does not fit a micro-batch of " + std::to_string(token_budget) +
                "; raise policy.dynamic_batching.train_mb_tokens");
    }
    if (in_batch == 0 || static_cast<int64_t>(in_batch + 1) * longest > token_budget) {
      for (auto& bins : per_rank) bins.emplace_back();
      in_batch = 0;
    }
    for (size_t i = start; i < end; ++i) per_rank[i - start].back().push_back(order[i]);
    ++in_batch;
  }
  return per_rank;
}

std::vector<std::vector<Members>> fixed_micro_batches(int64_t samples, int64_t micro_batch_size, int64_t ranks) {
  const int64_t share = (samples + ranks - 1) / ranks;
  const int64_t batches = (share + micro_batch_size - 1) / micro_batch_size;
  std::vector<std::vector<Members>> per_rank(static_cast<size_t>(ranks),
                                             std::vector<Members>(static_cast<size_t>(batches)));
  for (int64_t i = 0; i < samples; ++i) {
    per_rank[static_cast<size_t>(i / share)][static_cast<size_t>(i % share / micro_batch_size)].push_back(i);
  }
  return per_rank;
}

std::vector<std::vector<Members>> make_micro_batches(const SharedLengths& sequences, const MicroBatchOptions& options,
                                                     int64_t ranks) {
  const std::vector<int64_t>& lengths = sequences.lengths;
  switch (options.rule) {
    case MicroBatchOptions::Rule::kFixed:
      return fixed_micro_batches(static_cast<int64_t>(lengths.size()), options.samples, ranks);
    case MicroBatchOptions::Rule::kDynamic:
      return dynamic_micro_batches(lengths, options.tokens, options.round, ranks);
    case MicroBatchOptions::Rule::kPacked:
      break;
  }
  std::vector<std::vector<Members>> all =
      options.share_prompts ? shared_micro_batches(sequences, options.tokens, ranks, options.algorithm, options.seed)
                            : packed_micro_batches(lengths, options.tokens, ranks, options.algorithm, options.seed);
  if (!options.largest_first) return all;
  const auto load = [&](const Members& members) {
    int64_t sum = 0;
    for (const int64_t i : members) sum += lengths[static_cast<size_t>(i)];
    return sum;
  };
  for (std::vector<Members>& of_rank : all) {
    std::stable_sort(of_rank.begin(), of_rank.end(),
                     [&](const Members& a, const Members& b) { return load(a) > load(b); });
  }
  return all;
}

}  // namespace trireme
