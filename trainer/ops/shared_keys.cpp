#include "trainer/ops/shared_keys.h"

#include <string>

#include "base/error.h"

namespace trireme {

SharedKeys shared_keys(const std::vector<int64_t>& starts, const std::vector<int64_t>& prefix) {
  TRIREME_CHECK(prefix.size() + 1 == starts.size(), "attention_shared: one prefix for each sequence expected");
  SharedKeys keys;
  keys.starts.push_back(0);
  for (size_t s = 0; s < prefix.size(); ++s) {
    const int64_t p = prefix[s];
    if (p >= 0) {
      const auto at = static_cast<size_t>(p);
      TRIREME_CHECK(at < s && prefix[at] < 0 && starts[at + 1] > starts[at],
                    "attention_shared: the prefix of sequence " + std::to_string(s) +
                        " must be an earlier one that has rows and no prefix itself");
      const bool any = starts[s + 1] > starts[s];
      for (int64_t row = starts[at]; any && row < starts[at + 1]; ++row) keys.rows.push_back(row);
      keys.past.push_back(any ? starts[at + 1] - starts[at] : 0);
    } else {
      keys.past.push_back(0);
    }
    for (int64_t row = starts[s]; row < starts[s + 1]; ++row) keys.rows.push_back(row);
    keys.starts.push_back(static_cast<int64_t>(keys.rows.size()));
  }
  return keys;
}

}  // namespace trireme
