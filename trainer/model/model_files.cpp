// Models on disk: loading, saving, random initialisation.
#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/model/model.h"
#include "trainer/model/model_folder.h"
#include "trainer/model/safetensors.h"
#include "trainer/ops/parallel.h"
#include "trainer/ops/philox.h"
#include "trainer/parallel/exchange.h"

namespace trireme {
namespace {

using nlohmann::json;

std::string shape_text(at::IntArrayRef shape) {
  std::vector<std::string> sizes;
  for (const int64_t size : shape) sizes.push_back(std::to_string(size));
  return "[" + join(sizes, ", ") + "]";
}

constexpr const char* kHeadName = "lm_head.weight";
constexpr const char* kValueHeadName = "score.weight";

// Tensors that checkpoints carry although the model has no use for them.
bool is_redundant(const std::string& name, const ModelConfig& config) {
  return (config.tie_word_embeddings && name == kHeadName) || ends_with(name, ".rotary_emb.inv_freq");
}

constexpr const char* kCompanions[] = {"tokenizer.json",
                                       "tokenizer_config.json",
                                       "special_tokens_map.json",
                                       "added_tokens.json",
                                       "chat_template.jinja",
                                       "chat_template.json",
                                       "vocab.json",
                                       "merges.txt",
                                       "tokenizer.model",
                                       "generation_config.json"};

json generation_config(const ModelConfig& config) {
  const json full = config.to_json();
  return {{"_from_model_config", true}, {"bos_token_id", full["bos_token_id"]}, {"eos_token_id", full["eos_token_id"]}};
}

// The source's own config.json where it describes this model, so that keys unknown here survive.
json config_to_save(const Model& model, const SaveOptions& options, const std::string& dtype) {
  ModelConfig config = model.config();
  config.dtype = dtype;
  json values = config.to_json();
  if (options.source_dir.empty()) return values;
  const std::filesystem::path path = options.source_dir / "config.json";
  if (!std::filesystem::exists(path)) return values;
  json source = json::parse(read_file(path), nullptr, false);
  if (source.is_discarded() || !source.is_object()) fail_user(path.string() + " is not valid JSON");
  ModelConfig described = ModelConfig::from_json(source, path.string());
  if (config.value_head && !described.value_head) {  // the causal model that this one began as
    described = described.with_value_head();
    for (const char* key : {"architectures", "tie_word_embeddings", "id2label", "label2id"}) source[key] = values[key];
    source.erase("num_labels");
  }
  described.dtype = dtype;
  if (!(described == config)) {
    log_warn("model", path.string() + " describes another model than the one being saved; its keys are not copied");
    return values;
  }
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (source.contains(key)) source[key] = dtype;
  }
  if (!source.contains("dtype") && !source.contains("torch_dtype")) source["torch_dtype"] = dtype;
  return source;
}

}  // namespace

void load_parameters(Model& model, const std::filesystem::path& dir) {
  const at::NoGradGuard no_grad;
  const bool without_values = model.config().value_head && !ModelConfig::load(dir).value_head;
  std::set<std::string> seen, elsewhere;  // elsewhere: what other ranks hold
  for (const ModelParameter& parameter : model_parameters(model.config().shape())) {
    if (model.find(parameter.name) == nullptr) elsewhere.insert(parameter.name);
  }
  read_model_tensors(dir, [&](const std::string& name, const at::Tensor& value, const std::string& file) {
    const Parameter* parameter = model.find(name);
    if (parameter == nullptr) {
      if (is_redundant(name, model.config()) || elsewhere.count(name) > 0) return;
      if (without_values && name == kHeadName) return;
      fail_user(file + ": unexpected tensor " + name + " " + shape_text(value.sizes()) + "; config.json (" +
                to_string(model.config().family) + ") has no place for it");
    }
    const ParameterSlice& slice = parameter->slice;
    if (value.sizes() != at::IntArrayRef(slice.shape)) {
      fail_user(file + ": tensor " + name + " has shape " + shape_text(value.sizes()) + ", config.json says " +
                shape_text(slice.shape));
    }
    if (!at::isFloatingType(value.scalar_type()) || value.element_size() < 2) {
      fail_user(file + ": tensor " + name + " has dtype " + c10::toString(value.scalar_type()) +
                ", weights must be F64, F32, F16 or BF16");
    }
    if (!seen.insert(name).second) fail_data(file + ": tensor " + name + " occurs twice");
    parameter->tensor.detach().copy_(value.narrow(slice.dimension, slice.range.begin, slice.range.size()));
  });
  if (const Parameter* head = model.find(kValueHeadName);
      head != nullptr && without_values && seen.insert(kValueHeadName).second)
    head->tensor.detach().zero_();
  std::vector<std::string> missing;
  for (const Parameter& parameter : model.parameters()) {
    if (seen.count(parameter.name) == 0) missing.push_back(parameter.name);
  }
  if (missing.empty()) return;
  const size_t count = missing.size();
  if (missing.size() > 3) missing.resize(3);
  fail_user(dir.string() + ": the weights lack " + std::to_string(count) + " tensor" + (count > 1 ? "s" : "") + ": " +
            join(missing, ", ") + (count > missing.size() ? ", ..." : ""));
}

