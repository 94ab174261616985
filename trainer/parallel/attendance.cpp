#include "trainer/parallel/attendance.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/host.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/parallel/lifeline.h"

namespace trireme {
namespace {

constexpr const char* kVerdictKey = "attendance-absent";
constexpr const char* kFailureKey = "attendance-failed";
constexpr const char* kFailuresKey = "attendance-failed-count";

std::string rank_key(int rank) { return "attendance-" + std::to_string(rank); }
std::string host_key(int rank) { return "attendance-host-" + std::to_string(rank); }

// A device that has failed answers with an exception: the training thread gets the same and says it.
bool yes_or_failed(const std::function<bool()>& ask) {
  try {
    return ask();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

Attendance::Attendance(JobStore& store, const RendezvousOptions& rendezvous)
    : store_(store),
      rank_(rendezvous.rank),
      layout_(rendezvous.layout),
      actor_ranks_(rendezvous.actor_ranks),
      timeout_(rendezvous.timeout),
      period_(std::clamp(rendezvous.timeout / 8, Milliseconds(50), Milliseconds(1000))),
      grace_(rendezvous.stuck_grace),
      failure_patience_(rendezvous.failure_patience),
      on_stuck_(rendezvous.on_stuck),
      on_deadline_(rendezvous.on_deadline),
      on_unwinding_(rendezvous.on_unwinding),
      unwinding_grace_(rendezvous.unwinding_grace) {
  store_.set(host_key(rank_), host_name());  // before anybody can wait for this rank
  thread_ = std::thread([this] { run(); });
}

Attendance::~Attendance() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
  if (unwinding_.joinable()) unwinding_.join();
}

int Attendance::open(const RankGroup& group) {
  if (group.ranks.front() == rank_) {
    std::string ranks;
    for (const int rank : group.ranks) ranks += (ranks.empty() ? "" : " ") + std::to_string(rank);
    store_.set("attendance-ranks-" + group.name, ranks);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  groups_.emplace_back().who = group;
  return static_cast<int>(groups_.size()) - 1;
}

void Attendance::set_on_absent(std::function<void(const std::vector<int>& ranks)> on_absent) {
  const std::lock_guard<std::mutex> lock(absent_mutex_);
  on_absent_ = std::move(on_absent);
}

void Attendance::tell_absent(const std::vector<int>& ranks) {
  const std::lock_guard<std::mutex> lock(absent_mutex_);
  if (on_absent_ && !ranks.empty()) on_absent_(ranks);
}

void Attendance::note(int group, int64_t sequence) {
  const std::lock_guard<std::mutex> lock(mutex_);
  groups_[static_cast<size_t>(group)].sequence = sequence;
  groups_[static_cast<size_t>(group)].since = SteadyClock::now();
}

void Attendance::note_waiting(int group) {
  const std::lock_guard<std::mutex> lock(mutex_);
  waits_in_ = group;
}

void Attendance::note_waited() {
  const std::lock_guard<std::mutex> lock(mutex_);
  waits_in_ = -1;
}

void Attendance::set_phase(const std::string& phase) {
  const std::lock_guard<std::mutex> lock(mutex_);
  phase_ = phase;
  store_.lifeline().set_phase(phase);
}

std::string Attendance::phase() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return phase_;
}

void Attendance::note_queued(int group, QueuedCollective collective) {
  const std::lock_guard<std::mutex> lock(mutex_);
  groups_[static_cast<size_t>(group)].queue.push_back({std::move(collective), SteadyClock::now(), false});
}

std::string Attendance::name_of(int rank) const { return name_of_job_rank(layout_, actor_ranks_, rank); }

void Attendance::sleep(Milliseconds time) {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait_for(lock, time, [this] { return stopping_; });
}

bool Attendance::stopping() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stopping_;
}

// The host may be ahead: a rank has come to what its device has come to.
int64_t Attendance::place_now(const Group& group) {
  for (const Queued& queued : group.queue) {
    if (!queued.come) return queued.what.sequence - 1;
  }
  return group.sequence;
}

Attendance::Waits Attendance::waits_now() {
  if (waits_in_ >= 0) {
    const Group& group = groups_[static_cast<size_t>(waits_in_)];
    return {group.who.name, group.sequence};
  }
  for (const Group& group : groups_) {
    if (!group.queue.empty() && group.queue.front().come) return {group.who.name, group.queue.front().what.sequence};
  }
  return {};
}

void Attendance::update_queues() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto now = SteadyClock::now();
  for (Group& group : groups_) {
    std::deque<Queued>& queue = group.queue;
    while (!queue.empty() && yes_or_failed(queue.front().what.done)) {
      queue.pop_front();
      if (!queue.empty()) queue.front().since = now;
    }
    for (Queued& queued : queue) {
      if (queued.come) continue;
      if (!yes_or_failed(queued.what.come)) break;
      queued.come = true;
      queued.since = now;
    }
  }
}

std::vector<Attendance::Front> Attendance::fronts() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Front> fronts;
  for (size_t group = 0; group < groups_.size(); ++group) {
    if (!groups_[group].queue.empty()) fronts.push_back({static_cast<int>(group), groups_[group].queue.front()});
  }
  return fronts;
}

