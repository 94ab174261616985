// command: one child program per reward object. It reads a JSON line per response and answers each, in order, with a
// line {"reward": number} or {"error": text}; stderr is the trainer's. It is started when first needed and again when
// it died.
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <mutex>

#include "base/error.h"
#include "base/log.h"
#include "base/sigpipe.h"
#include "base/subprocess.h"
#include "trainer/rewards/reward_types.h"

namespace trireme {
namespace {

constexpr int kMaxDeathsInARow = 3;        // without one answer between them: the program does not work at all
constexpr size_t kMaxLineBytes = 1 << 20;  // of a reply
constexpr int kPollMs = 50;                // how soon cancel() is seen
constexpr const char* kTooSlow = "no answer within the time limit";

class CommandReward final : public Reward {
 public:
  explicit CommandReward(const RewardOptions& options)
      : name_(options.name.empty() ? options.type : options.name),
        command_(options.command),
        answer_timeout_s_(options.answer_timeout_s) {
    if (command_.empty() || command_[0].empty()) fail_user("reward '" + name_ + "': command is empty");
  }
  const std::string& name() const override { return name_; }
  void cancel() noexcept override { cancelled_ = true; }

  std::vector<RewardResult> score(const std::vector<RewardRequest>& requests, const Deadline& deadline) override {
    const SigpipeBlocked blocked;  // our writes to a dead child
    std::vector<RewardResult> results;
    int deaths = 0;
    std::string last_problem;
    while (results.size() < requests.size()) {
      const size_t before = results.size();
      std::string problem;
      bool give_up = true;
      if (cancelled_)
        problem = "cancelled";
      else if (deadline.passed())
        problem = "no time left";
      else if (deaths >= kMaxDeathsInARow)
        problem = "gave up: it failed " + std::to_string(deaths) + " times without an answer, at last: " + last_problem;
      else {
        give_up = false;
        problem = exchange(requests, results, deadline);
      }
      if (problem.empty()) break;
      deaths = results.size() > before ? 1 : deaths + 1;
      if (!give_up) {
        stop();
        last_problem = problem;
      }
      // Only the response it was at is lost; the rest goes to a fresh program.
      const bool stopped = cancelled_ || deadline.passed();
      const size_t lost = give_up || stopped ? requests.size() - results.size() : 1;
      RewardResult failed = failed_result(command_[0] + ": " + problem);
      failed.hopeless = !stopped && problem != kTooSlow;
      results.insert(results.end(), lost, failed);
    }
    return results;
  }

 private:
  void stop() {
    child_.reset();
    pending_.clear();
  }

