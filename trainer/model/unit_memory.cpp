#include "trainer/model/unit_memory.h"

#include <ATen/ATen.h>

#include "base/error.h"

namespace trireme {
namespace {

at::DataPtr none_on(at::Device device) { return {nullptr, device}; }

}  // namespace

UnitMemory::UnitMemory(int64_t elements, const at::TensorOptions& options, int64_t behind)
    : elements_(elements), behind_(behind), options_(options) {
  const auto bytes = static_cast<size_t>(elements + behind) * options.dtype().itemsize();
  storage_ = at::Storage(at::Storage::use_byte_size_t(), bytes, none_on(options.device()), /*allocator=*/nullptr,
                         /*resizable=*/false);
}

at::Tensor UnitMemory::view(int64_t offset, const std::vector<int64_t>& shape) const {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return at::empty({0}, options_).set_(storage_, offset, shape, strides);
}

void UnitMemory::set(const at::Tensor& memory) {
  TRIREME_CHECK(memory.is_contiguous() && memory.numel() >= elements_ + behind_ && memory.dtype() == options_.dtype(),
                "the memory of a unit holds it");
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap({memory.data_ptr(), options_.device()});
  memory_ = memory;
}

void UnitMemory::reset() {
  if (elements_ == 0 || !here()) return;
  storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(none_on(options_.device()));
  memory_ = at::Tensor();
}

}  // namespace trireme
