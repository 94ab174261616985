#include "trainer/model/config.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <tuple>

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "trainer/ops/rope_frequencies.h"

namespace trireme {
namespace {

using nlohmann::json;

// Typed access to one config.json that names file and key in its errors.
class Reader final {
 public:
  Reader(const json& values, const std::string& source) : values_(values), source_(source) {}

  bool has(const std::string& key) const { return values_.contains(key) && !values_[key].is_null(); }

  int64_t integer(const std::string& key, std::optional<int64_t> fallback = std::nullopt) const {
    if (!has(key)) return fallback ? *fallback : fail_missing<int64_t>(key);
    if (!values_[key].is_number_integer()) fail(key, "must be an integer");
    return values_[key].get<int64_t>();
  }
  int64_t positive(const std::string& key, std::optional<int64_t> fallback = std::nullopt) const {
    const int64_t value = integer(key, fallback);
    if (value <= 0) fail(key, "must be positive, is " + std::to_string(value));
    return value;
  }
  double number(const std::string& key, double fallback) const {
    if (!has(key)) return fallback;
    if (!values_[key].is_number()) fail(key, "must be a number");
    return values_[key].get<double>();
  }
  bool flag(const std::string& key, bool fallback) const {
    if (!has(key)) return fallback;
    if (!values_[key].is_boolean()) fail(key, "must be true or false");
    return values_[key].get<bool>();
  }
  std::string text(const std::string& key, const std::string& fallback) const {
    if (!has(key)) return fallback;
    if (!values_[key].is_string()) fail(key, "must be a string");
    return values_[key].get<std::string>();
  }
  const json& at(const std::string& key) const { return values_[key]; }
  [[noreturn]] void fail(const std::string& key, const std::string& problem) const {
    fail_user(source_ + ": " + key + " " + problem);
  }

