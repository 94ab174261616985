// The runner for CUDA. Everything of a step is queued on the current stream; the host is one step ahead of the device.
//
// A pure decode step (one new token for each sequence) is a CUDA graph over fixed addresses: its first kernel fetches
// the inputs from a ring in host memory, its last writes ids and log-probs there (step_io.h). Steps that prefill run
// eagerly through the same functions, so that a row has the same bits on both ways.
//
// Of a model of several stages a graph has one piece of this rank's. Rows come in before it and leave behind it, by
// the devices themselves: a stage's device waits for the rows of a lane, its host for nobody but the lane's last step.
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
#include <optional>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/ops/cuda/attention/attention.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/sms.h"
#include "trainer/parallel/communicator.h"
#include "trainer/parallel/peer_exchange.h"
#include "trainer/parallel/stage_links.h"
#include "trainer/rollout/cuda/step_io.h"
#include "trainer/rollout/step_runner.h"

namespace trireme {
namespace {

// Most samples of a step that leaves a part of the device to others. There every product is our own kernel's, which is
// cut for the SMs it has (ops/cuda/gemm/linear.cpp).
constexpr int64_t kSharedRows = kSharedDeviceSamples;

// First tokens of a step's new groups: at most this many samples. Their buffers are 2 MB.
constexpr int64_t kMaxOutputs = int64_t{1} << 17;

// Rows of a graph: the work of padded rows costs less than a graph for every count. Where a row chooses experts a
// padded one may choose some that nobody else does, whose matrices are then read: few rows are not padded.
int64_t rows_of_graph(int64_t rows, bool experts) {
  const int64_t few = experts ? (rows <= 16 ? 1 : 8) : 16;
  const int64_t step = rows <= 64 ? few : rows <= 256 ? 32 : 64;
  return (rows + step - 1) / step * step;
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
    bytes = (at - static_cast<char*>(base) + 15) / 16 * 16;
  }
  // Of any number of runs; a multiple of 16.
  static int64_t bytes_for(int64_t rows) { return (rows * (6 * 8 + 4 * 4 + 4 * 4 + 2 * 4 + 4) + 15) / 16 * 16; }

