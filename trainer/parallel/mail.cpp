#include "trainer/parallel/mail.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/host.h"
#include "base/text.h"

namespace trireme {
namespace {

constexpr size_t kPart = size_t{1} << 20;  // the store's server takes no larger value than a few MiB
constexpr int64_t kMostMailBytes = int64_t{1} << 36;
constexpr Milliseconds kBetweenLooks{200};  // for deaths and signs of life
constexpr Milliseconds kLongestPause{20};

std::string part_key(const std::string& name, int64_t part) { return name + "-part-" + std::to_string(part); }

}  // namespace

Mail::Mail(ParallelContext& context)
    : context_(context),
      patience_(context.timeout() + context.timeout() / 4 + Milliseconds(1000)),
      between_beats_(std::clamp(context.timeout() / 16, Milliseconds(50), Milliseconds(5000))) {
  TRIREME_CHECK(context.store() != nullptr, "mail needs a job of several ranks");
}

void Mail::post(const std::string& name, std::string_view bytes, int readers) {
  JobStore& store = *context_.store();
  int64_t parts = 0;
  for (size_t at = 0; at < bytes.size(); at += kPart)
    store.set(part_key(name, parts++), std::string(bytes.substr(at, kPart)));
  // Last: what is sent over one connection arrives in its order.
  store.set(name, std::to_string(bytes.size()) + " " + std::to_string(readers));
}

std::optional<std::string> Mail::take(const std::string& name) {
  JobStore& store = *context_.store();
  if (!store.has(name)) return std::nullopt;
  const std::vector<std::string> words = split(store.get(name), ' ');
  const int64_t size = words.size() == 2 ? parse_int(words[0]).value_or(-1) : -1;
  const int64_t readers = words.size() == 2 ? parse_int(words[1]).value_or(0) : 0;
  if (size < 0 || size > kMostMailBytes || readers < 1) fail_data("the message '" + name + "' has no length");
  const int64_t parts = (size + static_cast<int64_t>(kPart) - 1) / static_cast<int64_t>(kPart);
  std::string bytes;  // grows with what has come, not by what is said
  for (int64_t part = 0; part < parts; ++part) {
    bytes += store.get(part_key(name, part));
    if (static_cast<int64_t>(bytes.size()) != std::min(size, (part + 1) * static_cast<int64_t>(kPart))) {
      fail_data("the message '" + name + "' has " + std::to_string(bytes.size()) + " bytes in " +
                std::to_string(part + 1) + " of its parts, and says " + std::to_string(size) + " in all");
    }
  }
  if (readers > 1 && store.add(name + "-read", 1) < readers) return bytes;
  for (int64_t part = 0; part < parts; ++part) store.remove(part_key(name, part));
  store.remove(name);
  if (readers > 1) store.remove(name + "-read");
  return bytes;
}

void Mail::beat() {
  const auto now = SteadyClock::now();
  if (now < next_beat_) return;
  next_beat_ = now + between_beats_;
  (void)context_.store()->add(beat_key(context_.job_rank()), 1);
}

Mail::Wait::Wait(Mail& mail, int from, std::string what)
    : mail_(mail), from_(from), what_(std::move(what)), limit_(Deadline::after(mail.patience_)), look_(limit_) {
  look_ = Deadline::after(Milliseconds(0));
}

void Mail::Wait::pause() {
  ParallelContext& context = mail_.context_;
  std::this_thread::sleep_for(pause_);
  pause_ = std::min(2 * pause_, kLongestPause);
  if (!look_.passed()) return;
  look_ = Deadline::after(kBetweenLooks);
  const auto who = [&] { return context.name() + " on " + host_name() + " waits for " + what_; };
  if (const auto failure = context.failure_of_another()) throw Error(ErrorKind::kUnavailable, who() + ": " + *failure);
  const int64_t beats = context.store()->add(mail_.beat_key(from_), 0);
  if (std::exchange(beats_, beats) != beats) limit_ = Deadline::after(mail_.patience_);
  if (!limit_.passed()) return;
  throw Error(ErrorKind::kTimeout, who() + ": " + context.last_seen(from_) + " has given no sign of life for " +
                                       std::to_string(mail_.patience_.count() / 1000) + " s");
}

std::string Mail::wait(const std::string& name, int from, const std::string& what,
                       const std::function<void()>& on_wait) {
  Wait wait(*this, from, what);
  while (true) {
    if (auto bytes = take(name)) return std::move(*bytes);
    wait.pause();
    if (on_wait) on_wait();
  }
}

}  // namespace trireme