void require_cuda_kernels(const ModelConfig& config, const std::string& source, int64_t etp) {
  const auto refuse = [&](const std::string& what) {
    fail_user(source + ": " + what + "; the CPU takes it (cluster.device=cpu, --device cpu)");
  };
  if (config.head_dim != 64 && config.head_dim != 128)
    refuse("head_dim " + std::to_string(config.head_dim) + " has no kernels on CUDA, 64 and 128 have");
  if (config.num_experts > 0) {
    if (config.hidden_size % 128 != 0)
      refuse("hidden_size " + std::to_string(config.hidden_size) +
             " is no multiple of 128, which experts on CUDA need");
    if (config.moe_intermediate_size % (64 * etp) != 0) {
      refuse("an expert's width " + std::to_string(config.moe_intermediate_size) + " is no multiple of 64" +
             (etp == 1 ? "" : " for each of " + std::to_string(etp) + " expert tensor parallel ranks"));
    }
    if (config.num_experts > 512 || config.experts_per_token > 16)
      refuse("there are kernels for up to 512 experts and 16 of them a token");
  }
}

namespace {

std::unique_ptr<Model> load_as(const ModelConfig& config, const std::filesystem::path& dir,
                               const ModelOptions& options) {
  if (options.device.is_cuda())
    require_cuda_kernels(config, (dir / "config.json").string(), options.split ? options.split->etp : 1);
  auto model = std::make_unique<Model>(config, options);
  load_parameters(*model, dir);
  if (options.device.is_cpu()) choose_linear_mode(model->linear_shapes(), options.dtype);
  return model;
}

}  // namespace

std::unique_ptr<Model> load_model(const std::filesystem::path& dir, const ModelOptions& options) {
  const ModelConfig config = ModelConfig::load(dir);
  if (config.value_head)
    fail_user(dir.string() +
              " is a value or reward model (...ForSequenceClassification): it gives a number for each token, no text; "
              "name the folder of a causal model");
  return load_as(config, dir, options);
}

std::unique_ptr<Model> load_value_model(const std::filesystem::path& dir, const ModelOptions& options) {
  return load_as(ModelConfig::load(dir).with_value_head(), dir, options);
}

void save_model_description(const Model& model, const std::filesystem::path& dir, const SaveOptions& options) {
  std::error_code problem;
  std::filesystem::create_directories(dir, problem);
  if (problem) fail_io("cannot make folder " + dir.string() + ": " + problem.message());
  const at::ScalarType dtype = options.dtype.value_or(model.options().dtype);
  write_file_atomic(dir / "config.json", config_to_save(model, options, dtype_name(dtype)).dump(2) + "\n");
  bool generation = false;
  for (const char* name : kCompanions) {
    if (options.source_dir.empty() || !std::filesystem::exists(options.source_dir / name)) continue;
    if (std::filesystem::equivalent(options.source_dir, dir, problem)) continue;
    write_file_atomic(dir / name, read_file(options.source_dir / name));
    generation = generation || std::string_view(name) == "generation_config.json";
  }
  if (!generation && !std::filesystem::exists(dir / "generation_config.json")) {
    write_file_atomic(dir / "generation_config.json", generation_config(model.config()).dump(2) + "\n");
  }
}

at::Tensor gather_parameter(const Model& model, Communicator& ranks, const std::string& name, int to) {
  const at::NoGradGuard no_grad;
  const ModelSplit& held = model.split();
  const ModelShape shape = model.config().shape();
  const Parameter* own = model.find(name);
  // One copy of the weights: of expert ranks those beyond the tensor ones are data parallel.
  const Layout layout{
      .tp = held.tp, .ep = held.ep, .dp = ranks.size() / (held.tp * held.pp), .pp = held.pp, .etp = held.etp};
  TRIREME_CHECK(layout.copy_ranks() * held.pp == ranks.size(), "ranks hold the model together");
  std::vector<int64_t> whole, rows_of_ranks;
  std::vector<Range> known;
  int64_t dimension = 0;
  for (int rank = 0; rank < ranks.size(); ++rank) {
    const ModelSplit split = model_split(shape, layout, rank, held.stages);
    const std::optional<ParameterSlice> slice = parameter_slice(shape, split, name);
    // An earlier rank has the same of it: tensor ranks what all hold alike, data parallel ones all but split experts.
    const bool again =
        slice && (slice->tied_copy || std::find(known.begin(), known.end(), slice->range) != known.end());
    rows_of_ranks.push_back(slice && !again ? slice->range.size() : 0);
    if (!slice) continue;
    known.push_back(slice->range);
    whole = slice->shape;
    dimension = slice->dimension;
  }
  // Along the cut, which comes first.
  std::vector<int64_t> sizes = whole;
  std::swap(sizes.front(), sizes[static_cast<size_t>(dimension)]);
  const int64_t mine = rows_of_ranks[static_cast<size_t>(ranks.rank())];
  sizes.front() = mine;
  const at::Tensor part = mine > 0 ? own->tensor.detach().transpose(0, dimension).contiguous()
                                   : at::empty(sizes, model.flat_parameters().options());
  std::vector<int64_t> sent(static_cast<size_t>(ranks.size()), 0), received(sent);
  sent[static_cast<size_t>(to)] = mine;
  if (ranks.rank() == to) received = rows_of_ranks;
  const at::Tensor all = all_to_all_rows(ranks, part, sent, received);
  return ranks.rank() == to ? all.transpose(0, dimension).contiguous().cpu() : at::Tensor();
}

