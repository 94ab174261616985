#include "trainer/optimizer/adamw.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "trainer/model/safetensors.h"
#include "trainer/parallel/exchange.h"

namespace trireme {

DistributedAdamW::DistributedAdamW(Model& model, Communicator& data_parallel, const AdamWOptions& options,
                                   Communicator* expert_data_parallel)
    : model_(model),
      group_(data_parallel),
      options_(options),
      experts_(expert_data_parallel),
      tensor_(model.options().tensor),
      links_(model.options().links) {
  TRIREME_CHECK(model.flat_gradients().defined(), "the optimizer needs a trainable model");
  TRIREME_CHECK((experts_ != nullptr) == model.split().experts_apart(),
                "experts that others hold than the rest need the group that holds the same ones");
  TRIREME_CHECK(model.units() == nullptr || (options.shard_state && model.options().sharding.ranks == &group_ &&
                                             model.options().sharding.experts == experts_),
                "a model that shares gradients has its optimizer's groups");
  elements_ = model.trained_elements();
  make_buckets();
  dense_ = std::count_if(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) { return !bucket.experts; });
  unreduced_ = dense_;
  summed_.assign(buckets_.size(), false);
  add_decayed();
  count_elements();
  make_state();
  if (master_.is_cuda()) mark_decayed_groups();
  if (ShardedUnits* units = model.units()) {
    units->before_gradient_memory = [this](int64_t begin, int64_t end) { await_sums(begin, end); };
    units->before_gradients = [this](int64_t begin, const at::Tensor& gradients) { continue_sums(begin, gradients); };
    units->on_gradients = [this](int64_t begin, const at::Tensor& gradients) { reduce_unit(begin, gradients); };
  }
}

void DistributedAdamW::make_buckets() {
  const bool on_cuda = model_.options().device.is_cuda();
  ShardLayout layout;
  if (const ShardedUnits* units = model_.units()) {
    layout = units->shards();
  } else {
    const auto ranks = [this](Communicator& group) { return int64_t{options_.shard_state ? group.size() : 1}; };
    layout.add(0, model_.split_experts(), ranks(group_), options_.bucket_elements, false);
    if (experts_ != nullptr)
      layout.add(model_.split_experts(), elements_, ranks(*experts_), options_.bucket_elements, true);
  }
  owned_ = layout.owned;
  for (const FlatBucket& flat : layout.buckets) {
    Bucket& bucket = buckets_.emplace_back();
    static_cast<FlatBucket&>(bucket) = flat;
    bucket.group = flat.experts ? experts_ : &group_;
    Slice slice;
    slice.begin = bucket.begin + (bucket.sharded() ? bucket.group->rank() * bucket.part() : 0);
    slice.size = std::clamp<int64_t>(bucket.begin + bucket.size - slice.begin, 0, bucket.part());
    slice.at = bucket.at;
    // On a CPU the update has a place to work in for all of them.
    const bool in_place = bucket.group->size() == 1 && on_cuda && model_.units() == nullptr;
    slice.summed_at = in_place ? kInPlace : std::exchange(summed_elements_, summed_elements_ + bucket.part());
    slices_.push_back(slice);
  }
}

void DistributedAdamW::add_decayed() {
  for (const Parameter& parameter : model_.parameters()) {
    if (!parameter.trainable || !(options_.decay_all || parameter.decay)) continue;
    for (const Slice& slice : slices_) {
      const int64_t begin = std::max(parameter.offset, slice.begin);
      const int64_t end = std::min(parameter.offset + parameter.size, slice.begin + slice.size);
      if (begin < end) decayed_.push_back({slice.at + begin - slice.begin, end - begin});
    }
  }
}

bool DistributedAdamW::shares_weights() const { return model_.options().sharding.weights; }

void DistributedAdamW::make_state() {
  const c10::NoGradGuard no_grad;
  const at::TensorOptions options = model_.flat_parameters().options().requires_grad(false);
  const auto fp32 = options.dtype(at::kFloat);
  const bool in_fp32 = options.dtype() == fp32.dtype();
  exp_avg_ = at::zeros({owned_}, fp32);
  exp_avg_sq_ = at::zeros({owned_}, fp32);
  if (summed_elements_ > 0) grads_ = at::zeros({summed_elements_}, fp32);
  const bool all = group_.size() == 1 || !options_.shard_state;
  if (in_fp32 && shares_weights()) {
    master_ = model_.units()->parts();
  } else if (in_fp32 && all && owned_ == elements_) {
    master_ = model_.flat_parameters().detach().narrow(0, 0, elements_);
    return;
  } else {
    master_ = at::zeros({owned_}, fp32);
  }
  reset_master_from_weights();
}

