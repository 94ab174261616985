#include "trainer/rollout/scheduler.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace trireme {

namespace {

// Rows a resident should still be able to grow by after an admission or a preemption, so that the next step does not
// undo it.
constexpr int64_t kGrowthReserveRows = 16;

// A sequence that has an extent once the step begins.
struct Candidate {
  int64_t id = 0;
  int64_t old_start = -1;  // -1: admitted by this plan
  int64_t old_rows = 0;
  int64_t start = -1;  // -1: not placed yet
  int64_t rows = 0;
  int64_t cached = 0;
  int64_t donor = -1;  // index of the candidate whose prompt rows are copied, or -1
};

struct Gap {
  int64_t start = 0;
  int64_t rows = 0;
};

// First fit; the caller has checked that the rows exist in all.
bool take_gap(std::vector<Gap>& gaps, int64_t rows, int64_t& start) {
  for (Gap& gap : gaps) {
    if (gap.rows < rows) continue;
    start = gap.start;
    gap.start += rows;
    gap.rows -= rows;
    return true;
  }
  return false;
}

// Everything from row `next` on in its present order, then the admitted.
void compact(std::vector<Candidate>& candidates, const std::vector<int32_t>& by_start, int64_t next) {
  for (const int32_t i : by_start) {
    candidates[i].start = next;
    next += candidates[i].rows;
  }
  for (Candidate& c : candidates) {
    if (c.old_start >= 0) continue;
    c.start = next;
    next += c.rows;
  }
}

}  // namespace

// A plan while it is made.
struct Scheduler::Draft {
  std::vector<Candidate> candidates;
  int64_t rows = 0;  // sum of Candidate::rows
};

void StepPlan::clear() {
  preempted.clear();
  placements.clear();
  moves.clear();
  copies.clear();
  segments.clear();
  outputs.clear();
  tokens = prefill_tokens = decode_tokens = admitted = cache_rows = 0;
  crowded = false;
}

Scheduler::Scheduler(const SchedulerOptions& options) : options_(options) {
  if (options.cache_rows < 1) fail_user("rollout: the cache has no rows; give it more memory or a larger cache_rows");
  TRIREME_CHECK(options.first_row >= 0, "a scheduler's rows begin ahead of the arena");
  if (options.max_sequences < 1) fail_user("rollout: max_sequences must be at least 1");
  if (options.prefill_chunk_tokens < 1) fail_user("rollout: prefill_chunk_tokens must be at least 1");
  if (options.chunk_alignment < 1 || options.prefill_chunk_tokens < options.chunk_alignment) {
    fail_user("rollout: prefill_chunk_tokens is " + std::to_string(options.prefill_chunk_tokens) +
              "; on this device it must be at least " + std::to_string(options.chunk_alignment));
  }
  if (options.headroom_rows < 0) fail_user("rollout: headroom_rows must not be negative");
  if (!(options.grow_factor >= 1.0)) fail_user("rollout: grow_factor must be at least 1");
}

int64_t Scheduler::add_group(int64_t prompt_tokens, const std::vector<int64_t>& max_new) {
  const int64_t begin = append(prompt_tokens, max_new);
  // The first sample computes the prompt; the others wait for it.
  at(begin).state = State::kPending;
  pending_.insert(begin);
  return begin;
}

int64_t Scheduler::add_begun(int64_t prompt_tokens, const std::vector<int64_t>& max_new,
                             const std::vector<int64_t>& made) {
  TRIREME_CHECK(made.size() == max_new.size(), "samples that were begun, and others' lengths");
  for (size_t i = 0; i < made.size(); ++i)
    TRIREME_CHECK(made[i] >= 1 && made[i] < max_new[i], "a sample that was begun has no token, or has ended");
  const int64_t begin = append(prompt_tokens, max_new);
  for (size_t i = 0; i < made.size(); ++i) {
    const int64_t id = begin + static_cast<int64_t>(i);
    Sequence& s = at(id);
    s.length += made[i];
    s.state = State::kPending;
    pending_.insert(id);
    promise(s);
  }
  return begin;
}

