// DistributedAdamW in builds without CUDA: no state lies on a device.
#include "base/error.h"
#include "trainer/optimizer/adamw.h"

namespace trireme {
namespace {

[[noreturn]] void none() { fail_internal("this build has no CUDA"); }

}  // namespace

double DistributedAdamW::sum_of_squares_on_device(const at::Tensor&) { none(); }
void DistributedAdamW::mark_decayed_groups() { none(); }
void DistributedAdamW::update_on_device(const Factors&) { none(); }

}  // namespace trireme