DistributedAdamW::Slice DistributedAdamW::share_of(const Bucket& bucket) const {
  const int64_t ranks = bucket.group->size(), rank = bucket.group->rank();
  if (bucket.sharded()) return {bucket.begin + rank * bucket.part(), bucket.part(), bucket.at};
  const int64_t from = bucket.size * rank / ranks, to = bucket.size * (rank + 1) / ranks;
  return {bucket.begin + from, to - from, bucket.at + from};
}

DistributedAdamW::OwnedElements DistributedAdamW::saved_elements() const {
  if (options_.shard_state) return {0, owned_};
  // Each copy of the weights a part of all that its ranks own: ranks at the same place in two copies hold the same.
  const ModelSplit& split = model_.split();
  const int64_t of_copy = Layout{.tp = split.tp, .ep = split.ep, .etp = split.etp}.copy_ranks();
  const int64_t copies = split.tp * group_.size() / of_copy,
                copy = (split.tensor_rank + split.tp * group_.rank()) / of_copy;
  const int64_t from = owned_ * copy / copies;
  return {from, owned_ * (copy + 1) / copies - from};
}

// Not what tensor ranks hold alike, but on their first one, and not the last stage's copy of an embedding.
void DistributedAdamW::count_elements() {
  std::vector<Range> elsewhere;  // in the flat buffer, ascending
  if (tensor_ != nullptr && tensor_->rank() > 0) elsewhere.push_back({0, model_.alike_elements()});
  for (const Parameter& parameter : model_.parameters()) {
    if (parameter.slice.tied_copy) elsewhere.push_back({parameter.offset, parameter.offset + parameter.size});
  }
  for (size_t index = 0; index < buckets_.size(); ++index) {
    const Slice& slice = slices_[index];
    const bool in_place = slice.summed_at == kInPlace;
    const auto count = [&](int64_t from, int64_t to) {  // of the owned elements
      if (from >= to) return;
      const int64_t at = from - slice.at + (in_place ? slice.begin : slice.summed_at);
      if (!counted_.empty() && counted_.back().in_place == in_place &&
          counted_.back().at + counted_.back().size == at) {
        counted_.back().size += to - from;
      } else {
        counted_.push_back({in_place, at, to - from});
      }
    };
    const Slice share = share_of(buckets_[index]);
    int64_t from = share.at;
    for (const Range& run : elsewhere) {
      const int64_t begin = std::max(run.begin, share.begin), end = std::min(run.end, share.begin + share.size);
      if (begin >= end) continue;
      count(from, share.at + begin - share.begin);
      from = share.at + end - share.begin;
    }
    count(from, share.at + share.size);
  }
}

void DistributedAdamW::reset_master_from_weights() {
  const c10::NoGradGuard no_grad;
  if (shares_weights()) {
    model_.units()->cut();
    if (!master_.is_same(model_.units()->parts())) master_.copy_(model_.units()->parts());
    return;
  }
  const at::Tensor weights = model_.flat_parameters().detach();
  if (master_.data_ptr() == weights.data_ptr()) return;
  for (const Slice& slice : slices_) {
    if (slice.size > 0) master_.narrow(0, slice.at, slice.size).copy_(weights.narrow(0, slice.begin, slice.size));
  }
}

// Of what this rank has of the gradients; empty: all are finite.
std::string DistributedAdamW::first_not_finite() const {
  const auto finite = [](const at::Tensor& gradient) { return at::isfinite(gradient).all().item<bool>(); };
  for (const Parameter& parameter : model_.parameters()) {
    if (!parameter.trainable) continue;
    if (model_.units() == nullptr) {
      if (!finite(model_.flat_gradients().narrow(0, parameter.offset, parameter.size))) return parameter.name;
      continue;
    }
    for (const Slice& slice : slices_) {
      const int64_t begin = std::max(parameter.offset, slice.begin);
      const int64_t end = std::min(parameter.offset + parameter.size, slice.begin + slice.size);
      if (begin < end && !finite(grads_.narrow(0, slice.at + begin - slice.begin, end - begin))) return parameter.name;
    }
  }
  return "";
}

