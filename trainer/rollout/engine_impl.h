// Engine::Impl: what an engine keeps between its steps. For engine.cpp and engine_cache.cpp only.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trainer/rollout/engine.h"
#include "trainer/rollout/lanes.h"
#include "trainer/rollout/scheduler.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {

struct Engine::Impl {
  struct Group {
    GroupRequest request;
    GeneratedGroup result;
    std::shared_ptr<const SamplingOptions> sampling;
    LogprobOptions logprob;
    std::vector<int64_t> limits;    // new tokens of each sample
    int64_t order = 0;              // of submission
    size_t longest_stop_bytes = 0;  // 0: no stop strings
    int64_t unfinished = 0;
    std::vector<int64_t> aside;  // samples, while it is suspended: those that have not ended
  };
  struct LiveSample {
    Group* group = nullptr;
    int64_t index = 0;    // in the group
    int64_t unseen = -1;  // its entry of the lane's `launched`, or -1
    bool finished = false;
    GeneratedSample& result() const { return group->result.samples[index]; }
  };
  struct Outputs {  // of one step
    std::vector<Output> list;
    int64_t version = 0;  // of the weights that it read
  };
  using Complete = std::pair<int64_t, GeneratedGroup>;  // with Group::order
  struct Lane {
    explicit Lane(const SchedulerOptions& scheduling) : scheduler(scheduling) {}
    LiveSample& at(int64_t sequence) { return samples[sequence - first_sequence]; }
    Scheduler scheduler;
    std::deque<LiveSample> samples;  // of sequence ids first_sequence, first_sequence + 1, ...
    int64_t first_sequence = 0;
    StepPlan plan;  // reused from step to step
    // Of steps whose tokens are still the runner's: the last one, and, with late_stops, the one before for a moment.
    std::optional<Outputs> launched, earlier;
  };

  Impl(const Model& m, const Tokenizer* t, const EngineOptions& o, const SamplingOptions& s);

  bool together() const { return model.options().experts != nullptr; }
  bool pipelined() const { return model.options().links != nullptr; }
  bool on_cuda() const { return model.options().device.is_cuda(); }
  int64_t row_bytes() const { return KvArena::bytes_per_row(model.local(), model.options().dtype); }
  int64_t most_rows() const { return options.max_sequences * options.max_total_length; }
  std::unique_ptr<KvArena> make_arena(int64_t rows, int64_t most) const;
  std::unique_ptr<StepRunner> make_runner(KvArena& over) const;
  void take_cache();
  void allocate();
  void restore();
  void make_lanes(int64_t rows);
  void use_rows(int64_t rows);
  void allocate_measured();
  int64_t rows_that_fit();
  int64_t least_of_ranks(int64_t rows) const { return options.least_of_ranks ? options.least_of_ranks(rows) : rows; }
  void submit(GroupRequest request);
  std::vector<int64_t> sample_limits(const GroupRequest& request, const SamplingOptions& s) const;
  void deal();
  static std::vector<int64_t> samples_of(const LanePart& part);
  void add(Group& group, int64_t lane, const std::vector<int64_t>& samples);
  void settle(const Engine& engine, std::vector<Complete>& complete);
  void set_aside();
  void resume();
  void mark_mixed();
  std::vector<Complete> step(const Engine& engine);
  void launch(int64_t index);
  template <class F>
  static void naming_rows(Lane& lane, const std::vector<Output>& outputs, F&& run_part);
  static void fail_at(Lane& lane, int64_t sequence, int64_t position, const std::string& what);
  std::optional<Outputs> start(int64_t index);
  static int64_t known_rows(Lane& lane, const Segment& segment);
  void look(const Engine& engine, Lane& lane, std::vector<Complete>& complete);
  void process(const Engine& engine, Lane& lane, const Outputs& outputs, std::vector<Complete>& complete);
  void drop_steps();
  void forget_cached();
  void fill_request(int64_t index);
  int64_t token(const LiveSample& sample, int64_t position) const;
  static void expect_unseen(Lane& lane);
  std::optional<FinishReason> ended(const LiveSample& sample) const;
  bool stops(const Group& group, const GeneratedSample& sample) const;
  void finish(const Engine& engine, Lane& lane, int64_t sequence, FinishReason reason, std::vector<Complete>& complete);

  const Model& model;
  const Tokenizer* tokenizer;
  EngineOptions options;
  std::shared_ptr<const SamplingOptions> sampling;
  SchedulerOptions scheduling;  // of every lane, but for what is its share
  int64_t cache_rows = 0;       // of all lanes
  int64_t fewer_lanes = 0;      // than wanted, as was said
  std::vector<Lane> lanes;
  std::unique_ptr<KvArena> arena;
  std::unique_ptr<StepRunner> runner;                // over the arena
  std::map<int64_t, std::unique_ptr<Group>> groups;  // unfinished ones, by Group::order
  int64_t next_order = 0;
  std::map<int64_t, std::unique_ptr<Group>> suspended;  // likewise
  std::vector<Group*> arrivals;                         // in no lane yet
  int64_t weights_version = 0;                          // that the next step reads
  int64_t measured_rows = 0;                            // of the cache, where the engine found its size itself; else 0
  int64_t step_bytes = 0;                               // then: what steps want of LibTorch's allocator
  EngineStats stats;
  StepRequest request;  // reused from step to step
};

}  // namespace trireme
