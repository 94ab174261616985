#include "trainer/parallel/attendance.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "trainer/parallel/lifeline.h"

namespace trireme {
namespace {

// A device that has failed answers with an exception: the training thread gets the same and says it.
bool yes_or_failed(const std::function<bool()>& ask) {
  try {
    return ask();
  } catch (const std::exception&) {
    return true;
  }
}

}  // namespace

Attendance::Attendance(JobStore& store, const RendezvousOptions& rendezvous, const std::string& name,
                       std::function<void(const std::vector<int>& ranks)> on_absent)
    : store_(store),
      rank_(rendezvous.rank),
      size_(rendezvous.world_size),
      name_(name),
      timeout_(rendezvous.timeout),
      period_(std::clamp(rendezvous.timeout / 8, Milliseconds(50), Milliseconds(1000))),
      grace_(rendezvous.stuck_grace),
      on_stuck_(rendezvous.on_stuck),
      on_deadline_(rendezvous.on_deadline),
      on_absent_(std::move(on_absent)) {
  thread_ = std::thread([this] { run(); });
}

Attendance::~Attendance() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Attendance::note(int64_t sequence, const std::string& phase) {
  const std::lock_guard<std::mutex> lock(mutex_);
  place_.sequence = sequence;
  place_.since = SteadyClock::now();
  if (place_.phase == phase) return;
  place_.phase = phase;
  store_.lifeline().set_phase(phase);
}

void Attendance::note_phase(const std::string& phase) {
  const std::lock_guard<std::mutex> lock(mutex_);
  place_.phase = phase;
  store_.lifeline().set_phase(phase);
}

void Attendance::note_queued(QueuedCollective collective) {
  const std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back({std::move(collective), SteadyClock::now(), false});
}

void Attendance::sleep(Milliseconds time) {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait_for(lock, time, [this] { return stopping_; });
}

bool Attendance::stopping() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stopping_;
}

// The host may be ahead: a rank has come to what its device has come to.
Attendance::Place Attendance::place_now() {
  for (const Queued& queued : queue_) {
    if (!queued.come) return {queued.what.sequence - 1, queued.what.phase, queued.since};
  }
  return place_;
}

void Attendance::update_queue() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto now = SteadyClock::now();
  while (!queue_.empty() && yes_or_failed(queue_.front().what.done)) {
    queue_.pop_front();
    if (!queue_.empty()) queue_.front().since = now;
  }
  for (Queued& queued : queue_) {
    if (queued.come) continue;
    if (!yes_or_failed(queued.what.come)) break;
    queued.come = true;
    queued.since = now;
  }
}

std::optional<Attendance::Queued> Attendance::oldest() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() ? std::nullopt : std::optional<Queued>(queue_.front());
}

bool Attendance::still_pending(int64_t sequence) {
  update_queue();
  const auto front = oldest();
  return front && front->what.sequence == sequence;
}

std::string Attendance::named(const QueuedCollective& collective) const {
  return collective.operation + " number " + std::to_string(collective.sequence) + " of group '" + name_ + "' (" +
         std::to_string(size_) + " ranks) in phase " + collective.phase;
}

void Attendance::leave(const std::function<void(const std::string&)>& how, const std::string& what) {
  if (!how) return;
  store_.lifeline().goodbye();  // the process ends here: it is not this one that has died
  how("rank " + std::to_string(rank_) + " " + what);
}

void Attendance::publish() {
  Place now;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    now = place_now();
    if (now.sequence == published_.sequence && now.phase == published_.phase) return;
    published_ = now;
  }
  store_.set(key(rank_), std::to_string(now.sequence) + " " + now.phase);
}

Attendance::Place Attendance::place_of(int rank) {
  if (!store_.has(key(rank))) return {};
  const std::string text = store_.get(key(rank));
  const size_t space = text.find(' ');
  return {parse_int(text.substr(0, space)).value_or(0), space == std::string::npos ? "" : text.substr(space + 1), {}};
}

Attendance::Verdict Attendance::verdict() {
  if (!store_.has(verdict_key())) return {};
  // "SEQUENCE RANK RANK ..."
  Verdict verdict;
  for (const std::string& word : split(store_.get(verdict_key()), ' ')) {
    const int64_t number = parse_int(word).value_or(0);
    if (verdict.sequence == 0)
      verdict.sequence = number;
    else
      verdict.absent.push_back(static_cast<int>(number));
  }
  return verdict;
}

bool Attendance::accused() {
  const Verdict said = verdict();
  if (std::find(said.absent.begin(), said.absent.end(), rank_) == said.absent.end()) return false;
  const std::lock_guard<std::mutex> lock(mutex_);
  return place_.sequence < said.sequence;
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
  std::optional<Queued> waiting;
  const Deadline limit = Deadline::after(timeout_);
  while (!stopping() && !limit.passed()) {
    update_queue();
    const auto front = oldest();
    if (front && waiting && front->what.sequence == waiting->what.sequence) {
      const auto dead = store_.lifeline().dead();
      leave(on_deadline_, "leaves: " + named(front->what) +
                              " does not end, and rank 0, which keeps the store, has left or cannot be reached" +
                              (dead ? "; " + *dead : ""));
      return;
    }
    waiting = front;
    sleep(std::max(grace_, 2 * period_));
  }
}

