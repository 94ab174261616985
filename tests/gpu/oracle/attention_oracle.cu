#include "tests/gpu/oracle/attention_oracle.h"

#include "tests/gpu/oracle/attention_tiles.cuh"

namespace trireme::cuda {

cudaError_t oracle_packed(const AttentionArgs& args, cudaStream_t stream) {
  auto* items = const_cast<int32_t*>(args.items);
  int32_t* tiles = items + args.item_count;
  return args.head_dim == 128 ? launch_tiles<Packed128>(args, args.item_count, items, tiles, stream)
                              : launch_tiles<Packed64>(args, args.item_count, items, tiles, stream);
}

cudaError_t oracle_decode(const AttentionArgs& args, cudaStream_t stream) {
  auto* items = const_cast<int32_t*>(args.items);
  int32_t* tiles = items + args.item_count;
  return args.head_dim == 128 ? launch_tiles<Tiled128>(args, args.run_count, items, tiles, stream)
                              : launch_tiles<Tiled64>(args, args.run_count, items, tiles, stream);
}

}  // namespace trireme::cuda
