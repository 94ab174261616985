#include "trainer/ops/cuda/attention_tiles.cuh"
#include "trainer/ops/cuda/row_product.h"

namespace trireme::cuda {

cudaError_t launch_attention_packed(const AttentionArgs& args, PackedKernel kernel, cudaStream_t stream) {
  if (kernel == PackedKernel::kWarpGroups && row_product::device_supported()) {
    return launch_attention_wgmma(args, stream);
  }
  auto* items = const_cast<int32_t*>(args.items);
  int32_t* tiles = items + args.item_count;
  return args.head_dim == 128 ? launch_tiles<Packed128>(args, args.item_count, items, tiles, stream)
                              : launch_tiles<Packed64>(args, args.item_count, items, tiles, stream);
}

}  // namespace trireme::cuda
