#include "trainer/ops/cuda/attention/attention.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <tuple>

#include "base/error.h"
#include "trainer/ops/checks.h"
#include "trainer/ops/cuda/elementwise/row_kernels.h"
#include "trainer/ops/cuda/gemm/linear.h"
#include "trainer/ops/shared_keys.h"
#include "trainer/ops/sms.h"

namespace trireme::cuda {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr double kLog2E = 1.4426950408889634;

void check_launch(cudaError_t error, const char* op) {
  if (error != cudaSuccess) fail_internal(std::string(op) + ": the kernel did not start: " + cudaGetErrorString(error));
}

void require_bf16(const char* op, const at::Tensor& x) {
  if (x.scalar_type() != at::kBFloat16)
    fail_user(std::string(op) + " on " + x.device().str() + " is there for BFloat16 only, not for " +
              c10::toString(x.scalar_type()) + "; set the model's precision to bfloat16");
}

struct Shape {
  int64_t q_heads, kv_heads, head_dim, group;
};

Shape shape_of(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  require_bf16(op, q);
  require_same(op, q, k, "k");
  require_same(op, q, v, "v");
  TRIREME_CHECK(q.dim() == 3 && k.dim() == 3 && v.sizes() == k.sizes() && q.size(2) == k.size(2) && k.size(1) > 0 &&
                    q.size(1) % k.size(1) == 0,
                std::string(op) + ": q [tokens, q_heads, head_dim], k and v [rows, kv_heads, head_dim] expected");
  if (q.size(2) != 64 && q.size(2) != 128)
    fail_user(std::string(op) + " on " + q.device().str() + " has kernels for head_dim 64 and 128, not for " +
              std::to_string(q.size(2)));
  return {q.size(1), k.size(1), q.size(2), q.size(1) / k.size(1)};
}

double softmax_scale(double scale, const Shape& shape) {
  return scale != 0.0 ? scale : 1.0 / std::sqrt(static_cast<double>(shape.head_dim));
}

bool aligned(const at::Tensor& x) { return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0; }

// A row stride is fine where rows do not overlap, all else is copied. (contiguous() would leave a single row and an odd
// address as they are.)
at::Tensor with_rows(const at::Tensor& x) {
  const bool readable = x.stride(2) == 1 && x.stride(1) == x.size(2) && x.stride(0) % 8 == 0 &&
                        x.stride(0) >= x.size(1) * x.size(2) && aligned(x);
  return readable ? x : x.clone(at::MemoryFormat::Contiguous);
}

at::Tensor without_strides(const at::Tensor& x) {
  return x.is_contiguous() && aligned(x) ? x : x.clone(at::MemoryFormat::Contiguous);
}

AttentionArgs arguments(const char* op, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                        const at::Tensor& out, const Shape& shape, double scale, const at::Tensor& runs,
                        const at::Tensor& items) {
  for (const at::Tensor* x : {&q, &k, &v}) {
    if (x->size(0) * x->stride(0) >= kAddressable)
      fail_user(std::string(op) + ": " + std::to_string(x->size(0)) + " rows of stride " +
                std::to_string(x->stride(0)) +
                " exceed the kernels' reach of 2^32 elements; take fewer tokens a batch" + " or a smaller cache");
  }
  AttentionArgs args;
  args.q = q.const_data_ptr();
  args.k = k.const_data_ptr();
  args.v = v.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.q_stride = q.stride(0);
  args.k_stride = k.stride(0);
  args.v_stride = v.stride(0);
  args.key_rows = k.size(0);
  args.q_heads = static_cast<int>(shape.q_heads);
  args.kv_heads = static_cast<int>(shape.kv_heads);
  args.head_dim = static_cast<int>(shape.head_dim);
  args.scale_log2 = static_cast<float>(scale * kLog2E);
  args.runs = runs.const_data_ptr<int32_t>();
  args.run_count = static_cast<int>(runs.size(1));
  args.items = items.const_data_ptr<int32_t>();
  args.item_count = static_cast<int>(items.size(1));
  return args;
}

// Arrays of a pass, gathered in one pinned buffer and copied to the device at once.
struct DeviceArrays {
  at::Tensor token_rows;  // [tokens] int64
  at::Tensor runs;        // [4, R] int32
  at::Tensor items;       // [2, I] int32
  // Of a packed batch, for its backward.
  at::Tensor query_items;  // [2, I] int32
  at::Tensor key_items;    // [2, I] int32
  // Of shared prefixes; undefined without.
  at::Tensor key_rows;  // [E] int64, rows of k and v
  at::Tensor sorted;    // [E] int64, key_rows ascending
  at::Tensor order;     // [E] int64, where in key_rows each of them stands; ascending for equal ones
};

struct Item {
  int32_t run, tile;
  int64_t rows;  // that the tile walks: keys, or queries
};

// Tiles of query rows, the ones with most keys first, so that the SMs finish together.
std::vector<Item> make_items(const std::vector<CacheRun>& runs, int64_t group, bool decode) {
  std::vector<Item> items;
  for (size_t r = 0; r < runs.size(); ++r) {
    const CacheRun& run = runs[r];
    const int64_t tiles = decode ? 1 : (run.count * group + kPackedTileRows - 1) / kPackedTileRows;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t tokens = std::min(run.count, ((tile + 1) * kPackedTileRows + group - 1) / group);
      items.push_back({static_cast<int32_t>(r), static_cast<int32_t>(tile), run.past + tokens});
    }
  }
  if (!decode)
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.rows > b.rows; });
  return items;
}

