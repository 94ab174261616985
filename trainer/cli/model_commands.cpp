#include <fstream>
#include <iostream>
#include <limits>

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"
#include "trainer/algorithms/threads.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/cli/commands.h"
#include "trainer/cli/environment.h"
#include "trainer/config/config.h"
#include "trainer/model/model.h"
#include "trainer/parallel/device.h"
#include "trainer/rollout/generate.h"
#include "trainer/tokenizer/tokenizer.h"

namespace trireme {
namespace {

struct InitModelArguments {
  std::string out;
  std::string family = "qwen3";
  int64_t hidden = 128, layers = 4, heads = 4, kv_heads = 2, head_dim = 32, intermediate = 384, context = 1024,
          seed = 0;
  bool untied = false;
};

int init_model_verb(const InitModelArguments& a) {
  if (a.hidden < 1 || a.layers < 1 || a.heads < 1 || a.kv_heads < 1 || a.head_dim < 2 || a.intermediate < 1 ||
      a.context < 1) {
    fail_user("init-model: every size must be positive");
  }
  make_byte_tokenizer(a.out);
  nlohmann::json json = {{"model_type", a.family},
                         {"architectures",
                          {a.family == "llama"   ? "LlamaForCausalLM"
                           : a.family == "qwen2" ? "Qwen2ForCausalLM"
                                                 : "Qwen3ForCausalLM"}},
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
  const ModelConfig config = ModelConfig::from_json(json, "init-model");
  init_model(a.out, config, static_cast<uint64_t>(a.seed));
  std::cout << a.out << ": " << a.family << " with " << config.parameter_count()
            << " parameters and a byte-level tokenizer\n";
  return 0;
}

int export_verb(const std::string& checkpoint, const std::string& out) {
  namespace fs = std::filesystem;
  fs::path weights = fs::path(checkpoint) / "policy" / "weights";
  if (!fs::exists(weights)) {  // the folder of all checkpoints: the newest
    const std::vector<CheckpointInfo> all = list_checkpoints(checkpoint);
    if (all.empty()) fail_user(checkpoint + " is neither a checkpoint (step_N) nor a folder of complete ones");
    weights = all.back().path / "policy" / "weights";
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
  EngineOptions engine;
  engine.max_total_length = a.max_total_length;
  Input input(a.prompts);
  Output output(a.out);
  generate_jsonl(*model, *tokenizer, engine, a.sampling, a.options, input.stream(), input.name, output.stream());
  output.finish();
  return 0;
}

// {"text": ...} or {"ids": [...]} a line -> {"ids", "logprobs", "sum"}: log-probs of ids[1..].
int score_verb(const std::string& model_name, const std::string& text, const std::string& out, const std::string& dtype,
               const std::string& device) {
  const std::filesystem::path dir = resolve_model(model_name, hf_home_from_environment());
  const auto tokenizer = Tokenizer::load(dir);
  const std::unique_ptr<Model> model = load_frozen(model_name, dtype, device);
  Input input(text);
  Output output(out);
  std::string line;
  int64_t number = 0;
  while (std::getline(input.stream(), line)) {
    ++number;
    if (trim(line).empty()) continue;
    std::vector<int32_t> ids;
    try {
      const nlohmann::json row = nlohmann::json::parse(line);
      if (row.contains("ids"))
        ids = row.at("ids").get<std::vector<int32_t>>();
      else
        ids = tokenizer->encode(row.at("text").get<std::string>(), row.value("add_special", false));
    } catch (const nlohmann::json::exception& error) {
      fail_data(input.name + ":" + std::to_string(number) +
                ": a line must be {\"text\": ...} or {\"ids\": [...]}: " + error.what());
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

}  // namespace

void add_model_commands(CLI::App& app, CommandContext& context) {
  {
    auto a = std::make_shared<InitModelArguments>();
    CLI::App* verb = app.add_subcommand("init-model", "write a small random model with a byte-level tokenizer");
    verb->add_option("--out", a->out, "folder")->required();
    verb->add_option("--family", a->family, "llama, qwen2 or qwen3")->check(CLI::IsMember({"llama", "qwen2", "qwen3"}));
    verb->add_option("--hidden", a->hidden);
    verb->add_option("--layers", a->layers);
    verb->add_option("--heads", a->heads);
    verb->add_option("--kv-heads", a->kv_heads);
    verb->add_option("--head-dim", a->head_dim);
    verb->add_option("--intermediate", a->intermediate);
    verb->add_option("--context", a->context, "longest sequence");
    verb->add_option("--seed", a->seed);
    verb->add_flag("--untied", a->untied, "an output head of its own");
    verb->callback([a, &context] { context.run = [a] { return init_model_verb(*a); }; });
  }
  {
    auto checkpoint = std::make_shared<std::string>();
    auto out = std::make_shared<std::string>();
    CLI::App* verb = app.add_subcommand("export", "a checkpoint's weights as a Hugging Face folder");
    verb->add_option("--checkpoint", *checkpoint, "step_N, or the folder of checkpoints")->required();
    verb->add_option("--out", *out, "folder")->required();
    verb->callback([=, &context] { context.run = [=] { return export_verb(*checkpoint, *out); }; });
  }
  {
    auto a = std::make_shared<GenerateArguments>();
    CLI::App* verb = app.add_subcommand("generate", "answers to prompts, JSONL in and out");
    verb->add_option("--model", a->model, "folder or Hub id")->required();
    verb->add_option("--prompts", a->prompts, "lines {\"prompt\": ...} or {\"messages\": ...}; - is standard input");
    verb->add_option("--out", a->out);
    verb->add_option("--samples", a->options.samples, "answers for each prompt");
    verb->add_flag("--chat", a->options.chat, "a plain prompt becomes a user message");
    verb->add_option("--temperature", a->sampling.temperature, "0: greedy");
    verb->add_option("--top-p", a->sampling.top_p);
    verb->add_option("--top-k", a->sampling.top_k);
    verb->add_option("--min-p", a->sampling.min_p);
    verb->add_option("--max-new-tokens", a->sampling.max_new_tokens);
    verb->add_option("--stop", a->sampling.stop_strings, "stop string; may be given several times");
    verb->add_option("--max-total-length", a->max_total_length);
    verb->add_option("--seed", a->seed);
    verb->add_option("--dtype", a->dtype, "default: bfloat16 on CUDA, else float32")
        ->check(CLI::IsMember({"float32", "bfloat16"}));
    verb->add_option("--device", a->device, "auto: CUDA where there is one")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
    verb->callback([a, &context] { context.run = [a] { return generate_verb(*a); }; });
  }
  {
    auto model = std::make_shared<std::string>();
    auto text = std::make_shared<std::string>("-");
    auto out = std::make_shared<std::string>("-");
    auto dtype = std::make_shared<std::string>();
    auto device = std::make_shared<std::string>("auto");
    CLI::App* verb = app.add_subcommand("score", "log-probs of given texts, JSONL in and out");
    verb->add_option("--model", *model, "folder or Hub id")->required();
    verb->add_option("--text", *text, "lines {\"text\": ...} or {\"ids\": [...]}; - is standard input");
    verb->add_option("--out", *out);
    verb->add_option("--dtype", *dtype, "default: bfloat16 on CUDA, else float32")
        ->check(CLI::IsMember({"float32", "bfloat16"}));
    verb->add_option("--device", *device, "auto: CUDA where there is one")
        ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
    verb->callback([=, &context] { context.run = [=] { return score_verb(*model, *text, *out, *dtype, *device); }; });
  }
}

}  // namespace trireme
