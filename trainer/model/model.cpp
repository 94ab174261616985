#include "trainer/model/model.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "base/error.h"
#include "topology/combine_blocks.h"
#include "trainer/model/context_rows.h"
#include "trainer/model/recomputation.h"
#include "trainer/model/split_experts.h"
#include "trainer/model/split_linear.h"
#include "trainer/ops/cuda_ops.h"
#include "trainer/ops/experts.h"
#include "trainer/ops/router_watch.h"
#include "trainer/parallel/context.h"
#include "trainer/parallel/exchange.h"
#include "trainer/parallel/stage_links.h"

namespace trireme {

// The weights of products that share their input lie one after another in the flat buffer and are used as one matrix:
// `qkv` and `gate_up` are leaves of their own over the memory of the named parameters.
struct Model::Layer {
  int64_t number = 0;  // in the model
  at::Tensor input_norm, post_norm;
  at::Tensor qkv, o;            // [(q_heads + 2 kv_heads) * head_dim, hidden], [hidden, q_heads * head_dim]
  at::Tensor qkv_bias, o_bias;  // undefined: none
  at::Tensor q_norm, k_norm;    // undefined: none
  at::Tensor gate_up, down;     // [2 * intermediate, hidden], [hidden, intermediate]
  at::Tensor gate_up_bias, down_bias;
  ExpertWeights experts;  // undefined: the layer has a dense MLP
};

// What differs between packed and cached passes: rotation table and where keys live.
struct Model::Context {
  at::Tensor rope;                            // [positions, 2, head_dim / 2]
  at::Tensor positions;                       // [tokens]
  std::vector<int64_t> starts;                // packed
  std::vector<int64_t> prefix;                // packed; empty: nothing is shared
  std::shared_ptr<const ContextRows> pieces;  // packed, a context parallel rank's part
  std::shared_ptr<const std::vector<SequenceName>> names;
  const CachedBatch* cached = nullptr;
  KvArena* arena = nullptr;
  int64_t tokens = 0;
  int64_t tp = 1;
  std::shared_ptr<const WatchedRows> watched;  // packed, where routers are watched

