#include "trainer/algorithms/pipeline_step.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "base/error.h"
#include "topology/pipeline.h"
#include "trainer/model/context_rows.h"
#include "trainer/parallel/stage_links.h"

namespace trireme {
namespace {

int64_t pieces_of(const Model& model) { return static_cast<int64_t>(model.split().layers.size()); }

// Whose ranks make their passes together: those that sum gradients or gather weights in them, which all replicas do, or
// exchange rows. Null: each for itself.
Communicator* group_of_passes(const Model& model, bool train) {
  const Sharding& sharding = model.options().sharding;
  return sharding.weights || (sharding.gradients && train) ? sharding.ranks : model.options().passes;
}

// As many inputs as the ranks that make their passes together have at most: behind its own ones a rank makes passes
// without rows.
std::vector<const PackedBatch*> with_empty_ones(const Model& model, const PipelineWork& work, bool train) {
  std::vector<const PackedBatch*> inputs = work.inputs;
  Communicator* group = group_of_passes(model, train);
  if (group == nullptr) return inputs;
  static const PackedBatch none = PackedBatch::from_sequences({});
  const auto most = static_cast<size_t>(group->all_reduce_max(static_cast<double>(inputs.size())));
  inputs.resize(most, &none);
  return inputs;
}

// What this rank computes of the inputs: over context parallel ranks its parts of them.
struct OwnInputs {
  OwnInputs(const Model& model, const PipelineWork& work, bool train) : inputs(with_empty_ones(model, work, train)) {
    if (model.options().context == nullptr) return;
    for (const PackedBatch* whole : inputs) parts.push_back(context_part(model, *whole));
    for (size_t i = 0; i < inputs.size(); ++i) inputs[i] = &parts[i];
  }
  std::vector<PackedBatch> parts;
  std::vector<const PackedBatch*> inputs;
};

// One rank's turn of a table.
class StageRun final {
 public:
  StageRun(const Model& model, const PipelineWork& work, const std::vector<const PackedBatch*>& inputs,
           const PipelineTable& table, bool train)
      : model_(model),
        work_(work),
        inputs_(inputs),
        table_(table),
        passes_(table.stages.at(static_cast<size_t>(model.split().stage))),
        links_(model.options().links),
        train_(train) {}

  void run() {
    for (size_t i = 0; i < passes_.size(); ++i) {
      if (i == 0) begin_receive(0);
      // The next one's input comes in beside this pass. On a device a receive that waits would stand before whatever
      // of this pass waits for the whole device, as an allocator that gives memory back, so it begins behind it.
      const bool on_device = model_.options().device.is_cuda();
      if (!on_device) begin_receive(i + 1);
      const PipelinePass& pass = passes_[i];
      if (pass.backward) {
        if (ShardedUnits* units = model_.units()) units->expect_forward(i + 1 < passes_.size());
        backward(pass);
      } else {
        forward(pass);
      }
      if (on_device) begin_receive(i + 1);
      if (work_.on_progress && pass.piece == (train_ ? 0 : pieces_of(model_) - 1) && pass.backward == train_)
        work_.on_progress();
    }
    for (Sent& sent : sends_) sent.pending.wait();
  }

 private:
  struct Kept {
    at::Tensor input, output;  // of a forward pass, until its backward
  };
  struct Received {
    at::Tensor tensor;
    PendingCollective pending;
    PipelinePlace from;
    PipelinePass pass;  // there
  };
  struct Sent {
    PendingCollective pending;
    PipelinePlace to;
    int64_t taken_by = 0;  // place in that stage's passes
  };

  const PackedBatch& batch_of(const PipelinePass& pass) const {
    return *inputs_.at(static_cast<size_t>(pass.micro_batch));
  }

  // Of pass `i`, where another stage makes its input.
  void begin_receive(size_t i) {
    if (i >= passes_.size()) return;
    const PipelinePass& pass = passes_[i];
    const std::optional<PipelinePlace> from = input_of(table_, model_.split().stage, pass);
    if (!from) return;
    Received& next = received_.emplace_back();
    next.from = *from;
    next.pass = {from->piece, pass.micro_batch, pass.backward};
    next.tensor = model_.make_residual(batch_of(pass).tokens());
    next.pending = links_->begin_receive(next.tensor, pass.backward);
  }

  at::Tensor take_received() {
    Received first = std::move(received_.front());
    received_.pop_front();
    first.pending.wait();
    forget_sends(first);
    return first.tensor;
  }

  // Place of a pass among those of its stage.
  int64_t place_of(int64_t stage, const PipelinePass& pass) const {
    const std::vector<PipelinePass>& passes = table_.stages.at(static_cast<size_t>(stage));
    return std::find(passes.begin(), passes.end(), pass) - passes.begin();
  }

