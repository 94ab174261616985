// mapped_memory.h in builds without CUDA: none can be made.
#include "trainer/ops/mapped_memory.h"

#include "base/error.h"

namespace trireme::cuda {
namespace {

[[noreturn]] void none() { fail_internal("this build has no CUDA"); }

}  // namespace

struct MappedMemory::State {};

MappedMemory::MappedMemory(c10::Device, int64_t, int64_t) { none(); }
MappedMemory::~MappedMemory() = default;
void* MappedMemory::address(int64_t) const { none(); }
bool MappedMemory::mapped() const { none(); }
void MappedMemory::map(int64_t) { none(); }
void MappedMemory::unmap() { none(); }

int64_t take_peak_bytes(c10::Device) { none(); }

}  // namespace trireme::cuda
