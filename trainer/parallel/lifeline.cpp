#include "trainer/parallel/lifeline.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>

#include "base/error.h"
#include "base/text.h"
#include "trainer/parallel/sockets.h"

namespace trireme {
namespace {

constexpr size_t kMaxLine = 4096, kMaxText = 1000;
constexpr size_t kMaxStrangers = 1024;         // connections that have not joined
constexpr Milliseconds kStrangerLimit{60000};  // until they must have
constexpr Milliseconds kConnectLimit{30000};   // rank 0 listens already when its ticket is known
constexpr const char* kSilent = "its machine does not answer any more";
constexpr const char* kClosed = "its connection was closed without a word";

// Rank 0 has a connection for each rank here, two more in the store and one in each group.
void allow_many_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

// Takes the whole lines out of `text`; what is longer than a line may be is an error (false).
template <typename Fn>
bool take_lines(std::string& text, Fn&& fn) {
  size_t begin = 0, end;
  while ((end = text.find('\n', begin)) != std::string::npos) {
    fn(parse_lifeline_message(std::string_view(text).substr(begin, end - begin)));
    begin = end + 1;
  }
  text.erase(0, begin);
  return text.size() <= kMaxLine;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text.substr(0, kMaxText);
}

}  // namespace

LifelineMessage parse_lifeline_message(std::string_view line) {
  using Kind = LifelineMessage::Kind;
  LifelineMessage message;
  const auto rank = [](std::string_view text) {
    const auto number = parse_int(std::string(text));
    return number && *number >= 0 && *number <= INT32_MAX ? static_cast<int>(*number) : -1;
  };
  const size_t space = line.find(' ');
  const std::string_view word = line.substr(0, space);
  const std::string_view rest = space == std::string_view::npos ? std::string_view() : line.substr(space + 1);
  const size_t second = rest.find(' ');
  if (word == "all") message.kind = Kind::kAll;
  if (word == "bye") message.kind = Kind::kBye;
  if (word == "phase" || word == "dead") {
    message.kind = word == "dead" ? Kind::kDead : Kind::kPhase;
    message.text = std::string(rest.substr(0, word == "dead" ? kMaxText : 100));
  }
  if (word == "join" && second != std::string_view::npos) {
    message.kind = Kind::kJoin;
    message.text = std::string(rest.substr(0, std::min(second, kMaxText)));
    message.rank = rank(rest.substr(second + 1));
  }
  if (word == "died") {
    message.kind = Kind::kDied;
    message.rank = rank(rest.substr(0, second));
    if (second != std::string_view::npos) message.text = std::string(rest.substr(second + 1, 100));
  }
  if ((word == "join" || word == "died") && message.rank < 0) message.kind = Kind::kUnknown;
  return message;
}

std::string died_message(int rank, const std::string& how) {
  return "died " + std::to_string(rank) + " " + one_line(how) + "\n";
}

Lifeline::Lifeline(const LifelineOptions& options)
    : options_(options),
      wake_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      launcher_fd_(options.launcher_fd),
      joined_(static_cast<size_t>(options.world_size), false) {
  if (wake_fd_ < 0) fail_io(std::string("cannot make an event: ") + std::strerror(errno));
  thread_ = std::thread([this] { run(); });
}

Lifeline::~Lifeline() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    if (leaving_ || std::uncaught_exceptions() == 0) say_goodbye();
  }
  wake();
  thread_.join();
  // What was said goes out, if the others take it.
  const Deadline limit = Deadline::after(Milliseconds(1000));
  for (Connection& connection : connections_) {
    while (!connection.ended && !connection.out.empty() && !limit.passed()) {
      pollfd wanted{connection.fd, POLLOUT, 0};
      ::poll(&wanted, 1, 50);
      flush(connection);
    }
    ::shutdown(connection.fd, SHUT_WR);
    ::close(connection.fd);
  }
  if (listen_fd_ >= 0) ::close(listen_fd_);
  ::close(wake_fd_);
}

void Lifeline::wake() {
  const uint64_t one = 1;
  (void)!::write(wake_fd_, &one, sizeof one);
}