void DistributedAdamW::check_finite(double squares) const {
  if (std::isfinite(squares)) return;
  std::string name = first_not_finite();
  const std::string rest =
      " at optimizer step " + std::to_string(steps_done_ + 1) + " is not finite; the weights were not changed";
  // Every rank comes here: the sum is the same on all.
  if (model_.units() != nullptr) {  // whose micro-batch it was is not known any more
    for (Communicator* group : {&group_, tensor_}) {
      if (group == nullptr) continue;
      for (const std::string& other : group->all_gather_bytes(name))
        if (name.empty()) name = other;
    }
    fail_data("the ranks' sum of gradients" + (name.empty() ? "" : " of " + name) + rest);
  }
  const int own = job_rank();
  double last = group_.all_reduce_max(name.empty() ? -1.0 : static_cast<double>(own));
  if (tensor_ != nullptr) last = tensor_->all_reduce_max(last);
  if (links_ != nullptr) last = links_->group().all_reduce_max(last);
  const auto culprit = static_cast<int64_t>(last);
  if (!name.empty()) fail_data("rank " + std::to_string(own) + ": the gradient of " + name + rest);
  if (culprit < 0) fail_data("the ranks' sum of gradients" + rest);
  throw Error(ErrorKind::kUnavailable, "the gradient of rank " + std::to_string(culprit) + rest);
}

DistributedAdamW::~DistributedAdamW() {
  if (armed_) model_.on_gradients_final = nullptr;
  if (watching_) model_.before_reading = nullptr;
  ShardedUnits* units = model_.units();
  if (units == nullptr) return;
  units->before_gradient_memory = nullptr;
  units->before_gradients = units->on_gradients = nullptr;
}

void DistributedAdamW::reduce_in_next_backward() {
  if (group_.size() == 1 || model_.units() != nullptr) return;
  armed_ = true;
  model_.on_gradients_final = [this](int64_t from) { reduce_from(from); };
}

// Reductions whose copies and results are kept at once: more would only take memory.
constexpr size_t kMostUnderWay = 8;

// All ranks begin the buckets in one order, from the last to the first and experts' behind all others, whether in a
// backward pass or after it: what waits for a rank that is behind is what that rank comes to next.
void DistributedAdamW::reduce_from(int64_t from) {
  while (unreduced_ > 0 && buckets_[static_cast<size_t>(unreduced_ - 1)].begin >= from) reduce_bucket(--unreduced_);
}

// Where experts are apart. They lie behind all others, so a layer's are no part of what a pass says is final.
void DistributedAdamW::reduce_experts() {
  for (auto index = static_cast<int64_t>(buckets_.size()); index > dense_;) reduce_bucket(--index);
}

void DistributedAdamW::reduce_bucket(int64_t index) {
  const c10::NoGradGuard no_grad;
  const Bucket& bucket = buckets_[static_cast<size_t>(index)];
  if (slices_[static_cast<size_t>(index)].summed_at == kInPlace) return;
  begin_reduction(index, model_.flat_gradients().narrow(0, bucket.begin, bucket.size), /*adds=*/false);
  if (reductions_.size() > kMostUnderWay) finish_oldest_reduction();
}

// `gradients`: the bucket's, with its padding or without.
void DistributedAdamW::begin_reduction(int64_t index, const at::Tensor& gradients, bool adds) {
  const Bucket& bucket = buckets_[static_cast<size_t>(index)];
  const at::ScalarType wire = options_.reduce_in_fp32 ? at::kFloat : gradients.scalar_type();
  const at::TensorOptions options = gradients.options().dtype(wire);
  Reduction reduction;
  reduction.bucket = index;
  reduction.adds = adds;
  const int64_t at = slices_[static_cast<size_t>(index)].summed_at;
  at::Tensor mine = grads_.narrow(0, at, bucket.sharded() ? bucket.part() : bucket.size);
  if (wire != at::kFloat || adds) mine = reduction.received = at::empty({mine.size(0)}, options);
  if (!bucket.sharded()) {
    mine.copy_(gradients);
    reduction.sent = mine;
    reduction.pending = bucket.group->begin_all_reduce_sum(mine);
  } else {
    reduction.sent = gradients;
    if (gradients.size(0) < bucket.width || wire != gradients.scalar_type()) {
      reduction.sent = at::zeros({bucket.width}, options);
      reduction.sent.narrow(0, 0, gradients.size(0)).copy_(gradients);
    }
    reduction.pending = bucket.group->begin_reduce_scatter_sum(mine, reduction.sent);
  }
  reductions_.push_back(std::move(reduction));
}