bool Attendance::still_pending(int group, int64_t sequence) {
  update_queues();
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::deque<Queued>& queue = groups_[static_cast<size_t>(group)].queue;
  return !queue.empty() && queue.front().what.sequence == sequence;
}

std::string Attendance::named(const Front& front) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const RankGroup& who = groups_[static_cast<size_t>(front.group)].who;
  const QueuedCollective& collective = front.queued.what;
  return collective.operation + " number " + std::to_string(collective.sequence) + " of group '" + who.name + "' (" +
         std::to_string(who.ranks.size()) + " ranks) in phase " + collective.phase;
}

void Attendance::leave(const std::function<void(const std::string&)>& how, const std::string& what) {
  if (!how) return;
  store_.lifeline().goodbye();  // the process ends here: it is not this one that has died
  how(name_of(rank_) + " " + what);
}

void Attendance::publish() {
  std::vector<std::pair<std::string, std::string>> news;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Waits waits = waits_now();
    std::ostringstream own;
    own << waits.sequence << ' ' << (waits.group.empty() ? "-" : waits.group.c_str()) << ' ' << phase_;
    if (own.str() != published_) news.emplace_back(rank_key(rank_), own.str());
    published_ = own.str();
    for (Group& group : groups_) {
      const int64_t sequence = place_now(group);
      if (sequence == group.published) continue;
      group.published = sequence;
      news.emplace_back(place_key(group.who.name, rank_), std::to_string(sequence));
    }
  }
  for (const auto& [key, value] : news) store_.set(key, value);
}

int64_t Attendance::place_of(const std::string& group, int rank) {
  const std::string key = place_key(group, rank);
  return store_.has(key) ? parse_int(store_.get(key)).value_or(0) : 0;
}

std::string Attendance::phase_of(int rank) {
  const std::string key = rank_key(rank);
  if (!store_.has(key)) return "";
  const std::string text = store_.get(key);  // "SEQUENCE GROUP PHASE"
  const size_t space = text.find(' ', text.find(' ') + 1);
  return space == std::string::npos ? "" : text.substr(space + 1);
}

Attendance::Waits Attendance::waits_of(int rank) {
  const std::string key = rank_key(rank);
  if (!store_.has(key)) return {};
  const std::vector<std::string> words = split(store_.get(key), ' ');
  if (words.size() < 2 || words[1] == "-") return {};
  return {words[1], parse_int(words[0]).value_or(0)};
}

std::vector<int> Attendance::members_of(const std::string& group) {
  const std::string key = "attendance-ranks-" + group;
  std::vector<int> ranks;
  if (!store_.has(key)) return ranks;
  for (const std::string& word : split(store_.get(key), ' ')) {
    ranks.push_back(static_cast<int>(parse_int(word).value_or(0)));
  }
  return ranks;
}

Absence Attendance::verdict() {
  if (!store_.has(kVerdictKey)) return {};
  // "SEQUENCE GROUP RANK RANK ..."
  const std::vector<std::string> words = split(store_.get(kVerdictKey), ' ');
  if (words.size() < 3) return {};
  Absence verdict{words[1], parse_int(words[0]).value_or(0), {}};
  for (size_t i = 2; i < words.size(); ++i) verdict.ranks.push_back(static_cast<int>(parse_int(words[i]).value_or(-1)));
  return verdict;
}

std::optional<std::string> Attendance::accused() {
  const Absence said = verdict();
  if (std::find(said.ranks.begin(), said.ranks.end(), rank_) == said.ranks.end()) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Group& group : groups_) {
    if (group.who.name == said.group && group.sequence < said.sequence) return said.group;
  }
  return std::nullopt;
}

