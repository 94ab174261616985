#include "trainer/rollout/ledger.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace trireme {

Ledger::Ledger(const LedgerOptions& options, int64_t first_step, int64_t first_group)
    : options_(options), next_step_(first_step), current_step_(first_step), first_group_(first_group) {
  if (options.groups_per_step < 1 || options.samples_per_group < 1 || options.max_age < 0 ||
      options.critic_only_steps < 0 || options.most_steps_ahead < 0 || options.run_samples < 0 || first_step < 1 ||
      first_group < 0)
    fail_user("ledger: groups_per_step, samples_per_group and the first step must be >= 1, the rest >= 0");
  if (options.teaches_nothing && options.max_groups_of_step < options.groups_per_step)
    fail_user("ledger: a step may use up fewer groups than it wants");
  run_samples_ =
      options.run_samples == 0 ? options.samples_per_group : std::min(options.run_samples, options.samples_per_group);
  if (options.most_steps_ahead < options.max_age)
    fail_user("ledger: groups may be begun for fewer steps ahead than their age allows");
  if (options.exact_version && options.max_age > 0 && options.teaches_nothing)
    fail_user("ledger: exact versions with an age are not for groups that may be left out");
  newest_version_ = gone_before_ = version_of(first_step);
}

int64_t Ledger::version_of(int64_t step) const { return std::max<int64_t>(0, step - 1 - options_.critic_only_steps); }

int64_t Ledger::wanted_version(int64_t step) const { return std::max<int64_t>(0, version_of(step) - options_.max_age); }

Ledger::Begin Ledger::begin(int64_t step, int64_t version) const {
  const int64_t wanted = wanted_version(step);
  if (step > options_.last_step || version < wanted || step - current_step_ > options_.most_steps_ahead)
    return Begin::kNever;
  const bool fits = !options_.exact_version || version == wanted || wanted < gone_before_;
  return fits ? Begin::kYes : Begin::kNo;
}

template <typename Visit>
void Ledger::walk(Visit&& visit) const {
  int64_t ahead = 0;  // groups that are kept, as far as is known
  for (int64_t number = first_group_;; ++number) {
    const bool there = number < end_group();
    const Group* group = there ? &groups_[static_cast<size_t>(number - first_group_)] : nullptr;
    if (there && group->left_out) continue;
    if (!visit(number, group, next_step_ + ahead / options_.groups_per_step)) return;
    ++ahead;
  }
}

int64_t Ledger::latest_step(int64_t number) const {
  int64_t found = next_step_;
  walk([&](int64_t each, const Group*, int64_t step) {
    found = step;
    return each < number;
  });
  return found;
}

void Ledger::add_group() {
  Group& group = groups_.emplace_back();
  group.holder.assign(static_cast<size_t>(options_.samples_per_group), kOpen);
  group.samples.resize(static_cast<size_t>(options_.samples_per_group));
  group.open = options_.samples_per_group;
}

// In data-set order, until the places are full.
std::vector<SampleSpan> Ledger::open_runs(int64_t places, int64_t version) const {
  std::vector<SampleSpan> runs;
  int64_t left = places;
  walk([&](int64_t number, const Group* group, int64_t step) {
    const Begin may = begin(step, version);
    if (number >= end_at_ || may == Begin::kNever) return false;
    if (may == Begin::kNo) return true;
    const auto open = [&](int64_t i) { return group == nullptr || group->holder[static_cast<size_t>(i)] == kOpen; };
    for (int64_t i = 0; i < options_.samples_per_group && left > 0;) {
      if (!open(i)) {
        ++i;
        continue;
      }
      const int64_t end = std::min(options_.samples_per_group, (i / run_samples_ + 1) * run_samples_);
      SampleSpan& run = runs.emplace_back(SampleSpan{number, i, 0});
      for (; i < end && open(i); ++i) ++run.count;
      left -= run.count;
    }
    return left > 0;
  });
  return runs;
}

