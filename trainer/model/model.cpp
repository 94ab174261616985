#include "trainer/model/model.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>

#include "base/error.h"

namespace trireme {

struct Model::Layer {
  at::Tensor input_norm, post_norm;
  at::Tensor q, k, v, o;
  at::Tensor q_bias, k_bias, v_bias, o_bias;  // undefined: none
  at::Tensor q_norm, k_norm;                  // undefined: none
  at::Tensor gate, up, down;
  at::Tensor gate_bias, up_bias, down_bias;
};

// What differs between packed and cached passes: rotation table and where keys live.
struct Model::Context {
  at::Tensor rope;              // [tokens, 2, head_dim / 2]
  std::vector<int64_t> starts;  // packed
  const CachedBatch* cached = nullptr;
  KvArena* arena = nullptr;
};

namespace {

// The layer to run again in backward, carried through the autograd graph.
struct LayerCall final : torch::CustomClassHolder {
  explicit LayerCall(std::function<at::Tensor(const at::Tensor&)> f) : call(std::move(f)) {}
  std::function<at::Tensor(const at::Tensor&)> call;
};

// Keeps x only. `anchor` is one of the layer's parameters, so that the node exists when x itself needs no gradient; the
// parameters' gradients are accumulated by the inner backward.
class RecomputeFunction final : public torch::autograd::Function<RecomputeFunction> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& anchor,
                            const c10::intrusive_ptr<LayerCall>& layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = c10::IValue::make_capsule(layer);
    return layer->call(x);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto layer = c10::static_intrusive_pointer_cast<LayerCall>(context->saved_data["layer"].toCapsule());
    const at::Tensor x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    const at::AutoGradMode record(true);
    torch::autograd::backward({layer->call(x)}, {grads[0]});
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

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

Model::Model(const ModelConfig& config, const ModelOptions& options) : config_(config), options_(options) {
  if (options.device.is_cpu() && options.dtype != at::kFloat && options.dtype != at::kBFloat16 &&
      options.dtype != at::kDouble) {
    fail_user("a model on cpu computes in float32, bfloat16 or float64, not " + dtype_name(options.dtype));
  }
  allocate_parameters();
  bind_layers();
}

Model::~Model() = default;

void Model::allocate_parameters() {
  std::vector<std::vector<int64_t>> shapes;
  int64_t total = 0;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
    Parameter parameter;
    parameter.name = name;
    parameter.trainable = options_.trainable;
    parameter.offset = total;
    parameter.size = 1;
    for (const int64_t size : shape) parameter.size *= size;
    parameter.decay = shape.size() > 1;
    total += (parameter.size + kParameterAlignment - 1) / kParameterAlignment * kParameterAlignment;
    by_name_[name] = parameters_.size();
    parameters_.push_back(std::move(parameter));
    shapes.push_back(std::move(shape));
  };
  const ModelConfig& c = config_;
  const int64_t q_width = c.num_heads * c.head_dim, kv_width = c.num_kv_heads * c.head_dim;
  const auto add_linear = [&](const std::string& name, int64_t out, int64_t in, bool bias) {
    add(name + ".weight", {out, in});
    if (bias) add(name + ".bias", {out});
  };
  add("model.embed_tokens.weight", {c.vocab_size, c.hidden_size});
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string at = layer_name(i);
    add(at + "input_layernorm.weight", {c.hidden_size});
    add_linear(at + "self_attn.q_proj", q_width, c.hidden_size, c.qkv_bias);
    add_linear(at + "self_attn.k_proj", kv_width, c.hidden_size, c.qkv_bias);
    add_linear(at + "self_attn.v_proj", kv_width, c.hidden_size, c.qkv_bias);
    if (c.qk_norm) add(at + "self_attn.q_norm.weight", {c.head_dim});
    if (c.qk_norm) add(at + "self_attn.k_norm.weight", {c.head_dim});
    add_linear(at + "self_attn.o_proj", c.hidden_size, q_width, c.output_bias);
    add(at + "post_attention_layernorm.weight", {c.hidden_size});
    add_linear(at + "mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias);
    add_linear(at + "mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias);
    add_linear(at + "mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias);
  }
  add("model.norm.weight", {c.hidden_size});
  if (!c.tie_word_embeddings) add("lm_head.weight", {c.vocab_size, c.hidden_size});

  const at::NoGradGuard no_grad;
  const auto options = at::TensorOptions().dtype(options_.dtype).device(options_.device);
  flat_parameters_ = at::zeros({total}, options);
  if (options_.trainable) flat_gradients_ = at::zeros({total}, options);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    const auto slice = [&](const at::Tensor& flat) {
      return flat.narrow(0, parameter.offset, parameter.size).view(shapes[i]).detach();
    };
    parameter.tensor = slice(flat_parameters_);
    if (!options_.trainable) continue;
    parameter.tensor.set_requires_grad(true);
    parameter.tensor.mutable_grad() = slice(flat_gradients_);
  }
}

void Model::bind_layers() {
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    const std::string at = layer_name(i);
    const auto get = [&](const char* name) { return tensor(at + name); };
    Layer layer;
    layer.input_norm = get("input_layernorm.weight");
    layer.post_norm = get("post_attention_layernorm.weight");
    layer.q = get("self_attn.q_proj.weight");
    layer.k = get("self_attn.k_proj.weight");
    layer.v = get("self_attn.v_proj.weight");
    layer.o = get("self_attn.o_proj.weight");
    layer.q_bias = get("self_attn.q_proj.bias");
    layer.k_bias = get("self_attn.k_proj.bias");
    layer.v_bias = get("self_attn.v_proj.bias");
    layer.o_bias = get("self_attn.o_proj.bias");
    layer.q_norm = get("self_attn.q_norm.weight");
    layer.k_norm = get("self_attn.k_norm.weight");
    layer.gate = get("mlp.gate_proj.weight");
    layer.up = get("mlp.up_proj.weight");
    layer.down = get("mlp.down_proj.weight");
    layer.gate_bias = get("mlp.gate_proj.bias");
    layer.up_bias = get("mlp.up_proj.bias");
    layer.down_bias = get("mlp.down_proj.bias");
    layers_.push_back(std::move(layer));
  }
  embedding_ = tensor("model.embed_tokens.weight");
  final_norm_ = tensor("model.norm.weight");
  head_ = config_.tie_word_embeddings ? embedding_ : tensor("lm_head.weight");
}

const Parameter* Model::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &parameters_[found->second];
}

