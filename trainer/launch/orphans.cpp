#include "trainer/launch/orphans.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "base/text.h"

namespace trireme {
namespace {

// Of /proc/PID/stat: "PID (NAME) STATE PARENT ...". The name may hold anything.
pid_t parent_of(const std::filesystem::path& entry) {
  std::ifstream file(entry / "stat");
  std::string text;
  std::getline(file, text,
               '\0');  // unlike an iterator it does not throw when the process has ended since it was opened
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 4 >= text.size()) return -1;
  const size_t from = name_end + 4;
  return static_cast<pid_t>(parse_int(text.substr(from, text.find(' ', from) - from)).value_or(-1));
}

std::vector<pid_t> children() {
  std::vector<pid_t> found;
  const pid_t self = ::getpid();
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc", error), end; !error && entry != end; entry.increment(error)) {
    const auto pid = parse_int(entry->path().filename().string());
    if (pid && parent_of(entry->path()) == self) found.push_back(static_cast<pid_t>(*pid));
  }
  return found;
}

}  // namespace

Orphans::Orphans() {
  for (const pid_t child : children()) kept_.insert(child);
  ::prctl(PR_GET_CHILD_SUBREAPER, &before_);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
}

Orphans::~Orphans() {
  end_all(Deadline::after(Milliseconds(2000)));
  ::prctl(PR_SET_CHILD_SUBREAPER, before_);
}

void Orphans::keep(pid_t child) { kept_.insert(child); }

void Orphans::forget(pid_t child) { kept_.erase(child); }

void Orphans::reap() {
  siginfo_t ended{};
  while (::waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid > 0 &&
         kept_.count(ended.si_pid) == 0) {
    ::waitpid(ended.si_pid, nullptr, WNOHANG);
    ended = {};
  }
}

int Orphans::end_all(const Deadline& deadline) {
  std::set<pid_t> killed;
  while (true) {
    bool any = false;
    for (const pid_t child : children()) {
      if (kept_.count(child) != 0) continue;
      any = true;
      if (::waitpid(child, nullptr, WNOHANG) == child) continue;  // had ended
      ::kill(child, SIGKILL);                                     // ours and not waited for: nobody else's number
      killed.insert(child);
    }
    if (!any || deadline.passed()) return static_cast<int>(killed.size());
    std::this_thread::sleep_for(Milliseconds(5));
  }
}

}  // namespace trireme
