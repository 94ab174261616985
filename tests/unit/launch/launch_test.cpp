#include "trainer/launch/launch.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "base/error.h"
#include "base/fs.h"
#include "trainer/launch/once.h"
#include "trainer/launch/orphans.h"
#include "trainer/launch/reserved_port.h"
#include "trainer/launch/run_manifest.h"

namespace trireme {
namespace {

LaunchOptions shell(const std::string& script, int processes) {
  LaunchOptions options;
  options.command = {"sh", "-c", script};
  options.processes = processes;
  options.failure_grace = Milliseconds(500);
  return options;
}

TEST(Launch, GivesEachRankItsPlace) {
  const TemporaryDirectory dir;
  LaunchOptions options = shell(
      "echo \"$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $LOCAL_WORLD_SIZE\" > " + dir.path().string() + "/$RANK", 2);
  options.nodes = 2;
  options.node_rank = 1;
  options.master_port = 1234;
  options.master_address = "h0";
  EXPECT_EQ(launch(options, nullptr).exit_code, 0);
  EXPECT_EQ(read_file(dir.path() / "2"), "2 0 4 h0 2\n");
  EXPECT_EQ(read_file(dir.path() / "3"), "3 1 4 h0 2\n");
}

TEST(Launch, ACriticsRanksStandBehindTheActors) {
  const TemporaryDirectory dir;
  LaunchOptions options = shell(
      "echo \"$TRIREME_ROLE $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $TRIREME_ACTOR_RANKS "
      "$TRIREME_CRITIC_RANKS\" > " +
          dir.path().string() + "/$LOCAL_RANK",
      1);
  options.critic_ranks = 2;
  EXPECT_EQ(launch(options, nullptr).exit_code, 0);
  EXPECT_EQ(read_file(dir.path() / "0"), " 0 0 1 3  2\n");
  EXPECT_EQ(read_file(dir.path() / "1"), "critic 0 1 2 3 1 2\n");
  EXPECT_EQ(read_file(dir.path() / "2"), "critic 1 2 2 3 1 2\n");
}

TEST(Launch, ACriticsDeathIsToldByItsRankOfTheJob) {
  const TemporaryDirectory dir;
  const std::string file = (dir.path() / "told").string();
  LaunchOptions options = shell(
      "[ \"$TRIREME_ROLE\" = critic ] && { sleep 0.3; kill -9 $$; }; read -r line <&$TRIREME_LAUNCHER_FD; "
      "echo \"$line\" > " +
          file + "$RANK; exit 20",
      2);
  options.critic_ranks = 1;
  options.failure_grace = Milliseconds(250000);
  options.termination_log = (dir.path() / "termination").string();
  const LaunchResult result = launch(options, nullptr);
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_EQ(result.failed_rank, 0);
  EXPECT_TRUE(result.failed_critic);
  EXPECT_EQ(read_file(file + "0"), "died 2 signal 9 (Killed)\n");
  EXPECT_EQ(read_file(file + "1"), "died 2 signal 9 (Killed)\n");
  EXPECT_EQ(nlohmann::json::parse(read_file(options.termination_log)).at("role"), "critic");
}

TEST(Launch, ACriticsOwnLauncherCountsBehindTheActors) {
  const TemporaryDirectory dir;
  const std::string file = (dir.path() / "told").string();
  LaunchOptions options =
      shell("[ $RANK = 1 ] && { sleep 0.3; kill -9 $$; }; read -r line <&$TRIREME_LAUNCHER_FD; echo \"$line\" > " +
                file + "; exit 20",
            2);
  options.behind_actor_ranks = 8;
  options.master_port = 1234;
  options.failure_grace = Milliseconds(250000);
  const LaunchResult result = launch(options, nullptr);
  EXPECT_EQ(result.failed_rank, 1);
  EXPECT_TRUE(result.failed_critic);
  EXPECT_EQ(read_file(file), "died 9 signal 9 (Killed)\n");
}

TEST(Launch, NamesTheFirstFailureAndEndsTheRest) {
  const TemporaryDirectory dir;
  LaunchOptions options = shell("if [ $RANK = 1 ]; then echo something broke >&2; exit 21; fi; exec sleep 600", 3);
  options.termination_log = (dir.path() / "termination").string();
  const LaunchResult result = launch(options, nullptr);
  EXPECT_EQ(result.exit_code, 21);
  EXPECT_EQ(result.failed_rank, 1);
  EXPECT_EQ(result.cause, "exit code 21");
  EXPECT_EQ(result.tail, std::vector<std::string>{"something broke"});
  const auto account = nlohmann::json::parse(read_file(dir.path() / "termination"));
  EXPECT_EQ(account.at("rank"), 1);
  EXPECT_EQ(account.at("exitCode"), 21);
  EXPECT_EQ(account.at("logTail"), "something broke");
}

TEST(Launch, TheAccountFitsATerminationMessage) {
  const TemporaryDirectory dir;
  LaunchOptions options = shell("for i in $(seq 30); do printf '\\\\\"%0300d\\\\\"\\n' $i >&2; done; exit 1", 1);
  options.termination_log = (dir.path() / "termination").string();
  EXPECT_EQ(launch(options, nullptr).exit_code, 1);
  const std::string text = read_file(dir.path() / "termination");
  EXPECT_LE(text.size(), 4096u);
  EXPECT_GT(text.size(), 1000u);
  EXPECT_EQ(nlohmann::json::parse(text).at("exitCode"), 1);
}

LaunchOptions with_engines(const std::string& ranks, const std::string& engines, int count) {
  LaunchOptions options = shell(ranks, 1);
  options.engines = count;
  options.engine_command = {"sh", "-c", engines};
  options.engine_grace = Milliseconds(500);
  return options;
}

TEST(Launch, AnEngineThatEndsIsStartedAgainAndTheResultIsTheRanks) {
  const TemporaryDirectory dir;
  const std::string file = dir.path().string() + "/$TRIREME_ENGINE_NAME";
  // The rank ends when engine 1 is there for the second time; the one that does not leave is killed.
  LaunchOptions options = with_engines(
      "while [ $(wc -l < " + dir.path().string() + "/engine-1 2>/dev/null || echo 0) -lt 2 ]; do sleep 0.05; done",
      "echo \"$LOCAL_RANK $MASTER_PORT $RANK\" >> " + file + "; [ $TRIREME_ENGINE_NAME = engine-1 ] && kill -9 $$; " +
          "exec sleep 600",
      2);
  const LaunchResult result = launch(options, nullptr);
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(result.failed_rank, -1);
  const std::string first = read_file(dir.path() / "engine-0");
  EXPECT_EQ(first.substr(0, 2), "1 ") << "devices behind those of the ranks";
  EXPECT_EQ(first.find(" 0 "), std::string::npos) << "a port for the store, with one rank too";
  EXPECT_EQ(first.substr(first.size() - 2), " \n") << "it is no rank";
}

TEST(Launch, AnEngineThatCannotBeStartedAgainIsTriedLaterAndEndsNoRank) {
  const TemporaryDirectory dir;
  const std::string engine = (dir.path() / "engine").string(), again = (dir.path() / "again").string();
  write_file_atomic(
      engine, "#!/bin/sh\n[ $TRIREME_ENGINE_START = 0 ] || touch " + again + "\nmv $0 $0.away 2>/dev/null\nexit 1\n");
  std::filesystem::permissions(engine, std::filesystem::perms::owner_all);
  // The program is away when the engine is started again after 1 s, and there again before the next time.
  LaunchOptions options =
      with_engines("while [ ! -f " + engine + ".away ]; do sleep 0.05; done; sleep 2; mv " + engine + ".away " +
                       engine + "; while [ ! -f " + again + " ]; do sleep 0.05; done",
                   "", 1);
  options.engine_command = {engine};
  EXPECT_EQ(launch(options, nullptr).exit_code, 0);
}

// Rank 1 of engine 1 is killed; rank 0 leaves with the code of a lost peer, and both are started again.
TEST(Launch, TheRanksOfAnEngineAreStartedAndEndTogether) {
  const TemporaryDirectory dir;
  const std::string folder = dir.path().string();
  LaunchOptions options = with_engines(
      "while [ $(wc -l < " + folder + "/engine-1-0 2>/dev/null || echo 0) -lt 2 ]; do sleep 0.05; done",
      "echo \"$RANK $WORLD_SIZE $LOCAL_RANK $TRIREME_ENGINE_START\" >> " + folder + "/$TRIREME_ENGINE_NAME-$RANK; " +
          "[ $TRIREME_ENGINE_NAME = engine-0 ] && exec sleep 600; [ $TRIREME_ENGINE_START = 1 ] && exec sleep 600; " +
          "[ $RANK = 1 ] && kill -9 $$; until [ -s " + folder + "/engine-1-1 ]; do sleep 0.05; done; exit 20",
      2);
  options.engine_ranks = 2;
  testing::internal::CaptureStderr();
  const LaunchResult result = launch(options, nullptr);
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(read_file(dir.path() / "engine-0-0"), "0 2 1 0\n");
  EXPECT_EQ(read_file(dir.path() / "engine-0-1"), "1 2 2 0\n");
  EXPECT_EQ(read_file(dir.path() / "engine-1-0"), "0 2 3 0\n0 2 3 1\n");
  EXPECT_EQ(read_file(dir.path() / "engine-1-1").substr(0, 8), "1 2 4 0\n");
  EXPECT_NE(said.find("rank 1 of engine-1 ended with signal 9 (Killed); it is started again"), std::string::npos)
      << said;
}

TEST(Launch, EnginesHaveTheDevicesBehindACriticsToo) {
  const TemporaryDirectory dir;
  const std::string file = dir.path().string() + "/engine";
  LaunchOptions options =
      with_engines("until [ -s " + file + " ]; do sleep 0.05; done", "echo \"$LOCAL_RANK\" > " + file, 1);
  options.critic_ranks = 2;
  EXPECT_EQ(launch(options, nullptr).exit_code, 0);
  EXPECT_EQ(read_file(file), "3\n");
}

TEST(Launch, TheFirstGpuMayBeAnotherThanTheMachines) {
  const TemporaryDirectory dir;
  const std::string file = dir.path().string() + "/engine";
  LaunchOptions options = with_engines("echo \"$RANK $LOCAL_RANK\" > " + dir.path().string() +
                                           "/$LOCAL_RANK; until [ -s " + file + " ]; do sleep 0.05; done",
                                       "echo \"$LOCAL_RANK\" > " + file, 1);
  options.processes = 2;
  options.first_gpu = 4;
  EXPECT_EQ(launch(options, nullptr).exit_code, 0);
  EXPECT_EQ(read_file(dir.path() / "4"), "0 4\n");
  EXPECT_EQ(read_file(dir.path() / "5"), "1 5\n");
  EXPECT_EQ(read_file(file), "6\n");
}

TEST(Launch, WithoutAnEngineThatFitsTheRunEnds) {
  const LaunchResult result =
      launch(with_engines("exec sleep 600", "echo 'error: another model' >&2; exit 10", 2), nullptr);
  EXPECT_EQ(result.exit_code, 10);
  EXPECT_EQ(result.tail, std::vector<std::string>{"error: another model"});
  const LaunchResult mistake = launch(with_engines("exit 10", "exec sleep 600", 1), nullptr);
  EXPECT_EQ(mistake.exit_code, 10);
  EXPECT_EQ(mistake.failed_rank, 0);
}

TEST(Launch, ALostPeerIsNotTheCause) {
  LaunchOptions options = shell("[ $RANK = 0 ] && exit 20; sleep 0.2; kill -9 $$", 2);
  options.failure_grace = Milliseconds(60000);
  const LaunchResult result = launch(options, nullptr);
  EXPECT_EQ(result.failed_rank, 1);
  EXPECT_EQ(result.exit_code, 137);
}

TEST(Launch, TheOthersAreToldWhoDiedAndHow) {
  const TemporaryDirectory dir;
  const std::string file = (dir.path() / "told").string();
  // Rank 0 has lost a peer: that is no news. Rank 4 does not listen. Nobody waits for the grace.
  LaunchOptions options = shell(
      "case $RANK in 0) exit 20;; 1) sleep 0.5; kill -9 $$;; 4) exec </dev/null; sleep 1; exit 20;; esac; "
      "read -r line <&$TRIREME_LAUNCHER_FD; echo \"$line\" > " +
          file + "$RANK; exit 20",
      5);
  options.failure_grace = Milliseconds(250000);
  const LaunchResult result = launch(options, nullptr);
  EXPECT_EQ(result.failed_rank, 1);
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_TRUE(result.killed_ranks.empty());
  EXPECT_EQ(read_file(file + "2"), "died 1 signal 9 (Killed)\n");
  EXPECT_EQ(read_file(file + "3"), "died 1 signal 9 (Killed)\n");
}

// A worker of a reward's, say: in a session of its own, with the rank's stderr open.
TEST(Launch, WhatAKilledRankLeavesBehindHoldsUpNobodyAndIsEnded) {
  const TemporaryDirectory dir;
  const std::string file = (dir.path() / "worker").string();
  LaunchOptions options = shell("setsid sleep 900 & echo $! > " + file + "; echo last words >&2; kill -9 $$", 1);
  options.termination_log = (dir.path() / "termination").string();
  const LaunchResult result = launch(options, nullptr);  // waiting for the worker would trip the test's own time limit
  EXPECT_EQ(result.exit_code, 137);
  EXPECT_EQ(result.tail, std::vector<std::string>{"last words"});
  EXPECT_EQ(nlohmann::json::parse(read_file(options.termination_log)).at("exitCode"), 137);
  EXPECT_EQ(::kill(static_cast<pid_t>(std::stol(read_file(file))), 0), -1) << "the worker is still there";
}

TEST(Launch, WhatARankLeavesBehindIsEndedAfterASuccessToo) {
  const TemporaryDirectory dir;
  const std::string file = (dir.path() / "worker").string();
  EXPECT_EQ(launch(shell("setsid sleep 900 & echo $! > " + file, 1), nullptr).exit_code, 0);
  EXPECT_EQ(::kill(static_cast<pid_t>(std::stol(read_file(file))), 0), -1) << "the worker is still there";
}

// Of all processes of the machine it reads whose child they are; one may end between two reads.
TEST(Launch, ProcessesThatEndWhileTheyAreLookedAtAreNoFailure) {
  std::vector<pid_t> strangers;
  for (int i = 0; i < 2; ++i) {
    strangers.push_back(::fork());
    if (strangers.back() == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::execlp("sh", "sh", "-c", "while :; do /bin/true; done", nullptr);
      ::_exit(127);
    }
  }
  for (const Deadline deadline = Deadline::after(Milliseconds(3000)); !deadline.passed();) const Orphans looks;
  for (const pid_t stranger : strangers) {
    ::kill(stranger, SIGKILL);
    ::waitpid(stranger, nullptr, 0);
  }
}

TEST(Launch, WhoIsKilledAfterAFailureIsNamedButIsNotTheCause) {
  const LaunchResult result = launch(shell("[ $RANK = 0 ] && exit 20; exec sleep 600", 2), nullptr);
  EXPECT_EQ(result.failed_rank, 0);
  EXPECT_EQ(result.exit_code, 20);
  EXPECT_EQ(result.killed_ranks, std::vector<int>{1});
}

TEST(Launch, ASignalThatKillsARankBecomesItsCode) { EXPECT_EQ(launch(shell("kill -9 $$", 1), nullptr).exit_code, 137); }

// Ranks 0 and 1 each make the file `ready` with their number behind it.
std::thread terminate_when_both_are_ready(std::atomic<int>& signal, const std::string& ready) {
  return std::thread([&signal, ready] {
    const Deadline deadline = Deadline::after(Milliseconds(60000));
    while (!deadline.passed() && !(std::filesystem::exists(ready + "0") && std::filesystem::exists(ready + "1")))
      std::this_thread::sleep_for(Milliseconds(10));
    signal = SIGTERM;
  });
}

TEST(Launch, ForwardsTermination) {
  const TemporaryDirectory dir;
  std::atomic<int> signal{0};
  const std::string ready = (dir.path() / "ready").string();
  LaunchOptions options = shell("trap 'exit 40' TERM; echo > " + ready + "; while :; do sleep 0.05; done", 1);
  std::thread sender([&] {
    while (!std::filesystem::exists(ready)) std::this_thread::sleep_for(Milliseconds(10));
    signal = SIGTERM;
  });
  EXPECT_EQ(launch(options, &signal).exit_code, 40);
  sender.join();
}

TEST(Launch, SavingAndStoppingIsNoFailure) {
  const TemporaryDirectory dir;
  std::atomic<int> signal{0};
  const std::string ready = (dir.path() / "ready").string();
  LaunchOptions options = shell("trap 'exit 40' TERM; echo > " + ready + "$RANK; while :; do sleep 0.05; done", 2);
  std::thread sender = terminate_when_both_are_ready(signal, ready);
  const LaunchResult result = launch(options, &signal);
  sender.join();
  EXPECT_EQ(result.exit_code, 40);
  EXPECT_EQ(result.failed_rank, -1);
}

TEST(Launch, ATerminationBeforeTheStartIsNoFailureOfAPeer) {
  const TemporaryDirectory dir;
  std::atomic<int> signal{0};
  const std::string ready = (dir.path() / "ready").string();
  // Rank 1 has not begun: it ends by the signal. Rank 0 has, and finds its peer gone.
  LaunchOptions options = shell("[ $RANK = 0 ] && trap 'exit 20' TERM; echo > " + ready +
                                    "$RANK; [ $RANK = 1 ] && exec sleep 600; while :; do sleep 0.05; done",
                                2);
  options.termination_log = (dir.path() / "termination").string();
  std::thread sender = terminate_when_both_are_ready(signal, ready);
  const LaunchResult result = launch(options, &signal);
  sender.join();
  EXPECT_EQ(result.exit_code, 143);
  EXPECT_EQ(result.failed_rank, -1);
  EXPECT_FALSE(std::filesystem::exists(options.termination_log));
}

TEST(Launch, KillsWhoIgnoresTermination) {
  const TemporaryDirectory dir;
  std::atomic<int> signal{0};
  const std::string ready = (dir.path() / "ready").string();
  LaunchOptions options = shell("trap '' TERM; echo > " + ready + "; while :; do sleep 0.05; done", 1);
  options.grace = Milliseconds(1000);
  options.termination_log = (dir.path() / "termination").string();
  std::thread sender([&] {
    while (!std::filesystem::exists(ready)) std::this_thread::sleep_for(Milliseconds(10));
    signal = SIGTERM;
  });
  const LaunchResult result = launch(options, &signal);
  sender.join();
  EXPECT_EQ(result.exit_code, 137);
  // Not "signal 9 (Killed)", which is what the kernel does where memory is short.
  EXPECT_EQ(result.cause, "it did not end within the grace of 1 s after the signal to stop, and was killed");
  EXPECT_EQ(nlohmann::json::parse(read_file(options.termination_log)).at("cause"), result.cause);
}

// Whether this process could have the port now.
bool is_free(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  const bool bound = ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  ::close(fd);
  return bound;
}

// Waits for a file and gives what is in it.
std::string when_there(const std::filesystem::path& path) {
  const Deadline deadline = Deadline::after(Milliseconds(60000));
  while (!deadline.passed() && (!std::filesystem::exists(path) || read_file(path).empty()))
    std::this_thread::sleep_for(Milliseconds(10));
  return read_file(path);
}

TEST(Launch, TheChosenPortIsRankZerosFromItsStartToItsEnd) {
  const TemporaryDirectory dir;
  const std::string at = dir.path().string() + "/";
  LaunchOptions options = shell("echo \"$MASTER_PORT [$TRIREME_LISTEN_FD]\" > " + at +
                                    "$RANK; [ $RANK = 1 ] || readlink /proc/$$/fd/$TRIREME_LISTEN_FD > " + at +
                                    "link; until [ -e " + at + "end$RANK ]; do sleep 0.05; done",
                                2);
  LaunchResult result;
  std::thread launcher([&] { result = launch(options, nullptr); });
  const std::string first = when_there(dir.path() / "0"), second = when_there(dir.path() / "1");
  const int port = std::stoi(first);
  EXPECT_EQ(std::stoi(second), port);
  EXPECT_NE(second.find("[]"), std::string::npos) << "rank 1 has no part in it: " << second;
  EXPECT_EQ(when_there(dir.path() / "link").rfind("socket:", 0), 0u) << first;
  EXPECT_FALSE(is_free(port)) << "before rank 0 has listened";
  write_file_atomic(dir.path() / "end0", "");
  const Deadline deadline = Deadline::after(Milliseconds(60000));
  while (!is_free(port) && !deadline.passed()) std::this_thread::sleep_for(Milliseconds(10));
  EXPECT_TRUE(is_free(port)) << "neither the launcher nor rank 1 holds the port of a rank 0 that is gone";
  write_file_atomic(dir.path() / "end1", "");
  launcher.join();
  EXPECT_EQ(result.exit_code, 0);
}

TEST(Launch, ASocketThatItWasGivenGoesToRankZero) {
  const TemporaryDirectory dir;
  const std::string file = (dir.path() / "seen").string();
  LaunchOptions options =
      shell("[ $RANK = 1 ] || echo \"$MASTER_PORT $(readlink /proc/$$/fd/$TRIREME_LISTEN_FD)\" > " + file, 2);
  std::optional<ReservedPort> reserved(std::in_place);
  options.master_port = reserved->port();
  options.listen_fd = ::dup(reserved->fd());
  reserved.reset();
  EXPECT_FALSE(is_free(options.master_port));
  EXPECT_EQ(launch(options, nullptr).exit_code, 0);
  EXPECT_EQ(read_file(file).rfind(std::to_string(options.master_port) + " socket:", 0), 0u) << read_file(file);
  EXPECT_TRUE(is_free(options.master_port)) << "closed in the launcher";
}

TEST(Launch, SeveralNodesNeedAPort) {
  LaunchOptions options = shell("true", 1);
  options.nodes = 2;
  EXPECT_THROW(launch(options, nullptr), Error);
}

TEST(MapPaths, OnlyWholePathsAreReplaced) {
  const std::vector<PathMapping> mappings = {{"/data/deep", "/v/deep"}, {"/data", "/v/data"}};
  EXPECT_EQ(map_paths("/data", mappings), "/v/data");
  EXPECT_EQ(map_paths("/data/x/y", mappings), "/v/data/x/y");
  EXPECT_EQ(map_paths("/data/deep/z", mappings), "/v/deep/z");
  EXPECT_EQ(map_paths("--out=/data/x,/data/deep", mappings), "--out=/v/data/x,/v/deep");
  EXPECT_EQ(map_paths("/database/x", mappings), "/database/x");
  EXPECT_EQ(map_paths("a/data/x", mappings), "a/data/x");
  EXPECT_EQ(map_paths("", mappings), "");
}

TEST(RunManifest, InitContainersThenTheTrainerWithLocalPaths) {
  const TemporaryDirectory dir;
  // A stand-in for the program: writes down what it was called with.
  const auto program = dir.path() / "trireme";
  std::ofstream(program) << "#!/bin/sh\nprintf '%s\\n' \"$*\" >> " << dir.path().string() << "/calls\n"
                         << "[ -z \"$NNODES\" ] || echo \"nodes $NNODES rank $NODE_RANK $NAME $NCCL_SOCKET_IFNAME "
                            "$GLOO_SOCKET_IFNAME\" >> "
                         << dir.path().string() << "/calls\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  const auto manifest = dir.path() / "job.yaml";
  std::ofstream(manifest) << R"(apiVersion: trireme.dev/v1alpha1
kind: RLJob
metadata: {name: j}
spec:
  algorithm: SFT
  network: {socketInterface: eth0}
  config:
    inline: {checkpointing: {checkpoint_dir: /data/ck}}
  roles:
    actor:
      template:
        spec:
          initContainers:
            - name: first
              command: [trireme, init-task, addition, --out, /data/task]
              volumeMounts: [{name: d, mountPath: /data}]
          containers:
            - name: trainer
              env: [{name: NAME, value: /data/name}, {name: NCCL_SOCKET_IFNAME, value: lo}]
              volumeMounts: [{name: d, mountPath: /data}]
          volumes: [{name: d, persistentVolumeClaim: {claimName: claim}}]
)";
  RunOptions options;
  options.manifest = manifest;
  options.volumes = dir.path() / "volumes";
  options.program = program;
  EXPECT_EQ(run_manifest(options, nullptr), 0);
  const std::string calls = read_file(dir.path() / "calls");
  const std::string data = (dir.path() / "volumes" / "claim").string();
  EXPECT_NE(calls.find("init-task addition --out " + data + "/task\n"), std::string::npos) << calls;
  EXPECT_NE(calls.find("launch --nproc-per-node 1 -- train --algorithm sft --config "), std::string::npos) << calls;
  EXPECT_NE(calls.find("nodes 1 rank 0 " + data + "/name lo eth0\n"), std::string::npos)
      << "a template's settings of NCCL win, as in a cluster: " << calls;
  EXPECT_TRUE(std::filesystem::is_directory(data));
}

// A manifest with every role, and a program that does `engine` and `launch` as told.
struct AllRoles {
  AllRoles(const std::string& engine, const std::string& launch) {
    const auto program = dir.path() / "trireme";
    std::ofstream(program) << "#!/bin/sh\ncalls=" << calls().string() << "\ncase $1 in\nengine) " << engine
                           << ";;\nserve) echo \"serve $TRIREME_REWARD_PORT $2\" >> $calls; exec sleep 60;;\nlaunch) "
                           << launch << ";;\nesac\n";
    std::filesystem::permissions(program, std::filesystem::perms::owner_all);
    options.manifest = dir.path() / "job.yaml";
    options.volumes = dir.path() / "volumes";
    options.program = program;
    std::ofstream(options.manifest) << R"(apiVersion: trireme.dev/v1alpha1
kind: RLJob
metadata: {name: j}
spec:
  config:
    inline: {policy: {generation: {colocated: {enabled: false}}}}
  roles:
    actor: {}
    generation: {replicas: 2}
    reward:
      port: 8099
      template:
        spec:
          containers:
            - {name: reward, image: r, command: [trireme, serve, /d], volumeMounts: [{name: d, mountPath: /d}]}
          volumes: [{name: d, persistentVolumeClaim: {claimName: claim}}]
)";
  }
  std::filesystem::path calls() const { return dir.path() / "calls"; }

