#include "trainer/algorithms/loss.h"

#include <ATen/ATen.h>

#include <limits>

#include "base/error.h"

namespace trireme {
namespace {

constexpr double kEpsilon = 1e-8;  // NeMo-RL's, so that an empty batch is 0 and not NaN

at::Tensor finite_or_zero(const at::Tensor& x) { return at::where(at::isfinite(x), x, at::zeros_like(x)); }

// Sequence sums [S] and their spread back to tokens [T].
struct Sequences {
  const at::Tensor& index;
  const at::Tensor& mask;
  int64_t count;
  at::Tensor tokens;  // [S] valid tokens, at least 1

  Sequences(const LossInputs& in) : index(in.sequence), mask(in.mask), count(in.sequence_mask.size(0)) {
    tokens = sum(at::ones_like(in.mask)).clamp_min(1);
  }
  at::Tensor sum(const at::Tensor& x) const { return at::zeros({count}, x.options()).index_add(0, index, x * mask); }
  at::Tensor mean(const at::Tensor& x) const { return sum(x) / tokens; }
  at::Tensor spread(const at::Tensor& per_sequence) const { return per_sequence.index_select(0, index); }
};

at::Tensor clamp_symmetric(const at::Tensor& x, const std::optional<double>& bound) {
  return bound ? x.clamp(-*bound, *bound) : x;
}

at::Tensor kl_of(const at::Tensor& log_ratio, KlEstimator estimator) {
  switch (estimator) {
    case KlEstimator::kK1:
      return -log_ratio;
    case KlEstimator::kK2:
      return log_ratio * log_ratio / 2;
    case KlEstimator::kK3:
      return log_ratio.exp() - 1 - log_ratio;
  }
  fail_internal("unhandled KL estimator");
}

// Per-token KL to the reference, without beta.
at::Tensor kl_term(const at::Tensor& current, const at::Tensor& reference, const at::Tensor& generation,
                   const LossOptions& o) {
  const at::Tensor raw = reference - current;
  at::Tensor kl = kl_of(clamp_symmetric(raw, o.kl_input_clamp), o.kl_estimator);
  if (o.kl_score_function_gradient) {
    at::Tensor weight =
        finite_or_zero((current - (o.on_policy_kl_approximation ? generation : current.detach())).exp());
    if (o.kl_input_clamp) weight = at::where(raw.abs() > *o.kl_input_clamp, weight.detach(), weight);
    kl = kl * weight;
  } else if (o.on_policy_kl_approximation) {
    kl = kl * finite_or_zero((current - generation).exp().detach());
  }
  return clamp_symmetric(kl, o.kl_output_clamp);
}

double number(const at::Tensor& x) { return x.detach().item<double>(); }

}  // namespace

void validate(const LossOptions& o) {
  if (o.clip_c && *o.clip_c <= 1) fail_user("loss_fn.ratio_clip_c must be greater than 1 (dual clip)");
  if (o.sequence_level_ratios && o.token_level_loss) {
    fail_user("loss_fn.sequence_level_importance_ratios (GSPO) needs loss_fn.token_level_loss: false");
  }
  if (o.cispo && (o.clip_c || o.force_on_policy_ratio || o.sequence_level_ratios || o.disable_ppo_ratio)) {
    fail_user(
        "loss_fn.use_cispo cannot be combined with ratio_clip_c, force_on_policy_ratio, "
        "sequence_level_importance_ratios or "
        "disable_ppo_ratio");
  }
  if (o.cispo && !o.token_level_loss) fail_user("loss_fn.use_cispo needs loss_fn.token_level_loss: true");
  if (o.truncated_is != TruncatedImportanceSampling::kNone) {
    if (!o.importance_sampling_correction) {
      fail_user("loss_fn.truncated_importance_sampling_type needs loss_fn.use_importance_sampling_correction: true");
    }
    if (!o.truncated_is_ratio)
      fail_user("loss_fn.truncated_importance_sampling_type needs truncated_importance_sampling_ratio");
  }
}

LossOutput policy_loss(const LossInputs& in, const LossOptions& o) {
  const Sequences sequences(in);
  const at::Tensor valid = in.mask > 0;
  const at::Tensor zero = at::zeros_like(in.mask);
  // A -inf on a masked token must not poison the batch: masked before any arithmetic.
  const at::Tensor current = at::where(valid, in.current, zero);
  const at::Tensor generation = at::where(valid, in.generation, zero);
  const at::Tensor previous = o.force_on_policy_ratio ? current.detach() : at::where(valid, in.previous, zero);
  const at::Tensor advantages = at::where(valid, in.advantages, zero);

  const auto token_mean = [&](const at::Tensor& x) {
    return (x * in.mask).sum() / (in.global_valid_tokens + kEpsilon);
  };
  const auto reduce = [&](const at::Tensor& x) {
    if (o.token_level_loss) return token_mean(x);
    return (sequences.mean(x) * in.sequence_mask).sum() / (in.global_valid_sequences + kEpsilon);
  };

  at::Tensor log_ratio = current - previous;
  if (o.sequence_level_ratios) log_ratio = sequences.spread(sequences.mean(log_ratio));
  const at::Tensor ratio = o.disable_ppo_ratio ? current : log_ratio.exp();
  const at::Tensor clipped = o.disable_ppo_ratio ? current : ratio.clamp(1 - o.clip_min, 1 + o.clip_max);
  at::Tensor actor;
  if (o.cispo) {
    actor = -advantages * clipped.detach() * current;
  } else {
    actor = at::maximum(-advantages * ratio, -advantages * clipped);
    if (o.clip_c) actor = at::where(advantages < 0, at::minimum(actor, -advantages * *o.clip_c), actor);
  }

  at::Tensor weight = at::ones_like(current).detach();
  double out_of_bounds = 0;
  {
    const at::Tensor log_weight = (previous - generation).detach();
    const at::Tensor per_token =
        finite_or_zero(o.sequence_level_ratios ? sequences.spread(sequences.sum(log_weight)).exp() : log_weight.exp());
    if (o.importance_sampling_correction) {
      weight = per_token;
      const double high = o.truncated_is_ratio.value_or(std::numeric_limits<double>::infinity());
      const double low = o.truncated_is_ratio_min.value_or(0.0);
      const auto outside_of = [&](const at::Tensor& x) { return at::logical_or(x<low, x> high); };
      switch (o.truncated_is) {
        case TruncatedImportanceSampling::kNone:
          break;
        case TruncatedImportanceSampling::kTis:
          out_of_bounds = number(token_mean(outside_of(weight).to(weight.scalar_type())));
          weight = weight.clamp(low, high);
          break;
        case TruncatedImportanceSampling::kIcepop: {
          const at::Tensor outside = outside_of(weight);
          out_of_bounds = number(token_mean(outside.to(weight.scalar_type())));
          weight = at::where(outside, at::zeros_like(weight), weight);
          break;
        }
        case TruncatedImportanceSampling::kSeqMaskTis: {
          const at::Tensor outside = sequences.spread(outside_of(sequences.mean(log_weight).exp()));
          out_of_bounds = number(token_mean(outside.to(weight.scalar_type())));
          weight = at::where(outside, at::zeros_like(weight), weight);
          break;
        }
      }
    }
  }
  at::Tensor loss = reduce(actor * weight);
  LossOutput output;
  output.metrics["actor_loss"] = number(loss);
  if (o.kl_penalty != 0) {
    TRIREME_CHECK(in.reference.defined(), "the KL term needs reference log-probs");
    const at::Tensor reference = at::where(valid, in.reference, zero);
    const at::Tensor kl = reduce(kl_term(current, reference, generation, o));
    loss = loss + o.kl_penalty * kl;
    output.metrics["kl_penalty"] = number(kl);
  }
  if (o.positive_example_nll_weight != 0) {
    TRIREME_CHECK(in.positive.defined(), "positive_example_nll_weight needs the correctness of each token's answer");
    const at::Tensor nll = token_mean(-current * in.positive);  // by the global count, so that micro-batches add up
    loss = loss + o.positive_example_nll_weight * nll;
    output.metrics["positive_nll_loss"] = number(nll);
  }
  output.loss = loss;

  const at::Tensor c = current.detach();
  const at::Tensor r = ratio.detach();
  const at::Tensor mismatch = previous.detach() - generation;
  output.metrics["loss"] = number(loss);
  output.metrics["probs_ratio"] = number(token_mean(r));
  output.metrics["probs_ratio_clamped"] = number(token_mean(clipped.detach()));
  output.metrics["clip_fraction"] = number(token_mean((r != clipped.detach()).to(r.scalar_type())));
  output.metrics["token_mult_prob_error"] = number(token_mean(mismatch.abs().exp()));
  output.metrics["gen_kl_error"] = number(token_mean(mismatch.exp() - 1 - mismatch));
  output.metrics["sampling_importance_ratio"] = number(token_mean(weight));
  output.metrics["is_oob_ratio"] = out_of_bounds;
  output.metrics["approx_entropy"] = number(token_mean(-(c - generation).exp() * c));
  if (valid.any().item<bool>()) {
    const at::Tensor picked = r.masked_select(valid);
    output.metrics["probs_ratio_min"] = number(picked.min());
    output.metrics["probs_ratio_max"] = number(picked.max());
  }
  return output;
}

LossOutput sft_loss(const at::Tensor& current, const at::Tensor& mask, double global_valid_tokens) {
  LossOutput output;
  output.loss = (-current * mask).sum() / (global_valid_tokens + kEpsilon);
  output.metrics["loss"] = number(output.loss);
  return output;
}

}  // namespace trireme
