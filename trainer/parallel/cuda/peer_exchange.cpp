#include "trainer/parallel/peer_exchange.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "trainer/ops/cuda/device/stream.h"
#include "trainer/ops/cuda/exchange/peer_kernels.h"
#include "trainer/ops/cuda/gemm/linear.h"
#include "trainer/parallel/cuda/peer_memory.h"

namespace trireme {
namespace {

// Of receive buffers, all together; larger messages go in several exchanges.
constexpr int64_t kReceiveBytes = int64_t{96} << 20;

const cuda::Bf16* data(const at::Tensor& x) { return static_cast<const cuda::Bf16*>(x.const_data_ptr()); }
cuda::Bf16* mutable_data(const at::Tensor& x) { return static_cast<cuda::Bf16*>(x.mutable_data_ptr()); }

bool aligned(const at::Tensor& x) { return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0; }

// Contiguous and where kernels can read it.
at::Tensor ready(const at::Tensor& x) {
  const at::Tensor dense = x.contiguous();
  return aligned(dense) ? dense : dense.clone();
}

int64_t width_of(const at::Tensor& x) { return x.size(0) == 0 ? 0 : x.numel() / x.size(0); }

std::vector<int64_t> sized_like(const at::Tensor& like, int64_t rows) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[0] = rows;
  return sizes;
}

}  // namespace

struct PeerExchange::Impl {
  PeerGroup group;
  at::Device device = at::kCPU;
  at::Tensor state, absent;  // the latter pinned
  cuda::PeerMemoryView view;
  std::unique_ptr<PeerMemory> memory;  // receive buffers; goes first, and waits for kernels that write the others

  // Rows in as many parts as exchanges take. `part(from, count)`.
  template <typename Fn>
  void in_parts(int64_t rows, int64_t width, Fn&& part) const {
    TRIREME_CHECK(2 * width <= view.slot_bytes, "a row is larger than a receive buffer");
    const int64_t step = view.slot_bytes / (2 * std::max<int64_t>(1, width));
    for (int64_t from = 0; from < rows; from += step) part(from, std::min(step, rows - from));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }
  void run(bool sums, const cuda::PeerRows& rows) const {
    in_parts(rows.rows, rows.width, [&](int64_t from, int64_t count) {
      cuda::PeerRows part = rows;
      part.in += from * rows.in_row;
      part.out += from * rows.out_row;
      part.rows = count;
      (sums ? cuda::exchange_sums : cuda::exchange_copies)(view, part, cuda::stream_of(device.index()),
                                                           cuda::may_begin_early());
    });
  }
};

PeerExchange::PeerExchange() : impl_(std::make_unique<Impl>()) {}
PeerExchange::~PeerExchange() = default;

std::unique_ptr<PeerExchange> PeerExchange::make(const PeerGroup& group, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  std::unique_ptr<PeerExchange> made(new PeerExchange());
  Impl& impl = *made->impl_;
  impl.group = group;
  impl.device = device;
  cuda::PeerMemoryView& view = impl.view;
  view.rank = group.rank;
  view.ranks = group.size;
  view.slot_bytes = kReceiveBytes / cuda::kPeerBuffers / group.size / 4096 * 4096;
  view.patience_ns = static_cast<uint64_t>(group.patience.count()) * 1'000'000;
  std::string problem;
  if (group.size > cuda::kMostPeers) {
    problem = "it has more than " + std::to_string(cuda::kMostPeers) + " ranks";
  } else {
    const int64_t bytes = view.slot_bytes * cuda::kPeerBuffers * group.size;
    impl.memory = PeerMemory::make(
        group, device, bytes,
        [&](void* memory) {
          cuda::empty_receive_buffers(memory, bytes / 4, cuda::stream_of(device.index()));
          C10_CUDA_KERNEL_LAUNCH_CHECK();
        },
        problem);
  }
  if (!problem.empty()) {
    if (group.rank == 0)
      log_warn("parallel", "group '" + group.name + "' exchanges rows by NCCL, slower and without graphs: " + problem);
    return nullptr;
  }
  for (int rank = 0; rank < group.size; ++rank) view.receive[rank] = impl.memory->of(rank);
  impl.state = at::zeros({cuda::kPeerStateWords}, at::TensorOptions(device).dtype(at::kInt));
  impl.absent = at::zeros({1}, at::TensorOptions().dtype(at::kInt).pinned_memory(true));
  view.state = static_cast<uint32_t*>(impl.state.mutable_data_ptr());
  void* word = nullptr;
  C10_CUDA_CHECK(cudaHostGetDevicePointer(&word, impl.absent.mutable_data_ptr(), 0));
  view.absent = static_cast<uint32_t*>(word);
  return made;
}

bool PeerExchange::takes(const at::Tensor& rows) {
  return rows.is_cuda() && rows.scalar_type() == at::kBFloat16 && rows.dim() > 0 && width_of(rows) % 8 == 0;
}

