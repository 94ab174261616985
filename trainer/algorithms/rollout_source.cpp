#include "trainer/algorithms/rollout_source.h"

#include <utility>

#include "base/error.h"
#include "base/fs.h"
#include "base/log.h"
#include "base/text.h"
#include "trainer/algorithms/forced_lengths.h"
#include "trainer/algorithms/options.h"

namespace trireme {
namespace {

constexpr const char* kLedgerFile = "ledger.bin";  // of a checkpoint: samples of complete groups that are not trained

// Responses that another distribution, or other rewards, gave are not those of this run.
nlohmann::json drawn_from(const Config& config) {
  const LogprobOptions sampling = sampling_distribution(config);
  return {{"temperature", sampling.temperature},
          {"top_k", sampling.top_k},
          {"top_p", sampling.top_p},
          {"min_p", sampling.min_p},
          {"rewards", hash64(to_yaml(config, "env."))}};
}

uint64_t hash_of_prompt(const SharedTokens& tokens) {
  return hash64({reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(int32_t)});
}

}  // namespace

SavedGroups save_ledger(const Ledger& ledger, const PromptOfGroup& prompt) {
  SavedGroups saved;
  std::vector<Sample> samples;
  for (LedgerGroup& group : ledger.whole_groups()) {
    for (Sample& sample : group.samples) {
      sample.group = static_cast<int64_t>(saved.groups.size());
      samples.push_back(std::move(sample));
    }
    saved.groups.push_back(group.number - ledger.first_group());
    saved.prompts.push_back(hash_of_prompt(*prompt(group.number)));
  }
  saved.samples = pack_samples(samples);
  return saved;
}

int64_t restore_ledger(const SavedGroups& saved, int64_t first_group, const PromptOfGroup& prompt,
                       const std::function<int64_t(std::vector<LedgerGroup>)>& restore) {
  if (saved.prompts.size() != saved.groups.size()) fail_data("the saved groups of the ledger have other prompts");
  std::vector<SharedTokens> prompts(saved.groups.size());
  std::map<int64_t, LedgerGroup> groups;  // by place among the saved ones
  int64_t last = -1;
  for (size_t i = 0; i < saved.groups.size(); ++i) {
    if (saved.groups[i] <= last) fail_data("the saved groups of the ledger are not in order");
    last = saved.groups[i];
    const int64_t number = first_group + last;
    const SharedTokens* tokens = prompt(number);
    if (tokens == nullptr) break;  // the data ends earlier now
    prompts[i] = *tokens;
    if (hash_of_prompt(prompts[i]) == saved.prompts[i]) groups[static_cast<int64_t>(i)] = {number, true, {}};
  }
  for (Sample& sample : unpack_samples(saved.samples, prompts)) {
    const auto group = groups.find(sample.group);
    if (group == groups.end()) continue;
    sample.group = group->second.number;
    group->second.samples.push_back(std::move(sample));
  }
  std::vector<LedgerGroup> fitting;
  for (auto& [place, group] : groups) fitting.push_back(std::move(group));
  const auto refused = static_cast<int64_t>(saved.groups.size() - fitting.size());
  return refused + restore(std::move(fitting));
}

int64_t critic_only_steps(const Config& config) {
  return config.algorithm == "ppo" ? config.ppo.policy_training_start_step : 0;
}

LedgerOptions run_ledger(const Config& config) {
  const GrpoConfig& g = config.grpo;
  LedgerOptions options;
  options.groups_per_step = g.num_prompts_per_step;
  options.samples_per_group = g.num_generations_per_prompt;
  options.max_age = most_age(config);
  options.exact_version = exact_versions(config);
  options.last_step = g.max_num_steps;
  options.critic_only_steps = critic_only_steps(config);
  if (options.critic_only_steps > 0) options.most_steps_ahead = warmup_lead(config);
  if (g.use_dynamic_sampling) {
    options.teaches_nothing = [](const std::vector<Sample>& group) { return is_flat(group.begin(), group.end()); };
    options.max_groups_of_step = g.num_prompts_per_step * g.dynamic_sampling_max_gen_batches;
  }
  return options;
}

PromptsAhead::PromptsAhead(PromptStream& stream, const RolloutLengths* lengths, const GrpoConfig& config,
                           uint64_t next_sample_id)
    : stream_(stream),
      lengths_(lengths),
      rows_(stream.rows_of_epochs(config.max_num_epochs, prompts_per_round(config))),
      group_size_(config.num_generations_per_prompt),
      first_group_(static_cast<int64_t>(next_sample_id) / config.num_generations_per_prompt),
      first_sample_id_(next_sample_id),
      place_{stream.state(), stream.drawn(), next_sample_id, stream.skipped_long()} {}

std::optional<CarriedPrompt> PromptsAhead::next(int64_t group, bool needed) {
  if (!needed && stream_.drawn() >= rows_) return std::nullopt;
  CarriedPrompt prompt;
  prompt.example = stream_.next();
  if (lengths_ != nullptr) {
    force_prompt(*lengths_, group, prompt.example);
    for (int64_t i = 0; i < group_size_; ++i) prompt.forced_lengths.push_back(lengths_->output_of(group, i));
  }
  const auto next_sample_id = first_sample_id_ + static_cast<uint64_t>((group + 1 - first_group_) * group_size_);
  ahead_[group] = {stream_.state(), stream_.drawn(), next_sample_id, stream_.skipped_long()};
  return prompt;
}

void PromptsAhead::collected(int64_t last) {
  place_ = ahead_.at(last);
  ahead_.erase(ahead_.begin(), ahead_.upper_bound(last));
}

std::vector<Sample> kept_samples(std::vector<LedgerGroup> groups, int64_t group_size, GeneratedTotals& generated) {
  std::vector<Sample> kept;
  int64_t number = 0;
  for (LedgerGroup& group : groups) {
    generated.add(group.samples, group_size);
    if (!group.kept) continue;
    for (Sample& sample : group.samples) {
      sample.group = number;
      kept.push_back(std::move(sample));
    }
    ++number;
  }
  return kept;
}

void save_groups(const RolloutSource& source, const Config& config, nlohmann::json& state,
                 std::map<std::string, std::string>& files) {
  SavedGroups saved = source.saved();
  state["ledger"] = {{"groups", saved.groups}, {"prompts", saved.prompts}, {"drawn_from", drawn_from(config)}};
  files[kLedgerFile] = std::move(saved.samples);
}

void restore_groups(RolloutSource& source, const Session& session) {
  if (!session.resumed || !session.resumed->state.contains("ledger")) return;
  const nlohmann::json& saved = session.resumed->state.at("ledger");
  const auto groups = saved.at("groups").get<std::vector<int64_t>>();
  const bool comparable = saved.at("drawn_from") == drawn_from(session.config);
  int64_t refused = static_cast<int64_t>(groups.size());
  if (comparable) {
    refused = source.restore(
        {groups, saved.at("prompts").get<std::vector<uint64_t>>(), read_file(session.resumed->path / kLedgerFile)});
  }
  if (!session.context.is_main()) return;
  log_info("grpo", std::to_string(groups.size() - static_cast<size_t>(refused)) +
                       " complete groups of later steps come from the checkpoint" +
                       (refused > 0 ? "; " + std::to_string(refused) + " others do not fit the settings" : ""));
}

}  // namespace trireme
