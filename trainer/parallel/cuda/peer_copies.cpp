#include "trainer/parallel/peer_copies.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <string>

#include "base/error.h"
#include "trainer/parallel/cuda/peer_memory.h"
#include "trainer/parallel/cuda/stream_words.h"

namespace trireme {
namespace {

// Of all mailboxes of a rank; one is written and read in pieces by turns. With two ranks a piece is 8 MiB: copying it
// takes some 25 us, asking for it 5.
constexpr int64_t kMailboxesBytes = int64_t{64} << 20;
constexpr uint32_t kPieces = 8;
constexpr int64_t kPieceAlignment = 4096;
constexpr int64_t kPieceWordBytes = 256;  // words lie in cache lines of their own

// Streams in each direction, at most. A device has 32 queues, and a stream that shares one with another waits for what
// that waits for: eight ranks with a stream for each other one, twice where a critic has a group of its own, would be
// more. Steps of an exchange share them: in step s a rank sends to the one s behind it and receives from the one s
// before it, so what a stream waits for is of the same step on the other side, whose streams have the same steps before
// it: the earliest step that has not ended can always go on.
constexpr size_t kLanes = 3;

}  // namespace

struct PeerCopies::Impl {
  // What goes to one other rank, and comes from it.
  struct Peer {
    char* to = nullptr;          // my mailbox there
    void* arrived = nullptr;     // there: pieces that I have written
    void* taken_here = nullptr;  // pieces that it has read
    uint32_t sent = 0;
    char* from = nullptr;  // its mailbox here
    void* arrived_here = nullptr;
    void* taken = nullptr;  // there: pieces that I have read
    uint32_t received = 0;
  };

  explicit Impl(at::Device on) : device(on) {}

  at::Device device;
  int rank = 0;
  int64_t piece_bytes = 0;
  std::unique_ptr<PeerMemory> memory;
  std::vector<Peer> peers;              // by rank
  std::vector<cudaStream_t> outs, ins;  // by lane
  cudaStream_t within = nullptr;        // copies within the device

  // Of a step, which begin with 1.
  static cudaStream_t lane(const std::vector<cudaStream_t>& lanes, size_t step) {
    return lanes[(step - 1) % lanes.size()];
  }

  void send(Peer& peer, const at::Tensor& part, cudaStream_t stream) const {
    const auto* data = static_cast<const char*>(part.const_data_ptr());
    const auto bytes = static_cast<int64_t>(part.nbytes());
    for (int64_t begin = 0; begin < bytes; begin += piece_bytes) {
      const uint32_t piece = peer.sent++ % kPieces;
      wait_for_word(stream, peer.taken_here, peer.sent - kPieces);  // of the first ones nothing has to be taken
      C10_CUDA_CHECK(cudaMemcpyAsync(peer.to + piece * piece_bytes, data + begin,
                                     static_cast<size_t>(std::min(piece_bytes, bytes - begin)),
                                     cudaMemcpyDeviceToDevice, stream));
      write_word(stream, peer.arrived, peer.sent);
    }
  }

