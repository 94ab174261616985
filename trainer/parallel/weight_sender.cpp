#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/parallel/weight_link.h"
#include "trainer/parallel/weight_protocol.h"
#include "trainer/parallel/weight_wire.h"

namespace trireme {
namespace {

constexpr Milliseconds kLookForRequests{500};
constexpr Milliseconds kLookForConnections{100};

std::string requests_key(int64_t rank, const std::string& what) {
  return "weights/rank-" + std::to_string(rank) + "/" + what;
}

// The weights as senders see them: published, with some reading, or not.
class Published final {
 public:
  void publish(int64_t version, TimeMark whole) {
    const std::lock_guard<std::mutex> lock(mutex_);
    version_ = version;
    newest_ = std::max(newest_, version);
    whole_ = std::move(whole);
    changed_.notify_all();
  }
  void retract() {
    std::unique_lock<std::mutex> lock(mutex_);
    version_.reset();
    changed_.wait(lock, [&] { return readers_ == 0; });  // each has its deadline
  }
  void wake() {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

  // While one is there nobody writes the weights.
  class Reading final {
   public:
    // Of the newest weights, or, from 0 on, of those of version `wanted`, unless these have been written over.
    Reading(Published& published, int64_t wanted, const Deadline& deadline, const LinkCancel& cancel)
        : published_(published) {
      std::unique_lock<std::mutex> lock(published.mutex_);
      const auto there = [&] { return published.version_ && (wanted < 0 || *published.version_ == wanted); };
      const auto passed = [&] { return wanted >= 0 && published.newest_ >= wanted && !there(); };
      published.changed_.wait_until(lock, deadline.at(), [&] { return there() || passed() || cancel.cancelled(); });
      cancel.check();
      gone = passed();
      ended_ = gone;
      if (gone) return;
      if (!there()) fail_timeout("no weights were published until the deadline");
      version = *published.version_;
      whole = published.whole_;
      ++published.readers_;
    }
    ~Reading() { end(); }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;
    void end() {
      if (std::exchange(ended_, true)) return;
      const std::lock_guard<std::mutex> lock(published_.mutex_);
      --published_.readers_;
      published_.changed_.notify_all();
    }
    int64_t version = -1;
    bool gone = false;  // what was wanted; nothing is read
    TimeMark whole;     // on CUDA: when they were written

   private:
    Published& published_;
    bool ended_ = false;
  };

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<int64_t> version_;
  int64_t newest_ = -1;  // that there ever was
  TimeMark whole_;
  int readers_ = 0;
};

// One engine's: a thread, and the connection that it has now.
class EngineLink final {
 public:
  EngineLink(const WeightLinkOptions& options, const WeightView& weights, const WeightRoutes& routes,
             Published& published, int64_t engine, std::string link)
      : options_(options),
        weights_(weights),
        routes_(routes),
        published_(published),
        engine_(engine),
        link_(std::move(link)) {
    thread_ = std::thread([this] { run(); });
  }
  ~EngineLink() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      wanted_ = false;
      cancel_.cancel();
      changed_.notify_all();
    }
    published_.wake();
    thread_.join();
  }

  const std::string& link() const { return link_; }

  // The engine's newest question. One before it that the engine has not come to is given up; one that it has come to is
  // answered first.
  void ask() {
    const std::lock_guard<std::mutex> lock(mutex_);
    wanted_ = true;
    if (busy_ && !ready_) cancel_.cancel();
    changed_.notify_all();
    published_.wake();
  }

  double take_transfer() { return transfer_.exchange(0); }
  double take_stall() { return stall_.exchange(0); }

