// Mail: messages of bytes between ranks of different roles, which share no collective. Over the job's store.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "trainer/parallel/context.h"

namespace trireme {

// One per rank, called from its training thread. A name is posted once in an attempt, by one rank. Where a wait lasts
// as long as another role generates or trains, a collective's deadline says nothing: here the sender's signs of life
// count (beat()).
class Mail final {
 public:
  // Of a job of several ranks; the context outlives it.
  explicit Mail(ParallelContext& context);

  // For `readers` ranks, each of which takes it once; the last one removes it.
  void post(const std::string& name, std::string_view bytes, int readers = 1);
  // What was posted, if it has come. Throws Error(kData) where it is not what post() writes.
  std::optional<std::string> take(const std::string& name);

  // This rank is alive and goes on: whoever waits for it waits on. Cheap; may be called after every engine step.
  void beat();

  // A wait for another rank of the job (`from`), described as "the values of step 3".
  class Wait final {
   public:
    Wait(Mail& mail, int from, std::string what);
    // Returns after some milliseconds. Throws Error(kUnavailable) when a rank of the job has died or failed,
    // Error(kTimeout) that names `from` when it has given no sign of life for the patience.
    void pause();

   private:
    Mail& mail_;
    const int from_;
    const std::string what_;
    int64_t beats_ = -1;
    Deadline limit_, look_;
    Milliseconds pause_{1};
  };
  // Waits for it; `on_wait` (may be empty) is called meanwhile.
  std::string wait(const std::string& name, int from, const std::string& what,
                   const std::function<void()>& on_wait = {});

  // Longer than a collective's deadline, so that who is missing from one of the other role is named there first.
  Milliseconds patience() const { return patience_; }
  // For waits that begin before the sender can beat: the time that it may take until then.
  void add_patience(Milliseconds time) { patience_ += time; }

 private:
  std::string beat_key(int rank) const { return "mail-beat-" + std::to_string(rank); }

  ParallelContext& context_;
  Milliseconds patience_;
  const Milliseconds between_beats_;
  SteadyClock::time_point next_beat_{};
};

}  // namespace trireme
