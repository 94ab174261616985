#include "trainer/algorithms/dedicated.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/engine_identity.h"
#include "trainer/algorithms/engine_layout.h"
#include "trainer/algorithms/options.h"
#include "trainer/model/weight_view.h"
#include "trainer/rewards/failures.h"

namespace trireme {
namespace {

constexpr int64_t kRunSamples = 8;          // siblings that an engine takes at once: they share a prompt's prefill
constexpr Milliseconds kSilence{10000};     // without a word of an engine
constexpr Milliseconds kTransfer{60000};    // of weights, at most
constexpr Milliseconds kLookAtMain{20};     // of the other ranks
constexpr Milliseconds kFarewell{5000};     // for engines to leave
constexpr Milliseconds kValuesAtOnce{500};  // rank 0 computes, before it looks at the desk again
constexpr int64_t kMainIsDone = int64_t{1} << 40;

Milliseconds milliseconds(double seconds) { return Milliseconds(static_cast<int64_t>(seconds * 1000)); }

// 128 bits that nobody can guess.
std::string random_word() {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::random_device device;
  std::string word;
  for (int i = 0; i < 4; ++i) {
    for (uint32_t bits = device(), digit = 0; digit < 8; ++digit, bits >>= 4) word.push_back(kDigits[bits & 15]);
  }
  return word;
}

// Prompts, as they lie ahead of a broadcast's samples.
void append_tokens(std::string& bytes, const SharedTokens& tokens) {
  const auto count = static_cast<uint64_t>(tokens.size());
  bytes.append(reinterpret_cast<const char*>(&count), sizeof count);
  bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t));
}

SharedTokens take_tokens(std::string_view& bytes) {
  uint64_t count = 0;
  TRIREME_CHECK(bytes.size() >= sizeof count, "rank 0's groups are cut off");
  std::memcpy(&count, bytes.data(), sizeof count);
  bytes.remove_prefix(sizeof count);
  TRIREME_CHECK(count <= bytes.size() / sizeof(int32_t), "rank 0's groups are cut off");
  std::vector<int32_t> tokens(count);
  if (count > 0) std::memcpy(tokens.data(), bytes.data(), count * sizeof(int32_t));
  bytes.remove_prefix(count * sizeof(int32_t));
  return SharedTokens(std::move(tokens));
}

// What rank 0 took, for the other ranks.
std::string pack_step(const RolloutSource::Step& step, const DataPlace& place,
                      const std::map<std::string, double>& values) {
  nlohmann::json head = {{"prompts", place.prompts},
                         {"drawn", place.drawn},
                         {"next_sample_id", place.next_sample_id},
                         {"skipped_long", place.skipped_long},
                         {"rewards", pack_counters(step.rewards)},
                         {"values", values},
                         {"groups", nlohmann::json::array()}};
  std::string prompts;
  std::vector<Sample> samples;
  for (const LedgerGroup& group : step.groups) {
    append_tokens(prompts, group.samples.front().prompt);
    for (const Sample& sample : group.samples) {
      samples.push_back(sample);
      samples.back().group = static_cast<int64_t>(head["groups"].size());
    }
    head["groups"].push_back({group.number, group.kept});
  }
  return head.dump() + "\n" + prompts + pack_samples(samples);
}

RolloutSource::Step unpack_step(std::string_view bytes, DataPlace& place, std::map<std::string, double>& values) {
  const size_t line = bytes.find('\n');
  TRIREME_CHECK(line != std::string_view::npos, "rank 0's groups have no head");
  const nlohmann::json head = nlohmann::json::parse(bytes.substr(0, line));
  bytes.remove_prefix(line + 1);
  place.prompts = head.at("prompts");
  place.drawn = head.at("drawn").get<int64_t>();
  place.next_sample_id = head.at("next_sample_id").get<uint64_t>();
  place.skipped_long = head.at("skipped_long").get<int64_t>();
  for (const auto& [name, value] : head.at("values").items()) values[name] = value.get<double>();
  RolloutSource::Step step;
  step.rewards = sum_counters({head.at("rewards").get<std::string>()});
  std::vector<SharedTokens> prompts;
  for (const nlohmann::json& group : head.at("groups")) {
    step.groups.push_back({group.at(0).get<int64_t>(), group.at(1).get<bool>(), {}});
    prompts.push_back(take_tokens(bytes));
  }
  for (Sample& sample : unpack_samples(bytes, prompts)) {
    LedgerGroup& group = step.groups.at(static_cast<size_t>(sample.group));
    sample.group = group.number;
    group.samples.push_back(std::move(sample));
  }
  return step;
}

}  // namespace

