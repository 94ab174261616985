// How many threads a rank uses for its tensors.
#pragma once

namespace trireme {

// Shares the CPUs that this process may use evenly between the ranks of this node; no more than OMP_NUM_THREADS, where
// that is set. Called once, before tensors are made.
void use_threads(int ranks_on_this_node);

}  // namespace trireme
