#include "trainer/model/sharded_units.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace trireme {

WholeMemory::WholeMemory(int64_t elements, const at::TensorOptions& options) : elements_(elements), options_(options) {
  const auto bytes = elements * static_cast<int64_t>(options.dtype().itemsize());
  if (options.device().is_cuda()) mapped_ = std::make_unique<cuda::MappedMemory>(options.device(), 1, bytes);
}

at::Tensor WholeMemory::map() {
  if (mapped_ == nullptr) return at::zeros({elements_}, options_);
  mapped_->map(elements_ * static_cast<int64_t>(options_.dtype().itemsize()));
  return at::from_blob(mapped_->address(0), {elements_}, options_);
}

void WholeMemory::unmap() {
  if (mapped_ != nullptr) mapped_->unmap();
}

ShardedUnits::ShardedUnits(const Sharding& sharding, const Shape& shape) : sharding_(sharding), shape_(shape) {
  TRIREME_CHECK(sharding.ranks != nullptr, "who shares weights or gradients is not said");
  const ParameterLayout& layout = shape.layout;
  last_place_ = static_cast<int64_t>(layout.layer_begins.size());
  shards_ = shard_layout(layout, sharding.ranks->size(), sharding.experts == nullptr ? 1 : sharding.experts->size(),
                         sharding.bucket_elements);
  const at::TensorOptions of_gradients = shape.weights.dtype(shape.gradients);
  for (const WeightUnit& found : weight_units(layout)) {
    Unit& unit = units_.emplace_back();
    static_cast<WeightUnit&>(unit) = found;
    for (const FlatBucket& bucket : shards_.buckets) {
      if (bucket.begin < unit.begin || bucket.begin >= unit.end) continue;
      unit.buckets.push_back(bucket);
      unit.width += bucket.width;
    }
    unit.group = &group_of(unit.buckets.front());
    if (sharding.weights) unit.values = UnitMemory(unit.end - unit.begin, shape.weights, shape.spare_elements);
    if (shape.trainable) unit.gradients = UnitMemory(unit.end - unit.begin, of_gradients);
  }
  if (shape.trainable) alike_gradients_ = at::zeros({layout.alike_elements}, of_gradients);
  if (!sharding.weights) return;
  const int64_t total = layout.elements + layout.frozen_elements;
  alike_.values = UnitMemory(layout.alike_elements, shape.weights);
  frozen_ = {layout.elements, UnitMemory(layout.frozen_elements, shape.weights), {}};
  parts_and_spare_ = at::zeros({shards_.owned + shape.spare_elements}, shape.weights);
  parts_ = parts_and_spare_.narrow(0, 0, shards_.owned);
  flat_ = UnitMemory(total, shape.weights);
  memory_ = std::make_unique<WholeMemory>(total + shape.spare_elements, shape.weights);
  point_at(memory_->map());
}

Communicator& ShardedUnits::group_of(const FlatBucket& bucket) const {
  return bucket.experts ? *sharding_.experts : *sharding_.ranks;
}

// What the forward pass reads last is read first in backward; a tied embedding is read there too.
bool ShardedUnits::stays(const Unit& unit) const {
  return unit.place == last_place_ || (shape_.tied && unit.place == 0);
}

int64_t ShardedUnits::place_of(int64_t offset) const {
  for (const Unit& unit : units_)
    if (offset >= unit.begin && offset < unit.end) return unit.place;
  return 0;
}

at::Tensor ShardedUnits::flat_weights() const { return flat_.view(0, {flat_.elements()}); }

at::Tensor ShardedUnits::weights(int64_t offset, const std::vector<int64_t>& shape) const {
  for (const Unit& unit : units_)
    if (offset >= unit.begin && offset < unit.end) return unit.values.view(offset - unit.begin, shape);
  const Resident& resident = offset < shape_.layout.alike_elements ? alike_ : frozen_;
  return resident.values.view(offset - resident.begin, shape);
}

at::Tensor ShardedUnits::gradients(int64_t offset, const std::vector<int64_t>& shape) const {
  for (const Unit& unit : units_)
    if (offset >= unit.begin && offset < unit.end) return unit.gradients.view(offset - unit.begin, shape);
  int64_t size = 1;
  for (const int64_t extent : shape) size *= extent;
  return alike_gradients_.narrow(0, offset, size).view(shape);
}

// ---- a pass

// Its weights begin to come, where they neither are nor do already.
void ShardedUnits::begin_gather(Unit& unit) {
  if (unit.values.here() || unit.coming.defined()) return;
  if (unit.group->size() == 1) {  // all of them are this rank's: bucket behind bucket
    unit.values.set(parts_and_spare_.narrow(0, unit.buckets.front().at, unit.width + shape_.spare_elements));
    return;
  }
  unit.coming = at::empty({unit.width + shape_.spare_elements}, shape_.weights);
  unit.coming.narrow(0, unit.width, shape_.spare_elements).zero_();
  for (const FlatBucket& bucket : unit.buckets) {
    unit.pending.push_back(unit.group->begin_all_gather(unit.coming.narrow(0, bucket.begin - unit.begin, bucket.width),
                                                        parts_.narrow(0, bucket.at, bucket.part())));
  }
}

void ShardedUnits::ahead(int64_t place) {
  if (whole()) return;
  for (Unit& unit : units_)
    if (unit.place == place) begin_gather(unit);
}

void ShardedUnits::have(int64_t place) {
  if (whole()) return;
  ahead(place);
  for (Unit& unit : units_) {
    if (unit.place != place || !unit.coming.defined()) continue;
    for (PendingCollective& pending : unit.pending) pending.wait();
    unit.pending.clear();
    unit.values.set(std::exchange(unit.coming, at::Tensor()));
  }
}

