#include <ATen/ATen.h>

#include <cstring>
#include <deque>

#include "base/error.h"
#include "trainer/parallel/stage_links.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {
namespace {

class HostRunner final : public StepRunner {
 public:
  HostRunner(const Model& model, KvArena& arena) : model_(model), arena_(arena) {}

  void start(const StepRequest& request) override {
    const StepPlan& plan = *request.plan;
    for (const std::vector<RowCopy>* list : {&plan.moves, &plan.copies}) {
      for (const RowCopy& copy : *list) arena_.move(copy.from, copy.to, copy.rows);
    }
    const at::Tensor input = at::empty({2, plan.tokens}, at::kLong);
    int64_t* ids = input.data_ptr<int64_t>();
    int64_t* positions = ids + plan.tokens;
    for (const int64_t token : request.tokens) {
      TRIREME_CHECK(token >= 0 || static_cast<size_t>(-token) <= previous_.size(), "a token of no step");
      *ids++ = token >= 0 ? token : previous_[static_cast<size_t>(-token - 1)];
    }
    batch_.plan.host_runs.clear();
    for (const Segment& segment : plan.segments) {
      for (int64_t i = 0; i < segment.count; ++i) *positions++ = segment.past + i;
      batch_.plan.host_runs.push_back({segment.start, segment.past, segment.count});
    }
    batch_.ids = input.select(0, 0);
    batch_.positions = input.select(0, 1);
    const at::Tensor hidden = through_stages();
    SampleResult result;
    if (!plan.outputs.empty()) {
      if (hidden.defined()) result = model_.sample(output_rows(hidden, plan), request.rows);
      share(result, plan.outputs.size());
    }
    previous_ = result.ids;
    results_.push_back(std::move(result));
  }

  void start_without_rows() override {
    CachedBatch none;
    none.ids = at::empty({0}, at::kLong);
    none.positions = at::empty({0}, at::kLong);
    (void)model_.forward_cached(none, arena_);
  }

  SampleResult take() override {
    TRIREME_CHECK(!results_.empty(), "no step was started");
    SampleResult result = std::move(results_.front());
    results_.pop_front();
    return result;
  }

 private:
  // The batch through all pieces of this rank's stage, with those of the others between them. Hidden states on the last
  // stage; undefined on the others.
  at::Tensor through_stages() {
    StageLinks* links = model_.options().links;
    if (links == nullptr) return model_.forward_cached(batch_, arena_);
    const ModelSplit& split = model_.split();
    at::Tensor out;
    PendingCollective sent;
    for (int64_t piece = 0; piece < static_cast<int64_t>(split.layers.size()); ++piece) {
      at::Tensor in;
      if (!split.begins(piece)) {
        in = model_.make_residual(batch_.ids.size(0));
        links->begin_receive(in, /*backward=*/false).wait();
      }
      sent.wait();  // of the piece before: it has come round
      out = model_.forward_cached_piece(piece, batch_, arena_, in);
      if (!split.ends(piece)) sent = links->begin_send(out, /*backward=*/false);
    }
    sent.wait();
    return split.last_stage() ? out : at::Tensor();
  }

  // What the last stage has sampled, on all: each keeps the samples and plans the next step by itself.
  void share(SampleResult& result, size_t count) {
    StageLinks* links = model_.options().links;
    if (links == nullptr) return;
    const size_t ids = count * sizeof(int64_t), logprobs = count * sizeof(float);
    const at::Tensor packed = at::empty({static_cast<int64_t>(ids + logprobs)}, at::kByte);
    auto* bytes = packed.mutable_data_ptr<uint8_t>();
    if (model_.split().last_stage()) {
      std::memcpy(bytes, result.ids.data(), ids);
      std::memcpy(bytes + ids, result.logprobs.data(), logprobs);
    }
    links->share_last(packed);
    result.ids.resize(count);
    result.logprobs.resize(count);
    std::memcpy(result.ids.data(), bytes, ids);
    std::memcpy(result.logprobs.data(), bytes + ids, logprobs);
  }

  const Model& model_;
  KvArena& arena_;
  CachedBatch batch_;
  std::vector<int64_t> previous_;
  std::deque<SampleResult> results_;
};

}  // namespace

void StepRunner::start_without_rows() { fail_internal("this device has no steps without rows"); }

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