  // A stage that has run a pass has received everything that it ran before, and for it.
  void forget_sends(const Received& received) {
    const int64_t place = place_of(received.from.stage, received.pass);
    for (auto sent = sends_.begin(); sent != sends_.end();) {
      const bool there = sent->to.stage == received.from.stage && sent->taken_by <= place;
      if (there) sent->pending.wait();
      sent = there ? sends_.erase(sent) : sent + 1;
    }
  }

  // What is sent is kept until it is known to be there, or, where nobody answers, a few are under way. 2 pp are enough
  // that no ring of stages waits for itself: of pp the first stage comes to a piece's after as many passes.
  void send(const at::Tensor& tensor, const PipelinePass& pass) {
    const PipelinePlace to = *output_of(table_, model_.split().stage, pass);
    const int64_t taken_by = place_of(to.stage, {to.piece, pass.micro_batch, pass.backward});
    sends_.push_back({links_->begin_send(tensor.detach().contiguous(), pass.backward), to, taken_by});
    while (!train_ && static_cast<int64_t>(sends_.size()) > 2 * model_.split().pp) {
      sends_.front().pending.wait();
      sends_.pop_front();
    }
  }

  void forward(const PipelinePass& pass) {
    const bool last_batch = pass.micro_batch + 1 == static_cast<int64_t>(inputs_.size());
    if (train_ && last_batch && pieces_of(model_) == 1 && work_.before_last) work_.before_last();
    Kept kept;
    if (!model_.split().begins(pass.piece)) {
      kept.input = take_received();
      if (train_) kept.input.set_requires_grad(true);
    }
    PackedBatch batch = batch_of(pass);
    const at::Device device = model_.options().device;
    batch.ids = batch.ids.to(device);
    batch.positions = batch.positions.to(device);
    kept.output = model_.forward_piece(pass.piece, batch, kept.input);
    if (model_.split().ends(pass.piece)) {
      const auto index = static_cast<size_t>(pass.micro_batch);
      // Of no rows: its backward reaches the experts all the same, which others' rows have gone through.
      kept.output = index < work_.inputs.size() ? work_.finish(index, kept.output) : kept.output.sum();
    } else {
      send(kept.output, pass);
    }
    if (train_) kept_[{pass.piece, pass.micro_batch}] = std::move(kept);
  }

  void backward(const PipelinePass& pass) {
    const auto found = kept_.find({pass.piece, pass.micro_batch});
    TRIREME_CHECK(found != kept_.end(), "a backward pass without its forward");
    const Kept kept = std::move(found->second);
    kept_.erase(found);
    if (model_.split().ends(pass.piece)) {
      kept.output.backward();
    } else {
      torch::autograd::backward({kept.output}, {take_received()});
    }
    if (!kept.input.defined()) return;
    TRIREME_CHECK(kept.input.grad().defined(), "a piece whose input has no gradient");
    send(kept.input.grad(), pass);
  }

  const Model& model_;
  const PipelineWork& work_;
  const std::vector<const PackedBatch*>& inputs_;
  const PipelineTable& table_;
  const std::vector<PipelinePass>& passes_;
  StageLinks* links_;
  const bool train_;
  std::map<std::pair<int64_t, int64_t>, Kept> kept_;  // by piece and micro-batch
  std::deque<Received> received_;                     // of this pass and the next one
  std::deque<Sent> sends_;
};

}  // namespace

void train_passes(const Model& model, const PipelineWork& work) {
  const OwnInputs own(model, work, /*train=*/true);
  const std::vector<const PackedBatch*>& inputs = own.inputs;
  const auto micro_batches = static_cast<int64_t>(inputs.size());
  const PipelineTable table = training_passes(model.split().pp, pieces_of(model), micro_batches);
  StageRun(model, work, inputs, table, /*train=*/true).run();
  if (model.units() != nullptr) model.units()->end_passes();
}

void forward_passes(const Model& model, const PipelineWork& work) {
  const at::NoGradGuard no_grad;
  const OwnInputs own(model, work, /*train=*/false);
  const std::vector<const PackedBatch*>& inputs = own.inputs;
  const auto micro_batches = static_cast<int64_t>(inputs.size());
  const PipelineTable table = forward_passes(model.split().pp, pieces_of(model), micro_batches);
  StageRun(model, work, inputs, table, /*train=*/false).run();
  if (model.units() != nullptr) model.units()->end_passes();
}

void share_result(const Model& model, at::Tensor values) {
  if (StageLinks* links = model.options().links) links->share_last(std::move(values));
}

std::string share_result(const Model& model, const std::string& bytes) {
  StageLinks* links = model.options().links;
  return links == nullptr ? bytes : links->share_last(bytes);
}

}  // namespace trireme
