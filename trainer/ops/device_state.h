// What device code noted and could not throw itself.
#pragma once

#include <c10/core/Device.h>

namespace trireme {

// Waits for the current stream of `device`. Throws Error(kData) that names a token id outside the vocabulary which
// embed has met since the last call, and its place in that call. Nothing on CPU, where embed itself throws. For when a
// result is not finite: the row of such an id is NaN.
void throw_on_bad_ids(c10::Device device);

}  // namespace trireme
