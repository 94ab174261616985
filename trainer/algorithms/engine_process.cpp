#include "trainer/algorithms/engine_process.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/engine_follower.h"
#include "trainer/algorithms/engine_identity.h"
#include "trainer/algorithms/engine_layout.h"
#include "trainer/algorithms/engine_rank.h"
#include "trainer/algorithms/failure.h"
#include "trainer/algorithms/options.h"
#include "trainer/algorithms/rollouts.h"
#include "trainer/algorithms/session_parts.h"
#include "trainer/parallel/device.h"
#include "trainer/parallel/link_pair.h"
#include "trainer/rollout/host.h"
#include "trainer/work/client.h"

namespace trireme {
namespace {

constexpr int kTransferTries = 3;
constexpr Milliseconds kActorGone{5000};  // nobody answers for so long
constexpr Milliseconds kLongPoll{5000};   // at most
constexpr Milliseconds kRewardLook{50};
constexpr Milliseconds kBetweenSteps{300000};  // for a step to end: the first one warms up and captures graphs
constexpr Milliseconds kTransfer{60000};
constexpr Milliseconds kAskAgain{20};  // for weights that are gone: another version is under way

// What the actor hands out, until it has it back.
struct Running {
  LeasedWork work;
  SharedTokens prompt;
  std::vector<Sample> samples;  // when they are generated
};

// A failure of this one alone says nothing about what others would meet.
bool others_would_meet(ErrorKind kind) {
  return kind == ErrorKind::kUser || kind == ErrorKind::kData || kind == ErrorKind::kIo;
}

class EngineProcess final {
 public:
  explicit EngineProcess(EngineRank& rank);
  ~EngineProcess();
  void run();

 private:
  void generate();
  void probe_rewards();
  void join(WorkClient& client);
  WorkClient client() const { return WorkClient(place(), &stopping_); }
  WorkClientOptions place() const { return {rank_.url(), rank_.ticket(), kActorGone}; }

  // Each the work of one thread.
  void lease_work();
  void follow_weights();
  void bring_samples();

  void begin(LeasedWork work);
  void finished(GeneratedGroup group);       // on the host's thread
  bool apply_when_idle(WorkClient& client);  // whether the weights are others now
  int64_t fetch(WorkClient& client, WeightsReply reply);
  int64_t receive(const WeightsReply& reply);
  bool pin_elsewhere(const WeightsReply& reply, int64_t version);
  void fetch_in_place(WorkClient& client, const WeightsReply& reply);
  void apply(int64_t version);
  KeptCache kept_at_change() const;
  void tell_weights(int64_t version, KeptCache kept);
  void set_version(int64_t version, double stall_s);
  void fail(std::exception_ptr error);
  void end();
  template <typename Fn>
  std::thread guarded(Fn&& fn);
  int64_t fetched() const {
    const std::lock_guard lock(mutex_);
    return fetched_;
  }
  int64_t version_now() const {
    const std::lock_guard lock(mutex_);
    return version_;
  }
  Caller caller() const {
    const std::lock_guard lock(mutex_);
    return caller_;
  }