  at::Tensor tokens, positions, token_rows;  // [rows]
  at::Tensor keys, parameters, top_k;        // DeviceSampling
  at::Tensor runs, items;                    // CachePlan
  int64_t bytes = 0;
};

class DeviceRunner final : public StepRunner {
 public:
  DeviceRunner(const Model& model, KvArena& arena, int64_t max_rows, int64_t lanes,
               std::shared_ptr<const DevicePartition> partition)
      : model_(model),
        arena_(arena),
        links_(model.options().links),
        pieces_(static_cast<int64_t>(model.split().layers.size())),
        lanes_(static_cast<size_t>(lanes)),
        slots_(lanes_.size() + 2),
        partition_(std::move(partition)),
        device_(model.options().device),
        group_(model.local().heads / model.local().kv_heads),
        max_rows_(max_rows),
        experts_(model.local().experts > 0),
        peers_(model.split().tp > 1 ? model.options().tensor->peers(device_) : nullptr),
        expert_peers_(model.options().experts != nullptr ? model.options().experts->peers(device_) : nullptr),
        room_(cuda::decode_room(device_, model.local().heads, model.local().kv_heads,
                                model.local().head_dim)),  // of the whole device
        pool_(at::cuda::graph_pool_handle()),
        capture_stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index())),
        results_stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index())) {
    const c10::cuda::CUDAGuard guard(device_);
    const auto on_device = at::TensorOptions().device(device_);
    inputs_ = at::empty({DecodeInputs::bytes_for(bucket_of(max_rows))}, on_device.dtype(at::kByte));
    ids_ = at::zeros({kMaxOutputs * (embeds() ? lanes : 1)}, on_device.dtype(at::kLong));
    logprobs_ = at::zeros({kMaxOutputs}, on_device.dtype(at::kFloat));
    begun_ = at::zeros({1}, on_device.dtype(at::kLong));
    if (links_ != nullptr) residual_in_ = model.make_residual(bucket_of(max_rows)).zero_();
    if (links_ != nullptr) residual_out_ = at::zeros_like(residual_in_);
    uploads_ = pinned(places() * static_cast<int64_t>(inputs_.nbytes()), at::kByte);
    ring_.input_stride = static_cast<int64_t>(inputs_.nbytes());
    ring_.result_rows = (bucket_of(max_rows) + 15) / 16 * 16;  // the places' ids begin at whole numbers
    downloads_ = pinned(places() * result_bytes(), at::kByte);
    ring_.inputs = device_address(uploads_);
    ring_.results = device_address(downloads_);
    ring_.slots = static_cast<int>(places());
    ring_.begun = begun_.mutable_data_ptr<int64_t>();
    for (Slot& slot : slots_) {
      slot.results = pinned(kMaxOutputs * kResultBytes, at::kByte);
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming));
    }
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&turn_, cudaEventDisableTiming));
    idle_.resize(static_cast<size_t>(places()));
    for (IdleStep& step : idle_) C10_CUDA_CHECK(cudaEventCreateWithFlags(&step.done, cudaEventDisableTiming));
    if (!model_.graphs_allowed(bucket_of(max_rows)) && expert_peers_ != nullptr)  // all ranks are here
      log_info("rollout", "decode steps of up to " + std::to_string(max_rows) +
                              " samples a rank have no graphs where " +
                              "the ranks that share experts choose more than our grouped kernel takes");
    last_ = stream();
    if (partition_ != nullptr) prepare_shared(std::min(kSharedRows, max_rows));
  }

  ~DeviceRunner() override {
    // Kernels of a step that failed half way may still read the pinned ring.
    (void)cudaStreamSynchronize(last_);
    (void)cudaEventDestroy(turn_);
    for (IdleStep& step : idle_) (void)cudaEventDestroy(step.done);
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
    TRIREME_CHECK(pending_.size() + 1 < slots_.size(),
                  "a step was started before the results of earlier ones were taken");
    std::optional<PartitionScope> part;
    if (shared_ && plan.tokens <= kSharedRows && is_decode(plan))
      part.emplace(*partition_, PartitionScope::Part::kForeground);
    take_turn();
    move_rows(plan);
    Lane& lane = lanes_.at(static_cast<size_t>(request.lane));
    lane.together = agree(plan.tokens, is_decode(plan));
    // With late stops the lane's last step was not taken yet: it is the oldest.
    if (embeds() && links_ != nullptr && !pending_.empty() && pending_.front()->lane == &lane)
      receive(*pending_.front());
    Slot& slot = slots_[next_slot_];
    next_slot_ = (next_slot_ + 1) % slots_.size();
    slot.rows = static_cast<int64_t>(plan.outputs.size());
    slot.lane = &lane;
    slot.known = false;
    lane.step = &slot;
    lane.piece = 0;
    if (pieces_ > 1) {
      lane.plan = plan;
      lane.request = request;
      lane.request.plan = &lane.plan;
    }
    pending_.push_back(&slot);
    run_piece(request, lane);
  }

  void start_without_rows(int64_t index) override {
    const c10::cuda::CUDAGuard guard(device_);
    take_turn();
    Lane& lane = lanes_.at(static_cast<size_t>(index));
    lane.together = agree(0, /*decode=*/true);
    lane.step = nullptr;
    lane.piece = 0;
    run_without_rows(lane);
  }

  void proceed(int64_t lane) override {
    const c10::cuda::CUDAGuard guard(device_);
    take_turn();
    Lane& own = lanes_.at(static_cast<size_t>(lane));
    own.step == nullptr ? run_without_rows(own) : run_piece(own.request, own);
  }

  void warm_up(int64_t prefill_tokens, const SampleRow& like) override {
    const c10::cuda::CUDAGuard guard(device_);
    TRIREME_CHECK(pending_.empty(), "steps are under way");
    take_turn();
    const int64_t rows = arena_.rows() - kDeviceScratchRows;
    StepPlan plan;
    plan.segments.push_back({0, 0, 0, std::min(prefill_tokens, rows)});
    for (int64_t row = plan.segments.front().count; row < std::min(rows, plan.segments.front().count + max_rows_);
         ++row)
      plan.segments.push_back({row, row, 0, 1});
    for (const Segment& segment : plan.segments) plan.tokens += segment.count;
    for (int64_t row = 0; row < std::min(plan.tokens, kMaxOutputs); ++row) plan.outputs.push_back({0, row, 0});
    StepRequest request;
    request.plan = &plan;
    request.tokens.assign(static_cast<size_t>(plan.tokens), 0);
    request.rows.assign(plan.outputs.size(), like);
    for (int64_t piece = 0; piece < pieces_; ++piece) {  // with rows of zeros where another stage makes them
      const at::Tensor in = model_.split().begins(piece) ? at::Tensor() : model_.make_residual(plan.tokens).zero_();
      mixed(request, piece, in);
    }
    C10_CUDA_CHECK(cudaStreamSynchronize(stream()));
    const int64_t before = device_memory(device_).tensors + device_memory(device_).cached;
    const size_t graphs = graphs_.size();
    // Of all rows: there may be fewer lanes than wanted, which have more each.
    prepare_graphs(max_rows_, like.options.filters(), /*shared=*/false);
    if (graphs_.size() == graphs) return;
    const int64_t bytes = device_memory(device_).tensors + device_memory(device_).cached - before;
    log_info("rollout", std::to_string(graphs_.size() - graphs) + " graphs of decode steps of up to " +
                            std::to_string(max_rows_) + " samples hold " +
                            format_bytes(static_cast<uint64_t>(std::max<int64_t>(0, bytes))) + " of device memory");
  }

  void share_device(bool on) override {
    shared_ = on && partition_ != nullptr;
    if (shared_) return;
    const c10::cuda::CUDAGuard guard(device_);
    take_turn();  // whoever uses the current stream next comes after the last step
  }

  SampleResult take() override {
    TRIREME_CHECK(!pending_.empty(), "no step was started");
    Slot& slot = *pending_.front();
    if (links_ != nullptr && !model_.split().last_stage()) {
      const c10::cuda::CUDAGuard guard(device_);
      receive(slot);
      pass_on(slot);
    }
    pending_.pop_front();
    C10_CUDA_CHECK(cudaEventSynchronize(slot.done));
    for (const PeerExchange* peers : {peers_, expert_peers_})
      if (peers != nullptr) peers->throw_if_absent();
    if (pending_.empty()) {  // the lines are somebody else's until the next step
      for (Lane& lane : lanes_) {
        lane.sent.wait();
        lane.passed_on.wait();
      }
    }
    SampleResult result{{slot.id, slot.id + slot.rows}, {slot.logprob, slot.logprob + slot.rows}};
    for (int64_t row = 0; row < slot.rows; ++row) {
      if (!(slot.logprob[row] == slot.logprob[row])) throw LogitsError(row);
    }
    return result;
  }

 private:
  struct Lane;
  struct Slot {
    at::Tensor results;           // pinned: ids, then log-probs, of a step that is not a graph of the last stage
    const int64_t* id = nullptr;  // the results, wherever they are
    const float* logprob = nullptr;
    int64_t rows = 0;
    cudaEvent_t done = nullptr;
    Lane* lane = nullptr;
    bool known = false;  // the results are here, or on their way from the own device
    at::Tensor packed;   // on the device: results of another stage, as they travel
  };
  // What the ranks that step together have agreed on; alone the own step.
  struct Together {
    int64_t rows = 0;     // of the rank that has most
    bool decode = false;  // nobody has runs of several tokens
  };
  struct Lane {
    Slot* step = nullptr;    // its last one; null: it has no rows
    Together together;       // of it: other lanes' steps begin before its next piece
    int64_t piece = 0;       // that comes next
    StepPlan plan;           // of `step`, where more than one piece needs them
    StepRequest request;     //
    PendingCollective sent;  // to the next stage: rows, or what was sampled
    PendingCollective passed_on;
    at::Tensor in_flight;  // what `sent` sends
  };
  static constexpr int64_t kResultBytes = sizeof(int64_t) + sizeof(float);  // of a row

  // Decode steps whose uploads or results may be under way at once: of each lane the one running, of one the one before
  // it too, and the next. Each piece has its own.
  int64_t places() const { return static_cast<int64_t>(slots_.size()) * pieces_; }
  // The first stage, or the only one.
  bool embeds() const { return links_ == nullptr || links_->stage() == 0; }
  // Of the token that output i of the lane's last step samples, in ids_ of the stage that embeds it.
  int64_t place_of_ids(const Lane& lane) const { return embeds() ? kMaxOutputs * (&lane - lanes_.data()) : 0; }
  int64_t bucket_of(int64_t rows) const { return rows_of_graph(rows, experts_); }
  // Runs of attention in it: products want 16 rows, attention gives few samples more of the chip each, and one sample
  // more may be one too many for the larger share.
  int64_t runs_of(int64_t rows) const { return rows <= 16 ? rows : bucket_of(rows); }

  using Graph = std::unique_ptr<at::cuda::CUDAGraph>;

  // A decode step without rows of its own, whose results nobody takes: whether its place is free the device says.
  struct IdleStep {
    cudaEvent_t done = nullptr;
    bool under_way = false;
  };

  struct Keys {  // of a decode step; 0: not known
    int64_t longest = 0, total = 0;
  };
  // What a graph of a decode step is for.
  struct DecodeShape {
    int64_t piece = 0, bucket = 0, runs = 0;
    bool filters = false;
    Keys keys;
  };

  static at::Tensor pinned(int64_t elements, at::ScalarType type) {
    return at::empty({elements}, at::TensorOptions().dtype(type).pinned_memory(true));
  }
  static void* device_address(const at::Tensor& pinned) {
    void* address = nullptr;
    C10_CUDA_CHECK(cudaHostGetDevicePointer(&address, pinned.data_ptr(), 0));
    return address;
  }
  int64_t result_bytes() const { return ring_.result_rows * static_cast<int64_t>(sizeof(int64_t) + sizeof(float)); }
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }

  // The current stream goes on where the one before it, which steps were queued on, ends.
  void take_turn() {
    const cudaStream_t now = stream();
    if (now == last_) return;
    C10_CUDA_CHECK(cudaEventRecord(turn_, last_));
    C10_CUDA_CHECK(cudaStreamWaitEvent(now, turn_, 0));
    last_ = now;
  }

  // The foreground's graphs, while nobody else computes: plans of products are found by trial.
  void prepare_shared(int64_t most_rows) {
    {
      const PartitionScope part(*partition_, PartitionScope::Part::kForeground);
      take_turn();
      prepare_graphs(most_rows, /*filters=*/false, /*shared=*/true);
      C10_CUDA_CHECK(cudaStreamSynchronize(stream()));
    }
    take_turn();
  }

  // Those of 1 to `most_rows` sequences, the largest first: the others' memory is a part of its.
  void prepare_graphs(int64_t most_rows, bool filters, bool shared) {
    for (int64_t piece = 0; piece < pieces_; ++piece) {
      for (int64_t rows = most_rows; rows > 0; --rows) {
        const DecodeShape shape{piece, bucket_of(rows), runs_of(rows), filters, {}};
        if (!model_.graphs_allowed(shape.bucket)) continue;
        Graph& graph = graph_of(shape, shared);
        if (graph) continue;
        const int64_t place = next_place();
        (void)fill(StepRequest(), DecodeInputs(upload_of(place), shape.bucket, shape.runs, at::kCPU), 0, shape);
        queue([&] { run_decode(shape); });
        graph = capture(shape, shared);  // waits: the place is free again
      }
    }
  }

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

  // The slot's results are in its pinned memory when the current stream has come this far.
  void place_results(Slot& slot) {
    slot.id = reinterpret_cast<const int64_t*>(slot.results.const_data_ptr());
    slot.logprob = reinterpret_cast<const float*>(slot.id + slot.rows);
  }
  at::Tensor pinned_bytes(const Slot& slot, int64_t first, int64_t count) const {
    return slot.results.narrow(0, first, count);
  }
  static at::Tensor bytes(const at::Tensor& values, int64_t rows) { return values.narrow(0, 0, rows).view(at::kByte); }

  void fetch(Slot& slot) {
    place_results(slot);
    const auto ids = static_cast<int64_t>(sizeof(int64_t)) * slot.rows;
    if (slot.rows == 0) return;
    pinned_bytes(slot, 0, ids).copy_(bytes(ids_, slot.rows), /*non_blocking=*/true);
    pinned_bytes(slot, ids, kResultBytes * slot.rows - ids).copy_(bytes(logprobs_, slot.rows), /*non_blocking=*/true);
  }

  // The lane's next piece on this stage: rows from the stage before, through the layers, to the next stage; behind the
  // model's last piece it samples.
  void run_piece(const StepRequest& request, Lane& lane) {
    const ModelSplit& split = model_.split();
    const int64_t piece = lane.piece++;
    const bool decoding = lane.together.decode, last = split.ends(piece);
    Slot& slot = *lane.step;
    at::Tensor out;
    if (decoding) {
      out = decode(request, lane, piece);
    } else {
      at::Tensor in;
      if (!split.begins(piece)) in = received(model_.make_residual(request.plan->tokens));
      out = mixed(request, piece, in);
      if (last) fetch(slot);
    }
    if (!last) return send(lane, out);
    slot.known = true;
    C10_CUDA_CHECK(cudaEventRecord(slot.done, stream()));
    if (links_ != nullptr && slot.rows > 0) send(lane, at::cat({bytes(ids_, slot.rows), bytes(logprobs_, slot.rows)}));
  }

  // The lane's next piece where only others have rows. The stages of this replica know that nothing comes: nothing is
  // received, sent or sampled.
  void run_without_rows(Lane& lane) {
    const int64_t piece = lane.piece++;
    if (lane.together.rows == 0) return;
    if (!lane.together.decode) {
      CachedBatch nothing;
      nothing.ids = nothing.positions = at::empty({0}, ids_.options());
      (void)model_.forward_cached_piece(piece, nothing, arena_, {});
      return;
    }
    const DecodeShape shape = decode_shape(lane, piece);
    const int64_t place = next_place();
    (void)fill(StepRequest(), DecodeInputs(upload_of(place), shape.bucket, shape.runs, at::kCPU), 0, shape);
    // Rows of an earlier step would choose experts that nobody else does.
    if (!model_.split().begins(piece)) of_bucket(residual_in_, shape).zero_();
    replay(shape);
    IdleStep& step = idle_[static_cast<size_t>(place)];
    step.under_way = true;
    C10_CUDA_CHECK(cudaEventRecord(step.done, stream()));
  }

  at::Tensor received(at::Tensor rows) {
    links_->begin_receive(rows, /*backward=*/false).wait();
    return rows;
  }

  // What the lane sent a round ago was received long since: nothing waits.
  void send(Lane& lane, at::Tensor tensor) {
    lane.sent.wait();
    lane.in_flight = std::move(tensor);
    lane.sent = links_->begin_send(lane.in_flight, /*backward=*/false);
  }

  // What a step has sampled comes to the first stage from the last, to the others from the one before. The first one
  // embeds it in what it computes next; the others' hosts need not wait for that.
  void receive(Slot& slot) {
    if (slot.known) return;
    slot.known = true;
    place_results(slot);
    std::optional<c10::cuda::CUDAStreamGuard> beside;
    if (!embeds()) beside.emplace(results_stream_);
    if (slot.rows > 0) {
      const auto ids = static_cast<int64_t>(sizeof(int64_t)) * slot.rows;
      slot.packed = received(at::empty({kResultBytes * slot.rows}, inputs_.options()));
      if (embeds())
        ids_.narrow(0, place_of_ids(*slot.lane), slot.rows).view(at::kByte).copy_(slot.packed.narrow(0, 0, ids));
      pinned_bytes(slot, 0, kResultBytes * slot.rows).copy_(slot.packed, /*non_blocking=*/true);
    }
    C10_CUDA_CHECK(cudaEventRecord(slot.done, stream()));
  }

  // To the next stage, where that is not the one that has sampled.
  void pass_on(Slot& slot) {
    if (slot.rows == 0 || links_->stage() + 2 >= links_->stages()) return;
    std::optional<c10::cuda::CUDAStreamGuard> beside;
    if (!embeds()) beside.emplace(results_stream_);
    slot.lane->passed_on.wait();
    slot.lane->passed_on = links_->begin_send(slot.packed, /*backward=*/false);
  }

  // This rank's part of the bucket's rows.
  at::Tensor of_bucket(const at::Tensor& residual, const DecodeShape& shape) const {
    return residual.narrow(0, 0, model_.residual_rows(shape.bucket));
  }

  Graph& graph_of(const DecodeShape& shape, bool shared) {
    return graphs_[{shape.piece, shape.bucket, shape.runs, shape.filters, shared, kernel_for(shape.runs, shape.keys)}];
  }

  // Rows for the next stage; of the model's last piece nothing, the results are the slot's.
  at::Tensor decode(const StepRequest& request, const Lane& lane, int64_t piece) {
    const StepPlan& plan = *request.plan;
    const int64_t rows = plan.tokens;
    DecodeShape shape = decode_shape(lane, piece);
    const int64_t place = next_place();
    const DecodeInputs host(upload_of(place), shape.bucket, shape.runs, at::kCPU);
    shape.filters = fill(request, host, rows, shape);
    for (const Segment& segment : plan.segments) {
      shape.keys.longest = std::max(shape.keys.longest, segment.past + 1);
      shape.keys.total += segment.past + 1;
    }
    const ModelSplit& split = model_.split();
    if (!split.begins(piece)) (void)received(of_bucket(residual_in_, shape));
    replay(shape);
    if (!split.ends(piece)) return of_bucket(residual_out_, shape).clone();
    char* results = static_cast<char*>(downloads_.mutable_data_ptr()) + place * result_bytes();
    Slot& slot = *lane.step;
    slot.id = reinterpret_cast<const int64_t*>(results);
    slot.logprob = reinterpret_cast<const float*>(slot.id + ring_.result_rows);
    return {};
  }

  DecodeShape decode_shape(const Lane& lane, int64_t piece) const {
    return {piece, bucket_of(lane.together.rows), runs_of(lane.together.rows), false, {}};
  }

  // Free: a step with results that used it last was taken before the next one is started.
  int64_t next_place() {
    const int64_t place = decode_steps_++ % places();
    IdleStep& step = idle_[static_cast<size_t>(place)];
    if (std::exchange(step.under_way, false)) C10_CUDA_CHECK(cudaEventSynchronize(step.done));
    return place;
  }

  // Engines over split experts step together: the exchanges of a step are the same on all ranks, whatever their rows.
  Together agree(int64_t rows, bool decode) const {
    Communicator* ranks = model_.options().steps;
    if (ranks == nullptr) return {rows, decode};
    const at::Tensor numbers = at::tensor({rows, int64_t{decode ? 0 : 1}}, at::kLong);
    ranks->all_reduce_max(numbers);
    return {numbers[0].item<int64_t>(), numbers[1].item<int64_t>() == 0};
  }

  void replay(const DecodeShape& shape) {
    if (!model_.graphs_allowed(shape.bucket)) return run_decode(shape);
    const bool shared = partition_ != nullptr && sm_limit() > 0;
    Graph& graph = graph_of(shape, shared);
    if (graph) {
      queue([&] { graph->replay(); });
      return;
    }
    // The first time everything runs eagerly: libraries choose algorithms and kernels are loaded outside of a capture.
    queue([&] { run_decode(shape); });
    graph = capture(shape, shared);
  }

  // A decode step with its exchanges, if it has some, as one collective of each group that makes them: whether a rank
  // replays a graph or runs eagerly is its own matter.
  void queue(const std::function<void()>& step) {
    const auto of_experts = [&] {
      if (expert_peers_ == nullptr) return step();
      model_.options().experts->queue("decode step", step);
    };
    if (peers_ == nullptr) return of_experts();
    model_.options().tensor->queue("decode step", of_experts);
  }

  void* upload_of(int64_t place) const {
    return static_cast<char*>(uploads_.mutable_data_ptr()) + place * ring_.input_stride;
  }

  // Inputs of `rows` sequences; the other rows of the bucket read and write the scratch row. Returns whether any of
  // them has a filter.
  bool fill(const StepRequest& request, const DecodeInputs& host, int64_t rows, const DecodeShape& shape) const {
    const int64_t bucket = shape.bucket, runs = shape.runs;
    int64_t* token = host.tokens.mutable_data_ptr<int64_t>();
    int64_t* position = host.positions.mutable_data_ptr<int64_t>();
    int64_t* token_row = host.token_rows.mutable_data_ptr<int64_t>();
    int32_t* run = host.runs.mutable_data_ptr<int32_t>();
    int32_t* item = host.items.mutable_data_ptr<int32_t>();
    int64_t* key = host.keys.mutable_data_ptr<int64_t>();
    float* parameter = host.parameters.mutable_data_ptr<float>();
    int32_t* top_k = host.top_k.mutable_data_ptr<int32_t>();
    const int64_t scratch_row = arena_.rows() - kDeviceScratchRows;
    for (int64_t i = 0; i < bucket; ++i) {
      const bool used = i < rows;
      const Segment segment = used ? request.plan->segments[static_cast<size_t>(i)] : Segment{0, scratch_row, 0, 1};
      token[i] = used ? embedded(request, request.tokens[static_cast<size_t>(i)]) : 0;
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
    return filters;
  }

  // A token of the request, as this rank's embedding finds it; nothing where others embed.
  int64_t embedded(const StepRequest& request, int64_t token) const {
    if (token >= 0) return token;
    return embeds() ? token - place_of_ids(lanes_[static_cast<size_t>(request.lane)]) : 0;
  }

  // The kernel of attention that a step's lengths ask for, and its graph is captured with.
  DecodeKernel kernel_for(int64_t runs, const Keys& keys) const {
    const DecodeRoom room = sm_limit() > 0 ? room_.of(sm_limit()) : room_;
    return choose_decode_kernel({runs, model_.local().kv_heads, keys.longest, keys.total}, room);
  }

  void run_decode(const DecodeShape& shape) {
    const int64_t bucket = shape.bucket, runs = shape.runs;
    const cuda::DecodeScope scope;
    const DecodeInputs in(inputs_.mutable_data_ptr(), bucket, runs, device_);
    cuda::begin_decode_step(ring_, inputs_.mutable_data_ptr(), in.bytes, ids_.const_data_ptr<int64_t>(), bucket,
                            stream());
    CachedBatch batch;
    batch.ids = in.tokens;
    batch.positions = in.positions;
    batch.plan.token_rows = in.token_rows;
    batch.plan.runs = in.runs;
    batch.plan.items = in.items;
    batch.plan.decode = true;
    batch.plan.longest_keys = shape.keys.longest;
    batch.plan.total_keys = shape.keys.total;
    batch.alike = true;
    const ModelSplit& split = model_.split();
    const at::Tensor rows = split.begins(shape.piece) ? at::Tensor() : of_bucket(residual_in_, shape);
    const at::Tensor out = model_.forward_cached_piece(shape.piece, batch, arena_, rows);
    if (!split.ends(shape.piece)) {
      of_bucket(residual_out_, shape).copy_(out);
      return;
    }
    const DeviceSamples samples = model_.sample_on_device(out, {in.keys, in.parameters, in.top_k, shape.filters});
    if (links_ != nullptr) logprobs_.narrow(0, 0, bucket).copy_(samples.logprobs);
    cuda::finish_decode_step(ring_, samples.ids.const_data_ptr<int64_t>(), samples.logprobs.const_data_ptr<float>(),
                             ids_.mutable_data_ptr<int64_t>(), bucket, stream());
    C10_CUDA_CHECK(cudaGetLastError());
  }

  // Kernels of a graph run on the SMs of the stream that it was captured on. All graphs are captured on one
  // stream (those of a part of the device on that part's): the allocator gives what one of them used to the next only
  // there.
  Graph capture(const DecodeShape& shape, bool shared) {
    C10_CUDA_CHECK(cudaStreamSynchronize(stream()));
    const c10::cuda::CUDAStream side = shared ? c10::cuda::getCurrentCUDAStream(device_.index()) : capture_stream_;
    const c10::cuda::CUDAStreamGuard guard(side);
    auto graph = std::make_unique<at::cuda::CUDAGraph>();
    graph->capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
    run_decode(shape);
    graph->capture_end();
    C10_CUDA_CHECK(cudaStreamSynchronize(side.stream()));
    return graph;
  }

  // A piece of a step with runs of several tokens, `in` from the stage before. Rows for the next stage; of the model's
  // last piece nothing, what it samples is in ids_ and logprobs_.
  at::Tensor mixed(const StepRequest& request, int64_t piece, const at::Tensor& in) {
    const StepPlan& plan = *request.plan;
    const auto outputs = static_cast<int64_t>(plan.outputs.size());
    const at::Tensor input = pinned(2 * plan.tokens, at::kLong);
    int64_t* token = input.mutable_data_ptr<int64_t>();
    int64_t* position = token + plan.tokens;
    for (const int64_t each : request.tokens) *token++ = embedded(request, each);
    std::vector<CacheRun> runs;
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
    const at::Tensor hidden = model_.forward_cached_piece(piece, batch, arena_, in);
    if (!model_.split().ends(piece)) return hidden;
    if (outputs == 0) return {};
    const at::Tensor keys = pinned(3 * outputs, at::kLong), parameters = pinned(4 * outputs, at::kFloat),
                     top_k = pinned(outputs, at::kInt);
    const bool filters = fill_sampling(request.rows, keys.mutable_data_ptr<int64_t>(),
                                       parameters.mutable_data_ptr<float>(), top_k.mutable_data_ptr<int32_t>());
    const auto upload = [&](const at::Tensor& t, int64_t columns) {
      const at::Tensor moved = t.to(device_, /*non_blocking=*/true);
      return columns == 1 ? moved : moved.view({outputs, columns});
    };
    const DeviceSamples samples = model_.sample_on_device(
        output_rows(hidden, plan), {upload(keys, 3), upload(parameters, 4), upload(top_k, 1), filters});
    ids_.narrow(0, 0, outputs).copy_(samples.ids);
    logprobs_.narrow(0, 0, outputs).copy_(samples.logprobs);
    return {};
  }

  const Model& model_;
  KvArena& arena_;
  StageLinks* const links_;  // null: the model has one stage
  const int64_t pieces_;     // of this stage
  std::vector<Lane> lanes_;
  std::vector<Slot> slots_;
  size_t next_slot_ = 0;
  const std::shared_ptr<const DevicePartition> partition_;  // or null
  const at::Device device_;
  const int64_t group_;
  const int64_t max_rows_;
  const bool experts_;                      // the model has some
  const PeerExchange* const peers_;         // of the tensor ranks, or null
  const PeerExchange* const expert_peers_;  // of those that share experts, or null
  const DecodeRoom room_;
  const at::cuda::MempoolId_t pool_;  // shared: graphs run one after another, and their results leave it at once
  const c10::cuda::CUDAStream capture_stream_;
  const c10::cuda::CUDAStream results_stream_;  // results of other stages on their way to the host
  at::Tensor inputs_;                           // bytes of DecodeInputs
  at::Tensor residual_in_, residual_out_;       // of bucket_of(max_rows) tokens: rows of a graph that is a piece
  at::Tensor ids_;                  // [kMaxOutputs], of the last step; on the first stage of several, of every lane's
  at::Tensor logprobs_;             // [kMaxOutputs], of the last step, if it is none of a graph or of several stages
  at::Tensor uploads_, downloads_;  // pinned, places() each: inputs and results of decode steps
  at::Tensor begun_;                // decode steps that the device began
  cuda::StepRing ring_;
  std::vector<IdleStep> idle_;  // of each place
  int64_t decode_steps_ = 0;    // pieces of them that the host started
  std::deque<Slot*> pending_;
  // By piece, rows, runs, filters, whether shared, kernel of attention.
  std::map<std::tuple<int64_t, int64_t, int64_t, bool, bool, DecodeKernel>, Graph> graphs_;
  bool shared_ = false;
  cudaStream_t last_ = nullptr;  // that a step was queued on
  cudaEvent_t turn_ = nullptr;
  std::vector<RowMove> moves_;
};

}  // namespace

std::unique_ptr<StepRunner> make_device_runner(const Model& model, KvArena& arena, int64_t max_rows, int64_t lanes,
                                               std::shared_ptr<const DevicePartition> partition) {
  return std::make_unique<DeviceRunner>(model, arena, max_rows, lanes, std::move(partition));
}

DeviceMemory device_memory(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
  const auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const int64_t tensors = stats.allocated_bytes[all].current;
  return {static_cast<int64_t>(total), static_cast<int64_t>(free), tensors,
          stats.reserved_bytes[all].current - tensors};
}

void empty_device_cache(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  c10::cuda::CUDACachingAllocator::emptyCache();
}

}  // namespace trireme