 private:
  template <class T>
  [[noreturn]] T fail_missing(const std::string& key) const {
    fail_user(source_ + ": key " + key + " is missing");
  }
  const json& values_;
  const std::string& source_;
};

constexpr const char* kKnown =
    "llama (LlamaForCausalLM), qwen2 (Qwen2ForCausalLM), qwen3 (Qwen3ForCausalLM), qwen3_moe (Qwen3MoeForCausalLM), "
    "mixtral (MixtralForCausalLM), and each ...ForSequenceClassification with one label";

constexpr std::tuple<ModelFamily, const char*, const char*> kFamilies[] = {
    {ModelFamily::kLlama, "llama", "LlamaForCausalLM"},
    {ModelFamily::kQwen2, "qwen2", "Qwen2ForCausalLM"},
    {ModelFamily::kQwen3, "qwen3", "Qwen3ForCausalLM"},
    {ModelFamily::kQwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM"},
    {ModelFamily::kMixtral, "mixtral", "MixtralForCausalLM"}};

// The value model of a family: LlamaForCausalLM -> LlamaForSequenceClassification.
std::string classifier_of(std::string_view causal) {
  constexpr std::string_view kCausal = "CausalLM";
  return std::string(causal.substr(0, causal.size() - kCausal.size())) + "SequenceClassification";
}

// The first of "architectures": what the weights are for. Two models of one type differ by it, e.g. a classifier.
std::string first_architecture(const Reader& reader) {
  if (!reader.has("architectures")) return {};
  const json& all = reader.at("architectures");
  if (!all.is_array() || (!all.empty() && !all[0].is_string()))
    reader.fail("architectures", "must be a list of strings");
  return all.empty() ? std::string() : all[0].get<std::string>();
}

ModelFamily parse_family(const Reader& reader, const std::string& source) {
  const std::string type = reader.text("model_type", "");
  const std::string architecture = first_architecture(reader);
  if (type.empty() && architecture.empty())
    fail_user(source + ": neither model_type nor architectures says what model this is; known are " + kKnown);
  for (const auto& [family, its_type, its_architecture] : kFamilies) {
    const bool same =
        architecture.empty() || architecture == its_architecture || architecture == classifier_of(its_architecture);
    if ((type.empty() || type == its_type) && same) return family;
  }
  const auto known = [](const std::string& name) {
    return std::any_of(std::begin(kFamilies), std::end(kFamilies), [&](const auto& family) {
      return name == std::get<1>(family) || name == std::get<2>(family) || name == classifier_of(std::get<2>(family));
    });
  };
  if (known(type) && known(architecture))
    fail_user(source + ": model_type " + type + " and architecture " + architecture + " do not belong together");
  fail_user(source + ": unknown architecture " + (architecture.empty() || known(architecture) ? type : architecture) +
            "; known are " + kKnown);
}

// Whether the model has a value head. transformers names labels in id2label, and means two where a file names none.
bool parse_value_head(const Reader& reader, const std::string& source) {
  const std::string architecture = first_architecture(reader);
  if (!ends_with(architecture, "ForSequenceClassification")) return false;
  int64_t labels = reader.integer("num_labels", 2);
  if (reader.has("id2label")) {
    if (!reader.at("id2label").is_object()) reader.fail("id2label", "must be an object");
    labels = static_cast<int64_t>(reader.at("id2label").size());
  }
  if (labels == 1) return true;
  fail_user(source + ": " + architecture + " with " + std::to_string(labels) +
            " labels (id2label, num_labels) is not supported; a value or reward model has one");
}

// What Qwen3's and Mixtral's own files never say otherwise. Each of it would change the model, so none is passed over.
void require_plain_routing(const Reader& reader) {
  for (const char* key : {"shared_expert_intermediate_size", "n_shared_experts", "num_shared_experts"}) {
    if (reader.integer(key, 0) != 0) reader.fail(key, "is not 0: shared experts are not supported");
  }
  for (const char* key : {"n_group", "num_expert_group", "topk_group"}) {
    if (reader.integer(key, 1) > 1) reader.fail(key, "is above 1: routing by groups of experts is not supported");
  }
  for (const char* key : {"scoring_func", "router_scoring_func", "moe_router_activation_func"}) {
    if (const std::string score = reader.text(key, "softmax"); score != "softmax")
      reader.fail(key, score + " is not supported; softmax is");
  }
  for (const char* key : {"moe_router_enable_expert_bias", "use_expert_bias", "router_bias"}) {
    if (reader.flag(key, false)) reader.fail(key, "true is not supported: experts are chosen without a bias");
  }
  if (const std::string method = reader.text("topk_method", "greedy"); method != "greedy")
    reader.fail("topk_method", method + " is not supported; greedy is");
  if (reader.integer("first_k_dense_replace", 0) != 0)
    reader.fail("first_k_dense_replace", "is not 0: layers without experts are named by mlp_only_layers");
  if (reader.integer("moe_layer_freq", 1) != 1)
    reader.fail("moe_layer_freq", "is not 1: layers with experts are named by decoder_sparse_step");
  if (reader.number("routed_scaling_factor", 1.0) != 1.0)
    reader.fail("routed_scaling_factor", "other than 1 is not supported");
  if (reader.number("router_jitter_noise", 0.0) != 0.0)
    reader.fail("router_jitter_noise", "other than 0 is not supported: routing must be the same in every pass");
}

// Both spellings: Qwen's num_experts and Mixtral's num_local_experts.
void parse_experts(ModelConfig& config, const Reader& reader) {
  const bool mixtral = config.family == ModelFamily::kMixtral;
  require_plain_routing(reader);
  const char* const count = reader.has("num_experts") ? "num_experts" : "num_local_experts";
  config.num_experts = reader.positive(count, mixtral ? 8 : 128);
  if (reader.has("num_local_experts") && reader.integer("num_local_experts") != config.num_experts)
    reader.fail("num_local_experts", "is another number than num_experts");
  config.experts_per_token = reader.positive("num_experts_per_tok", mixtral ? 2 : 8);
  if (config.experts_per_token > config.num_experts) {
    reader.fail("num_experts_per_tok", std::to_string(config.experts_per_token) + " is more than " + count + " " +
                                           std::to_string(config.num_experts));
  }
  if (mixtral) {
    config.moe_intermediate_size = config.intermediate_size;
    config.normalize_experts = true;
    config.router_aux_loss_coef = reader.number("router_aux_loss_coef", 0.001);
    return;
  }
  config.moe_intermediate_size = reader.positive("moe_intermediate_size", 768);
  config.normalize_experts = reader.flag("norm_topk_prob", false);
  config.router_aux_loss_coef = reader.number("router_aux_loss_coef", 0.001);
  config.sparse_step = reader.positive("decoder_sparse_step", 1);
  if (!reader.has("mlp_only_layers")) return;
  const json& layers = reader.at("mlp_only_layers");
  if (!layers.is_array()) reader.fail("mlp_only_layers", "must be a list of layers");
  for (const json& layer : layers) {
    if (!layer.is_number_integer() || layer.get<int64_t>() < 0 || layer.get<int64_t>() >= config.num_layers)
      reader.fail("mlp_only_layers", "names " + layer.dump() + ", which is none of the layers");
    config.dense_layers.push_back(layer.get<int64_t>());
  }
}

// As transformers reads it: without a factor it is the ratio of the two lengths, and a length beside rope_scaling comes
// before one inside.
void parse_yarn(RopeOptions& rope, const Reader& reader, const Reader& inner, int64_t max_position) {
  const char* const original = "original_max_position_embeddings";
  rope.scaling = RopeOptions::Scaling::kYarn;
  rope.original_max_position =
      reader.has(original) ? reader.positive(original) : inner.positive(original, max_position);
  rope.factor =
      inner.number("factor", static_cast<double>(max_position) / static_cast<double>(rope.original_max_position));
  if (rope.factor < 1.0) inner.fail("factor", "must be at least 1 for yarn");
  const auto or_default = [&](const char* key, double fallback) {  // there 0 is the same as absent
    const double value = inner.number(key, fallback);
    return value == 0.0 ? fallback : value;
  };
  rope.beta_fast = or_default("beta_fast", 32.0);
  rope.beta_slow = or_default("beta_slow", 1.0);
  if (rope.beta_slow < 0 || rope.beta_fast < rope.beta_slow)
    inner.fail("beta_fast", "must be at least beta_slow, both positive");
  rope.truncate = inner.flag("truncate", true);
  rope.attention_factor = inner.number(
      "attention_factor",
      yarn_attention_factor(rope.factor, inner.number("mscale", 0.0), inner.number("mscale_all_dim", 0.0)));
  if (rope.attention_factor <= 0) inner.fail("attention_factor", "must be positive");
  if (rope.theta <= 1.0) inner.fail("rope_theta", "must be above 1 for yarn");
}

RopeOptions parse_rope(const Reader& reader, const json& values, const std::string& source, int64_t head_dim,
                       int64_t max_position) {
  RopeOptions rope;
  rope.head_dim = head_dim;
  rope.theta = reader.number("rope_theta", 10000.0);
  rope.original_max_position = max_position;
  // transformers 5 holds everything in rope_parameters; 4 had rope_theta at the top and rope_scaling beside it.
  const char* key = reader.has("rope_parameters") ? "rope_parameters"
                    : reader.has("rope_scaling")  ? "rope_scaling"
                                                  : nullptr;
  if (reader.number("partial_rotary_factor", 1.0) != 1.0)
    reader.fail("partial_rotary_factor", "other than 1 is not supported");
  if (key == nullptr) return rope;
  if (!values[key].is_object()) reader.fail(key, "must be an object");
  const std::string inner_source = source + ": " + key;
  const Reader inner(values[key], inner_source);
  rope.theta = inner.number("rope_theta", rope.theta);
  if (inner.number("partial_rotary_factor", 1.0) != 1.0)
    inner.fail("partial_rotary_factor", "other than 1 is not supported");
  const std::string type = inner.text("rope_type", inner.text("type", "default"));
  if (type == "default") return rope;
  if (type == "yarn") {
    parse_yarn(rope, reader, inner, max_position);
    return rope;
  }
  rope.factor = inner.number("factor", 1.0);
  if (rope.factor <= 0) inner.fail("factor", "must be positive");
  if (type == "dynamic") {
    rope.scaling = RopeOptions::Scaling::kDynamic;
    return rope;
  }
  if (type == "linear") {
    rope.scaling = RopeOptions::Scaling::kLinear;
    return rope;
  }
  if (type == "llama3") {
    rope.scaling = RopeOptions::Scaling::kLlama3;
    rope.low_freq_factor = inner.number("low_freq_factor", 1.0);
    rope.high_freq_factor = inner.number("high_freq_factor", 4.0);
    rope.original_max_position = inner.positive("original_max_position_embeddings", max_position);
    if (rope.high_freq_factor <= rope.low_freq_factor) inner.fail("high_freq_factor", "must be above low_freq_factor");
    return rope;
  }
  inner.fail("rope_type", type + " is not supported; known are default, linear, dynamic, llama3, yarn");
}

void require_plain_attention(const Reader& reader, ModelFamily family) {
  if (reader.flag("use_sliding_window", false)) reader.fail("use_sliding_window", "true is not supported");
  // Mixtral's is on wherever it has a value.
  if (family == ModelFamily::kMixtral && reader.has("sliding_window"))
    reader.fail("sliding_window", reader.at("sliding_window").dump() + " is not supported; null is");
  if (!reader.has("layer_types")) return;
  for (const json& type : reader.at("layer_types")) {
    if (!type.is_string() || type.get<std::string>() != "full_attention") {
      reader.fail("layer_types", type.dump() + " is not supported; only full_attention is");
    }
  }
}

std::vector<int32_t> parse_token_ids(const Reader& reader, const std::string& key) {
  std::vector<int32_t> ids;
  if (!reader.has(key)) return ids;
  const json& value = reader.at(key);
  for (const json& id : value.is_array() ? value : json::array({value})) {
    if (!id.is_number_integer()) reader.fail(key, "must be an integer or a list of integers");
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

}  // namespace

const char* to_string(ModelFamily family) {
  switch (family) {
    case ModelFamily::kLlama:
      return "llama";
    case ModelFamily::kQwen2:
      return "qwen2";
    case ModelFamily::kQwen3:
      return "qwen3";
    case ModelFamily::kQwen3Moe:
      return "qwen3_moe";
    case ModelFamily::kMixtral:
      return "mixtral";
  }
  return "unknown";
}

ModelConfig ModelConfig::load(const std::filesystem::path& dir) {
  const std::filesystem::path path = dir / "config.json";
  std::string text;
  try {
    text = read_file(path);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kNotFound) throw;
    fail_user(dir.string() + " is not a model folder: it has no config.json");
  }
  const json values = json::parse(text, nullptr, false);
  if (values.is_discarded()) fail_user(path.string() + " is not valid JSON");
  return from_json(values, path.string());
}

ModelConfig ModelConfig::from_json(const json& values, const std::string& source) {
  if (!values.is_object()) fail_user(source + " is not a JSON object");
  const Reader reader(values, source);
  ModelConfig config;
  config.family = parse_family(reader, source);
  config.vocab_size = reader.positive("vocab_size");
  config.hidden_size = reader.positive("hidden_size");
  config.intermediate_size = reader.positive("intermediate_size");
  config.num_layers = reader.positive("num_hidden_layers");
  config.num_heads = reader.positive("num_attention_heads");
  config.num_kv_heads = reader.positive("num_key_value_heads", config.num_heads);
  const bool mixture = config.family == ModelFamily::kQwen3Moe || config.family == ModelFamily::kMixtral;
  // Qwen3's default is a constant, the others' follows from the sizes.
  const bool qwen3 = config.family == ModelFamily::kQwen3;
  config.head_dim =
      reader.positive("head_dim", qwen3 ? 128 : std::max<int64_t>(1, config.hidden_size / config.num_heads));
  if (!reader.has("head_dim") && !qwen3 && config.hidden_size % config.num_heads != 0) {
    reader.fail("hidden_size", std::to_string(config.hidden_size) + " is not a multiple of num_attention_heads " +
                                   std::to_string(config.num_heads));
  }
  if (config.num_heads % config.num_kv_heads != 0) {
    reader.fail("num_attention_heads", std::to_string(config.num_heads) + " is not a multiple of num_key_value_heads " +
                                           std::to_string(config.num_kv_heads));
  }
  if (config.head_dim % 2 != 0)
    reader.fail("head_dim", std::to_string(config.head_dim) + " is odd; rotary embedding needs an even one");
  config.max_position_embeddings = reader.positive("max_position_embeddings", 2048);
  config.rms_norm_eps = reader.number("rms_norm_eps", 1e-6);
  config.initializer_range = reader.number("initializer_range", 0.02);
  const std::string activation = reader.text("hidden_act", "silu");
  if (activation != "silu" && activation != "swish")
    reader.fail("hidden_act", activation + " is not supported; silu is");
  require_plain_attention(reader, config.family);
  config.rope = parse_rope(reader, values, source, config.head_dim, config.max_position_embeddings);
  config.value_head = parse_value_head(reader, source);
  config.tie_word_embeddings = reader.flag("tie_word_embeddings", false) && !config.value_head;
  const bool attention_bias = reader.flag("attention_bias", false);
  config.qkv_bias = config.family == ModelFamily::kQwen2 || attention_bias;
  config.output_bias = config.family != ModelFamily::kQwen2 && attention_bias;
  config.mlp_bias = config.family == ModelFamily::kLlama && reader.flag("mlp_bias", false);
  config.qk_norm = qwen3 || config.family == ModelFamily::kQwen3Moe;
  if (mixture) parse_experts(config, reader);
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (!mixture && reader.integer(key, 0) > 0)
      reader.fail(key, "makes it a mixture of experts, which " + std::string(to_string(config.family)) + " is not");
  }
  config.eos_token_ids = parse_token_ids(reader, "eos_token_id");
  const std::vector<int32_t> bos = parse_token_ids(reader, "bos_token_id");
  config.bos_token_id = bos.empty() ? -1 : bos[0];
  config.dtype = reader.text("dtype", reader.text("torch_dtype", "float32"));
  return config;
}

namespace {

json scaling_json(const RopeOptions& rope) {
  using Scaling = RopeOptions::Scaling;
  json scaling = {{"factor", rope.factor}};
  scaling["rope_type"] = rope.scaling == Scaling::kLlama3    ? "llama3"
                         : rope.scaling == Scaling::kYarn    ? "yarn"
                         : rope.scaling == Scaling::kDynamic ? "dynamic"
                                                             : "linear";
  if (rope.scaling == Scaling::kLlama3) {
    scaling["low_freq_factor"] = rope.low_freq_factor;
    scaling["high_freq_factor"] = rope.high_freq_factor;
    scaling["original_max_position_embeddings"] = rope.original_max_position;
  }
  if (rope.scaling == Scaling::kYarn) {
    scaling["original_max_position_embeddings"] = rope.original_max_position;
    scaling["beta_fast"] = rope.beta_fast;
    scaling["beta_slow"] = rope.beta_slow;
    scaling["attention_factor"] = rope.attention_factor;
    if (!rope.truncate) scaling["truncate"] = false;
  }
  return scaling;
}

json one_label() { return {{"id2label", {{"0", "LABEL_0"}}}, {"label2id", {{"LABEL_0", 0}}}}; }

json experts_json(const ModelConfig& config) {
  json values = {{"num_experts_per_tok", config.experts_per_token},
                 {"router_aux_loss_coef", config.router_aux_loss_coef},
                 {"output_router_logits", false}};
  if (config.family == ModelFamily::kMixtral) {
    values["num_local_experts"] = config.num_experts;
    values["sliding_window"] = nullptr;
    return values;
  }
  values["num_experts"] = config.num_experts;
  values["moe_intermediate_size"] = config.moe_intermediate_size;
  values["norm_topk_prob"] = config.normalize_experts;
  values["decoder_sparse_step"] = config.sparse_step;
  values["mlp_only_layers"] = config.dense_layers;
  return values;
}

}  // namespace

int64_t ModelConfig::positions() const {
  using Scaling = RopeOptions::Scaling;
  const auto stretched = [&](int64_t length) {
    return static_cast<int64_t>(std::floor(static_cast<double>(length) * rope.factor));
  };
  if (rope.scaling == Scaling::kYarn) return std::max(max_position_embeddings, stretched(rope.original_max_position));
  if (rope.scaling == Scaling::kLinear) return std::max(max_position_embeddings, stretched(max_position_embeddings));
  return max_position_embeddings;
}

ModelConfig ModelConfig::with_value_head() const {
  ModelConfig config = *this;
  config.value_head = true;
  config.tie_word_embeddings = false;
  return config;
}

json ModelConfig::to_json() const {
  const auto* known = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                   [this](const auto& its) { return std::get<0>(its) == family; });
  json values = {
      {"architectures", {value_head ? classifier_of(std::get<2>(*known)) : std::get<2>(*known)}},
      {"model_type", to_string(family)},
      {"vocab_size", vocab_size},
      {"hidden_size", hidden_size},
      {"intermediate_size", intermediate_size},
      {"num_hidden_layers", num_layers},
      {"num_attention_heads", num_heads},
      {"num_key_value_heads", num_kv_heads},
      {"head_dim", head_dim},
      {"max_position_embeddings", max_position_embeddings},
      {"rms_norm_eps", rms_norm_eps},
      {"initializer_range", initializer_range},
      {"hidden_act", "silu"},
      {"tie_word_embeddings", tie_word_embeddings},
      {"attention_dropout", 0.0},
      {"use_cache", true},
      {"rope_theta", rope.theta},
      {"dtype", dtype},
      {"torch_dtype", dtype},
  };
  json rope_values = {{"rope_theta", rope.theta}, {"rope_type", "default"}};
  if (rope.scaling != RopeOptions::Scaling::kNone) {
    const json scaling = scaling_json(rope);
    values["rope_scaling"] = scaling;
    rope_values.update(scaling);
  }
  values["rope_parameters"] = rope_values;
  const bool mixtral = family == ModelFamily::kMixtral;
  if (family != ModelFamily::kQwen2 && !mixtral) values["attention_bias"] = qkv_bias;
  if (family == ModelFamily::kLlama) values["mlp_bias"] = mlp_bias;
  if (family != ModelFamily::kLlama && !mixtral) values["use_sliding_window"] = false;
  if (num_experts > 0) values.update(experts_json(*this));
  if (value_head) values.update(one_label());
  if (eos_token_ids.size() == 1) values["eos_token_id"] = eos_token_ids[0];
  if (eos_token_ids.size() > 1) values["eos_token_id"] = eos_token_ids;
  if (eos_token_ids.empty()) values["eos_token_id"] = nullptr;
  values["bos_token_id"] = bos_token_id >= 0 ? json(bos_token_id) : json(nullptr);
  return values;
}

std::vector<LinearShape> ModelConfig::linear_shapes() const {
  return linear_shapes(local_shape(shape(), model_split(shape(), {}, 0)));
}

std::vector<LinearShape> ModelConfig::linear_shapes(const LocalShape& own) const {
  std::vector<LinearShape> shapes = {
      {.in = own.hidden, .out = own.query_width() + 2 * own.key_width(), .bias = qkv_bias},
      {.in = own.query_width(), .out = own.hidden, .bias = output_bias}};
  if (layers_with_experts() < num_layers) {
    shapes.push_back({.in = own.hidden, .out = 2 * own.intermediate, .gate_up = !mlp_bias, .bias = mlp_bias});
    shapes.push_back({.in = own.intermediate, .out = own.hidden, .bias = mlp_bias});
  }
  if (own.vocab > 0 && !value_head) shapes.push_back({.in = own.hidden, .out = own.vocab, .head = true});
  return shapes;
}

ModelShape ModelConfig::shape() const {
  ModelShape shape{.layers = num_layers,
                   .hidden = hidden_size,
                   .heads = num_heads,
                   .kv_heads = num_kv_heads,
                   .head_dim = head_dim,
                   .intermediate = intermediate_size,
                   .vocab = vocab_size,
                   .tied = tie_word_embeddings && !value_head,
                   .value_head = value_head,
                   .qkv_bias = qkv_bias,
                   .output_bias = output_bias,
                   .mlp_bias = mlp_bias,
                   .qk_norm = qk_norm,
                   .experts = num_experts,
                   .experts_per_token = experts_per_token,
                   .moe_intermediate = moe_intermediate_size,
                   .sparse_step = sparse_step,
                   .dense_layers = dense_layers,
                   .mixtral_names = family == ModelFamily::kMixtral};
  bool dense = false;
  for (int64_t layer = 0; layer < num_layers; ++layer) dense = dense || !shape.has_experts(layer);
  if (!dense) shape.intermediate = 0;
  return shape;
}

int64_t ModelConfig::layers_with_experts() const {
  const ModelShape own = shape();
  int64_t count = 0;
  for (int64_t layer = 0; layer < num_layers; ++layer) count += own.has_experts(layer) ? 1 : 0;
  return count;
}

int64_t ModelConfig::parameter_count() const { return trireme::parameter_count(shape()); }

double ModelConfig::forward_flops_per_token(double context) const {
  const double q = static_cast<double>(num_heads * head_dim), kv = static_cast<double>(num_kv_heads * head_dim);
  const double hidden = static_cast<double>(hidden_size);
  const auto sparse = static_cast<double>(layers_with_experts()), layers = static_cast<double>(num_layers);
  const double attention = hidden * (q + 2 * kv) + q * hidden;
  const double dense = 3 * hidden * static_cast<double>(intermediate_size);
  const double experts = hidden * static_cast<double>(num_experts) +
                         3 * hidden * static_cast<double>(experts_per_token * moe_intermediate_size);
  return 2 * (layers * attention + (layers - sparse) * dense + sparse * experts) + layers * 4 * q * context +
         2 * hidden * (value_head ? 1 : static_cast<double>(vocab_size));
}

}  // namespace trireme
