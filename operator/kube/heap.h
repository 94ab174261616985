// Heap: freed memory goes back to the system, but only when there is enough of it to be worth the walk over the heap.
#pragma once

#include <cstddef>
#include <optional>

#include "base/clock.h"

namespace trireme::kube {

// Gives freed pages back to the system.
void trim_heap();

struct HeapSize {
  size_t resident = 0;  // of the process
  size_t in_use = 0;    // of the heap, by what the program holds
};
HeapSize heap_size();

// When to trim. Pure: the time and the sizes are arguments.
class HeapTrims final {
 public:
  // Not for less than `worth` bytes that became free but stayed resident since the last trim, and once a minute; four
  // times as much goes after five seconds, so that a burst does not pile up.
  explicit HeapTrims(size_t worth) : worth_(worth) {}
  bool due(const HeapSize& size, SteadyClock::time_point now);
  void trimmed(const HeapSize& after, SteadyClock::time_point now);

 private:
  static size_t unused(const HeapSize& size) { return size.resident > size.in_use ? size.resident - size.in_use : 0; }

  const size_t worth_;
  size_t kept_ = 0;  // the least unused since the last trim: code, stacks, pages with something in use on them
  std::optional<SteadyClock::time_point> last_;
};

}  // namespace trireme::kube