const at::Tensor& Model::tensor(const std::string& name) const {
  static const at::Tensor none;
  const Parameter* parameter = find(name);
  return parameter != nullptr ? parameter->tensor : none;
}

const at::Tensor& Model::head_weight() const { return head_; }

void Model::zero_gradients() {
  if (flat_gradients_.defined()) flat_gradients_.zero_();
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

at::Tensor Model::rope_rows(const at::Tensor& positions) const {
  const at::ScalarType type = options_.dtype == at::kDouble ? at::kDouble : at::kFloat;
  const int64_t needed = positions.size(0) == 0 ? 1 : positions.max().item<int64_t>() + 1;
  const std::lock_guard<std::mutex> lock(rope_mutex_);
  if (!rope_cache_.defined() || rope_cache_.size(0) < needed) {
    const int64_t size = std::max<int64_t>({needed, 256, rope_cache_.defined() ? 2 * rope_cache_.size(0) : 0});
    rope_cache_ = rope_table(at::arange(size, at::kLong), config_.rope, type).to(options_.device);
  }
  return rope_cache_.index_select(0, positions);
}

at::Tensor Model::forward(const PackedBatch& batch) const {
  TRIREME_CHECK(batch.ids.defined() && batch.positions.defined() && batch.ids.size(0) == batch.positions.size(0),
                "forward: ids and positions must have the same length");
  Context context;
  context.rope = rope_rows(batch.positions);
  context.starts = batch.starts;
  return run(batch.ids, context);
}

at::Tensor Model::forward_cached(const CachedBatch& batch, KvArena& arena) const {
  TRIREME_CHECK(batch.ids.defined() && batch.positions.defined() && batch.ids.size(0) == batch.positions.size(0),
                "forward_cached: ids and positions must have the same length");
  TRIREME_CHECK(arena.num_layers() == config_.num_layers, "forward_cached: the arena belongs to another model");
  const at::NoGradGuard no_grad;
  Context context;
  context.rope = rope_rows(batch.positions);
  context.cached = &batch;
  context.arena = &arena;
  return run(batch.ids, context);
}

at::Tensor Model::run(const at::Tensor& ids, const Context& context) const {
  at::Tensor x = embed(embedding_, ids);
  const bool recompute = options_.checkpoint_activations && context.arena == nullptr && at::GradMode::is_enabled();
  for (int64_t i = 0; i < config_.num_layers; ++i) {
    x = recompute ? run_layer_recomputed(i, x, context) : run_layer(i, x, context);
  }
  return rms_norm(x, final_norm_, config_.rms_norm_eps);
}

at::Tensor Model::run_layer(int64_t index, const at::Tensor& x, const Context& context) const {
  const Layer& layer = layers_[static_cast<size_t>(index)];
  const int64_t tokens = x.size(0);
  const at::Tensor normed = rms_norm(x, layer.input_norm, config_.rms_norm_eps);
  at::Tensor q = trireme::linear(normed, layer.q, layer.q_bias).view({tokens, config_.num_heads, config_.head_dim});
  at::Tensor k = trireme::linear(normed, layer.k, layer.k_bias).view({tokens, config_.num_kv_heads, config_.head_dim});
  const at::Tensor v =
      trireme::linear(normed, layer.v, layer.v_bias).view({tokens, config_.num_kv_heads, config_.head_dim});
  if (layer.q_norm.defined()) q = rms_norm(q, layer.q_norm, config_.rms_norm_eps);
  if (layer.k_norm.defined()) k = rms_norm(k, layer.k_norm, config_.rms_norm_eps);
  q = rope(q, context.rope);
  k = rope(k, context.rope);
  at::Tensor mixed;
  if (context.arena == nullptr) {
    mixed = attention_packed(q, k, v, context.starts);
  } else {
    const at::Tensor& keys = context.arena->keys(index);
    const at::Tensor& values = context.arena->values(index);
    append_cached(k, v, keys, values, context.cached->rows);
    mixed = attention_cached(q, keys, values, context.cached->rows);
  }
  const at::Tensor attended = x + trireme::linear(mixed.view({tokens, -1}), layer.o, layer.o_bias);
  const at::Tensor inner = rms_norm(attended, layer.post_norm, config_.rms_norm_eps);
  const at::Tensor gate = trireme::linear(inner, layer.gate, layer.gate_bias);
  const at::Tensor up = trireme::linear(inner, layer.up, layer.up_bias);
  return attended + trireme::linear(swiglu(gate, up), layer.down, layer.down_bias);
}

at::Tensor Model::run_layer_recomputed(int64_t index, const at::Tensor& x, const Context& context) const {
  const at::Tensor& anchor = layers_[static_cast<size_t>(index)].q;
  if (!x.requires_grad() && !anchor.requires_grad()) return run_layer(index, x, context);
  auto call = c10::make_intrusive<LayerCall>(
      [this, index, context](const at::Tensor& input) { return run_layer(index, input, context); });
  return RecomputeFunction::apply(x, anchor, call);
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
      const at::Tensor values =
          token_logprobs(hidden, model.head_weight(), targets, options).to(at::kCPU, at::kFloat).contiguous();
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
