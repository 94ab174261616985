#include "trainer/parallel/communicator.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/error.h"
#include "base/host.h"
#include "base/log.h"
#include "trainer/parallel/attendance.h"
#include "trainer/parallel/bounded_calls.h"
#include "trainer/parallel/device_group.h"
#include "trainer/parallel/flat_bytes.h"
#include "trainer/parallel/lifeline.h"
#include "trainer/parallel/own_address.h"
#include "trainer/parallel/peer_copies.h"
#include "trainer/parallel/peer_exchange.h"
#include "trainer/parallel/transport.h"

namespace trireme {
namespace {

std::string first_line(const char* text) {
  const char* end = std::strchr(text, '\n');
  return end == nullptr ? std::string(text) : std::string(text, end);
}

}  // namespace

RendezvousOptions of_job(const RendezvousOptions& rendezvous, const Layout& layout) {
  RendezvousOptions job = rendezvous;
  if (!job.of_critic) job.layout = layout;
  if (!job.of_critic && job.critic_ranks == 0) {
    job.actor_ranks = 0;
    return job;
  }
  (job.of_critic ? job.critic_ranks : job.actor_ranks) = rendezvous.world_size;
  if (job.actor_ranks < 1 || job.critic_ranks < 1) {
    fail_user("a job with " + std::to_string(job.actor_ranks) + " actor ranks and " + std::to_string(job.critic_ranks) +
              " critic ranks: a critic is told both (TRIREME_ACTOR_RANKS, WORLD_SIZE)");
  }
  if (job.of_critic) job.rank += job.actor_ranks;
  job.world_size = job.actor_ranks + job.critic_ranks;
  return job;
}

std::string name_of_job_rank(const Layout& layout, int actor_ranks, int rank) {
  if (actor_ranks == 0 || rank < actor_ranks) return name_of_rank(layout, rank);
  return "critic rank " + std::to_string(rank - actor_ranks);
}

namespace {

std::string own_name(const RendezvousOptions& job) { return name_of_job_rank(job.layout, job.actor_ranks, job.rank); }

}  // namespace

struct JobStore::Impl {
  // c10d waits without limit for most of its answers. Its own deadline, where it has one, says more.
  explicit Impl(const RendezvousOptions& options)
      : rendezvous(options),
        calls(options.timeout + std::clamp(options.timeout / 4, Milliseconds(2000), Milliseconds(30000))) {}

