// trireme launch: start the ranks of this node, forward signals, supervise.
#pragma once

#include <atomic>
#include <map>
#include <string>
#include <vector>

#include "base/clock.h"

namespace trireme {

struct LaunchOptions {
  // One rank's argv; the environment tells it its rank and, in TRIREME_LAUNCHER_FD, where it can read which ranks of
  // this node have failed ("died RANK HOW", a line each); rank 0, in TRIREME_LISTEN_FD, the socket of MASTER_PORT,
  // where the port was chosen here.
  std::vector<std::string> command;
  int processes = 1;  // ranks of this node
  int first_gpu = 0;  // LOCAL_RANK of the first of them, where others of this machine have the GPUs before it
  // Behind them so many of PPO's critic, of one node: TRIREME_ROLE=critic, TRIREME_ACTOR_RANKS, numbers of their own
  // in RANK and WORLD_SIZE. All processes get TRIREME_CRITIC_RANKS.
  int critic_ranks = 0;
  // Or all processes are a critic's, behind so many actor ranks that other launchers start; 0: they are the actor's.
  int behind_actor_ranks = 0;
  int nodes = 1;
  int node_rank = 0;
  std::string master_address = "127.0.0.1";
  int master_port = 0;  // 0: a free port (one node only)
  int listen_fd = -1;   // a socket bound to master_port, for rank 0, closed here; -1: rank 0 makes its own
  std::map<std::string, std::string> environment;
  // Generation processes beside the ranks (one node only), and one's argv: they find the ranks by MASTER_ADDR and
  // MASTER_PORT, and their names in TRIREME_ENGINE_NAME. One that ends while the ranks run is started again, a few
  // times; none is needed for the result, but a mistake in the configuration of all of them ends the run.
  int engines = 0;
  // Processes of an engine, one a device; several have RANK and WORLD_SIZE in it, and end together.
  int engine_ranks = 1;
  std::vector<std::string> engine_command;
  int config_code = 10;               // an engine's code for a mistake in its configuration
  Milliseconds engine_grace{15000};   // for engines to leave when the ranks have ended
  Milliseconds grace{300000};         // after a forwarded SIGTERM, until SIGKILL
  Milliseconds failure_grace{20000};  // after the first failure: the others may notice and leave by themselves
  int peer_failed_code = 20;          // a rank's code for "a peer or the network failed"; the others are told of any
                                      // other failure
  int stopped_code = 40;              // a rank's code for "stopped by the forwarded signal, checkpoint saved"
  std::string termination_log;        // file for the one-line JSON account of a failure; empty: none
  int tail_lines = 30;
};

struct LaunchResult {
  int exit_code = 0;              // of the first failed rank; 128 + n for signal n
  int failed_rank = -1;           // -1: none, or an engine
  bool failed_critic = false;     // it is one of the critic's
  std::string cause;              // "exit code 21", or that it did not end within the grace
  std::vector<std::string> tail;  // its last log lines
  std::vector<int> killed_ranks;  // of the job: had not left when the grace after that failure was over
};

// Set by the caller's signal handler: the signal's number, forwarded once. May be null.
LaunchResult launch(const LaunchOptions& options, const std::atomic<int>* signal);

}  // namespace trireme
