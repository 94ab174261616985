// Which part of a device this thread's kernels are for: a PartitionScope (partition.h) says so.
#pragma once

namespace trireme {

// SMs; 0: all.
int sm_limit();

// Scratch memory that a kernel of one lane uses is not used by one of another: lanes run at the same time.
inline constexpr int kLanes = 2;  // 0: all but the background
int work_lane();

}  // namespace trireme
