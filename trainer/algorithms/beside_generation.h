// What a run's models compute beside the last responses of its rollouts, and what is said where they cannot.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "trainer/algorithms/session.h"
#include "trainer/ops/partition.h"

namespace trireme {

class ReferenceStream;
class CriticTrainer;

// Whether there is anything to compute there: for a reference model, early gradients, a critic that is whole on this
// rank, a reward model.
bool works_beside_generation(const Session& session);

// Whether grpo.early_gradients is on and can be: a model that is not split (`split`: or what generates has a layout of
// its own) and products that keep row bits. Says why not, and what follows generation.
bool early_gradients_beside(const Session& session, bool split, bool row_exact);

// The stream of those that are there, or null: they follow generation. `reference`, `critic` (on this rank) may be
// null; all outlive the stream. Throws Error(kUser) where early gradients have no part of the device.
std::unique_ptr<ReferenceStream> stream_beside_generation(const Session& session, const Model* reference,
                                                          const CriticTrainer* critic, bool early_gradients,
                                                          std::shared_ptr<const DevicePartition> partition,
                                                          std::function<void(const std::string&)> on_stuck);

}  // namespace trireme