// Tiles of the queries of a run (of its keys), for backward; the ones with most work first.
std::vector<Item> make_backward_items(const std::vector<CacheRun>& runs, bool of_keys) {
  std::vector<Item> items;
  for (size_t r = 0; r < runs.size(); ++r) {
    const CacheRun& run = runs[r];
    const int64_t count = of_keys ? run.past + run.count : run.count;
    for (int64_t first = 0; first < count; first += kBackwardTileRows) {
      const int64_t seen = of_keys ? run.count - std::max<int64_t>(first - run.past, 0)
                                   : run.past + std::min(first + kBackwardTileRows, run.count);
      items.push_back({static_cast<int32_t>(r), static_cast<int32_t>(first / kBackwardTileRows), seen});
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.rows > b.rows; });
  return items;
}

// The backward's items may be none.
DeviceArrays upload(const std::vector<CacheRun>& runs, const std::vector<Item>& items,
                    const std::vector<Item>& query_items, const std::vector<Item>& key_items, int64_t tokens,
                    at::Device device) {
  const auto run_count = static_cast<int64_t>(runs.size());
  const std::vector<Item>* const lists[] = {&items, &query_items, &key_items};
  int64_t item_words = 0;
  for (const std::vector<Item>* list : lists) item_words += static_cast<int64_t>(list->size());
  const int64_t run_words = 2 * run_count;
  const int64_t words = tokens + run_words + item_words;  // of 8 bytes
  at::Tensor host = at::empty({words}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  auto* row_of_token = host.mutable_data_ptr<int64_t>();
  auto* of_run = reinterpret_cast<int32_t*>(row_of_token + tokens);
  auto* item = reinterpret_cast<int32_t*>(row_of_token + tokens + run_words);
  int64_t token = 0;
  for (int64_t r = 0; r < run_count; ++r) {
    const CacheRun& run = runs[static_cast<size_t>(r)];
    of_run[r] = static_cast<int32_t>(token);
    of_run[run_count + r] = static_cast<int32_t>(run.count);
    of_run[2 * run_count + r] = static_cast<int32_t>(run.extent_start);
    of_run[3 * run_count + r] = static_cast<int32_t>(run.past + run.count);
    for (int64_t i = 0; i < run.count && tokens > 0; ++i) row_of_token[token + i] = run.extent_start + run.past + i;
    token += run.count;
  }
  for (const std::vector<Item>* list : lists) {
    for (const Item& i : *list) *item++ = i.run;
    for (const Item& i : *list) *item++ = i.tile;
  }
  const at::Tensor all = host.to(device, /*non_blocking=*/true);
  const auto ints = [&](int64_t from, int64_t count) { return all.narrow(0, from, count).view(at::kInt); };
  DeviceArrays arrays;
  arrays.token_rows = all.narrow(0, 0, tokens);
  arrays.runs = ints(tokens, run_words).view({4, run_count});
  int64_t at = tokens + run_words;
  at::Tensor* const targets[] = {&arrays.items, &arrays.query_items, &arrays.key_items};
  for (size_t i = 0; i < std::size(lists); ++i) {
    const auto count = static_cast<int64_t>(lists[i]->size());
    *targets[i] = ints(at, count).view({2, count});
    at += count;
  }
  return arrays;
}

void require_int32(int64_t value, const char* what) {
  TRIREME_CHECK(value >= 0 && value <= std::numeric_limits<int32_t>::max(),
                std::string("attention: ") + what + " of " + std::to_string(value) + " does not fit 32 bits");
}

void refuse_capture(const char* op) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_launch(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(), &status), op);
  TRIREME_CHECK(status == cudaStreamCaptureStatusNone,
                std::string(op) + " copies from host memory and cannot be captured into a graph");
}

