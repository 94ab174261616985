// Log-probs, entropy and sampling over the vocabulary: one function turns a row of logits into its distribution, and
// all three read that.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "trainer/ops/checks.h"
#include "trainer/ops/cpu_kernels.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/linear.h"
#include "trainer/ops/ops.h"
#include "trainer/ops/parallel.h"
#include "trainer/ops/philox.h"

namespace trireme {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kChunkElements = 16 << 20;  // logits held at a time
constexpr int64_t kMaxChunkRows = 1024;
// In place of -infinity for dropped logits: its exp is 0 as well, and 0 times it is still 0.
constexpr double kDropped = -1e30;

int64_t chunk_rows(int64_t vocab) {
  return std::clamp<int64_t>(kChunkElements / std::max<int64_t>(1, vocab), 1, kMaxChunkRows);
}

void check_options(const LogprobOptions& options) {
  if (!(options.temperature > 0.0) || !std::isfinite(options.temperature)) {
    fail_user("temperature must be a positive number, got " + std::to_string(options.temperature) +
              " (greedy is an option of its own)");
  }
  if (options.top_k < 0) fail_user("top_k must be 0 (off) or positive, got " + std::to_string(options.top_k));
  if (!(options.top_p > 0.0 && options.top_p <= 1.0))
    fail_user("top_p must be in (0, 1], got " + std::to_string(options.top_p));
  if (!(options.min_p >= 0.0 && options.min_p <= 1.0))
    fail_user("min_p must be in [0, 1], got " + std::to_string(options.min_p));
}

// A row's distribution: p_j = e[j] / sum with e[j] = exp(z[j] - max), 0 where dropped.
template <class T>
struct Distribution {
  T max = 0;
  T sum = 0;
  T log_sum = 0;
  T logprob(T z) const { return (z - max) - log_sum; }
};

// Buffers of one thread.
template <class T>
struct Workspace {
  std::vector<T> e, other;
  std::vector<int64_t> order;
  explicit Workspace(int64_t vocab) : e(static_cast<size_t>(vocab)), other(static_cast<size_t>(vocab)) {}
};

template <class T>
void drop_below(T* z, int64_t vocab, T threshold) {
  for (int64_t j = 0; j < vocab; ++j) {
    if (z[j] < threshold) z[j] = static_cast<T>(kDropped);
  }
}

// Keeps the smallest prefix of the order (logit descending, id ascending) whose mass reaches top_p.
template <class T>
void keep_top_p(T* z, int64_t vocab, T max, double top_p, Workspace<T>& work) {
  const double wanted = top_p * static_cast<double>(cpu_kernels<T>().exp_sum(z, max, work.e.data(), vocab));
  std::vector<int64_t>& order = work.order;
  order.resize(static_cast<size_t>(vocab));
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](int64_t a, int64_t b) { return z[a] != z[b] ? z[a] > z[b] : a < b; };
  double mass = 0;
  int64_t sorted = 0, kept = 0;
  while (kept < vocab && (kept == 0 || mass < wanted)) {
    if (kept == sorted) {  // sort only as far as the mass needs
      const int64_t next = std::min(vocab, std::max<int64_t>(64, sorted * 4));
      std::partial_sort(order.begin() + sorted, order.begin() + next, order.end(), before);
      sorted = next;
    }
    mass += static_cast<double>(work.e[static_cast<size_t>(order[static_cast<size_t>(kept++)])]);
  }
  for (int64_t i = kept; i < vocab; ++i) z[order[static_cast<size_t>(i)]] = static_cast<T>(kDropped);
}

