// How many threads a rank uses for its tensors.
#pragma once

namespace trireme {

// Shares the machine's cores evenly between the ranks of this node. Called once, before tensors are made.
void use_threads(int ranks_on_this_node);

}  // namespace trireme
