// mapped_memory.h in builds without CUDA: none can be made.
#include "trainer/ops/mapped_memory.h"

#include "base/error.h"

namespace trireme::cuda {
namespace {

[[noreturn]] void no_memory() { fail_internal("this build has no CUDA"); }

}  // namespace

struct MappedMemory::State {};

MappedMemory::MappedMemory(c10::Device, int64_t, int64_t) { no_memory(); }
MappedMemory::~MappedMemory() = default;
void* MappedMemory::address(int64_t) const { no_memory(); }
bool MappedMemory::mapped() const { no_memory(); }
void MappedMemory::map(int64_t) { no_memory(); }
void MappedMemory::unmap() { no_memory(); }

int64_t take_peak_bytes(c10::Device) { no_memory(); }

}  // namespace trireme::cuda