  const RendezvousOptions rendezvous;
  BoundedCalls calls;
  c10::intrusive_ptr<c10d::TCPStore> tcp;        // null with one rank
  c10::intrusive_ptr<c10d::PrefixStore> scoped;  // keys of this attempt
  // The same over a connection of its own, null with one rank: c10d holds a connection while it waits for a key, and
  // groups wait so for ranks that Attendance meanwhile looks for.
  c10::intrusive_ptr<c10d::PrefixStore> of_groups;
  std::unique_ptr<Lifeline> lifeline;  // ends first: the others hear of it before the store goes
};

JobStore::JobStore(const RendezvousOptions& rendezvous) : impl_(std::make_unique<Impl>(rendezvous)) {
  const Deadline deadline = Deadline::after(rendezvous.timeout);
  LifelineOptions lifeline;
  lifeline.rank = rendezvous.rank;
  lifeline.world_size = rendezvous.world_size;
  lifeline.launcher_fd = rendezvous.launcher_fd;
  lifeline.on_death = rendezvous.on_deadline;
  lifeline.name_of = [layout = rendezvous.layout, actors = rendezvous.actor_ranks](int rank) {
    return name_of_job_rank(layout, actors, rank);
  };
  impl_->lifeline = std::make_unique<Lifeline>(lifeline);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(rendezvous.master_port);
  options.isServer = rendezvous.rank == 0;
  options.numWorkers = static_cast<size_t>(rendezvous.world_size);
  options.waitWorkers = false;  // the lifeline waits for them: it sees who dies before all have come
  if (rendezvous.rank == 0 && rendezvous.listen_fd >= 0) options.masterListenFd = rendezvous.listen_fd;
  options.timeout = rendezvous.timeout;
  const std::string where = rendezvous.master_address + ":" + std::to_string(rendezvous.master_port);
  const auto fail = [&](ErrorKind kind, const char* why) {
    throw Error(kind, own_name(rendezvous) + " on " + host_name() + ": rendezvous at " + where + " of " +
                          std::to_string(rendezvous.world_size) + " ranks failed: " + first_line(why));
  };
  const auto connect = [&options, &calls = impl_->calls](const std::string& address) {
    return calls.call([address, options] { return c10::make_intrusive<c10d::TCPStore>(address, options); });
  };
  try {
    impl_->tcp = connect(rendezvous.world_size == 1 ? "127.0.0.1" : rendezvous.master_address);
  } catch (const std::exception& error) {
    fail(ErrorKind::kTimeout, error.what());
  }
  const std::string attempt = "attempt-" + rendezvous.attempt;
  impl_->scoped = c10::make_intrusive<c10d::PrefixStore>(attempt, impl_->tcp);
  if (rendezvous.world_size > 1) {
    try {
      if (rendezvous.rank == 0)
        set("lifeline", impl_->lifeline->open());
      else
        impl_->lifeline->join(rendezvous.master_address, get("lifeline"), deadline);
      impl_->lifeline->wait_for_all(deadline);
    } catch (const Error& error) {
      impl_->lifeline->leaving();  // the others wait for this rank no more than it for them
      fail(error.kind(), error.what());
    }
    options.isServer = false;
    options.masterListenFd.reset();
    options.numWorkers.reset();  // of a server
    try {
      impl_->of_groups = c10::make_intrusive<c10d::PrefixStore>(attempt, connect(rendezvous.master_address));
    } catch (const std::exception& error) {
      impl_->lifeline->leaving();
      fail(ErrorKind::kTimeout, error.what());
    }
  }
}

JobStore::~JobStore() = default;

Lifeline& JobStore::lifeline() { return *impl_->lifeline; }
bool JobStore::silent() const { return impl_->calls.lost(); }

namespace {
// `fn` owns what it uses (BoundedCalls).
template <typename Fn>
auto store_call(JobStore::Impl& impl, const char* operation, const std::string& key, Fn&& fn) {
  std::string why;
  const bool was_silent = impl.calls.lost();  // a death that explains it has been waited for
  try {
    if (!impl.lifeline->rank0_is_gone()) return impl.calls.call(std::forward<Fn>(fn));
    why = "rank 0, which keeps the store, has gone";
  } catch (const Error& late) {
    why = std::string(late.what()) + "; rank 0" + kSilent;
  } catch (const std::exception& error) {
    why = first_line(error.what());
  }
  const auto dead = impl.lifeline->wait_for_dead(was_silent ? Milliseconds(0) : Lifeline::kWord);
  throw Error(ErrorKind::kTimeout, own_name(impl.rendezvous) + " on " + host_name() + ": store " + operation + " of '" +
                                       key + "' in phase " + impl.lifeline->phase() + " failed: " + why +
                                       (dead ? "; " + *dead : ""));
}
}  // namespace

int64_t JobStore::add(const std::string& key, int64_t amount) {
  return store_call(*impl_, "add", key, [store = impl_->scoped, key, amount] { return store->add(key, amount); });
}
void JobStore::set(const std::string& key, const std::string& value) {
  store_call(*impl_, "set", key,
             [store = impl_->scoped, key, bytes = std::vector<uint8_t>(value.begin(), value.end())] {
               store->set(key, bytes);
             });
}
std::string JobStore::get(const std::string& key) {
  const std::vector<uint8_t> bytes =
      store_call(*impl_, "get", key, [store = impl_->scoped, key] { return store->get(key); });
  return std::string(bytes.begin(), bytes.end());
}
void JobStore::remove(const std::string& key) {
  store_call(*impl_, "delete", key, [store = impl_->scoped, key] { store->deleteKey(key); });
}
bool JobStore::has(const std::string& key) {
  return store_call(*impl_, "check", key, [store = impl_->scoped, key] { return store->check({key}); });
}

struct Communicator::Impl {
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo;
  // Made when the first CUDA tensor comes: all ranks call the same operations, and a CPU run needs no NCCL.
  c10::intrusive_ptr<c10d::Backend> device;
  c10::intrusive_ptr<c10d::Store> store;  // keys of the job's attempt
  Milliseconds timeout{0};                // of the collectives
  std::string name;
  int rank = 0, size = 1;
  std::unique_ptr<PeerExchange> peers;
  std::unique_ptr<PeerCopies> copies;
  bool peers_known = false, copies_known = false;
  bool queueing = false;  // within queue()

