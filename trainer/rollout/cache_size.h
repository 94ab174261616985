// Size of the cache: figures of memory in, rows out. Pure; the engine measures and says when.
#pragma once

#include <cstdint>

namespace trireme {

// Every size is in [1, most_rows]: with one row the scheduler refuses by name what does not fit.
struct CacheLimits {
  int64_t row_bytes = 0;  // of a row over all layers
  int64_t most_rows = 1;  // that anybody could use
};

// Left free on a device for what the driver takes later: code of kernels that are launched first, graphs of other ways
// to sample, and the last granule of each layer's keys and values.
inline constexpr int64_t kDriverBytes = int64_t{1} << 30;

// On the host: `fraction` of what is available.
int64_t host_cache_rows(int64_t available_bytes, double fraction, const CacheLimits& limits);

// For which a device's cache has addresses, whatever it gets of them: all that the whole device could hold, and kernels
// can reach (`reachable`).
int64_t mapped_cache_rows(int64_t device_bytes, int64_t reachable, const CacheLimits& limits);

// On a device, where `free_bytes` are left beside the largest step: `fraction` of them, and kDriverBytes stay in any
// case.
int64_t device_cache_rows(int64_t free_bytes, double fraction, const CacheLimits& limits);

// When a device's cache takes its memory again: what others have left of it, but for what steps want besides and half
// of kDriverBytes, whose purposes may have been met by now. most_rows: what it had at first.
int64_t returning_cache_rows(int64_t free_bytes, int64_t step_bytes, const CacheLimits& limits);

}  // namespace trireme