  EngineRank& rank_;
  const Config& config_;
  const EngineProcessOptions& options_;
  EngineGroup& group_;
  EngineFaults faults_;
  bool transfer_begins_ = false;  // of the thread that fetches
  bool torn_ = false;             // weights that are read came to some ranks, or in part
  RewardPool rewards_;
  JoinRequest join_;
  bool in_flight_ = false, kept_ = false;
  int64_t group_size_ = 1;
  Milliseconds long_poll_ = kLongPoll;
  WeightReceiver* receiver_ = nullptr;  // rank_'s
  std::unique_ptr<EngineHost> host_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Caller caller_;
  std::map<uint64_t, Running> running_;    // by the first sample's id, until generated
  std::map<int64_t, Running> unrewarded_;  // by the reward pool's group id
  int64_t next_reward_ = 0;
  int64_t version_ = -1, fetched_ = -1;
  double transfer_s_ = 0, stall_s_ = 0;
  std::exception_ptr failure_;
  bool over_ = false;
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> looks_{0};  // for rewards: what is in hand is being worked on
};

EngineProcess::EngineProcess(EngineRank& rank)
    : rank_(rank),
      config_(rank.config()),
      options_(rank.options()),
      group_(rank.group()),
      faults_(options_.fault),
      rewards_(reward_options(config_, options_.rewards), uses_reward_model(config_)) {
  join_ = identity_of(config_, rank.model().config(), rank.model_dir(), options_.hf_home);
  join_.name = options_.name;
  std::random_device device;
  join_.session = std::to_string((static_cast<uint64_t>(device()) << 32) | device());
}

EngineProcess::~EngineProcess() {
  end();
  host_.reset();  // its thread uses what lies behind it
}

// Where it runs they may lack what the actor's have. Whoever has joined is given samples, and heard of within seconds,
// which a service that still starts does not allow.
void EngineProcess::probe_rewards() {
  const double limit_s = config_.env.startup_timeout_s;
  if (limit_s > 0) rewards_.probe(parse_probe(rank_.probe()), Milliseconds(static_cast<int64_t>(limit_s * 1000)));
}

void EngineProcess::join(WorkClient& client) {
  faults_.begins("joining");
  const JoinReply reply = client.join(join_);
  const std::lock_guard lock(mutex_);
  const bool again = !caller_.session.empty();
  caller_ = {reply.engine, join_.session, reply.desk};
  if (again) return;
  in_flight_ = reply.in_flight;
  kept_ = reply.in_flight && !config_.grpo.async_grpo.recompute_kv_cache_after_weight_updates;
  group_size_ = reply.group_size;
  long_poll_ = std::min(kLongPoll, Milliseconds(reply.silence_ms / 4));
}

void EngineProcess::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_ && !over_) failure_ = error;
  }
  end();
}

// All threads leave soon.
void EngineProcess::end() {
  stopping_ = true;
  if (receiver_ != nullptr) receiver_->cancel();
  group_.cancel_orders();
  { const std::lock_guard lock(mutex_); }  // who has just looked is waiting by now
  changed_.notify_all();
}

template <typename Fn>
std::thread EngineProcess::guarded(Fn&& fn) {
  return std::thread([this, fn = std::forward<Fn>(fn)] {
    try {
      rank_.use_device();
      fn();
    } catch (...) {
      fail(std::current_exception());
    }
  });
}

void EngineProcess::run() {
  try {
    generate();
  } catch (const std::exception& error) {
    host_.reset();  // behind the engine's last step
    group_.end(error.what());
    throw;
  }
  group_.end("");
}

void EngineProcess::generate() {
  probe_rewards();
  WorkClient first = client();
  join(first);
  group_.tell({.kind = EngineMessage::kBegin, .number = caller_.engine, .text = {}});
  std::function<void(int64_t)> on_bytes;
  if (options_.fault.kind != EngineFault::Kind::kNone) {
    on_bytes = [this](int64_t) {
      if (std::exchange(transfer_begins_, false)) faults_.begins("transfer");
    };
  }
  rank_.make_receiver(caller_.engine, on_bytes);
  receiver_ = rank_.receiver();
  host_ = std::make_unique<EngineHost>([this, threads = at::get_num_threads()] { return rank_.make_engine(threads); },
                                       [this](GeneratedGroup group) { finished(std::move(group)); }, &group_);
  const std::string devices = group_.size() == 1 ? "" : std::to_string(group_.size()) + " x ";
  log_info("engine", options_.name + " generates for the run at " + rank_.url() + " on " + devices +
                         device_name(rank_.model().options().device) + ", as engine " + std::to_string(caller_.engine));
  if (options_.on_ready) options_.on_ready();
  std::vector<std::thread> threads;
  threads.push_back(guarded([this] { lease_work(); }));
  threads.push_back(guarded([this] { follow_weights(); }));
  try {
    bring_samples();
  } catch (...) {
    fail(std::current_exception());
  }
  end();
  for (std::thread& thread : threads) thread.join();
  LeaveRequest leave;
  leave.caller = caller();
  try {
    if (failure_) std::rethrow_exception(failure_);
  } catch (const Error& error) {
    leave.why = error.what();
    leave.fatal = others_would_meet(error.kind());
    leave.kind = static_cast<int64_t>(error.kind());
  } catch (const std::exception& error) {
    leave.why = error.what();
  }
  WorkClient(place(), nullptr).leave(leave);
  host_.reset();
  if (failure_) std::rethrow_exception(failure_);
}

