// EngineGroup: the ranks of one engine, which hold a model together and generate the same samples with it: how they
// meet, and what the first one, the leader, says to the others.
//
// Two lines run from the leader to each follower. Over the first one go turns: what the leader's engine does next, from
// the thread that owns it. Over the second one go orders about weights, which travel beside generation; each but a sign
// of life has an answer.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "trainer/parallel/context.h"
#include "trainer/parallel/link_pair.h"
#include "trainer/rollout/host.h"

namespace trireme {

struct EngineMessage {
  enum Kind : int64_t {
    // Turns.
    kBegin = 1,  // number: the engine's, which has joined
    kSubmit,     // text: pack_request()
    kStep,
    kStill,    // the device comes to rest; answered
    kWeights,  // what was received last are the weights of version `number` from the next step on; flag: KeptCache
    // Both.
    kEnd,  // text: why; empty: the run is over
    // Orders.
    kPin,      // the weights of version `number`, for engine `flag`, when turns have come to `behind`; text: the link
    kReceive,  // what was pinned
    kRelease,
    kAlive,
    // Answers.
    kDone,
    kGone,    // the version is there no more
    kFailed,  // number: ErrorKind; text: why
  };
  int64_t kind = 0, number = 0, flag = 0;
  int64_t behind = -1;  // the version that the leader's engine is at
  std::string text;
};

// A request as it travels in a turn. `sampling` of its own it cannot have.
std::string pack_request(const GroupRequest& request);
// Throws Error(kData) where it is none.
GroupRequest unpack_request(const std::string& bytes);

struct EngineGroupOptions {
  RendezvousOptions job;  // of the actor's store, where ranks of an engine learn of their leader
  std::string name;       // of the engine; with `start` no other's, nor one's before it
  std::string start = "0";
  int rank = 0;   // in the engine
  Layout layout;  // of the engine
};

class EngineGroup final : public EngineFollowers {
 public:
  // Collective. One rank opens nothing and meets nobody. Throws what a rendezvous throws.
  explicit EngineGroup(const EngineGroupOptions& options);
  ~EngineGroup() override;

  ParallelContext& ranks() { return *context_; }
  int rank() const { return context_->rank(); }
  int size() const { return context_->world_size(); }
  bool leads() const { return rank() == 0; }

  // Of a leader; nothing where it is alone. Turns: from the thread of the engine, and ahead of it from the first one.
  void tell(const EngineMessage& turn);
  void submit(const GroupRequest& request) override;
  void step() override;
  // All followers' devices have come to rest behind the turns before.
  void be_still();
  // `meanwhile` is called whatever comes of the others. What it throws goes through when all have answered; else the
  // first failure of a follower is thrown. False: one of them has answered kGone. One order at a time, from any thread;
  // none behind one whose answers did not all come, which throw Error(kUnavailable).
  bool order(const EngineMessage& order, const std::function<void()>& meanwhile = {});
  void give_sign_of_life();
  // To all lines that still carry. The last call of a leader, when no other is under way.
  void end(const std::string& why);

  // Of a follower. Wait for the leader as long as it lives; an order for some minutes.
  EngineMessage next_turn();
  EngineMessage next_order();
  void answer_turn(const EngineMessage& answer);
  void answer_order(const EngineMessage& answer);

  // From any thread: what waits on these lines ends soon, by Error(kUnavailable).
  void cancel_turns() { cancel_turns_.cancel(); }
  void cancel_orders() { cancel_orders_.cancel(); }

 private:
  struct Lines {
    std::unique_ptr<LinkPair> turns, orders;
  };
  void meet(const EngineGroupOptions& options);
  void send_order(const EngineMessage& order);
  std::vector<EngineMessage> answers();
  Deadline patience() const;

  std::unique_ptr<ParallelContext> context_;
  LinkCancel cancel_turns_, cancel_orders_;
  std::vector<Lines> lines_;  // to the followers; of one of them: to the leader
  std::mutex orders_;
  bool carries_orders_ = true;
};

}  // namespace trireme