  // Sends what has no result yet and appends the replies. Returns what went wrong, or nothing when all are answered.
  std::string exchange(const std::vector<RewardRequest>& requests, std::vector<RewardResult>& results,
                       const Deadline& deadline) {
    try {
      if (child_ && (child_->poll() || spoke_unasked())) stop();
      if (!child_) start();
    } catch (const Error& error) {
      return error.what();
    }
    std::string input;
    for (size_t k = results.size(); k < requests.size(); ++k) input += request_line(request_json(requests[k])) + "\n";
    size_t written = 0;
    auto reply_deadline = next_reply_deadline(deadline);
    while (results.size() < requests.size()) {
      if (cancelled_) return "cancelled";
      if (reply_deadline.passed()) return kTooSlow;
      pollfd fds[2] = {{child_->stdout_fd(), POLLIN, 0}, {child_->stdin_fd(), POLLOUT, 0}};
      const int count = written < input.size() ? 2 : 1;
      const int wait_ms = static_cast<int>(std::min<int64_t>(kPollMs, reply_deadline.remaining().count() + 1));
      const int ready = ::poll(fds, static_cast<nfds_t>(count), wait_ms);
      if (ready < 0 && errno != EINTR) return std::string("poll: ") + std::strerror(errno);
      if (ready <= 0) continue;
      if ((fds[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
        char buffer[1 << 16];
        const ssize_t got = ::read(child_->stdout_fd(), buffer, sizeof buffer);
        if (got == 0) return "ended with " + child_->terminate(Milliseconds(1000)).describe();
        if (got < 0 && errno != EAGAIN && errno != EINTR) return std::string("read: ") + std::strerror(errno);
        if (got > 0) pending_.append(buffer, static_cast<size_t>(got));
        const size_t before = results.size();
        const std::string problem = take_replies(results, requests.size());
        if (!problem.empty()) return problem;
        if (results.size() > before) reply_deadline = next_reply_deadline(deadline);
      }
      if (count == 2 && (fds[1].revents & (POLLOUT | POLLERR | POLLHUP)) != 0) {
        const ssize_t put = ::write(child_->stdin_fd(), input.data() + written, input.size() - written);
        if (put > 0) written += static_cast<size_t>(put);
        // It closed its input: what it still says is read until its end.
        if (put < 0 && errno != EAGAIN && errno != EINTR) written = input.size();
      }
    }
    return "";
  }

  // A line too many in an earlier group: from then on replies and responses would not match.
  bool spoke_unasked() {
    char byte;
    return !pending_.empty() || ::read(child_->stdout_fd(), &byte, 1) >= 0;
  }

  Deadline next_reply_deadline(const Deadline& whole) const {
    if (answer_timeout_s_ <= 0) return whole;
    const Deadline one = Deadline::after(Milliseconds(static_cast<int64_t>(answer_timeout_s_ * 1000)));
    return one.at() < whole.at() ? one : whole;
  }

  std::string take_replies(std::vector<RewardResult>& results, size_t wanted) {
    size_t from = 0;
    std::string problem;
    while (results.size() < wanted && problem.empty()) {
      const size_t end = pending_.find('\n', from);
      if (end == std::string::npos) break;
      const std::string line = pending_.substr(from, end - from);
      from = end + 1;
      const nlohmann::json reply = nlohmann::json::parse(line, nullptr, false);
      const bool object = reply.is_object();
      if (object && reply.contains("reward") && reply["reward"].is_number() &&
          std::isfinite(reply["reward"].get<double>())) {
        results.push_back({.reward = reply["reward"].get<double>()});
      } else if (object && reply.contains("error") && reply["error"].is_string()) {
        results.push_back(failed_result(command_[0] + ": " + reply["error"].get<std::string>()));
        results.back().declined = true;
      } else {
        // After a line we cannot read nobody knows which response the next one answers.
        problem = "answered '" + line.substr(0, 80) + "' instead of {\"reward\": number}";
      }
    }
    pending_.erase(0, from);
    if (problem.empty() && pending_.size() > kMaxLineBytes) problem = "answered a line of more than 1 MiB";
    return problem;
  }

  void start() {
    SpawnOptions spawn;
    spawn.argv = command_;
    spawn.pipe_stdin = true;
    spawn.pipe_stdout = true;
    // The second start, the third, the fifth ...: a program that dies at each response must not fill the log.
    if (const int again = starts_++; again > 0 && (again & (again - 1)) == 0)
      log_warn("rewards",
               "reward '" + name_ + "': starting " + command_[0] + " again (start " + std::to_string(starts_) + ")");
    child_ = std::make_unique<Subprocess>(Subprocess::spawn(spawn));
    pending_.clear();
    for (const int fd : {child_->stdin_fd(), child_->stdout_fd()})
      ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  }

  std::string name_;
  std::vector<std::string> command_;
  double answer_timeout_s_;
  std::unique_ptr<Subprocess> child_;
  std::string pending_;  // read and not yet a whole line
  int starts_ = 0;
  std::atomic<bool> cancelled_{false};
};

}  // namespace

std::unique_ptr<Reward> make_command_reward(const RewardOptions& options) {
  return std::make_unique<CommandReward>(options);
}

}  // namespace trireme