size_t DistributedAdamW::first_bucket_from(int64_t begin) const {
  return static_cast<size_t>(std::lower_bound(buckets_.begin(), buckets_.end(), begin,
                                              [](const Bucket& one, int64_t at) { return one.begin < at; }) -
                             buckets_.begin());
}

// Whether what a backward pass adds up has the precision of the sums over micro-batches.
bool DistributedAdamW::gradients_carry_sums() const {
  return options_.reduce_in_fp32 && model_.flat_gradients().scalar_type() == at::kFloat;
}

// A tied embedding is differentiated first and last: its last pass's gradients, the largest of a small model's, may
// still be on their way.
void DistributedAdamW::await_sums(int64_t begin, int64_t end) {
  const c10::NoGradGuard no_grad;
  const auto within = [&](const Reduction& one) {
    const int64_t at = buckets_[static_cast<size_t>(one.bucket)].begin;
    return at >= begin && at < end;
  };
  while (std::any_of(reductions_.begin(), reductions_.end(), within)) finish_oldest_reduction();
}

// Earlier micro-batches' sums go into this rank's own part of the next one's gradients and come out of the reduction
// with them: a third of the traffic of an addition behind it, and no memory for what is added.
void DistributedAdamW::continue_sums(int64_t begin, const at::Tensor& gradients) {
  if (!gradients_carry_sums()) return;
  const c10::NoGradGuard no_grad;
  size_t index = first_bucket_from(begin);
  for (int64_t at = 0; at < gradients.size(0); at += buckets_[index++].width) {
    if (!summed_[index]) continue;
    const Bucket& bucket = buckets_[index];
    gradients.narrow(0, at + bucket.group->rank() * bucket.part(), bucket.part())
        .copy_(grads_.narrow(0, bucket.at, bucket.part()));
  }
}

// One unit's are under way at a time, beside the computation of the next one's: so many whole gradients there are.
void DistributedAdamW::reduce_unit(int64_t begin, const at::Tensor& gradients) {
  const c10::NoGradGuard no_grad;
  while (!reductions_.empty()) finish_oldest_reduction();
  const bool carried = gradients_carry_sums();
  size_t index = first_bucket_from(begin);
  for (int64_t at = 0; at < gradients.size(0); at += buckets_[index++].width) {
    begin_reduction(static_cast<int64_t>(index), gradients.narrow(0, at, buckets_[index].width),
                    /*adds=*/summed_[index] && !carried);
    summed_[index] = true;
    ++reduced_early_;
  }
}

void DistributedAdamW::finish_oldest_reduction() {
  Reduction& reduction = reductions_.front();
  reduction.pending.wait();
  if (reduction.received.defined()) {
    const int64_t at = slices_[static_cast<size_t>(reduction.bucket)].summed_at;
    const at::Tensor own = grads_.narrow(0, at, reduction.received.size(0));
    if (reduction.adds) {
      own.add_(reduction.received);
    } else {
      own.copy_(reduction.received);
    }
  }
  reductions_.pop_front();
}

void DistributedAdamW::finish_reduction() {
  if (model_.units() != nullptr) {  // what tensor ranks hold alike is left
    const size_t first = first_bucket_from(model_.alike_elements());
    unreduced_ = static_cast<int64_t>(first);
    for (size_t index = first; index < buckets_.size(); ++index)  // which no pass came by
      if (!summed_[index]) grads_.narrow(0, buckets_[index].at, buckets_[index].part()).zero_();
    summed_.assign(buckets_.size(), false);
  }
  reduce_from(0);
  if (model_.units() == nullptr) reduce_experts();
  while (!reductions_.empty()) finish_oldest_reduction();
  unreduced_ = dense_;
}

