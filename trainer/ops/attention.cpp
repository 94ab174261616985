// Causal attention, packed and cached: both hand blocks of query rows to the same kernel, which computes each row by
// itself.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <cstring>

#include "trainer/ops/attention_runs.h"
#include "trainer/ops/checks.h"
#include "trainer/ops/cpu_kernels.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/ops.h"
#include "trainer/ops/parallel.h"
#include "trainer/ops/shared_keys.h"

namespace trireme {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kBlockRows = 16;  // query rows (positions x heads of a group) of one task

struct Shape {
  int64_t q_heads, kv_heads, head_dim, group;
  int64_t positions_per_block() const { return std::max<int64_t>(1, kBlockRows / group); }
};

Shape shape_of(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const char* op) {
  require_supported(op, q);
  require_same(op, q, k, "k");
  require_same(op, q, v, "v");
  TRIREME_CHECK(q.dim() == 3 && k.dim() == 3 && v.sizes() == k.sizes() && q.size(2) == k.size(2) && k.size(1) > 0 &&
                    q.size(1) % k.size(1) == 0,
                std::string(op) + ": q [tokens, q_heads, head_dim], k and v [rows, kv_heads, head_dim] expected");
  return {q.size(1), k.size(1), q.size(2), q.size(1) / k.size(1)};
}

double softmax_scale(double scale, const Shape& shape) {
  return scale != 0.0 ? scale : 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
}

using Run = AttentionRun;
using Packing = AttentionRuns;  // the runs of a packed pass, and which rows of k and v they find where

// One task: some positions of a run, one key head.
struct Task {
  int64_t run, from, count, kv_head;
};

// Cheap ones last, so that the threads finish together.
std::vector<Task> make_tasks(const std::vector<Run>& runs, const Shape& shape, double& flops) {
  std::vector<Task> tasks;
  const int64_t step = shape.positions_per_block();
  flops = 0;
  for (size_t r = 0; r < runs.size(); ++r) {
    const Run& run = runs[r];
    flops += 4.0 * static_cast<double>(shape.q_heads * shape.head_dim) * static_cast<double>(run.count) *
             (static_cast<double>(run.past) + 0.5 * static_cast<double>(run.count));
    for (int64_t end = run.count; end > 0; end -= std::min(end, step)) {
      const int64_t count = std::min(end, step);
      for (int64_t head = 0; head < shape.kv_heads; ++head)
        tasks.push_back({static_cast<int64_t>(r), end - count, count, head});
    }
  }
  return tasks;
}

constexpr double kParallelFlops = 400'000;

template <class T>
T* scratch(int64_t elements) {
  thread_local std::vector<T> buffer;
  if (static_cast<int64_t>(buffer.size()) < elements) buffer.resize(static_cast<size_t>(elements));
  return buffer.data();
}

// q and out [tokens, q_heads, head_dim], k and v [rows, kv_heads, head_dim], lse [tokens, q_heads] or null; contiguous.
template <class T>
void attend_runs(const T* q, const T* k, const T* v, const std::vector<Run>& runs, const Shape& shape, double scale,
                 T* out, T* lse) {
  double flops = 0;
  const std::vector<Task> tasks = make_tasks(runs, shape, flops);
  const int64_t q_stride = shape.q_heads * shape.head_dim;
  const int64_t kv_stride = shape.kv_heads * shape.head_dim;
  parallel_dynamic(static_cast<int64_t>(tasks.size()), flops > kParallelFlops, [&](int64_t index) {
    const Task& task = tasks[static_cast<size_t>(index)];
    const Run& run = runs[static_cast<size_t>(task.run)];
    const int64_t rows = task.count * shape.group;
    std::vector<const T*> q_rows(static_cast<size_t>(rows));
    std::vector<T*> out_rows(static_cast<size_t>(rows));
    std::vector<int64_t> keys(static_cast<size_t>(rows));
    std::vector<T> sums(static_cast<size_t>(rows));
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t position = task.from + row / shape.group;
      const int64_t at =
          (run.q_row + position) * q_stride + (task.kv_head * shape.group + row % shape.group) * shape.head_dim;
      q_rows[static_cast<size_t>(row)] = q + at;
      out_rows[static_cast<size_t>(row)] = out + at;
      keys[static_cast<size_t>(row)] = run.past + position + 1;
    }
    const int64_t first = run.keys * kv_stride + task.kv_head * shape.head_dim;
    cpu_kernels<T>().attend({rows, q_rows.data(), out_rows.data(), lse != nullptr ? sums.data() : nullptr, keys.data(),
                             k + first, v + first, kv_stride, shape.head_dim, static_cast<T>(scale),
                             scratch<T>(attend_scratch(keys.back()))});
    for (int64_t row = 0; lse != nullptr && row < rows; ++row) {
      lse[(run.q_row + task.from + row / shape.group) * shape.q_heads + task.kv_head * shape.group +
          row % shape.group] = sums[static_cast<size_t>(row)];
    }
  });
}

