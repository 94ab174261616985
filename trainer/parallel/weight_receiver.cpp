#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/parallel/weight_link.h"
#include "trainer/parallel/weight_protocol.h"
#include "trainer/parallel/weight_wire.h"

namespace trireme {
namespace {

constexpr Milliseconds kAskAgain{20};  // weights that are gone: another version is under way

// One of the actor ranks that weights come from, and the connection to it.
struct Source {
  std::unique_ptr<LinkPair> pair;
  std::unique_ptr<WeightWire> wire;
  int64_t transfers = 0;  // over pair
  WeightPart part;
  WeightMessage header;

  void drop() {
    wire.reset();
    pair.reset();
  }
};

// Tells senders whose turn has not come that this engine is there, from a thread of its own. What fails here is seen by
// whoever uses the connection next.
class SignsOfLife final {
 public:
  explicit SignsOfLife(Milliseconds interval) : interval_(interval), thread_([this] { run(); }) {}
  ~SignsOfLife() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void begin(LinkPair& pair) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pairs_.insert(&pair);
  }
  // From here on the pair is the caller's.
  void end(LinkPair& pair) {
    const std::lock_guard<std::mutex> lock(mutex_);
    pairs_.erase(&pair);
  }

 private:
  void run() {
    WeightMessage alive;
    alive.kind = WeightMessage::kAlive;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, interval_, [&] { return ended_; })) {
      for (auto pair = pairs_.begin(); pair != pairs_.end();) {
        try {
          send_message(**pair, alive, Deadline::after(interval_));
          ++pair;
        } catch (const std::exception&) {
          pair = pairs_.erase(pair);
        }
      }
    }
  }

  const Milliseconds interval_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<LinkPair*> pairs_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace

struct WeightReceiver::Impl {
  Impl(const WeightLinkOptions& of, const WeightView& view) : options(of), weights(view) {}

  std::string peer() const { return "rank " + std::to_string(rank); }

  // Where bytes go: the live weights, where there is nothing beside them.
  const at::Tensor& into() const { return second.defined() ? second : weights.flat; }

  void drop() {
    signs.reset();  // of connections that go
    kept.clear();
    sources.clear();
    packed.reset();  // which their devices have left
    store.reset();
  }

  // What `fn` throws names both ends, and ends the connections.
  template <typename Fn>
  auto named(Fn&& fn) {
    const auto prefixed = [&](ErrorKind kind, const std::string& what) {
      drop();
      return Error(kind, "weights from rank " + std::to_string(rank) + " to " + engine_name(options) + " over '" +
                             link + "': " + failure_of_transfer(options.transport, what));
    };
    try {
      return fn(Deadline::after(options.deadline));
    } catch (const Error& error) {
      throw prefixed(error.kind(), error.what());
    } catch (const std::exception& error) {
      const std::string what = error.what();
      throw prefixed(ErrorKind::kUnavailable, what.substr(0, what.find('\n')));
    }
  }

  // The parts' sources, with the connections that there are to them.
  void expect_parts(const std::string& name, const std::vector<WeightPart>& of, bool pinned) {
    check_link_name(name);
    TRIREME_CHECK(!of.empty(), "weights come from somebody");
    pins = pinned;
    rank = of.front().actor_rank;
    std::vector<int64_t> ranks;
    for (const WeightPart& part : of) ranks.push_back(part.actor_rank);
    if (link != name || ranks != order || !kept.empty()) drop();
    link = name;
    order = ranks;
    for (const WeightPart& part : of) sources[part.actor_rank].part = part;
  }

  // The next connection of the link: its number is this engine's to count, and never used again.
  void connect(Source& source, const Deadline& deadline) {
    if (!store)
      store =
          std::make_unique<LinkStore>(options.store_address, options.store_port, options.attempt, deadline.remaining());
    const int64_t number = store->add(link_key(link, rank, "connections"), 1);
    const std::string name = link_key(link, rank, std::to_string(number));
    store->set(name, "1");
    (void)store->get(name + "/offered", deadline, cancel, peer() + " did not come to the link");
    store->set(name + "/taken", "1");
    source.pair = std::make_unique<LinkPair>(*store, name, 1, options.store_address, peer(), deadline, cancel);
    source.transfers = 0;
  }

