// The steps of DistributedAdamW over state that lies on a GPU.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cmath>

#include "base/error.h"
#include "trainer/optimizer/adamw.h"
#include "trainer/optimizer/cuda/adamw.h"

namespace trireme {
namespace {

cuda::Element element_of(const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kFloat) return cuda::Element::kFloat;
  if (tensor.scalar_type() == at::kBFloat16) return cuda::Element::kBFloat16;
  fail_user(std::string("the optimizer on cuda takes bfloat16 and float32 weights and gradients, not ") +
            c10::toString(tensor.scalar_type()));
}

cudaStream_t stream_of(const at::Tensor& x) { return c10::cuda::getCurrentCUDAStream(x.device().index()).stream(); }

}  // namespace

double DistributedAdamW::sum_of_squares_on_device(const at::Tensor& gradients) {
  const c10::cuda::CUDAGuard guard(gradients.device());
  const int64_t blocks = cuda::squares_blocks(gradients.numel());
  const at::Tensor sums = at::empty({blocks + 1}, gradients.options().dtype(at::kDouble).requires_grad(false));
  double* data = sums.mutable_data_ptr<double>();
  cuda::sum_of_squares(gradients.const_data_ptr(), element_of(gradients), gradients.numel(), data, data + blocks,
                       stream_of(gradients));
  return sums[blocks].item<double>();
}

void DistributedAdamW::mark_decayed_groups() {
  static_assert(kParameterAlignment % cuda::kDecayGroup == 0, "a group lies in one block, whose members decay alike");
  const int64_t groups = (elements_ + cuda::kDecayGroup - 1) / cuda::kDecayGroup;
  std::vector<uint32_t> words(static_cast<size_t>(groups / 32 + 2), 0);
  for (const Parameter& parameter : model_.parameters()) {
    if (!parameter.trainable || !(options_.decay_all || parameter.decay)) continue;
    const int64_t end = (parameter.offset + parameter.size + cuda::kDecayGroup - 1) / cuda::kDecayGroup;
    for (int64_t g = parameter.offset / cuda::kDecayGroup; g < end; ++g) {
      words[static_cast<size_t>(g / 32)] |= uint32_t{1} << (g % 32);
    }
  }
  decay_bits_ = at::from_blob(words.data(), {static_cast<int64_t>(words.size())}, at::kInt).to(master_.device());
}

void DistributedAdamW::update_on_device(const Factors& factors) {
  const c10::cuda::CUDAGuard guard(master_.device());
  cuda::AdamWStep step;
  step.clip = static_cast<float>(factors.clip);
  step.beta1 = static_cast<float>(options_.beta1);
  step.beta2 = static_cast<float>(options_.beta2);
  step.rest1 = static_cast<float>(1 - options_.beta1);
  step.rest2 = static_cast<float>(1 - options_.beta2);
  step.keep = static_cast<float>(1 - factors.learning_rate * factors.weight_decay);
  step.step_size = static_cast<float>(factors.learning_rate / factors.correction1);
  step.root_correction2 = static_cast<float>(std::sqrt(factors.correction2));
  step.eps = static_cast<float>(options_.eps);

  const bool shares = shares_weights();  // then what is written are this rank's parts
  const at::Tensor weights = shares ? model_.units()->parts() : this->weights();
  const bool own_master = master_.data_ptr() != weights.data_ptr();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = buckets_[b];
    const Slice& slice = slices_[b];
    // The rounded weights go straight into the live ones, except into a bucket whose padding has to be gathered too.
    const bool whole = bucket.size == bucket.width;
    const bool direct = own_master && (whole || bucket.ranks == 1 || shares);
    if (slice.size > 0) {
      const bool in_place = slice.summed_at == kInPlace;
      const at::Tensor& gradients = in_place ? model_.flat_gradients() : grads_;
      const int64_t from = in_place ? slice.begin : slice.summed_at;
      cuda::AdamWRun run;
      run.gradients = gradients.narrow(0, from, slice.size).const_data_ptr();
      run.gradient_type = element_of(gradients);
      run.master = master_.mutable_data_ptr<float>() + slice.at;
      run.exp_avg = exp_avg_.mutable_data_ptr<float>() + slice.at;
      run.exp_avg_sq = exp_avg_sq_.mutable_data_ptr<float>() + slice.at;
      if (direct) run.weights = weights.narrow(0, shares ? slice.at : slice.begin, slice.size).mutable_data_ptr();
      run.weight_type = element_of(weights);
      run.n = slice.size;
      if (factors.weight_decay != 0) run.decay_bits = static_cast<const uint32_t*>(decay_bits_.const_data_ptr());
      run.begin = slice.begin;
      cuda::adamw_update(run, step, stream_of(master_));
    }
    if (!own_master || bucket.ranks == 1 || shares) continue;
    if (direct) {
      Gathering gathering;
      gathering.begin = bucket.begin;
      gathering.size = bucket.size;
      gathering.mine = weights.narrow(0, slice.begin, bucket.part());
      gathering.pending = bucket.group->begin_all_gather(weights.narrow(0, bucket.begin, bucket.width), gathering.mine);
      gatherings_.push_back(std::move(gathering));
    } else {
      gather_bucket(bucket);
    }
  }
  if (shares) model_.units()->refresh();
}

}  // namespace trireme