  // Which rows of the residual stream a tensor rank has.
  bool whole_rows() const { return tp > 1 && arena != nullptr; }
  bool sharded_rows() const { return tp > 1 && arena == nullptr; }
};

// What backward computes again of a layer.
struct Model::Again {
  bool layer = false;  // everything
  bool norms = false, swiglu = false, experts = false;
};

namespace {

std::string layer_name(int64_t index) { return "model.layers." + std::to_string(index) + "."; }

}  // namespace

PackedBatch PackedBatch::from_sequences(const std::vector<std::vector<int32_t>>& sequences) {
  PackedBatch batch;
  batch.starts.push_back(0);
  for (const auto& sequence : sequences)
    batch.starts.push_back(batch.starts.back() + static_cast<int64_t>(sequence.size()));
  batch.ids = at::empty({batch.starts.back()}, at::kLong);
  batch.positions = at::empty({batch.starts.back()}, at::kLong);
  auto* id = batch.ids.mutable_data_ptr<int64_t>();
  auto* position = batch.positions.mutable_data_ptr<int64_t>();
  for (const auto& sequence : sequences) {
    for (size_t i = 0; i < sequence.size(); ++i) {
      *id++ = sequence[i];
      *position++ = static_cast<int64_t>(i);
    }
  }
  return batch;
}

void set_split(ModelOptions& options, const ModelShape& shape, ParallelContext& ranks, const StageOptions& stages) {
  if (shape.experts > 0) ranks.make_expert_groups();
  if (ranks.layout().cp > 1) options.context = &ranks.group(Axis::kCp);
  if (ranks.holders().size() == 1) return;
  options.split = model_split(shape, ranks.layout(), ranks.rank(), stages);
  options.tensor = &ranks.tensor_parallel();
  options.links = ranks.stage_links();
  if (options.split->ep * options.split->etp == 1) return;
  options.experts = &ranks.group(Axis::kEtpEp);
  options.passes = &ranks.group(Axis::kPasses);
  options.steps = &ranks.group(Axis::kCopy);
}

Model::Model(const ModelConfig& config, const ModelOptions& options) : config_(config), options_(options) {
  if (options.device.is_cpu() && options.dtype != at::kFloat && options.dtype != at::kBFloat16 &&
      options.dtype != at::kDouble) {
    fail_user("a model on cpu computes in float32, bfloat16 or float64, not " + dtype_name(options.dtype));
  }
  if (!options.trainable) options_.sharding.gradients = false;
  if (!options.trainable || options.sharding.gradients) options_.lends_gradients = false;
  split_ = options.split ? *options.split : whole_model(config);
  local_ = local_shape(config.shape(), split_);
  options_.pad_widths = options_.pad_widths || options_.device.is_cuda();
  if (options_.pad_widths) {
    local_.hidden = padded_width(local_.hidden);
    local_.intermediate = padded_width(local_.intermediate);
  }
  TRIREME_CHECK(config.num_experts == 0 || counted() == 0, "experts have kernels for hidden sizes of their own");
  TRIREME_CHECK(split_.pp == (options.links == nullptr ? 1 : options.links->stages()),
                "a model of several pipeline stages needs the links between them");
  TRIREME_CHECK(split_.tp == (options.tensor == nullptr ? 1 : options.tensor->size()),
                "a model split over tensor ranks needs their group");
  TRIREME_CHECK(split_.ep * split_.etp == (options.experts == nullptr ? 1 : options.experts->size()),
                "a model whose experts are split needs their group");
  TRIREME_CHECK((options.experts != nullptr) == (options.passes != nullptr) &&
                    (options.experts != nullptr) == (options.steps != nullptr),
                "a model whose experts are split needs the groups that make passes and steps together");
  TRIREME_CHECK(split_.pp == 1 || !options_.sharding.any(), "pipeline stages share no weights and gradients");
  if (options.links != nullptr) options.links->connect(options.device);
  if (options.device.is_cuda() && split_.layers.size() > 1 && !options.links->over_memory()) {
    fail_user(
        "virtual pipeline stages need GPUs that see each other's memory, as those of one host over NVLink: between "
        "these NCCL's kernels would wait for each other; set policy.megatron_cfg."
        "virtual_pipeline_model_parallel_size to 1");
  }
  if (options.checkpoint_activations) recompute_.whole_layers = config.num_layers;
  allocate_parameters();
  bind_layers();
  if (split_.tp > 1) share_head();
}

Model::~Model() = default;

void Model::allocate_parameters() {
  ParameterLayout layout = parameter_layout(config_, split_, options_.freeze_router, options_.pad_widths);
  const int64_t total = layout.elements + layout.frozen_elements;
  trained_elements_ = layout.elements;
  alike_elements_ = layout.alike_elements;
  split_experts_ = layout.split_experts;
  layer_begins_ = layout.layer_begins;
  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(options_.dtype).device(options_.device);
  // Behind the last one there is room for the rows by which the head's number becomes a multiple of 8 (kHeadRows); no
  // part of the buffer: never trained, sampled or saved. A tied head has the layers behind it.
  const int64_t more = (kHeadRows - local_.vocab % kHeadRows) % kHeadRows * local_.hidden;
  const at::ScalarType of_gradients = options_.gradient_dtype.value_or(options_.dtype);
  if (options_.sharding.any()) {
    units_ = std::make_unique<ShardedUnits>(options_.sharding, ShardedUnits::Shape{.layout = layout,
                                                                                   .weights = options,
                                                                                   .gradients = of_gradients,
                                                                                   .trainable = options_.trainable,
                                                                                   .tied = config_.tie_word_embeddings,
                                                                                   .spare_elements = more});
    flat_gradients_ = units_->alike_gradients();
  } else if (options_.lends_gradients) {
    gradient_memory_ = std::make_unique<WholeMemory>(trained_elements_, options.dtype(of_gradients));
    gradient_values_ = UnitMemory(trained_elements_, options.dtype(of_gradients));
    return_gradients();
    flat_gradients_ = gradient_values_.view(0, {trained_elements_});
  } else if (options_.trainable) {
    flat_gradients_ = at::zeros({trained_elements_}, options.dtype(of_gradients));
  }
  if (options_.releasable) {
    TRIREME_CHECK(!options_.trainable && !options_.sharding.any(), "only weights that are not trained come and go");
    const auto least = options_.least_bytes / static_cast<int64_t>(options.dtype().itemsize());
    memory_ = std::make_unique<WholeMemory>(std::max(total + more, least), options);
    values_ = UnitMemory(total, options, more);
  }
  flat_parameters_ = options_.sharding.weights ? units_->flat_weights()
                     : options_.releasable     ? values_.view(0, {total})
                                               : at::zeros({total + more}, options).narrow(0, 0, total);
  for (PlacedParameter& placed : layout.parameters) {
    by_name_[placed.name] = parameters_.size();
    Parameter& parameter = parameters_.emplace_back();
    static_cast<PlacedParameter&>(parameter) = std::move(placed);
    parameter.trainable = options_.trainable && !parameter.frozen;
    parameter.decay = parameter.slice.shape.size() > 1;
    parameter.tensor = leaf(parameter.offset, parameter.held, parameter.trainable, parameter.shape());
  }
}

void Model::take_memory() {
  TRIREME_CHECK(options_.releasable, "the weights of this model stay");
  if (!values_.here()) values_.set(memory_->map());
}

void Model::release_memory() {
  if (!values_.here()) return;
  values_.reset();
  memory_->unmap();
}

void Model::lend_gradients() {
  if (gradient_memory_ == nullptr || !gradient_values_.here()) return;
  gradient_values_.reset();
  gradient_memory_->unmap();
}

void Model::return_gradients() {
  if (gradient_memory_ != nullptr && !gradient_values_.here()) gradient_values_.set(gradient_memory_->map());
}

int64_t Model::lent_bytes() const {
  return gradient_memory_ == nullptr ? 0 : static_cast<int64_t>(flat_gradients_.nbytes());
}

// A leaf over the flat buffers from element `offset` on.
at::Tensor Model::leaf(int64_t offset, const std::vector<int64_t>& held, bool trainable,
                       const std::vector<int64_t>& shape) const {
  int64_t size = 1;
  for (const int64_t extent : held) size *= extent;
  const auto slice = [&](const at::Tensor& flat) { return flat.narrow(0, offset, size).view(held); };
  const auto without_padding = [&](at::Tensor whole) {
    for (size_t d = 0; d < shape.size(); ++d) whole = whole.narrow(static_cast<int64_t>(d), 0, shape[d]);
    return whole.detach();
  };
  at::Tensor tensor = without_padding(options_.sharding.weights ? units_->weights(offset, held)
                                      : options_.releasable     ? values_.view(offset, held)
                                                                : slice(flat_parameters_));
  if (trainable) {
    tensor.set_requires_grad(true);
    tensor.set_grad_dtype(flat_gradients_.scalar_type());
    tensor.mutable_grad() = without_padding(units_ ? units_->gradients(offset, held) : slice(flat_gradients_));
  }
  return tensor;
}

void Model::bind_layers() {
  const at::NoGradGuard no_grad;
  // One leaf over the block of parameters whose first and last are named; undefined when there are none.
  const auto block = [&](const std::string& first, const std::string& last) {
    const Parameter* begin = find(first);
    const Parameter* end = find(last);
    if (begin == nullptr) return at::Tensor();
    const int64_t elements = end->offset + end->size - begin->offset;
    if (begin->held.size() == 1) return leaf(begin->offset, {elements}, begin->trainable);
    const int64_t in = begin->held[1];
    return leaf(begin->offset, {elements / in, in}, begin->trainable);
  };
  const ModelShape shape = config_.shape();
  std::vector<int64_t> own;
  for (const Range& piece : split_.layers) {
    const auto first = static_cast<int64_t>(own.size());
    for (int64_t layer = piece.begin; layer < piece.end; ++layer) own.push_back(layer);
    pieces_.push_back({first, static_cast<int64_t>(own.size())});
  }
  for (const int64_t i : own) {
    const std::string at = layer_name(i), attention = at + "self_attn.", mlp = at + "mlp.";
    Layer layer;
    layer.number = i;
    layer.input_norm = held(at + "input_layernorm.weight");
    layer.post_norm = held(at + "post_attention_layernorm.weight");
    layer.qkv = block(attention + "q_proj.weight", attention + "v_proj.weight");
    layer.qkv_bias = block(attention + "q_proj.bias", attention + "v_proj.bias");
    layer.o = held(attention + "o_proj.weight");
    layer.o_bias = held(attention + "o_proj.bias");
    layer.q_norm = held(attention + "q_norm.weight");
    layer.k_norm = held(attention + "k_norm.weight");
    if (shape.has_experts(i)) {
      const auto name = [&](int64_t expert, ExpertMatrix matrix) { return at + expert_name(shape, expert, matrix); };
      const int64_t first = split_.experts.begin, last = split_.experts.end - 1;
      layer.experts.router = held(at + router_name(shape));
      layer.experts.gate_up = block(name(first, ExpertMatrix::kGate), name(last, ExpertMatrix::kUp));
      layer.experts.down = block(name(first, ExpertMatrix::kDown), name(last, ExpertMatrix::kDown));
    }
    layer.gate_up = block(mlp + "gate_proj.weight", mlp + "up_proj.weight");
    layer.gate_up_bias = block(mlp + "gate_proj.bias", mlp + "up_proj.bias");
    layer.down = held(mlp + "down_proj.weight");
    layer.down_bias = held(mlp + "down_proj.bias");
    layers_.push_back(std::move(layer));
  }
  embedding_ = held("model.embed_tokens.weight");
  final_norm_ = held("model.norm.weight");
  head_ = config_.value_head ? held("score.weight") : config_.tie_word_embeddings ? embedding_ : held("lm_head.weight");
}

void Model::share_head() {
  Communicator* group = options_.tensor;
  split_logits_.vocabulary = config_.vocab_size;
  split_logits_.width = split_.vocab.size();
  split_logits_.rank = group->rank();
  split_logits_.ranks = group->size();
  split_logits_.whole_rows = [group](const at::Tensor& columns) { return trireme::whole_rows(*group, columns); };
  split_logits_.own_columns = [group](const at::Tensor& rows) { return trireme::own_columns(*group, rows); };
  split_logits_.gather = [group](const at::Tensor& own) { return share_rows(*group, own); };
  split_logits_.gather_samples = [group](const DeviceSamples& own) { return trireme::gather_samples(*group, own); };
}

const Parameter* Model::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &parameters_[found->second];
}