  WeightMessage question(const Source& source, int64_t version) const {
    WeightMessage ready = message_about(weights, source.part, WeightMessage::kReady, version);
    ready.pins = pins || sources.size() > 1 ? 1 : 0;
    ready.stall_seconds = stall_seconds();
    return ready;
  }

  void ask(Source& source, int64_t version, const Deadline& deadline) {
    if (!source.pair) connect(source, deadline);
    send_message(*source.pair, question(source, version), deadline);
  }

  // Asks until the source has answered: its header, or that the version is gone. A connection
  // that ends before the sender has said anything is one that it had given up: the next one is the answer's.
  const WeightMessage& answer(Source& source, int64_t version, const Deadline& deadline) {
    for (;;) {
      cancel.check();
      bool begun = false;
      try {
        ask(source, version, deadline);
        source.header = receive_message(*source.pair, deadline);
        begun = true;
        hear(source, version, deadline);
        return source.header;
      } catch (const Error& error) {
        if (begun || error.kind() == ErrorKind::kTimeout || deadline.passed() || cancel.cancelled()) throw;
        source.drop();
        store.reset();
      }
    }
  }

  // The first words of a source, and the wire that they may announce.
  void hear(Source& source, int64_t version, const Deadline& deadline) {
    if (const std::string why = misfit(source.header, question(source, version)); !why.empty()) fail_user(why);
    if (source.header.kind == WeightMessage::kWire) {
      const std::string id(source.header.wire, sizeof source.header.wire);
      source.wire = std::make_unique<WeightWire>(weights.flat.device(), 1, id, deadline, cancel);
      source.header = receive_message(*source.pair, deadline);
    }
    if (source.header.kind == WeightMessage::kGone && version >= 0) return;
    expect(source.header, WeightMessage::kHeader);
    if (version >= 0 && source.header.version != version)
      throw Error(ErrorKind::kUnavailable, "it has other weights than those that were asked for");
  }

  // Every source keeps its weights of this version, or (-1) of that which the first one's are. One after the other: who
  // keeps weights hears of this engine from its answer on. False: a source has written over the version, and none keeps
  // any.
  bool pin(int64_t version, const Deadline& deadline) {
    for (const int64_t of : order) {  // before anybody keeps weights for this
      rank = of;
      if (!sources[of].pair) connect(sources[of], deadline);
    }
    if (!signs) signs = std::make_unique<SignsOfLife>(options.silence / 5);
    for (const int64_t of : order) {
      rank = of;
      const WeightMessage& header = answer(sources[of], version, deadline);
      if (header.kind == WeightMessage::kGone) {
        release(deadline);
        return false;
      }
      version = header.version;
      kept.push_back(of);
      signs->begin(*sources[of].pair);
    }
    return true;
  }

  // Who keeps weights keeps them no more.
  void release(const Deadline& deadline) {
    WeightMessage release;
    release.kind = WeightMessage::kRelease;
    for (const int64_t of : std::exchange(kept, {})) {
      signs->end(*sources[of].pair);
      send_message(*sources[of].pair, release, deadline);
    }
    signs.reset();
  }

  // What all sources keep, from one after the other.
  void receive_pinned(const Deadline& deadline) {
    TRIREME_CHECK(!kept.empty(), "no rank keeps weights for this engine");
    WeightTransfer transfer{.version = pinned(), .verified = true};
    for (const int64_t of : std::exchange(kept, {})) {
      rank = of;
      signs->end(*sources[of].pair);
      WeightMessage go;
      go.kind = WeightMessage::kGo;
      send_message(*sources[of].pair, go, deadline);
      receive(sources[of], transfer, deadline);
    }
    signs.reset();
    received(transfer);
  }

  int64_t fetch(const Deadline& deadline) {
    if (order.size() == 1) {
      WeightTransfer transfer{.verified = true};
      rank = order.front();
      transfer.version = answer(sources[rank], -1, deadline).version;
      receive(sources[rank], transfer, deadline);
      received(transfer);
    } else {
      while (!pin(-1, deadline)) {
        if (deadline.passed()) fail_timeout("the weights were written over whenever all ranks were asked");
        std::this_thread::sleep_for(kAskAgain);
      }
      receive_pinned(deadline);
    }
    return last.version;
  }

