#include "trainer/algorithms/carry_over.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <set>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"

namespace trireme {
namespace {

constexpr int64_t kSiblings = 8;        // of a run where replicas share a group: they share a prompt's prefill
constexpr Milliseconds kPoll{2};        // between two looks at the counter
constexpr int64_t kMostTickets = 4096;  // of a round; what is left comes in the next one

// What a replica wants ahead of an engine step, the strongest wish last.
constexpr int64_t kNothing = 0, kToStep = 1, kToStop = 2;

LedgerOptions of_replicas(LedgerOptions options, int64_t replicas) {
  options.run_samples = replicas == 1 ? 0 : std::min(options.samples_per_group, kSiblings);
  return options;
}

template <typename T>
void append(std::string& bytes, const std::vector<T>& values) {
  const auto count = static_cast<uint64_t>(values.size());
  bytes.append(reinterpret_cast<const char*>(&count), sizeof count);
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// What append() wrote at the front, which is taken off.
template <typename T>
std::vector<T> take(std::string_view& bytes) {
  uint64_t count = 0;
  TRIREME_CHECK(bytes.size() >= sizeof count, "an exchange of samples is cut off");
  std::memcpy(&count, bytes.data(), sizeof count);
  bytes.remove_prefix(sizeof count);
  TRIREME_CHECK(count <= bytes.size() / sizeof(T), "an exchange of samples is cut off");
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), bytes.data(), count * sizeof(T));
  bytes.remove_prefix(count * sizeof(T));
  return values;
}

}  // namespace

int64_t sum_of_replicas(ParallelContext& context, int64_t of_replica) {
  return context.world().all_reduce_sum(context.generation().leads() ? of_replica : 0);
}

struct CarryOver::Round {
  std::string taken_key, done_key;
  int64_t wanted = 0;            // samples that the step misses
  std::set<int64_t> groups;      // they are of these
  std::set<Place> counted;       // runs of this replica that are in the count of what has come
  std::vector<SampleSpan> rest;  // that was not dealt: ticket t is the run rest[t]
  // Of a leader.
  std::vector<int64_t> tickets;  // that it took
  bool rest_taken = false;       // by somebody
  int64_t done = 0;              // as last seen
  SteadyClock::time_point looked{};
  Deadline patience = Deadline::after(Milliseconds(0));
  double idle_seconds = 0;
};

// What the ranks of a replica do next.
struct CarryOver::Turn {
  bool over = false;             // the step is complete
  bool steps = false;            // the engine, or one that it steps together with, has work
  std::vector<int64_t> tickets;  // to begin
};

CarryOver::CarryOver(Engine& engine, const Tokenizer* tokenizer, RewardPool* rewards, ParallelContext& context,
                     PhaseTimer& timer, CarryOverOptions options)
    : engine_(engine),
      tokenizer_(tokenizer),
      rewards_(rewards),
      context_(context),
      timer_(timer),
      options_(std::move(options)),
      replicas_(context.generation().replicas),
      replica_(context.generation().number),
      leads_(context.generation().leads()),
      ledger_(of_replicas(options_.ledger, replicas_), options_.first_step, options_.first_group),
      next_prompt_(options_.first_group) {
  TRIREME_CHECK((rewards != nullptr && tokenizer != nullptr) || options_.drawn_rewards, "samples without rewards");
}

uint64_t CarryOver::sample_id(int64_t group) const {
  return options_.first_sample_id +
         static_cast<uint64_t>((group - options_.first_group) * options_.ledger.samples_per_group);
}

int64_t CarryOver::add(const std::string& key, int64_t amount) {
  if (context_.store() != nullptr) return context_.store()->add(key, amount);
  return counters_[key] += amount;
}

bool CarryOver::ask(int64_t group, bool needed) {
  while (next_prompt_ <= group) {
    std::optional<CarriedPrompt> given = options_.prompt(next_prompt_, needed);
    if (!given) return false;
    Prompt prompt{std::move(given->example), SharedTokens(), std::move(given->forced_lengths)};
    prompt.tokens = SharedTokens(prompt.example.prompt);
    prompts_.emplace(next_prompt_++, std::move(prompt));
  }
  return true;
}

