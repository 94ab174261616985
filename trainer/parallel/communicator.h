// JobStore and Communicator: rendezvous, counters, and collectives of groups of ranks with deadlines.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "topology/topology.h"
#include "trainer/parallel/peer_group.h"
#include "trainer/parallel/peer_lines.h"

namespace trireme {

struct RendezvousOptions {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world = 0;  // ranks that were started on this node; 0: not told
  std::string master_address = "127.0.0.1";
  int master_port = 0;  // rank 0 listens here; 0 with one rank: no store is opened
  int listen_fd = -1;   // rank 0: a socket bound to master_port already, which the store takes over; -1: none
  std::string attempt = "0";
  Layout layout;  // names a rank's place in messages
  Milliseconds timeout{600000};
  // Called from a thread of its own when the other ranks have given up waiting for this one, and it has not come within
  // the grace either, or when its device has not come to a collective in time. Empty: nothing is done.
  std::function<void(const std::string& what)> on_stuck;
  Milliseconds stuck_grace{2000};
  // Called from a thread of its own when a collective that this rank's device has come to does not end: its deadline
  // has passed, or another rank has failed. A collective that the host waits in throws instead. Also called, whatever
  // the training thread does, when another rank has died and this one is still there some seconds later, or when
  // another has said that it fails and this one has not begun to leave within failure_patience.
  std::function<void(const std::string& what)> on_deadline;
  Milliseconds failure_patience{15000};  // less than a launcher waits before it kills
  // Called from a thread of its own when this rank has thrown what ends it (ParallelContext::leaves_by) and is still
  // there so much later: a destructor waits for its device, which waits for others that have left. Less than a launcher
  // waits before it kills.
  std::function<void(const std::exception& error)> on_unwinding;
  Milliseconds unwinding_grace{8000};
  int launcher_fd = -1;  // where the launcher writes which of this host's ranks died (lifeline.h); -1: none
  // Where PPO's critic has ranks of its own: how many ranks either role has, else 0 both; whether this process is the
  // critic's. `rank` and `world_size` are those of its role. Ranks of the job are the actor's, then the critic's.
  int actor_ranks = 0, critic_ranks = 0;
  bool of_critic = false;
};

// The same by ranks of the job, which is what JobStore, Attendance and Communicator are told. `layout` is the role's;
// names are by the actor's, which a critic is told in `rendezvous`. Throws Error(kUser) for sizes that cannot be.
RendezvousOptions of_job(const RendezvousOptions& rendezvous, const Layout& layout);
// "rank 37 (tp 1, pp 2, dp 1)", "critic rank 0": of a rank of the job. `actor_ranks` 0: all are the actor's.
std::string name_of_job_rank(const Layout& layout, int actor_ranks, int rank);

class Lifeline;

// What is said of rank 0 when the store does not answer.
inline constexpr const char* kSilent = ", which keeps the store, stands still or cannot be reached";

// The rendezvous, and then the job-wide key-value store. Rank 0 is the server. Calls come from any thread and go one
// after the other. All throw Error(kTimeout) when rank 0 has gone, or has not answered for rendezvous.timeout and at
// most 30 s more: then all at once.
class JobStore final {
 public:
  // Returns when all ranks have come. Throws Error(kUnavailable) naming a rank that has died before, Error(kTimeout) at
  // rendezvous.timeout.
  explicit JobStore(const RendezvousOptions& rendezvous);
  ~JobStore();

  int64_t add(const std::string& key, int64_t amount);  // atomic; returns the new value
  void set(const std::string& key, const std::string& value);
  std::string get(const std::string& key);  // waits for the key, Error(kTimeout) that names it
  bool has(const std::string& key);
  void remove(const std::string& key);  // nothing where it is not there
  bool silent() const;                  // a call was not answered in time
  Lifeline& lifeline();                 // who of the others is still there; with one rank nobody is watched