DedicatedRollouts::DedicatedRollouts(Session& session, PromptStream& prompts, const RolloutLengths* lengths,
                                     const DedicatedOptions& options, std::function<void()> on_progress)
    : session_(session),
      prompts_(prompts, lengths, session.config.grpo, options.next_sample_id),
      on_progress_(std::move(on_progress)),
      exact_(exact_versions(session.config) && most_age(session.config) > 0),
      patience_(milliseconds(session.config.cluster.collective_timeout_s)),
      place_(prompts_.place()),
      next_step_(options.steps + 1),
      version_(std::max<int64_t>(0, options.steps - critic_only_steps(session.config))) {
  if (options.rendezvous.master_port == 0) {
    fail_user(
        "policy.generation.colocated.enabled is false, and engines could not reach this run: start it with trireme "
        "launch --engines N -- train ..., or set MASTER_ADDR and MASTER_PORT and start trireme engine beside it");
  }
  store_ = session.context.store();
  if (store_ == nullptr) {
    own_store_ = std::make_unique<JobStore>(options.rendezvous);
    store_ = own_store_.get();
  }
  WeightLinkOptions link;
  link.store_address = options.rendezvous.master_address;
  link.store_port = options.rendezvous.master_port;
  link.attempt = options.rendezvous.attempt;
  link.actor_rank = session.context.rank();
  link.actor_ranks = session.context.world_size();
  link.deadline = kTransfer;
  link.verify_weights_period = session.config.grpo.async_grpo.verify_weights_period;
  link.transport = options.transport;
  link.engine_ranks = engine_ranks(session.config);
  const Layout engine = engine_layout(session.config, session.policy->config().shape(), session.context.layout());
  parts_ = std::make_unique<WeightParts>(
      *session.policy,
      EngineLayouts{.training = session.context.layout(), .stages = stage_options(session.config), .engine = engine});
  WeightRoutes routes;
  routes.sources = [this, ranks = link.engine_ranks](int64_t receiver) {
    return parts_->sources(receiver / ranks, receiver % ranks);
  };
  routes.sent = [this, own = link.actor_rank, ranks = link.engine_ranks](int64_t receiver) {
    return parts_->sent(own, receiver / ranks, receiver % ranks);
  };
  sender_ = std::make_unique<WeightSender>(link, weight_view(*session.policy), std::move(routes));
  before_update_ = std::move(session.optimizer->before_update);
  session.optimizer->before_update = [this] {
    retract();
    if (before_update_) before_update_();
  };
  if (ShardedUnits* units = session.policy->units()) {
    before_release_ = units->before_release;
    units->before_release = session.optimizer->before_update;
  }
  if (is_main()) {
    make_desk(options, lengths);
    make_server(options);
  }
  publish();
}

DedicatedRollouts::~DedicatedRollouts() {
  session_.optimizer->before_update = std::move(before_update_);
  if (ShardedUnits* units = session_.policy->units()) units->before_release = std::move(before_release_);
  server_.reset();  // it asks the sender
}

