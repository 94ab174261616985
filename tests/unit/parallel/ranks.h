// Ranks as threads of one process.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/unit/parallel/listening.h"
#include "trainer/parallel/context.h"

namespace trireme::test {

// Runs body(rank) on a thread per rank; returns what each threw.
inline std::vector<std::string> on_ranks(int world, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(world));
  std::signal(SIGPIPE, SIG_IGN);  // as cli_main does: Gloo writes to connections whose other end may have gone
  disable_flight_recorder();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// The place of rank `job_rank` of a job whose first ranks are actors and whose others are critics.
inline RendezvousOptions role_place(ListeningPort& port, int job_rank, int actors, int critics, Milliseconds timeout) {
  RendezvousOptions place = port.place(job_rank, actors + critics, timeout);
  place.of_critic = job_rank >= actors;
  place.actor_ranks = actors;
  place.critic_ranks = critics;
  place.rank = place.of_critic ? job_rank - actors : job_rank;
  place.world_size = place.of_critic ? critics : actors;
  return place;
}

// One rank stands still, and the collectives of the others fail. Nobody leaves before all have failed and the one was
// told: a rank that has left would be named instead.
class StandStill final {
 public:
  explicit StandStill(int others) : others_(others) {}
  // Before the rank's context is made of its place.
  void watch(RendezvousOptions& place) {
    place.stuck_grace = Milliseconds(100);
    place.on_stuck = [this, rank = place.rank](const std::string&) { told_ = told_ == -1 ? rank : -2; };
  }
  // What the rank does that stands still.
  void stand() const {
    const Deadline limit = Deadline::after(Milliseconds(200000));
    while ((gave_up_ < others_ || told_ == -1) && !limit.passed()) std::this_thread::sleep_for(Milliseconds(10));
  }
  // What another does: `work` fails, and its error is thrown when all may leave.
  template <class F>
  [[noreturn]] void fail(F&& work) {
    std::string error;
    try {
      work();
    } catch (const std::exception& e) {
      error = e.what();
    }
    ++gave_up_;
    stand();
    throw std::runtime_error(error);
  }
  // The rank that was told that it is stuck; -1: none, -2: several.
  int told() const { return told_; }

 private:
  const int others_;
  std::atomic<int> gave_up_{0}, told_{-1};
};

// Runs body on every rank of the layout; an error of any fails the test.
inline void on_layout(const Layout& layout, const std::function<void(ParallelContext&)>& body,
                      const std::optional<Layout>& generation = {}) {
  const auto world = static_cast<int>(layout.world());
  ListeningPort port;
  const auto errors = on_ranks(world, [&](int rank) {
    ParallelContext context(layout, port.place(rank, world, Milliseconds(250000)));
    if (generation) context.set_generation(*generation);
    body(context);
    context.world().barrier();  // rank 0 serves the store: it leaves last
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

}  // namespace trireme::test
