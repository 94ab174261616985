#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/parallel/weight_link.h"
#include "trainer/parallel/weight_protocol.h"
#include "trainer/parallel/weight_wire.h"

namespace trireme {

struct WeightReceiver::Impl {
  Impl(const WeightLinkOptions& of, const WeightView& view) : options(of), weights(view) {}

  std::string peer() const { return "rank " + std::to_string(rank); }

  // Where bytes go: the live weights, where there is nothing beside them.
  const at::Tensor& into() const { return second.defined() ? second : weights.flat; }

  void drop() {
    wire.reset();
    pair.reset();
    store.reset();
  }

  // The next connection of the link: its number is this engine's to count, and never used again.
  void connect(const Deadline& deadline) {
    store =
        std::make_unique<LinkStore>(options.store_address, options.store_port, options.attempt, deadline.remaining());
    const int64_t number = store->add(link_key(link, "connections"), 1);
    const std::string name = link_key(link, std::to_string(number));
    store->set(name, "1");
    (void)store->get(name + "/offered", deadline, cancel, peer() + " did not come to the link");
    store->set(name + "/taken", "1");
    pair = std::make_unique<LinkPair>(*store, name, 1, options.store_address, peer(), deadline, cancel);
    transfers = 0;
  }

  // A connection that ends before the sender has said anything is one that it had given up: the next one is the
  // answer's.
  int64_t fetch(const Deadline& deadline) {
    for (;;) {
      cancel.check();
      begun = false;
      try {
        if (!pair) connect(deadline);
        return transfer(deadline);
      } catch (const Error& error) {
        if (begun || error.kind() == ErrorKind::kTimeout || deadline.passed() || cancel.cancelled()) throw;
        drop();
      }
    }
  }

  int64_t transfer(const Deadline& deadline) {
    fresh = false;
    WeightMessage ready = message_about(weights, WeightMessage::kReady, -1);
    ready.stall_seconds = stall_seconds();
    send_message(*pair, ready, deadline);
    WeightMessage header = receive_message(*pair, deadline);
    begun = true;
    if (const std::string why = misfit(header, ready); !why.empty()) fail_user(why);
    if (header.kind == WeightMessage::kWire) {
      const std::string id(header.wire, sizeof header.wire);
      wire = std::make_unique<WeightWire>(weights.flat.device(), 1, id, deadline, cancel);
      header = receive_message(*pair, deadline);
    }
    expect(header, WeightMessage::kHeader);
    const Stopwatch watch;
    const WeightMessage trailer = receive_bytes(deadline);
    WeightTransfer transfer{
        .version = header.version, .seconds = watch.seconds(), .bytes = header.bytes, .verified = header.verify != 0};
    if (trailer.version != header.version || trailer.verify != header.verify)
      throw Error(ErrorKind::kUnavailable, "the trailer is not that of the header");
    if (transfers == 0) judge_transport(options.transport, weights.flat.is_cuda(), header.host);
    WeightMessage receipt = message_about(weights, WeightMessage::kReceipt, header.version);
    if (transfer.verified) receipt.checksum = checksum();
    receipt.accepted = receipt.checksum == trailer.checksum ? 1 : 0;
    send_message(*pair, receipt, deadline);
    if (receipt.accepted == 0) {
      throw Error(ErrorKind::kUnavailable, "other bytes came than were sent: checksum " +
                                               std::to_string(receipt.checksum) + " instead of " +
                                               std::to_string(trailer.checksum));
    }
    ++transfers;
    torn = false;
    fresh = second.defined();
    last = transfer;
    return header.version;
  }

  WeightMessage receive_bytes(const Deadline& deadline) {
    torn = !second.defined();
    if (!weights.flat.is_cuda()) {
      pair->receive(into(), deadline, options.on_bytes);
    } else {
      if (!wire) throw Error(ErrorKind::kUnavailable, "the other end has a wire between devices that is not here");
      wire->receive(into(), read());
    }
    const WeightMessage trailer = receive_message(*pair, deadline);
    expect(trailer, WeightMessage::kTrailer);
    if (wire) wire->wait(deadline, cancel);
    return trailer;
  }

