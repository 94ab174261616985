// Which part of a device this thread's kernels are for (partition.h). Both are of the thread.
#pragma once

namespace trireme {

// Multiprocessors; 0: all.
int processor_limit();
void set_processor_limit(int processors);

// Scratch memory that a kernel of one lane uses is not used by one of another: lanes run at the same time.
inline constexpr int kLanes = 2;  // 0: all but the background
int work_lane();
void set_work_lane(int lane);

}  // namespace trireme