std::string Lifeline::open() {
  TRIREME_CHECK(options_.rank == 0, "rank 0 listens");
  allow_many_files();
  uint16_t port = 0;
  const int fd = listen_anywhere(port, "the other ranks");
  const std::lock_guard<std::mutex> lock(mutex_);
  listen_fd_ = fd;
  secret_ = new_secret();
  joined_[0] = true;
  all_ = options_.world_size == 1;
  wake();
  return std::to_string(port) + " " + secret_;
}

void Lifeline::join(const std::string& host, const std::string& ticket, const Deadline& deadline) {
  const size_t space = ticket.find(' ');
  const std::string port = ticket.substr(0, space);
  const std::string secret = space == std::string::npos ? "" : ticket.substr(space + 1);
  const Deadline limit(std::min(deadline.at(), SteadyClock::now() + kConnectLimit));
  std::string why;
  while (true) {
    const int fd = connect_to(host, port, limit, why);
    std::unique_lock<std::mutex> lock(mutex_);
    if (fd >= 0) {
      watch_by_kernel(fd, kUnreachable);
      Connection connection;
      connection.fd = fd;
      connection.rank = 0;
      connections_.push_back(std::move(connection));
      send(connections_.back(), "join " + secret + " " + std::to_string(options_.rank) + "\n");
      wake();
      return;
    }
    if (declared_) throw Error(ErrorKind::kUnavailable, *declared_);
    if (limit.passed()) {
      throw Error(ErrorKind::kUnavailable, "rank 0 cannot be reached at " + host + " port " + port + ": " + why);
    }
    changed_.wait_for(lock, Milliseconds(100));
  }
}

std::vector<int> Lifeline::not_joined() const {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < joined_.size(); ++rank) {
    if (!joined_[rank]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

void Lifeline::wait_for_all(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_until(lock, deadline.at(), [this] { return all_ || declared_ || hub_left_; });
  if (declared_) throw Error(ErrorKind::kUnavailable, *declared_);
  if (all_) return;
  if (hub_left_) throw Error(ErrorKind::kUnavailable, "rank 0 has left before all ranks had come");
  if (options_.rank != 0) fail_timeout("not all ranks have come in time");
  std::string names;
  const std::vector<int> ranks = not_joined();
  for (size_t i = 0; i < std::min<size_t>(ranks.size(), 8); ++i) {
    names += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > 8) names += " and " + std::to_string(ranks.size() - 8) + " more";
  names = ranks.size() == 1 ? "rank " + names + " has not come in time" : "ranks " + names + " have not come in time";
  if (!accept_error_.empty()) names += " (" + accept_error_ + ")";
  declare(names);
  fail_timeout(names);
}

void Lifeline::set_phase(const std::string& phase) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (phase == phase_) return;
  phase_ = phase;
  if (Connection* rank0 = hub()) send(*rank0, "phase " + one_line(phase) + "\n");
}

std::string Lifeline::phase() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return phase_;
}

std::optional<std::string> Lifeline::dead() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return declared_;
}

std::optional<std::string> Lifeline::wait_for_dead(Milliseconds time) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, time, [this] { return declared_ || hub_left_; });
  return declared_;
}

bool Lifeline::rank0_is_gone() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return hub_left_ || deaths_.count(0) > 0;
}

void Lifeline::explain(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  explained_ = what;
}

void Lifeline::leaving() {
  const std::lock_guard<std::mutex> lock(mutex_);
  leaving_ = true;
}

void Lifeline::goodbye() {
  const std::lock_guard<std::mutex> lock(mutex_);
  say_goodbye();
}

void Lifeline::say_goodbye() {
  if (goodbye_) return;
  goodbye_ = true;
  for (Connection& connection : connections_) {
    if (connection.rank >= 0) send(connection, "bye\n");
  }
}

Lifeline::Connection* Lifeline::hub() {
  if (options_.rank == 0) return nullptr;
  for (Connection& connection : connections_) {
    if (!connection.ended && !connection.left) return &connection;
  }
  return nullptr;
}

void Lifeline::send(Connection& connection, const std::string& line) {
  if (connection.ended) return;
  connection.out += line;
  flush(connection);
  if (!connection.out.empty()) wake();  // the thread waits until there is room
}