at::Tensor Model::held(const std::string& name) const {
  const Parameter* parameter = find(name);
  if (parameter == nullptr) return {};
  const bool padded = parameter->held != parameter->shape();
  return padded ? leaf(parameter->offset, parameter->held, parameter->trainable) : parameter->tensor;
}

const at::Tensor& Model::head_weight() const { return head_; }

void Model::zero_gradients() {
  const bool lent = gradient_memory_ != nullptr && !gradient_values_.here();  // zeros come back
  if (flat_gradients_.defined() && !lent) flat_gradients_.zero_();
}

void Model::copy_parameters_from(const Model& other) {
  TRIREME_CHECK(
      parameters_.size() == other.parameters_.size() && flat_parameters_.sizes() == other.flat_parameters_.sizes(),
      "copy_parameters_from: the models have different configurations");
  for (size_t i = 0; i < parameters_.size(); ++i) {
    TRIREME_CHECK(parameters_[i].name == other.parameters_[i].name &&
                      parameters_[i].tensor.sizes() == other.parameters_[i].tensor.sizes(),
                  "copy_parameters_from: " + parameters_[i].name + " differs in name or shape");
  }
  const at::NoGradGuard no_grad;
  flat_parameters_.copy_(other.flat_parameters_);
}

// Angles of positions 0, 1, ... up to at least `positions` of them.
at::Tensor Model::rope_rows(int64_t positions) const {
  const at::ScalarType type = options_.dtype == at::kDouble ? at::kDouble : at::kFloat;
  const std::lock_guard<std::mutex> lock(rope_mutex_);
  if (!rope_cache_.defined() || rope_cache_.size(0) < positions) {
    int64_t ahead = std::max<int64_t>(256, rope_cache_.defined() ? 2 * rope_cache_.size(0) : 0);
    if (config_.rope.scaling == RopeOptions::Scaling::kDynamic)  // there is no table beyond
      ahead = std::min(ahead, config_.rope.original_max_position);
    const int64_t size = std::max(positions, ahead);
    rope_cache_ = rope_table(at::arange(size, at::kLong), config_.rope, type).to(options_.device);
  }
  return rope_cache_;
}