void DedicatedRollouts::make_desk(const DedicatedOptions& options, const RolloutLengths* lengths) {
  const Config& config = session_.config;
  DeskOptions desk;
  desk.ledger = run_ledger(config);
  desk.ledger.run_samples = std::min(kRunSamples, config.grpo.num_generations_per_prompt);
  desk.first_step = next_step_;
  desk.first_group = prompts_.first_group();
  desk.first_sample_id = options.next_sample_id;
  desk.in_flight = !exact_versions(config);
  desk.lease = milliseconds(config.grpo.async_grpo.lease_timeout_s);
  desk.silence = std::min(kSilence, desk.lease);
  desk.max_lost = config.grpo.async_grpo.max_generation_failures;
  desk.vocabulary = session_.policy->config().vocab_size;
  desk.rewards = options.rewards;
  desk.name = "desk-" + random_word().substr(0, 12);
  desk.section = config.algorithm;
  desk.prompt = [this](int64_t group, bool needed) -> std::optional<WorkPrompt> {
    // The next step is made whole if it is to come at all.
    std::optional<CarriedPrompt> given = prompts_.next(group, needed && prompts_.has_rows());
    if (!given) return std::nullopt;
    return WorkPrompt{std::move(given->example), std::move(given->forced_lengths)};
  };
  desk.refuses = [config = config,
                  actor = identity_of(config, session_.policy->config(), session_.model_dir, options.hf_home)](
                     const JoinRequest& engine) { return difference_of_engine(actor, config, engine); };
  desk_ = std::make_unique<SharedDesk>(std::move(desk),
                                       [this, ranks = engine_ranks(config)](int64_t engine, const std::string& link) {
                                         for (int64_t rank = 0; rank < ranks; ++rank)
                                           sender_->serve(engine * ranks + rank, link_of_rank(link, rank));
                                       });
}

void DedicatedRollouts::make_server(const DedicatedOptions& options) {
  const Config& config = session_.config;
  WorkServerOptions server;
  server.port = options.work_port;
  server.ticket = random_word();
  // A run's samples: for each token its id, its log-prob and at worst a version of its own.
  server.max_body_bytes = static_cast<size_t>(
      (1 << 23) +
      kRunSamples * (4096 + config.policy.max_total_sequence_length *
                                static_cast<int64_t>(sizeof(int32_t) + sizeof(float) + sizeof(VersionSpan))));
  server_ = std::make_unique<WorkServer>(server, *desk_);
  store_->set(kWorkPortKey, std::to_string(server_->port()));
  store_->set(kRewardProbeKey, to_body(options.probe));
  store_->set(kActorLayoutKey, to_string(session_.context.layout()));
  store_->set(kWorkTicketKey, server.ticket);
  log_info("engines", "generation processes get their work at port " + std::to_string(server_->port()));
}

void DedicatedRollouts::publish() {
  if (ShardedUnits* units = session_.policy->units()) units->gather();  // they are, behind training
  if (!published_) sender_->publish(version_);
  published_ = true;
  if (is_main()) desk_->with([](Desk& desk) { desk.publish(); });
}

// Before the weights are written, or, where ranks share them, are whole no more.
void DedicatedRollouts::retract() {
  if (!published_) return;
  const PhaseTimer::Scope refit = session_.timer.enter(Phase::kRefit);
  const Stopwatch watch;
  if (exact_) {
    // Where the groups of this step came from a checkpoint none may be there yet, and those behind want these weights.
    const bool last = next_step_ > session_.config.grpo.max_num_steps;
    wait_for_main([last](Desk& desk) { return desk.behind().empty() && (last || desk.engines() > 0); },
                  std::min(patience_, 2 * kTransfer),
                  [this] { desk_->with([](Desk& desk) { desk.give_up_behind(); }); });
  }
  if (is_main()) desk_->with([](Desk& desk) { desk.retract(); });  // who comes now waits for the next ones
  sender_->retract();
  published_ = false;
  waited_for_weights_ += watch.seconds();
}