  void receive(Peer& peer, const at::Tensor& part, cudaStream_t stream) const {
    auto* data = static_cast<char*>(part.mutable_data_ptr());
    const auto bytes = static_cast<int64_t>(part.nbytes());
    for (int64_t begin = 0; begin < bytes; begin += piece_bytes) {
      const uint32_t piece = peer.received++ % kPieces;
      wait_for_word(stream, peer.arrived_here, peer.received);
      C10_CUDA_CHECK(cudaMemcpyAsync(data + begin, peer.from + piece * piece_bytes,
                                     static_cast<size_t>(std::min(piece_bytes, bytes - begin)),
                                     cudaMemcpyDeviceToDevice, stream));
      write_word(stream, peer.taken, peer.received);
    }
  }
};

PeerCopies::PeerCopies() = default;

PeerCopies::~PeerCopies() {
  if (impl_ == nullptr) return;
  const c10::cuda::CUDAGuard guard(impl_->device);
  impl_->memory.reset();
  for (const auto& lanes : {impl_->outs, impl_->ins})
    for (const cudaStream_t stream : lanes) (void)cudaStreamDestroy(stream);
  if (impl_->within != nullptr) (void)cudaStreamDestroy(impl_->within);
}

std::unique_ptr<PeerCopies> PeerCopies::make(const PeerGroup& group, at::Device device, std::string& problem) {
  const c10::cuda::CUDAGuard guard(device);
  std::unique_ptr<PeerCopies> copies(new PeerCopies());
  copies->impl_ = std::make_unique<Impl>(device);
  Impl& impl = *copies->impl_;
  impl.rank = group.rank;
  impl.piece_bytes = std::max<int64_t>(
      kPieceAlignment, kMailboxesBytes / std::max(1, group.size - 1) / kPieces / kPieceAlignment * kPieceAlignment);
  // A rank's memory: words, by the other rank, of what has arrived from it and of what it has taken; then a mailbox for
  // each rank, the own one's unused.
  const int64_t head = 2 * group.size * kPieceWordBytes, mailbox = impl.piece_bytes * kPieces;
  impl.memory = PeerMemory::make(
      group, device, head + group.size * mailbox,
      [head](void* memory) {
        TRIREME_CHECK(streams_wait_for_words(), "the driver's streams cannot wait");
        C10_CUDA_CHECK(cudaMemset(memory, 0, static_cast<size_t>(head)));
      },
      problem);
  if (!problem.empty()) return nullptr;
  const auto at = [&](int rank, int64_t offset) { return static_cast<char*>(impl.memory->of(rank)) + offset; };
  const auto arrived = [](int from) { return 2 * from * kPieceWordBytes; };
  const auto taken = [](int by) { return (2 * by + 1) * kPieceWordBytes; };
  for (auto* lanes : {&impl.outs, &impl.ins}) {
    while (lanes->size() < std::min(kLanes, static_cast<size_t>(group.size - 1)))
      C10_CUDA_CHECK(cudaStreamCreateWithFlags(&lanes->emplace_back(), cudaStreamNonBlocking));
  }
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&impl.within, cudaStreamNonBlocking));
  for (int rank = 0; rank < group.size; ++rank) {
    Impl::Peer& peer = impl.peers.emplace_back();
    if (rank == group.rank) continue;
    peer.to = at(rank, head + group.rank * mailbox);
    peer.arrived = at(rank, arrived(group.rank));
    peer.taken_here = at(group.rank, taken(rank));
    peer.from = at(group.rank, head + rank * mailbox);
    peer.arrived_here = at(group.rank, arrived(rank));
    peer.taken = at(rank, taken(group.rank));
  }
  return copies;
}

PeerLines::Copy PeerCopies::exchange(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  const c10::cuda::CUDAGuard guard(impl_->device);
  TRIREME_CHECK(to.size() == impl_->peers.size() && from.size() == to.size(), "copies: a part of each rank expected");
  at::cuda::CUDAEvent ready;
  ready.record();
  const auto ends = std::make_shared<std::vector<at::cuda::CUDAEvent>>();
  const auto on = [&](cudaStream_t stream, const auto& copy) {
    const auto side = c10::cuda::getStreamFromExternal(stream, impl_->device.index());
    ready.block(side);
    copy();
    ends->emplace_back().record(side);
  };
  // What goes is queued before what comes: nobody waits, on the host or on a device, for what this rank has not sent.
  const auto own = static_cast<size_t>(impl_->rank);
  for (size_t step = 1; step < to.size(); ++step) {  // all ranks begin with another
    const size_t rank = (own + step) % to.size();
    if (!to[rank].defined()) continue;
    TRIREME_CHECK(to[rank].is_contiguous(), "copies: contiguous parts");
    const cudaStream_t stream = Impl::lane(impl_->outs, step);
    on(stream, [&] { impl_->send(impl_->peers[rank], to[rank], stream); });
  }
  for (size_t step = 1; step < from.size(); ++step) {
    const size_t rank = (own + from.size() - step) % from.size();
    if (!from[rank].defined()) continue;
    TRIREME_CHECK(from[rank].is_contiguous(), "copies: contiguous parts");
    const cudaStream_t stream = Impl::lane(impl_->ins, step);
    on(stream, [&] { impl_->receive(impl_->peers[rank], from[rank], stream); });
  }
  if (to[own].defined()) {
    TRIREME_CHECK(from[own].defined() && from[own].nbytes() == to[own].nbytes() && to[own].is_contiguous() &&
                      from[own].is_contiguous(),
                  "copies: what stays goes into as much");
    on(impl_->within, [&] {
      C10_CUDA_CHECK(cudaMemcpyAsync(from[own].mutable_data_ptr(), to[own].const_data_ptr(), to[own].nbytes(),
                                     cudaMemcpyDeviceToDevice, impl_->within));
    });
  }
  return {[ends, to, from] {
            for (at::cuda::CUDAEvent& end : *ends) end.block(c10::cuda::getCurrentCUDAStream());
          },
          [ends] {
            return std::all_of(ends->begin(), ends->end(), [](const at::cuda::CUDAEvent& end) { return end.query(); });
          }};
}

}  // namespace trireme