// How many positions the table must have. On CUDA looking at `positions` would wait for the device: the whole range the
// model knows, made once.
int64_t Model::rope_extent(const at::Tensor& positions, int64_t longest) const {
  if (!options_.device.is_cpu()) return std::max(longest, config_.positions());
  return positions.size(0) == 0 ? 1 : positions.max().item<int64_t>() + 1;
}

Model::Context Model::packed_context(const PackedBatch& batch) const {
  TRIREME_CHECK(batch.ids.defined() && batch.positions.defined() && batch.ids.size(0) == batch.positions.size(0),
                "forward: ids and positions must have the same length");
  TRIREME_CHECK((options_.context != nullptr) == (batch.context != nullptr),
                "forward: a model over context parallel ranks takes each rank's part of a batch (context_part)");
  Context context;
  int64_t longest = 0;
  for (size_t s = 0; s + 1 < batch.starts.size(); ++s)
    longest = std::max(longest, batch.starts[s + 1] - batch.starts[s]);
  context.rope = rope_rows(rope_extent(batch.positions, longest));
  context.positions = batch.positions;
  context.starts = batch.starts;
  context.prefix = batch.prefix;
  context.pieces = batch.context;
  context.names = batch.names;
  context.tokens = batch.tokens();
  context.tp = split_.tp;
  if (router_watch != nullptr && options_.trainable && at::GradMode::is_enabled())
    context.watched = watched_rows(batch, context);
  return context;
}

// The rows of the micro-batch that this rank's routers see: of context ranks their parts, of these each tensor rank's.
std::shared_ptr<const WatchedRows> Model::watched_rows(const PackedBatch& batch, const Context& context) const {
  if (batch.context == nullptr && split_.tp == 1) return router_watch->rows_of(batch.starts, batch.prefix, {});
  at::Tensor rows = batch.context ? at::tensor(batch.context->rows, at::kLong) : at::arange(context.tokens, at::kLong);
  const Range own = expert_rows(context);
  if (split_.tp > 1) rows = rows.narrow(0, own.begin, own.size());
  return batch.context ? router_watch->rows_of(batch.context->starts, batch.context->prefix, rows)
                       : router_watch->rows_of(batch.starts, batch.prefix, rows);
}

at::Tensor Model::forward(const PackedBatch& batch) const {
  TRIREME_CHECK(split_.pp == 1, "forward: the model has several pipeline stages");
  return run(0, batch.ids, packed_context(batch), {});
}

at::Tensor Model::forward_piece(int64_t piece, const PackedBatch& batch, const at::Tensor& input) const {
  return run(piece, batch.ids, packed_context(batch), input);
}

at::Tensor Model::forward_cached(const CachedBatch& batch, KvArena& arena) const {
  TRIREME_CHECK(split_.pp == 1, "forward_cached: the model has several pipeline stages");
  return forward_cached_piece(0, batch, arena, {});
}

int64_t Model::residual_rows(int64_t tokens) const { return (tokens + split_.tp - 1) / split_.tp; }

at::Tensor Model::make_residual(int64_t tokens) const {
  return at::empty({residual_rows(tokens), local_.hidden}, flat_parameters_.options());
}

at::Tensor Model::forward_cached_piece(int64_t piece, const CachedBatch& batch, KvArena& arena,
                                       const at::Tensor& input) const {
  TRIREME_CHECK(batch.ids.defined() && batch.positions.defined() && batch.ids.size(0) == batch.positions.size(0),
                "forward_cached: ids and positions must have the same length");
  TRIREME_CHECK(arena.num_layers() == local_.layers, "forward_cached: the arena belongs to another model");
  const at::NoGradGuard no_grad;
  Context context;
  context.rope = rope_rows(rope_extent(batch.positions, 0));
  context.positions = batch.positions;
  context.cached = &batch;
  context.arena = &arena;
  context.tokens = batch.ids.size(0);
  context.tp = split_.tp;
  return run(piece, batch.ids, context, input);
}