// Returns on all ranks when `done` holds on rank 0. With nothing coming for `patience` rank 0 calls `too_long`, which
// throws, or lets things go on. A collective would run into its own deadline: the others look at a counter that rises
// while rank 0 waits, and lose patience when it does not.
void DedicatedRollouts::wait_for_main(const std::function<bool(Desk&)>& done, Milliseconds patience,
                                      const std::function<void()>& too_long, const std::function<void()>& meanwhile) {
  const std::string key = "dedicated-wait-" + std::to_string(next_step_) + "-" + std::to_string(waits_++);
  const bool several = session_.context.world_size() > 1;
  if (is_main()) {
    const auto on_wait = [&] {
      if (on_progress_) on_progress_();
      desk_->with([this](Desk& desk) { session_.reporting.engines(desk.engines(), desk.lost_engines()); });
      if (several) store_->add(key, 1);
      if (meanwhile) meanwhile();
    };
    if (!desk_->wait(done, patience, on_wait)) too_long();
    if (several) store_->add(key, kMainIsDone);
    return;
  }
  int64_t seen = -1;
  Deadline deadline = Deadline::after(patience_);
  while (true) {
    const int64_t now = store_->add(key, 0);
    if (now >= kMainIsDone) return;
    if (now != seen) deadline = Deadline::after(patience_);
    seen = now;
    if (const auto failure = session_.context.failure_of_another())
      throw Error(ErrorKind::kUnavailable, session_.context.name() + " waits for groups: " + *failure);
    if (deadline.passed())
      fail_timeout("rank 0 does not say any more whether groups have come (cluster.collective_timeout_s)");
    if (on_progress_) on_progress_();
    std::this_thread::sleep_for(kLookAtMain);
  }
}

// Some samples of a group that are there of a step that is not complete, and that on_samples has not had.
std::vector<Sample> DedicatedRollouts::next_to_tell() {
  return desk_->with([this](const Desk& desk) {
    std::vector<Sample> next;
    if (desk.ledger().complete()) return next;  // the rest with the step
    desk.ledger().visit_ready([&](const Sample* samples, size_t count) {
      if (!next.empty()) return;
      for (size_t i = 0; i < count; ++i) {
        if (told_.insert({samples[i].group, samples[i].index}).second) next.push_back(samples[i]);
      }
    });
    return next;
  });
}

// On rank 0, while it waits for the rest of a step: what has come of it, to the critic. However much that is, soon it
// looks again whether the step has come, and tells the ranks that wait for it that it goes on.
void DedicatedRollouts::value_ready() {
  if (!on_samples) return;
  for (const Deadline limit = Deadline::after(kValuesAtOnce); !limit.passed();) {
    std::vector<Sample> samples = next_to_tell();
    if (samples.empty()) return;
    on_samples(samples);
    for (Sample& sample : samples) {
      if (!sample.values.empty()) values_[{sample.group, sample.index}] = std::move(sample.values);
    }
  }
}

// On rank 0. The deadline is no echo of another rank's failure: they are told what it is.
void DedicatedRollouts::fail_without_groups() {
  const std::string what = "after cluster.collective_timeout_s " + desk_->with([](Desk& desk) {
    return desk.describe_wait() + (desk.engines() == 0 ? ": start trireme engine, or trireme launch --engines N" : "");
  });
  session_.context.report_failure(session_.context.name() + ": " + what);
  fail_timeout(what);
}