// Of every group that may begin; where the data ends none does from there on. The same on all ranks.
void CarryOver::ask_for_prompts() {
  ledger_.end_at(std::numeric_limits<int64_t>::max());
  for (const MissingGroup& missing : ledger_.missing())
    TRIREME_CHECK(ask(missing.number, /*needed=*/true), "the next step's prompt was not given");
  for (const SampleSpan& span : ledger_.leasable_runs(std::numeric_limits<int64_t>::max())) {
    if (ask(span.group, /*needed=*/false)) continue;
    ledger_.end_at(next_prompt_);
    return;
  }
}

void CarryOver::begin(const SampleSpan& span) {
  const Prompt& prompt = prompts_.at(span.group);
  GroupRequest request;
  request.group_id = span.group;
  request.prompt = *prompt.tokens;
  request.samples = span.count;
  request.first_sample_id = sample_id(span.group) + static_cast<uint64_t>(span.first_sample);
  request.ends_known = options_.ends_known;
  request.sampling = options_.sampling;
  const std::vector<int64_t>& forced = prompt.forced_lengths;
  if (!forced.empty())
    request.forced_lengths.assign(forced.begin() + span.first_sample, forced.begin() + span.first_sample + span.count);
  TRIREME_CHECK(running_.emplace(request.first_sample_id, span).second, "a run was begun twice");
  engine_.submit(std::move(request));
}

void CarryOver::finished(std::vector<GeneratedGroup> groups) {
  for (GeneratedGroup& group : groups) {
    const auto found = running_.find(group.first_sample_id);
    TRIREME_CHECK(found != running_.end(), "the engine has finished a run that nobody began");
    const SampleSpan span = found->second;
    running_.erase(found);
    if (!leads_) continue;
    const Prompt& prompt = prompts_.at(span.group);
    std::vector<Sample> samples;
    std::vector<RewardRequest> requests;
    for (size_t i = 0; i < group.samples.size(); ++i) {
      samples.push_back(to_sample(span.group, span.first_sample + static_cast<int64_t>(i), prompt.tokens,
                                  std::move(group.samples[i])));
      if (rewards_ != nullptr)
        requests.push_back(
            reward_request(prompt.example, samples.back().response, samples.back().truncated, *tokenizer_));
    }
    if (on_samples && told_.count(span.group) > 0) on_samples(samples);
    if (rewards_ == nullptr) {
      fill_drawn_rewards(*options_.drawn_rewards, options_.ledger.samples_per_group, samples.data(), samples.size());
      rewarded_.emplace_back(span, std::move(samples));
      continue;
    }
    unrewarded_.emplace(next_reward_, std::pair(span, std::move(samples)));
    rewards_->submit(next_reward_++, std::move(requests));
  }
}

// What is there of the step, of groups that were not known to be its before; what is generated from now on, finished()
// tells.
void CarryOver::tell_ready(const std::set<int64_t>& missing) {
  if (!on_samples) return;
  std::set<int64_t> fresh = missing;
  ledger_.visit_ready([&](const Sample* samples, size_t) { fresh.insert(samples->group); });
  std::erase_if(fresh, [&](int64_t group) { return told_.count(group) > 0; });
  const auto tell = [&](const Sample* samples, size_t count) {
    if (count == 0 || fresh.count(samples->group) == 0) return;
    std::vector<Sample> copies(samples, samples + count);
    on_samples(copies);
  };
  if (leads_ && replica_ == 0) ledger_.visit_ready(tell);  // which all ranks have
  for (const auto& [span, samples] : rewarded_) tell(samples.data(), samples.size());
  for (const auto& [id, run] : unrewarded_) tell(run.second.data(), run.second.size());
  told_.merge(fresh);
}

// Those that are there, and if there is none the first that comes in time.
void CarryOver::take_rewards(Milliseconds wait) {
  while (!unrewarded_.empty()) {
    const std::optional<RewardedGroup> group = rewards_->wait_any(Deadline::after(wait));
    if (!group) return;
    wait = Milliseconds(0);
    const auto found = unrewarded_.find(group->group_id);
    TRIREME_CHECK(found != unrewarded_.end(), "a reward for a run that nobody submitted");
    auto [span, samples] = std::move(found->second);
    unrewarded_.erase(found);
    fill_rewards(*group, samples.data());
    if (options_.drawn_rewards)
      fill_drawn_rewards(*options_.drawn_rewards, options_.ledger.samples_per_group, samples.data(), samples.size());
    rewarded_.emplace_back(span, std::move(samples));
  }
}

