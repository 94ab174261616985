#include "trainer/algorithms/replay.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cstring>
#include <map>
#include <ostream>
#include <string>

#include "base/error.h"
#include "base/text.h"
#include "trainer/algorithms/loss.h"
#include "trainer/algorithms/options.h"
#include "trainer/batch/micro_batch.h"
#include "trainer/model/safetensors.h"
#include "trainer/parallel/device.h"

namespace trireme {

namespace {

// Reads what a dump holds of micro-batch `index`.
class DumpedBatch final {
 public:
  DumpedBatch(const SafetensorsFile& file, int64_t index)
      : file_(file), prefix_("micro_batch." + std::to_string(index) + ".") {}

  at::Tensor get(const char* name) const { return file_.tensor(prefix_ + name).clone(); }

  // Of the weights that drew each token; undefined in a dump of an older program.
  at::Tensor versions() const { return has("weight_versions") ? get("weight_versions") : at::Tensor(); }

  LossInputs loss_inputs() const {
    const auto& metadata = file_.header().metadata;
    LossInputs in;
    in.current = get("current_logprobs");
    if (has("unfiltered_logprobs")) in.current_unfiltered = get("unfiltered_logprobs");
    in.previous = get("previous_logprobs");
    in.generation = get("generation_logprobs");
    if (has("reference_logprobs")) in.reference = get("reference_logprobs");
    if (has("positive")) in.positive = get("positive");
    in.advantages = get("advantages");
    in.mask = get("mask");
    in.sequence = get("sequence");
    in.sequence_mask = get("sequence_mask");
    in.global_valid_tokens = parse_double(metadata.at("global_valid_tokens")).value_or(0);
    in.global_valid_sequences = parse_double(metadata.at("global_valid_sequences")).value_or(0);
    // Dumps without this count are of a program that divided by all valid tokens.
    const auto positive = metadata.find("global_positive_tokens");
    in.global_positive_tokens =
        positive == metadata.end() ? in.global_valid_tokens : parse_double(positive->second).value_or(0);
    return in;
  }

  MicroBatch micro_batch() const {
    const auto numbers = [this](const char* name) {
      const at::Tensor list = get(name);
      return std::vector<int64_t>(list.const_data_ptr<int64_t>(), list.const_data_ptr<int64_t>() + list.numel());
    };
    MicroBatch batch;
    batch.input.ids = get("ids");
    batch.input.starts = numbers("starts");
    if (has("prefix")) batch.input.prefix = numbers("prefix");
    const std::vector<int64_t>& begin = batch.input.starts;
    std::vector<int64_t> positions;
    for (size_t s = 0; s + 1 < begin.size(); ++s) {
      const int64_t shared = batch.input.prefix.empty() ? -1 : batch.input.prefix.at(s);
      const int64_t past =
          shared < 0 ? 0 : begin.at(static_cast<size_t>(shared) + 1) - begin.at(static_cast<size_t>(shared));
      for (int64_t p = begin[s]; p < begin[s + 1]; ++p) positions.push_back(past + p - begin[s]);
    }
    batch.input.positions = at::tensor(positions, at::kLong);
    batch.rows = get("rows");
    batch.targets = get("targets");
    return batch;
  }

 private:
  bool has(const char* name) const { return file_.contains(prefix_ + name); }

