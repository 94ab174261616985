#include "trainer/parallel/attendance.h"

#include <algorithm>

#include "base/log.h"
#include "base/text.h"

namespace trireme {

Attendance::Attendance(JobStore& store, const RendezvousOptions& rendezvous, const std::string& name)
    : store_(store),
      rank_(rendezvous.rank),
      size_(rendezvous.world_size),
      name_(name),
      timeout_(rendezvous.timeout),
      period_(std::clamp(rendezvous.timeout / 8, Milliseconds(50), Milliseconds(1000))),
      grace_(rendezvous.stuck_grace),
      on_stuck_(rendezvous.on_stuck) {
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
  if (place_.phase != phase) place_.phase = phase;
}

void Attendance::sleep(Milliseconds time) {
  std::unique_lock<std::mutex> lock(mutex_);
  wake_.wait_for(lock, time, [this] { return stopping_; });
}

void Attendance::publish() {
  Place now;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (place_.sequence == published_) return;
    now = place_;
    published_ = now.sequence;
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
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (stopping_) return;
      }
      publish();
      if (!on_stuck_ || !accused()) continue;
      Place before;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        before = place_;
      }
      sleep(grace_);  // a rank that is only slow comes, finds the others gone and leaves by itself
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (stopping_ || place_.sequence != before.sequence) return;
      }
      on_stuck_("rank " + std::to_string(rank_) + " is stuck: the others have given up waiting for it in group '" +
                name_ + "', it last came to number " + std::to_string(before.sequence) + ", in phase " + before.phase);
      return;
    }
  } catch (const std::exception& error) {
    // The store went with rank 0: the collectives say so too, with more to tell.
    log_debug("parallel", error.what());
  }
}

std::vector<int> Attendance::absent(int64_t sequence) {
  std::vector<int> ranks;
  try {
    SteadyClock::time_point since;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      since = place_.since;
    }
    if (SteadyClock::now() - since < timeout_ * 9 / 10) {
      const Verdict said = verdict();
      return said.sequence == sequence ? said.absent : ranks;
    }
    publish();
    // Whoever waits in it has written so within a period of its coming.
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
  } catch (const std::exception& error) {
    log_debug("parallel", error.what());
  }
  return ranks;
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
