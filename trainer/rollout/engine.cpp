#include "trainer/rollout/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/model/row_names.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/experts.h"
#include "trainer/parallel/communicator.h"
#include "trainer/rollout/cache_size.h"
#include "trainer/rollout/lanes.h"
#include "trainer/rollout/scheduler.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {

namespace {

// Tokens of context before the longest stop string when the tail of an answer is decoded: a tokenizer may treat the
// first tokens of a text differently.
constexpr size_t kTailMarginTokens = 8;

// Checks them and brings them into one form: greedy is a flag, the temperature positive.
SamplingOptions checked(SamplingOptions s, const Tokenizer* tokenizer) {
  if (!(s.temperature >= 0.0)) fail_user("rollout: temperature must be >= 0, it is " + std::to_string(s.temperature));
  if (s.temperature == 0.0) {
    s.greedy = true;
    s.temperature = 1.0;
  }
  if (s.top_k < 0) fail_user("rollout: top_k must be >= 0 (0: off), it is " + std::to_string(s.top_k));
  if (!(s.top_p > 0.0 && s.top_p <= 1.0))
    fail_user("rollout: top_p must be in (0, 1], it is " + std::to_string(s.top_p));
  if (!(s.min_p >= 0.0 && s.min_p <= 1.0))
    fail_user("rollout: min_p must be in [0, 1], it is " + std::to_string(s.min_p));
  for (const std::string& text : s.stop_strings) {
    if (text.empty()) fail_user("rollout: a stop string is empty");
    if (tokenizer == nullptr) fail_user("rollout: stop strings need a tokenizer");
  }
  return s;
}

}  // namespace

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

  Impl(const Model& m, const Tokenizer* t, const EngineOptions& o, const SamplingOptions& s)
      : model(m), tokenizer(t), options(o), sampling(std::make_shared<SamplingOptions>(checked(s, t))) {
    if (options.max_total_length <= 0) options.max_total_length = model.config().positions();
    // No rotation beyond, and on CUDA nobody looks at positions.
    const bool dynamic = model.config().rope.scaling == RopeOptions::Scaling::kDynamic;
    if (dynamic && options.max_total_length > model.config().positions()) {
      fail_user("rollout: sequences of " + std::to_string(options.max_total_length) +
                " tokens, but dynamic rope scaling ends at " + std::to_string(model.config().positions()) +
                "; lower policy.max_total_sequence_length");
    }
    if (options.max_total_length < 2) fail_user("rollout: max_total_length must be at least 2");
    if (options.max_sequences < 1) fail_user("rollout: max_sequences must be at least 1");
    TRIREME_CHECK(options.lanes >= 1 && (options.lanes == 1 || pipelined()), "lanes are those of a pipeline");
    if (!(options.cache_memory_fraction > 0.0 && options.cache_memory_fraction <= 1.0)) {
      fail_user("rollout: cache_memory_fraction must be in (0, 1]");
    }
    scheduling.prefill_chunk_tokens = options.prefill_chunk_tokens;
    scheduling.headroom_rows = options.headroom_rows;
    scheduling.grow_factor = options.grow_factor;
    if (on_cuda()) {
      options.late_stops = true;
      scheduling.chunk_alignment = kChunkAlignment;
    }
    make_lanes(options.cache_rows == 0 ? 1 : options.cache_rows);  // allocate() finds it
  }

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

