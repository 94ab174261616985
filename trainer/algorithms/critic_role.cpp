#include "trainer/algorithms/critic_role.h"

#include <thread>

#include "base/error.h"
#include "base/host.h"
#include "trainer/algorithms/session_parts.h"

namespace trireme {

CriticLink::CriticLink(ParallelContext& context, const Config& config) : context_(context), mail_(context) {
  if (context_.is_main()) mail_.post(critic_mail::kSettings, own_settings(config), context_.critic_ranks());
}

void CriticLink::begin(int64_t steps, bool resumed) {
  if (context_.is_main()) {
    mail_.post(critic_mail::kBegin, std::to_string(steps) + (resumed ? " 1" : " 0"), context_.critic_ranks());
    mail_.beat();
  }
  const std::string ready = mail_.wait(critic_mail::kReady, context_.actor_ranks(), "the critic to be ready", [this] {
    beat();
    if (on_wait) on_wait();
  });
  works_ahead_ = ready != critic_mail::kTogether;
}

void CriticLink::call(const CriticCall& call) {
  ++calls_;
  beat();
  if (context_.is_main()) mail_.post(critic_mail::call(calls_), pack_call(call), context_.critic_ranks());
}

std::string CriticLink::answer(const std::string& what) {
  return mail_.wait(critic_mail::answer(calls_), context_.actor_ranks(), what, on_wait);
}

void CriticLink::ahead(const Sample* samples, size_t count) {
  const int64_t number = context_.store()->add(critic_mail::kAheadCount, 1);
  mail_.post(critic_mail::ahead(number), pack_for_critic({samples, samples + count}));
}

void CriticLink::begin_values(const std::vector<Sample>& samples, int64_t step) {
  CriticCall asked;
  asked.kind = CriticCall::Kind::kValues;
  asked.step = step;
  if (context_.is_main()) asked.samples = samples;
  call(asked);
  step_of_values_ = step;
}

void CriticLink::finish_values(std::vector<Sample>& samples) {
  unpack_values(answer("the values of step " + std::to_string(step_of_values_)), samples);
}

void CriticLink::begin_training(const std::vector<Sample>& samples, int64_t passes, int64_t step) {
  CriticCall asked;
  asked.kind = CriticCall::Kind::kTrain;
  asked.step = step;
  asked.passes = passes;
  if (context_.is_main()) asked.samples = samples;
  call(asked);
}

CriticTrained CriticLink::finish_training() { return unpack_trained(answer("the critic's training")); }

void CriticLink::save(int64_t step, const std::map<std::string, double>& metrics) {
  CriticCall asked;
  asked.kind = CriticCall::Kind::kSave;
  asked.step = step;
  asked.metrics = metrics;
  call(asked);
}

void CriticLink::wait_saved(int64_t step, const std::atomic<bool>& cancelled, const std::function<void()>& moves) {
  const std::string key = critic_mail::saved(step);
  Patience patience(context_.timeout());
  const auto who = [&] { return context_.name() + " on " + host_name(); };
  for (Milliseconds pause(5); !cancelled.load(); pause = std::min(2 * pause, Milliseconds(100))) {
    if (context_.store()->has(key)) return;
    if (const auto failure = context_.failure_of_another()) {
      throw Error(ErrorKind::kUnavailable,
                  who() + " waits for the critic's checkpoint of step " + std::to_string(step) + ": " + *failure);
    }
    if (patience.moved(context_.store()->add(critic_mail::kSaving, 0))) {
      if (moves) moves();
    } else if (patience.passed()) {
      throw Error(ErrorKind::kTimeout, who() + " waits for the critic's checkpoint of step " + std::to_string(step) +
                                           ", which " + context_.last_seen(context_.actor_ranks()) +
                                           " has not written: nothing has moved for " +
                                           std::to_string(patience.seconds()) + " s");
    }
    std::this_thread::sleep_for(pause);
  }
}

bool CriticLink::asked_to_stop() { return context_.is_main() && context_.store()->has(critic_mail::kStop); }

void CriticLink::end(bool stopped) {
  CriticCall asked;
  asked.stopped = stopped;
  call(asked);
  (void)answer("the critic's last checkpoint");
  context_.world().barrier();  // rank 0 serves the store: all have read from it
}

}  // namespace trireme
