#include "trainer/bench/device_cuda.h"

#include "base/error.h"

namespace trireme::bench {
namespace {

[[noreturn]] void none() { fail_internal("this build has no CUDA"); }

}  // namespace

nlohmann::json cuda_versions() { none(); }
void read_on_cuda(int, const void*, size_t, unsigned*) { none(); }
double cuda_counted_seconds(int, const std::function<void()>&, int64_t) { none(); }
double cuda_seconds_per_call(int, const std::function<void(int64_t)>&, const TimingOptions&) { none(); }

}  // namespace trireme::bench
