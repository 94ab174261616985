#include "trainer/parallel/peer_exchange.h"

#include "base/error.h"

namespace trireme {

struct PeerExchange::Impl {};

namespace {
[[noreturn]] void none() { TRIREME_CHECK(false, "this build has no exchanges between devices"); }
}  // namespace

PeerExchange::PeerExchange() = default;
PeerExchange::~PeerExchange() = default;
std::unique_ptr<PeerExchange> PeerExchange::make(const PeerGroup&, at::Device) { return nullptr; }
bool PeerExchange::takes(const at::Tensor&) { return false; }
at::Tensor PeerExchange::gather(const at::Tensor&) { none(); }
at::Tensor PeerExchange::scatter_sum(const at::Tensor&) { none(); }
at::Tensor PeerExchange::sum(const at::Tensor&) { none(); }
NormResult PeerExchange::sum_add_rms_norm(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, int64_t) {
  none();
}
at::Tensor PeerExchange::whole_rows(const at::Tensor&) { none(); }
at::Tensor PeerExchange::own_columns(const at::Tensor&) { none(); }
DeviceSamples PeerExchange::gather_samples(const DeviceSamples&) { none(); }
void PeerExchange::throw_if_absent() const {}

}  // namespace trireme
