#include "trainer/rollout/engine.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "trainer/model/row_names.h"
#include "trainer/ops/experts.h"
#include "trainer/parallel/communicator.h"
#include "trainer/rollout/engine_impl.h"

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

Engine::Impl::Impl(const Model& m, const Tokenizer* t, const EngineOptions& o, const SamplingOptions& s)
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
