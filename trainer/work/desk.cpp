#include "trainer/work/desk.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/text.h"
#include "trainer/rewards/failures.h"

namespace trireme {
namespace {

constexpr int64_t kMostRuns = 512;    // of one answer
constexpr size_t kMostDeparted = 64;  // sessions whose counters are remembered
constexpr int64_t kNoEngine = -1;

std::string few(const std::vector<int64_t>& groups) {
  constexpr size_t kNamed = 5;
  std::vector<std::string> numbers;
  for (size_t i = 0; i < std::min(groups.size(), kNamed); ++i) numbers.push_back(std::to_string(groups[i]));
  return join(numbers, ", ") + (groups.size() > kNamed ? " and others" : "");
}

}  // namespace

Desk::Desk(DeskOptions options)
    : options_(std::move(options)),
      ledger_(options_.ledger, options_.first_step, options_.first_group),
      next_prompt_(options_.first_group) {}

uint64_t Desk::sample_id(int64_t group) const {
  return options_.first_sample_id +
         static_cast<uint64_t>((group - options_.first_group) * options_.ledger.samples_per_group);
}

std::string Desk::name_of(int64_t engine) const {
  const auto found = names_.find(engine);
  return found == names_.end() ? "engine " + std::to_string(engine) : found->second;
}

void Desk::check_desk(const Caller& caller) const {
  if (caller.desk != options_.name)
    throw Error(ErrorKind::kConflict, "the actor that this engine joined has gone; another one is here now");
}

std::string Desk::key_of(const std::string& name) const {
  return options_.section + ".async_" + options_.section + "." + name;
}

Desk::Engine* Desk::find(const Caller& caller) {
  const auto found = engines_.find(caller.engine);
  return found == engines_.end() || found->second.session != caller.session ? nullptr : &found->second;
}

Desk::Engine* Desk::heard(const Caller& caller, Time now) {
  check_desk(caller);
  Engine* engine = find(caller);
  if (engine != nullptr) engine->heard = std::max(engine->heard, now);
  return engine;
}

JoinReply Desk::join(const JoinRequest& request, Time now) {
  if (options_.refuses) {
    if (const auto why = options_.refuses(request)) {
      news_.push_back("engine " + request.name + " was refused: " + *why);
      fail_user("engine " + request.name + " " + *why);
    }
  }
  const auto known = numbers_.find(request.name);
  int64_t number = known != numbers_.end() ? known->second : kNoEngine;
  if (number != kNoEngine && engines_.count(number) > 0 && engines_.at(number).session != request.session)
    lose(number, "another process has its name now");
  // The smallest that nobody has: which actor ranks send it weights follows from it.
  for (int64_t i = 0; number == kNoEngine; ++i) {
    if (engines_.count(i) == 0) number = i;
  }
  numbers_[request.name] = number;
  names_[number] = request.name;
  for (auto other = numbers_.begin(); other != numbers_.end();) {  // who had the number is gone
    other = other->second == number && other->first != request.name ? numbers_.erase(other) : std::next(other);
  }
  Engine engine;
  if (const auto there = engines_.find(number); there != engines_.end()) engine = std::move(there->second);
  if (const auto before = departed_.find(request.session); before != departed_.end()) {
    engine = std::move(before->second);
    departed_.erase(before);
    engine.link.clear();  // its number may be another one, and so those that send to it
  }
  if (engine.link.empty()) engine.link = options_.name + "-" + std::to_string(links_++);
  engine.name = request.name;
  engine.session = request.session;
  engine.places = request.places;
  engine.version = engine.fetched = -1;  // it says so with its next lease
  engine.heard = engine.moved = now;
  engines_[number] = std::move(engine);
  ++progress_;
  news_.push_back("engine " + request.name + " has joined as number " + std::to_string(number) + ": " +
                  std::to_string(engines()) + " are there");
  return {number, options_.name, options_.ledger.samples_per_group, options_.in_flight, options_.silence.count()};
}

// What it has goes back. It may come again.
void Desk::lose(int64_t number, const std::string& why) {
  const auto found = engines_.find(number);
  if (found == engines_.end()) return;
  const int64_t samples = ledger_.lost(number);
  std::string said = "engine " + found->second.name + " is gone: " + why;
  if (samples > 0) said += "; others generate its " + std::to_string(samples) + " samples";
  news_.push_back(said);
  departed_[found->second.session] = std::move(found->second);
  if (departed_.size() > kMostDeparted) departed_.erase(departed_.begin());
  engines_.erase(found);
  ++lost_engines_;
  if (samples > 0) ++lost_in_row_;
  if (options_.max_lost > 0 && lost_in_row_ >= options_.max_lost && !failure_) {
    failure_.emplace(ErrorKind::kUnavailable,
                     std::to_string(lost_in_row_) +
                         " engines in a row were lost with samples in hand and no group came in between "
                         "(" +
                         key_of("max_generation_failures") + "); the last: " + said);
  }
  forget_versions();
}

// Weights older than those of any engine that is there can be had no more: the actor has the newest ones only.
void Desk::forget_versions() {
  int64_t oldest = ledger_.newest_version();
  for (const auto& [number, engine] : engines_) {
    // The first weights that it has fetched it will generate with, though its next request has yet to say so.
    const int64_t has = engine.version >= 0 ? engine.version : engine.fetched;
    if (has >= 0) oldest = std::min(oldest, has);
  }
  const std::vector<int64_t> groups = ledger_.gone_before(oldest);
  if (groups.empty()) return;
  news_.push_back("groups " + few(groups) + " get newer weights than those of version " + std::to_string(oldest - 1) +
                  " or older, which no engine has any more: from here on the run is not the one that it would be "
                  "without this loss");
}

bool Desk::expire(Time now) {
  std::vector<std::pair<int64_t, std::string>> gone;
  const std::map<int64_t, int64_t> held = ledger_.held();
  for (const auto& [number, engine] : engines_) {
    const auto seconds = [](Milliseconds time) { return format_double(static_cast<double>(time.count()) / 1000); };
    if (now - engine.heard > options_.silence)
      gone.emplace_back(number, "nothing was heard of it for " + seconds(options_.silence) + " s");
    else if (held.count(number) > 0 && now - engine.moved > options_.lease)
      gone.emplace_back(number, "it took no step for " + seconds(options_.lease) + " s (" + key_of("lease_timeout_s") +
                                    ") with samples in hand");
  }
  for (const auto& [number, why] : gone) lose(number, why);
  return !gone.empty();
}

bool Desk::ask(int64_t group, bool needed) {
  while (next_prompt_ <= group) {
    std::optional<WorkPrompt> given = options_.prompt(next_prompt_, needed);
    if (!given) return false;
    Prompt prompt{std::move(*given), SharedTokens()};
    prompt.tokens = SharedTokens(prompt.work.example.prompt);
    prompts_.emplace(next_prompt_++, std::move(prompt));
  }
  return true;
}

const SharedTokens* Desk::prompt(int64_t group) {
  if (!ask(group, /*needed=*/false)) return nullptr;
  return &prompts_.at(group).tokens;
}

// Of every group that weights of `version` may begin; where the data ends none does from there on.
void Desk::ask_for_prompts(int64_t version) {
  ledger_.end_at(std::numeric_limits<int64_t>::max());
  for (const MissingGroup& missing : ledger_.missing()) {
    if (ask(missing.number, /*needed=*/true)) continue;
    ledger_.end_at(next_prompt_);
    return;
  }
  for (const SampleSpan& span : ledger_.leasable_runs(std::numeric_limits<int64_t>::max(), version)) {
    if (ask(span.group, /*needed=*/false)) continue;
    ledger_.end_at(next_prompt_);
    return;
  }
}

// Of its free places, how many it may fill.
int64_t Desk::share_of(int64_t number, int64_t places, int64_t version) const {
  int64_t total = ledger_.leasable(version), own = 0;
  for (const auto& [engine, samples] : ledger_.held()) {
    total += samples;
    if (engine == number) own = samples;
  }
  const int64_t share = (total + engines() - 1) / std::max<int64_t>(1, engines());
  return std::min(places, share - own);
}

LeasedWork Desk::work_of_run(const LeasedRun& run) const {
  const Prompt& prompt = prompts_.at(run.span.group);
  LeasedWork work;
  work.run = run.id;
  work.group = run.span.group;
  work.first_sample = run.span.first_sample;
  work.count = run.span.count;
  work.first_sample_id = sample_id(run.span.group) + static_cast<uint64_t>(run.span.first_sample);
  work.prompt = *prompt.tokens;
  work.prompt_text = prompt.work.example.prompt_text;
  work.gold = prompt.work.example.gold;
  work.extra = prompt.work.example.extra;
  const std::vector<int64_t>& forced = prompt.work.forced_lengths;
  if (!forced.empty())
    work.forced_lengths.assign(forced.begin() + run.span.first_sample,
                               forced.begin() + run.span.first_sample + run.span.count);
  return work;
}

LeaseReply Desk::lease(const LeaseRequest& request, Time now) {
  LeaseReply reply;
  Engine* engine = heard(request.caller, now);
  reply.over = over_;
  reply.known = engine != nullptr;
  if (engine == nullptr || over_) return reply;
  if (request.fetched > ledger_.newest_version() || request.version < engine->version)
    fail_data("engine " + engine->name + " has weights of version " + std::to_string(request.version) + " and " +
              std::to_string(request.fetched) + ", the newest are " + std::to_string(ledger_.newest_version()));
  const bool changed = request.version != engine->version;
  engine->version = request.version;
  engine->fetched = std::max(engine->fetched, request.fetched);
  if (request.steps != engine->steps) engine->moved = std::max(engine->moved, now);
  engine->steps = request.steps;
  recomputed_rows_ += std::max<int64_t>(0, request.recomputed_rows - engine->recomputed_rows);
  engine->recomputed_rows = request.recomputed_rows;
  if (changed) {
    transfer_s_ = std::max(transfer_s_, request.transfer_s);
    stall_s_ = std::max(stall_s_, request.stall_s);
    forget_versions();
  }
  if (!open_ || request.version < 0 || request.places == 0) return reply;
  ask_for_prompts(request.version);
  const int64_t number = request.caller.engine;
  int64_t places = share_of(number, request.places, request.version);
  const bool empty_handed = ledger_.held().count(number) == 0;
  while (places > 0 && static_cast<int64_t>(reply.runs.size()) < kMostRuns) {
    const std::vector<LeasedRun> runs = ledger_.lease(number, 1, request.version);
    if (runs.empty()) break;
    places -= runs.front().span.count;
    reply.runs.push_back(work_of_run(runs.front()));
  }
  if (empty_handed && !reply.runs.empty()) engine->moved = now;
  reply.left = ledger_.leasable(request.version) > 0;
  return reply;
}

bool Desk::answers_now(const LeaseRequest& request, const LeaseReply& reply) const {
  const auto found = engines_.find(request.caller.engine);
  return over_ || found == engines_.end() || found->second.session != request.caller.session ||
         found->second.fetched > request.fetched || (request.may_change && !reply.left);
}

void Desk::check_samples(const GroupsRequest& request) const {
  const std::string who =
      "engine " + name_of(request.caller.engine) + ": samples of group " + std::to_string(request.group);
  for (const Sample& sample : request.samples) {
    for (const int32_t token : sample.response) {
      if (token < 0 || token >= options_.vocabulary) fail_data(who + " have a token that is none of the vocabulary");
    }
    if (static_cast<int64_t>(sample.reward_parts.size()) != options_.rewards)
      fail_data(who + " have " + std::to_string(sample.reward_parts.size()) + " rewards instead of " +
                std::to_string(options_.rewards));
    for (size_t t = 0; t < sample.generation_logprobs.size(); ++t) {
      if (!std::isfinite(sample.generation_logprobs[t]))
        fail_data(who + ": the log-prob of token " + std::to_string(t) + " of sample " + std::to_string(sample.index) +
                  " is not finite");
    }
  }
}

// Since an engine says how its counters stand, what comes twice counts once.
void Desk::count(const Caller& caller, std::vector<RewardCounters> counters) {
  Engine* engine = find(caller);
  if (engine == nullptr) {
    const auto before = departed_.find(caller.session);
    if (before == departed_.end()) return;
    engine = &before->second;
  }
  if (counters.empty() || (!engine->counters.empty() && engine->counters.size() != counters.size())) return;
  if (engine->counters.empty()) {
    engine->counters = counters;
    for (RewardCounters& one : engine->counters) one = {one.name};
  }
  std::vector<RewardCounters> fresh = counted_since(counters, engine->counters);
  if (std::any_of(fresh.begin(), fresh.end(), [](const RewardCounters& one) { return one.scored < 0; })) return;
  for (RewardCounters& one : fresh) {
    if (!one.last_error.empty()) one.last_error = name_of(caller.engine) + ": " + one.last_error;
  }
  if (rewards_.empty() || rewards_.size() == fresh.size()) add_counters(rewards_, fresh);
  engine->counters = std::move(counters);
}

GroupsReply Desk::take_groups(GroupsRequest request, Time now) {
  heard(request.caller, now);
  for (size_t i = 0; i < request.samples.size(); ++i) {
    Sample& sample = request.samples[i];
    if (sample.index != request.first_sample + static_cast<int64_t>(i)) fail_data("samples of a run are not in order");
    sample.group = request.group;
  }
  GroupsReply reply;
  const auto prompt = prompts_.find(request.group);
  if (prompt == prompts_.end()) {  // its step is trained
    count(request.caller, std::move(request.counters));
    return reply;
  }
  for (Sample& sample : request.samples) sample.prompt = prompt->second.tokens;
  check_samples(request);
  const auto samples = static_cast<int64_t>(request.samples.size());
  switch (ledger_.complete(request.run, std::move(request.samples))) {
    case Completion::kForeign:
      fail_data("engine " + name_of(request.caller.engine) + " brought samples of group " +
                std::to_string(request.group) + " that are not those of run " + std::to_string(request.run));
    case Completion::kTooOld:
      reply.result = GroupsReply::Result::kTooOld;
      return reply;
    case Completion::kTaken:
      samples_[request.caller.engine] += samples;
      lost_in_row_ = 0;
      ++progress_;
      break;
    case Completion::kKnown:
      break;
  }
  count(request.caller, std::move(request.counters));
  return reply;
}

WeightsReply Desk::weights(const WeightsRequest& request, Time now) {
  WeightsReply reply;
  Engine* engine = heard(request.caller, now);
  reply.known = engine != nullptr;
  reply.over = over_;
  if (engine == nullptr || over_) return reply;
  if (request.after > engine->fetched && request.after <= ledger_.newest_version()) {
    engine->fetched = request.after;
    ++progress_;
  }
  if (request.wait_ms < 0 || !published_ || ledger_.newest_version() <= request.after) return reply;
  reply.version = ledger_.newest_version();
  reply.engine = request.caller.engine;
  reply.link = engine->link;
  return reply;
}

void Desk::leave(const LeaveRequest& request, Time now) {
  if (heard(request.caller, now) == nullptr) return;
  const std::string name = name_of(request.caller.engine);
  if (request.fatal && !failure_ && !over_)
    failure_.emplace(static_cast<ErrorKind>(request.kind), "engine " + name + ": " + request.why);
  lose(request.caller.engine, request.why.empty() ? "it has left" : "it has left: " + request.why);
}

void Desk::trained(int64_t step) {
  ledger_.trained(step);
  published_ = false;
}

void Desk::publish() {
  published_ = true;
  forget_versions();
}

bool Desk::complete() const {
  if (failure_) throw *failure_;
  if (const auto spent = ledger_.exhausted()) {
    fail_data("dynamic sampling: of the " + std::to_string(spent->used_up) + " groups that step " +
              std::to_string(ledger_.next_step()) + " may use up only " + std::to_string(spent->kept) + " of " +
              std::to_string(options_.ledger.groups_per_step) + " have rewards that differ; raise " + options_.section +
              ".dynamic_sampling_max_gen_batches or choose other data");
  }
  return ledger_.complete();
}

Desk::Step Desk::take(int64_t step) {
  Step taken;
  taken.groups = ledger_.take(step);
  taken.rewards = std::exchange(rewards_, {});
  for (RewardCounters& one : taken.rewards) rewards_.push_back({one.name});
  taken.transfer_s = std::exchange(transfer_s_, 0);
  taken.stall_s = std::exchange(stall_s_, 0);
  taken.recomputed_rows = std::exchange(recomputed_rows_, 0);
  taken.samples = std::exchange(samples_, {});
  prompts_.erase(prompts_.begin(), prompts_.lower_bound(ledger_.first_group()));
  return taken;
}

std::vector<std::string> Desk::behind() const {
  std::vector<std::string> names;
  for (const auto& [number, engine] : engines_) {
    if (engine.fetched < ledger_.newest_version()) names.push_back(engine.name);
  }
  return names;
}

void Desk::give_up_behind() {
  std::vector<int64_t> numbers;
  for (const auto& [number, engine] : engines_) {
    if (engine.fetched < ledger_.newest_version()) numbers.push_back(number);
  }
  for (const int64_t number : numbers) lose(number, "it did not fetch the newest weights in time");
}

std::string Desk::describe_wait() const {
  std::string missing = trireme::describe(ledger_.missing(), "engine");
  for (auto name = names_.rbegin(); name != names_.rend(); ++name)  // 12 before 1
    missing = replace_all(missing, "engine " + std::to_string(name->first) + " has", name->second + " has");
  return "step " + std::to_string(ledger_.next_step()) + " waits for " + missing + "; " +
         (engines_.empty()
              ? "no engine is there"
              : std::to_string(engines_.size()) + (engines_.size() == 1 ? " engine is" : " engines are") + " there");
}

std::vector<std::string> Desk::take_news() { return std::exchange(news_, {}); }

}  // namespace trireme