  TemporaryDirectory dir;
  RunOptions options;
};

TEST(RunManifest, EveryRoleRunsOnThisMachine) {
  const AllRoles all(
      R"(echo "engine $TRIREME_WORK_URL $TRIREME_ENGINE_NAME $TRIREME_REWARD_URL" >> $calls; exec sleep 60)",
      R"(touch $calls; n=0
while [ $(grep -c . $calls) -lt 3 ] && [ $n -lt 400 ]; do sleep 0.05; n=$((n+1)); done
echo "launch http://127.0.0.1:$TRIREME_WORK_PORT" >> $calls)");
  EXPECT_EQ(run_manifest(all.options, nullptr), 0) << "the actor's end is the run's";
  const std::string calls = read_file(all.calls());
  const size_t at = calls.find("launch ");
  ASSERT_NE(at, std::string::npos) << calls;
  const std::string url = calls.substr(at + 7, calls.find('\n', at) - at - 7);
  for (const char* name : {"j-generation-0-a1", "j-generation-1-a1"}) {
    EXPECT_NE(calls.find("engine " + url + " " + name + " http://127.0.0.1:8099\n"), std::string::npos) << calls;
  }
  EXPECT_NE(calls.find("serve 8099 " + (all.options.volumes / "claim").string() + "\n"), std::string::npos) << calls;
}

