// Where the keys of sequences that share prefixes lie (attention_shared).
#pragma once

#include <cstdint>
#include <vector>

namespace trireme {

// The keys of every sequence one after another: its prefix's rows, then its own. starts [sequences + 1] in `rows`,
// whose entries are rows of k and v. past[s] rows of sequence s are its prefix's; an empty sequence has no keys.
struct SharedKeys {
  std::vector<int64_t> rows, starts, past;
};
// Throws Error(kInternal) unless starts and prefix are as attention_shared wants them.
SharedKeys shared_keys(const std::vector<int64_t>& starts, const std::vector<int64_t>& prefix);

}  // namespace trireme