// Each sample's limit of new tokens.
std::vector<int64_t> Engine::Impl::sample_limits(const GroupRequest& request, const SamplingOptions& s) const {
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t room = options.max_total_length - prompt;
  if (prompt == 0) fail_user("the prompt has no tokens");
  if (request.samples < 1) fail_user("samples must be at least 1");
  if (room < 1) {
    fail_user("its prompt of " + std::to_string(prompt) + " tokens leaves no room for an answer within " +
              std::to_string(options.max_total_length) + " tokens (policy.max_total_sequence_length)");
  }
  if (!request.forced_lengths.empty()) {
    if (static_cast<int64_t>(request.forced_lengths.size()) != request.samples) {
      fail_user("it has " + std::to_string(request.forced_lengths.size()) + " forced lengths for " +
                std::to_string(request.samples) + " samples");
    }
    for (const int64_t length : request.forced_lengths) {
      if (length < 1 || length > room) {
        fail_user("its forced length " + std::to_string(length) + " is not in 1.." + std::to_string(room));
      }
    }
    if (request.ends_known) return request.forced_lengths;
  }
  const int64_t wanted = request.max_new_tokens > 0 ? request.max_new_tokens : s.max_new_tokens;
  std::vector<int64_t> limits(static_cast<size_t>(request.samples), wanted > 0 ? std::min(wanted, room) : room);
  for (size_t i = 0; i < request.forced_lengths.size(); ++i) limits[i] = std::max(limits[i], request.forced_lengths[i]);
  return limits;
}

std::unique_ptr<KvArena> Engine::Impl::make_arena(int64_t rows, int64_t most) const {
  const int64_t scratch = on_cuda() ? kDeviceScratchRows : 0;
  return std::make_unique<KvArena>(model.local(), rows + scratch, model.options().dtype, model.options().device,
                                   most + scratch);
}

std::unique_ptr<StepRunner> Engine::Impl::make_runner(KvArena& over) const {
  if (on_cuda()) return make_device_runner(model, over, options.max_sequences, options.lanes, options.partition);
  return make_host_runner(model, over);
}

// Only when idle.
void Engine::Impl::make_lanes(int64_t rows) {
  TRIREME_CHECK(groups.empty(), "the cache's size was changed under samples");
  lanes.clear();
  for (const LaneShare& share : lane_shares(options.lanes, rows, options.max_sequences, options.max_total_length)) {
    scheduling.first_row = share.first_row;
    scheduling.cache_rows = share.rows;
    scheduling.max_sequences = share.max_sequences;
    lanes.emplace_back(scheduling);
  }
  cache_rows = rows;
  stats.lanes = static_cast<int64_t>(lanes.size());
}

void Engine::Impl::use_rows(int64_t rows) {
  if (rows != cache_rows) make_lanes(rows);
  if (stats.lanes < options.lanes && stats.lanes != fewer_lanes) {
    fewer_lanes = stats.lanes;
    log_info("rollout", "generation has " + std::to_string(stats.lanes) + " of " + std::to_string(options.lanes) +
                            " lanes: " + std::to_string(rows) + " cache rows and " +
                            std::to_string(options.max_sequences) + " places are for as many sequences of " +
                            std::to_string(options.max_total_length) + " tokens");
  }
  stats.cache_rows = rows;
}

void Engine::Impl::allocate() {
  if (on_cuda() && options.cache_rows == 0) return allocate_measured();
  int64_t rows = options.cache_rows;
  if (rows == 0) {
    rows = host_cache_rows(available_memory_bytes(), options.cache_memory_fraction, {row_bytes(), most_rows()});
  }
  rows = least_of_ranks(rows);
  auto made = make_arena(rows, rows);
  runner = make_runner(*made);
  arena = std::move(made);
  use_rows(rows);
}

void Engine::Impl::restore() {
  int64_t rows = cache_rows;
  if (on_cuda())
    log_debug("rollout", "the cache takes its memory again: " + to_string(device_memory(model.options().device)));
  if (measured_rows > 0) rows = least_of_ranks(rows_that_fit());
  arena->restore(rows + (on_cuda() ? kDeviceScratchRows : 0));
  use_rows(rows);
}

namespace {

std::string gibibytes(int64_t bytes) { return format_bytes(static_cast<uint64_t>(std::max<int64_t>(0, bytes))); }

}  // namespace