std::vector<LeasedRun> Ledger::lease(int64_t engine, int64_t places, int64_t version) {
  TRIREME_CHECK(version <= newest_version_, "an engine has weights that nobody has trained");
  std::vector<LeasedRun> runs;
  for (const SampleSpan& span : open_runs(places, version)) {
    while (span.group >= end_group()) add_group();
    Group& group = at(span.group);
    const int64_t id = next_run_++;
    std::fill_n(group.holder.begin() + span.first_sample, span.count, id);
    group.open -= span.count;
    runs_[id] = {engine, span, version};
    runs.push_back({id, engine, span, version});
  }
  return runs;
}

int64_t Ledger::leasable(int64_t version) const {
  int64_t samples = 0;
  walk([&](int64_t number, const Group* group, int64_t step) {
    const Begin may = begin(step, version);
    if (number >= end_at_ || may == Begin::kNever) return false;
    if (may == Begin::kYes) samples += group == nullptr ? options_.samples_per_group : group->open;
    return true;
  });
  return samples;
}

std::vector<int64_t> Ledger::gone_before(int64_t version) {
  std::vector<int64_t> groups;
  if (!options_.exact_version || version <= gone_before_) return groups;
  walk([&](int64_t number, const Group* group, int64_t step) {
    const int64_t wanted = wanted_version(step);
    if (number >= end_at_ || step > options_.last_step || wanted >= version) return false;
    if (wanted >= gone_before_ && (group == nullptr || group->open > 0)) groups.push_back(number);
    return true;
  });
  gone_before_ = version;
  return groups;
}

std::vector<int64_t> Ledger::wanting_older() const {
  std::vector<int64_t> groups;
  if (!options_.exact_version) return groups;
  walk([&](int64_t number, const Group* group, int64_t step) {
    if (number >= end_at_ || step > options_.last_step || wanted_version(step) >= newest_version_) return false;
    if (group == nullptr || !whole(*group)) groups.push_back(number);
    return true;
  });
  return groups;
}

void Ledger::put(int64_t number, Sample sample) {
  Group& group = at(number);
  const auto index = static_cast<size_t>(sample.index);
  if (group.holder[index] == kOpen) --group.open;
  group.holder[index] = kComplete;
  group.samples[index] = std::move(sample);
  ++group.complete;
  if (whole(group) && options_.teaches_nothing) group.left_out = options_.teaches_nothing(group.samples);
}

Completion Ledger::complete(int64_t id, std::vector<Sample> samples) {
  const auto found = runs_.find(id);
  if (found == runs_.end()) return id >= 0 && id < next_run_ ? Completion::kKnown : Completion::kForeign;
  const Run run = found->second;
  if (static_cast<int64_t>(samples.size()) != run.span.count) return Completion::kForeign;
  for (size_t i = 0; i < samples.size(); ++i) {
    const Sample& sample = samples[i];
    if (sample.group != run.span.group || sample.index != run.span.first_sample + static_cast<int64_t>(i) ||
        !spans_tile(sample.weight_versions, static_cast<int64_t>(sample.response.size())))
      return Completion::kForeign;
  }
  Group& group = at(run.span.group);
  const auto first = group.holder.begin() + run.span.first_sample;
  if (std::all_of(first, first + run.span.count, [](int64_t holder) { return holder == kComplete; }))
    return Completion::kKnown;
  const int64_t oldest = std::max(run.version, version_of(latest_step(run.span.group)) - options_.max_age);
  const bool fits = std::all_of(samples.begin(), samples.end(), [&](const Sample& sample) {
    return sample.weight_versions.empty() || (sample.weight_versions.front().version >= oldest &&
                                              sample.weight_versions.back().version <= newest_version_);
  });
  if (!fits) {
    for (int64_t& holder : group.holder) {
      if (holder != id) continue;
      holder = kOpen;
      ++group.open;
    }
    return Completion::kTooOld;
  }
  for (Sample& sample : samples) {
    if (group.holder[static_cast<size_t>(sample.index)] != kComplete) put(run.span.group, std::move(sample));
  }
  return Completion::kTaken;
}