  // On CUDA: when the place where bytes go has been read. Without a second buffer by whatever the calling thread has
  // queued, which is its caller's last step.
  TimeMark read() const {
    if (second.defined()) return applied;
    const c10::DeviceGuard device(weights.flat.device());
    return mark_time();
  }

  double stall_seconds() const {
    if (!second.defined()) return last.seconds;
    return applied == nullptr ? applied_in : seconds_between(applying, applied);
  }

  uint64_t checksum() const { return wire ? wire->checksum(into(), nullptr) : weight_checksum(into()); }

  const WeightLinkOptions options;
  const WeightView weights;
  at::Tensor second;  // undefined: no room
  LinkCancel cancel;
  std::string link;
  int64_t rank = 0;
  std::unique_ptr<LinkStore> store;
  std::unique_ptr<LinkPair> pair;
  std::unique_ptr<WeightWire> wire;
  int64_t transfers = 0;       // over pair
  bool begun = false;          // in this transfer the sender has said something
  bool fresh = false;          // the second buffer has what apply() would copy
  double applied_in = 0;       // seconds, on the CPU
  TimeMark applying, applied;  // on CUDA: apply() began, and has read the second buffer
  std::atomic<bool> torn{false};
  WeightTransfer last;
};

WeightReceiver::WeightReceiver(const WeightLinkOptions& options, const WeightView& weights)
    : impl_(std::make_unique<Impl>(options, weights)) {
  TRIREME_CHECK(weights.flat.is_contiguous() && weights.flat.numel() > 0, "flat weights are contiguous");
  if (!options.second_buffer) return;
  const at::NoGradGuard no_grad;
  try {
    impl_->second = at::empty_like(weights.flat);
  } catch (const c10::OutOfMemoryError&) {
    log_warn("weights", "there is no memory for a second copy of the weights (" +
                            format_bytes(static_cast<uint64_t>(weights.flat.nbytes())) +
                            "): decoding stops while new ones are received");
  }
}

WeightReceiver::~WeightReceiver() { impl_->drop(); }

bool WeightReceiver::needs_stop() const { return !impl_->second.defined(); }

int64_t WeightReceiver::fetch(const std::string& link, int64_t actor_rank) {
  check_link_name(link);
  const auto prefixed = [&](ErrorKind kind, const std::string& what) {
    impl_->drop();
    return Error(kind, "weights from rank " + std::to_string(actor_rank) + " to engine " +
                           std::to_string(impl_->options.engine) + " over '" + link +
                           "': " + failure_of_transfer(impl_->options.transport, what));
  };
  if (impl_->link != link || impl_->rank != actor_rank) impl_->drop();
  impl_->link = link;
  impl_->rank = actor_rank;
  try {
    return impl_->fetch(Deadline::after(impl_->options.deadline));
  } catch (const Error& error) {
    throw prefixed(error.kind(), error.what());
  } catch (const std::exception& error) {
    const std::string what = error.what();
    throw prefixed(ErrorKind::kUnavailable, what.substr(0, what.find('\n')));
  }
}

void WeightReceiver::cancel() { impl_->cancel.cancel(); }

bool WeightReceiver::torn() const { return impl_->torn; }

void WeightReceiver::apply() {
  if (!impl_->fresh) return;
  const at::NoGradGuard no_grad;
  at::Tensor live = impl_->weights.flat;
  const c10::DeviceGuard device(live.device());
  const Stopwatch watch;
  if (live.is_cuda()) impl_->applying = mark_time();
  live.copy_(impl_->second, /*non_blocking=*/true);
  if (live.is_cuda()) impl_->applied = mark_time();
  impl_->applied_in = watch.seconds();
  impl_->fresh = false;
}

double WeightReceiver::stall_seconds() const { return impl_->stall_seconds(); }

const WeightTransfer& WeightReceiver::last() const { return impl_->last; }

}  // namespace trireme
