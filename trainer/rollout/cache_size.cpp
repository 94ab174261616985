#include "trainer/rollout/cache_size.h"

#include <algorithm>

namespace trireme {

namespace {

int64_t share(int64_t bytes, double fraction) { return static_cast<int64_t>(static_cast<double>(bytes) * fraction); }

// Bytes below zero are none.
int64_t rows_in(int64_t bytes, const CacheLimits& limits) {
  return std::clamp<int64_t>(bytes / limits.row_bytes, 1, limits.most_rows);
}

}  // namespace

int64_t host_cache_rows(int64_t available_bytes, double fraction, const CacheLimits& limits) {
  return rows_in(share(available_bytes, fraction), limits);
}

int64_t mapped_cache_rows(int64_t device_bytes, int64_t reachable, const CacheLimits& limits) {
  return std::clamp<int64_t>(std::min(device_bytes / limits.row_bytes, reachable), 1, limits.most_rows);
}

int64_t device_cache_rows(int64_t free_bytes, double fraction, const CacheLimits& limits) {
  return rows_in(std::min(share(free_bytes, fraction), free_bytes - kDriverBytes), limits);
}

int64_t returning_cache_rows(int64_t free_bytes, int64_t step_bytes, const CacheLimits& limits) {
  return rows_in(free_bytes - step_bytes - kDriverBytes / 2, limits);
}

}  // namespace trireme