at::Tensor Model::run(int64_t piece, const at::Tensor& ids, const Context& context, const at::Tensor& received) const {
  const bool records = at::GradMode::is_enabled() && options_.trainable;
  const auto reading = [&](int64_t place, int64_t end) {
    if (units_) units_->read(place);
    if (before_reading) before_reading(end);
  };
  // Their gradient is there when everything behind them has been differentiated. A parameter's gradient is added before
  // any other work of the pass goes on.
  const auto watch = [&](const at::Tensor& input, int64_t index) {
    if ((!on_gradients_final && !units_) || !at::GradMode::is_enabled() || !input.requires_grad()) return;
    input.register_hook([this, index](const at::Tensor&) {
      if (units_) units_->differentiated(index + 1);
      if (on_gradients_final) on_gradients_final(layer_begins_[static_cast<size_t>(index)]);
    });
  };
  const Range own = pieces_.at(static_cast<size_t>(piece));
  // A rank that only takes part in what others' rows want of its experts. Kernels take no empty batches.
  if (context.arena != nullptr && context.tokens == 0 && options_.device.is_cuda()) {
    const at::Tensor nothing = make_residual(0);
    for (int64_t i = own.begin; i < own.end; ++i) {
      if (layers_[static_cast<size_t>(i)].experts.router.defined()) (void)experts(i, {nothing, {}}, context, Again());
    }
    return nothing;
  }
  Residual x;
  if (split_.begins(piece)) {
    reading(0, layer_begins_.front());
    x.sum = embed_rows(ids, context);
  } else if (context.whole_rows()) {
    x.sum = share_rows(*options_.tensor, received).narrow(0, 0, context.tokens);
  } else {
    // No leaf: a leaf's hook may come before the gradients of the parameters beside it are added.
    x.sum = received.view_as(received);
  }
  for (int64_t i = own.begin; i < own.end; ++i) {
    watch(x.delta.defined() ? x.delta : x.sum, i);
    reading(i + 1, layer_begins_[static_cast<size_t>(i + 1)]);
    const NormResult input = next_norm(x, layers_[static_cast<size_t>(i)].input_norm, context);
    const Again again = again_of(i - own.begin, context);
    x = again.layer ? run_layer_again(i, input, context) : run_layer(i, input, context, again);
  }
  if (!split_.ends(piece)) return end_of_piece(x, context);
  watch(x.delta, local_.layers);
  reading(local_.layers + 1, flat_parameters_.numel());
  const at::Tensor hidden = next_norm(x, final_norm_, context).normed;
  if (units_) units_->end_forward(records);
  return context.sharded_rows() ? gather_rows(*options_.tensor, hidden).narrow(0, 0, ids.size(0)) : hidden;
}

// Where each rank has all rows the last product's sum over ranks is still to come: it is this norm's first step.
NormResult Model::next_norm(const Residual& x, const at::Tensor& scale, const Context& context) const {
  if (context.whole_rows() && x.delta.defined())
    return sum_add_rms_norm(*options_.tensor, x.sum, x.delta, scale, config_.rms_norm_eps, counted());
  return add_rms_norm(x.sum, x.delta, scale, config_.rms_norm_eps, counted());
}

// What goes to the next piece: one addition, rounded once, add_rms_norm's sum, of every tp-th part of the rows.
at::Tensor Model::end_of_piece(const Residual& x, const Context& context) const {
  if (!context.whole_rows()) return at::add(x.sum, x.delta);
  const at::Tensor sum = at::add(x.sum, sum_rows(*options_.tensor, x.delta));
  const int64_t own = residual_rows(context.tokens);
  return at::constant_pad_nd(sum, {0, 0, 0, own * split_.tp - context.tokens})
      .narrow(0, own * split_.tensor_rank, own)
      .contiguous();
}

// Of a split vocabulary each rank knows its own rows; the others' are zero in its part of the sum, as are the rows that
// only make their number a multiple of tp.
at::Tensor Model::embed_rows(const at::Tensor& ids, const Context& context) const {
  if (split_.tp == 1) return embed(embedding_, ids);
  EmbeddingPart part{split_.vocab.begin, config_.vocab_size, ids.size(0)};
  if (context.whole_rows()) return sum_rows(*options_.tensor, embed_part(embedding_, ids, part));
  part.rows = (ids.size(0) + split_.tp - 1) / split_.tp * split_.tp;
  return sum_to_rows(*options_.tensor, embed_part(embedding_, ids, part));
}

// Of the layer that is `index` in its piece.
Model::Again Model::again_of(int64_t index, const Context& context) const {
  Again again;
  if (context.arena != nullptr || !options_.trainable || !at::GradMode::is_enabled()) return again;
  again.layer = index < recompute_.whole_layers;
  const bool cheap = !again.layer && index < recompute_.whole_layers + recompute_.cheap_layers;
  again.experts = !again.layer && index < recompute_.whole_layers + recompute_.expert_layers;
  again.norms = cheap && recompute_.norms;
  again.swiglu = cheap && recompute_.swiglu;
  return again;
}

Residual Model::run_layer_again(int64_t index, const NormResult& input, const Context& context) const {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  return layer_again(
      input, layer.qkv, [this, index, context](const NormResult& x) { return run_layer(index, x, context, Again()); },
      [this, scale = layer.input_norm](const at::Tensor& sum) {
        return rms_norm(sum, scale, config_.rms_norm_eps, counted());
      });
}

// h = x + attention(norm(x)); y = h + mlp(norm(h)), whose sum is left to the norm behind it.
Residual Model::run_layer(int64_t index, const NormResult& x, const Context& context, const Again& again) const {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const auto input = [&](const NormResult& norm, const at::Tensor& scale) {
    return normed(norm, scale, config_.rms_norm_eps, counted(), again.norms);
  };
  const at::Tensor attended = attention(index, input(x, layer.input_norm), context);
  const NormResult h = next_norm({x.sum, attended}, layer.post_norm, context);
  return {h.sum, mlp(index, input(h, layer.post_norm), context, again)};
}

