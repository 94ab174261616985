#include "operator/kube/heap.h"

#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace trireme::kube {

// Sanitizers put an allocator of their own before glibc's, whose heaps then do not exist.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TRIREME_OWN_ALLOCATOR
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TRIREME_OWN_ALLOCATOR
#endif
#endif

void trim_heap() {
#ifndef TRIREME_OWN_ALLOCATOR
  malloc_trim(0);
#endif
}

HeapSize heap_size() {
  HeapSize size;
#ifndef TRIREME_OWN_ALLOCATOR
  const struct mallinfo2 heap = mallinfo2();
  size.in_use = heap.uordblks + heap.hblkhd;
  if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
    size_t all = 0, resident = 0;
    if (std::fscanf(file, "%zu %zu", &all, &resident) == 2)
      size.resident = resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    std::fclose(file);
  }
#endif
  return size;
}

bool HeapTrims::due(const HeapSize& size, SteadyClock::time_point now) {
  const size_t now_unused = unused(size);
  kept_ = std::min(kept_, now_unused);
  const size_t freed = now_unused > kept_ ? now_unused - kept_ : 0;
  if (freed < worth_) return false;
  if (!last_) return true;
  return now - *last_ >= (freed / 4 >= worth_ ? std::chrono::seconds(5) : std::chrono::seconds(60));
}

void HeapTrims::trimmed(const HeapSize& after, SteadyClock::time_point now) {
  kept_ = unused(after);
  last_ = now;
}

}  // namespace trireme::kube