RolloutSource::Step DedicatedRollouts::collect(RankShares&, std::map<std::string, double>& values) {
  session_.context.set_phase("generation");
  const PhaseTimer::Scope idle = session_.timer.enter(Phase::kIdle);
  const Stopwatch watch;
  if (is_main()) desk_->with([](Desk& desk) { desk.open(); });
  wait_for_main([](Desk& desk) { return desk.complete(); }, patience_, [this] { fail_without_groups(); },
                [this] { value_ready(); });
  const double waited = watch.seconds();
  Step step;
  std::string bytes;
  session_.context.set_phase("rollout exchange");
  Communicator& world = session_.context.world();
  const double transfer_s = world.all_reduce_max(sender_->take_transfer_seconds());
  const double stall_s = world.all_reduce_max(sender_->take_stall_seconds());
  if (is_main()) {
    step = take(values);
    for (const auto& [name, seconds] : {std::pair{"transfer", transfer_s}, std::pair{"stall", stall_s}}) {
      double& told = values[std::string("performance/weight_") + name + "_seconds"];  // by engines
      told = std::max(told, seconds);
    }
    if (world.size() > 1) bytes = pack_step(step, place_, values);
  }
  if (world.size() > 1) {
    bytes = world.broadcast_bytes(bytes, 0);
    if (!is_main()) step = unpack_step(bytes, place_, values);
  }
  ++next_step_;
  waits_ = 0;
  values["timing/train/exposed_generation"] = waited;
  values["timing/train/weight_sync"] = std::exchange(waited_for_weights_, 0);
  return step;
}

RolloutSource::Step DedicatedRollouts::take(std::map<std::string, double>& values) {
  Step step;
  desk_->with([&](Desk& desk) {
    Desk::Step taken = desk.take(next_step_);
    step.groups = std::move(taken.groups);
    step.rewards = std::move(taken.rewards);
    for (LedgerGroup& group : step.groups) {
      for (Sample& sample : group.samples) {
        const auto found = values_.find({sample.group, sample.index});
        if (found != values_.end()) sample.values = std::move(found->second);
      }
    }
    values_.clear();
    told_.clear();
    prompts_.collected(step.groups.back().number);
    place_ = prompts_.place();
    const Ledger::Counts counts = desk.ledger().counts();
    values["train/recomputed_rows"] = static_cast<double>(taken.recomputed_rows);
    if (most_age(session_.config) > 0) {
      values["performance/ledger_groups_leased"] = static_cast<double>(counts.leased);
      values["performance/ledger_groups_complete"] = static_cast<double>(counts.complete);
    }
    session_.reporting.engines(desk.engines(), desk.lost_engines());
    values["performance/engines_live"] = static_cast<double>(desk.engines());
    values["performance/engines_lost"] = static_cast<double>(desk.lost_engines());
    values["performance/weight_transfer_seconds"] = taken.transfer_s;
    values["performance/weight_stall_seconds"] = taken.stall_s;
  });
  return step;
}

void DedicatedRollouts::trained(int64_t step) {
  session_.optimizer->finish_gather();  // whole, before others read them
  version_ = std::max<int64_t>(0, step - critic_only_steps(session_.config));
  if (is_main()) desk_->with([&](Desk& desk) { desk.trained(step); });
  publish();
}

void DedicatedRollouts::prepare_save() {
  if (!exact_ || !session_.config.checkpointing.enabled) return;
  const PhaseTimer::Scope idle = session_.timer.enter(Phase::kIdle);
  session_.context.set_phase("checkpoint");
  wait_for_main([](Desk& desk) { return desk.ledger().wanting_older().empty(); }, patience_,
                [this] {
                  log_warn("engines",
                           "the checkpoint lacks groups that older weights were to generate, which did not come within "
                           "cluster.collective_timeout_s: a run that is resumed from it gives them newer weights");
                });
}

void DedicatedRollouts::finish() {
  if (!is_main()) return;
  desk_->with([](Desk& desk) { desk.end(); });
  desk_->wait([](Desk& desk) { return desk.engines() == 0; }, kFarewell, on_progress_);
}

SavedGroups DedicatedRollouts::saved() const {
  return desk_->with(
      [](Desk& desk) { return save_ledger(desk.ledger(), [&](int64_t group) { return desk.prompt(group); }); });
}

int64_t DedicatedRollouts::restore(const SavedGroups& saved) {
  if (!is_main()) return 0;
  return desk_->with([&](Desk& desk) {
    return restore_ledger(
        saved, desk.ledger().first_group(), [&](int64_t group) { return desk.prompt(group); },
        [&](std::vector<LedgerGroup> groups) { return desk.restore(std::move(groups)); });
  });
}

}  // namespace trireme
