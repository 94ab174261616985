#include "trainer/algorithms/critic_follower.h"

#include <cstring>

#include "base/error.h"
#include "trainer/algorithms/session_parts.h"

namespace trireme {
namespace {

// What a value depends on.
std::string tokens_of(const Sample& sample) {
  const auto prompt_tokens = static_cast<uint64_t>(sample.prompt.size());
  std::string tokens(reinterpret_cast<const char*>(&prompt_tokens), sizeof prompt_tokens);
  tokens.append(reinterpret_cast<const char*>(sample.prompt.data()), sample.prompt.size() * sizeof(int32_t));
  tokens.append(reinterpret_cast<const char*>(sample.response.data()), sample.response.size() * sizeof(int32_t));
  return tokens;
}

}  // namespace

CriticFollower::CriticFollower(ParallelContext& context, Mail& mail, CriticState& state, CriticTrainer& trainer,
                               CheckpointManager& checkpoints, int64_t steps)
    : context_(context), mail_(mail), state_(state), trainer_(trainer), checkpoints_(checkpoints), steps_(steps) {}

// The actor's next call. Meanwhile what was generated gets its values.
CriticCall CriticFollower::next_call() {
  context_.set_phase("waiting");
  const std::string name = critic_mail::call(++calls_);
  Mail::Wait wait(mail_, /*from=*/0, "the actor's next call, number " + std::to_string(calls_));
  while (true) {
    if (const auto bytes = mail_.take(name)) return unpack_call(*bytes);
    if (value_ahead()) continue;
    checkpoints_.throw_failure();
    tell_saved();
    tell_to_stop();
    wait.pause();
  }
}

// Of samples that this rank may take: the one after the other, in turn with the critic's other ranks.
bool CriticFollower::value_ahead() {
  const auto bytes = mail_.take(critic_mail::ahead(next_ahead()));
  if (!bytes) return false;
  ++aheads_taken_;
  if (!trainer_.values_alone()) return true;
  context_.set_phase("values");
  std::vector<Sample> samples = unpack_for_critic(*bytes);
  trainer_.fill_own_values(samples);
  for (const Sample& sample : samples) values_ahead_[tokens_of(sample)] = sample.values;
  context_.set_phase("waiting");
  return true;
}

int64_t CriticFollower::next_ahead() const { return 1 + context_.rank() + aheads_taken_ * context_.world_size(); }

// What was not come to before the call, which has all samples: taken out of the store.
void CriticFollower::drop_ahead() {
  const int64_t all = context_.store()->add(critic_mail::kAheadCount, 0);
  for (; next_ahead() <= all; ++aheads_taken_)
    (void)mail_.wait(critic_mail::ahead(next_ahead()), /*from=*/0, "samples that were generated");
}

// Values of the call's samples, on all ranks: those that any rank has already, then the rest, evenly.
void CriticFollower::fill_values(std::vector<Sample>& samples) {
  drop_ahead();
  std::string own;
  for (size_t i = 0; i < samples.size() && !values_ahead_.empty(); ++i) {
    const auto found = values_ahead_.find(tokens_of(samples[i]));
    if (found == values_ahead_.end()) continue;
    const auto place = static_cast<uint64_t>(i);
    own.append(reinterpret_cast<const char*>(&place), sizeof place);
    own.append(reinterpret_cast<const char*>(found->second.data()), found->second.size() * sizeof(float));
  }
  values_ahead_.clear();
  for (const std::string& part : context_.world().all_gather_bytes(own)) {
    for (size_t at = 0; at < part.size();) {
      uint64_t place = 0;
      TRIREME_CHECK(part.size() - at >= sizeof place, "a critic rank's values are cut off");
      std::memcpy(&place, part.data() + at, sizeof place);
      at += sizeof place;
      TRIREME_CHECK(place < samples.size(), "a critic rank has values of another sample");
      Sample& sample = samples[place];
      const size_t bytes = sample.response.size() * sizeof(float);
      TRIREME_CHECK(part.size() - at >= bytes, "a critic rank's values are cut off");
      sample.values.resize(sample.response.size());
      if (bytes > 0) std::memcpy(sample.values.data(), part.data() + at, bytes);
      at += bytes;
    }
  }
  trainer_.fill_values(samples);
}

CriticTrained CriticFollower::train(const CriticCall& call) {
  if (before_training) before_training(call.step);
  const Stopwatch watch;
  CriticTrained trained;
  trained.metrics = trainer_.train(call.samples, call.passes);
  trained.seconds = watch.seconds();
  steps_ = call.step;
  return trained;
}

void CriticFollower::save(const CriticCall& call) {
  state_.optimizer->finish_gather();
  if (ShardedUnits* units = state_.model->units()) units->gather();
  checkpoints_.begin_save(call.step, *state_.model, *state_.optimizer, nlohmann::json::object(), call.metrics,
                          config_yaml);
  tell_saved();
}

void CriticFollower::answer(const std::string& bytes) {
  if (context_.is_main()) mail_.post(critic_mail::answer(calls_), bytes, context_.actor_ranks());
}

TrainSummary CriticFollower::follow() {
  TrainSummary summary;
  while (true) {
    CriticCall call = next_call();
    switch (call.kind) {
      case CriticCall::Kind::kValues:
        context_.set_phase("values");
        fill_values(call.samples);
        answer(pack_values(call.samples));
        break;
      case CriticCall::Kind::kTrain:
        context_.set_phase("value training");
        answer(pack_trained(train(call)));
        break;
      case CriticCall::Kind::kSave:
        context_.set_phase("checkpoint");
        save(call);
        break;
      case CriticCall::Kind::kEnd:
        context_.set_phase("checkpoint");
        checkpoints_.finish();
        checkpoints_.tidy();
        context_.world().barrier();
        summary.end = call.stopped ? LoopEnd::kStopped : LoopEnd::kFinished;
        summary.steps = steps_;
        answer("");
        return summary;
    }
  }
}

// The actor saves and stops all of its ranks, and then these.
void CriticFollower::tell_to_stop() {
  if (told_to_stop_ || stop_signal == nullptr || stop_signal->load() == 0) return;
  told_to_stop_ = true;
  context_.store()->set(critic_mail::kStop, context_.name());
}

void CriticFollower::tell_saved() {
  const std::optional<SavedCheckpoint> saved = checkpoints_.take_saved();
  if (saved && context_.is_main()) log_saved(*saved);
}

}  // namespace trireme
