// ParallelContext: this rank's place in the layout, and the communicator of each axis a model may be split over.
#pragma once

#include <memory>

#include "topology/topology.h"
#include "trainer/parallel/communicator.h"

namespace trireme {

class ParallelContext final {
 public:
  // One process, no store: tests and the inspection verbs.
  ParallelContext();
  // Meets the other ranks (deadline: rendezvous.timeout). Throws Error(kUser) that names the size when the layout
  // splits over anything but data parallel, or does not fit the world.
  ParallelContext(const Layout& layout, const RendezvousOptions& rendezvous);

  const Layout& layout() const { return layout_; }
  const Coordinates& coordinates() const { return coordinates_; }
  int rank() const { return rendezvous_.rank; }
  int world_size() const { return rendezvous_.world_size; }
  bool is_main() const { return rendezvous_.rank == 0; }
  // Gradients and optimizer slices of dense parameters.
  Communicator& data_parallel() { return *data_parallel_; }
  // Null with one process.
  JobStore* store() { return store_.get(); }
  void set_phase(const std::string& phase) { data_parallel_->set_phase(phase); }
  const std::string& phase() const { return data_parallel_->phase(); }

 private:
  Layout layout_;
  RendezvousOptions rendezvous_;
  Coordinates coordinates_;
  std::unique_ptr<JobStore> store_;
  std::unique_ptr<Communicator> data_parallel_;
};

}  // namespace trireme