void Lifeline::flush(Connection& connection) {
  while (!connection.out.empty()) {
    const ssize_t put =
        ::send(connection.fd, connection.out.data(), connection.out.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (put < 0) {
      connection.out.clear();  // reading says what has happened to it
      return;
    }
    connection.out.erase(0, static_cast<size_t>(put));
  }
}

void Lifeline::ended(Connection& connection, const std::string& how) {
  if (connection.ended) return;
  connection.ended = true;
  if (connection.rank < 0) return;
  if (!connection.left) {
    note_death(connection.rank, how, connection.phase);
  } else if (connection.rank == 0) {
    hub_left_ = true;
    changed_.notify_all();
  }
}

void Lifeline::note_death(int rank, const std::string& how, const std::string& phase) {
  if (declared_ || rank == options_.rank || rank >= options_.world_size) return;
  if (deaths_.empty()) {
    // Rank 0 will tell; should it not, this rank says what it knows.
    const bool told_by_rank0 = rank != 0 && hub() != nullptr;
    settle_at_ = SteadyClock::now() + (told_by_rank0 ? 3 : 1) * options_.settle;
  }
  // How a process ended is the launcher's to say, whoever comes first.
  Death& death = deaths_[rank];
  if (death.how.empty() || death.how == kClosed) death.how = how;
  if (death.phase.empty()) death.phase = phase;
}

std::string Lifeline::name_of(int rank) const {
  return options_.name_of ? options_.name_of(rank) : "rank " + std::to_string(rank);
}

std::string Lifeline::describe_deaths() const {
  constexpr size_t kShown = 8;
  std::string text;
  size_t shown = 0;
  for (const auto& [rank, death] : deaths_) {
    if (++shown > kShown) break;
    text += (shown > 1 ? "; " : "") + name_of(rank) + " has died" +
            (death.phase.empty() ? "" : " in phase " + death.phase) + ": " + death.how;
  }
  if (deaths_.size() > kShown) text += "; and " + std::to_string(deaths_.size() - kShown) + " more ranks";
  return one_line(text);
}

void Lifeline::declare(const std::string& sentence) {
  if (declared_) return;
  declared_ = sentence;
  declared_at_ = SteadyClock::now();
  changed_.notify_all();
  if (options_.rank != 0) return;
  for (Connection& connection : connections_) {
    if (connection.rank >= 0) send(connection, "dead " + sentence + "\n");
  }
}

void Lifeline::take(Connection& connection, const LifelineMessage& message) {
  using Kind = LifelineMessage::Kind;
  if (connection.ended) return;
  const bool to_rank0 = options_.rank == 0, known = connection.rank >= 0;
  if (to_rank0 && !known) {
    const auto place = static_cast<size_t>(message.rank);
    if (message.kind != Kind::kJoin || message.text != secret_ || message.rank < 1 ||
        message.rank >= options_.world_size || joined_[place]) {
      connection.ended = true;  // a stranger
      return;
    }
    connection.rank = message.rank;
    connection.phase = "start";
    joined_[place] = true;
    if (declared_) send(connection, "dead " + *declared_ + "\n");
    if (!not_joined().empty()) return;
    all_ = true;
    changed_.notify_all();
    for (Connection& other : connections_) {
      if (other.rank >= 0) send(other, "all\n");
    }
    return;
  }
  switch (message.kind) {
    case Kind::kBye:
      connection.left = true;
      return;
    case Kind::kPhase:
      connection.phase = message.text;
      return;
    case Kind::kDied:
      if (to_rank0) note_death(message.rank, message.text, "");
      return;
    case Kind::kDead:
      if (!to_rank0) declare(message.text);
      return;
    case Kind::kAll:
      if (!to_rank0) all_ = true;
      changed_.notify_all();
      return;
    case Kind::kJoin:
    case Kind::kUnknown:
      return;
  }
}

void Lifeline::read_from(Connection& connection) {
  char buffer[4096];
  while (!connection.ended) {
    const ssize_t got = ::recv(connection.fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got > 0) {
      connection.in.append(buffer, static_cast<size_t>(got));
      if (!take_lines(connection.in, [&](const LifelineMessage& message) { take(connection, message); }))
        connection.in.clear();
      continue;
    }
    const bool silent = got < 0 && (errno == ETIMEDOUT || errno == EHOSTUNREACH || errno == ENETUNREACH);
    ended(connection, silent ? kSilent : kClosed);
  }
}

void Lifeline::read_launcher() {
  char buffer[4096];
  const ssize_t got = ::read(launcher_fd_, buffer, sizeof buffer);
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  if (got <= 0) {
    launcher_fd_ = -1;
    return;
  }
  launcher_in_.append(buffer, static_cast<size_t>(got));
  const bool fits = take_lines(launcher_in_, [&](const LifelineMessage& message) {
    if (message.kind != LifelineMessage::Kind::kDied) return;
    if (Connection* rank0 = hub()) send(*rank0, died_message(message.rank, message.text));
    note_death(message.rank, message.text, "");
  });
  if (!fits) launcher_in_.clear();
}

bool Lifeline::accept_all() {
  while (true) {
    const int fd = ::accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
      accept_error_ = std::string("a connection was not accepted: ") + std::strerror(errno);
      return false;
    }
    const auto strangers = std::count_if(connections_.begin(), connections_.end(),
                                         [](const Connection& connection) { return connection.rank < 0; });
    if (static_cast<size_t>(strangers) >= kMaxStrangers) {
      ::close(fd);
      continue;
    }
    watch_by_kernel(fd, kUnreachable);
    Connection connection;
    connection.fd = fd;
    connection.since = SteadyClock::now();
    connections_.push_back(std::move(connection));
  }
}