TEST(RunManifest, WithoutAnyGenerationPodTheRunHasFailed) {
  const AllRoles all("exit 10", "sleep 1");
  EXPECT_EQ(run_manifest(all.options, nullptr), 10);
}

// One pod of the actor and two of the critic, which do as told and may write to $calls-ROLE-INDEX.
struct WithCritic {
  WithCritic(const std::string& actor, const std::string& critic) {
    const auto program = dir.path() / "trireme";
    std::ofstream(program) << "#!/bin/sh\ncalls=" << dir.path().string()
                           << "/calls-$TRIREME_ROLE-$TRIREME_POD_INDEX\ncase $TRIREME_ROLE in\nactor) " << actor
                           << ";;\ncritic) " << critic << ";;\nesac\n";
    std::filesystem::permissions(program, std::filesystem::perms::owner_all);
    options.manifest = dir.path() / "job.yaml";
    options.volumes = dir.path() / "volumes";
    options.program = program;
    std::ofstream(options.manifest) << R"(apiVersion: trireme.dev/v1alpha1
kind: RLJob
metadata: {name: j}
spec:
  algorithm: PPO
  config: {inline: {}}
  roles:
    actor: {processesPerPod: 3}
    critic: {replicas: 2, processesPerPod: 2}
)";
  }
  std::string calls(const std::string& pod) const { return read_file(dir.path() / ("calls-" + pod)); }

  TemporaryDirectory dir;
  RunOptions options;
};