// Sequences in no list yet.
int64_t Scheduler::append(int64_t prompt_tokens, const std::vector<int64_t>& max_new) {
  if (prompt_tokens < 1) fail_user("rollout: a prompt has no tokens");
  if (max_new.empty()) fail_user("rollout: a group has no samples");
  for (const int64_t limit : max_new) {
    if (limit < 1)
      fail_user("rollout: a sample may generate " + std::to_string(limit) + " tokens; it must be at least 1");
    const int64_t rows = prompt_tokens + limit - 1;
    if (rows > options_.cache_rows) {
      fail_user("rollout: a prompt of " + std::to_string(prompt_tokens) + " tokens with up to " +
                std::to_string(limit) + " new ones needs " + std::to_string(rows) +
                " cache rows but the whole cache has " + std::to_string(options_.cache_rows) +
                "; give the cache more memory or lower the length limit");
    }
  }
  const int64_t begin = first_id_ + static_cast<int64_t>(sequences_.size());
  const int64_t end = begin + static_cast<int64_t>(max_new.size());
  for (const int64_t limit : max_new) {
    Sequence s;
    s.group_begin = begin;
    s.group_end = end;
    s.prompt = prompt_tokens;
    s.length = prompt_tokens;
    s.max_length = prompt_tokens + limit;
    sequences_.push_back(s);
  }
  unfinished_ += end - begin;
  ++version_;
  return begin;
}

int64_t Scheduler::first_extent_rows(const Sequence& s) const {
  return std::max(s.length, std::min(s.max_rows(), s.length + options_.headroom_rows));
}

// Tokens to compute before the sequence decodes one at a time.
int64_t Scheduler::prefill_tokens(const Sequence& s, int64_t cached) {
  const int64_t missing = s.length - cached;
  return missing == 1 && cached >= s.prompt ? 0 : missing;
}

void Scheduler::plan(StepPlan& out) const {
  out.clear();
  out.version = version_;
  Draft draft;
  select_residents(draft, out);
  if (out.preempted.empty()) {
    admit(draft, out);
  } else {
    out.crowded = true;
  }
  place(draft, out);
  cut_segments(draft, out);
  out.cache_rows = draft.rows;
}

// Candidates are the residents with room for their known tokens; the newest go while that does not fit.
void Scheduler::select_residents(Draft& draft, StepPlan& out) const {
  std::vector<Candidate>& candidates = draft.candidates;
  candidates.reserve(residents_.size());
  int64_t reserve = 0;
  for (const int64_t id : residents_) {
    const Sequence& s = at(id);
    Candidate c;
    c.id = id;
    c.old_start = s.start;
    c.old_rows = s.rows;
    c.rows = std::max(s.rows, s.length);
    c.cached = s.cached;
    draft.rows += c.rows;
    reserve += std::min(kGrowthReserveRows, std::max<int64_t>(0, s.max_rows() - c.rows));
    candidates.push_back(c);
  }
  if (draft.rows <= options_.cache_rows) return;
  while (candidates.size() > 1 && draft.rows + reserve > options_.cache_rows) {
    const Candidate& c = candidates.back();
    draft.rows -= c.rows;
    reserve -= std::min(kGrowthReserveRows, std::max<int64_t>(0, at(c.id).max_rows() - c.rows));
    out.preempted.push_back(c.id);
    candidates.pop_back();
  }
}

// Pending sequences in the order of their ids, until one does not fit. A sample waits while a sibling is computing the
// prompt that it can copy.
void Scheduler::admit(Draft& draft, StepPlan& out) const {
  std::vector<Candidate>& candidates = draft.candidates;
  out.crowded = true;  // until all are admitted
  int64_t budget = options_.prefill_chunk_tokens;
  int64_t reserve = 0;
  for (const Candidate& c : candidates) {
    const Sequence& s = at(c.id);
    budget -= prefill_tokens(s, c.cached);
    reserve += std::min(kGrowthReserveRows, std::max<int64_t>(0, s.max_rows() - c.rows));
  }
  const size_t residents = candidates.size();
  int64_t promised_rows = promised_rows_;
  int64_t promised_sequences = promised_sequences_;
  int64_t group = -1;  // group_begin of the last one looked at, with the two answers about its siblings:
  int64_t donor = -1;
  bool prompt_under_way = false;
  for (const int64_t id : pending_) {
    const Sequence& s = at(id);
    if (s.group_begin != group) {
      group = s.group_begin;
      donor = -1;
      prompt_under_way = false;
      const auto end = candidates.begin() + static_cast<std::ptrdiff_t>(residents);
      auto c = std::lower_bound(candidates.begin(), end, group, [](const Candidate& a, int64_t b) { return a.id < b; });
      for (; c != end && c->id < s.group_end; ++c) {
        if (c->cached >= s.prompt && donor < 0) donor = c - candidates.begin();
        if (c->cached < s.prompt) prompt_under_way = true;
      }
    }
    if (donor < 0 && prompt_under_way) continue;
    int64_t cached = donor >= 0 ? s.prompt : 0;
    // Several tokens are computed again, the run must begin where a chunk may.
    if (s.length - cached > 1) cached = cached / options_.chunk_alignment * options_.chunk_alignment;
    const int64_t prefill = prefill_tokens(s, cached);
    if (prefill > 0 && budget <= 0) return;
    const int64_t rows = first_extent_rows(s);
    const bool new_group = s.length == s.prompt;
    if (!candidates.empty()) {
      // A new group may not take what the samples of the started ones will need.
      const int64_t kept_rows = reserve + (new_group ? promised_rows : 0);
      const int64_t kept_sequences = new_group ? promised_sequences : 0;
      if (draft.rows + rows + kept_rows > options_.cache_rows) return;
      if (static_cast<int64_t>(candidates.size()) + kept_sequences >= options_.max_sequences) return;
    }
    Candidate c;
    c.id = id;
    c.rows = rows;
    c.donor = donor;
    c.cached = cached;
    candidates.push_back(c);
    ++out.admitted;
    draft.rows += rows;
    budget -= prefill;
    reserve += std::min(kGrowthReserveRows, std::max<int64_t>(0, s.max_rows() - rows));
    if (donor < 0) prompt_under_way = true;
    if (new_group) {
      for (int64_t sibling = id + 1; sibling < s.group_end; ++sibling) {
        promised_rows += first_extent_rows(at(sibling));
        ++promised_sequences;
      }
    } else {
      promised_rows -= s.promised;
      --promised_sequences;
    }
  }
  out.crowded = false;
}