// prefix empty: nothing is shared.
Packing packing_of(const std::vector<int64_t>& starts, const std::vector<int64_t>& prefix) {
  Packing packing;
  SharedKeys keys;
  if (!prefix.empty()) keys = shared_keys(starts, prefix);
  for (size_t s = 0; s + 1 < starts.size(); ++s) {
    const int64_t count = starts[s + 1] - starts[s];
    if (count == 0) continue;
    packing.runs.push_back(prefix.empty() ? Run{starts[s], 0, count, starts[s]}
                                          : Run{starts[s], keys.past[s], count, keys.starts[s]});
  }
  packing.key_rows = std::move(keys.rows);
  return packing;
}

at::Tensor take_rows(const at::Tensor& x, const std::vector<int64_t>& rows) {
  return rows.empty() ? x : x.index_select(0, at::tensor(rows, at::kLong));
}

// Sums of the rows of dx that are one row of x, in order.
at::Tensor add_rows(const at::Tensor& dx, const std::vector<int64_t>& rows, int64_t count) {
  if (rows.empty()) return dx;
  at::Tensor sum = at::zeros({count, dx.size(1), dx.size(2)}, dx.options());
  const int64_t width = dx.size(1) * dx.size(2);
  with_compute_type(dx, [&](auto zero) {
    using T = decltype(zero);
    const T* from = dx.const_data_ptr<T>();
    T* to = sum.mutable_data_ptr<T>();
    for (size_t i = 0; i < rows.size(); ++i)
      cpu_kernels<T>().add_to(to + rows[i] * width, from + static_cast<int64_t>(i) * width, width);
  });
  return sum;
}

// out [tokens, q_heads, head_dim] in q's dtype; lse filled when defined.
at::Tensor packed_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Packing& packing,
                          const Shape& shape, double scale, at::Tensor& lse) {
  const at::Tensor qc = for_compute(q), kc = take_rows(for_compute(k), packing.key_rows),
                   vc = take_rows(for_compute(v), packing.key_rows);
  at::Tensor out = at::empty_like(qc);
  with_compute_type(q, [&](auto zero) {
    using T = decltype(zero);
    attend_runs<T>(qc.const_data_ptr<T>(), kc.const_data_ptr<T>(), vc.const_data_ptr<T>(), packing.runs, shape, scale,
                   out.mutable_data_ptr<T>(), lse.defined() ? lse.mutable_data_ptr<T>() : nullptr);
  });
  return out.to(q.scalar_type());
}

struct BackwardInput {
  at::Tensor q, k, v, out, lse, dout;
};

// One task owns the gradients of one key head of one sequence; query rows add to them in order.
template <class T>
void backward_runs(const BackwardInput& in, const std::vector<Run>& runs, const Shape& shape, double scale,
                   at::Tensor& dq, at::Tensor& dk, at::Tensor& dv) {
  const int64_t q_stride = shape.q_heads * shape.head_dim;
  const int64_t kv_stride = shape.kv_heads * shape.head_dim;
  double flops = 0;
  make_tasks(runs, shape, flops);
  const T* q = in.q.const_data_ptr<T>();
  const T* out = in.out.const_data_ptr<T>();
  const T* dout = in.dout.const_data_ptr<T>();
  const T* lse = in.lse.const_data_ptr<T>();
  T* gq = dq.mutable_data_ptr<T>();
  const auto count = static_cast<int64_t>(runs.size()) * shape.kv_heads;
  parallel_dynamic(count, flops > kParallelFlops, [&](int64_t index) {
    const Run& run = runs[static_cast<size_t>(index / shape.kv_heads)];
    const int64_t kv_head = index % shape.kv_heads;
    const int64_t first = run.keys * kv_stride + kv_head * shape.head_dim;
    std::vector<const T*> q_rows, dout_rows;
    std::vector<T*> dq_rows;
    std::vector<int64_t> keys;
    std::vector<T> sums, deltas;
    for (int64_t from = 0; from < run.count; from += shape.positions_per_block()) {
      const int64_t positions = std::min(shape.positions_per_block(), run.count - from);
      q_rows.clear(), dout_rows.clear(), dq_rows.clear(), keys.clear(), sums.clear(), deltas.clear();
      for (int64_t row = 0; row < positions * shape.group; ++row) {
        const int64_t position = from + row / shape.group;
        const int64_t head = kv_head * shape.group + row % shape.group;
        const int64_t at = (run.q_row + position) * q_stride + head * shape.head_dim;
        q_rows.push_back(q + at);
        dout_rows.push_back(dout + at);
        dq_rows.push_back(gq + at);
        keys.push_back(run.past + position + 1);
        sums.push_back(lse[(run.q_row + position) * shape.q_heads + head]);
        deltas.push_back(cpu_kernels<T>().dot(dout + at, out + at, shape.head_dim));
      }
      cpu_kernels<T>().attend_backward(
          {static_cast<int64_t>(q_rows.size()), q_rows.data(), dout_rows.data(), sums.data(), deltas.data(),
           dq_rows.data(), keys.data(), in.k.const_data_ptr<T>() + first, in.v.const_data_ptr<T>() + first,
           dk.mutable_data_ptr<T>() + first, dv.mutable_data_ptr<T>() + first, kv_stride, shape.head_dim,
           static_cast<T>(scale), scratch<T>(2 * attend_scratch(keys.back()))});
    }
  });
}