TEST(RunManifest, CriticPodsAreRanksBesideTheActors) {
  const std::string tell =
      "echo \"$NODE_RANK of $NNODES, [$TRIREME_ACTOR_RANKS] $TRIREME_CRITIC_RANKS $MASTER_ADDR "
      "${TRIREME_LISTEN_FD:+socket}\" > $calls; echo \"$MASTER_PORT $*\" >> $calls";
  const WithCritic all(tell, tell);
  EXPECT_EQ(run_manifest(all.options, nullptr), 0);
  const std::string actor = all.calls("actor-0"), first = all.calls("critic-0"), second = all.calls("critic-1");
  EXPECT_EQ(actor.substr(0, actor.find('\n')), "0 of 1, [] 4 127.0.0.1 socket");
  EXPECT_EQ(first.substr(0, first.find('\n')), "0 of 2, [3] 4 127.0.0.1 ");
  EXPECT_EQ(second.substr(0, second.find('\n')), "1 of 2, [3] 4 127.0.0.1 ");
  const auto port = [](const std::string& text) {
    const size_t at = text.find('\n') + 1;
    return text.substr(at, text.find(' ', at) - at);
  };
  EXPECT_EQ(port(first), port(actor));
  EXPECT_EQ(port(second), port(actor));
  EXPECT_NE(first.find(" launch --nproc-per-node 2 -- train --algorithm ppo "), std::string::npos) << first;
  EXPECT_NE(first.find("dp=4"), std::string::npos) << first;
  EXPECT_NE(actor.find(" launch --nproc-per-node 3 -- train --algorithm ppo "), std::string::npos) << actor;
}