// Over a small arena with addresses for all the memory there could be, everything that takes memory besides happens
// first. Then the arena gets its share of what is left.
void Engine::Impl::allocate_measured() {
  const at::Device device = model.options().device;
  Stopwatch watch;
  empty_device_cache(device);
  const int64_t row_elements = model.local().key_width();
  const int64_t reachable = cuda::kAddressable / row_elements - 1 - kDeviceScratchRows;
  const int64_t most =
      least_of_ranks(mapped_cache_rows(device_memory(device).total, reachable, {row_bytes(), most_rows()}));
  const int64_t widest = std::min(most, options.prefill_chunk_tokens + options.max_sequences);
  auto made = make_arena(widest, most);
  auto steps = make_runner(*made);
  SampleRow like;
  like.options = sampling->logprob_options();
  steps->warm_up(options.prefill_chunk_tokens, like);
  const DeviceMemory memory = device_memory(device);
  made->release();
  const int64_t left = device_memory(device).free;
  const int64_t rows = least_of_ranks(device_cache_rows(left, options.cache_memory_fraction, {row_bytes(), most}));
  made->restore(rows + kDeviceScratchRows);
  log_info("rollout", "the largest step keeps " + gibibytes(memory.cached) + " and " + gibibytes(left) +
                          " of the GPU's memory are left beside it: the cache has " + std::to_string(rows) + " rows, " +
                          gibibytes(rows * row_bytes()) + " (" + format_fixed(watch.seconds(), 1) + " s)");
  runner = std::move(steps);
  arena = std::move(made);
  step_bytes = memory.cached;
  measured_rows = rows;
  use_rows(rows);
}

// As many as before, or what others have left.
int64_t Engine::Impl::rows_that_fit() {
  const at::Device device = model.options().device;
  const CacheLimits limits{row_bytes(), measured_rows};
  if (returning_cache_rows(device_memory(device).free, 0, limits) == measured_rows) return measured_rows;
  empty_device_cache(device);
  const DeviceMemory memory = device_memory(device);
  // What steps had of the allocator's went with it, but for the graphs' part.
  const int64_t rows = returning_cache_rows(memory.free, std::max<int64_t>(0, step_bytes - memory.cached), limits);
  if (rows < measured_rows && rows != cache_rows) {
    log_warn("rollout", "only " + gibibytes(memory.free) + " of the GPU's memory are free: the cache has " +
                            std::to_string(rows) + " rows instead of " + std::to_string(measured_rows) +
                            "; a lower policy.generation.kv_cache_memory_fraction leaves more to training");
  }
  return rows;
}

void Engine::Impl::take_cache() {
  if (arena == nullptr) {
    allocate();
  } else if (!arena->resident()) {
    restore();
  }
}

void Engine::Impl::submit(GroupRequest request) {
  TRIREME_CHECK(!together() || (arena != nullptr && arena->resident()),
                "engines that step together take their caches together, before they are given work");
  take_cache();
  const std::string name = "group " + std::to_string(request.group_id);
  auto group = std::make_unique<Group>();
  try {
    group->sampling = sampling;
    if (request.sampling)
      group->sampling = std::make_shared<const SamplingOptions>(checked(*request.sampling, tokenizer));
    group->limits = sample_limits(request, *group->sampling);
    group->request = std::move(request);
    // Several lanes each have room for whatever keeps the limits.
    if (lanes.size() == 1) add(*group, 0, samples_of({0, 0, group->request.samples, 0}));
  } catch (const Error& e) {
    throw Error(e.kind(), name + ": " + e.what());
  }
  const GroupRequest& kept = group->request;
  group->order = next_order++;
  group->logprob = group->sampling->logprob_options();
  for (const std::string& text : group->sampling->stop_strings) {
    group->longest_stop_bytes = std::max(group->longest_stop_bytes, text.size());
  }
  group->unfinished = kept.samples;
  group->result.group_id = kept.group_id;
  group->result.first_sample_id = kept.first_sample_id;
  group->result.samples.resize(kept.samples);
  if (lanes.size() > 1) arrivals.push_back(group.get());
  groups.emplace(group->order, std::move(group));
}

