#include <ATen/ATen.h>

#include <deque>

#include "base/error.h"
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
    const at::Tensor hidden = model_.forward_cached(batch_, arena_);
    SampleResult result;
    if (!plan.outputs.empty()) result = model_.sample(output_rows(hidden, plan), request.rows);
    previous_ = result.ids;
    results_.push_back(std::move(result));
  }

  SampleResult take() override {
    TRIREME_CHECK(!results_.empty(), "no step was started");
    SampleResult result = std::move(results_.front());
    results_.pop_front();
    return result;
  }

 private:
  const Model& model_;
  KvArena& arena_;
  CachedBatch batch_;
  std::vector<int64_t> previous_;
  std::deque<SampleResult> results_;
};

}  // namespace

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