// A packing, carried through the autograd graph.
struct KeptPacking final : torch::CustomClassHolder {
  explicit KeptPacking(std::shared_ptr<const Packing> p) : packing(std::move(p)) {}
  std::shared_ptr<const Packing> packing;
};

class AttentionFunction final : public torch::autograd::Function<AttentionFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const c10::intrusive_ptr<KeptPacking>& kept, double scale) {
    const Shape shape = shape_of(q, k, v, "attention_packed");
    at::Tensor lse = at::empty({q.size(0), shape.q_heads}, q.options().dtype(compute_type(q)));
    const at::Tensor out = packed_forward(q, k, v, *kept->packing, shape, scale, lse);
    context->save_for_backward({q, k, v, out, lse});
    context->saved_data["packing"] = c10::IValue::make_capsule(kept);
    context->saved_data["scale"] = scale;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const auto kept = c10::static_intrusive_pointer_cast<KeptPacking>(context->saved_data["packing"].toCapsule());
    const Packing& packing = *kept->packing;
    const BackwardInput in{for_compute(saved[0]),
                           take_rows(for_compute(saved[1]), packing.key_rows),
                           take_rows(for_compute(saved[2]), packing.key_rows),
                           for_compute(saved[3]),
                           saved[4],
                           for_compute(grads[0])};
    const Shape shape = shape_of(in.q, in.k, in.v, "attention_packed");
    at::Tensor dq = at::empty_like(in.q), dk = at::zeros_like(in.k), dv = at::zeros_like(in.v);
    with_compute_type(in.q, [&](auto zero) {
      backward_runs<decltype(zero)>(in, packing.runs, shape, context->saved_data["scale"].toDouble(), dq, dk, dv);
    });
    const at::ScalarType type = saved[0].scalar_type();
    return {dq.to(type), add_rows(dk, packing.key_rows, saved[1].size(0)).to(type),
            add_rows(dv, packing.key_rows, saved[1].size(0)).to(type), at::Tensor(), at::Tensor()};
  }
};

void check_runs(const std::vector<CacheRun>& runs, int64_t tokens, int64_t capacity, const char* op) {
  int64_t total = 0;
  for (const CacheRun& run : runs) {
    TRIREME_CHECK(
        run.extent_start >= 0 && run.past >= 0 && run.count >= 0 && run.extent_start + run.past + run.count <= capacity,
        std::string(op) + ": a run leaves the arena of " + std::to_string(capacity) + " rows");
    total += run.count;
  }
  TRIREME_CHECK(total == tokens, std::string(op) + ": runs hold " + std::to_string(total) + " tokens, the batch has " +
                                     std::to_string(tokens));
}

}  // namespace

namespace {

at::Tensor attend_packing(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          std::shared_ptr<const Packing> packing, double scale) {
  const Shape shape = shape_of(q, k, v, "attention_packed");
  const double factor = softmax_scale(scale, shape);
  if (wants_grad(q) || wants_grad(k) || wants_grad(v))
    return AttentionFunction::apply(q, k, v, c10::make_intrusive<KeptPacking>(std::move(packing)), factor);
  at::Tensor no_lse;
  return packed_forward(q, k, v, *packing, shape, factor, no_lse);
}

at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<int64_t>& starts,
                  const std::vector<int64_t>& prefix, double scale) {
  TRIREME_CHECK(k.size(0) == q.size(0) && !starts.empty() && starts.front() == 0 && starts.back() == q.size(0),
                "attention_packed: starts must go from 0 to the number of tokens");
  for (size_t i = 0; i + 1 < starts.size(); ++i)
    TRIREME_CHECK(starts[i] <= starts[i + 1], "attention_packed: starts must ascend");
  if (q.is_cuda()) return cuda::attention_packed(q, k, v, starts, prefix, scale);
  return attend_packing(q, k, v, std::make_shared<const Packing>(packing_of(starts, prefix)), scale);
}

}  // namespace

at::Tensor attention_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& starts, double scale) {
  return attend(q, k, v, starts, {}, scale);
}