// What was submitted since the last step, to lanes.
void Engine::Impl::deal() {
  if (arrivals.empty()) return;
  std::vector<LaneLoad> loads;
  for (const Lane& lane : lanes)
    loads.push_back({lane.scheduler.unfinished(), lane.scheduler.options().max_sequences, lane.plan.crowded});
  std::vector<int64_t> sizes;
  for (const Group* group : arrivals) sizes.push_back(group->request.samples);
  for (const LanePart& part : deal_to_lanes(std::move(loads), sizes))
    add(*arrivals[static_cast<size_t>(part.group)], part.lane, samples_of(part));
  arrivals.clear();
}

std::vector<int64_t> Engine::Impl::samples_of(const LanePart& part) {
  std::vector<int64_t> samples(static_cast<size_t>(part.count));
  std::iota(samples.begin(), samples.end(), part.first);
  return samples;
}

// Samples that all have tokens, or all have none.
void Engine::Impl::add(Group& group, int64_t index, const std::vector<int64_t>& samples) {
  Lane& lane = lanes[static_cast<size_t>(index)];
  const auto prompt = static_cast<int64_t>(group.request.prompt.size());
  std::vector<int64_t> limits, made;
  for (const int64_t i : samples) {
    limits.push_back(group.limits[static_cast<size_t>(i)]);
    if (!group.result.samples.empty() && !group.result.samples[static_cast<size_t>(i)].response.empty())
      made.push_back(static_cast<int64_t>(group.result.samples[static_cast<size_t>(i)].response.size()));
  }
  const int64_t first =
      made.empty() ? lane.scheduler.add_group(prompt, limits) : lane.scheduler.add_begun(prompt, limits, made);
  if (lane.samples.empty()) lane.first_sequence = first;
  for (const int64_t i : samples) lane.samples.push_back({&group, i, -1, false});
}

// The tokens of all steps that were started, in the order in which they were.
void Engine::Impl::settle(const Engine& engine, std::vector<Complete>& complete) {
  for (Lane& lane : lanes) {
    if (lane.launched) process(engine, lane, *lane.launched, complete);
    lane.launched.reset();
  }
}

// Behind settle(). The schedulers begin anew; groups stay where they are, with what their samples have.
void Engine::Impl::set_aside() {
  for (Group* group : arrivals) group->aside = samples_of({0, 0, group->request.samples, 0});
  arrivals.clear();
  for (Lane& lane : lanes) {
    for (const LiveSample& sample : lane.samples) {
      if (!sample.finished) sample.group->aside.push_back(sample.index);
    }
  }
  for (auto& [order, group] : groups) suspended.emplace(order, std::move(group));
  groups.clear();
  make_lanes(cache_rows);
}

// In the order in which they were submitted, each to the lane that has the fewest.
void Engine::Impl::resume() {
  if (suspended.empty()) return;
  TRIREME_CHECK(groups.empty(), "samples were resumed behind others");
  take_cache();
  for (auto& [order, group] : suspended) {
    std::vector<int64_t> begun, others;
    std::sort(group->aside.begin(), group->aside.end());
    for (const int64_t i : group->aside)
      (group->result.samples[static_cast<size_t>(i)].response.empty() ? others : begun).push_back(i);
    group->aside.clear();
    for (const std::vector<int64_t>& samples : {begun, others}) {
      if (samples.empty()) continue;
      const auto fewest = std::min_element(lanes.begin(), lanes.end(), [](const Lane& a, const Lane& b) {
        return a.scheduler.unfinished() < b.scheduler.unfinished();
      });
      add(*group, fewest - lanes.begin(), samples);
    }
  }
  groups = std::exchange(suspended, {});
}

// Unfinished samples that go on over cached keys and values.
void Engine::Impl::mark_mixed() {
  for (Lane& lane : lanes) {
    for (size_t i = 0; i < lane.samples.size(); ++i) {
      const LiveSample& sample = lane.samples[i];
      if (!sample.finished && lane.scheduler.reads_cached(lane.first_sequence + static_cast<int64_t>(i)))
        sample.result().mixed_context = true;
    }
  }
}