// z: logits in, scaled and filtered logits out; work.e gets the weights.
template <class T>
Distribution<T> distribution(T* z, int64_t vocab, const LogprobOptions& options, Workspace<T>& work) {
  const CpuKernels<T>& kernels = cpu_kernels<T>();
  if (options.temperature != 1.0) kernels.scale(z, static_cast<T>(1.0 / options.temperature), z, vocab);
  Distribution<T> result;
  result.max = kernels.max(z, vocab);
  if (options.top_k > 0 && options.top_k < vocab) {
    std::copy(z, z + vocab, work.other.begin());
    std::nth_element(work.other.begin(), work.other.begin() + (options.top_k - 1), work.other.end(), std::greater<T>());
    drop_below(z, vocab, work.other[static_cast<size_t>(options.top_k - 1)]);
  }
  if (options.top_p < 1.0) keep_top_p(z, vocab, result.max, options.top_p, work);
  if (options.min_p > 0.0) drop_below(z, vocab, result.max + static_cast<T>(std::log(options.min_p)));
  result.sum = kernels.exp_sum(z, result.max, work.e.data(), vocab);
  result.log_sum = std::log(result.sum);
  return result;
}

// After distribution(): -sum p log p. Uses work.other.
template <class T>
T entropy_of(const T* z, int64_t vocab, const Distribution<T>& d, Workspace<T>& work) {
  for (int64_t j = 0; j < vocab; ++j) work.other[static_cast<size_t>(j)] = z[j] - d.max;
  return d.log_sum - cpu_kernels<T>().dot(work.e.data(), work.other.data(), vocab) / d.sum;
}

at::Tensor chunk_logits(const at::Tensor& hidden, const at::Tensor& head, int64_t from, int64_t count) {
  at::Tensor logits = linear_forward(hidden.narrow(0, from, count), head, {}).to(compute_type(hidden)).contiguous();
  return logits;
}

// Of rows [from, from + count) of a batch, whose logits are `z`: in place.
template <class T>
void logprobs_of(T* z, int64_t from, int64_t count, int64_t vocab, const int64_t* targets,
                 const LogprobOptions& options, T* logprobs, T* entropies) {
  parallel_tasks(count, std::max<int64_t>(1, 16'384 / vocab), [&](int64_t begin, int64_t end) {
    Workspace<T> work(vocab);
    for (int64_t r = begin; r < end; ++r) {
      T* row = z + r * vocab;
      const int64_t target = targets[from + r];
      const Distribution<T> d = distribution(row, vocab, options, work);
      if (row[target] <= static_cast<T>(kDropped)) {
        if (!options.allow_filtered) {
          fail_data("row " + std::to_string(from + r) + ": target token " + std::to_string(target) +
                    " has probability 0 under top_k, top_p or min_p");
        }
        logprobs[from + r] = -std::numeric_limits<T>::infinity();
      } else {
        logprobs[from + r] = d.logprob(row[target]);
      }
      if (entropies != nullptr) entropies[from + r] = entropy_of(row, vocab, d, work);
    }
  });
}

template <class T>
void logprob_rows(const at::Tensor& hidden, const at::Tensor& head, const int64_t* targets,
                  const LogprobOptions& options, T* logprobs, T* entropies) {
  const int64_t rows = hidden.size(0), vocab = head.size(0), step = chunk_rows(vocab);
  for (int64_t from = 0; from < rows; from += step) {
    const int64_t count = std::min(step, rows - from);
    at::Tensor logits = chunk_logits(hidden, head, from, count);
    logprobs_of(logits.mutable_data_ptr<T>(), from, count, vocab, targets, options, logprobs, entropies);
  }
}

// Gradient of one row's logits from those of its log-prob and entropy; dz may be z.
template <class T>
void logits_gradient(T* z, int64_t vocab, int64_t target, const LogprobOptions& options, T dlogprob, T dentropy,
                     bool with_entropy, Workspace<T>& work) {
  const Distribution<T> d = distribution(z, vocab, options, work);
  if (z[target] <= static_cast<T>(kDropped)) dlogprob = 0;
  const T entropy = with_entropy ? entropy_of(z, vocab, d, work) : 0;
  // d logprob / dz_j = [j = target] - p_j, d entropy / dz_j = -p_j (log p_j + entropy).
  const T slope = with_entropy ? -dentropy / d.sum : 0;
  const T level = (-dlogprob - (with_entropy ? dentropy * (entropy - d.log_sum - d.max) : 0)) / d.sum;
  cpu_kernels<T>().gated_line(work.e.data(), z, level, slope, z, vocab);
  z[target] += dlogprob;
  if (options.temperature != 1.0) cpu_kernels<T>().scale(z, static_cast<T>(1.0 / options.temperature), z, vocab);
}

