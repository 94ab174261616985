#include "trainer/algorithms/loss.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace trireme {
namespace {

constexpr double kEpsilon = 1e-8;  // NeMo-RL's, so that an empty batch is 0 and not NaN

at::Tensor finite_or_zero(const at::Tensor& x) { return at::where(at::isfinite(x), x, at::zeros_like(x)); }

// Sequence sums [S] of the tokens of `mask` and their spread back to tokens [T]. Means are over all valid tokens.
struct Sequences {
  const at::Tensor& index;
  const at::Tensor& mask;
  int64_t count;
  at::Tensor tokens;  // [S] valid tokens, at least 1

  Sequences(const LossInputs& in, const at::Tensor& of_mask)
      : index(in.sequence), mask(of_mask), count(in.sequence_mask.size(0)) {
    tokens = at::zeros({count}, in.mask.options()).index_add(0, index, in.mask).clamp_min(1);
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
  at::Tensor kl = kl_of(clamp_symmetric(raw, o.kl_input_clamp_value), o.reference_policy_kl_type);
  if (o.kl_score_function_gradient) {
    at::Tensor weight =
        finite_or_zero((current - (o.use_on_policy_kl_approximation ? generation : current.detach())).exp());
    if (o.kl_input_clamp_value) weight = at::where(raw.abs() > *o.kl_input_clamp_value, weight.detach(), weight);
    kl = kl * weight;
  } else if (o.use_on_policy_kl_approximation) {
    kl = kl * finite_or_zero((current - generation).exp().detach());
  }
  return clamp_symmetric(kl, o.kl_output_clamp_value);
}

double number(const at::Tensor& x) { return x.detach().item<double>(); }

at::Tensor is_dropped(const at::Tensor& logprobs) { return at::isneginf(logprobs.detach()); }

// [T] each. Masked tokens are 0 before any arithmetic: a -inf on one must not poison the batch.
struct Tokens {
  at::Tensor valid, zero;
  at::Tensor kept;       // valid, and dropped by no filter
  at::Tensor kept_mask;  // the same as 0 or 1
  at::Tensor current, previous, generation, advantages;
  at::Tensor mismatch;  // previous - generation, without a gradient; 0 where previous is dropped

  Tokens(const LossInputs& in, const LossOptions& o)
      : valid(in.mask > 0), zero(at::zeros_like(in.mask)), kept(valid), kept_mask(in.mask) {
    const at::Tensor& before = o.force_on_policy_ratio ? in.current : in.previous;
    at::Tensor known = valid;
    if (in.filters) {
      known = at::logical_and(valid, at::logical_not(is_dropped(before)));
      kept = at::logical_and(known, at::logical_not(is_dropped(in.current)));
      kept_mask = at::where(kept, in.mask, zero);
    }
    current = at::where(kept, in.current, zero);
    generation = masked(in.generation);
    previous = at::where(kept, before.detach(), zero);
    advantages = masked(in.advantages);
    mismatch = at::where(known, before.detach() - generation, zero).detach();
  }
  at::Tensor masked(const at::Tensor& x) const { return at::where(valid, x, zero); }
};

// Means over the optimizer step: sums here, of the tokens of the sequences' mask, divided by its counts over all ranks
// and micro-batches.
struct Means {
  const LossInputs& in;
  const LossOptions& o;
  const Sequences& sequences;

