// Scheduler: who computes which tokens in the next step and where their cache rows lie. Lengths only: no token
// values, no tensors. plan() looks, commit() does; README.md has the invariants.
#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <string>
#include <vector>

namespace trireme {

struct SchedulerOptions {
  int64_t cache_rows = 0;               // rows (token positions) of the cache arena that are this scheduler's
  int64_t first_row = 0;                // the first of them; plans speak of rows of the whole arena
  int64_t max_sequences = 256;          // resident at once
  int64_t prefill_chunk_tokens = 2048;  // budget of a step for everything but the one next token of each sequence
  int64_t headroom_rows = 64;  // a new extent has this many rows beyond the known tokens (capped by the sequence's end)
  // A chunk of a prompt ends at a multiple of this many tokens or at its end (kChunkAlignment on CUDA).
  int64_t chunk_alignment = 1;
  double grow_factor = 1.5;  // an extent that is full becomes this much larger, cache permitting
};

// `rows` cache rows from row `from` to row `to`, in every layer.
struct RowCopy {
  int64_t from = 0;
  int64_t to = 0;
  int64_t rows = 0;
  bool operator==(const RowCopy&) const = default;
};

// A sequence's new extent: [start, start + rows), of which the first `cached` rows hold its first tokens once moves and
// copies are done.
struct Placement {
  int64_t sequence = 0;
  int64_t start = 0;
  int64_t rows = 0;
  int64_t cached = 0;
  bool operator==(const Placement&) const = default;
};

// Tokens [past, past + count) of one sequence, computed in this step over the `past` rows already cached at `start`.
struct Segment {
  int64_t sequence = 0;
  int64_t start = 0;
  int64_t past = 0;
  int64_t count = 0;
  bool operator==(const Segment&) const = default;
};

// One token sampled in this step, from the hidden state of flat row `row`, for token index `position` of `sequence`.
struct Output {
  int64_t sequence = 0;
  int64_t row = 0;
  int64_t position = 0;
  bool operator==(const Output&) const = default;
};

// One step. To carry it out: the moves in their order, the copies, the forward pass over the segments, the outputs.
struct StepPlan {
  std::vector<int64_t> preempted;     // sequences that lose their rows (and are computed again later)
  std::vector<Placement> placements;  // new extents: admitted, grown, moved
  std::vector<RowCopy> moves;         // residents' rows to their new extents; each with the meaning of memmove
  std::vector<RowCopy> copies;        // a resident sibling's prompt rows into an admitted sequence's extent
  std::vector<Segment> segments;
  std::vector<Output> outputs;
  int64_t tokens = 0;  // flat rows of the step: prefill_tokens + decode_tokens
  int64_t prefill_tokens = 0;
  int64_t decode_tokens = 0;  // one next token each; never limited
  int64_t admitted = 0;
  int64_t cache_rows = 0;  // in use during the step
  bool crowded = false;    // a sequence that could begin found no room: budget, rows or places
  uint64_t version = 0;    // state it was made from; commit() refuses another

  bool empty() const { return segments.empty(); }
  void clear();
};

// Not thread-safe: one thread owns it. The same calls give the same plans.
class Scheduler final {
 public:
  explicit Scheduler(const SchedulerOptions& options);  // throws Error(kUser) on impossible options

  // A group whose samples share a prompt of `prompt_tokens`; sample i ends after max_new[i] >= 1 tokens at the latest.
  // Returns the first sample's sequence id; the ids of a group are consecutive, ids are never used twice.
  // Throws Error(kUser) when a sample could not fit into the whole cache.
  int64_t add_group(int64_t prompt_tokens, const std::vector<int64_t>& max_new);
  // Likewise samples that were begun elsewhere: sample i has made[i] tokens, 1 or more and fewer than max_new[i]. They
  // are computed again, as after a preemption.
  int64_t add_begun(int64_t prompt_tokens, const std::vector<int64_t>& max_new, const std::vector<int64_t>& made);

  // The next step, into a plan whose memory is used again. Changes nothing here; empty only when idle().
  void plan(StepPlan& out) const;
  // Carries out a plan of the present state: extents, cached rows, one more token for each output. A sequence that has
  // reached its length is released.
  void commit(const StepPlan& plan);
  // The sequence ended by itself (a stop token). Its rows are free for the next plan. Nothing if it has ended already.
  void stop(int64_t sequence);
  // Forgets all cached rows: residents are computed again (weights changed).
  void drop_cache();

  // Whether rows are cached that the sequence continues or begins with: its own, or a sibling's with the prompt. Not
  // once it has ended, of whose tokens the last may not have been looked at.
  bool reads_cached(int64_t sequence) const;

  bool idle() const { return unfinished_ == 0; }
  int64_t unfinished() const { return unfinished_; }
  int64_t residents() const { return static_cast<int64_t>(residents_.size()); }
  int64_t used_rows() const { return used_rows_; }
  const SchedulerOptions& options() const { return options_; }
  // Throws Error(kInternal) when an invariant of README.md is broken. O(residents log residents); for tests.
  void check() const;

 private:
  enum class State : uint8_t {
    kUnstarted,  // waits for its group's first tokens
    kPending,    // wants an extent
    kResident,   // has one
    kDone,
  };
  struct Sequence {
    State state = State::kUnstarted;
    int64_t group_begin = 0;  // ids [group_begin, group_end) share the prompt
    int64_t group_end = 0;
    int64_t prompt = 0;
    int64_t length = 0;      // known tokens: prompt + sampled
    int64_t max_length = 0;  // prompt + max_new
    int64_t cached = 0;      // rows that hold tokens [0, cached)
    int64_t start = 0;
    int64_t rows = 0;
    int64_t promised = 0;  // rows of its first extent while it waits in a started group, else 0
    // The last token is never fed, so it needs no row.
    int64_t max_rows() const { return max_length - 1; }
  };

  Sequence& at(int64_t id) { return sequences_[id - first_id_]; }
  const Sequence& at(int64_t id) const { return sequences_[id - first_id_]; }
  int64_t first_extent_rows(const Sequence& s) const;
  static int64_t prefill_tokens(const Sequence& s, int64_t cached);
  int64_t append(int64_t prompt_tokens, const std::vector<int64_t>& max_new);
  void promise(Sequence& s);
  void unpromise(Sequence& s);
  void evict(int64_t id);
  void finish(int64_t id);
  void hand_over(int64_t id);
  void forget_done();
  struct Draft;
  void select_residents(Draft& draft, StepPlan& out) const;
  void admit(Draft& draft, StepPlan& out) const;
  void place(Draft& draft, StepPlan& out) const;
  void cut_segments(Draft& draft, StepPlan& out) const;

  SchedulerOptions options_;
  std::deque<Sequence> sequences_;  // ids first_id_, first_id_ + 1, ...; finished ones leave at the front
  int64_t first_id_ = 0;
  std::vector<int64_t> residents_;  // ids, ascending
  std::set<int64_t> pending_;       // ids
  int64_t unfinished_ = 0;
  int64_t used_rows_ = 0;
  int64_t promised_rows_ = 0;       // sum of Sequence::promised: a new group may not take these
  int64_t promised_sequences_ = 0;  // how many have one
  uint64_t version_ = 0;
};

}  // namespace trireme