OptimizerStep DistributedAdamW::step(double learning_rate, double weight_decay, double max_grad_norm, Gather gather) {
  const c10::NoGradGuard no_grad;
  finish_gather();  // the master slices that are still being sent are written below
  if (armed_) model_.on_gradients_final = nullptr;
  armed_ = false;
  OptimizerStep result;
  result.reduced_early = reduced_early_ + dense_ - unreduced_;
  reduced_early_ = 0;
  sum_alike();
  sum_tied();
  if (grads_.defined()) finish_reduction();
  double squares = group_.all_reduce_sum(sum_of_squares());
  if (tensor_ != nullptr) squares = tensor_->all_reduce_sum(squares);
  if (links_ != nullptr) squares = links_->group().all_reduce_sum(squares);
  check_finite(squares);
  result.grad_norm = std::sqrt(squares);
  if (max_grad_norm > 0) result.clip_factor = std::min(1.0, max_grad_norm / (result.grad_norm + 1e-6));

  if (before_update) before_update();
  ++steps_done_;
  Factors factors;
  factors.learning_rate = learning_rate;
  factors.weight_decay = weight_decay;
  factors.clip = result.clip_factor;
  factors.correction1 = 1 - std::pow(options_.beta1, static_cast<double>(steps_done_));
  factors.correction2 = 1 - std::pow(options_.beta2, static_cast<double>(steps_done_));
  if (master_.is_cuda()) {
    update_on_device(factors);
  } else {
    update(factors);
    write_weights();
  }
  if (gather == Gather::kNow || experts_ != nullptr) {
    finish_gather();
  } else if (!gatherings_.empty()) {
    watching_ = true;
    model_.before_reading = [this](int64_t end) { finish_gather_before(end); };
  }
  model_.zero_gradients();
  return result;
}

void DistributedAdamW::update(const Factors& factors) {
  if (factors.clip < 1) grads_.mul_(factors.clip);
  if (factors.weight_decay != 0) {
    const double keep = 1 - factors.learning_rate * factors.weight_decay;
    for (const OwnedElements& run : decayed_) master_.narrow(0, run.at, run.size).mul_(keep);
  }
  exp_avg_.mul_(options_.beta1).add_(grads_, 1 - options_.beta1);
  exp_avg_sq_.mul_(options_.beta2).addcmul_(grads_, grads_, 1 - options_.beta2);
  // grads_ is scratch from here: it becomes the denominator.
  at::sqrt_out(grads_, exp_avg_sq_);
  grads_.div_(std::sqrt(factors.correction2)).add_(options_.eps);
  master_.addcdiv_(exp_avg_, grads_, -factors.learning_rate / factors.correction1);
}

// Begins to gather every bucket into the live weights.
void DistributedAdamW::write_weights() {
  if (shares_weights()) {
    if (!master_.is_same(model_.units()->parts())) model_.units()->parts().copy_(master_);
    model_.units()->refresh();
    return;
  }
  if (master_.data_ptr() == model_.flat_parameters().data_ptr()) return;
  for (const Bucket& bucket : buckets_) gather_bucket(bucket);
}

// A bucket may be written while a forward pass holds others for its backward. It is read by none before it is there,
// so the version counter, which all parameters share and which guards what was saved, is not moved.
at::Tensor DistributedAdamW::weights() const {
  return model_.flat_parameters().variable_data().narrow(0, 0, elements_);
}

void DistributedAdamW::gather_bucket(const Bucket& bucket) {
  const at::Tensor weights = this->weights();
  if (!bucket.sharded()) {
    weights.narrow(0, bucket.begin, bucket.size).copy_(master_.narrow(0, bucket.at, bucket.size));
    return;
  }
  Gathering gathering;
  gathering.mine = master_.narrow(0, bucket.at, bucket.part()).to(weights.scalar_type());
  gathering.begin = bucket.begin;
  gathering.size = bucket.size;
  if (bucket.size == bucket.width) {
    gathering.pending = bucket.group->begin_all_gather(weights.narrow(0, bucket.begin, bucket.width), gathering.mine);
  } else {
    gathering.padded = at::empty({bucket.width}, weights.options());
    gathering.pending = bucket.group->begin_all_gather(gathering.padded, gathering.mine);
  }
  gatherings_.push_back(std::move(gathering));
}

void DistributedAdamW::finish_gather_before(int64_t end) {
  const c10::NoGradGuard no_grad;
  while (!gatherings_.empty() && gatherings_.front().begin < end) {
    Gathering& gathering = gatherings_.front();
    gathering.pending.wait();
    if (gathering.padded.defined()) {
      weights().narrow(0, gathering.begin, gathering.size).copy_(gathering.padded.narrow(0, 0, gathering.size));
    }
    gatherings_.pop_front();
  }
}

void DistributedAdamW::finish_gather() {
  finish_gather_before(elements_);
  if (watching_) model_.before_reading = nullptr;
  watching_ = false;
}

