// CarryOver: rollouts of steps that overlap. Where a step's last responses leave places of the engine free, groups of
// the next steps are begun (Ledger); when the step is complete generation stops where it is, and goes on from there
// after the update.
//
// Every rank keeps the same ledger. What a step still misses is known to all at the beginning of a *round*, and what
// can begin is dealt by a function of that, without a message; what is left over goes by tickets of one counter, in
// order, to whichever replica has room. The samples of the step that have their rewards are counted in another; when
// the number is reached every replica stops behind the engine step it is in. Then one exchange: tickets and rewarded
// samples, of later steps too. With dynamic sampling a step has further rounds until it is complete.
//
// Of a replica's ranks (GenerationRanks) the leader alone has rewards and looks at the counters. Ahead of each engine
// step it tells the others what it has found: tickets, or that the step is complete. All of them then do the same with
// their engines. Replicas that step together, since they share experts, agree ahead of each step as well: who has no
// work takes part without rows while another has some, and all stop as soon as one knows that the step is complete.
// A replica of one rank that shares no experts sends no message between exchanges.
//
// So which weights drew a token depends on time, and on one rank and with drawn rewards on nothing. What it does not
// depend on: which groups a step has, and each token's log-prob, which is that of its weights, bit for bit, unless keys
// are kept over updates.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "trainer/algorithms/rollout_source.h"
#include "trainer/algorithms/rollouts.h"
#include "trainer/algorithms/step_results.h"
#include "trainer/rollout/ledger.h"

namespace trireme {

struct CarryOverOptions {
  LedgerOptions ledger;  // run_samples is chosen here
  int64_t first_step = 1;
  int64_t first_group = 0;
  uint64_t first_sample_id = 0;  // of the first group; the next ones follow
  SamplingOptions sampling;
  bool keep_cache = false;  // over updates; else keys and values are computed again
  bool ends_known = false;  // GroupRequest::ends_known
  // For measurements: raw rewards are drawn, whatever the rewards say. Without rewards and tokenizer they must be.
  std::optional<uint64_t> drawn_rewards;
  // grpo or ppo: whose keys sentences name.
  std::string section = "grpo";
  double timeout_s = 600;  // with nothing to generate, how long a replica waits for what others have
  // The prompt of a group; asked once each, in order. Nothing: the data has ended ahead of it. `needed`: the next step
  // cannot do without, and must get one.
  std::function<std::optional<CarriedPrompt>(int64_t group, bool needed)> prompt;
};

// Of what the ranks of a replica count alike. Collective.
int64_t sum_of_replicas(ParallelContext& context, int64_t of_replica);

// Of a step's collection, on this rank.
struct CarriedStep {
  std::vector<LedgerGroup> groups;  // of the step, and those left out among them; the same on all ranks
  int64_t rounds = 0;
};

// One per rank, on its training thread; all ranks make the same calls.
class CarryOver final {
 public:
  // All outlive it. `engine` is over the model of context.generation(). `timer` gets generation, rewards (waited for
  // with nothing to generate) and idle.
  CarryOver(Engine& engine, const Tokenizer* tokenizer, RewardPool* rewards, ParallelContext& context,
            PhaseTimer& timer, CarryOverOptions options);

  // Collective. Generates until the ledger's next step is complete, and takes it. Behind it the engine is idle, its
  // unfinished samples set aside, unless keys are kept. Throws Error(kData) where dynamic sampling has used up what a
  // step may.
  CarriedStep collect(RankShares& shares);
  // The step that was taken is trained, and the weights are the ledger's newest ones.
  void trained(int64_t step);
  // Before the engine or the rewards are somebody else's, as a validation's: nothing is under way in either. What runs
  // is set aside until the next collect().
  void make_way();
  // Likewise of the engine alone.
  void set_aside();

  const Ledger& ledger() const { return ledger_; }
  uint64_t sample_id(int64_t group) const;  // of its first sample

  // The ledger's complete groups for a checkpoint, by distance from its first group, and back, before anything was
  // collected; restore() asks for their prompts. Returns how many groups it could not take.
  using Saved = SavedGroups;
  Saved saved() const;
  int64_t restore(const Saved& saved);

  // Called between engine steps, for heartbeats. May be empty.
  std::function<void()> on_progress;
  // RolloutSource::on_samples; what it fills in is not kept. May be empty.
  std::function<void(std::vector<Sample>& samples)> on_samples;

 private:
  using Place = std::pair<int64_t, int64_t>;  // group, first sample: of a run
  struct Prompt {
    PromptExample example;
    SharedTokens tokens;
    std::vector<int64_t> forced_lengths;
  };
  struct Round;
  struct Turn;

  void ask_for_prompts();
  bool ask(int64_t group, bool needed);
  void begin(const SampleSpan& span);
  void finished(std::vector<GeneratedGroup> groups);
  void tell_ready(const std::set<int64_t>& missing);
  void take_rewards(Milliseconds wait);
  void generate(Round& round);
  Turn next_turn(Round& round);
  void hear_leader(Turn& turn);
  bool enough(Round& round);
  std::vector<int64_t> take_tickets(Round& round);
  void wait_idle(Round& round);
  void exchange(const Round& round, RankShares& shares);
  void complete(const SampleSpan& span, std::vector<Sample> samples);
  std::vector<SharedTokens> prompts_of_wire() const;
  int64_t add(const std::string& key, int64_t amount);

  Engine& engine_;
  const Tokenizer* tokenizer_;
  RewardPool* rewards_;
  ParallelContext& context_;
  PhaseTimer& timer_;
  const CarryOverOptions options_;
  const int64_t replicas_, replica_;  // that generate; this rank's
  const bool leads_;                  // it
  Ledger ledger_;
  std::map<int64_t, Prompt> prompts_;  // of the groups from the ledger's first one on
  int64_t next_prompt_ = 0;
  std::map<Place, int64_t> runs_;           // ids of leased runs, of all replicas
  std::map<uint64_t, SampleSpan> running_;  // in this rank's engine, by their first sample's id
  // Of a leader, as rewarded_; by the reward pool's group id.
  std::map<int64_t, std::pair<SampleSpan, std::vector<Sample>>> unrewarded_;
  int64_t next_reward_ = 0;
  std::vector<std::pair<SampleSpan, std::vector<Sample>>> rewarded_;  // not exchanged yet
  std::set<int64_t> told_;                                            // groups of this step, of on_samples
  int64_t rounds_ = 0;                                                // of the run; the same on all ranks
  std::map<std::string, int64_t> counters_;                           // with one process
};

}  // namespace trireme