// One turn of the loop, behind submit(): each lane's plan and launch, and, when its next plan wants them, the tokens of
// its last step; with late_stops of the one before, so that a device has its next step while the host looks at them.
std::vector<Engine::Impl::Complete> Engine::Impl::step(const Engine& engine) {
  const at::NoGradGuard no_grad;
  const Stopwatch watch;
  std::vector<Complete> complete;
  deal();
  LaneOrder order;
  order.lanes = static_cast<int64_t>(lanes.size());
  order.late = options.late_stops;
  if (pipelined()) order.pieces = static_cast<int64_t>(model.split().layers.size());
  for (int64_t piece = 0; piece < order.pieces; ++piece) {
    for (int64_t index = 0; index < order.lanes; ++index) {
      if (piece == 0) {
        launch(index);
      } else if (lanes[static_cast<size_t>(index)].launched || together()) {  // no turn is left out
        const Stopwatch forward;
        Lane& lane = lanes[static_cast<size_t>(index)];
        naming_rows(lane, lane.plan.outputs, [&] { runner->proceed(index); });
        stats.forward_seconds += forward.seconds();
      }
      if (const auto seen = order.looks_at(piece, index)) look(engine, lanes[static_cast<size_t>(*seen)], complete);
    }
  }
  // Nobody waits for what a stopped sample got besides, and the stages' lines are others' now.
  if (pipelined() && groups.empty()) drop_steps();
  stats.seconds += watch.seconds();
  return complete;
}

void Engine::Impl::launch(int64_t index) {
  Lane& lane = lanes[static_cast<size_t>(index)];
  lane.scheduler.plan(lane.plan);
  lane.earlier = std::move(lane.launched);
  lane.launched = start(index);
}

// An error about a row of the lane's planned step, or an output, is told with whose it is; as it came where its sample
// has ended, which with late_stops may be.
void Engine::Impl::fail_at(Lane& lane, int64_t sequence, int64_t position, const std::string& what) {
  if (sequence < lane.first_sequence) return;
  const LiveSample& sample = lane.at(sequence);
  const GroupRequest& group = sample.group->request;
  const auto prompt = static_cast<int64_t>(group.prompt.size());
  fail_data(what + name_of_token({group.group_id, sample.index, prompt}, position));
}

template <class F>
void Engine::Impl::naming_rows(Lane& lane, const std::vector<Output>& outputs, F&& run_part) {
  try {
    std::forward<F>(run_part)();
  } catch (const LogitsError& error) {
    const Output& output = outputs.at(static_cast<size_t>(error.row()));
    fail_at(lane, output.sequence, output.position, "the model's logits are not finite for ");
    throw;
  } catch (const RouterError& error) {
    int64_t row = error.row();
    auto segment = lane.plan.segments.begin();
    for (; row >= segment->count; ++segment) row -= segment->count;
    fail_at(lane, segment->sequence, segment->past + row,
            "layer " + std::to_string(error.layer()) + ": the router's logits are not finite at ");
    throw;
  }
}

// Starts the lane's planned step. Nothing where there is nothing to do.
std::optional<Engine::Impl::Outputs> Engine::Impl::start(int64_t index) {
  Lane& lane = lanes[static_cast<size_t>(index)];
  const StepPlan& plan = lane.plan;
  if (plan.empty()) {
    if (together()) runner->start_without_rows(index);
    return std::nullopt;
  }
  Stopwatch watch;
  fill_request(index);
  int64_t again = 0;
  for (const Segment& segment : plan.segments) again += known_rows(lane, segment);
  stats.host_seconds += watch.lap();
  naming_rows(lane, plan.outputs, [&] { runner->start(request); });
  stats.forward_seconds += watch.lap();
  lane.scheduler.commit(plan);
  ++stats.steps;
  int64_t used = 0;
  for (const Lane& each : lanes) used += each.plan.cache_rows;
  stats.peak_cache_rows = std::max(stats.peak_cache_rows, used);
  stats.prefill_tokens += plan.prefill_tokens;
  stats.decode_tokens += plan.decode_tokens;
  stats.preemptions += static_cast<int64_t>(plan.preempted.size());
  stats.sequence_steps += static_cast<int64_t>(plan.segments.size());
  stats.recomputed_rows += again;
  for (const std::vector<RowCopy>* list : {&plan.moves, &plan.copies}) {
    for (const RowCopy& copy : *list) stats.copied_rows += copy.rows;
  }
  return Outputs{plan.outputs, weights_version};
}

