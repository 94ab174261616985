// UnitMemory: memory that comes and goes behind tensors that stay.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace trireme {

class UnitMemory final {
 public:
  UnitMemory() = default;  // of no elements
  // `behind`: so many more that may be read behind the last one, which its memory has too.
  UnitMemory(int64_t elements, const at::TensorOptions& options, int64_t behind = 0);

  // From element `offset` on; autograd may save it. To be read and written only while there is memory.
  at::Tensor view(int64_t offset, const std::vector<int64_t>& shape) const;
  // From now on the elements are those of `memory`, which has at least as many, with those behind, and is held.
  void set(const at::Tensor& memory);
  void reset();
  bool here() const { return memory_.defined(); }
  const at::Tensor& memory() const { return memory_; }
  int64_t elements() const { return elements_; }

 private:
  int64_t elements_ = 0, behind_ = 0;
  at::TensorOptions options_;
  at::Storage storage_;
  at::Tensor memory_;
};

}  // namespace trireme