void add_shared(DeviceArrays& arrays, const std::vector<int64_t>& key_rows, at::Device device) {
  const auto count = static_cast<int64_t>(key_rows.size());
  require_int32(count, "a number of keys");
  at::Tensor host = at::empty({3 * count}, at::TensorOptions().dtype(at::kLong).pinned_memory(true));
  auto* row = host.mutable_data_ptr<int64_t>();
  int64_t* order = row + 2 * count;
  std::copy(key_rows.begin(), key_rows.end(), row);
  std::iota(order, order + count, int64_t{0});
  std::stable_sort(order, order + count, [&](int64_t a, int64_t b) { return row[a] < row[b]; });
  for (int64_t i = 0; i < count; ++i) row[count + i] = row[order[i]];
  const at::Tensor all = host.to(device, /*non_blocking=*/true);
  arrays.key_rows = all.narrow(0, 0, count);
  arrays.sorted = all.narrow(0, count, count);
  arrays.order = all.narrow(0, 2 * count, count);
}

// Which rows attend to which keys: whole sequences one after another, with those before theirs or without, or runs of
// rows anywhere.
struct PackedRows {
  std::vector<int64_t> starts, prefix;  // prefix empty: nothing is shared
  std::shared_ptr<const AttentionRuns> runs;

  bool operator==(const PackedRows& other) const {
    return runs == other.runs && starts == other.starts && prefix == other.prefix;
  }
  // And the order of the keys, empty: as they are.
  std::pair<std::vector<CacheRun>, std::vector<int64_t>> cache_runs() const {
    std::vector<CacheRun> found;
    if (runs != nullptr) {
      for (const AttentionRun& run : runs->runs) found.push_back({run.keys, run.past, run.count});
      return {found, runs->key_rows};
    }
    SharedKeys keys;
    if (!prefix.empty()) keys = shared_keys(starts, prefix);
    for (size_t s = 0; s + 1 < starts.size(); ++s) {
      const int64_t count = starts[s + 1] - starts[s];
      if (count == 0) continue;
      found.push_back(prefix.empty() ? CacheRun{starts[s], 0, count} : CacheRun{keys.starts[s], keys.past[s], count});
    }
    return {found, keys.rows};
  }
};