void Attendance::run() {
  try {
    while (true) {
      sleep(period_);
      if (stopping() || look()) return;
    }
  } catch (const std::exception& error) {
    // The store went with rank 0. What the host waits for says so too, with more to tell; what the device waits for
    // does not.
    log_debug("parallel", error.what());
  }
  std::optional<Front> waiting;
  const Deadline limit = Deadline::after(timeout_);
  const auto host_waits = [this] {
    const std::lock_guard<std::mutex> lock(mutex_);
    return waits_in_ < 0 ? Waits{} : waits_now();
  };
  const Waits before = host_waits();
  while (!stopping() && !limit.passed()) {
    update_queues();
    if (leave_by_failure()) return;
    if (waiting && still_pending(waiting->group, waiting->queued.what.sequence)) {
      const auto known = failure_known_since();
      const auto why = known ? known : store_.lifeline().dead();
      leave(on_deadline_, "leaves: " + named(*waiting) +
                              " does not end, and rank 0, which keeps the store, has left or cannot be reached" +
                              (why ? "; " + *why : ""));
      return;
    }
    const std::vector<Front> now = fronts();
    waiting = now.empty() ? std::nullopt : std::optional<Front>(now.front());
    sleep(std::max(grace_, 2 * period_));
  }
  // A group that connects waits for an answer of the store as well, for ever.
  const Waits still = host_waits();
  if (stopping() || before.group.empty() || still.group != before.group || still.sequence != before.sequence) return;
  leave(on_deadline_, "leaves: number " + std::to_string(still.sequence) + " of group '" + still.group +
                          "' does not end; " + name_of(0) + kSilent);
}

bool Attendance::look() {
  update_queues();
  publish();
  look_for_failures();
  for (const Front& front : fronts()) {
    if (look_at_device(front)) return true;
  }
  if (leave_by_failure()) return true;
  if (!on_stuck_) return false;
  const auto group = accused();
  if (!group) return false;
  const auto place = [&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found =
        std::find_if(groups_.begin(), groups_.end(), [&](const Group& g) { return g.who.name == *group; });
    return std::pair(place_now(*found), phase_);
  };
  const auto [before, phase] = place();
  sleep(grace_);  // a rank that is only slow comes, finds the others gone and leaves by itself
  update_queues();
  if (stopping() || place().first != before) return false;
  leave(on_stuck_, "is stuck: the others have given up waiting for it in group '" + *group +
                       "', it last came to number " + std::to_string(before) + ", in phase " + phase);
  return true;
}

void Attendance::look_for_failures() {
  if (failure_known_since()) return;
  auto what = reported_failure();
  if (what)
    store_.lifeline().explain(*what);
  else
    what = store_.lifeline().dead();
  const std::lock_guard<std::mutex> lock(mutex_);
  failed_ = std::move(what);
  failed_since_ = SteadyClock::now();
}

std::optional<std::string> Attendance::failure_known_since(Milliseconds time) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return SteadyClock::now() - failed_since_ >= time ? failed_ : std::nullopt;
}

// Its host waits for what will not come, and does not ask: for rewards, for parts of a checkpoint. One that leaves
// already has more to say itself.
bool Attendance::leave_by_failure() {
  if (!on_deadline_ || leaving_) return false;
  const auto failure = failure_known_since(failure_patience_);
  if (!failure) return false;
  leave(on_deadline_, "leaves in phase " + phase() + ", since another rank has failed. " + *failure);
  return true;
}

bool Attendance::look_at_device(const Front& front) {
  const int64_t sequence = front.queued.what.sequence;
  if (const auto failure = failure_known_since(grace_)) {
    leave(on_deadline_, "leaves: " + named(front) + " cannot end, since another rank has failed. " + *failure);
    return true;
  }
  if (SteadyClock::now() - front.queued.since < timeout_) return false;
  const std::string seconds = std::to_string(timeout_.count() / 1000) + " s";
  if (!front.queued.come) {
    sleep(3 * period_ + grace_);  // the others, whose deadline is the same, name this rank first
    if (stopping() || !still_pending(front.group, sequence)) return false;
    const std::vector<Front> now = fronts();
    const auto same = std::find_if(now.begin(), now.end(), [&](const Front& f) { return f.group == front.group; });
    if (same == now.end() || same->queued.come) return false;
    leave(on_stuck_, "is stuck: its device has not come to " + named(front) + " within " + seconds +
                         ": what was queued before does not end");
    return true;
  }
  const Absence absence = missing(front.group, sequence);
  if (stopping() || !still_pending(front.group, sequence)) return false;
  tell_absent(absence.ranks);
  leave(on_deadline_, "leaves: " + named(front) + " has not ended within " + seconds + describe(absence, front.group));
  return true;
}

Absence Attendance::missing(int group, int64_t sequence) {
  publish();
  RankGroup who;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    who = groups_[static_cast<size_t>(group)].who;
  }
  // Whoever waits in it has written so within a period of its coming.
  Absence absence{who.name, sequence, {}};
  const Deadline settled = Deadline::after(3 * period_);
  while (true) {
    absence.ranks.clear();
    for (const int rank : who.ranks) {
      if (rank != rank_ && place_of(who.name, rank) < sequence) absence.ranks.push_back(rank);
    }
    if (absence.ranks.empty() || settled.passed()) break;
    sleep(period_);
  }
  if (absence.ranks.empty()) return absence;
  absence = cause(std::move(absence));
  if (!store_.has(kVerdictKey)) {
    std::string verdict = std::to_string(absence.sequence) + " " + absence.group;
    for (const int rank : absence.ranks) verdict += " " + std::to_string(rank);
    store_.set(kVerdictKey, verdict);
  }
  // It is read, and the stuck leave, before we do: the first to leave is taken for the cause, and the store goes with
  // rank 0.
  sleep(2 * period_ + grace_);
  return absence;
}

