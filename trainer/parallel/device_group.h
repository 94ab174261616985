// What a Communicator needs of a device for tensors that lie there: NCCL's group, and to see how far a stream is.
// Builds with CUDA link cuda/, the others no_cuda/, where such tensors are an error.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/clock.h"

namespace trireme {

// Collective. `timeout`: after which NCCL's own watchdog ends the process.
c10::intrusive_ptr<c10d::Backend> make_device_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    Milliseconds timeout);

// Tells, from any thread, whether a collective of such a group has ended. Holds none of its tensors, as `work` itself
// does with the results for as long as it lives.
std::function<bool()> end_of(const c10::intrusive_ptr<c10d::Work>& work);

// Tells, from any thread, whether the device has come to what the current stream holds now.
std::function<bool()> mark_current_stream();
// A moment of the current stream, and the seconds between two of one device; waits until it has come to the later one.
using TimeMark = std::shared_ptr<void>;
TimeMark mark_time();
double seconds_between(const TimeMark& begin, const TimeMark& end);
// Whether the current stream is being captured into a graph.
bool capturing();

}  // namespace trireme
