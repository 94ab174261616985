#include "trainer/parallel/weight_wire.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "trainer/parallel/weight_link.h"

namespace trireme {
namespace {

constexpr std::chrono::microseconds kLook{200};
constexpr Milliseconds kLeave{10000};  // a device leaves what was aborted

// NCCL itself: c10d's groups have a watchdog that ends the process when the other end of one breaks. LibTorch has
// loaded the library; that one is taken, so that a process has one NCCL.
struct NcclCalls {
  void* library = ::dlopen("libnccl.so.2", RTLD_NOW);

  template <typename Fn>
  Fn* find(const char* name) const {
    void* found = library == nullptr ? nullptr : ::dlsym(library, name);
    if (found == nullptr) fail_internal(std::string("libnccl.so.2 has no ") + name + ", or is not there");
    return reinterpret_cast<Fn*>(found);
  }

  decltype(ncclGetUniqueId)* get_unique_id = find<decltype(ncclGetUniqueId)>("ncclGetUniqueId");
  decltype(ncclCommInitRankConfig)* init = find<decltype(ncclCommInitRankConfig)>("ncclCommInitRankConfig");
  decltype(ncclCommGetAsyncError)* state = find<decltype(ncclCommGetAsyncError)>("ncclCommGetAsyncError");
  decltype(ncclCommAbort)* abort = find<decltype(ncclCommAbort)>("ncclCommAbort");
  decltype(ncclSend)* send = find<decltype(ncclSend)>("ncclSend");
  decltype(ncclRecv)* receive = find<decltype(ncclRecv)>("ncclRecv");
  decltype(ncclGetErrorString)* text = find<decltype(ncclGetErrorString)>("ncclGetErrorString");
};

const NcclCalls& nccl() {
  static const NcclCalls calls;
  return calls;
}

void check_nccl(ncclResult_t result, const char* what) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  throw Error(ErrorKind::kUnavailable, std::string("NCCL: ") + what + " failed: " + nccl().text(result));
}

void poll_until(const std::function<bool()>& done, const Deadline& deadline, const LinkCancel* cancel,
                const char* what) {
  while (!done()) {
    if (cancel != nullptr) cancel->check();
    if (deadline.passed()) fail_timeout(std::string(what) + " did not end until the deadline");
    std::this_thread::sleep_for(kLook);
  }
}

}  // namespace

struct WeightWire::Impl {
  Impl(at::Device on, int at_side) : device(on), side(at_side), stream(c10::cuda::getDefaultCUDAStream(on.index())) {
    const c10::cuda::CUDAGuard guard(device);
    int least = 0, greatest = 0;
    C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    C10_CUDA_CHECK(cudaStreamCreateWithPriority(&raw, cudaStreamNonBlocking, greatest));
    stream = c10::cuda::getStreamFromExternal(raw, device.index());
  }

  // Everything that the communicator has begun from the host's side is queued.
  void settle(const Deadline& deadline, const LinkCancel& cancel, const char* what) {
    poll_until(
        [&] {
          ncclResult_t state = ncclInProgress;
          check_nccl(nccl().state(comm, &state), what);
          check_nccl(state, what);
          return state == ncclSuccess;
        },
        deadline, &cancel, what);
  }

  void begin(const TimeMark& after) {
    if (after != nullptr) std::static_pointer_cast<at::cuda::CUDAEvent>(after)->block(stream);
    queued = true;
    marked = false;
  }

  at::Device device;
  int side = 0;
  cudaStream_t raw = nullptr;
  c10::cuda::CUDAStream stream;
  ncclComm_t comm = nullptr;
  at::cuda::CUDAEvent end;
  bool queued = false;  // something has been, since the last wait
  bool marked = false;  // `end` is behind it
};

std::string WeightWire::make_id() {
  ncclUniqueId id;
  static_assert(sizeof id.internal == kIdBytes);
  check_nccl(nccl().get_unique_id(&id), "making an id");
  return std::string(id.internal, sizeof id.internal);
}