  at::Tensor of_tokens(const at::Tensor& x) const {
    return (x * sequences.mask).sum() / (in.global_valid_tokens + kEpsilon);
  }
  // As the loss is meant: over tokens, or over sequences of their tokens' means.
  at::Tensor of_loss(const at::Tensor& x) const {
    if (o.token_level_loss) return of_tokens(x);
    return (sequences.mean(x) * in.sequence_mask).sum() / (in.global_valid_sequences + kEpsilon);
  }
};

// PPO's clipped surrogate, negated. GSPO: the ratio is a sequence's. CISPO: the clipped ratio weighs the log-prob.
struct Surrogate {
  at::Tensor loss;            // [T]
  at::Tensor ratio, clipped;  // [T]
};

Surrogate clipped_surrogate(const Tokens& t, const Sequences& sequences, const LossOptions& o) {
  at::Tensor log_ratio = t.current - t.previous;
  if (o.sequence_level_importance_ratios) log_ratio = sequences.spread(sequences.mean(log_ratio));
  Surrogate s;
  s.ratio = o.disable_ppo_ratio ? t.current : log_ratio.exp();
  s.clipped = o.disable_ppo_ratio ? t.current : s.ratio.clamp(1 - o.ratio_clip_min, 1 + o.ratio_clip_max);
  if (o.use_cispo) {
    s.loss = -t.advantages * s.clipped.detach() * t.current;
    return s;
  }
  s.loss = at::maximum(-t.advantages * s.ratio, -t.advantages * s.clipped);
  if (o.ratio_clip_c)
    s.loss = at::where(t.advantages < 0, at::minimum(s.loss, -t.advantages * *o.ratio_clip_c), s.loss);
  return s;
}

// Weights that correct for the sampler's distribution: previous over generation, truncated as the options say.
struct Importance {
  at::Tensor weight;         // [T], without a gradient; ones without the correction
  at::Tensor measured;       // [T], also without the correction
  double out_of_bounds = 0;  // share of tokens outside the truncation's bounds
};

Importance importance_of(const Tokens& t, const Sequences& sequences, const Means& mean, const LossOptions& o) {
  Importance result;
  result.weight = at::ones_like(t.current).detach();
  const at::Tensor& log_weight = t.mismatch;
  const at::Tensor per_token = finite_or_zero(
      o.sequence_level_importance_ratios ? sequences.spread(sequences.sum(log_weight)).exp() : log_weight.exp());
  result.measured = per_token;
  if (!o.use_importance_sampling_correction) return result;
  at::Tensor& weight = result.weight;
  weight = per_token;
  const double high = o.truncated_importance_sampling_ratio.value_or(std::numeric_limits<double>::infinity());
  const double low = o.truncated_importance_sampling_ratio_min.value_or(0.0);
  const auto outside_of = [&](const at::Tensor& x) { return at::logical_or(x<low, x> high); };
  const auto share = [&](const at::Tensor& outside) {
    return number(mean.of_tokens(outside.to(weight.scalar_type())));
  };
  const auto drop = [&](const at::Tensor& outside) {
    result.out_of_bounds = share(outside);
    weight = at::where(outside, at::zeros_like(weight), weight);
  };
  switch (o.truncated_importance_sampling_type) {
    case TruncatedImportanceSampling::kNone:
      break;
    case TruncatedImportanceSampling::kTis:
      result.out_of_bounds = share(outside_of(weight));
      weight = weight.clamp(low, high);
      break;
    case TruncatedImportanceSampling::kIcepop:
      drop(outside_of(weight));
      break;
    case TruncatedImportanceSampling::kSeqMaskTis:
      drop(sequences.spread(outside_of(sequences.mean(log_weight).exp())));
      break;
  }
  result.measured = weight;
  return result;
}

// `mean`: of all valid tokens; `kept`: of those that no filter drops, the others' ratio is 0.
void describe(const Tokens& t, const Surrogate& s, const Importance& importance, const Means& mean, const Means& kept,
              std::map<std::string, double>& metrics) {
  const at::Tensor c = t.current.detach();
  const at::Tensor r = s.ratio.detach();
  const at::Tensor clipped = s.clipped.detach();
  metrics["probs_ratio"] = number(kept.of_tokens(r));
  metrics["probs_ratio_clamped"] = number(kept.of_tokens(clipped));
  metrics["clip_fraction"] = number(kept.of_tokens((r != clipped).to(r.scalar_type())));
  metrics["token_mult_prob_error"] = number(mean.of_tokens(t.mismatch.abs().exp()));
  metrics["gen_kl_error"] = number(mean.of_tokens(t.mismatch.exp() - 1 - t.mismatch));
  metrics["sampling_importance_ratio"] = number(mean.of_tokens(importance.measured));
  metrics["is_oob_ratio"] = importance.out_of_bounds;
  metrics["approx_entropy"] = number(kept.of_tokens(-(c - t.generation).exp() * c));
  if (mean.in.filters) {
    const at::Tensor dropped = at::logical_and(t.valid, at::logical_not(t.kept));
    metrics["filtered_token_fraction"] = number(mean.of_tokens(dropped.to(r.scalar_type())));
  }
  if (!t.kept.any().item<bool>()) return;
  const at::Tensor picked = r.masked_select(t.kept);
  metrics["probs_ratio_min"] = number(picked.min());
  metrics["probs_ratio_max"] = number(picked.max());
}

}  // namespace

at::Tensor kl_estimate(const at::Tensor& current, const at::Tensor& reference, KlEstimator estimator,
                       const std::optional<double>& input_clamp, const std::optional<double>& output_clamp) {
  return clamp_symmetric(kl_of(clamp_symmetric(reference - current, input_clamp), estimator), output_clamp);
}

void validate(const LossOptions& o) {
  if (o.ratio_clip_c && *o.ratio_clip_c <= 1) fail_user("loss_fn.ratio_clip_c must be greater than 1 (dual clip)");
  if (o.sequence_level_importance_ratios && o.token_level_loss) {
    fail_user("loss_fn.sequence_level_importance_ratios (GSPO) needs loss_fn.token_level_loss: false");
  }
  if (o.use_cispo &&
      (o.ratio_clip_c || o.force_on_policy_ratio || o.sequence_level_importance_ratios || o.disable_ppo_ratio)) {
    fail_user(
        "loss_fn.use_cispo cannot be combined with ratio_clip_c, force_on_policy_ratio, "
        "sequence_level_importance_ratios or "
        "disable_ppo_ratio");
  }
  if (o.use_cispo && !o.token_level_loss) fail_user("loss_fn.use_cispo needs loss_fn.token_level_loss: true");
  if (o.truncated_importance_sampling_type != TruncatedImportanceSampling::kNone) {
    if (!o.use_importance_sampling_correction) {
      fail_user("loss_fn.truncated_importance_sampling_type needs loss_fn.use_importance_sampling_correction: true");
    }
    if (!o.truncated_importance_sampling_ratio)
      fail_user("loss_fn.truncated_importance_sampling_type needs truncated_importance_sampling_ratio");
  }
}

LossOutput policy_loss(const LossInputs& in, const LossOptions& o) {
  const Tokens tokens(in, o);
  const Sequences sequences(in, in.mask), of_kept(in, tokens.kept_mask);
  const Means mean{in, o, sequences}, kept{in, o, of_kept};
  const Surrogate surrogate = clipped_surrogate(tokens, of_kept, o);
  const Importance importance = importance_of(tokens, sequences, mean, o);
  LossOutput output;
  at::Tensor loss = kept.of_loss(surrogate.loss * importance.weight);
  output.metrics["actor_loss"] = number(loss);
  if (o.reference_policy_kl_penalty != 0) {
    TRIREME_CHECK(in.reference.defined(), "the KL term needs reference log-probs");
    const at::Tensor reference = tokens.masked(in.reference);
    // The reference has no filters, and so must the policy: else the KL is not 0 where both are the same model.
    const at::Tensor current = in.current_unfiltered.defined() ? tokens.masked(in.current_unfiltered) : tokens.current;
    const at::Tensor kl = mean.of_loss(kl_term(current, reference, tokens.generation, o));
    loss = loss + o.reference_policy_kl_penalty * kl;
    output.metrics["kl_penalty"] = number(kl);
  }
  if (o.positive_example_nll_weight != 0) {
    TRIREME_CHECK(in.positive.defined(), "positive_example_nll_weight needs to know which responses are correct");
    // The mean over the tokens of correct responses, as VAPO has it (Yue et al. 2025, equation 10). NeMo-RL's main
    // branch divides by the micro-batch's own count, so that its sum grows with the number of micro-batches; by the
    // count over all ranks and micro-batches it is what NeMo-RL computes of one micro-batch, however the batch is cut.
    const at::Tensor nll = (-tokens.current * in.positive * in.mask).sum() / (in.global_positive_tokens + kEpsilon);
    loss = loss + o.positive_example_nll_weight * nll;
    output.metrics["positive_nll_loss"] = number(nll);
  }
  output.loss = loss;
  output.metrics["loss"] = number(loss);
  describe(tokens, surrogate, importance, mean, kept, output.metrics);
  return output;
}

LossOutput value_loss(const ValueLossInputs& in, const ValueLossOptions& o) {
  const at::Tensor valid = in.mask > 0, zero = at::zeros_like(in.mask);
  const auto masked = [&](const at::Tensor& x) { return at::where(valid, x, zero); };
  const at::Tensor values = masked(in.values), returns = masked(in.returns);
  at::Tensor squares = (values - returns).square(), clipped_more = zero;
  if (o.cliprange.value_or(0) > 0) {
    const at::Tensor old_values = masked(in.old_values);
    const at::Tensor clipped = values.clamp(old_values - *o.cliprange, old_values + *o.cliprange);
    const at::Tensor of_clipped = (clipped - returns).square();
    clipped_more = (of_clipped > squares).to(in.mask.scalar_type());
    squares = at::maximum(squares, of_clipped);
  }
  LossOutput output;
  output.loss = 0.5 * o.scale * (squares * in.mask).sum() / (in.global_valid_tokens + kEpsilon);
  // Moments in float64 and of the exact count: a variance is the difference of two of them.
  const double tokens = std::max(in.global_valid_tokens, 1.0);
  const at::Tensor v = values.detach().to(at::kDouble), r = returns.to(at::kDouble), m = in.mask.to(at::kDouble);
  const auto mean = [&](const at::Tensor& x) { return number((x * m).sum()) / tokens; };
  output.metrics["loss"] = number(output.loss);
  output.metrics["vf_clipfrac"] = mean(clipped_more.detach().to(at::kDouble));
  output.metrics["values_mean"] = mean(v);
  output.metrics["returns_mean"] = mean(r);
  output.metrics["returns_sq_mean"] = mean(r.square());
  output.metrics["residual_sq_mean"] = mean((r - v).square());
  if (!valid.any().item<bool>()) return output;
  const at::Tensor picked = values.detach().masked_select(valid);
  output.metrics["values_min"] = number(picked.min());
  output.metrics["values_max"] = number(picked.max());
  return output;
}

double explained_variance(double values_mean, double returns_mean, double returns_sq_mean, double residual_sq_mean) {
  const double bias = returns_mean - values_mean;
  const double residual = residual_sq_mean - bias * bias, whole = returns_sq_mean - returns_mean * returns_mean;
  return 1 - residual / std::max(whole, 1e-8);
}

LossOutput sft_loss(const at::Tensor& current, const at::Tensor& mask, double global_valid_tokens) {
  LossOutput output;
  output.loss = (-current * mask).sum() / (global_valid_tokens + kEpsilon);
  output.metrics["loss"] = number(output.loss);
  return output;
}

}  // namespace trireme