// Work in, as long as there is room; and the sign of life.
void EngineProcess::lease_work() {
  WorkClient client = this->client();
  while (!stopping_) {
    host_->check();
    LeaseRequest request;
    request.caller = caller();
    request.places = host_->places();
    request.steps = host_->steps() + looks_;
    request.recomputed_rows = host_->recomputed_rows();
    {
      const std::lock_guard lock(mutex_);
      request.version = version_;
      request.fetched = fetched_;
      request.transfer_s = transfer_s_;
      request.stall_s = stall_s_;
    }
    const bool idle = host_->unfinished() == 0 && request.places > 0;
    // It hears from its own engine, and not from the actor, when it can take the weights that it has beside it.
    const bool has_newer = !in_flight_ && request.fetched > request.version;
    const bool in_line = receiver_->needs_stop() && request.version >= 0;  // first ones: follow_weights()
    request.may_change = idle && !in_flight_ && (has_newer || in_line);
    request.wait_ms = request.places > 0 && (request.may_change || !has_newer) ? long_poll_.count() : 0;
    LeaseReply reply = client.lease(request);
    if (reply.over) {
      {
        const std::lock_guard lock(mutex_);
        over_ = true;
      }
      return end();
    }
    if (!reply.known) {
      log_warn("engine", "the actor had given this engine up; it joins again");
      join(client);
      continue;
    }
    const bool nothing = reply.runs.empty();
    for (LeasedWork& work : reply.runs) begin(std::move(work));
    if (request.may_change && nothing && !reply.left && apply_when_idle(client)) continue;
    if (request.places == 0 || (nothing && has_newer && !request.may_change))
      host_->wait_for_places(request.places, Deadline::after(long_poll_ / 4));
  }
}

// New weights of an engine that changes them only with nothing unfinished: now, when nobody has to begin anything more
// with the present ones.
bool EngineProcess::apply_when_idle(WorkClient& client) {
  if (receiver_->needs_stop()) {  // they are received where they are read
    {
      const std::lock_guard lock(mutex_);
      if (version_ < 0) return false;  // the first ones are follow_weights()'s
    }
    const WeightsReply reply = client.weights({caller(), fetched(), 500});
    if (reply.version < 0) return false;
    fetch_in_place(client, reply);
    return true;
  }
  int64_t version = 0;
  {
    const std::lock_guard lock(mutex_);
    if (fetched_ <= version_) return false;
    version = fetched_;
  }
  apply(version);
  return true;
}

// The newest weights, of one version on all ranks of the engine.
int64_t EngineProcess::receive(const WeightsReply& reply) {
  const std::vector<WeightPart>& parts = rank_.parts(reply.engine);
  if (group_.size() == 1) return receiver_->fetch(reply.link, parts);
  const Deadline deadline = Deadline::after(kTransfer);
  int64_t version = -1;
  for (bool pinned = false; !pinned;) {
    version = receiver_->pin(reply.link, parts, -1);
    if (version >= 0) pinned = pin_elsewhere(reply, version);
    if (pinned) break;
    if (deadline.passed()) fail_timeout("the weights were written over whenever all ranks were asked");
    std::this_thread::sleep_for(kAskAgain);
  }
  torn_ = receiver_->needs_stop();
  (void)group_.order({.kind = EngineMessage::kReceive, .text = {}}, [this] { receiver_->receive_pinned(); });
  torn_ = false;
  return version;
}

// The engine's other ranks. Where that cannot be, nobody keeps any.
bool EngineProcess::pin_elsewhere(const WeightsReply& reply, int64_t version) {
  const auto let_be = [&] {
    (void)group_.order({.kind = EngineMessage::kRelease, .text = {}}, [this] { receiver_->release(); });
  };
  try {
    const EngineMessage order{.kind = EngineMessage::kPin,
                              .number = version,
                              .flag = reply.engine,
                              .behind = version_now(),
                              .text = reply.link};
    if (group_.order(order)) return true;
  } catch (const Error&) {
    let_be();
    throw;
  }
  let_be();
  return false;
}

// Fetches; a transfer that breaks is asked for again, three times in all.
int64_t EngineProcess::fetch(WorkClient& client, WeightsReply reply) {
  for (int tries = 1;; ++tries) {
    faults_.begins("fetching");
    transfer_begins_ = true;
    try {
      return receive(reply);
    } catch (const Error& error) {
      if (tries == kTransferTries || stopping_ || error.kind() == ErrorKind::kUser) throw;
      log_warn("engine", std::string(error.what()) + "; asking again");
    }
    do {
      reply = client.weights({caller(), fetched(), long_poll_.count()});
      if (reply.over || stopping_) throw Error(ErrorKind::kUnavailable, "the run has ended");
      if (!reply.known) join(client);  // the thread that leases, which else does it, may be the one that fetches
    } while (reply.version < 0);
  }
}