 private:
  void run() {
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return wanted_ || stopping_; });
        if (stopping_) break;
        wanted_ = false;
        busy_ = true;
        ready_ = false;
        cancel_.reset();
      }
      try {
        answer(Deadline::after(options_.deadline));
      } catch (const std::exception& error) {
        drop();
        store_.reset();
        if (!stopping_) log_warn("weights", who() + ": " + error.what() + "; the connection is given up");
      }
      const std::lock_guard<std::mutex> lock(mutex_);
      busy_ = false;
    }
    drop();
  }

  std::string who() const {
    return "weights from rank " + std::to_string(options_.actor_rank) + " to " + peer() + " over '" + link_ + "'";
  }
  std::string peer() const { return engine_name(options_, engine_); }
  std::string key(const std::string& what) const { return link_key(link_, options_.actor_rank, what); }

  void drop() {
    wire_.reset();
    packed_.reset();  // which its device has left
    pair_.reset();
  }

  // The engine counts its connections. Where it has made a new one, or the old one breaks before it says that it is
  // ready, that one is taken.
  void answer(const Deadline& deadline) {
    if (!part_) part_ = routes_.sent ? routes_.sent(engine_) : WeightPart{.actor_rank = options_.actor_rank};
    if (!store_) {
      store_ = std::make_unique<LinkStore>(options_.store_address, options_.store_port, options_.attempt,
                                           deadline.remaining());
    }
    if (pair_ && store_->add(key("connections"), 0) == connection_) {
      try {
        return transfer(deadline);
      } catch (const Error&) {
        if (ready_ || deadline.passed() || cancel_.cancelled()) throw;
      }
    }
    drop();
    connect(deadline);
    transfer(deadline);
  }

  // The newest connection that the engine still waits at: an older one it has given up. What is offered and not taken
  // yet is offered again by the next answer.
  void connect(const Deadline& deadline) {
    const std::string missing = peer() + " did not come to the link";
    (void)store_->get(key(std::to_string(connection_ + 1)), deadline, cancel_, missing);
    for (int64_t offered = 0;;) {
      const int64_t newest = store_->add(key("connections"), 0);
      const std::string name = key(std::to_string(newest));
      if (offered != newest) store_->set(name + "/offered", "1");
      offered = newest;
      if (store_->poll(name + "/taken", std::min(kLookForConnections, deadline.remaining()))) {
        connection_ = newest;
        pair_ = std::make_unique<LinkPair>(*store_, name, 0, options_.store_address, peer(), deadline, cancel_);
        transfers_ = 0;
        return;
      }
      cancel_.check();
      if (deadline.passed()) fail_timeout(missing);
    }
  }

  bool verifies() const {
    return transfers_ == 0 || (options_.verify_weights_period > 0 && transfers_ % options_.verify_weights_period == 0);
  }

  // Weights are kept from being written no longer than an engine that is ready for them takes. One with several sources
  // may ask for a version, be told that it is gone, or let the weights be, and asks again.
  void transfer(const Deadline& deadline) {
    for (;;) {
      const WeightMessage engine = receive_message(*pair_, deadline);
      expect(engine, WeightMessage::kReady);
      set_ready(true);
      if (std::isfinite(engine.stall_seconds)) note(stall_, engine.stall_seconds);
      WeightMessage message = message_about(weights_, *part_, WeightMessage::kHeader, -1);
      if (const std::string why = misfit(message, engine); !why.empty()) {
        send_message(*pair_, message, deadline);  // from which the engine sees the same
        throw Error(ErrorKind::kUnavailable, why);
      }
      if (weights_.flat.is_cuda() && !wire_) make_wire(message, deadline);
      Published::Reading reading(published_, engine.version, deadline, cancel_);
      if (offer(message, engine, reading, deadline)) return send(message, reading, deadline);
      reading.end();
      set_ready(false);  // what comes now may be another question
    }
  }

  // Says which weights there are, and keeps them for an engine that has others to read first. Whether they are to be
  // sent.
  bool offer(WeightMessage& message, const WeightMessage& engine, const Published::Reading& reading,
             const Deadline& deadline) {
    message.kind = reading.gone ? WeightMessage::kGone : WeightMessage::kHeader;
    message.version = reading.version;
    message.verify = verifies() ? 1 : 0;
    send_message(*pair_, message, deadline);
    if (reading.gone || engine.pins == 0) return !reading.gone;
    for (;;) {
      const WeightMessage said =
          receive_message(*pair_, Deadline(std::min(deadline.at(), SteadyClock::now() + options_.silence)));
      if (said.kind == WeightMessage::kAlive) continue;
      if (said.kind == WeightMessage::kRelease) return false;
      expect(said, WeightMessage::kGo);
      return true;
    }
  }

  void set_ready(bool ready) {
    const std::lock_guard<std::mutex> lock(mutex_);
    cancel_.check();
    ready_ = ready;
  }

  void send(WeightMessage& message, Published::Reading& reading, const Deadline& deadline) {
    try {
      send_bytes(message, reading, deadline);
    } catch (...) {
      wire_.reset();  // the device has left the weights before `reading` ends
      throw;
    }
  }

  void send_bytes(WeightMessage& message, Published::Reading& reading, const Deadline& deadline) {
    const Stopwatch watch;
    message.kind = WeightMessage::kTrailer;
    if (wire_) {
      send_from_device(message, reading, deadline);
    } else {
      send_from_host(message, deadline);
      reading.end();
      send_message(*pair_, message, deadline);
    }
    const WeightMessage receipt = receive_message(*pair_, deadline);
    expect(receipt, WeightMessage::kReceipt);
    if (wire_) wire_->wait(deadline, cancel_);
    reading.end();
    if (receipt.accepted == 0) throw Error(ErrorKind::kUnavailable, mismatch(message.checksum, receipt.checksum));
    ++transfers_;
    note(transfer_, watch.seconds());
  }

  uint64_t checksum() const {
    return part_->whole ? weight_checksum(weights_.flat) : part_checksum(weights_.flat, *part_);
  }

  void send_from_host(WeightMessage& trailer, const Deadline& deadline) {
    if (part_->whole) {
      pair_->send(weights_.flat, deadline, options_.on_bytes);
    } else {
      int64_t sent = 0;
      for (const WeightChunk& chunk : chunks_of(*part_, kChunkBytes / weights_.flat.element_size())) {
        const at::Tensor bytes = chunk.contiguous() ? in_place(chunk) : packed(chunk);
        if (!chunk.contiguous()) gather_chunk(weights_.flat, chunk, bytes);
        pair_->send(bytes, deadline);
        sent += static_cast<int64_t>(bytes.nbytes());
        if (options_.on_bytes) options_.on_bytes(sent);
      }
    }
    if (trailer.verify != 0) trailer.checksum = checksum();
  }

  at::Tensor in_place(const WeightChunk& chunk) const {
    return weights_.flat.narrow(0, chunk.stretches.front().offset, chunk.elements);
  }
  // Memory for a chunk that lies in several stretches: of the wire's stream where there is one.
  at::Tensor packed(const WeightChunk& chunk) {
    if (!packed_.defined()) packed_ = at::empty({kChunkBytes / weights_.flat.element_size()}, weights_.flat.options());
    return packed_.narrow(0, 0, chunk.elements);
  }

  void make_wire(WeightMessage& message, const Deadline& deadline) {
    const std::string id = WeightWire::make_id();
    std::copy(id.begin(), id.end(), message.wire);
    message.kind = WeightMessage::kWire;
    send_message(*pair_, message, deadline);
    wire_ = std::make_unique<WeightWire>(weights_.flat.device(), 0, id, deadline, cancel_);
  }

  // The trailer goes ahead of the bytes' end, so that what is waited for is the receipt: a connection that ends, as
  // that of an engine that dies, is seen there at once, on a device not before the deadline.
  void send_from_device(WeightMessage& trailer, const Published::Reading& reading, const Deadline& deadline) {
    if (trailer.verify != 0) wire_->run([&] { trailer.checksum = checksum(); }, reading.whole);
    if (part_->whole) {
      wire_->send(weights_.flat, reading.whole);
    } else {
      // Each chunk's memory is written again when the stream has left it.
      int64_t ahead = 0;
      for (const WeightChunk& chunk : chunks_of(*part_, kChunkBytes / weights_.flat.element_size())) {
        if (chunk.contiguous()) {
          wire_->send(in_place(chunk), reading.whole);
        } else {
          wire_->run([&] { gather_chunk(weights_.flat, chunk, packed(chunk)); }, reading.whole);
          wire_->send(packed(chunk), nullptr);
        }
        if (++ahead % kChunksAhead == 0) {
          wire_->wait(deadline, cancel_, [this] { pair_->check_peer(); });
        } else {
          wire_->settle(deadline, cancel_);
        }
      }
    }
    send_message(*pair_, trailer, deadline);
  }

  std::string mismatch(uint64_t sent, uint64_t received) const {
    return peer() + " received other bytes than were sent: checksum " + std::to_string(received) + " instead of " +
           std::to_string(sent);
  }

  static void note(std::atomic<double>& slowest, double seconds) {
    double known = slowest.load();
    while (known < seconds && !slowest.compare_exchange_weak(known, seconds)) {
    }
  }

  const WeightLinkOptions& options_;
  const WeightView& weights_;
  const WeightRoutes& routes_;
  Published& published_;
  const int64_t engine_;
  const std::string link_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool wanted_ = false, busy_ = false;
  bool ready_ = false;  // the engine has come to what is answered
  std::atomic<bool> stopping_{false};
  LinkCancel cancel_;
  std::atomic<double> transfer_{0}, stall_{0};

  // Of the thread.
  std::optional<WeightPart> part_;  // made by the first question
  std::unique_ptr<LinkStore> store_;
  std::unique_ptr<LinkPair> pair_;
  at::Tensor packed_;
  std::unique_ptr<WeightWire> wire_;
  int64_t connection_ = 0;  // the engine's number of pair_, or of the last one that it took
  int64_t transfers_ = 0;   // over pair_
  std::thread thread_;
};

}  // namespace

