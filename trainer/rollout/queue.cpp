#include "trainer/rollout/queue.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace trireme {
namespace {

constexpr int64_t kBlock = 8;           // siblings on one rank, where a group is spread over several
constexpr int64_t kSmallestBlock = 4;   // fewer would compute the prompt too often
constexpr int64_t kSamplesAtOnce = 64;  // so that what an engine turns out to have no room for stays with the others

// Siblings that stay together where each group is dealt to `ranks`: of a size that divides the group, if any does.
int64_t block_of(int64_t samples, int64_t ranks) {
  const int64_t most = std::min(samples, std::max(kBlock, samples / ranks));
  for (int64_t size = most; size >= std::min(samples, kSmallestBlock); --size) {
    if (samples % size == 0) return size;
  }
  return most;
}

}  // namespace

bool take_and_step(QueueEngine& engine, SampleSource& source) {
  const int64_t room = source.places() - engine.unfinished();
  if (room > 0 && !(engine.crowded() && engine.unfinished() > 0)) {
    for (const SampleSpan& span : source.take(room)) engine.submit(span);
  }
  if (!engine.somebody_unfinished()) return false;
  engine.step();
  return true;
}

int64_t LocalCounter::add(const std::string& key, int64_t amount) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TRIREME_CHECK(key_.empty() || key_ == key, "a local counter was used for '" + key_ + "' and '" + key + "'");
  key_ = key;
  return value_ += amount;
}

SampleQueue::SampleQueue(const QueueShape& shape, CounterStore& store, std::string key)
    : shape_(shape), store_(store), key_(std::move(key)) {
  if (shape.groups < 0 || shape.samples < 1 || shape.places < 1) {
    fail_user("rollout queue: groups must be >= 0, samples and places >= 1");
  }
  if (shape.rank < 0 || shape.rank >= shape.ranks) fail_user("rollout queue: the rank is none of the ranks");
  unit_ = shape.whole_groups ? shape.samples : 1;
  total_ = shape.groups * shape.samples / unit_;
  const int64_t even = total_ / shape.ranks + (shape.rank < total_ % shape.ranks ? 1 : 0);
  const int64_t most = std::max<int64_t>(1, shape.places / unit_);
  share_ = std::min(even, most);
  places_ = share_ * unit_;
  const int64_t shares = std::min(total_, shape.ranks * most);
  one_wave_ = shares == total_;
  if (shape.ranks == 1 || shape.whole_groups) return;
  block_ = block_of(shape.samples, shape.ranks);
  rounds_ = shares / (shape.ranks * block_);
}

// The tickets of the shares go through the groups in strides, so that each rank's come from many prompts: responses to
// one prompt tend to be long together.
int64_t SampleQueue::sample_at(int64_t ticket) const {
  if (ticket >= rounds_ * shape_.ranks * block_) return ticket * unit_;
  const int64_t block = ticket / block_;
  return (block % rounds_ * shape_.ranks + block / rounds_) * block_ + ticket % block_;
}

int64_t SampleQueue::amount(int64_t room) const {
  const int64_t wanted = (room + unit_ - 1) / unit_;
  int64_t count = std::min(wanted, share_ - taken_);
  if (taken_ >= share_) {
    // What is left goes in smaller and smaller pieces, so that nobody is the last with many.
    const int64_t left = total_ - seen_;
    const int64_t most = shape_.ranks == 1 ? left : std::max<int64_t>(1, left / (2 * shape_.ranks));
    count = std::min(one_wave_ ? wanted : std::max(wanted, shape_.samples / unit_), most);
  }
  if (shape_.ranks > 1)
    return std::min(count, std::max<int64_t>(1, std::max(kSamplesAtOnce, shape_.places / 4) / unit_));
  const int64_t end = seen_ + count;  // nobody else takes any: whole groups
  return count + (shape_.whole_groups ? 0 : (shape_.samples - end % shape_.samples) % shape_.samples);
}

std::vector<SampleSpan> SampleQueue::take(int64_t room) {
  std::vector<SampleSpan> spans;
  if (room < 1 || places_ == 0 || seen_ >= total_) return spans;
  const int64_t count = amount(room);
  const int64_t first = store_.add(key_, count) - count;
  seen_ = first + count;
  for (int64_t ticket = first; ticket < std::min(first + count, total_); ++ticket) {
    ++taken_;
    const int64_t sample = sample_at(ticket);
    const int64_t group = sample / shape_.samples, index = sample % shape_.samples;
    SampleSpan* last = spans.empty() ? nullptr : &spans.back();
    if (last != nullptr && last->group == group && last->first_sample + last->count == index) {
      last->count += unit_;
    } else {
      spans.push_back({group, index, unit_});
    }
  }
  return spans;
}

}  // namespace trireme
