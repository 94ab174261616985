// WeightSender and WeightReceiver: weights of actor ranks to an engine, another process, beside what all compute. An
// engine has them from one rank, or, where ranks share a model, a part from each of several (topology/weight_plan.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "trainer/parallel/transport.h"
#include "trainer/parallel/weight_pieces.h"

namespace trireme {

// The weights of a model as they travel; made by weight_view (trainer/model/weight_view.h).
struct WeightView {
  at::Tensor flat;      // [elements], contiguous: Model::flat_parameters()
  uint64_t layout = 0;  // a digest of names, shapes and places of the parameters in it
};

struct WeightLinkOptions {
  // The store of the job, which actor rank 0 serves (with one actor rank: a JobStore that was made for it). Who
  // connects need be no rank of its world: both ends have connections of their own. The address is the one that other
  // hosts reach it by, on rank 0 too: what goes towards it leaves by the interface that engines and actors meet on.
  std::string store_address = "127.0.0.1";
  int store_port = 0;
  std::string attempt = "0";  // as RendezvousOptions::attempt of the store
  int64_t actor_rank = 0;     // a sender's own rank
  int64_t actor_ranks = 1;    // a sender's: how many there are
  // A receiver's own number. Where engines have several ranks, each of them is a receiver of its own: rank r of engine
  // e has number e x engine_ranks + r, at both ends.
  int64_t engine = 0;
  int64_t engine_ranks = 1;
  // Of a whole transfer, from the call to its end, and of each wait in it. A peer that has gone is seen at once (but
  // for an actor's that goes while bytes come from its device), one that stands still at the deadline.
  Milliseconds deadline{60000};
  // Of an engine that reads from other ranks first: how long a sender keeps its weights for it without a sign of life.
  // The engine gives one five times as often, by its own number.
  Milliseconds silence{5000};
  // Checksums are compared after a connection's first transfer, and after every so many; 0: after the first only. The
  // sender's counts.
  int64_t verify_weights_period = 100;
  // Of a receiver on CUDA: false, or no memory for it: weights are received where they are read.
  bool second_buffer = true;
  // A receiver's: what must carry the bytes between two hosts (spec.network.rdma.require), judged at a connection's
  // first transfer, before its weights count. Needs `log` where it is `required`. Sockets are Error(kUnavailable).
  TransportCheck transport;
  // Called with the bytes of a transfer that have been sent, or have come. What it throws breaks the transfer. Tests.
  std::function<void(int64_t bytes)> on_bytes;
};

// What one transfer was.
struct WeightTransfer {
  int64_t version = -1;
  double seconds = 0;  // of the bytes, without waiting for the other end to begin
  int64_t bytes = 0;
  bool verified = false;  // checksums were compared
};

// Who sends what to an engine, of weights that ranks of training share; made by WeightParts
// (trainer/model/weight_parts.h). Called from any thread.
struct WeightRoutes {
  std::function<std::vector<int64_t>(int64_t engine)> sources;  // actor ranks
  std::function<WeightPart(int64_t engine)> sent;               // by this rank, where it is one of them
};

// 64 bits over the tensor's bytes: the sum of its words of 8 bytes, each times an odd number of its place, modulo 2^64.
// On CUDA by the current stream, which is waited for. The same number on every device.
uint64_t weight_checksum(const at::Tensor& tensor);

// The same by a reduction of the library, as on a device.
uint64_t weight_checksum_by_reduction(const at::Tensor& tensor);

// The actor's side, one an actor rank. It has threads and connections of its own; engines are served at the same time,
// and one that breaks breaks no other. publish() and retract() are called by the training thread.
class WeightSender final {
 public:
  // `weights` must live until this has gone. Without `routes` each rank has the whole model, and sends it to the
  // engines whose number mod actor_ranks is its own. Throws Error(kTimeout) where the store cannot be reached.
  WeightSender(const WeightLinkOptions& options, const WeightView& weights, WeightRoutes routes = {});
  ~WeightSender();  // ends what is under way
  WeightSender(const WeightSender&) = delete;
  WeightSender& operator=(const WeightSender&) = delete;

  // The live weights are those of `version`, and may be read until retract() returns. On CUDA: what the current stream
  // holds now comes first. They must be whole: after DistributedAdamW::finish_gather.
  void publish(int64_t version);
  // Before they are written: no send begins any more, one under way is waited for, at its deadline it is broken, and so
  // are engines that keep these weights until they have read those of other ranks. Then nothing reads them. Returns the
  // seconds that it waited. Called without a publish() it does nothing.
  double retract();
  // An engine asks for the newest weights over the link of this name (a word of at most 128 letters, digits, '.', '_'
  // and '-', no other engine's). From any thread; the store carries it to the ranks that send to that engine. They send
  // when weights are published, and give up at the deadline. A second call for an
  // engine stands in for the first, unless the engine has come to that already: then it is answered next. Throws
  // Error(kUser) for a bad name, Error(kUnavailable) without a store.
  void serve(int64_t engine, const std::string& link);

  // Of the transfers that have ended since the last call: the slowest's seconds (performance/weight_transfer_seconds);
  // 0: none.
  double take_transfer_seconds();
  // The same of what decoding stood still for (performance/weight_stall_seconds). An engine tells it when it comes for
  // the next weights.
  double take_stall_seconds();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The engine's side. One thread calls fetch(), or its halves, the one that reads the weights calls apply(), not at the
// same time; with needs_stop() that one calls fetch() too, or its device has come to rest.
class WeightReceiver final {
 public:
  // Takes memory for a second buffer, where there is any: before the cache's is measured. `weights` outlives it.
  WeightReceiver(const WeightLinkOptions& options, const WeightView& weights);
  ~WeightReceiver();
  WeightReceiver(const WeightReceiver&) = delete;
  WeightReceiver& operator=(const WeightReceiver&) = delete;

  // There is no second buffer: fetch() writes the live weights, so decoding stops before it is called. On CUDA bytes
  // come behind what the current stream holds then.
  bool needs_stop() const;
  // Waits for the newest weights from these actor ranks, in this order, all of one version, which somebody asks to
  // serve this link (WeightSender::serve), before or after this call. Returns their version. A rank keeps its weights
  // from being written from the time that all were asked until it has been read. Throws when it breaks:
  // Error(kUnavailable) or Error(kTimeout) that names engine and rank, and may be tried again, which makes a new
  // connection; Error(kUser) where it can never work (another model or dtype). The live weights and version are then as
  // they were; with needs_stop() they may be torn (torn()) and must not be read before a fetch() succeeds.
  int64_t fetch(const std::string& link, const std::vector<WeightPart>& parts);
  int64_t fetch(const std::string& link, int64_t actor_rank);  // the whole model, of one
  // The same in halves, for ranks of an engine that all need the same version: every source keeps its weights of
  // `version`, -1: the newest. Returns the version, or -1 where it has been written over; then, as after release() and
  // receive_pinned(), none keeps any.
  int64_t pin(const std::string& link, const std::vector<WeightPart>& parts, int64_t version);
  void receive_pinned();
  void release();
  // From any thread: fetch() throws soon, also every later one.
  void cancel();
  bool torn() const;  // then no step may be taken
  // What was fetched last becomes the live weights: a copy in place, on the current stream on CUDA, which it does not
  // wait for. Nothing after a fetch() that needed a stop, or a second time.
  void apply();
  const WeightTransfer& last() const;  // that fetch() returned from
  // What decoding stood still for the last one: its transfer where that needed a stop, else apply(), whose end on the
  // device is waited for. 0: none was applied.
  double stall_seconds() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