struct WeightSender::Impl {
  Impl(const WeightLinkOptions& of, const WeightView& view, WeightRoutes by)
      : options(of),
        weights(view),
        routes(std::move(by)),
        requests(of.store_address, of.store_port, of.attempt, of.deadline),
        asking(of.store_address, of.store_port, of.attempt, of.deadline) {
    next = requests.add(requests_key(options.actor_rank, "taken"), 0) + 1;
    listener = std::thread([this] { listen(); });
  }

  ~Impl() {
    stopping = true;
    listener.join();
    links.clear();
  }

  void listen() {
    try {
      while (!stopping) {
        const std::string key = requests_key(options.actor_rank, "request-" + std::to_string(next));
        const auto request = requests.poll(key, kLookForRequests);
        if (!request) continue;
        requests.erase(key);
        next = requests.add(requests_key(options.actor_rank, "taken"), 1) + 1;
        try {
          take(*request);
        } catch (const std::exception& error) {  // no thread is left for the moment, say: the engine asks again
          log_warn("weights", "a request for weights is not answered: " + std::string(error.what()));
        }
      }
    } catch (const std::exception& error) {  // the run itself ends where its store has gone
      if (!stopping) log_error("weights", std::string("no engine gets weights any more: ") + error.what());
    }
  }

  // "ENGINE LINK", written by serve().
  void take(const std::string& request) {
    const size_t space = std::min(request.find(' '), request.size());
    const auto engine = parse_int(request.substr(0, space));
    if (!engine || space == request.size()) {
      log_warn("weights", "a request for weights in the store is none: '" + request.substr(0, 64) + "'");
      return;
    }
    const std::string link = request.substr(space + 1);
    const std::lock_guard<std::mutex> lock(mutex);
    const auto known = links.find(*engine);
    if (known == links.end() || known->second->link() != link) {
      auto made = std::make_unique<EngineLink>(options, weights, routes, published, *engine, link);
      links[*engine] = std::move(made);
    }
    links.at(*engine)->ask();
  }