// The arrays of a packed batch: all layers, forward and backward, ask for the same ones. Kept by stream, because the
// copy and later reuse of the memory are ordered on the stream that made them.
DeviceArrays packed_arrays(const PackedRows& rows, int64_t group, at::Device device) {
  struct Entry {
    PackedRows rows;
    int64_t group;
    c10::cuda::CUDAStream stream;
    DeviceArrays arrays;
  };
  constexpr size_t kKept = 8;
  static std::mutex mutex;
  static auto* entries = new std::deque<Entry>;  // never destroyed: device memory outlives the driver at exit otherwise
  refuse_capture("attention_packed");
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device.index());
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Entry& entry : *entries) {
    if (entry.stream == stream && entry.group == group && entry.rows == rows) return entry.arrays;
  }
  const auto [runs, key_rows] = rows.cache_runs();
  DeviceArrays arrays = upload(runs, make_items(runs, group, false), make_backward_items(runs, false),
                               make_backward_items(runs, true), 0, device);
  if (!rows.prefix.empty() || !key_rows.empty()) add_shared(arrays, key_rows, device);
  entries->push_back({rows, group, stream, arrays});
  if (entries->size() > kKept) entries->pop_front();
  return arrays;
}

at::Tensor take_rows(const at::Tensor& x, const at::Tensor& rows) {
  return rows.defined() ? x.index_select(0, rows) : with_rows(x);
}

// Sums in float32, rounded once, of the rows of dx [E, heads, head_dim] that are one of `count` rows.
at::Tensor add_rows(const at::Tensor& dx, const DeviceArrays& arrays, int64_t count) {
  if (!arrays.key_rows.defined()) return dx;
  const at::Tensor from = dx.contiguous();
  at::Tensor sum = at::zeros({count, dx.size(1), dx.size(2)}, dx.options());
  embed_backward(static_cast<const Bf16*>(from.const_data_ptr()), arrays.sorted.const_data_ptr<int64_t>(),
                 arrays.order.const_data_ptr<int64_t>(), from.size(0), count, dx.size(1) * dx.size(2),
                 sum.mutable_data_ptr(), /*wide=*/false, c10::cuda::getCurrentCUDAStream());
  check_launch(cudaGetLastError(), "attention_packed's backward");
  return sum;
}

// out [tokens, q_heads, head_dim]; lse [tokens, q_heads] filled when defined.
at::Tensor packed_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const PackedRows& rows,
                          const Shape& shape, double scale, at::Tensor& lse) {
  const c10::cuda::CUDAGuard guard(q.device());
  at::Tensor out = at::empty(q.sizes(), q.options());
  if (q.size(0) == 0) return out;
  require_int32(q.size(0), "a number of tokens");
  const DeviceArrays arrays = packed_arrays(rows, shape.group, q.device());
  const at::Tensor qr = with_rows(q), kr = take_rows(k, arrays.key_rows), vr = take_rows(v, arrays.key_rows);
  AttentionArgs args = arguments("attention_packed", qr, kr, vr, out, shape, scale, arrays.runs, arrays.items);
  if (lse.defined()) args.lse = lse.mutable_data_ptr<float>();
  check_launch(launch_attention_packed(args, c10::cuda::getCurrentCUDAStream()), "attention_packed");
  return out;
}

// Carried through the autograd graph.
struct RowsOfCall final : torch::CustomClassHolder {
  explicit RowsOfCall(PackedRows r) : rows(std::move(r)) {}
  const PackedRows rows;
};

