// LinkStore and LinkPair: how two processes that are no ranks of one world meet, and send each other bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"

namespace trireme {

// Ends what another thread waits for in a LinkStore or a LinkPair: that throws Error(kUnavailable) soon.
class LinkCancel final {
 public:
  void cancel() { cancelled_ = true; }  // any thread
  void reset() { cancelled_ = false; }  // while nobody waits
  bool cancelled() const { return cancelled_.load(); }
  void check() const;  // throws when cancelled

 private:
  std::atomic<bool> cancelled_{false};
};

// A connection of its own to the job's store, with the keys of the attempt. One thread at a time.
class LinkStore final {
 public:
  // Throws Error(kTimeout) that names the store when it cannot be reached. `timeout` is of every other call, too, with
  // a second more for the answer.
  LinkStore(const std::string& address, int port, const std::string& attempt, Milliseconds timeout);
  ~LinkStore();

  // All throw Error(kUnavailable) that names the store when it has gone or does not answer.
  int64_t add(const std::string& key, int64_t amount);  // returns the new value
  void set(const std::string& key, const std::string& value);
  void erase(const std::string& key);
  // Waits for the key so long; nothing: it has not come.
  std::optional<std::string> poll(const std::string& key, Milliseconds patience);
  // Throws Error(kTimeout) that says `missing` at the deadline, Error(kUnavailable) when cancelled.
  std::string get(const std::string& key, const Deadline& deadline, const LinkCancel& cancel,
                  const std::string& missing);

  struct Impl;
  Impl& impl() { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

// A TCP connection of two processes, of their own and not Gloo's: there a wait that has begun cannot be ended, and one
// for a peer that goes in the wrong moment lasts until its deadline. Messages have a size that both know, and come in
// the order in which they were sent. All calls throw Error(kTimeout) at the deadline, Error(kUnavailable) when the
// other one has gone or `cancel` says so; then nothing more can be sent or received, and what was under way is whole or
// not. One thread at a time.
class LinkPair final {
 public:
  // Collective: side 0 and side 1, which are there both, under a name that nobody has had before. Side 0 listens, where
  // the job's store is reached from, and takes whoever knows the secret that is in the store. `peer` names the other
  // one in messages. `cancel` outlives the pair.
  LinkPair(LinkStore& store, const std::string& name, int side, const std::string& address, const std::string& peer,
           const Deadline& deadline, LinkCancel& cancel);
  ~LinkPair();
  LinkPair(const LinkPair&) = delete;
  LinkPair& operator=(const LinkPair&) = delete;

  // Contiguous CPU tensors, in pieces of 32 MiB; `on_bytes`, when not empty, is called with what has gone so far. A
  // send returns when the tensor may be written again.
  void send(const at::Tensor& tensor, const Deadline& deadline, const std::function<void(int64_t)>& on_bytes = {});
  void receive(at::Tensor tensor, const Deadline& deadline, const std::function<void(int64_t)>& on_bytes = {});
  // Throws Error(kUnavailable) when the other one has gone, as far as is seen without waiting.
  void check_peer() const;

 private:
  LinkPair(const std::string& peer, LinkCancel& cancel);
  void listen(LinkStore& store, const std::string& name, const std::string& address, const Deadline& deadline);
  void connect(LinkStore& store, const std::string& name, const Deadline& deadline);
  // Moves `size` bytes; sends them where `to_send` is not null.
  void move(const char* to_send, char* to_fill, int64_t size, const Deadline& deadline);
  void exchange(const at::Tensor& tensor, bool sends, const Deadline& deadline,
                const std::function<void(int64_t)>& on_bytes);

  const std::string peer_;
  LinkCancel& cancel_;
  int fd_ = -1;
};

}  // namespace trireme