int64_t Ledger::lost(int64_t engine) {
  int64_t samples = 0;
  for (const auto& [id, run] : runs_) {
    if (run.engine != engine) continue;
    Group& group = at(run.span.group);
    for (int64_t i = run.span.first_sample; i < run.span.first_sample + run.span.count; ++i) {
      if (group.holder[static_cast<size_t>(i)] != id) continue;
      group.holder[static_cast<size_t>(i)] = kOpen;
      ++group.open;
      ++samples;
    }
  }
  return samples;
}

std::vector<MissingGroup> Ledger::missing() const {
  std::vector<MissingGroup> missing;
  walk([&](int64_t number, const Group* group, int64_t step) {
    const bool used_up =
        options_.teaches_nothing && number - first_group_ >= options_.max_groups_of_step;  // exhausted() says the rest
    if (step != next_step_ || used_up) return false;
    if (group != nullptr && whole(*group)) return true;
    MissingGroup one{number, group == nullptr ? options_.samples_per_group : group->open, {}};
    std::map<int64_t, int64_t> held;
    for (const int64_t holder : group == nullptr ? std::vector<int64_t>{} : group->holder) {
      if (holder >= 0) ++held[runs_.at(holder).engine];
    }
    for (const auto& [engine, samples] : held) one.holders.push_back({engine, samples});
    missing.push_back(std::move(one));
    return true;
  });
  return missing;
}

std::optional<Ledger::Exhausted> Ledger::exhausted() const {
  if (!options_.teaches_nothing) return std::nullopt;
  int64_t kept = 0;
  for (size_t i = 0; i < static_cast<size_t>(options_.max_groups_of_step); ++i) {
    if (i >= groups_.size() || !whole(groups_[i])) return std::nullopt;
    kept += groups_[i].left_out ? 0 : 1;
    if (kept == options_.groups_per_step) return std::nullopt;
  }
  return Exhausted{kept, options_.max_groups_of_step};
}

void Ledger::visit_ready(const std::function<void(const Sample* samples, size_t count)>& visit) const {
  walk([&](int64_t, const Group* group, int64_t step) {
    if (group == nullptr || step != next_step_) return false;
    const size_t size = group->holder.size();
    for (size_t begin = 0, end = 0; begin < size; begin = end + 1) {
      for (end = begin; end < size && group->holder[end] == kComplete; ++end) continue;
      if (end > begin) visit(&group->samples[begin], end - begin);
    }
    return true;
  });
}

std::vector<LedgerGroup> Ledger::take(int64_t step) {
  TRIREME_CHECK(step == next_step_,
                "step " + std::to_string(step) + " was taken, the next one is " + std::to_string(next_step_));
  TRIREME_CHECK(newest_version_ == version_of(step), "a step was taken before the one ahead was trained");
  TRIREME_CHECK(complete(), "step " + std::to_string(step) + " was taken before it was complete");
  std::vector<LedgerGroup> taken;
  int64_t kept = 0;
  while (kept < options_.groups_per_step) {
    Group& group = groups_.front();
    taken.push_back({first_group_, !group.left_out, std::move(group.samples)});
    kept += group.left_out ? 0 : 1;
    groups_.pop_front();
    ++first_group_;
  }
  std::erase_if(runs_, [&](const auto& run) { return run.second.span.group < first_group_; });
  ++next_step_;
  return taken;
}

void Ledger::trained(int64_t step) {
  TRIREME_CHECK(step + 1 == next_step_, "step " + std::to_string(step) + " is trained, but was not the last one taken");
  current_step_ = next_step_;
  newest_version_ = version_of(next_step_);
}

std::vector<LedgerGroup> Ledger::whole_groups() const {
  std::vector<LedgerGroup> result;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (whole(groups_[i]))
      result.push_back({first_group_ + static_cast<int64_t>(i), !groups_[i].left_out, groups_[i].samples});
  }
  return result;
}

