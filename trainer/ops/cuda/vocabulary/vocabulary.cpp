// The ops of the vocabulary of cuda_ops.h. Logits are made by linear_forward in chunks of rows of at most kChunkBytes.
// Where the whole batch is one chunk, its logits are kept for backward; else backward makes them again.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>

#include "trainer/ops/checks.h"
#include "trainer/ops/cuda/device/stream.h"
#include "trainer/ops/cuda/vocabulary/vocabulary_kernels.h"
#include "trainer/ops/cuda_ops.h"

namespace trireme::cuda {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kChunkBytes = int64_t{512} << 20;

void check_inputs(const char* op, const at::Tensor& hidden, const at::Tensor& head) {
  if (hidden.scalar_type() != at::kBFloat16) {
    fail_user(std::string(op) + " on cuda takes bfloat16, not " + c10::toString(hidden.scalar_type()));
  }
  require_same(op, hidden, head, "head");
  TRIREME_CHECK(hidden.dim() == 2 && head.dim() == 2 && hidden.size(1) == head.size(1),
                std::string(op) + ": hidden [rows, hidden] and head [vocab, hidden] expected");
  TRIREME_CHECK(head.size(0) < (int64_t{1} << 30), std::string(op) + ": the vocabulary is too large");
}

void check_array(const char* name, const at::Tensor& array, const at::Tensor& hidden, at::IntArrayRef shape,
                 at::ScalarType type) {
  TRIREME_CHECK(array.defined() && array.device() == hidden.device() && array.scalar_type() == type &&
                    array.sizes() == shape && array.is_contiguous(),
                std::string("sample_tokens_on_device: ") + name + " must be contiguous, of the stated shape and type " +
                    "and on the device of hidden");
}

RowOptions row_options(const LogprobOptions& options) {
  RowOptions rows;
  rows.temperature = static_cast<float>(options.temperature);
  rows.top_p = static_cast<float>(options.top_p);
  rows.min_p = static_cast<float>(options.min_p);
  rows.top_k = static_cast<int32_t>(std::min<int64_t>(options.top_k, INT32_MAX));
  return rows;
}

// Logits [count, vocab] whose rows begin at multiples of 8 elements. A head of another number of rows is multiplied
// with those behind it in its memory (model.h puts some there), whatever they hold: what they give lies between the
// rows of the result, where nothing reads it. So the product is one that fast kernels take, and the others' bits are
// the same.
at::Tensor chunk_logits(const at::Tensor& hidden, const at::Tensor& head, int64_t from, int64_t count) {
  const at::Tensor rows = hidden.narrow(0, from, count);
  const int64_t vocab = head.size(0), in = head.size(1), padded = (vocab + 7) / 8 * 8;
  if (padded == vocab) return linear_forward(rows, head, {}).contiguous();
  const auto end = static_cast<size_t>(head.storage_offset() + padded * in) * head.element_size();
  if (head.is_contiguous() && end <= head.storage().nbytes()) {
    const at::Tensor wide = head.detach().as_strided({padded, in}, {in, 1});
    return linear_forward(rows, wide, {}).narrow(1, 0, vocab);
  }
  at::Tensor logits = at::empty({count, padded}, rows.options().requires_grad(false)).narrow(1, 0, vocab);
  logits.copy_(linear_forward(rows, head, {}));
  return logits;
}

// Of a chunk of `count` rows those whose logits this rank reads: all of them, or a part where the head is split. The
// last parts may be smaller than `each`, or empty.
struct OwnRows {
  int64_t first, count, each;
};
OwnRows own_rows(int64_t count, const SplitLogits* split) {
  if (split == nullptr) return {0, count, count};
  const int64_t each = (count + split->ranks - 1) / split->ranks, first = std::min(count, each * split->rank);
  return {first, std::min(each, count - first), each};
}
int64_t vocabulary_of(const at::Tensor& head, const SplitLogits* split) {
  return split == nullptr ? head.size(0) : split->vocabulary;
}
int64_t chunk_rows(int64_t rows, const at::Tensor& head, const SplitLogits* split) {
  return vocabulary_chunk_rows(rows, split == nullptr ? head.size(0) : split->width);
}

// Whole logits of a chunk's own rows [own count, vocabulary].
at::Tensor own_logits(const at::Tensor& hidden, const at::Tensor& head, int64_t from, int64_t count,
                      const SplitLogits* split) {
  if (split == nullptr) return chunk_logits(hidden, head, from, count);
  const OwnRows own = own_rows(count, split);
  const int64_t even = own.each * split->ranks, width = split->width, vocab = head.size(0);
  at::Tensor rows = hidden.narrow(0, from, count);
  if (even > count) rows = at::constant_pad_nd(rows, {0, 0, 0, even - count});
  at::Tensor part;
  if (vocab == 0) {
    part = at::zeros({even, width}, rows.options().requires_grad(false));
  } else {
    part = chunk_logits(rows, head, 0, even);
    // What lies between rows is read by nobody: only the vocabulary's last columns are padding.
    part = (vocab + 7) / 8 * 8 == width ? part.as_strided({even, width}, {part.stride(0), 1})
                                        : at::constant_pad_nd(part, {0, width - vocab});
  }
  return split->whole_rows(part).narrow(0, 0, own.count).narrow(1, 0, split->vocabulary);
}

// The own columns of a chunk's `count` rows, of what lies where own_logits put logits.
at::Tensor own_columns(const at::Tensor& rows, const at::Tensor& head, int64_t count, const SplitLogits& split) {
  const int64_t each = own_rows(count, &split).each, width = split.ranks * split.width;
  return split.own_columns(rows.as_strided({each, width}, {width, 1})).narrow(0, 0, count).narrow(1, 0, head.size(0));
}

uint16_t* bits_of(const at::Tensor& logits) { return static_cast<uint16_t*>(logits.mutable_data_ptr()); }
Logits view_of(const at::Tensor& logits) { return {bits_of(logits), logits.size(0), logits.size(1), logits.stride(0)}; }

// Scratch of a chunk: partial results of each slice.
struct Partials {
  at::Tensor slices;  // [rows, slices, 2]
  at::Tensor dots;    // [rows, slices] or undefined
  Partials(int64_t rows, int64_t vocab, bool with_dots, const at::Tensor& like) {
    const auto options = like.options().dtype(at::kFloat).requires_grad(false);
    slices = at::empty({rows, slices_of(vocab), 2}, options);
    if (with_dots) dots = at::empty({rows, slices_of(vocab)}, options);
  }
  SlicePartial* slice_data() const { return static_cast<SlicePartial*>(slices.mutable_data_ptr()); }
  float* dot_data() const { return dots.defined() ? dots.mutable_data_ptr<float>() : nullptr; }
};
static_assert(sizeof(SlicePartial) == 2 * sizeof(float) && sizeof(RowFilter) == 2 * sizeof(float) &&
              sizeof(RowStatistics) == 4 * sizeof(float));

RowFilter* filter_data(const at::Tensor& filters, int64_t row) {
  return filters.defined() ? static_cast<RowFilter*>(filters.mutable_data_ptr()) + row : nullptr;
}
RowStatistics* statistics_data(const at::Tensor& statistics, int64_t row) {
  return static_cast<RowStatistics*>(statistics.mutable_data_ptr()) + row;
}

struct Forward {
  at::Tensor logprobs;    // [rows]
  at::Tensor entropies;   // [rows] or undefined
  at::Tensor statistics;  // [rows, 4]
  at::Tensor filters;     // [rows, 2] or undefined
  at::Tensor logits;      // [rows, vocab] where kept
};

Forward forward_rows(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                     const LogprobOptions& options, bool with_entropy, bool keep_logits, const SplitLogits* split) {
  const c10::cuda::CUDAGuard guard(hidden.device());
  const int64_t rows = hidden.size(0), vocab = vocabulary_of(head, split), step = chunk_rows(rows, head, split);
  const auto floats = hidden.options().dtype(at::kFloat).requires_grad(false);
  Forward out;
  out.logprobs = at::empty({rows}, floats);
  out.statistics = at::empty({rows, 4}, floats);
  if (with_entropy) out.entropies = at::empty({rows}, floats);
  if (options.filters()) out.filters = at::empty({rows, 2}, floats);
  const RowOptions of_rows = row_options(options);
  const cudaStream_t stream = stream_of(hidden);
  for (int64_t from = 0; from < rows; from += step) {
    const int64_t count = std::min(step, rows - from);
    const OwnRows own = own_rows(count, split);
    const int64_t first = from + own.first;
    const at::Tensor z = own_logits(hidden, head, from, count, split);
    // A split chunk's results are gathered from what each rank has found of its own rows.
    at::Tensor logprobs = out.logprobs.narrow(0, from, count), entropies = out.entropies;
    if (with_entropy) entropies = entropies.narrow(0, from, count);
    if (split != nullptr) {
      logprobs = at::zeros({own.each}, floats);
      if (with_entropy) entropies = at::zeros({own.each}, floats);
    }
    if (own.count > 0) {
      const Logits logits = view_of(z);
      RowFilter* filters = filter_data(out.filters, first);
      if (filters != nullptr) find_filters(logits, of_rows, filters, stream);
      const Partials partials(own.count, vocab, with_entropy, hidden);
      slice_partials(logits, of_rows, filters, partials.slice_data(), partials.dot_data(), stream);
      LogprobOutputs outputs;
      outputs.logprobs = logprobs.mutable_data_ptr<float>();
      outputs.entropies = with_entropy ? entropies.mutable_data_ptr<float>() : nullptr;
      outputs.statistics = statistics_data(out.statistics, first);
      finish_logprobs(logits, of_rows, filters, targets.const_data_ptr<int64_t>() + first, options.allow_filtered,
                      partials.slice_data(), partials.dot_data(), outputs, stream);
    }
    if (split != nullptr) {
      out.logprobs.narrow(0, from, count).copy_(split->gather(logprobs).narrow(0, 0, count));
      if (with_entropy) out.entropies.narrow(0, from, count).copy_(split->gather(entropies).narrow(0, 0, count));
    }
    if (keep_logits && count == rows) out.logits = z;
  }
  return out;
}

// Gradient buffer that takes the products directly: the head's own, where it is a leaf that has one.
at::Tensor gradient_buffer(const at::Tensor& head) {
  if (!head.is_leaf()) return {};
  const at::Tensor buffer = head.grad();
  return buffer.defined() && buffer.is_contiguous() && buffer.device() == head.device() ? buffer : at::Tensor();
}

class DeviceLogprobFunction final : public torch::autograd::Function<DeviceLogprobFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden, const at::Tensor& head,
                               const at::Tensor& targets, const LogprobOptions& options, bool with_entropy,
                               const SplitLogits* split) {
    Forward out = forward_rows(hidden, head, targets, options, with_entropy, /*keep_logits=*/true, split);
    context->save_for_backward({hidden, head, targets});
    context->saved_data["split"] = reinterpret_cast<int64_t>(split);
    context->saved_data["statistics"] = out.statistics;
    context->saved_data["temperature"] = options.temperature;
    if (out.filters.defined()) context->saved_data["filters"] = out.filters;
    if (out.logits.defined()) context->saved_data["logits"] = out.logits;
    if (!with_entropy) out.entropies = at::empty({0}, out.logprobs.options());
    return {out.logprobs, out.entropies};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor& hidden = saved[0];
    const at::Tensor& head = saved[1];
    const at::Tensor& targets = saved[2];
    const c10::cuda::CUDAGuard guard(hidden.device());
    const auto* split = reinterpret_cast<const SplitLogits*>(context->saved_data["split"].toInt());
    const int64_t rows = hidden.size(0), vocab = vocabulary_of(head, split), step = chunk_rows(rows, head, split);
    const auto take = [&](const char* name) {
      const auto found = context->saved_data.find(name);
      return found == context->saved_data.end() ? at::Tensor() : found->second.toTensor();
    };
    const at::Tensor statistics = take("statistics"), filters = take("filters");
    // Overwritten below, so only the first backward may use them.
    at::Tensor kept = take("logits");
    context->saved_data.erase("logits");
    RowOptions of_rows;
    of_rows.temperature = static_cast<float>(context->saved_data["temperature"].toDouble());

    const auto floats = hidden.options().dtype(at::kFloat).requires_grad(false);
    const at::Tensor dlogprobs = grads[0].defined() ? grads[0].to(at::kFloat).contiguous() : at::zeros({rows}, floats);
    const bool with_entropy = grads[1].defined() && grads[1].numel() == rows && rows > 0;
    const at::Tensor dentropies = with_entropy ? grads[1].to(at::kFloat).contiguous() : at::Tensor();

    const bool want_hidden = context->needs_input_grad(0), want_head = context->needs_input_grad(1);
    at::Tensor dhidden, dhead, sum;
    if (want_hidden) dhidden = at::empty(hidden.sizes(), hidden.options().requires_grad(false));
    const at::Tensor buffer = want_head ? gradient_buffer(head) : at::Tensor();
    if (want_head) {
      // Chunks are added in float32; a single chunk may go where the gradient belongs.
      const bool direct = buffer.defined() && (buffer.scalar_type() == at::kFloat || step >= rows);
      sum = direct ? buffer
                   : at::zeros(head.sizes(),
                               head.options().requires_grad(false).dtype(step >= rows ? at::kBFloat16 : at::kFloat));
    }
    const cudaStream_t stream = stream_of(hidden);
    for (int64_t from = 0; from < rows; from += step) {
      const int64_t count = std::min(step, rows - from);
      const OwnRows own = own_rows(count, split);
      const int64_t first = from + own.first;
      at::Tensor z = kept.defined() ? kept : own_logits(hidden, head, from, count, split);
      kept.reset();
      if (own.count > 0) {
        logits_gradient(bits_of(z), own.count, vocab, view_of(z).stride, of_rows, filter_data(filters, first),
                        targets.const_data_ptr<int64_t>() + first, statistics_data(statistics, first),
                        dlogprobs.const_data_ptr<float>() + first,
                        with_entropy ? dentropies.const_data_ptr<float>() + first : nullptr, stream);
      }
      if (split != nullptr) z = own_columns(z, head, count, *split);
      if (z.size(1) == 0) {  // a part of padding only
        if (want_hidden) dhidden.narrow(0, from, count).zero_();
        continue;
      }
      if (want_hidden) dhidden.narrow(0, from, count).copy_(linear_backward_input(z, head));
      if (want_head) linear_backward_weight(z, hidden.narrow(0, from, count), sum);
    }
    if (want_head && !sum.is_same(buffer)) {
      if (buffer.defined()) {
        at::Tensor(buffer).add_(sum);  // one rounding for all chunks
      } else {
        dhead = sum.to(head.scalar_type());
      }
    }
    return {dhidden, dhead, at::Tensor(), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

int64_t vocabulary_chunk_rows(int64_t rows, int64_t vocab) {
  const int64_t fit = std::max<int64_t>(1, kChunkBytes / (2 * vocab));
  if (rows <= fit) return std::max<int64_t>(1, rows);
  return fit < 128 ? fit : fit / 128 * 128;
}

LogprobResult token_logprobs(const at::Tensor& hidden, const at::Tensor& head, const at::Tensor& targets,
                             const LogprobOptions& options, bool with_entropy, const SplitLogits* split) {
  check_inputs("token_logprobs", hidden, head);
  TRIREME_CHECK(targets.dim() == 1 && targets.size(0) == hidden.size(0) && targets.scalar_type() == at::kLong &&
                    targets.device() == hidden.device(),
                "token_logprobs: targets [rows] int64 on the device of hidden expected");
  const at::Tensor ids = targets.contiguous();
  if (wants_grad(hidden) || wants_grad(head)) {
    const variable_list both = DeviceLogprobFunction::apply(hidden, head, ids, options, with_entropy, split);
    return {both[0], with_entropy ? both[1] : at::Tensor()};
  }
  const Forward out = forward_rows(hidden, head, ids, options, with_entropy, /*keep_logits=*/false, split);
  return {out.logprobs, out.entropies};
}

DeviceSamples sample_tokens_on_device(const at::Tensor& hidden, const at::Tensor& head, const DeviceSampling& given,
                                      const SplitLogits* split) {
  check_inputs("sample_tokens_on_device", hidden, head);
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard guard(hidden.device());
  const int64_t rows = hidden.size(0), vocab = vocabulary_of(head, split), step = chunk_rows(rows, head, split);
  check_array("keys [rows, 3] int64", given.keys, hidden, {rows, 3}, at::kLong);
  check_array("parameters [rows, 4] float32", given.parameters, hidden, {rows, 4}, at::kFloat);
  check_array("top_k [rows] int32", given.top_k, hidden, {rows}, at::kInt);
  DeviceSamples out{at::empty({rows}, given.keys.options()), at::empty({rows}, given.parameters.options())};
  const cudaStream_t stream = stream_of(hidden);
  for (int64_t from = 0; from < rows; from += step) {
    const int64_t count = std::min(step, rows - from);
    const OwnRows own = own_rows(count, split);
    const int64_t first = from + own.first;
    const at::Tensor z = own_logits(hidden, head, from, count, split);
    DeviceSamples drawn{out.ids.narrow(0, from, count), out.logprobs.narrow(0, from, count)};
    if (split != nullptr)
      drawn = {at::zeros({own.each}, out.ids.options()), at::zeros({own.each}, out.logprobs.options())};
    if (own.count > 0) {
      const Logits logits = view_of(z);
      RowOptions options;
      options.parameters = given.parameters.const_data_ptr<float>() + 4 * first;
      options.top_ks = given.top_k.const_data_ptr<int32_t>() + first;
      at::Tensor filters;
      if (given.any_filter) {
        filters = at::empty({own.count, 2}, given.parameters.options());
        find_filters(logits, options, filter_data(filters, 0), stream);
      }
      const Partials partials(own.count, vocab, /*with_dots=*/false, hidden);
      slice_partials(logits, options, filter_data(filters, 0), partials.slice_data(), nullptr, stream);
      finish_samples(logits, options, filter_data(filters, 0), given.keys.const_data_ptr<int64_t>() + 3 * first,
                     partials.slice_data(), drawn.ids.mutable_data_ptr<int64_t>(),
                     drawn.logprobs.mutable_data_ptr<float>(), stream);
    }
    if (split == nullptr) continue;
    drawn = split->gather_samples(drawn);
    if (step >= rows) return {drawn.ids.narrow(0, 0, rows), drawn.logprobs.narrow(0, 0, rows)};
    out.ids.narrow(0, from, count).copy_(drawn.ids.narrow(0, 0, count));
    out.logprobs.narrow(0, from, count).copy_(drawn.logprobs.narrow(0, 0, count));
  }
  return out;
}

SampleResult sample_tokens(const at::Tensor& hidden, const at::Tensor& head, const std::vector<SampleRow>& rows) {
  const auto count = static_cast<int64_t>(rows.size());
  DeviceSampling sampling;
  at::Tensor keys = at::empty({count, 3}, at::kLong), parameters = at::empty({count, 4}, at::kFloat),
             top_k = at::empty({count}, at::kInt);
  for (int64_t i = 0; i < count; ++i) {
    const SampleRow& row = rows[static_cast<size_t>(i)];
    const RowOptions options = row_options(row.options);
    int64_t* key = keys.mutable_data_ptr<int64_t>() + 3 * i;
    key[0] = static_cast<int64_t>(row.key.seed);
    key[1] = static_cast<int64_t>(row.key.sample_id);
    key[2] = static_cast<int64_t>(row.key.position);
    float* parameter = parameters.mutable_data_ptr<float>() + 4 * i;
    parameter[0] = options.temperature;
    parameter[1] = options.top_p;
    parameter[2] = options.min_p;
    parameter[3] = row.greedy ? 1.0f : 0.0f;
    top_k.mutable_data_ptr<int32_t>()[i] = options.top_k;
    sampling.any_filter = sampling.any_filter || row.options.filters();
  }
  sampling.keys = keys.to(hidden.device());
  sampling.parameters = parameters.to(hidden.device());
  sampling.top_k = top_k.to(hidden.device());
  const DeviceSamples samples = cuda::sample_tokens_on_device(hidden, head, sampling);
  const at::Tensor ids = samples.ids.cpu(), logprobs = samples.logprobs.cpu();
  SampleResult result{std::vector<int64_t>(rows.size()), std::vector<float>(rows.size())};
  for (size_t i = 0; i < rows.size(); ++i) {
    result.ids[i] = ids.const_data_ptr<int64_t>()[i];
    result.logprobs[i] = logprobs.const_data_ptr<float>()[i];
    if (!std::isfinite(result.logprobs[i])) throw LogitsError(static_cast<int64_t>(i));
  }
  return result;
}

}  // namespace trireme::cuda
