// RolloutSource: who gives a step its groups where steps overlap. The training loop makes the same calls whoever
// generates; what any source has in common is here too.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "trainer/algorithms/rollout_metrics.h"
#include "trainer/algorithms/session.h"
#include "trainer/algorithms/step_results.h"
#include "trainer/data/dataset.h"
#include "trainer/rewards/pool.h"
#include "trainer/rollout/ledger.h"
#include "trainer/rollout/lengths.h"

namespace trireme {

// Complete groups of later steps, for a checkpoint.
struct SavedGroups {
  std::vector<int64_t> groups;    // distance from the ledger's first group, ascending
  std::vector<uint64_t> prompts;  // a hash of each group's prompt: data may be read or shown otherwise later
  std::string samples;            // packed; a sample's group is its place in `groups`
};

// In the data, behind the groups of the steps that were collected.
struct DataPlace {
  nlohmann::json prompts;  // PromptStream::state()
  int64_t drawn = 0;       // rows ahead of it, since the start
  uint64_t next_sample_id = 0;
  int64_t skipped_long = 0;  // prompts, since the start
};

// One per rank, on its training thread; all ranks make the same calls, in this order: collect(), trained(), collect(),
// ...; make_way() and set_aside() between trained() and collect(), or before the first one.
class RolloutSource {
 public:
  RolloutSource() = default;
  virtual ~RolloutSource() = default;
  RolloutSource(const RolloutSource&) = delete;
  RolloutSource& operator=(const RolloutSource&) = delete;

  struct Step {
    // In data-set order with raw rewards, but for a reward model's; those left out among them. The same on all ranks.
    std::vector<LedgerGroup> groups;
    // What rewards counted since the step before, of all ranks; a validation's is not in it.
    std::vector<RewardCounters> rewards;
  };
  // Collective. The next step. Behind it nothing reads the policy until trained(). Adds to `shares`, and to `values`
  // what the log says of this source. Throws Error(kData) where dynamic sampling has used up what a step may.
  virtual Step collect(RankShares& shares, std::map<std::string, double>& values) = 0;
  // Collective. The step that was collected is trained: the policy has the weights that the next step begins with.
  virtual void trained(int64_t step) = 0;
  // Collective. Before the engine or the rewards are somebody else's until the next collect(), as a validation's:
  // nothing is under way in either.
  virtual void make_way() = 0;
  // Before the engine's memory is somebody else's until the next collect(): nothing is under way in it. Rewards are.
  virtual void set_aside() = 0;

  // Of a critic: called in collect() with samples of its step whose tokens are final, while others are generated; with
  // each once, on one rank. What it fills into Sample::values may be the step's. May be empty.
  std::function<void(std::vector<Sample>& samples)> on_samples;

  // Where a run goes on that is resumed behind the last collected step.
  virtual const DataPlace& place() const = 0;
  // Collective. Before saved(): what a checkpoint must keep is there.
  virtual void prepare_save() {}
  // Collective. The run has come to its end; nothing is asked of the source any more.
  virtual void finish() {}
  // What a checkpoint keeps; rank 0 has it.
  virtual SavedGroups saved() const = 0;
  // Back, before the first collect(). Returns how many groups do not fit the settings or the data. Throws Error(kData)
  // for groups that are damaged.
  virtual int64_t restore(const SavedGroups& saved) = 0;
};

// The complete groups of a ledger that are not trained, and back into one of which nothing was leased; `prompt` gives
// those of a group, or null where the data ends ahead of it. Returns how many do not fit. Throws Error(kData) for
// groups that are damaged.
using PromptOfGroup = std::function<const SharedTokens*(int64_t group)>;
SavedGroups save_ledger(const Ledger& ledger, const PromptOfGroup& prompt);
int64_t restore_ledger(const SavedGroups& saved, int64_t first_group, const PromptOfGroup& prompt,
                       const std::function<int64_t(std::vector<LedgerGroup>)>& restore);

// A run's ledger, but for the number of its runs' samples.
LedgerOptions run_ledger(const Config& config);
// So many steps at the beginning leave the policy's weights as they are: the critic's alone.
int64_t critic_only_steps(const Config& config);

// A group's prompt as it is generated.
struct CarriedPrompt {
  PromptExample example;
  std::vector<int64_t> forced_lengths;  // of its samples, for measurements; empty: off
};

// Prompts of groups that are ahead of what is trained, each with the place of the stream behind it.
class PromptsAhead final {
 public:
  // Of a run that has the steps before `next_sample_id`. `stream` (where it is to go on) and `lengths` (may be null)
  // outlive it.
  PromptsAhead(PromptStream& stream, const RolloutLengths* lengths, const GrpoConfig& config, uint64_t next_sample_id);

  int64_t first_group() const { return first_group_; }
  // Of a group, asked once each, in order; nothing behind the run's rows, unless the group is `needed`.
  std::optional<CarriedPrompt> next(int64_t group, bool needed);
  // Whether the run has rows behind the groups that were collected.
  bool has_rows() const { return place_.drawn < rows_; }
  // The groups up to and with `last` have been collected.
  void collected(int64_t last);
  const DataPlace& place() const { return place_; }

 private:
  PromptStream& stream_;
  const RolloutLengths* lengths_;
  const int64_t rows_, group_size_, first_group_;
  const uint64_t first_sample_id_;
  DataPlace place_;
  std::map<int64_t, DataPlace> ahead_;
};

// Samples of the groups that are kept, numbered from 0, in data order; `generated` gets those of all.
std::vector<Sample> kept_samples(std::vector<LedgerGroup> groups, int64_t group_size, GeneratedTotals& generated);

// The source's groups into the state and the files of a checkpoint, and back from the one that `session` was resumed
// from, if any: groups which another distribution, or other rewards, gave are left out. Says on rank 0 what came.
void save_groups(const RolloutSource& source, const Config& config, nlohmann::json& state,
                 std::map<std::string, std::string>& files);
void restore_groups(RolloutSource& source, const Session& session);

}  // namespace trireme