class PackedFunction final : public torch::autograd::Function<PackedFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const c10::intrusive_ptr<RowsOfCall>& call, double scale) {
    const Shape shape = shape_of("attention_packed", q, k, v);
    at::Tensor lse = at::empty({q.size(0), shape.q_heads}, q.options().dtype(at::kFloat));
    const at::Tensor out = packed_forward(q, k, v, call->rows, shape, scale, lse);
    context->save_for_backward({q, k, v, out, lse});
    context->saved_data["rows"] = c10::IValue::make_capsule(call);
    context->saved_data["scale"] = scale;
    return out;
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &out = saved[3], &lse = saved[4];
    if (q.size(0) == 0) return {at::zeros_like(q), at::zeros_like(k), at::zeros_like(v), at::Tensor(), at::Tensor()};
    const c10::cuda::CUDAGuard guard(q.device());
    const Shape shape = shape_of("attention_packed", q, k, v);
    const auto call = c10::static_intrusive_pointer_cast<RowsOfCall>(context->saved_data["rows"].toCapsule());
    const DeviceArrays arrays = packed_arrays(call->rows, shape.group, q.device());
    const double scale = context->saved_data["scale"].toDouble();
    const at::Tensor dout = without_strides(grads[0]), keys = take_rows(k, arrays.key_rows),
                     values = take_rows(v, arrays.key_rows);
    const at::Tensor queries = with_rows(q);
    AttentionBackwardArgs args;
    args.forward =
        arguments("attention_packed's backward", queries, keys, values, out, shape, scale, arrays.runs, arrays.items);
    args.forward.lse = lse.mutable_data_ptr<float>();
    args.tokens = q.size(0);
    args.dout = dout.const_data_ptr();
    const at::Tensor dq = at::empty(q.sizes(), q.options()), dk = at::empty(keys.sizes(), k.options()),
                     dv = at::empty(values.sizes(), v.options());
    args.dq = dq.mutable_data_ptr();
    args.dk = dk.mutable_data_ptr();
    args.dv = dv.mutable_data_ptr();
    const at::Tensor scratch = at::empty({2, shape.q_heads, q.size(0)}, lse.options());
    args.minus_lse = scratch.select(0, 0).mutable_data_ptr<float>();
    args.sums = scratch.select(0, 1).mutable_data_ptr<float>();
    args.scale = static_cast<float>(scale);
    args.query_items = arrays.query_items.const_data_ptr<int32_t>();
    args.query_item_count = static_cast<int>(arrays.query_items.size(1));
    args.key_items = arrays.key_items.const_data_ptr<int32_t>();
    args.key_item_count = static_cast<int>(arrays.key_items.size(1));
    check_launch(launch_attention_backward(args, c10::cuda::getCurrentCUDAStream()), "attention_packed's backward");
    return {dq, add_rows(dk, arrays, k.size(0)), add_rows(dv, arrays, k.size(0)), at::Tensor(), at::Tensor()};
  }
};

void check_plan(const char* op, const CachePlan& plan, const at::Tensor& q, const Shape& shape) {
  TRIREME_CHECK(plan.runs.defined() && plan.items.defined() && plan.runs.device() == q.device() &&
                    plan.runs.scalar_type() == at::kInt && plan.items.scalar_type() == at::kInt &&
                    plan.runs.dim() == 2 && plan.items.dim() == 2 && plan.runs.size(0) == 4 &&
                    plan.items.size(0) == 2 && plan.runs.is_contiguous() && plan.items.is_contiguous(),
                std::string(op) + ": the plan has no device arrays for " + q.device().str() +
                    "; make it with make_cache_plan for that device");
  if (!plan.decode) return;
  TRIREME_CHECK(plan.runs.size(1) <= q.size(0) && plan.items.size(1) == plan.runs.size(1),
                std::string(op) + ": a decode plan has one run and one item for each of at most " +
                    std::to_string(q.size(0)) + " tokens");
  if (shape.group > kMaxDecodeGroup)
    fail_user(std::string(op) + ": decode on CUDA serves up to " + std::to_string(kMaxDecodeGroup) +
              " query heads a key head; this model has " + std::to_string(shape.group));
}

// The host's copy of the runs is empty where the device arrays are filled otherwise.
void check_arena(const char* op, const at::Tensor& arena_k, const at::Tensor& arena_v, const CachePlan& plan) {
  TRIREME_CHECK(arena_k.is_contiguous() && arena_v.is_contiguous(), std::string(op) + ": the arena must be contiguous");
  for (const CacheRun& run : plan.host_runs) {
    TRIREME_CHECK(run.extent_start + run.past + run.count <= arena_k.size(0),
                  std::string(op) + ": a run leaves the arena of " + std::to_string(arena_k.size(0)) + " rows");
  }
}

}  // namespace