Absence Attendance::cause(Absence absence) {
  std::vector<std::string> seen{absence.group};
  while (true) {
    std::vector<int> idle;  // wait for nobody
    Waits next;
    for (const int rank : absence.ranks) {
      const Waits waits = waits_of(rank);
      if (waits.group.empty())
        idle.push_back(rank);
      else if (next.group.empty())
        next = waits;
    }
    if (!idle.empty()) {
      absence.ranks = idle;
      return absence;
    }
    // They wait for each other: what they have not come to is as good an answer as any.
    if (std::find(seen.begin(), seen.end(), next.group) != seen.end()) return absence;
    seen.push_back(next.group);
    Absence further{next.group, next.sequence, {}};
    for (const int rank : members_of(next.group)) {
      if (place_of(next.group, rank) < next.sequence) further.ranks.push_back(rank);
    }
    if (further.ranks.empty()) return absence;
    absence = std::move(further);
  }
}

Absence Attendance::absent(int group, int64_t sequence) {
  Absence absence;
  try {
    SteadyClock::time_point since;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      since = groups_[static_cast<size_t>(group)].since;
    }
    absence = SteadyClock::now() - since >= timeout_ * 9 / 10 ? missing(group, sequence) : verdict();
  } catch (const std::exception& error) {
    log_debug("parallel", error.what());
  }
  tell_absent(absence.ranks);
  return absence;
}

void Attendance::leaving() {
  leaving_ = true;
  store_.lifeline().leaving();
}

void Attendance::report_failure(const std::string& what) {
  leaving();
  try {
    if (store_.add(kFailuresKey, 1) != 1) return;
    store_.set(kFailureKey, std::to_string(rank_) + " " + what);
    sleep(2 * period_);
  } catch (const std::exception& error) {
    log_debug("parallel", error.what());
  }
}

void Attendance::leaves_by(std::exception_ptr error) {
  if (!on_unwinding_ || unwinding_.joinable()) return;
  unwinding_ = std::thread([this, error = std::move(error)] {
    sleep(unwinding_grace_);
    if (stopping()) return;
    store_.lifeline().goodbye();  // the process ends here, and its error is told: it has not died
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& known) {
      on_unwinding_(known);
    }
  });
}

std::optional<std::string> Attendance::failure_of_another(Milliseconds wait) {
  Lifeline& lifeline = store_.lifeline();
  try {
    if (auto reported = reported_failure()) return reported;
  } catch (const std::exception& error) {
    // Rank 0 has left, and the store with it: what the thread has read there before still holds.
    log_debug("parallel", error.what());
    if (auto known = failure_known_since()) return known;
  }
  return lifeline.wait_for_dead(wait);
}

std::optional<std::string> Attendance::reported_failure() {
  if (!store_.has(kFailureKey)) return std::nullopt;
  const std::string text = store_.get(kFailureKey);
  const size_t space = text.find(' ');
  const auto rank = parse_int(text.substr(0, space));
  if (space == std::string::npos || !rank || *rank == rank_) return std::nullopt;
  const std::string what = text.substr(space + 1);
  const bool named = starts_with(what, "rank ") || starts_with(what, "critic rank ");
  return named ? what : name_of(static_cast<int>(*rank)) + ": " + what;
}

std::string Attendance::describe(const Absence& absence, int group) {
  constexpr size_t kShown = 8;
  std::string where;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (absence.group != groups_[static_cast<size_t>(group)].who.name)
      where = " to number " + std::to_string(absence.sequence) + " of group '" + absence.group + "'";
  }
  std::string text;
  try {
    for (size_t i = 0; i < std::min(absence.ranks.size(), kShown); ++i) {
      const int rank = absence.ranks[i];
      const std::string phase = phase_of(rank);
      const std::string host = store_.has(host_key(rank)) ? " on " + store_.get(host_key(rank)) : "";
      text += "; " + name_of(rank) + host + " has not come" + where + " (last seen at number " +
              std::to_string(place_of(absence.group, rank)) + (phase.empty() ? "" : ", phase " + phase) + ")";
    }
  } catch (const std::exception& error) {
    log_debug("parallel", error.what());
  }
  if (store_.silent()) text += "; " + name_of(0) + kSilent;
  if (absence.ranks.size() > kShown) text += "; and " + std::to_string(absence.ranks.size() - kShown) + " more ranks";
  return text;
}

}  // namespace trireme
