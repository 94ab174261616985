// RewardPool: runs rewards on threads of its own while generation goes on, and hands back whole groups.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "trainer/rewards/reward.h"

namespace trireme {

struct RewardedGroup {
  int64_t group_id = 0;
  std::vector<double> rewards;             // [samples] weighted sum over the rewards
  std::vector<std::vector<double>> parts;  // [rewards, samples] before weighting; 0 where failed
  std::vector<uint8_t> dropped;            // [samples] 1: a reward with policy "drop" failed; leave the sample out
  int64_t failures = 0;                    // failed (reward, sample) pairs, whatever the policy
  double seconds = 0;                      // from submit to done
};

struct RewardCounters {
  std::string name;
  int64_t scored = 0;  // responses, failed ones included
  int64_t failed = 0;
  int64_t dropped = 0;      // failed under policy "drop"
  double busy_seconds = 0;  // summed over threads
  std::string last_error;
};

// Every submitted group comes back exactly once from wait_any (as a group, or as the exception of policy "error").
// submit, wait_any, pending and counters may be called from any thread. The destructor cancels what runs and joins.
class RewardPool final {
 public:
  // Throws Error(kUser) for bad options, and where there are none, unless rewards are made `elsewhere` too: then groups
  // come back at once with rewards of 0.
  explicit RewardPool(std::vector<RewardOptions> options, bool elsewhere = false);
  ~RewardPool();
  RewardPool(const RewardPool&) = delete;
  RewardPool& operator=(const RewardPool&) = delete;

  // Before the first submit: has one response scored by each reward, again and again until it has an answer or `limit`
  // has passed. Throws Error(kUser) naming the reward for a mistake that no waiting mends, Error(kIo) at the limit.
  // `scores`: whether this pool will score anything; if not, such a mistake is only said.
  void probe(const RewardRequest& example, Milliseconds limit, bool scores = true);
  void submit(int64_t group_id, std::vector<RewardRequest> requests);
  // The next finished group, in order of finishing; nothing when the deadline passed first.
  // Throws Error(kIo) that names reward, group and reason when the group failed under policy "error".
  std::optional<RewardedGroup> wait_any(const Deadline& deadline);
  // Submitted and not yet handed out.
  int64_t pending() const;
  std::vector<RewardCounters> counters() const;

 private:
  struct Job;
  struct Lane;
  void work(Lane& lane, Reward& reward);
  void finish_part(Lane& lane, Job& job, std::vector<RewardResult> results, double seconds);

  std::vector<std::unique_ptr<Lane>> lanes_;  // one per reward: its own queue, so that a slow one holds up nobody else
  mutable std::mutex mutex_;                  // guards all below, the lanes' queues and counters included
  std::condition_variable finished_;
  std::deque<std::shared_ptr<Job>> done_;
  int64_t pending_ = 0;
  bool stopping_ = false;
};

}  // namespace trireme