WeightWire::WeightWire(at::Device device, int side, const std::string& id, const Deadline& deadline,
                       const LinkCancel& cancel)
    : impl_(std::make_unique<Impl>(device, side)) {
  TRIREME_CHECK(id.size() == kIdBytes, "an id of NCCL's has 128 bytes");
  const c10::cuda::CUDAGuard guard(device);
  ncclUniqueId nccl_id;
  std::memcpy(nccl_id.internal, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;  // else nothing could end a call that waits for the other side
  const char* what = "connecting two devices";
  try {
    check_nccl(nccl().init(&impl_->comm, 2, nccl_id, side, &config), what);
    impl_->settle(deadline, cancel, what);
  } catch (...) {
    if (impl_->comm != nullptr) (void)nccl().abort(impl_->comm);
    (void)cudaStreamDestroy(impl_->raw);
    throw;
  }
}

// Abort is right after success, too: destroying a communicator waits for the other side.
WeightWire::~WeightWire() {
  const c10::cuda::CUDAGuard guard(impl_->device);
  if (impl_->comm != nullptr) (void)nccl().abort(impl_->comm);
  const Deadline deadline = Deadline::after(kLeave);
  while (cudaStreamQuery(impl_->raw) == cudaErrorNotReady && !deadline.passed()) std::this_thread::sleep_for(kLook);
  if (deadline.passed()) log_error("weights", "a device did not leave a transfer that was aborted");
  (void)cudaStreamDestroy(impl_->raw);
}

void WeightWire::send(const at::Tensor& tensor, const TimeMark& after) {
  const c10::cuda::CUDAGuard guard(impl_->device);
  impl_->begin(after);
  check_nccl(nccl().send(tensor.const_data_ptr(), tensor.nbytes(), ncclInt8, 1 - impl_->side, impl_->comm, impl_->raw),
             "a send");
}

void WeightWire::receive(at::Tensor tensor, const TimeMark& after) {
  const c10::cuda::CUDAGuard guard(impl_->device);
  impl_->begin(after);
  check_nccl(
      nccl().receive(tensor.mutable_data_ptr(), tensor.nbytes(), ncclInt8, 1 - impl_->side, impl_->comm, impl_->raw),
      "a receive");
}

void WeightWire::run(const std::function<void()>& queue, const TimeMark& after) {
  const c10::cuda::CUDAGuard guard(impl_->device);
  const c10::cuda::CUDAStreamGuard stream(impl_->stream);
  impl_->begin(after);
  queue();
}

void WeightWire::settle(const Deadline& deadline, const LinkCancel& cancel) {
  const c10::cuda::CUDAGuard guard(impl_->device);
  impl_->settle(deadline, cancel, "bytes between two devices");
}

// A call that does not block may still be at work when it returns: what it queues is behind no event before.
void WeightWire::wait(const Deadline& deadline, const LinkCancel& cancel, const std::function<void()>& meanwhile) {
  if (!impl_->queued) return;
  const c10::cuda::CUDAGuard guard(impl_->device);
  const char* what = "bytes between two devices";
  impl_->settle(deadline, cancel, what);
  if (!impl_->marked) impl_->end.record(impl_->stream);
  impl_->marked = true;
  poll_until(
      [&] {
        ncclResult_t state = ncclSuccess;
        check_nccl(nccl().state(impl_->comm, &state), what);
        check_nccl(state, what);
        if (meanwhile) meanwhile();
        return impl_->end.query();
      },
      deadline, &cancel, what);
  impl_->queued = false;
}

uint64_t WeightWire::checksum(const at::Tensor& tensor, const TimeMark& after) {
  const c10::cuda::CUDAGuard guard(impl_->device);
  const c10::cuda::CUDAStreamGuard stream(impl_->stream);
  if (after != nullptr) std::static_pointer_cast<at::cuda::CUDAEvent>(after)->block(impl_->stream);
  return weight_checksum(tensor);
}

}  // namespace trireme
