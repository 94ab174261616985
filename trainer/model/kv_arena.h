// KvArena: keys and values of all layers as flat rows; a sequence owns one contiguous extent, the same in every layer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "trainer/model/config.h"

namespace trireme {

namespace cuda {
class MappedMemory;
}

// What of a model the rows hold: of a split one this rank's key heads.
struct KvShape {
  KvShape(const ModelConfig& config)  // NOLINT(google-explicit-constructor): the whole model's
      : layers(config.num_layers), kv_heads(config.num_kv_heads), head_dim(config.head_dim) {}
  KvShape(const LocalShape& local)  // NOLINT(google-explicit-constructor)
      : layers(local.layers), kv_heads(local.kv_heads), head_dim(local.head_dim) {}
  int64_t layers, kv_heads, head_dim;
};

// `rows` rows from row `from` to row `to`, in every layer.
struct RowMove {
  int64_t from = 0;
  int64_t to = 0;
  int64_t rows = 0;
};

// Not thread-safe. Who owns which rows is the engine's business; the arena only stores them.
class KvArena final {
 public:
  // `rows` of at most `most_rows` (0: no more than `rows`), which restore() may give it later.
  KvArena(const KvShape& shape, int64_t rows, at::ScalarType dtype, at::Device device, int64_t most_rows = 0);
  ~KvArena();
  KvArena(const KvArena&) = delete;
  KvArena& operator=(const KvArena&) = delete;

  // Gives the memory back until restore(), which fills it with zeros and may take another number of rows. Tensors of
  // before must not be used again, but on CUDA the new ones have their addresses; release() waits for the device.
  void release();
  void restore(int64_t rows);
  bool resident() const { return resident_; }

  int64_t rows() const { return rows_; }  // those of before while released
  int64_t num_layers() const { return shape_.layers; }
  const at::Tensor& keys(int64_t layer) const { return keys_[layer]; }      // [rows, kv_heads, head_dim], rotated
  const at::Tensor& values(int64_t layer) const { return values_[layer]; }  // [rows, kv_heads, head_dim]

  // Copies `rows` rows starting at `from` to `to` in every layer, with the meaning of memmove: ranges may overlap, and
  // source rows outside the target stay as they were. Serves to move an extent and to give a sample its prompt's rows.
  void move(int64_t from, int64_t to, int64_t rows);

  // move() of each, in order. On CUDA one launch, faster where no target meets another range of the call, and never a
  // wait for the device but in the first such call.
  void move_all(const std::vector<RowMove>& moves);

  // Memory of one row over all layers.
  static int64_t bytes_per_row(const KvShape& shape, at::ScalarType dtype);

 private:
  void check_range(int64_t from, int64_t to, int64_t rows) const;

  void make_tensors();

  KvShape shape_;
  int64_t rows_ = 0, most_rows_ = 0;
  at::TensorOptions options_;
  bool resident_ = false;
  std::unique_ptr<cuda::MappedMemory> memory_;  // on CUDA: a section for each layer's keys, then for its values
  std::vector<at::Tensor> keys_;
  std::vector<at::Tensor> values_;
  at::Tensor addresses_;  // of both on the device, once needed
};

}  // namespace trireme
