// PeerExchange: exchanges of rows between the devices of a group that see each other's memory (NVLink, one host).
// Builds with CUDA link cuda/peer_exchange.cpp, the others no_cuda/, where no devices do.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "trainer/ops/ops.h"
#include "trainer/parallel/peer_group.h"

namespace trireme {

// One thread owns it, and its calls are on one stream at a time. Tensors are bfloat16 in rows of a multiple of 8
// elements; sums are those of exchange.h. No autograd. Every call is legal in stream capture but for the first of a
// size that the allocator does not have yet. A call returns at once; whether somebody did not come
// throw_if_absent() knows, which every Communicator::queue asks and who waits for results should.
class PeerExchange final {
 public:
  // Null where some of the devices cannot map each other's memory: on several hosts, without NVLink or in containers of
  // their own; the reason is logged once. Collective.
  static std::unique_ptr<PeerExchange> make(const PeerGroup& group, at::Device device);
  ~PeerExchange();
  PeerExchange(const PeerExchange&) = delete;
  PeerExchange& operator=(const PeerExchange&) = delete;

  // Whether it takes rows of this kind.
  static bool takes(const at::Tensor& rows);

  at::Tensor gather(const at::Tensor& own);           // [n, ...] -> [size * n, ...]
  at::Tensor scatter_sum(const at::Tensor& partial);  // [size * n, ...] -> own [n, ...]
  at::Tensor sum(const at::Tensor& partial);          // [n, ...] -> [n, ...] on all, in one step
  // sum() and add_rms_norm with it as delta, of so many counted elements (0: all), in one launch: [n, width].
  NormResult sum_add_rms_norm(const at::Tensor& x, const at::Tensor& partial, const at::Tensor& weight, double eps,
                              int64_t counted);
  // Columns to rows and back: [size * n, width] of each rank's own columns -> own rows [n, size * width]. `columns` may
  // have a row stride that is a multiple of 8.
  at::Tensor whole_rows(const at::Tensor& columns);
  at::Tensor own_columns(const at::Tensor& rows);
  // What each rank sampled for [n] rows -> [size * n].
  DeviceSamples gather_samples(const DeviceSamples& own);

  // Throws Error(kUnavailable) that names the rank of the group for which a kernel has waited in vain.
  void throw_if_absent() const;

 private:
  PeerExchange();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
