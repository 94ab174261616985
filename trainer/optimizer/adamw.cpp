#include "trainer/optimizer/adamw.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "trainer/model/safetensors.h"

namespace trireme {

DistributedAdamW::DistributedAdamW(Model& model, Communicator& data_parallel, const AdamWOptions& options)
    : model_(model), group_(data_parallel), options_(options) {
  TRIREME_CHECK(model.flat_gradients().defined(), "the optimizer needs a trainable model");
  elements_ = model.flat_parameters().numel();
  const int64_t ranks = group_.size();
  bucket_ = std::min(options_.bucket_elements, elements_);
  bucket_ = (bucket_ + ranks - 1) / ranks * ranks;
  buckets_ = (elements_ + bucket_ - 1) / bucket_;
  const int64_t part = bucket_ / ranks;
  for (int64_t b = 0; b < buckets_; ++b) {
    Slice slice;
    slice.begin = bucket_begin(b) + group_.rank() * part;
    slice.size = std::clamp<int64_t>(elements_ - slice.begin, 0, part);
    slice.at = b * part;
    slices_.push_back(slice);
  }
  owned_ = buckets_ * part;
  unreduced_ = buckets_;
  for (const Parameter& parameter : model.parameters()) {
    if (!parameter.trainable || !(options_.decay_all || parameter.decay)) continue;
    for (const Slice& slice : slices_) {
      const int64_t begin = std::max(parameter.offset, slice.begin);
      const int64_t end = std::min(parameter.offset + parameter.size, slice.begin + slice.size);
      if (begin < end) decayed_.push_back({slice.at + begin - slice.begin, end - begin});
    }
  }
  const c10::NoGradGuard no_grad;
  const auto fp32 = model.flat_parameters().options().dtype(at::kFloat).requires_grad(false);
  exp_avg_ = at::zeros({owned_}, fp32);
  exp_avg_sq_ = at::zeros({owned_}, fp32);
  if (ranks > 1 || !fp32.device().is_cuda()) grads_ = at::zeros({owned_}, fp32);
  const bool in_place =
      ranks == 1 && buckets_ * bucket_ == elements_ && model.flat_parameters().scalar_type() == at::kFloat;
  if (in_place) {
    master_ = model.flat_parameters().detach();
  } else {
    master_ = at::zeros({owned_}, fp32);
    reset_master_from_weights();
  }
  if (master_.is_cuda()) mark_decayed_groups();
}

void DistributedAdamW::reset_master_from_weights() {
  const c10::NoGradGuard no_grad;
  const at::Tensor weights = model_.flat_parameters().detach();
  if (master_.data_ptr() == weights.data_ptr()) return;
  for (const Slice& slice : slices_) {
    if (slice.size > 0) master_.narrow(0, slice.at, slice.size).copy_(weights.narrow(0, slice.begin, slice.size));
  }
}

void DistributedAdamW::check_finite(double squares) const {
  if (std::isfinite(squares)) return;
  std::string name;
  for (const Parameter& parameter : model_.parameters()) {
    if (!parameter.trainable || !name.empty()) continue;
    const at::Tensor gradient = model_.flat_gradients().narrow(0, parameter.offset, parameter.size);
    if (!at::isfinite(gradient).all().item<bool>()) name = parameter.name;
  }
  // Every rank comes here: the sum is the same on all.
  const auto culprit = static_cast<int64_t>(group_.all_reduce_max(name.empty() ? -1.0 : group_.rank()));
  const std::string rest =
      " at optimizer step " + std::to_string(steps_done_ + 1) + " is not finite; the weights were not changed";
  if (!name.empty()) fail_data("rank " + std::to_string(group_.rank()) + ": the gradient of " + name + rest);
  if (culprit < 0) fail_data("the ranks' sum of gradients" + rest);
  throw Error(ErrorKind::kUnavailable, "the gradient of rank " + std::to_string(culprit) + rest);
}

DistributedAdamW::~DistributedAdamW() {
  if (armed_) model_.on_gradients_final = nullptr;
  if (watching_) model_.before_reading = nullptr;
}

void DistributedAdamW::reduce_in_next_backward() {
  if (group_.size() == 1) return;
  armed_ = true;
  model_.on_gradients_final = [this](int64_t from) { reduce_from(from); };
}

// Reductions whose copies and results are kept at once: more would only take memory.
constexpr size_t kMostUnderWay = 8;

// All ranks begin the buckets in one order, from the last to the first, whether in a backward pass or after it.
void DistributedAdamW::reduce_from(int64_t from) {
  const c10::NoGradGuard no_grad;
  const at::Tensor gradients = model_.flat_gradients();
  const at::ScalarType wire = options_.reduce_in_fp32 ? at::kFloat : gradients.scalar_type();
  const int64_t part = bucket_ / group_.size();
  while (unreduced_ > 0 && bucket_begin(unreduced_ - 1) >= from) {
    Reduction reduction;
    reduction.bucket = --unreduced_;
    const int64_t begin = bucket_begin(reduction.bucket), size = std::min(bucket_, elements_ - begin);
    reduction.sent = gradients.narrow(0, begin, size);
    if (size < bucket_ || wire != gradients.scalar_type()) {
      const at::Tensor padded = at::zeros({bucket_}, gradients.options().dtype(wire));
      padded.narrow(0, 0, size).copy_(reduction.sent);
      reduction.sent = padded;
    }
    at::Tensor mine = grads_.narrow(0, reduction.bucket * part, part);
    if (wire != at::kFloat) mine = reduction.received = take_received(part, reduction.sent.options());
    reduction.pending = group_.begin_reduce_scatter_sum(mine, reduction.sent);
    reductions_.push_back(std::move(reduction));
    if (reductions_.size() > kMostUnderWay) finish_oldest_reduction();
  }
}

void DistributedAdamW::finish_oldest_reduction() {
  const int64_t part = bucket_ / group_.size();
  Reduction& reduction = reductions_.front();
  reduction.pending.wait();
  if (reduction.received.defined()) {
    grads_.narrow(0, reduction.bucket * part, part).copy_(reduction.received);
    received_.push_back(reduction.received);
  }
  reductions_.pop_front();
}

// Whoever watches a collective holds its result for a while after its end: always the same ones, so that this is no
// memory besides.
at::Tensor DistributedAdamW::take_received(int64_t part, const at::TensorOptions& options) {
  if (received_.empty()) return at::empty({part}, options);
  at::Tensor result = std::move(received_.back());
  received_.pop_back();
  return result;
}

void DistributedAdamW::finish_reduction() {
  reduce_from(0);
  while (!reductions_.empty()) finish_oldest_reduction();
  unreduced_ = buckets_;
}

OptimizerStep DistributedAdamW::step(double learning_rate, double weight_decay, double max_grad_norm, Gather gather) {
  const c10::NoGradGuard no_grad;
  finish_gather();  // the master slices that are still being sent are written below
  if (armed_) model_.on_gradients_final = nullptr;
  armed_ = false;
  OptimizerStep result;
  result.reduced_early = buckets_ - unreduced_;
  if (grads_.defined()) finish_reduction();
  const double squares = group_.all_reduce_sum(sum_of_squares());
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
  if (gather == Gather::kNow) {
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
    for (const Decayed& run : decayed_) master_.narrow(0, run.at, run.size).mul_(keep);
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
  if (master_.data_ptr() == model_.flat_parameters().data_ptr()) return;
  for (int64_t b = 0; b < buckets_; ++b) gather_bucket(b);
}

// A bucket may be written while a forward pass holds others for its backward. It is read by none before it is there,
// so the version counter, which all parameters share and which guards what was saved, is not moved.
at::Tensor DistributedAdamW::weights() const { return model_.flat_parameters().variable_data(); }

void DistributedAdamW::gather_bucket(int64_t b) {
  const at::Tensor weights = this->weights();
  const int64_t part = bucket_ / group_.size();
  Gathering gathering;
  gathering.mine = master_.narrow(0, b * part, part).to(weights.scalar_type());
  gathering.begin = bucket_begin(b);
  gathering.size = std::min(bucket_, elements_ - gathering.begin);
  if (gathering.size == bucket_) {
    gathering.pending = group_.begin_all_gather(weights.narrow(0, gathering.begin, bucket_), gathering.mine);
  } else {
    gathering.padded = at::empty({bucket_}, weights.options());
    gathering.pending = group_.begin_all_gather(gathering.padded, gathering.mine);
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

double DistributedAdamW::sum_of_squares() const {
  const at::Tensor gradients = grads_.defined() ? grads_ : model_.flat_gradients();
  if (gradients.is_cuda()) return sum_of_squares_on_device(gradients);
  return gradients.to(at::kDouble).square().sum().item<double>();
}

namespace {
std::string part_name(int rank) {
  std::string digits = std::to_string(rank);
  digits.insert(0, digits.size() < 5 ? 5 - digits.size() : 0, '0');
  return "rank_" + digits + ".safetensors";
}
}  // namespace

TensorFile DistributedAdamW::saved() const {
  nlohmann::json segments = nlohmann::json::array();
  for (const Slice& slice : slices_) segments.push_back({slice.begin, slice.size, slice.at});
  return {part_name(group_.rank()),
          {{"exp_avg", exp_avg_}, {"exp_avg_sq", exp_avg_sq_}, {"master", master_}},
          {{"segments", segments.dump()},
           {"ranks", std::to_string(group_.size())},
           {"elements", std::to_string(elements_)},
           {"steps_done", std::to_string(steps_done_)}}};
}

void DistributedAdamW::save(const std::filesystem::path& dir) const {
  const TensorFile file = saved();
  write_safetensors(dir / file.name, file.tensors, file.metadata);
}

void DistributedAdamW::load(const std::filesystem::path& dir) {
  const c10::NoGradGuard no_grad;
  int ranks = 1;
  int64_t covered = 0;
  for (int saved = 0; saved < ranks; ++saved) {
    const std::filesystem::path path = dir / part_name(saved);
    const SafetensorsFile file(path);
    const auto& metadata = file.header().metadata;
    try {
      if (std::stoll(metadata.at("elements")) != elements_) {
        fail_data(path.string() + " holds the state of " + metadata.at("elements") +
                  " parameter elements, the model has " + std::to_string(elements_));
      }
      ranks = std::stoi(metadata.at("ranks"));
      steps_done_ = std::stoll(metadata.at("steps_done"));
      for (const auto& segment : nlohmann::json::parse(metadata.at("segments"))) {
        const int64_t begin = segment.at(0), size = segment.at(1), at = segment.at(2);
        for (const Slice& slice : slices_) {
          const int64_t from = std::max(begin, slice.begin), to = std::min(begin + size, slice.begin + slice.size);
          if (from >= to) continue;
          const auto copy = [&](at::Tensor target, const char* name) {
            target.narrow(0, slice.at + from - slice.begin, to - from)
                .copy_(file.tensor(name).narrow(0, at + from - begin, to - from));
          };
          copy(exp_avg_, "exp_avg");
          copy(exp_avg_sq_, "exp_avg_sq");
          copy(master_, "master");
          covered += to - from;
        }
      }
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      fail_data(path.string() + " is not an optimizer state: " + error.what());
    }
  }
  int64_t wanted = 0;
  for (const Slice& slice : slices_) wanted += slice.size;
  if (covered != wanted) fail_data(dir.string() + " does not hold the whole optimizer state");
  write_weights();
  finish_gather();
}

}  // namespace trireme