namespace {

at::Tensor attend_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, PackedRows rows, double scale) {
  const Shape shape = shape_of("attention_packed", q, k, v);
  const double factor = softmax_scale(scale, shape);
  if (wants_grad(q) || wants_grad(k) || wants_grad(v))
    return PackedFunction::apply(q, k, v, c10::make_intrusive<RowsOfCall>(std::move(rows)), factor);
  at::Tensor no_lse;
  return packed_forward(q, k, v, rows, shape, factor, no_lse);
}

}  // namespace

at::Tensor attention_packed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const std::vector<int64_t>& starts, const std::vector<int64_t>& prefix, double scale) {
  return attend_packed(q, k, v, {starts, prefix, nullptr}, scale);
}

at::Tensor attention_runs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const std::shared_ptr<const AttentionRuns>& runs, double scale) {
  return attend_packed(q, k, v, {{}, {}, runs}, scale);
}

CachePlan make_cache_plan(std::vector<CacheRun> runs, int64_t group, at::Device device) {
  TRIREME_CHECK(group >= 1, "make_cache_plan: at least one query head a key head");
  const c10::cuda::CUDAGuard guard(device);
  refuse_capture("make_cache_plan");
  CachePlan plan;
  // Runs without new tokens have no row in the device arrays: their keys are not read.
  std::vector<CacheRun> computed;
  int64_t tokens = 0;
  plan.decode = true;
  for (const CacheRun& run : runs) {
    TRIREME_CHECK(run.extent_start >= 0 && run.past >= 0 && run.count >= 0,
                  "make_cache_plan: a run has negative parts");
    require_int32(run.extent_start + run.past + run.count, "an arena row");
    tokens += run.count;
    if (run.count == 0) continue;
    plan.decode = plan.decode && run.count == 1;
    computed.push_back(run);
  }
  plan.decode = plan.decode && !computed.empty() && group <= kMaxDecodeGroup;
  require_int32(tokens, "a number of tokens");
  const DeviceArrays arrays = upload(computed, make_items(computed, group, plan.decode), {}, {}, tokens, device);
  if (plan.decode) {
    for (const CacheRun& run : computed) {
      plan.longest_keys = std::max(plan.longest_keys, run.past + 1);
      plan.total_keys += run.past + 1;
    }
  }
  plan.host_runs = std::move(runs);
  plan.token_rows = arrays.token_rows;
  plan.runs = arrays.runs;
  plan.items = arrays.items;
  return plan;
}

DecodeRoom decode_room(at::Device device, int64_t q_heads, int64_t kv_heads, int64_t head_dim) {
  using Key = std::tuple<c10::DeviceIndex, int64_t, int64_t>;
  static std::mutex mutex;
  static std::map<Key, DecodeRoom> rooms;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [found, is_new] = rooms.try_emplace({device.index(), q_heads / kv_heads, head_dim});
  DecodeRoom& room = found->second;
  if (is_new) {
    const c10::cuda::CUDAGuard guard(device);
    int sms = 0;
    check_launch(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device.index()), "attention_cached");
    room.sms = sms;
    AttentionArgs args;
    args.q_heads = static_cast<int>(q_heads);
    args.kv_heads = static_cast<int>(kv_heads);
    args.head_dim = static_cast<int>(head_dim);
    args.run_count = 1;
    args.early = true;  // one block an SM, as in a decode step
    for (const auto& [blocks, count] :
         {std::pair{2, &room.clusters2}, std::pair{4, &room.clusters4}, std::pair{8, &room.clusters8}}) {
      int clusters = 0;
      if (count_attention_clusters(args, blocks, &clusters) != cudaSuccess) (void)cudaGetLastError();
      *count = std::min(clusters, sms / blocks);
    }
  }
  return sm_limit() > 0 ? room.of(sm_limit()) : room;
}

