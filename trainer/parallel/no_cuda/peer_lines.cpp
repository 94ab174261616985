#include "trainer/parallel/peer_lines.h"

#include "base/error.h"

namespace trireme {

struct PeerLines::Impl {};

PeerLines::PeerLines() = default;
PeerLines::~PeerLines() = default;
std::unique_ptr<PeerLines> PeerLines::make(const PeerGroup&, at::Device, std::string& problem) {
  problem = "this build has no devices";
  return nullptr;
}
PeerLines::Copy PeerLines::send(const at::Tensor&, bool) { fail_internal("this build has no devices"); }
void PeerLines::receive(at::Tensor, bool) { fail_internal("this build has no devices"); }

}  // namespace trireme
