#include "base/subprocess.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/sigpipe.h"

extern char** environ;

namespace trireme {
namespace {

struct Pipe {
  int read = -1;
  int write = -1;
  Pipe() = default;
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    close_end(read);
    close_end(write);
  }
  void open() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail_io(std::string("cannot make a pipe: ") + std::strerror(errno));
    read = ends[0];
    write = ends[1];
  }
  static void close_end(int& end) {
    if (end >= 0) ::close(std::exchange(end, -1));
  }
};

// In a child before exec: it has no part in what libraries have opened without O_CLOEXEC, connections to other ranks
// among them. The system call itself, since the C library may be older than the kernel. Where there is none (before
// Linux 5.11, in some sandboxes) one descriptor is asked for after the other.
void keep_only_standard_descriptors() {
  constexpr unsigned kFirst = 3, kCloexec = 1U << 2;  // CLOSE_RANGE_CLOEXEC
  constexpr int kMostAskedFor = 1 << 16;
#ifdef SYS_close_range
  if (::syscall(SYS_close_range, kFirst, ~0U, kCloexec) == 0) return;
#endif
  for (int fd = kFirst; fd < kMostAskedFor; ++fd) ::fcntl(fd, F_SETFD, FD_CLOEXEC);
}

ExitStatus decode(int raw) {
  ExitStatus status;
  if (WIFSIGNALED(raw))
    status.signal = WTERMSIG(raw);
  else
    status.code = WEXITSTATUS(raw);
  return status;
}

std::vector<std::string> merged_environment(const std::map<std::string, std::string>& set_env) {
  std::vector<std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (set_env.count(text.substr(0, text.find('='))) == 0) merged.push_back(text);
  }
  for (const auto& [key, value] : set_env) merged.push_back(key + "=" + value);
  return merged;
}

}  // namespace

std::string ExitStatus::describe() const {
  if (signal != 0) return "signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
  return "exit code " + std::to_string(code);
}

Subprocess Subprocess::spawn(const SpawnOptions& options) {
  TRIREME_CHECK(!options.argv.empty(), "spawn needs a program");
  Pipe in, out, err, failure;
  const std::vector<std::string> environment = merged_environment(options.set_env);
  std::vector<char*> argv, envp;
  for (const std::string& argument : options.argv) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  for (const std::string& entry : environment) envp.push_back(const_cast<char*>(entry.c_str()));
  envp.push_back(nullptr);
  failure.open();
  if (options.pipe_stdin) in.open();
  if (options.pipe_stdout) out.open();
  if (options.pipe_stderr) err.open();
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) fail_io(std::string("cannot fork: ") + std::strerror(errno));
  if (pid == 0) {
    // Only async-signal-safe calls from here to exec.
    if (options.own_group) ::setpgid(0, 0);
    if (options.die_with_parent) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(127);
    }
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::signal(SIGPIPE, SIG_DFL);
    const int null_in = options.pipe_stdin ? in.read : ::open("/dev/null", O_RDONLY);
    ::dup2(null_in, 0);
    if (options.pipe_stdout) ::dup2(out.write, 1);
    if (options.merge_stderr)
      ::dup2(1, 2);
    else if (options.pipe_stderr)
      ::dup2(err.write, 2);
    keep_only_standard_descriptors();
    if (options.keep_fd >= 0) ::fcntl(options.keep_fd, F_SETFD, 0);
    if (!options.working_directory.empty() && ::chdir(options.working_directory.c_str()) != 0) {
      const int code = errno;
      (void)!::write(failure.write, &code, sizeof code);
      ::_exit(127);
    }
    ::execvpe(argv[0], argv.data(), envp.data());
    const int code = errno;
    (void)!::write(failure.write, &code, sizeof code);
    ::_exit(127);
  }
  if (options.own_group) ::setpgid(pid, pid);  // also here: whoever comes first
  for (int* end : {&failure.write, &in.read, &out.write, &err.write}) Pipe::close_end(*end);
  int code = 0;
  ssize_t got;
  do got = ::read(failure.read, &code, sizeof code);
  while (got < 0 && errno == EINTR);
  Subprocess child;
  child.pid_ = pid;
  child.own_group_ = options.own_group;
  child.stdin_fd_ = std::exchange(in.write, -1);
  child.stdout_fd_ = std::exchange(out.read, -1);
  child.stderr_fd_ = std::exchange(err.read, -1);
  if (got == static_cast<ssize_t>(sizeof code)) {
    fail_user("cannot run '" + options.argv[0] + "': " + std::strerror(code));
  }
  return child;
}

Subprocess::Subprocess(Subprocess&& other) noexcept { *this = std::move(other); }