  c10::intrusive_ptr<c10d::Store> keys(const std::string& purpose) const {
    return c10::make_intrusive<c10d::PrefixStore>(purpose + "-" + name, store);
  }
  // Attendance keeps the deadline and names who is missing; what waits on a device by itself, only when that fails.
  Milliseconds patience() const { return timeout + Milliseconds(120000); }

  c10d::Backend& backend(const at::Tensor& tensor) {
    if (tensor.is_cuda()) {
      if (device == nullptr) device = make_device_group(keys("nccl"), rank, size, patience());
      return *device;
    }
    TRIREME_CHECK(tensor.is_cpu(), "this build has collectives for CPU tensors only");
    return *gloo;
  }
};

Communicator::Communicator() = default;
Communicator::~Communicator() {
  if (impl_ == nullptr || impl_->device == nullptr) return;
  try {
    // After a failure the peers may be gone: nothing to wait for.
    if (std::uncaught_exceptions() > 0) {
      impl_->device->abort();
    } else {
      impl_->device->shutdown();
    }
  } catch (const std::exception& error) {
    log_warn("parallel", "group '" + name_ + "' did not end cleanly: " + first_line(error.what()));
  }
}

Communicator::Communicator(JobStore& store, const RendezvousOptions& rendezvous, Attendance& attendance,
                           const RankGroup& group)
    : ranks_(group.ranks), job_rank_(rendezvous.rank), size_(static_cast<int>(group.ranks.size())), name_(group.name) {
  const auto own = std::find(group.ranks.begin(), group.ranks.end(), rendezvous.rank);
  TRIREME_CHECK(own != group.ranks.end(), "a rank makes only groups that it is in");
  rank_ = static_cast<int>(own - group.ranks.begin());
  if (size_ == 1) return;
  impl_ = std::make_unique<Impl>();
  impl_->store = store.impl().of_groups;
  impl_->timeout = rendezvous.timeout;
  impl_->name = name_;
  impl_->rank = rank_;
  impl_->size = size_;
  attendance_ = &attendance;
  place_ = attendance.open(group);
  call("connect", [&] {
    auto options = c10d::ProcessGroupGloo::Options::create(rendezvous.timeout);
    options->devices.push_back(
        c10d::ProcessGroupGloo::createDeviceForHostname(own_address_towards(rendezvous.master_address)));
    options->threads = 1;
    impl_->gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(impl_->keys("gloo"), rank_, size_, options);
  });
}

Communicator::Communicator(Communicator& group, int from, int to, int number)
    : impl_(std::make_unique<Impl>()),
      attendance_(group.attendance_),
      ranks_({group.ranks_.at(static_cast<size_t>(from)), group.ranks_.at(static_cast<size_t>(to))}),
      line_(true),
      peer_(group.rank() == from ? to : from),
      tag_(number),
      job_rank_(group.job_rank_),
      rank_(group.rank() == from ? 0 : 1),
      size_(2),
      name_(group.name_ + "-line-" + std::to_string(number)) {
  TRIREME_CHECK(from != to && (group.rank() == from || group.rank() == to), "a line is between this rank and another");
  impl_->gloo = group.impl_->gloo;
  impl_->store = group.impl_->store;
  impl_->timeout = group.impl_->timeout;
  impl_->name = name_;
  impl_->rank = rank_;
  impl_->size = size_;
  place_ = attendance_->open({name_, ranks_});
}

void PendingCollective::wait() {
  if (!finish_) return;
  const std::function<void()> finish = std::move(finish_);
  finish_ = nullptr;
  finish();
}

void Communicator::failed(const char* operation, int64_t sequence, const std::string& phase,
                          const std::exception& error) {
  attendance_->leaving();
  const Absence absence = attendance_->absent(place_, sequence);
  // A broken connection is here before the word of what broke it.
  std::string cause;
  if (const auto other = attendance_->failure_of_another(absence.ranks.empty() ? Lifeline::kWord : Milliseconds(0)))
    cause = "; " + *other;
  throw Error(ErrorKind::kUnavailable, attendance_->name_of(job_rank_) + " on " + host_name() + ": " + operation +
                                           " number " + std::to_string(sequence) + " of group '" + name_ + "' (" +
                                           std::to_string(size_) + " ranks) in phase " + phase + " failed: " +
                                           nccl_reason(error.what()) + attendance_->describe(absence, place_) + cause);
}

template <typename Fn>
void Communicator::wait(const char* operation, int64_t sequence, const std::string& phase, Fn&& fn) {
  attendance_->note_waiting(place_);
  try {
    fn();
  } catch (const std::exception& error) {
    failed(operation, sequence, phase, error);
  }
  attendance_->note_waited();
}

template <typename Fn>
void Communicator::call(const char* operation, Fn&& fn) {
  ++sequence_;
  attendance_->note(place_, sequence_);
  wait(operation, sequence_, attendance_->phase(), std::forward<Fn>(fn));
}

template <typename Fn>
void Communicator::exposed(bool on_device, Fn&& fn) {
  const auto kind = line_ ? ExposedWaits::Kind::kStage : ExposedWaits::Kind::kExchange;
  if (on_device) return attendance_->waits.queue(kind, std::forward<Fn>(fn));
  const Stopwatch watch;
  fn();
  if (name_ != kWorld) attendance_->waits.add(kind, watch.seconds());
}

template <typename Fn>
PendingCollective Communicator::begin(const char* operation, const at::Tensor& tensor, Fn&& start) {
  c10::intrusive_ptr<c10d::Work> work;
  const std::string phase = attendance_->phase();
  call(operation, [&] {
    c10d::Backend& backend = impl_->backend(tensor);
    if (tensor.is_cuda()) {
      std::function<bool()> come = mark_current_stream();
      work = start(backend);
      attendance_->note_queued(place_, {sequence_, operation, phase, std::move(come), end_of(work)});
      return;
    }
    work = start(backend);
  });
  PendingCollective pending;
  pending.finish_ = [this, operation, work, sequence = sequence_, phase, on_device = tensor.is_cuda()] {
    // On a device of the current stream, not of the host.
    exposed(on_device, [&] { wait(operation, sequence, phase, [&] { work->wait(); }); });
  };
  return pending;
}

template <typename Fn>
void Communicator::run(const char* operation, const at::Tensor& tensor, Fn&& start) {
  begin(operation, tensor, std::forward<Fn>(start)).wait();
}

PendingCollective Communicator::begin_all_reduce_sum(at::Tensor tensor) {
  if (size_ == 1) return {};
  std::vector<at::Tensor> list{tensor};
  return begin("all-reduce", tensor, [&](c10d::Backend& backend) { return backend.allreduce(list); });
}

void Communicator::all_reduce_sum(at::Tensor tensor) { begin_all_reduce_sum(std::move(tensor)).wait(); }

void Communicator::all_reduce_max(at::Tensor tensor) {
  if (size_ == 1) return;
  std::vector<at::Tensor> list{tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  run("all-reduce", tensor, [&](c10d::Backend& backend) { return backend.allreduce(list, options); });
}

void Communicator::broadcast(at::Tensor tensor, int root) {
  if (size_ == 1) return;
  std::vector<at::Tensor> list{tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  run("broadcast", tensor, [&](c10d::Backend& backend) { return backend.broadcast(list, options); });
}

PendingCollective Communicator::begin_all_gather(at::Tensor out, const at::Tensor& in) {
  TRIREME_CHECK(out.numel() == in.numel() * size_, "all_gather: output must hold one input per rank");
  at::Tensor input = in;
  if (size_ == 1) {
    if (out.data_ptr() != in.data_ptr()) out.view(in.sizes()).copy_(in);
    return {};
  }
  if (!in.is_cuda() && in.is_alias_of(out)) input = in.clone();  // Gloo does not allow overlap
  at::Tensor flat_out = out.view({-1});
  at::Tensor flat_in = input.view({-1});
  return begin("all-gather", out, [&](c10d::Backend& backend) { return backend._allgather_base(flat_out, flat_in); });
}

PendingCollective Communicator::begin_reduce_scatter_sum(at::Tensor out, const at::Tensor& in) {
  TRIREME_CHECK(in.numel() == out.numel() * size_, "reduce_scatter: input must hold one output per rank");
  if (size_ == 1) {
    if (out.data_ptr() != in.data_ptr()) out.view({-1}).copy_(in.view({-1}));
    return {};
  }
  at::Tensor flat_out = out.view({-1});
  at::Tensor flat_in = in.view({-1});
  return begin("reduce-scatter", in,
               [&](c10d::Backend& backend) { return backend._reduce_scatter_base(flat_out, flat_in); });
}

void Communicator::all_gather(at::Tensor out, const at::Tensor& in) { begin_all_gather(out, in).wait(); }

void Communicator::reduce_scatter_sum(at::Tensor out, const at::Tensor& in) {
  begin_reduce_scatter_sum(out, in).wait();
}

void Communicator::all_to_all(at::Tensor out, const at::Tensor& in, const std::vector<int64_t>& out_rows,
                              const std::vector<int64_t>& in_rows) {
  begin_all_to_all(std::move(out), in, out_rows, in_rows).wait();
}

PendingCollective Communicator::begin_all_to_all(at::Tensor out, const at::Tensor& in,
                                                 const std::vector<int64_t>& out_rows,
                                                 const std::vector<int64_t>& in_rows) {
  TRIREME_CHECK(out.scalar_type() == in.scalar_type() && out.is_contiguous() && in.is_contiguous(),
                "all_to_all: contiguous tensors of one dtype");
  if (size_ == 1) {
    out.copy_(in);
    return {};
  }
  // As bytes, so that no backend has a say in the dtype; one row of them is `width`.
  const auto counts = [&](const at::Tensor& tensor, const std::vector<int64_t>& rows) {
    const int64_t width = tensor.numel() / std::max<int64_t>(1, tensor.size(0)) * tensor.element_size();
    std::vector<int64_t> counts = rows.empty() ? std::vector<int64_t>(size_, tensor.size(0) / size_) : rows;
    TRIREME_CHECK(std::accumulate(counts.begin(), counts.end(), int64_t{0}) == tensor.size(0),
                  "all_to_all: the parts must be the tensor");
    for (int64_t& count : counts) count *= width;
    return counts;
  };
  at::Tensor flat_out = flat_bytes(out), flat_in = flat_bytes(in);
  std::vector<int64_t> sizes_out = counts(out, out_rows), sizes_in = counts(in, in_rows);
  return begin("all-to-all", in,
               [&](c10d::Backend& backend) { return backend.alltoall_base(flat_out, flat_in, sizes_out, sizes_in); });
}

// As bytes, as in all_to_all. A line's device group has its two ranks only.
PendingCollective Communicator::begin_send(const at::Tensor& tensor) {
  TRIREME_CHECK(tensor.is_contiguous() && rank_ == 0, "send: a contiguous tensor from a line's first rank");
  if (tensor.numel() == 0) return {};
  std::vector<at::Tensor> bytes{flat_bytes(tensor)};
  const int to = tensor.is_cuda() ? 1 : peer_, tag = tensor.is_cuda() ? 0 : tag_;
  return begin("send", tensor, [&](c10d::Backend& backend) { return backend.send(bytes, to, tag); });
}

PendingCollective Communicator::begin_receive(at::Tensor tensor) {
  TRIREME_CHECK(tensor.is_contiguous() && rank_ == 1, "receive: a contiguous tensor on a line's last rank");
  if (tensor.numel() == 0) return {};
  std::vector<at::Tensor> bytes{flat_bytes(tensor)};
  const int from = tensor.is_cuda() ? 0 : peer_, tag = tensor.is_cuda() ? 0 : tag_;
  return begin("receive", tensor, [&](c10d::Backend& backend) { return backend.recv(bytes, from, tag); });
}

PeerExchange* Communicator::peers(at::Device device) {
  if (size_ == 1 || !device.is_cuda()) return nullptr;
  if (!impl_->peers_known) {
    impl_->peers_known = true;
    impl_->peers = PeerExchange::make(peer_group(), device);
  }
  return impl_->peers.get();
}

PeerCopies* Communicator::copies(at::Device device) {
  if (size_ == 1 || !device.is_cuda()) return nullptr;
  if (!impl_->copies_known) {
    impl_->copies_known = true;
    std::string problem;
    impl_->copies = PeerCopies::make(peer_group(), device, problem);
    if (!problem.empty() && rank_ == 0)
      log_warn("parallel", "group '" + name_ + "' exchanges rows beside products by NCCL, slower: " + problem);
  }
  return impl_->copies.get();
}

PeerGroup Communicator::peer_group() {
  return {.name = name_,
          .rank = rank_,
          .size = size_,
          .all_gather_bytes = [this](const std::string& own) { return all_gather_bytes(own); },
          .patience = impl_->patience()};
}

PendingCollective Communicator::begin_send(const std::function<PeerLines::Copy()>& launch) {
  const std::string phase = attendance_->phase();
  call("send", [] {});
  std::function<bool()> come = mark_current_stream();
  PeerLines::Copy copy = launch();
  attendance_->note_queued(place_, {sequence_, "send", phase, std::move(come), std::move(copy.done)});
  PendingCollective pending;
  pending.finish_ = std::move(copy.wait);
  return pending;
}

PendingCollective Communicator::begin_receive(std::function<void()> launch) {
  const std::string phase = attendance_->phase();
  call("receive", [] {});
  PendingCollective pending;
  pending.finish_ = [this, launch = std::move(launch), phase, sequence = sequence_] {
    std::function<bool()> come = mark_current_stream();
    exposed(/*on_device=*/true, launch);
    attendance_->note_queued(place_, {sequence, "receive", phase, std::move(come), mark_current_stream()});
  };
  return pending;
}

PendingCollective Communicator::begin_copies(const char* operation, const std::function<PeerLines::Copy()>& launch) {
  const std::string phase = attendance_->phase();
  call(operation, [] {});
  std::function<bool()> come = mark_current_stream();
  PeerLines::Copy copy = launch();
  attendance_->note_queued(place_, {sequence_, operation, phase, std::move(come), std::move(copy.done)});
  PendingCollective pending;
  pending.finish_ = [this, wait = std::move(copy.wait)] { exposed(/*on_device=*/true, wait); };
  return pending;
}

void Communicator::queue(const char* operation, const std::function<void()>& launch) {
  if (capturing() || impl_->queueing) {
    launch();
    return;
  }
  const std::string phase = attendance_->phase();
  call(operation, [&] { impl_->peers->throw_if_absent(); });
  // What fails here is this rank's own failure, no echo of another's.
  std::function<bool()> come = mark_current_stream();
  impl_->queueing = true;
  try {
    exposed(/*on_device=*/true, launch);
  } catch (...) {
    impl_->queueing = false;
    throw;
  }
  impl_->queueing = false;
  attendance_->note_queued(place_, {sequence_, operation, phase, std::move(come), mark_current_stream()});
}

void Communicator::barrier() {
  if (size_ == 1) return;
  call("barrier", [&] { impl_->gloo->barrier()->wait(); });
}

void disable_flight_recorder() { ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0); }

std::vector<std::string> Communicator::all_gather_bytes(const std::string& bytes) {
  if (size_ == 1) return {bytes};
  at::Tensor lengths = at::zeros({size_}, at::kLong);
  all_gather(lengths, at::full({1}, static_cast<int64_t>(bytes.size()), at::kLong));
  const int64_t* length = lengths.const_data_ptr<int64_t>();
  const int64_t widest = std::max<int64_t>(1, lengths.max().item<int64_t>());
  at::Tensor mine = at::zeros({widest}, at::kByte);
  std::memcpy(mine.data_ptr(), bytes.data(), bytes.size());
  at::Tensor all = at::empty({widest * size_}, at::kByte);
  all_gather(all, mine);
  std::vector<std::string> parts;
  const char* data = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>());
  for (int r = 0; r < size_; ++r) parts.emplace_back(data + r * widest, static_cast<size_t>(length[r]));
  return parts;
}

std::string Communicator::broadcast_bytes(const std::string& bytes, int root) {
  if (size_ == 1) return bytes;
  at::Tensor size = at::full({1}, static_cast<int64_t>(bytes.size()), at::kLong);
  broadcast(size, root);
  at::Tensor data = at::empty({size.item<int64_t>()}, at::kByte);
  if (data.numel() == 0) return "";
  if (rank_ == root) std::memcpy(data.data_ptr(), bytes.data(), bytes.size());
  broadcast(data, root);
  return rank_ == root ? bytes : std::string(static_cast<const char*>(data.const_data_ptr()), data.nbytes());
}

double Communicator::all_reduce_sum(double value) {
  if (size_ == 1) return value;
  at::Tensor tensor = at::full({1}, value, at::kDouble);
  all_reduce_sum(tensor);
  return tensor.item<double>();
}

double Communicator::all_reduce_max(double value) {
  if (size_ == 1) return value;
  at::Tensor tensor = at::full({1}, value, at::kDouble);
  all_reduce_max(tensor);
  return tensor.item<double>();
}

int64_t Communicator::all_reduce_sum(int64_t value) {
  if (size_ == 1) return value;
  at::Tensor tensor = at::full({1}, value, at::kLong);
  all_reduce_sum(tensor);
  return tensor.item<int64_t>();
}

}  // namespace trireme