  const SafetensorsFile& file_;
  const std::string prefix_;
};

// The model's log-probs in place of the dumped ones, and how they differ from these and from the sampler's.
void compute_again(const Model& model, const DumpedBatch& batch, const Config& config, LossInputs& in,
                   ReplayResult& result) {
  const auto compute = [&](const LogprobOptions& distribution) {
    return response_logprobs(model, batch.micro_batch(), distribution).to(at::kCPU, at::kFloat).contiguous();
  };
  const at::Tensor recomputed = compute(sampling_distribution(config));
  const at::Tensor dumped = in.current.to(at::kFloat);
  // Both -infinity where the filters dropped a token.
  const at::Tensor error = (recomputed - dumped).abs().masked_fill(recomputed == dumped, 0);
  result.largest_logprob_error = std::max(result.largest_logprob_error, error.max().item<double>());
  const at::Tensor sampled = in.generation.to(at::kFloat).contiguous();
  const at::Tensor versions = batch.versions();
  for (int64_t i = 0; i < recomputed.numel(); ++i) {
    const int64_t differs =
        std::memcmp(recomputed.const_data_ptr<float>() + i, sampled.const_data_ptr<float>() + i, sizeof(float)) != 0
            ? 1
            : 0;
    result.differing_tokens += differs;
    const int64_t version = versions.defined() ? versions.const_data_ptr<int64_t>()[i] : -1;
    if (version < 0) continue;  // nobody said
    ReplayResult::OfVersion& of = result.versions[version];
    ++of.tokens;
    of.differing += differs;
  }
  in.current = recomputed;
  if (in.current_unfiltered.defined()) in.current_unfiltered = compute(reference_distribution(config));
}

// In which the run combined experts: as the dump says, of older ones as the configuration does.
int64_t expert_blocks(const std::filesystem::path& dump, const std::map<std::string, std::string>& metadata,
                      const Config& config, const ModelConfig& model) {
  const auto told = metadata.find("expert_blocks");
  if (told == metadata.end() || model.num_experts == 0) return config.policy.moe_combine_blocks;
  const int64_t blocks = parse_int(told->second).value_or(0);
  if (blocks < 1 || model.num_experts % blocks != 0) {
    fail_data(dump.string() + ": expert_blocks is '" + told->second + "', no number that divides the model's " +
              std::to_string(model.num_experts) + " experts");
  }
  return blocks;
}

}  // namespace

ReplayResult replay(const std::filesystem::path& dump, const std::filesystem::path& model_dir,
                    const std::string& device, std::ostream& out) {
  const SafetensorsFile file(dump);
  const auto& metadata = file.header().metadata;
  for (const char* key : {"config", "micro_batches", "global_valid_tokens", "global_valid_sequences"}) {
    if (metadata.count(key) == 0) fail_data(dump.string() + " is not the dump of a step: its metadata has no " + key);
  }
  const Config config = load_config_text(metadata.at("config"), {}, nullptr, dump.string() + " (config)");
  const LossOptions options = loss_options(config);
  std::unique_ptr<Model> model;
  if (!model_dir.empty()) {
    ModelOptions frozen;
    frozen.dtype = parse_dtype(config.policy.precision);
    frozen.trainable = false;
    frozen.device = choose_device(device, 0);
    frozen.wide_router = router_settings(config).moe_router_dtype == "fp64";
    frozen.combine_blocks = expert_blocks(dump, metadata, config, ModelConfig::load(model_dir));
    model = load_model(model_dir, frozen);
  }
  const c10::NoGradGuard no_grad;
  ReplayResult result;
  result.micro_batches = parse_int(metadata.at("micro_batches")).value_or(0);
  for (int64_t m = 0; m < result.micro_batches; ++m) {
    const DumpedBatch batch(file, m);
    LossInputs in = batch.loss_inputs();
    in.filters = sampling_distribution(config).filters();
    if (model) compute_again(*model, batch, config, in, result);
    const LossOutput output = policy_loss(in, options);
    const double loss = output.loss.item<double>();
    const double dumped = batch.get("loss").item<double>();
    out << "micro-batch " << m << ": " << in.current.numel() << " tokens, loss " << format_double(loss) << ", dumped "
        << format_double(dumped) << "\n";
    result.tokens += in.current.numel();
    result.loss += loss;
    result.dumped_loss += dumped;
  }
  for (const auto& [version, of] : result.versions) {
    out << "weight version " << version << ": " << of.tokens << " tokens, " << of.differing
        << " differ from the sampler's bits\n";
  }
  out << "total: " << result.tokens << " tokens, loss " << format_double(result.loss) << ", dumped "
      << format_double(result.dumped_loss) << ", difference "
      << format_double(std::abs(result.loss - result.dumped_loss));
  if (model) {
    out << ", largest log-prob error " << format_double(result.largest_logprob_error) << ", " << result.differing_tokens
        << " tokens differ from the sampler's bits";
  }
  out << "\n";
  return result;
}

}  // namespace trireme