Subprocess& Subprocess::operator=(Subprocess&& other) noexcept {
  if (this != &other) {
    if (pid_ > 0 && !status_) terminate(Milliseconds(0));
    close_all();
    pid_ = std::exchange(other.pid_, -1);
    own_group_ = other.own_group_;
    stdin_fd_ = std::exchange(other.stdin_fd_, -1);
    stdout_fd_ = std::exchange(other.stdout_fd_, -1);
    stderr_fd_ = std::exchange(other.stderr_fd_, -1);
    status_ = std::exchange(other.status_, std::nullopt);
  }
  return *this;
}

Subprocess::~Subprocess() {
  if (pid_ > 0 && !status_) terminate(Milliseconds(0));
  close_all();
}

void Subprocess::close_stdin() {
  if (stdin_fd_ >= 0) ::close(stdin_fd_);
  stdin_fd_ = -1;
}

void Subprocess::close_all() {
  close_stdin();
  if (stdout_fd_ >= 0) ::close(stdout_fd_);
  if (stderr_fd_ >= 0) ::close(stderr_fd_);
  stdout_fd_ = stderr_fd_ = -1;
}

void Subprocess::tell(const std::string& text) const {
  if (stdin_fd_ < 0 || status_) return;
  ::fcntl(stdin_fd_, F_SETFL, ::fcntl(stdin_fd_, F_GETFL) | O_NONBLOCK);
  const SigpipeBlocked blocked;
  (void)!::write(stdin_fd_, text.data(), text.size());
}

std::optional<ExitStatus> Subprocess::poll() {
  if (status_) return status_;
  siginfo_t ended{};
  if (::waitid(P_PID, static_cast<id_t>(pid_), &ended, WEXITED | WNOHANG | WNOWAIT) != 0 || ended.si_pid != pid_)
    return status_;
  if (own_group_) ::kill(-pid_, SIGKILL);  // before it is reaped: until then nobody else can have its number
  int raw = 0;
  if (::waitpid(pid_, &raw, WNOHANG) == pid_) status_ = decode(raw);
  return status_;
}

std::optional<ExitStatus> Subprocess::wait(const Deadline& deadline) {
  Milliseconds pause(1);
  while (true) {
    if (auto status = poll()) return status;
    if (deadline.passed()) return std::nullopt;
    std::this_thread::sleep_for(std::min(pause, deadline.remaining() + Milliseconds(1)));
    pause = std::min(pause * 2, Milliseconds(20));
  }
}

void Subprocess::signal(int number) const {
  if (pid_ > 0 && !status_) ::kill(pid_, number);
}

void Subprocess::signal_group(int number) const {
  if (pid_ <= 0 || status_) return;
  if (own_group_)
    ::kill(-pid_, number);
  else
    signal(number);
}

ExitStatus Subprocess::terminate(Milliseconds grace) {
  if (status_) return *status_;
  if (grace.count() > 0) {
    signal_group(SIGTERM);
    if (auto status = wait(Deadline::after(grace))) return *status;
  }
  signal_group(SIGKILL);
  signal(SIGKILL);
  int raw = 0;
  while (::waitpid(pid_, &raw, 0) < 0 && errno == EINTR) {
  }
  status_ = decode(raw);
  return *status_;
}

RunResult run_process(SpawnOptions options, const std::string& input, const Deadline& deadline) {
  options.pipe_stdin = true;
  options.pipe_stdout = true;
  Subprocess child = Subprocess::spawn(options);
  ::fcntl(child.stdin_fd(), F_SETFL, ::fcntl(child.stdin_fd(), F_GETFL) | O_NONBLOCK);
  auto blocked = std::make_unique<SigpipeBlocked>();
  RunResult result;
  size_t written = 0;
  bool output_open = true;
  if (input.empty()) child.close_stdin();
  while (output_open && !deadline.passed()) {
    pollfd fds[2] = {{child.stdout_fd(), POLLIN, 0}, {child.stdin_fd(), POLLOUT, 0}};
    const int count = child.stdin_fd() >= 0 ? 2 : 1;
    const int ready = ::poll(fds, static_cast<nfds_t>(count),
                             static_cast<int>(std::min<int64_t>(deadline.remaining().count() + 1, 1000)));
    if (ready < 0 && errno != EINTR) break;
    if (ready <= 0) continue;
    if (count == 2 && (fds[1].revents & (POLLOUT | POLLERR | POLLHUP)) != 0) {
      const ssize_t put = ::write(child.stdin_fd(), input.data() + written, input.size() - written);
      if (put > 0) written += static_cast<size_t>(put);
      if ((put < 0 && errno != EAGAIN && errno != EINTR) || written == input.size()) child.close_stdin();
    }
    if ((fds[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
      char buffer[1 << 16];
      const ssize_t got = ::read(child.stdout_fd(), buffer, sizeof buffer);
      if (got > 0)
        result.output.append(buffer, static_cast<size_t>(got));
      else if (got == 0 || errno != EINTR)
        output_open = false;
    }
  }
  blocked.reset();
  std::optional<ExitStatus> status = child.wait(deadline);
  result.timed_out = !status.has_value();
  result.status = status ? *status : child.terminate(Milliseconds(0));
  return result;
}

}  // namespace trireme
