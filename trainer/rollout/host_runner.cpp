#include <ATen/ATen.h>

#include <cstring>
#include <deque>

#include "base/error.h"
#include "trainer/parallel/stage_links.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {
namespace {

// Everything happens in the call. What a stage sends is received when the next one comes to it, so the sender goes on
// with another lane; what is sent back by the last stage goes to the first, and from there, in take(), on to the
// others. Each line sees its messages in the order of turns on both of its ends.
class HostRunner final : public StepRunner {
 public:
  HostRunner(const Model& model, KvArena& arena) : model_(model), arena_(arena), links_(model.options().links) {}

  void start(const StepRequest& request) override {
    const StepPlan& plan = *request.plan;
    for (const std::vector<RowCopy>* list : {&plan.moves, &plan.copies}) {
      for (const RowCopy& copy : *list) arena_.move(copy.from, copy.to, copy.rows);
    }
    Lane& lane = lane_at(request.lane);
    // With late stops the lane's last step was not taken yet: it is the oldest.
    if (embeds() && !steps_.empty() && steps_.front().lane == &lane) receive(steps_.front());
    fill_batch(request, lane);
    lane.plan.tokens = plan.tokens;
    lane.plan.outputs = plan.outputs;
    lane.rows = request.rows;
    lane.piece = 0;
    lane.step = &steps_.emplace_back();
    lane.step->lane = &lane;
    lane.step->outputs = plan.outputs.size();
    run_piece(lane);
  }

  void proceed(int64_t lane) override { run_piece(lanes_.at(static_cast<size_t>(lane))); }

  // The stages of this replica know that nothing comes: only experts are asked, and answer with nothing.
  void start_without_rows(int64_t index) override {
    Lane& lane = lane_at(index);
    lane.batch = CachedBatch();
    lane.batch.ids = at::empty({0}, at::kLong);
    lane.batch.positions = at::empty({0}, at::kLong);
    lane.plan.tokens = 0;
    lane.plan.outputs.clear();
    lane.rows.clear();
    lane.piece = 0;
    lane.step = nullptr;
    run_piece(lane);
  }

  SampleResult take() override {
    TRIREME_CHECK(!steps_.empty(), "no step was started");
    Step& step = steps_.front();
    receive(step);
    pass_on(step);
    SampleResult result = std::move(step.result);
    steps_.pop_front();
    if (steps_.empty()) {  // the lines are somebody else's until the next step
      for (Lane& lane : lanes_) {
        lane.sent.wait();
        lane.passed_on.wait();
      }
    }
    return result;
  }

 private:
  struct Lane;
  struct Step {  // started and not taken
    Lane* lane = nullptr;
    size_t outputs = 0;
    bool known = false;  // the result is here
    SampleResult result;
    at::Tensor packed;  // the result, as it travels
  };
  struct Lane {
    CachedBatch batch;
    StepPlan plan;  // tokens and outputs only
    std::vector<SampleRow> rows;
    int64_t piece = 0;         // that comes next
    Step* step = nullptr;      // its last one; null: it has no rows
    std::vector<int64_t> ids;  // that its last known step sampled
    PendingCollective sent;    // to the next stage: rows, or what was sampled
    PendingCollective passed_on;
    at::Tensor in_flight;  // what `sent` sends
  };

  Lane& lane_at(int64_t index) {
    while (static_cast<int64_t>(lanes_.size()) <= index) lanes_.emplace_back();
    return lanes_[static_cast<size_t>(index)];
  }

  bool embeds() const { return links_ != nullptr && links_->stage() == 0; }

  // Ids of the first stage's batch; the others know tokens of the lane's last step too late, and need none.
  void fill_batch(const StepRequest& request, Lane& lane) const {
    const StepPlan& plan = *request.plan;
    const at::Tensor input = at::empty({2, plan.tokens}, at::kLong);
    int64_t* ids = input.data_ptr<int64_t>();
    int64_t* positions = ids + plan.tokens;
    const bool embedded = links_ == nullptr || embeds();
    for (const int64_t token : request.tokens) {
      TRIREME_CHECK(token >= 0 || !embedded || static_cast<size_t>(-token) <= lane.ids.size(), "a token of no step");
      *ids++ = token >= 0 ? token : embedded ? lane.ids[static_cast<size_t>(-token - 1)] : 0;
    }
    lane.batch = CachedBatch();
    for (const Segment& segment : plan.segments) {
      for (int64_t i = 0; i < segment.count; ++i) *positions++ = segment.past + i;
      lane.batch.plan.host_runs.push_back({segment.start, segment.past, segment.count});
    }
    lane.batch.ids = input.select(0, 0);
    lane.batch.positions = input.select(0, 1);
  }