at::Tensor attention_decode(const at::Tensor& q, const at::Tensor& arena_k, const at::Tensor& arena_v,
                            const CachePlan& plan, double scale, DecodeKernel kernel) {
  const Shape shape = shape_of("attention_cached", q, arena_k, arena_v);
  check_arena("attention_cached", arena_k, arena_v, plan);
  TRIREME_CHECK(plan.decode, "attention_decode: every run must have one new token");
  check_plan("attention_cached", plan, q, shape);
  const c10::cuda::CUDAGuard guard(q.device());
  const at::Tensor qr = with_rows(q);
  at::Tensor out = at::empty(q.sizes(), q.options());
  AttentionArgs args = arguments("attention_cached", qr, arena_k, arena_v, out, shape, softmax_scale(scale, shape),
                                 plan.runs, plan.items);
  args.early = may_begin_early();
  check_launch(launch_attention_decode(args, kernel, c10::cuda::getCurrentCUDAStream()), "attention_cached");
  return out;
}

at::Tensor attention_cached(const at::Tensor& q, const at::Tensor& arena_k, const at::Tensor& arena_v,
                            const CachePlan& plan, double scale) {
  if (plan.decode) {
    const DecodeWork work{plan.runs.size(1), arena_k.size(1), plan.longest_keys, plan.total_keys};
    const DecodeRoom room = decode_room(q.device(), q.size(1), arena_k.size(1), q.size(2));
    return attention_decode(q, arena_k, arena_v, plan, scale, choose_decode_kernel(work, room));
  }
  const Shape shape = shape_of("attention_cached", q, arena_k, arena_v);
  check_arena("attention_cached", arena_k, arena_v, plan);
  check_plan("attention_cached", plan, q, shape);
  const c10::cuda::CUDAGuard guard(q.device());
  const at::Tensor qr = with_rows(q);
  at::Tensor out = at::empty(q.sizes(), q.options());
  if (plan.items.size(1) == 0) return out;
  const AttentionArgs args = arguments("attention_cached", qr, arena_k, arena_v, out, shape,
                                       softmax_scale(scale, shape), plan.runs, plan.items);
  check_launch(launch_attention_packed(args, c10::cuda::getCurrentCUDAStream()), "attention_cached");
  return out;
}

void append_cached(const at::Tensor& k, const at::Tensor& v, const at::Tensor& arena_k, const at::Tensor& arena_v,
                   const CachePlan& plan) {
  require_bf16("append_cached", k);
  require_same("append_cached", k, v, "v");
  require_same("append_cached", k, arena_k, "the arena");
  require_same("append_cached", k, arena_v, "the arena");
  check_arena("append_cached", arena_k, arena_v, plan);
  TRIREME_CHECK(k.dim() == 3 && v.sizes() == k.sizes() && arena_v.sizes() == arena_k.sizes() && arena_k.dim() == 3 &&
                    k.size(1) == arena_k.size(1) && k.size(2) == arena_k.size(2) && k.size(2) % 8 == 0,
                "append_cached: k and v [tokens, kv_heads, head_dim] expected, as the arena");
  TRIREME_CHECK(
      plan.token_rows.defined() && plan.token_rows.device() == k.device() &&
          plan.token_rows.scalar_type() == at::kLong && plan.token_rows.is_contiguous() &&
          plan.token_rows.numel() == k.size(0),
      "append_cached: the plan must name an arena row for each of the " + std::to_string(k.size(0)) + " tokens");
  const c10::cuda::CUDAGuard guard(k.device());
  const at::Tensor kr = with_rows(k), vr = with_rows(v);
  check_launch(
      launch_append(kr.const_data_ptr(), vr.const_data_ptr(), kr.stride(0), vr.stride(0), arena_k.mutable_data_ptr(),
                    arena_v.mutable_data_ptr(), plan.token_rows.const_data_ptr<int64_t>(), k.size(0),
                    k.size(1) * k.size(2), c10::cuda::getCurrentCUDAStream()),
      "append_cached");
}

}  // namespace trireme::cuda