void Scheduler::place(Draft& draft, StepPlan& out) const {
  std::vector<Candidate>& candidates = draft.candidates;
  int64_t growing = 0;
  bool changed = false;
  for (const Candidate& c : candidates) {
    if (c.old_start >= 0 && c.rows > c.old_rows) ++growing;
    if (c.old_start < 0 || c.rows != c.old_rows) changed = true;
  }
  if (!changed) {
    for (Candidate& c : candidates) c.start = c.old_start;
    return;
  }
  // Those that grow share what is left, up to the growth factor each.
  for (Candidate& c : candidates) {
    if (growing == 0) break;
    if (c.old_start < 0 || c.rows <= c.old_rows) continue;
    const Sequence& s = at(c.id);
    const auto wanted = static_cast<int64_t>(std::ceil(static_cast<double>(c.old_rows) * options_.grow_factor));
    const int64_t more =
        std::clamp<int64_t>(std::min(wanted, s.max_rows()) - c.rows, 0, (options_.cache_rows - draft.rows) / growing);
    c.rows += more;
    draft.rows += more;
    --growing;
  }

  std::vector<int32_t> by_start;  // indices of those that have rows already
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].old_start >= 0) by_start.push_back(static_cast<int32_t>(i));
  }
  std::sort(by_start.begin(), by_start.end(),
            [&](int32_t a, int32_t b) { return candidates[a].old_start < candidates[b].old_start; });
  // Who fits where it is, stays. Rows that a mover leaves stay untouched in this step, so that the order of the moves
  // does not matter.
  std::vector<Gap> gaps;
  const int64_t end = options_.first_row + options_.cache_rows;
  int64_t free_from = options_.first_row;
  for (size_t i = 0; i < by_start.size(); ++i) {
    Candidate& c = candidates[by_start[i]];
    const int64_t next = i + 1 < by_start.size() ? candidates[by_start[i + 1]].old_start : end;
    const bool stays = c.old_start + c.rows <= next;
    if (stays) c.start = c.old_start;
    if (c.old_start > free_from) gaps.push_back({free_from, c.old_start - free_from});
    free_from = c.old_start + (stays ? c.rows : c.old_rows);
  }
  if (free_from < end) gaps.push_back({free_from, end - free_from});
  const bool fits = std::all_of(candidates.begin(), candidates.end(),
                                [&](Candidate& c) { return c.start >= 0 || take_gap(gaps, c.rows, c.start); });
  if (!fits) compact(candidates, by_start, options_.first_row);

  for (const Candidate& c : candidates) {
    if (c.start != c.old_start || c.rows != c.old_rows) out.placements.push_back({c.id, c.start, c.rows, c.cached});
    if (c.donor >= 0 && c.cached > 0) out.copies.push_back({candidates[c.donor].start, c.start, c.cached});
  }
  // Extents keep their order in a compaction: those that go down, lowest first, and then those that go up, highest
  // first, never overwrite rows that are still to be moved.
  for (const int32_t i : by_start) {
    const Candidate& c = candidates[i];
    if (c.start < c.old_start && c.cached > 0) out.moves.push_back({c.old_start, c.start, c.cached});
  }
  for (auto i = by_start.rbegin(); i != by_start.rend(); ++i) {
    const Candidate& c = candidates[*i];
    if (c.start > c.old_start && c.cached > 0) out.moves.push_back({c.old_start, c.start, c.cached});
  }
}