at::Tensor attention_shared(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& starts, const std::vector<int64_t>& prefix, double scale) {
  TRIREME_CHECK(prefix.size() + 1 == starts.size(), "attention_shared: one prefix for each sequence expected");
  return attend(q, k, v, starts, prefix, scale);
}

at::Tensor attention_runs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::shared_ptr<const AttentionRuns>& runs, double scale) {
  const int64_t keys = runs->key_rows.empty() ? k.size(0) : static_cast<int64_t>(runs->key_rows.size());
  int64_t rows = 0;
  for (const AttentionRun& run : runs->runs) {
    TRIREME_CHECK(
        run.q_row == rows && run.past >= 0 && run.count > 0 && run.keys >= 0 && run.keys + run.past + run.count <= keys,
        "attention_runs: a run leaves the keys, or the order of the rows");
    rows += run.count;
  }
  TRIREME_CHECK(rows == q.size(0), "attention_runs: the runs have other rows than q");
  if (q.is_cuda()) return cuda::attention_runs(q, k, v, runs, scale);
  return attend_packing(q, k, v, runs, scale);
}

CachePlan make_cache_plan(std::vector<CacheRun> runs, int64_t group, at::Device device) {
  if (device.is_cuda()) return cuda::make_cache_plan(std::move(runs), group, device);
  CachePlan plan;
  plan.host_runs = std::move(runs);
  return plan;
}

at::Tensor attention_cached(const at::Tensor& q, const at::Tensor& arena_k, const at::Tensor& arena_v,
                            const CachePlan& plan, double scale) {
  if (q.is_cuda()) return cuda::attention_cached(q, arena_k, arena_v, plan, scale);
  const Shape shape = shape_of(q, arena_k, arena_v, "attention_cached");
  TRIREME_CHECK(arena_k.is_contiguous() && arena_v.is_contiguous(), "attention_cached: the arena must be contiguous");
  check_runs(plan.host_runs, q.size(0), arena_k.size(0), "attention_cached");
  const at::Tensor qc = for_compute(q);
  at::Tensor out = at::empty_like(qc);
  at::Tensor keys = arena_k, values = arena_v;
  std::vector<Run> runs;
  int64_t token = 0;
  for (const CacheRun& run : plan.host_runs) {
    if (run.count > 0) runs.push_back({token, run.past, run.count, run.extent_start});
    token += run.count;
  }
  if (runs.empty()) return at::zeros_like(q);  // no rows
  if (compute_type(q) != q.scalar_type()) {
    // The kernel reads float32: convert the extents in use, one after another.
    std::vector<at::Tensor> some_keys, some_values;
    int64_t at = 0;
    for (Run& run : runs) {
      const int64_t count = run.past + run.count;
      some_keys.push_back(arena_k.narrow(0, run.keys, count));
      some_values.push_back(arena_v.narrow(0, run.keys, count));
      run.keys = at;
      at += count;
    }
    keys = at::cat(some_keys).to(at::kFloat);
    values = at::cat(some_values).to(at::kFloat);
  }
  with_compute_type(q, [&](auto zero) {
    using T = decltype(zero);
    attend_runs<T>(qc.const_data_ptr<T>(), keys.const_data_ptr<T>(), values.const_data_ptr<T>(), runs, shape,
                   softmax_scale(scale, shape), out.mutable_data_ptr<T>(), nullptr);
  });
  return out.to(q.scalar_type());
}

void append_cached(const at::Tensor& k, const at::Tensor& v, const at::Tensor& arena_k, const at::Tensor& arena_v,
                   const CachePlan& plan) {
  if (k.is_cuda()) return cuda::append_cached(k, v, arena_k, arena_v, plan);
  require_supported("append_cached", k);
  require_same("append_cached", k, arena_k, "the arena");
  check_runs(plan.host_runs, k.size(0), arena_k.size(0), "append_cached");
  const at::Tensor kc = k.contiguous(), vc = v.contiguous();
  const size_t row_bytes = static_cast<size_t>(k.size(1) * k.size(2)) * k.element_size();
  int64_t token = 0;
  for (const CacheRun& run : plan.host_runs) {
    const size_t target = static_cast<size_t>(run.extent_start + run.past) * row_bytes;
    const size_t source = static_cast<size_t>(token) * row_bytes, bytes = static_cast<size_t>(run.count) * row_bytes;
    std::memcpy(static_cast<char*>(arena_k.mutable_data_ptr()) + target,
                static_cast<const char*>(kc.const_data_ptr()) + source, bytes);
    std::memcpy(static_cast<char*>(arena_v.mutable_data_ptr()) + target,
                static_cast<const char*>(vc.const_data_ptr()) + source, bytes);
    token += run.count;
  }
}

}  // namespace trireme