// Whether the samples that the step misses have their rewards, of all replicas together. Every leader comes to the same
// answer, one a moment later than another.
bool CarryOver::enough(Round& round) {
  int64_t fresh = 0;
  for (const auto& [span, samples] : rewarded_) {
    if (round.groups.count(span.group) == 0) continue;
    fresh += round.counted.insert({span.group, span.first_sample}).second ? span.count : 0;
  }
  const auto now = SteadyClock::now();
  if (fresh == 0 && now - round.looked < kPoll) return false;
  round.looked = now;
  const int64_t done = add(round.done_key, fresh);
  if (done != round.done)
    round.patience = Deadline::after(Milliseconds(static_cast<int64_t>(options_.timeout_s * 1000)));
  round.done = done;
  TRIREME_CHECK(done <= round.wanted, "more samples of a step have come than it misses");
  return done == round.wanted;
}

// Of runs that were not dealt, for what this replica has room for.
std::vector<int64_t> CarryOver::take_tickets(Round& round) {
  std::vector<int64_t> taken;
  if (round.rest_taken) return taken;
  const int64_t unfinished = engine_.unfinished_samples();
  const int64_t room = engine_.options().max_sequences - unfinished;
  if (room <= 0 || (engine_.crowded() && unfinished > 0)) return taken;
  const int64_t siblings = std::max<int64_t>(1, round.rest.front().count);
  const int64_t count = std::max<int64_t>(1, room / siblings);
  const int64_t end = add(round.taken_key, count);
  const auto all = static_cast<int64_t>(round.rest.size());
  for (int64_t ticket = end - count; ticket < std::min(end, all); ++ticket) taken.push_back(ticket);
  round.tickets.insert(round.tickets.end(), taken.begin(), taken.end());
  round.rest_taken = end >= all;
  return taken;
}

// The leader's turn, on all ranks of the replica. Mostly there is nothing to say, and nothing is what is said.
void CarryOver::hear_leader(Turn& turn) {
  const PhaseTimer::Scope wait = timer_.enter(engine_.idle() ? Phase::kIdle : Phase::kGeneration);
  std::string said;
  if (turn.over || !turn.tickets.empty()) {
    append(said, std::vector<int64_t>{turn.over ? 1 : 0});
    append(said, turn.tickets);
  }
  said = context_.generation().from_leader(said);
  if (leads_ || said.empty()) return;
  std::string_view bytes = said;
  turn.over = take<int64_t>(bytes).at(0) != 0;
  turn.tickets = take<int64_t>(bytes);
}

// The same on all ranks of a replica, and but for its tickets on all that step together.
CarryOver::Turn CarryOver::next_turn(Round& round) {
  Turn turn;
  if (leads_) {
    take_rewards(Milliseconds(0));
    turn.over = enough(round);
    if (!turn.over) turn.tickets = take_tickets(round);
  }
  if (context_.generation().replica->size() > 1) hear_leader(turn);
  for (const int64_t ticket : turn.tickets) begin(round.rest.at(static_cast<size_t>(ticket)));
  const int64_t all = engine_.largest_together(turn.over ? kToStop : engine_.idle() ? kNothing : kToStep);
  turn.over = all == kToStop;
  turn.steps = all == kToStep;
  return turn;
}

// Nothing to generate, of a leader: for rewards of its samples, or for other replicas.
void CarryOver::wait_idle(Round& round) {
  const bool rewards = !unrewarded_.empty();
  const Stopwatch watch;
  const PhaseTimer::Scope scope = timer_.enter(rewards ? Phase::kRewards : Phase::kIdle);
  if (rewards) {
    take_rewards(kPoll);
  } else {
    std::this_thread::sleep_for(kPoll);
    round.idle_seconds += watch.seconds();
  }
  if (!round.patience.passed()) return;
  const std::string who = "rank " + std::to_string(context_.rank()) + ": after cluster.collective_timeout_s step " +
                          std::to_string(ledger_.next_step()) + " still waits for " +
                          std::to_string(round.wanted - round.done) + " samples of " +
                          describe(ledger_.missing(), context_.generation().replica->size() > 1 ? "replica" : "rank");
  if (rewards) fail_io(who + "; this rank's have no reward yet: their own limits should be shorter");
  fail_timeout(who);
}