// What becomes of keys and values with the next weights: those of none are nobody's.
KeptCache EngineProcess::kept_at_change() const {
  const std::lock_guard lock(mutex_);
  return kept_ && version_ >= 0 ? KeptCache::kKept : KeptCache::kNothing;
}

void EngineProcess::tell_weights(int64_t version, KeptCache kept) {
  group_.tell({.kind = EngineMessage::kWeights, .number = version, .flag = static_cast<int64_t>(kept), .text = {}});
}

// Behind the change, when it is known what decoding stood still for it: the actor hears of both at once.
void EngineProcess::set_version(int64_t version, double stall_s) {
  {
    const std::lock_guard lock(mutex_);
    version_ = version;
    fetched_ = std::max(fetched_, version);
    stall_s_ = stall_s;
    transfer_s_ = receiver_->last().seconds;
  }
  changed_.notify_all();
}

// What was fetched last becomes the weights, between two steps.
void EngineProcess::apply(int64_t version) {
  const KeptCache kept = kept_at_change();
  const auto change = [&](Engine& engine) {
    faults_.begins("applying");
    tell_weights(version, kept);
    receiver_->apply();
    engine.weights_changed(version, kept);
  };
  host_->between_steps(change, Deadline::after(kBetweenSteps));
  set_version(version, receiver_->stall_seconds());
}

// Where there is one copy of the weights only: they come between two steps, behind the one that the device still has.
void EngineProcess::fetch_in_place(WorkClient& client, const WeightsReply& reply) {
  const KeptCache kept = kept_at_change();
  int64_t version = 0;
  double stall_s = 0;
  const auto change = [&](Engine& engine) {
    const Stopwatch watch;
    try {
      group_.be_still();
      version = fetch(client, reply);
    } catch (const Error& error) {
      if (!receiver_->torn() && !torn_) throw;
      throw UnusableEngine(error.kind(),
                           std::string(error.what()) +
                               "; its weights are in part the ones before, so this engine generates nothing any more");
    }
    faults_.begins("applying");
    tell_weights(version, kept);
    engine.weights_changed(version, kept);
    stall_s = watch.seconds();
  };
  host_->between_steps(change, Deadline::after(kBetweenSteps));
  set_version(version, stall_s);
}

// Newer weights, beside generation where there is room for them.
void EngineProcess::follow_weights() {
  WorkClient client = this->client();
  while (!stopping_) {
    group_.give_sign_of_life();
    int64_t after = -1;
    bool first = false;
    {
      std::unique_lock lock(mutex_);
      // A second copy that is not used yet is not overwritten.
      if (!changed_.wait_for(lock, long_poll_, [&] { return stopping_ || fetched_ <= version_; })) continue;
      after = fetched_;
      first = version_ < 0;
    }
    if (stopping_) return;
    const bool in_line = receiver_->needs_stop() && !in_flight_;
    if (in_line && !first) {  // lease_work() does it, and gives no sign of life meanwhile
      (void)client.weights({caller(), after, -1});
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, long_poll_, [&] { return stopping_.load(); });
      continue;
    }
    // Once it is asked for them the actor waits no longer than a transfer may take: the engine is made before.
    if (first && receiver_->needs_stop()) host_->between_steps([](Engine&) {}, Deadline::after(kBetweenSteps));
    const WeightsReply reply = client.weights({caller(), after, long_poll_.count()});
    if (reply.over || !reply.known) std::this_thread::sleep_for(kRewardLook);  // lease_work() hears it too
    if (reply.version < 0) continue;
    if (receiver_->needs_stop()) {
      fetch_in_place(client, reply);
    } else {
      const int64_t version = fetch(client, reply);
      if (in_flight_ || first) {
        apply(version);
      } else {
        const std::lock_guard lock(mutex_);
        fetched_ = version;
      }
    }
    // The actor may wait for it, and ends this engine's wait for work, which was for what older weights may begin.
    (void)client.weights({caller(), fetched(), -1});
  }
}

