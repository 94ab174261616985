// trireme bench step --engines N: a whole step whose responses other processes generate.
#pragma once

#include <nlohmann/json.hpp>
#include <ostream>

#include "trainer/bench/step_bench.h"
#include "trainer/parallel/communicator.h"

namespace trireme::bench {

// The same run by the trainer itself: of the processes of `rendezvous`, all of one host under one launcher, the last
// options.engines x options.engine_tp generate (run_engine), the others train (run_grpo) in the layout of
// options.common, from random weights, with the forced lengths and drawn rewards of `bench step`. Without
// options.carry_over they take turns; with it engines take new weights between two steps. What the step log says is the
// measurement: two steps lead in. Rank 0 prints, writes and returns the report, the others nothing. Throws Error(kUser)
// for options that this has no use for.
nlohmann::json bench_step_with_engines(const StepBenchOptions& options, const RendezvousOptions& rendezvous,
                                       std::ostream& out);

}  // namespace trireme::bench