void CarryOver::generate(Round& round) {
  const PhaseTimer::Scope generation = timer_.enter(Phase::kGeneration);
  context_.set_phase("generation");
  round.patience = Deadline::after(Milliseconds(static_cast<int64_t>(options_.timeout_s * 1000)));
  for (Turn turn = next_turn(round); !turn.over; turn = next_turn(round)) {
    if (turn.steps) {
      finished(engine_.step());
      round.patience = Deadline::after(Milliseconds(static_cast<int64_t>(options_.timeout_s * 1000)));
    } else if (leads_) {
      wait_idle(round);
    }
    if (on_progress) on_progress();
  }
}

std::vector<SharedTokens> CarryOver::prompts_of_wire() const {
  std::vector<SharedTokens> prompts;
  for (const auto& [number, prompt] : prompts_) prompts.push_back(prompt.tokens);
  return prompts;
}

void CarryOver::complete(const SampleSpan& span, std::vector<Sample> samples) {
  const auto found = runs_.find({span.group, span.first_sample});
  TRIREME_CHECK(found != runs_.end(), "samples of a run that nobody leased");
  const Completion result = ledger_.complete(found->second, std::move(samples));
  TRIREME_CHECK(result == Completion::kTaken, "the ledger did not take a run's samples");
  runs_.erase(found);
}

// Every replica's tickets, in their order, then its rewarded samples: all ledgers go on alike.
void CarryOver::exchange(const Round& round, RankShares& shares) {
  const PhaseTimer::Scope idle = timer_.enter(Phase::kIdle);
  context_.set_phase("rollout exchange");
  const int64_t base = ledger_.first_group();
  std::string part;
  append(part, std::vector<double>{round.idle_seconds});
  append(part, round.tickets);
  std::vector<SampleSpan> spans;
  std::vector<Sample> samples;
  for (auto& [span, of_run] : rewarded_) {
    spans.push_back(span);
    for (Sample& sample : of_run) {
      sample.group -= base;
      samples.push_back(std::move(sample));
    }
  }
  rewarded_.clear();
  append(part, spans);
  part += pack_samples(samples);
  samples.clear();
  const std::vector<std::string> parts =
      context_.world_size() == 1 ? std::vector<std::string>{std::move(part)} : context_.generation().from_leaders(part);
  std::vector<int64_t> owner(round.rest.size(), -1);
  std::vector<std::string_view> rest;
  const auto replicas = static_cast<size_t>(replicas_);
  shares.idle_seconds.resize(replicas, 0);
  shares.samples.resize(replicas, 0);
  TRIREME_CHECK(parts.size() == replicas, "an exchange of samples has another number of parts than replicas");
  for (size_t r = 0; r < parts.size(); ++r) {
    std::string_view bytes = parts[r];
    shares.idle_seconds[r] += take<double>(bytes).at(0);
    for (const int64_t ticket : take<int64_t>(bytes)) owner.at(static_cast<size_t>(ticket)) = static_cast<int64_t>(r);
    rest.push_back(bytes);
  }
  for (size_t ticket = 0; ticket < owner.size() && owner[ticket] >= 0; ++ticket) {
    const std::vector<LeasedRun> runs = ledger_.lease(owner[ticket], 1, ledger_.newest_version());
    TRIREME_CHECK(runs.size() == 1 && runs[0].span == round.rest[ticket], "a ticket's run is another one by now");
    runs_[{runs[0].span.group, runs[0].span.first_sample}] = runs[0].id;
  }
  const std::vector<SharedTokens> prompts = prompts_of_wire();
  for (size_t r = 0; r < rest.size(); ++r) {
    const std::vector<SampleSpan> of_rank = take<SampleSpan>(rest[r]);
    std::vector<Sample> all = unpack_samples(rest[r], prompts);
    shares.samples[r] += static_cast<int64_t>(all.size());
    size_t next = 0;
    for (const SampleSpan& span : of_rank) {
      TRIREME_CHECK(next + static_cast<size_t>(span.count) <= all.size(), "a run's samples did not all come");
      std::vector<Sample> of_run;
      for (int64_t i = 0; i < span.count; ++i) {
        of_run.push_back(std::move(all[next++]));
        of_run.back().group += base;
      }
      complete(span, std::move(of_run));
    }
    TRIREME_CHECK(next == all.size(), "samples of no run have come");
  }
}

