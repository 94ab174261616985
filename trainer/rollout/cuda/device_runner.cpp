// The runner for CUDA. Everything of a step is queued on the current stream; the host is one step ahead of the device.
//
// A pure decode step (one new token for each sequence) is a CUDA graph over fixed addresses: one upload fills its
// inputs, the graph runs model and sampling, two downloads fetch ids and log-probs. Steps that prefill run eagerly
// through the same functions, so that a row has the same bits on both ways.
#include <ATen/ATen.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <tuple>

#include "base/error.h"
#include "trainer/ops/cuda/linear.h"
#include "trainer/rollout/cuda/resolve.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {
namespace {

// Steps whose uploads or results may be under way at once: the one running, the one before it, and the next.
constexpr int64_t kSlots = 3;

// First tokens of a step's new groups: at most this many samples. Their buffers are 2 MB.
constexpr int64_t kMaxOutputs = int64_t{1} << 17;

// Rows of a graph: the work of padded rows costs less than a graph for every count.
int64_t bucket_of(int64_t rows) {
  const int64_t step = rows <= 64 ? 16 : rows <= 256 ? 32 : 64;
  return (rows + step - 1) / step * step;
}

// Runs of attention in it: products want 16 rows, attention gives few samples more of the chip each.
int64_t runs_of(int64_t rows) {
  int64_t runs = 1;
  while (runs < rows && runs < 16) runs *= 2;
  return rows <= 16 ? runs : bucket_of(rows);
}

// The inputs of a decode step of `rows` rows inside one buffer, host and device alike.
class DecodeInputs {
 public:
  DecodeInputs(void* base, int64_t rows, int64_t run_count, at::Device device) {
    auto* at = static_cast<char*>(base);
    const auto take = [&](std::vector<int64_t> shape, at::ScalarType type) {
      const at::Tensor view = at::from_blob(at, shape, at::TensorOptions().dtype(type).device(device));
      at += view.nbytes();
      return view;
    };
    tokens = take({rows}, at::kLong);
    positions = take({rows}, at::kLong);
    token_rows = take({rows}, at::kLong);
    keys = take({rows, 3}, at::kLong);
    parameters = take({rows, 4}, at::kFloat);
    runs = take({4, run_count}, at::kInt);
    items = take({2, run_count}, at::kInt);
    top_k = take({rows}, at::kInt);
    bytes = at - static_cast<char*>(base);
  }
  static int64_t bytes_for(int64_t rows) { return rows * (6 * 8 + 4 * 4 + 4 * 4 + 2 * 4 + 4); }