bool Attendance::look() {
  update_queue();
  publish();
  look_for_failures();
  if (look_at_device()) return true;
  if (!on_stuck_ || !accused()) return false;
  Place before;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    before = place_now();
  }
  sleep(grace_);  // a rank that is only slow comes, finds the others gone and leaves by itself
  update_queue();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || place_now().sequence != before.sequence) return false;
  }
  leave(on_stuck_, "is stuck: the others have given up waiting for it in group '" + name_ +
                       "', it last came to number " + std::to_string(before.sequence) + ", in phase " + before.phase);
  return true;
}

void Attendance::look_for_failures() {
  if (failed_) return;
  failed_ = reported_failure();
  if (failed_)
    store_.lifeline().explain(*failed_);
  else
    failed_ = store_.lifeline().dead();
  failed_since_ = SteadyClock::now();
}

bool Attendance::look_at_device() {
  const auto front = oldest();
  if (!front) return false;
  const int64_t sequence = front->what.sequence;
  if (failed_ && SteadyClock::now() - failed_since_ >= grace_) {
    leave(on_deadline_, "leaves: " + named(front->what) + " cannot end, since another rank has failed. " + *failed_);
    return true;
  }
  if (SteadyClock::now() - front->since < timeout_) return false;
  const std::string seconds = std::to_string(timeout_.count() / 1000) + " s";
  if (!front->come) {
    sleep(3 * period_ + grace_);  // the others, whose deadline is the same, name this rank first
    if (stopping() || !still_pending(sequence) || oldest()->come) return false;
    leave(on_stuck_, "is stuck: its device has not come to " + named(front->what) + " within " + seconds +
                         ": what was queued before does not end");
    return true;
  }
  const std::vector<int> ranks = missing(sequence);
  if (stopping() || !still_pending(sequence)) return false;
  if (!ranks.empty() && on_absent_) on_absent_(ranks);
  leave(on_deadline_, "leaves: " + named(front->what) + " has not ended within " + seconds + describe(ranks));
  return true;
}

std::vector<int> Attendance::missing(int64_t sequence) {
  publish();
  // Whoever waits in it has written so within a period of its coming.
  std::vector<int> ranks;
  const Deadline settled = Deadline::after(3 * period_);
  while (true) {
    ranks.clear();
    for (int rank = 0; rank < size_; ++rank) {
      if (rank != rank_ && place_of(rank).sequence < sequence) ranks.push_back(rank);
    }
    if (ranks.empty() || settled.passed()) break;
    sleep(period_);
  }
  if (ranks.empty()) return ranks;
  std::string verdict = std::to_string(sequence);
  for (const int rank : ranks) verdict += " " + std::to_string(rank);
  store_.set(verdict_key(), verdict);
  // It is read, and the stuck leave, before we do: the first to leave is taken for the cause, and the store goes with
  // rank 0.
  sleep(2 * period_ + grace_);
  return ranks;
}

std::vector<int> Attendance::absent(int64_t sequence) {
  try {
    SteadyClock::time_point since;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      since = place_.since;
    }
    if (SteadyClock::now() - since >= timeout_ * 9 / 10) return missing(sequence);
    const Verdict said = verdict();
    if (said.sequence == sequence) return said.absent;
  } catch (const std::exception& error) {
    log_debug("parallel", error.what());
  }
  return {};
}

void Attendance::leaving() { store_.lifeline().leaving(); }

void Attendance::report_failure(const std::string& what) {
  leaving();
  try {
    if (store_.add(failure_key() + "-count", 1) != 1) return;
    store_.set(failure_key(), std::to_string(rank_) + " " + what);
    sleep(2 * period_);
  } catch (const std::exception& error) {
    log_debug("parallel", error.what());
  }
}

std::optional<std::string> Attendance::failure_of_another(Milliseconds wait) {
  Lifeline& lifeline = store_.lifeline();
  try {
    if (auto reported = reported_failure()) return reported;
  } catch (const std::exception& error) {
    log_debug("parallel", error.what());
  }
  return lifeline.wait_for_dead(wait);
}

std::optional<std::string> Attendance::reported_failure() {
  if (!store_.has(failure_key())) return std::nullopt;
  const std::string text = store_.get(failure_key());
  const size_t space = text.find(' ');
  if (space == std::string::npos || parse_int(text.substr(0, space)) == rank_) return std::nullopt;
  const std::string what = text.substr(space + 1);
  return starts_with(what, "rank ") ? what : "rank " + text.substr(0, space) + ": " + what;
}

std::string Attendance::describe(const std::vector<int>& ranks) {
  constexpr size_t kShown = 8;
  std::string text;
  try {
    for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) {
      const Place place = place_of(ranks[i]);
      text += "; rank " + std::to_string(ranks[i]) + " has not come (last seen at number " +
              std::to_string(place.sequence) + (place.phase.empty() ? "" : ", phase " + place.phase) + ")";
    }
  } catch (const std::exception& error) {
    log_debug("parallel", error.what());
  }
  if (ranks.size() > kShown) text += "; and " + std::to_string(ranks.size() - kShown) + " more ranks";
  return text;
}

}  // namespace trireme