at::Tensor Model::attention(int64_t index, const Activation& x, const Context& context) const {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const at::Tensor qkv = first_product(x, layer.qkv, layer.qkv_bias, context);
  const at::Tensor mixed = attend(index, qkv, context);
  return last_product({mixed.view({qkv.size(0), local_.query_width()}), {}}, layer.o, layer.o_bias, context);
}

// Of pieces of sequences: keys and values that other ranks need go to all, once a layer.
at::Tensor Model::attend_pieces(const Qkv& parts, const ContextRows& rows) const {
  if (!rows.exchanges()) return attention_runs(parts.q, parts.k, parts.v, rows.attention);
  const at::Tensor own = at::cat({parts.k.index_select(0, rows.shared), parts.v.index_select(0, rows.shared)}, 1);
  const at::Tensor all = gather_rows(*options_.context, own, rows.shared_counts);
  const int64_t heads = local_.kv_heads;
  return attention_runs(parts.q, at::cat({parts.k, all.narrow(1, 0, heads)}),
                        at::cat({parts.v, all.narrow(1, heads, heads)}), rows.attention);
}

// Queries over the keys and values before them: the batch's own, or the arena's, where the new ones go first.
at::Tensor Model::attend(int64_t index, const at::Tensor& qkv, const Context& context) const {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const QkvLayout layout{local_.heads, local_.kv_heads, local_.head_dim, config_.rms_norm_eps};
  if (context.arena == nullptr) {
    const Qkv parts = split_qkv(qkv, layer.q_norm, layer.k_norm, context.rope, context.positions, layout);
    if (context.pieces != nullptr) return attend_pieces(parts, *context.pieces);
    return context.prefix.empty() ? attention_packed(parts.q, parts.k, parts.v, context.starts)
                                  : attention_shared(parts.q, parts.k, parts.v, context.starts, context.prefix);
  }
  const at::Tensor& keys = context.arena->keys(index);
  const at::Tensor& values = context.arena->values(index);
  const at::Tensor q = split_qkv_cached(qkv, layer.q_norm, layer.k_norm, context.rope, context.positions, layout, keys,
                                        values, context.cached->plan);
  return attention_cached(q, keys, values, context.cached->plan);
}

at::Tensor Model::mlp(int64_t index, const Activation& x, const Context& context, const Again& again) const {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  if (layer.experts.router.defined()) {
    try {
      return experts(index, x, context, again);
    } catch (const RouterError& error) {
      fail_at_router(error, layer.number, context);
    }
  }
  if (context.arena != nullptr && x.value.is_cuda() && !layer.gate_up_bias.defined())
    return trireme::linear(cuda::gate_up_swiglu(x.value, layer.gate_up), layer.down, layer.down_bias);
  const at::Tensor gate_up = first_product(x, layer.gate_up, layer.gate_up_bias, context);
  return last_product(activated(gate_up, again.swiglu), layer.down, layer.down_bias, context);
}

int64_t Model::expert_blocks() const { return combine_blocks(config_.num_experts, options_.combine_blocks, split_.ep); }

// Of the pass, which this rank's experts take: of tensor ranks each its part, without the rows that only make their
// number a multiple of tp. Those would choose experts too.
Range Model::expert_rows(const Context& context) const {
  const int64_t own = residual_rows(context.tokens);
  const int64_t begin = std::min(context.tokens, own * split_.tensor_rank);
  return {begin, std::min(context.tokens, begin + own)};
}

// With whose row it was, where the pass knows: the router was given this rank's part of the rows.
void Model::fail_at_router(const RouterError& error, int64_t layer, const Context& context) const {
  const int64_t row = error.row() + (split_.tp > 1 ? expert_rows(context).begin : 0);
  if (context.names == nullptr) throw RouterError(row, layer);
  const int64_t of_batch = context.pieces ? context.pieces->rows.at(static_cast<size_t>(row)) : row;
  const size_t sequence = sequence_of_row(context.pieces ? context.pieces->starts : context.starts, of_batch);
  const auto position = context.positions[row].item<int64_t>();
  fail_data("layer " + std::to_string(layer) + ": the router's logits are not finite at " +
            name_of_token(context.names->at(sequence), position));
}