  at::Tensor tokens, positions, token_rows;  // [rows]
  at::Tensor keys, parameters, top_k;        // DeviceSampling
  at::Tensor runs, items;                    // CachePlan
  int64_t bytes = 0;
};

class DeviceRunner final : public StepRunner {
 public:
  DeviceRunner(const Model& model, KvArena& arena, int64_t max_rows)
      : model_(model),
        arena_(arena),
        device_(model.options().device),
        group_(model.config().num_heads / model.config().num_kv_heads),
        scratch_row_(arena.capacity_rows() - kDeviceScratchRows),
        pool_(at::cuda::graph_pool_handle()) {
    const c10::cuda::CUDAGuard guard(device_);
    const auto on_device = at::TensorOptions().device(device_);
    inputs_ = at::empty({DecodeInputs::bytes_for(bucket_of(max_rows))}, on_device.dtype(at::kByte));
    ids_ = at::zeros({kMaxOutputs}, on_device.dtype(at::kLong));
    logprobs_ = at::zeros({kMaxOutputs}, on_device.dtype(at::kFloat));
    for (Slot& slot : slots_) {
      slot.upload = pinned(inputs_.nbytes(), at::kByte);
      slot.ids = pinned(kMaxOutputs, at::kLong);
      slot.logprobs = pinned(kMaxOutputs, at::kFloat);
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming));
    }
  }

  ~DeviceRunner() override {
    for (Slot& slot : slots_) {
      if (slot.done == nullptr) continue;
      (void)cudaEventSynchronize(slot.done);
      (void)cudaEventDestroy(slot.done);
    }
  }

  void start(const StepRequest& request) override {
    const c10::cuda::CUDAGuard guard(device_);
    const StepPlan& plan = *request.plan;
    if (static_cast<int64_t>(plan.outputs.size()) > kMaxOutputs) {
      fail_user("rollout: one step would start " + std::to_string(plan.outputs.size()) +
                " samples; lower policy.generation.prefill_chunk_tokens");
    }
    TRIREME_CHECK(pending_.size() + 1 < kSlots, "a step was started before the results of earlier ones were taken");
    move_rows(plan);
    Slot& slot = slots_[static_cast<size_t>(next_slot_)];
    next_slot_ = (next_slot_ + 1) % kSlots;
    if (is_decode(plan)) {
      decode(request, slot);
    } else {
      mixed(request);
    }
    slot.rows = static_cast<int64_t>(plan.outputs.size());
    if (slot.rows > 0) {
      const auto fetch = [&](const at::Tensor& from, const at::Tensor& to) {
        to.narrow(0, 0, slot.rows).copy_(from.narrow(0, 0, slot.rows), /*non_blocking=*/true);
      };
      fetch(ids_, slot.ids);
      fetch(logprobs_, slot.logprobs);
    }
    C10_CUDA_CHECK(cudaEventRecord(slot.done, stream()));
    pending_.push_back(&slot);
  }

  SampleResult take() override {
    TRIREME_CHECK(!pending_.empty(), "no step was started");
    Slot& slot = *pending_.front();
    pending_.pop_front();
    C10_CUDA_CHECK(cudaEventSynchronize(slot.done));
    const int64_t* id = slot.ids.const_data_ptr<int64_t>();
    const float* logprob = slot.logprobs.const_data_ptr<float>();
    SampleResult result{{id, id + slot.rows}, {logprob, logprob + slot.rows}};
    for (int64_t row = 0; row < slot.rows; ++row) {
      if (!(logprob[row] == logprob[row])) {
        fail_data("row " + std::to_string(row) + ": the model's logits are not finite");
      }
    }
    return result;
  }

 private:
  struct Slot {
    at::Tensor upload;         // pinned bytes
    at::Tensor ids, logprobs;  // pinned results
    int64_t rows = 0;
    cudaEvent_t done = nullptr;
  };
  struct Graph {
    at::cuda::CUDAGraph graph;
    bool captured = false;
  };

  static at::Tensor pinned(int64_t elements, at::ScalarType type) {
    return at::empty({elements}, at::TensorOptions().dtype(type).pinned_memory(true));
  }
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }

  // Every segment has one new token, and every one of them is sampled from, in order.
  static bool is_decode(const StepPlan& plan) {
    if (plan.outputs.empty() || static_cast<int64_t>(plan.outputs.size()) != plan.tokens ||
        plan.segments.size() != plan.outputs.size()) {
      return false;
    }
    for (size_t i = 0; i < plan.outputs.size(); ++i) {
      if (plan.outputs[i].row != static_cast<int64_t>(i) || plan.segments[i].count != 1) return false;
    }
    return true;
  }

  void move_rows(const StepPlan& plan) {
    for (const std::vector<RowCopy>* list : {&plan.moves, &plan.copies}) {
      moves_.clear();
      for (const RowCopy& copy : *list) moves_.push_back({copy.from, copy.to, copy.rows});
      if (!moves_.empty()) arena_.move_all(moves_);
    }
  }

  // The arguments of sampling, into host tensors of DecodeInputs' types. Returns whether any row has a filter.
  static bool fill_sampling(const std::vector<SampleRow>& rows, int64_t* keys, float* parameters, int32_t* top_k) {
    bool filters = false;
    for (const SampleRow& row : rows) {
      *keys++ = static_cast<int64_t>(row.key.seed);
      *keys++ = static_cast<int64_t>(row.key.sample_id);
      *keys++ = static_cast<int64_t>(row.key.position);
      *parameters++ = static_cast<float>(row.options.temperature);
      *parameters++ = static_cast<float>(row.options.top_p);
      *parameters++ = static_cast<float>(row.options.min_p);
      *parameters++ = row.greedy ? 1.0f : 0.0f;
      *top_k++ = static_cast<int32_t>(row.options.top_k);
      filters = filters || row.options.filters();
    }
    return filters;
  }

  void decode(const StepRequest& request, Slot& slot) {
    const StepPlan& plan = *request.plan;
    const int64_t rows = plan.tokens, bucket = bucket_of(rows), runs = runs_of(rows);
    const DecodeInputs host(slot.upload.mutable_data_ptr(), bucket, runs, at::kCPU);
    int64_t* token = host.tokens.mutable_data_ptr<int64_t>();
    int64_t* position = host.positions.mutable_data_ptr<int64_t>();
    int64_t* token_row = host.token_rows.mutable_data_ptr<int64_t>();
    int32_t* run = host.runs.mutable_data_ptr<int32_t>();
    int32_t* item = host.items.mutable_data_ptr<int32_t>();
    int64_t* key = host.keys.mutable_data_ptr<int64_t>();
    float* parameter = host.parameters.mutable_data_ptr<float>();
    int32_t* top_k = host.top_k.mutable_data_ptr<int32_t>();
    for (int64_t i = 0; i < bucket; ++i) {
      const bool used = i < rows;  // other rows read and write the scratch row
      const Segment segment = used ? plan.segments[static_cast<size_t>(i)] : Segment{0, scratch_row_, 0, 1};
      token[i] = used ? request.tokens[static_cast<size_t>(i)] : 0;
      position[i] = segment.past;
      token_row[i] = segment.start + segment.past;
      if (i >= runs) continue;
      run[i] = static_cast<int32_t>(i);
      run[runs + i] = 1;
      run[2 * runs + i] = static_cast<int32_t>(segment.start);
      run[3 * runs + i] = static_cast<int32_t>(segment.past + 1);
      item[i] = static_cast<int32_t>(i);
      item[runs + i] = 0;
    }
    const bool filters = fill_sampling(request.rows, key, parameter, top_k);
    for (int64_t i = rows; i < bucket; ++i) {
      for (int64_t j = 0; j < 3; ++j) key[3 * i + j] = 0;
      const float plain[] = {1.0f, 1.0f, 0.0f, 1.0f};
      std::copy(plain, plain + 4, parameter + 4 * i);
      top_k[i] = 0;
    }
    C10_CUDA_CHECK(cudaMemcpyAsync(inputs_.mutable_data_ptr(), slot.upload.const_data_ptr(),
                                   static_cast<size_t>(host.bytes), cudaMemcpyHostToDevice, stream()));
    Graph& graph = graphs_[{bucket, runs, filters}];
    if (graph.captured) {
      graph.graph.replay();
      return;
    }
    // The first time everything runs eagerly: libraries choose algorithms and kernels are loaded outside of a capture.
    run_decode(bucket, runs, filters);
    capture(graph, bucket, runs, filters);
  }

  void run_decode(int64_t bucket, int64_t runs, bool filters) {
    const cuda::DecodeScope scope;
    const DecodeInputs in(inputs_.mutable_data_ptr(), bucket, runs, device_);
    cuda::resolve_tokens(in.tokens.const_data_ptr<int64_t>(), ids_.const_data_ptr<int64_t>(),
                         in.tokens.mutable_data_ptr<int64_t>(), bucket, stream());
    CachedBatch batch;
    batch.ids = in.tokens;
    batch.positions = in.positions;
    batch.plan.token_rows = in.token_rows;
    batch.plan.runs = in.runs;
    batch.plan.items = in.items;
    batch.plan.decode = true;
    sample(model_.forward_cached(batch, arena_), {in.keys, in.parameters, in.top_k, filters});
  }

  void sample(const at::Tensor& hidden, const DeviceSampling& sampling) {
    const DeviceSamples samples = sample_tokens_on_device(hidden, model_.head_weight(), sampling);
    ids_.narrow(0, 0, samples.ids.size(0)).copy_(samples.ids);
    logprobs_.narrow(0, 0, samples.logprobs.size(0)).copy_(samples.logprobs);
  }

  void capture(Graph& graph, int64_t bucket, int64_t runs, bool filters) {
    C10_CUDA_CHECK(cudaStreamSynchronize(stream()));
    const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index());
    const c10::cuda::CUDAStreamGuard guard(side);
    graph.graph.capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
    run_decode(bucket, runs, filters);
    graph.graph.capture_end();
    graph.captured = true;
    C10_CUDA_CHECK(cudaStreamSynchronize(side.stream()));
  }

  // A step with runs of several tokens.
  void mixed(const StepRequest& request) {
    const StepPlan& plan = *request.plan;
    const auto outputs = static_cast<int64_t>(plan.outputs.size());
    const at::Tensor input = pinned(2 * plan.tokens, at::kLong);
    int64_t* token = input.mutable_data_ptr<int64_t>();
    int64_t* position = token + plan.tokens;
    std::copy(request.tokens.begin(), request.tokens.end(), token);
    std::vector<CacheRow> runs;
    for (const Segment& segment : plan.segments) {
      for (int64_t i = 0; i < segment.count; ++i) *position++ = segment.past + i;
      runs.push_back({segment.start, segment.past, segment.count});
    }
    const at::Tensor on_device = input.to(device_, /*non_blocking=*/true);
    const at::Tensor ids = on_device.narrow(0, 0, plan.tokens);
    cuda::resolve_tokens(ids.const_data_ptr<int64_t>(), ids_.const_data_ptr<int64_t>(), ids.mutable_data_ptr<int64_t>(),
                         plan.tokens, stream());
    CachedBatch batch;
    batch.ids = ids;
    batch.positions = on_device.narrow(0, plan.tokens, plan.tokens);
    batch.plan = make_cache_plan(std::move(runs), group_, device_);
    const at::Tensor hidden = model_.forward_cached(batch, arena_);
    if (outputs == 0) return;
    const at::Tensor keys = pinned(3 * outputs, at::kLong), parameters = pinned(4 * outputs, at::kFloat),
                     top_k = pinned(outputs, at::kInt);
    const bool filters = fill_sampling(request.rows, keys.mutable_data_ptr<int64_t>(),
                                       parameters.mutable_data_ptr<float>(), top_k.mutable_data_ptr<int32_t>());
    const auto upload = [&](const at::Tensor& t, int64_t columns) {
      const at::Tensor moved = t.to(device_, /*non_blocking=*/true);
      return columns == 1 ? moved : moved.view({outputs, columns});
    };
    sample(output_rows(hidden, plan), {upload(keys, 3), upload(parameters, 4), upload(top_k, 1), filters});
  }

  const Model& model_;
  KvArena& arena_;
  const at::Device device_;
  const int64_t group_;
  const int64_t scratch_row_;
  const at::cuda::MempoolId_t pool_;  // shared: graphs run one after another, and their results leave it at once
  at::Tensor inputs_;                 // bytes of DecodeInputs
  at::Tensor ids_, logprobs_;         // [kMaxOutputs], of the last step
  Slot slots_[kSlots];
  int64_t next_slot_ = 0;
  std::deque<Slot*> pending_;
  std::map<std::tuple<int64_t, int64_t, bool>, Graph> graphs_;  // by rows, runs, filters
  std::vector<RowMove> moves_;
};

}  // namespace

std::unique_ptr<StepRunner> make_device_runner(const Model& model, KvArena& arena, int64_t max_rows) {
  return std::make_unique<DeviceRunner>(model, arena, max_rows);
}

int64_t device_available_bytes(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return static_cast<int64_t>(free) + stats.reserved_bytes[all].current - stats.allocated_bytes[all].current;
}

}  // namespace trireme
