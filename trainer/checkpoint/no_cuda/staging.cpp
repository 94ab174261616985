// Of staging.h and pinned_memory.h what reads a device, in builds without CUDA: it is the CPU.
#include "trainer/checkpoint/staging.h"

#include <cstring>

#include "trainer/checkpoint/pinned_memory.h"

namespace trireme {

bool pin_memory(c10::Device, void*, int64_t, std::string* problem) {
  *problem = "this build has no CUDA";
  return false;
}
void unpin_memory(void*) {}

struct StateReader::Impl {};

StateReader::StateReader(at::Device) {}
StateReader::~StateReader() = default;
void StateReader::mark() {}
void StateReader::begin() {}
void StateReader::read(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, static_cast<size_t>(bytes)); }
void StateReader::finish() {}

}  // namespace trireme
