// parallel_tasks: at::parallel_for without OpenMP flags in every source (they would not match the precompiled header).
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace trireme {

// Calls task(begin, end) for disjoint ranges that cover 0 .. count, at least `grain` long where possible, on LibTorch's
// intra-op threads. An exception of a task is rethrown here.
void parallel_tasks(int64_t count, int64_t grain, c10::function_ref<void(int64_t, int64_t)> task);

// Calls task(i) for i in 0 .. count, in the order in which threads become free; on this thread alone unless `worth`.
// What a task writes must not depend on who runs it.
void parallel_dynamic(int64_t count, bool worth, c10::function_ref<void(int64_t)> task);

}  // namespace trireme