// Next tokens first, then the longer stretches as far as the budget goes, each in the order of ids.
void Scheduler::cut_segments(Draft& draft, StepPlan& out) const {
  std::vector<Candidate>& candidates = draft.candidates;
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  for (const bool decoding : {true, false}) {
    for (const Candidate& c : candidates) {
      const Sequence& s = at(c.id);
      const int64_t prefill = prefill_tokens(s, c.cached);
      if ((prefill == 0) != decoding) continue;
      int64_t count = decoding ? 1 : std::min(prefill, options_.prefill_chunk_tokens - out.prefill_tokens);
      if (count < prefill && !decoding) {  // cached is a multiple of the alignment, and so stays
        count = count / options_.chunk_alignment * options_.chunk_alignment;
      }
      if (count == 0) return;
      out.segments.push_back({c.id, c.start, c.cached, count});
      out.tokens += count;
      (decoding ? out.decode_tokens : out.prefill_tokens) += count;
      if (c.cached + count < s.length) return;  // the budget is spent
      const bool first_tokens = s.length == s.prompt;
      const int64_t end = first_tokens ? s.group_end : c.id + 1;
      for (int64_t id = c.id; id < end; ++id) out.outputs.push_back({id, out.tokens - 1, s.length});
    }
  }
}

void Scheduler::promise(Sequence& s) {
  unpromise(s);
  s.promised = first_extent_rows(s);
  promised_rows_ += s.promised;
  ++promised_sequences_;
}

void Scheduler::unpromise(Sequence& s) {
  if (s.promised == 0) return;
  promised_rows_ -= s.promised;
  --promised_sequences_;
  s.promised = 0;
}

// Resident -> pending; the caller takes the id out of residents_.
void Scheduler::evict(int64_t id) {
  Sequence& s = at(id);
  used_rows_ -= s.rows;
  s.start = s.rows = s.cached = 0;
  s.state = State::kPending;
  pending_.insert(id);
  if (s.length > s.prompt) {
    promise(s);
  } else {  // its group has no tokens yet: it is a new group again
    for (int64_t sibling = id + 1; sibling < s.group_end; ++sibling) unpromise(at(sibling));
  }
}

void Scheduler::commit(const StepPlan& plan) {
  TRIREME_CHECK(plan.version == version_,
                "a scheduler plan was committed after the state it was made from had changed");
  ++version_;
  for (const int64_t id : plan.preempted) evict(id);
  residents_.resize(residents_.size() - plan.preempted.size());  // they are the newest residents
  const auto old_residents = static_cast<std::ptrdiff_t>(residents_.size());
  for (const Placement& p : plan.placements) {
    Sequence& s = at(p.sequence);
    if (s.state == State::kPending) {
      pending_.erase(p.sequence);
      unpromise(s);
      s.state = State::kResident;
      residents_.push_back(p.sequence);
      if (s.length == s.prompt) {
        for (int64_t sibling = p.sequence + 1; sibling < s.group_end; ++sibling) promise(at(sibling));
      }
    }
    used_rows_ += p.rows - s.rows;
    s.start = p.start;
    s.rows = p.rows;
    s.cached = p.cached;
  }
  std::sort(residents_.begin() + old_residents, residents_.end());
  std::inplace_merge(residents_.begin(), residents_.begin() + old_residents, residents_.end());
  for (const Segment& segment : plan.segments) at(segment.sequence).cached += segment.count;
  for (const Output& output : plan.outputs) {
    Sequence& s = at(output.sequence);
    ++s.length;
    if (s.state == State::kUnstarted) {
      s.state = State::kPending;
      pending_.insert(output.sequence);
      promise(s);
    }
  }
  for (const Output& output : plan.outputs) {
    const Sequence& s = at(output.sequence);
    if (s.length == s.max_length) finish(output.sequence);
  }
  forget_done();
}

void Scheduler::stop(int64_t id) {
  if (id < first_id_) return;
  TRIREME_CHECK(id < first_id_ + static_cast<int64_t>(sequences_.size()), "unknown sequence " + std::to_string(id));
  if (at(id).state == State::kDone) return;
  TRIREME_CHECK(at(id).state != State::kUnstarted, "a sequence was stopped before it had a token");
  ++version_;
  finish(id);
  forget_done();
}

void Scheduler::finish(int64_t id) {
  Sequence& s = at(id);
  if (s.state == State::kPending) {
    pending_.erase(id);
    unpromise(s);
  } else {
    hand_over(id);
    residents_.erase(std::lower_bound(residents_.begin(), residents_.end(), id));
    used_rows_ -= s.rows;
    s.start = s.rows = s.cached = 0;
  }
  s.state = State::kDone;
  --unfinished_;
}