// Logits in, their gradients out, of rows [from, from + count).
template <class T>
void gradients_of(T* z, int64_t from, int64_t count, int64_t vocab, const int64_t* targets,
                  const LogprobOptions& options, const T* dlogprobs, const T* dentropies, bool with_entropy) {
  parallel_tasks(count, std::max<int64_t>(1, 16'384 / vocab), [&](int64_t begin, int64_t end) {
    Workspace<T> work(vocab);
    for (int64_t r = begin; r < end; ++r) {
      logits_gradient(z + r * vocab, vocab, targets[from + r], options, dlogprobs[from + r], dentropies[from + r],
                      with_entropy, work);
    }
  });
}

void keep_options(AutogradContext& context, const LogprobOptions& options, bool with_entropy) {
  context.saved_data["temperature"] = options.temperature;
  context.saved_data["top_k"] = options.top_k;
  context.saved_data["top_p"] = options.top_p;
  context.saved_data["min_p"] = options.min_p;
  context.saved_data["entropy"] = with_entropy;
}

LogprobOptions kept_options(const AutogradContext& context) {
  LogprobOptions options;
  options.temperature = context.saved_data.at("temperature").toDouble();
  options.top_k = context.saved_data.at("top_k").toInt();
  options.top_p = context.saved_data.at("top_p").toDouble();
  options.min_p = context.saved_data.at("min_p").toDouble();
  options.allow_filtered = true;
  return options;
}