void ShardedUnits::leave(Unit& unit) {
  if (!whole()) unit.values.reset();
}

void ShardedUnits::read(int64_t place) {
  const c10::NoGradGuard no_grad;
  if (whole()) return;
  for (Unit& unit : units_) {
    const bool ended = place == 0 && unit.place == last_place_;  // an earlier forward pass was the last of its own
    if (ended || (unit.place < place && !stays(unit))) leave(unit);
  }
  have(place);
  if (place < last_place_) ahead(place + 1);
}

void ShardedUnits::end_forward(bool backward) {
  const c10::NoGradGuard no_grad;
  if (!backward) return;
  make_gradients(last_place_);
  if (shape_.tied) make_gradients(0);
  if (last_place_ > 1) ahead(last_place_ - 1);  // what backward reads behind the head
}

void ShardedUnits::make_gradients(int64_t place) {
  for (Unit& unit : units_) {
    if (unit.place != place || unit.gradients.here()) continue;
    if (before_gradient_memory) before_gradient_memory(unit.begin, unit.end);
    unit.gradients.set(at::zeros({unit.width}, shape_.weights.dtype(shape_.gradients)));
    if (before_gradients) before_gradients(unit.begin, unit.gradients.memory());
  }
}

void ShardedUnits::differentiated(int64_t place) {
  const c10::NoGradGuard no_grad;
  const bool kept = forward_follows_ && place == 1;  // the next pass reads it soon
  std::vector<std::pair<int64_t, at::Tensor>> complete;
  for (auto unit = units_.rbegin(); unit != units_.rend(); ++unit) {
    if (unit->place == place) {
      complete.emplace_back(unit->begin, unit->gradients.memory());
      unit->gradients.reset();
    }
    if (unit->place == place ? !kept : place == last_place_ && stays(*unit)) leave(*unit);
  }
  // Collectives of a group run in the order they are begun in. What is read next goes before sums that nobody waits
  // for: the layers before this one, and in the end what the next forward pass begins with.
  if (place > 1) have(place - 1);
  if (place > 2) ahead(place - 2);
  if (place == 2 && forward_follows_) ahead(0);
  if (kept) ahead(2);
  for (const auto& [begin, gradients] : complete)
    if (on_gradients) on_gradients(begin, gradients);
  if (place == 0) return;
  make_gradients(place - 1);
  // The embedding's are complete when everything is.
  if (place == 1) torch::autograd::Engine::get_default_engine().queue_callback([this] { differentiated(0); });
}

void ShardedUnits::end_passes() {
  for (Unit& unit : units_) {
    if (unit.coming.defined()) have(unit.place);  // what was begun ends
    leave(unit);
  }
}

// ---- whole weights

void ShardedUnits::point_at(const at::Tensor& whole) {
  flat_.set(whole);
  for (Unit& unit : units_) unit.values.set(whole.narrow(0, unit.begin, unit.end - unit.begin + shape_.spare_elements));
  for (Resident* resident : {&alike_, &frozen_}) {
    const int64_t size = resident->values.elements();
    if (size > 0) resident->values.set(whole.narrow(0, resident->begin, size));
    resident->kept = at::Tensor();
  }
}

void ShardedUnits::gather() {
  if (whole()) return;
  const c10::NoGradGuard no_grad;
  end_passes();
  const at::Tensor kept = frozen_.kept;
  const at::Tensor whole = memory_->map();
  if (kept.defined()) whole.narrow(0, frozen_.begin, frozen_.values.elements()).copy_(kept);
  point_at(whole);
  refresh();
}

void ShardedUnits::release() {
  if (!sharding_.weights || !flat_.here()) return;
  if (before_release) before_release();
  const c10::NoGradGuard no_grad;
  for (Resident* resident : {&alike_, &frozen_}) {
    if (resident->values.elements() == 0) continue;
    resident->kept = resident->values.memory().clone();
    resident->values.set(resident->kept);
  }
  for (Unit& unit : units_) unit.values.reset();
  flat_.reset();
  memory_->unmap();
}

void ShardedUnits::cut() {
  TRIREME_CHECK(flat_.here(), "the weights are not whole");
  const c10::NoGradGuard no_grad;
  for (const FlatBucket& bucket : shards_.buckets) {
    const int64_t begin = bucket.begin + group_of(bucket).rank() * bucket.part();
    const int64_t size = std::clamp<int64_t>(bucket.begin + bucket.size - begin, 0, bucket.part());
    if (size > 0) parts_.narrow(0, bucket.at, size).copy_(flat_.memory().narrow(0, begin, size));
  }
}

void ShardedUnits::refresh() {
  const c10::NoGradGuard no_grad;
  if (!flat_.here()) end_passes();
  for (const FlatBucket& bucket : shards_.buckets) {
    const bool alike = bucket.begin < shape_.layout.alike_elements;
    if (!flat_.here() && !alike) continue;
    const at::Tensor to = (alike ? alike_.values.memory() : flat_.memory()).narrow(0, bucket.begin, bucket.size);
    const at::Tensor mine = parts_.narrow(0, bucket.at, bucket.part());
    if (bucket.size == bucket.width) {
      group_of(bucket).all_gather(to, mine);
    } else {
      const at::Tensor padded = at::empty({bucket.width}, shape_.weights);
      group_of(bucket).all_gather(padded, mine);
      to.copy_(padded.narrow(0, 0, bucket.size));
    }
  }
}

}  // namespace trireme
