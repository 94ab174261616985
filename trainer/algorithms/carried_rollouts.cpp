#include "trainer/algorithms/carried_rollouts.h"

#include <utility>

#include "trainer/rewards/failures.h"

namespace trireme {

bool keeps_cache(const Config& config) {
  const auto& async = config.grpo.async_grpo;
  return carries_over(config) && !async.recompute_kv_cache_after_weight_updates;
}

CarriedRollouts::CarriedRollouts(Session& session, Engine& engine, RewardPool& rewards, PromptStream& prompts,
                                 const RolloutLengths* lengths, int64_t steps, uint64_t next_sample_id,
                                 std::function<void()> on_progress)
    : session_(session),
      engine_(engine),
      rewards_(rewards),
      prompts_(prompts, lengths, session.config.grpo, next_sample_id) {
  CarryOverOptions options;
  options.ledger = run_ledger(session.config);
  options.first_step = steps + 1;
  options.first_group = prompts_.first_group();
  options.first_sample_id = next_sample_id;
  options.sampling = engine_.sampling();
  options.keep_cache = keeps_cache(session.config);
  if (lengths != nullptr) options.drawn_rewards = static_cast<uint64_t>(session.config.grpo.seed);
  options.section = session.config.algorithm;
  options.timeout_s = session.config.cluster.collective_timeout_s;
  options.prompt = [this](int64_t group, bool needed) { return prompts_.next(group, needed); };
  carry_ = std::make_unique<CarryOver>(engine_, session.tokenizer.get(), &rewards_, session.context, session.timer,
                                       std::move(options));
  carry_->on_progress = std::move(on_progress);
  counted_before_ = rewards_.counters();
}

// What the rewards of this rank counted since the last look belongs to carry-over.
void CarriedRollouts::count_rewards() {
  add_counters(counted_, counted_since(rewards_.counters(), counted_before_));
  counted_before_ = rewards_.counters();
}

void CarriedRollouts::make_way() {
  carry_->make_way();
  if (!made_way_) count_rewards();
  made_way_ = true;
}

RolloutSource::Step CarriedRollouts::collect(RankShares& shares, std::map<std::string, double>& values) {
  if (made_way_) counted_before_ = rewards_.counters();
  made_way_ = false;
  const int64_t recomputed = engine_.stats().recomputed_rows;
  carry_->on_samples = on_samples;
  Step step;
  step.groups = carry_->collect(shares).groups;
  count_rewards();
  step.rewards = sum_counters(session_.context.world().all_gather_bytes(pack_counters(counted_)));
  counted_.clear();
  prompts_.collected(step.groups.back().number);
  values["train/recomputed_rows"] =
      static_cast<double>(sum_of_replicas(session_.context, engine_.stats().recomputed_rows - recomputed));
  const Ledger::Counts counts = carry_->ledger().counts();
  values["performance/ledger_groups_leased"] = static_cast<double>(counts.leased);
  values["performance/ledger_groups_complete"] = static_cast<double>(counts.complete);
  values["performance/ledger_samples_carried"] = static_cast<double>(counts.leased_samples);
  return step;
}

}  // namespace trireme
