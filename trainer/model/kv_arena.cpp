#include "trainer/model/kv_arena.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstring>

#include "base/error.h"

namespace trireme {

KvArena::KvArena(const ModelConfig& config, int64_t capacity_rows, at::ScalarType dtype, at::Device device)
    : capacity_rows_(capacity_rows) {
  TRIREME_CHECK(capacity_rows > 0, "the arena needs at least one row");
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    keys_.push_back(at::zeros({capacity_rows, config.num_kv_heads, config.head_dim}, options));
    values_.push_back(at::zeros({capacity_rows, config.num_kv_heads, config.head_dim}, options));
  }
}

void KvArena::move(int64_t from, int64_t to, int64_t rows) {
  TRIREME_CHECK(from >= 0 && to >= 0 && rows >= 0 && from + rows <= capacity_rows_ && to + rows <= capacity_rows_,
                "rows outside the arena of " + std::to_string(capacity_rows_));
  if (rows == 0 || from == to) return;
  const at::NoGradGuard no_grad;
  for (const std::vector<at::Tensor>* side : {&keys_, &values_}) {
    for (const at::Tensor& tensor : *side) {
      if (tensor.is_cpu()) {
        const size_t row_bytes = static_cast<size_t>(tensor.stride(0)) * tensor.element_size();
        auto* base = static_cast<char*>(tensor.mutable_data_ptr());
        std::memmove(base + static_cast<size_t>(to) * row_bytes, base + static_cast<size_t>(from) * row_bytes,
                     static_cast<size_t>(rows) * row_bytes);
      } else {
        const bool overlap = from < to + rows && to < from + rows;
        const at::Tensor source = tensor.narrow(0, from, rows);
        tensor.narrow(0, to, rows).copy_(overlap ? source.clone() : source);
      }
    }
  }
}

int64_t KvArena::bytes_per_row(const ModelConfig& config, at::ScalarType dtype) {
  return 2 * config.num_layers * config.num_kv_heads * config.head_dim * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace trireme