// At the tokens of the lane's last step; with late_stops of the one before.
void Engine::Impl::look(const Engine& engine, Lane& lane, std::vector<Complete>& complete) {
  std::optional<Outputs>& step = options.late_stops ? lane.earlier : lane.launched;
  if (step) process(engine, lane, *step, complete);
  step.reset();
  expect_unseen(lane);
}

// Takes the tokens of the oldest step, which is this lane's and has these outputs.
void Engine::Impl::process(const Engine& engine, Lane& lane, const Outputs& outputs, std::vector<Complete>& complete) {
  Stopwatch watch;
  SampleResult sampled;
  naming_rows(lane, outputs.list, [&] { sampled = runner->take(); });
  stats.waiting_seconds += watch.lap();
  for (size_t i = 0; i < outputs.list.size(); ++i) {
    const int64_t sequence = outputs.list[i].sequence;
    if (sequence < lane.first_sequence || lane.at(sequence).finished) {
      ++stats.surplus_tokens;
      continue;
    }
    LiveSample& sample = lane.at(sequence);
    sample.unseen = -1;
    sample.result().response.push_back(static_cast<int32_t>(sampled.ids[i]));
    sample.result().logprobs.push_back(sampled.logprobs[i]);
    append_version(sample.result().versions, outputs.version);
    ++stats.sampled_tokens;
    if (const std::optional<FinishReason> reason = ended(sample)) finish(engine, lane, sequence, *reason, complete);
  }
  while (!lane.samples.empty() && lane.samples.front().finished) {
    lane.samples.pop_front();
    ++lane.first_sequence;
  }
  stats.host_seconds += watch.lap();
}

// Takes the tokens that nobody needs of steps which may still be under way.
void Engine::Impl::drop_steps() {
  for (Lane& lane : lanes) {
    if (lane.launched) (void)runner->take();
    lane.launched.reset();
  }
}

void Engine::Impl::forget_cached() {
  for (Lane& lane : lanes) lane.scheduler.drop_cache();
}

// Rows of the segment that were computed before: all but that of the newest token, of a sample that has some.
int64_t Engine::Impl::known_rows(Lane& lane, const Segment& segment) {
  if (segment.count == 1) return 0;  // the newest token, or a few rows of no weight
  const LiveSample& sample = lane.at(segment.sequence);
  const auto made = static_cast<int64_t>(sample.result().response.size()) + (sample.unseen >= 0 ? 1 : 0);
  if (made == 0) return 0;
  const auto known = static_cast<int64_t>(sample.group->request.prompt.size()) + made - 1;
  return std::max<int64_t>(0, std::min(segment.past + segment.count, known) - segment.past);
}

// Everything the runner needs of the lane's planned step.
void Engine::Impl::fill_request(int64_t index) {
  Lane& lane = lanes[static_cast<size_t>(index)];
  request.plan = &lane.plan;
  request.lane = index;
  request.tokens.clear();
  request.rows.clear();
  for (const Segment& segment : lane.plan.segments) {
    const LiveSample& sample = lane.at(segment.sequence);
    for (int64_t i = 0; i < segment.count; ++i) request.tokens.push_back(token(sample, segment.past + i));
  }
  for (const Output& output : lane.plan.outputs) {
    const LiveSample& sample = lane.at(output.sequence);
    const Group& group = *sample.group;
    SampleRow row;
    row.options = group.logprob;
    row.key.seed = group.sampling->seed;
    row.key.sample_id = group.request.first_sample_id + static_cast<uint64_t>(sample.index);
    row.key.position = static_cast<uint64_t>(output.position);
    row.greedy = group.sampling->greedy;
    request.rows.push_back(row);
  }
}

