// Attention over runs of rows whose keys lie anywhere: pieces of sequences.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace trireme {

// Consecutive query rows of one sequence: row i of them sees `past` + i + 1 keys, the first of which is key `keys`.
struct AttentionRun {
  int64_t q_row = 0;  // the first one
  int64_t past = 0;
  int64_t count = 0;
  int64_t keys = 0;
};
struct AttentionRuns {
  std::vector<AttentionRun> runs;  // of all query rows, in their order
  std::vector<int64_t> key_rows;   // rows of k and v in the order in which the runs count keys; empty: as they are
};
// Attention where the keys of a run's rows lie anywhere in k and v [rows, kv_heads, head_dim], which may have other
// rows than q. Row bits are those of attention_packed over the same keys; on CUDA where `past` is a multiple of
// kChunkAlignment, and with key_rows given, the rows of no two runs in common there.
at::Tensor attention_runs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::shared_ptr<const AttentionRuns>& runs, double scale = 0.0);

}  // namespace trireme
