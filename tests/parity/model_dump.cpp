// model_dump MODEL_DIR INPUT OUTPUT EXPORT_DIR: reads ids [tokens] and starts [sequences + 1] (int64) from INPUT,
// writes to OUTPUT the logits, the next-token log-probs, the gradients of their mean, a greedy continuation and, of a
// mixture, how often each sequence chose each expert of each layer, and saves the model to EXPORT_DIR. All files are
// safetensors. model_dump --values MODEL_DIR INPUT OUTPUT EXPORT_DIR: of a value model the value of each token, and the
// gradients of their mean. model_dump --init DIR: random models of every family, made by init_model alone, below DIR.
#include <ATen/ATen.h>

#include <iostream>

#include "base/error.h"
#include "trainer/model/model.h"
#include "trainer/model/safetensors.h"
#include "trainer/ops/router_watch.h"

namespace trireme {
namespace {

std::vector<int64_t> values_of(const at::Tensor& tensor) {
  const at::Tensor host = tensor.contiguous();
  return {host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel()};
}

// Greedy tokens after the first sequence, one forward_cached each.
at::Tensor continue_greedily(const Model& model, std::vector<int64_t> prompt, int64_t count) {
  KvArena arena(model.config(), static_cast<int64_t>(prompt.size()) + count, model.options().dtype, at::kCPU);
  std::vector<int64_t> ids = prompt, generated;
  int64_t past = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto tokens = static_cast<int64_t>(ids.size());
    const at::Tensor hidden = model.forward_cached(
        {at::tensor(ids, at::kLong), at::arange(past, past + tokens, at::kLong), {{{0, past, tokens}}}}, arena);
    past += tokens;
    ids = sample_tokens(hidden.narrow(0, tokens - 1, 1), model.head_weight(), {{{}, {}, true}}).ids;
    generated.push_back(ids[0]);
  }
  return at::tensor(generated, at::kLong);
}

// [sequences, layers, experts] float64; layers without experts have zeros.
at::Tensor choices_of_sequences(Model& model, const std::vector<int64_t>& ids, const std::vector<int64_t>& starts) {
  const ModelConfig& config = model.config();
  model.router_watch =
      std::make_shared<RouterWatch>(config.num_layers, config.num_experts, BalanceOptions(), at::Device(at::kCPU));
  std::vector<at::Tensor> choices;
  for (size_t s = 0; s + 1 < starts.size(); ++s) {
    (void)model.forward(PackedBatch::from_sequences({{ids.begin() + starts[s], ids.begin() + starts[s + 1]}}));
    choices.push_back(model.router_watch->take().of_layers.narrow(1, 0, config.num_experts));
  }
  return at::stack(choices);
}

PackedBatch read_batch(const SafetensorsFile& file) {
  PackedBatch batch;
  batch.ids = file.tensor("ids").clone();
  batch.starts = values_of(file.tensor("starts"));
  std::vector<int64_t> positions;
  for (size_t s = 0; s + 1 < batch.starts.size(); ++s) {
    for (int64_t t = batch.starts[s]; t < batch.starts[s + 1]; ++t) positions.push_back(t - batch.starts[s]);
  }
  batch.positions = at::tensor(positions, at::kLong);
  return batch;
}

void dump_values(const std::filesystem::path& dir, const std::filesystem::path& input,
                 const std::filesystem::path& output, const std::filesystem::path& exported) {
  ModelOptions all_trained;
  all_trained.freeze_router = false;
  const auto model = load_value_model(dir, all_trained);
  const at::Tensor values = model->values(model->forward(read_batch(SafetensorsFile(input))));
  values.mean().backward();
  NamedTensors out = {{"values", values.detach()}};
  for (const Parameter& parameter : model->parameters())
    out.emplace_back("grad." + parameter.name, parameter.tensor.grad());
  write_safetensors(output, out);
  SaveOptions save;
  save.source_dir = dir;
  save_model(*model, exported, save);
}

void dump(const std::filesystem::path& dir, const std::filesystem::path& input, const std::filesystem::path& output,
          const std::filesystem::path& exported) {
  ModelOptions all_trained;
  all_trained.freeze_router = false;
  const auto model = load_model(dir, all_trained);
  const SafetensorsFile file(input);
  PackedBatch batch;
  batch.ids = file.tensor("ids").clone();
  batch.starts = values_of(file.tensor("starts"));
  std::vector<int64_t> positions, rows, targets;
  const std::vector<int64_t> ids = values_of(batch.ids);
  for (size_t s = 0; s + 1 < batch.starts.size(); ++s) {
    for (int64_t t = batch.starts[s]; t < batch.starts[s + 1]; ++t) {
      positions.push_back(t - batch.starts[s]);
      if (t + 1 == batch.starts[s + 1]) continue;
      rows.push_back(t);
      targets.push_back(ids[static_cast<size_t>(t) + 1]);
    }
  }
  batch.positions = at::tensor(positions, at::kLong);
  const at::Tensor hidden = model->forward(batch);
  const at::Tensor logprobs = token_logprobs(hidden.index_select(0, at::tensor(rows, at::kLong)), model->head_weight(),
                                             at::tensor(targets, at::kLong), {});
  logprobs.mean().backward();
  NamedTensors out = {{"logits", head_logits(hidden.detach(), model->head_weight().detach())},
                      {"logprobs", logprobs.detach()}};
  for (const Parameter& parameter : model->parameters())
    out.emplace_back("grad." + parameter.name, parameter.tensor.grad());
  out.emplace_back("greedy", continue_greedily(*model, {ids.begin(), ids.begin() + batch.starts[1]}, 12));
  if (model->config().num_experts > 0) out.emplace_back("choices", choices_of_sequences(*model, ids, batch.starts));
  write_safetensors(output, out);
  SaveOptions save;
  save.source_dir = dir;
  save.max_shard_bytes = 20'000;  // several shards even for these sizes
  save_model(*model, exported, save);
}

void init_families(const std::filesystem::path& dir) {
  ModelConfig config;
  config.vocab_size = 70, config.hidden_size = 32, config.intermediate_size = 48, config.num_layers = 2;
  config.num_heads = 4, config.num_kv_heads = 2, config.head_dim = 8, config.rope.head_dim = 8;
  config.max_position_embeddings = 128, config.initializer_range = 0.2, config.eos_token_ids = {2, 3};
  config.dtype = "float32";
  init_model(dir / "llama", config, 1);
  config.rope.theta = 500000.0;
  config.rope.scaling = RopeOptions::Scaling::kLlama3;
  config.rope.factor = 8.0, config.rope.original_max_position = 4;
  init_model(dir / "llama3", config, 2);
  config.rope.scaling = RopeOptions::Scaling::kNone;
  config.family = ModelFamily::kQwen2, config.qkv_bias = true, config.tie_word_embeddings = true;
  init_model(dir / "qwen2", config, 3);
  config.family = ModelFamily::kQwen3, config.qkv_bias = false, config.qk_norm = true;
  config.head_dim = config.rope.head_dim = 16;
  init_model(dir / "qwen3", config, 4);
  config.family = ModelFamily::kQwen3Moe, config.tie_word_embeddings = false;
  config.num_experts = 8, config.experts_per_token = 2, config.moe_intermediate_size = 24, config.dense_layers = {0};
  init_model(dir / "qwen3_moe", config, 5);
  config.family = ModelFamily::kMixtral, config.qk_norm = false, config.dense_layers = {};
  config.moe_intermediate_size = config.intermediate_size;
  init_model(dir / "mixtral", config, 6);
}

}  // namespace
}  // namespace trireme

int main(int argc, char** argv) {
  const bool init = argc == 3 && std::string(argv[1]) == "--init";
  const bool values = argc == 6 && std::string(argv[1]) == "--values";
  if (argc != 5 && !init && !values) {
    std::cerr << "usage: model_dump [--values] MODEL_DIR INPUT OUTPUT EXPORT_DIR | model_dump --init DIR\n";
    return 2;
  }
  try {
    if (init) trireme::init_families(argv[2]);
    if (values) trireme::dump_values(argv[2], argv[3], argv[4], argv[5]);
    if (!init && !values) trireme::dump(argv[1], argv[2], argv[3], argv[4]);
  } catch (const std::exception& error) {
    std::cerr << "model_dump: " << error.what() << "\n";
    return 1;
  }
}
