// Attention by other kernels than the trainer's (FlashInfer's, mma.sync) with the same order of operations: what the
// bits of the trainer's are compared with.
#pragma once

#include "trainer/ops/cuda/attention/attention_kernels.h"

namespace trireme::cuda {

// Any runs; args as of launch_attention_packed.
cudaError_t oracle_packed(const AttentionArgs& args, cudaStream_t stream);
// Runs of one query row each; args as of launch_attention_decode, and items: run i, tile 0.
cudaError_t oracle_decode(const AttentionArgs& args, cudaStream_t stream);

}  // namespace trireme::cuda