// Token `position` of the sample as StepRequest::tokens has it.
int64_t Engine::Impl::token(const LiveSample& sample, int64_t position) const {
  const Group& group = *sample.group;
  const auto prompt = static_cast<int64_t>(group.request.prompt.size());
  if (position < prompt) return group.request.prompt[position];
  const std::vector<int32_t>& tokens = sample.result().response;
  const int64_t i = position - prompt;
  if (i < static_cast<int64_t>(tokens.size())) return tokens[i];
  TRIREME_CHECK(sample.unseen >= 0 && i == static_cast<int64_t>(tokens.size()),
                "a step reads a token before it is sampled");
  return -(sample.unseen + 1);
}

// The lane's next step may read the tokens of its last one, which the host does not know yet.
void Engine::Impl::expect_unseen(Lane& lane) {
  if (!lane.launched) return;
  for (size_t i = 0; i < lane.launched->list.size(); ++i) {
    const int64_t sequence = lane.launched->list[i].sequence;
    if (sequence >= lane.first_sequence) lane.at(sequence).unseen = static_cast<int64_t>(i);
  }
}

// Whether its last token ended it.
std::optional<FinishReason> Engine::Impl::ended(const LiveSample& sample) const {
  const Group& group = *sample.group;
  const auto made = static_cast<int64_t>(sample.result().response.size());
  const std::vector<int64_t>& forced = group.request.forced_lengths;
  const bool stopped = forced.empty() ? stops(group, sample.result())
                                      : !group.request.ends_known && made == forced[static_cast<size_t>(sample.index)];
  if (stopped) return FinishReason::kStop;
  if (made < group.limits[sample.index]) return std::nullopt;
  return FinishReason::kLength;
}

bool Engine::Impl::stops(const Group& group, const GeneratedSample& sample) const {
  const SamplingOptions& s = *group.sampling;
  if (std::find(s.stop_ids.begin(), s.stop_ids.end(), sample.response.back()) != s.stop_ids.end()) return true;
  if (group.longest_stop_bytes == 0) return false;
  // A token is at least a byte of text. Earlier tokens have been looked at, so a match ends in the last one.
  const size_t count = std::min(sample.response.size(), group.longest_stop_bytes + kTailMarginTokens);
  const std::string tail =
      tokenizer->decode(sample.response.data() + sample.response.size() - count, count, /*skip_special=*/false);
  return std::any_of(s.stop_strings.begin(), s.stop_strings.end(),
                     [&tail](const std::string& text) { return tail.find(text) != std::string::npos; });
}

// The last one completes its group.
void Engine::Impl::finish(const Engine& engine, Lane& lane, int64_t sequence, FinishReason reason,
                          std::vector<Complete>& complete) {
  LiveSample& sample = lane.at(sequence);
  Group& group = *sample.group;
  sample.result().finish = reason;
  sample.finished = true;
  if (reason == FinishReason::kStop) lane.scheduler.stop(sequence);
  if (engine.on_sample) engine.on_sample(group.request, sample.index, sample.result());
  if (--group.unfinished > 0) return;
  group.result.prompt = std::move(group.request.prompt);
  complete.emplace_back(group.order, std::move(group.result));
  groups.erase(group.order);
}

Engine::Engine(const Model& model, const Tokenizer* tokenizer, const EngineOptions& options,
               const SamplingOptions& sampling)
    : impl_(std::make_unique<Impl>(model, tokenizer, options, sampling)) {}
Engine::~Engine() = default;

