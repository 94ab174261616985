#include "trainer/rewards/pool.h"

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/rewards/reward_types.h"

namespace trireme {
namespace {

constexpr Milliseconds kProbePause{500};  // between two tries

}  // namespace

struct RewardPool::Job {
  RewardedGroup group;
  std::vector<RewardRequest> requests;  // read by all lanes, written by none
  size_t open_parts = 0;
  std::string fatal;  // policy "error": why
  Stopwatch since_submit;
};

struct RewardPool::Lane {
  RewardOptions options;
  size_t index = 0;
  std::deque<std::shared_ptr<Job>> queue;
  std::condition_variable ready;
  RewardCounters counters;
  std::vector<std::unique_ptr<Reward>> rewards;  // one per thread
  std::vector<std::thread> threads;
};

RewardPool::RewardPool(std::vector<RewardOptions> options, bool elsewhere) {
  if (options.empty() && !elsewhere)
    fail_user("no reward is configured: enable at least one of env." + join(reward_names(), ", env."));
  for (RewardOptions& one : options) {
    auto lane = std::make_unique<Lane>();
    lane->index = lanes_.size();
    lane->counters.name = one.name.empty() ? one.type : one.name;
    for (int64_t k = 0; k < std::max<int64_t>(1, one.num_workers); ++k) lane->rewards.push_back(make_reward(one));
    lane->options = std::move(one);
    lanes_.push_back(std::move(lane));
  }
  for (const auto& lane : lanes_) {  // only when all options are known to be good
    for (const auto& reward : lane->rewards)
      lane->threads.emplace_back([this, &lane = *lane, &reward = *reward] { work(lane, reward); });
  }
}

RewardPool::~RewardPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  for (const auto& lane : lanes_) {
    for (const auto& reward : lane->rewards) reward->cancel();
    lane->ready.notify_all();
  }
  for (const auto& lane : lanes_) {
    for (std::thread& thread : lane->threads) thread.join();
  }
}

void RewardPool::probe(const RewardRequest& example, Milliseconds limit, bool scores) {
  for (const auto& lane : lanes_) {
    const Deadline deadline = Deadline::after(limit);
    const std::string name = "reward '" + lane->counters.name + "'";
    for (int attempt = 1;; ++attempt) {
      const std::vector<RewardResult> results = lane->rewards.front()->score({example}, deadline);
      const RewardResult result = results.empty() ? failed_result("no result") : results.front();
      if (result.failed && result.declined)
        log_warn("rewards", name + " works, but has no reward for the probe: " + result.error);
      if (!result.failed || result.declined) break;
      if (result.hopeless && scores) fail_user(name + " does not work: " + result.error);
      if (result.hopeless) {
        log_info("rewards", name + " does not work here, where nothing is scored: " + result.error);
        break;
      }
      if (deadline.remaining() <= kProbePause) {
        fail_io(name + " has not answered a probe within " +
                format_fixed(static_cast<double>(limit.count()) / 1000, 0) +
                " s (env.startup_timeout_s): " + result.error);
      }
      if (attempt == 1) log_info("rewards", name + " does not answer yet, it is waited for: " + result.error);
      std::this_thread::sleep_for(kProbePause);
    }
  }
}

void RewardPool::submit(int64_t group_id, std::vector<RewardRequest> requests) {
  auto job = std::make_shared<Job>();
  job->group.group_id = group_id;
  job->group.rewards.assign(requests.size(), 0.0);
  job->group.parts.assign(lanes_.size(), std::vector<double>(requests.size(), 0.0));
  job->group.dropped.assign(requests.size(), 0);
  job->requests = std::move(requests);
  job->open_parts = lanes_.size();
  const std::lock_guard lock(mutex_);
  ++pending_;
  if (lanes_.empty()) {
    done_.push_back(std::move(job));
    finished_.notify_one();
  }
  for (const auto& lane : lanes_) {
    lane->queue.push_back(job);
    lane->ready.notify_one();
  }
}

void RewardPool::work(Lane& lane, Reward& reward) {
  while (true) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock lock(mutex_);
      lane.ready.wait(lock, [&] { return stopping_ || !lane.queue.empty(); });
      if (stopping_) return;
      job = std::move(lane.queue.front());
      lane.queue.pop_front();
    }
    const Stopwatch watch;
    std::vector<RewardResult> results;
    std::string problem = "the reward gave too few results";
    try {
      results = reward.score(job->requests,
                             Deadline::after(Milliseconds(static_cast<int64_t>(lane.options.timeout_s * 1000))));
    } catch (const std::exception& error) {
      problem = error.what();
    } catch (...) {
      problem = "an exception of unknown type";
    }
    results.resize(job->requests.size(), {.reward = 0, .failed = true, .error = problem});
    finish_part(lane, *job, std::move(results), watch.seconds());
    const std::lock_guard lock(mutex_);
    if (--job->open_parts > 0) continue;
    job->group.seconds = job->since_submit.seconds();
    done_.push_back(std::move(job));
    finished_.notify_one();
  }
}

void RewardPool::finish_part(Lane& lane, Job& job, std::vector<RewardResult> results, double seconds) {
  std::string warning;
  {
    const std::lock_guard lock(mutex_);
    RewardCounters& counters = lane.counters;
    counters.busy_seconds += seconds;
    counters.scored += static_cast<int64_t>(results.size());
    for (size_t k = 0; k < results.size(); ++k) {
      const RewardResult& result = results[k];
      if (!result.failed) {
        job.group.parts[lane.index][k] = result.reward;
        continue;
      }
      ++counters.failed;
      ++job.group.failures;
      counters.last_error = result.error;
      if (lane.options.failure_policy == RewardFailurePolicy::kDrop && job.group.dropped[k] == 0) {
        job.group.dropped[k] = 1;
        ++counters.dropped;
      }
      if (lane.options.failure_policy == RewardFailurePolicy::kError && job.fatal.empty()) {
        job.fatal = "reward '" + counters.name + "' failed for group " + std::to_string(job.group.group_id) +
                    ", sample " + std::to_string(k) + ": " + result.error;
      }
      // The first, the second, the fourth ... so that a broken service does not fill the log.
      if ((counters.failed & (counters.failed - 1)) == 0) {
        warning = "reward '" + counters.name + "': failure " + std::to_string(counters.failed) + " (group " +
                  std::to_string(job.group.group_id) + "): " + result.error;
      }
    }
  }
  if (!warning.empty()) log_warn("rewards", warning);
}

std::optional<RewardedGroup> RewardPool::wait_any(const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  if (!finished_.wait_until(lock, deadline.at(), [&] { return !done_.empty(); })) return std::nullopt;
  const std::shared_ptr<Job> job = std::move(done_.front());
  done_.pop_front();
  --pending_;
  lock.unlock();
  if (!job->fatal.empty()) throw Error(ErrorKind::kIo, job->fatal);
  RewardedGroup group = std::move(job->group);
  // Summed here in the order of the configuration: the same bits whichever reward was done first.
  for (size_t part = 0; part < lanes_.size(); ++part) {
    for (size_t k = 0; k < group.rewards.size(); ++k)
      group.rewards[k] += lanes_[part]->options.weight * group.parts[part][k];
  }
  return group;
}

int64_t RewardPool::pending() const {
  const std::lock_guard lock(mutex_);
  return pending_;
}

std::vector<RewardCounters> RewardPool::counters() const {
  const std::lock_guard lock(mutex_);
  std::vector<RewardCounters> all;
  for (const auto& lane : lanes_) all.push_back(lane->counters);
  return all;
}

}  // namespace trireme