void EngineProcess::begin(LeasedWork work) {
  faults_.begins("generation");
  GroupRequest request;
  request.group_id = work.group;
  request.prompt = work.prompt;
  request.samples = work.count;
  request.first_sample_id = work.first_sample_id;
  request.ends_known = false;
  request.forced_lengths = work.forced_lengths;
  {
    const std::lock_guard lock(mutex_);
    Running running;
    running.prompt = SharedTokens(work.prompt);
    running.work = std::move(work);
    // It was given up, and handed out to the same engine again: one of the two is enough.
    if (!running_.emplace(request.first_sample_id, std::move(running)).second) return;
  }
  host_->submit(std::move(request));
}

void EngineProcess::finished(GeneratedGroup group) {
  std::vector<RewardRequest> requests;
  int64_t id = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = running_.find(group.first_sample_id);
    TRIREME_CHECK(found != running_.end(), "the engine has finished a run that nobody began");
    Running running = std::move(found->second);
    running_.erase(found);
    PromptExample example;
    example.prompt_text = running.work.prompt_text;
    example.gold = running.work.gold;
    example.extra = running.work.extra;
    for (size_t i = 0; i < group.samples.size(); ++i) {
      running.samples.push_back(to_sample(running.work.group, running.work.first_sample + static_cast<int64_t>(i),
                                          running.prompt, std::move(group.samples[i])));
      const Sample& sample = running.samples.back();
      requests.push_back(reward_request(example, sample.response, sample.truncated, rank_.tokenizer()));
    }
    id = next_reward_++;
    unrewarded_.emplace(id, std::move(running));
  }
  faults_.begins("rewards");
  rewards_.submit(id, std::move(requests));
  changed_.notify_all();
}

// Samples out, with their rewards; and who ends the process.
void EngineProcess::bring_samples() {
  WorkClient client = this->client();
  const bool drawn = !config_.policy.generation.forced_lengths.empty();
  while (!stopping_) {
    host_->check();
    if (options_.stop_signal != nullptr && options_.stop_signal->load() != 0) {
      log_info("engine", "got signal " + std::to_string(options_.stop_signal->load()) + ": it hands back what it has");
      const std::lock_guard lock(mutex_);
      over_ = true;
      return;
    }
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kRewardLook, [&] { return stopping_ || !unrewarded_.empty(); });
      if (unrewarded_.empty()) continue;
    }
    ++looks_;
    const std::optional<RewardedGroup> rewarded = rewards_.wait_any(Deadline::after(kRewardLook));
    if (!rewarded) continue;
    Running running;
    {
      const std::lock_guard lock(mutex_);
      running = std::move(unrewarded_.at(rewarded->group_id));
      unrewarded_.erase(rewarded->group_id);
    }
    fill_rewards(*rewarded, running.samples.data());
    if (drawn)
      fill_drawn_rewards(static_cast<uint64_t>(config_.grpo.seed), group_size_, running.samples.data(),
                         running.samples.size());
    GroupsRequest request;
    request.caller = caller();
    request.run = running.work.run;
    request.group = running.work.group;
    request.first_sample = running.work.first_sample;
    request.counters = rewards_.counters();
    request.samples = std::move(running.samples);
    for (Sample& sample : request.samples) sample.group = 0;
    faults_.begins("bringing");
    const GroupsReply reply = client.send_groups(request);
    faults_.begins("brought");
    if (reply.result == GroupsReply::Result::kTooOld)
      log_warn("engine", "samples of group " + std::to_string(request.group) +
                             " are older than their step takes; they are generated again");
  }
}

}  // namespace

void run_engine(const Config& config, const EngineProcessOptions& options) {
  if (!generates_elsewhere(config))
    fail_user(
        "trireme engine is for a run with policy.generation.colocated.enabled=false; this one's ranks generate: set it "
        "to false, or leave --engines out");
  if (options.rendezvous.master_port == 0)
    fail_user("trireme engine needs MASTER_ADDR and MASTER_PORT, where the run's first actor has its store");
  const int64_t ranks = engine_ranks(config);
  if (options.rank < 0 || options.rank >= ranks) {
    fail_user("this process is rank " + std::to_string(options.rank) + " of its engine, which has " +
              std::to_string(ranks) + " (policy.generation.tensor_parallel_size)");
  }
  EngineRank rank(config, options);
  run_and_report(rank.group().ranks(), [&] {
    if (rank.group().leads())
      EngineProcess(rank).run();
    else
      follow_leader(rank);
  });
}

}  // namespace trireme
