#include <fstream>
#include <iostream>
#include <limits>

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "trainer/algorithms/threads.h"
#include "trainer/bench/shapes.h"
#include "trainer/checkpoint/catalogue.h"
#include "trainer/cli/commands.h"
#include "trainer/cli/environment.h"
#include "trainer/config/config.h"
#include "trainer/model/model.h"
#include "trainer/parallel/device.h"
#include "trainer/rollout/generate.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {
namespace {

constexpr const char* kNoSpecialTokens =
    "encode plain text without the tokenizer's special tokens (a begin token); a line's \"add_special\" wins";

struct InitModelArguments {
  std::string out;
  std::string family = "qwen3";
  int64_t hidden = 128, layers = 4, heads = 4, kv_heads = 2, head_dim = 32, intermediate = 384, context = 1024,
          seed = 0;
  int64_t experts = 8, experts_per_token = 2, expert_width = 64;  // of families with experts
  bool experts_given = false;
  bool untied = false;
  std::string shape;  // of bench/shapes.h, instead of the sizes
  int64_t shape_layers = 0;
  bool no_weights = false;
};

// The shape's own vocabulary, of which the byte-level tokenizer knows the first ids; what it does not know has no text.
int init_shape(const InitModelArguments& a) {
  ModelConfig config = bench::find_shape(a.shape, a.shape_layers);
  config.eos_token_ids = {kByteImEnd};
  make_byte_tokenizer(a.out);
  if (a.no_weights) {
    write_file_atomic(std::filesystem::path(a.out) / "config.json", config.to_json().dump(2) + "\n");
  } else {
    init_model(a.out, config, static_cast<uint64_t>(a.seed));
  }
  std::cout << a.out << ": " << to_lower(a.shape) << " with " << config.parameter_count() << " parameters"
            << (a.no_weights ? " to be drawn (policy.random_weights=true)" : "") << " and a byte-level tokenizer\n";
  return 0;
}

int init_model_verb(const InitModelArguments& a) {
  if (!a.shape.empty()) return init_shape(a);
  if (a.hidden < 1 || a.layers < 1 || a.heads < 1 || a.kv_heads < 1 || a.head_dim < 2 || a.intermediate < 1 ||
      a.context < 1) {
    fail_user("init-model: every size must be positive");
  }
  const bool mixture = a.family == "qwen3_moe" || a.family == "mixtral";
  if (a.experts_given && !mixture) fail_user("init-model: --experts and its kin are of qwen3_moe and mixtral");
  make_byte_tokenizer(a.out);
  nlohmann::json json = {{"model_type", a.family},
                         {"vocab_size", kByteVocabSize},
                         {"hidden_size", a.hidden},
                         {"intermediate_size", a.intermediate},
                         {"num_hidden_layers", a.layers},
                         {"num_attention_heads", a.heads},
                         {"num_key_value_heads", a.kv_heads},
                         {"head_dim", a.head_dim},
                         {"hidden_act", "silu"},
                         {"rms_norm_eps", 1e-6},
                         {"rope_theta", 10000.0},
                         {"max_position_embeddings", a.context},
                         {"tie_word_embeddings", !a.untied},
                         {"initializer_range", 0.02},
                         {"eos_token_id", kByteImEnd},
                         {"torch_dtype", "float32"}};
  if (a.family == "qwen3_moe") {
    json.update({{"num_experts", a.experts},
                 {"num_experts_per_tok", a.experts_per_token},
                 {"moe_intermediate_size", a.expert_width},
                 {"norm_topk_prob", true}});
  }
  if (a.family == "mixtral") {
    json.update({{"num_local_experts", a.experts}, {"num_experts_per_tok", a.experts_per_token}});
    json["intermediate_size"] = a.expert_width;  // there is no other MLP
  }
  const ModelConfig config = ModelConfig::from_json(json, "init-model");
  init_model(a.out, config, static_cast<uint64_t>(a.seed));
  std::cout << a.out << ": " << a.family << " with " << config.parameter_count()
            << " parameters and a byte-level tokenizer\n";
  return 0;
}

// By the metric of the run that wrote them.
const CheckpointInfo& best_of(const std::vector<CheckpointInfo>& all, const std::string& folder) {
  const std::filesystem::path path = all.back().path / "config.yaml";
  std::vector<std::string> ignored;
  const Config config = load_config_text(read_file(path), {}, &ignored, path);
  const std::string metric = checkpoint_metric(config);
  if (metric.empty()) fail_user(path.string() + " names no checkpointing.metric_name, so that none is the best");
  const CheckpointInfo* best = best_checkpoint(all, metric, config.checkpointing.higher_is_better);
  if (best == nullptr) fail_user("no checkpoint in " + folder + " has the metric " + metric);
  std::cout << "step " << best->step << ": " << metric << " " << best->metrics.at(metric) << ", the "
            << (config.checkpointing.higher_is_better ? "highest" : "lowest") << " of " << all.size()
            << " checkpoints\n";
  return *best;
}

int export_verb(const std::string& checkpoint, const std::string& out, bool best) {
  namespace fs = std::filesystem;
  fs::path weights = fs::path(checkpoint) / "policy" / "weights";
  if (best && fs::exists(weights)) fail_user("--best chooses from a folder of checkpoints; " + checkpoint + " is one");
  if (!fs::exists(weights)) {  // the folder of all checkpoints: the newest
    const std::vector<CheckpointInfo> all = list_checkpoints(checkpoint);
    if (all.empty()) fail_user(checkpoint + " is neither a checkpoint (step_N) nor a folder of complete ones");
    weights = (best ? best_of(all, checkpoint) : all.back()).path / "policy" / "weights";
  }
  ModelOptions frozen;
  frozen.trainable = false;
  frozen.dtype = parse_dtype(ModelConfig::load(weights).dtype);
  const std::unique_ptr<Model> model = load_model(weights, frozen);
  SaveOptions save;
  save.source_dir = weights;
  save_model(*model, out, save);
  std::cout << weights.string() << " -> " << out << "\n";
  return 0;
}

struct GenerateArguments {
  std::string model, prompts = "-", out = "-";
  GenerateOptions options;
  SamplingOptions sampling;
  int64_t seed = 0;
  int64_t max_total_length = 0;
  bool no_special_tokens = false;
  std::string dtype, device = "auto";
};

struct Input {
  explicit Input(const std::string& path) : name(path == "-" ? "standard input" : path) {
    if (path == "-") return;
    file.open(path);
    if (!file) fail_user("cannot open " + path);
  }
  std::istream& stream() { return file.is_open() ? static_cast<std::istream&>(file) : std::cin; }
  std::string name;
  std::ifstream file;
};

struct Output {
  explicit Output(const std::string& path) : name(path) {
    if (path == "-") return;
    file.open(path);
    if (!file) fail_io("cannot write " + path);
  }
  std::ostream& stream() { return file.is_open() ? static_cast<std::ostream&>(file) : std::cout; }
  void finish() {
    stream().flush();
    if (!stream()) fail_io("cannot write " + name);
  }
  std::string name;
  std::ofstream file;
};

// dtype "": bfloat16 on CUDA, else float32.
std::unique_ptr<Model> load_frozen(const std::string& name, const std::string& dtype, const std::string& device) {
  ModelOptions frozen;
  frozen.trainable = false;
  frozen.device = choose_device(device, 0);
  frozen.dtype = parse_dtype(!dtype.empty() ? dtype : frozen.device.is_cuda() ? "bfloat16" : "float32");
  use_threads(1);
  return load_model(resolve_model(name, hf_home_from_environment()), frozen);
}

int generate_verb(GenerateArguments a) {
  const std::filesystem::path dir = resolve_model(a.model, hf_home_from_environment());
  const auto tokenizer = Tokenizer::load(dir);
  const std::unique_ptr<Model> model = load_frozen(a.model, a.dtype, a.device);
  a.sampling.seed = static_cast<uint64_t>(a.seed);
  a.sampling.stop_ids = tokenizer->eos_ids();
  a.options.add_special = !a.no_special_tokens;
  EngineOptions engine;
  engine.max_total_length = a.max_total_length;
  Input input(a.prompts);
  Output output(a.out);
  generate_jsonl(*model, *tokenizer, engine, a.sampling, a.options, input.stream(), input.name, output.stream());
  output.finish();
  return 0;
}

struct ScoreArguments {
  std::string model, text = "-", out = "-", dtype, device = "auto";
  bool no_special_tokens = false;
};

// {"text": ...} or {"ids": [...]} a line -> {"ids", "logprobs", "sum"}: log-probs of ids[1..].
int score_verb(const ScoreArguments& a) {
  const std::filesystem::path dir = resolve_model(a.model, hf_home_from_environment());
  const auto tokenizer = Tokenizer::load(dir);
  const std::unique_ptr<Model> model = load_frozen(a.model, a.dtype, a.device);
  Input input(a.text);
  Output output(a.out);
  std::string line;
  int64_t number = 0;
  while (std::getline(input.stream(), line)) {
    ++number;
    if (trim(line).empty()) continue;
    std::vector<int32_t> ids;
    try {
      ids = tokens_of_line(nlohmann::ordered_json::parse(line), "text", *tokenizer, !a.no_special_tokens,
                           model->config().vocab_size);
    } catch (const nlohmann::json::exception& error) {
      fail_data(input.name + ":" + std::to_string(number) + ": not valid JSON: " + error.what());
    } catch (const Error& error) {
      throw Error(error.kind(), input.name + ":" + std::to_string(number) + ": " + error.what());
    }
    std::vector<float> logprobs;
    if (ids.size() > 1) logprobs = score(*model, {ids}).front();
    double sum = 0;
    for (const float value : logprobs) sum += value;
    output.stream() << nlohmann::json{{"ids", ids}, {"logprobs", logprobs}, {"sum", sum}}.dump() << "\n";
  }
  output.finish();
  return 0;
}

void exclude_sizes(CLI::App& verb, CLI::Option& shape) {
  for (const char* size : {"--family", "--experts", "--experts-per-token", "--expert-width", "--hidden", "--heads",
                           "--kv-heads", "--head-dim", "--intermediate", "--context", "--untied"})
    shape.excludes(verb.get_option(size));
}

}  // namespace