at::Tensor PeerExchange::gather(const at::Tensor& own) {
  const c10::cuda::CUDAGuard guard(own.device());
  const at::Tensor in = ready(own);
  const int64_t rows = in.size(0), width = width_of(in);
  at::Tensor out = at::empty(sized_like(in, rows * impl_->group.size), in.options());
  impl_->run(/*sums=*/false, {.in = data(in),
                              .in_row = width,
                              .out = mutable_data(out),
                              .out_rank = rows * width,
                              .out_row = width,
                              .rows = rows,
                              .width = width});
  return out;
}

at::Tensor PeerExchange::scatter_sum(const at::Tensor& partial) {
  const c10::cuda::CUDAGuard guard(partial.device());
  const at::Tensor in = ready(partial);
  const int64_t rows = in.size(0) / impl_->group.size, width = width_of(in);
  at::Tensor out = at::empty(sized_like(in, rows), in.options());
  impl_->run(/*sums=*/true, {.in = data(in),
                             .in_rank = rows * width,
                             .in_row = width,
                             .out = mutable_data(out),
                             .out_row = width,
                             .rows = rows,
                             .width = width});
  return out;
}

at::Tensor PeerExchange::sum(const at::Tensor& partial) {
  const c10::cuda::CUDAGuard guard(partial.device());
  const at::Tensor in = ready(partial);
  const int64_t width = width_of(in);
  at::Tensor out = at::empty_like(in);
  impl_->run(/*sums=*/true, {.in = data(in),
                             .in_row = width,
                             .out = mutable_data(out),
                             .out_row = width,
                             .rows = in.size(0),
                             .width = width});
  return out;
}

NormResult PeerExchange::sum_add_rms_norm(const at::Tensor& x, const at::Tensor& partial, const at::Tensor& weight,
                                          double eps, int64_t counted) {
  const c10::cuda::CUDAGuard guard(x.device());
  const at::Tensor residual = ready(x), in = ready(partial), scale = ready(weight);
  const int64_t rows = in.size(0), width = in.size(1);
  NormResult out{at::empty_like(in), at::empty_like(in)};
  impl_->in_parts(rows, width, [&](int64_t from, int64_t count) {
    cuda::exchange_add_rms_norm(impl_->view, data(residual) + from * width, data(in) + from * width, data(scale),
                                static_cast<float>(eps), {count, width, counted > 0 ? counted : width},
                                mutable_data(out.sum) + from * width, mutable_data(out.normed) + from * width,
                                cuda::stream_of(in), cuda::may_begin_early());
  });
  return out;
}

at::Tensor PeerExchange::whole_rows(const at::Tensor& columns) {
  const c10::cuda::CUDAGuard guard(columns.device());
  const bool usable = columns.stride(1) == 1 && columns.stride(0) % 8 == 0 && aligned(columns);
  const at::Tensor in = usable ? columns : ready(columns);
  const int64_t rows = in.size(0) / impl_->group.size, width = in.size(1), stride = in.stride(0);
  at::Tensor out = at::empty({rows, width * impl_->group.size}, in.options());
  impl_->run(/*sums=*/false, {.in = data(in),
                              .in_rank = rows * stride,
                              .in_row = stride,
                              .out = mutable_data(out),
                              .out_rank = width,
                              .out_row = out.size(1),
                              .rows = rows,
                              .width = width});
  return out;
}

at::Tensor PeerExchange::own_columns(const at::Tensor& whole) {
  const c10::cuda::CUDAGuard guard(whole.device());
  const at::Tensor in = ready(whole);
  const int64_t rows = in.size(0), width = in.size(1) / impl_->group.size;
  at::Tensor out = at::empty({rows * impl_->group.size, width}, in.options());
  impl_->run(/*sums=*/false, {.in = data(in),
                              .in_rank = width,
                              .in_row = in.size(1),
                              .out = mutable_data(out),
                              .out_rank = rows * width,
                              .out_row = width,
                              .rows = rows,
                              .width = width});
  return out;
}

DeviceSamples PeerExchange::gather_samples(const DeviceSamples& own) {
  const c10::cuda::CUDAGuard guard(own.ids.device());
  const int64_t rows = own.ids.size(0), all = rows * impl_->group.size;
  TRIREME_CHECK(rows * 16 <= impl_->view.slot_bytes, "more samples than a receive buffer takes");
  DeviceSamples out{at::empty({all}, own.ids.options()), at::empty({all}, own.logprobs.options())};
  cuda::exchange_samples(impl_->view, own.ids.const_data_ptr<int64_t>(), own.logprobs.const_data_ptr<float>(), rows,
                         out.ids.mutable_data_ptr<int64_t>(), out.logprobs.mutable_data_ptr<float>(),
                         cuda::stream_of(own.ids));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return out;
}

void PeerExchange::throw_if_absent() const {
  const auto rank = *static_cast<const volatile int32_t*>(impl_->absent.const_data_ptr());
  if (rank == 0) return;
  throw Error(ErrorKind::kUnavailable, "a device has waited in vain for rank " + std::to_string(rank - 1) +
                                           " of group '" + impl_->group.name + "'");
}

}  // namespace trireme
