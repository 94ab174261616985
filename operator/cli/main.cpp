#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstdlib>

#include "base/sigpipe.h"
#include "operator/cli/operator.h"

namespace {

std::atomic<bool> stop{false};

void on_signal(int) { stop = true; }

}  // namespace

int main(int argc, char** argv) {
  // Dozens of threads that mostly wait: a heap for each of them would only keep what it once used.
  mallopt(M_ARENA_MAX, 2);
  rlimit files{};  // four servers with up to 1,024 connections each; some systems give 1,024 descriptors unless asked
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  trireme::ignore_sigpipe();
  return trireme::cli::operator_main(
      std::vector<std::string>(argv + 1, argv + argc),
      [](const std::string& name) {
        const char* value = std::getenv(name.c_str());
        return std::string(value ? value : "");
      },
      stop);
}