  // The lane's next piece on this stage: rows from the stage before, through the layers, to the next stage; behind the
  // model's last piece it samples. Without rows nothing is received, sent or sampled.
  void run_piece(Lane& lane) {
    const ModelSplit& split = model_.split();
    const int64_t piece = lane.piece++;
    at::Tensor in;
    if (!split.begins(piece)) {
      in = model_.make_residual(lane.plan.tokens);
      if (lane.step != nullptr) links_->begin_receive(in, /*backward=*/false).wait();
    }
    const at::Tensor out = model_.forward_cached_piece(piece, lane.batch, arena_, in);
    if (lane.step == nullptr) return;
    if (!split.ends(piece)) return send(lane, out);
    Step& step = *lane.step;
    if (step.outputs > 0) step.result = model_.sample(output_rows(out, lane.plan), lane.rows);
    step.known = true;
    lane.ids = step.result.ids;
    if (links_ == nullptr || step.outputs == 0) return;
    step.packed = pack(step.result);
    send(lane, step.packed);
  }

  // Waits until what the lane sent a round ago was received: so far a stage may be ahead of the next.
  void send(Lane& lane, const at::Tensor& tensor) {
    lane.sent.wait();
    lane.in_flight = tensor;
    lane.sent = links_->begin_send(lane.in_flight, /*backward=*/false);
  }

  // What a step has sampled comes to the first stage from the last, to the others from the one before.
  void receive(Step& step) {
    if (step.known) return;
    step.known = true;
    if (step.outputs > 0) {
      step.packed = at::empty({static_cast<int64_t>(step.outputs * kSampleBytes)}, at::kByte);
      links_->begin_receive(step.packed, /*backward=*/false).wait();
      step.result = unpack(step.packed, step.outputs);
    }
    step.lane->ids = step.result.ids;
  }

  // To the next stage, where that is not the one that has sampled.
  void pass_on(Step& step) {
    if (links_ == nullptr || step.outputs == 0 || links_->stage() + 2 >= links_->stages()) return;
    step.lane->passed_on.wait();
    step.lane->passed_on = links_->begin_send(step.packed, /*backward=*/false);
  }

  static constexpr size_t kSampleBytes = sizeof(int64_t) + sizeof(float);

  static at::Tensor pack(const SampleResult& result) {
    const size_t ids = result.ids.size() * sizeof(int64_t), logprobs = result.logprobs.size() * sizeof(float);
    at::Tensor packed = at::empty({static_cast<int64_t>(ids + logprobs)}, at::kByte);
    auto* bytes = packed.mutable_data_ptr<uint8_t>();
    std::memcpy(bytes, result.ids.data(), ids);
    std::memcpy(bytes + ids, result.logprobs.data(), logprobs);
    return packed;
  }

  static SampleResult unpack(const at::Tensor& packed, size_t count) {
    SampleResult result;
    result.ids.resize(count);
    result.logprobs.resize(count);
    const auto* bytes = packed.const_data_ptr<uint8_t>();
    std::memcpy(result.ids.data(), bytes, count * sizeof(int64_t));
    std::memcpy(result.logprobs.data(), bytes + count * sizeof(int64_t), count * sizeof(float));
    return result;
  }

  const Model& model_;
  KvArena& arena_;
  StageLinks* const links_;  // null: the model has one stage
  std::deque<Lane> lanes_;   // stay where they are
  std::deque<Step> steps_;   // oldest first
};

}  // namespace

void StepRunner::start_without_rows(int64_t /*lane*/) { fail_internal("this device has no steps without rows"); }

std::unique_ptr<StepRunner> make_host_runner(const Model& model, KvArena& arena) {
  return std::make_unique<HostRunner>(model, arena);
}

at::Tensor output_rows(const at::Tensor& hidden, const StepPlan& plan) {
  bool all_rows = static_cast<int64_t>(plan.outputs.size()) == plan.tokens;
  for (size_t i = 0; all_rows && i < plan.outputs.size(); ++i)
    all_rows = plan.outputs[i].row == static_cast<int64_t>(i);
  if (all_rows) return hidden;
  const at::Tensor index = at::empty({static_cast<int64_t>(plan.outputs.size())}, at::kLong);
  int64_t* row = index.data_ptr<int64_t>();
  for (const Output& output : plan.outputs) *row++ = output.row;
  return hidden.index_select(0, index.to(hidden.device()));
}

}  // namespace trireme