// Over tensor ranks the result of own rows is whole and needs no sum. Where each rank has all rows it is a part of one:
// zeros elsewhere, with which a sum gives back its bits, since combine gives no negative zero.
at::Tensor Model::experts(int64_t index, const Activation& x, const Context& context, const Again& again) const {
  const ExpertShape shape{.experts = config_.num_experts,
                          .per_token = config_.experts_per_token,
                          .normalize = config_.normalize_experts,
                          .wide_router = options_.wide_router,
                          .combine_blocks = expert_blocks()};
  const ExpertWeights& weights = layers_[static_cast<size_t>(index)].experts;
  std::shared_ptr<const RouterCall> watch;
  if (context.watched != nullptr)
    watch = std::make_shared<const RouterCall>(
        RouterCall{router_watch, layers_[static_cast<size_t>(index)].number, context.watched});
  const auto mixture = [&](const Activation& rows) {
    if (options_.experts == nullptr)
      return mixture_of_experts(rows.value, weights, shape, {rows.again, again.experts}, std::move(watch));
    const ExpertRanks ranks{.group = options_.experts, .experts = local_.experts, .tensor = split_.etp};
    if (context.cached == nullptr || !context.cached->alike || !gathers_experts(residual_rows(context.tokens)))
      return split_mixture_of_experts(rows.value, weights, shape, ranks, std::move(watch), again.experts);
    // As many of each rank: of tensor ranks the last may have less.
    const int64_t own = rows.value.size(0), each = residual_rows(context.tokens);
    const at::Tensor even = own == each ? rows.value : at::constant_pad_nd(rows.value, {0, 0, 0, each - own});
    return gathered_mixture_of_experts(even, weights, shape, ranks).narrow(0, 0, own);
  };
  if (split_.tp == 1) return mixture(x);
  const Range own = expert_rows(context);
  const int64_t first = context.whole_rows() ? own.begin : 0, rows = x.value.size(0);
  // Cut and padded also by nothing: all ranks record the same.
  Activation mine{x.value.narrow(0, first, own.size()), {}};
  if (x.again) mine.again = [again = x.again, first, count = own.size()] { return again().narrow(0, first, count); };
  return at::constant_pad_nd(mixture(mine), {0, 0, first, rows - first - own.size()});
}

// Of a split head each rank makes the logits of its part of the vocabulary, and then takes the whole rows of every
// tp-th part of the rows, the last of which may belong to nobody: the same function as on one rank reads them, filters
// included.
at::Tensor Model::whole_logits(const at::Tensor& hidden) const {
  const int64_t rows = hidden.size(0), own = (rows + split_.tp - 1) / split_.tp, width = split_.vocab.size();
  const at::Tensor even = at::constant_pad_nd(hidden, {0, 0, 0, own * split_.tp - rows});
  // A rank may hold padding only; all record the same exchanges.
  at::Tensor logits = local_.vocab > 0 ? trireme::linear(even, head_, {}) : even.narrow(1, 0, 1).narrow(1, 0, 0);
  logits = at::constant_pad_nd(logits, {0, width - local_.vocab});
  const std::vector<int64_t> counts(static_cast<size_t>(split_.tp), own);
  return all_to_all_rows(*options_.tensor, logits, counts, counts)
      .view({split_.tp, own, width})
      .permute({1, 0, 2})
      .reshape({own, split_.tp * width})
      .narrow(1, 0, config_.vocab_size);
}

at::Tensor Model::values(const at::Tensor& hidden) const {
  TRIREME_CHECK(config_.value_head, "values of a model that has a vocabulary's head");
  if (split_.tp == 1) return token_values(hidden, head_);
  // Each rank those of every tp-th part of the rows, the last of which may belong to nobody.
  const int64_t rows = hidden.size(0), own = (rows + split_.tp - 1) / split_.tp;
  const at::Tensor even = at::constant_pad_nd(hidden, {0, 0, 0, own * split_.tp - rows});
  const at::Tensor mine = token_values(even.narrow(0, own * split_.tensor_rank, own), head_);
  return share_rows(*options_.tensor, mine).narrow(0, 0, rows);
}

at::Tensor Model::logprobs(const at::Tensor& hidden, const at::Tensor& targets, const LogprobOptions& options) const {
  TRIREME_CHECK(!config_.value_head, "log-probs of a value model, which has no vocabulary");
  if (split_.tp == 1) return token_logprobs(hidden, head_, targets, options);
  if (hidden.is_cuda()) return split_token_logprobs(hidden, head_, targets, options, split_logits_);
  Communicator& group = *options_.tensor;
  const at::Tensor whole = whole_logits(hidden);
  const int64_t rows = hidden.size(0), own = whole.size(0);
  const at::Tensor ids = at::constant_pad_nd(targets, {0, own * split_.tp - rows}).narrow(0, own * group.rank(), own);
  LogprobOptions lenient = options;  // padding's target may be filtered
  lenient.allow_filtered = true;
  const at::Tensor all = share_rows(group, logprobs_of_logits(whole, ids, lenient, false).logprobs).narrow(0, 0, rows);
  if (!options.allow_filtered && at::isinf(all.detach()).any().item<bool>())
    fail_data("a target token has probability 0 under top_k, top_p or min_p");
  return all;
}

SampleResult Model::sample(const at::Tensor& hidden, const std::vector<SampleRow>& rows) const {
  TRIREME_CHECK(!config_.value_head, "tokens of a value model, which has no vocabulary");
  if (split_.tp == 1) return sample_tokens(hidden, head_, rows);
  const at::NoGradGuard no_grad;
  Communicator& group = *options_.tensor;
  const at::Tensor whole = whole_logits(hidden);
  const auto count = static_cast<int64_t>(rows.size()), own = whole.size(0);
  const int64_t begin = std::min(count, own * group.rank()), end = std::min(count, begin + own);
  SampleResult mine;
  try {
    mine = sample_logits(whole.narrow(0, 0, end - begin), {rows.begin() + begin, rows.begin() + end});
  } catch (const LogitsError& error) {
    throw LogitsError(begin + error.row());
  }
  const at::Tensor ids = at::zeros({own}, at::kLong), logprobs = at::zeros({own}, at::kFloat);
  std::copy(mine.ids.begin(), mine.ids.end(), ids.mutable_data_ptr<int64_t>());
  std::copy(mine.logprobs.begin(), mine.logprobs.end(), logprobs.mutable_data_ptr<float>());
  const at::Tensor all_ids = share_rows(group, ids), all_logprobs = share_rows(group, logprobs);
  const auto* id = all_ids.const_data_ptr<int64_t>();
  const auto* logprob = all_logprobs.const_data_ptr<float>();
  return {{id, id + count}, {logprob, logprob + count}};
}

