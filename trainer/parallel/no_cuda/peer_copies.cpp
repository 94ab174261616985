#include "trainer/parallel/peer_copies.h"

#include "base/error.h"

namespace trireme {

struct PeerCopies::Impl {};

PeerCopies::PeerCopies() = default;
PeerCopies::~PeerCopies() = default;
std::unique_ptr<PeerCopies> PeerCopies::make(const PeerGroup&, at::Device, std::string& problem) {
  problem = "this build has no devices";
  return nullptr;
}
PeerLines::Copy PeerCopies::exchange(const std::vector<at::Tensor>&, const std::vector<at::Tensor>&) {
  fail_internal("this build has no devices");
}

}  // namespace trireme