// Each tensor rank has the gradients of its own rows. The buckets they lie in are reduced after this: no reduction that
// began in a backward pass reaches them.
void DistributedAdamW::sum_alike() {
  if (tensor_ == nullptr || model_.alike_elements() == 0) return;
  const at::Tensor own = model_.flat_gradients().narrow(0, 0, model_.alike_elements());
  own.copy_(sum_rows(*tensor_, own));
}

// Of a tied embedding the first and the last stage each have the gradients of their own use; the sum has the same bits
// on both, as have their weights after it. No reduction that began in a backward pass reaches it: it lies before the
// layers. From three replicas on the order of a sum shows in its bits, and a bucket's follows from the place in it,
// which is another one on each stage: the replicas' sum is made here, in their order, and the first one brings it in.
void DistributedAdamW::sum_tied() {
  const ModelSplit& split = model_.split();
  if (links_ == nullptr || !model_.config().tie_word_embeddings || !(split.first_stage() || split.last_stage())) return;
  const Parameter& embedding = *model_.find("model.embed_tokens.weight");
  const at::Tensor own = model_.flat_gradients().narrow(0, embedding.offset, embedding.size);
  own.add_(links_->swap_ends(own));
  if (group_.size() <= 2) return;
  // Some replicas may have begun these in backward: all begin them before the sum.
  reduce_from(embedding.offset + embedding.size);
  own.copy_(sum_rows(group_, own));
  if (group_.rank() > 0) own.zero_();
}

double DistributedAdamW::sum_of_squares() const {
  double squares = 0;
  for (const CountedRun& run : counted_) {
    const at::Tensor gradients = (run.in_place ? model_.flat_gradients() : grads_).narrow(0, run.at, run.size);
    squares += gradients.is_cuda() ? sum_of_squares_on_device(gradients)
                                   : gradients.to(at::kDouble).square().sum().item<double>();
  }
  return squares;
}

int DistributedAdamW::ranks_of_model() const {
  return (tensor_ == nullptr ? 1 : tensor_->size()) * (links_ == nullptr ? 1 : links_->stages());
}

// Tensor ranks are next to each other, stages furthest apart (topology.h).
int DistributedAdamW::job_rank() const {
  const int tensor = tensor_ == nullptr ? 0 : tensor_->rank(), stage = links_ == nullptr ? 0 : links_->stage();
  return tensor + (tensor_ == nullptr ? 1 : tensor_->size()) * (group_.rank() + group_.size() * stage);
}

namespace {
std::string part_name(int rank) {
  std::string digits = std::to_string(rank);
  digits.insert(0, digits.size() < 5 ? 5 - digits.size() : 0, '0');
  return "rank_" + digits + ".safetensors";
}
}  // namespace

std::vector<StatePiece> DistributedAdamW::own_pieces(const OwnedElements& part) const {
  std::vector<OwnedRun> runs;
  for (const Slice& slice : slices_) {
    const int64_t begin = std::max(slice.at, part.at), end = std::min(slice.at + slice.size, part.at + part.size);
    if (begin < end) runs.push_back({slice.begin + begin - slice.at, end - begin, begin - part.at});
  }
  const ModelOptions& options = model_.options();
  return state_pieces(parameter_layout(model_.config(), model_.split(), options.freeze_router, options.pad_widths),
                      runs);
}

TensorFile DistributedAdamW::saved() const {
  const OwnedElements part = saved_elements();
  const auto of = [&](const at::Tensor& state) { return state.narrow(0, part.at, part.size); };
  return {part_name(job_rank()),
          {{"exp_avg", of(exp_avg_)}, {"exp_avg_sq", of(exp_avg_sq_)}, {"master", of(master_)}},
          {{"format", "2"},
           {"pieces", to_json(own_pieces(part)).dump()},
           {"ranks", std::to_string(group_.size() * ranks_of_model())},
           {"steps_done", std::to_string(steps_done_)}}};
}

void DistributedAdamW::save(const std::filesystem::path& dir) const {
  const TensorFile file = saved();
  write_safetensors(dir / file.name, file.tensors, file.metadata);
}

