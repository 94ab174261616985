#include "trainer/algorithms/engine_identity.h"

#include "base/error.h"
#include "base/fs.h"
#include "base/text.h"

namespace trireme {
namespace {

std::string digest_of_tokenizer(const Config& config, const std::filesystem::path& model_dir,
                                const std::filesystem::path& hf_home) {
  const TokenizerConfig& t = config.policy.tokenizer;
  const std::filesystem::path dir =
      t.name.empty() || t.name == config.policy.model_name ? model_dir : resolve_model(t.name, hf_home);
  uint64_t digest = hash64(t.chat_template);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}) {
    std::error_code ignored;
    if (std::filesystem::is_regular_file(dir / name, ignored)) digest = hash64(read_file(dir / name), digest);
  }
  return std::to_string(digest);
}

}  // namespace

JoinRequest identity_of(const Config& config, const ModelConfig& model, const std::filesystem::path& model_dir,
                        const std::filesystem::path& hf_home) {
  JoinRequest request;
  request.config = to_yaml(config);
  request.model = model.to_json().dump();
  request.tokenizer = digest_of_tokenizer(config, model_dir, hf_home);
  request.places = config.policy.generation.max_running_samples;
  request.program = std::to_string(hash64(read_file("/proc/self/exe")));
  return request;
}

std::optional<std::string> difference_of_engine(const JoinRequest& actor, const Config& config,
                                                const JoinRequest& engine) {
  if (engine.program != actor.program) return "runs another program than the actor, of another version or build";
  std::vector<std::string> ignored;
  Config other = load_config_text(engine.config, {}, &ignored, "the configuration of engine " + engine.name);
  // What generation does not depend on, or another machine has otherwise.
  other.cluster = config.cluster;
  other.checkpointing = config.checkpointing;
  other.policy.generation.kv_cache_tokens = config.policy.generation.kv_cache_tokens;
  other.policy.generation.max_running_samples = config.policy.generation.max_running_samples;
  if (const auto difference = first_difference(config, other))
    return "has other settings than the actor: " + *difference;
  if (engine.model != actor.model)
    return "has another model than the actor: " + engine.model + " instead of " + actor.model;
  if (engine.tokenizer != actor.tokenizer) return "has another tokenizer than the actor: its files differ";
  return std::nullopt;
}

}  // namespace trireme