DeviceSamples Model::sample_on_device(const at::Tensor& hidden, const DeviceSampling& rows) const {
  return split_.tp == 1 ? sample_tokens_on_device(hidden, head_, rows)
                        : sample_split_tokens_on_device(hidden, head_, rows, split_logits_);
}

bool Model::graphs_allowed(int64_t tokens) const {
  const bool tensor = split_.tp == 1 || options_.tensor->peers(options_.device) != nullptr;
  return (options_.experts == nullptr || gathers_experts(residual_rows(tokens))) && tensor;
}

// Whether the ranks of the experts' group, with `rows` each, gather them instead of sending each its own.
bool Model::gathers_experts(int64_t rows) const {
  if (!options_.device.is_cuda()) return false;
  if (!gathers_experts_) {
    // Each rank has tried its own kernels.
    const bool here = options_.experts->peers(options_.device) != nullptr && grouped_part_here(1);
    gathers_experts_ = options_.experts->all_reduce_sum(int64_t{here ? 0 : 1}) == 0;
  }
  return *gathers_experts_ && grouped_part_here(rows * options_.experts->size());
}

bool Model::grouped_part_here(int64_t rows) const {
  return cuda::grouped_part_supported(rows * config_.experts_per_token, local_.experts, local_.hidden,
                                      local_.moe_intermediate);
}

// The first and the last product of attention and MLP. Of sharded rows all come before the one, and their sums over the
// ranks go to their owners behind the other; where each rank has all rows next_norm makes the sums.
at::Tensor Model::first_product(const Activation& x, const at::Tensor& weight, const at::Tensor& bias,
                                const Context& context) const {
  if (!context.sharded_rows()) return product(x, weight, bias);
  return gathered_linear({options_.tensor, context.tokens, options_.overlap_exchanges}, x, weight, bias);
}

at::Tensor Model::last_product(const Activation& x, const at::Tensor& weight, const at::Tensor& bias,
                               const Context& context) const {
  if (!context.sharded_rows()) return product(x, weight, bias);
  return summed_linear({options_.tensor, context.tokens, options_.overlap_exchanges}, x, weight, bias);
}

bool products_are_exact(const ModelConfig& config, const LocalShape& own, at::ScalarType dtype, at::Device device,
                        int64_t most_rows) {
  return linear_rows_are_exact(config.linear_shapes(own), dtype, device, most_rows) &&
         (own.experts == 0 || grouped_rows_are_exact(own.experts, own.hidden, own.moe_intermediate, device));
}

std::vector<std::vector<float>> score(const Model& model, const std::vector<std::vector<int32_t>>& sequences,
                                      const LogprobOptions& options, int64_t max_tokens_per_batch) {
  const at::NoGradGuard no_grad;
  std::vector<std::vector<float>> results(sequences.size());
  for (size_t from = 0; from < sequences.size();) {
    std::vector<std::vector<int32_t>> batch_sequences;
    int64_t tokens = 0;
    size_t to = from;
    while (to < sequences.size() &&
           (to == from || tokens + static_cast<int64_t>(sequences[to].size()) <= max_tokens_per_batch)) {
      tokens += static_cast<int64_t>(sequences[to].size());
      batch_sequences.push_back(sequences[to++]);
    }
    PackedBatch batch = PackedBatch::from_sequences(batch_sequences);
    std::vector<int64_t> rows;
    for (size_t s = 0; s < batch_sequences.size(); ++s) {
      for (int64_t row = batch.starts[s]; row + 1 < batch.starts[s + 1]; ++row) rows.push_back(row);
    }
    if (!rows.empty()) {
      const at::Tensor index = at::tensor(rows, at::kLong);
      const at::Tensor targets = batch.ids.index_select(0, index + 1).to(model.options().device);
      batch.ids = batch.ids.to(model.options().device);
      batch.positions = batch.positions.to(model.options().device);
      const at::Tensor hidden = model.forward(batch).index_select(0, index.to(model.options().device));
      const at::Tensor values = model.logprobs(hidden, targets, options).to(at::kCPU, at::kFloat).contiguous();
      const float* value = values.const_data_ptr<float>();
      for (size_t s = 0; s < batch_sequences.size(); ++s) {
        const size_t count = batch_sequences[s].empty() ? 0 : batch_sequences[s].size() - 1;
        results[from + s].assign(value, value + count);
        value += count;
      }
    }
    from = to;
  }
  return results;
}

at::ScalarType parse_dtype(const std::string& name) {
  if (name == "float32") return at::kFloat;
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  if (name == "float64") return at::kDouble;
  fail_user("unknown dtype " + name + "; known are float32, bfloat16, float16, float64");
}

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "float32";
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kDouble:
      return "float64";
    default:
      return c10::toString(dtype);
  }
}

}  // namespace trireme