// The last holder of a prompt gives its extent to the first sibling that waits for one, else the prompt would be
// computed again.
void Scheduler::hand_over(int64_t id) {
  Sequence& s = at(id);
  if (s.cached < s.prompt || promised_sequences_ == 0) return;
  int64_t heir = -1;
  for (int64_t other = std::max(s.group_begin, first_id_); other < s.group_end; ++other) {
    const Sequence& o = at(other);
    if (other == id) continue;
    if (o.state == State::kResident && o.cached >= o.prompt) return;
    if (o.state == State::kPending && heir < 0) heir = other;
  }
  if (heir < 0) return;
  Sequence& h = at(heir);
  pending_.erase(heir);
  unpromise(h);
  h.state = State::kResident;
  h.start = s.start;
  h.rows = std::min(s.rows, h.max_rows());
  h.cached = s.prompt;
  used_rows_ += h.rows;  // the caller takes s.rows off
  residents_.insert(std::lower_bound(residents_.begin(), residents_.end(), heir), heir);
}

bool Scheduler::reads_cached(int64_t id) const {
  if (id < first_id_ || at(id).state == State::kDone) return false;
  const Sequence& s = at(id);
  for (int64_t each = std::max(s.group_begin, first_id_); each < s.group_end; ++each) {
    const Sequence& other = at(each);
    if (other.state == State::kResident && other.cached > 0) return true;
  }
  return false;
}

void Scheduler::drop_cache() {
  ++version_;
  for (const int64_t id : residents_) evict(id);
  residents_.clear();
}

void Scheduler::forget_done() {
  while (!sequences_.empty() && sequences_.front().state == State::kDone) {
    sequences_.pop_front();
    ++first_id_;
  }
}

void Scheduler::check() const {
  int64_t rows = 0;
  int64_t unfinished = 0;
  int64_t resident = 0;
  int64_t pending = 0;
  int64_t promised = 0;
  int64_t promised_count = 0;
  std::vector<std::pair<int64_t, int64_t>> extents;
  for (int64_t id = first_id_; id < first_id_ + static_cast<int64_t>(sequences_.size()); ++id) {
    const Sequence& s = at(id);
    const std::string who = "sequence " + std::to_string(id) + ": ";
    const bool holds = s.state == State::kResident;
    if (s.state != State::kDone) ++unfinished;
    TRIREME_CHECK(holds == (s.rows > 0), who + "rows without residence");
    TRIREME_CHECK(s.cached <= s.rows && s.rows <= s.max_rows(), who + "rows out of bounds");
    TRIREME_CHECK(s.state == State::kDone || s.length < s.max_length, who + "ran over its length");
    TRIREME_CHECK(!holds || s.cached < s.length, who + "nothing left to compute");
    TRIREME_CHECK(s.state != State::kUnstarted || s.length == s.prompt, who + "unstarted with tokens");
    TRIREME_CHECK((s.state == State::kPending) == (pending_.count(id) == 1), who + "pending list");
    TRIREME_CHECK(holds == std::binary_search(residents_.begin(), residents_.end(), id), who + "resident list");
    resident += holds ? 1 : 0;
    pending += s.state == State::kPending ? 1 : 0;
    promised += s.promised;
    promised_count += s.promised > 0 ? 1 : 0;
    TRIREME_CHECK(s.promised == 0 || s.state == State::kUnstarted || s.state == State::kPending, who + "promise kept");
    rows += s.rows;
    if (holds) extents.emplace_back(s.start, s.rows);
  }
  std::sort(extents.begin(), extents.end());
  int64_t end = options_.first_row;
  for (const auto& [start, count] : extents) {
    TRIREME_CHECK(start >= end, "extents overlap, or begin ahead of the cache");
    end = start + count;
  }
  TRIREME_CHECK(end <= options_.first_row + options_.cache_rows, "an extent ends after the cache");
  TRIREME_CHECK(rows == used_rows_, "used rows do not add up");
  TRIREME_CHECK(unfinished == unfinished_, "unfinished sequences do not add up");
  TRIREME_CHECK(resident == residents(), "residents do not add up");
  TRIREME_CHECK(pending == static_cast<int64_t>(pending_.size()), "pending sequences do not add up");
  TRIREME_CHECK(promised == promised_rows_ && promised_count == promised_sequences_, "promises do not add up");
  TRIREME_CHECK(resident <= options_.max_sequences, "too many residents");
}

}  // namespace trireme