namespace {

// Of a file of format 1, which had no names: runs of the flat buffer of the whole model.
std::vector<StatePiece> pieces_by_place(const std::map<std::string, std::string>& metadata, const ModelConfig& config) {
  const ParameterLayout layout = parameter_layout(config, whole_model(config));
  if (std::stoll(metadata.at("elements")) != layout.elements) {
    fail_data("holds the state of " + metadata.at("elements") + " parameter elements, the model has " +
              std::to_string(layout.elements));
  }
  std::vector<OwnedRun> runs;
  for (const auto& segment : nlohmann::json::parse(metadata.at("segments")))
    runs.push_back({segment.at(0), segment.at(1), segment.at(2)});
  return state_pieces(layout, runs);
}

// The first element of a piece, in its slice, that no copy reaches; nothing: all are there.
std::optional<int64_t> first_missing(const StatePiece& piece, std::vector<StateCopy> copies) {
  std::sort(copies.begin(), copies.end(), [](const StateCopy& a, const StateCopy& b) { return a.to < b.to; });
  int64_t next = piece.first;
  for (const StateCopy& copy : copies) {
    const int64_t element = element_at(piece, copy.to);
    if (element > next) break;
    next = std::max(next, element + copy.count);
  }
  if (next >= piece.first + piece.count) return std::nullopt;
  return next;
}

}  // namespace

void DistributedAdamW::take_state(const SafetensorsFile& file, const std::filesystem::path& path,
                                  std::vector<Taken>& taken) {
  std::vector<StatePiece> saved;
  try {
    const auto& metadata = file.header().metadata;
    steps_done_ = std::stoll(metadata.at("steps_done"));
    saved = metadata.count("pieces") > 0 ? state_pieces_from_json(nlohmann::json::parse(metadata.at("pieces")))
                                         : pieces_by_place(metadata, model_.config());
  } catch (const std::exception& error) {
    fail_data(path.string() + " is not an optimizer state of this model: " + error.what());
  }
  std::multimap<std::string, const StatePiece*> by_name;
  for (const StatePiece& piece : saved) by_name.emplace(piece.parameter, &piece);
  const std::pair<const char*, at::Tensor> states[] = {
      {"exp_avg", exp_avg_}, {"exp_avg_sq", exp_avg_sq_}, {"master", master_}};
  for (const auto& [name, target] : states) {
    const at::Tensor source = file.tensor(name);
    for (Taken& own : taken) {
      const auto [begin, end] = by_name.equal_range(own.piece.parameter);
      for (auto it = begin; it != end; ++it) {
        for (const StateCopy& copy :
             common_state(model_.find(own.piece.parameter)->slice.shape, *it->second, own.piece)) {
          if (copy.from + copy.count > source.numel()) fail_data(path.string() + ": " + name + " is too short");
          target.narrow(0, copy.to, copy.count).copy_(source.narrow(0, copy.from, copy.count));
          if (target.is_same(master_)) own.copies.push_back(copy);
        }
      }
    }
  }
}

void DistributedAdamW::load(const std::filesystem::path& dir) {
  const c10::NoGradGuard no_grad;
  std::vector<Taken> taken;
  for (StatePiece& piece : own_pieces({0, owned_})) taken.push_back({std::move(piece), {}});
  int ranks = 1;
  for (int saved = 0; saved < ranks; ++saved) {
    const std::filesystem::path path = dir / part_name(saved);
    const SafetensorsFile file(path);
    const auto& metadata = file.header().metadata;
    const auto said = metadata.find("ranks");
    ranks = said == metadata.end() ? 0 : static_cast<int>(parse_int(said->second).value_or(0));
    if (ranks < 1) fail_data(path.string() + " is not an optimizer state: it does not say of how many ranks it is one");
    take_state(file, path, taken);
  }
  for (const Taken& own : taken) {
    if (const std::optional<int64_t> missing = first_missing(own.piece, own.copies)) {
      const std::string router = ".gate.weight";  // its name in every family with experts
      const std::string& name = own.piece.parameter;
      const bool of_router = name.size() > router.size() && name.substr(name.size() - router.size()) == router;
      fail_data(dir.string() + " does not hold the whole optimizer state: of " + own.piece.parameter + " (slice " +
                std::to_string(own.piece.range.begin) + " to " + std::to_string(own.piece.range.end) +
                " of dimension " + std::to_string(own.piece.dimension) + ") element " + std::to_string(*missing) +
                " is the first that is missing" +
                (of_router && own.copies.empty() ? "; a run with policy.megatron_cfg.freeze_moe_router=true, the "
                                                   "default, keeps no state of routers: set it again"
                                                 : ""));
    }
  }
  write_weights();
  finish_gather();
}

}  // namespace trireme