  int64_t pinned() { return sources[order.front()].header.version; }

  void received(const WeightTransfer& transfer) {
    torn = false;
    fresh = second.defined();
    last = transfer;
  }

  // A source's bytes, behind its header.
  void receive(Source& source, WeightTransfer& transfer, const Deadline& deadline) {
    const WeightMessage& header = source.header;
    const Stopwatch watch;
    const WeightMessage trailer = receive_bytes(source, transfer.bytes, deadline);
    transfer.seconds += watch.seconds();
    transfer.bytes += header.bytes;
    transfer.verified = transfer.verified && header.verify != 0;
    if (trailer.version != header.version || trailer.verify != header.verify)
      throw Error(ErrorKind::kUnavailable, "the trailer is not that of the header");
    if (source.transfers == 0) judge_transport(options.transport, weights.flat.is_cuda(), header.host);
    WeightMessage receipt = message_about(weights, source.part, WeightMessage::kReceipt, header.version);
    if (header.verify != 0) receipt.checksum = checksum(source);
    receipt.accepted = receipt.checksum == trailer.checksum ? 1 : 0;
    send_message(*source.pair, receipt, deadline);
    if (receipt.accepted == 0) {
      throw Error(ErrorKind::kUnavailable, "other bytes came than were sent: checksum " +
                                               std::to_string(receipt.checksum) + " instead of " +
                                               std::to_string(trailer.checksum));
    }
    ++source.transfers;
  }

  WeightMessage receive_bytes(Source& source, int64_t before, const Deadline& deadline) {
    fresh = false;
    torn = !second.defined();
    if (!weights.flat.is_cuda()) {
      receive_on_host(source, before, deadline);
    } else {
      if (!source.wire)
        throw Error(ErrorKind::kUnavailable, "the other end has a wire between devices that is not here");
      receive_on_device(source, deadline);
    }
    const WeightMessage trailer = receive_message(*source.pair, deadline);
    expect(trailer, WeightMessage::kTrailer);
    if (source.wire) source.wire->wait(deadline, cancel);
    return trailer;
  }

  // On CUDA: when the place where bytes go has been read. Without a second buffer by whatever the calling thread has
  // queued, which is its caller's last step.
  TimeMark read() const {
    if (second.defined()) return applied != nullptr ? applied : filled;
    const c10::DeviceGuard device(weights.flat.device());
    return mark_time();
  }

  void receive_on_host(Source& source, int64_t before, const Deadline& deadline) {
    if (source.part.whole) return source.pair->receive(into(), deadline, options.on_bytes);
    for (const WeightChunk& chunk : chunks_of(source.part, chunk_elements())) {
      const at::Tensor bytes = chunk.contiguous() ? in_place(chunk) : packed_chunk(chunk);
      source.pair->receive(bytes, deadline);
      if (!chunk.contiguous()) scatter_chunk(bytes, chunk, into());
      before += static_cast<int64_t>(bytes.nbytes());
      if (options.on_bytes) options.on_bytes(before);
    }
  }

  // Each chunk's memory is written again when the stream has left it.
  void receive_on_device(Source& source, const Deadline& deadline) {
    const TimeMark free = read();
    if (source.part.whole) return source.wire->receive(into(), free);
    int64_t ahead = 0;
    for (const WeightChunk& chunk : chunks_of(source.part, chunk_elements())) {
      if (chunk.contiguous()) {
        source.wire->receive(in_place(chunk), free);
      } else {
        source.wire->run([&] { (void)packed_chunk(chunk); }, free);
        source.wire->receive(packed_chunk(chunk), nullptr);
      }
      if (++ahead % kChunksAhead == 0) {
        source.wire->wait(deadline, cancel, [&] { source.pair->check_peer(); });
      } else {
        source.wire->settle(deadline, cancel);
      }
      if (!chunk.contiguous()) source.wire->run([&] { scatter_chunk(packed_chunk(chunk), chunk, into()); }, nullptr);
    }
  }