void add_model_commands(CLI::App& app, CommandContext& context) {
  {
    auto a = std::make_shared<InitModelArguments>();
    CLI::App* verb = app.add_subcommand("init-model", "write a small random model with a byte-level tokenizer");
    verb->add_option("--out", a->out, "folder")->required();
    verb->add_option("--family", a->family, "llama, qwen2, qwen3, qwen3_moe or mixtral")
        ->check(CLI::IsMember({"llama", "qwen2", "qwen3", "qwen3_moe", "mixtral"}));
    verb->add_option("--experts", a->experts, "qwen3_moe and mixtral only, like the next two");
    verb->add_option("--experts-per-token", a->experts_per_token);
    verb->add_option("--expert-width", a->expert_width);
    verb->add_option("--hidden", a->hidden);
    CLI::Option* layers =
        verb->add_option("--layers", a->layers, "number of layers; with --shape, cut the shape to this many");
    verb->add_option("--heads", a->heads);
    verb->add_option("--kv-heads", a->kv_heads);
    verb->add_option("--head-dim", a->head_dim);
    verb->add_option("--intermediate", a->intermediate);
    verb->add_option("--context", a->context, "longest sequence");
    verb->add_option("--seed", a->seed);
    verb->add_flag("--untied", a->untied, "do not tie the output head to the embedding");
    CLI::Option* shape = verb->add_option("--shape", a->shape, "a shape of `trireme bench`, instead of the sizes");
    exclude_sizes(*verb, *shape);
    verb->add_flag("--no-weights", a->no_weights, "write config.json and the tokenizer only, for policy.random_weights")
        ->needs(shape);
    verb->callback([a, shape, layers, verb, &context] {
      for (const char* option : {"--experts", "--experts-per-token", "--expert-width"})
        a->experts_given = a->experts_given || verb->count(option) > 0;
      if (shape->count() > 0) a->shape_layers = layers->count() > 0 ? a->layers : 0;
      context.run = [a] { return init_model_verb(*a); };
    });
  }
  {
    auto checkpoint = std::make_shared<std::string>();
    auto out = std::make_shared<std::string>();
    auto best = std::make_shared<bool>(false);
    CLI::App* verb = app.add_subcommand("export", "write a checkpoint's weights as a Hugging Face folder");
    verb->add_option("--checkpoint", *checkpoint, "a checkpoint (step_N), or the folder of checkpoints")->required();
    verb->add_option("--out", *out, "folder")->required();
    verb->add_flag("--best", *best, "take the folder's best checkpoint by checkpointing.metric_name, not its newest");
    verb->callback([=, &context] { context.run = [=] { return export_verb(*checkpoint, *out, *best); }; });
  }
  {
    auto a = std::make_shared<GenerateArguments>();
    CLI::App* verb = app.add_subcommand("generate", "generate responses to prompts, JSONL in and out");
    verb->add_option("--model", a->model, "folder or Hub id")->required();
    verb->add_option("--prompts", a->prompts,
                     "lines {\"prompt\": ...}, {\"ids\": [...]} or {\"messages\": ...}; - is standard input");
    verb->add_flag("--no-special-tokens", a->no_special_tokens, kNoSpecialTokens);
    verb->add_option("--out", a->out);
    verb->add_option("--samples", a->options.samples, "responses for each prompt");
    verb->add_flag("--chat", a->options.chat, "a plain prompt becomes a user message");
    verb->add_option("--temperature", a->sampling.temperature, "sampling temperature; 0: greedy");
    verb->add_option("--top-p", a->sampling.top_p);
    verb->add_option("--top-k", a->sampling.top_k);
    verb->add_option("--min-p", a->sampling.min_p);
    verb->add_option("--max-new-tokens", a->sampling.max_new_tokens);
    verb->add_option("--stop", a->sampling.stop_strings, "stop string; may be repeated");
    verb->add_option("--max-total-length", a->max_total_length);
    verb->add_option("--seed", a->seed);
    verb->add_option("--dtype", a->dtype, "default: bfloat16 on CUDA, else float32")
        ->check(CLI::IsMember({"float32", "bfloat16"}));
    verb->add_option("--device", a->device, "auto: CUDA if there is a GPU")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
    verb->callback([a, &context] { context.run = [a] { return generate_verb(*a); }; });
  }
  {
    auto a = std::make_shared<ScoreArguments>();
    CLI::App* verb = app.add_subcommand("score", "compute log-probs of given texts, JSONL in and out");
    verb->add_option("--model", a->model, "folder or Hub id")->required();
    verb->add_option("--text", a->text, "lines {\"text\": ...} or {\"ids\": [...]}; - is standard input");
    verb->add_option("--out", a->out);
    verb->add_flag("--no-special-tokens", a->no_special_tokens, kNoSpecialTokens);
    verb->add_option("--dtype", a->dtype, "default: bfloat16 on CUDA, else float32")
        ->check(CLI::IsMember({"float32", "bfloat16"}));
    verb->add_option("--device", a->device, "auto: CUDA if there is a GPU")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
    verb->callback([a, &context] { context.run = [a] { return score_verb(*a); }; });
  }
}

}  // namespace trireme