TEST(RunManifest, AMountOverThisMachinesOwnPathsIsMappedOnce) {
  const TemporaryDirectory dir;
  const auto program = dir.path() / "trireme";
  std::ofstream(program) << "#!/bin/sh\nwhile [ $1 != --config ]; do shift; done\n[ -f $2 ] && echo \"$*\" > "
                         << dir.path().string() << "/calls\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  RunOptions options;
  options.manifest = dir.path() / "job.yaml";
  options.volumes = dir.path() / "volumes";
  options.program = program;
  const std::string temporary = dir.path().parent_path().string();
  std::ofstream(options.manifest) << R"(apiVersion: trireme.dev/v1alpha1
kind: RLJob
metadata: {name: j}
spec:
  algorithm: SFT
  config: {inline: {}}
  checkpoint: {directory: )" << temporary
                                  << R"(/ck}
  roles:
    actor:
      template:
        spec:
          containers: [{name: trainer, volumeMounts: [{name: t, mountPath: )"
                                  << temporary << R"(}]}]
          volumes: [{name: t, persistentVolumeClaim: {claimName: claim}}]
)";
  EXPECT_EQ(run_manifest(options, nullptr), 0) << "the inline configuration is a file there";
  const std::string calls = read_file(dir.path() / "calls");
  EXPECT_NE(calls.find(" checkpointing.checkpoint_dir=" + (options.volumes / "claim" / "ck").string() + " "),
            std::string::npos)
      << calls;
}

TEST(RunManifest, PodsHaveGpusOfTheirOwn) {
  const TemporaryDirectory dir;
  const auto program = dir.path() / "trireme";
  std::ofstream(program) << "#!/bin/sh\necho \"$1 $LOCAL_RANK $TRIREME_FIRST_GPU\" > " << dir.path().string()
                         << "/$TRIREME_ROLE-$TRIREME_POD_INDEX\n"
                         << "[ $1 != launch ] || until [ -s " << dir.path().string() << "/generation-0 ] && [ -s "
                         << dir.path().string() << "/generation-1 ]; do sleep 0.05; done\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  RunOptions options;
  options.manifest = dir.path() / "job.yaml";
  options.volumes = dir.path() / "volumes";
  options.program = program;
  std::ofstream(options.manifest) << R"(apiVersion: trireme.dev/v1alpha1
kind: RLJob
metadata: {name: j}
spec:
  algorithm: PPO
  config: {inline: {policy: {generation: {colocated: {enabled: false}}}}}
  roles:
    actor: {gpusPerPod: 3}
    critic: {replicas: 2, gpusPerPod: 2}
    generation: {replicas: 2, gpusPerPod: 1}
)";
  EXPECT_EQ(run_manifest(options, nullptr), 0);
  const std::pair<const char*, const char*> wanted[] = {{"actor-0", "launch 0 0\n"},
                                                        {"critic-0", "launch 3 3\n"},
                                                        {"critic-1", "launch 5 5\n"},
                                                        {"generation-0", "engine 7 7\n"},
                                                        {"generation-1", "engine 8 8\n"}};
  for (const auto& [pod, told] : wanted) EXPECT_EQ(read_file(dir.path() / pod), told) << pod;
}

TEST(RunManifest, ALostPeersCodeIsNotTheRunsWhereAnotherPodHasFailed) {
  // Whoever's end is seen first.
  EXPECT_EQ(run_manifest(WithCritic("exit 20", "sleep 0.5; exit 21").options, nullptr), 21);
  EXPECT_EQ(run_manifest(WithCritic("sleep 0.5; exit 20", "exit 21").options, nullptr), 21);
  EXPECT_EQ(run_manifest(WithCritic("exit 20", "exit 20").options, nullptr), 20);
  WithCritic hangs("exit 20", "exec sleep 600");
  hangs.options.failure_grace = Milliseconds(200);
  EXPECT_EQ(run_manifest(hangs.options, nullptr), 20) << "that others were killed behind it is no failure of theirs";
}

TEST(RunManifest, PodsOnOneMachineNeedNoRdma) {
  const TemporaryDirectory dir;
  const auto program = dir.path() / "trireme";
  std::ofstream(program)
      << "#!/bin/sh\necho \"require [$TRIREME_REQUIRE_RDMA$NCCL_NET] ${TRIREME_LISTEN_FD:+socket}\" >> "
      << dir.path().string() << "/calls\n";
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  const auto manifest = dir.path() / "job.yaml";
  std::ofstream(manifest) << R"(apiVersion: trireme.dev/v1alpha1
kind: RLJob
metadata: {name: j}
spec:
  algorithm: SFT
  network: {rdma: {resourceName: rdma/hca, require: true}}
  config:
    inline: {checkpointing: {checkpoint_dir: /data/ck}}
  roles:
    actor:
      replicas: 2
      gpusPerPod: 1
      template:
        spec:
          containers:
            - name: trainer
              volumeMounts: [{name: d, mountPath: /data}]
          volumes: [{name: d, persistentVolumeClaim: {claimName: claim}}]
)";
  RunOptions options;
  options.manifest = manifest;
  options.volumes = dir.path() / "volumes";
  options.program = program;
  EXPECT_EQ(run_manifest(options, nullptr), 0);
  const std::string calls = read_file(dir.path() / "calls");  // in any order
  EXPECT_TRUE(calls == "require [] socket\nrequire [] \n" || calls == "require [] \nrequire [] socket\n")
      << "the first pod has the socket of the rendezvous: " << calls;
}

