// Device memory that can be given back and taken again under the same addresses, which CUDA graphs hold, and every time
// as much of it as there is. Of builds with CUDA: elsewhere none can be made.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace trireme::cuda {

// Not thread-safe.
class MappedMemory final {
 public:
  // Reserves addresses for `sections` stretches of `bytes` each; there is no memory behind them yet.
  MappedMemory(c10::Device device, int64_t sections, int64_t bytes);
  ~MappedMemory();
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;

  void* address(int64_t section) const;
  bool mapped() const;
  // Takes memory for the first `bytes` of every section, filled with zeros on the current stream. What LibTorch's
  // allocator has cached goes back to the device first where there is too little. Throws c10::OutOfMemoryError. Nothing
  // where something is mapped already.
  void map(int64_t bytes);
  // Gives it back. Waits for everything that runs on the device.
  void unmap();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The most that LibTorch's tensors and mapped memory of `device` have had together since the last call. Resets
// LibTorch's own peak, as map() and unmap() do.
int64_t take_peak_bytes(c10::Device device);

}  // namespace trireme::cuda