class LogprobFunction final : public torch::autograd::Function<LogprobFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden, const at::Tensor& head,
                               const at::Tensor& targets, const LogprobOptions& options, bool with_entropy) {
    context->save_for_backward({hidden, head, targets});
    keep_options(*context, options, with_entropy);
    return run(hidden, head, targets, options, with_entropy);
  }

  static variable_list run(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                           const LogprobOptions& options, bool with_entropy) {
    const auto output = hidden.options().dtype(compute_type(hidden)).requires_grad(false);
    at::Tensor logprobs = at::empty({hidden.size(0)}, output);
    at::Tensor entropies = at::empty({with_entropy ? hidden.size(0) : 0}, output);
    with_compute_type(hidden, [&](auto zero) {
      using T = decltype(zero);
      logprob_rows<T>(hidden, head, targets.const_data_ptr<int64_t>(), options, logprobs.mutable_data_ptr<T>(),
                      with_entropy ? entropies.mutable_data_ptr<T>() : nullptr);
    });
    return {logprobs, entropies};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& hidden = saved[0];
    const at::Tensor& head = saved[1];
    const LogprobOptions options = kept_options(*context);
    const bool with_entropy = context->saved_data["entropy"].toBool() && grads[1].defined();
    const auto of_rows = [&](const at::Tensor& grad, bool wanted) {
      return wanted && grad.defined() ? for_compute(grad)
                                      : at::zeros({hidden.size(0)}, hidden.options().dtype(compute_type(hidden)));
    };
    const at::Tensor dlogprobs = of_rows(grads[0], true), dentropies = of_rows(grads[1], with_entropy);
    const bool want_hidden = context->needs_input_grad(0), want_head = context->needs_input_grad(1);
    const at::Tensor head_compute = head.to(compute_type(hidden));
    at::Tensor dhidden, dhead;
    if (want_hidden) dhidden = at::empty(hidden.sizes(), hidden.options().dtype(compute_type(hidden)));
    if (want_head) dhead = at::zeros(head.sizes(), head.options().dtype(compute_type(hidden)));
    const int64_t* targets = saved[2].const_data_ptr<int64_t>();
    const int64_t rows = hidden.size(0), vocab = head.size(0), step = chunk_rows(vocab);
    for (int64_t from = 0; from < rows; from += step) {
      const int64_t count = std::min(step, rows - from);
      at::Tensor logits = chunk_logits(hidden, head, from, count);
      with_compute_type(hidden, [&](auto zero) {
        using T = decltype(zero);
        gradients_of(logits.mutable_data_ptr<T>(), from, count, vocab, targets, options, dlogprobs.const_data_ptr<T>(),
                     dentropies.const_data_ptr<T>(), with_entropy);
      });
      if (want_hidden) dhidden.narrow(0, from, count).copy_(logits.mm(head_compute));
      if (want_head) dhead.addmm_(logits.t(), hidden.narrow(0, from, count).to(dhead.scalar_type()));
    }
    return {want_hidden ? dhidden.to(hidden.scalar_type()) : at::Tensor(),
            want_head ? dhead.to(head.scalar_type()) : at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class LogitsFunction final : public torch::autograd::Function<LogitsFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& targets,
                               const LogprobOptions& options, bool with_entropy) {
    context->save_for_backward({logits, targets});
    keep_options(*context, options, with_entropy);
    return run(logits, targets, options, with_entropy);
  }

  static variable_list run(const at::Tensor& logits, const at::Tensor& targets, const LogprobOptions& options,
                           bool with_entropy) {
    at::Tensor work = logits.detach().to(compute_type(logits), /*non_blocking=*/false, /*copy=*/true).contiguous();
    at::Tensor logprobs = at::empty({work.size(0)}, work.options());
    at::Tensor entropies = at::empty({with_entropy ? work.size(0) : 0}, work.options());
    with_compute_type(work, [&](auto zero) {
      using T = decltype(zero);
      logprobs_of(work.mutable_data_ptr<T>(), 0, work.size(0), work.size(1), targets.const_data_ptr<int64_t>(), options,
                  logprobs.mutable_data_ptr<T>(), with_entropy ? entropies.mutable_data_ptr<T>() : nullptr);
    });
    return {logprobs, entropies};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& logits = saved[0];
    const bool with_entropy = context->saved_data["entropy"].toBool() && grads[1].defined();
    at::Tensor work = logits.to(compute_type(logits), /*non_blocking=*/false, /*copy=*/true).contiguous();
    const auto of_rows = [&](const at::Tensor& grad, bool wanted) {
      return wanted && grad.defined() ? for_compute(grad) : at::zeros({work.size(0)}, work.options());
    };
    const at::Tensor dlogprobs = of_rows(grads[0], true), dentropies = of_rows(grads[1], with_entropy);
    with_compute_type(work, [&](auto zero) {
      using T = decltype(zero);
      gradients_of(work.mutable_data_ptr<T>(), 0, work.size(0), work.size(1), saved[1].const_data_ptr<int64_t>(),
                   kept_options(*context), dlogprobs.const_data_ptr<T>(), dentropies.const_data_ptr<T>(), with_entropy);
    });
    return {work.to(logits.scalar_type()), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

void check_targets(const at::Tensor& targets, int64_t rows, int64_t vocab) {
  const int64_t* id = targets.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows; ++i) {
    if (id[i] >= 0 && id[i] < vocab) continue;
    fail_data("row " + std::to_string(i) + ": target token " + std::to_string(id[i]) +
              " is outside the vocabulary of " + std::to_string(vocab));
  }
}

void check_head(const char* op, const at::Tensor& hidden, const at::Tensor& head) {
  require_supported(op, hidden);
  require_same(op, hidden, head, "head");
  TRIREME_CHECK(hidden.dim() == 2 && head.dim() == 2 && hidden.size(1) == head.size(1) && head.size(0) > 0,
                std::string(op) + ": hidden [rows, hidden] and head [vocab, hidden] expected");
}

variable_list logprobs_and_entropy(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                                   const LogprobOptions& options, bool with_entropy) {
  check_head("token_logprobs", hidden, head);
  check_options(options);
  TRIREME_CHECK(targets.dim() == 1 && targets.size(0) == hidden.size(0) && targets.scalar_type() == at::kLong &&
                    targets.device() == hidden.device(),
                "token_logprobs: targets [rows] int64 expected");
  const at::Tensor ids = targets.contiguous();
  check_targets(ids, ids.size(0), head.size(0));
  if (wants_grad(hidden) || wants_grad(head)) return LogprobFunction::apply(hidden, head, ids, options, with_entropy);
  return LogprobFunction::run(hidden, head, ids, options, with_entropy);
}

// The first id at which the running sum of weights passes u times the total. Blocks are summed first, all in float64.
template <class T>
int64_t inverse_cdf(const T* e, int64_t vocab, double u, std::vector<double>& blocks) {
  constexpr int64_t kBlock = 64;
  blocks.assign(static_cast<size_t>((vocab + kBlock - 1) / kBlock), 0.0);
  for (int64_t j = 0; j < vocab; ++j) blocks[static_cast<size_t>(j / kBlock)] += static_cast<double>(e[j]);
  double total = 0;
  for (const double block : blocks) total += block;
  const double wanted = u * total;
  double below = 0;
  int64_t last = 0;
  for (size_t block = 0; block < blocks.size(); ++block) {
    const int64_t begin = static_cast<int64_t>(block) * kBlock, end = std::min(vocab, begin + kBlock);
    double running = below;
    const bool here = below + blocks[block] > wanted;
    for (int64_t j = begin; j < end && (here || block + 1 == blocks.size()); ++j) {
      running += static_cast<double>(e[j]);
      if (e[j] > 0 && running > wanted) return j;
    }
    below += blocks[block];
  }
  for (int64_t j = 0; j < vocab; ++j) last = e[j] > 0 ? j : last;  // rounding at the very end of the range
  return last;
}

// Of rows [from, from + count) of a batch, whose logits are `z`: in place.
template <class T>
void sample_of(T* z, int64_t from, int64_t count, int64_t vocab, const std::vector<SampleRow>& options,
               SampleResult& result) {
  parallel_tasks(count, std::max<int64_t>(1, 16'384 / vocab), [&](int64_t begin, int64_t end) {
    Workspace<T> work(vocab);
    std::vector<double> blocks;
    for (int64_t r = begin; r < end; ++r) {
      const SampleRow& row = options[static_cast<size_t>(from + r)];
      T* logit = z + r * vocab;
      const Distribution<T> d = distribution(logit, vocab, row.options, work);
      if (!std::isfinite(d.sum)) throw LogitsError(from + r);
      int64_t id = 0;
      if (row.greedy) {
        id = std::find(logit, logit + vocab, d.max) - logit;
      } else {
        id = inverse_cdf(work.e.data(), vocab, philox_uniform(row.key.seed, row.key.sample_id, row.key.position),
                         blocks);
      }
      result.ids[static_cast<size_t>(from + r)] = id;
      result.logprobs[static_cast<size_t>(from + r)] = static_cast<float>(d.logprob(logit[id]));
    }
  });
}

template <class T>
void sample_rows(const at::Tensor& hidden, const at::Tensor& head, const std::vector<SampleRow>& options,
                 SampleResult& result) {
  const int64_t rows = hidden.size(0), vocab = head.size(0), step = chunk_rows(vocab);
  for (int64_t from = 0; from < rows; from += step) {
    const int64_t count = std::min(step, rows - from);
    at::Tensor logits = chunk_logits(hidden, head, from, count);
    sample_of(logits.mutable_data_ptr<T>(), from, count, vocab, options, result);
  }
}

}  // namespace

at::Tensor token_logprobs(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                          const LogprobOptions& options) {
  if (hidden.is_cuda()) {
    check_options(options);
    return cuda::token_logprobs(hidden, head, targets, options, false).logprobs;
  }
  return logprobs_and_entropy(hidden, head, targets, options, false)[0];
}

LogprobResult token_logprobs_and_entropy(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                                         const LogprobOptions& options) {
  if (hidden.is_cuda()) {
    check_options(options);
    return cuda::token_logprobs(hidden, head, targets, options, true);
  }
  const variable_list both = logprobs_and_entropy(hidden, head, targets, options, true);
  return {both[0], both[1]};
}

LogprobResult logprobs_of_logits(const at::Tensor& logits, const at::Tensor& targets, const LogprobOptions& options,
                                 bool with_entropy) {
  check_options(options);
  require_supported("logprobs_of_logits", logits);
  const at::Tensor ids = targets.contiguous();
  check_targets(ids, logits.size(0), logits.size(1));
  const variable_list both = wants_grad(logits) ? LogitsFunction::apply(logits, ids, options, with_entropy)
                                                : LogitsFunction::run(logits, ids, options, with_entropy);
  return {both[0], both[1]};
}

SampleResult sample_tokens(const at::Tensor& hidden, const at::Tensor& head, const std::vector<SampleRow>& rows) {
  TRIREME_CHECK(hidden.dim() == 2 && static_cast<int64_t>(rows.size()) == hidden.size(0),
                "sample_tokens: one SampleRow per row expected");
  for (const SampleRow& row : rows) check_options(row.options);
  if (hidden.is_cuda()) return cuda::sample_tokens(hidden, head, rows);
  check_head("sample_tokens", hidden, head);
  const at::NoGradGuard no_grad;
  SampleResult result{std::vector<int64_t>(rows.size()), std::vector<float>(rows.size())};
  with_compute_type(hidden, [&](auto zero) { sample_rows<decltype(zero)>(hidden, head, rows, result); });
  return result;
}

SampleResult sample_logits(const at::Tensor& logits, const std::vector<SampleRow>& rows) {
  TRIREME_CHECK(logits.dim() == 2 && static_cast<int64_t>(rows.size()) == logits.size(0),
                "sample_logits: one SampleRow per row expected");
  for (const SampleRow& row : rows) check_options(row.options);
  require_supported("sample_logits", logits);
  const at::Tensor work = logits.detach().to(compute_type(logits), /*non_blocking=*/false, /*copy=*/true).contiguous();
  SampleResult result{std::vector<int64_t>(rows.size()), std::vector<float>(rows.size())};
  with_compute_type(work, [&](auto zero) {
    using T = decltype(zero);
    sample_of(work.mutable_data_ptr<T>(), 0, work.size(0), work.size(1), rows, result);
  });
  return result;
}

at::Tensor split_token_logprobs(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                                const LogprobOptions& options, const SplitLogits& split) {
  TRIREME_CHECK(hidden.is_cuda(), "split_token_logprobs is for CUDA");
  check_options(options);
  return cuda::token_logprobs(hidden, head, targets, options, /*with_entropy=*/false, &split).logprobs;
}

DeviceSamples sample_split_tokens_on_device(const at::Tensor& hidden, const at::Tensor& head,
                                            const DeviceSampling& rows, const SplitLogits& split) {
  TRIREME_CHECK(hidden.is_cuda(), "sample_split_tokens_on_device is for CUDA");
  return cuda::sample_tokens_on_device(hidden, head, rows, &split);
}

DeviceSamples sample_tokens_on_device(const at::Tensor& hidden, const at::Tensor& head, const DeviceSampling& rows) {
  if (hidden.is_cuda()) return cuda::sample_tokens_on_device(hidden, head, rows);
  fail_user("sample_tokens_on_device has no implementation for " + hidden.device().str() +
            " in this build; use sample_tokens");
}

}  // namespace trireme
