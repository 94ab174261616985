// Sums and products of matrices in an answer's tree, for its parser.
#pragma once

#include "trainer/rewards/answer_parser.h"

namespace trireme {

// A sum or product with matrices among its children as the one matrix it says; any other node as it is. Null when the
// sizes do not go together, or the result would be too large to be an answer.
NodePtr with_matrices_computed(NodePtr node);

}  // namespace trireme
