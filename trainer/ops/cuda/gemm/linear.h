// linear of cuda_ops.h, and what besides it other kernels and tests want: GEMMs through cublasLt, and through our own
// kernels where there are few rows (gemm_choice.h).
//
// Determinism class of the forward: row-exact. With a workspace of 1 KiB and algorithms that split no sum over `in`,
// every output element is one chain of additions in ascending order whatever the number of rows or the tile. Measured
// on H200 (cuBLAS 13.1): one set of row bits for 9 weight shapes and every row count from 16 to 16,384, at the default
// setting's speed. linear_rows_are_exact() checks it for the shapes of a model at start-up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "trainer/ops/cuda_ops.h"

namespace trireme::cuda {

// Whether the next kernel of this thread may begin before the one ahead has ended: in a DecodeScope whose last GEMM was
// of our kernels. Behind others an early launch costs more than it saves.
bool may_begin_early();

// gemm(0) .. gemm(count - 1), calls of linear_backward_weight that do not depend on each other, on a few streams behind
// the current one, which then waits for them: where one's last blocks leave SMs without work the next one's begin. Each
// has the same bits in every run. Not in stream capture.
void beside_each_other(at::Device device, int64_t count, const std::function<void(int64_t index)>& gemm);

// Workspace of the forward in bytes. More than the 1 KiB it has lets the library split sums again: for the test that
// shows that its default is not exact.
size_t forward_workspace_bytes();
void set_forward_workspace_bytes(size_t bytes);  // not while ops run; forgets the chosen algorithms

}  // namespace trireme::cuda