CarriedStep CarryOver::collect(RankShares& shares) {
  CarriedStep step;
  {
    const PhaseTimer::Scope generation = timer_.enter(Phase::kGeneration);
    engine_.take_cache();
    engine_.resume();
  }
  if (ledger_.complete()) tell_ready({});
  while (!ledger_.complete()) {
    if (const auto spent = ledger_.exhausted()) {
      fail_data("dynamic sampling: of the " + std::to_string(spent->used_up) + " groups that step " +
                std::to_string(ledger_.next_step()) + " may use up only " + std::to_string(spent->kept) + " of " +
                std::to_string(options_.ledger.groups_per_step) + " have rewards that differ; raise " +
                options_.section + ".dynamic_sampling_max_gen_batches or choose other data");
    }
    Round round;
    const std::string name = "carry-" + std::to_string(options_.first_step) + "-" + std::to_string(rounds_++);
    round.taken_key = name + "-taken";
    round.done_key = name + "-done";
    ask_for_prompts();
    for (const MissingGroup& missing : ledger_.missing()) {
      round.groups.insert(missing.number);
      round.wanted += missing.open;
      for (const MissingGroup::Holder& holder : missing.holders) round.wanted += holder.samples;
    }
    tell_ready(round.groups);
    for (const LeasedRun& run : deal_evenly(ledger_, replicas_, engine_.options().max_sequences)) {
      runs_[{run.span.group, run.span.first_sample}] = run.id;
      if (run.engine == replica_) begin(run.span);
    }
    round.rest = ledger_.leasable_runs(std::numeric_limits<int64_t>::max());
    if (static_cast<int64_t>(round.rest.size()) > kMostTickets) round.rest.resize(kMostTickets);
    round.rest_taken = round.rest.empty();
    generate(round);
    exchange(round, shares);
    ++step.rounds;
  }
  told_.clear();
  // What is still under way is in the way of training where it has the lines between ranks that share the model, or a
  // model that training takes the memory of.
  const bool shared = context_.generation().replica->size() > 1 || context_.holders().size() > 1;
  if (!options_.keep_cache || context_.generation().apart || shared) {
    const PhaseTimer::Scope generation = timer_.enter(Phase::kGeneration);
    finished(options_.keep_cache ? engine_.settle() : engine_.suspend());
  }
  step.groups = ledger_.take(ledger_.next_step());
  prompts_.erase(prompts_.begin(), prompts_.lower_bound(ledger_.first_group()));
  return step;
}

void CarryOver::trained(int64_t step) { ledger_.trained(step); }

void CarryOver::set_aside() {
  if (!engine_.idle()) finished(engine_.suspend());
}

void CarryOver::make_way() {
  set_aside();
  const Deadline deadline = Deadline::after(Milliseconds(static_cast<int64_t>(options_.timeout_s * 1000)));
  while (!unrewarded_.empty()) {
    take_rewards(std::min(Milliseconds(1000), deadline.remaining()));
    if (on_progress) on_progress();
    if (deadline.passed() && !unrewarded_.empty()) {
      fail_io("rank " + std::to_string(context_.rank()) + ": " + std::to_string(unrewarded_.size()) +
              " runs of groups have no reward yet after cluster.collective_timeout_s; their own limits should be "
              "shorter");
    }
  }
}

CarryOver::Saved CarryOver::saved() const {
  return save_ledger(ledger_, [this](int64_t group) { return &prompts_.at(group).tokens; });
}

int64_t CarryOver::restore(const Saved& saved) {
  const auto prompt = [this](int64_t group) {
    return ask(group, /*needed=*/false) ? &prompts_.at(group).tokens : nullptr;
  };
  return restore_ledger(saved, ledger_.first_group(), prompt,
                        [this](std::vector<LedgerGroup> groups) { return ledger_.restore(std::move(groups)); });
}

}  // namespace trireme
