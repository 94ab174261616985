// How sequences become micro-batches. Pure; depends on lengths and groups only, never on timing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

using Members = std::vector<int64_t>;  // of a micro-batch: positions in what was given

enum class PackingAlgorithm { kConcatenative, kFirstFitDecreasing, kFirstFitShuffle, kModifiedFirstFitDecreasing };

// "concatenative" | "first_fit_decreasing" | "first_fit_shuffle" | "modified_first_fit_decreasing"; Error(kUser) else.
PackingAlgorithm parse_packing_algorithm(const std::string& name);

// Every index once, each bin's lengths sum to at most `capacity`. Error(kUser) when a length exceeds it.
// kModifiedFirstFitDecreasing follows Johnson and Garey, "A 71/60 theorem for bin packing" (1985), with the greedy
// passes of NeMo-RL's packer. `seed` is used by kFirstFitShuffle only.
std::vector<Members> pack_bins(const std::vector<int64_t>& lengths, int64_t capacity, PackingAlgorithm algorithm,
                               uint64_t seed);

// Splits bins until there are at least `minimum` and a multiple of `multiple`, taking sequences from the fullest bins.
// Bins may stay empty when there are fewer sequences than bins wanted.
std::vector<Members> balance_bins(std::vector<Members> bins, int64_t minimum, int64_t multiple);

// Micro-batches of each data-parallel rank for one optimizer step: result[rank] is a list of bins, the same number on
// every rank (an empty bin is a micro-batch with nothing in it). With one rank they are the algorithm's. With several
// the algorithm says how many there are, and the sequences are dealt evenly over as many where they fit, since the
// fullest rank decides how long a step takes.
std::vector<std::vector<Members>> packed_micro_batches(const std::vector<int64_t>& lengths, int64_t capacity,
                                                       int64_t ranks, PackingAlgorithm algorithm, uint64_t seed);

// The same where the prompt of a group's samples is computed once in a micro-batch: the first prompts[i] of the
// lengths[i] tokens of sample i are those of its groups[i]'s prompt, equal for a whole group, and count once in a bin.
// A group is cut into as few parts of about equal size as the capacity, and an even share of the responses for each
// rank, allow. With several ranks the bins are filled evenly, group after group, where that gives the fullest rank
// less.
struct SharedLengths {
  std::vector<int64_t> lengths, prompts, groups;
};
std::vector<std::vector<Members>> shared_micro_batches(const SharedLengths& samples, int64_t capacity, int64_t ranks,
                                                       PackingAlgorithm algorithm, uint64_t seed);

// NeMo-RL's dynamic batching: ascending by length, dealt with stride `ranks`; a micro-batch closes when
// count * (longest, rounded up to `round`) would exceed `token_budget`. All ranks get the same boundaries.
std::vector<std::vector<Members>> dynamic_micro_batches(const std::vector<int64_t>& lengths, int64_t token_budget,
                                                        int64_t round, int64_t ranks);

// Fixed `micro_batch_size` samples each, in order, dealt in contiguous blocks to ranks.
std::vector<std::vector<Members>> fixed_micro_batches(int64_t samples, int64_t micro_batch_size, int64_t ranks);

// Which of the rules above holds, and with which numbers.
struct MicroBatchOptions {
  enum class Rule { kFixed, kPacked, kDynamic };
  Rule rule = Rule::kFixed;
  int64_t samples = 1;  // kFixed: of a micro-batch
  int64_t tokens = 0;   // kPacked, kDynamic: of a micro-batch at most
  int64_t round = 1;    // kDynamic
  PackingAlgorithm algorithm = PackingAlgorithm::kModifiedFirstFitDecreasing;  // kPacked
  bool share_prompts = false;                                                  // kPacked
  bool largest_first = false;                                                  // kPacked: a rank's fullest comes first
  uint64_t seed = 0;                                                           // kPacked
};

// One optimizer step's (or one pass's) micro-batches of each rank, as many on each.
std::vector<std::vector<Members>> make_micro_batches(const SharedLengths& sequences, const MicroBatchOptions& options,
                                                     int64_t ranks);

}  // namespace trireme