void Engine::submit(GroupRequest request) { impl_->submit(std::move(request)); }

std::vector<GeneratedGroup> Engine::step() {
  std::vector<GeneratedGroup> result;
  if (idle() && !impl_->together()) return result;
  for (auto& [order, group] : impl_->step(*this)) result.push_back(std::move(group));
  return result;
}

bool Engine::idle() const { return impl_->groups.empty(); }

int64_t Engine::unfinished_samples() const {
  int64_t count = 0;
  for (const auto& [id, group] : impl_->groups) count += group->unfinished;
  return count;
}

bool Engine::somebody_unfinished() const { return largest_together(idle() ? 0 : 1) > 0; }

int64_t Engine::largest_together(int64_t value) const {
  if (!impl_->together()) return value;
  // Of a pipeline each stage asks its own: those of a replica name the same at the same round, so all get the same
  // answer.
  return static_cast<int64_t>(impl_->model.options().steps->all_reduce_max(static_cast<double>(value)));
}

bool Engine::crowded() const {
  return std::all_of(impl_->lanes.begin(), impl_->lanes.end(),
                     [](const Impl::Lane& lane) { return lane.plan.crowded; });
}

void Engine::take_cache() {
  if (impl_->together()) impl_->take_cache();
}

std::vector<GeneratedGroup> Engine::run() {
  take_cache();
  std::vector<Impl::Complete> complete;
  while (somebody_unfinished()) {
    for (Impl::Complete& group : impl_->step(*this)) complete.push_back(std::move(group));
  }
  std::sort(complete.begin(), complete.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<GeneratedGroup> result;
  for (auto& [order, group] : complete) result.push_back(std::move(group));
  return result;
}

void Engine::share_device(bool on) {
  if (impl_->runner != nullptr) impl_->runner->share_device(on);
}

void Engine::weights_changed(int64_t version, KeptCache kept) {
  TRIREME_CHECK(version >= impl_->weights_version, "an engine was given older weights than it had");
  const bool others = version != impl_->weights_version;
  impl_->weights_version = version;
  if (kept == KeptCache::kNothing) {
    impl_->forget_cached();
  } else if (others) {
    impl_->mark_mixed();
  }
}

std::vector<GeneratedGroup> Engine::settle() {
  std::vector<Impl::Complete> complete;
  impl_->settle(*this, complete);
  std::vector<GeneratedGroup> result;
  for (auto& [order, group] : complete) result.push_back(std::move(group));
  return result;
}

std::vector<GeneratedGroup> Engine::suspend() {
  TRIREME_CHECK(impl_->suspended.empty(), "samples were set aside twice");
  std::vector<GeneratedGroup> result = settle();
  impl_->set_aside();
  return result;
}

void Engine::resume() { impl_->resume(); }

int64_t Engine::suspended_samples() const {
  int64_t count = 0;
  for (const auto& [order, group] : impl_->suspended) count += group->unfinished;
  return count;
}

int64_t Engine::weights_version() const { return impl_->weights_version; }

void Engine::release_cache() {
  TRIREME_CHECK(idle(), "the rollout cache was released while samples are unfinished");
  impl_->forget_cached();
  impl_->drop_steps();
  if (impl_->arena != nullptr) impl_->arena->release();
  impl_->stats.cache_rows = 0;
  if (impl_->on_cuda())
    log_debug("rollout",
              "the cache has given its memory back: " + to_string(device_memory(impl_->model.options().device)));
}

const EngineOptions& Engine::options() const { return impl_->options; }
const SamplingOptions& Engine::sampling() const { return *impl_->sampling; }
const EngineStats& Engine::stats() const { return impl_->stats; }

void Engine::reset_stats() {
  const int64_t rows = impl_->stats.cache_rows, lanes = impl_->stats.lanes;
  impl_->stats = EngineStats();
  impl_->stats.cache_rows = rows;
  impl_->stats.lanes = lanes;
}

}  // namespace trireme