SteadyClock::time_point Lifeline::next_turn() const {
  auto next = SteadyClock::now() + kStrangerLimit;
  if (!deaths_.empty() && !declared_) next = std::min(next, settle_at_);
  if (declared_ && !goodbye_ && options_.on_death) {
    next = std::min(next, declared_at_ + (leaving_ ? options_.leaving_patience : options_.patience));
  }
  return next;
}

void Lifeline::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  bool called = false;
  while (!stopping_) {
    std::vector<pollfd> wanted = {{wake_fd_, POLLIN, 0}, {listen_fd_, POLLIN, 0}, {launcher_fd_, POLLIN, 0}};
    for (const Connection& connection : connections_) {
      wanted.push_back({connection.fd, static_cast<short>(connection.out.empty() ? POLLIN : POLLIN | POLLOUT), 0});
    }
    // One millisecond more: a turn that is rounded down would come again and again until it is due.
    const Milliseconds time = called ? kStrangerLimit : Deadline(next_turn()).remaining() + Milliseconds(1);
    lock.unlock();
    ::poll(wanted.data(), wanted.size(), static_cast<int>(time.count()));
    lock.lock();
    uint64_t ignored;
    (void)!::read(wake_fd_, &ignored, sizeof ignored);
    if (wanted[2].revents != 0 && launcher_fd_ >= 0) read_launcher();
    // join() may have added one behind those that were asked for.
    for (size_t i = 3; i < wanted.size(); ++i) {
      Connection& connection = connections_[i - 3];
      if ((wanted[i].revents & POLLOUT) != 0) flush(connection);
      if ((wanted[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0) read_from(connection);
    }
    if (wanted[1].revents != 0 && !accept_all()) {  // no file left, say: it would be asked again at once
      changed_.wait_for(lock, Milliseconds(100));
    }
    const auto now = SteadyClock::now();
    if (!deaths_.empty() && !declared_ && now >= settle_at_) declare(describe_deaths());
    std::erase_if(connections_, [now](const Connection& connection) {
      const bool stranger = connection.rank < 0 && now - connection.since >= kStrangerLimit;
      if (connection.ended || stranger) ::close(connection.fd);
      return connection.ended || stranger;
    });
    const Milliseconds patience = leaving_ ? options_.leaving_patience : options_.patience;
    if (declared_ && !called && !goodbye_ && options_.on_death && now >= declared_at_ + patience) {
      called = true;
      const std::string what = name_of(options_.rank) + " leaves in phase " + phase_ + ": " +
                               (explained_ ? *explained_ + "; " : "") + *declared_;
      say_goodbye();
      lock.unlock();
      options_.on_death(what);
      lock.lock();
    }
  }
}

}  // namespace trireme
