// What the two ends of a weight link say to each other (weight_link.h). The engine that it is ready, and for which
// version; the actor, over a new connection between devices, the id of their wire; then the version, the bytes and a
// trailer; the engine a receipt.
//
// An engine that has several sources (`pins`) needs one version of all. Each sender keeps its weights behind the header
// until the engine says go, or lets them be; who reads from another one meanwhile gives signs of life. A sender whose
// weights of that version have been written over says that they are gone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "trainer/parallel/link_pair.h"
#include "trainer/parallel/weight_link.h"
#include "trainer/parallel/weight_wire.h"

namespace trireme {

// All of one size, which both ends know.
struct WeightMessage {
  enum Kind : int64_t { kReady = 1, kWire, kHeader, kTrailer, kReceipt, kGo, kAlive, kRelease, kGone };
  static constexpr uint64_t kMagic = 0x7472'6972'656d'6502ULL;  // "trireme", 2

  uint64_t magic = kMagic;
  int64_t kind = 0;
  int64_t version = -1;  // ready: the one that is wanted; -1: the newest
  int64_t pins = 0;      // ready: what comes behind the header waits for go
  int64_t accepted = 1;  // receipt: the weights are taken
  // The sender's weights, or its part of them: of every kind.
  int64_t bytes = 0;
  int64_t dtype = 0;    // at::ScalarType
  uint64_t layout = 0;  // WeightView's, or the part's digest
  int64_t on_device = 0;
  int64_t verify = 0;        // header, trailer: checksums are compared
  uint64_t checksum = 0;     // trailer, receipt
  double stall_seconds = 0;  // ready: what decoding stood still for the weights before
  char wire[WeightWire::kIdBytes] = {};
  char host[128] = {};  // the sender's
};

// A stream of pieces goes in chunks of so many bytes, at both ends.
inline constexpr int64_t kChunkBytes = int64_t{32} << 20;
// Queued on a device at most: a launch behind a full queue would wait without a deadline.
inline constexpr int64_t kChunksAhead = 8;

// With sizes, dtype, layout and host of the part of these weights.
WeightMessage message_about(const WeightView& weights, const WeightPart& part, WeightMessage::Kind kind,
                            int64_t version);
void send_message(LinkPair& pair, const WeightMessage& message, const Deadline& deadline);
// Throws Error(kUnavailable) when what comes is none.
WeightMessage receive_message(LinkPair& pair, const Deadline& deadline);
// Throws Error(kUnavailable) when it is another kind.
void expect(const WeightMessage& message, WeightMessage::Kind kind);
// Why the actor's weights do not fit into the engine's: a sentence's end; empty when they do.
std::string misfit(const WeightMessage& actor, const WeightMessage& engine);

// Throws Error(kUnavailable) when what carries weights from another host must be RDMA and is not.
void judge_transport(const TransportCheck& check, bool on_device, const std::string& other_host);
// What a transfer failed by: where NCCL says so and RDMA is required, also that, and what to do (rdma_failure).
std::string failure_of_transfer(const TransportCheck& check, const std::string& what);

// "engine 3", "engine 1 rank 1": the receiver of this number, by WeightLinkOptions::engine_ranks.
std::string engine_name(const WeightLinkOptions& options, int64_t number);
inline std::string engine_name(const WeightLinkOptions& options) { return engine_name(options, options.engine); }

// Throws Error(kUser) when it is no word for keys.
void check_link_name(const std::string& link);
// Keys of the store, of the connections between an engine and one of its sources.
std::string link_key(const std::string& link, int64_t actor_rank, const std::string& what);

}  // namespace trireme
