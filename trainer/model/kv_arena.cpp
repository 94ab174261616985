#include "trainer/model/kv_arena.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/mapped_memory.h"

namespace trireme {

KvArena::KvArena(const KvShape& shape, int64_t rows, at::ScalarType dtype, at::Device device, int64_t most_rows)
    : shape_(shape), most_rows_(std::max(rows, most_rows)), options_(at::TensorOptions().dtype(dtype).device(device)) {
  if (device.is_cuda()) {
    const int64_t sections = 2 * shape.layers;
    memory_ =
        std::make_unique<cuda::MappedMemory>(device, sections, most_rows_ * bytes_per_row(shape, dtype) / sections);
  }
  restore(rows);
}

KvArena::~KvArena() = default;

void KvArena::make_tensors() {
  const std::vector<int64_t> shape = {rows_, shape_.kv_heads, shape_.head_dim};
  keys_.clear();
  values_.clear();
  for (int64_t section = 0; section < 2 * shape_.layers; ++section) {
    at::Tensor made =
        memory_ != nullptr ? at::from_blob(memory_->address(section), shape, options_) : at::zeros(shape, options_);
    (section < shape_.layers ? keys_ : values_).push_back(std::move(made));
  }
}

void KvArena::release() {
  if (!resident_) return;
  if (memory_ != nullptr) memory_->unmap();
  keys_.clear();
  values_.clear();
  resident_ = false;
}

void KvArena::restore(int64_t rows) {
  TRIREME_CHECK(!resident_, "the arena has its memory already");
  TRIREME_CHECK(rows > 0 && rows <= most_rows_,
                "an arena of at most " + std::to_string(most_rows_) + " rows cannot have " + std::to_string(rows));
  if (memory_ != nullptr)
    memory_->map(rows * bytes_per_row(shape_, c10::typeMetaToScalarType(options_.dtype())) / (2 * shape_.layers));
  rows_ = rows;
  make_tensors();
  resident_ = true;
}

void KvArena::check_range(int64_t from, int64_t to, int64_t rows) const {
  TRIREME_CHECK(from >= 0 && to >= 0 && rows >= 0 && from + rows <= rows_ && to + rows <= rows_,
                "rows outside the arena of " + std::to_string(rows_));
}

void KvArena::move(int64_t from, int64_t to, int64_t rows) {
  check_range(from, to, rows);
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

namespace {

// Whether no target meets another range, so that the order of the moves does not matter.
bool independent(const std::vector<std::array<int64_t, 3>>& moves) {
  std::vector<std::pair<int64_t, int64_t>> targets;  // [begin, end)
  for (const auto& [from, to, rows] : moves) targets.emplace_back(to, to + rows);
  std::sort(targets.begin(), targets.end());
  for (size_t i = 0; i + 1 < targets.size(); ++i) {
    if (targets[i].second > targets[i + 1].first) return false;
  }
  for (const auto& [from, to, rows] : moves) {
    // The last target that begins before the source ends.
    const auto after = std::lower_bound(targets.begin(), targets.end(), std::pair(from + rows, int64_t{0}));
    if (after != targets.begin() && std::prev(after)->second > from) return false;
  }
  return true;
}

}  // namespace

void KvArena::move_all(const std::vector<RowMove>& moves) {
  if (!keys_.empty() && keys_.front().is_cuda()) {
    std::vector<std::array<int64_t, 3>> list;
    for (const RowMove& m : moves) {
      check_range(m.from, m.to, m.rows);
      if (m.rows > 0 && m.from != m.to) list.push_back({m.from, m.to, m.rows});
    }
    if (!addresses_.defined()) {
      std::vector<at::Tensor> tensors = keys_;
      tensors.insert(tensors.end(), values_.begin(), values_.end());
      addresses_ = cuda::device_addresses(tensors);
    }
    const at::Tensor& first = keys_.front();
    cuda::copy_arena_rows(addresses_, first.stride(0) * first.element_size(), list, /*ordered=*/!independent(list));
    return;
  }
  for (const RowMove& m : moves) move(m.from, m.to, m.rows);
}

int64_t KvArena::bytes_per_row(const KvShape& shape, at::ScalarType dtype) {
  return 2 * shape.layers * shape.kv_heads * shape.head_dim * static_cast<int64_t>(c10::elementSize(dtype));
}

}  // namespace trireme