TEST(Once, NodeZeroRunsAndTheOthersWait) {
  const TemporaryDirectory dir;
  OnceOptions options;
  options.marker = dir.path() / "made" / ".done";
  options.command = {"sh", "-c", "sleep 0.3; echo run >> " + (dir.path() / "runs").string()};
  options.timeout = Milliseconds(60000);
  OnceOptions waiting = options;
  waiting.node_rank = 1;
  std::string seen;
  std::thread other([&] {
    EXPECT_EQ(run_once(waiting, nullptr), 0);
    seen = read_file(dir.path() / "runs");
  });
  EXPECT_EQ(run_once(options, nullptr), 0);
  other.join();
  EXPECT_EQ(seen, "run\n");
  EXPECT_EQ(run_once(options, nullptr), 0);
  EXPECT_EQ(read_file(dir.path() / "runs"), "run\n") << "done once, it is not run again";
  options.command.back() += " ";
  EXPECT_EQ(run_once(options, nullptr), 0);
  EXPECT_EQ(read_file(dir.path() / "runs"), "run\nrun\n") << "another command is";
}

TEST(Once, AFailureLeavesNoMarkerAndNobodyWaitsForEver) {
  const TemporaryDirectory dir;
  OnceOptions options;
  options.marker = dir.path() / ".done";
  options.command = {"sh", "-c", "exit 7"};
  write_file_atomic(options.marker, "something else\n");
  EXPECT_EQ(run_once(options, nullptr), 7);
  EXPECT_FALSE(std::filesystem::exists(options.marker));
  options.node_rank = 1;
  options.timeout = Milliseconds(300);
  try {
    run_once(options, nullptr);
    FAIL() << "waited without a limit";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kTimeout);
    EXPECT_NE(std::string(error.what()).find(options.marker.string()), std::string::npos) << error.what();
  }
  const std::atomic<int> signal{SIGTERM};
  options.timeout = Milliseconds(60000);
  EXPECT_EQ(run_once(options, &signal), 128 + SIGTERM);
}

}  // namespace
}  // namespace trireme
