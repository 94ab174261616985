// Critic: who gives a rollout's states their values and learns the returns, on the actor's ranks or on its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "trainer/algorithms/critic.h"
#include "trainer/algorithms/critic_wire.h"
#include "trainer/parallel/mail.h"

namespace trireme {

// On each actor rank, called from its training thread. For each step in this order: begin_values(), finish_values(),
// begin_training(), finish_training(), by all actor ranks.
class Critic {
 public:
  Critic() = default;
  virtual ~Critic() = default;
  Critic(const Critic&) = delete;
  Critic& operator=(const Critic&) = delete;

  // Whether ahead() is of use.
  virtual bool works_ahead() const { return false; }
  // Samples next to each other whose tokens are final, while others are generated: their values will be asked for.
  virtual void ahead(const Sample* /*samples*/, size_t /*count*/) {}
  // The same where this rank waits for others to generate, so that passes of its own cost nothing: they may fill in
  // Sample::values.
  virtual bool works_in_waits() const { return works_ahead(); }
  virtual void in_wait(std::vector<Sample>& samples) { ahead(samples.data(), samples.size()); }
  // Sample::values of all samples, on all ranks, behind finish_values() with the same samples: a critic on ranks of its
  // own computes them beside what the actor does between the two. Throw Error(kData) that names sample and token where
  // one is not finite.
  virtual void begin_values(std::vector<Sample>& samples, int64_t step) = 0;
  virtual void finish_values(std::vector<Sample>& samples) = 0;
  // Every rank passes the same samples, with values and returns. On the actor's ranks it has trained when this returns;
  // else it trains beside what follows.
  virtual void begin_training(const std::vector<Sample>& samples, int64_t passes, int64_t step) = 0;
  virtual CriticTrained finish_training() = 0;
};

// On the actor's ranks.
class LocalCritic final : public Critic {
 public:
  explicit LocalCritic(std::unique_ptr<CriticTrainer> trainer) : trainer_(std::move(trainer)) {}
  bool works_in_waits() const override { return trainer_->values_alone(); }
  void in_wait(std::vector<Sample>& samples) override { trainer_->fill_own_values(samples); }
  void begin_values(std::vector<Sample>& samples, int64_t) override { trainer_->fill_values(samples); }
  void finish_values(std::vector<Sample>&) override {}
  void begin_training(const std::vector<Sample>& samples, int64_t passes, int64_t) override {
    const Stopwatch watch;
    trained_.metrics = trainer_->train(samples, passes);
    trained_.seconds = watch.seconds();
  }
  CriticTrained finish_training() override { return trained_; }

 private:
  std::unique_ptr<CriticTrainer> trainer_;
  CriticTrained trained_;
};

// The actor's end of a critic that has ranks of its own (critic_rank.h is the other), one per actor rank. Rank 0 asks,
// every actor rank reads what comes. Called from the training thread but where something else is said.
class CriticLink final {
 public:
  // Rank 0 tells its settings, with which the critic's are compared.
  CriticLink(ParallelContext& context, const Config& config);

  // The actor has done `steps` steps, of a checkpoint where `resumed`. Returns when the critic has done as many.
  void begin(int64_t steps, bool resumed);
  // Whether the critic's ranks compute values of what they are sent ahead; known behind begin().
  bool works_ahead() const { return works_ahead_; }
  void ahead(const Sample* samples, size_t count);
  void begin_values(const std::vector<Sample>& samples, int64_t step);
  void finish_values(std::vector<Sample>& samples);
  void begin_training(const std::vector<Sample>& samples, int64_t passes, int64_t step);
  CriticTrained finish_training();
  // The critic begins to save, beside the actor's own save; wait_saved() returns when its checkpoint has its name, or
  // `cancelled` is set; from any thread. `moves`, which may be empty, is called while the critic writes. Throws
  // Error(kUnavailable) when a rank has failed, Error(kTimeout) when the critic has written nothing for the deadline of
  // a collective.
  void save(int64_t step, const std::map<std::string, double>& metrics);
  void wait_saved(int64_t step, const std::atomic<bool>& cancelled, const std::function<void()>& moves = {});
  // Whether a critic rank got a signal to stop. Asked by rank 0; the others say no.
  bool asked_to_stop();
  // The last call: returns when the critic's ranks leave.
  void end(bool stopped);
  // This rank goes on: the critic waits for it. Often.
  void beat() {
    if (context_.is_main()) mail_.beat();
  }

  // Called in waits, for heartbeats. May be empty.
  std::function<void()> on_wait;

 private:
  void call(const CriticCall& call);
  std::string answer(const std::string& what);

  ParallelContext& context_;
  Mail mail_;
  int64_t calls_ = 0;  // the same on all ranks
  int64_t step_of_values_ = 0;
  bool works_ahead_ = true;
};

class RemoteCritic final : public Critic {
 public:
  explicit RemoteCritic(CriticLink& link) : link_(link) {}
  bool works_ahead() const override { return link_.works_ahead(); }
  void ahead(const Sample* samples, size_t count) override { link_.ahead(samples, count); }
  void begin_values(std::vector<Sample>& samples, int64_t step) override { link_.begin_values(samples, step); }
  void finish_values(std::vector<Sample>& samples) override { link_.finish_values(samples); }
  void begin_training(const std::vector<Sample>& samples, int64_t passes, int64_t step) override {
    link_.begin_training(samples, passes, step);
  }
  CriticTrained finish_training() override { return link_.finish_training(); }

 private:
  CriticLink& link_;
};

// Names of messages, of both ends.
namespace critic_mail {
inline constexpr const char* kSettings = "critic-settings";
inline constexpr const char* kBegin = "critic-begin";        // "STEPS RESUMED"
inline constexpr const char* kReady = "critic-ready";        // kTogether, or empty
inline constexpr const char* kTogether = "together";         // its ranks compute values with each other only
inline constexpr const char* kStop = "critic-stop";          // a key of the store
inline constexpr const char* kAheadCount = "critic-aheads";  // a counter of the store
inline constexpr const char* kSaving = "critic-saving";      // likewise: grows while a save of its ranks does
inline std::string call(int64_t number) { return "critic-call-" + std::to_string(number); }
inline std::string answer(int64_t number) { return "critic-answer-" + std::to_string(number); }
inline std::string ahead(int64_t number) { return "critic-ahead-" + std::to_string(number); }   // from 1
inline std::string saved(int64_t step) { return "critic-saved-step-" + std::to_string(step); }  // a key of the store
}  // namespace critic_mail

}  // namespace trireme