  int64_t chunk_elements() const { return kChunkBytes / weights.flat.element_size(); }
  at::Tensor in_place(const WeightChunk& chunk) const {
    return into().narrow(0, chunk.stretches.front().offset, chunk.elements);
  }
  // Memory for a chunk that goes to several stretches: of the stream of the first wire that needs it. Sources come one
  // after the other, and a device has left it when a source has been received.
  at::Tensor packed_chunk(const WeightChunk& chunk) {
    if (!packed.defined()) packed = at::empty({chunk_elements()}, weights.flat.options());
    return packed.narrow(0, 0, chunk.elements);
  }

  double stall_seconds() const {
    if (!second.defined()) return last.seconds;
    return applied == nullptr ? applied_in : seconds_between(applying, applied);
  }

  uint64_t checksum(Source& source) const {
    const WeightPart& part = source.part;
    if (!source.wire) return part.whole ? weight_checksum(into()) : part_checksum(into(), part);
    if (part.whole) return source.wire->checksum(into(), nullptr);
    uint64_t sum = 0;
    source.wire->run([&] { sum = part_checksum(into(), part); }, nullptr);
    return sum;
  }

  const WeightLinkOptions options;
  const WeightView weights;
  at::Tensor second;  // undefined: no room
  at::Tensor packed;
  LinkCancel cancel;
  std::string link;
  std::vector<int64_t> order;          // of receipt
  int64_t rank = 0;                    // of the source that something is done with
  std::unique_ptr<LinkStore> store;    // while sources are connected
  std::map<int64_t, Source> sources;   // by rank
  bool pins = false;                   // one source keeps its weights too, as several do
  std::vector<int64_t> kept;           // sources that keep their weights
  std::unique_ptr<SignsOfLife> signs;  // to them
  bool fresh = false;                  // the second buffer has what apply() would copy
  double applied_in = 0;               // seconds, on the CPU
  TimeMark filled;                     // on CUDA: the second buffer is zeros
  TimeMark applying, applied;          // on CUDA: apply() began, and has read the second buffer
  std::atomic<bool> torn{false};
  WeightTransfer last;
};

WeightReceiver::WeightReceiver(const WeightLinkOptions& options, const WeightView& weights)
    : impl_(std::make_unique<Impl>(options, weights)) {
  TRIREME_CHECK(weights.flat.is_contiguous() && weights.flat.numel() > 0, "flat weights are contiguous");
  if (!options.second_buffer) return;
  const at::NoGradGuard no_grad;
  try {
    impl_->second = at::zeros_like(weights.flat);  // parts leave out what is between parameters
    const c10::DeviceGuard device(weights.flat.device());
    if (weights.flat.is_cuda()) impl_->filled = mark_time();
  } catch (const c10::OutOfMemoryError&) {
    log_warn("weights", "there is no memory for a second copy of the weights (" +
                            format_bytes(static_cast<uint64_t>(weights.flat.nbytes())) +
                            "): decoding stops while new ones are received");
  }
}

WeightReceiver::~WeightReceiver() { impl_->drop(); }

bool WeightReceiver::needs_stop() const { return !impl_->second.defined(); }

int64_t WeightReceiver::fetch(const std::string& link, int64_t actor_rank) {
  return fetch(link, std::vector<WeightPart>{{.actor_rank = actor_rank}});
}

int64_t WeightReceiver::fetch(const std::string& link, const std::vector<WeightPart>& parts) {
  impl_->expect_parts(link, parts, /*pins=*/false);
  return impl_->named([&](const Deadline& deadline) { return impl_->fetch(deadline); });
}

int64_t WeightReceiver::pin(const std::string& link, const std::vector<WeightPart>& parts, int64_t version) {
  impl_->expect_parts(link, parts, /*pins=*/true);
  return impl_->named([&](const Deadline& deadline) { return impl_->pin(version, deadline) ? impl_->pinned() : -1; });
}

void WeightReceiver::receive_pinned() {
  impl_->named([&](const Deadline& deadline) { impl_->receive_pinned(deadline); });
}

void WeightReceiver::release() {
  impl_->named([&](const Deadline& deadline) { impl_->release(deadline); });
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