  struct Impl;
  Impl& impl() { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

class Attendance;
class PeerCopies;
class PeerExchange;

inline constexpr const char* kWorld = "world";  // name of the group of everybody
// Some of the job's ranks, in the order that counts in the group. Its name is unique in the job ("dp-3").
struct RankGroup {
  std::string name;
  std::vector<int> ranks;
};

// A collective that runs beside its caller. Its tensors may be neither written nor read before wait().
class PendingCollective final {
 public:
  PendingCollective() = default;  // of a group of one: done
  // Returns when the result is there; on CUDA, for all that is launched on the current stream from now on. Throws as
  // the operation itself would have. A second call does nothing.
  void wait();

 private:
  friend class Communicator;
  std::function<void()> finish_;
};

// LibTorch's flight recorder of collectives adds to a map of its own without a lock: two threads that begin collectives
// of two groups at once may end the process. For the whole process, before the first group is made and while no other
// thread runs.
void disable_flight_recorder();

// Collectives over `size()` ranks. All ranks of the group call the same operations in the same order, and a rank that
// is in several groups makes them in one order on all ranks. Tensors are contiguous.
class Communicator final {
 public:
  // A group of one: every operation is the identity.
  Communicator();
  // This rank (rendezvous.rank) must be in the group. `attendance` is the rank's, and outlives the group.
  Communicator(JobStore& store, const RendezvousOptions& rendezvous, Attendance& attendance, const RankGroup& group);
  // A line from rank `from` of `group` to its rank `to`, this rank one of the two: a group of them, for begin_send and
  // begin_receive only, over the connections of `group`, which outlives it. `number`: the line's own in `group`.
  Communicator(Communicator& group, int from, int to, int number);
  ~Communicator();

  int rank() const { return rank_; }  // in the group
  int size() const { return size_; }
  const std::vector<int>& ranks() const { return ranks_; }  // of the job; none of a group of one
  const std::string& name() const { return name_; }

  void all_reduce_sum(at::Tensor tensor);
  void all_reduce_max(at::Tensor tensor);
  void broadcast(at::Tensor tensor, int root);
  // out [size * n] from in [n]; in may be a view of out's own part.
  void all_gather(at::Tensor out, const at::Tensor& in);
  // out [n] = this rank's part of the sum over ranks of in [size * n].
  void reduce_scatter_sum(at::Tensor out, const at::Tensor& in);
  // Bytes only: in is cut into size() parts along dimension 0, part r goes to rank r; out has the parts of all ranks in
  // their order. Sizes: rows of each part; empty: equal parts. All dtypes; parts may be empty.
  void all_to_all(at::Tensor out, const at::Tensor& in, const std::vector<int64_t>& out_rows = {},
                  const std::vector<int64_t>& in_rows = {});
  // all_reduce_sum, all_gather, reduce_scatter_sum and all_to_all, begun and not waited for. CPU: on a thread of
  // Gloo's, which takes them in order; CUDA: on NCCL's own stream, behind what the current stream holds now. They count
  // as come to when begun. May be called from the thread of a backward pass while the thread that started it waits. The
  // group must outlive the result.
  [[nodiscard]] PendingCollective begin_all_reduce_sum(at::Tensor tensor);
  [[nodiscard]] PendingCollective begin_all_gather(at::Tensor out, const at::Tensor& in);
  [[nodiscard]] PendingCollective begin_reduce_scatter_sum(at::Tensor out, const at::Tensor& in);
  [[nodiscard]] PendingCollective begin_all_to_all(at::Tensor out, const at::Tensor& in,
                                                   const std::vector<int64_t>& out_rows,
                                                   const std::vector<int64_t>& in_rows);
  // Of a line: what is sent first is received first, into a tensor of its size and dtype. A send ends when the other
  // rank receives; several may be under way, and calls of both kinds are in any order on a rank. On CUDA the two ranks'
  // first call of a line makes NCCL's group of them, and waits for the other's.
  [[nodiscard]] PendingCollective begin_send(const at::Tensor& tensor);
  [[nodiscard]] PendingCollective begin_receive(at::Tensor tensor);
  // Exchanges over the memory of the group's devices; null where there are none: one rank, the CPU, devices that cannot
  // see each other. Collective at the first call.
  PeerExchange* peers(at::Device device);
  // Copies over the same memory that run beside what the devices compute; null likewise. Collective at the first call.
  PeerCopies* copies(at::Device device);
  // What makes peers(), copies() and PeerLines of this group. Of a group of several ranks.
  PeerGroup peer_group();
  // `launch` queues kernels with exchanges over peers() on the current stream. They count, are named and watched as one
  // collective, those of calls within it too; in stream capture not at all: whoever replays a graph of them calls this
  // for it.
  void queue(const char* operation, const std::function<void()>& launch);
  // A message of a line between devices that goes by PeerLines: counted now, watched from when it is queued. Of a send
  // that is now; `launch` of a receive is called by the result's wait(), on the stream that is current then.
  [[nodiscard]] PendingCollective begin_send(const std::function<PeerLines::Copy()>& launch);
  [[nodiscard]] PendingCollective begin_receive(std::function<void()> launch);
  // `launch` begins copies() beside the current stream: counted now, watched until they are done. What the result's
  // wait() lets the stream stand still counts as waiting for others.
  [[nodiscard]] PendingCollective begin_copies(const char* operation, const std::function<PeerLines::Copy()>& launch);
  void barrier();
  // Any length per rank; result[r] is rank r's.
  std::vector<std::string> all_gather_bytes(const std::string& bytes);
  // Those of rank `root`, of any length, which no other knows; `bytes` of the others do not count.
  std::string broadcast_bytes(const std::string& bytes, int root);
  double all_reduce_sum(double value);
  double all_reduce_max(double value);
  int64_t all_reduce_sum(int64_t value);

 private:
  template <typename Fn>
  void wait(const char* operation, int64_t sequence, const std::string& phase, Fn&& fn);
  template <typename Fn>
  void call(const char* operation, Fn&& fn);
  // `fn` lets the host wait, or the current stream: that counts as this rank's waiting for others.
  template <typename Fn>
  void exposed(bool on_device, Fn&& fn);
  // `start` begins the operation on the backend of `tensor` and returns its c10d::Work.
  template <typename Fn>
  PendingCollective begin(const char* operation, const at::Tensor& tensor, Fn&& start);
  template <typename Fn>
  void run(const char* operation, const at::Tensor& tensor, Fn&& start);  // and waits for it
  [[noreturn]] void failed(const char* operation, int64_t sequence, const std::string& phase,
                           const std::exception& error);
  struct Impl;
  std::unique_ptr<Impl> impl_;
  Attendance* attendance_ = nullptr;  // null with one rank
  std::vector<int> ranks_;            // of the job
  bool line_ = false;                 // between two stages
  int peer_ = 0, tag_ = 0;            // a line's: the other rank in the group that carries it, and its number there
  int place_ = 0;                     // the group's number in attendance_
  int job_rank_ = 0;
  int rank_ = 0;
  int size_ = 1;
  std::string name_ = "self";
  int64_t sequence_ = 0;
};

}  // namespace trireme
