#include "trainer/parallel/peer_lines.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "trainer/parallel/cuda/peer_memory.h"
#include "trainer/parallel/cuda/stream_words.h"

namespace trireme {
namespace {

// A mailbox: chunks that are written and read in turn. One is large enough that copying it takes much longer than
// asking for it. A message that a mailbox has no room for keeps the sender's stream waiting until the receiver takes it
// out. That must not stand before what the receiver waits for: nothing may wait for the whole device between a send and
// the receive that the other side answers it with.
constexpr int64_t kCopyBytes = int64_t{4} << 20;
constexpr uint32_t kChunks = 16;
constexpr int64_t kMailboxBytes = kCopyBytes * kChunks;

// A rank's memory: words, each in a cache line of its own, then a mailbox for each direction.
constexpr int64_t kWordBytes = 256;
constexpr int64_t kHeadBytes = 4 * kWordBytes;

}  // namespace

struct PeerLines::Impl {
  // Of one direction.
  struct Way {
    char* to = nullptr;          // the receiver's mailbox
    void* arrived = nullptr;     // there: chunks that have been written
    void* taken_here = nullptr;  // chunks that the receiver has read, of what is sent from here
    cudaStream_t stream = nullptr;
    uint32_t sent = 0;

    char* from = nullptr;  // the own mailbox
    void* arrived_here = nullptr;
    void* taken = nullptr;  // the sender's
    uint32_t received = 0;
    at::cuda::CUDAEvent last;  // what was received last has been copied out
  };

  explicit Impl(at::Device on) : device(on) {}

  at::Device device;
  std::unique_ptr<PeerMemory> memory;
  std::array<Way, 2> ways;  // forward, backward
};

PeerLines::PeerLines() = default;

PeerLines::~PeerLines() {
  if (impl_ == nullptr) return;
  const c10::cuda::CUDAGuard guard(impl_->device);
  impl_->memory.reset();
  for (Impl::Way& way : impl_->ways)
    if (way.stream != nullptr) (void)cudaStreamDestroy(way.stream);
}

std::unique_ptr<PeerLines> PeerLines::make(const PeerGroup& group, at::Device device, std::string& problem) {
  const c10::cuda::CUDAGuard guard(device);
  std::unique_ptr<PeerLines> lines(new PeerLines());
  lines->impl_ = std::make_unique<Impl>(device);
  Impl& impl = *lines->impl_;
  impl.memory = PeerMemory::make(
      group, device, kHeadBytes + 2 * kMailboxBytes,
      [](void* memory) {
        TRIREME_CHECK(streams_wait_for_words(), "the driver's streams cannot wait");
        C10_CUDA_CHECK(cudaMemset(memory, 0, kHeadBytes));
      },
      problem);
  if (!problem.empty()) return nullptr;
  for (const bool backward : {false, true}) {
    Impl::Way& way = impl.ways[backward];
    const int next = (group.rank + 1) % group.size, before = (group.rank + group.size - 1) % group.size;
    const auto at = [&](int rank, int64_t offset) { return static_cast<char*>(impl.memory->of(rank)) + offset; };
    const int64_t arrived = backward * kWordBytes, taken = (2 + backward) * kWordBytes,
                  mailbox = kHeadBytes + backward * kMailboxBytes;
    const int to = backward ? before : next, from = backward ? next : before;
    way.to = at(to, mailbox);
    way.arrived = at(to, arrived);
    way.taken_here = at(group.rank, taken);
    way.from = at(group.rank, mailbox);
    way.arrived_here = at(group.rank, arrived);
    way.taken = at(from, taken);
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&way.stream, cudaStreamNonBlocking));
  }
  return lines;
}

PeerLines::Copy PeerLines::send(const at::Tensor& tensor, bool backward) {
  const c10::cuda::CUDAGuard guard(impl_->device);
  Impl::Way& way = impl_->ways[backward];
  const auto side = c10::cuda::getStreamFromExternal(way.stream, impl_->device.index());
  at::cuda::CUDAEvent ready;
  ready.record();
  ready.block(side);
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  for (int64_t begin = 0; begin < bytes; begin += kCopyBytes) {
    const uint32_t chunk = way.sent++ % kChunks;
    wait_for_word(way.stream, way.taken_here, way.sent - kChunks);  // of the first ones nothing has to be taken
    C10_CUDA_CHECK(cudaMemcpyAsync(way.to + chunk * kCopyBytes, data + begin,
                                   static_cast<size_t>(std::min(kCopyBytes, bytes - begin)), cudaMemcpyDeviceToDevice,
                                   way.stream));
    write_word(way.stream, way.arrived, way.sent);
  }
  const auto end = std::make_shared<at::cuda::CUDAEvent>();
  end->record(side);
  c10::cuda::CUDACachingAllocator::recordStream(tensor.storage().data_ptr(), side);
  return {[end, tensor] { end->block(c10::cuda::getCurrentCUDAStream()); }, [end] { return end->query(); }};
}

void PeerLines::receive(at::Tensor tensor, bool backward) {
  const c10::cuda::CUDAGuard guard(impl_->device);
  Impl::Way& way = impl_->ways[backward];
  const auto current = c10::cuda::getCurrentCUDAStream();
  way.last.block(current);
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  for (int64_t begin = 0; begin < bytes; begin += kCopyBytes) {
    const uint32_t chunk = way.received++ % kChunks;
    wait_for_word(current.stream(), way.arrived_here, way.received);
    C10_CUDA_CHECK(cudaMemcpyAsync(data + begin, way.from + chunk * kCopyBytes,
                                   static_cast<size_t>(std::min(kCopyBytes, bytes - begin)), cudaMemcpyDeviceToDevice,
                                   current.stream()));
    write_word(current.stream(), way.taken, way.received);
  }
  way.last.record(current);
}

}  // namespace trireme
