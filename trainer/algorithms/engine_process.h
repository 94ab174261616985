// run_engine: a process that generates for a run which trains elsewhere (`trireme engine`). It has the model, the
// tokenizer and the rewards of the run's configuration, no optimizer and no data. Several processes of one machine are
// one engine where policy.generation.tensor_parallel_size says so; the first of them speaks for it (engine_group.h).
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <string>

#include "trainer/algorithms/engine_fault.h"
#include "trainer/config/config.h"
#include "trainer/parallel/communicator.h"
#include "trainer/parallel/transport.h"
#include "trainer/rewards/place.h"

namespace trireme {

struct EngineProcessOptions {
  std::string name;              // of this engine, with all of its ranks; no other that runs has it
  std::string start = "0";       // which one of that name: how often it was started before
  int rank = 0;                  // in the engine
  std::string work_url;          // http://host:port of actor 0; empty: the port is in the job's store
  RendezvousOptions rendezvous;  // of the actors: address, port and attempt of their store; local_rank: the device
  std::filesystem::path hf_home;
  RewardPlace rewards;
  TransportCheck transport;
  bool second_buffer = true;  // for weights; false: they are received where they are read, with decoding stopped
  EngineFault fault;          // for tests
  // Non-zero: hand back what is in hand, and leave. Of an engine's first rank: the others leave with it.
  const std::atomic<int>* stop_signal = nullptr;
  std::function<void()> on_ready;  // from here on stop_signal is read
};

// Returns when the run has ended, or by stop_signal. Throws Error(kUnavailable) soon after the actor has gone, or when
// its weights cannot be had three times in a row; Error(kUser) with the first difference when it may not join; before
// it joins, what a probe of its rewards throws (RewardPool::probe: while that waits for a service, for
// env.startup_timeout_s at most, nobody looks for the actor). What model, engine and rewards throw later, and others
// would meet too, is told to the actor, and ends the run there.
void run_engine(const Config& config, const EngineProcessOptions& options);

}  // namespace trireme