void save_model(const Model& model, const std::filesystem::path& dir, const SaveOptions& options) {
  TRIREME_CHECK(!model.options().split, "a split model is saved by its checkpoints");
  save_model_description(model, dir, options);
  NamedTensors tensors;
  for (const Parameter& parameter : model.parameters()) {
    tensors.emplace_back(parameter.name, parameter.tensor.detach().contiguous());
  }
  write_sharded(dir, tensors, options.max_shard_bytes, options.dtype.value_or(model.options().dtype));
}

void init_parameters(Model& model, uint64_t seed) {
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : model.parameters()) {
    at::Tensor target = parameter.tensor.detach();
    if (target.dim() == 1) {
      target.fill_(ends_with(parameter.name, "norm.weight") ? 1.0 : 0.0);
      continue;
    }
    // Drawn by the place in the whole parameter, so that a slice has the whole's values.
    const ParameterSlice& slice = parameter.slice;
    const int64_t columns = target.size(1), stride = slice.shape[1];
    const int64_t row0 = slice.dimension == 0 ? slice.range.begin : 0;
    const int64_t column0 = slice.dimension == 1 ? slice.range.begin : 0;
    const int64_t elements = target.numel();  // without padding
    at::Tensor values = at::empty({elements}, at::kFloat);
    auto* value = values.mutable_data_ptr<float>();
    const uint64_t id = hash64(parameter.name);
    const double range = model.config().initializer_range;
    parallel_tasks(elements, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t place = (row0 + i / columns) * stride + column0 + i % columns;
        value[i] = static_cast<float>(range * philox_normal(seed, id, static_cast<uint64_t>(place)));
      }
    });
    target.copy_(values.view(target.sizes()));
  }
}

namespace {

// Rows choose experts by what they are. With small embeddings, and outputs of attention and MLP as large as what they
// read, all rows of a context would be alike behind a few layers and choose the same experts, which no trained model
// does: so embeddings of 1, and outputs smaller by the root of twice the layers, as Megatron draws them.
double deviation_of_draw(const ModelConfig& config, const std::string& name) {
  const double range = config.initializer_range;
  if (config.num_experts == 0 || config.tie_word_embeddings) return range;
  if (name == "model.embed_tokens.weight") return 1.0;
  const bool output =
      ends_with(name, "o_proj.weight") || ends_with(name, "down_proj.weight") || ends_with(name, "w2.weight");
  return output ? range / std::sqrt(2.0 * static_cast<double>(config.num_layers)) : range;
}

}  // namespace

void draw_parameters(Model& model, uint64_t seed) {
  const at::NoGradGuard no_grad;
  at::Generator shared = at::globalContext().defaultGenerator(model.options().device);
  at::Generator generator = [&shared] {  // its own, so that no other thread draws between ours
    const std::lock_guard<std::mutex> lock(shared.mutex());
    return shared.clone();
  }();
  for (Parameter& parameter : model.parameters()) {
    // By its name: two stages of a pipeline may hold one parameter, ranks other experts.
    generator.set_current_seed(seed ^ hash64(parameter.name));
    at::Tensor values = parameter.tensor.detach();
    if (values.dim() > 1)
      values.normal_(0.0, deviation_of_draw(model.config(), parameter.name), generator);
    else
      values.fill_(ends_with(parameter.name, ".bias") ? 0.0 : 1.0);
  }
}

void init_model(const std::filesystem::path& dir, const ModelConfig& config, uint64_t seed) {
  ModelOptions options;
  options.trainable = false;
  Model model(config, options);
  init_parameters(model, seed);
  SaveOptions save;
  save.dtype = parse_dtype(config.dtype);
  save_model(model, dir, save);
}

}  // namespace trireme
