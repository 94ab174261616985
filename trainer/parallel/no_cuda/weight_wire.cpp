#include "trainer/parallel/weight_wire.h"

#include "base/error.h"

namespace trireme {

struct WeightWire::Impl {};

std::string WeightWire::make_id() { fail_internal("this build has no CUDA"); }
WeightWire::WeightWire(at::Device, int, const std::string&, const Deadline&, const LinkCancel&) {
  fail_internal("this build has no CUDA");
}
WeightWire::~WeightWire() = default;
void WeightWire::send(const at::Tensor&, const TimeMark&) { fail_internal("this build has no CUDA"); }
void WeightWire::receive(at::Tensor, const TimeMark&) { fail_internal("this build has no CUDA"); }
void WeightWire::run(const std::function<void()>&, const TimeMark&) { fail_internal("this build has no CUDA"); }
void WeightWire::settle(const Deadline&, const LinkCancel&) { fail_internal("this build has no CUDA"); }
void WeightWire::wait(const Deadline&, const LinkCancel&, const std::function<void()>&) {
  fail_internal("this build has no CUDA");
}
uint64_t WeightWire::checksum(const at::Tensor&, const TimeMark&) { fail_internal("this build has no CUDA"); }

}  // namespace trireme