int64_t Ledger::restore(std::vector<LedgerGroup> groups) {
  TRIREME_CHECK(groups_.empty() && next_run_ == 0, "a ledger was restored after its beginning");
  std::sort(groups.begin(), groups.end(),
            [](const LedgerGroup& a, const LedgerGroup& b) { return a.number < b.number; });
  int64_t refused = 0;
  for (LedgerGroup& group : groups) {
    // In order: which groups ahead are left out is known by now.
    const auto valid = [&] {
      if (group.number < first_group_ || group.number >= end_at_) return false;
      if (static_cast<int64_t>(group.samples.size()) != options_.samples_per_group) return false;
      const int64_t step = latest_step(group.number), oldest = version_of(step) - options_.max_age;
      if (step > options_.last_step) return false;
      for (size_t i = 0; i < group.samples.size(); ++i) {
        const Sample& sample = group.samples[i];
        const VersionSpans& spans = sample.weight_versions;
        if (sample.index != static_cast<int64_t>(i)) return false;
        if (!spans.empty() && (spans.front().version < oldest || spans.back().version > newest_version_)) return false;
      }
      return true;
    };
    if (!valid() || (group.number < end_group() && at(group.number).complete > 0)) {
      ++refused;
      continue;
    }
    while (group.number >= end_group()) add_group();
    for (Sample& sample : group.samples) {
      sample.group = group.number;
      put(group.number, std::move(sample));
    }
  }
  return refused;
}

Ledger::Counts Ledger::counts() const {
  Counts counts;
  for (const Group& group : groups_) {
    if (whole(group)) {
      ++counts.complete;
    } else {
      ++(group.open == options_.samples_per_group ? counts.open : counts.leased);
    }
    counts.leased_samples += options_.samples_per_group - group.open - group.complete;
  }
  return counts;
}

std::map<int64_t, int64_t> Ledger::held() const {
  std::map<int64_t, int64_t> held;
  for (const Group& group : groups_) {
    for (const int64_t holder : group.holder) {
      if (holder >= 0) ++held[runs_.at(holder).engine];
    }
  }
  return held;
}

std::vector<LeasedRun> deal_evenly(Ledger& ledger, int64_t engines, int64_t places) {
  std::vector<int64_t> has(static_cast<size_t>(engines), 0);
  int64_t total = ledger.leasable();
  for (const auto& [engine, samples] : ledger.held()) {
    total += samples;
    if (engine >= 0 && engine < engines) has[static_cast<size_t>(engine)] = samples;
  }
  const int64_t share = std::min(places, (total + engines - 1) / engines);
  std::vector<LeasedRun> dealt;
  while (true) {
    const auto fewest = std::min_element(has.begin(), has.end());
    if (*fewest >= share) return dealt;
    const std::vector<LeasedRun> run = ledger.lease(fewest - has.begin(), 1, ledger.newest_version());
    if (run.empty()) return dealt;
    *fewest += run.front().span.count;
    dealt.push_back(run.front());
  }
}

std::string describe(const std::vector<MissingGroup>& missing, const std::string& engine) {
  constexpr size_t kNamed = 5;
  if (missing.empty()) return "no group";
  std::vector<std::string> numbers, who;
  std::map<int64_t, int64_t> held;
  int64_t open = 0;
  for (const MissingGroup& group : missing) {
    if (numbers.size() < kNamed) numbers.push_back(std::to_string(group.number));
    open += group.open;
    for (const MissingGroup::Holder& holder : group.holders) held[holder.engine] += holder.samples;
  }
  for (const auto& [number, samples] : held)
    who.push_back(engine + " " + std::to_string(number) + " has " + std::to_string(samples) + " of their samples");
  if (open > 0) who.push_back("nobody has " + std::to_string(open));
  const std::string more =
      missing.size() > kNamed ? " and " + std::to_string(missing.size() - kNamed) + " more" : std::string();
  return (missing.size() == 1 ? "group " : "groups ") + join(numbers, ", ") + more + " (" + join(who, ", ") + ")";
}

}  // namespace trireme