  const WeightLinkOptions options;
  const WeightView weights;
  const WeightRoutes routes;
  Published published;
  LinkStore requests;
  std::mutex asking_mutex;
  LinkStore asking;
  int64_t next = 1;
  std::atomic<bool> stopping{false};
  std::mutex mutex;
  std::map<int64_t, std::unique_ptr<EngineLink>> links;  // by engine
  std::thread listener;
};

WeightSender::WeightSender(const WeightLinkOptions& options, const WeightView& weights, WeightRoutes routes) {
  TRIREME_CHECK(options.actor_ranks > 0 && options.actor_rank >= 0 && options.actor_rank < options.actor_ranks,
                "a sender is one of the actor's ranks");
  TRIREME_CHECK(weights.flat.is_contiguous() && weights.flat.numel() > 0, "flat weights are contiguous");
  impl_ = std::make_unique<Impl>(options, weights, std::move(routes));
}

WeightSender::~WeightSender() = default;

void WeightSender::publish(int64_t version) {
  const c10::DeviceGuard device(impl_->weights.flat.device());
  impl_->published.publish(version, impl_->weights.flat.is_cuda() ? mark_time() : nullptr);
}

double WeightSender::retract() {
  const Stopwatch watch;
  impl_->published.retract();
  return watch.seconds();
}

void WeightSender::serve(int64_t engine, const std::string& link) {
  check_link_name(link);
  TRIREME_CHECK(engine >= 0, "engines count from 0");
  const std::vector<int64_t> ranks =
      impl_->routes.sources ? impl_->routes.sources(engine) : std::vector<int64_t>{engine % impl_->options.actor_ranks};
  const std::lock_guard<std::mutex> lock(impl_->asking_mutex);
  for (const int64_t rank : ranks) {
    const int64_t number = impl_->asking.add(requests_key(rank, "asked"), 1);
    impl_->asking.set(requests_key(rank, "request-" + std::to_string(number)), std::to_string(engine) + " " + link);
  }
}

double WeightSender::take_transfer_seconds() {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  double slowest = 0;
  for (const auto& [engine, link] : impl_->links) slowest = std::max(slowest, link->take_transfer());
  return slowest;
}

double WeightSender::take_stall_seconds() {
  const std::lock_guard<std::mutex> lock(impl_->mutex);
  double slowest = 0;
  for (const auto& [engine, link] : impl_->links) slowest = std::max(slowest, link->take_stall());
  return slowest;
}

}  // namespace trireme
