#include "trainer/parallel/context.h"

#include "base/error.h"

namespace trireme {

ParallelContext::ParallelContext() : data_parallel_(std::make_unique<Communicator>()) {}

ParallelContext::ParallelContext(const Layout& layout, const RendezvousOptions& rendezvous)
    : layout_(layout), rendezvous_(rendezvous) {
  if (const std::vector<std::string> refused = unsupported_splits(layout); !refused.empty()) fail_user(refused.front());
  LayoutCheck check;
  check.world = rendezvous.world_size;
  const LayoutReport report = check_layout(layout, check);
  if (!report.ok()) fail_user(report.errors.front());
  if (rendezvous.rank < 0 || rendezvous.rank >= rendezvous.world_size) {
    fail_user("rank " + std::to_string(rendezvous.rank) + " is outside the world of " +
              std::to_string(rendezvous.world_size));
  }
  coordinates_ = trireme::coordinates(layout, rendezvous.rank);
  if (rendezvous.world_size > 1) store_ = std::make_unique<JobStore>(rendezvous);
  data_parallel_ =
      store_ ? std::make_unique<Communicator>(*store_, rendezvous, "dp") : std::make_unique<Communicator>();
}

}  // namespace trireme
